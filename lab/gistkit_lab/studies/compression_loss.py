"""Study `compression-loss`: whether a compression loss can stand in for the autoencoding loss in pretraining.

The demo's small model is pretrained under each setting, with the continuation loss in all of them. Copies of it are
then fine-tuned alike, on the autoencoding loss alone and on questions (More Effective LLM Compressed Tokens, Table 2,
whose model is Llama-2-7B at 15x, fine-tuned on PwC). All weights train; encoder and decoder share them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gistkit.compress import Compressor
from gistkit.hf import attach
from gistkit.train.data import Corpus
from gistkit_lab.studies import epl
from gistkit_lab.studies.draws import measured
from gistkit_lab.studies.fitting import Session
from gistkit_lab.studies.needles import Needles
from gistkit_lab.studies.needles import evaluate as answer
from gistkit_lab.studies.pages import machine_caption, runs, seeds
from gistkit_lab.studies.reconstruction import evaluate, held_out_losses
from gistkit_lab.studies.rows import SEEDS, Cell, Rows, name_of, of_split, spread, tabulate
from gistkit_lab.studies.study import Names, Pictures, SavedRun, Study, StudyPlan

PRETRAINING = "pretraining"
Loss = Callable[[Compressor, int], Tensor]


class Setting(NamedTuple):
    """What a setting is called in tables, and what it pretrains with: losses and position layout."""

    title: str
    losses: tuple[str, ...]
    layout: str = "epl"


SETTINGS = {
    "full": Setting("full", ("ae", "lm", "compression")),
    "without-cl": Setting("without CL", ("ae", "lm")),
    "without-ae": Setting("without AE", ("lm", "compression")),
    "without-ae-cl": Setting("without AE and CL", ("lm",)),
    "without-pi": Setting("without PI", ("ae", "lm", "compression"), "dpl"),
    "without-cl-pi": Setting("without CL and PI", ("ae", "lm"), "dpl"),
}
# The losses of fine-tuning, each alone.
TASKS = ("ae", "qa")


@dataclass(frozen=True)
class Recipe(epl.Recipe):
    """Everything that determines a run except its setting and seed; `steps` are those of pretraining.

    Args:
        tuning_steps, tuning_eval_every: of each fine-tuning, which starts with the warm-up anew.
        cue, answer: bytes of a question's passage, see `Needles`; its context is a chunk.
        eval_questions: held-out questions at every evaluation.
        final_questions: questions at the end, held-out ones and as many of the test split.
    """

    continuation: int = 80
    tuning_steps: int = 200
    tuning_eval_every: int = 10
    cue: int = 6
    answer: int = 8
    eval_questions: int = 64
    final_questions: int = 256

    @property
    def tuning(self) -> Recipe:
        """The schedule of a fine-tuning."""
        return replace(self, steps=self.tuning_steps, eval_every=self.tuning_eval_every)


def build_compressor(recipe: Recipe, setting: str, seed: int) -> Compressor:
    """The untrained model of a seed under one of `SETTINGS`."""
    _, losses, layout = SETTINGS[setting]
    return epl.build_compressor(recipe, layout, seed, losses)


@dataclass
class Run:
    """The results of one setting and seed, by stage: "pretraining", and the fine-tunings "ae" and "qa" of its copies.

    `curves` hold (step, loss, share) over held-out text: of reconstruction nats a byte and right bytes, in the stage
    "qa" nats an answer's byte and exact answers. `seconds` are those of training at each of these evaluations; those of
    fine-tuning begin where pretraining ends. `held_out` and `test` hold the figures at the end of each stage: "loss"
    and "share", and of pretraining also the losses it trained, by name. The test split is read once.
    """

    setting: str
    seed: int
    curves: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    held_out: dict[str, dict[str, float]] = field(default_factory=dict)
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    parameters: int = 0


class Texts:
    """What a seed trains on and is measured on, which are the two held-out splits of a corpus of bytes."""

    def __init__(self, recipe: Recipe, corpus: Corpus, seed: int, device: str) -> None:
        self.recipe, self.corpus, self.seed, self.device = recipe, corpus, seed, device
        length = recipe.chunk + recipe.continuation
        self.chunks: dict[str, Tensor] = {}
        self.passages: dict[str, Tensor] = {}
        for name, split in measured(corpus, length).items():
            self.chunks[name] = split.chunks(recipe.chunk, count=recipe.final_chunks).to(device)
            self.passages[name] = split.chunks(length, count=recipe.final_chunks).to(device)
        self.questions = Needles(
            corpus, None, recipe.batch, recipe.chunk, recipe.chunk,
            lines=0, cue=recipe.cue, answer=recipe.answer, seed=seed,
        )  # fmt: skip

    def loss(self, stage: str) -> Loss:
        """The training loss of a stage at step 0, 1, ..."""
        recipe = self.recipe
        if stage == "qa":
            return lambda compressor, step: compressor(**self._to_device(self.questions(step)))["loss"]
        continuation = recipe.continuation if stage == PRETRAINING else 0
        length = recipe.chunk + continuation
        # All at once, so that a resumed run uses those of its step; fine-tuning has texts of its own.
        generator = torch.Generator().manual_seed((1000 if continuation else 2000) + self.seed)
        steps = recipe.steps if stage == PRETRAINING else recipe.tuning_steps
        starts = torch.randint(0, self.corpus.train.numel() - length + 1, (steps, recipe.batch), generator=generator)

        def loss(compressor: Compressor, step: int) -> Tensor:
            rows = self.corpus.passages(starts[step], length).to(self.device)
            after = {"continuation_ids": rows[:, recipe.chunk :]} if continuation else {}
            total: Tensor = compressor(rows[:, : recipe.chunk], **after)["loss"]
            return total

        return loss

    def figures(self, stage: str, compressor: Compressor) -> tuple[float, float]:
        """(loss, share) during a stage, of the first held-out texts or questions; the model is attached."""
        if stage == "qa":
            return self._answers(compressor, "held_out", self.recipe.eval_questions)
        return evaluate(compressor, self.chunks["held_out"][: self.recipe.eval_chunks])

    def final(self, stage: str, compressor: Compressor, split: str) -> dict[str, float]:
        """The figures at the end of a stage, of "held_out" or "test"; the model is attached."""
        if stage == "qa":
            loss, share = self._answers(compressor, split, self.recipe.final_questions)
        else:
            loss, share = evaluate(compressor, self.chunks[split])
        trained = held_out_losses(compressor, self.passages[split]) if stage == PRETRAINING else {}
        return {name: value for name, value in trained.items() if name in ("lm", "compression")} | {
            "loss": loss, "share": share
        }  # fmt: skip

    def _answers(self, compressor: Compressor, split: str, count: int) -> tuple[float, float]:
        found = answer(compressor, self.questions, split, count, self.device)["all"]
        return found["loss"], found["exact"]

    def _to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}


def train(session: Session) -> Run:
    """Pretrains one setting and seed, and fine-tunes copies of it on each of `TASKS`."""
    recipe, setting, seed = session.recipe, session.arm, session.seed
    texts, run = Texts(recipe, session.source, seed, session.device), Run(setting, seed)
    pretrained = build_compressor(recipe, setting, seed).to(session.device)
    run.parameters = sum(parameter.numel() for _, parameter in pretrained.trainable())
    if not session.resume:
        # Those of all stages: a later stage must not go on from an earlier run.
        for stage in (PRETRAINING, *TASKS):
            shutil.rmtree(_of_stage(session, stage).state, ignore_errors=True)
    _run_stage(session, run, PRETRAINING, pretrained, texts)
    for task in TASKS:
        compressor = build_compressor(recipe, setting, seed).to(session.device)
        compressor.load_state_dict(pretrained.state_dict())
        compressor.set_losses([task])
        _run_stage(session, run, task, compressor, texts)
    return run


def _of_stage(session: Session, stage: str) -> Session:
    if stage == PRETRAINING:
        return replace(session, resume=True)
    return replace(session, recipe=session.recipe.tuning, stage=stage, resume=True)


def _run_stage(session: Session, run: Run, stage: str, compressor: Compressor, texts: Texts) -> None:
    loss = texts.loss(stage)
    identity = session.decides("final_chunks", "final_questions", corpus=session.source.digest, stage=stage)
    progress = _of_stage(session, stage).fit(
        compressor, lambda step: loss(compressor, step), lambda: texts.figures(stage, compressor), identity
    )
    before = run.seconds[PRETRAINING][-1] if stage in TASKS else 0.0
    run.curves[stage] = progress.curve
    run.seconds[stage] = [before + seconds for seconds in progress.times]
    with attach(compressor.model):
        run.held_out[stage] = texts.final(stage, compressor, "held_out")
        run.test[stage] = texts.final(stage, compressor, "test")


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
UNITS = (
    "Losses in nats a byte, in brackets one that was not pretrained on. Tuned: after fine-tuning on that loss alone. "
    "Time: of pretraining, as a ratio to that without CL."
)
GAPS = (
    "Nats a byte after fine-tuning on AE, on held-out text; at equal time: where the sooner of two ends. Times are "
    "compared in seeds whose runs are all of one machine and commit."
)


class CompressionLoss(Study):
    """The same model pretrained under each of `SETTINGS`, then fine-tuned alike."""

    name = "compression-loss"
    run_type = Run
    recipe_type = Recipe
    arm_field = "setting"
    lists: ClassVar[Mapping[str, Names]] = {
        "settings": Names(list(SETTINGS), list(SETTINGS), "; without-ae-cl: the continuation loss alone")
    }
    text = "text file to train on"
    measured = "Held-out text", "Text that no choice was made on, and gaps seed by seed on held-out text"
    train = staticmethod(train)

    def about(self, recipe: Recipe, arms: Sequence[str], source: Corpus) -> str:
        return (
            f"Pretraining for {recipe.steps} steps under {len(arms)} settings; then {recipe.tuning_steps} of "
            f"fine-tuning on the AE loss, and as many on questions; text {source.name}, {source.digest}"
        )

    def order(self, run: Run) -> int:
        return list(SETTINGS).index(run.setting)

    def rows(self, runs: Sequence[Run], recipe: Any, split: str = "test", timed: Collection[int] | None = None) -> Rows:
        """As in `Study`; a loss that a setting does not pretrain with is in brackets, or "-" if its maps are untrained.

        `timed`: the seeds whose times can be compared; None: all.
        """
        with_ae = {
            run.seed: pretraining_seconds(run)
            for run in runs
            if run.setting == WITH_AE and (timed is None or run.seed in timed)
        }

        def compression(setting: str, runs: Sequence[Run]) -> str:
            shown = "compression" in SETTINGS[setting].losses
            return of_split(split, PRETRAINING, "compression")(setting, runs) if shown else "-"

        def ae(setting: str, runs: Sequence[Run]) -> str:
            cell = of_split(split, PRETRAINING, "loss")(setting, runs)
            return cell if "ae" in SETTINGS[setting].losses else f"({cell})"

        def time(setting: str, runs: Sequence[Run]) -> str:
            times = [pretraining_seconds(run) / with_ae[run.seed] for run in runs if run.seed in with_ae]
            return spread(times, "{:.2f}") if times else "-"

        columns: dict[str, Cell] = {
            "setting": name_of(lambda setting: SETTINGS[setting].title),
            "CL loss": compression,
            "AE loss": ae,
            "LM loss": of_split(split, PRETRAINING, "lm"),
            "tuned: AE loss": of_split(split, "ae", "loss"),
            "AE accuracy": of_split(split, "ae", "share"),
            "tuned: question loss": of_split(split, "qa", "loss"),
            "pretraining time": time,
            "seeds": SEEDS,
        }
        for index, heading in enumerate(PAPER_HEADER):
            columns[heading] = name_of({setting: figures[index] for setting, figures in PAPER.items()})
        return tabulate(self.by_arm(runs), columns)

    def more_rows(self, runs: Sequence[Run], recipe: Any) -> Sequence[Rows]:
        return [self.gap_rows(runs)]

    def gap_rows(self, runs: Sequence[Run], timed: Collection[int] | None = None) -> Rows:
        """Header and one row a seed that has two settings compared: AE losses less one another, nats a byte.

        First at the end of fine-tuning, then at equal time, where the sooner of the two ends. "-" where a seed lacks a
        setting, and at equal time if it is not among the `timed` (None: all are).
        """
        rows = [["AE loss", "LM+CL less LM+AE", "at equal time", "LM less LM+CL", "at equal time"]]
        groups = self.by_arm(runs)
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

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        return f"{super().report(runs, plan)}\n\n{UNITS}\n{NAMES}\n{CLAIM}"

    def captioned(self, group: Sequence[SavedRun]) -> Sequence[tuple[Rows, str]]:
        recipe: Recipe = group[0].recipe
        timed = _seeds_of_one_machine(group)
        how = (
            f"Text on which nothing was chosen, {recipe.steps} steps of pretraining and {recipe.tuning_steps} of each "
            f"fine-tuning, {seeds(group)}: mean (lowest-highest). {UNITS} {machine_caption(group)}."
        )
        rows = self.rows(runs(group), recipe, timed=timed)
        return [(rows, how), (self.gap_rows(runs(group), timed), f"{GAPS} {NAMES}")]

    def figures(self, runs: Sequence[Run], recipe: Any) -> Pictures:
        """The AE loss in fine-tuning by steps and by seconds, pretraining included; a line a setting."""
        from gistkit.viz.style import OTHER_STYLES, Picture, tidy
        from gistkit_lab.viz.lines import draw_band, legend_beside

        figure = Picture(figsize=(10.4, 3.8), layout="constrained", dpi=120)
        panels = figure.subplots(1, 2, sharey=True)
        curves: tuple[tuple[str, Callable[[Run], Any]], ...] = (
            ("step of fine-tuning on the AE loss", lambda run: run.curves["ae"]),
            ("second of training, pretraining included", ae_path),
        )
        for axes, (name, curve) in zip(panels, curves, strict=True):
            for setting, found in self.by_arm(runs).items():
                style = OTHER_STYLES[list(SETTINGS).index(setting)]
                label = SETTINGS[setting].title
                draw_band(axes, [curve(run) for run in found], label=label, markersize=4, markevery=2, **style)
            axes.set(xlabel=name, yscale="log")
            tidy(axes)
        panels[0].set_yticks(TICKS, map(str, TICKS))
        panels[0].minorticks_off()
        panels[0].set_ylabel("held-out AE loss (nats a byte)")
        panels[0].set_title("Reconstructing, after pretraining under each setting", loc="left")
        legend_beside(panels[1])
        return {"fine-tuning": figure}


TICKS = (0.2, 0.5, 1, 2, 5)


def _seeds_of_one_machine(group: Sequence[SavedRun]) -> set[int]:
    """Seeds whose runs have one machine and commit: seconds of others, faster or slower, would be compared."""
    machines = {saved.run.seed: saved.machine for saved in group}
    return machines.keys() - {saved.run.seed for saved in group if saved.machine != machines[saved.run.seed]}


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


STUDY = CompressionLoss()
