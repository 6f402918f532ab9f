"""What `refine` gains: facts in held-out documents, asked of a fitted selection before and after, and of the full text.

SmolLM2 with the adapters of smollm2-select-4x. The file of results grows by document; the same command
continues it.

example: OMP_NUM_THREADS=1 python lab/models/refined.py --documents 20 --out benchmarks/results/refine-smollm2.jsonl
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from texts import manuals

from gistkit.compress import Compressor, Memory, refine
from gistkit.compress.scores import SCORES
from gistkit.evaluate import Example
from gistkit.evaluate.runner import evaluating
from gistkit.hf.smollm2 import load_smollm2
from gistkit.info import machine
from gistkit_lab import digests
from gistkit_lab.presses.comparison import FULL, Asked, Comparison, Entry, Measure, Outcome, asked_of, kept
from gistkit_lab.presses.facts import ABSENT, fact_questions
from gistkit_lab.presses.reader import PressReader, Text
from gistkit_lab.presses.report import presses_table

NAME = "smollm2-select-4x"
# Tokens of a document, and of an answer.
LENGTH, ANSWER = 512, 24
REFINED = "fitted kvzip, refined"


def documents(tokenizer: Any, count: int) -> list[dict[str, list[Example]]]:
    """Of each document its questions by kind, without those that it does not answer."""
    sets = fact_questions(manuals().held_out.tolist(), tokenizer, {LENGTH: count})
    found: dict[str, dict[str, list[Example]]] = {}
    for kind, examples in sets.items():
        for one in examples:
            if one.answers != ABSENT:
                found.setdefault(one.context, {}).setdefault(kind, []).append(replace(one, continuation=None))
    return list(found.values())


class Given(Measure):
    """As `Measure`, of a memory that there is."""

    def __init__(self, given: Memory, presses: PressReader, text: Text, asked: Asked, entry: Entry) -> None:
        super().__init__(presses, [text], asked, entry, {}, ANSWER)
        self.given = given

    def memory(self, owner: int, question: Sequence[int]) -> Memory:
        """It."""
        return self.given


def measured(presses: PressReader, asked: Asked, ratios: Sequence[int], steps: int, tokenizer: Any) -> list[Outcome]:
    """The outcomes of a document: of all of it, and of a selection at each ratio before and after."""
    (context,) = asked.contexts
    with evaluating(presses.select):
        text = presses.read(context.context)
    memories = {Entry(NAME, FULL, 1): presses.first(text, text.length)}
    seconds = {}
    for ratio in ratios:
        memory = presses.scored(text, "kvzip", kept(text.length - 1, ratio), "all", fit=True)
        begun = time.process_time()
        found = refine(presses.select, memory, context.context, steps=steps)
        print(f"{ratio}x: KL {found.before:.3f} to {found.after:.3f}", flush=True)
        memories[Entry(NAME, "kvzip", ratio, shares="all", fit=True)] = memory
        memories[after := Entry(NAME, REFINED, ratio, shares="all")] = found.memory
        seconds[after] = time.process_time() - begun
    with torch.no_grad():
        outcomes = [Given(memory, presses, text, asked, entry)(tokenizer) for entry, memory in memories.items()]
    # Of a refined memory those of refining.
    return [replace(one, seconds=round(seconds.get(one.entry, one.seconds), 1)) for one in outcomes]


def joined(before: Comparison, now: Comparison) -> Comparison:
    """Two comparisons of the same rows about other documents, as one."""
    lists = [one.name for one in fields(Outcome) if one.name not in ("entry", "seconds")]
    outcomes = [
        replace(
            one,
            seconds=round(one.seconds + more.seconds, 1),
            **{name: getattr(one, name) + getattr(more, name) for name in lists},
        )
        for one, more in zip(before.outcomes, now.outcomes, strict=True)
    ]
    owners = [owner + len(before.lengths) for owner in now.contexts]
    sets, lengths = before.sets + now.sets, before.lengths + now.lengths
    return Comparison(before.settings, sets, before.contexts + owners, lengths, outcomes)


def continued(path: Path, settings: dict[str, Any]) -> Comparison | None:
    """What a file has of the same settings, on whatever machine; None: there is no file.

    Raises:
        ValueError: if its settings are others.
    """
    if not path.exists():
        return None
    found = Comparison.load(path)
    if {**found.settings, "machine": None} != {**settings, "machine": None}:
        raise ValueError(f"--out: expected results with {settings}, got {dict(found.settings)} in {path}")
    return found


def main() -> int:
    """Writes the outcomes after each document, and prints what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model, tokenizer = load_smollm2(getattr(torch, arguments.dtype))
    compressor = Compressor.from_pretrained(Path(__file__).resolve().parents[2] / "models" / NAME, model).eval()
    presses = PressReader(model, tokenizer, {"kvzip": SCORES["kvzip"]()}, compressor, fit=True)
    presses.select.tokenizer = tokenizer
    chosen = documents(tokenizer, arguments.documents)
    # Which passages are taken depends on how many are.
    texts = [(kind, one.context, one.question, one.answers) for each in chosen for kind in each for one in each[kind]]
    settings = {
        "model": "SmolLM2-135M-Instruct", "dtype": arguments.dtype, "max_new_tokens": ANSWER, "machine": machine(),
        "steps": arguments.steps, "documents": digests.of_values(texts),
        "compressor": digests.of_compressor(compressor),
    }  # fmt: skip
    found = continued(arguments.out, settings)
    for sets in chosen[0 if found is None else len(found.lengths) :]:
        asked = asked_of(sets, tokenizer)
        outcomes = measured(presses, asked, arguments.ratios, arguments.steps, tokenizer)
        now = Comparison(settings, asked.sets, asked.owners, [len(asked.contexts[0].context)], outcomes)
        if found is not None and [one.entry for one in found.outcomes] != [one.entry for one in outcomes]:
            raise ValueError(f"--out: expected results of the same rows, got others in {arguments.out}")
        found = now if found is None else joined(found, now)
        found.save(arguments.out)
        print(f"{len(found.lengths)} documents, {len(found.sets)} questions\n{presses_table(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
