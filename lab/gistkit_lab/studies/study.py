"""Study: the options of a study's command, its runs, and its tables and figures."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gistkit_lab.studies.results import DataSource

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Job(NamedTuple):
    """A run to be made: an arm, or its name, and a seed."""

    arm: Any
    seed: int

    @property
    def name(self) -> str:
        """The name of the run, also in files."""
        return f"{_name(self.arm)}-{self.seed}"

    @property
    def title(self) -> str:
        """The title of its progress bar."""
        return f"{_name(self.arm)} seed {self.seed}"


def _name(arm: Any) -> str:
    return arm if isinstance(arm, str) else str(arm.name)


@dataclass(frozen=True)
class StudyPlan:
    """The runs that a command line asks for.

    Args:
        recipe: what determines all runs.
        jobs: the runs.
        about: lines to print before the first run.
        source: the text or images; None: there are none.
        preset: the preset's name, "" for studies without presets; part of the name of the committed results file.
    """

    recipe: Any
    jobs: Sequence[Job]
    about: str = ""
    source: DataSource | None = None
    preset: str = ""


class Study(ABC):
    """A paper's experiment.

    Args:
        name: in commands and results files.
        run_type, recipe_type: classes of what a results file holds.
        kind: of the plan's source, "text" or "images".
        presets: recipes by name, for --preset.
        shared: whether the processes of a launcher can train a run together.
        train_run: trains and measures one run: (recipe, arm, seed, the plan's source if it has one, out, *, device,
            resume, bar); a study may override `train` instead.
    """

    name: str
    run_type: Any
    recipe_type: Any
    kind = "text"
    presets: Mapping[str, Any]
    shared = False
    train_run: Callable[..., Any]

    @abstractmethod
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options of its command, without those that all studies have."""

    @abstractmethod
    def plan(self, options: argparse.Namespace) -> StudyPlan:
        """The runs to make.

        Raises:
            ValueError: naming the option, what was expected and what came.
        """

    def recipe_for(self, options: argparse.Namespace) -> Any:
        """The recipe of --preset, with --steps if they are given."""
        recipe = self.presets[options.preset]
        return replace(recipe, steps=options.steps or recipe.steps)

    def train(self, plan: StudyPlan, job: Job, out: Path, *, device: str, resume: bool, bar: Any) -> Any:
        """Trains and measures one run; `out` keeps its state, from which `resume` continues."""
        source = () if plan.source is None else (plan.source,)
        return self.train_run(plan.recipe, job.arm, job.seed, *source, out, device=device, resume=resume, bar=bar)

    @abstractmethod
    def arm_name(self, run: Any) -> str:
        """The name of a run's arm."""

    @abstractmethod
    def table(self, runs: Sequence[Any], recipe: Any) -> str:
        """The results of the runs of one recipe, beside the paper's figures."""

    @abstractmethod
    def figures(self, runs: Sequence[Any], recipe: Any) -> Mapping[str, Figure]:
        """Pictures of the results, by name."""

    @abstractmethod
    def page(self, groups: Sequence[Sequence[Any]]) -> str:
        """The tables of committed runs (`SavedRun` of the registry), in groups by recipe, with captions."""

    def report(self, runs: Sequence[Any], plan: StudyPlan) -> str:
        """The text that the command prints at the end."""
        return self.table(runs, plan.recipe)

    def more_pictures(self, plan: StudyPlan, out: Path) -> list[Path]:
        """Writes pictures of the states in `out`, and returns their paths."""
        return []

    def small(self, recipe: Any) -> bool:
        """Whether the model is so small that one thread trains it as fast as several."""
        return True

    def variant(self, recipe: Any) -> str:
        """The name of a recipe among several in one results file; each has its own table."""
        return ""

    def without_maps(self, run: Any) -> Any:
        """A run as committed, without attention maps."""
        return replace(run, attention=[]) if hasattr(run, "attention") else run

    def run_of(self, values: dict[str, Any]) -> Any:
        """A run from its values in a results file."""
        return self.run_type(**values)

    def recipe_of(self, values: dict[str, Any]) -> Any:
        """A recipe from its values in a results file."""
        return self.recipe_type(**values)

    def seed(self, run: Any) -> int:
        """The seed of a run."""
        return int(run.seed)
