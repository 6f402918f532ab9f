"""Copies: a second set of the layers' linear maps, for the tokens of one role."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from gistkit.hf import forwards
from gistkit.hf.families import decoder_of
from gistkit.nn import RoleLinear

if TYPE_CHECKING:
    from gistkit.compress.adapters import Use


class Copies(nn.Module):
    """A copy of every linear map of a decoder's layers, in use for one role's rows where a pass says which those are.

    Args:
        model: holds the maps that are copied, without any adapters around them; norms and embeddings are shared.
        role: whose copies they are.
    """

    def __init__(self, model: nn.Module, role: str) -> None:
        super().__init__()
        self.role = role
        decoder = decoder_of(model)
        linear = _linear_maps(decoder)
        # A module's name may have no dots.
        self.maps = nn.ModuleDict({name.replace(".", "/"): copy.deepcopy(plain_map(m)) for name, m in linear.items()})
        self.maps.requires_grad_(True)
        self._by_role = {
            module: RoleLinear(_Plain(), {role: self.maps[name.replace(".", "/")]}) for name, module in linear.items()
        }
        self._use: Mapping[str, slice] | tuple[str, ...] | None = None

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """The copies for their role's tokens of `use`, where it is {role: tokens}, or for its rows of the batch."""
        mine: Mapping[str, slice] | tuple[str, ...] = use if isinstance(use, tuple) else {}
        if isinstance(use, Mapping):
            mine = {self.role: use[self.role]}
        before = self._use
        if before is None and not mine:
            yield
            return
        with nullcontext() if before is not None else self._mapped():
            self._use = mine
            try:
                yield
            finally:
                self._use = before

    @contextmanager
    def all_rows_as(self, role: str) -> Iterator[None]:
        """Inside `using`, the maps of `role` serve all rows: the copies, or the originals."""
        before = self._use
        self._use = {role: slice(None)} if role == self.role else {}
        try:
            yield
        finally:
            self._use = before

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """The originals' modules map each token as `_use` says."""
        self._check_dtype()
        plain = [cast(_Plain, by_role.base) for by_role in self._by_role.values()]
        for its, module in zip(plain, self._by_role, strict=True):
            its.plain = module.forward
        try:
            with forwards({module: partial(self._map, by_role) for module, by_role in self._by_role.items()}):
                yield
        finally:
            for its in plain:
                its.plain = None

    def _check_dtype(self) -> None:
        module, by_role = next(iter(self._by_role.items()))
        ours, theirs = by_role.roles[self.role].weight, plain_map(module).weight
        if (ours.dtype, ours.device) != (theirs.dtype, theirs.device):
            raise ValueError(
                f"model: expected {ours.dtype} on {ours.device}, as the gists' copies of its weights are, got "
                f"{theirs.dtype} on {theirs.device}; move the compressor rather than the model"
            )

    def _map(self, by_role: RoleLinear, x: Tensor) -> Tensor:
        if isinstance(self._use, tuple):
            return by_role.of_rows(x, self._use)
        return by_role(x, self._use)  # type: ignore[no-any-return]


def plain_map(module: nn.Module) -> Any:
    """The linear map that PEFT has put an adapter around, or the module itself."""
    return getattr(module, "base_layer", module)


def _linear_maps(decoder: nn.Module) -> dict[str, nn.Module]:
    """The modules that map linearly, with the adapters around them where there are any."""
    found: dict[str, nn.Module] = {}
    last = "no module's name"
    for name, module in decoder.named_modules():
        # What PEFT puts a map into comes before the map and the adapter's own.
        if not name.startswith(f"{last}.") and isinstance(plain_map(module), nn.Linear):
            found[name], last = module, name
    return found


class _Plain(nn.Module):
    """A module as it was found, while it has another forward; no parent of it."""

    plain: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """The map of x."""
        return self.plain(x)  # type: ignore[no-any-return]
