"""CompressorTrainer: transformers' Trainer for compressors. Trainer: the same from a recipe and batches."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, Subset
from transformers import TrainerCallback, TrainerState, TrainingArguments

from gistkit.common.files import lock, remove_partials
from gistkit.common.processes import launched
from gistkit.compress import Compressor, LanguageModel
from gistkit.compress.files import base_fingerprints, save_pretrained
from gistkit.hf import attach
from gistkit.train import checkpoints
from gistkit.train.arguments import RunOptions, arguments_of
from gistkit.train.batches import Batches, collate, num_tokens
from gistkit.train.callbacks import Bar, MetricsFile, StepFlow, record_of, seed_step, waited
from gistkit.train.losses import Losses
from gistkit.train.recipe import Recipe, split_groups
from gistkit.train.resumable import ResumableTrainer
from gistkit.train.rounded import RoundedMaps
from gistkit.train.sharding import reshard, whole, whole_weights
from gistkit.train.stages import Stage, check_stages, selecting_at

Measure = Callable[[Compressor], dict[str, float]]
EXPORTED = "compressor"
# Options of transformers' Trainer for models that return logits.
UNUSED = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")


class Diverged(ValueError):
    """The loss or the gradient is no longer a finite number."""


def _check_eval_dataset(dataset: Any) -> None:
    if isinstance(dataset, str | Mapping):
        raise ValueError(f"eval_dataset: expected one dataset, got {dataset!r:.100}")


class CompressorTrainer(ResumableTrainer):
    """Trains a compressor or a `LanguageModel` by `TrainingArguments`; under a launcher, on all its processes.

    It adds to transformers' Trainer what a compressor needs:

    - Each loss is the mean over all its tokens of a step, however the rows are divided among processes and passes.
    - Gists' own parameters have a learning rate of their own. Only trained tensors are saved.
    - A checkpoint is a folder that is whole or not there; a damaged last one gives way to the one before. A run that is
      resumed has the losses of one that never stopped, bit for bit on the same machine with as many threads.
    - SIGINT (Ctrl-C) and SIGTERM, in any process, end a run after its step, with a checkpoint; a second one at once.
    - metrics.jsonl has every figure that is logged, see `gistkit.train.read_metrics`.

    A `LanguageModel` reads contexts and continuations as one text, and has one loss, "loss". The threshold of a
    `MixedResolution`, unless its rule determines it, is computed before every step from the step's batch, and before an
    evaluation from as many training rows as are held out.

    Args:
        compressor: its `trainable()` parameters are trained in place; those of a LanguageModel are its compressor's.
        args: transformers' own.
        train_dataset, eval_dataset: rows for the collator, such as a `datasets.Dataset` or `IterableDataset`; of a
            stream, every process reads all rows and takes its part.
        data_collator: makes a batch, keyword arguments of `Compressor.forward`, of rows.
        memory_factor: learning rate of the gists' own parameters, over that of the others (GistPool).
        stages: how a Dodo with a scorer selects nuggets in the first steps, see `gistkit.train.growing`.
        measure: returns more numbers for each evaluation from the compressor in eval mode; called in every process.
        patience: evaluations in a row without a lower held-out loss after which the run ends. None: it continues.
        save_minutes: minutes after which a step has a checkpoint if none before it has; None: only by steps.
        identity: JSON values that determine the run; a checkpoint of another run is refused.
        progress: whether to show a progress bar.
        callbacks, options: as of transformers' Trainer.

    Raises:
        ValueError: for fp16, several held-out sets, and options that it cannot use, such as compute_metrics.
    """

    def __init__(
        self,
        compressor: Compressor | LanguageModel,
        args: TrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[Any], dict[str, Tensor]] = collate,
        *,
        memory_factor: float = 3.0,
        stages: Sequence[Stage] = (),
        measure: Measure | None = None,
        patience: int | None = None,
        save_minutes: float | None = None,
        identity: Mapping[str, Any] | None = None,
        progress: bool = True,
        callbacks: Sequence[TrainerCallback] = (),
        **options: Any,
    ) -> None:
        self.losses = Losses(compressor)
        self.compressor = self.losses.compressor
        check_stages(self.compressor, stages)
        self.memory_factor, self.stages, self.measure = memory_factor, tuple(stages), measure
        self.patience = patience
        # Frozen base weights are not in a checkpoint; this identifies them.
        own = any(name.startswith("model.") for name, _ in self.compressor.trainable())
        frozen = self.compressor.adapters is not None or not own
        self._fingerprints = base_fingerprints(self.compressor) if frozen else None
        identity = {
            **(identity or {}),
            "model": self.compressor.lm.structure if self._fingerprints is None else self._fingerprints[0],
            "method": self.compressor.method,
            **compressor.settings,
            **({"stages": [asdict(stage) for stage in stages]} if stages else {}),
        }
        # Of a run: what is entered when it begins ends with it, also by an error.
        self.stack = ExitStack()
        # The collator takes of a row what it needs.
        args.remove_unused_columns = False
        # Accelerate would shuffle by whatever torch was last seeded with.
        args.data_seed = args.seed if args.data_seed is None else args.data_seed
        config: Any = args.accelerator_config
        if config.dispatch_batches:
            raise ValueError("accelerator_config: expected dispatch_batches: false, got true")
        if args.mixed_precision == "fp16":
            # Gradients that overflow would end the run, before the scaler has found its scale.
            raise ValueError("fp16: expected bf16 or no mixed precision, got fp16")
        for name in UNUSED:
            if options.get(name) is not None:
                raise ValueError(
                    f"{name}: expected None, as the losses are the compressor's and `measure` adds figures, "
                    f"got {options[name]!r}"
                )
        _check_eval_dataset(eval_dataset)
        # Accelerate would cut and join batches of a stream, by the keys and the width of the first.
        config.dispatch_batches = False
        super().__init__(
            model=self.losses,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=lambda rows: self.losses.read(data_collator(rows)),
            identity=identity,
            flow=StepFlow,
            save_minutes=save_minutes,
            callbacks=[*([Bar(self.stack)] if progress else []), MetricsFile(), *callbacks],
            **options,
        )
        self._check_sharding()
        self.identity["precision"] = self.accelerator.mixed_precision
        # Checkpointing saves the memory that copies take, and keeps no weights for the backward pass.
        checkpointing = getattr(args, "activation_checkpointing", args.gradient_checkpointing)
        rounds = self.accelerator.mixed_precision == "bf16" and not checkpointing
        self._rounded = RoundedMaps(self.compressor, torch.bfloat16 if rounds else None)
        self.begin_records()

    def trained(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The compressor's."""
        return self.compressor.trainable()

    def _check_sharding(self) -> None:
        """Refuses what would train or save other weights than these."""
        state = self.accelerator.state
        plugin = getattr(state, "fsdp_plugin", None)
        if plugin is not None and not getattr(self.accelerator, "is_fsdp2", False):
            raise ValueError(
                "accelerate: expected fsdp_version: 2, which keeps frozen and trained weights apart, got 1"
            )
        if plugin is not None and plugin.activation_checkpointing:
            # It would run layers again without knowing whether they ran with the adapter.
            raise ValueError(
                "accelerate: expected fsdp_activation_checkpointing: false, got true; use gradient_checkpointing"
            )
        plugin = getattr(state, "deepspeed_plugin", None)
        if plugin is not None and plugin.zero_stage == 3:
            raise ValueError("accelerate: expected ZeRO of stage 1 or 2, or FSDP for sharded weights, got stage 3")

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Trains as transformers' does.

        Args:
            resume_from_checkpoint: a folder, or True for the last whole checkpoint of the run.

        Raises:
            Diverged: if the loss or the gradient is not finite; the last good checkpoint is kept.
            Interrupted: (a KeyboardInterrupt) after SIGINT or SIGTERM, when a checkpoint is saved.
            ValueError: if the checkpoint is another run's, or none is whole.
        """
        compressor, device = self.compressor, self.accelerator.device
        training = compressor.training
        try:
            # The backward pass may run layers again, so it belongs inside the attached model too.
            forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
            with forked, attach(compressor.model), self.stack:
                return super().train(resume_from_checkpoint, *args, **options)
        finally:
            self.losses.gradient_checkpointing_disable()
            compressor.train(training)

    def has_ended(self, state: TrainerState) -> bool:
        """Whether its patience has ended the run."""
        return self.patience is not None and waited(state) >= self.patience

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """transformers' optimizer, over the compressor's groups; weight decay is on parameters of two or more axes."""
        if self.optimizer is None:
            given = self.optimizer_cls_and_kwargs
            kind, options = given or self.get_optimizer_cls_and_kwargs(self.args, cast(Any, self.losses))
            rate = options.get("lr", self.args.learning_rate)
            groups = self.compressor.parameter_groups(rate, self.memory_factor)
            self.optimizer = kind(split_groups(groups, rate, self.args.weight_decay), **options)
        return self.optimizer

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of a step's passes in this process, and the tokens of each loss in all of the step."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        counts = torch.stack([self.losses.counts(batch) for batch in batches]).sum(0)
        tokens = torch.tensor([sum(map(num_tokens, batches))], dtype=counts.dtype)
        counts = self.accelerator.reduce(torch.cat([counts, tokens]).to(device), "sum")
        self._tokens += float(counts[-1])
        if self.losses.calibrates:
            # The threshold of a stage with random nuggets is that of other draws than the step's.
            seed_step(self.args, self.state, 1)
            found = launched().gathered([{name: each.cpu() for name, each in batch.items()} for batch in batches])
            self._calibrate([batch for several in found for batch in several])
        return batches, counts[:-1]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """A pass forward and back, at the stage of its step."""
        with selecting_at(self.compressor, self.stages, self.state.global_step), self._rounded.used():
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The weighted mean of a compressor's losses, each weighted by the share of its tokens that is in this pass."""
        counts = self.losses.counts(inputs)
        outputs = model(**inputs)
        losses = torch.stack([outputs[name].float() for name in self.losses.names])
        if num_items_in_batch is not None:
            losses = losses * (counts.to(num_items_in_batch) / num_items_in_batch.clamp(min=1)).to(losses)
            self._sums += losses.detach().double()
            # Processes take the mean of their gradients; this is a sum.
            losses = losses * self.accelerator.num_processes
        loss = self.losses.mean(losses)
        return (loss, outputs) if return_outputs else loss

    def _calibrate(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Sets a language model's threshold on these batches, the same in every process."""
        self.compressor.eval()
        selecting = selecting_at(self.compressor, self.stages, self.state.global_step)
        # Before training Accelerate has not set the precision.
        with torch.no_grad(), selecting, self.accelerator.autocast():
            self.model_wrapped(*(self._prepare_inputs(dict(batch)) for batch in batches), calibrate=True)
        reshard(self.model_wrapped)

    def calibrate(self, rows: int) -> None:
        """Sets the threshold of a language model that needs one on training rows, from those of the next step on."""
        if not self.losses.calibrates:
            return
        per_pass = self.args.per_device_train_batch_size
        per_step = per_pass * self.args.gradient_accumulation_steps * self.args.world_size
        first, count = self.state.global_step * per_step, -(-rows // per_step) * per_step
        # In the same parts as training passes: the same scores, within the same memory.
        chosen = [self._training_row(first + index) for index in range(count)]
        self._calibrate([self.data_collator(chosen[at : at + per_pass]) for at in range(0, count, per_pass)])

    def _training_row(self, index: int) -> Any:
        data: Any = self.train_dataset
        if not hasattr(data, "__len__"):
            raise ValueError(
                f"train_dataset: expected rows by number, of which the threshold is computed, got {type(data).__name__}"
            )
        return data[index % len(data)]

    def _clip_grad_norm(self, model: Any, limit: float | None = None) -> Tensor:
        parameters = [parameter for _, parameter in self.compressor.trainable()]
        return whole(self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm if limit is None else limit))

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # transformers calls it also where nothing is clipped.
        norm = self._clip_grad_norm(model, math.inf) if grad_norm is None else grad_norm
        if not math.isfinite(float(norm)):
            raise Diverged(self._diverged(float(norm)))
        return norm

    def _diverged(self, norm: float) -> str:
        states = checkpoints.find(self.out)
        note = f"the last good checkpoint is {states[-1]}" if states else "there is no checkpoint yet"
        values = dict(zip([*self.losses.names, "grad_norm"], [*self._sums.tolist(), norm], strict=True))
        figures = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        return (
            f"loss: expected finite numbers, got {figures} in step {self.state.global_step + 1}; {note}. "
            "A lower learning rate or more warm-up steps may help"
        )

    def begin_records(self) -> None:
        """Counts from here what the next record is the mean of."""
        self._sums = torch.zeros(len(self.losses.names), dtype=torch.float64, device=self.args.device)
        self._tokens, self._seconds_before, self._step_before = 0.0, self.seconds, self.state.global_step

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """As transformers', with every loss by name, and the speed."""
        if "loss" in logs:
            steps = max(1, self.state.global_step - self._step_before)
            means = self.accelerator.reduce(self._sums, "sum") / steps
            logs |= {
                "loss": float(self.losses.mean(means)),
                **dict(zip(self.losses.names, means.tolist(), strict=True)),
            }
            taken = self.seconds - self._seconds_before
            logs |= {"tokens_per_second": self._tokens / max(taken, 1e-9), "seconds": self.seconds}
            self.begin_records()
        super().log(logs, *args, **options)

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The held-out losses, each the mean over all its tokens, and what `measure` returns."""
        # A module that Accelerate prepares for an evaluation it would later train as it is, without DDP.
        model: Any = self.model_wrapped if self.is_in_train else self.model
        if not self.is_in_train and not self.is_fsdp_enabled:
            # Some are moved only when a run begins.
            self.losses.to(self.accelerator.device)
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        _check_eval_dataset(dataset)
        batches = list(DataLoader(dataset, self.args.eval_batch_size, collate_fn=self.data_collator))
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        # A stream has no length.
        self.calibrate(sum(len(batch["input_ids"]) for batch in batches))
        model.eval()
        sums = torch.zeros(2, len(self.losses.names), dtype=torch.float64, device=self.accelerator.device)
        for first in range(0, len(batches), world):
            # Sharded weights need every process in every pass: one without rows of its own gets weight 0.
            batch = batches[min(first + rank, len(batches) - 1)]
            count = self.losses.counts(batch).to(sums) * (first + rank < len(batches))
            with self.accelerator.autocast():
                found = model(**self._prepare_inputs(batch))
            losses = torch.stack([found[name].double() for name in self.losses.names])
            sums += torch.stack([losses * count, count])
        reshard(model)
        sums = self.accelerator.reduce(sums, "sum")
        means = sums[0] / sums[1].clamp(min=1)
        values = {"loss": float(self.losses.mean(means)), **dict(zip(self.losses.names, means.tolist(), strict=True))}
        if self.measure is not None:
            values |= self.measure(self.compressor)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the trained compressor for `Compressor.from_pretrained`, with whole weights where they are sharded."""
        folder = Path(output_dir or self.out / EXPORTED)
        if _internal_call:
            super().save_model(str(folder), _internal_call=True)
            return
        main = self.accelerator.is_main_process
        with whole_weights(self.compressor, keep=main):
            if main and self.compressor.adapters is not None:
                save_pretrained(self.compressor, folder, self._fingerprints)
            elif main:
                self.compressor.save_pretrained(folder)
        self.accelerator.wait_for_everyone()

    def header(self) -> dict[str, Any]:
        """Beside the seconds, the longest context that any process has trained on."""
        own = torch.tensor([self.compressor.trained_length or 0], device=self.accelerator.device)
        self.compressor.trained_length = int(self.accelerator.gather(own).max()) or None
        return {"trained_length": self.compressor.trained_length, **super().header()}

    def take(self, header: Mapping[str, Any]) -> None:
        """See `header`."""
        super().take(header)
        length = max(self.compressor.trained_length or 0, header["trained_length"] or 0)
        self.compressor.trained_length = length or None

    def _load_best_model(self) -> None:
        if not self.flow.number:
            checkpoints.restore(str(self.state.best_model_checkpoint), self.compressor.trainable(), self.identity)


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        steps: number of updates, including those before a resumption.
        seconds: of training, without evaluations.
        held_out: losses of an evaluation by name, in nats a token: the last, or with patience that of the lowest loss;
            empty if there was none.
        folder: holds metrics.jsonl, the last checkpoints (checkpoint-*) and the trained compressor (compressor/).
        weights: number of updates that the trained weights have seen: with patience those before that evaluation.
    """

    steps: int
    seconds: float
    held_out: dict[str, float]
    folder: Path
    weights: int


class Trainer(CompressorTrainer):
    """A `CompressorTrainer` from a recipe, which has all that a paper says of its schedule, and batches.

    The recipe, the batches and the compressor determine the losses of a run. The number of processes and `accumulate`
    change them only by rounding. Random numbers drawn in a pass (dropout, random nuggets of a stage) depend on the
    seed, the step and the process.

    Args:
        compressor: as of `CompressorTrainer`.
        batches: the training and held-out rows.
        recipe: the schedule; its `batch` is the batches' size. Its epochs become steps of these batches. Where its
            patience ends, the run does; it ends with the weights of the evaluation with the lowest loss, whose
            checkpoint is kept. The evaluation before the first step is none of these.
        out: folder for metrics, checkpoints and the trained compressor; one that all processes see.
        measure, stages, progress: as of `CompressorTrainer`.
        callbacks: `transformers.TrainerCallback`s.
        options: the fields of `RunOptions`. In bf16 the decoder's frozen linear maps are rounded once rather than at
            every use, with the same losses to the bit; the copies take half of their bytes. Not with
            `gradient_checkpointing`, nor with sharded weights. A checkpoint takes three times the bytes of the trained
            parameters (with Adam's state), and one more is there while it is written.

    Raises:
        ImportError, RuntimeError: if the package of a tracker is missing.
        ValueError: if an argument is out of range, or the rows cannot be divided among processes and passes.
    """

    def __init__(
        self,
        compressor: Compressor | LanguageModel,
        batches: Batches,
        recipe: Recipe,
        out: str | Path,
        *,
        callbacks: Sequence[TrainerCallback] = (),
        progress: bool = True,
        measure: Measure | None = None,
        stages: Sequence[Stage] = (),
        **options: Any,
    ) -> None:
        run = RunOptions(**options)
        if recipe.patience is not None and run.eval_every is None:
            raise ValueError(f"patience: expected evaluations (eval_every) with it, got {recipe.patience} without")
        if batches.size != recipe.batch:
            raise ValueError(f"batches: expected {recipe.batch} rows as the recipe says, got {batches.size}")
        self.batches, self.recipe = batches, recipe.for_rows(batches.rows)
        rows = [] if run.eval_every is None else batches.held_out_rows(run.held_out)
        if recipe.patience is not None and not rows:
            raise ValueError("patience: expected held-out rows with it, got none")
        super().__init__(
            compressor,
            arguments_of(self.recipe, out, run, evaluates=bool(rows)),
            Subset(batches, range(self.recipe.steps * recipe.batch)),
            rows or None,
            batches.collate,
            memory_factor=recipe.memory_factor,
            stages=stages,
            measure=measure,
            patience=recipe.patience,
            save_minutes=run.save_minutes or None,
            identity={"recipe": self.recipe.identity, "batches": batches.identity},
            progress=progress,
            callbacks=callbacks,
        )
        if self.is_fsdp_enabled and recipe.optimizer == "adafactor":
            raise ValueError("optimizer: expected adamw with FSDP, as torch's Adafactor takes no sharded weights")

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(cast(Any, self.train_dataset))

    def _training_row(self, index: int) -> Any:
        return self.batches[index]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The recipe's."""
        if self.optimizer is None:
            groups = self.compressor.parameter_groups(self.recipe.learning_rate, self.memory_factor)
            self.optimizer = self.recipe.make_optimizer(groups)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The recipe's learning rates."""
        recipe = self.recipe
        self._created_lr_scheduler = True
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or cast(Any, self.optimizer), lambda step: recipe.learning_rate_at(step) / recipe.learning_rate
        )
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        return self.recipe.learning_rate_at(self.state.global_step)

    def train(self, *, resume: bool = False) -> Result:  # type: ignore[override]
        """Trains to the recipe's last step, or until its patience ends, and saves the compressor as it then is.

        Args:
            resume: whether to continue from the last checkpoint in `out`, if there is one.

        Raises:
            Diverged, Interrupted: as of `CompressorTrainer.train`.
            OSError: if another run has `out`, or the disk is full, in one line with the file and the space; what was
                saved before stays.
            ValueError: without `resume`, if `out` has checkpoints; with it, if the last one is another run's or none is
                whole. A damaged last one is left out, with a warning.
        """
        with ExitStack() as stack:
            if self.is_world_process_zero():
                self.out.mkdir(parents=True, exist_ok=True)
                try:
                    stack.callback(os.close, lock(self.out, "run"))
                except OSError as error:
                    # Some network disks have no locks; a run goes on without.
                    if error.errno not in (ENOLCK, ENOSYS, EOPNOTSUPP):
                        raise
                remove_partials(self.out)
                checkpoints.remove_partial(self.out)
            # A kill may have left the last checkpoint to be put back.
            self.accelerator.wait_for_everyone()
            super().train(self._resumes(resume))
            state = self.state
            weights, at = state.global_step, state.log_history
            if self.patience is not None and state.best_global_step:
                weights = state.best_global_step
                self._load_best_model()
            found = [record_of(entry) or {} for entry in at]
            held_out = [each["held_out"] for each in found if "held_out" in each and each["step"] <= weights]
            self.calibrate(len(cast(Any, self.eval_dataset) or ()) or self.recipe.batch)
            self.save_model()
        return Result(state.global_step, self.seconds, held_out[-1] if held_out else {}, self.out, weights)

    def _resumes(self, resume: bool) -> bool:
        """Whether there is a checkpoint to continue from; a folder with another run's results is refused."""
        states = checkpoints.find(self.out)
        if states and not resume:
            raise ValueError(f"{self.out}: expected no checkpoints, got {len(states)}; resume, or use another folder")
        if not states and (self.out / EXPORTED).exists():
            raise ValueError(
                f"{self.out}: expected checkpoints beside the trained {EXPORTED}/ to continue from, got none; "
                "use another folder"
            )
        return bool(states)
