"""What a study is: the options of its command, its runs, and what is shown of them."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gistkit.studies.results import DataSource

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gistkit.studies.registry import SavedRun


class Job(NamedTuple):
    """A run that is asked for: an arm, by its name, and a seed."""

    arm: Any
    seed: int

    @property
    def name(self) -> str:
        """What the run is called, in files too."""
        return f"{_name(self.arm)}-{self.seed}"

    @property
    def title(self) -> str:
        """What its progress bar is called."""
        return f"{_name(self.arm)} seed {self.seed}"


def _name(arm: Any) -> str:
    return arm if isinstance(arm, str) else str(arm.name)


@dataclass(frozen=True)
class StudyPlan:
    """What a command line asks of a study.

    Args:
        recipe: what decides all runs.
        jobs: the runs.
        about: lines to print before the first.
        source: what is read; None: nothing is.
        preset: of the recipe, "" where there are none; it names the file of committed results.
    """

    recipe: Any
    jobs: Sequence[Job]
    about: str = ""
    source: DataSource | None = None
    preset: str = ""


class Study(ABC):
    """A paper's experiment.

    Args:
        name: as commands and results files have it.
        run_type, recipe_type: made of what a results file holds.
        kind: of what is read, "text" or "images".
        presets: recipes by name, for --preset.
        train_run: trains and measures one run: (recipe, arm, seed, the plan's source if it has one, out, *, device,
            resume, bar); a study may override `train` instead.
    """

    name: str
    run_type: Any
    recipe_type: Any
    kind = "text"
    presets: Mapping[str, Any]
    train_run: Callable[..., Any]

    @abstractmethod
    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """The options of its command, but for those that all have."""

    @abstractmethod
    def plan(self, options: argparse.Namespace) -> StudyPlan:
        """What is to be run.

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
        """What the runs of one recipe gave, beside the paper's figures."""

    @abstractmethod
    def figures(self, runs: Sequence[Any], recipe: Any) -> Mapping[str, Figure]:
        """Pictures of the same, by name."""

    @abstractmethod
    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        """The tables of committed runs, a group a recipe, each with what it was made with."""

    def report(self, runs: Sequence[Any], plan: StudyPlan) -> str:
        """What the command prints at the end."""
        return self.table(runs, plan.recipe)

    def more_pictures(self, plan: StudyPlan, out: Path) -> list[Path]:
        """Pictures of the states in `out`, written there too."""
        return []

    def small(self, recipe: Any) -> bool:
        """Whether a model is so small that one thread trains it as fast as several."""
        return True

    def variant(self, recipe: Any) -> str:
        """What tells recipes apart that one results file may hold; each has a table of its own."""
        return ""

    def without_maps(self, run: Any) -> Any:
        """A run as it is committed: without attention maps."""
        return replace(run, attention=[]) if hasattr(run, "attention") else run

    def run_of(self, values: dict[str, Any]) -> Any:
        """A run of what a results file holds of it."""
        return self.run_type(**values)

    def recipe_of(self, values: dict[str, Any]) -> Any:
        """A recipe of what a results file holds of it."""
        return self.recipe_type(**values)

    def seed(self, run: Any) -> int:
        """The seed of a run."""
        return int(run.seed)
