"""Copies: a second set of the layers' linear maps, for the tokens of one role."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gistkit.hf.families import decoder_of
from gistkit.nn import RoleLinear

if TYPE_CHECKING:
    from gistkit.compress.adapters import Use


class Copies(nn.Module):
    """A copy of every linear map of a decoder's layers, in use for one role's rows where a pass says which those are.

    Args:
        model: holds the maps that are copied; norms and embeddings are shared.
        role: whose copies they are.
    """

    def __init__(self, model: nn.Module, role: str) -> None:
        super().__init__()
        self.role = role
        decoder = decoder_of(model)
        linear = {name: module for name, module in decoder.named_modules() if isinstance(module, nn.Linear | Conv1D)}
        # A module's name may have no dots.
        self.maps = nn.ModuleDict({name.replace(".", "/"): copy.deepcopy(module) for name, module in linear.items()})
        self._by_role = [
            (module, RoleLinear(_Plain(module), {role: self.maps[name.replace(".", "/")]}))
            for name, module in linear.items()
        ]
        self._slices: Mapping[str, slice] = {}
        self._patched = False

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """The copies for their role's rows of `use`, where it is {role: rows}; elsewhere none."""
        before, self._slices = self._slices, {self.role: use[self.role]} if isinstance(use, Mapping) else {}
        outermost = not self._patched
        try:
            if outermost and self._slices:
                self._patched = True
                for module, by_role in self._by_role:
                    module.forward = partial(self._map, by_role)  # type: ignore[method-assign]
            yield
        finally:
            self._slices = before
            if outermost and self._patched:
                self._patched = False
                for module, _ in self._by_role:
                    vars(module).pop("forward", None)

    def _map(self, by_role: RoleLinear, x: Tensor) -> Tensor:
        return by_role(x, self._slices)  # type: ignore[no-any-return]


class _Plain(nn.Module):
    """A module's own forward, whatever its instance has in that place; no parent of the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)

    def forward(self, x: Tensor) -> Tensor:
        """The map of x."""
        (module,) = self._module
        return type(module).forward(module, x)  # type: ignore[no-any-return]
