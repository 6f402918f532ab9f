"""Drop-in torch modules for models over layouts, position encodings, and models that take any of these."""

from gistkit.nn.absolute import Learned, Learned2D, Sinusoidal
from gistkit.nn.alibi import ALiBi
from gistkit.nn.block import Block, Pass
from gistkit.nn.cache import KVCache
from gistkit.nn.gpt import GPT
from gistkit.nn.nuggets import Nuggets, NuggetScorer, nuggets_above, straight_through, threshold_for, top_nuggets
from gistkit.nn.position_encoding import IMAGE_ENCODINGS, TEXT_ENCODINGS, position_encoding
from gistkit.nn.positions import NoPE, PositionEncoding, grid_positions
from gistkit.nn.roles import LowRank, RoleLinear
from gistkit.nn.rotary import RoPE, RoPE2D, RoPE2DMix
from gistkit.nn.seqpe import SeqPE
from gistkit.nn.seqpe_candidates import ContrastiveSampler
from gistkit.nn.seqpe_losses import contrastive_loss, ood_loss
from gistkit.nn.seqpe_positions import SeqPEPositions
from gistkit.nn.seqpe_regularizer import SeqPELosses, SeqPERegularizer, SeqPEStep
from gistkit.nn.seqpe_samplers import StartSampler, WindowSampler
from gistkit.nn.vit import ViT

__all__ = [
    "GPT",
    "IMAGE_ENCODINGS",
    "TEXT_ENCODINGS",
    "ALiBi",
    "Block",
    "ContrastiveSampler",
    "KVCache",
    "Learned",
    "Learned2D",
    "LowRank",
    "NoPE",
    "NuggetScorer",
    "Nuggets",
    "Pass",
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
    "ViT",
    "WindowSampler",
    "contrastive_loss",
    "grid_positions",
    "nuggets_above",
    "ood_loss",
    "position_encoding",
    "straight_through",
    "threshold_for",
    "top_nuggets",
]
