"""The command of the study `pooling`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.options.arguments import names, number, positive, several
from gistkit.studies.options import seeds_of
from gistkit.studies.pages import machine_caption, runs
from gistkit.studies.pooling import report
from gistkit.studies.pooling.inputs import INPUTS, make_inputs
from gistkit.studies.pooling.layer import CONTEXTS, MASKS, Recipe, Setting
from gistkit.studies.pooling.runs import Run, grid, train
from gistkit.studies.registry import SavedRun
from gistkit.studies.study import Job, Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Without the vocabulary, whose matrix comes with another package.
QUICK: dict[str, Any] = {"inputs": ["sphere", "sphere+common"], "seeds": 1, "learning_rates": [1e-3], "steps": 400}
FULL: dict[str, Any] = {"inputs": list(INPUTS), "seeds": 3, "learning_rates": [1e-3, 3e-3], "steps": 500}


class PoolingStudy(Study):
    """One layer that learns to average windows of its context."""

    name = "pooling"
    run_type = Run
    recipe_type = Recipe

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--quick", action="store_true",
            help="one seed and learning rate, 400 steps, without the vocabulary: under two minutes on two cores",
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
        parser.add_argument("--ratios", type=several(positive), default=[2], help="embeddings a window (default: 2)")
        parser.add_argument(
            "--lengths", type=several(positive), default=[20], help="embeddings a context (default: 20)"
        )
        parser.add_argument("--heads", type=several(_heads), default=[(1, 1)], help="heads/key heads (default: 1/1)")
        parser.add_argument(
            "--learning-rates", type=several(number(1e-9, 1.0)), metavar="RATES", help="default: 0.001,0.003"
        )
        parser.add_argument("--seeds", type=seeds_of, metavar="N", help="seeds 0 to N-1 (default: 3)")
        parser.add_argument("--steps", type=positive, help="training steps at most (default: 500)")
        parser.add_argument("--batch", type=positive, default=32, help="sequences a step (default: %(default)s)")

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        preset = QUICK if options.quick else FULL
        values = {name: preset[name] if (option := getattr(options, name)) is None else option for name in preset}
        settings = grid(
            seeds=values["seeds"],
            inputs=values["inputs"],
            heads=options.heads,
            ratio=options.ratios,
            length=options.lengths,
            mask=options.masks,
            context=options.contexts,
            learning_rate=values["learning_rates"],
        )
        recipe = Recipe(steps=values["steps"], batch=options.batch)
        # What is missing is missed before the first run, not after it.
        for name in values["inputs"]:
            make_inputs(name, recipe.width)
        about = f"{len(settings)} settings, {recipe.steps} steps of {recipe.batch} sequences at most"
        return StudyPlan(recipe, [Job(setting, setting.seed) for setting in settings], about)

    def train(self, plan: StudyPlan, job: Job, out: Path, *, device: str, resume: bool, bar: Any) -> Run:
        state = out / f"{job.arm.name}.safetensors"
        return train(plan.recipe, job.arm, state, device=device, resume=resume, bar=bar)

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
