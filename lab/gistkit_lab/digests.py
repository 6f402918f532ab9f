"""What a measurement was made with, in a few digits, so that another one is not taken for it."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

from gistkit.compress import Compressor


def of_values(values: Any) -> str:
    """12 hex digits of JSON values."""
    return sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def of_compressor(compressor: Compressor) -> str:
    """12 hex digits of a compressor: its model's weights, its own, and its settings."""
    return of_values([type(compressor).__name__, *compressor.fingerprints(), compressor.settings])
