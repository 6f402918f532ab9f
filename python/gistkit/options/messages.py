"""Warnings and errors of commands, one line each on standard error."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gistkit.common.messages import one_line

# Most characters in a line.
MOST = 1000


def warn(message: object) -> None:
    """Prints a command's warning on its own line, even while a progress bar is drawn."""
    text = f"gistkit: warning: {one_line(message, MOST)}"
    if (bars := sys.modules.get("tqdm")) is None:
        print(text, file=sys.stderr)
    else:
        bars.tqdm.write(text, file=sys.stderr)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Shows each of Python's warnings once as a command's: without file, line number and source line."""
    shown: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            warn(message)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory; torch reports that on a CPU only in a RuntimeError's text."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
