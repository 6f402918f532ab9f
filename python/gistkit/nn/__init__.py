"""Drop-in torch modules for models over layouts."""

from gistkit.nn.nuggets import Nuggets, NuggetScorer, nuggets_above, straight_through, threshold_for, top_nuggets
from gistkit.nn.roles import LowRank, RoleLinear
from gistkit.nn.seqpe import SeqPE

__all__ = [
    "LowRank",
    "NuggetScorer",
    "Nuggets",
    "RoleLinear",
    "SeqPE",
    "nuggets_above",
    "straight_through",
    "threshold_for",
    "top_nuggets",
]
