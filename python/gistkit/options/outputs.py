"""Checks of output files and folders, made before the work starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from gistkit.options.texts import STDIN


def check_file(name: str, path: Path, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuses a path that cannot be written as a file.

    Args:
        name: the option's name, for errors.
        path: a regular file, or a file that does not exist yet; its folders need not exist either.
        inputs: what the command reads, None for what was not given.
    """
    if str(path) == STDIN:
        raise ValueError(f"{name}: expected a file, got {path}; this command does not write to standard output")
    try:
        # /dev/stdout is a link to whatever file it was redirected to.
        folder = Path(os.path.realpath(path.parent))
        if (path.exists() and not path.is_file()) or folder == Path("/dev") or folder.is_relative_to("/proc"):
            kind = "a folder" if path.is_dir() else "a device or a pipe"
            raise ValueError(f"{name}: expected a file, got {kind}, {path}")
        if path.exists() and any(given and os.path.exists(given) and path.samefile(given) for given in inputs):
            raise ValueError(f"{name}: expected another file than one that is read, got {path}")
    except OSError as error:
        raise _unwritable(name, path, error) from error
    # A link stays, and its file is replaced where it is.
    check_folder(name, Path(os.path.realpath(path)).parent)


def check_folder(name: str, path: Path) -> None:
    """Refuses a folder that is not writable; it need not exist, and is not created here."""
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _unwritable(name, path, error) from error


def _unwritable(name: str, path: Path, error: OSError) -> ValueError:
    reason = error.strerror or type(error).__name__
    return ValueError(f"{name}: cannot write to {str(path)!r:.200}: {reason}")
