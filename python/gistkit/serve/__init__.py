"""The server: texts are compressed once, and asked often in OpenAI's chat format."""

from gistkit.serve.app import application
from gistkit.serve.errors import Refused
from gistkit.serve.shelf import Entry, Shelf
from gistkit.serve.worker import Limits

__all__ = ["Entry", "Limits", "Refused", "Shelf", "application"]
