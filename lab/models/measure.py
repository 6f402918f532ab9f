"""What a trained compressor keeps of held-out pages, beside no and full context and a selection without training.

The text, what follows it, facts, and questions written by hand.

example: OMP_NUM_THREADS=1 python lab/models/measure.py smollm2-x500-4x --contexts 64
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from manual_questions import PAGE, examples
from passages import Passages
from texts import manuals, other_domain

from gistkit.compress import Compressor
from gistkit.evaluate import Example
from gistkit.evaluate.metrics import perplexity
from gistkit.evaluate.run import run
from gistkit.hf.smollm2 import load_smollm2
from gistkit.train import Corpus
from gistkit_lab.presses.comparison import FULL, NONE, PLAIN, Entry, Outcome, against_presses, entries

MODELS = Path(__file__).resolve().parents[2] / "models"
# What `compared` calls the compressor.
NAME = "it"
# Tokens of a context, of what follows it, and of an answer.
CONTEXT, FOLLOWING, ANSWER = 128, 64, 24


def measure(compressor: Compressor, corpus: Corpus, count: int, *, progress: bool = True) -> dict[str, float]:
    """Figures on `count` held-out contexts of 128 tokens.

    Returns:
        "bleu4" and "accuracy" of reconstruction (0..100, 0..1); and of each of `rows`, by its name, the perplexity of
        the 64 tokens that follow, and NAME_facts, the exact answers in percent about a fact put into each context.
        "way": how far from no to full context, both as the memory's reader reads them, the memory's perplexity is.
    """
    tokenizer = corpus.tokenizer
    passages = corpus.chunks(CONTEXT + FOLLOWING, count=count).tolist()
    plain = [Example(row[:CONTEXT], continuation=row[CONTEXT:]) for row in passages]
    rows = Passages(corpus, CONTEXT, CONTEXT, FOLLOWING, count, 0).held_out_rows(count)
    facts = [
        # Without the end of the answer.
        Example(row["input_ids"], question=row["question_ids"], answers=[tokenizer.decode(row["answer_ids"][:-1])])
        for row in rows
    ]
    (kept,) = run(compressor, tokenizer, plain, baselines=(), tasks=("ae",), batch_size=16, progress=progress).rows
    found = {"bleu4": kept.metrics["ae_bleu4"], "accuracy": kept.metrics["ae_accuracy"]}
    for name, one in compared(compressor, [*plain, *facts], tokenizer, progress=progress).items():
        found[name] = perplexity(sum(one.following_nats) / sum(one.following_tokens))
        found[f"{name}_facts"] = 100 * fmean(one.exact)
    own = "adapter_" if "adapter_none" in found else ""
    none, full = found[f"{own}none"], found[f"{own}full"]
    return found | {"way": (none - found["memory"]) / (none - full)}


def asked(
    compressor: Compressor, questions: Sequence[Example], tokenizer: Any, *, progress: bool = True
) -> dict[str, float]:
    """Figures on questions about pages: their "count", and of NAME, each of `rows`, in percent:

    NAME, exact answers; NAME_within, answers with the right one within; NAME_f1, the F1 of words.
    """
    found: dict[str, float] = {"count": len(questions)}
    for name, one in compared(compressor, questions, tokenizer, progress=progress).items():
        for kind, values in (("", one.exact), ("_within", one.within), ("_f1", one.f1)):
            found[f"{name}{kind}"] = 100 * fmean(values)
    return found


def rows(compressor: Compressor) -> dict[str, Entry]:
    """What stands beside the memory, and the memory, by name: all with the same prompt.

    "none" and "full": the model without the adapter, without and with the whole context. "adapter_none" and
    "adapter_full": the same with the adapter that the memory is read with, where there is one. "kvzip": a selection
    without training of as many bytes, read as the memory is.
    """
    found = {"none": Entry(PLAIN, NONE), "full": Entry(PLAIN, FULL, 1)}
    reader = next(entry.reader for entry in entries({NAME: compressor}, ratios=()) if entry.memory == NAME)
    if reader == NAME:
        found |= {"adapter_none": Entry(NAME, NONE), "adapter_full": Entry(NAME, FULL, 1)}
    return found | {
        "memory": Entry(reader, NAME, compressor.ratio),
        "kvzip": Entry(reader, "kvzip", compressor.ratio),
    }


def compared(
    compressor: Compressor, examples: Sequence[Example], tokenizer: Any, *, progress: bool = True
) -> dict[str, Outcome]:
    """The outcomes of `rows`."""
    named = rows(compressor)
    # Those of a reader follow each other, as contexts are read once for each.
    chosen = sorted(named.values(), key=lambda entry: entry.reader)
    step = (lambda text: print(text, file=sys.stderr)) if progress else (lambda text: None)
    found = against_presses(
        compressor.model, tokenizer, {"": examples}, trained={NAME: compressor}, rows=chosen, max_new_tokens=ANSWER,
        on_step=step,
    )  # fmt: skip
    outcomes = {one.entry: one for one in found.outcomes}
    return {name: outcomes[entry] for name, entry in named.items()}


def measured(compressor: Compressor, count: int) -> dict[str, dict[str, float]]:
    """The figures on held-out pages of the manuals, on the pages of another domain, and of questions about pages."""
    corpus = manuals()
    found = {"manuals": measure(compressor, corpus, count), "other": measure(compressor, other_domain(), count)}
    if questions := examples(corpus.tokenizer, PAGE):
        found["questions"] = asked(compressor, questions, corpus.tokenizer)
    return found


def main() -> int:
    """Measures a trained compressor and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="its name in this folder, or a folder")
    parser.add_argument("--contexts", type=int, default=64, help="of each domain, at most (default: %(default)s)")
    options = parser.parse_args()
    folder = Path(options.model) if Path(options.model).is_dir() else MODELS / options.model
    compressor = Compressor.from_pretrained(folder, load_smollm2()[0]).eval()
    for domain, figures in measured(compressor, options.contexts).items():
        print(domain, json.dumps({name: round(value, 3) for name, value in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
