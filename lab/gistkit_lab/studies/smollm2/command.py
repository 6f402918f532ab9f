"""The command of the study `smollm2`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gistkit.evaluate.report import format_table
from gistkit.layouts.positions import SCHEMES
from gistkit.options.arguments import number
from gistkit.train.data import load_corpus
from gistkit_lab.studies import reconstruction
from gistkit_lab.studies.epl import report
from gistkit_lab.studies.epl.command import STUDIED, Epl
from gistkit_lab.studies.options import add_names, add_text, jobs, seeds_of
from gistkit_lab.studies.pages import drop_column, machine_caption, runs, seeds
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.smollm2.study import CARRIERS, DTYPES, PRESETS, Recipe, build_compressor, recipe, tokenizer
from gistkit_lab.studies.study import StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# What options change of a preset.
CHANGEABLE = ("method", "match_embeddings", "dtype", "learning_rate")


class SmolLM2(Epl):
    """Position layouts on a real language model."""

    name = "smollm2"
    recipe_type = Recipe

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--preset", choices=PRESETS, default="short",
            help="short: minutes a run on a CPU; long: chunks of 510 tokens; staged: ICAE with matched embeddings and "
            "contexts that grow from 16 to 64 tokens, two hours of a core a run; paper, paper-staged: for a GPU "
            "(default: %(default)s)",
        )  # fmt: skip
        parser.add_argument("--method", choices=CARRIERS, help="default: the preset's, x500 but for the staged ones")
        parser.add_argument(
            "--match-embeddings", action=argparse.BooleanOptionalAction,
            help="whether ICAE's outputs get the size of embeddings (default: as the preset; the staged ones have it)",
        )  # fmt: skip
        add_names(parser, "--layouts", SCHEMES, STUDIED)
        add_text(parser)
        parser.add_argument(
            "--dtype", choices=DTYPES,
            help="of the frozen model; bfloat16 is faster on processors that multiply in it (default: float32)",
        )  # fmt: skip
        parser.add_argument("--learning-rate", type=number(1e-9, 1.0), help="default: the preset's")
        parser.add_argument(
            "--seeds", type=seeds_of, default=1, metavar="N", help="seeds 0 to N-1 (default: %(default)s)"
        )

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        changes = {name: getattr(options, name) for name in CHANGEABLE if getattr(options, name) is not None}
        run_recipe = recipe(options.preset, **changes)
        corpus = load_corpus(options.text, tokenizer=tokenizer(run_recipe))
        about = (
            f"SmolLM2-135M, frozen: {run_recipe.chunk} tokens from {run_recipe.chunk // run_recipe.ratio} "
            f"memory tokens, LoRA of rank {run_recipe.rank} in the encoder; text {corpus.name} "
            f"({len(corpus.train)} + {len(corpus.held_out)} tokens)"
        )
        return StudyPlan(run_recipe, jobs(options.layouts, options.seeds), about, corpus, options.preset)

    def build(self, recipe: Any, arm: str, seed: int) -> Any:
        return build_compressor(recipe, arm, seed)

    def small(self, recipe: Any) -> bool:
        return False

    def variant(self, recipe: Any) -> str:
        stages = "-staged" if recipe.lengths else ""
        matched = "-matched" if recipe.match_embeddings else ""
        dtype = "" if recipe.dtype == DTYPES[0] else f"-{recipe.dtype}"
        return f"{recipe.method}{matched}{stages}{dtype}-{recipe.learning_rate:g}"

    def without_maps(self, run: reconstruction.Run) -> reconstruction.Run:
        return replace(run, attention=run.attention[-1:])

    def table(self, runs: Sequence[reconstruction.Run], recipe: Any) -> str:
        return format_table(_rows(runs, recipe))

    def report(self, runs: Sequence[reconstruction.Run], plan: StudyPlan) -> str:
        return super().report(runs, plan).removesuffix(f"\n\n{report.LIMITS}")

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        order = list(PRESETS)
        preset = {id(group): self.preset(group[0].recipe) for group in groups}
        tables = []
        for group in sorted(
            groups, key=lambda group: (group[0].recipe.method == "icae", order.index(preset[id(group)]))
        ):
            recipe = group[0].recipe
            rows = _rows(runs(group), recipe)
            name = {"x500": "500x", "icae": "ICAE"}[recipe.method] + ", matched" * recipe.match_embeddings
            rows[0][0] = f"{name}, {preset[id(group)]}, learning rate {recipe.learning_rate:g}"
            tables.append(
                f"{format_table(drop_column(rows, 'training'))}\n\nHeld-out, {recipe.steps} steps of {recipe.batch} x "
                f"{recipe.chunk} tokens, {recipe.chunk // recipe.ratio} memory tokens, {seeds(group)}"
                f"{_stages(recipe)}{'' if recipe.dtype == DTYPES[0] else f', {recipe.dtype}'}. "
                f"{machine_caption(group)}."
            )
        return "\n\n".join(tables)

    def preset(self, run_recipe: Recipe) -> str:
        """The preset of a recipe."""
        options = {name: getattr(run_recipe, name) for name in CHANGEABLE}
        return next((name for name in PRESETS if recipe(name, **options) == run_recipe), "other")

    def figures(self, runs: Sequence[reconstruction.Run], recipe: Any) -> Mapping[str, Figure]:
        return report.figures(runs, recipe, last_layer=True)


def _rows(runs: Sequence[reconstruction.Run], recipe: Recipe) -> list[list[str]]:
    rows = report.table_rows(runs, recipe.method)
    # The losses of a curve in stages are those of contexts of several lengths.
    return drop_column(rows, rows[0][1]) if recipe.lengths else rows


def _stages(recipe: Recipe) -> str:
    if not recipe.lengths:
        return ""
    return (
        f"; contexts of {', '.join(map(str, recipe.lengths))} tokens one after another, with as many tokens a step; "
        f"{recipe.compression_steps} steps of the compression loss alone"
    )


STUDY = SmolLM2()
