"""Files that are whole or not there: written beside their place and moved; read with a message for a broken one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` in one move; where writing fails, `path` stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        # On the disk before it takes the place of a good one.
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_tensors(
    path: Path, what: str, broken: str = "a file that cannot be read"
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors, on the CPU, of a safetensors file; messages name `what` it should be.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is cut short, or no safetensors.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected {what}, got none there")
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: expected {what}, got {broken} ({error})") from error
