"""Frozen maps are rounded once for passes in bfloat16: losses are the same to the bit, and the weights stay."""

import contextlib
import dataclasses

import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from gistkit.compress import AvgPool, Compressor, FiveHundredX, GistPool
from gistkit.train import Trainer, read_metrics
from gistkit.train.rounded import RoundedMaps
from tests.helpers.tiers import mostly_slow
from tests.helpers.train_worker import (
    RECIPE,
    make_batches,
    make_compressor,
    make_dodo,
    make_gistpool,
    make_model,
    make_reader,
    numbers,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def make_gpt2():
    """A family whose maps are transposed, with biases."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=512))
    return FiveHundredX(model, chunk=8, ratio=4, losses=("ae", "lm"), lora=4)


def make_norms():
    """LoRA on embeddings too, and norms that train."""
    return FiveHundredX(make_model(), chunk=8, ratio=4, losses=("ae", "lm"), lora=4, embedding_lora=4, train_norms=True)


def make_saved():
    """A linear map that trains whole, through a copy of PEFT's."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["gate_proj"])
    return FiveHundredX(make_model(), chunk=8, ratio=4, losses=("ae", "lm"), lora=lora)


MAKERS = {
    "500x": make_compressor,
    "dropout": lambda: make_compressor(dropout=0.3),
    "compression": lambda: make_compressor(losses=("ae", "compression")),
    "gistpool": make_gistpool,
    "dodo": make_dodo,
    "avgpool": lambda: AvgPool(make_model(), ratio=4, losses=("ae", "lm"), lora=4, bos_token=0),
    "reader": make_reader,
    "gpt2": make_gpt2,
    "norms": make_norms,
    "saved": make_saved,
}


def compressor_of(trained):
    return trained if isinstance(trained, Compressor) else trained.compressor


def weights_of(trained):
    """Every parameter's own tensor, and a copy of it."""
    return {
        name: (parameter, parameter.data_ptr(), parameter.dtype, parameter.detach().clone())
        for name, parameter in compressor_of(trained).named_parameters()
    }


def assert_restored(trained, before, but=()):
    now = dict(compressor_of(trained).named_parameters())
    assert now.keys() == before.keys()
    for name, (parameter, place, dtype, copy) in before.items():
        assert now[name] is parameter and parameter.data_ptr() == place and parameter.dtype == dtype, name
        assert name in but or torch.equal(parameter, copy), name


@pytest.fixture
def without(monkeypatch):
    """A switch that leaves weights to autocast."""
    return lambda: monkeypatch.setattr(RoundedMaps, "used", lambda self: contextlib.nullcontext())


@pytest.mark.parametrize("name", mostly_slow(MAKERS, "500x"))
def test_losses_and_weights_are_those_of_autocast_to_the_bit(tmp_path, monkeypatch, without, name):
    used = []
    plain = RoundedMaps.used

    @contextlib.contextmanager
    def watched(self):
        with plain(self):
            used.append(self.nbytes)
            yield

    monkeypatch.setattr(RoundedMaps, "used", watched)
    options = {"recipe": dataclasses.replace(RECIPE, steps=4), "precision": "bf16"}
    ours = MAKERS[name]()
    before, trained = weights_of(ours), {key for key, _ in compressor_of(ours).trainable()}
    train(tmp_path / "ours", ours, **options)
    assert len(used) == 4 and min(used) > 0
    assert_restored(ours, before, but=trained)
    without()
    theirs = MAKERS[name]()
    train(tmp_path / "theirs", theirs, **options)
    found, wanted = (numbers(read_metrics(tmp_path / run / "metrics.jsonl")) for run in ("ours", "theirs"))
    assert found == wanted
    if name == "500x":
        train(tmp_path / "plain", MAKERS[name](), recipe=options["recipe"])
        plain = [record["loss"] for record in read_metrics(tmp_path / "plain" / "metrics.jsonl") if "loss" in record]
        losses = [record["loss"] for record in found if "loss" in record]
        assert losses == pytest.approx(plain, rel=2e-2) and losses != plain
    for (key, one), (_, other) in zip(
        compressor_of(ours).named_parameters(), compressor_of(theirs).named_parameters(), strict=True
    ):
        assert torch.equal(one, other), key


def test_frozen_maps_alone_are_rounded():
    compressor = make_norms()
    rounded = RoundedMaps(compressor)
    before = weights_of(compressor)
    with rounded.used():
        inside = {name: parameter.dtype for name, parameter in compressor.named_parameters()}
        copies = {name: parameter for name, parameter in compressor.named_parameters() if inside[name] != torch.float32}
        for name, parameter in copies.items():
            torch.testing.assert_close(parameter.float(), before[name][3], rtol=2**-8, atol=0)
            assert torch.equal(parameter, before[name][3].bfloat16())
    parts = {name.split(".")[-1 - ("base_layer" in name) - 1] for name in copies}
    assert parts == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(copies) == 2 * 7 and not any("lora" in name for name in copies)
    assert rounded.nbytes == sum(2 * before[name][3].numel() for name in copies)
    assert_restored(compressor, before)


def test_an_exception_inside_restores_the_weights(tmp_path):
    compressor = make_compressor()
    before = weights_of(compressor)
    with pytest.raises(ZeroDivisionError), RoundedMaps(compressor).used():
        raise ZeroDivisionError
    assert_restored(compressor, before)
    handle = compressor.model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, compressor, precision="bf16", eval_every=None)
    handle.remove()
    assert_restored(compressor, before)


def test_a_map_that_is_tied_to_an_embedding_stays_as_it_is():
    compressor = make_compressor()
    tied = compressor.model.model.layers[0].mlp.down_proj
    compressor.model.model.extra = torch.nn.Embedding(*tied.weight.shape)
    compressor.model.model.extra.weight = tied.weight
    with RoundedMaps(compressor).used():
        assert tied.weight.dtype == torch.float32
        assert compressor.model.model.layers[1].mlp.down_proj.weight.dtype == torch.bfloat16
        # The output embedding is tied too.
        assert compressor.model.lm_head.weight is compressor.embed.weight
        assert compressor.embed.weight.dtype == torch.float32


def test_a_changed_weight_is_rounded_again():
    compressor = make_compressor()
    rounded, weight = RoundedMaps(compressor), compressor.model.model.layers[0].mlp.up_proj.weight
    with rounded.used():
        first = weight.data_ptr()
    with rounded.used():
        assert weight.data_ptr() == first
    weight.data = weight.data + 1
    with rounded.used():
        assert weight.detach().float().mean() > 0.5
    with torch.no_grad():
        weight.sub_(1)
    with rounded.used():
        assert weight.detach().float().mean().abs() < 0.5


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: make_compressor(), {"precision": "no"}),
        (lambda: make_compressor(), {"precision": "bf16", "gradient_checkpointing": True}),
        (lambda: make_compressor(lora=None), {"precision": "bf16"}),
        (lambda: make_compressor(dtype=torch.bfloat16), {"precision": "no"}),
        (lambda: GistPool(make_model(), ratio=4, full_copy=True, lora=4, bos_token=0), {"precision": "bf16"}),
    ],
)
def test_there_are_no_copies_where_none_serve(tmp_path, make, options):
    compressor = make()
    trainer = Trainer(compressor, make_batches(), RECIPE, tmp_path, cpu=True, progress=False, **options)
    with trainer._rounded.used():
        assert trainer._rounded.nbytes == 0
