"""Position encodings inside transformers' vision transformers, against dense attention with their formulas."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from gistkit import hf
from gistkit.nn import IMAGE_ENCODINGS, NoPE, PositionEncoding, RoPE2DMix, SeqPEPositions, grid_positions
from tests.helpers import encodings
from tests.helpers.encodings import close
from tests.helpers.models import checkpoint
from tests.helpers.tiers import mostly_slow

HEADS, HEAD_DIM, LAYERS, DIM, PATCH = 2, 12, 2, 24, 4
# Tokens before the patches, by family.
EXTRA = {"ViT": 1, "DeiT": 2, "Dinov2": 1, "Dinov2WithRegisters": 3}
if Version(transformers.__version__) < Version("5.18"):
    # Its encoder hands no arguments to its layers.
    del EXTRA["Dinov2"], EXTRA["Dinov2WithRegisters"]
LAST = list(EXTRA)[-1]


def model_of(family: str, size: int = 12, **changes: Any) -> Any:
    own = {"num_register_tokens": 2} if family == "Dinov2WithRegisters" else {}
    if family.startswith("ViT") or family == "DeiT":
        own |= {"intermediate_size": 32}
    config = getattr(transformers, f"{family}Config")(
        hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=HEADS, image_size=size, patch_size=PATCH,
        num_labels=5, initializer_range=0.2, **own | changes,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForImageClassification")(config).double().eval()


def encoding(name: str, family: str, **options: Any) -> PositionEncoding:
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "layers": LAYERS, "extra_tokens": EXTRA[family]}
    return encodings.encoding(name, **sizes, **options).double()


def images(rows: int, columns: int) -> Tensor:
    return torch.randn(2, 3, PATCH * rows, PATCH * columns, generator=torch.Generator().manual_seed(1)).double()


def by_formula(model: Any, name: str, position: Any, pixels: Tensor, positions: Tensor | None = None) -> Tensor:
    """The model's own layers without its table, with dense attention and a formula in it."""
    extra, embeddings = position.extra_tokens, model.base_model.embeddings
    rows, columns = (side // PATCH for side in pixels.shape[2:])
    positions = grid_positions(rows, columns) if positions is None else positions
    positions = positions.expand(len(pixels), -1, -1)
    more = encodings.added(name, position, positions, DIM)
    if isinstance(more, Tensor):
        first = torch.zeros(extra, DIM).double() if getattr(position, "extra", None) is None else position.extra
        more = torch.cat([first.expand(len(pixels), -1, -1), more], 1)
    table, before = embeddings.position_embeddings, embeddings.interpolate_pos_encoding
    count = 1 + (extra == 2) * (model.config.model_type == "deit") + rows * columns
    embeddings.position_embeddings = nn.Parameter(torch.zeros(1, count, DIM, dtype=torch.float64))
    embeddings.interpolate_pos_encoding = lambda *_: embeddings.position_embeddings
    handle = embeddings.register_forward_hook(lambda module, args, output: output + more)
    try:
        flags = {} if "dinov2" in model.config.model_type else {"interpolate_pos_encoding": True}
        with encodings.written_out(model, name, position, positions):
            return model(pixels, **flags).logits
    finally:
        handle.remove()
        embeddings.interpolate_pos_encoding, embeddings.position_embeddings = before, table


CASES = [(family, name) for family in EXTRA for name in IMAGE_ENCODINGS]
QUICK = {("ViT", name) for name in IMAGE_ENCODINGS} | {(family, "seqpe-mul") for family in EXTRA}
QUICK |= {(LAST, "learned-2d"), (LAST, "rope-2d")}


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_logits_are_those_of_the_formulas(family: str, name: str) -> None:
    model, position = model_of(family), encoding(name, family)
    # A table of 3 x 4 is interpolated beyond, which has its own tests.
    sizes = ((3, 3), (2, 4)) if name == "learned-2d" else ((3, 3), (2, 4), (5, 6))
    for size in sizes:
        pixels = images(*size)
        with hf.encode_positions(model, position):
            found = model(pixels).logits
        close(found, by_formula(model, name, position, pixels))


def test_the_models_own_table_gives_the_model() -> None:
    model, position, pixels = model_of("ViT"), encoding("learned-2d", "ViT"), images(3, 3)
    its = model.vit.embeddings.position_embeddings[0]
    position = type(position)((3, 3), DIM, extra_tokens=1).double()  # type: ignore[call-arg]
    position.load_state_dict({"extra": its[:1], "table": its[1:].unflatten(0, (3, 3))})
    expected = model(pixels).logits
    with hf.encode_positions(model, position):
        # Its own attention takes its softmax in single precision.
        torch.testing.assert_close(model(pixels).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["seqpe-bias", "rope-2d-mix"])
def test_positions_and_embeddings_of_the_caller(name: str) -> None:
    model, position, pixels = model_of(LAST), encoding(name, LAST), images(3, 2)
    rows = torch.stack([grid_positions(3, 2, (0, 5)), grid_positions(3, 2, (60, 2))])
    with hf.encode_positions(model, position):
        found = model(pixels, position_ids=rows).logits
        close(found, by_formula(model, name, position, pixels, rows))
        if isinstance(position, SeqPEPositions):
            close(model(pixels, embeddings=position.encoder(rows)).logits, found)


@pytest.mark.parametrize("family", ["ViT", LAST])
def test_training_has_the_gradients_of_the_formulas(family: str) -> None:
    model, position, pixels = model_of(family).train(), encoding("seqpe-mul", family, projection="layer"), images(3, 3)
    parameters = [*position.parameters(), *(p for n, p in model.named_parameters() if "position" not in n)]
    parameters = [parameter for parameter in parameters if parameter is not model.base_model.embeddings.mask_token]
    expected = torch.autograd.grad(by_formula(model, "seqpe-mul", position, pixels).square().mean(), parameters)
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint(model, use_reentrant=False)
        with hf.encode_positions(model, position):
            found = torch.autograd.grad(model(pixels).logits.square().mean(), parameters)
        for ours, its in zip(found, expected, strict=True):
            close(ours, its)


@pytest.mark.parametrize("family", mostly_slow(EXTRA, "ViT"))
def test_the_model_is_left_as_it_was(family: str) -> None:
    model, pixels = model_of(family), images(3, 3)
    before, own = model(pixels).logits, model.config._attn_implementation
    with hf.encode_positions(model, encoding("seqpe-sum", family)):
        assert not torch.allclose(model(pixels).logits, before)
    assert torch.equal(model(pixels).logits, before) and model.config._attn_implementation == own
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert "interpolate_pos_encoding" not in vars(model.base_model.embeddings)


def test_what_is_refused() -> None:
    model, pixels = model_of("ViT"), images(3, 3)

    def inside(position: Any, rope: bool = False, **call: Any) -> Any:
        with hf.encode_positions(model, position, rope=rope):
            return model(pixels, **call)

    with pytest.raises(ValueError, match=r"position: expected RoPE2DMix of the model's \d layers, got 1"):
        inside(RoPE2DMix(HEADS, HEAD_DIM, 1, extra_tokens=1))
    with pytest.raises(
        ValueError,
        match="position: expected one with axes=2 and extra_tokens=1, got NoPE with axes=None and extra_tokens=0",
    ):
        inside(NoPE())
    with pytest.raises(ValueError, match="rope: expected False for ViTModel, which has no RoPE"):
        inside(NoPE(extra_tokens=1), rope=True)
    with pytest.raises(ValueError, match=r"position_ids: expected \[9, 2\] or \[B, 9, 2\], got shape \(8, 2\)"):
        inside(NoPE(extra_tokens=1), position_ids=grid_positions(2, 4))
    with pytest.raises(ValueError, match=r"output_attentions: expected False under gistkit.hf.encode_positions"):
        inside(NoPE(extra_tokens=1), output_attentions=True)
    checkpoint(model.train(), use_reentrant=True)
    with pytest.raises(ValueError, match="position: expected gradient checkpointing with use_reentrant=False"):
        inside(NoPE(extra_tokens=1))
