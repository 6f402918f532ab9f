"""Autoencoding of Dodo: Figure 4, by the length of texts, and Table 6, in eight languages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gistkit_lab.tables.dodo import PAPER, PILE
from gistkit_lab.tables.table import EVALUATE, LENGTHS, TRAIN, Arm, Column, Stage, Table

MODEL = "LLaMA 7B"
OPEN = ("what the preset dodo-ae chooses: gistkit train --preset dodo-ae --dry-run says it",)
DOCUMENTS = ("--documents", "--context", "512", "--examples", "100", "--tasks", "ae", "--baselines", "")
# Of its memory slots ICAE appends all 128 to a text of any length up to 512.
SLOTS = ("--method", "icae", "--chunk", "512", "--ratio", "4")
TOKENS = (100, 200, 300, 400, 500)
# BLEU and perplexity.
_LANGUAGES = {
    "English": (99.1, 1.004), "Bulgarian": (97.7, 1.040), "German": (98.8, 1.017), "French": (99.0, 1.011),
    "Italian": (98.3, 1.014), "Dutch": (97.9, 1.021), "Polish": (98.3, 1.032), "Russian": (98.9, 1.032),
}  # fmt: skip


def _train(settings: Sequence[str]) -> Stage:
    return Stage(TRAIN, ("--preset", "dodo-ae", "--text", "{text}"), settings)


def _by_length(title: str, folder: str, settings: Sequence[str]) -> Arm:
    stages = {"train": _train(settings)}
    for length in TOKENS:
        words = ["--text", "{text}", "--context", str(length), "--continuation", "1", "--examples", "200"]
        words += ["--tasks", "ae", "--baselines", ""]
        stages[f"length-{length}"] = Stage(EVALUATE, words, start="train")
    return Arm(title, folder, stages)


def _language(name: str, figures: Sequence[float]) -> Arm:
    source = "ae-10x/train"
    measure = Stage(EVALUATE, ("--text", f"{{{name.lower()}}}", *DOCUMENTS), start=source)
    stages = {source: _train(("--method", "dodo", "--ratio", "10")), "documents": measure}
    published = dict(zip((column.heading for column in COLUMNS), figures, strict=True))
    return Arm(name, f"ae-10x-{name.lower()}", stages, published)


COLUMNS = [Column("BLEU", "documents", "ae_bleu4"), Column("Perplexity", "documents", "ae_perplexity")]
TABLES: Mapping[str, Table] = {
    "dodo-figure-4": Table(
        f"{PAPER}, Figure 4: BLEU by the length of texts", "dodo-ae", MODEL, PILE,
        [Column(str(length), f"length-{length}", "ae_bleu4") for length in TOKENS],
        [
            _by_length("Dodo 20x", "ae-20x", ("--method", "dodo", "--ratio", "20")),
            _by_length("Dodo 10x", "ae-10x", ("--method", "dodo", "--ratio", "10")),
            _by_length("ICAE with 128 slots", "ae-icae", SLOTS),
        ],
        (
            *OPEN,
            "its figures are in the picture alone: 98 in all at 20x, and of ICAE nearly 100 below 300 tokens",
            "its ICAE's figures are from that paper; here it trains as Dodo does",
            "lengths: 100 to 500 tokens, of 200 held-out passages each, all of that length where it has 5 more or less",
        ),
        picture=LENGTHS,
    ),
    "dodo-6": Table(
        f"{PAPER}, Table 6", "dodo-ae", MODEL,
        PILE | {name.lower(): f"100 documents in {name} of RedPajama, as JSON lines or Parquet" for name in _LANGUAGES},
        COLUMNS,
        [_language(name, figures) for name, figures in _LANGUAGES.items()],
        OPEN,
    ),
}  # fmt: skip
