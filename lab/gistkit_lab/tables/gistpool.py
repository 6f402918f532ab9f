"""Tables of Long Context In-Context Compression by Getting to the Gist of Gisting: six sets of questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gistkit_lab.tables.files import published
from gistkit_lab.tables.table import ALL, EVALUATE, TRAIN, Arm, Column, Stage, Table, WrongAnswers, by_heading

PAPER = "Long Context In-Context Compression by Getting to the Gist of Gisting"
FIGURES = published("gistpool")
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
# Of Table 2.
_LARGE_SETS = ("fairytaleqa", "race", "drop")
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
# Of Tables 6 and 7; rows as columns there.
MATRIX = ("drop", "fairytaleqa", "narrativeqa", "race", "squad")
# Of Tables 8 and 9.
MIXED = ("drop", "narrativeqa", "race", "squad")


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


def training(name: str, settings: Sequence[str], data: str) -> Stage:
    """The training of a set's preset on data."""
    return Stage(TRAIN, ("--preset", f"gistpool-{name}", "--questions", data), settings)


def evaluating(data: str, start: str = "train") -> Stage:
    """The answers about data of what a stage has trained."""
    return Stage(EVALUATE, ("--questions", data, "--examples", ALL, "--baselines", ""), start=start)


def _set_table(name: str, figures: str, sets: Sequence[str], follows: str, folder: str, model: str) -> Table:
    arms = []
    column = sets.index(name)
    for title, ratio, losses, wrongs in FIGURES[figures]:
        theirs = by_heading(COLUMNS, (losses[column], wrongs[column]))
        if theirs:
            stages = {"train": training(name, _settings(title, ratio), "{train}"), "answers": evaluating("{test}")}
            arms.append(Arm(_title(title, ratio), _folder(name, title, ratio), stages, theirs))
    data = {"train": f"{name}'s training set", "test": f"{name}'s evaluation split"}
    return Table(f"{PAPER}, {follows}, {name}", folder, model, data, COLUMNS, arms, OPEN + MASK)


def _cross_table(number: int, method: str) -> Table:
    columns: list[Column] = []
    for name in MATRIX:
        stage = f"answers-{name}"
        columns += [Column(f"on {name}", stage, "qa_loss"), WrongAnswers(f"{name} wrong", stage, "qa_judge")]
    arms = []
    for name, losses, wrongs in FIGURES["cross"][method]:
        figures = [figure for pair in zip(losses, wrongs, strict=True) for figure in pair]
        stages = {f"answers-{other}": evaluating(f"{{{other}-test}}") for other in MATRIX}
        train = training(name, _settings(method, 5), f"{{{name}-train}}")
        theirs = by_heading(columns, figures)
        arms.append(Arm(f"trained on {name}", _folder(name, method, 5), {"train": train, **stages}, theirs))
    return Table(
        f"{PAPER}, Table {number}, {method} at 5x", "gistpool", "Gemma 2 2B", splits(MATRIX), columns, arms,
        OPEN + _mask_of(method),
    )  # fmt: skip


def _mixture_table(number: int, method: str) -> Table:
    arms = []
    for name, others, others_wrong, same, same_wrong in FIGURES["mixtures"][method]:
        mixed = [f"{{{other}-train}}" for other in MIXED if other != name]
        words = ("--preset", "gistpool-mixture", "--questions", *mixed, "--weights", "1,1,1")
        for index, ratio in enumerate((2, 5, 10)):
            settings, answers = _settings(method, ratio), evaluating(f"{{{name}-test}}")
            for source, folder, train, figures in (
                ("the other 3", f"not-{name}", Stage(TRAIN, words, settings), (others, others_wrong)),
                ("the same", name, training(name, settings, f"{{{name}-train}}"), (same, same_wrong)),
            ):
                title, stages = f"{name} {ratio}x, trained on {source}", {"train": train, "answers": answers}
                theirs = by_heading(COLUMNS, [each[index] for each in figures])
                arms.append(Arm(title, _folder(folder, method, ratio), stages, theirs))
    return Table(
        f"{PAPER}, Table {number}, {method}", "gistpool", "Gemma 2 2B", splits(MIXED), COLUMNS, arms,
        OPEN + _mask_of(method),
    )  # fmt: skip


def _mask_of(method: str) -> tuple[str, ...]:
    return MASK if _METHODS[method][0] == "gistpool" else ()


def splits(names: Sequence[str]) -> dict[str, str]:
    """The data of sets."""
    return {f"{name}-{split}": f"{name}'s {split} split" for name in names for split in ("train", "test")}


TABLES: Mapping[str, Table] = {
    **{
        f"gistpool-{name}": _set_table(name, "sets", SETS, "Appendix B and Table 5", "gistpool", "Gemma 2 2B")
        for name in SETS
    },
    **{
        f"gistpool-2-{name}": _set_table(name, "large", _LARGE_SETS, "Table 2", "gistpool-9b", "Gemma 2 9B")
        for name in _LARGE_SETS
    },
    "gistpool-6": _cross_table(6, ONE),
    "gistpool-7": _cross_table(7, "AvgPool"),
    "gistpool-8": _mixture_table(8, ONE),
    "gistpool-9": _mixture_table(9, "AvgPool"),
}
