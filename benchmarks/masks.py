"""The masks and sizes that the attention benchmark covers, and the visible work of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

import numpy as np
from torch import Tensor

from gistkit import Plan, layouts
from gistkit.ops.reference import dense_mask


@cache
def _every_tenth(tokens: int) -> np.ndarray:
    return np.arange(tokens) % 10 == 0


@cache
def _random_tenth(tokens: int) -> np.ndarray:
    """As many as every tenth, at random places: a learned selection is irregular."""
    return np.random.default_rng(0).permutation(tokens) % 10 == 0


def _gistpool(n: int, ratio: int) -> layouts.Layout:
    """About n tokens, of which 256 are text."""
    return layouts.gistpool((n - 257) * ratio // (ratio + 1), ratio, 256)


# Plans of about n tokens for each method.
METHODS: dict[str, Callable[[int], Plan]] = {
    "causal": lambda n: layouts.causal(n).compile(),
    "Gist 8x": lambda n: layouts.gist(n * 5 // 6, memory=n * 5 // 48, text=n // 16).compile(),
    "GistPool 8x": lambda n: _gistpool(n, 8).compile(),
    "GistPool 8x, interleaved": lambda n: _gistpool(n, 8).compile(grouped=False),
    "Dodo 10x, tau 128": lambda n: layouts.dodo(_every_tenth(n), 128).compile(),
    "Dodo 10x, tau 512": lambda n: layouts.dodo(_every_tenth(n), 512).compile(),
    "ICAE chunks of 510": lambda n: layouts.icae_encoder(n * 5 // 6, 510, 102).compile(),
    "VoCo, 576 to 128": lambda n: layouts.voco(576, 128, n // 4, images=max(1, n * 3 // 4 // 704)).compile(),
}
RATIOS: dict[str, Callable[[int], Plan]] = {
    f"GistPool {ratio}x": lambda n, ratio=ratio: _gistpool(n, ratio).compile() for ratio in (2, 5, 10)
}
DODO: dict[str, Callable[[int], Plan]] = {
    "Dodo 10x at random, tau 128": lambda n: layouts.dodo(_random_tenth(n), 128).compile(),
    "Dodo 10x at random, tau 512": lambda n: layouts.dodo(_random_tenth(n), 512).compile(),
    "Dodo 10x, tau 128, segment 32": lambda n: layouts.dodo(_every_tenth(n), 128, segment=32).compile(),
}
PLANS = METHODS | RATIOS | DODO
FEW = ("causal", "GistPool 8x", "Dodo 10x, tau 128")


@dataclass(frozen=True)
class Point:
    """Sizes of one case: tokens, sequences, query and key heads, head dim, dtype."""

    n: int = 4096
    batch: int = 1
    heads: int = 8
    key_heads: int = 8
    dim: int = 64
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"N {self.n}, B{self.batch} H{self.heads}/{self.key_heads} D{self.dim} {self.dtype}"


BASE = Point()
QUICK = replace(BASE, n=2048)
# Each axis leaves the base point in one direction, with the few masks; the base point itself has those of all methods.
# Quick runs have an axis of their own.
AXES: Mapping[str, tuple[Point, ...]] = {
    "base": (BASE,),
    "length": tuple(replace(BASE, n=n) for n in (1024, 2048, 8192, 16384)),
    "dim": (replace(BASE, dim=128),),
    "heads": (replace(BASE, heads=1, key_heads=1), replace(BASE, batch=4)),
    "gqa": (replace(BASE, key_heads=2),),
    "dtype": (replace(BASE, dtype="bfloat16"), replace(BASE, dtype="float16")),
    "quick": (QUICK,),
}

# Masks and points that are a suite by themselves.
STUDIES: Mapping[str, tuple[tuple[str, ...], tuple[Point, ...]]] = {
    "gistpool": (tuple(RATIOS), tuple(replace(BASE, n=n) for n in (2048, 4096, 8192))),
    "dodo": (("Dodo 10x, tau 128", "Dodo 10x, tau 512", *DODO), (BASE, replace(BASE, n=8192))),
}


@dataclass(frozen=True)
class Shape:
    """A mask at a point, forward alone or with backward."""

    mask: str
    point: Point
    backward: bool

    @property
    def name(self) -> str:
        """What the case is called in tables."""
        return f"{self.mask}, {self.point}, {'forward + backward' if self.backward else 'forward'}"

    @property
    def facts(self) -> dict[str, object]:
        """Sizes, for the files; visible: pairs over all heads and sequences."""
        found = {"mask": self.mask, **asdict(self.point), "pass": "forward + backward" if self.backward else "forward"}
        return {**found, "visible": self.visible}

    @property
    def visible(self) -> int:
        """Visible (query, key) pairs over all heads and sequences."""
        return visible_pairs(PLANS[self.mask](self.point.n)) * self.point.heads * self.point.batch

    @property
    def work(self) -> float:
        """Operations on visible pairs: 4 D forward; backward has five products where forward has two."""
        return self.visible * 4 * self.point.dim * (3.5 if self.backward else 1)


def visible_pairs(plan: Plan) -> int:
    """How many (query, key) pairs a plan shows, over its own sequences."""
    start, end = plan.spans.long().unbind(-1)
    return int((end - start).sum())


def dense(plan: Plan) -> Tensor:
    """bool [Nq, Nk] of a plan for one sequence."""
    return dense_mask(plan)[0]


def shapes(points: Iterable[Point], masks: Sequence[str] | None = None) -> Iterator[Shape]:
    """The cases of some points. `masks`: these everywhere; None: all at the base point, few elsewhere."""
    for point in points:
        for mask in masks or (METHODS if point == BASE else FEW):
            for backward in (False, True):
                yield Shape(mask, point, backward)
