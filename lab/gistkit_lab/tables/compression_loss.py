"""Tables of More Effective LLM Compressed Tokens: ICAE with uniform positions and a compression loss on Llama 2."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gistkit.train.presets import PRESETS
from gistkit_lab.tables.table import ALL, EVALUATE, TRAIN, Arm, Column, Stage, Table, TrainingLoss

PAPER = "More Effective LLM Compressed Tokens"
MODEL = "Llama 2 7B"
TEXT = {"text": "SlimPajama's passages of more than 4,096 characters, text, JSON lines or Parquet"}
QUESTIONS = {"train": "PwC's training set", "test": "PwC's test set"}
OPEN = (
    "its losses are those of training; here AE, LM and BLEU4 are of 1,000 held-out passages of 510 tokens and 510 that "
    "follow, or 496 and 496 at 31x, and CL is the last held-out loss of training, of as many",
    "what the preset cl-llama2 chooses: gistkit train --preset cl-llama2 --dry-run says it",
)
PRETRAINED = [
    Column("AE loss", "held-out", "ae_loss"),
    Column("LM loss", "held-out", "lm_loss"),
    Column("BLEU4", "held-out", "ae_bleu4"),
]
CHUNK = 510
# 31 divides it, and a context has one chunk.
CHUNK_31X = 496


def _pretrain(settings: Sequence[str], context: int = CHUNK) -> dict[str, Stage]:
    train = ["--preset", "cl-llama2", "--text", "{text}", "--held-out", "1000", "--eval-every", "4300"]
    if context != CHUNK:
        settings = (*settings, "--chunk", str(context))
        train += ["--min-length", str(2 * context), "--max-length", str(2 * context)]
    return {
        "pretrain": Stage(TRAIN, train, settings),
        "held-out": Stage(
            EVALUATE,
            ("--text", "{text}", "--context", str(context), "--continuation", str(context), "--examples", "1000",
             "--baselines", ""),
            start="pretrain",
        ),
    }  # fmt: skip


def _finetuned(settings: Sequence[str]) -> dict[str, Stage]:
    finetune = ("--preset", "cl-llama2", "--losses", "qa", "--window", str(CHUNK), "--questions", "{train}")
    return {
        **_pretrain(settings),
        "finetune": Stage(TRAIN, finetune, start="pretrain"),
        "answers": Stage(
            EVALUATE, ("--questions", "{test}", "--examples", ALL, "--baselines", "", "--keep-examples"),
            start="finetune",
        ),
    }  # fmt: skip


def _published(columns: Sequence[Column], *values: float | None) -> dict[str, float]:
    return {
        column.heading: value for column, value in zip(columns, values, strict=True) if value is not None
    }  # fmt: skip


DOWNSTREAM = [
    TrainingLoss("CL loss", "pretrain", "compression"),
    *PRETRAINED,
    Column("answers' BLEU4", "answers", "qa_bleu4"),
]
# The preset's adapter with another rank on the linear maps; embeddings keep theirs.
WIDE = {**PRESETS["cl-llama2"].compressor["lora"], "r": 256, "lora_alpha": 512}
TABLES: Mapping[str, Table] = {
    "cl-1": Table(
        f"{PAPER}, Table 1", "cl", MODEL, TEXT, PRETRAINED,
        [
            Arm("5x", "5x", _pretrain(("--ratio", "5")), _published(PRETRAINED, 0.01, 2.01, 99.7)),
            Arm("15x", "15x", _pretrain(("--ratio", "15")), _published(PRETRAINED, 0.03, 2.08, 96.9)),
            Arm("31x", "31x", _pretrain(("--ratio", "31"), CHUNK_31X), _published(PRETRAINED, 0.11, 2.18, 84.4)),
        ],
        OPEN,
    ),
    "cl-2": Table(
        f"{PAPER}, Table 2", "cl", MODEL, TEXT | QUESTIONS, DOWNSTREAM,
        [
            Arm("full", "15x", _finetuned(("--ratio", "15")), _published(DOWNSTREAM, 0.17, 0.03, 2.08, 96.9, 26.2)),
            Arm("wo CL", "15x-ae-lm", _finetuned(("--ratio", "15", "--losses", "ae,lm")),
                _published(DOWNSTREAM, None, 0.02, 2.06, 95.8, 26.0)),
            Arm("wo AE", "15x-lm-compression", _finetuned(("--ratio", "15", "--losses", "lm,compression")),
                _published(DOWNSTREAM, 0.15, None, 2.06, None, 26.5)),
            Arm("wo CL + PI", "15x-ae-lm-dpl", _finetuned(("--ratio", "15", "--losses", "ae,lm", "--layout", "dpl")),
                _published(DOWNSTREAM, None, 0.17, 2.10, 52.7, 22.1)),
            Arm("full, rank 256", "15x-256", _finetuned(("--ratio", "15", "--option", f"lora={json.dumps(WIDE)}")),
                _published(DOWNSTREAM, 0.09, 0.01, 2.18, 99.6, 26.4)),
        ],
        (*OPEN, "how it fine-tunes: with the schedule of its pretraining",
         "from where on a context stays uncompressed: behind the 510 tokens of a chunk, in fine-tuning too",
         "alpha at rank 256: twice the rank", "AE is measured of the arm without it too"),
    ),
}  # fmt: skip
