"""What `refine` gains: questions by hand about documents, from a selection before and after, and the whole text.

Of SmolLM2 with the adapter of smollm2-avgpool-2x in its weights; 140 CPU seconds a document.

example: OMP_NUM_THREADS=1 python lab/models/refined.py --ratio 16 --out runs/refined.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from manual_questions import PAGE, Question, about
from peft import PeftModel

from gistkit.compress import Compressor, Memory, Select, refine
from gistkit.compress.tokens import QUESTION, filled_ids, text_ids
from gistkit.evaluate.metrics import contains_answer, exact_match, perplexity
from gistkit.hf.smollm2 import load_smollm2

ADAPTER = Path(__file__).resolve().parents[2] / "models" / "smollm2-avgpool-2x" / "gistkit_0_text"
# Questions by their lines; the document is around the answer of the first and has those of the others.
DOCUMENTS = (
    (43, 42),
    (1, 0),
    (28, 27),
    (14, 13),
    (36, 35),
    (47, 46),
    (38, 37),
    (23, 22),
    (17, 18, 19),
    (30, 29),
    (31, 32),
)
ANSWER = 24


def asked(compressor: Compressor, memory: Memory, one: Question) -> dict[str, Any]:
    """The nats of the right answer, and what the model says."""
    tokenizer = compressor.tokenizer
    question = filled_ids(QUESTION, "{question}", one.question, tokenizer)
    answer = text_ids(one.answer, tokenizer, special_tokens=False)
    with torch.no_grad():
        states = compressor.decode(memory, "qa", [question + answer])[0, len(question) :][: len(answer)]
        nats = -compressor.logits(states).log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum()
    said = str(compressor.ask(memory, one.question, max_new_tokens=ANSWER))
    first = (said.splitlines() or [""])[0].strip()
    return {
        "nats": float(nats), "tokens": len(answer), "said": said, "exact": exact_match(first, [one.answer]),
        "within": contains_answer(said, [one.answer]),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> str:
    """A line for each of the three readings."""
    questions, lines = [question for row in rows for question in row["questions"]], []
    for name in ("full", "before", "after"):
        found = [question[name] for question in questions]
        apart = [abs(one["nats"] - question["full"]["nats"]) for one, question in zip(found, questions, strict=True)]
        lines.append(
            f"{name:8} of {len(found)}: exact {sum(one['exact'] for one in found):.0f}, within "
            f"{sum(one['within'] for one in found):.0f}, perplexity "
            f"{perplexity(sum(one['nats'] for one in found) / sum(one['tokens'] for one in found)):.2f}, nats from the "
            f"whole text's {sum(apart) / len(apart):.2f}, says the same "
            f"{sum(one['said'] == question['full']['said'] for one, question in zip(found, questions, strict=True))}"
        )
    return "\n".join(lines)


def main() -> int:
    """Writes the answers after each document, and prints what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--documents", type=int, default=len(DOCUMENTS))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    plain, tokenizer = load_smollm2()
    model: Any = PeftModel.from_pretrained(plain, str(ADAPTER)).merge_and_unload()
    full = Select(model, ratio=1, by="even").eval()
    select = Select(model, ratio=arguments.ratio, shares="all").eval()
    full.tokenizer = select.tokenizer = tokenizer
    every, rows = about(tokenizer, PAGE), []
    for chosen in DOCUMENTS[: arguments.documents]:
        ids = every[chosen[0]].context
        memory, begun = select.encode([ids]), time.process_time()
        found = refine(select, memory, ids, steps=arguments.steps)
        row = {"document": chosen, "seconds": time.process_time() - begun, "kl": (found.before, found.after)}
        read = {"full": (full, full.encode([ids])), "before": (select, memory), "after": (select, found.memory)}
        questions = (every[index].asked for index in chosen)
        answers = [{name: asked(*each, one) for name, each in read.items()} for one in questions]
        rows.append({**row, "questions": answers})
        arguments.out.write_text(json.dumps(rows, indent=1))
        print(f"{len(rows)} documents, KL {found.before:.3f} to {found.after:.3f}\n{summary(rows)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
