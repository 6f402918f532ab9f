"""Losses: the module that a trainer wraps and changes instead of the compressor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gistkit.compress import Compressor, LanguageModel, MixedResolution
from gistkit.compress.methods.in_place import InPlace
from gistkit.train.batches import Batch, for_losses, targets, texts


class Losses(nn.Module):
    """The losses of a compressor, or of a language model, which is not a module: its parameters are its compressor's.

    `names` are those of the losses, and `calibrates` says whether it is a language model whose threshold comes from
    sampled text.
    """

    def __init__(self, trained: Compressor | LanguageModel) -> None:
        super().__init__()
        self.reader: Any = trained if isinstance(trained, LanguageModel) else None
        self.compressor: Compressor = trained.compressor if isinstance(trained, LanguageModel) else trained
        self.calibrates = isinstance(trained, MixedResolution) and trained.compressor.samples_threshold
        # What `targets` gets of the model.
        self._target_options: dict[str, Any]
        if self.reader is not None:
            losses, self._target_options = {"loss": 1.0}, {"bos_token": self.compressor.bos_token}
        else:
            end_token = self.compressor.end_token is not None
            losses, self._target_options = self.compressor.loss_weights, {"end_token": end_token}
            if isinstance(self.compressor, InPlace):
                self._target_options["bos_token"] = self.compressor.bos_token
        self.names = tuple(losses)
        weights = torch.tensor(list(losses.values()), dtype=torch.float64)
        self._weights = (weights / weights.sum()).tolist()

    def forward(self, *batches: Batch, calibrate: bool = False, **batch: Tensor) -> dict[str, Tensor]:
        """The losses of a batch; with `calibrate` none, but it sets the reader's threshold on these batches.

        One method does both, because Accelerate's precision and sharded weights apply only here.
        """
        if calibrate:
            self.reader.calibrate(batches)
            return {}
        return self.compressor(**batch) if self.reader is None else self.reader(**batch)

    def read(self, batch: Batch) -> Batch:
        """The part of a batch that the losses need."""
        return texts(batch) if self.reader is not None else for_losses(batch, self.names)

    def counts(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The tokens that each loss is the mean over, fp64 [n] as in `names`."""
        counts = targets(dict(batch), window=self.compressor.window, **self._target_options)
        return torch.tensor([counts[name] for name in self.names], dtype=torch.float64)

    def mean(self, losses: Tensor) -> Tensor:
        """The weighted mean of losses [n], a scalar."""
        return (losses * losses.new_tensor(self._weights)).sum()

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: Any = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Keeps only each layer's inputs for the backward pass; transformers asks for it by this name."""
        for name, value in (("kwargs", activation_checkpointing_kwargs), ("offload", offload)):
            if value:
                raise ValueError(f"activation_checkpointing_kwargs: expected no {name}, got {value}")
        if every_n_layers != 1:
            raise ValueError(f"every_n_layers: expected 1, got {every_n_layers}")
        self.compressor.gradient_checkpointing_enable()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **options: Any) -> None:
        """The same, as transformers before 5.24 asks for it."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        self.compressor.gradient_checkpointing_disable()
