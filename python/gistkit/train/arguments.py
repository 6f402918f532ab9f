"""RunOptions: how a run is made; transformers' TrainingArguments of it and a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.common.declared import check, declared, documented
from gistkit.common.processes import launched
from gistkit.train.recipe import Recipe

if TYPE_CHECKING:
    from transformers import TrainingArguments


@documented
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is made, which changes its losses by rounding at most; keyword arguments of `Trainer`.

    Without `eval_every` there are no evaluations. `cpu`: whether to use no GPU; False: torch's current one. `track`:
    where the figures go too, "tensorboard" or "wandb", or several of transformers' integrations.
    """

    precision: str | None = declared(None, "bf16: mixed precision (default: the launcher's)", among=("no", "bf16"))
    accumulate: int = declared(1, "passes a step, to save memory", least=1)
    gradient_checkpointing: bool = declared(False, "recompute layers in the backward pass, to save memory")
    eval_every: int | None = declared(500, "steps between held-out losses, the first before training", least=1)
    held_out: int = declared(64, "most rows of a held-out loss", least=1)
    save_every: int = declared(500, "steps between checkpoints; the last step has one too", least=1)
    save_minutes: float | None = declared(5.0, "most minutes between checkpoints; 0: only by steps", least=0)
    keep: int = declared(2, "checkpoints kept, at least 2, in case the last one is damaged", least=2)
    cpu: bool = False
    track: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        check(self)

    def rows(self, recipe: Recipe, processes: int) -> int:
        """The rows of a pass in a process."""
        rows, rest = divmod(recipe.batch, processes * self.accumulate)
        if rest:
            raise ValueError(
                f"batch: expected a multiple of {processes} processes x {self.accumulate} passes, "
                f"got {recipe.batch} rows"
            )
        return rows


def arguments_of(recipe: Recipe, out: str | Path, run: RunOptions, *, evaluates: bool) -> TrainingArguments:
    """The arguments of a run; `evaluates`: whether it has rows to hold out."""
    import torch
    from transformers import TrainingArguments

    rows = run.rows(recipe, launched().count)
    options: dict[str, Any] = {} if run.precision is None else {"bf16": run.precision == "bf16"}
    if run.gradient_checkpointing:
        # Before transformers 5.24 it had another name.
        names = {each.name for each in fields(TrainingArguments)}
        options["activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"] = True
    # transformers makes the first GPU the current one.
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=recipe.steps,
        seed=recipe.seed,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=run.accumulate,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=run.eval_every if evaluates else None,
        eval_on_start=evaluates,
        save_steps=run.save_every,
        save_total_limit=run.keep,
        logging_steps=1,
        logging_nan_inf_filter=False,
        metric_for_best_model=None if recipe.patience is None else "loss",
        greater_is_better=False,
        dataloader_pin_memory=not run.cpu and torch.cuda.is_available(),
        report_to=[run.track] if isinstance(run.track, str) else list(run.track),
        disable_tqdm=True,
        use_cpu=run.cpu,
        **options,
    )
    if current and not run.cpu and launched().count == 1:
        torch.cuda.set_device(current)
        device = torch.device("cuda", current)
        arguments.distributed_state.device = arguments.__dict__["_setup_devices"] = device
    return arguments
