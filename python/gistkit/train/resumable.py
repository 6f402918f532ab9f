"""ResumableTrainer: transformers' Trainer that ends after a step when a signal comes, and goes on from there."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TrainOutput

from gistkit.common.signals import Interrupted, deferred_signals
from gistkit.train import checkpoints

SCHEDULER = "scheduler.json"
NOTICE = "The run ends after this step, with a checkpoint. The same signal once more ends it at once."


class _Ended(Exception):
    """A run that goes on has nothing left to do."""


class Flow(TrainerCallback):
    """When a `ResumableTrainer` saves and ends."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        # Of the signal that ended the run in any process; 0: none.
        self.number = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.number, self.saved_at, self.saved_step = 0, time.monotonic(), state.global_step
        # Those of this run, not of the checkpoint.
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.seconds += time.perf_counter() - self.trainer.clock
        minutes = self.trainer.save_minutes
        is_time = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        accelerator = self.trainer.accelerator
        # Clocks differ: the main process's decides. A signal or a callback may reach only one.
        ours = self.trainer.agreed(
            self.trainer.signals.number, is_time and accelerator.is_main_process, control.should_training_stop
        )
        self.number = int(ours[0])
        control.should_training_stop = bool(ours[2] or self.number)
        control.should_save = bool(control.should_save or ours[1] or control.should_training_stop)
        if self.number:
            # An interrupted run is measured when it goes on.
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A run that a signal ends within an epoch gets here too.
        control.should_evaluate = bool(control.should_evaluate and not self.number)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A callback before this one may have ended the run.
        control.should_save = control.should_save or control.should_training_stop

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved_at, self.saved_step = time.monotonic(), state.global_step


class ResumableTrainer(transformers.Trainer):
    """transformers' Trainer, with whole checkpoints of the trained tensors; under a launcher, on all its processes.

    `gistkit.train.CompressorTrainer` says what checkpoints and signals do. The evaluation that an interrupted run had
    left is made when it goes on.

    Args:
        model: the module that is wrapped, whose output is the loss or what `compute_loss` makes one of.
        args, identity, save_minutes, callbacks, options: as of `CompressorTrainer`.
        flow: the `Flow` of this trainer.
        notice: a line for standard error when a signal comes.
    """

    def __init__(
        self,
        model: nn.Module,
        args: transformers.TrainingArguments,
        *,
        identity: Mapping[str, Any],
        flow: type[Flow] = Flow,
        save_minutes: float | None = None,
        notice: str = NOTICE,
        callbacks: Sequence[TrainerCallback] = (),
        **options: Any,
    ) -> None:
        self.identity = dict(identity)
        self.save_minutes, self.notice = save_minutes, notice
        self.flow = flow(self)
        self.signals: Any = None
        # Where a checkpoint is written before it moves to its place.
        self._partial: Path | None = None
        self.seconds, self.clock = 0.0, 0.0
        # One process trains on one GPU: transformers would divide each batch among all.
        args._n_gpu = min(args.n_gpu, 1)
        super().__init__(model=model, args=args, callbacks=[*callbacks, self.flow], **options)
        # transformers' own print every record.
        for printing in (transformers.ProgressCallback, transformers.PrinterCallback):
            self.pop_callback(printing)

    def trained(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The parameters that checkpoints hold, by name: sharded weights have others than whole ones."""
        raise NotImplementedError

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return Path(str(self.args.output_dir))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """As `CompressorTrainer.train`, but for losses that are not finite."""
        main = self.accelerator.is_main_process
        if main:
            checkpoints.remove_partial(self.out)
        self.accelerator.wait_for_everyone()
        path = None
        if resume_from_checkpoint is True:
            path = checkpoints.last_whole(self.out, remove=main)
        elif resume_from_checkpoint:
            path = checkpoints.checked(Path(resume_from_checkpoint))
        state = None if path is None else TrainerState.load_from_json(str(path / TRAINER_STATE_NAME))
        if main and state is not None and self.args.save_total_limit is not None:
            # A kill may have come before older ones were removed.
            checkpoints.rotate(self.out, self.args.save_total_limit, state.global_step, self._best(state))
        if state is not None and self.has_ended(state):
            self._load_from_checkpoint(str(path))
            self.state = state
            return TrainOutput(state.global_step, 0.0, {})
        on_start = self.args.eval_on_start
        if state is not None:
            self.args.eval_on_start = self.args.eval_strategy != "no" and self._evaluation_due(state)
        with deferred_signals(self.notice if main else "") as self.signals:
            try:
                output = super().train(None if path is None else str(path), *args, **options)
            except _Ended:
                output = TrainOutput(self.state.global_step, 0.0, {})
            finally:
                self.args.eval_on_start = on_start
            if number := self.flow.number:
                raise Interrupted(number, self._interruption(number))
        return output

    def _interruption(self, number: int) -> str:
        step = self.state.global_step
        return (
            f"{signal.Signals(number).name} after step {step} of {self.state.max_steps}; "
            f"{checkpoints.path_of(self.out, step)} is saved, and resume=True goes on from there"
        )

    def has_ended(self, state: TrainerState) -> bool:
        """Whether the run of a checkpoint ended before its last step."""
        return False

    def _evaluation_due(self, state: TrainerState) -> bool:
        """Whether the last step before a resumed run has an evaluation that was not made."""
        step, last = state.global_step, self.args.max_steps if self.args.max_steps > 0 else state.max_steps
        if any("eval_loss" in entry and entry["step"] == step for entry in state.log_history):
            return False
        if self.args.eval_strategy == "epoch":
            epoch = float(state.epoch or 0)
            return epoch >= self.args.eval_delay and (step == last or epoch.is_integer())
        if step < self.args.eval_delay:
            return False
        # Those of this run, not of the checkpoint.
        state.compute_steps(self.args, last)
        return step == last or step % cast(int, state.eval_steps) == 0

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """transformers' own; a step's time begins here."""
        self.clock = time.perf_counter()
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def agreed(self, *numbers: int) -> list[int]:
        """The largest of each number in all processes."""
        accelerator = self.accelerator
        if accelerator.num_processes == 1:
            return list(numbers)
        found: list[int] = accelerator.gather(torch.tensor([numbers], device=accelerator.device)).amax(0).tolist()
        return found

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **options)
        # A callback behind the flow, or of a record, may have ended the run, and in one process only.
        self.control.should_training_stop = bool(self.agreed(self.control.should_training_stop)[0])
        if self.control.should_training_stop and self.flow.saved_step != self.state.global_step:
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        # The evaluation that an interrupted run had left: it may have found the best weights, or the end.
        if skip_scheduler and self.state.global_step:
            self._determine_best_metric(metrics, trial)
            if self.control.should_training_stop:
                self._save_checkpoint(self.model, trial)
                raise _Ended
        return metrics

    def _best(self, state: TrainerState) -> str | None:
        """The checkpoint of the best evaluation that has one, or gets one now."""
        path = checkpoints.path_of(self.out, state.best_global_step or 0)
        if path.exists() or state.best_global_step == state.global_step:
            return str(path)
        return cast("str | None", state.best_model_checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._partial or self.out)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """transformers' checkpoint, written elsewhere, and moved to its place when all of it is on the disk."""
        out, state = self.out, self.state
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        best = self._best(state)
        write, wait = self.args.should_save, self.accelerator.wait_for_everyone
        try:
            with checkpoints.writing(out, state.global_step, write=write, wait=wait) as folder:
                self._partial = folder.parent
                super()._save_checkpoint(model, trial)
                state.best_model_checkpoint = best
                if write:
                    state.save_to_json(str(folder / TRAINER_STATE_NAME))
        finally:
            self._partial, self.args.save_total_limit = None, limit
        if write and limit:
            checkpoints.rotate(out, limit, state.global_step, best)
        wait()

    def header(self) -> dict[str, Any]:
        """JSON values of a run beside its tensors, which a checkpoint keeps; `take` gets them back."""
        return {"seconds": self.seconds}

    def take(self, header: Mapping[str, Any]) -> None:
        """Goes on with what `header` was in a checkpoint."""
        self.seconds = header["seconds"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Only the trained tensors, for a checkpoint."""
        header = {"identity": self.identity, **self.header()}
        checkpoints.save_weights(Path(str(output_dir)), self.trained(), header, write=self.args.should_save)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.take(checkpoints.restore(resume_from_checkpoint, self.trained(), self.identity))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer: Any = self.optimizer
        state = getattr(optimizer, "optimizer", optimizer).state
        checkpoints.save_optimizer(Path(output_dir), self.trained(), state, write=self.args.should_save)
        if self.args.should_save:
            (Path(output_dir) / SCHEDULER).write_text(json.dumps(cast(Any, self.lr_scheduler).state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.is_deepspeed_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif checkpoint is not None:
            optimizer: Any = self.optimizer
            checkpoints.load_optimizer(Path(checkpoint), self.trained(), getattr(optimizer, "optimizer", optimizer))
            scheduler: Any = self.lr_scheduler
            scheduler.load_state_dict(json.loads((Path(checkpoint) / SCHEDULER).read_text()))
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
