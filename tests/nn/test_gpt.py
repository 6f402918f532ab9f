"""GPT against a dense one written out here and against transformers' GPT-2, and its cache against full passes."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from gistkit import Plan
from gistkit.nn import (
    GPT,
    TEXT_ENCODINGS,
    Block,
    KVCache,
    Learned,
    NoPE,
    Pass,
    PositionEncoding,
    RoPE,
    position_encoding,
)
from tests.helpers import encodings
from tests.helpers.encodings import close, counted

pytestmark = pytest.mark.usefixtures("double")
VOCAB, DIM, LAYERS, HEADS, LENGTH = 40, 24, 2, 3, 10
HEAD_DIM = DIM // HEADS
STARTS = torch.arange(LENGTH) + torch.tensor([[0], [3], [117]])


def encoding(name: str, **options: Any) -> PositionEncoding:
    return encodings.encoding(name, heads=HEADS, head_dim=HEAD_DIM, layers=LAYERS, **options)


def gpt(position: PositionEncoding, **options: Any) -> GPT:
    model = GPT(VOCAB, DIM, LAYERS, HEADS, position, **options)
    for parameter in model.parameters():
        # At their start the weights are too small for attention to tell keys apart.
        if parameter.dim() == 2 and parameter.shape[0] != VOCAB:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def ids(batch: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (batch, LENGTH))


def dense(model: GPT, tokens: Tensor, positions: Tensor) -> Tensor:
    """The tiny form with whole matrices: RMSNorm, SwiGLU, tied, and each head's N x N logits under a causal mask."""
    rms = lambda x, weight: x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight  # noqa: E731
    x = model.position.embed(model.tokens.weight[tokens], positions)
    prepared = model.position.prepare(positions)
    bias = model.position.key_bias(positions, torch.float64)
    batch, count, _ = x.shape
    for i, block in enumerate(model.blocks):
        projected = rms(x, block.norm_1.weight) @ block.attention.qkv.weight.T
        q, k, v = (p.view(batch, count, HEADS, HEAD_DIM).transpose(1, 2) for p in projected.split(DIM, -1))
        q, k = model.position(q, k, prepared, i)
        scores = q @ k.mT / math.sqrt(HEAD_DIM)
        if bias is not None:
            scores = scores + bias[:, :, None]
        mixed = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ block.attention.out.weight.T
        gate, up = (rms(x, block.norm_2.weight) @ block.network.gate_up.weight.T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ block.network.down.weight.T
    return rms(x, model.norm.weight) @ model.tokens.weight.T


@pytest.mark.parametrize("name", TEXT_ENCODINGS)
def test_the_tiny_form_with_every_encoding(name: str) -> None:
    model, tokens = gpt(encoding(name)), ids()
    for positions in (torch.arange(LENGTH), STARTS):
        close(model(tokens, positions), dense(model, tokens, positions))
    close(model(tokens), dense(model, tokens, torch.arange(LENGTH)))
    logits = model(tokens)
    assert logits.shape == (3, LENGTH, VOCAB)
    logits.pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().any() for p in model.parameters())


@pytest.mark.parametrize("name", [*TEXT_ENCODINGS, "seqpe-bias per layer", "seqpe-mul per layer"])
def test_tokens_after_a_cache_are_those_of_a_full_pass(name: str) -> None:
    name, _, layers = name.partition(" ")
    model, tokens = gpt(encoding(name, **({"projection": "layer"} if layers else {}))), ids()
    for positions in (torch.arange(LENGTH), STARTS):
        expected, cache, parts = model(tokens, positions), KVCache(), []
        for at in range(0, LENGTH, 3):
            rows = slice(at, at + 3)
            # Afterwards the cache knows which positions come next.
            given = positions[..., rows] if at == 0 else None
            parts.append(model(tokens[:, rows], given, cache=cache))
        close(torch.cat(parts, 1), expected)
        assert len(cache) == LENGTH


@pytest.mark.parametrize("held", [0, 4])
def test_a_pass_that_fails_leaves_the_cache_as_it_was(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, cache = gpt(encoding("alibi")), ids(2), KVCache()
    if held:
        model(tokens[:, :held], cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.blocks[1], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids(2 if held else 3)[:, held:], cache=cache)
    assert len(cache) == held
    close(model(tokens[:, held:], cache=cache), model(tokens)[:, held:])


def test_positions_that_leap_are_kept_with_their_keys() -> None:
    positions = torch.tensor([[5, 9, 9, 2, 100, 3, 0, 1, 7, 50]])
    for name in TEXT_ENCODINGS:
        model, tokens, cache = gpt(encoding(name)), ids(1), KVCache()
        parts = [model(tokens[:, i : i + 1], positions[:, i : i + 1], cache=cache) for i in range(LENGTH)]
        close(torch.cat(parts, 1), model(tokens, positions))
        assert torch.equal(cache.positions, positions)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["alibi", "seqpe-bias", "seqpe-mul", "rope-1e4", "learned"])
def test_generate_takes_the_likeliest_token_each_time(name: str) -> None:
    model, tokens = gpt(encoding(name)), ids(2)
    expected, positions = tokens, STARTS[1:]
    for _ in range(5):
        expected = torch.cat([expected, model(expected, positions)[:, -1:].argmax(-1)], 1)
        positions = torch.cat([positions, positions[:, -1:] + 1], 1)
    assert torch.equal(model.generate(tokens, 5, STARTS[1:]), expected)
    assert torch.equal(model.generate(tokens, 0), tokens)


def test_generate_reads_all_positions_at_once() -> None:
    model, tokens = gpt(encoding("seqpe-bias")).eval(), ids(2)
    calls = counted(model.position.encoder)
    for starts in (None, STARTS[:2], 900 + STARTS[0]):
        model.generate(tokens, 50, starts)
    # A prompt of 10 and 49 that follow, once from 0 and 3.
    assert calls == [59, 62, 59]
    # What was kept ended with the call.
    model.position.encoder.tokens.data.mul_(1.5)
    close(model(tokens), dense(model, tokens, torch.arange(LENGTH)))
    assert not model.position.encoder._kept


def test_embeddings_of_the_caller_are_used() -> None:
    model, tokens = gpt(encoding("seqpe-bias")), ids()
    encoder = model.position.encoder
    e = encoder(torch.cat([STARTS.flatten(), torch.arange(50)]))[: STARTS.numel()].view(3, LENGTH, -1)
    # They count, and not what the encoder would say.
    close(model(tokens, STARTS + 1, embeddings=e), model(tokens, STARTS))
    cache = KVCache()
    parts = [model(tokens[:, rows], embeddings=e[:, rows], cache=cache) for rows in (slice(0, 4), slice(4, LENGTH))]
    close(torch.cat(parts, 1), model(tokens, STARTS))


def test_a_stretched_table_serves_a_cache_with_its_extent_alone() -> None:
    position = Learned(4, DIM)
    model, tokens = gpt(position), ids()
    model(tokens[:, :4], cache=(cache := KVCache()))
    with pytest.raises(ValueError, match=r"positions: expected below the table's length of 4 with a cache.* got 9"):
        model(tokens[:, 4:], cache=cache)
    position.extent = LENGTH
    cache = KVCache()
    close(torch.cat([model(tokens[:, :4], cache=cache), model(tokens[:, 4:], cache=cache)], 1), model(tokens))
    position.extent = None
    close(model(tokens), dense(model, tokens, torch.arange(LENGTH)))


def test_a_plan_says_who_sees_whom() -> None:
    """Rows padded on the left, whose queries see no padding, are what they are alone."""
    model, tokens, pad = gpt(encoding("seqpe-bias")), ids(2), torch.tensor([0, 4])
    end = torch.arange(1, LENGTH + 1).expand(2, -1)
    spans = torch.stack([pad[:, None].expand_as(end).minimum(end), end], -1)[:, :, None].to(torch.int32)
    positions = (torch.arange(LENGTH) - pad[:, None]).clamp(min=0)
    logits = model(tokens, positions, plan=Plan.from_spans(spans, LENGTH))
    close(logits[:1], model(tokens[:1]))
    close(logits[1:, 4:], model(tokens[1:, 4:]))


def same_weights(theirs: GPT2LMHeadModel) -> dict[str, Tensor]:
    """The weights of transformers' GPT-2 under the names of `GPT`, but for its positions."""
    state = {"tokens.weight": theirs.transformer.wte.weight, "head.weight": theirs.transformer.wte.weight}
    names = {"norm_1": "ln_1", "norm_2": "ln_2", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
    names |= {"network.up": "mlp.c_fc", "network.down": "mlp.c_proj"}
    for i, block in enumerate(theirs.transformer.h):
        for our, their in names.items():
            its = block.get_submodule(their)
            state[f"blocks.{i}.{our}.weight"] = its.weight.T if its.weight.dim() == 2 else its.weight
            state[f"blocks.{i}.{our}.bias"] = its.bias
    return state | {f"norm.{part}": getattr(theirs.transformer.ln_f, part) for part in ("weight", "bias")}


@pytest.mark.parametrize("learned", [True, False])
def test_gpt2s_form_is_that_of_transformers(learned: bool) -> None:
    config = GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=DIM, n_layer=LAYERS, n_head=HEADS)
    theirs = GPT2LMHeadModel(config).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    position: PositionEncoding = Learned(16, DIM) if learned else NoPE()
    ours = GPT(VOCAB, DIM, LAYERS, HEADS, position, style="gpt2").eval()
    state = same_weights(theirs)
    if learned:
        state["position.table"] = theirs.transformer.wpe.weight
    else:
        torch.nn.init.zeros_(theirs.transformer.wpe.weight)
    ours.load_state_dict(state)
    tokens = ids()
    close(ours(tokens), theirs(tokens).logits)


def test_gpt2s_size_and_start() -> None:
    with torch.device("meta"):
        model = GPT(50257, 768, 12, 12, NoPE(), style="gpt2")
    # 124,439,808 of GPT-2 less 1024 learned positions.
    assert sum(p.numel() for p in model.parameters()) == 124_439_808 - 1024 * 768
    model = GPT(500, DIM, 12, HEADS, encoding("seqpe-bias", std=0.7), style="gpt2")
    assert model.blocks[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.blocks[0].attention.out.weight.std().item() == pytest.approx(0.02 / math.sqrt(24), rel=0.2)
    assert not model.blocks[0].attention.qkv.bias.any()
    # The encoding starts as it was made.
    assert model.position.projections[0].weight.std().item() == pytest.approx(0.7, rel=0.1)


def test_dropout_is_for_training_alone() -> None:
    model, tokens = GPT(VOCAB, DIM, LAYERS, HEADS, NoPE(), dropout=0.5), ids()
    assert not torch.allclose(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("name", ["alibi", "seqpe-bias"])
def test_dropout_of_attention_s_weights_is_for_training_alone(name: str) -> None:
    model, plain = (gpt(encoding(name), attention_dropout=rate) for rate in (0.3, 0.0))
    plain.load_state_dict(model.state_dict())
    tokens = ids()[:1]
    close(model.eval()(tokens), plain.eval()(tokens))
    # The first token sees itself alone, which each head of each layer keeps or drops.
    found = model.train()(tokens.expand(1000, -1))
    assert not torch.allclose(found[0], found[1])
    first = found[:, 0].unique(dim=0)
    assert len(first) <= 2 ** (LAYERS * HEADS)
    assert len(found[:, -1].unique(dim=0)) > len(first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rope-1e4", "seqpe-bias"])
def test_a_block_compiles_whole(name: str) -> None:
    torch._dynamo.reset()
    position = encoding(name)
    block, positions = Block(DIM, HEADS, 0, style="llama"), torch.arange(LENGTH)
    spans = torch.stack([torch.zeros(LENGTH), torch.arange(1, LENGTH + 1)], -1).to(torch.int32)[None, :, None]
    bias = position.key_bias(positions, torch.float64)
    shared = Pass(position, position.prepare(positions), Plan(spans.contiguous(), LENGTH), bias)
    hidden = torch.randn(2, LENGTH, DIM, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    out, expected = compiled(hidden, shared), block(hidden, shared)
    close(out, expected)
    parameters = [hidden, *block.parameters()]
    for ours, its in zip(
        torch.autograd.grad(out.pow(2).sum(), parameters, retain_graph=True),
        torch.autograd.grad(expected.pow(2).sum(), parameters),
        strict=True,
    ):
        close(ours, its)


@pytest.mark.slow
def test_a_model_compiles_whole() -> None:
    torch._dynamo.reset()
    model, tokens = gpt(encoding("rope-1e4")), ids()
    close(torch.compile(model, fullgraph=True, backend="aot_eager")(tokens), model(tokens))


def test_what_is_refused() -> None:
    model = gpt(RoPE(HEAD_DIM))
    with pytest.raises(ValueError, match=r"input_ids: expected \[B, N\], got shape \(10,\)"):
        model(ids()[0])
    with pytest.raises(ValueError, match=r"positions: expected \[10\] or \[B, 10\], got shape \(9,\)"):
        model(ids(), torch.arange(9))
    with pytest.raises(ValueError, match="max_new_tokens: expected at least 0, got -1"):
        model.generate(ids(), -1)
    with pytest.raises(TypeError, match="position: expected a PositionEncoding, got str"):
        GPT(VOCAB, DIM, 1, HEADS, "rope")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"position: expected one with axes=1 and extra_tokens=0, got .* axes=2"):
        GPT(VOCAB, DIM, 1, HEADS, position_encoding("rope-2d", heads=HEADS, head_dim=HEAD_DIM, layers=1))
    with pytest.raises(ValueError, match="dim: expected a multiple of 5 heads, got 24"):
        GPT(VOCAB, DIM, 1, 5, NoPE())
    with pytest.raises(ValueError, match="style: expected llama, gpt2, vit, got 'bert'"):
        GPT(VOCAB, DIM, 1, HEADS, NoPE(), style="bert")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attention_dropout: expected at least 0 and below 1, got 1\.0"):
        GPT(VOCAB, DIM, LAYERS, HEADS, NoPE(), attention_dropout=1.0)
    cache = KVCache()
    model(ids(2), cache=cache)
    with pytest.raises(ValueError, match="cache: expected a batch of 2 as it holds, got 3"):
        model(ids(3), cache=cache)
