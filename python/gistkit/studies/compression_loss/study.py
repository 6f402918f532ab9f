"""Study `compression-loss`: what the compression loss, the autoencoding loss and the position ids each bring.

The demo's small model, with the continuation loss in every run (More Effective LLM Compressed Tokens, Table 2, whose
model is Llama-2-7B at 15x). It trains from scratch, encoder and decoder share their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from gistkit.compress import Compressor
from gistkit.studies.epl import study as epl
from gistkit.studies.reconstruction import Run

# Losses and position layout of each setting.
SETTINGS = {
    "full": (("ae", "lm", "compression"), "epl"),
    "without CL": (("ae", "lm"), "epl"),
    "without AE": (("lm", "compression"), "epl"),
    "without PI": (("ae", "lm", "compression"), "dpl"),
    "without CL and PI": (("ae", "lm"), "dpl"),
}
# Table 2 at 15x: CL loss, AE loss, LM loss, AE BLEU-4.
PAPER = {
    "full": ("0.17", "0.03", "2.08", "96.9"),
    "without CL": ("-", "0.02", "2.06", "95.8"),
    "without AE": ("0.15", "-", "2.06", "-"),
    "without CL and PI": ("-", "0.17", "2.10", "52.7"),
}


@dataclass(frozen=True)
class Recipe(epl.Recipe):
    """Everything that determines a run except its setting and seed."""

    continuation: int = 80


def build_compressor(recipe: Recipe, setting: str, seed: int) -> Compressor:
    """The untrained model of a seed under one of `SETTINGS`."""
    losses, layout = SETTINGS[setting]
    return epl.build_compressor(recipe, layout, seed, losses)


def table_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Header and one row a setting, mean over seeds; losses that a setting does not train stand in brackets."""
    header = ["setting", "CL loss", "AE loss", "LM loss", "AE accuracy", "greedy", "seconds"]
    rows = [[*header, "paper: CL", "AE", "LM", "AE BLEU-4"]]
    for setting in dict.fromkeys(run.layout for run in runs):
        setting_runs = [run for run in runs if run.layout == setting]
        ae = _mean_loss(setting_runs, "ae")
        if ae == "-":
            ae = f"({mean(run.loss for run in setting_runs):.3f})"
        rows.append(
            [
                setting,
                _mean_loss(setting_runs, "compression"),
                ae,
                _mean_loss(setting_runs, "lm"),
                f"{mean(run.accuracy for run in setting_runs):.3f}",
                f"{mean(run.greedy_accuracy for run in setting_runs):.3f}",
                f"{mean(run.seconds for run in setting_runs):.0f}",
                *PAPER.get(setting, ("-",) * 4),
            ]
        )
    return rows


def _mean_loss(runs: Sequence[Run], name: str) -> str:
    """A cell of a loss, the mean over runs; "-" where they do not train it."""
    return f"{mean(run.losses[name] for run in runs):.3f}" if name in runs[0].losses else "-"
