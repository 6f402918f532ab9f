"""ICAE and 500xCompressor against a chunk-by-chunk form on transformers' own eager attention."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from gistkit.compress import ICAE, AvgPool, CompressionHead, FiveHundredX, JointHead, NoContext, token_loss
from gistkit.compress.losses import segment_targets
from gistkit.compress.tokens import PART
from gistkit.hf import CACHE
from tests.helpers.models import TOLERANCE, double_angles, tiny, tiny_llama
from tests.helpers.rules import plain_positions

METHODS = [ICAE, FiveHundredX]


def matched(compressor, states):
    """What the decoder reads of the encoder's outputs."""
    if not compressor.settings.get("match_embeddings"):
        return states
    size = states.square().mean(-1, keepdim=True).sqrt()
    return states / size * compressor.gain + compressor.shift


def plain_decode(compressor, ids, task, tokens, encoding=nullcontext):
    """Hidden states at the task token and `tokens`: one plain forward for each chunk, one for the decoder.

    The encoder's run inside `encoding()`.
    """
    model, memory = compressor.model, compressor.memory_tokens
    embed = model.get_input_embeddings()
    encoder, decoder_memory, rest = plain_positions(
        compressor.layout, compressor.carrier, ids.shape[1], compressor.chunk, memory, task, tokens.shape[1]
    )
    batch = ids.shape[0]
    slots = compressor.memory_embeddings.double().expand(batch, -1, -1)
    caches, outputs = [], []
    ones = lambda n: torch.ones(batch, n, dtype=torch.long)  # noqa: E731
    with double_angles(model):
        for number, (context_ids, memory_ids) in enumerate(encoder):
            part = ids[:, number * compressor.chunk :][:, : len(context_ids)]
            position_ids = torch.tensor([context_ids + memory_ids]).expand(batch, -1)
            cache = DynamicCache(config=model.config)
            with encoding():
                out = model.model(
                    inputs_embeds=torch.cat([embed(part), slots], 1),
                    position_ids=position_ids,
                    attention_mask=ones(position_ids.shape[1]),
                    **{CACHE: cache},
                    use_cache=True,
                )
            outputs.append(matched(compressor, out.last_hidden_state[:, -memory:]))
            caches.append([(layer.keys[:, :, -memory:], layer.values[:, :, -memory:]) for layer in cache.layers])
        task_embedding = compressor.task_embeddings["ae" if task == "ae" else "lm"].double().expand(batch, 1, -1)
        inputs, position_ids = torch.cat([task_embedding, embed(tokens)], 1), rest
        cache = DynamicCache(config=model.config)
        if compressor.carrier == "embedding":
            inputs, position_ids = torch.cat([*outputs, inputs], 1), decoder_memory + rest
        else:
            for layer in range(model.config.num_hidden_layers):
                for one in caches:
                    cache.update(*one[layer], layer)
        out = model.model(
            inputs_embeds=inputs,
            position_ids=torch.tensor([position_ids]).expand(batch, -1),
            attention_mask=ones(inputs.shape[1] + cache.get_seq_length()),
            **{CACHE: cache},
            use_cache=True,
        )
    return out.last_hidden_state[:, -1 - tokens.shape[1] :]


@pytest.mark.parametrize("scheme", ["dpl", "upl", "epl", "cpl"])
@pytest.mark.parametrize("method", METHODS)
def test_decoding_equals_plain_forwards(method, scheme):
    # One chunk, three with a broken ratio, and a short last one.
    for context, chunk, ratio, tasks in ((10, 10, 5, ["ae"]), (23, 10, 2.5, ["ae", "lm", "qa"]), (13, 12, 4, ["lm"])):
        compressor = method(tiny_llama(), chunk=chunk, ratio=ratio, layout=scheme, lora=None)
        ids, tokens = torch.randint(0, 50, (2, context)), torch.randint(0, 50, (2, 7))
        memory = compressor.encode(ids)
        for task in tasks:
            ours = compressor.decode(memory, task, tokens)
            torch.testing.assert_close(ours, plain_decode(compressor, ids, task, tokens), **TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_encoder_and_decoder_share_an_adapter(method, tmp_path):
    """One plain model with the adapter on, in all passes."""
    options = {"chunk": 6, "ratio": 3, "lora": 2, "embedding_lora": 3, "train_norms": True}
    compressor = method(tiny_llama(), losses=("ae", "lm"), shared_lora=True, **options).double()
    with torch.no_grad():
        for name, parameter in compressor.trainable():
            if "lora_" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) / 4)
    ids, tokens = torch.randint(0, 50, (2, 13)), torch.randint(0, 50, (2, 7))
    ours = compressor.decode(compressor.encode(ids), "lm", tokens)
    with compressor.using("encoder"):
        expected = plain_decode(compressor, ids, "lm", tokens)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    alone = plain_decode(compressor, ids, "lm", tokens, lambda: compressor.using("encoder"))
    assert not torch.allclose(ours, alone, rtol=1e-2, atol=1e-2), "the decoder's passes have it too"
    # What it generates are the tokens that these hidden states predict, also with the adapter folded into the maps.
    memory = compressor.eval().encode(ids)
    made = compressor.generate(memory, tokens, task="lm", max_new_tokens=1)
    assert made[:, 0].tolist() == compressor.logits(ours[:, -1]).argmax(-1).tolist()
    with compressor.folded():
        assert torch.equal(compressor.generate(memory, tokens, task="lm", max_new_tokens=1), made)
    # A loss of the decoder's passes alone trains it.
    compressor.train()(ids, continuation_ids=tokens)["lm"].backward()
    assert all(parameter.grad is not None for name, parameter in compressor.trainable() if "norm" in name)
    compressor.save_pretrained(tmp_path)
    again = method.from_pretrained(tmp_path, tiny_llama()).double().eval()
    torch.testing.assert_close(again.decode(again.encode(ids), "lm", tokens), ours, rtol=1e-4, atol=1e-4)
    assert again.settings["shared_lora"] and not method(tiny_llama(), **options).settings["shared_lora"]


def test_matched_embeddings():
    compressor = ICAE(tiny_llama(), chunk=6, ratio=3, losses=("ae", "lm"), match_embeddings=True, lora=2).double()
    table = compressor.embed.weight.detach()
    assert (compressor.gain == compressor.gain[0]).all()
    torch.testing.assert_close(compressor.gain[0], table.std(), rtol=1e-6, atol=0)
    torch.testing.assert_close(compressor.shift, table.mean(0), rtol=1e-6, atol=1e-8)
    with torch.no_grad():
        compressor.gain.mul_(torch.rand(compressor.lm.width) + 0.5)
    ids, tokens = torch.randint(0, 50, (2, 13)), torch.randint(0, 50, (2, 7))
    ours = compressor.decode(compressor.encode(ids), "ae", tokens)
    torch.testing.assert_close(ours, plain_decode(compressor, ids, "ae", tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_losses_and_gradients(method):
    names = ("ae", "lm", "compression", "qa")
    compressor = method(tiny_llama(), chunk=8, ratio=4, losses=names, lora=None).double()
    ids, after = torch.randint(0, 50, (2, 12)), torch.randint(0, 50, (2, 5))
    question, answer = torch.randint(0, 50, (2, 3)), torch.randint(0, 50, (2, 4))
    losses = compressor(ids, continuation_ids=after, question_ids=question, answer_ids=answer)
    head = compressor.model.lm_head
    for name, targets, skip in (("ae", ids, 0), ("lm", after, 0), ("qa", torch.cat([question, answer], 1), 3)):
        logits = head(plain_decode(compressor, ids, name, targets[:, :-1]))[:, skip:]
        expected = F.cross_entropy(logits.float().flatten(0, 1), targets[:, skip:].flatten())
        torch.testing.assert_close(losses[name], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(losses["loss"], sum(losses[name] for name in names) / 4)
    losses["loss"].backward()
    for name, parameter in compressor.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_losses_are_weighted_and_padding_is_left_out():
    compressor = ICAE(tiny_llama(), chunk=8, ratio=4, losses={"lm": 3.0, "ae": 1.0}, lora=None, end_token=7)
    contexts = [torch.randint(0, 50, (n,)) for n in (8, 5)]
    after = torch.tensor([[1, 2, 3, 4], [5, 6, -100, -100]])
    losses = compressor([c.tolist() for c in contexts], continuation_ids=after)
    torch.testing.assert_close(losses["loss"], (losses["ae"] + 3 * losses["lm"]) / 4)
    head, total, count = compressor.model.lm_head, {"ae": 0.0, "lm": 0.0}, {"ae": 0, "lm": 0}
    for context, row in zip(contexts, after, strict=True):
        for task, targets in (("ae", torch.cat([context, torch.tensor([7])])), ("lm", row[row >= 0])):
            logits = head(plain_decode(compressor, context[None], task, targets[None, :-1]))[0]
            total[task] += F.cross_entropy(logits.float(), targets, reduction="sum")
            count[task] += len(targets)
    for task in total:
        torch.testing.assert_close(losses[task], total[task] / count[task], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_beyond_the_window_the_rest_is_read_as_it_is(method):
    compressor = method(tiny_llama(), chunk=6, ratio=3, window=12, lora=None)
    ids, text = torch.randint(0, 50, (1, 17)), torch.randint(0, 50, (1, 4))
    memory = compressor.encode(ids)
    assert memory.context_lengths == (12,) and memory.rest == (tuple(ids[0, 12:].tolist()),)
    plain = plain_decode(compressor, ids[:, :12], "lm", torch.cat([ids[:, 12:], text], 1))
    torch.testing.assert_close(compressor.decode(memory, "lm", text), plain[:, 5:], **TOLERANCE)
    ragged = compressor.encode([ids[0].tolist(), ids[0, :9].tolist()])
    both = compressor.decode(ragged, "lm", text.expand(2, -1))
    torch.testing.assert_close(both[:1], plain[:, 5:], **TOLERANCE)
    alone = plain_decode(compressor, ids[:, :9], "lm", text)
    torch.testing.assert_close(both[1:], alone, **TOLERANCE)
    plain = plain_decode(compressor, ids[:, :12], "ae", text)
    torch.testing.assert_close(compressor.decode(memory, "ae", text), plain, **TOLERANCE)


def test_segment_targets_are_the_tokens_around_each_memory_id():
    # Ids 2 and 5 own tokens 1-3 and 4-6.
    assert segment_targets(torch.arange(1, 7)[None], 6, 2).tolist() == [[[1, 2, 3], [4, 5, 6]]]
    # The second chunk is short: two tokens for two memory tokens.
    assert segment_targets(torch.arange(1, 7)[None], 4, 2)[0].tolist() == [[1, 2], [3, 4], [5, -100], [6, -100]]
    assert segment_targets(torch.arange(1, 8)[None], 7, 3)[0].tolist() == [[1, 2, -100], [3, 4, -100], [5, 6, 7]]
    # A row of four tokens beside one of six.
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]])
    ragged = segment_targets(ids, 4, 2, [6, 4])
    assert torch.equal(ragged[0], segment_targets(ids[:1], 4, 2)[0])
    assert ragged[1].tolist() == [[7, 8], [9, 10], [-100, -100], [-100, -100]]


def test_compression_head_predicts_each_offset():
    head, hidden, weight = CompressionHead(6, 3), torch.randn(2, 4, 6), torch.randn(11, 6)
    targets = torch.randint(0, 11, (2, 4, 3))
    targets[0, 0, 2] = -100
    maps = head.projection.weight.view(3, 6, 6)
    logits = torch.einsum("bmd,oed,ve->bmov", hidden, maps, weight)
    expected = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(head(hidden, weight, targets), expected)


def test_joint_head_is_one_map_to_all_logits_of_a_segment():
    head, hidden = JointHead(6, 3, 11), torch.randn(2, 4, 6)
    targets = torch.randint(0, 11, (2, 4, 3))
    targets[1, 3, 1:] = -100
    logits = head.projection(hidden).view(2, 4, 3, 11)
    expected = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(head(hidden, None, targets), expected)
    compressor = ICAE(tiny_llama(), chunk=6, ratio=3, losses=("compression",), joint_head=True, lora=None)
    assert compressor(torch.randint(0, 50, (1, 9)))["compression"].isfinite()


@pytest.mark.parametrize(
    ("chunk", "softcap", "biased"), [(1, None, True), (3, 2.0, False), (100, 2.0, True), (None, None, False)]
)
def test_token_loss_is_cross_entropy_in_chunks(chunk, softcap, biased):
    hidden, weight = torch.randn(2, 5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    bias = torch.randn(9, requires_grad=True) if biased else None
    targets = torch.randint(0, 9, (2, 5))
    targets[1, 2] = -100
    logits = F.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    ours = token_loss(hidden, weight, targets, bias=bias, chunk=chunk, softcap=softcap)
    torch.testing.assert_close(ours, expected)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    # A factor of the loss is one of the gradient, which was made before it.
    for a, b in zip(torch.autograd.grad(3 * ours, inputs), torch.autograd.grad(3 * expected, inputs), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(token_loss(hidden, weight, targets, bias=bias, softcap=softcap, chunk=chunk), ours)
    assert token_loss(hidden, weight, torch.full_like(targets, -100)) == 0


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_token_loss_under_autocast_has_the_gradient_of_rounded_products(base):
    hidden = torch.randn(40, 64, requires_grad=True)
    weight = torch.randn(300, 64).to(base).requires_grad_()
    targets = torch.randint(0, 300, (40,))

    def plain(hidden, weight):
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def ours(hidden, weight):
        return token_loss(hidden, weight, targets, chunk=16)

    found = {}
    for name, loss in (("ours", ours), ("plain", plain)):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(hidden, weight)
        gradients = torch.autograd.grad(value, (hidden, weight))
        assert [gradient.dtype for gradient in gradients] == [torch.float32, base]
        found[name] = [value, *(gradient.float() for gradient in gradients)]
    exact = plain(hidden, weight.float())
    found["exact"] = [exact, *(g.float() for g in torch.autograd.grad(exact, (hidden, weight)))]
    for a, b, c in zip(found["ours"], found["plain"], found["exact"], strict=True):
        # As near to the exact one as plain autocast is.
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-3 * c.norm()


@pytest.mark.parametrize("method", [ICAE, AvgPool])
def test_a_changed_window_is_that_of_a_compressor_made_with_it(method, tmp_path):
    options = {"ratio": 4, "lora": None} | ({"chunk": 8} if method is ICAE else {"bos_token": 0})
    ids, model = torch.arange(2, 22)[None], tiny_llama()
    compressor, made = (method(model, **options | more).eval() for more in ({}, {"window": 9}))
    made.load_state_dict(compressor.state_dict())
    expected = made.encode(ids)
    compressor.set_window(9)
    compressor.save_pretrained(tmp_path)
    for one in (compressor, method.from_pretrained(tmp_path, tiny_llama())):
        memory = one.encode(ids)
        assert memory.context_lengths == (9,) and memory.rest == (tuple(range(11, 22)),)
        assert all(map(torch.equal, memory.tensors, expected.tensors))
    compressor.set_window(None)
    assert compressor.encode(ids).context_lengths == (20,)


def test_a_window_that_a_method_does_not_have():
    with pytest.raises(ValueError, match="window: expected none for no_context, which has no window, got 9"):
        NoContext(tiny_llama(), bos_token=0).set_window(9)
    with pytest.raises(ValueError, match="window: expected at least the ratio, 5 tokens, got 4"):
        AvgPool(tiny_llama(), ratio=5, bos_token=0).set_window(4)


def test_models_say_what_was_expected():
    with pytest.raises(TypeError, match="model: expected a transformers causal language model, got str"):
        ICAE("llama")
    with pytest.raises(TypeError, match="model: expected one with a language model head, got LlamaModel"):
        ICAE(tiny_llama().model)
    assert ICAE(tiny_llama(), chunk=np.int64(20), ratio=np.float32(5), losses="ae").memory_tokens == 4


def test_inputs_say_what_was_expected():
    compressor = ICAE(tiny_llama(), chunk=4, ratio=2, losses=("lm",), lora=None)
    zeros = lambda *shape: torch.zeros(shape, dtype=torch.long)  # noqa: E731
    for ids, mask, message in [
        (zeros(2, 0), None, "input_ids: expected at least 1 token, got 0 in row 0"),
        ([[1, 2, 3], []], None, "input_ids: expected at least 1 token, got 0 in row 1"),
        (zeros(2, 4) + 50, None, r"input_ids: expected token ids in \[0, 50\), got 50"),
        ([[1, -3]], None, r"input_ids: expected token ids in \[0, 50\), got -3"),
        ([[2**70] * 4], None, r"input_ids: expected token ids in \[0, 50\), got one beyond 64 bits"),
        (zeros(1, 2, 3), None, r"input_ids: expected token ids \[B, N\] with B >= 1, got shape \(1, 2, 3\)"),
        (zeros(1, 4), torch.tensor([[1, 0, 1, 1]]), "attention_mask: expected padding only at the ends of rows"),
        ([[1, 2, 3], [4, 5]], [[1, 1, 1], [0, 0]], "input_ids: expected at least 1 token, got 0 in row 1"),
        ([[1, 2, 3], [4, 5]], [[1, 0, 1], [1, 1]], "attention_mask: expected padding .*, got a gap in row 0"),
        (zeros(1, 4), torch.ones(1, 3), r"attention_mask: expected the shape \(1, 4\) of input_ids, got \(1, 3\)"),
        ({"ids": []}, None, "input_ids: expected a mapping with input_ids, got the keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            compressor.encode(ids, mask)
    for ids, message in (
        ("text", ""), (zeros(1, 4).float(), ""), ([["a", "b"]], ""), ([], ".*got an empty list"),
        ([[1, 2, 3], 4], ".*got 4 in a list"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"input_ids: expected{message}"):
            compressor.encode(ids)
    assert compressor.encode([np.int64(3)] * 4).lengths == (2,)
    assert compressor.encode([1, 2, 3, 4], torch.tensor([0, 1, 1, 0])).context_lengths == (2,)
    assert compressor.encode([[1, 2, 3], [4]], [np.array([0, 1, 1]), [1]]).context_lengths == (2, 1)
    assert compressor.encode(np.full((1, 4), 3, np.uint16)).context_lengths == (4,)
    memory = compressor.encode(zeros(2, 4))
    for match, call in [
        ("attention_mask: expected rows as long as those of input_ids",
         lambda: compressor.encode([[1] * 4, [2] * 5], [1] * 4)),
        ("continuation_ids: expected -100 only at the ends of rows, got a gap in row 0",
         lambda: compressor(zeros(1, 4), continuation_ids=torch.tensor([[5, -100, 6]]))),
        ("continuation_ids: expected", lambda: compressor(zeros(2, 4))),
        ("continuation_ids: expected tokens to predict, got empty rows",
         lambda: compressor(zeros(2, 4), continuation_ids=zeros(2, 0))),
        ("continuation_ids: expected 2 rows as input_ids has, got 3",
         lambda: compressor(zeros(2, 4), continuation_ids=zeros(3, 2))),
        ("task: expected one of ae, lm, qa, got 'sum'", lambda: compressor.decode(memory, "sum", zeros(2, 1))),
        ("input_ids: expected 2 rows as the memory has, got 3", lambda: compressor.decode(memory, "lm", zeros(3, 1))),
        (r"targets: expected shape \(2, 3\) as hidden_states has, got \(2, 4\)",
         lambda: token_loss(torch.zeros(2, 3, 4), torch.zeros(5, 4), zeros(2, 4))),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            call()


def test_positions_beyond_the_models_range_are_warned_of():
    compressor = ICAE(tiny_llama(max_position_embeddings=16), chunk=20, ratio=5, lora=None)
    with pytest.warns(UserWarning, match="position IDs reach 20, beyond the model's max_position_embeddings of 16"):
        compressor.encode(torch.zeros(1, 20, dtype=torch.long))


@pytest.mark.parametrize("method", METHODS)
def test_training_after_inference_mode(method):
    compressor = method(tiny_llama(), chunk=6, ratio=3, losses=("ae",), lora=None)
    ids = torch.randint(0, 50, (1, 9))
    with torch.inference_mode():
        compressor.generate(compressor.encode(ids), task="ae", max_new_tokens=9)
    compressor(ids)["loss"].backward()
    assert compressor.memory_embeddings.grad.abs().sum() > 0


def test_a_batch_in_which_nothing_is_asked_has_a_loss_of_0():
    # As in a process's share of a larger one.
    compressor = ICAE(tiny_llama(), chunk=4, ratio=2, losses=("lm",), lora=None)
    loss = compressor(torch.zeros(2, 4, dtype=torch.long), continuation_ids=torch.full((2, 3), -100))["loss"]
    loss.backward()
    assert float(loss.detach()) == 0.0


def decoder_passes(compressor, call):
    """What a call returns, and the tokens of each pass of the decoder in it."""
    passes = []
    handle = compressor.lm.decoder.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    try:
        return call(), passes
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("method", "layout", "lengths", "family"),
    [
        (ICAE, "dpl", (40,), "llama"),
        (FiveHundredX, "epl", (40, 36, 33), "llama"),
        (FiveHundredX, "upl", (40, 36, 33), "mistral"),
        (FiveHundredX, "cpl", (40, 40, 33), "gemma3"),
        (partial(ICAE, match_embeddings=True), "epl", (37, 34), "llama"),
    ],
)
def test_a_long_context_is_encoded_in_parts_to_the_same_memory(method, layout, lengths, family, monkeypatch):
    losses = ("ae", "compression")
    compressor = method(tiny(family), chunk=8, ratio=4, layout=layout, lora=4, losses=losses).eval()
    contexts = [torch.randint(0, compressor.vocabulary, (length,)).tolist() for length in lengths]
    whole, passes = decoder_passes(compressor, lambda: compressor.encode(contexts))
    assert len(passes) == 1
    with torch.no_grad():
        losses = compressor(contexts)
        monkeypatch.setitem(PART, "cpu", 20 * len(lengths))
        for name, loss in compressor(contexts).items():
            torch.testing.assert_close(loss, losses[name], **TOLERANCE)
    memory, passes = decoder_passes(compressor, lambda: compressor.encode(contexts))
    # Two chunks of 8 + 2 a pass; the last is as long as the longest row's rest.
    assert passes == [20, 20, max(lengths) - 32 + 2]
    for ours, other in zip(memory.tensors, whole.tensors, strict=True):
        assert ours.is_contiguous() and not ours.requires_grad
        torch.testing.assert_close(ours, other, **TOLERANCE)
    for name in ("lengths", "context_lengths", "starts"):
        assert getattr(memory, name) == getattr(whole, name)
    assert torch.equal(memory.positions, whole.positions)


def test_contexts_stay_whole_where_parts_would_differ_or_need_a_graph(monkeypatch):
    monkeypatch.setitem(PART, "cpu", 10)

    def passes(compressor, *lengths, **options):
        rows = [[1] * length for length in lengths]
        return len(decoder_passes(compressor, lambda: compressor.encode(rows, **options))[1])

    compressor = FiveHundredX(tiny_llama(), chunk=8, ratio=4, lora=4)
    assert passes(compressor, 40) == 5 and passes(compressor, 40, 39) == 5
    assert passes(compressor, 40, gradient=True) == 1
    assert passes(compressor, 8, 7, 8) == 1, "a chunk each"
    assert passes(compressor, 40, 9) == 1, "rows of different numbers of chunks"
    assert len(decoder_passes(compressor, lambda: compressor([[1] * 40], continuation_ids=[[1, 2]]))[1]) == 3
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    assert passes(FiveHundredX(tiny_llama(rope_parameters=dynamic), chunk=8, ratio=4, lora=4), 40) == 1
