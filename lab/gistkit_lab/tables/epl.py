"""Tables of Position IDs Matter (EPL): ICAE and 500xCompressor in three layouts, pretrained and fine-tuned on MRQA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gistkit.train.presets import PRESETS
from gistkit_lab.tables.files import published
from gistkit_lab.tables.table import ALL, EVALUATE, TRAIN, Arm, Column, Stage, Table, by_heading

PAPER = "Position IDs Matter"
FIGURES = published("epl")
DATA = {
    "text": "SlimPajama-6B, a file or folder of text, JSON lines or Parquet",
    "train": "MRQA's six training sets, files or a folder",
    "test": "MRQA's twelve validation sets, in and out of domain, files or a folder",
}
OPEN = (
    "lengths of the 1,000 held-out passages: half of the longest in training, 1,020 tokens, for 8B 2,040, and as many "
    "that follow",
    "what the presets epl-pretrain and epl-finetune choose: gistkit train --preset NAME --dry-run says it",
    "on what it trains the task tokens of NoContext and FullContext: as the others, on the text and then on MRQA",
)
MODELS = {"1b": "Llama 3.2 1B", "3b": "Llama 3.2 3B", "8b": "Llama 3.1 8B"}
METHODS = {"ICAE": "icae", "500x": "x500"}
BASELINES = {"NoContext": "none", "FullContext": "full"}
LAYOUTS = ("dpl", "upl", "epl")


def _scores(sets: Mapping[str, str]) -> list[Column]:
    return [
        Column(f"{heading} {score}", "answers", metric, of)
        for heading, of in sets.items()
        for score, metric in (("F1", "qa_rouge1_f1"), ("EM", "qa_exact_match"))
    ]


PRETRAINED = [
    Column("PPL(AE)", "reconstruction", "ae_perplexity"),
    Column("LM PPL", "reconstruction", "lm_perplexity"),
    Column("AE BLEU", "reconstruction", "ae_bleu4"),
]
INSIDE = _scores(
    {
        "SQuAD": "squad", "NewsQA": "newsqa", "TriQA": "triviaqa", "SearchQA": "searchqa", "HQA": "hotpotqa",
        "NQ": "naturalquestions", "In-domain": "in-domain",
    }
)  # fmt: skip
OUTSIDE = _scores(
    {
        "BioASQ": "bioasq", "DROP": "drop", "DuoRC": "duorc", "RACE": "race", "RE": "relationextraction",
        "TQA": "textbookqa", "Out-of-domain": "out-of-domain",
    }
)  # fmt: skip


def _figures(model: str, arm: str) -> Mapping[str, float]:
    """The paper's figures of an arm by heading; none of an arm that it does not have."""
    found: dict[str, float] = {}
    for rows, columns in (("pretrained", PRETRAINED), ("inside", INSIDE), ("outside", OUTSIDE)):
        for at, title, *values in FIGURES[rows]:
            if (at, title) == (model, arm):
                found |= by_heading(columns, values)
    return found


def _arm(model: str, title: str, folder: str, settings: Sequence[str]) -> Arm:
    pretrain = "epl-pretrain-8b" if model == "8b" else "epl-pretrain"
    half = str(PRESETS[pretrain].recipe.max_length // 2)
    return Arm(
        title,
        f"{model}-{folder}",
        {
            "pretrain": Stage(TRAIN, ("--preset", pretrain, "--text", "{text}"), settings),
            "reconstruction": Stage(
                EVALUATE,
                ("--text", "{text}", "--context", half, "--continuation", half, "--examples", "1000",
                 "--baselines", ""),
                start="pretrain",
            ),
            "finetune": Stage(TRAIN, ("--preset", "epl-finetune", "--questions", "{train}"), start="pretrain"),
            "answers": Stage(
                EVALUATE, ("--questions", "{test}", "--examples", ALL, "--baselines", ""), start="finetune"
            ),
        },
        _figures(model, title),
    )  # fmt: skip


def _table(
    number: int, model: str, columns: Sequence[Column], layouts: Sequence[str], baselines: bool = False
) -> Table:
    arms = [
        _arm(model, f"{title}({layout.upper()})", f"{method}-{layout}", ("--method", method, "--layout", layout))
        for title, method in METHODS.items()
        for layout in layouts
    ]
    if baselines:
        none, full = (_arm(model, title, title.lower(), ("--baseline", each)) for title, each in BASELINES.items())
        arms = [none, *arms, full]
    return Table(f"{PAPER}, Table {number}", "epl", MODELS[model], DATA, columns, arms, OPEN)


ABOUT_IMAGES = [
    Column("SQA", "sqa", "qa_choice"),
    Column("MMB", "mmb", "qa_choice"),
    Column("VQAv2", "vqav2", "qa_vqa"),
]
_IMAGE_DATA = {
    "conversations": "LLaVA's 665k conversations",
    "images": "the folder of all images, in which conversations, ScienceQA (test/ID/image.png) and VQAv2 name theirs",
    "sqa": "ScienceQA's problems.json, or JSON lines of image, question and answer, the letter of an option",
    "mmb": "MMBench's .tsv file, which has its images, or likewise",
    "vqav2": "VQAv2's: JSON lines of image, question and answers, those of ten people",
}
_IMAGE_OPEN = (
    "what the preset voco-llama chooses: gistkit train --preset voco-llama --dry-run says it",
    "how SQA and MMB are asked: for the letter of an option, which an answer names by itself, before a mark or after "
    "'the answer is'; SQA is its test questions with an image, and MMB right in every order of the options (circular)",
    "rows that are of VoCo-LLaMA's own paper are left out",
)


def _image_table(number: int, tokens: Sequence[int]) -> Table:
    words = ("--preset", "voco-llama", "--questions", "{conversations}", "--images", "{images}")
    arms = []
    for count, layout, *figures in FIGURES["images"]:
        if count in tokens:
            settings = ("--layout", layout, "--option", f"memory_tokens={count}")
            stages = {"train": Stage(TRAIN, words, settings)}
            for name in ("sqa", "mmb", "vqav2"):
                asked = ("--questions", f"{{{name}}}", "--images", "{images}", "--examples", ALL)
                stages[name] = Stage(EVALUATE, asked, start="train")
            theirs = by_heading(ABOUT_IMAGES, figures)
            arms.append(Arm(f"{layout.upper()} {count}", f"voco-{count}-{layout}", stages, theirs))
    model = "LLaVA 1.5's parts: Vicuna 7B, CLIP at 336 pixels and a pretrained projector"
    return Table(f"{PAPER}, Table {number}", "epl", model, _IMAGE_DATA, ABOUT_IMAGES, arms, _IMAGE_OPEN)


def _with_sac(table: Table) -> Table:
    """The table with a row of SAC, which the paper does not have."""
    sac = _arm("1b", "SAC", "sac", ("--method", "sac", "--losses", "lm"))
    choice = "SAC (2510.08907, by the same authors), which the paper does not have: as the others, without autoencoding"
    return replace(table, arms=[*table.arms, sac], open=[*table.open, choice])


def _tables() -> Iterator[tuple[str, Table]]:
    means = [*PRETRAINED[1:], *OUTSIDE[-2:]]
    yield "epl-4", _with_sac(_table(4, "1b", [*PRETRAINED[1:], *OUTSIDE], ("dpl", "epl")))
    yield "epl-5", _image_table(5, (128,))
    yield "epl-6", _table(6, "1b", means, LAYOUTS)
    for model in ("3b", "8b"):
        yield f"epl-7-{model}", _table(7, model, means, ("dpl", "epl"))
    yield "epl-10", _image_table(10, (2, 128))
    for number, columns in ((9, PRETRAINED), (16, INSIDE), (17, OUTSIDE)):
        for model in MODELS:
            yield f"epl-{number}-{model}", _table(number, model, columns, ("dpl", "epl"), True)
    yield "epl-18", _table(18, "1b", INSIDE, LAYOUTS)
    yield "epl-19", _table(19, "1b", OUTSIDE, LAYOUTS)


TABLES: Mapping[str, Table] = dict(_tables())
