"""The server: texts are compressed once, and asked often in OpenAI's chat format."""

from gistkit_serve.server.app import application
from gistkit_serve.server.errors import Refused
from gistkit_serve.server.shelf import Entry, Shelf
from gistkit_serve.server.worker import Limits

__all__ = ["Entry", "Limits", "Refused", "Shelf", "application"]
