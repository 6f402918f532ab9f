"""Beacon: a context is read chunk by chunk, and each chunk reads the memory of those before it."""

from __future__ import annotations

from dataclasses import dataclass

from gistkit import layouts
from gistkit.compress.config import register, setting
from gistkit.compress.methods.gist import GistsConfig, behind_gists
from gistkit.compress.methods.in_place import OnePass
from gistkit.layouts import Layout


@register("beacon")
@dataclass(frozen=True, kw_only=True)
class BeaconConfig(GistsConfig):
    """Activation Beacon (Zhang et al., arXiv 2401.03462), see `gistkit.layouts.beacon`.

    Args:
        separate: as in `GistsConfig`; the paper's beacons have their own maps of queries, keys and values.
        segment: context tokens of a chunk at most; a chunk is a whole number of windows of `ratio` tokens.
        part: as in `InPlaceConfig`. By default one pass reads all chunks, as each needs those before it.
    """

    separate: bool = True
    segment: int = setting(2048, least=1)
    part: int | None = setting(0, least=0, in_memory=False)

    def layout(self, context: int) -> Layout:
        return layouts.beacon(context, self.ratio, 1, segment=self.segment)

    start = behind_gists


class Beacon(OnePass, config=BeaconConfig):
    """Activation Beacon; arguments are those of `BeaconConfig`, `GistsConfig` and `InPlaceConfig`."""
