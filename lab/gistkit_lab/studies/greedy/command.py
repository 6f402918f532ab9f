"""The command of the study `greedy`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gistkit.compress import Dodo
from gistkit.options.arguments import device, path, positive
from gistkit.options.models import add_dtype, add_model_name, load_compressor, load_model
from gistkit.options.texts import read_contents
from gistkit.train.presets import find_preset
from gistkit.train.streams import token_ids
from gistkit_lab.studies.greedy import report
from gistkit_lab.studies.greedy.report import Run
from gistkit_lab.studies.greedy.study import Recipe, SwapSearch, passages, study
from gistkit_lab.studies.pages import machine_caption, runs
from gistkit_lab.studies.registry import SavedRun
from gistkit_lab.studies.study import Job, Study, StudyPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Search:
    """A trained Dodo and the passages whose nuggets are swapped.

    Args:
        compressor, texts, batch_size: as of `study`.
    """

    def __init__(self, compressor: Dodo, texts: Sequence[Sequence[int]], batch_size: int) -> None:
        self.compressor, self.texts, self.batch_size = compressor, texts, batch_size
        self.name = compressor.title


class Passages(NamedTuple):
    """What was read."""

    name: str
    digest: str


class GreedyStudy(Study):
    """How near a Dodo's nuggets are to the best that a greedy search finds; nothing is trained."""

    name = "greedy"
    run_type = Run
    recipe_type = Recipe

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--compressor", type=path, required=True, metavar="FOLDER", help="trained Dodo")
        add_model_name(parser)
        add_dtype(parser)
        parser.add_argument(
            "--texts", nargs="+", required=True, metavar="TEXT", help="text file, folder, or - for standard input"
        )
        parser.add_argument("--glob", default="**/*.txt", help="which files of a folder (default: %(default)s)")
        parser.add_argument(
            "--passages", type=positive, default=16, metavar="N",
            help="of the texts, at most; each is read some thousand times (default: %(default)s; the paper: 1000)",
        )  # fmt: skip
        for name, default, purpose in (
            ("--context", 128, "tokens compressed"),
            ("--read", 64, "tokens after them, uncompressed"),
            ("--asked", 64, "tokens after these, predicted"),
            ("--rounds", 1, "times through all nuggets"),
            ("--batch-size", 32, "selections read at a time"),
        ):
            parser.add_argument(
                name, type=positive, default=default, metavar="N", help=f"{purpose} (default: %(default)s)"
            )

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        contents = read_contents(options.texts, options.glob)
        recipe = Recipe(options.context, options.read, options.asked, options.rounds)
        model, tokenizer = load_model(options.model, options.dtype, device(options.device))
        compressor = load_compressor(options.compressor, model)
        if not isinstance(compressor, Dodo):
            raise ValueError(f"--compressor: expected a Dodo, got a {type(compressor).__name__}, {options.compressor}")
        texts = [token_ids(tokenizer, content) for content in contents]
        text_passages = passages(texts, recipe.length, options.passages)
        if not text_passages:
            raise ValueError(
                f"--texts: expected one of at least {recipe.length} tokens, those of --context, --read and --asked, "
                f"got at most {max(map(len, texts))}"
            )
        about = (
            f"{compressor.title}: {len(text_passages)} passages, {recipe.context} tokens compressed, "
            f"{recipe.read} read, {recipe.asked} asked"
        )
        source = Passages(", ".join(options.texts), sha256(json.dumps(text_passages).encode()).hexdigest()[:12])
        return StudyPlan(recipe, [Job(Search(compressor, text_passages, options.batch_size), 0)], about, source)

    def train(self, plan: StudyPlan, job: Job, out: Path, *, device: str, resume: bool, bar: Any) -> Run:
        search: Search = job.arm
        results = list(study(search.compressor, search.texts, plan.recipe, batch_size=search.batch_size))
        return Run(search.compressor.title, search.compressor.settings, results)

    def arm_name(self, run: Run) -> str:
        return run.title

    def seed(self, run: Run) -> int:
        return 0

    def small(self, recipe: Recipe) -> bool:
        return False

    def run_of(self, values: dict[str, Any]) -> Run:
        names = ("before", "after")
        texts = [SwapSearch(**text | {name: tuple(text[name]) for name in names}) for text in values["texts"]]
        return Run(**values | {"texts": texts})

    def table(self, runs: Sequence[Run], recipe: Recipe) -> str:
        return report.format_results(runs)

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        (group,) = groups
        recipe, training = group[0].recipe, group[0].run.training
        preset = find_preset(training["preset"]).recipe
        return (
            f"{self.table(runs(group), recipe)}\n{recipe.context} tokens compressed, {recipe.read} read, "
            f"{recipe.asked} asked, after {training['steps']} steps of {preset.batch} passages of "
            f"{preset.max_length} tokens. {machine_caption(group)}."
        )

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Mapping[str, Figure]:
        return {}


STUDY = GreedyStudy()
