"""The command of the study `pooling`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.options.arguments import names, number, positive, several
from gistkit_lab.studies.options import seeds_of
from gistkit_lab.studies.pages import machine_caption, runs
from gistkit_lab.studies.pooling import report
from gistkit_lab.studies.pooling.inputs import INPUTS, make_inputs
from gistkit_lab.studies.pooling.layer import CONTEXTS, MASKS, Recipe, Setting
from gistkit_lab.studies.pooling.runs import Run, grid, train
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.study import Job, Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Without the vocabulary, whose matrix comes with another package.
QUICK: dict[str, Any] = {"inputs": ["sphere", "sphere+common"], "seeds": 1, "learning_rates": [1e-3], "steps": 400}
FULL: dict[str, Any] = {"inputs": list(INPUTS), "seeds": 3, "learning_rates": [1e-3, 3e-3], "steps": 500}
# What Section 6.1 says in words; its ratios but 1, lengths and learning rates are formulas that the stored text lacks.
PAPER: dict[str, Any] = {
    "inputs": ["sphere", "vocabulary"], "seeds": 3, "learning_rates": [3e-4, 1e-3, 3e-3], "steps": 50_000,
    "batch": 64, "heads": [(1, 1), (8, 8), (8, 4)], "ratios": [1, 2, 5],
}  # fmt: skip
PAPER_OPEN = """\
Getting to the Gist of Gisting, Table 11: 50,000 steps of 64 sequences, 3 seeds, heads 1/1, 8/8 and 8/4.
  - ratios: 1, and two that its stored text lacks, here 2 and 5 (--ratios)
  - lengths and learning rates: lacking too, here 20 and 3e-4, 1e-3, 3e-3 (--lengths, --learning-rates)
  - the vocabulary: SmolLM2's in place of Gemma 2's
  - the table's own figures: lacking; what the text says of them stands in the rows "paper"
  - a run that has 99.9% right ends there"""
BATCH, HEADS, RATIOS = 32, [(1, 1)], [2]


class PoolingStudy(Study):
    """One layer that learns to average windows of its context."""

    name = "pooling"
    run_type = Run
    recipe_type = Recipe

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        size = parser.add_mutually_exclusive_group()
        size.add_argument(
            "--quick", action="store_true",
            help="one seed and learning rate, 400 steps, without the vocabulary: under two minutes on two cores",
        )  # fmt: skip
        size.add_argument(
            "--paper", action="store_true",
            help="the paper's 50,000 steps of 64 sequences, 3 seeds and 3 shapes of heads at ratios 1, 2 and 5, for a "
            "GPU; other options change it",
        )  # fmt: skip
        parser.add_argument(
            "--inputs", type=names(*INPUTS),
            help="context embeddings: random on a sphere, rows of SmolLM2's vocabulary, or the sphere with one fixed "
            "vector added (default: all)",
        )  # fmt: skip
        parser.add_argument(
            "--masks", type=names(*MASKS), default=list(MASKS),
            help="a gist sees its own window (pool) or all before it (standard) (default: both)",
        )  # fmt: skip
        parser.add_argument(
            "--contexts", type=names(*CONTEXTS), default=list(CONTEXTS),
            help="length of the context: fixed, variable, or variable with all gists at position 0 (default: all)",
        )  # fmt: skip
        parser.add_argument("--ratios", type=several(positive), help="embeddings a window (default: 2)")
        parser.add_argument(
            "--lengths", type=several(positive), default=[20], help="embeddings a context (default: 20)"
        )
        parser.add_argument("--heads", type=several(_heads), help="heads/key heads (default: 1/1)")
        parser.add_argument(
            "--learning-rates", type=several(number(1e-9, 1.0)), metavar="RATES", help="default: 0.001,0.003"
        )
        parser.add_argument("--seeds", type=seeds_of, metavar="N", help="seeds 0 to N-1 (default: 3)")
        parser.add_argument("--steps", type=positive, help="training steps at most (default: 500)")
        parser.add_argument("--batch", type=positive, help="sequences a step (default: 32)")

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        preset: dict[str, Any] = {"batch": BATCH, "heads": HEADS, "ratios": RATIOS}
        preset |= PAPER if options.paper else QUICK if options.quick else FULL
        values = {name: preset[name] if (option := getattr(options, name)) is None else option for name in preset}
        settings = grid(
            seeds=values["seeds"],
            inputs=values["inputs"],
            heads=values["heads"],
            ratio=values["ratios"],
            length=options.lengths,
            mask=options.masks,
            context=options.contexts,
            learning_rate=values["learning_rates"],
        )
        recipe = Recipe(steps=values["steps"], batch=values["batch"])
        if options.paper:
            # As often in all as the shorter runs are watched.
            recipe = replace(recipe, eval_every=max(recipe.eval_every, recipe.steps // 100))
        # What is missing is missed before the first run, not after it.
        for name in values["inputs"]:
            make_inputs(name, recipe.width)
        about = f"{len(settings)} settings, {recipe.steps} steps of {recipe.batch} sequences at most"
        if options.paper:
            about = f"{PAPER_OPEN}\n{about}"
        return StudyPlan(recipe, [Job(setting, setting.seed) for setting in settings], about)

    def train(self, plan: StudyPlan, job: Job, out: Path, *, device: str, resume: bool, bar: Any) -> Run:
        return train(plan.recipe, job.arm, out / job.arm.name, device=device, resume=resume, bar=bar)

    def arm_name(self, run: Run) -> str:
        return run.setting.name

    def seed(self, run: Run) -> int:
        return run.setting.seed

    def run_of(self, values: dict[str, Any]) -> Run:
        return Run(**values | {"setting": Setting(**values["setting"])})

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        return report.format_results(runs, recipe)

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        saved = [run for part in groups for run in part]
        recipe = saved[0].recipe
        return (
            f"{report.format_results(runs(saved), recipe)}\nAt most {recipe.steps} steps of {recipe.batch} sequences. "
            f"{machine_caption(saved)}."
        )

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return report.figures(runs)


def _heads(text: str) -> tuple[int, int]:
    if re.fullmatch(r"\d+/\d+", text) is None:
        raise argparse.ArgumentTypeError(f"expected heads/key heads such as 8/4, got {text!r}")
    heads, keys = map(int, text.split("/"))
    return heads, keys


STUDY = PoolingStudy()
