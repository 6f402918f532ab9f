"""Adapters and copies: what tokens of a role have of their own in a shared model, LoRA or copies of its maps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from gistkit.hf import forwards
from gistkit.hf.attach import decoder_of
from gistkit.hf.lora import (
    check_honoured,
    embedding_scale,
    is_norm,
    keep_wide,
    linear_maps,
    maps_of,
    norms_of,
    plain_map,
)
from gistkit.nn import LowRank, RoleLinear
from gistkit.nn.adapted import AdaptedMap, adaptable
from gistkit.nn.folded import FoldedMap, fold, foldable
from gistkit.nn.roles import LowRankTokens, TokenMap

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

# The adapters of a pass: that of one role; {role: its tokens}; a role for each row of the batch; or none.
Use = str | Mapping[str, slice] | tuple[str, ...] | None
# Of the names of all compressors' adapters.
PREFIX = "gistkit_"


def first_adapter(model: nn.Module) -> str | None:
    """The name of a module in `model` that PEFT has wrapped with an adapter; None if there is none."""
    return next((name for name, _ in model.named_modules() if name.endswith(".base_layer")), None)


def freeze_base(model: nn.Module) -> None:
    """Freezes a model's weights, but for PEFT's adapters in it, which stay as they are."""
    adapters: set[nn.Parameter] = set()
    for layer in _peft_layers(model) if hasattr(model, "peft_config") else []:
        base = layer.base_layer if hasattr(layer, "base_layer") else layer.original_module
        adapters |= {*layer.parameters()} - {*base.parameters()}
    for parameter in model.parameters():
        if parameter not in adapters:
            parameter.requires_grad_(False)


def active_adapters(layers: Sequence[Any]) -> list[str]:
    """The adapters that are active in some of PEFT's layers."""
    return sorted({name for layer in layers if not layer._disable_adapters for name in layer.active_adapters})


class RoleMaps:
    """Modules that map each token with the parameters of its role, inside a pass by role.

    Args:
        by_role: the modules, each with its map by role. `use` says whose tokens are which: {role: its tokens}, a role
            for each row of the batch, or one role for all rows.
    """

    def __init__(self, by_role: Mapping[nn.Module, RoleLinear]) -> None:
        self._forwards = {module: partial(self._map, each) for module, each in by_role.items()}
        self.use: Use = None

    def __setitem__(self, module: nn.Module, by_role: RoleLinear) -> None:
        self._forwards[module] = partial(self._map, by_role)

    @contextmanager
    def using(self, use: str | Mapping[str, slice] | tuple[str, ...]) -> Iterator[None]:
        """Inside, the modules map tokens as `use` says; blocks may be nested."""
        before = self.use
        with forwards(self._forwards if before is None else {}):
            self.use = use
            try:
                yield
            finally:
                self.use = before

    @contextmanager
    def all_rows_as(self, role: str) -> Iterator[None]:
        """Inside a pass by role, the map of `role` applies to all rows."""
        before = self.use
        if before is not None:
            self.use = role
        try:
            yield
        finally:
            self.use = before

    def _map(self, by_role: RoleLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        use: Any = self.use
        if isinstance(by_role.base, TokenMap):
            x = x[..., None]
        if isinstance(use, tuple):
            return by_role.of_rows(x, use)
        if isinstance(use, str):
            return by_role.all_rows(x, use)
        return by_role(x, use)  # type: ignore[no-any-return]


class _Folds(dict[str, tuple[Any, dict[nn.Module, Tensor]]]):
    """By role: the versions of the weights, and the folded weight of each layer. A copy of the model has none yet."""

    def __reduce__(self) -> Any:
        return _Folds, ()


class Adapters:
    """A compressor's own LoRA adapters in a model, one for each role, all off except inside `using`.

    Args:
        model: changed in place: its target modules get the adapters beside their frozen weights.
        configs: {role: PEFT's configuration of its adapter}.
        by_role: see `SharedModel.install`.
    """

    def __init__(self, model: PreTrainedModel, configs: Mapping[str, LoraConfig], by_role: bool = False) -> None:
        # PEFT is slow to import, and needed only where there are adapters.
        from peft import get_peft_model

        for config in configs.values():
            check_honoured(config)
        taken_names = {name for layer in _peft_layers(model) for name in layer.active_adapters}
        taken_names |= set(getattr(model, "peft_config", None) or {})
        free_numbers = (
            number for number in range(len(taken_names) + 1) if not taken_names & set(_names(number, configs).values())
        )
        self.names = _names(next(free_numbers), configs)
        self._previous = active_adapters(_peft_layers(model))
        chosen: list[str] = next((layer.active_adapters for layer in _peft_layers(model)), [])
        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        self._has_others, self._trained = bool(taken_names), trained
        with warnings.catch_warnings():
            # Two compressors may share one model: each has adapters under its own names.
            warnings.filterwarnings("ignore", "You are trying to modify a model with PEFT for a second time")
            # PEFT asks transformers by a name that it deprecates.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
            # Nothing is merged: what is looked up has the adapter, and a tied output embedding stays as it is.
            warnings.filterwarnings("ignore", "Model (has|with) `tie_word_embeddings=True`")
            (first, config), *other_roles = configs.items()
            self.peft: PeftModel = get_peft_model(model, config, adapter_name=self.names[first])  # type: ignore[assignment]
            for role, other_config in other_roles:
                self.peft.add_adapter(self.names[role], other_config)
        self._layers = _peft_layers(model)
        # Those that a user has switched off now are the ones to switch on again.
        self._off = [name for name in chosen if not name.startswith(PREFIX)]
        self._merged: dict[nn.Module, list[str]] = {}
        self._set(self._previous)
        own_names = set(self.names.values())
        for name, parameter in model.named_parameters():
            parts = set(name.split("."))
            # Other adapters are left as they were; the base weights are frozen.
            parameter.requires_grad_(
                bool(own_names & parts) or (bool(taken_names & parts) and trained.get(name, False))
            )
        self.role_maps = RoleMaps({})
        self._adapted = {layer: AdaptedMap(layer) for layer in self._layers if adaptable(layer)}
        self._folds: _Folds = _Folds()
        self._norms = {model.get_submodule(name) for name in norms_of(model)}
        targets = [layer for layer in self._layers if self._targets(layer)]
        self._check_targets(model, targets)
        self._by_role = bool(other_roles) or by_role
        self._alone = self._by_role or any(hasattr(layer, "modules_to_save") for layer in targets)
        if self._by_role:
            self.role_maps = RoleMaps({layer: self._roles_of(layer) for layer in targets})
        for layer in targets:
            # PEFT's new modules are in training mode, whatever mode the model is in.
            layer.train(model.training)
            saved = getattr(layer, "modules_to_save", {})
            for copied in (saved[name] for name in own_names if name in saved):
                if is_norm(copied):
                    keep_wide(copied)

    def drop_embedding(self, role: str) -> None:
        """Removes what a role that looks no tokens up has on the input embedding."""
        layer: Any = cast(Any, self.peft.base_model).model.get_input_embeddings()
        name = self.names[role]
        if name not in getattr(layer, "lora_embedding_A", ()):
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Adapter .* was active which is now deleted")
            layer.delete_adapter(name)
        self._set(self._previous)
        self.role_maps[layer] = self._roles_of(layer)

    def owns(self, name: str) -> bool:
        """Whether a parameter of the model, by its name, is one of these adapters'."""
        return not set(self.names.values()).isdisjoint(name.split("."))

    def plain(self, name: str) -> str:
        """A parameter's name with the role instead of the adapter's name, which depends on other adapters."""
        roles = {adapter: role for role, adapter in self.names.items()}
        return ".".join(roles.get(part, part) for part in name.split("."))

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """The adapter of one role for all tokens, or each role's adapter for its tokens, or the model without either.

        A user's adapters that are active stay active beside the adapter of one role, and without it.

        Raises:
            ValueError: if there are some and these are for the tokens of a role, or train copies of modules.
        """
        others = self._active_others()
        if others and (self._alone or isinstance(use, Mapping | tuple)):
            raise ValueError(
                "lora: expected no other active adapter beside adapters or copies for the tokens of a role, or "
                f"modules_to_save, got {', '.join(others)}; switch it off with PEFT's disable_adapter"
            )
        if isinstance(use, Mapping | tuple) and not self._by_role:
            # The other roles use copies of the maps.
            (use,) = self.names
        # Within a pass by role the target modules look the role up: a layer may change it for a moment.
        if isinstance(use, Mapping | tuple) or self.role_maps.use is not None:
            with self.role_maps.using({} if use is None else use):
                yield
            return
        with (
            self.switched(others if use is None else [*others, self.names[use]]),
            forwards({layer: adapted for layer, adapted in self._adapted.items() if "forward" not in vars(layer)}),
        ):
            yield

    def _active_others(self) -> list[str]:
        """A user's active adapters, and those of other compressors that were active when these were made."""
        active = active_adapters(self._layers)
        return [name for name in active if name in self._previous or not name.startswith(PREFIX)]

    @contextmanager
    def switched(self, names: list[str]) -> Iterator[None]:
        """Inside, exactly PEFT's adapters of these names apply, all of them to all rows, beside merged ones."""
        # PEFT would leave ours out of maps that a user has merged adapters into: inside, these are plain ones.
        merged = {layer: layer.merged_adapters for layer in self._layers if getattr(layer, "merged_adapters", None)}
        layer = self._layers[0]
        if (layer.active_adapters if not layer._disable_adapters else []) == names and not merged:
            yield
            return
        before = [(layer, layer._active_adapter, layer._disable_adapters) for layer in self._layers]
        for layer in merged:
            layer.merged_adapters = []
        self._merged |= merged
        self._set(names)
        try:
            yield
        finally:
            for layer, adapters in merged.items():
                layer.merged_adapters = adapters
                del self._merged[layer]
            for layer, active, disabled in before:
                vars(layer).update(_active_adapter=active, _disable_adapters=disabled)

    def reads_as(self, role: str | None) -> bool:
        """Whether a pass would now run with the adapter of this role, or with none of these where it is None."""
        own = set(active_adapters(self._layers[:1])) & set(self.names.values())
        return own == ({self.names[role]} if role is not None else set())

    def parameters(self) -> Iterator[nn.Parameter]:
        """The adapters' own."""
        return (parameter for name, parameter in self.peft.named_parameters() if self.owns(name))

    @contextmanager
    def folded(self, role: str, versions: Any) -> Iterator[None]:
        """Inside, passes of one role without gradients run on copies of the maps with its adapter added into them.

        The copies are kept until `unfold`, or until the weights have other `versions`.
        """
        name = self.names.get(role)
        if name is None:
            yield
            return
        layers = [layer for layer in self._layers if foldable(layer, name)]
        versions = versions, [layer.scaling[name] for layer in layers]
        if self._folds.get(role, (None,))[0] != versions:
            self._folds.pop(role, None)
            self._folds[role] = versions, {layer: fold(layer, name) for layer in layers}
        weights = self._folds[role][1]
        with forwards({layer: FoldedMap(layer, name, weight) for layer, weight in weights.items()}):
            yield

    def unfold(self) -> None:
        """Frees what `folded` has kept."""
        self._folds.clear()

    def _targets(self, layer: Any) -> bool:
        containers = ("lora_A", "lora_embedding_A", "modules_to_save")
        return any(name in getattr(layer, part, ()) for part in containers for name in self.names.values())

    def _check_targets(self, model: PreTrainedModel, targets: Sequence[Any]) -> None:
        """Refuses adapters that no pass would use."""
        head: Any = model.get_output_embeddings()
        if head in targets:
            name = next(name for name, module in model.named_modules() if module is head)
            raise ValueError(
                "lora: expected no adapter on the output embedding, because the losses read its plain weight, got one "
                f"on {name} (ensure_weight_tying adds one to a tied embedding)"
            )
        if self._previous and any(hasattr(layer, "modules_to_save") for layer in targets):
            raise ValueError(
                "lora: expected no modules_to_save in a model with another active adapter, because PEFT then ignores "
                f"them, got {', '.join(self._previous)}"
            )

    def remove(self) -> None:
        """Restores the model as it was before these adapters."""
        trained = self._trained
        for name in self.names.values():
            self.peft.delete_adapter(name)
        base: Any = self.peft.base_model
        model = base.model
        if not self._has_others:
            base.unload()
            vars(model).pop("peft_config", None)
        for name, parameter in model.named_parameters():
            # Beside other adapters the maps stay in PEFT's modules.
            plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
            parameter.requires_grad_(trained.get(name, trained.get(plain, False)))

    def _roles_of(self, layer: Any) -> RoleLinear:
        from peft.tuners.lora import Embedding as LoraEmbedding
        from peft.tuners.lora import Linear as LoraLinear

        base: Any = getattr(layer, "base_layer", None)
        of_tokens = isinstance(layer, LoraEmbedding) and isinstance(base, nn.Embedding)
        if layer in self._norms and not self._previous:
            return RoleLinear(
                layer.original_module, {role: layer.modules_to_save[name] for role, name in self.names.items()}
            )
        if self._previous or not (of_tokens or (isinstance(layer, LoraLinear) and isinstance(base, nn.Linear))):
            raise ValueError(
                "lora: expected plain LoRA on linear maps and embeddings, modules_to_save that are norms of hidden "
                "states, and no other active adapter, for adapters by role, got "
                f"{self._previous or type(layer).__name__}"
            )
        if of_tokens:
            # A model may scale its embeddings; PEFT scales what an adapter adds to them likewise.
            factor = embedding_scale(base)
            tables = layer.lora_embedding_A, layer.lora_embedding_B
            added = {
                role: LowRankTokens(*tables, name, layer.scaling[name] * factor)
                for role, name in self.names.items()
                if name in tables[0]
            }
            return RoleLinear(TokenMap(base), added)
        roles = {
            role: LowRank(layer.lora_A[name], layer.lora_B[name], layer.scaling[name], layer.lora_dropout[name])
            for role, name in self.names.items()
        }
        return RoleLinear(base, roles)

    def _set(self, names: Sequence[str]) -> None:
        # PEFT's own switches change requires_grad too, which an optimizer and a running backward pass rely on.
        for layer in self._layers:
            on = [name for name in names if name not in self._merged.get(layer, ())]
            off = [] if hasattr(layer, "modules_to_save") else self._off
            # Where none are switched off, one that a user adds is on.
            vars(layer).update(_active_adapter=on or [*off], _disable_adapters=bool(off) and not on)


def _names(number: int, roles: Mapping[str, Any]) -> dict[str, str]:
    return {role: f"{PREFIX}{number}_{role}" for role in roles}


def _peft_layers(model: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def check_copied(model: nn.Module, lora: LoraConfig) -> None:
    """Refuses adapters that would be missing from the gists' copies of the linear maps."""
    if active := active_adapters(_peft_layers(model)):
        raise ValueError(f"full_copy: expected a model without other active adapters, got {', '.join(active)}")
    paths = [name.split(".") for name in maps_of(model, decoder_of(model))]
    holders = {".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    # As PEFT selects them, by the ends of names.
    saved = [name for name in lora.modules_to_save or () if any(holder.endswith(name) for holder in holders)]
    if saved:
        raise ValueError(f"lora: expected no modules_to_save of linear maps with full_copy, got {sorted(saved)}")


class Copies(nn.Module):
    """A copy of every linear map of a decoder's layers, which passes use for the rows of one role.

    Args:
        model: holds the maps that are copied, without any adapters around them; embeddings are shared.
        role: the role that the copies belong to.
        norms: whether the decoder's norms of hidden states are copied too; otherwise they are shared.
    """

    def __init__(self, model: nn.Module, role: str, *, norms: bool = False) -> None:
        super().__init__()
        self.role = role
        decoder = decoder_of(model)
        copied = linear_maps(decoder)
        for name, module in copied.items():
            if not (weight := plain_map(module).weight).is_floating_point():
                raise TypeError(
                    f"model: expected linear maps in floating point, which copies of them train in, got {weight.dtype} "
                    f"at {name}"
                )
        if norms:
            names = {module: name for name, module in decoder.named_modules()}
            copied |= {names[norm]: norm for norm in map(model.get_submodule, norms_of(model))}
        # A norm may be inside PEFT's wrapper, which has a copy of it that trains.
        plain = {name: getattr(module, "original_module", plain_map(module)) for name, module in copied.items()}
        # A module's name may have no dots.
        self.maps = nn.ModuleDict({name.replace(".", "/"): copy.deepcopy(module) for name, module in plain.items()})
        self.maps.requires_grad_(True)
        # Inside a pass the base of each is the module's own forward, so that none is a parent of the module.
        self._by_role: dict[nn.Module, Any] = {
            module: RoleLinear(cast(Any, None), {role: self.maps[name.replace(".", "/")]})
            for name, module in copied.items()
        }
        self.role_maps = RoleMaps(self._by_role)

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """Uses the copies for the tokens of their role in `use`, {role: tokens}, or for its rows of the batch."""
        rows_by_role: Mapping[str, slice] | tuple[str, ...] = use if isinstance(use, tuple) else {}
        if isinstance(use, Mapping):
            rows_by_role = {self.role: use[self.role]}
        nested = self.role_maps.use is not None
        if not nested and not rows_by_role:
            yield
            return
        originals = [] if nested else [*self._by_role.items()]
        if originals:
            self._check_dtype()
        for module, by_role in originals:
            by_role.base = module.forward
        try:
            with self.role_maps.using(rows_by_role):
                yield
        finally:
            for _, by_role in originals:
                by_role.base = None

    def _check_dtype(self) -> None:
        module, by_role = next(iter(self._by_role.items()))
        copied, original = by_role.roles[self.role].weight, plain_map(module).weight
        if (copied.dtype, copied.device) != (original.dtype, original.device):
            raise ValueError(
                f"model: expected {copied.dtype} on {copied.device}, as the gists' copies of its weights are, got "
                f"{original.dtype} on {original.device}; move the compressor rather than the model"
            )
