"""Copies: a second set of the layers' linear maps, for the tokens of one role."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from gistkit.hf.families import decoder_of
from gistkit.nn import RoleLinear

if TYPE_CHECKING:
    from gistkit.compress.adapters import Use


def replaced(forwards: Mapping[nn.Module, Any]) -> list[Any]:
    """Gives modules a forward of their own; returns what their instances had in that place, None where nothing."""
    before = [vars(module).get("forward") for module in forwards]
    for module, forward in forwards.items():
        module.forward = forward
    return before


def put_back(modules: Iterable[nn.Module], before: Sequence[Any]) -> None:
    """Undoes `replaced`."""
    for module, forward in zip(modules, before, strict=True):
        if forward is None:
            vars(module).pop("forward", None)
        else:
            module.forward = forward


class Copies(nn.Module):
    """A copy of every linear map of a decoder's layers, in use for one role's rows where a pass says which those are.

    Args:
        model: holds the maps that are copied, and no adapters; norms and embeddings are shared.
        role: whose copies they are.
    """

    def __init__(self, model: nn.Module, role: str) -> None:
        super().__init__()
        self.role = role
        decoder = decoder_of(model)
        linear = {name: module for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
        # A module's name may have no dots.
        self.maps = nn.ModuleDict({name.replace(".", "/"): copy.deepcopy(module) for name, module in linear.items()})
        self.maps.requires_grad_(True)
        self._by_role = {
            module: RoleLinear(_Plain(), {role: self.maps[name.replace(".", "/")]}) for name, module in linear.items()
        }
        self._own: list[Any] = []
        self._slices: Mapping[str, slice] | None = None

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """The copies for their role's rows of `use`, where it is {role: rows}; elsewhere none."""
        rows = {self.role: use[self.role]} if isinstance(use, Mapping) else {}
        before = self._slices
        if before is None and not rows:
            yield
            return
        self._slices = rows
        try:
            if before is None:
                self._check_dtype()
                for module, by_role in self._by_role.items():
                    cast(_Plain, by_role.base).plain = module.forward
                self._own = replaced({module: partial(self._map, each) for module, each in self._by_role.items()})
            yield
        finally:
            self._slices = before
            if before is None:
                put_back(self._by_role, self._own)
                for by_role in self._by_role.values():
                    cast(_Plain, by_role.base).plain = None

    def _check_dtype(self) -> None:
        module, by_role = next(iter(self._by_role.items()))
        ours, theirs = by_role.roles[self.role].weight, module.weight
        if (ours.dtype, ours.device) != (theirs.dtype, theirs.device):
            raise ValueError(
                f"model: expected {ours.dtype} on {ours.device}, as the gists' copies of its weights are, got "
                f"{theirs.dtype} on {theirs.device}; move the compressor rather than the model"
            )

    def _map(self, by_role: RoleLinear, x: Tensor) -> Tensor:
        return by_role(x, self._slices)  # type: ignore[no-any-return]


class _Plain(nn.Module):
    """A module as it was found, while it has another forward; no parent of it."""

    plain: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """The map of x."""
        return self.plain(x)  # type: ignore[no-any-return]
