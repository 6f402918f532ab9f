"""Drop-in torch modules for models over layouts, position encodings, and models that take any of these."""

from gistkit.nn.absolute import Learned, Learned2D, Sinusoidal
from gistkit.nn.alibi import ALiBi
from gistkit.nn.models.block import Block, Pass
from gistkit.nn.models.cache import KVCache
from gistkit.nn.models.gpt import GPT
from gistkit.nn.nuggets import Nuggets, NuggetScorer, nuggets_above, straight_through, threshold_for, top_nuggets
from gistkit.nn.position_encoding import IMAGE_ENCODINGS, TEXT_ENCODINGS, position_encoding
from gistkit.nn.positions import NoPE, PositionEncoding, grid_positions
from gistkit.nn.roles import LowRank, RoleLinear
from gistkit.nn.rotary import PoPE, RoPE, RoPE2D, RoPE2DMix
from gistkit.nn.saved import load_position, save_position
from gistkit.nn.seqpe.encoder import SeqPE
from gistkit.nn.seqpe.losses import contrastive_loss, ood_loss
from gistkit.nn.seqpe.positions import SeqPEPositions
from gistkit.nn.seqpe.regularizer import SeqPELosses, SeqPERegularizer, SeqPEStep
from gistkit.nn.seqpe.samplers import ContrastiveSampler, StartSampler, WindowSampler
from gistkit.nn.seqpe.trie import DigitTrie

__all__ = [
    "GPT",
    "IMAGE_ENCODINGS",
    "TEXT_ENCODINGS",
    "ALiBi",
    "Block",
    "ContrastiveSampler",
    "DigitTrie",
    "KVCache",
    "Learned",
    "Learned2D",
    "LowRank",
    "NoPE",
    "NuggetScorer",
    "Nuggets",
    "Pass",
    "PoPE",
    "PositionEncoding",
    "RoPE",
    "RoPE2D",
    "RoPE2DMix",
    "RoleLinear",
    "SeqPE",
    "SeqPELosses",
    "SeqPEPositions",
    "SeqPERegularizer",
    "SeqPEStep",
    "Sinusoidal",
    "StartSampler",
    "WindowSampler",
    "contrastive_loss",
    "grid_positions",
    "load_position",
    "nuggets_above",
    "ood_loss",
    "position_encoding",
    "save_position",
    "straight_through",
    "threshold_for",
    "top_nuggets",
]
