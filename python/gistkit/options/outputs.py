"""Files and folders that a command writes, checked before its work begins."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gistkit.options.texts import STDIN


def check_file(name: str, path: Path) -> None:
    """Refuses what cannot be written as a file.

    Args:
        name: of the option, in errors.
        path: a regular file or one that does not exist; so may its folders.

    Raises:
        ValueError: for "-", a folder, a device, or a place where nothing can be written.
    """
    if str(path) == STDIN:
        raise ValueError(f"{name}: expected a file, got {path}; nothing is written to standard output")
    try:
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise ValueError(f"{name}: expected a file, got {kind}, {path}")
    except OSError as error:
        raise _unwritable(name, path, error) from error
    check_folder(name, path.parent)


def check_folder(name: str, path: Path) -> None:
    """Refuses a folder in which no file can be written; it need not exist, and is not made here."""
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _unwritable(name, path, error) from error


def _unwritable(name: str, path: Path, error: OSError) -> ValueError:
    reason = error.strerror or type(error).__name__
    return ValueError(f"{name}: expected a place that can be written to, got {str(path)!r:.200}: {reason}")
