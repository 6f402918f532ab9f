"""Tables and lines of pictures that the studies `length` and `retrieval` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gistkit_lab.studies import results
from gistkit_lab.studies.extrapolation.student import ARMS

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
    "seqpe-bias-no-delta-no-ood": "SeqPE AttnBias without both losses",
}
Lines = dict[str, dict[float, list[float]]]


def by_arm(runs: Sequence[Any]) -> dict[str, list[Any]]:
    """The runs of each arm, in the order of `ARMS`, by seed."""
    runs_by_arm: dict[str, list[Any]] = {}
    for run in sorted(runs, key=lambda run: (ARMS.index(run.arm), run.seed)):
        runs_by_arm.setdefault(run.arm, []).append(run)
    return runs_by_arm


def arm_rows(
    runs: Sequence[Any], split: str, figure: Callable[[Any], float], form: Callable[[float], str]
) -> list[list[str]]:
    """Header and one row an arm: a figure at each length; several seeds give mean (lowest-highest)."""
    lengths = list(getattr(runs[0], split))
    first = int(lengths[0])
    header = ["position encoding", *[f"{int(length) // first}x, {length}" for length in lengths], "training", "seeds"]
    rows = [header]
    for arm, arm_runs in by_arm(runs).items():
        cells = [results.spread([figure(getattr(run, split)[length]) for run in arm_runs], form) for length in lengths]
        seconds = results.spread([run.seconds for run in arm_runs], "{:.0f} s".format)
        rows.append([TITLES[arm], *cells, seconds, str(len(arm_runs))])
    return rows


def number(value: float) -> str:
    """A perplexity: two decimals, and fewer digits where it is large."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}" if value < 10_000 else f"{value:.1e}"


def arm_lines(runs: Sequence[Any], split: str, figure: Callable[[Any], float]) -> Lines:
    """A figure by arm and length, of each seed."""
    return {
        TITLES[arm]: {
            int(length): [figure(getattr(run, split)[length]) for run in arm_runs]
            for length in getattr(arm_runs[0], split)
        }
        for arm, arm_runs in by_arm(runs).items()
    }


def paper_lines(
    runs: Sequence[Any], paper: Mapping[str, Sequence[Any]], shortest: int, figure: Callable[[Any], float]
) -> Lines:
    """The paper's figures of the arms that there are, by arm and length."""
    return {
        TITLES[arm]: {shortest << power: [figure(value)] for power, value in enumerate(row)}
        for arm, row in paper.items()
        if arm in by_arm(runs)
    }
