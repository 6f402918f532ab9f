"""Compressors for Hugging Face decoders: one file a method, over one interface (`pip install gistkit[hf]`)."""

from gistkit.compress.base import Compressor
from gistkit.compress.icae import ICAE
from gistkit.compress.losses import CompressionHead, token_loss
from gistkit.compress.memory import Memory
from gistkit.compress.x500 import FiveHundredX

__all__ = ["ICAE", "CompressionHead", "Compressor", "FiveHundredX", "Memory", "token_loss"]
