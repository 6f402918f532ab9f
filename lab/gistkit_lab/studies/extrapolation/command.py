"""Options of the studies `length` and `retrieval`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from gistkit_lab.studies.extrapolation.student import ABLATIONS
from gistkit_lab.studies.options import add_names, add_runs


def add_encodings(
    parser: argparse.ArgumentParser, presets: Mapping[str, object], sizes: str, default: Sequence[str]
) -> None:
    """--preset, --encodings, --seeds and --steps. `sizes`: a description of the presets."""
    parser.add_argument("--preset", choices=presets, default="short", help=f"{sizes} (default: %(default)s)")
    encodings = list(dict.fromkeys([*default, *ABLATIONS]))
    further = [name for name in encodings if name not in default]
    add_names(parser, "--encodings", encodings, default, f", {' and '.join(further)} among them" if further else "")
    add_runs(parser)
