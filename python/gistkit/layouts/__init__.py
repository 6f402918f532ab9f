"""Layouts: who sees whom, at which position, and the builders for each method."""

from gistkit.layouts.causal import causal
from gistkit.layouts.icae import decoder, icae_encoder
from gistkit.layouts.layout import Layout
from gistkit.layouts.plan import Plan
from gistkit.layouts.positions import decoder_positions, encoder_positions, upl
from gistkit.layouts.relations import (
    ALL,
    CAUSAL,
    SEGMENT,
    SEGMENT_CAUSAL,
    SELF,
    Relation,
    Role,
    older,
    recent,
    windows,
)

__all__ = [
    "ALL",
    "CAUSAL",
    "SEGMENT",
    "SEGMENT_CAUSAL",
    "SELF",
    "Layout",
    "Plan",
    "Relation",
    "Role",
    "causal",
    "decoder",
    "decoder_positions",
    "encoder_positions",
    "icae_encoder",
    "older",
    "recent",
    "upl",
    "windows",
]
