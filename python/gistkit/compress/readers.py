"""language_model: the one that reads with a compressor, by its method."""

from __future__ import annotations

from typing import Any

from gistkit.compress.avgpool import AvgPool
from gistkit.compress.base import Compressor
from gistkit.compress.compressive import Compressive
from gistkit.compress.dodo import Dodo
from gistkit.compress.language import LanguageModel
from gistkit.compress.mixed import MixedResolution

READERS: dict[str, type[LanguageModel]] = {Dodo.method: MixedResolution, AvgPool.method: Compressive}


def language_model(compressor: Compressor, tau: int, segment: int | None = None) -> LanguageModel:
    """The language model of `READERS` that reads with a compressor.

    Args:
        compressor: a Dodo or an AvgPool.
        tau, segment: as that model takes them; segment None: its default.

    Raises:
        ValueError: if none reads with the compressor, or tau or segment is out of range.
    """
    method = getattr(compressor, "method", type(compressor).__name__)
    if method not in READERS:
        raise ValueError(f"compressor: expected {' or '.join(READERS)}, which language models read with, got {method}")
    make: Any = READERS[method]
    made: LanguageModel = make(compressor, tau=tau, **({} if segment is None else {"segment": segment}))
    return made
