"""Tables of Dodo: the language model that reads on, questions about SQuAD's passages, and summaries."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gistkit_lab.tables.table import ALL, EVALUATE, TRAIN, Arm, Column, Stage, Table

PAPER = "Dodo"
PILE = {"text": "the Pile, split by hand: files whose names tell train, validation and test"}
CHAT = ("what the presets dodo-continue and dodo-finetune choose: gistkit train --preset NAME --dry-run says it",)
# Dodo's LoRA, for models that have one decoder: a rank alone would adapt all linear maps of theirs.
LORA = {"r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "k_proj", "v_proj"]}
_OF_DODO = ("--method", "dodo", "--ratio", "10")
_OF_MEANS = ("--method", "avgpool", "--option", f"lora={json.dumps(LORA)}")
# Its scorer is the one that the others begin with.
_AUTOENCODER = Stage(TRAIN, ("--preset", "dodo-ae", "--text", "{text}"), _OF_DODO, folder="10x")


def _reading(method: str, states: int) -> dict[str, Stage]:
    """Half of the states stand for ten times as many tokens, the others for the last ones."""
    recent, past, segment = states // 2, states * 5, ("--segment", "8")
    measure = (
        "--context",
        str(past + recent),
        "--continuation",
        "32",
        "--tau",
        str(recent),
        *segment,
        "--baselines",
        "recent",
        "--examples",
        "1000",
        "--split",
        "test",
    )
    total = str(past + recent + 32)
    words = (
        "--preset",
        "dodo-lm",
        "--tau",
        str(recent),
        *segment,
        "--min-length",
        total,
        "--max-length",
        total,
        "--text",
        "{text}",
    )
    if method == "dodo":
        stages = {"autoencoder": _AUTOENCODER, "train": Stage(TRAIN, words, start="autoencoder")}
    else:
        stages = {"train": Stage(TRAIN, words, (*_OF_MEANS, "--ratio", "10", "--option", "soft_prompt=true"))}
    return {
        **stages,
        "pile": Stage(EVALUATE, ("--text", "{text}", *measure), start="train"),
        "wikitext": Stage(EVALUATE, ("--text", "{wikitext}", "--excluded-words", "<unk>", *measure), start="train"),
    }  # fmt: skip


READING = [
    Column("WikiText subword", "wikitext", "lm_perplexity"),
    Column("WikiText word", "wikitext", "lm_word_perplexity"),
    Column("Pile", "pile", "lm_perplexity"),
]
# States: those of Full, Compressive and Dodo, in the order of these columns.
_READ_ON = {
    256: ((6.39, 10.65, 4.94), (6.88, 11.62, 4.82), (6.30, 10.55, 4.01)),
    128: ((6.87, 11.69, 5.35), (7.09, 12.18, 4.93), (6.58, 11.06, 4.49)),
    64: ((7.95, 14.08, 5.80), (7.64, 13.39, 5.65), (6.91, 11.78, 5.01)),
}


def _arms() -> list[Arm]:
    headings = [column.heading for column in READING]
    arms = []
    for states, figures in _READ_ON.items():
        for title, method, row, values in zip(
            ("Full", "Compressive", "Dodo"), ("dodo", "avgpool", "dodo"), ("last", "", ""), figures, strict=True
        ):
            # The plain model reads as many last tokens as Dodo keeps states, in the same evaluation.
            stages, published = _reading(method, states), dict(zip(headings, values, strict=True))
            arms.append(Arm(f"{title} {states}", f"{method}-{states}", stages, published, row))
    return arms


def _answering(ratio: int) -> dict[str, Stage]:
    return {
        "train": Stage(
            TRAIN, ("--preset", "dodo-continue", "--text", "{text}"), ("--method", "dodo", "--ratio", str(ratio))
        ),
        "answers": Stage(
            EVALUATE,
            ("--questions", "{squad}", "--examples", ALL, "--prompt", "dodo", "--baselines", "none,full,summary"),
            start="train",
        ),
    }


ACCURACY = [Column("accuracy", "answers", "qa_contains_answer")]
ROUGE = [
    Column("R1", "summaries", "qa_rouge1_f1"),
    Column("R2", "summaries", "qa_rouge2_f1"),
    Column("RL", "summaries", "qa_rougel_f1"),
]
_FINETUNE = ("--preset", "dodo-finetune", "--questions", "{train}")
_SUMMARIES = {
    "train": Stage(TRAIN, _FINETUNE, _OF_DODO),
    "summaries": Stage(
        EVALUATE,
        ("--questions", "{test}", "--examples", ALL, "--prompt", "dodo", "--max-new-tokens", "128", "--baselines",
         "full"),
        start="train",
    ),
}  # fmt: skip
# The mean of one state is the state: at 1x AvgPool is the model with the whole context.
_FULL = {**_SUMMARIES, "train": Stage(TRAIN, _FINETUNE, (*_OF_MEANS, "--ratio", "1"))}
TABLES: Mapping[str, Table] = {
    "dodo-1": Table(
        f"{PAPER}, Table 1", "dodo", "Llama 2 7B",
        PILE | {"wikitext": "wiki.test.tokens of WikiText-103, or the folder of its .tokens files: .raw has no <unk>"},
        READING, _arms(),
        ("how many tokens are predicted from one history: 32, of 1,000 passages of each test split",
         "length of a segment: 8 tokens, with which Dodo's mean number of states is as it says, within 2%; Compressive "
         "has up to 9 recent tokens more, those of windows that are not whole",
         "what besides the scorer begins as the autoencoder's: all that it trained, here the same model at 10x",
         "what LoRA adapts in Compressive: the query, key and value maps, as in Dodo; it trains a soft prompt too",
         "what the preset dodo-lm chooses: gistkit train --preset dodo-lm --dry-run says it",
         "Full reads its last tokens: as many as Dodo's mean number of states"),
    ),
    "dodo-3": Table(
        f"{PAPER}, Table 3", "dodo-chat", "Llama 2 7B chat", PILE | {"squad": "SQuAD's validation set"}, ACCURACY,
        [
            Arm("NoDoc", "10x", _answering(10), {"accuracy": 1.4}, "NoContext"),
            Arm("LMSumm 10x", "10x", _answering(10), {"accuracy": 30.9}, "Summary"),
            Arm("Full", "10x", _answering(10), {"accuracy": 64.5}, "FullContext"),
            Arm("Dodo 5x", "5x", _answering(5), {"accuracy": 59.1}, "Dodo"),
            Arm("Dodo 10x", "10x", _answering(10), {"accuracy": 49.8}, "Dodo"),
        ],
        CHAT,
    ),
    "dodo-4": Table(
        f"{PAPER}, Table 4", "dodo-chat", "Llama 2 7B chat",
        {"train": "CNN/DailyMail 3.0.0, training set", "test": "its test set"}, ROUGE,
        [
            Arm("Full (zero-shot)", "summaries", _SUMMARIES, {"R1": 32.5, "R2": 9.7, "RL": 28.2}, "FullContext"),
            Arm("Full (fine-tuning)", "summaries-full", _FULL, {"R1": 37.7, "R2": 15.6, "RL": 35.3}, "AvgPool"),
            Arm("Dodo 10x", "summaries", _SUMMARIES, {"R1": 39.9, "R2": 14.6, "RL": 37.0}, "Dodo"),
        ],
        (*CHAT, "what trains of Full (fine-tuning): LoRA as Dodo's, on the model that reads the whole document",
         "how long a summary may be: 128 tokens"),
    ),
}  # fmt: skip
