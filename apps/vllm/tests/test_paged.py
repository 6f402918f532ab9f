"""Reading keys and values back out of blocks that a backend fills in its own order."""

from types import SimpleNamespace

import pytest
import torch

from gistkit_vllm import paged

BLOCKS, HEADS, TOKENS, SIZE = 9, 3, 16, 8


def by_heads(layer, key, value, cache, slots):
    """[blocks, heads, tokens, keys and values], as most of vLLM's backends."""
    cache[slots // TOKENS, :, slots % TOKENS] = torch.cat([key, value], -1)


def packed(layer, key, value, cache, slots):
    """Keys of a block in columns, then its values in rows, as on CPUs."""
    both = cache.view(BLOCKS if len(cache) > 1 else 1, HEADS, 2, TOKENS * SIZE)
    keys, values = both[:, :, 0].unflatten(-1, (SIZE, TOKENS)), both[:, :, 1].unflatten(-1, (TOKENS, SIZE))
    keys[slots // TOKENS, :, :, slots % TOKENS] = key
    values[slots // TOKENS, :, slots % TOKENS] = value


def halved(layer, key, value, cache, slots):
    by_heads(layer, key / 2, value, cache, slots)


def padded(layer, key, value, cache, slots):
    by_heads(layer, key, value, cache[..., :-1], slots)


def layer_of(write, dtype, order=(0, 1, 2, 3), size=2 * SIZE):
    shape = BLOCKS, HEADS, TOKENS, size
    cache = torch.zeros([shape[axis] for axis in order], dtype=dtype).permute([order.index(axis) for axis in range(4)])
    assert cache.shape == shape
    return SimpleNamespace(kv_cache=cache, impl=SimpleNamespace(do_kv_cache_update=write))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("write", "order"),
    [(by_heads, (0, 1, 2, 3)), (by_heads, (0, 2, 1, 3)), (by_heads, (1, 0, 2, 3)), (packed, (0, 1, 2, 3))],
)
def test_what_was_written_is_read(write, order, dtype):
    layer = layer_of(write, dtype, order)
    places = paged.order(layer, dtype, HEADS, SIZE)
    assert not layer.kv_cache.any()
    key, value = torch.randn(2, 37, HEADS, SIZE).to(dtype)
    slots = torch.tensor([4, 1, 7]).repeat_interleave(TOKENS)[:37] * TOKENS + torch.arange(37) % TOKENS
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
    assert torch.equal(paged.read(layer.kv_cache, places, slots, HEADS, SIZE), torch.stack([key, value]))


@pytest.mark.parametrize(("write", "size"), [(halved, 2 * SIZE), (padded, 2 * SIZE + 1)])
def test_blocks_with_other_contents_are_refused(write, size):
    with pytest.raises(ValueError, match="kv_cache: expected keys and values as they are, got other contents in"):
        paged.order(layer_of(write, torch.float32, size=size), torch.float32, HEADS, SIZE)
