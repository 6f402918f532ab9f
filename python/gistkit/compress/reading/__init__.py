"""language_model: the language model that reads with a compressor, by the compressor's method."""

from __future__ import annotations

from typing import Any

from gistkit.compress.compressor import Compressor
from gistkit.compress.methods.avgpool import AvgPool
from gistkit.compress.methods.dodo import Dodo
from gistkit.compress.reading.compressive import Compressive
from gistkit.compress.reading.language import LanguageModel
from gistkit.compress.reading.mixed import MixedResolution

READERS: dict[str, type[LanguageModel]] = {Dodo.method: MixedResolution, AvgPool.method: Compressive}


def language_model(compressor: Compressor, tau: int, segment: int | None = None) -> LanguageModel:
    """The language model of `READERS` that reads with a compressor.

    Args:
        compressor: a Dodo or an AvgPool.
        tau, segment: as the model takes them; segment None: its default.

    Raises:
        ValueError: if no language model reads with the compressor, or tau or segment is out of range.
    """
    method = getattr(compressor, "method", type(compressor).__name__)
    if method not in READERS:
        raise ValueError(f"compressor: expected {' or '.join(READERS)}, which language models read with, got {method}")
    reader_class: Any = READERS[method]
    reader: LanguageModel = reader_class(compressor, tau=tau, **({} if segment is None else {"segment": segment}))
    return reader
