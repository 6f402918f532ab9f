"""position_encoding: any of the position encodings, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from gistkit.nn.absolute import Learned, Learned2D, Sinusoidal
from gistkit.nn.alibi import ALiBi
from gistkit.nn.positions import NoPE, PositionEncoding
from gistkit.nn.rotary import PoPE, RoPE, RoPE2D, RoPE2DMix
from gistkit.nn.seqpe.encoder import SeqPE
from gistkit.nn.seqpe.positions import Integration, SeqPEPositions


@dataclass(frozen=True)
class _Model:
    """What encodings need to know of a model."""

    heads: int
    head_dim: int
    layers: int
    length: int | None
    grid: tuple[int, int] | None
    encoder: SeqPE | None
    extra: dict[str, int]

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim


def _needed(name: str, argument: str, value: Any) -> Any:
    if value is None:
        raise ValueError(f"{argument}: expected one for {name}, got None")
    return value


def _seqpe(integration: Integration) -> Callable[..., PositionEncoding]:
    def make(model: _Model, **options: Any) -> PositionEncoding:
        encoder = _needed(f"seqpe-{integration}", "encoder", model.encoder)
        arguments = {"layers": model.layers, "integration": integration} | model.extra | options
        return SeqPEPositions(encoder, model.heads, model.head_dim, **arguments)

    return make


def _rope(base: float) -> Callable[..., PositionEncoding]:
    return lambda model, **options: RoPE(model.head_dim, **({"base": base} | model.extra | options))


_SEQPE = {f"seqpe-{integration}": _seqpe(integration) for integration in get_args(Integration)}
_TEXT: dict[str, Callable[..., PositionEncoding]] = {
    "nope": lambda model: NoPE(**model.extra),
    "sinusoidal": lambda model, **options: Sinusoidal(model.dim, **model.extra, **options),
    "learned": lambda model, **options: Learned(
        _needed("learned", "length", model.length), model.dim, **model.extra, **options
    ),
    "rope-1e4": _rope(1e4),
    "rope-1e6": _rope(1e6),
    "rope-1e8": _rope(1e8),
    "pope": lambda model, **options: PoPE(model.heads, model.head_dim, model.layers, **model.extra, **options),
    "alibi": lambda model: ALiBi(model.heads, **model.extra),
    **_SEQPE,
}
_IMAGE: dict[str, Callable[..., PositionEncoding]] = {
    "nope": _TEXT["nope"],
    "sinusoidal-2d": lambda model, **options: Sinusoidal(model.dim, axes=2, **model.extra, **options),
    "learned-2d": lambda model, **options: Learned2D(
        _needed("learned-2d", "grid", model.grid), model.dim, **model.extra, **options
    ),
    "rope-2d": lambda model, **options: RoPE2D(model.head_dim, **model.extra, **options),
    "rope-2d-mix": lambda model, **options: RoPE2DMix(
        model.heads, model.head_dim, model.layers, **model.extra, **options
    ),
    **_SEQPE,
}

TEXT_ENCODINGS = tuple(_TEXT)
IMAGE_ENCODINGS = tuple(_IMAGE)


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
    makers = _TEXT | _IMAGE
    if name not in makers:
        raise ValueError(f"name: expected one of {', '.join(makers)}, got {name!r}")
    extra = {"extra_tokens": extra_tokens} if extra_tokens else {}
    return makers[name](_Model(heads, head_dim, layers, length, grid, encoder, extra), **options)
