"""Which of gistkit's files and functions a call goes through; `python -m tests.helpers.trace_calls` prints them.

The fewer files a reader has to follow, the better; `tests/compress/test_trace.py` holds the numbers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import gistkit

PACKAGE = Path(gistkit.__file__).parent


@dataclass
class Trace:
    """Calls of gistkit's Python functions, in the order of the first of each.

    Args:
        files: calls into each file, by its path in the package.
        functions: calls of each function, as file:name.
        switches: how often the next call was into another file.
    """

    files: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)
    switches: int = 0

    def __str__(self) -> str:
        files = "\n".join(f"    {calls:6} {name}" for name, calls in self.files.items())
        return (
            f"{len(self.files)} files, {len(self.functions)} functions, {self.files.total()} calls, "
            f"{self.switches} switches between files\n{files}"
        )


def trace(call: Callable[[], object]) -> Trace:
    """Makes the call and returns what it went through; calls that torch makes back into gistkit count too."""
    found, last = Trace(), ""

    def look(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal last
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
        found.files[file] += 1
        found.functions[f"{file}:{code.co_qualname}"] += 1
        found.switches += file != last
        last = file

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def main() -> None:
    """Prints the traces of encoding, the first time and warm, and of generation, on a tiny Llama."""
    import torch

    from gistkit.compress import ICAE, Dodo, FiveHundredX, GistPool
    from tests.helpers.models import tiny_llama

    ids = torch.randint(2, 90, (2, 45), generator=torch.Generator().manual_seed(0))
    made = {
        ICAE: {"chunk": 20},
        FiveHundredX: {"chunk": 20},
        GistPool: {"bos_token": 1},
        Dodo: {"bos_token": 1, "layer": 1},
    }
    for method, options in made.items():
        compressor = method(tiny_llama(vocab_size=100), ratio=5, lora=4, **options)
        with torch.no_grad():
            for name in ("first", "warm"):
                print(f"{method.__name__}.encode, {name}: {trace(partial(compressor.encode, ids))}")
            memory = compressor.encode(ids)
            print(f"{method.__name__}.generate: {trace(partial(compressor.generate, memory, max_new_tokens=3))}")


if __name__ == "__main__":
    main()
