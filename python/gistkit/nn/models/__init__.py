"""Models that take any position encoding: GPT for text, ViT for images."""

from gistkit.nn.models.block import Block, Pass
from gistkit.nn.models.cache import KVCache
from gistkit.nn.models.gpt import GPT
from gistkit.nn.models.vit import ViT

__all__ = ["GPT", "Block", "KVCache", "Pass", "ViT"]
