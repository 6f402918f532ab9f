"""Questions written by hand about texts of 1,024 to 4,096 tokens: held-out manuals, and how peoples see the sky.

example: python lab/models/long_questions.py runs/models/long     # for gistkit evaluate --questions
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from manual_questions import by_name, write
from texts import TEXT, held_out_pages

from gistkit.hf.smollm2 import load_smollm2_tokenizer

FILE = Path(__file__).with_name("long_questions.jsonl")


def lines(tokenizer: Any) -> dict[str, list[dict[str, Any]]]:
    """By set, "manuals" or "sky", the questions with their contexts: the first `tokens` tokens of a page.

    Those whose page is not held out, or has no such answer there, are left out: other versions of the packages differ.
    """
    kinds = {"manuals": by_name(held_out_pages()), "sky": by_name(sorted((TEXT / "sky").rglob("*.txt")))}
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for line in FILE.read_text().splitlines():
        one = json.loads(line)
        for kind, pages in kinds.items():
            for page in pages.get(one["page"], [])[:1]:
                ids = tokenizer(page.read_text(), add_special_tokens=False)["input_ids"][: one["tokens"]]
                context = tokenizer.decode(ids)
                if one["answer"] in context:
                    found[kind].append({"context": context, "question": one["question"], "answers": [one["answer"]]})
    return found


def main() -> int:
    """Writes a file of JSON lines for each set into a folder."""
    for kind, questions in lines(load_smollm2_tokenizer()).items():
        write(Path(sys.argv[1]) / f"{kind}.jsonl", questions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
