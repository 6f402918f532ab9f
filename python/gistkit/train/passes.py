"""Passes: a whole batch through all processes, each loss the mean over all of its tokens however they are shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gistkit.compress import Compressor
from gistkit.train.batches import Batch, split, targets

if TYPE_CHECKING:
    from accelerate import Accelerator


class Losses(nn.Module):
    """What Accelerate wraps and changes, so that the compressor stays as it is."""

    def __init__(self, compressor: Compressor) -> None:
        super().__init__()
        self.compressor = compressor

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The compressor's losses of a batch."""
        return self.compressor(**batch)


class Passes:
    """Forward and backward passes of the rows that are this process's.

    Args:
        accelerator: what prepared `module`.
        module: prepared `Losses`.
        compressor: the one inside.
    """

    def __init__(self, accelerator: Accelerator, module: nn.Module, compressor: Compressor) -> None:
        self.accelerator = accelerator
        self.module = module
        self.names = tuple(compressor.loss_weights)
        self._end_token = compressor.end_token is not None
        weights = torch.tensor(list(compressor.loss_weights.values()), dtype=torch.float64)
        self._weights = (weights / weights.sum()).tolist()

    def mean(self, losses: Tensor) -> Tensor:
        """The weighted mean of losses [n], a scalar."""
        return (losses * losses.new_tensor(self._weights)).sum()

    def backward(self, batch: Batch) -> Tensor:
        """Adds the gradient of the batch's mean loss; returns the losses, fp32 [n] as in `names`, in every process."""
        accelerator = self.accelerator
        rank, world, passes = (
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.gradient_accumulation_steps,
        )
        whole = self._counts(batch)
        parts = split(batch, world * passes)
        total = torch.zeros(len(self.names), device=accelerator.device)
        for part in parts[rank::world]:
            with accelerator.accumulate(self.module):
                # Of the tokens that a loss is the mean over, the share in this part.
                losses = self._losses(part) * (self._counts(part) / whole.clamp(min=1)).to(total)
                # Accelerate takes the mean over passes and processes; this is a sum.
                accelerator.backward(self.mean(losses) * len(parts))
            total += losses.detach()
        return accelerator.reduce(total, "sum")

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> Tensor:
        """The losses of all batches, fp64 [n] as in `names`, in every process; at least one batch."""
        accelerator = self.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=accelerator.device)
        for first in range(0, len(batches), world):
            # Sharded weights need every process in every pass: one without rows of its own counts for nothing.
            batch = batches[min(first + rank, len(batches) - 1)]
            count = self._counts(batch).to(sums) * (first + rank < len(batches))
            sums += torch.stack([self._losses(batch).double() * count, count])
        sums = accelerator.reduce(sums, "sum")
        return sums[0] / sums[1].clamp(min=1)

    def _losses(self, batch: Batch) -> Tensor:
        device = self.accelerator.device
        losses = self.module({name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()})
        return torch.stack([losses[name].float() for name in self.names])

    def _counts(self, batch: Batch) -> Tensor:
        counts = targets(batch, end_token=self._end_token)
        return torch.tensor([counts[name] for name in self.names], dtype=torch.float64)
