"""Compressors for Hugging Face decoders: one file a method, over one interface (`pip install gistkit[hf]`)."""

from gistkit.compress.base import Compressor
from gistkit.compress.icae import ICAE
from gistkit.compress.losses import CompressionHead, JointHead, token_loss
from gistkit.compress.memory import Memory, Source
from gistkit.compress.x500 import FiveHundredX

METHODS: dict[str, type[Compressor]] = {"icae": ICAE, "x500": FiveHundredX}

__all__ = [
    "ICAE",
    "METHODS",
    "CompressionHead",
    "Compressor",
    "FiveHundredX",
    "JointHead",
    "Memory",
    "Source",
    "token_loss",
]
