"""Identity: what tells a compressor's weights from others, looked at again only when they may have changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from gistkit import hf
from gistkit.hf.attach import ModuleSnapshot
from gistkit.hf.fingerprint import base_weights, packed_modules, plain_tensors

# Models that trained within a compressor: what another one keeps of them is in no other place.
_TRAINED: WeakSet[nn.Module] = WeakSet()


class Weights(NamedTuple):
    """The base model's parameters, the compressor's own parameters by name, and a snapshot of the modules with both.

    `packed` are the base model's modules with a quantized weight in buffers, which others replace when it moves.
    """

    snapshot: ModuleSnapshot
    base: list[nn.Parameter]
    own: dict[str, nn.Parameter]
    packed: list[nn.Module]

    def of_base(self) -> Iterator[Tensor]:
        """The base model's parameters, and those buffers."""
        yield from self.base
        yield from (buffer for module in self.packed for buffer in module.buffers(recurse=False))


class Identity:
    """The fingerprints of a compressor's weights, and of its base model's.

    Args:
        compressor: the module with all parameters; those of the base model begin with "model.".
        trains_base: whether the base model's own weights may train.
    """

    def __init__(self, compressor: Any, trains_base: bool) -> None:
        self.compressor = compressor
        # Of the base model as the compressor was made around it; None: it may have trained since.
        model, self._made = compressor.model, None
        # A weight that was made in inference mode has no version.
        if trains_base and model not in _TRAINED and not any(weight.is_inference() for weight in model.parameters()):
            self._made = self._versions_of_model()
        self._base: tuple[Any, str] | None = None
        self._own: tuple[Any, str] | None = None
        self._weights: Weights | None = None
        # The base model for messages, see `gistkit.hf.identity`.
        self.model: dict[str, Any] | None = None

    def fingerprints(self) -> tuple[str, str]:
        """The base model's fingerprint and that of the compressor's own weights, from one look at them."""
        with self.compressor.lm.turn():
            weights, (base_version, own_version) = self.weights(), self.versions(anywhere=False)
            if self._base is None or self._base[0] != base_version:
                self._base = base_version, hf.fingerprint(self.compressor.lm.model)
                self.model = hf.identity(self.compressor.lm.model)
            if self._own is None or self._own[0] != own_version:
                self._own = own_version, hf.digest(weights.own.items())
            return self._base[1], self._own[1]

    def known_as(self, fingerprint: str) -> None:
        """Gives the base model's weights, as they now are, a fingerprint: that of another dtype's copy of them."""
        self._base = versions_of(self.weights().of_base()), fingerprint
        self.model = hf.identity(self.compressor.lm.model)

    def forget(self) -> None:
        """Forgets the fingerprints of what trains: a step follows, which a GPU's host could not see."""
        self._own = None
        if not self.compressor.keeps_base:
            self._base = self._made = None
            _TRAINED.add(self.compressor.model)

    @property
    def untouched(self) -> bool:
        """Whether the base model's weights are those that the compressor was made around; see `versions_of`."""
        return self._made is not None and self._made == self._versions_of_model()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Inside, weights move or change their dtype, which makes no others of them."""
        untouched = self.untouched
        yield
        if untouched:
            self._made = self._versions_of_model()

    def _versions_of_model(self) -> tuple[Any, ...]:
        """`versions_of` the base model's weights without whatever adapters it has, which are not saved with it."""
        with self.compressor.lm.turn():
            return versions_of((weight for _, weight in base_weights(self.compressor.model)), anywhere=True)

    def versions(self, *, anywhere: bool = True) -> tuple[Any, Any]:
        """What changes with the base model's weights, and with the compressor's own; a GPU is waited for `anywhere`."""
        # Another thread may have the model without its upper layers.
        with self.compressor.lm.turn():
            weights = self.weights()
            base, own = (versions_of(part, anywhere=anywhere) for part in (weights.of_base(), weights.own.values()))
            return base, own

    def weights(self) -> Weights:
        """The base model's weights and the compressor's own, collected again only when a parameter is replaced."""
        weights, adapters = self._weights, self.compressor.adapters
        if weights is None or not weights.snapshot.unchanged:
            base, own = [], {}
            for name, parameter in self.compressor.named_parameters():
                if adapters is not None and adapters.owns(name):
                    own[adapters.plain(name)] = parameter
                elif name.startswith("model."):
                    base.append(parameter)
                else:
                    own[name] = parameter
            packed = [module for _, module in packed_modules(self.compressor.model)]
            weights = self._weights = Weights(ModuleSnapshot(self.compressor.modules()), base, own, packed)
        return weights


def versions_of(weights: Iterable[Tensor], *, anywhere: bool = False) -> tuple[Any, ...]:
    """A cheap key of weights: the address and the version of each and, on the CPU or `anywhere`, one of its values.

    It changes if a weight is replaced or updated in place. Only the values show changes of whole weights through
    `.data`, as fused optimizers and some loaders make them. A change of other single values through `.data`, such as
    one row of embeddings, is not noticed, nor any on a GPU, as reading values would wait for it.
    """
    values: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    places = []
    # A loop of every pass: most weights have no parts.
    plain = (nn.Parameter, Tensor)
    for weight in (part for one in weights for part in ((one,) if type(one) in plain else _held(one))):
        # Weights made in inference mode have no version.
        places.append((weight.data_ptr(), 0 if weight.is_inference() else weight._version))
        if weight.numel() and (weight.is_cpu or (anywhere and not weight.is_meta)):
            inside = tuple(size * 5 // 8 for size in weight.shape)
            values.setdefault((weight.device, weight.dtype), []).append(weight.detach()[inside])
    return (*places, *(tuple(torch.stack(some).tolist()) for some in values.values()))


def _held(weight: Tensor) -> list[Tensor]:
    """The plain tensors of a weight that this process has: its parts, or its shard."""
    return plain_tensors(weight.detach().to_local() if hasattr(weight, "to_local") else weight)  # type: ignore[attr-defined]
