"""position_encoding: any of the position encodings, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from gistkit.nn.absolute import Learned, Learned2D, Sinusoidal
from gistkit.nn.alibi import ALiBi
from gistkit.nn.positions import NoPE, PositionEncoding
from gistkit.nn.rotary import PoPE, RoPE, RoPE2D, RoPE2DMix
from gistkit.nn.seqpe.encoder import SeqPE
from gistkit.nn.seqpe.positions import Integration, SeqPEPositions

_SEQPE = tuple(f"seqpe-{integration}" for integration in get_args(Integration))
TEXT_ENCODINGS = ("nope", "sinusoidal", "learned", "rope-1e4", "rope-1e6", "rope-1e8", "pope", "alibi", *_SEQPE)
IMAGE_ENCODINGS = ("nope", "sinusoidal-2d", "learned-2d", "rope-2d", "rope-2d-mix", *_SEQPE)


def position_encoding(
    name: str,
    *,
    heads: int,
    head_dim: int,
    layers: int,
    length: int | None = None,
    grid: tuple[int, int] | None = None,
    encoder: SeqPE | None = None,
    extra_tokens: int = 0,
    **options: Any,
) -> PositionEncoding:
    """A position encoding for a model of `layers` layers of `heads` heads, whose width is heads * head_dim.

    Args:
        name: for text (`TEXT_ENCODINGS`) nope, sinusoidal, learned, rope-1e4, rope-1e6, rope-1e8, pope, alibi, and
            for images (`IMAGE_ENCODINGS`) nope, sinusoidal-2d, learned-2d, rope-2d, rope-2d-mix; for both, with an
            encoder of 1 or 2 axes, seqpe-sum, seqpe-mul, seqpe-bias.
        length: positions of the table of "learned".
        grid: (rows, columns) of the table of "learned-2d".
        encoder: of the SeqPE forms.
        extra_tokens: see `PositionEncoding`; 1 for a vision transformer with [CLS].
        options: further arguments of the encoding's class, such as `projection`, `mul_start` or, where queries share
            keys, `key_heads` of `SeqPEPositions` and `PoPE`.

    Raises:
        ValueError: the name is unknown, or an argument that the encoding needs is None.
        TypeError: the encoding's class has no such option.
    """
    needs: dict[str, tuple[str, Any]] = {"learned": ("length", length), "learned-2d": ("grid", grid)}
    argument, needed = needs.get(name, ("encoder", encoder))
    if needed is None and name in (*needs, *_SEQPE):
        raise ValueError(f"{argument}: expected one for {name}, got None")
    dim, shape = heads * head_dim, (heads, head_dim, layers)
    makers: dict[str, Callable[..., PositionEncoding]] = {
        "nope": NoPE,
        "sinusoidal": partial(Sinusoidal, dim),
        "learned": partial(Learned, needed, dim),
        "rope-1e4": partial(RoPE, head_dim, base=1e4),
        "rope-1e6": partial(RoPE, head_dim, base=1e6),
        "rope-1e8": partial(RoPE, head_dim, base=1e8),
        "pope": partial(PoPE, *shape),
        "alibi": partial(ALiBi, heads),
        "sinusoidal-2d": partial(Sinusoidal, dim, axes=2),
        "learned-2d": partial(Learned2D, needed, dim),
        "rope-2d": partial(RoPE2D, head_dim),
        "rope-2d-mix": partial(RoPE2DMix, *shape),
    }
    for each in get_args(Integration):
        makers[f"seqpe-{each}"] = partial(SeqPEPositions, needed, heads, head_dim, layers=layers, integration=each)
    if name not in makers:
        raise ValueError(f"name: expected one of {', '.join(makers)}, got {name!r}")
    return makers[name](**({"extra_tokens": extra_tokens} if extra_tokens else {}), **options)
