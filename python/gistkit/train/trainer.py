"""Trainer: the loop. Losses down, metrics and checkpoints out, on any number of processes."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gistkit.common.signals import Interrupted, held
from gistkit.compress import Compressor, LanguageModel
from gistkit.compress.files import base_fingerprints, save_compressor
from gistkit.evaluate.baselines import Baseline
from gistkit.hf import attach
from gistkit.train import checkpoint
from gistkit.train.accelerator import make_accelerator
from gistkit.train.batches import Batches, num_tokens
from gistkit.train.best import Best
from gistkit.train.callbacks import Bar, Callback, Told
from gistkit.train.metrics import Metrics, Record
from gistkit.train.passes import Losses, Passes
from gistkit.train.recipe import Recipe, set_learning_rate
from gistkit.train.rounded import RoundedMaps
from gistkit.train.sharding import gathers_kept_keys, whole, whole_weights
from gistkit.train.stages import Stage, check_stages, selecting_at
from gistkit.train.tracking import Tracked, Tracker

Measure = Callable[[Compressor], dict[str, float]]
EXPORTED = "compressor"
NOTICE = "The run ends after this step, with a checkpoint. The same signal once more ends it at once."


class Diverged(ValueError):
    """The loss or the gradient is no longer a finite number."""


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        steps: number of updates, including those before a resumption.
        seconds: of training, without evaluations.
        held_out: losses of an evaluation by name, in nats a token: the last, or with patience that of the lowest loss;
            empty if there was none.
        folder: holds metrics.jsonl, the last checkpoints (step-*.safetensors) and the trained compressor (compressor/).
        weights: number of updates that the trained weights have seen: with patience those before that evaluation.
    """

    steps: int
    seconds: float
    held_out: dict[str, float]
    folder: Path
    weights: int


class Trainer:
    """Trains a compressor or a `LanguageModel` through Accelerate; under `accelerate launch`, on all its processes.

    The recipe, the batches and the compressor determine the losses of a run. The number of processes and `accumulate`
    change them only by rounding. A run that is interrupted and resumed has the same losses as an uninterrupted one, bit
    for bit on the same machine with as many threads. Random numbers drawn in a pass (dropout, random nuggets of a
    stage) depend on the seed, the step and the process. SIGINT (Ctrl-C) and SIGTERM, in any process, end a run after
    its step, with a checkpoint; a second one ends it at once.

    A `LanguageModel` reads contexts and continuations as one text, and has one loss, "loss". The threshold of a
    `MixedResolution`, unless its rule determines it, is computed before every step from the step's batch, which costs a
    pass through the scorer's layers; before an evaluation, and at the end, from as many training rows as are held out.
    The compressor is saved with that threshold.

    Args:
        compressor: its `trainable()` parameters are trained in place; those of a LanguageModel are its compressor's.
        batches: the training and held-out rows.
        recipe: the schedule; its `batch` is the batches' size. Its epochs become steps of these batches. Where its
            patience ends, the run does, with a checkpoint. A run with patience ends with the weights of the evaluation
            with the lowest loss, which best.safetensors holds; its checkpoints are of its last steps.
        out: folder for metrics, checkpoints and the trained compressor; one that all processes see.
        accumulate: passes a step; the batch's rows are divided by processes x accumulate.
        precision: "no" or "bf16" mixed precision; None: the launcher's, otherwise "no". In bf16 the decoder's frozen
            linear maps are rounded once rather than at every use, with the same losses to the bit; the copies take half
            of their bytes. Not with `gradient_checkpointing`, nor with sharded weights.
        cpu: whether to use no GPU.
        gradient_checkpointing: whether layers run again in the backward pass, which saves memory.
        eval_every: steps between held-out evaluations, the first of which precedes training; None: no evaluations.
        held_out: rows of an evaluation, at most.
        save_every: steps between checkpoints; the last step has one too.
        save_minutes: minutes after which a step has a checkpoint if none before it has; None: by steps alone.
        keep: number of checkpoints to keep, at least 2, since the last one may turn out damaged. One takes three times
            the bytes of the trained parameters (with Adam's state), and one more is there while it is written.
        track: where the figures go too, through Accelerate's trackers: "tensorboard" (event files in `out`/tensorboard)
            or "wandb" (the project gistkit, under the name of `out`), several of them, or objects of
            `accelerate.tracking.GeneralTracker`. A resumed run goes on in the same run. Only the main process logs.
        callbacks: what the main process tells of steps, evaluations and checkpoints, each in its turn; see `Callback`.
        progress: whether to show a progress bar.
        measure: returns more numbers for each evaluation from the compressor in eval mode; called in every process.
        stages: how a Dodo with a scorer selects nuggets in the first steps, see `growing`; evaluations, and what is
            saved, are as the compressor says.

    Raises:
        ImportError: if the package of a tracker is missing.
        ValueError: if an argument is out of range, or the rows cannot be divided among processes and passes.
    """

    def __init__(
        self,
        compressor: Compressor | LanguageModel,
        batches: Batches,
        recipe: Recipe,
        out: str | Path,
        *,
        accumulate: int = 1,
        precision: str | None = None,
        cpu: bool = False,
        gradient_checkpointing: bool = False,
        eval_every: int | None = 500,
        held_out: int = 64,
        save_every: int = 500,
        save_minutes: float | None = 5.0,
        keep: int = 2,
        track: Tracker | Sequence[Tracker] = (),
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        measure: Measure | None = None,
        stages: Sequence[Stage] = (),
    ) -> None:
        for name, value, least in (
            ("eval_every", eval_every, 1),
            ("held_out", held_out, 1),
            ("save_every", save_every, 1),
            ("keep", keep, 2),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if save_minutes is not None and not save_minutes > 0:
            raise ValueError(f"save_minutes: expected a number above 0, or None, got {save_minutes}")
        if recipe.patience is not None and eval_every is None:
            raise ValueError(f"patience: expected evaluations (eval_every) beside it, got {recipe.patience} without")
        if batches.size != recipe.batch:
            raise ValueError(f"batches: expected {recipe.batch} rows as the recipe says, got {batches.size}")
        self.accelerator = make_accelerator(accumulate, precision, cpu, track, Path(out))
        processes, passes = self.accelerator.num_processes, self.accelerator.gradient_accumulation_steps
        if recipe.batch % (processes * passes):
            raise ValueError(
                f"batch: expected a multiple of {processes} processes x {passes} passes, got {recipe.batch} rows"
            )
        self._trained = compressor
        self.compressor = compressor.compressor if isinstance(compressor, LanguageModel) else compressor
        check_stages(self.compressor, stages)
        self.batches, self.out, self.stages = batches, Path(out), tuple(stages)
        self.recipe = recipe.for_rows(batches.rows)
        self.gradient_checkpointing = gradient_checkpointing
        self.eval_every, self.held_out, self.keep = eval_every, held_out, keep
        self.save_every, self.save_minutes = save_every, save_minutes
        self.progress, self.measure, self.callbacks = progress, measure, tuple(callbacks)
        # Frozen base weights are not in a checkpoint; this identifies them.
        frozen = self.compressor.adapters is not None or isinstance(self.compressor, Baseline)
        self._fingerprints = base_fingerprints(self.compressor) if frozen else None
        self._model = self.compressor.lm.structure if self._fingerprints is None else self._fingerprints[0]
        self._seconds = 0.0
        self._held_out_losses: dict[str, float] = {}
        self._best = Best(self.out)
        # The step of the last evaluation, the last checkpoint's time, and whether a callback has ended the run.
        self._evaluated: int | None = None
        self._saved_at = 0.0
        self._ended = False
        self._told = Told(())
        self._steps_done = 0

    @property
    def identity(self) -> dict[str, Any]:
        """The JSON values that determine the losses, see `Recipe.identity`."""
        stages = {"stages": [asdict(stage) for stage in self.stages]} if self.stages else {}
        return {
            "recipe": self.recipe.identity,
            "batches": self.batches.identity,
            "model": self._model,
            "method": self.compressor.method,
            **self._trained.settings,
            "precision": self.accelerator.mixed_precision,
            **stages,
        }

    def train(self, *, resume: bool = False) -> Result:
        """Trains to the recipe's last step, or until its patience ends, and saves the compressor as it then is.

        Args:
            resume: whether to continue from the last checkpoint in `out`, if there is one.

        Raises:
            Diverged: if the loss or the gradient is not finite; the last good checkpoint is kept.
            Interrupted: (a KeyboardInterrupt) after SIGINT or SIGTERM, when a checkpoint is saved.
            OSError: if the disk is full, in one line with the file and the space; what was saved before stays.
            ValueError: without `resume`, if `out` has checkpoints; with it, if the last one is another run's or none is
                whole. A damaged last one is left out, with a warning.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        main = self.accelerator.is_main_process
        if main:
            checkpoint.remove_interrupted(self.out)
        resumes = self._resumes(resume)
        recipe = self.recipe
        self._evaluated = None
        self._best = Best(self.out)
        if main and not resumes:
            self._best.path.unlink(missing_ok=True)
        self._ended, self._steps_done = False, 0
        self._told = Told(self._all_callbacks() if main else ())
        try:
            with self._ready():
                first = self._load() if resumes else 0
                self._steps_done = first
                due = self._evaluation_due(first)
                metrics = Metrics(self.out, step=first, evaluates=due, write=main)
                try:
                    self._told.on_start(first, recipe.steps)
                    if due:
                        self._evaluate(first, metrics)
                    self._run(first, metrics)
                finally:
                    metrics.close()
                last = self._steps_done
                weights, held_out = self._chosen(last)
                self._calibrate(weights, self.held_out)
            self._export()
        finally:
            self._told.on_end(self._steps_done)
        return Result(last, self._seconds, held_out, self.out, weights)

    def _all_callbacks(self) -> list[Callback]:
        """The main process's: its progress bar and trackers, then the user's."""
        bar = [Bar()] if self.progress else []
        tracked = [Tracked(self.accelerator, self.out, self.identity)] if self.accelerator.log_with else []
        return [*bar, *tracked, *self.callbacks]

    def _run(self, first: int, metrics: Metrics) -> None:
        """The steps from `first` on, with their evaluations and checkpoints."""
        steps = self.recipe.steps
        self._saved_at = time.monotonic()
        with held(NOTICE if self.accelerator.is_main_process else "") as signals:
            for step in range(first, steps):
                if self._is_over:
                    break
                record = self._update(step)
                self._steps_done = steps_done = step + 1
                metrics.write(record)
                ends = self._told.on_step(steps_done, record)
                number, is_time, self._ended = self._agree(signals.number, ends)
                if not number and self._evaluation_due(steps_done):
                    self._evaluate(steps_done, metrics)
                is_last = steps_done == steps or self._is_over
                if number or is_time or steps_done % self.save_every == 0 or is_last:
                    metrics.sync()
                    self._save(steps_done)
                if number:
                    path = checkpoint.path_of(self.out, steps_done)
                    raise Interrupted(
                        number,
                        f"{signal.Signals(number).name} after step {steps_done} of {steps}; {path} is saved, and "
                        "resume=True goes on from there",
                    )

    @property
    def _is_over(self) -> bool:
        """Whether the recipe's patience has ended, or a callback the run."""
        return self._ended or (self.recipe.patience is not None and self._best.waited >= self.recipe.patience)

    def _chosen(self, last: int) -> tuple[int, dict[str, float]]:
        """Takes the weights that the run ends with: (how many updates they have seen, their held-out losses)."""
        best = self._best
        if self.recipe.patience is None or best.step == last:
            return last, self._held_out_losses
        step = best.restore(self.compressor.trainable(), warn=self.accelerator.is_main_process)
        return (last, self._held_out_losses) if step is None else (step, best.held_out)

    def _resumes(self, resume: bool) -> bool:
        """Whether there is a checkpoint to go on from; a folder with another run's results is refused."""
        states = checkpoint.find(self.out)
        if states and not resume:
            raise ValueError(f"{self.out}: expected no checkpoints, got {len(states)}; resume, or use another folder")
        if not states and (self.out / EXPORTED).exists():
            raise ValueError(
                f"{self.out}: expected checkpoints beside the trained {EXPORTED}/ to go on from, got none; "
                "use another folder"
            )
        return bool(states)

    def _agree(self, number: int, ends: bool = False) -> tuple[int, bool, bool]:
        """The same in all processes: the signal that one got or 0, whether to save, and whether a callback ends it."""
        accelerator = self.accelerator
        waited = time.monotonic() - self._saved_at
        is_time = self.save_minutes is not None and waited >= 60 * self.save_minutes
        if accelerator.num_processes == 1:
            return number, is_time, ends
        # Clocks differ: the main process's decides.
        ours = torch.tensor([[number, is_time and accelerator.is_main_process, ends]], device=accelerator.device)
        number, is_time, ends = accelerator.gather(ours).amax(0).tolist()
        return number, bool(is_time), bool(ends)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Prepares passes, and undoes that at the end."""
        accelerator, compressor = self.accelerator, self.compressor
        training, device = compressor.training, accelerator.device
        groups = compressor.parameter_groups(self.recipe.learning_rate, self.recipe.memory_factor)
        optimizer = self.recipe.make_optimizer(groups)
        module, self._optimizer = accelerator.prepare(Losses(self._trained), optimizer)
        self._passes = Passes(accelerator, module, self._trained)
        # Checkpointing saves the memory that copies take, and keeps no weights for the backward pass.
        rounds = accelerator.mixed_precision == "bf16" and not self.gradient_checkpointing
        self._rounded = RoundedMaps(compressor, torch.bfloat16 if rounds else None)
        if self.gradient_checkpointing:
            compressor.gradient_checkpointing_enable()
        try:
            # The backward pass may run layers again, so it belongs inside the attached model too.
            forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
            with forked, attach(compressor.model), gathers_kept_keys(compressor):
                yield
        finally:
            if self.gradient_checkpointing:
                compressor.gradient_checkpointing_disable()
            compressor.train(training)
            del self._passes, self._optimizer, self._rounded
            accelerator.free_memory()

    def _update(self, step: int) -> Record:
        """One update of the weights; returns its metrics."""
        accelerator, recipe = self.accelerator, self.recipe
        clock = time.perf_counter()
        seeds = np.random.SeedSequence([recipe.seed, step, accelerator.process_index])
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        rate = recipe.learning_rate_at(step)
        set_learning_rate(self._optimizer, rate)
        batch = self._passes.read(self.batches(step))
        with selecting_at(self.compressor, self.stages, step), self._rounded.used():
            self._calibrate(step, recipe.batch)
            self.compressor.train()
            losses = self._passes.backward(batch)
        norm = accelerator.clip_grad_norm_([parameter for _, parameter in self.compressor.trainable()], recipe.clip)
        norm = whole(norm)
        values = dict(zip([*self._passes.names, "grad_norm"], [*losses.tolist(), float(norm)], strict=True))
        if not all(map(math.isfinite, values.values())):
            raise Diverged(self._diverged(step, values))
        self._optimizer.step()
        self._optimizer.zero_grad()
        seconds = time.perf_counter() - clock
        self._seconds += seconds
        speed = {"tokens_per_second": num_tokens(batch) / seconds, "seconds": self._seconds}
        return {"step": step + 1, "loss": float(self._passes.mean(losses.double())), **values, "lr": rate, **speed}

    def _diverged(self, step: int, values: dict[str, float]) -> str:
        states = checkpoint.find(self.out)
        checkpoint_note = f"the last good checkpoint is {states[-1]}" if states else "there is no checkpoint yet"
        figures = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        return (
            f"loss: expected finite numbers, got {figures} in step {step + 1}; {checkpoint_note}. "
            "A lower learning rate or more warm-up steps may help"
        )

    def _evaluation_due(self, step: int) -> bool:
        """Whether there is an evaluation after `step` updates which has not been made."""
        if not self.eval_every or self._evaluated == step:
            return False
        return step % self.eval_every == 0 or step == self.recipe.steps

    def _evaluate(self, step: int, metrics: Metrics) -> None:
        self._evaluated = step
        batches = self.batches.held_out(self.held_out)
        if not batches and self.recipe.patience is not None:
            raise ValueError("patience: expected held-out rows beside it, got none")
        if not batches:
            return
        self._calibrate(step, self.held_out)
        self.compressor.eval()
        losses = self._passes.evaluate([self._passes.read(batch) for batch in batches])
        held_out = dict(zip(self._passes.names, losses.tolist(), strict=True))
        self._held_out_losses = {"loss": float(self._passes.mean(losses)), **held_out}
        loss = self._held_out_losses["loss"]
        if self.measure is not None:
            with torch.no_grad():
                self._held_out_losses |= self.measure(self.compressor)
        metrics.write({"step": step, "held_out": self._held_out_losses})
        ends = self._told.on_evaluate(step, self._held_out_losses)
        self._ended = self._agree(0, ends)[2] or self._ended
        if self._best.see(step, loss, self._held_out_losses) and self.recipe.patience is not None:
            self._best.keep(self.compressor.trainable(), write=self.accelerator.is_main_process)
            self.accelerator.wait_for_everyone()

    def _calibrate(self, step: int, rows: int) -> None:
        """Sets a language model's threshold on at least `rows` rows, of this step and the following ones."""
        if not self._passes.calibrates:
            return
        # Without dropout, which differs between processes.
        self.compressor.eval()
        steps = range(step, step + -(-rows // self.recipe.batch))
        self._passes.calibrate(self._passes.read(self.batches(at)) for at in steps)

    def _load(self) -> int:
        """Restores the last checkpoint that is whole; returns its step."""
        accelerator, parameters = self.accelerator, self.compressor.trainable()
        states, optimizer = checkpoint.find(self.out), self._optimizer.optimizer
        progress = checkpoint.load_last(states, self.identity, parameters, optimizer, warn=accelerator.is_main_process)
        self._seconds, self._held_out_losses = progress["seconds"], progress["held_out"]
        self._best = Best(self.out, progress)
        step: int = progress["step"]
        if accelerator.is_main_process:
            # A run that was killed behind its last checkpoint had not removed the oldest.
            checkpoint.prune(self.out, self.keep, step)
        # Earlier releases did not write it.
        length = max(self.compressor.trained_length or 0, progress.get("trained_length", 0))
        self.compressor.trained_length = length or None
        # Checkpoints written before evaluations could wait for a resumption come after those of their step.
        self._evaluated = progress.get("evaluated", step)
        steps = accelerator.gather(torch.tensor([step], device=accelerator.device)).tolist()
        if len(set(steps)) > 1:
            raise ValueError(f"{self.out}: expected the same checkpoint in all processes, got the steps {steps}")
        return step

    def _save(self, step: int) -> None:
        main = self.accelerator.is_main_process
        progress = {
            "step": step,
            "seconds": self._seconds,
            "held_out": self._held_out_losses,
            "evaluated": self._evaluated,
            "trained_length": self._trained_length(),
            **self._best.progress,
        }
        path, parameters = checkpoint.path_of(self.out, step), self.compressor.trainable()
        checkpoint.save(path, self.identity, progress, parameters, self._optimizer.optimizer, write=main)
        if main:
            checkpoint.prune(self.out, self.keep, step)
        self.accelerator.wait_for_everyone()
        self._saved_at = time.monotonic()
        self._told.on_save(step, path)

    def _trained_length(self) -> int:
        """Tokens of the longest context of all processes."""
        own = torch.tensor([self.compressor.trained_length or 0], device=self.accelerator.device)
        self.compressor.trained_length = int(self.accelerator.gather(own).max()) or None
        return self.compressor.trained_length or 0

    def _export(self) -> None:
        """Saves the trained compressor, with whole weights where they are sharded."""
        main = self.accelerator.is_main_process
        with whole_weights(self.compressor, keep=main):
            if main and isinstance(self.compressor, Baseline):
                self.compressor.save_pretrained(self.out / EXPORTED)
            elif main:
                save_compressor(self.compressor, self.out / EXPORTED, self._fingerprints)
        self.accelerator.wait_for_everyone()
