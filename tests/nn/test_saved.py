"""Position encodings in a folder: read back they give the same logits to the bit, and broken files are named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from gistkit import hf
from gistkit.nn import (
    GPT,
    IMAGE_ENCODINGS,
    TEXT_ENCODINGS,
    ALiBi,
    Learned,
    Learned2D,
    PoPE,
    PositionEncoding,
    RoPE,
    RoPE2D,
    RoPE2DMix,
    SeqPE,
    SeqPEPositions,
    Sinusoidal,
    load_position,
    save_position,
)
from tests.helpers import encodings
from tests.helpers.models import tiny
from tests.hf import test_encode_images


def text_encoding(name: str, **options: Any) -> PositionEncoding:
    return encodings.encoding(name, heads=4, key_heads=4, head_dim=12, layers=2, **options)


@pytest.mark.parametrize("name", TEXT_ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gpt_reads_the_same_from_a_folder(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model, ids = (
        GPT(50, 48, 2, 4, text_encoding(name), style="gpt2").to(dtype).eval(),
        torch.arange(9)[None],
    )
    expected = model(ids, 3 * torch.arange(9))
    save_position(model.position, tmp_path)
    own, random = model.position, torch.get_rng_state()
    model.position = load_position(tmp_path)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.position is not own and type(model.position) is type(own)
    assert torch.equal(model(ids, 3 * torch.arange(9)), expected)
    assert {n: p.dtype for n, p in model.position.named_parameters()} == {n: dtype for n, _ in own.named_parameters()}


@pytest.mark.parametrize("name", IMAGE_ENCODINGS)
def test_a_vit_reads_the_same_from_a_folder(tmp_path: Path, name: str) -> None:
    position, pixels = test_encode_images.encoding(name, "ViT"), test_encode_images.images(5, 3)
    if name == "learned-2d":
        position.extent = (7, 9)
    save_position(position, tmp_path)
    found = []
    for its in (position.eval(), load_position(tmp_path)):
        with hf.encode_positions(test_encode_images.model_of("ViT"), its) as model:
            found.append(model(pixels).logits)
    # Products of the same numbers elsewhere in memory may differ in their last bits.
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_a_model_and_its_encoding_share_a_folder(tmp_path: Path) -> None:
    """With every setting away from its default."""
    torch.manual_seed(0)
    encoder = SeqPE(
        16, out_dim=10, base=7, digits=3, layers=1, heads=4, shared_places=False, dropout=0.2, attention_dropout=0.1,
        std=0.3,
    )  # fmt: skip
    position = SeqPEPositions(
        encoder, 4, 12, key_heads=2, layers=2, integration="mul", projection="layer", mul_start=0.5, std=0.3
    ).double()
    model, ids = tiny("llama"), torch.arange(1, 10)[None]
    with hf.encode_positions(model, position.eval()):
        expected = model(ids).logits
    model.save_pretrained(tmp_path)
    save_position(position, tmp_path)
    again, loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), load_position(tmp_path)
    assert isinstance(loaded, SeqPEPositions) and loaded.encoder.dropped
    assert loaded.encoder.dropout == 0.2 and not loaded.training and all(p.requires_grad for p in loaded.parameters())
    with hf.encode_positions(again, loaded):
        assert torch.equal(again(ids).logits, expected)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    save_position(text_encoding("seqpe-bias"), tmp_path)
    path = tmp_path / "position.json"
    content = json.loads(path.read_text())

    def refuses(message: str, **settings: Any) -> None:
        path.write_text(json.dumps(content | {"settings": content["settings"] | settings}))
        with pytest.raises(ValueError, match=message):
            load_position(tmp_path)

    refuses(
        r"position\.json: expected the settings of SeqPEPositions, .*other tensors than settings claim", head_dim=16
    )
    refuses("expected heads of at most 16777216, got", heads=2**60)
    refuses("expected layers of at most 1024, got 5000", encoder=content["settings"]["encoder"] | {"layers": 5000})
    refuses(r"settings of SeqPEPositions, got some that do not fit .*unexpected keyword argument", other=1)
    refuses("settings of SeqPEPositions, got some that do not fit", heads="4")
    refuses("settings of SeqPEPositions, got some that do not fit", encoder=None)
    path.write_text(json.dumps(content | {"version": 9}))
    with pytest.raises(ValueError, match="expected format gistkit-position and version 1, got"):
        load_position(tmp_path)
    path.write_text(json.dumps(content | {"kind": "Module"}))
    with pytest.raises(ValueError, match=r"expected the settings of one of NoPE, .*, got .?Module"):
        load_position(tmp_path)
    path.write_text(json.dumps(content))
    save_file({}, tmp_path / "position.safetensors")
    with pytest.raises(ValueError, match="other tensors than settings claim"):
        load_position(tmp_path)
    (tmp_path / "position.safetensors").unlink()
    with pytest.raises(OSError, match=r"position\.safetensors: expected the weights of a position encoding"):
        load_position(tmp_path)
    with pytest.raises(OSError, match="expected the settings of a position encoding, found none"):
        load_position(tmp_path / "none")

    class Own(RoPE):
        pass

    with pytest.raises(TypeError, match=r"position: expected one of NoPE, .* got Own"):
        save_position(Own(8), tmp_path)


def test_settings_may_be_large_or_numpy_s(tmp_path: Path) -> None:
    two = np.int64(2)
    for position in (
        RoPE(4, base=10**8), RoPE2D(4, base=10**8), RoPE2DMix(2, 4, 2, base=10**8), Sinusoidal(4, base=10**8),
        Learned(two, 2, extent=10**8), Learned2D((two, 3), 2), ALiBi(two), PoPE(two, 4, 2, spread=np.float32(0.5)),
    ):  # fmt: skip
        save_position(position, tmp_path)
        assert getattr(load_position(tmp_path), "base", 0) == getattr(position, "base", 0)
