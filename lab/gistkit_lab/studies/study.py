"""Study: a paper's experiment, in a file of its own: recipe and arms, how one is trained, its tables and pictures."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from gistkit.evaluate.report import format_table
from gistkit.options.arguments import existing, names, number, positive, several, whole
from gistkit.train.data import load_corpus
from gistkit_lab.studies.rows import Rows, drop_column, joined

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gistkit_lab.studies.fitting import Session


# More runs than that are a mistake, and would be listed before the first begins.
seeds_of = whole(1, 10_000)


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


class Names(NamedTuple):
    """An option of comma-separated names: those that there are, those without it, and more of its help."""

    known: Sequence[str]
    default: Sequence[str]
    more: str = ""


def _name(arm: Any) -> str:
    return arm if isinstance(arm, str) else str(arm.name)


# By name.
Pictures: TypeAlias = "Mapping[str, Figure]"


def jobs(arms: Sequence[object], seeds: int) -> list[Job]:
    """Every arm of seed 0, then of seed 1, ..."""
    return [Job(arm, seed) for seed in range(seeds) for arm in arms]


@dataclass(frozen=True)
class StudyPlan:
    """The runs that a command line asks for.

    Args:
        recipe: what determines all runs.
        jobs: the runs.
        about: lines to print before the first run.
        source: the text or images, with name and digest; None: there are none.
        preset: the preset's name, "" for studies without presets; part of the name of the committed results file.
    """

    recipe: Any
    jobs: Sequence[Job]
    about: str = ""
    source: Any = None
    preset: str = ""


class SavedRun(NamedTuple):
    """A run from a results file; `source` is the name of its text or images."""

    run: Any
    recipe: Any
    machine: dict[str, Any]
    source: str = ""


def add_names(
    parser: argparse.ArgumentParser, option: str, choices: Sequence[str], default: Sequence[str], more: str = ""
) -> None:
    """An option of comma-separated names. `more`: help text before the default."""
    parser.add_argument(
        option,
        type=names(*choices),
        default=list(default),
        help=f"comma-separated{more} (default: {','.join(default)})",
    )


def add_fields(
    parser: argparse.ArgumentParser, recipe: Any, purposes: Mapping[str, str], choices: Mapping[str, Any]
) -> None:
    """An option for each field of a recipe's class that has a purpose; one that is not given is None.

    `choices` are the values of a field that has names.
    """
    kinds: dict[str, dict[str, Any]] = {
        "bool": {"action": argparse.BooleanOptionalAction},
        "int": {"type": whole(), "metavar": "N"},
        "float": {"type": number(1e-9, 1.0)},
        "tuple[int, ...]": {"type": several(positive), "metavar": "N,N,.."},
    }
    for each in fields(recipe):
        if each.name in purposes:
            kind = {"choices": choices[each.name]} if each.name in choices else kinds[str(each.type)]
            parser.add_argument(f"--{each.name.replace('_', '-')}", help=purposes[each.name], **kind)


class Study(ABC):
    """A paper's experiment.

    Args:
        name: in commands and results files.
        run_type, recipe_type: classes of what a results file holds.
        arm_field: of a run, its arm, where that is a name.
        arm_type: of other arms, whose fields a run has too.
        presets: recipes by name, for --preset; `sizes`: what they are, for the help; `preset`: the default.
        lists: options of names, of which the first has the arms; text: what --text is, "" without it.
        changes: fields of the recipe that are options, with their help; choices: the values of those that have names.
        notes: by preset, what it follows and what its paper leaves open.
        kind: of the source, "text" or "images".
        shared: whether the processes of a launcher can train a run together.
        measured: what the tables of held-out data and of the test split are called; (): the latter stands alone.
        legend: what stands below the tables.
    """

    name: ClassVar[str]
    run_type: ClassVar[Any]
    recipe_type: ClassVar[Any]
    arm_field: ClassVar[str] = "arm"
    arm_type: ClassVar[Any] = None
    presets: ClassVar[Mapping[str, Any]] = {}
    sizes: ClassVar[str] = ""
    preset: ClassVar[str] = "quick"
    lists: ClassVar[Mapping[str, Names]] = {}
    text: ClassVar[str] = ""
    changes: ClassVar[Mapping[str, str]] = {}
    choices: ClassVar[Mapping[str, Sequence[str]]] = {}
    notes: ClassVar[Mapping[str, str]] = {}
    kind: ClassVar[str] = "text"
    shared: ClassVar[bool] = False
    measured: ClassVar[tuple[str, ...]] = ("Held-out", "Test")
    legend: ClassVar[str] = ""

    # What a command line asks for.

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options of its command, without those that all studies have."""
        if self.presets:
            parser.add_argument(
                "--preset", choices=self.presets, default=self.preset, help=f"{self.sizes} (default: %(default)s)"
            )
        for option, each in self.lists.items():
            add_names(parser, f"--{option}", *each)
        if self.text:
            parser.add_argument("--text", type=existing, help=f"{self.text} (default: the standard library's topics)")
        self.add_own(parser)
        add_fields(parser, self.recipe_type, self.changes, self.choices)
        parser.add_argument(
            "--seeds", type=seeds_of, default=1, metavar="N", help="seeds 0 to N-1 (default: %(default)s)"
        )
        steps, default = (None, "the preset's") if self.presets else (self.recipe_type.steps, "%(default)s")
        parser.add_argument("--steps", type=positive, default=steps, help=f"training steps a run (default: {default})")

    def add_own(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options that are the study's alone."""
        return

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        """The runs to make.

        Raises:
            ValueError: naming the option, what was expected and what came.
        """
        recipe = self.recipe_for(options)
        source = self.load(options, recipe)
        recipe = self.fitted(recipe, source)
        arms = self.arms(options, recipe)
        about = [self.about(recipe, arms, source), self.notes.get(getattr(options, "preset", ""))]
        return StudyPlan(
            recipe, jobs(arms, options.seeds), "\n".join(filter(None, about)), source, self.file(options, recipe)
        )

    def recipe_for(self, options: argparse.Namespace) -> Any:
        """The recipe of --preset, with --steps and what else of it is given."""
        recipe = self.presets[options.preset] if self.presets else self.recipe_type()
        given = {name: value for name in self.changes if (value := getattr(options, name)) is not None}
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        return replace(recipe, steps=options.steps or recipe.steps, **given)

    def load(self, options: argparse.Namespace, recipe: Any) -> Any:
        """The text or the images; None: there are none."""
        return load_corpus(options.text, tokenizer=self.tokenizer(recipe)) if self.text else None

    def tokenizer(self, recipe: Any) -> Any:
        """Of the text; None: it is bytes."""
        return None

    def fitted(self, recipe: Any, source: Any) -> Any:
        """The recipe for a text or images."""
        return recipe

    def arms(self, options: argparse.Namespace, recipe: Any) -> Sequence[Any]:
        """The arms, or their names."""
        return list(getattr(options, next(iter(self.lists))))

    def about(self, recipe: Any, arms: Sequence[Any], source: Any) -> str:
        """A line to print before the first run."""
        return ""

    def file(self, options: argparse.Namespace, recipe: Any) -> str:
        """What the name of the committed results file has besides the study's."""
        return getattr(options, "preset", "")

    # A run.

    @abstractmethod
    def train(self, session: Session) -> Any:
        """Trains and measures one run; the session's folder gets its state at every evaluation."""

    def small(self, recipe: Any) -> bool:
        """Whether the model is so small that one thread trains it as fast as several."""
        return getattr(recipe, "model", None) != "smollm2" and getattr(recipe, "dim", 0) <= 128

    # What is kept of runs.

    def arm_of(self, run: Any) -> Any:
        if self.arm_type is None:
            return getattr(run, self.arm_field)
        return self.arm_type(**{each.name: getattr(run, each.name) for each in fields(self.arm_type)})

    def arm_name(self, run: Any) -> str:
        return _name(self.arm_of(run))

    def seed(self, run: Any) -> int:
        return int(run.seed)

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
        """A recipe from its values in a results file, in which tuples are lists."""
        return self.recipe_type(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})

    # Tables and pictures.

    def order(self, run: Any) -> Any:
        """What the arms of runs are sorted by; the seed comes after it."""
        return 0

    def by_arm(self, runs: Sequence[Any]) -> dict[Any, list[Any]]:
        """The runs of each arm by seed, arms in their order."""
        found: dict[Any, list[Any]] = {}
        for run in sorted(runs, key=lambda run: (self.order(run), self.seed(run))):
            found.setdefault(self.arm_of(run), []).append(run)
        return found

    def rows(self, runs: Sequence[Any], recipe: Any, split: str = "test") -> Rows:
        """Header and one row an arm, of "held_out" or "test"; several seeds give mean (lowest-highest)."""
        raise NotImplementedError

    def more_rows(self, runs: Sequence[Any], recipe: Any) -> Sequence[Rows]:
        """Further tables of the runs."""
        return ()

    def paper_rows(self, recipe: Any) -> Sequence[Rows]:
        """Tables of the paper's figures."""
        return ()

    def table(self, runs: Sequence[Any], recipe: Any) -> str:
        """The results of the runs of one recipe, beside the paper's figures."""
        tables = joined([self.rows(runs, recipe), *self.more_rows(runs, recipe), *self.paper_rows(recipe)])
        return "\n\n".join(filter(None, [tables, self.legend]))

    def report(self, runs: Sequence[Any], plan: StudyPlan) -> str:
        """The text that the command prints at the end."""
        if not self.measured:
            return self.table(runs, plan.recipe)
        held_out, test = self.measured
        return (
            f"{held_out}:\n{format_table(self.rows(runs, plan.recipe, 'held_out'))}\n\n"
            f"{test}:\n{self.table(runs, plan.recipe)}"
        )

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        """The tables of committed runs, in groups by recipe, with captions; and the paper's."""
        parts: list[str] = []
        for group in groups:
            for rows, caption in self.captioned(group):
                # Other work on the machine distorts how long a run took.
                shown = drop_column(rows, "training") if "training" in rows[0] else rows
                parts += ["\n\n".join(filter(None, [format_table(shown), caption]))] if len(rows) > 1 else []
        return "\n\n".join([*parts, *map(format_table, self.paper_rows(groups[0][0].recipe))])

    def captioned(self, group: Sequence[SavedRun]) -> Sequence[tuple[Rows, str]]:
        """The tables of committed runs of one recipe, each with its caption."""
        runs, recipe = [saved.run for saved in group], group[0].recipe
        tables = [self.rows(runs, recipe), *self.more_rows(runs, recipe)]
        return list(zip(tables, self.captions(group), strict=True))

    def captions(self, group: Sequence[SavedRun]) -> Sequence[str]:
        """Of `rows` and of each of `more_rows`."""
        raise NotImplementedError

    def figures(self, runs: Sequence[Any], recipe: Any) -> Pictures:
        """Pictures of the results, by name."""
        return {}

    def more_pictures(self, plan: StudyPlan, out: Path) -> list[Path]:
        """Writes pictures of the states in `out`, and returns their paths."""
        return []
