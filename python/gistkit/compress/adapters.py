"""LoRA through PEFT, switched on for the encoder and off for the decoder: one copy of the base weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel


def lora_config(model: PreTrainedModel, rank: int) -> LoraConfig:
    """LoRA on query and value projections with alpha 2 rank, as Position IDs Matter trains its encoders.

    Raises:
        ValueError: if the rank is below 1, or no projection of the model has a known name.
    """
    if rank < 1:
        raise ValueError(f"lora: expected a rank >= 1, got {rank}")
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = next((known for known in (["q_proj", "v_proj"], ["c_attn"]) if names >= set(known)), None)
    if targets is None:
        raise ValueError(
            f"lora: expected a model with q_proj and v_proj (or c_attn), got {type(model).__name__}; "
            "pass a peft.LoraConfig with its target_modules"
        )
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, fan_in_fan_out=targets == ["c_attn"])


class Adapter:
    """A LoRA adapter of its own in a model, off except inside `on`.

    Args:
        model: changed in place: its target modules get the adapter beside their frozen weights.
        config: what PEFT makes it from.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig) -> None:
        taken = {name for layer in _tuned(model) for name in layer.active_adapters}
        taken |= set(getattr(model, "peft_config", None) or {})
        self.name = next(name for name in map("gistkit_{}".format, range(len(taken) + 1)) if name not in taken)
        active = {name for layer in _tuned(model) if not layer._disable_adapters for name in layer.active_adapters}
        self._before = sorted(active)
        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        with warnings.catch_warnings():
            # Two compressors may share one model: each has an adapter under its own name.
            warnings.filterwarnings("ignore", "You are trying to modify a model with PEFT for a second time")
            # PEFT asks transformers by a name that it deprecates.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
            self.peft: PeftModel = get_peft_model(model, config, adapter_name=self.name)  # type: ignore[assignment]
        self._layers = _tuned(model)
        self._set(self._before)
        for name, parameter in model.named_parameters():
            parts = set(name.split("."))
            # Other adapters are left as they were; the base weights are frozen.
            parameter.requires_grad_(self.name in parts or (bool(taken & parts) and trained.get(name, False)))

    @contextmanager
    def on(self) -> Iterator[None]:
        """The adapter beside those that were active before it was made."""
        with self._switched([*self._before, self.name]):
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model as it was before the adapter was made."""
        with self._switched(self._before):
            yield

    @contextmanager
    def _switched(self, names: list[str]) -> Iterator[None]:
        before = self._layers[0].active_adapters if not self._layers[0]._disable_adapters else []
        if before == names:
            yield
            return
        self._set(names)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, names: list[str]) -> None:
        # PEFT's own switches change requires_grad too, which an optimizer and a running backward pass rely on.
        for layer in self._layers:
            layer._active_adapter = list(names) if names else [self.name]
            layer._disable_adapters = not names


def _tuned(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]
