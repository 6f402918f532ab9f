"""The frequencies with which a pass rotates keys, and which of them may move to other positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gistkit.hf.attach import check_rotates, decoder_of, forwards, frequencies_of
from gistkit.hf.parts import FAMILIES, changing


def check_moves(model: nn.Module) -> None:
    """Raises a TypeError for a model whose keys of any length of text `gistkit.ops.rerotate` cannot move."""
    check_rotates(model)
    changing = changing_rope(model)
    if changing:
        raise TypeError(
            f"model: expected RoPE of the same frequencies at any length, got {min(changing)}, whose frequencies "
            "depend on it"
        )


def changing_rope(model: nn.Module) -> set[str]:
    """The types of the model's RoPE whose frequencies depend on the length of a pass."""
    return changing(decoder_of(model))


@contextmanager
def rotating_as(model: nn.Module, length: int) -> Iterator[None]:
    """Inside, RoPE whose frequencies change with the length of a pass (`changing_rope`) has those of `length`."""
    rotary: Any = decoder_of(model).rotary_emb
    own, kinds = rotary.forward, rotary.rope_type
    fixed = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"

    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Puts the frequencies in place, where a pass of an unchanging type leaves them.
        own(x, torch.full_like(position_ids[..., :1], length - 1), *args, **kwargs)
        rotary.rope_type = fixed
        try:
            return own(x, position_ids, *args, **kwargs)
        finally:
            rotary.rope_type = kinds

    with forwards({rotary: forward}):
        yield


def frequencies(model: nn.Module) -> list[Tensor]:
    """The current frequencies [R/2] of each layer's RoPE; a ValueError if gistkit does not know the model's RoPE."""
    decoder = decoder_of(model)
    inv_freqs = frequencies_of(decoder)
    if inv_freqs is None:
        raise ValueError(
            f"model: expected one with RoPE of a known family ({', '.join(FAMILIES)}), got {decoder.config.model_type}"
        )
    return inv_freqs
