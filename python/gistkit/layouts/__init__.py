"""Layouts: attention masks and position IDs, and a builder for each method."""

from gistkit.layouts.avgpool import avgpool
from gistkit.layouts.batch import compile_batch
from gistkit.layouts.beacon import beacon
from gistkit.layouts.builders import BUILDERS
from gistkit.layouts.causal import causal, causal_plan
from gistkit.layouts.context import full_context, no_context
from gistkit.layouts.dodo import dodo
from gistkit.layouts.gist import gist
from gistkit.layouts.gistpool import gistpool
from gistkit.layouts.icae import decoder, icae_encoder
from gistkit.layouts.layout import Layout
from gistkit.layouts.links import Links
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
    windows_causal,
)
from gistkit.layouts.sac import sac
from gistkit.layouts.voco import voco

__all__ = [
    "ALL",
    "BUILDERS",
    "CAUSAL",
    "SEGMENT",
    "SEGMENT_CAUSAL",
    "SELF",
    "Layout",
    "Links",
    "Plan",
    "Relation",
    "Role",
    "avgpool",
    "beacon",
    "causal",
    "causal_plan",
    "compile_batch",
    "decoder",
    "decoder_positions",
    "dodo",
    "encoder_positions",
    "full_context",
    "gist",
    "gistpool",
    "icae_encoder",
    "no_context",
    "older",
    "recent",
    "sac",
    "upl",
    "voco",
    "windows",
    "windows_causal",
]
