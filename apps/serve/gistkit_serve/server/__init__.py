"""The server: texts are compressed once, and asked often in OpenAI's chat format."""

from gistkit_serve.server.app import application
from gistkit_serve.server.entry import Entry
from gistkit_serve.server.errors import Refused
from gistkit_serve.server.offline import Offline
from gistkit_serve.server.repository import MemoryRepository
from gistkit_serve.server.worker import Limits

__all__ = ["Entry", "Limits", "MemoryRepository", "Offline", "Refused", "application"]
