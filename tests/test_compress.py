"""ICAE and 500xCompressor against a chunk-by-chunk form on transformers' own eager attention."""

import pytest
import torch
from hf_models import double_angles, tiny_llama
from torch.nn import functional as F
from transformers import DynamicCache

from gistkit.compress import ICAE, CompressionHead, FiveHundredX, token_loss
from gistkit.compress.losses import segment_targets

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
METHODS = [ICAE, FiveHundredX]


def spread(first, last, memory):
    """Uniform ids by the paper's Algorithm 1, in exact fractions, ties to even."""
    from fractions import Fraction

    ratio = Fraction(last - first + 1, memory)
    return [round(first + (ratio - 1) / 2 + ratio * slot) for slot in range(memory)]


def plain_positions(scheme, carrier, context, chunk, memory, task, text):
    """Position ids of Tables 1-3 written out: per chunk (context, memory), then decoder (memory, task and text)."""
    starts = range(0, context, chunk)
    total = memory * len(starts)
    encoder = []
    for start in starts:
        stop = min(start + chunk, context)
        if scheme in ("dpl", "cpl"):
            encoder.append((list(range(stop - start)), list(range(stop - start, stop - start + memory))))
        else:
            encoder.append((list(range(start + 1, stop + 1)), spread(start + 1, stop, memory)))
    if scheme in ("epl", "cpl"):
        # Embeddings take the uniform ids; cached keys keep theirs, and `ids` is not used.
        ids = [i for start in starts for i in spread(start + 1, min(start + chunk, context), memory)]
        first = 0 if task == "ae" else context
    else:
        ids = list(range(total)) if carrier == "embedding" else None
        first = total
    return encoder, ids, list(range(first, first + 1 + text))


def plain_decode(compressor, ids, task, tokens):
    """Hidden states at the task token and `tokens`: one plain forward for each chunk, one for the decoder."""
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
            out = model.model(
                inputs_embeds=torch.cat([embed(part), slots], 1),
                position_ids=position_ids,
                attention_mask=ones(position_ids.shape[1]),
                past_key_values=cache,
                use_cache=True,
            )
            outputs.append(out.last_hidden_state[:, -memory:])
            caches.append([(layer.keys[:, :, -memory:], layer.values[:, :, -memory:]) for layer in cache.layers])
        task_embedding = compressor.task_embeddings["ae" if task == "ae" else "lm"].double().expand(batch, 1, -1)
        inputs, position_ids, cache = (
            torch.cat([task_embedding, embed(tokens)], 1),
            rest,
            DynamicCache(config=model.config),
        )
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
            past_key_values=cache,
            use_cache=True,
        )
    return out.last_hidden_state[:, -1 - tokens.shape[1] :]


@pytest.mark.parametrize("scheme", ["dpl", "upl", "epl", "cpl"])
@pytest.mark.parametrize("task", ["ae", "lm", "qa"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("context", "chunk", "ratio"), [(10, 10, 5), (23, 10, 4)])
def test_decoding_equals_plain_forwards(method, scheme, task, context, chunk, ratio):
    compressor = method(tiny_llama(), chunk=chunk, ratio=ratio, layout=scheme)
    ids, tokens = torch.randint(0, 50, (2, context)), torch.randint(0, 50, (2, 7))
    ours = compressor.decode(compressor.encode(ids), task, tokens)
    torch.testing.assert_close(ours, plain_decode(compressor, ids, task, tokens), **TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_losses_and_gradients(method):
    compressor = method(tiny_llama(), chunk=8, ratio=4, losses=("ae", "lm", "compression")).double()
    ids, after = torch.randint(0, 50, (2, 12)), torch.randint(0, 50, (2, 5))
    losses = compressor(ids, after)
    head = compressor.model.lm_head
    for name, targets in (("ae", ids), ("lm", after)):
        logits = head(plain_decode(compressor, ids, name, targets[:, :-1]))
        expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        torch.testing.assert_close(losses[name], expected, rtol=1e-6, atol=1e-6)
    mean = (losses["ae"] + losses["lm"] + losses["compression"]) / 3
    torch.testing.assert_close(losses["loss"], mean)
    losses["loss"].backward()
    for name, parameter in compressor.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("method", METHODS)
def test_generate_is_greedy_and_leaves_the_memory_alone(method):
    compressor = method(tiny_llama(), chunk=8, ratio=4)
    memory = compressor.encode(torch.randint(0, 50, (2, 12)))
    prompt = torch.randint(0, 50, (2, 3))
    before = [tensor.clone() for layer in memory.layers or ((memory.embeddings,),) for tensor in layer]
    answer = compressor.generate(memory, 5, task="qa", prompt_ids=prompt)
    tokens = prompt
    for _ in range(5):
        hidden = compressor.decode(memory, "qa", tokens)
        tokens = torch.cat([tokens, compressor.model.lm_head(hidden[:, -1:]).argmax(-1)], 1)
    assert torch.equal(answer, tokens[:, 3:])
    assert torch.equal(compressor.generate(memory, 5, task="qa", prompt_ids=prompt), answer)
    after = [tensor for layer in memory.layers or ((memory.embeddings,),) for tensor in layer]
    assert all(map(torch.equal, before, after))


def test_segment_targets_are_the_tokens_around_each_memory_id():
    # Ids 2 and 5 own tokens 1-3 and 4-6.
    assert segment_targets(torch.arange(1, 7)[None], 6, 2).tolist() == [[[1, 2, 3], [4, 5, 6]]]
    # The second chunk is short: two tokens for two memory tokens.
    assert segment_targets(torch.arange(1, 7)[None], 4, 2)[0].tolist() == [[1, 2], [3, 4], [5, -100], [6, -100]]
    assert segment_targets(torch.arange(1, 8)[None], 7, 3)[0].tolist() == [[1, 2, -100], [3, 4, -100], [5, 6, 7]]


def test_compression_head_predicts_each_offset():
    head, hidden, weight = CompressionHead(6, 3), torch.randn(2, 4, 6), torch.randn(11, 6)
    targets = torch.randint(0, 11, (2, 4, 3))
    targets[0, 0, 2] = -100
    maps = head.projection.weight.view(3, 6, 6)
    logits = torch.einsum("bmd,oed,ve->bmov", hidden, maps, weight)
    expected = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(head(hidden, weight, targets), expected)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_token_loss_is_cross_entropy_in_chunks(chunk):
    hidden, weight = torch.randn(2, 5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets = torch.randint(0, 9, (2, 5))
    targets[1, 2] = -100
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), ignore_index=-100)
    ours = token_loss(hidden, weight, targets, chunk=chunk)
    torch.testing.assert_close(ours, expected)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(a, b)
    assert token_loss(hidden, weight, torch.full_like(targets, -100)) == 0


def test_errors_say_what_was_expected():
    model = tiny_llama()
    for settings, message in [
        ({"chunk": 0}, "chunk: expected at least 1 token, got 0"),
        ({"ratio": 0.5}, "ratio: expected a number >= 1, got 0.5"),
        ({"ratio": float("nan")}, "ratio: expected a number >= 1, got nan"),
        ({"losses": ("ae", "kl")}, r"losses: expected some of ae, lm, compression, got \('ae', 'kl'\)"),
        ({"layout": "xyz"}, "xyz"),
    ]:
        with pytest.raises(ValueError, match=message):
            ICAE(model, **settings)
    compressor = ICAE(model, chunk=4, ratio=2, losses=("lm",))
    with pytest.raises(ValueError, match=r"input_ids: expected \[B, p\] with p >= 1, got shape \(2, 0\)"):
        compressor.encode(torch.zeros(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="continuation_ids: expected"):
        compressor(torch.zeros(2, 4, dtype=torch.long))
    memory = compressor.encode(torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="task: expected one of ae, lm, qa, got 'sum'"):
        compressor.decode(memory, "sum", torch.zeros(2, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="input_ids: expected 2 rows as the memory has, got 3"):
        compressor.decode(memory, "lm", torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="prompt_ids: expected 2 rows as the memory has, got 3"):
        compressor.generate(memory, 2, prompt_ids=torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="max_new_tokens: expected at least 1, got 0"):
        compressor.generate(memory, 0)
    with pytest.raises(ValueError, match=r"targets: expected shape \(2, 3\) as hidden has, got \(2, 4\)"):
        token_loss(torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize("method", METHODS)
def test_training_after_inference_mode(method):
    compressor = method(tiny_llama(), chunk=7, ratio=3)
    ids = torch.randint(0, 50, (1, 9))
    with torch.inference_mode():
        compressor.generate(compressor.encode(ids), ids.shape[1])
    compressor(ids)["loss"].backward()
    assert compressor.memory_embeddings.grad.abs().sum() > 0


@pytest.mark.parametrize("method", METHODS)
def test_gradient_checkpointing_is_refused(method):
    compressor = method(tiny_llama(), chunk=7, ratio=3).train()
    enable = getattr(compressor.model, "activation_checkpointing_enable", None)
    (enable or compressor.model.gradient_checkpointing_enable)()
    with pytest.raises(ValueError, match="model: expected gradient checkpointing to be off"):
        compressor(torch.randint(0, 50, (1, 9)))


def test_a_memory_of_another_kind_is_refused():
    model = tiny_llama()
    memory = ICAE(model, chunk=8, ratio=4).encode(torch.randint(0, 50, (1, 8)))
    for reader in (FiveHundredX(model, chunk=8, ratio=4), ICAE(model, chunk=8, ratio=4, layout="dpl")):
        with pytest.raises(
            ValueError, match=r"memory: expected one made with .* got one made with \('embedding', 8, 2"
        ):
            reader.generate(memory, 2)
