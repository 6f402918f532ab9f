"""Memories whose heads share what they keep, SmolLM2-135M: RAM, a question's first token, and each token after it.

The same text is kept by KVzip with heads that keep different numbers of tokens, by KVzip with equal shares, and whole.
A fourth contender reads the first memory with all heads padded to the longest. All answer the same question in turn,
on gistkit's attention.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import harness
import torch
from asking import docstrings
from torch import Tensor
from tqdm import tqdm

from gistkit.compress import Memory, Select
from gistkit.compress.tokens import QUESTION
from gistkit.hf.smollm2 import load_smollm2

TOKENS, RATIOS, ANSWER = (500, 1000, 3000), (4, 8, 16), 16
SHARED, EQUAL, PADDED, FULL = "unequal shares", "equal shares", "padded to the longest head", "full KV cache"


class Padded(Select):
    """Reads memories whose shorter heads are filled up."""

    def key_biases(self, memory: Memory) -> list[Tensor] | None:
        """Nothing is seen of what fills them up."""
        empty = torch.zeros(memory.positions.shape).masked_fill(memory.positions == 0, -torch.inf).mT
        return list(empty.split([heads for heads, _ in self.lm.head_shapes], 1))


def padded(memory: Memory) -> Memory:
    """The memory with columns for the head with most, of which others leave some empty."""
    layers = []
    for layer, counts in zip(memory.layers or (), memory.counts or (), strict=True):
        held = torch.arange(memory.num_tokens) < counts[..., None]
        both = [part.new_zeros(*held.shape, part.shape[1]) for part in layer]
        for whole, part in zip(both, layer, strict=True):
            whole[held] = part
        layers.append((both[0], both[1]))
    positions = memory.in_columns(memory.positions).long()
    return replace(memory, counts=None, positions=positions, layers=tuple(layers), maker=None)


@dataclass(frozen=True)
class Contender:
    """Who reads which memory."""

    compressor: Select
    memory: Memory

    def seconds(self, question: list[int], tokens: int) -> float:
        """That an answer of so many tokens takes."""
        start = time.perf_counter()
        self.compressor.generate(self.memory, [question], task="qa", max_new_tokens=tokens, stop_tokens=())
        return time.perf_counter() - start

    @property
    def nbytes(self) -> int:
        """Of keys and values in RAM."""
        return sum(tensor.nbytes for tensor in self.memory.tensors)


def contenders(model: Any, tokenizer: Any, ids: list[int], ratio: int) -> dict[str, Contender]:
    """All of them for one text."""

    def made(kind: type[Select], **settings: Any) -> Select:
        compressor = kind(model, **settings).eval()
        compressor.tokenizer = tokenizer
        return compressor

    shared, equal = (made(Select, ratio=ratio, by="kvzip", shares=shares) for shares in ("all", "equal"))
    full = made(Select, ratio=1, by="even")
    memory = shared.encode([ids])
    return {
        SHARED: Contender(shared, memory),
        EQUAL: Contender(equal, equal.encode([ids])),
        PADDED: Contender(made(Padded, ratio=ratio, by="kvzip", shares="all"), padded(memory)),
        FULL: Contender(full, full.encode([ids])),
    }


def measured(readers: dict[str, Contender], question: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each, with medians over rounds: bytes, seconds to the first token, milliseconds of one after it."""
    first: dict[str, list[float]] = {name: [] for name in readers}
    later: dict[str, list[float]] = {name: [] for name in readers}
    for done in range(rounds + 1):
        for name, reader in readers.items():
            one, more = (reader.seconds(question, tokens) for tokens in (1, 1 + ANSWER))
            if done:
                first[name].append(one)
                later[name].append(1e3 * (more - one) / ANSWER)
    return [
        {
            "form": name,
            "mb": reader.nbytes / 1e6,
            "first": statistics.median(first[name]),
            "token": statistics.median(later[name]),
            # Of the same round, as the machine's moods hit both.
            "of_full": statistics.median(a / b for a, b in zip(later[name], later[FULL], strict=True)),
        }
        for name, reader in readers.items()
    ]


def main() -> int:
    """Measures, prints a row for each contender, and keeps the rows where asked."""
    parser = harness.parser(__doc__, "python benchmarks/shares.py --tokens 500 --dtype bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a text (default: %(default)s)")
    parser.add_argument("--ratios", type=int, nargs="+", default=RATIOS, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    torch.set_num_threads(options.threads)
    found = harness.environment()
    print("shares: " + ", ".join(f"{key} {value}" for key, value in found.items()))
    model, tokenizer = load_smollm2(dtype=getattr(torch, options.dtype))
    text = tokenizer(docstrings(), add_special_tokens=False)["input_ids"]
    question = tokenizer(QUESTION.format(question="What is a module?"), add_special_tokens=False)["input_ids"]
    cases = [(tokens, ratio) for tokens in options.tokens for ratio in options.ratios]
    rows: list[dict[str, Any]] = []
    for tokens, ratio in tqdm(cases, desc="shares", unit="case", dynamic_ncols=True):
        readers = contenders(model, tokenizer, text[:tokens], ratio)
        for row in measured(readers, question, rounds):
            rows.append({"tokens": tokens, "ratio": ratio, **row})
            tqdm.write(
                f"  {tokens:5} tokens {ratio:3}x  {row['form']:28} {row['mb']:8.1f} MB, first token "
                f"{row['first']:6.3f} s, then {row['token']:6.1f} ms a token, {row['of_full']:.2f} of the full cache's"
            )
    content = {"suite": "shares", "machine": found, "dtype": options.dtype, "rounds": rounds, "rows": rows}
    harness.write("shares", content, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
