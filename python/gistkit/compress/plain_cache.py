"""to_cache: a memory as a cache of the plain model, over which transformers itself generates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from gistkit import hf, ops
from gistkit.common.checks import POSITIONS
from gistkit.compress.generation import Reading
from gistkit.compress.memory import Memory, Task, check_memory
from gistkit.compress.tokens import pad
from gistkit.hf.attach import pretrained
from gistkit.hf.cache import CACHE, MemoryCache


@torch.no_grad()
def to_cache(compressor: Any, memory: Memory, task: Task = "lm") -> MemoryCache:
    """A transformers cache of [memory][task token], for `model.generate(ids, cache=cache)`.

    `gistkit.hf.CACHE` is the name of the argument in the installed release (`past_key_values` before transformers
    5.24).

    `model.generate` takes only the prompt, [B, N] with N >= 1; no option needs to account for the memory. The keys are
    rotated so that the prompt starts at position 0, which RoPE allows because it depends only on differences. Rows must
    have the same number of memory tokens; one row serves any number of prompts. Pad shorter prompts on the left and
    pass their mask [B, N], which `hf.cover_memory` prepares the model for. A call leaves its tokens in the cache, and
    the next call continues them if it gets all tokens; `cache.reset()` drops them. In-place methods with LoRA also have
    an adapter for the text, active inside `with compressor.using(compressor.reader)`. There gistkit's attention runs,
    which takes no padding. Passes that would read the memory differently, without that adapter or across the model's
    sliding window, raise a ValueError.

    Args:
        memory, task: as in `generate`; tokens after the window are read into the cache.

    Raises:
        TypeError: for a model without such RoPE, such as GPT-2, or with dynamic or longrope RoPE.
        ValueError: if rows have different numbers of memory tokens, or of tokens after the window; or if an in-place
            method has compressed more than the model's sliding window.
    """
    check_memory(memory)
    hf.check_moves(compressor.lm.model)
    rests = tuple(map(len, memory.rest)) if task != "ae" else ()
    for tokens, lengths in (("memory tokens", memory.lengths), ("tokens after the window", rests)):
        if len({*lengths}) > 1:
            raise ValueError(
                f"memory: expected rows with equal numbers of {tokens}, as the model's own attention needs, got "
                f"{min(lengths)} to {max(lengths)}; use generate, which takes any"
            )
    if memory.counts is not None or compressor.key_biases(memory) is not None:
        raise ValueError(
            "memory: expected the same number of tokens in each head and no fitted biases, as the model's own "
            f"attention needs, got {'fitted biases' if memory.counts is None else 'heads that share tokens'}; use "
            "generate, which takes any, or make it with compressor.changed(shares='equal', fit=False)"
        )
    next_places, narrowest = compressor.ordinals(memory)[1], min(compressor.lm.windows, default=POSITIONS)
    places = None if next_places == memory.lengths else max(next_places)
    if places is not None and places >= narrowest:
        raise ValueError(
            f"memory: expected fewer than {narrowest} context tokens, the model's sliding window, got {places}; use "
            "generate, which takes any"
        )
    nothing = pad(((),) * memory.batch_size, compressor.lm.device)
    with compressor.lm.using(compressor.reader), compressor.lm.without_checkpointing():
        # Its plan ends with the row of the token that follows.
        reading = Reading(compressor, memory, nothing, task, 2)
        reading.read(nothing.ids)
        # Transformers numbers new tokens from 0.
        back = -cast(Tensor, reading.plan.positions)[..., -1:]
        inv_freqs = hf.frequencies(compressor.lm.model)
        layers = [
            (ops.rerotate(key, back.expand(*back.shape[:-1], key.shape[2]), inv_freq.to(key.device)), value)
            for (key, value), inv_freq in zip(reading.cache.held, inv_freqs, strict=True)
        ]
    hf.cover_memory(pretrained(compressor.lm.model))
    cache = hf.memory_cache(layers, 0)
    cache.guard = _guard(compressor, places, narrowest)
    return cache


def _guard(compressor: Any, places: int | None, window: int) -> Callable[[int], None]:
    """What refuses passes over `to_cache` that would read other weights or other keys than `generate` does.

    Args:
        places: of the context, where a memory token stands for several of them; None: each stands for its own place.
        window: the model's narrowest sliding window.
    """
    # A cache may be copied, and kept longer than the compressor.
    own, reader = compressor.lm.adapters, compressor.reader
    held = (lambda: None) if own is None else weakref.ref(own)

    def guard(tokens: int) -> None:
        adapters = held()
        if adapters is not None and not adapters.reads_as(reader):
            where = "inside `with compressor.using(compressor.reader)`" if reader else "outside of compressor.using"
            raise ValueError(f"{CACHE}: expected a pass {where}, as the compressor reads a memory")
        if places is not None and places + tokens > window:
            raise ValueError(
                f"{CACHE}: expected at most {window} tokens, the model's sliding window, got {places} compressed and "
                f"{tokens} after them; use generate, which takes any"
            )

    return guard
