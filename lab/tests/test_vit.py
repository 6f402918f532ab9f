"""ViT against torch's own encoder layers, at any size and from any corner."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gistkit.nn import IMAGE_ENCODINGS, NoPE, PositionEncoding, RoPE2D, grid_positions
from gistkit_lab.vit import ViT
from tests.helpers import encodings
from tests.helpers.encodings import close

pytestmark = pytest.mark.usefixtures("double")
PATCH, CHANNELS, CLASSES, DIM, LAYERS, HEADS = 2, 3, 7, 24, 2, 3


def encoding(name: str, **options: Any) -> PositionEncoding:
    return encodings.encoding(name, heads=HEADS, head_dim=DIM // HEADS, layers=LAYERS, extra_tokens=1, **options)


def vit(position: PositionEncoding, **options: Any) -> ViT:
    return ViT(PATCH, CHANNELS, CLASSES, DIM, LAYERS, HEADS, position, **options)


def images(rows: int, columns: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, CHANNELS, PATCH * rows, PATCH * columns)


def by_torch(model: ViT, pixels: Tensor) -> Tensor:
    """The same weights in torch's encoder layers, patches cut by a loop."""
    batch, _, height, width = pixels.shape
    patches = torch.stack(
        [
            pixels[:, :, i : i + PATCH, j : j + PATCH].reshape(batch, -1)
            for i in range(0, height, PATCH)
            for j in range(0, width, PATCH)
        ],
        1,
    )
    hidden = torch.cat([model.cls.expand(batch, 1, -1), model.patches(patches)], 1)
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(
            DIM, HEADS, 4 * DIM, 0.0, "gelu", batch_first=True, norm_first=True, layer_norm_eps=1e-6
        )
        state = {
            "self_attn.in_proj_weight": block.attention.qkv.weight,
            "self_attn.in_proj_bias": block.attention.qkv.bias,
        }
        names = {"self_attn.out_proj": "attention.out", "linear1": "network.up", "linear2": "network.down"}
        names |= {"norm1": "norm_1", "norm2": "norm_2"}
        for theirs, ours in names.items():
            state |= {f"{theirs}.{part}": getattr(block.get_submodule(ours), part) for part in ("weight", "bias")}
        layer.load_state_dict(state)
        hidden = layer(hidden)
    return model.head(model.norm(hidden[:, 0]))


@pytest.mark.parametrize("size", [(1, 1), (3, 4), (5, 2)])
def test_without_positions_it_is_torchs_encoder(size: tuple[int, int]) -> None:
    model, pixels = vit(NoPE(extra_tokens=1)), images(*size)
    close(model(pixels), by_torch(model, pixels))


@pytest.mark.parametrize("name", IMAGE_ENCODINGS)
def test_every_encoding_at_every_size_with_gradients(name: str) -> None:
    model = vit(encoding(name))
    for size in ((3, 4), (2, 2), (9, 6)):
        pixels = images(*size)
        logits = model(pixels)
        assert logits.shape == (2, CLASSES)
        close(model(pixels, grid_positions(*size)), logits)
    logits.pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().any() for p in model.parameters())


@pytest.mark.parametrize("name", [name for name in IMAGE_ENCODINGS if name != "nope"])
def test_positions_matter(name: str) -> None:
    """Patches in another order, with their positions or without."""
    model, pixels = vit(encoding(name)), images(3, 4)
    order = torch.randperm(12)
    positions = grid_positions(3, 4)
    patches = pixels.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).flatten(2, 3)[:, :, order]
    shuffled = patches.unflatten(2, (3, 4)).permute(0, 1, 2, 4, 3, 5).reshape(pixels.shape)
    close(model(shuffled, positions[order]), model(pixels))
    assert (model(shuffled) - model(pixels)).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["rope-2d", "rope-2d-mix", "seqpe-sum", "seqpe-mul", "seqpe-bias", "sinusoidal-2d"])
def test_images_of_a_batch_start_at_corners_of_their_own(name: str) -> None:
    model, pixels = vit(encoding(name)), images(3, 4)
    starts = torch.stack([grid_positions(3, 4, (0, 5)), grid_positions(3, 4, (60, 2))])
    together = model(pixels, starts)
    for row in range(2):
        close(together[row : row + 1], model(pixels[row : row + 1], starts[row]))
    if not name.startswith("rope"):
        assert (together - model(pixels)).abs().max() > 1e-6


@pytest.mark.parametrize("projection", ["shared", "layer"])
def test_embeddings_of_the_caller_are_used(projection: str) -> None:
    model, pixels, positions = vit(encoding("seqpe-mul", projection=projection)), images(3, 4), grid_positions(3, 4)
    e = model.position.encoder(torch.cat([positions, positions + 9]))
    close(model(pixels, embeddings=e[:12]), model(pixels))
    # They count, and not what the encoder would say.
    close(model(pixels, positions, embeddings=e[12:]), model(pixels, positions + 9))


def test_drop_path_leaves_whole_rows_out_and_keeps_the_expectation() -> None:
    """By layer from 0 to the rate; attention and network of a row are left out separately."""
    model, pixels = vit(NoPE(extra_tokens=1), drop_path=0.4), images(2, 2, 1).expand(1500, -1, -1, -1)
    assert [block.drop_path for block in model.blocks] == [0.0, 0.4]  # type: ignore[union-attr]
    block, added = model.blocks[1], {}
    for name in ("attention", "network"):
        block.get_submodule(name).register_forward_hook(lambda m, a, output, name=name: added.update({name: output}))
    inputs: list[Tensor] = []
    block.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    outputs: list[Tensor] = []
    block.register_forward_hook(lambda m, args, output: outputs.append(output))
    with torch.no_grad():
        close(model.eval()(pixels[:1]), by_torch(model, pixels[:1]))
        model.train()(pixels)
    rest = outputs[-1] - inputs[-1]
    kinds = {0: 0, 1: 0, 2: 0, 3: 0}
    network = added["network"]
    for row in range(len(rest)):
        kept = [
            kind for kind in range(4)
            if torch.allclose(rest[row], ((kind & 1) * added["attention"][row] + (kind >> 1) * network[row]) / 0.6)
        ]  # fmt: skip
        assert len(kept) == 1
        kinds[kept[0]] += 1
    for kind, share in {0: 0.16, 1: 0.24, 2: 0.24, 3: 0.36}.items():
        assert abs(kinds[kind] / 1500 - share) < 0.05
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="drop_path: expected at least 0 and below 1, got"):
            vit(NoPE(extra_tokens=1), drop_path=wrong)


def test_what_is_refused() -> None:
    model = vit(RoPE2D(DIM // HEADS, extra_tokens=1))
    with pytest.raises(ValueError, match=r"images: expected \[B, 3, height, width\] .* multiples of 2, got .* 5, 4\)"):
        model(torch.zeros(1, 3, 5, 4))
    with pytest.raises(ValueError, match=r"positions: expected \[12, 2\] or \[B, 12, 2\], got shape \(11, 2\)"):
        model(images(3, 4), grid_positions(3, 4)[1:])
    with pytest.raises(ValueError, match=r"position: expected one with axes=2 and extra_tokens=1, got RoPE2D .*=0"):
        vit(RoPE2D(DIM // HEADS))
