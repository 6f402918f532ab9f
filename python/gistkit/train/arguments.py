"""transformers' TrainingArguments of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from gistkit.common.processes import launched
from gistkit.train.recipe import Recipe

PRECISIONS = ("no", "bf16")


def arguments_of(
    recipe: Recipe,
    out: str | Path,
    *,
    accumulate: int,
    precision: str | None,
    cpu: bool,
    gradient_checkpointing: bool,
    eval_every: int | None,
    save_every: int,
    keep: int,
    track: str | Sequence[str],
) -> TrainingArguments:
    """The arguments of a run; their names are `Trainer`'s.

    Raises:
        ValueError: if an argument is not supported, or the rows cannot be divided.
    """
    if precision not in (None, *PRECISIONS):
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    processes = launched().count
    if recipe.batch % (processes * accumulate):
        raise ValueError(
            f"batch: expected a multiple of {processes} processes x {accumulate} passes, got {recipe.batch} rows"
        )
    rows = recipe.batch // (processes * accumulate)
    options: dict[str, Any] = {} if precision is None else {"bf16": precision == "bf16"}
    if gradient_checkpointing:
        # Before transformers 5.24 it had another name.
        names = {each.name for each in fields(TrainingArguments)}
        options["activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"] = True
    return TrainingArguments(
        output_dir=str(out),
        max_steps=recipe.steps,
        seed=recipe.seed,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=accumulate,
        eval_strategy="no" if eval_every is None else "steps",
        eval_steps=eval_every,
        save_steps=save_every,
        save_total_limit=keep,
        logging_steps=1,
        logging_nan_inf_filter=False,
        metric_for_best_model=None if recipe.patience is None else "loss",
        greater_is_better=False,
        dataloader_pin_memory=not cpu,
        report_to=[track] if isinstance(track, str) else list(track),
        disable_tqdm=True,
        use_cpu=cpu,
        **options,
    )
