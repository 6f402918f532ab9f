"""The Accelerate object of a run: device, processes, precision and accumulation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

try:
    from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
    from accelerate.state import AcceleratorState
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    raise ImportError("training needs the package accelerate; pip install 'gistkit[train]' brings it") from error

from gistkit.train.tracking import Tracker, check_trackers

PRECISIONS = ("no", "bf16")


def make_accelerator(
    accumulate: int,
    precision: str | None,
    cpu: bool,
    track: Tracker | Sequence[Tracker] = (),
    folder: Path = Path(),
) -> Accelerator:
    """What `accelerate launch` (or, without it, this machine) offers.

    Args:
        accumulate: passes a step.
        precision: "no" or "bf16" (mixed precision); None: what the launcher says, otherwise "no".
        cpu: whether to leave GPUs alone.
        track: of `Trainer`.
        folder: of the run, where trackers keep files.

    Raises:
        ImportError: if the package of a tracker is missing.
        ValueError: if an argument or the launcher's configuration is not supported.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate: expected at least 1 pass a step, got {accumulate}")
    precision = precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    trackers = check_trackers(track)
    # Accelerate has one state a process; a run after another may want another precision.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != precision:
        AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
        log_with=trackers or None,
        project_dir=folder / "tensorboard",
        # The language model's task token takes no part in reconstruction, and the other way round.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    kind, sharding = accelerator.distributed_type, getattr(accelerator.state, "fsdp_plugin", None)
    if kind == DistributedType.FSDP and not getattr(accelerator, "is_fsdp2", False):
        raise ValueError("accelerate: expected fsdp_version: 2, which keeps frozen and trained weights apart, got 1")
    if kind == DistributedType.FSDP and sharding is not None and sharding.activation_checkpointing:
        # It would run layers again without knowing whether they ran with the adapter.
        raise ValueError(
            "accelerate: expected fsdp_activation_checkpointing: false, got true; use gradient_checkpointing"
        )
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"accelerate: expected one device, data parallel processes or FSDP, got {kind.value}")
    return accelerator
