"""LoRA through PEFT: adapters beside frozen base weights, for all rows of a pass or for a role's rows each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gistkit.compress.shared import Maps
from gistkit.hf import forwards
from gistkit.nn import LowRank, RoleLinear

# Which adapter serves a pass: one by role, each role's own for its tokens, that of the role of each row of the batch,
# or none.
Use = str | Mapping[str, slice] | tuple[str, ...] | None


def lora_config(model: PreTrainedModel, rank: int, maps: Maps = "query_value") -> LoraConfig:
    """LoRA on linear maps of the decoder layers, with alpha 2 rank.

    Args:
        maps: "query_value", the projections that Position IDs Matter trains its encoders with; "query_key_value", three
            of the attention's, as many weights as Dodo's Table 5 counts; "all", for a model fine-tuned as a whole.

    Raises:
        ValueError: if the rank is below 1, or no projection of the model has a known name.
    """
    if rank < 1:
        raise ValueError(f"lora: expected a rank >= 1, got {rank}")
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    if maps == "all":
        return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", fan_in_fan_out=transposed)
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    wanted = ["q_proj", "v_proj"] if maps == "query_value" else ["q_proj", "k_proj", "v_proj"]
    targets = next((known for known in (wanted, ["c_attn"]) if names >= set(known)), None)
    if targets is None:
        raise ValueError(
            f"lora: expected a model with {' and '.join(wanted)} (or c_attn), got {type(model).__name__}; "
            "pass a peft.LoraConfig with its target_modules"
        )
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, fan_in_fan_out=targets == ["c_attn"])


def active_adapters(model: nn.Module) -> list[str]:
    """The adapters that a pass of the model runs with as it is."""
    return sorted({name for layer in _tuned(model) if not layer._disable_adapters for name in layer.active_adapters})


class Adapters:
    """LoRA adapters of its own in a model, one for each role, all off except inside `using`.

    Args:
        model: changed in place: its target modules get the adapters beside their frozen weights.
        configs: {role: what PEFT makes the role's adapter from}.
    """

    def __init__(self, model: PreTrainedModel, configs: Mapping[str, LoraConfig]) -> None:
        for config in configs.values():
            _check_config(config)
        taken = {name for layer in _tuned(model) for name in layer.active_adapters}
        taken |= set(getattr(model, "peft_config", None) or {})
        free = (number for number in range(len(taken) + 1) if not taken & set(_names(number, configs).values()))
        self.names = _names(next(free), configs)
        self._before = active_adapters(model)
        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        with warnings.catch_warnings():
            # Two compressors may share one model: each has adapters under its own names.
            warnings.filterwarnings("ignore", "You are trying to modify a model with PEFT for a second time")
            # PEFT asks transformers by a name that it deprecates.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
            (first, config), *others = configs.items()
            self.peft: PeftModel = get_peft_model(model, config, adapter_name=self.names[first])  # type: ignore[assignment]
            for role, other in others:
                self.peft.add_adapter(self.names[role], other)
        self._layers = _tuned(model)
        self._set(self._before)
        own = set(self.names.values())
        for name, parameter in model.named_parameters():
            parts = set(name.split("."))
            # Other adapters are left as they were; the base weights are frozen.
            parameter.requires_grad_(bool(own & parts) or (bool(taken & parts) and trained.get(name, False)))
        self._maps: dict[nn.Module, partial[Tensor]] = {}
        self._use: Use = None
        if others:
            try:
                targets = [layer for layer in self._layers if self._targets(layer)]
                self._maps = {layer: partial(self._map, self._roles_of(layer)) for layer in targets}
            except ValueError:
                self._remove(bool(taken), trained)
                raise

    def owns(self, name: str) -> bool:
        """Whether a parameter of the model, by its name, is one of these adapters'."""
        return not set(self.names.values()).isdisjoint(name.split("."))

    def plain(self, name: str) -> str:
        """A parameter's name with its role in place of the adapter's name, which depends on what else there is."""
        roles = {adapter: role for role, adapter in self.names.items()}
        return ".".join(roles.get(part, part) for part in name.split("."))

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """The adapter of one role for all tokens, of several for those of each, or the model as it was before.

        Those that were active before the adapters were made are active beside the adapter of one role, and alone.
        """
        if isinstance(use, Mapping | tuple) and len(self.names) == 1:
            # Beside copies of the maps for all other roles.
            (use,) = self.names
        # Within a pass by role the target modules ask who serves them: a layer may change that for a moment.
        if isinstance(use, Mapping | tuple) or self._use is not None:
            with self._by_rows({} if use is None else use):
                yield
            return
        with self.switched(self._before if use is None else [*self._before, self.names[use]]):
            yield

    @contextmanager
    def switched(self, names: list[str]) -> Iterator[None]:
        """Inside, PEFT's adapters of these names serve all rows together, and no others."""
        layer = self._layers[0]
        before = layer.active_adapters if not layer._disable_adapters else []
        if before == names:
            yield
            return
        self._set(names)
        try:
            yield
        finally:
            self._set(before)

    @contextmanager
    def _by_rows(self, use: str | Mapping[str, slice] | tuple[str, ...]) -> Iterator[None]:
        """Every target module maps rows by role; a role alone is that of all rows."""
        before = self._use
        with forwards(self._maps if before is None else {}):
            self._use = use
            try:
                yield
            finally:
                self._use = before

    @contextmanager
    def all_rows_as(self, role: str) -> Iterator[None]:
        """Inside a pass by role, the adapter of `role` serves all rows; a lone adapter does so anyway."""
        before = self._use
        if before is not None:
            self._use = role
        try:
            yield
        finally:
            self._use = before

    def _map(self, by_role: RoleLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        use: Any = self._use
        if isinstance(use, tuple):
            return by_role.of_rows(x, use)
        if isinstance(use, str):
            return by_role.all_rows(x, use)
        return by_role(x, use)  # type: ignore[no-any-return]

    def _targets(self, layer: Any) -> bool:
        held = ("lora_A", "lora_embedding_A", "modules_to_save")
        return any(name in getattr(layer, part, ()) for part in held for name in self.names.values())

    def _remove(self, others: bool, trained: Mapping[str, bool]) -> None:
        """Leaves the model as it was found."""
        for name in self.names.values():
            self.peft.delete_adapter(name)
        base: Any = self.peft.base_model
        model = base.model
        if not others:
            base.unload()
            vars(model).pop("peft_config", None)
        for name, parameter in model.named_parameters():
            # Beside other adapters the maps stay in PEFT's modules.
            parameter.requires_grad_(trained.get(name, trained.get(name.replace(".base_layer.", "."), False)))

    def _roles_of(self, layer: Any) -> RoleLinear:
        if self._before or not isinstance(layer, LoraLinear) or not isinstance(layer.base_layer, nn.Linear):
            raise ValueError(
                "lora: expected plain LoRA on linear maps, and no other active adapter, for adapters by role, got "
                f"{self._before or type(layer).__name__}"
            )
        roles = {
            role: LowRank(layer.lora_A[name], layer.lora_B[name], layer.scaling[name], layer.lora_dropout[name])
            for role, name in self.names.items()
        }
        return RoleLinear(layer.base_layer, roles)

    def _set(self, names: Sequence[str]) -> None:
        # PEFT's own switches change requires_grad too, which an optimizer and a running backward pass rely on.
        for layer in self._layers:
            active = list(names) if names else list(self.names.values())
            vars(layer).update(_active_adapter=active, _disable_adapters=not names)


def _check_config(config: LoraConfig) -> None:
    """Refuses what makes an adapter of another model than the one it is put into."""
    start = config.init_lora_weights
    if isinstance(start, str) and start.lower().startswith(("pissa", "olora", "corda", "loftq")):
        raise ValueError(f"lora: expected a start that leaves the base model as it is, got init_lora_weights {start!r}")
    if config.use_dora:
        raise ValueError("lora: expected plain LoRA, got use_dora=True")


def _names(number: int, roles: Mapping[str, Any]) -> dict[str, str]:
    return {role: f"gistkit_{number}_{role}" for role in roles}


def _tuned(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]
