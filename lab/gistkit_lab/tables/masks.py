"""Table 10 of Getting to the Gist of Gisting: GistPool's mask, in forty variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from gistkit_lab.tables.gistpool import LONGEST, OPEN, PAPER
from gistkit_lab.tables.table import ALL, EVALUATE, TRAIN, Arm, Column, Stage, Table

RATIO = 5
SETS = ("drop", "fairytaleqa", "squad")
# By windows, None all of them: the losses on these sets, in the order of four choices, each first no and then yes.
_LOSSES = {
    1: """
        0.879 1.472 0.463; 0.812 1.315 0.468; 0.814 1.335 0.443; 0.808 1.330 0.449
        0.896 1.398 0.458; 0.806 1.287 0.447; 0.787 1.295 0.442; 0.822 1.318 0.428
        0.871 1.429 0.471; 0.832 1.307 0.432; 0.788 1.317 0.462; 0.800 1.323 0.442
        0.807 1.384 0.450; 0.817 1.279 0.435; 0.771 1.317 0.448; 0.820 1.275 0.438
    """,
    5: """
        0.774 1.264 0.427; 0.793 1.220 0.432; 0.789 1.229 0.394; 0.729 1.212 0.406
        0.782 1.246 0.413; 0.784 1.216 0.422; 0.730 1.226 0.410; 0.770 1.223 0.408
        0.759 1.250 0.404; 0.762 1.200 0.408; 0.765 1.237 0.411; 0.771 1.274 0.400
        0.803 1.232 0.421; 0.763 1.226 0.412; 0.743 1.224 0.408; 0.739 1.233 0.402
    """,
    # The fourth choice is always yes.
    None: """
        0.768 1.174 0.421; 0.753 1.177 0.393; 0.766 1.160 0.405; 0.741 1.163 0.392
        0.764 1.188 0.395; 0.751 1.192 0.394; 0.778 1.193 0.394; 0.723 1.155 0.397
    """,
}
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
    cells = [cell for line in _LOSSES[windows].strip().splitlines() for cell in line.split(";")]
    fourth = (False, True) if windows is not None else (True,)
    choices = product((False, True), (False, True), (False, True), fourth)
    return {choice: [float(word) for word in cell.split()] for choice, cell in zip(choices, cells, strict=True)}


def _arms() -> Iterator[Arm]:
    for windows in _LOSSES:
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
                preset = ("--preset", f"gistpool-{name}", "--questions", f"{{{name}-train}}")
                answers = ("--questions", f"{{{name}-test}}", "--examples", ALL, "--baselines", "")
                stages[f"train-{name}"] = Stage(TRAIN, preset, settings)
                stages[f"answers-{name}"] = Stage(EVALUATE, answers, start=f"train-{name}")
            shown = {None: "all windows", 1: "1 window"}.get(windows, f"{windows} windows")
            title = " + ".join(
                [shown, *(text for text, chosen in zip(CHOICES.values(), choice, strict=True) if chosen)]
            )
            folder = "-".join(["mask", str(windows or "all"), "".join(str(int(chosen)) for chosen in choice)])
            yield Arm(title, folder, stages, values)


TABLES: Mapping[str, Table] = {
    "gistpool-10": Table(
        f"{PAPER}, Table 10", "gistpool", "Gemma 2 2B",
        {f"{name}-{split}": f"{name}'s {split} split" for name in SETS for split in ("train", "test")},
        [Column(name, f"answers-{name}", "qa_loss") for name in SETS],
        list(_arms()),
        (OPEN[0], *_READING),
    ),
}  # fmt: skip
