"""Table 10 of Getting to the Gist of Gisting: GistPool's mask, in forty variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from gistkit_lab.tables.gistpool import FIGURES, LONGEST, OPEN, PAPER, evaluating, splits, training
from gistkit_lab.tables.table import Arm, Column, Table

RATIO = 5
SETS = ("drop", "fairytaleqa", "squad")
# The four choices as they are read here; the order of the middle two is open.
CHOICES = {
    "context_sees_memory": "context sees gists",
    "memory_sees_memory": "gists see gists",
    "memory_sees_itself": "gists see themselves",
    "memory_sees_bos": "gists see BOS",
}
_READING = (
    "its four columns of yes and no have no headers in the stored text, nor have the last eight rows a number of "
    "windows. Read here: the first is whether the context sees gists, as that is no in GistPool (Section 5.3), whose "
    "figures at 5x stand at 5 windows, no, yes, yes, yes; the fourth is BOS, which is always yes in the last eight "
    "rows, whose gists then see all windows and what is before them",
    "of the second and the third column one is whether gists see the gists before them and the other whether they see "
    "themselves: where a row has one alone, both rows' figures stand there, that of the second column first",
    "compression rate: 5x, by those figures",
)
_Choices = tuple[bool, bool, bool, bool]


def _figures(windows: int | None) -> dict[_Choices, list[float]]:
    """The losses of each choice."""
    fourth = (False, True) if windows is not None else (True,)
    choices = product((False, True), (False, True), (False, True), fourth)
    return dict(zip(choices, FIGURES["masks"][str(windows or "all")], strict=True))


def _arms() -> Iterator[Arm]:
    for windows in (1, 5, None):
        figures = _figures(windows)
        for choice in figures:
            context, gists, itself, bos = choice
            # Rows that differ by the order of the two columns alone.
            rows = dict.fromkeys([(context, True, False, bos), (context, False, True, bos)])
            losses = [figures[row] for row in (rows if gists != itself else [choice])]
            values = {name: [loss[index] for loss in losses] for index, name in enumerate(SETS)}
            options = {"windows": "null" if windows is None else str(windows), "gists": str(-(-LONGEST // RATIO))}
            options["copy_norms"] = "true"
            options |= {name: str(chosen).lower() for name, chosen in zip(CHOICES, choice, strict=True)}
            words = (word for name, value in options.items() for word in ("--option", f"{name}={value}"))
            settings = ["--method", "gistpool", "--ratio", str(RATIO), *words]
            stages = {}
            for name in SETS:
                stages[f"train-{name}"] = training(name, settings, f"{{{name}-train}}")
                stages[f"answers-{name}"] = evaluating(f"{{{name}-test}}", f"train-{name}")
            shown = {None: "all windows", 1: "1 window"}.get(windows, f"{windows} windows")
            title = " + ".join(
                [shown, *(text for text, chosen in zip(CHOICES.values(), choice, strict=True) if chosen)]
            )
            folder = "-".join(["mask", str(windows or "all"), "".join(str(int(chosen)) for chosen in choice)])
            yield Arm(title, folder, stages, values)


TABLES: Mapping[str, Table] = {
    "gistpool-10": Table(
        f"{PAPER}, Table 10", "gistpool", "Gemma 2 2B", splits(SETS),
        [Column(name, f"answers-{name}", "qa_loss") for name in SETS],
        list(_arms()),
        (OPEN[0], *_READING),
    ),
}  # fmt: skip
