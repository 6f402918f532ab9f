"""Compressors for Hugging Face decoders: one file a method, over one interface (`pip install gistkit[hf]`)."""

from gistkit.compress.avgpool import AvgPool
from gistkit.compress.base import Compressor
from gistkit.compress.chunks import ChunkCompressor
from gistkit.compress.compressive import Compressive
from gistkit.compress.dodo import Dodo
from gistkit.compress.gist import Gist
from gistkit.compress.gistpool import GistPool
from gistkit.compress.icae import ICAE
from gistkit.compress.language import LanguageModel
from gistkit.compress.losses import CompressionHead, JointHead, token_loss
from gistkit.compress.memory import Memory, Source
from gistkit.compress.mixed import MixedResolution
from gistkit.compress.no_context import NoContext
from gistkit.compress.pooling_start import start_as_means
from gistkit.compress.readers import READERS, language_model
from gistkit.compress.recent import Recent
from gistkit.compress.x500 import FiveHundredX

METHODS: dict[str, type[Compressor]] = {
    method.method: method  # type: ignore[type-abstract]
    for method in (ICAE, FiveHundredX, Gist, AvgPool, GistPool, Dodo, NoContext)
}

__all__ = [
    "ICAE",
    "METHODS",
    "READERS",
    "AvgPool",
    "ChunkCompressor",
    "CompressionHead",
    "Compressive",
    "Compressor",
    "Dodo",
    "FiveHundredX",
    "Gist",
    "GistPool",
    "JointHead",
    "LanguageModel",
    "Memory",
    "MixedResolution",
    "NoContext",
    "Recent",
    "Source",
    "language_model",
    "start_as_means",
    "token_loss",
]
