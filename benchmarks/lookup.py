"""How often a question finds its document: ways to represent documents for `Store.nearest`, all compared exactly.

The documents are pages of Debian's manuals (lab/models/text.py writes them), the beginning of each. Two sets of
questions: the first 50 by hand about their pages (manual_questions.jsonl beside it), and made-up facts (questions.py
there), each put as a sentence at a random place of a page of its own. A page is divided into windows of words, and its
nearest window counts. Recall at k: percent of questions whose page is among the k nearest.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from scipy import sparse
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
from tqdm import tqdm

from gistkit.hf.smollm2 import load_smollm2

sys.path.append(str(Path(__file__).resolve().parents[1] / "lab" / "models"))

from questions import draw_fact

TERMS = 2**20
# Weights a / (a + p) of a token of frequency p (Arora et al. 2017, SIF).
SIF = 1e-4
# From windows and questions to their scores [questions, windows].
Scores = Callable[[list[str], list[str]], Any]


class Pages:
    """Pages with the facts among their sentences, and the questions with the number of the page that each is about."""

    def __init__(self, folder: Path, count: int, characters: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        files: dict[str, Path] = {}
        for path in sorted(folder.rglob("*.txt")):
            files.setdefault(f"{path.parent.name}/{path.stem.partition('-')[2]}", path)
        lines = (harness.ROOT / "lab/models/manual_questions.jsonl").read_text().splitlines()[:50]
        manual = [one for one in map(json.loads, lines) if one["page"] in files]
        wanted = sorted({one["page"] for one in manual})
        others = [name for name in files if name not in wanted]
        random.shuffle(others)
        names = wanted + others[: count - len(wanted)]
        self.texts = [files[name].read_text()[:characters] for name in names]
        facts = {}
        while len(facts) < min(170, len(names)):
            fact = draw_fact(random)
            facts.setdefault(fact.question, fact)
        self.questions = [(one["question"], names.index(one["page"])) for one in manual]
        self.by_hand = len(manual)
        for fact, page in zip(facts.values(), random.permutation(len(names)).tolist(), strict=False):
            sentences = re.split(r"(?<=[.!?])\s", self.texts[page])
            sentences.insert(int(random.integers(len(sentences) + 1)), fact.sentence)
            self.texts[page] = " ".join(sentences)
            self.questions.append((fact.question, page))


def windows(texts: Sequence[str], words: int) -> tuple[list[str], np.ndarray]:
    """Parts of `words` words, 0: whole texts, and the number of each one's text."""
    parts, owners = [], []
    for number, text in enumerate(texts):
        found = text.split() or [""]
        for start in range(0, len(found), words or len(found)):
            parts.append(" ".join(found[start : start + (words or len(found))]))
            owners.append(number)
    return parts, np.array(owners)


def ranks(scores: np.ndarray, owners: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
    """How many documents come before the wanted one of each question; equal ones do."""
    best = np.full((max(owners) + 1, len(scores)), -np.inf, np.float32)
    np.maximum.at(best, owners, scores.T.astype(np.float32))
    right = best[wanted, np.arange(len(wanted))]
    return (best >= right).sum(0) - 1


def words(width: int = 0, idf: bool = True, **options: Any) -> Scores:
    """Cosines of tf-idf of hashed words or characters; with `width` in so many dimensions (a count sketch)."""

    def scores(parts: list[str], questions: list[str]) -> Any:
        counter = HashingVectorizer(n_features=TERMS, norm=None, alternate_sign=False, **options)
        weights = TfidfTransformer(sublinear_tf=True, use_idf=idf)
        rows, asked = weights.fit_transform(counter.transform(parts)), weights.transform(counter.transform(questions))
        if not width:
            return (asked @ rows.T).toarray()
        random = np.random.default_rng(0)
        signs = random.choice([-1.0, 1.0], TERMS).astype(np.float32)
        sketch = sparse.csr_matrix((signs, (np.arange(TERMS), random.integers(width, size=TERMS))), (TERMS, width))
        return unit((asked @ sketch).toarray()) @ unit((rows @ sketch).toarray()).T

    return scores


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors of length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def embeddings(model: Any, tokenizer: Any, hidden: bool) -> Scores:
    """Cosines of means over tokens, of input embeddings or of the model's last hidden states, weighted by SIF."""
    table = model.get_input_embeddings().weight

    @torch.no_grad()
    def scores(parts: list[str], questions: list[str]) -> Any:
        rows = [tokenizer(text, verbose=False)["input_ids"] or [0] for text in parts + questions]
        counts = np.bincount(np.concatenate(rows[: len(parts)]), minlength=len(table))
        weights = torch.from_numpy(SIF / (SIF + counts / counts.sum())).float()
        means = []
        for row in tqdm(rows, desc="embed", disable=not hidden):
            ids = torch.tensor(row)
            states = model.get_decoder()(ids[None]).last_hidden_state[0] if hidden else table[ids]
            means.append(weights[ids] @ states / weights[ids].sum())
        vectors = unit(torch.stack(means).numpy())
        return vectors[len(parts) :] @ vectors[: len(parts)].T

    return scores


def rows(options: argparse.Namespace) -> dict[str, tuple[int, Scores]]:
    """{name: (words of a window, scores)} of all that is compared."""
    letters = {"analyzer": "char_wb", "ngram_range": (3, 5)}
    found: dict[str, tuple[int, Scores]] = {
        "words, tf-idf, whole pages": (0, words()),
        "words, tf-idf, windows of 200": (200, words()),
        "words, tf-idf, windows of 100": (100, words()),
        "words, tf-idf, windows of 50": (50, words()),
        "words, tf without idf, windows of 100": (100, words(idf=False)),
        "words, tf-idf in 1024 dimensions, windows of 100": (100, words(1024)),
        "words, tf-idf in 4096 dimensions, windows of 100": (100, words(4096)),
        "characters 3 to 5, tf-idf, windows of 100": (100, words(**letters)),
        "characters 3 to 5, tf-idf in 4096 dimensions, windows of 100": (100, words(4096, **letters)),
    }
    model, tokenizer = load_smollm2()
    found["input embeddings of SmolLM2, windows of 100"] = (100, embeddings(model, tokenizer, False))
    if options.hidden:
        found["last hidden states of SmolLM2, windows of 100"] = (100, embeddings(model, tokenizer, True))
    return found


def main() -> int:
    """Compares all, prints a line for each, and with --save writes results/lookup.jsonl."""
    parser = harness.command(__doc__, "python benchmarks/lookup.py --hidden --save")
    parser.add_argument(
        "--text", type=Path, default=harness.ROOT / "runs/models/text/manuals", help="pages (default: %(default)s)"
    )
    parser.add_argument("--pages", type=int, default=800, help="default: %(default)s")
    parser.add_argument("--characters", type=int, default=6000, help="of a page, at most (default: %(default)s)")
    parser.add_argument("--hidden", action="store_true", help="the model's last hidden states too: slow")
    parser.add_argument("--form", default="", metavar="TEXT", help="only those with this text in their name")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    parser.add_argument("--save", action="store_true", help="add the rows to benchmarks/results/lookup.jsonl")
    options = parser.parse_args()
    if not options.text.is_dir():
        parser.error(f"--text: expected a folder of pages, got {options.text}; lab/models/text.py writes them")
    torch.set_num_threads(options.threads)
    pages = Pages(options.text, options.pages, options.characters)
    questions, wanted = [question for question, _ in pages.questions], [page for _, page in pages.questions]
    print(f"{len(pages.texts)} pages, {pages.by_hand} questions by hand, {len(questions) - pages.by_hand} facts")
    for name, (size, scores) in rows(options).items():
        if options.form not in name:
            continue
        parts, owners = windows(pages.texts, size)
        found = ranks(np.asarray(scores(parts, questions)), owners, wanted)
        figures = {
            f"{kind}@{k}": round(100 * float((part < k).mean()), 1)
            for kind, part in (("hand", found[: pages.by_hand]), ("facts", found[pages.by_hand :]))
            for k in (1, 5)
        }
        row = {
            "form": name, "pages": len(pages.texts), "characters": options.characters, "windows": len(parts),
            "questions": [pages.by_hand, len(questions) - pages.by_hand], **figures,
        }  # fmt: skip
        print("  " + name.ljust(62) + "  ".join(f"{key} {value:5.1f}" for key, value in figures.items()), flush=True)
        if options.save:
            with (harness.ROOT / "benchmarks/results/lookup.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
