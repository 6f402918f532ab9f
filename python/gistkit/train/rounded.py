"""Frozen linear maps in the precision of mixed-precision passes, rounded once instead of at every use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gistkit.compress import Compressor
from gistkit.hf.lora import linear_maps, plain_map


class RoundedMaps:
    """The frozen float32 linear maps of a compressor's decoder, of which passes under autocast use rounded copies.

    Autocast rounds a frozen weight at every use, and keeps a copy for each pass until its backward pass; copies that
    are made once give the same bits. Embeddings, norms, what trains, and weights that any of these share stay as they
    are, and so does a compressor with gists' copies of its maps, sharded weights or offloaded ones.

    Args:
        compressor: see above; its parameters keep their identity.
        dtype: of the passes; None: nothing is rounded.
    """

    def __init__(self, compressor: Compressor, dtype: torch.dtype | None = torch.bfloat16) -> None:
        self.dtype = dtype
        self._maps = [] if dtype is None or compressor.copies is not None else _frozen_maps(compressor)
        # What a copy is of, by place and version, and the copy.
        self._copies: dict[nn.Parameter, tuple[tuple[int, int], Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that there are now."""
        return sum(copy.nbytes for _, copy in self._copies.values())

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, passes use the copies; afterwards the parameters hold the very tensors that they held before."""
        originals: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for parameter in self._maps:
                rounded = self._rounded(parameter)
                originals.append((parameter, parameter.data))
                parameter.data = rounded
            yield
        finally:
            for parameter, original in originals:
                parameter.data = original

    def _rounded(self, parameter: nn.Parameter) -> Tensor:
        state = parameter.data_ptr(), parameter._version
        kept, copy = self._copies.get(parameter, (None, None))
        if copy is None or kept != state:
            copy = parameter.detach().to(self.dtype)
            self._copies[parameter] = state, copy
        return copy


def _frozen_maps(compressor: Compressor) -> list[nn.Parameter]:
    """The parameters of linear maps that a rounded copy can stand for."""
    maps: list[Any] = [plain_map(module) for module in linear_maps(compressor.lm.decoder).values()]
    if any(hasattr(module, "_hf_hook") for module in compressor.modules()):
        return []
    found = dict.fromkeys(parameter for module in maps for parameter in module.parameters())
    chosen = {*maps}
    shared = {
        parameter
        for module in compressor.modules()
        if module not in chosen
        for parameter in module.parameters(recurse=False)
    }
    return [
        parameter
        for parameter in found
        if parameter not in shared
        and not parameter.requires_grad
        and parameter.dtype == torch.float32
        and not parameter.is_meta
        and not hasattr(parameter, "full_tensor")
    ]
