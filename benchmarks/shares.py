"""Memories whose heads share what they keep, SmolLM2-135M: RAM, a question's first token, and each token after it.

The same text is kept by KVzip with heads that keep different numbers of tokens, evenly with as many tokens a head, and
whole.
All answer the same question in turn, on gistkit's attention.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import harness
import torch
from asking import docstrings
from torch import Tensor
from tqdm import tqdm

from gistkit.compress import Memory, Select
from gistkit.compress.methods.select import Repeated
from gistkit.compress.tokens import QUESTION
from gistkit.hf.smollm2 import load_smollm2

TOKENS, RATIOS, ANSWER = (500, 1000, 3000), (4, 8, 16), 20
SHARED, EQUAL, FULL = "unequal shares", "equal shares", "full KV cache"


class Once(Select):
    """Repeats a text once for all ratios."""

    found: Repeated | None = None

    def repetition(self, *text: Any, **asked: Any) -> Repeated:
        """See `Select.repetition`."""
        self.found = self.found or super().repetition(*text, **asked)
        return self.found


@dataclass
class Times:
    """A streamer that notes when tokens come."""

    at: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """Gets the prompt first."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Contender:
    """Who reads which memory."""

    compressor: Select
    memory: Memory

    def seconds(self, question: list[int]) -> tuple[float, float]:
        """To an answer's first token, and of one after it, as the median."""
        start, times = time.perf_counter(), Times()
        self.compressor.generate(
            self.memory, [question], task="qa", max_new_tokens=1 + ANSWER, stop_tokens=(), streamer=times
        )
        _, first, *_ = times.at
        return first - start, statistics.median(after - before for before, after in pairwise(times.at[1:]))

    @property
    def nbytes(self) -> int:
        """Of keys and values in RAM."""
        return sum(tensor.nbytes for tensor in self.memory.tensors)


def contenders(model: Any, tokenizer: Any, ids: list[int], ratios: list[int]) -> dict[int, dict[str, Contender]]:
    """All of them for one text, by ratio."""
    found, full = None, Select(model, ratio=1, by="even").eval()
    whole, readers = Contender(full, full.encode([ids])), {}
    for ratio in ratios:
        shared, equal = Once(model, ratio=ratio, by="kvzip", shares="all"), Select(model, ratio=ratio, by="even")
        shared.tokenizer, shared.found = tokenizer, found
        readers[ratio] = {
            SHARED: Contender(shared.eval(), shared.encode([ids])),
            EQUAL: Contender(equal.eval(), equal.encode([ids])),
            FULL: whole,
        }
        found = shared.found
    return readers


def measured(readers: dict[str, Contender], question: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each, with medians over rounds: bytes, seconds to the first token, milliseconds of one after it."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for done in range(rounds + 1):
        for name, reader in readers.items():
            if done:
                times[name].append(reader.seconds(question))
            else:
                reader.seconds(question)
    rows = []
    for name, reader in readers.items():
        first, later = zip(*times[name], strict=True)
        _, full = zip(*times[FULL], strict=True)
        rows.append(
            {
                "form": name,
                "mb": reader.nbytes / 1e6,
                "first": statistics.median(first),
                "token": 1e3 * statistics.median(later),
                # Of the same round, as the machine's moods hit both.
                "of_full": statistics.median(a / b for a, b in zip(later, full, strict=True)),
            }
        )
    return rows


def main() -> int:
    """Measures, prints a row for each contender, and keeps the rows where asked."""
    parser = harness.parser(__doc__, "python benchmarks/shares.py --tokens 500 --dtype bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a text (default: %(default)s)")
    parser.add_argument("--ratios", type=int, nargs="+", default=RATIOS, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    found = harness.begin("shares", options)
    model, tokenizer = load_smollm2(dtype=getattr(torch, options.dtype))
    text = tokenizer(docstrings(), add_special_tokens=False)["input_ids"]
    question = tokenizer(QUESTION.format(question="What is a module?"), add_special_tokens=False)["input_ids"]
    rows: list[dict[str, Any]] = []
    for tokens in tqdm(options.tokens, desc="shares", unit="text", dynamic_ncols=True):
        for ratio, readers in contenders(model, tokenizer, text[:tokens], options.ratios).items():
            for row in measured(readers, question, rounds):
                rows.append({"tokens": tokens, "ratio": ratio, **row})
                tqdm.write(
                    f"  {tokens:5} tokens {ratio:3}x  {row['form']:15} {row['mb']:8.1f} MB, first token "
                    f"{row['first']:6.3f} s, then {row['token']:6.1f} ms a token, {row['of_full']:.2f} of the full "
                    "cache's"
                )
    harness.write("shares", {"machine": found, "dtype": options.dtype, "rounds": rounds, "rows": rows}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
