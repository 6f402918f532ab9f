"""Tables of Long Context In-Context Compression by Getting to the Gist of Gisting: six sets of questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gistkit_lab.tables.table import ALL, EVALUATE, TRAIN, Arm, Column, Stage, Table, WrongAnswers

PAPER = "Long Context In-Context Compression by Getting to the Gist of Gisting"
SETS = ("alpaca", "squad", "drop", "race", "narrativeqa", "fairytaleqa")
# The longest contexts of the presets gistpool-..., in tokens, which decide how many gist embeddings there are.
LONGEST = 8192
OPEN = (
    "what the presets gistpool-... choose: gistkit train --preset NAME --dry-run says it",
    "wrong answers need a judge, the paper's being Gemini 1.5 Flash: --more 'answers=--judge URL --judge-model NAME'",
)
MASK = (
    "which mask GistPool and the others with a pool mask have: 5 windows, BOS, and the gists before, which the context "
    "does not see. Section 5.3 does not mention the gists before. But of Table 10, as far as its columns are known, "
    "the row with GistPool's figures at 5x has all choices but the context's; gistpool-10 has the mask without them",
)
COLUMNS = [Column("loss", "answers", "qa_loss"), WrongAnswers("wrong", "answers", "qa_judge")]
# Appendix B and Table 5: ratio; losses; wrong answers in percent, in the order of SETS.
_FIGURES = """
Full context; 1; 1.037 0.270 0.514 0.083 1.126 0.751; 38.0 5.6 19.8 8.8 10.4 28.2
No context; 1; 1.339 2.139 1.546 0.139 2.975 2.563; 93.6 73.2 68.4 36.6 83.2 73.6
AvgPool; 2; 1.080 0.352 0.741 0.105 1.293 1.119; 37.9 6.8 29.8 11.4 8.6 37.2
AvgPool; 5; 1.092 0.495 0.947 0.120 1.406 1.523; 40.0 10.4 35.6 14.6 16.0 47.6
AvgPool; 10; 1.104 0.702 1.105 0.117 1.609 2.094; 43.4 17.6 42.6 18.0 25.8 58.0
AvgPool; 25; - - - - - 2.604; - - - - - 69.4
AvgPool; 50; - - - - - 2.730; - - - - - 73.2
Gist; 1; 1.041 0.512 1.077 0.127 1.450 2.668; 33.4 15.4 58.0 35.6 33.0 73.6
Gist; 2; 1.045 0.619 1.165 0.132 1.487 2.443; 35.4 17.2 59.0 35.8 35.8 71.6
Gist; 5; 1.050 0.783 1.164 0.129 1.625 2.406; 36.6 24.6 54.4 30.0 39.4 73.4
Gist; 10; 1.053 0.925 1.210 0.128 1.737 2.482; 36.8 28.0 55.6 30.4 44.8 70.8
Gist; 25; - - - - - 2.441; - - - - - 70.8
Gist; 50; - - - - - 2.448; - - - - - 72.6
OffsetGist; 1; 1.042 0.501 1.089 0.125 1.395 2.508; 35.8 15.6 57.2 33.3 27.4 75.4
OffsetGist; 2; 1.043 0.619 1.102 0.128 1.486 2.491; 38.2 15.6 56.6 32.6 31.4 74.4
OffsetGist; 5; 1.049 0.739 1.293 0.126 1.699 2.448; 36.8 25.2 62.6 31.6 39.6 70.0
OffsetGist; 10; 1.052 0.890 1.197 0.128 1.716 2.435; 37.8 27.4 53.0 31.6 38.0 70.0
SepGist; 1; 1.036 0.505 0.815 0.109 1.468 1.874; 34.6 16.8 43.2 23.7 33.6 64.0
SepGist; 2; 1.041 0.592 0.951 0.108 1.537 1.943; 34.2 18.0 50.2 22.6 33.8 66.0
SepGist; 5; 1.045 0.732 1.022 0.114 1.619 2.012; 36.2 21.8 47.0 18.2 38.8 68.4
SepGist; 10; 1.052 0.764 1.069 0.110 1.834 2.124; 39.4 24.4 45.8 24.8 46.0 66.8
Gist with pool mask; 1; 1.035 0.306 0.653 0.105 1.230 2.617; 32.6 7.6 34.4 21.4 20.0 76.6
Gist with pool mask; 2; 1.039 0.337 0.809 0.107 1.251 1.895; 35.8 7.4 42.0 20.2 21.4 65.0
Gist with pool mask; 5; 1.044 0.433 1.030 0.107 1.350 2.163; 38.5 11.4 43.4 19.0 22.2 65.2
Gist with pool mask; 10; 1.055 0.630 1.167 0.105 1.477 2.433; 37.2 17.8 49.2 21.4 24.6 68.4
SepGist with pool mask; 1; 1.036 0.355 0.599 0.089 1.188 1.186; 35.0 6.4 28.2 16.6 18.2 57.8
SepGist with pool mask; 2; 1.041 0.365 0.667 0.091 1.205 1.021; 34.8 6.0 33.8 13.6 20.2 53.0
SepGist with pool mask; 5; 1.044 0.425 0.758 0.090 1.265 1.172; 37.2 8.0 29.0 11.8 19.0 51.0
SepGist with pool mask; 10; 1.049 0.547 0.910 0.101 1.372 1.481; 35.4 15.4 35.4 13.2 20.2 55.4
OffsetGist with pool mask; 1; 1.038 0.312 0.687 0.105 1.242 2.771; 33.8 7.6 37.6 21.0 21.8 79.2
OffsetGist with pool mask; 2; 1.040 0.332 0.778 0.102 1.272 2.355; 33.8 7.4 39.1 22.0 22.6 69.5
OffsetGist with pool mask; 5; 1.046 0.453 0.970 0.108 1.389 2.338; 36.6 11.8 43.2 20.6 24.2 70.2
OffsetGist with pool mask; 10; 1.059 0.670 1.171 0.112 1.505 2.426; 37.6 19.4 48.8 21.8 26.8 71.8
OffsetSepGist; 1; 1.036 0.493 0.796 0.101 1.411 1.906; 35.8 13.4 39.0 21.8 28.8 61.0
OffsetSepGist; 2; 1.038 0.547 0.864 0.100 1.422 1.865; 36.2 18.0 40.9 20.0 28.4 61.6
OffsetSepGist; 5; 1.045 0.636 0.904 0.104 1.544 1.974; 39.0 16.8 39.6 19.2 30.8 64.0
OffsetSepGist; 10; 1.049 0.786 0.956 0.108 2.172 2.219; 40.2 22.0 46.0 23.8 59.6 62.4
GistPool; 1; 1.035 0.340 0.617 0.091 1.189 1.153; 33.8 7.0 30.2 14.5 18.0 59.6
GistPool; 2; 1.038 0.357 0.656 0.092 1.207 1.020; 33.5 6.0 30.3 15.2 19.8 52.8
GistPool; 5; 1.043 0.408 0.770 0.091 1.267 1.223; 36.0 9.6 29.4 13.8 18.6 53.2
GistPool; 10; 1.050 0.545 0.897 0.102 1.376 1.592; 40.3 13.6 34.2 12.2 16.4 58.2
GistPool; 25; - - - - - 1.959; - - - - - 55.4
GistPool; 50; - - - - - 2.178; - - - - - 62.8
GistPool, one gist embedding; 2; - 0.364 0.657 0.083 1.207 0.971; - 6.2 25.0 9.8 11.8 43.4
GistPool, one gist embedding; 5; - 0.396 0.726 0.094 1.263 1.185; - 9.8 32.0 12.8 16.0 43.2
GistPool, one gist embedding; 10; - 0.575 0.859 0.104 1.364 1.483; - 13.2 32.6 14.4 17.8 48.2
GistPool, one gist embedding, separate positions; 2; - 0.379 0.720 0.094 1.255 1.270; - 5.2 27.8 13.0 11.0 47.4
GistPool, one gist embedding, separate positions; 5; - 0.491 0.858 0.099 1.340 1.849; - 9.8 32.6 13.8 13.8 57.0
GistPool, one gist embedding, separate positions; 10; - 0.640 0.912 0.099 1.472 2.089; - 12.6 35.8 15.2 21.8 65.0
"""
# Table 2: Gemma 2 9B on FairytaleQA, RACE and DROP.
_LARGE_SETS = ("fairytaleqa", "race", "drop")
_LARGE = """
Full context; 1; 0.613 0.063 0.423; 18.2 4.4 12.2
Gist; 2; 2.448 0.130 1.161; 70.6 33.5 60.6
AvgPool; 2; 1.118 0.105 0.730; 36.8 12.6 29.6
GistPool; 2; 0.758 0.063 0.462; 40.2 10.8 16.6
Gist; 10; 2.466 0.125 1.204; 72.8 29.0 57.2
AvgPool; 10; 2.090 0.115 1.080; 57.6 18.0 41.6
GistPool; 10; 1.037 0.069 0.645; 38.2 8.2 22.4
No context; 1; 2.415 0.104 1.599; 71.8 24.8 65.6
"""
ONE = "GistPool, one gist embedding"
_METHODS: Mapping[str, Sequence[str]] = {
    "Full context": ("avgpool",),
    "No context": ("no_context",),
    "AvgPool": ("avgpool",),
    "Gist": ("gist",),
    "OffsetGist": ("gist", "offset=true"),
    "SepGist": ("gist", "separate=true"),
    "OffsetSepGist": ("gist", "offset=true", "separate=true"),
    "Gist with pool mask": ("gistpool", "offset=false", "separate=false"),
    "OffsetGist with pool mask": ("gistpool", "separate=false"),
    "SepGist with pool mask": ("gistpool", "offset=false"),
    "GistPool": ("gistpool",),
    ONE: ("gistpool",),
    f"{ONE}, separate positions": ("gistpool", "separate_positions=true"),
}
# Tables 6 and 7, trained at 5x on the first and tested on the others; rows as columns there. Losses; wrong answers.
MATRIX = ("drop", "fairytaleqa", "narrativeqa", "race", "squad")
_CROSS = {
    ONE: """
        drop; 0.726 3.558 3.102 0.300 0.974; 32.0 64.2 26.2 37.6 18.4
        fairytaleqa; 1.901 1.185 1.849 1.302 1.620; 77.6 43.2 29.4 49.8 50.0
        narrativeqa; 1.838 2.049 1.263 0.374 0.871; 63.4 53.2 16.0 30.6 16.4
        race; 1.900 3.463 2.671 0.094 2.142; 73.6 88.2 57.6 12.8 57.8
        squad; 2.235 3.028 2.886 0.339 0.396; 68.8 75.6 19.8 35.4 9.8
    """,
    "AvgPool": """
        drop; 0.947 4.877 3.207 0.679 1.273; 35.6 79.0 34.4 37.4 25.6
        fairytaleqa; 7.190 1.523 5.541 8.784 9.686; 81.6 47.6 56.6 36.3 83.8
        narrativeqa; 1.951 2.490 1.406 0.815 1.445; 69.8 63.0 16.0 37.0 30.0
        race; 3.806 9.317 7.758 0.120 7.905; 74.7 87.6 71.4 14.6 74.2
        squad; 2.884 4.225 3.434 0.580 0.495; 72.3 81.0 28.0 43.1 10.4
    """,
}
# Tables 8 and 9, trained on the three other sets and on the same one: losses and wrong answers at 2x, 5x and 10x.
MIXED = ("drop", "narrativeqa", "race", "squad")
_MIXTURES = {
    ONE: """
        drop; 1.573 1.581 1.641; 59.4 63.8 67.4; 0.657 0.726 0.859; 25.0 32.0 32.6
        narrativeqa; 2.069 2.012 2.039; 12.2 19.2 24.6; 1.207 1.263 1.364; 11.8 16.0 17.8
        race; 0.324 0.302 0.277; 28.0 28.6 31.8; 0.083 0.094 0.104; 9.8 12.8 14.4
        squad; 0.571 0.725 1.007; 8.4 15.6 18.2; 0.364 0.396 0.575; 6.2 9.8 13.2
    """,
    "AvgPool": """
        drop; 1.821 1.973 2.014; 64.0 64.6 68.0; 0.741 0.947 1.105; 29.8 35.6 42.6
        narrativeqa; 2.769 2.630 2.721; 17.6 25.8 39.0; 1.293 1.406 1.609; 8.6 16.0 25.8
        race; 0.284 0.345 0.364; 36.4 37.4 41.2; 0.105 0.120 0.117; 11.4 14.6 18.0
        squad; 0.674 1.127 1.599; 9.6 20.4 34.0; 0.352 0.495 0.702; 6.8 10.4 17.6
    """,
}


def _lines(block: str) -> Iterator[list[str]]:
    """The cells of each line of figures."""
    for line in block.strip().splitlines():
        yield [cell.strip() for cell in line.split(";")]


def _numbers(cell: str) -> list[float | None]:
    return [None if word == "-" else float(word) for word in cell.split()]


def _published(loss: float, wrong: float) -> dict[str, float]:
    return {"loss": loss, "wrong": wrong}


def _settings(title: str, ratio: int) -> list[str]:
    """The options of a method at a ratio; but for ONE each gist has an embedding of its own."""
    method, *options = _METHODS[title]
    if method == "gistpool":
        options.append("memory_sees_memory=true")
    if "separate=true" in options or (method == "gistpool" and "separate=false" not in options):
        # Two sets of parameters, which share nothing but embeddings (Section 5.2).
        options.append("copy_norms=true")
    if title in ("No context", "Full context", "AvgPool") or title.startswith(ONE):
        gists = []
    else:
        gists = [f"gists={-(-LONGEST // ratio)}"]
    at = [] if title == "No context" else ["--ratio", str(ratio)]
    return ["--method", method, *at, *(word for option in (*options, *gists) for word in ("--option", option))]


def _folder(name: str, title: str, ratio: int) -> str:
    return f"{name}-{title.lower().replace(',', '').replace(' ', '-')}-{ratio}x"


def _title(title: str, ratio: int) -> str:
    return title if title.endswith("context") else f"{title} {ratio}x"


def _train(name: str, settings: Sequence[str], data: str) -> Stage:
    return Stage(TRAIN, ("--preset", f"gistpool-{name}", "--questions", data), settings)


def _evaluate(data: str) -> Stage:
    return Stage(EVALUATE, ("--questions", data, "--examples", ALL, "--baselines", ""), start="train")


def _set_table(name: str, figures: str, sets: Sequence[str], follows: str, folder: str, model: str) -> Table:
    arms = []
    for title, at, losses, wrongs in _lines(figures):
        ratio, column = int(at), sets.index(name)
        loss, wrong = _numbers(losses)[column], _numbers(wrongs)[column]
        if loss is not None and wrong is not None:
            stages = {"train": _train(name, _settings(title, ratio), "{train}"), "answers": _evaluate("{test}")}
            arms.append(Arm(_title(title, ratio), _folder(name, title, ratio), stages, _published(loss, wrong)))
    data = {"train": f"{name}'s training set", "test": f"{name}'s evaluation split"}
    return Table(f"{PAPER}, {follows}, {name}", folder, model, data, COLUMNS, arms, OPEN + MASK)


def _cross_table(number: int, method: str) -> Table:
    columns: list[Column] = []
    for name in MATRIX:
        stage = f"answers-{name}"
        columns += [Column(f"on {name}", stage, "qa_loss"), WrongAnswers(f"{name} wrong", stage, "qa_judge")]
    arms = []
    for name, losses, wrongs in _lines(_CROSS[method]):
        pairs = zip(_numbers(losses), _numbers(wrongs), strict=True)
        figures = [figure for pair in pairs for figure in pair if figure is not None]
        stages = {f"answers-{other}": _evaluate(f"{{{other}-test}}") for other in MATRIX}
        train = _train(name, _settings(method, 5), f"{{{name}-train}}")
        published = dict(zip((column.heading for column in columns), figures, strict=True))
        arms.append(Arm(f"trained on {name}", _folder(name, method, 5), {"train": train, **stages}, published))
    return Table(
        f"{PAPER}, Table {number}, {method} at 5x", "gistpool", "Gemma 2 2B", _splits(MATRIX), columns, arms,
        OPEN + _mask_of(method),
    )  # fmt: skip


def _mixture_table(number: int, method: str) -> Table:
    arms = []
    for name, *cells in _lines(_MIXTURES[method]):
        others, others_wrong, same, same_wrong = map(_numbers, cells)
        mixed = [f"{{{other}-train}}" for other in MIXED if other != name]
        words = ("--preset", "gistpool-mixture", "--questions", *mixed, "--weights", "1,1,1")
        for index, ratio in enumerate((2, 5, 10)):
            settings, answers = _settings(method, ratio), _evaluate(f"{{{name}-test}}")
            for source, folder, train, loss, wrong in (
                ("the other 3", f"not-{name}", Stage(TRAIN, words, settings), others[index], others_wrong[index]),
                ("the same", name, _train(name, settings, f"{{{name}-train}}"), same[index], same_wrong[index]),
            ):
                published = {"loss": loss, "wrong": wrong}
                arms.append(
                    Arm(
                        f"{name} {ratio}x, trained on {source}",
                        _folder(folder, method, ratio),
                        {"train": train, "answers": answers},
                        {heading: figure for heading, figure in published.items() if figure is not None},
                    )
                )
    return Table(
        f"{PAPER}, Table {number}, {method}", "gistpool", "Gemma 2 2B", _splits(MIXED), COLUMNS, arms,
        OPEN + _mask_of(method),
    )  # fmt: skip


def _mask_of(method: str) -> tuple[str, ...]:
    return MASK if _METHODS[method][0] == "gistpool" else ()


def _splits(names: Sequence[str]) -> dict[str, str]:
    return {f"{name}-{split}": f"{name}'s {split} split" for name in names for split in ("train", "test")}


TABLES: Mapping[str, Table] = {
    **{
        f"gistpool-{name}": _set_table(name, _FIGURES, SETS, "Appendix B and Table 5", "gistpool", "Gemma 2 2B")
        for name in SETS
    },
    **{
        f"gistpool-2-{name}": _set_table(name, _LARGE, _LARGE_SETS, "Table 2", "gistpool-9b", "Gemma 2 9B")
        for name in _LARGE_SETS
    },
    "gistpool-6": _cross_table(6, ONE),
    "gistpool-7": _cross_table(7, "AvgPool"),
    "gistpool-8": _mixture_table(8, ONE),
    "gistpool-9": _mixture_table(9, "AvgPool"),
}
