"""Compressors for Hugging Face decoders: one file per method, one interface (`pip install gistkit[hf]`)."""

from gistkit.common.trained import trained
from gistkit.compress.compressor import Compressor
from gistkit.compress.config import REGISTRY, Config, register, setting
from gistkit.compress.losses import CompressionHead, JointHead, token_loss
from gistkit.compress.memory import Memory
from gistkit.compress.methods.avgpool import AvgPool, NoContext
from gistkit.compress.methods.beacon import Beacon
from gistkit.compress.methods.dodo import Dodo
from gistkit.compress.methods.gist import Gist, GistPool
from gistkit.compress.methods.gist_start import start_as_means
from gistkit.compress.methods.icae import ICAE, ChunkCompressor, FiveHundredX
from gistkit.compress.methods.kv_distill import KVDistill
from gistkit.compress.methods.sac import SAC
from gistkit.compress.methods.select import Select
from gistkit.compress.methods.separate_encoder import SeparateEncoder
from gistkit.compress.methods.voco import VoCo
from gistkit.compress.reading import READERS, language_model
from gistkit.compress.reading.compressive import Compressive
from gistkit.compress.reading.language import LanguageModel
from gistkit.compress.reading.mixed import MixedResolution
from gistkit.compress.refining import Refined, refine
from gistkit.compress.source import Source

METHODS: dict[str, type[Compressor]] = {name: config.compressor for name, config in REGISTRY.items()}

__all__ = [
    "ICAE",
    "METHODS",
    "READERS",
    "SAC",
    "AvgPool",
    "Beacon",
    "ChunkCompressor",
    "CompressionHead",
    "Compressive",
    "Compressor",
    "Config",
    "Dodo",
    "FiveHundredX",
    "Gist",
    "GistPool",
    "JointHead",
    "KVDistill",
    "LanguageModel",
    "Memory",
    "MixedResolution",
    "NoContext",
    "Refined",
    "Select",
    "SeparateEncoder",
    "Source",
    "VoCo",
    "language_model",
    "refine",
    "register",
    "setting",
    "start_as_means",
    "token_loss",
    "trained",
]
