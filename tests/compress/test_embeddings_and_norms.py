"""LoRA on embeddings and trained norms in every method, against the methods written out with merged tables."""

import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from gistkit.compress import METHODS, Compressive, MixedResolution
from gistkit.compress.config import embedding_statistics
from tests.compress.test_voco import expect
from tests.helpers.in_place_oracle import maps_by_row, unsettle
from tests.helpers.models import TOLERANCE, tiny, tiny_llama, tokens
from tests.helpers.tiers import slow, tiers
from tests.helpers.vision import Image, processed, tiny_vision

BOS = 1
ALL = ("ae", "lm", "compression")
CHUNKS = {"chunk": 6, "ratio": 3, "losses": ALL}
GISTS = {"ratio": 3, "bos_token": BOS, "losses": ALL}
PLAIN = {"ratio": 3, "bos_token": BOS, "losses": ("ae", "lm")}
VARIANTS = {
    "icae": ("icae", CHUNKS),
    "x500": ("x500", CHUNKS),
    "voco": ("voco", {"memory_tokens": 2}),
    "gist": ("gist", GISTS),
    "offset gist": ("gist", GISTS | {"offset": True}),
    "separate gist": ("gist", GISTS | {"separate": True}),
    "avgpool": ("avgpool", PLAIN),
    "avgpool kv": ("avgpool", PLAIN | {"pool": "kv"}),
    "gistpool": ("gistpool", GISTS),
    "gistpool copy": ("gistpool", GISTS | {"full_copy": True}),
    "gistpool shared": ("gistpool", GISTS | {"separate": False}),
    "dodo": ("dodo", PLAIN | {"layer": 1}),
    "dodo shared": ("dodo", PLAIN | {"layer": 1, "separate": False}),
    "dodo strided": ("dodo", PLAIN | {"layer": 1, "selection": "strided"}),
    "no_context": ("no_context", {"bos_token": BOS, "losses": ("ae", "lm")}),
}
PARTS = {"embeddings": {"embedding_lora": 5}, "norms": {"train_norms": True}}
PARTS["both"] = PARTS["embeddings"] | PARTS["norms"]
NORMS = 5  # of two layers, and the last one


def make(name, model=None, **settings):
    method, options = VARIANTS[name]
    if model is None:
        model = tiny_vision("llava") if method == "voco" else tiny_llama()
    torch.manual_seed(0)
    compressor = METHODS[method](model, **{"lora": 2} | options | settings).double()
    # LoRA that changes something, norms and copies that differ from the model's.
    return unsettle(compressor, among=("lora_", "modules_to_save", "copies."))


def exact_norm(self, x):
    """A norm in double precision: the model's own rounds to single."""
    return x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * self.weight


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "voco"])
def test_every_role_has_its_own_norms_and_tables(name):
    compressor = make(name, **PARTS["both"])
    roles, named = len(compressor.adapters.names), " ".join(n for n, _ in compressor.trainable())
    # Gists are no tokens that are looked up.
    looked_up = 1 if compressor.method in ("gist", "gistpool") else roles
    assert named.count("lora_embedding") == 2 * looked_up and named.count("modules_to_save") == NORMS * roles


def test_voco_reads_images_with_them(monkeypatch):
    monkeypatch.setattr(LlamaRMSNorm, "forward", exact_norm)
    compressor = make("voco", **PARTS["both"])
    row, question = [1, 5, 6, Image(seed=1), 7, 8, Image(seed=2), 9], [11, 12, 13, 14]
    with maps_by_row(compressor, None):
        expected = expect(compressor, "llava", row, question)[0][-len(question) :]
    inputs, upstream = processed("llava", [row]), torch.randn(4, 48, dtype=torch.float64)

    def value():
        hidden = compressor.decode(compressor.encode(inputs, gradient=True), "qa", [question])[0, 1:]
        return hidden, (hidden * upstream).sum()

    hidden, total = value()
    torch.testing.assert_close(hidden, expected, **TOLERANCE)
    trained = [p for n, p in compressor.trainable() if "embedding" in n or "modules_to_save" in n]
    directions = [torch.randn_like(p) for p in trained]
    gradients = torch.autograd.grad(total, trained)
    slope = torch.stack([(a * b).sum() for a, b in zip(gradients, directions, strict=True)]).sum()
    ends = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.add_(step * direction)
            ends.append(value()[1])
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["icae", "x500"])
def test_the_decoder_keeps_the_models_norms_and_embeddings(method):
    model = tiny_llama()
    ids, text = tokens(2, 12), tokens(2, 5)
    logits = model(ids).logits
    compressor = make(method, model, **PARTS["both"])
    assert torch.equal(model(ids).logits, logits)
    plain = make(method, tiny_llama(), lora=None)
    plain.memory_embeddings, plain.task_embeddings = compressor.memory_embeddings, compressor.task_embeddings
    memory = compressor.encode(ids)
    torch.testing.assert_close(compressor.decode(memory, "lm", text), plain.decode(memory, "lm", text), **TOLERANCE)
    other = plain.encode(ids)
    assert not torch.allclose(memory.tensors[-1], other.tensors[-1])


@pytest.mark.parametrize(
    ("name", "reading", "options"),
    [
        ("avgpool", Compressive, {}),
        ("dodo strided", MixedResolution, {"separate": True}),
        *slow(("dodo strided", MixedResolution, {"separate": False})),
    ],
)
def test_reading_on_uses_them(name, reading, options):
    compressor = make(name, ratio=2, **options, **PARTS["both"]).eval()
    reader = reading(compressor, tau=4, segment=2)
    ids = tokens(2, 12)
    reader(ids)["loss"].backward()
    assert all(bool(p.grad.any()) for n, p in compressor.trainable() if "lora_embedding" in n or "modules_to_save" in n)
    wanted = reader.hidden(reader.rows(ids))
    stream = reader.start(ids[:, :7])
    with compressor.folded():
        for at in range(7, 12):
            torch.testing.assert_close(stream.step(ids[:, at]), wanted[:, at + 1], **TOLERANCE)


@pytest.mark.parametrize("family", tiers(["gpt2", "gemma2", "qwen3"], ["gemma2"]))
def test_tied_and_scaled_embeddings(family):
    model = tiny(family)
    spread = embedding_statistics(model.get_input_embeddings())[1]
    head = model.get_output_embeddings().weight
    compressor = make("avgpool" if family != "gpt2" else "gist", model, losses=("lm",), **PARTS["both"])
    assert compressor.lm.head.weight is head and not head.requires_grad
    torch.testing.assert_close(embedding_statistics(compressor.embed)[1], spread)
    ids, text = tokens(1, 9), tokens(1, 5)
    memory = compressor.encode(ids)
    # The tied output embedding is the model's, whatever is added to what is looked up.
    hidden = compressor.decode(memory, "lm", text)
    torch.testing.assert_close(
        compressor(ids, continuation_ids=text)["loss"].double(),
        F.cross_entropy(compressor.logits(hidden)[0, :-1].double(), text[0]), rtol=1e-6, atol=1e-6,
    )  # fmt: skip
    compressor(ids, continuation_ids=text)["loss"].backward()
    named = [n for n, p in compressor.trainable() if "lora_embedding" in n or "modules_to_save" in n]
    assert named and head.grad is None
    if family == "qwen3":
        assert not any("q_norm" in n or "k_norm" in n for n in named)


def test_norms_of_a_bfloat16_model_train_in_float32():
    model = tiny_llama().bfloat16()
    ids = tokens(2, 12)
    before = METHODS["x500"](model, chunk=6, ratio=3, lora=None).memory_embeddings
    torch.manual_seed(0)
    compressor = METHODS["icae"](tiny_llama().bfloat16(), chunk=6, ratio=3, lora=2, losses=("lm",), **PARTS["both"])
    assert before.dtype == torch.float32
    norms = {n: p for n, p in compressor.trainable() if "modules_to_save" in n}
    assert {p.dtype for p in norms.values()} == {torch.float32}
    start = {n: p.detach().clone() for n, p in norms.items()}
    optimizer = torch.optim.AdamW(norms.values(), lr=1e-4)
    compressor(ids, continuation_ids=ids)["loss"].backward()
    optimizer.step()
    assert all(not torch.equal(p, start[n]) for n, p in norms.items())
    assert compressor.encode(ids).embeddings.dtype == torch.bfloat16


def test_norms_beside_another_active_adapter_are_refused():
    import peft

    model = tiny_llama()
    peft.get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="lora: expected no modules_to_save in a model with another active adapter"):
        make("icae", model, train_norms=True)


def test_two_compressors_share_a_model():
    model = tiny_llama()
    ids = tokens(2, 12)
    logits = model(ids).logits
    first = make("icae", model, **PARTS["both"])
    before = first.encode(ids)
    second = make("dodo", model, **PARTS["both"])
    assert all(map(torch.equal, first.encode(ids).tensors, before.tensors))
    alone = make("dodo", **PARTS["both"])
    torch.testing.assert_close(second.encode(ids).tensors, alone.encode(ids).tensors, **TOLERANCE)
    assert torch.equal(model(ids).logits, logits)
    second.adapters.remove()
    assert torch.equal(model(ids).logits, logits)
    assert all(map(torch.equal, first.encode(ids).tensors, before.tensors))
