"""What a trained compressor keeps of held-out pages, beside no and full context: the text, what follows it, facts.

example: OMP_NUM_THREADS=1 python lab/models/measure.py smollm2-x500-4x --contexts 64
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manual_questions import examples
from passages import Passages
from texts import manuals, other_domain

from gistkit.compress import Compressor
from gistkit.evaluate import Example
from gistkit.evaluate.run import run
from gistkit.hf.smollm2 import load_smollm2
from gistkit.train import Corpus

MODELS = Path(__file__).resolve().parents[2] / "models"
# Tokens of a context, of what follows it, and of an answer.
CONTEXT, FOLLOWING, ANSWER = 128, 64, 24
# Tokens of the part of a page that a question written by hand is about.
PAGE = 512


def measure(compressor: Compressor, corpus: Corpus, count: int, *, progress: bool = True) -> dict[str, float]:
    """Figures on `count` held-out contexts of 128 tokens.

    Returns:
        "bleu4" and "accuracy" of reconstruction (0..100, 0..1); "none", "memory" and "full", the perplexities of the 64
        tokens that follow, and "way", how far from none to full that of the memory is; "facts", "facts_full" and
        "facts_none", the exact answers in percent about a fact put into each context.
    """
    tokenizer = corpus.tokenizer
    rows = corpus.chunks(CONTEXT + FOLLOWING, count=count).tolist()
    plain = [Example(row[:CONTEXT], continuation=row[CONTEXT:]) for row in rows]
    batch = Passages(corpus, CONTEXT, CONTEXT, FOLLOWING, count, 0).held_out(count)[0]
    facts = [
        Example(context, question=[token for token in question if token >= 0], answers=[answer])
        for context, question, answer in zip(
            batch["input_ids"].tolist(), batch["question_ids"].tolist(), answers_of(batch, tokenizer), strict=True
        )
    ]
    settings: dict[str, Any] = {"batch_size": 16, "progress": progress}
    (kept,) = run(compressor, tokenizer, plain, baselines=(), tasks=("ae",), **settings).rows
    following = run(compressor, tokenizer, plain, tasks=("lm",), **settings).rows
    answered = run(compressor, tokenizer, facts, tasks=("qa",), max_new_tokens=ANSWER, **settings).rows
    none, memory, full = (row.metrics["lm_perplexity"] for row in following)
    exact = [row.metrics["qa_exact_match"] for row in answered]
    return {
        "bleu4": kept.metrics["ae_bleu4"],
        "accuracy": kept.metrics["ae_accuracy"],
        "none": none,
        "memory": memory,
        "full": full,
        "way": (none - memory) / (none - full),
        **dict(zip(("facts_none", "facts", "facts_full"), exact, strict=True)),
    }


def asked(
    compressor: Compressor, questions: Sequence[Example], tokenizer: Any, *, progress: bool = True
) -> dict[str, float]:
    """Figures on questions about pages.

    Returns:
        "count" of the questions; and of NAME "none", "memory" and "full", the context that is read: NAME, exact answers
        in percent; NAME_within, answers with the right one within; NAME_f1, the F1 of words, in percent.
    """
    rows = run(
        compressor, tokenizer, questions, tasks=("qa",), max_new_tokens=ANSWER, batch_size=10, progress=progress
    ).rows
    found: dict[str, float] = {"count": len(questions)}
    for name, row in zip(("none", "memory", "full"), rows, strict=True):
        found[name] = row.metrics["qa_exact_match"]
        found[f"{name}_within"] = row.metrics["qa_contains_answer"]
        found[f"{name}_f1"] = row.metrics["qa_token_f1"]
    return found


def answers_of(batch: dict[str, Any], tokenizer: Any) -> list[str]:
    """The answers of a batch as text."""
    return [tokenizer.decode([token for token in row if token >= 0], skip_special_tokens=True)
            for row in batch["answer_ids"].tolist()]  # fmt: skip


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
