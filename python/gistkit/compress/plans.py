"""Compiled plans of the encoder and decoder passes, made once for each set of lengths."""

from __future__ import annotations

from functools import lru_cache

import torch

from gistkit import layouts
from gistkit.layouts import Plan


@lru_cache(maxsize=256)
def encoder_plan(context: int, chunk: int, memory: int, positions: str, device: str) -> Plan:
    """All chunks in one row, context tokens first, then memory tokens; a chunk sees only itself."""
    # A plan outlives the call: made in inference mode, its tensors could not serve training later.
    with torch.inference_mode(False):
        return layouts.icae_encoder(context, chunk, memory, positions=positions).compile(device=device)


@lru_cache(maxsize=256)
def decoder_plan(
    context: int, chunk: int, memory: int, positions: str, task: str, carrier: str, text: int, device: str
) -> Plan:
    """Memory tokens, the task token, then `text` tokens, causal."""
    layout = layouts.decoder(context, chunk, memory, task=task, carrier=carrier, positions=positions, text=text)
    with torch.inference_mode(False):
        return layout.compile(device=device)
