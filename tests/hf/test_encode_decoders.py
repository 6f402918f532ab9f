"""Position encodings inside GPT-2 and decoders built like a Llama: their formulas, caches, padding, training."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from gistkit import hf, layouts
from gistkit.nn import (
    TEXT_ENCODINGS,
    ALiBi,
    Learned,
    NoPE,
    PoPE,
    PositionEncoding,
    RoPE2D,
    SeqPE,
    SeqPEPositions,
    SeqPERegularizer,
)
from tests.helpers import encodings
from tests.helpers.encodings import close, counted
from tests.helpers.models import checkpoint, double_angles, tiny
from tests.helpers.tiers import mostly_slow

HEADS, KEY_HEADS, HEAD_DIM, LAYERS = 4, 2, 12, 2
IDS = torch.randint(1, 50, (2, 9), generator=torch.Generator().manual_seed(1))
ROWS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11], [90, 9, 0, 1, 2, 3, 4, 7, 2]])
# Without windows, which no encoding is told of.
OPEN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "gpt2": {},
}
CASES = [(family, name) for family in OPEN for name in TEXT_ENCODINGS]
QUICK = {(family, name) for family in ("llama", "gpt2") for name in TEXT_ENCODINGS}
QUICK |= {("qwen3", "seqpe-bias"), ("qwen2", "seqpe-mul")}


def encoding(name: str, **options: Any) -> PositionEncoding:
    options = {"key_heads": KEY_HEADS} | options
    return encodings.encoding(name, heads=HEADS, head_dim=HEAD_DIM, layers=LAYERS, **options).double()


def inside(family: str, name: str, **options: Any) -> tuple[Any, PositionEncoding]:
    """A model and an encoding of its heads; "gpt2" has as many key heads as heads, and no RoPE."""
    if family == "gpt2":
        return tiny("gpt2", pad_token_id=0), encoding(name, key_heads=HEADS, **options)
    return tiny(family, pad_token_id=0, head_dim=HEAD_DIM, **OPEN[family]), encoding(name, **options)


def by_formula(
    model: Any, name: str, position: PositionEncoding, positions: Tensor | None = None, rope: bool = False
) -> Tensor:
    """The model's own layers without its positions, or with its RoPE, with dense attention and a formula in it."""
    positions = torch.arange(IDS.shape[1]).expand_as(IDS) if positions is None else positions
    embedded = model.get_input_embeddings()(IDS)
    embedded = embedded + encodings.added(name, position, positions, embedded.shape[-1])
    # At position 0 RoPE turns nothing.
    own = positions if rope else torch.zeros_like(positions)
    if model.config.model_type == "gpt2":
        embedded = embedded - model.transformer.wpe(own).detach()
    with encodings.written_out(model, name, position, positions), double_angles(model):
        return model(inputs_embeds=embedded, position_ids=own, use_cache=False).logits


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_logits_are_those_of_the_formulas(family: str, name: str) -> None:
    model, position = inside(family, name)
    for positions in (None, ROWS):
        with hf.encode_positions(model, position):
            found = model(IDS, position_ids=positions).logits
        close(found, by_formula(model, name, position, positions))


@pytest.mark.parametrize("name", mostly_slow(TEXT_ENCODINGS, "nope", "learned", "alibi", "seqpe-bias"))
def test_beside_the_models_own_rope(name: str) -> None:
    model, position = inside("llama", name)
    with hf.encode_positions(model, position, rope=True):
        found = model(IDS, position_ids=ROWS).logits
    close(found, by_formula(model, name, position, ROWS, rope=True))
    if name == "nope":
        with hf.attach(model), hf.encode_positions(model, position, rope=True):
            found = model(IDS).logits
        with hf.attach(model):
            assert torch.equal(found, model(IDS).logits)


def test_each_layer_may_have_its_projection() -> None:
    model, position = inside("llama", "seqpe-sum", projection="layer")
    with hf.encode_positions(model, position):
        found = model(IDS).logits
    close(found, by_formula(model, "seqpe-sum", position))


@pytest.mark.parametrize("name", mostly_slow(TEXT_ENCODINGS, "sinusoidal", "alibi", "seqpe-bias"))
@pytest.mark.parametrize(("family", "rope"), [("llama", False), ("llama", True), ("gpt2", False)])
def test_passes_in_chunks_are_one_pass(family: str, rope: bool, name: str) -> None:
    (model, position), cache = inside(family, name), DynamicCache()
    with hf.encode_positions(model, position, rope=rope):
        whole = model(IDS).logits
        parts = [model(part, **{hf.CACHE: cache}).logits for part in IDS.split([4, 1, 4], 1)]
    close(torch.cat(parts, 1), whole)
    wide, heads = 2 if name in ("pope", "seqpe-bias") else 1, HEADS if family == "gpt2" else KEY_HEADS
    assert cache.layers[0].keys.shape == (2, heads, 9, wide * HEAD_DIM)
    assert cache.layers[0].values.shape == (2, heads, 9, HEAD_DIM)


@pytest.mark.parametrize("name", mostly_slow(TEXT_ENCODINGS, "learned", "rope-1e4", "alibi", "seqpe-bias"))
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generate_with_a_cache_without_one_and_padded(family: str, name: str) -> None:
    """Greedy and by beams, each row as it is alone."""
    model, position = inside(family, name)
    settings = {"max_new_tokens": 5, "do_sample": False}
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    with hf.encode_positions(model, position):
        cached = model.generate(IDS, attention_mask=mask, **settings)
        assert torch.equal(cached, model.generate(IDS, attention_mask=mask, use_cache=False, **settings))
        for row, start in ((0, 0), (1, 4)):
            alone = model.generate(IDS[row : row + 1, start:], attention_mask=mask[row : row + 1, start:], **settings)
            assert torch.equal(cached[row : row + 1, start:], alone)
        beams = model.generate(IDS, attention_mask=mask, num_beams=3, **settings)
        assert torch.equal(beams, model.generate(IDS, attention_mask=mask, num_beams=3, use_cache=False, **settings))
        # Each new token is the choice of a pass over all before it.
        assert torch.equal(cached[:1, 9:], model(cached[:1, :-1]).logits[:, 8:].argmax(-1))


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "seqpe-mul"), *(("gpt2", name) for name in ("alibi", "seqpe-bias", "sinusoidal"))]
)
def test_padding_at_either_end_changes_nothing(family: str, name: str) -> None:
    model, position = inside(family, name)
    padded, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for row, (start, count) in enumerate(((0, 9), (3, 9), (12, 0))):
        padded[row, start : start + count], mask[row, start : start + count] = IDS[row % 2, :count], 1
    with hf.encode_positions(model, position):
        logits = model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        alone = model(IDS).logits
    close(logits[0, :9], alone[0])
    close(logits[1, 3:], alone[1])
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["seqpe-bias", "seqpe-mul", "learned"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_training_has_the_gradients_of_the_formulas(family: str, name: str) -> None:
    """Also with gradient checkpointing of two passes, the first of which is run again after the second."""
    model, position = (each.train() for each in inside(family, name))
    parameters = [*position.parameters(), *(p for n, p in model.named_parameters() if "wpe" not in n)]
    expected = torch.autograd.grad(
        by_formula(model, name, position).square().mean() + by_formula(model, name, position, ROWS).square().mean(),
        parameters,
    )
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint(model, use_reentrant=False)
        with hf.encode_positions(model, position):
            one, two = model(IDS).logits, model(IDS, position_ids=ROWS).logits
            found = torch.autograd.grad(one.square().mean() + two.square().mean(), parameters)
        for ours, its in zip(found, expected, strict=True):
            close(ours, its)
            assert ours.abs().any()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_model_is_left_as_it_was(family: str) -> None:
    model, position = inside(family, "seqpe-bias")
    before, implementation = model(IDS).logits, model.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), hf.encode_positions(model, position, rope=family == "llama"):
        assert not torch.allclose(model(IDS).logits, before)
        raise RuntimeError("inside")
    assert torch.equal(model(IDS).logits, before) and model.config._attn_implementation == implementation
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())
    assert "generate" not in vars(model)


def test_a_peft_model_has_its_adapters_and_the_encoding() -> None:
    peft = pytest.importorskip("peft")
    model, position = inside("llama", "seqpe-bias")
    lora = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    )
    lora.double().eval()
    with hf.encode_positions(lora, position):
        found = lora(IDS).logits
        assert lora.generate(input_ids=IDS, max_new_tokens=2).shape == (2, 11)
    merged = lora.merge_and_unload()
    close(found, by_formula(merged, "seqpe-bias", position))


def test_dropout_of_attention_s_weights_is_the_models_own() -> None:
    model = tiny("gpt2", attn_pdrop=0.4).train()

    def draw() -> Tensor:
        torch.manual_seed(5)
        return model(IDS).logits

    with hf.encode_positions(model, NoPE()):
        found = draw()
        assert not torch.allclose(found, model(IDS).logits)
    torch.nn.init.zeros_(model.transformer.wpe.weight)
    close(found, draw())


def test_the_models_own_table_gives_the_model() -> None:
    model, position = tiny("gpt2"), Learned(512, HEADS * HEAD_DIM).double()
    position.load_state_dict({"table": model.transformer.wpe.weight})
    expected = model(IDS).logits
    with hf.encode_positions(model, position):
        close(model(IDS).logits, expected)


def test_generate_does_not_read_each_position_anew() -> None:
    model, position = inside("gpt2", "seqpe-bias")
    position.eval()
    calls = counted(position.encoder)
    with hf.encode_positions(model, position):
        for _ in range(2):
            model.generate(IDS[:1], max_new_tokens=30, do_sample=False)
            assert len(calls) <= 4 and sum(calls) <= 72
            calls.clear()
            position.encoder.tokens.data.mul_(1.5)
        expected = model(IDS).logits
    close(expected, by_formula(model, "seqpe-bias", position))
    assert "generate" not in vars(model)


@pytest.mark.parametrize("integration", ["sum", "mul", "bias"])
def test_embeddings_of_the_caller_serve_the_model_and_the_regularizer(integration: str) -> None:
    """A training step reads each position once, and its gradients are those of two readings."""
    model, position = (each.train() for each in inside("gpt2", f"seqpe-{integration}"))
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
    model = tiny("gpt2", resid_pdrop=1.0).train()
    with hf.encode_positions(model, encoding("seqpe-bias", key_heads=HEADS)):
        logits = model(IDS).logits
    close(logits, model.lm_head(model.transformer.ln_f(model.transformer.wte(IDS))))


@pytest.mark.parametrize("name", ["alibi", "seqpe-bias", "rope-1e4"])
def test_attachs_arguments_pass_through(name: str) -> None:
    """A plan with position IDs of its own, a bias of keys, and kept keys as another pass's memory."""
    model, position = inside("gpt2", name)
    plan = layouts.causal(9).compile()
    with hf.encode_positions(model, position):
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


class Leaves(hf.KeptKeys):
    def leave(self, *args: Any) -> None:
        pass


def test_what_is_refused() -> None:
    def refused(model: Any, position: Any = None, rope: bool = False, **call: Any) -> Any:
        with hf.encode_positions(model, NoPE() if position is None else position, rope=rope):
            return model(IDS, **call)

    for family, windows in (("mistral", "6"), ("qwen2", "5"), ("gemma3", "4")):
        with pytest.raises(
            TypeError, match=f"layers that see all earlier tokens, got .* with sliding windows of {windows}"
        ):
            refused(tiny(family))
    capped = tiny("gemma2", layer_types=["full_attention"] * 2)
    with pytest.raises(TypeError, match=r"does not cap its logits, got Gemma2Model, which caps at 50\.0"):
        refused(capped)
    with pytest.raises(
        TypeError,
        match=r"expected a transformers GPT-2, a decoder whose attention is built like a Llama's, .* got Phi3Model",
    ):
        refused(tiny("phi3", sliding_window=None))
    with pytest.raises(ValueError, match="rope: expected False for GPT2Model, which has no RoPE, got True"):
        refused(tiny("gpt2"), rope=True)
    model, _ = inside("llama", "nope")
    with (
        pytest.raises(ValueError, match=r"position: expected one block of gistkit\.hf\.encode_positions a model"),
        hf.encode_positions(model, NoPE()),
    ):
        refused(model)
    with pytest.raises(ValueError, match="position: expected one with axes=1 and extra_tokens=0, got RoPE2D"):
        refused(model, RoPE2D(HEAD_DIM))
    own: dict[str, int] = {"key_heads": KEY_HEADS, "layers": 1}
    for position in (
        PoPE(HEADS, HEAD_DIM, **own),
        SeqPEPositions(SeqPE(8), HEADS, HEAD_DIM, projection="layer", **own),
    ):
        with pytest.raises(
            ValueError, match=r"position: expected (SeqPEPositions|PoPE) of the model's \d layers, got 1"
        ):
            refused(model, position)
    with pytest.raises(ValueError, match=r"keep: expected none that makes keys of its own .* got Leaves"):
        refused(model, keep=Leaves(slice(None)))
    with pytest.raises(ValueError, match=r"key: expected \[B, 4, 9, 12\], got shape \(2, 2, 9, 12\)"):
        refused(model, SeqPEPositions(SeqPE(16, digits=3), HEADS, HEAD_DIM).double())
    with pytest.raises(ValueError, match="key_heads: expected a divisor of 4 heads, got 3"):
        SeqPEPositions(SeqPE(16), HEADS, HEAD_DIM, key_heads=3)
    with pytest.raises(ValueError, match="key_heads: expected 4 for projection 'none', got 2"):
        SeqPEPositions(SeqPE(48), HEADS, HEAD_DIM, key_heads=2, projection="none")


def test_calls_that_are_refused() -> None:
    model, position = inside("gpt2", "seqpe-bias")

    def refused(position: PositionEncoding, **call: Any) -> Any:
        with hf.encode_positions(model, position):
            return model(IDS, **call)

    mask = torch.ones_like(IDS)
    mask[0, 4] = 0
    with pytest.raises(ValueError, match="attention_mask: expected padding only at the ends of rows"):
        refused(NoPE(), attention_mask=mask)
    with pytest.raises(ValueError, match=r"attention_mask: expected \[2, 9\], got shape \(2, 8\)"):
        refused(NoPE(), attention_mask=mask[:, 1:])
    with pytest.raises(ValueError, match="embeddings: expected none for ALiBi, which has no encoder"):
        refused(ALiBi(HEADS), embeddings=torch.zeros(9, 16))
    with pytest.raises(ValueError, match=r"embeddings: expected \[9, 16\] or \[B, 9, 16\], got shape \(8, 16\)"):
        refused(position, embeddings=torch.zeros(8, 16))
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
        refused(NoPE())
