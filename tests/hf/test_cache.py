"""What a pass leaves behind for the next one: kept keys, memory in front of a layer's own, the memory cache."""

import contextlib
import weakref

import pytest
import torch
from transformers import DynamicCache

import gistkit
from gistkit.hf import CACHE, KeptKeys, attach, cover_memory, memory_cache
from gistkit.hf.cache import empty_cache
from gistkit.inspect import AttentionRecorder
from tests.helpers.models import FAMILIES, additive, checkpoint, double_angles, eager, tiny, tiny_llama
from tests.helpers.tiers import slow, tiers
from tests.hf.test_families import TOLERANCE, tokens

ROWS = torch.tensor([1, 4, 6])


def two_passes(model, rows, batch=2):
    """A scalar of a second pass over what `rows` of a first one left behind, as a compressor trains."""
    keep = KeptKeys(rows)
    with attach(model):
        model(tokens(batch, 7), keep=keep, use_cache=False)
        kept = keep.layers
        positions = torch.arange(7, 12)[None]
        out = model(tokens(batch, 5), memory=keep.layers, position_ids=positions, use_cache=False)
        loss = out.logits.logsumexp(-1).sum()
        loss.backward()
    # A checkpointed layer runs again in the backward pass; what it kept stays what it was.
    assert [id(part) for pair in keep.layers for part in pair] == [id(part) for pair in kept for part in pair]
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", tiers(FAMILIES, ["gemma3", "gpt2"]))
def test_memory_of_all_rows_continues_the_sequence(family):
    model = tiny(family)
    ids = tokens(2, 12)
    keep = KeptKeys(slice(None))
    with attach(model):
        whole = model(ids, use_cache=False).logits
        first = model(ids[:, :7], keep=keep, use_cache=False).logits
        rest = model(ids[:, 7:], memory=keep.layers, position_ids=torch.arange(7, 12)[None], use_cache=False).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, **TOLERANCE)


@pytest.mark.parametrize(
    ("family", "rows"),
    [("llama", ROWS), ("gemma3", slice(2, 5)), *slow(("gpt2", ROWS))],
)
def test_gradients_through_kept_keys_survive_checkpointing(family, rows):
    model = tiny(family).train()
    loss, expected = two_passes(model, rows)
    model.zero_grad()
    checkpoint(model, use_reentrant=False)
    again, gradients = two_passes(model, rows)
    assert torch.equal(again, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], **TOLERANCE)


def test_reentrant_checkpointing_would_lose_gradients_and_is_refused():
    model = checkpoint(tiny_llama().train(), use_reentrant=True)
    message = "keep: expected gradient checkpointing with use_reentrant=False, got use_reentrant=True"
    with attach(model), pytest.raises(ValueError, match=message):
        model(tokens(1, 4), keep=KeptKeys(slice(None)), use_cache=False)
    bias = torch.zeros(1, 1, 4, dtype=torch.float64)
    with attach(model):
        assert model(tokens(1, 4), key_bias=bias, use_cache=False).logits.isfinite().all()
        with pytest.raises(ValueError, match="key_bias: expected gradient checkpointing with use_reentrant=False"):
            model(tokens(1, 4), key_bias=bias.requires_grad_(), use_cache=False)


def test_gradients_through_kept_keys_are_those_of_one_pass():
    model = tiny_llama().train()
    _, gradients = two_passes(model, ROWS)
    model.zero_grad()
    # One pass over both texts, in which the second sees the kept rows of the first.
    mask = torch.ones(12, 12).tril().bool()
    mask[7:, :7] = False
    mask[7:, ROWS] = True
    ids = torch.cat([tokens(2, 7), tokens(2, 5)], 1)
    with eager(model):
        logits = model(ids, attention_mask=additive(mask), use_cache=False).logits[:, 7:]
    logits.logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, **TOLERANCE)


def test_a_plan_counts_the_memory():
    model = tiny_llama()
    layout = gistkit.layouts.decoder(20, 10, 2, task="lm", carrier="kv", positions="epl", text=4)
    plan = layout.compile()
    skip = plan.num_queries - 5
    layers = [(torch.randn(1, 2, skip, 12).double(), torch.randn(1, 2, skip, 12).double()) for _ in range(2)]
    ids = tokens(2, 5)
    cache = filled(layers, 2)
    rows = plan.rows(skip, plan.num_queries)
    with attach(model):
        expected = model(ids, plan=rows, **{CACHE: cache}).logits
        torch.testing.assert_close(model(ids, plan=rows, memory=layers, use_cache=False).logits, expected, **TOLERANCE)


def test_recorder_sees_the_memory():
    model = tiny_llama()
    layers, ids = memory_of(2), tokens(2, 5)
    with attach(model), torch.no_grad(), AttentionRecorder() as recorder:
        model(ids, memory=layers)
    positions = torch.arange(5)[None]
    with torch.no_grad(), eager(model):
        theirs = model(ids, **{CACHE: filled(layers, 2)}, position_ids=positions, output_attentions=True).attentions
    assert theirs[1].shape == (2, 4, 5, 8)
    for one, weights in zip(recorder.maps, theirs, strict=True):
        torch.testing.assert_close(one.weights, weights, **TOLERANCE)


def test_memory_errors_say_what_was_expected():
    model = tiny_llama()
    pair = (torch.zeros(1, 2, 3, 12).double(),) * 2
    with attach(model):
        with pytest.raises(ValueError, match=r"memory: expected \(key, value\) for each of 2 layers, got 1"):
            model(tokens(2, 4), memory=[pair])
        for shape in ((3, 2, 3, 12), (2, 4, 3, 12), (2, 2, 3, 8), (2, 3, 12)):
            message = r"memory: expected keys \[1 or 2, 2, K, 12\] for layer 0, got shape"
            with pytest.raises(ValueError, match=message):
                model(tokens(2, 4), memory=[(torch.zeros(shape).double(),) * 2] * 2)


def filled(layers, rows):
    """The model's own cache of a memory."""
    cache = DynamicCache()
    for index, pair in enumerate(layers):
        cache.update(*(part.expand(rows, -1, -1, -1) for part in pair), index)
    return cache


def memory_of(batch, count=3, heads=2, dim=12, dtype=torch.float64):
    torch.manual_seed(5)
    return [tuple(torch.randn(2, batch, heads, count, dim, dtype=dtype)) for _ in range(2)]


def decode(model, cache, ids, start, parts):
    """Logits of ids fed in parts, each at the positions that follow `start`."""
    out = []
    for a, b in parts:
        positions = torch.arange(start + a, start + b)[None]
        out.append(model(ids[:, a:b], **{CACHE: cache}, position_ids=positions).logits)
    return torch.cat(out, 1).detach()


def over_the_concatenation(model, layers, ids, start):
    """The model's own logits in one pass over memory and tokens."""
    length, memory = ids.shape[1], layers[0][0].shape[2]
    mask = torch.cat([torch.ones(length, memory), torch.ones(length, length).tril()], 1).bool()
    positions = torch.arange(start, start + length)[None]
    with torch.no_grad(), double_angles(model):
        return model(
            ids, **{CACHE: filled(layers, len(ids))}, position_ids=positions, attention_mask=additive(mask)
        ).logits


@pytest.mark.parametrize(
    ("mode", "attached", "capacity"),
    [
        (torch.no_grad, False, 200),
        (torch.no_grad, True, 0),
        (torch.inference_mode, True, 2),
        (torch.enable_grad, False, 0),
    ],
)
def test_decoding_from_a_memory_equals_attention_over_the_concatenation(mode, attached, capacity):
    model = tiny_llama()
    layers = memory_of(2)
    copies = [tuple(part.clone() for part in pair) for pair in layers]
    ids = tokens(2, 90)
    expected = over_the_concatenation(model, layers, ids, 50)
    cache = memory_cache(layers, 50, capacity)
    parts = [(0, 5), (5, 6), (6, 7), (7, 9), (9, 60), (60, 64), (64, 65), (65, 66), (66, 80), (80, 90)]
    with mode(), double_angles(model), attach(model) if attached else contextlib.nullcontext():
        torch.testing.assert_close(decode(model, cache, ids, 50, parts), expected, **TOLERANCE)
    assert cache.get_seq_length() == 140 and cache.get_mask_sizes(1, 0) == (94, 0)
    for pair, copy in zip(layers, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(pair, copy, strict=True))


def test_positions_go_on_from_the_logical_length():
    model = tiny_llama()
    layers = memory_of(1)
    ids = tokens(3, 6)
    expected = over_the_concatenation(model, layers, ids, 50)
    with torch.no_grad(), double_angles(model):
        cache = memory_cache(layers, 50)
        parts = [model(ids[:, a:b], **{CACHE: cache}).logits for a, b in ((0, 4), (4, 5), (5, 6))]
        torch.testing.assert_close(torch.cat(parts, 1), expected, **TOLERANCE)
        # A two-dimensional mask counts the keys that are there.
        padded = torch.tensor([[1] * 9, [0] + [1] * 8, [1] * 9])
        first = model(ids, **{CACHE: memory_cache(layers, 50)}, attention_mask=padded).logits
    assert torch.allclose(first[[0, 2]], expected[[0, 2]]) and not torch.allclose(first[1], expected[1])


@torch.no_grad()
def test_no_copy_while_there_is_room():
    layer = memory_cache(memory_of(2), 3, capacity=100).layers[0]
    new = torch.randn(2, 2, 1, 12).double()
    keys, _ = layer.update(new, new)
    places = {layer.update(new, new)[0].data_ptr() for _ in range(99)}
    assert places == {keys.data_ptr()} and layer.num_keys == 103
    layer.update(new, new)
    assert layer.update(new, new)[0].data_ptr() != keys.data_ptr()
    copies = 0
    for _ in range(2000):
        before = layer.keys.data_ptr()
        copies += layer.update(new, new)[0].data_ptr() != before
    assert copies <= 5 and layer.num_keys == 2105


@torch.no_grad()
def test_rows_are_taken_repeated_and_reordered():
    model = tiny_llama()
    layers = memory_of(3)
    ids = tokens(3, 8)
    rows = torch.tensor([2, 0])
    picked = [(key[rows], value[rows]) for key, value in layers]
    with double_angles(model):
        for change, index in (
            (lambda cache: cache.batch_select_indices(rows), rows),
            (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), torch.tensor([1, 1, 0])),
            (lambda cache: cache.batch_repeat_interleave(2), torch.arange(3).repeat_interleave(2)),
        ):
            cache = memory_cache(layers, 9)
            decode(model, cache, ids, 9, [(0, 4), (4, 5)])
            change(cache)
            assert cache.batch_size == len(index) and cache.get_seq_length() == 14
            expected = over_the_concatenation(model, [(k[index], v[index]) for k, v in layers], ids[index], 9)
            after = decode(model, cache, ids[index], 9, [(5, 6), (6, 8)])
            torch.testing.assert_close(after, expected[:, 5:], **TOLERANCE)
        before = memory_cache(layers, 9)
        before.batch_select_indices(rows)
        torch.testing.assert_close(before.layers[1].values, picked[1][1], rtol=0, atol=0)


@torch.no_grad()
def test_what_was_appended_can_be_cropped():
    model = tiny_llama()
    layers = memory_of(2)
    ids = tokens(2, 8)
    expected = over_the_concatenation(model, layers, ids, 9)
    cache = memory_cache(layers, 9)
    with double_angles(model):
        decode(model, cache, torch.cat([ids[:, :4], ids[:, :3]], 1), 9, [(0, 7)])
        cache.crop(-3)
        assert cache.get_seq_length() == 13
        torch.testing.assert_close(decode(model, cache, ids, 9, [(4, 8)]), expected[:, 4:], **TOLERANCE)
        cache.reset()
        assert cache.get_seq_length() == 9 and cache.layers[0].num_keys == 3
        torch.testing.assert_close(decode(model, cache, ids, 9, [(0, 8)]), expected, **TOLERANCE)
    for wrong in (-9, 2):
        with pytest.raises(ValueError, match=f"tokens_to_remove: expected -8 to 0.*got {wrong}"):
            cache.crop(wrong)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("memory", "runs"), [(1, (3, 1, 4, 1)), (2, (6, 2, 4)), (None, (3, 1))])
def test_a_reset_cache_serves_any_number_of_rows(grad, memory, runs):
    model = tiny_llama()
    layers = memory_of(1, 0) if memory is None else memory_of(memory)
    cache = empty_cache(2, 9) if memory is None else memory_cache(layers, 9)
    cache.layers[0].crop(0)
    for rows in runs:
        cache.reset()
        ids = tokens(rows, 6)
        repeated = [[part.repeat_interleave(rows // (memory or 1), 0) for part in pair] for pair in layers]
        expected = over_the_concatenation(model, repeated, ids, 9)
        with torch.set_grad_enabled(grad), double_angles(model):
            torch.testing.assert_close(decode(model, cache, ids, 9, [(0, 4), (4, 6)]), expected, **TOLERANCE)


@torch.no_grad()
def test_a_cache_does_not_hold_what_it_copied():
    cache = memory_cache(memory_of(1), 3)
    held = weakref.ref(cache.layers[0].keys)
    cache.layers[0].update(*torch.randn(2, 3, 2, 1, 12).double())
    assert held() is None


@pytest.mark.parametrize("grad", [False, True])
def test_a_failed_update_counts_no_tokens(grad):
    layer = memory_cache(memory_of(2), 3).layers[0]
    new = torch.randn(3, 2, 1, 12).double()
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="must match"):
        layer.update(new, new)
    assert (layer.get_seq_length(), layer.num_keys) == (3, 3)


def test_a_cache_of_inference_mode_goes_on_outside():
    layer = memory_cache(memory_of(1), 3).layers[0]
    new = torch.randn(1, 2, 1, 12).double()
    with torch.inference_mode():
        layer.update(new, new)
    with torch.no_grad():
        keys, _ = layer.update(2 * new, new)
    assert torch.equal(keys[:, :, 3:], torch.cat([new, 2 * new], 2))


def test_gradients_reach_the_memory():
    model = tiny_llama()
    layers = [(key.requires_grad_(), value.requires_grad_()) for key, value in memory_of(1)]
    cache = memory_cache(layers, 3)
    ids = tokens(2, 5)
    with attach(model):
        for a, b in ((0, 3), (3, 5)):
            logits = model(ids[:, a:b], **{CACHE: cache}).logits
        logits.logsumexp(-1).sum().backward()
        again = [(key.detach().requires_grad_(), value.detach().requires_grad_()) for key, value in layers]
        out = model(ids, memory=again, position_ids=torch.arange(3, 8)[None], use_cache=False).logits[:, 3:]
        out.logsumexp(-1).sum().backward()
    for pair, same in zip(layers, again, strict=True):
        for a, b in zip(pair, same, strict=True):
            torch.testing.assert_close(a.grad, b.grad, **TOLERANCE)


def test_memory_cache_errors_say_what_was_expected():
    pair = (torch.zeros(1, 2, 3, 12), torch.zeros(1, 2, 3, 12))
    with pytest.raises(ValueError, match=r"memory: expected keys and values \[B, H, K, D\], got shapes"):
        memory_cache([(pair[0], pair[1][:, :, :2])], 3)
    with pytest.raises(ValueError, match="logical_length: expected at least 0, got -1"):
        memory_cache([pair], -1)
    with pytest.raises(ValueError, match="capacity: expected at least 0, got -2"):
        memory_cache([pair], 3, capacity=-2)


@pytest.mark.parametrize(("family", "length"), [("llama", 1), ("llama", 40), ("gemma3", 4)])
def test_generate_reads_prompts_padded_at_their_start_over_a_memory(family, length):
    model = tiny(family, sliding_window=17).eval() if family == "gemma3" else tiny(family).eval()
    cover_memory(model)
    layers = memory_of(1, 4, dim=model.config.head_dim)
    ids, told = tokens(2, 9), {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    mask = torch.ones(2, length + 9, dtype=torch.long)
    mask[0, length : length + 3] = 0
    found = model.generate(ids, attention_mask=mask, **{CACHE: memory_cache(layers, length)}, **told)[:, 9:]
    for row, begin in ((0, 3), (1, 0)):
        alone = torch.ones(1, length + 9 - begin, dtype=torch.long)
        cache = memory_cache(layers, length)
        expected = model.generate(ids[row : row + 1, begin:], attention_mask=alone, **{CACHE: cache}, **told)
        assert torch.equal(found[row], expected[0, 9 - begin :])


def test_zeros_at_the_positions_of_a_memory_are_refused():
    model = tiny("llama").eval()
    cover_memory(model)
    mask = torch.ones(1, 40 + 9, dtype=torch.long)
    mask[0, 38] = 0
    with pytest.raises(ValueError, match="attention_mask: expected ones in its first 40 columns"):
        model(tokens(1, 9), attention_mask=mask, **{CACHE: memory_cache(memory_of(1), 40)})
