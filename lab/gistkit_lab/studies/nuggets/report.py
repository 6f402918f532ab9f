"""The results of the study `nuggets`: tables beside the paper's figures, and pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

from gistkit_lab.studies import results
from gistkit_lab.studies.nuggets.runs import Run
from gistkit_lab.studies.nuggets.study import LM_ARMS, SELECTIONS, Arm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES = {
    "full": "Full (all)",
    "sliding": "Full (sliding)",
    "truncated": "Full (truncated)",
    "none": "No nuggets",
    "compressive": "Compressive",
    "learned": "Dodo learned",
    "strided": "Dodo strided",
    "random": "Dodo random",
    "delimiters": "Dodo delimiters",
    "frozen": "Dodo frozen scorer",
}
# Dodo, Table 1: perplexity a subword on WikiText-103 at 64, 128 and 256 states, Llama-2 7B, 10x.
PAPER_LM = {"truncated": (7.95, 6.87, 6.39), "compressive": (7.64, 7.09, 6.88), "learned": (6.91, 6.58, 6.30)}

# Section 4.2, LLaMA-7B.
PAPER_BLEU = {"learned": "near 98 at 20x"}

PAPER = (
    "The paper's perplexity is of WikiText-103, Llama-2 7B, 10x (Dodo, Table 1); its reconstruction is LLaMA-7B's "
    "(Section 4.2).\nThere ten token types, mostly those that end a clause, are 95% of the nuggets."
)


def by_arm(runs: Sequence[Run], task: str) -> dict[Arm, list[Run]]:
    """The runs of each arm of a task, in the order of ratios and methods."""
    order = SELECTIONS if task == "ae" else LM_ARMS
    runs_by_arm: dict[Arm, list[Run]] = {}
    task_runs = (run for run in runs if run.task == task)
    for run in sorted(task_runs, key=lambda run: (run.ratio, order.index(run.method), run.seed)):
        runs_by_arm.setdefault(Arm(task, run.method, run.ratio), []).append(run)
    return runs_by_arm


def reconstruction_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Header and one row an arm that reconstructs; several seeds give mean (lowest-highest)."""
    header = ["selection", "ratio", "held-out loss", "test loss", "token accuracy", "BLEU-4", "nuggets", "seeds"]
    rows = [[*header, "paper: BLEU"]]
    for arm, arm_runs in by_arm(runs, "ae").items():
        rows.append(
            [
                TITLES[arm.method],
                f"{arm.ratio}x",
                results.spread([run.held_out["loss"] for run in arm_runs]),
                results.spread([run.test["loss"] for run in arm_runs]),
                results.spread([run.test["accuracy"] for run in arm_runs]),
                results.spread([run.test["bleu"] for run in arm_runs], "{:.1f}".format),
                results.spread([run.chosen.get("rate", math.nan) for run in arm_runs]),
                str(len(arm_runs)),
                PAPER_BLEU.get(arm.method, "-"),
            ]
        )
    return rows


def language_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Header and one row an arm of the language model: measured states and perplexity; several seeds as above."""
    header = ["states kept", "held-out states", "held-out perplexity", "test states", "test perplexity", "nuggets"]
    rows = [[*header, "seeds", "paper: at 64 / 128 / 256 states"]]
    for arm, arm_runs in by_arm(runs, "lm").items():
        row = [TITLES[arm.method]]
        for split in ("held_out", "test"):
            row.append(results.spread([getattr(run, split)["states"] for run in arm_runs], "{:.1f}".format))
            row.append(results.spread([math.exp(getattr(run, split)["loss"]) for run in arm_runs], "{:.2f}".format))
        rate = [run.chosen["rate"] for run in arm_runs if run.chosen]
        paper = " / ".join(f"{value:.2f}" for value in PAPER_LM.get(arm.method, ())) or "-"
        rows.append([*row, results.spread(rate) if rate else "-", str(len(arm_runs)), paper])
    return rows


def type_rows(runs: Sequence[Run], task: str, top: int = 10) -> list[list[str]]:
    """Header and the token types that the learned scorer selects most (first seed, highest ratio)."""
    run = _learned_run(runs, task)
    rows = [["token", "share of nuggets", "share of text"]]
    if run is not None:
        selected, tokens = run.chosen["selected"], run.chosen["tokens"]
        for token, times, occurrences in run.chosen["types"][:top]:
            rows.append([repr(token), f"{times / max(selected, 1):.3f}", f"{occurrences / tokens:.3f}"])
    return rows


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """Perplexity by states, and of the learned scorer the token types and a text."""
    from gistkit_lab.viz import draw_perplexity, draw_text, draw_token_types

    pictures: dict[str, Figure] = {}
    language = {arm: arm_runs for arm, arm_runs in by_arm(runs, "lm").items() if arm.method != "full"}
    if language:
        series = {}
        for arm, arm_runs in language.items():
            states = mean(run.test["states"] for run in arm_runs)
            series[TITLES[arm.method]] = [(states, [math.exp(run.test["loss"]) for run in arm_runs])]
        pictures["perplexity"] = draw_perplexity(series, title="Perplexity of test text by states kept a layer")
    for task, purpose in (("ae", "to reconstruct"), ("lm", "to read on")):
        learned = _learned_run(runs, task)
        if learned is not None and learned.chosen.get("types"):
            selected, tokens = learned.chosen["selected"], learned.chosen["tokens"]
            types = [
                (token, times / selected, occurrences / tokens) for token, times, occurrences in learned.chosen["types"]
            ]
            title = f"Nuggets learned {purpose}, {learned.ratio}x"
            pictures[f"{task}-types"] = draw_token_types(types, title=title)
            pieces, scores, is_nugget = zip(*learned.chosen["text"], strict=True)
            pictures[f"{task}-text"] = draw_text(pieces, scores, is_nugget, title=title)
    return pictures


def _learned_run(runs: Sequence[Run], task: str) -> Run | None:
    learned = [run for arm, arm_runs in by_arm(runs, task).items() if arm.method == "learned" for run in arm_runs[:1]]
    return learned[-1] if learned else None
