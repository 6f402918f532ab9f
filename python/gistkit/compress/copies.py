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

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """The copies for their role's rows of `use`, where it is {role: rows}; elsewhere none."""
        slices = {self.role: use[self.role]} if isinstance(use, Mapping) else None
        before = [vars(module).pop("forward", None) for module, _ in self._by_role]
        try:
            if slices is not None:
                for module, by_role in self._by_role:
                    module.forward = partial(by_role, slices=slices)  # type: ignore[method-assign]
            yield
        finally:
            for (module, _), forward in zip(self._by_role, before, strict=True):
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward  # type: ignore[method-assign]


class _Plain(nn.Module):
    """A module's own forward, whatever its instance has in that place; no parent of the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = (module,)

    def forward(self, x: Tensor) -> Tensor:
        """The map of x."""
        (module,) = self._module
        return type(module).forward(module, x)  # type: ignore[no-any-return]
