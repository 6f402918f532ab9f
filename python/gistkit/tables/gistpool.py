"""Tables of Long Context In-Context Compression by Getting to the Gist of Gisting: six sets of questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gistkit.tables.table import ALL, EVALUATE, TRAIN, Arm, Column, Stage, Table

PAPER = "Long Context In-Context Compression by Getting to the Gist of Gisting"
SETS = ("alpaca", "squad", "drop", "race", "narrativeqa", "fairytaleqa")
OPEN = (
    "what the presets gistpool-... choose: gistkit train --preset NAME --dry-run says it",
    "No context is left out; for the share of wrong answers give a judge: --more 'answers=--judge URL --judge-model "
    "NAME', and look at QA judge in the reports",
)
LOSS = [Column("loss", "answers", "qa_loss")]
# At 2x, 5x and 10x, in the order of SETS; Full context and 1x first.
_ARMS: Mapping[str, tuple[Sequence[str], Mapping[int, Sequence[float]]]] = {
    "Full context": (("--method", "avgpool"), {1: (1.037, 0.270, 0.514, 0.083, 1.126, 0.751)}),
    "AvgPool": (
        ("--method", "avgpool"),
        {
            2: (1.080, 0.352, 0.741, 0.105, 1.293, 1.119),
            5: (1.092, 0.495, 0.947, 0.120, 1.406, 1.523),
            10: (1.104, 0.702, 1.105, 0.117, 1.609, 2.094),
        },
    ),
    "Gist": (
        ("--method", "gist"),
        {
            1: (1.041, 0.512, 1.077, 0.127, 1.450, 2.668),
            2: (1.045, 0.619, 1.165, 0.132, 1.487, 2.443),
            5: (1.050, 0.783, 1.164, 0.129, 1.625, 2.406),
            10: (1.053, 0.925, 1.210, 0.128, 1.737, 2.482),
        },
    ),
    "SepOffsetGist": (
        ("--method", "gist", "--option", "offset=true", "--option", "separate=true"),
        {
            1: (1.036, 0.493, 0.796, 0.101, 1.411, 1.906),
            2: (1.038, 0.547, 0.864, 0.100, 1.422, 1.865),
            5: (1.045, 0.636, 0.904, 0.104, 1.544, 1.974),
            10: (1.049, 0.786, 0.956, 0.108, 2.172, 2.219),
        },
    ),
    "GistPool": (
        ("--method", "gistpool"),
        {
            1: (1.035, 0.340, 0.617, 0.091, 1.189, 1.153),
            2: (1.038, 0.357, 0.656, 0.092, 1.207, 1.020),
            5: (1.043, 0.408, 0.770, 0.091, 1.267, 1.223),
            10: (1.050, 0.545, 0.897, 0.102, 1.376, 1.592),
        },
    ),
}
# Trained at 5x on the first, tested on the others; GistPool's Table 6 and AvgPool's Table 7, rows as columns there.
MATRIX = ("drop", "fairytaleqa", "narrativeqa", "race", "squad")
_CROSS = {
    "gistpool": (
        6,
        {
            "drop": (0.726, 3.558, 3.102, 0.300, 0.974),
            "fairytaleqa": (1.901, 1.185, 1.849, 1.302, 1.620),
            "narrativeqa": (1.838, 2.049, 1.263, 0.374, 0.871),
            "race": (1.900, 3.463, 2.671, 0.094, 2.142),
            "squad": (2.235, 3.028, 2.886, 0.339, 0.396),
        },
    ),
    "avgpool": (
        7,
        {
            "drop": (0.947, 4.877, 3.207, 0.679, 1.273),
            "fairytaleqa": (7.190, 1.523, 5.541, 8.784, 9.686),
            "narrativeqa": (1.951, 2.490, 1.406, 0.815, 1.445),
            "race": (3.806, 9.317, 7.758, 0.120, 7.905),
            "squad": (2.884, 4.225, 3.434, 0.580, 0.495),
        },
    ),
}


def _train(name: str, settings: Sequence[str], data: str) -> Stage:
    return Stage(TRAIN, ("--preset", f"gistpool-{name}", "--questions", data), settings)


def _evaluate(data: str) -> Stage:
    return Stage(EVALUATE, ("--questions", data, "--examples", ALL, "--baselines", ""), start="train")


def _set_table(name: str) -> Table:
    arms = [
        Arm(
            f"{title} {ratio}x" if title != "Full context" else title,
            f"{name}-{title.lower().replace(' ', '-')}-{ratio}x",
            {
                "train": _train(name, (*method, "--ratio", str(ratio)), "{train}"),
                "answers": _evaluate("{test}"),
            },
            {"loss": losses[SETS.index(name)]},
        )
        for title, (method, ratios) in _ARMS.items()
        for ratio, losses in ratios.items()
    ]
    data = {"train": f"{name}'s training set", "test": f"{name}'s evaluation split"}
    return Table(f"{PAPER}, Appendix B, evaluation losses of {name}", "gistpool", "Gemma 2 2B", data, LOSS, arms, OPEN)


def _cross_table(method: str) -> Table:
    number, losses = _CROSS[method]
    columns = [Column(f"on {name}", f"answers-{name}", "qa_loss") for name in MATRIX]
    settings = ("--method", method, "--ratio", "5")
    arms = [
        Arm(
            f"trained on {name}",
            f"{name}-{method}-5x",
            {
                "train": _train(name, settings, f"{{{name}-train}}"),
                **{f"answers-{other}": _evaluate(f"{{{other}-test}}") for other in MATRIX},
            },
            dict(zip((column.heading for column in columns), losses[name], strict=True)),
        )
        for name in MATRIX
    ]
    data = {f"{name}-{split}": f"{name}'s {split} split" for name in MATRIX for split in ("train", "test")}
    return Table(
        f"{PAPER}, Table {number}, evaluation losses at 5x", "gistpool", "Gemma 2 2B", data, columns, arms, OPEN
    )


TABLES: Mapping[str, Table] = {
    **{f"gistpool-{name}": _set_table(name) for name in SETS},
    **{f"gistpool-{_CROSS[method][0]}": _cross_table(method) for method in _CROSS},
}
