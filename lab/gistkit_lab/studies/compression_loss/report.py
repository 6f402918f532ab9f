"""The results of the study `compression-loss`: tables beside the paper's figures, and the picture of fine-tuning."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gistkit_lab.studies.compression_loss.runs import PRETRAINING, Run
from gistkit_lab.studies.compression_loss.study import SETTINGS
from gistkit_lab.studies.results import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Table 2 at 15x: CL loss, AE loss, LM loss, AE BLEU-4; BLEU-4 of the answers after fine-tuning on PwC. The hours of
# training, which footnote 7 has for two settings.
PAPER = {
    "full": ("0.17", "0.03", "2.08", "96.9", "26.2", "-"),
    "without-cl": ("-", "0.02", "2.06", "95.8", "26.0", "34.4 h"),
    "without-ae": ("0.15", "-", "2.06", "-", "26.5", "24.3 h"),
    "without-cl-pi": ("-", "0.17", "2.10", "52.7", "22.1", "-"),
}
PAPER_HEADER = ("paper: CL", "AE", "LM", "AE BLEU-4", "tuned: PwC BLEU-4", "time")
# The two settings that are compared, and the one that has neither loss.
WITH_AE, WITH_CL, NEITHER = "without-cl", "without-ae", "without-ae-cl"
NAMES = "LM+CL is the setting without AE, LM+AE the one without CL, LM the one without both."
CLAIM = (
    "The compression loss can stand in for the autoencoding loss here if, with every seed, LM+CL ends at most 0.1 above"
    "\nLM+AE at equal time, and far below LM."
)


def by_setting(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each setting by seed, in the order of `SETTINGS`."""
    ordered = sorted(runs, key=lambda run: run.seed)
    groups = {name: [run for run in ordered if run.setting == name] for name in SETTINGS}
    return {name: group for name, group in groups.items() if group}


def table_rows(runs: Sequence[Run], split: str = "test", timed: Collection[int] | None = None) -> list[list[str]]:
    """Header and one row a setting: figures of "held_out" or "test"; several seeds give mean (lowest-highest).

    A loss that a setting does not pretrain with stands in brackets, and the compression loss, whose maps are then
    untrained, is left out. `timed`: the seeds whose times can be compared; None: all.
    """
    header = ["setting", "CL loss", "AE loss", "LM loss", "tuned: AE loss", "AE accuracy", "tuned: question loss"]
    rows = [[*header, "pretraining time", "seeds", *PAPER_HEADER]]
    with_ae = {
        run.seed: pretraining_seconds(run)
        for run in runs
        if run.setting == WITH_AE and (timed is None or run.seed in timed)
    }
    for name, group in by_setting(runs).items():
        losses = SETTINGS[name].losses

        def cell(stage: str, figure: str, group: Sequence[Run] = group) -> str:
            return spread([getattr(run, split)[stage][figure] for run in group])

        ae = cell(PRETRAINING, "loss")
        times = [pretraining_seconds(run) / with_ae[run.seed] for run in group if run.seed in with_ae]
        rows.append(
            [
                SETTINGS[name].title,
                cell(PRETRAINING, "compression") if "compression" in losses else "-",
                ae if "ae" in losses else f"({ae})",
                cell(PRETRAINING, "lm"),
                cell("ae", "loss"),
                cell("ae", "share"),
                cell("qa", "loss"),
                spread(times, "{:.2f}".format) if times else "-",
                str(len(group)),
                *PAPER.get(name, ("-",) * len(PAPER_HEADER)),
            ]
        )
    return rows


def gap_rows(runs: Sequence[Run], timed: Collection[int] | None = None) -> list[list[str]]:
    """Header and one row a seed that has two settings compared: AE losses less one another, nats a byte.

    First at the end of fine-tuning, after as many steps of both; then at equal time, where the sooner of the two ends.
    "-" where a seed lacks a setting, and at equal time if it is not among the `timed` (None: all are).
    """
    rows = [["AE loss", "LM+CL less LM+AE", "at equal time", "LM less LM+CL", "at equal time"]]
    groups = by_setting(runs)
    found = {name: {run.seed: run for run in groups.get(name, ())} for name in (WITH_AE, WITH_CL, NEITHER)}
    pairs = ((WITH_CL, WITH_AE), (NEITHER, WITH_CL))
    for seed in sorted(set().union(*found.values())):
        cells: list[str] = []
        for first, second in pairs:
            if seed in found[first] and seed in found[second]:
                two = found[first][seed], found[second][seed]
                comparable = timed is None or seed in timed
                cells += [f"{gap_at_end(*two):+.3f}", f"{gap_at_equal_time(*two):+.3f}" if comparable else "-"]
            else:
                cells += ["-", "-"]
        if set(cells) != {"-"}:
            rows.append([f"seed {seed}", *cells])
    return rows


def pretraining_seconds(run: Run) -> float:
    """How long the pretraining took."""
    return run.seconds[PRETRAINING][-1]


def gap_at_end(first: Run, second: Run) -> float:
    """The AE loss of the first run less that of the second, both fine-tuned on it, over held-out text."""
    return first.curves["ae"][-1][1] - second.curves["ae"][-1][1]


def gap_at_equal_time(first: Run, second: Run) -> float:
    """As `gap_at_end`, but at the seconds of training at which the first of the two ends.

    The other may then still pretrain. Between two evaluations its loss lies on a line.
    """
    paths = [ae_path(run) for run in (first, second)]
    end = min(path[-1, 0] for path in paths)
    losses = [float(np.interp(end, path[:, 0], path[:, 1])) for path in paths]
    return losses[0] - losses[1]


def ae_path(run: Run) -> np.ndarray:
    """float [n, 2], the seconds of training and the AE loss through pretraining and fine-tuning."""
    points = [
        (seconds, loss)
        for stage in (PRETRAINING, "ae")
        for seconds, (_, loss, _) in zip(run.seconds[stage], run.curves[stage], strict=True)
    ]
    return np.array(points)


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """The AE loss in fine-tuning by steps and by seconds."""
    from gistkit_lab.studies.compression_loss.figures import draw_fine_tuning

    groups = by_setting(runs)
    steps = {
        name: [[(step, loss) for step, loss, _ in run.curves["ae"]] for run in group] for name, group in groups.items()
    }
    seconds = {name: [ae_path(run) for run in group] for name, group in groups.items()}
    return {"fine-tuning": draw_fine_tuning(steps, seconds)}
