"""What the studies `length` and `retrieval` found: tables beside the paper's, JSON and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from gistkit.studies import extrapolation, length, results, retrieval
from gistkit.studies.extrapolation import ARMS
from gistkit.train.data import Corpus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "nope": "NoPE",
    "sinusoidal": "Sinusoidal",
    "learned": "Learned",
    "rope-1e4": "RoPE 1e4",
    "rope-1e6": "RoPE 1e6",
    "rope-1e8": "RoPE 1e8",
    "alibi": "ALiBi",
    "seqpe-sum": "SeqPE AttnSum",
    "seqpe-mul": "SeqPE AttnMul",
    "seqpe-bias": "SeqPE AttnBias",
    "seqpe-bias-no-delta": "SeqPE AttnBias without L_delta",
    "seqpe-bias-no-ood": "SeqPE AttnBias without L_OOD",
}
# SeqPE, Tables I and IV: perplexity on WikiText-103 at 1x, 2x, .. of 512 tokens.
PAPER_LENGTH = {
    "nope": (20.40, 34.98, 116.11, 289.73, 536.29, 881.56),
    "sinusoidal": (23.37, 77.86, 628.68, 2.3e3, 5.0e3, 9.4e3),
    "learned": (20.30, 21.36, 37.70, 86.90, 152.53, 230.63),
    "rope-1e4": (19.44, 35.25, 113.17, 252.15, 477.89, 745.52),
    "rope-1e6": (19.46, 30.18, 92.01, 201.57, 332.04, 539.20),
    "rope-1e8": (19.42, 42.92, 144.71, 341.40, 541.17, 786.08),
    "alibi": (20.06, 19.06, 18.65, 18.72, 19.36, 21.39),
    "seqpe-bias": (19.65, 18.74, 18.51, 18.58, 18.86, 19.37),
    "seqpe-bias-no-delta": (19.57, 33.81, 104.07, 205.33),
    "seqpe-bias-no-ood": (19.62, 18.78, 18.56, 18.62),
}
# SeqPE, Table II: perplexity and exact match in percent on RULER's SQuAD at 1x, 2x, .. of 1024 tokens.
PAPER_RETRIEVAL = {
    "nope": ((6.07, 29.2), (236.53, 3.6), (967.89, 0.6), (1.5e4, 0.0)),
    "sinusoidal": ((7.66, 26.2), (577.48, 1.8), (1.5e4, 0.0), (1.5e6, 0.0)),
    "learned": ((6.79, 25.0), (15.66, 11.8), (41.30, 6.2), (365.49, 0.2)),
    "rope-1e6": ((5.62, 28.0), (23.00, 9.0), (314.77, 3.0), (963.48, 0.8)),
    "alibi": ((5.49, 23.8), (8.07, 11.4), (9.52, 8.0), (121.14, 2.0)),
    "seqpe-bias": ((5.56, 26.8), (7.64, 15.0), (7.58, 11.4), (28.60, 2.6)),
}

Lines = dict[str, dict[float, list[float]]]


def by_arm(runs: Sequence[Any]) -> dict[str, list[Any]]:
    """The runs of each arm, in the order of `ARMS`, by seed."""
    found: dict[str, list[Any]] = {}
    for run in sorted(runs, key=lambda run: (ARMS.index(run.arm), run.seed)):
        found.setdefault(run.arm, []).append(run)
    return found


def length_rows(runs: Sequence[length.Run], split: str = "test") -> list[list[str]]:
    """Header and one row an arm: perplexity at each length; several seeds give mean (lowest-highest)."""
    return _rows(runs, split, lambda found: math.exp(found), number)


def retrieval_rows(runs: Sequence[retrieval.Run], figure: str, split: str = "test") -> list[list[str]]:
    """Header and one row an arm, as `length_rows`: "perplexity" of the answers, or "exact", the share without error."""
    if figure == "exact":
        return _rows(runs, split, lambda found: found["exact"], "{:.3f}".format)
    return _rows(runs, split, lambda found: math.exp(found["loss"]), number)


def _rows(
    runs: Sequence[Any], split: str, figure: Callable[[Any], float], form: Callable[[float], str]
) -> list[list[str]]:
    lengths = list(getattr(runs[0], split))
    first = int(lengths[0])
    header = ["position encoding", *[f"{int(one) // first}x, {one}" for one in lengths], "training", "seeds"]
    rows = [header]
    for arm, mine in by_arm(runs).items():
        cells = [results.spread([figure(getattr(run, split)[one]) for run in mine], form) for one in lengths]
        seconds = results.spread([run.seconds for run in mine], "{:.0f} s".format)
        rows.append([TITLES[arm], *cells, seconds, str(len(mine))])
    return rows


def paper_length_rows() -> list[list[str]]:
    """The paper's figures for the study `length`."""
    header = ["paper: WikiText-103", *[f"{1 << power}x, {512 << power}" for power in range(6)]]
    return [header, *[_padded([TITLES[arm], *map(number, row)], 7) for arm, row in PAPER_LENGTH.items()]]


def paper_retrieval_rows() -> list[list[str]]:
    """The paper's figures for the study `retrieval`: perplexity / exact match in percent."""
    header = ["paper: RULER SQuAD", *[f"{1 << power}x, {1024 << power}" for power in range(4)]]
    cells = {arm: [f"{number(loss)} / {exact}" for loss, exact in row] for arm, row in PAPER_RETRIEVAL.items()}
    return [header, *[[TITLES[arm], *row] for arm, row in cells.items()]]


def number(value: float) -> str:
    """A perplexity: two decimals, and fewer digits where it is large."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}" if value < 10_000 else f"{value:.1e}"


def _padded(row: list[str], cells: int) -> list[str]:
    return row + ["-"] * (cells - len(row))


def write_length(
    path: Path, runs: Sequence[length.Run], recipe: length.Recipe, corpus: Corpus, machine: Mapping[str, object]
) -> None:
    """Everything measured, with the recipe, the text and the machine."""
    results.write(path, "length", runs, recipe, corpus, machine)


def write_retrieval(
    path: Path, runs: Sequence[retrieval.Run], recipe: retrieval.Recipe, machine: Mapping[str, object]
) -> None:
    """Everything measured, with the recipe and the machine."""
    results.write(path, "retrieval", runs, recipe, None, machine)


def read_length(path: Path) -> tuple[list[length.Run], length.Recipe]:
    """The runs and recipe that `write_length` wrote."""
    return results.read(path, length.Run, length.Recipe)


def read_retrieval(path: Path) -> tuple[list[retrieval.Run], retrieval.Recipe]:
    """The runs and recipe that `write_retrieval` wrote."""
    return results.read(path, retrieval.Run, retrieval.Recipe)


def length_figures(runs: Sequence[length.Run], split: str = "test") -> dict[str, Figure]:
    """Perplexity against the length, ours and the paper's."""
    from gistkit.viz.extrapolation import Panel, draw_lengths

    panels = [
        Panel("perplexity", _lines(runs, split, math.exp)),
        Panel("paper: GPT-2 on WikiText-103", _paper_lines(runs, PAPER_LENGTH, 512, lambda one: one)),
    ]
    return {"length": draw_lengths(panels, "Language models at longer texts than they were trained on")}


def retrieval_figures(runs: Sequence[retrieval.Run], split: str = "test") -> dict[str, Figure]:
    """Perplexity and exact answers against the length, and the paper's."""
    from gistkit.viz.extrapolation import Panel, draw_lengths

    panels = [
        Panel("perplexity of the answers", _lines(runs, split, lambda found: math.exp(found["loss"]))),
        Panel("right answers", _lines(runs, split, lambda found: found["exact"]), logarithmic=False),
        Panel("paper: perplexity, RULER SQuAD", _paper_lines(runs, PAPER_RETRIEVAL, 1024, lambda one: one[0])),
    ]
    return {"retrieval": draw_lengths(panels, "Looking up facts in longer contexts than in training")}


def draw_length(folder: Path, runs: Sequence[length.Run], prefix: str = "", split: str = "test") -> list[Path]:
    """`length_figures` as PNG files in `folder`."""
    return results.save(folder, length_figures(runs, split), prefix)


def draw_retrieval(folder: Path, runs: Sequence[retrieval.Run], prefix: str = "", split: str = "test") -> list[Path]:
    """`retrieval_figures` as PNG files in `folder`."""
    return results.save(folder, retrieval_figures(runs, split), prefix)


def draw_embeddings(path: Path, recipe: length.Recipe, states: Mapping[str, Path], positions: int = 2048) -> Path:
    """How alike the embeddings of positions are before training and after it, as a PNG file (SeqPE, Figure 2).

    Args:
        states: by arm, what `length.train` left of its weights.
    """
    from gistkit.viz.seqpe import draw_similarity

    shown: dict[str, Any] = {}
    for arm, state in states.items():
        student = extrapolation.Student(recipe, extrapolation.arms([arm])[0], 256, seed=0)
        encoder = student.encoder
        if encoder is None:
            raise ValueError(f"states: expected arms with an encoder, got {arm!r}")
        with torch.no_grad():
            shown.setdefault("before training", encoder.eval().table(positions))
            prefix = "model.position.encoder."
            weights = load_file(state)
            encoder.load_state_dict({k.removeprefix(prefix): x for k, x in weights.items() if k.startswith(prefix)})
            shown[TITLES[arm].removeprefix("SeqPE ")] = encoder.table(positions)
    draw_similarity(shown, trained=recipe.length).savefig(path, dpi=100)
    return path


def _lines(runs: Sequence[Any], split: str, figure: Callable[[Any], float]) -> Lines:
    return {
        TITLES[arm]: {int(one): [figure(getattr(run, split)[one]) for run in mine] for one in getattr(mine[0], split)}
        for arm, mine in by_arm(runs).items()
    }


def _paper_lines(
    runs: Sequence[Any], paper: Mapping[str, Sequence[Any]], shortest: int, figure: Callable[[Any], float]
) -> Lines:
    return {
        TITLES[arm]: {shortest << power: [figure(one)] for power, one in enumerate(row)}
        for arm, row in paper.items()
        if arm in by_arm(runs)
    }
