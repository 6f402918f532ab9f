"""SeqPE: positions read digit by digit, their use in attention, and the two losses for positions beyond training."""

from gistkit.nn.seqpe.encoder import SeqPE
from gistkit.nn.seqpe.losses import contrastive_loss, nearest_candidate, ood_loss
from gistkit.nn.seqpe.positions import SeqPEPositions
from gistkit.nn.seqpe.regularizer import SeqPELosses, SeqPERegularizer, SeqPEStep
from gistkit.nn.seqpe.samplers import ContrastiveSampler, StartSampler, WindowSampler
from gistkit.nn.seqpe.trie import DigitTrie

__all__ = [
    "ContrastiveSampler",
    "DigitTrie",
    "SeqPE",
    "SeqPELosses",
    "SeqPEPositions",
    "SeqPERegularizer",
    "SeqPEStep",
    "StartSampler",
    "WindowSampler",
    "contrastive_loss",
    "nearest_candidate",
    "ood_loss",
]
