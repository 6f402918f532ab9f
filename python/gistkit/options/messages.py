"""Warnings and errors of commands, a line each on standard error."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gistkit.common.messages import one_line

# Characters of a line.
MOST = 1000


def warn(message: object) -> None:
    """A warning of a command, on a line of its own also where a progress bar is being drawn."""
    text = f"gistkit: warning: {one_line(message, MOST)}"
    if (bars := sys.modules.get("tqdm")) is None:
        print(text, file=sys.stderr)
    else:
        bars.tqdm.write(text, file=sys.stderr)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Inside, Python's warnings are those of a command: without file, line number and source line."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        warn(message)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory, which torch tells by a RuntimeError's text."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
