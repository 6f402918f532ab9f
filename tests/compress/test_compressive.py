"""The Compressive Transformer's means as keys of a language model, against the dense form."""

from unittest import mock

import pytest
import torch
from transformers.models.llama import modeling_llama

from gistkit import hf
from gistkit.compress import AvgPool, Compressive, Dodo
from tests.compress.test_mixed import make as make_mixed
from tests.helpers.in_place_oracle import rotate, unsettle
from tests.helpers.models import (
    TOLERANCE,
    checkpoint,
    eager,
    same_gradients,
    same_under_checkpointing,
    tiny,
    tiny_llama,
    tokens,
)
from tests.helpers.streams import read_on
from tests.helpers.tiers import slow, tiers

BOS = 1
POOLS = pytest.mark.parametrize("pool", ["hidden", "kv"])


def make(model=None, tau=6, segment=6, ratio=3, lora=2, pool="hidden", **options):
    model = tiny_llama() if model is None else model
    compressor = AvgPool(model, ratio=ratio, pool=pool, bos_token=BOS, lora=lora, **options)
    return Compressive(unsettle(compressor.double()), tau=tau, segment=segment)


def seen_by(count, reader):
    """bool [N, N + W] and the windows: who sees which token, and which mean."""
    ratio, tau, segment = reader.compressor.chunk, reader.tau, reader.segment
    windows = [[i for i in range(a, a + ratio) if i] for a in range(0, count - ratio + 1, ratio)]
    windows = [window for window in windows if window]
    mask = torch.zeros(count, count + len(windows), dtype=torch.bool)
    for i in range(count):
        first = max(0, i // segment * segment - (tau - segment)) // ratio * ratio
        for j in range(i + 1):
            mask[i, j] = j == 0 or j >= first
        for w, window in enumerate(windows):
            mask[i, count + w] = window[-1] < first
    return mask, windows


def dense(reader, ids):
    """Hidden states [N, d] with means made in each layer of transformers' own attention."""
    model, count = reader.compressor.model, len(ids)
    mask, windows = seen_by(count, reader)
    inv_freq = model.get_decoder().rotary_emb.inv_freq
    places = list(range(count))
    middle = [sum(window) / len(window) for window in windows]
    plain = modeling_llama.eager_attention_forward
    entered = {}
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: entered.update({layer.self_attn: (layer, args[0])}))
        for layer in model.get_decoder().layers
    ]

    def attend(module, query, key, value, attention_mask, **kwargs):
        if reader.compressor.pool == "hidden":
            layer, states = entered[module]
            mean = layer.input_layernorm(torch.stack([states[:, w].mean(1) for w in windows], 1))
            projected = (module.k_proj(mean), module.v_proj(mean))
            means = [x.unflatten(2, (-1, module.head_dim)).transpose(1, 2) for x in projected]
        else:
            turned = rotate(key, [-place for place in places], inv_freq)
            means = [torch.stack([x[:, :, w].mean(2) for w in windows], 2) for x in (turned, value)]
        keys = torch.cat([key, rotate(means[0], middle, inv_freq)], 2)
        return plain(module, query, keys, torch.cat([value, means[1]], 2), attention_mask, **kwargs)

    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    patch = pytest.MonkeyPatch()
    try:
        patch.setattr(modeling_llama, "eager_attention_forward", attend)
        reader.compressor.adapters._set([reader.compressor.adapters.names["text"]])
        with eager(model):
            return model.get_decoder()(
                inputs_embeds=led(reader, torch.tensor([ids])), attention_mask=added[None, None],
                position_ids=torch.tensor([places]), use_cache=False,
            ).last_hidden_state[0]  # fmt: skip
    finally:
        reader.compressor.adapters._set([])
        patch.undo()
        for hook in hooks:
            hook.remove()


def led(reader, ids):
    """Embeddings of ids [1, N] with the soft prompt, if there is one, in BOS's place."""
    embeddings = reader.compressor.embed(ids)
    prompt = reader.compressor.soft_prompt
    return embeddings if prompt is None else torch.cat([prompt[None], embeddings[:, 1:]], 1)


@pytest.mark.parametrize(
    ("pool", "tau", "segment", "ratio"),
    [
        ("hidden", 6, 6, 3),
        ("kv", 6, 3, 3),
        ("hidden", 8, 4, 2),
        ("kv", 5, 5, 5),
        ("hidden", 4, 2, 1),
        ("hidden", 8, 4, 3),
        ("kv", 4, 4, 5),
        ("kv", 64, 32, 4),
    ],
)
def test_one_pass_equals_the_dense_form(pool, tau, segment, ratio):
    reader = make(tau=tau, segment=segment, ratio=ratio, pool=pool)
    ids = [BOS, *tokens(22).tolist()]
    torch.testing.assert_close(reader.hidden(reader.rows([ids]))[0], dense(reader, ids), **TOLERANCE)


@POOLS
def test_a_soft_prompt_leads(pool):
    reader, ids = make(pool=pool, soft_prompt=True), [BOS, *tokens(22).tolist()]
    prompt = reader.compressor.soft_prompt
    with torch.no_grad():
        prompt += torch.randn_like(prompt)
    hidden = reader.hidden(reader.rows([ids]))[0]
    torch.testing.assert_close(hidden, dense(reader, ids), **TOLERANCE)
    for _ in read_on(reader, tokens(2, 20), (9, 4)):
        pass
    assert "soft_prompt" in dict(reader.compressor.trainable())
    fresh = make(pool=pool, soft_prompt=True).compressor
    torch.testing.assert_close(fresh.soft_prompt, fresh.embed(torch.tensor([BOS])))
    assert make().compressor.soft_prompt is None


def test_what_is_pooled_is_what_was_asked_for():
    ids = tokens(2, 30)
    model = tiny_llama()
    losses = {}
    for pool, past in (("hidden", None), ("kv", None), ("hidden", "kv"), ("kv", "hidden")):
        compressor = AvgPool(model, ratio=3, pool=pool, past=past, bos_token=BOS)
        losses[pool, past] = Compressive(compressor, tau=6, segment=6)(ids)["loss"].item()
    assert losses["hidden", None] != losses["kv", None]
    assert losses["hidden", "kv"] == losses["kv", None] and losses["kv", "hidden"] == losses["hidden", None]


@POOLS
def test_gradients_are_those_of_the_dense_form(pool):
    reader = make(pool=pool, soft_prompt=True)
    ids = [BOS, *tokens(22).tolist()]
    weight = torch.randn(23, 48, dtype=torch.float64)
    gradients = same_gradients(
        reader.compressor,
        lambda: (reader.hidden(reader.rows([ids]))[0] * weight).sum(),
        lambda: (dense(reader, ids) * weight).sum(),
        rtol=1e-8,
    )
    assert len(gradients) > 4


@pytest.mark.parametrize(
    ("make", "options", "trained"),
    [
        (make, {"soft_prompt": True}, "soft_prompt"),
        (make_mixed, {"threshold": 0.0}, "scorer.up.weight"),
        (make_mixed, {"threshold": 0.0, "lora": None}, "scorer.up.weight"),
    ],
)
def test_gradient_checkpointing_makes_the_same_gradients_and_is_the_compressors_own(make, options, trained):
    reader, ids = make(**options), tokens(2, 20)
    gradients = same_under_checkpointing(reader.compressor, lambda: reader(ids)["loss"], **TOLERANCE)
    assert gradients[trained].any()
    checkpoint(reader.compressor.model)
    with pytest.raises(ValueError, match=r"compressor's own gradient_checkpointing_enable\(\)"):
        reader(ids)


def test_states_are_the_tokens_and_means_seen():
    for tau, segment, ratio in ((6, 3, 3), (8, 4, 3)):
        reader = make(tau=tau, segment=segment, ratio=ratio)
        mask, windows = seen_by(23, reader)
        assert reader.states(reader.rows(tokens(1, 22)))[0].tolist() == mask.sum(1).tolist()
        # No token is lost between the means and the recent tokens.
        for row, seen in enumerate(mask[:, 23:]):
            meant = {place for window, is_seen in zip(windows, seen, strict=True) if is_seen for place in window}
            assert meant | set(mask[row, :23].nonzero()[:, 0].tolist()) == set(range(row + 1))


def test_a_text_too_short_for_a_mean():
    reader = make(ratio=6)
    ids = tokens(1, 3)
    with reader.compressor.using("text"):
        whole = reader.rows(ids)
        wanted = reader.compressor.model.get_decoder()(input_ids=whole.ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(reader.hidden(whole), wanted, rtol=1e-7, atol=1e-7)
    assert reader([[5]])["loss"].isfinite()


@pytest.mark.parametrize("family", tiers(["mistral", "gemma3"]))
def test_a_sliding_window_leaves_what_ends_in_it(family):
    reader = make(tiny(family), tau=4, segment=2, ratio=2)
    (window,) = reader.compressor.lm.windows
    count = 17
    plan = reader.plan(count)
    mask, windows = seen_by(count, reader)
    for i in range(count):
        for at, last in [*enumerate(range(count)), *((count + w, its[-1]) for w, its in enumerate(windows))]:
            mask[i, at] &= i - last < window
    compiled = torch.zeros_like(mask)
    for row, intervals in enumerate(plan.windowed[window].spans[0].tolist()):
        for start, end in intervals:
            compiled[row, start:end] = True
    assert torch.equal(compiled, mask)
    assert reader.hidden(reader.rows(tokens(2, 16))).isfinite().all()


def test_the_model_is_searched_for_its_frequencies_once_a_pass(monkeypatch):
    reader = make(pool="kv")
    counted = mock.Mock(side_effect=hf.frequencies)
    monkeypatch.setattr(hf, "frequencies", counted)
    reader.hidden(reader.rows(tokens(1, 16)))
    assert counted.call_count == 1


@pytest.mark.parametrize(
    ("pool", "family", "tau", "segment", "ratio"),
    [
        ("hidden", "llama", 6, 3, 3),
        ("kv", "gemma3", 4, 2, 1),
        ("hidden", "llama", 8, 4, 3),
        *slow(("kv", "llama", 64, 32, 4), ("kv", "qwen3", 6, 6, 3), ("hidden", "gemma2", 8, 4, 4)),
    ],
)
def test_reading_token_by_token_equals_one_pass(pool, family, tau, segment, ratio):
    reader = make(tiny(family), tau=tau, segment=segment, ratio=ratio, pool=pool)
    for stream, seen in read_on(reader, tokens(3, 33), (13, 5, 1)):
        # The cache holds what the token saw, but for what a sliding window leaves.
        assert reader.compressor.lm.windows or list(stream.states) == seen


@POOLS
def test_a_pass_of_another_length_does_not_change_the_means(pool):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 6, "long_factor": [3.0] * 6}
    reader = make(tiny_llama(rope_parameters=rope, max_position_embeddings=96), pool=pool)
    ids = tokens(1, 60)
    wanted = reader.hidden(reader.rows(ids))
    stream = reader.start(ids[:, :40])
    for at in range(40, 60):
        # RoPE types that go by the length hold the frequencies of the last pass, whose ever it was.
        reader.compressor.model(input_ids=tokens(1, 5))
        torch.testing.assert_close(stream.step(ids[:, at]), wanted[:, at + 1], **TOLERANCE)


BOTH = pytest.mark.parametrize("make", [make, make_mixed], ids=["compressive", "mixed"])


@BOTH
def test_ragged_rows_are_each_row_by_itself(make):
    reader = make()
    rows = [tokens(n).tolist() for n in (17, 4, 1, 11)]
    together = reader.hidden(reader.rows(rows))
    states = reader.states(reader.rows(rows))
    for row, ids in enumerate(rows):
        alone = reader.hidden(reader.rows([ids]))[0]
        torch.testing.assert_close(together[row, : len(ids) + 1], alone, **TOLERANCE)
        assert states[row].tolist() == reader.states(reader.rows([ids]))[0].tolist() + [0] * (17 - len(ids))


@BOTH
def test_greedy_generation_is_what_one_pass_predicts(make):
    reader = make()
    prompts = [tokens(17).tolist(), tokens(4).tolist()]
    answer = reader.generate(prompts, max_new_tokens=12)
    for prompt, given in zip(prompts, answer.tolist(), strict=True):
        hidden = reader.hidden(reader.rows([prompt + given]))[0]
        logits = reader.compressor.logits(hidden[len(prompt) : -1])
        assert logits.argmax(-1).tolist() == given
    # A row ends behind its stop token.
    stop = int(answer[0, 2])
    shorter = reader.generate(prompts[:1], max_new_tokens=12, stop_tokens=stop)
    first = answer[0].tolist().index(stop)
    assert shorter[0].tolist() == answer[0, : first + 1].tolist()
    banned = reader.generate(prompts[:1], max_new_tokens=12, bad_words_ids=[[stop]])
    assert stop in answer[0] and stop not in banned
    with pytest.raises(ValueError, match=r"expected greedy_search or sample of one .*, got beam_search of 1"):
        reader.generate(prompts, num_beams=2)


@pytest.mark.parametrize(
    ("make", "options", "kept"),
    [(make, {}, 1 / 4), (make_mixed, {"selection": "strided"}, 1 / 4), (make_mixed, {"selection": "none"}, 0)],
)
def test_memory_is_bounded_by_what_is_kept_and_the_recent_tokens(make, options, kept):
    reader, sizes = make(tau=8, segment=4, ratio=4, **options), []
    stream = reader.start(tokens(1, 3))
    for count in range(4, 90):
        stream.step(tokens(1))
        assert stream.states[0] <= 1 + count * kept + 8
        sizes.append(stream.nbytes)
    assert kept or max(sizes[40:]) <= max(sizes[:40])


@POOLS
def test_a_segments_tokens_are_written_in_place_and_streams_share_nothing(pool):
    reader = make(tau=8, segment=4, ratio=4, pool=pool)
    ids = tokens(2, 40)
    one, other = (reader.start(ids[:1, :20]) for _ in range(2))
    wanted = reader.hidden(reader.rows(ids[:1])), reader.hidden(reader.rows(torch.cat([ids[:1, :20], ids[1:, 20:]], 1)))
    for at in range(20, 40):
        for stream, row, all_of_it in zip((one, other), ids, wanted, strict=True):
            before = memory_of(stream)
            torch.testing.assert_close(stream.step(row[None, at]), all_of_it[:, at + 1], **TOLERANCE)
            # Memory is new for the first token, and where position at + 1 begins a segment.
            assert at == 20 or (at + 1) % 4 == 0 or memory_of(stream) == before, at
        assert not {*memory_of(one)} & {*memory_of(other)}


def memory_of(stream):
    """Where the keys, and hidden states, of a stream's cache lie."""
    return [key.data_ptr() for key, _ in stream._cache._held()]


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="compressor: expected an AvgPool, got Dodo"):
        Compressive(Dodo(tiny_llama(), layer=1, bos_token=BOS))
    with pytest.raises(TypeError, match="model: expected a family whose attention is built like a Llama's"):
        Compressive(AvgPool(tiny("phi3"), past="kv", bos_token=BOS))
