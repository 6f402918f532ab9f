"""Tables of Position IDs Matter (EPL): ICAE and 500xCompressor in three layouts, pretrained and fine-tuned on MRQA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gistkit.train.presets import PRESETS
from gistkit_lab.tables.table import ALL, EVALUATE, TRAIN, Arm, Column, Stage, Table

PAPER = "Position IDs Matter"
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
# The paper's figures of a model's arms, in the order of these columns: Tables 9 and 6, 16 and 18, 17 and 19.
_PRETRAINED = """
1b NoContext 11.56 13.25 0.00
1b ICAE(DPL) 1.40 12.18 31.80
1b ICAE(UPL) - 11.50 72.35
1b ICAE(EPL) 1.04 11.42 95.98
1b 500x(DPL) 1.04 11.22 93.73
1b 500x(UPL) - 10.94 95.86
1b 500x(EPL) 1.01 10.80 98.50
1b FullContext 1.02 9.90 33.49
3b NoContext 9.58 11.02 0.00
3b ICAE(DPL) 1.49 10.33 48.12
3b ICAE(EPL) 1.02 9.07 97.05
3b 500x(DPL) 1.02 9.44 96.86
3b 500x(EPL) 1.00 8.68 99.34
3b FullContext 1.06 8.25 60.16
8b NoContext 7.79 9.02 0.00
8b ICAE(DPL) 1.58 9.22 49.08
8b ICAE(EPL) 1.00 7.61 98.82
8b 500x(DPL) 1.01 7.61 97.68
8b 500x(EPL) 1.00 7.40 99.49
8b FullContext 1.00 7.30 98.00
"""
_INSIDE = """
1b NoContext 9.34 1.92 4.80 0.59 3.04 0.92 14.99 8.71 9.47 3.27 10.88 3.91 8.75 3.22
1b ICAE(DPL) 54.58 36.99 37.57 21.25 57.96 48.85 68.90 56.68 59.61 43.01 59.40 42.01 56.34 41.47
1b ICAE(UPL) 62.22 42.25 44.49 26.16 61.35 51.88 70.33 57.73 63.85 46.89 61.71 43.00 60.66 44.65
1b ICAE(EPL) 59.94 39.39 43.61 24.95 61.50 51.98 69.31 57.11 64.22 46.84 61.21 42.11 59.97 43.73
1b 500x(DPL) 68.26 49.15 43.17 25.31 60.30 51.03 70.33 57.96 66.44 49.45 64.69 46.78 62.20 46.61
1b 500x(UPL) 65.92 46.35 49.33 29.89 63.97 54.98 71.85 59.77 67.04 50.53 64.20 45.66 63.72 47.86
1b 500x(EPL) 67.87 47.54 49.23 29.58 64.53 55.16 72.51 60.39 68.51 51.06 65.55 46.97 64.70 48.45
1b FullContext 58.72 39.20 38.72 16.62 31.82 24.42 49.15 36.27 53.22 39.08 53.47 36.12 47.51 31.95
3b NoContext 15.65 7.09 6.15 1.26 8.68 6.38 42.54 31.83 16.31 9.02 16.43 8.18 17.63 10.63
3b ICAE(DPL) 58.95 41.53 39.70 23.12 60.49 51.64 66.35 53.81 58.68 42.55 58.55 41.94 57.12 42.43
3b ICAE(EPL) 73.82 53.67 58.02 36.51 71.22 62.26 71.41 59.90 72.61 55.77 70.19 51.33 69.55 53.24
3b 500x(DPL) 68.28 50.15 50.98 32.15 68.10 59.54 74.16 62.11 70.63 53.57 67.58 50.19 66.62 51.28
3b 500x(EPL) 77.74 58.38 61.19 41.62 71.62 62.66 74.32 62.67 75.06 58.52 72.03 54.07 71.99 56.32
3b FullContext 74.07 55.43 48.99 24.62 63.92 54.05 67.69 52.31 63.73 48.33 64.32 46.54 63.79 46.88
8b NoContext 21.84 11.74 9.52 3.28 31.58 26.37 59.66 45.49 20.34 12.71 29.62 17.94 28.76 19.59
8b ICAE(DPL) 56.56 38.87 36.99 20.06 64.54 55.58 71.35 58.92 57.04 41.20 58.04 41.19 57.42 42.64
8b ICAE(EPL) 78.44 58.90 61.69 40.17 73.92 65.05 80.05 67.65 74.93 58.33 72.43 54.14 73.58 57.37
8b 500x(DPL) 80.56 62.11 60.31 40.65 74.00 65.39 79.60 67.51 76.18 59.62 74.17 56.48 74.14 58.63
8b 500x(EPL) 80.60 61.37 64.43 44.35 74.75 66.04 79.39 67.74 77.17 60.53 74.71 56.16 75.18 59.36
8b FullContext 80.53 61.97 60.24 40.05 72.65 63.28 76.54 61.99 73.07 57.19 72.25 54.01 72.55 56.42
"""
_OUTSIDE = """
1b NoContext 10.63 4.52 17.72 10.18 3.93 0.53 6.58 0.30 11.74 3.70 20.50 9.78 11.85 4.83
1b ICAE(DPL) 38.39 26.99 37.13 27.28 27.90 18.32 21.67 4.30 76.98 64.45 37.62 22.55 39.95 27.32
1b ICAE(UPL) 41.82 29.32 37.77 27.41 33.73 22.45 26.90 4.90 73.61 60.62 48.19 29.94 43.67 29.11
1b ICAE(EPL) 42.66 29.19 37.03 26.95 32.50 21.39 26.87 5.34 76.90 64.31 47.25 29.81 43.87 29.50
1b 500x(DPL) 44.22 31.38 40.47 29.34 32.20 21.19 27.67 5.93 83.03 71.98 47.00 28.88 45.76 31.45
1b 500x(UPL) 45.71 32.38 40.19 28.81 37.66 26.12 29.02 6.08 78.22 64.55 50.19 31.87 46.83 31.64
1b 500x(EPL) 46.11 31.91 40.94 29.41 39.07 26.32 31.89 7.27 80.39 67.71 49.80 31.14 48.03 32.29
1b FullContext 45.72 31.45 40.74 30.27 39.20 27.85 29.57 7.72 74.85 64.01 53.31 34.60 47.23 32.65
3b NoContext 24.84 17.22 21.17 13.37 5.87 1.93 8.87 1.19 20.60 13.30 37.34 22.82 19.78 11.64
3b ICAE(DPL) 41.75 31.65 38.77 29.81 28.40 18.99 21.58 3.56 76.56 64.82 47.85 30.41 42.49 29.87
3b ICAE(EPL) 50.83 36.70 54.10 43.38 45.66 33.24 38.78 9.35 82.71 71.64 58.13 36.93 55.03 38.54
3b 500x(DPL) 50.20 37.63 48.64 38.32 38.77 26.85 31.86 8.16 83.67 73.71 55.08 34.80 51.37 36.58
3b 500x(EPL) 53.15 39.03 57.00 45.84 50.35 36.51 42.45 10.83 85.20 75.20 58.09 35.53 57.71 40.49
3b FullContext 59.20 42.82 50.30 35.53 39.09 27.51 36.72 9.20 81.73 73.27 67.50 43.65 55.76 38.66
8b NoContext 43.16 33.64 25.60 18.43 6.15 2.33 7.98 1.63 33.89 25.27 50.27 32.67 27.84 19.00
8b ICAE(DPL) 47.42 33.98 35.98 27.41 22.54 13.99 21.48 4.60 77.58 65.98 53.55 34.13 43.09 30.01
8b ICAE(EPL) 53.21 37.90 58.83 47.50 47.26 33.44 40.65 9.64 84.35 73.91 58.39 36.13 57.12 39.76
8b 500x(DPL) 51.50 37.70 59.85 47.64 47.95 34.44 41.17 10.39 85.86 75.85 58.22 35.93 57.42 40.32
8b 500x(EPL) 54.80 39.43 62.46 50.70 51.33 37.38 43.40 11.13 85.77 75.10 58.11 35.00 59.31 41.45
8b FullContext 59.80 42.95 60.64 47.64 26.91 16.86 42.80 10.53 85.11 74.08 71.68 47.57 57.83 39.94
"""


def _figures(model: str, arm: str) -> Mapping[str, float]:
    """The paper's figures of an arm by heading; none of an arm that it does not have."""
    found: dict[str, float] = {}
    for block, columns in ((_PRETRAINED, PRETRAINED), (_INSIDE, INSIDE), (_OUTSIDE, OUTSIDE)):
        for line in block.strip().splitlines():
            at, title, *values = line.split()
            if (at, title) == (model, arm):
                pairs = zip(columns, values, strict=True)
                found |= {column.heading: float(value) for column, value in pairs if value != "-"}
    return found


def _compressor(model: str, method: str, layout: str) -> Arm:
    settings = ("--method", METHODS[method], "--layout", layout)
    return _arm(model, f"{method}({layout.upper()})", f"{METHODS[method]}-{layout}", settings)


def _baseline(model: str, title: str) -> Arm:
    return _arm(model, title, title.lower(), ("--baseline", BASELINES[title]))


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
    arms = [_compressor(model, method, layout) for method in METHODS for layout in layouts]
    if baselines:
        arms = [_baseline(model, "NoContext"), *arms, _baseline(model, "FullContext")]
    return Table(f"{PAPER}, Table {number}", "epl", MODELS[model], DATA, columns, arms, OPEN)


# Table 10, of which Table 5 has some: VoCo tokens an image, layout, SQA, MMB and VQAv2.
_IMAGES = """
2 dpl 66.1 61.5 73.7
2 epl 67.6 61.4 69.5
128 dpl 64.9 59.9 76.9
128 epl 66.5 64.6 78.4
"""
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
    arms = []
    for line in _IMAGES.strip().splitlines():
        count, layout, *figures = line.split()
        if int(count) not in tokens:
            continue
        settings = ("--layout", layout, "--option", f"memory_tokens={count}")
        words = ("--preset", "voco-llama", "--questions", "{conversations}", "--images", "{images}")
        answers = {
            name: Stage(
                EVALUATE, ("--questions", f"{{{name}}}", "--images", "{images}", "--examples", ALL), start="train"
            )
            for name in ("sqa", "mmb", "vqav2")
        }
        published = {column.heading: float(figure) for column, figure in zip(ABOUT_IMAGES, figures, strict=True)}
        arms.append(
            Arm(
                f"{layout.upper()} {count}",
                f"voco-{count}-{layout}",
                {"train": Stage(TRAIN, words, settings), **answers},
                published,
            )
        )
    model = "LLaVA 1.5's parts: Vicuna 7B, CLIP at 336 pixels and a pretrained projector"
    return Table(f"{PAPER}, Table {number}", "epl", model, _IMAGE_DATA, ABOUT_IMAGES, arms, _IMAGE_OPEN)


def _tables() -> Iterator[tuple[str, Table]]:
    means = [*PRETRAINED[1:], *OUTSIDE[-2:]]
    yield "epl-4", _table(4, "1b", [*PRETRAINED[1:], *OUTSIDE], ("dpl", "epl"))
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
