"""Passes: a whole batch through all processes; each loss is the mean over all its tokens, however they are divided."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gistkit.compress import Compressor, LanguageModel, MixedResolution
from gistkit.train.batches import Batch, for_losses, split, targets, texts
from gistkit.train.sharding import reshard

if TYPE_CHECKING:
    from accelerate import Accelerator


class Losses(nn.Module):
    """The module that Accelerate wraps and changes in place of the compressor."""

    def __init__(self, trained: Compressor | LanguageModel) -> None:
        super().__init__()
        # A language model is not a module: all its parameters are the compressor's.
        self.reader: Any = trained if isinstance(trained, LanguageModel) else None
        self.compressor: Compressor = trained.compressor if isinstance(trained, LanguageModel) else trained

    def forward(self, *batches: Batch, calibrate: bool = False) -> dict[str, Tensor]:
        """The losses of a batch; with `calibrate` none, but it sets the reader's threshold on these batches.

        One method does both, because Accelerate's precision and sharded weights apply only here.
        """
        if calibrate:
            self.reader.calibrate(batches)
            return {}
        (batch,) = batches
        return self.compressor(**batch) if self.reader is None else self.reader(**batch)


class Passes:
    """Forward and backward passes over the rows of this process.

    Args:
        accelerator: the one that prepared `module`.
        module: prepared `Losses`.
        trained: the compressor or language model inside.

    `calibrates`: whether that is a language model whose threshold comes from sampled text.
    """

    def __init__(self, accelerator: Accelerator, module: nn.Module, trained: Compressor | LanguageModel) -> None:
        self.accelerator = accelerator
        self.module = module
        self._reads = isinstance(trained, LanguageModel)
        self.calibrates = isinstance(trained, MixedResolution) and trained.compressor.samples_threshold
        # What `targets` is told of the model.
        self._target_options: dict[str, Any]
        if isinstance(trained, LanguageModel):
            losses, self._target_options = {"loss": 1.0}, {"bos_token": trained.compressor.bos_token}
        else:
            losses, self._target_options = trained.loss_weights, {"end_token": trained.end_token is not None}
        self.names = tuple(losses)
        weights = torch.tensor(list(losses.values()), dtype=torch.float64)
        self._weights = (weights / weights.sum()).tolist()

    def read(self, batch: Batch) -> Batch:
        """The part of a batch that the losses need."""
        return texts(batch) if self._reads else for_losses(batch, self.names)

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
        batch_counts = self._counts(batch)
        parts = split(batch, world * passes)
        total = torch.zeros(len(self.names), device=accelerator.device)
        for part in parts[rank::world]:
            with accelerator.accumulate(self.module):
                # Weighted by the share of each loss's tokens that is in this part.
                losses = self._losses(part) * (self._counts(part) / batch_counts.clamp(min=1)).to(total)
                # Accelerate takes the mean over passes and processes; this is a sum.
                accelerator.backward(self.mean(losses) * len(parts))
            total += losses.detach()
        return accelerator.reduce(total, "sum")

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Sets a reader's threshold on training batches, the same in every process."""
        parts = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
        # In the same parts as training passes: the same scores, within the same memory.
        self.module(*(self._to_device(part) for batch in batches for part in split(batch, parts)), calibrate=True)
        reshard(self.module)

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> Tensor:
        """The losses of all batches, fp64 [n] as in `names`, in every process; at least one batch."""
        accelerator = self.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=accelerator.device)
        for first in range(0, len(batches), world):
            # Sharded weights need every process in every pass: one without rows of its own gets weight 0.
            batch = batches[min(first + rank, len(batches) - 1)]
            count = self._counts(batch).to(sums) * (first + rank < len(batches))
            sums += torch.stack([self._losses(batch).double() * count, count])
        reshard(self.module)
        sums = accelerator.reduce(sums, "sum")
        return sums[0] / sums[1].clamp(min=1)

    def _losses(self, batch: Batch) -> Tensor:
        losses = self.module(self._to_device(batch))
        return torch.stack([losses[name].float() for name in self.names])

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.accelerator.device, non_blocking=True) for name, tensor in batch.items()}

    def _counts(self, batch: Batch) -> Tensor:
        counts = targets(batch, **self._target_options)
        return torch.tensor([counts[name] for name in self.names], dtype=torch.float64)
