"""GPT, a language model that takes any position encoding, and its layers."""

from gistkit.nn.models.block import Block, Pass
from gistkit.nn.models.cache import KVCache
from gistkit.nn.models.gpt import GPT

__all__ = ["GPT", "Block", "KVCache", "Pass"]
