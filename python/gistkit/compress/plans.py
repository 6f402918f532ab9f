"""Compiled plans of the encoder and decoder passes, made once for each set of lengths."""

from __future__ import annotations

from functools import lru_cache

from gistkit import layouts
from gistkit.layouts import Plan


@lru_cache(maxsize=256)
def encoder_plan(context: int, chunk: int, memory: int, positions: str, device: str) -> Plan:
    """All chunks in one row, context tokens first, then memory tokens; a chunk sees only itself."""
    return layouts.icae_encoder(context, chunk, memory, positions=positions).compile(device=device)


@lru_cache(maxsize=256)
def decoder_plan(
    context: int, chunk: int, memory: int, positions: str, task: str, carrier: str, text: int, device: str
) -> Plan:
    """Memory tokens, the task token, then `text` tokens, causal."""
    layout = layouts.decoder(context, chunk, memory, task=task, carrier=carrier, positions=positions, text=text)
    return layout.compile(device=device)
