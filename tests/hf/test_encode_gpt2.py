"""Position encodings inside transformers' GPT-2: its dropout, its table, `attach`'s arguments, SeqPE's embeddings."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GPT2LMHeadModel

from gistkit import hf, layouts
from gistkit.nn import (
    ALiBi,
    Learned,
    NoPE,
    PositionEncoding,
    SeqPERegularizer,
)
from tests.helpers import encodings
from tests.helpers.encodings import close, counted
from tests.helpers.models import checkpoint, tiny

HEADS, HEAD_DIM, LAYERS, VOCAB = 4, 12, 2, 50
IDS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


def encoding(name: str, **options: Any) -> PositionEncoding:
    return encodings.encoding(name, heads=HEADS, head_dim=HEAD_DIM, layers=LAYERS, **options).double()


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    return tiny("gpt2", pad_token_id=0, **changes)


def test_dropout_of_attention_s_weights_is_the_models_own() -> None:
    model = gpt2(attn_pdrop=0.4).train()

    def draw() -> Tensor:
        torch.manual_seed(5)
        return model(IDS).logits

    with hf.encode_positions(model, NoPE()):
        found = draw()
        assert not torch.allclose(found, model(IDS).logits)
    torch.nn.init.zeros_(model.transformer.wpe.weight)
    close(found, draw())


def test_the_models_own_table_gives_the_model() -> None:
    model, position = gpt2(), Learned(512, HEADS * HEAD_DIM).double()
    position.load_state_dict({"table": model.transformer.wpe.weight})
    expected = model(IDS).logits
    with hf.encode_positions(model, position):
        close(model(IDS).logits, expected)


def test_generate_does_not_read_each_position_anew() -> None:
    model, position = gpt2(), encoding("seqpe-bias").eval()
    calls = counted(position.encoder)
    with hf.encode_positions(model, position):
        for _ in range(2):
            model.generate(IDS[:1], max_new_tokens=30, do_sample=False)
            assert len(calls) <= 4 and sum(calls) <= 72
            calls.clear()
            position.encoder.tokens.data.mul_(1.5)
        expected = model(IDS).logits
    with hf.encode_positions(model, position):
        close(model(IDS).logits, expected)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("integration", ["sum", "mul", "bias"])
def test_embeddings_of_the_caller_serve_the_model_and_the_regularizer(integration: str) -> None:
    """A training step reads each position once, and its gradients are those of two readings."""
    model, position = gpt2().train(), encoding(f"seqpe-{integration}").train()
    encoder = position.encoder
    regularizer = SeqPERegularizer(encoder, 9, 500, 2, pivots=4, candidates=4, windows=2, shift_rate=0.5)
    step = regularizer.draw(len(IDS), 1)
    parameters, places = [*position.parameters()], step.positions[step.main]
    assert step.shifted.any() and not step.shifted.all()
    with hf.encode_positions(model, position):
        total = loss_of(model(IDS, position_ids=places).logits)
        expected = torch.autograd.grad(total + regularizer.losses(step, encoder(step.positions)).total, parameters)
        calls = counted(encoder)
        encoded = encoder(step.positions)
        loss = loss_of(model(IDS, position_ids=places, embeddings=step.embeddings(encoded)).logits)
        found = torch.autograd.grad(loss + regularizer.losses(step, encoded).total, parameters)
        assert calls == [len(step.positions)]
        close(loss, total)
        for mine, its in zip(found, expected, strict=True):
            close(mine, its)
        # They count, and not what the encoder would say; with a cache those of the new tokens.
        cache = DynamicCache()
        rows = step.embeddings(encoded)
        parts = [
            model(IDS[:, part], embeddings=rows[:, part], **{hf.CACHE: cache}).logits
            for part in (slice(0, 4), slice(4, 9))
        ]
        close(loss_of(torch.cat(parts, 1)), total)


def loss_of(logits: Tensor) -> Tensor:
    # Transformers' own is in single precision.
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def test_what_layers_add_is_dropped_in_training_as_the_model_says() -> None:
    model = gpt2(resid_pdrop=1.0).train()
    with hf.encode_positions(model, encoding("seqpe-bias")):
        logits = model(IDS).logits
    close(logits, model.lm_head(model.transformer.ln_f(model.transformer.wte(IDS))))


@pytest.mark.parametrize("name", ["alibi", "seqpe-bias", "rope-1e4"])
def test_attachs_arguments_pass_through(name: str) -> None:
    """A plan with position IDs of its own, a bias of keys, and kept keys as another pass's memory."""
    model = gpt2()
    plan = layouts.causal(9).compile()
    with hf.encode_positions(model, encoding(name)):
        whole = model(IDS).logits
        close(model(IDS, plan=plan).logits, whole)
        hidden = torch.zeros(1, 1, 9, dtype=torch.float64)
        hidden[..., 0] = -torch.inf
        # As without the first token, at the positions of the others.
        rest = model(IDS[:, 1:], position_ids=torch.arange(1, 9)[None]).logits
        close(model(IDS, key_bias=hidden).logits[:, 1:], rest)
        # A list has a bias of the first keys for each layer.
        first = [hidden[..., :2]] * LAYERS
        close(model(IDS, key_bias=first).logits[:, 1:], rest)
        keep = hf.KeptKeys(slice(None))
        model(IDS[:, :5], keep=keep, use_cache=False)
        options = {"memory": keep.layers, "position_ids": torch.arange(5, 9)[None], "use_cache": False}
        if name == "alibi":
            with pytest.raises(ValueError, match="memory: expected none with ALiBi"):
                model(IDS[:, 5:], **options)
            with pytest.raises(ValueError, match=f"{hf.CACHE}: expected a key of each token.*got 5 keys for 8 tokens"):
                model(IDS[:, 5:], **{hf.CACHE: hf.memory_cache(keep.layers, 8)})
        else:
            close(model(IDS[:, 5:], **options).logits, whole[:, 5:])


def test_what_is_refused() -> None:
    model = gpt2()

    def inside(position: PositionEncoding, its: Any = model, **call: Any) -> Any:
        with hf.encode_positions(its, position):
            return its(IDS, **call)

    with pytest.raises(TypeError, match=r"model: expected a transformers GPT-2, .*, got Phi3Model"):
        inside(NoPE(), tiny("phi3"))
    mask = torch.ones_like(IDS)
    mask[0, 4] = 0
    with pytest.raises(ValueError, match="attention_mask: expected padding only at the ends of rows"):
        inside(NoPE(), attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask: expected \[2, 9\], got shape \(2, 8\)"):
        inside(NoPE(), attention_mask=mask[:, 1:])
    with pytest.raises(ValueError, match="embeddings: expected none for ALiBi, which has no encoder"):
        inside(ALiBi(HEADS), embeddings=torch.zeros(9, 16))
    with pytest.raises(ValueError, match=r"embeddings: expected \[9, 16\] or \[B, 9, 16\], got shape \(8, 16\)"):
        inside(encoding("seqpe-bias"), embeddings=torch.zeros(8, 16))
    with hf.encode_positions(model, ALiBi(HEADS)):
        cache = getattr(model(IDS[:, :5]), hf.CACHE)
        with pytest.raises(ValueError, match=r"position_ids: expected to grow by 1 .* got \[\[5, 7, 8, 9\]\]"):
            model(IDS[:, 5:], **{hf.CACHE: cache}, position_ids=torch.tensor([[5, 7, 8, 9]]))
    with hf.encode_positions(model, Learned(4, HEADS * HEAD_DIM).double()):
        cache = getattr(model(IDS[:, :4]), hf.CACHE)
        with pytest.raises(ValueError, match="below the table's length of 4 with a cache"):
            model(IDS[:, 4:], **{hf.CACHE: cache})
    checkpoint(model.train(), use_reentrant=True)
    with pytest.raises(ValueError, match="position: expected gradient checkpointing with use_reentrant=False"):
        inside(NoPE())
