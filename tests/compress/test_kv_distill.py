"""KV-Distill against the same written out on transformers' own attention: adapters of the selected tokens alone."""

import contextlib

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from gistkit.compress import KVDistill, MixedResolution
from gistkit.compress.losses import divergence_loss
from gistkit.hf import CACHE
from tests.helpers.in_place_oracle import merged, unsettle
from tests.helpers.models import eager, tiny_llama, tokens

BOS = 1


def made(**options):
    return unsettle(KVDistill(tiny_llama(), **{"ratio": 3, "layer": 1, "bos_token": BOS, "lora": 2} | options).double())


@contextlib.contextmanager
def adapted(compressor, chosen):
    """Each map with its adapter where `chosen`, bool [N], is True, and as the base model has it elsewhere."""
    (name,) = compressor.adapters.names.values()
    layers = [layer for layer in compressor.model.modules() if name in getattr(layer, "lora_A", ())]
    for layer in layers:
        whole, base = merged(layer, name), layer.base_layer
        layer.forward = lambda x, a=whole, b=base: torch.where(
            chosen[: x.shape[1], None], a(x), F.linear(x, b.weight, b.bias)
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def read(compressor, ids, kept, text):
    """Hidden states [T + 1, d] after the tokens at `kept` and at each of `text`; `ids` begin with BOS."""
    model, cache, reading = compressor.model, DynamicCache(), DynamicCache()
    chosen = torch.zeros(len(ids), dtype=torch.bool)
    chosen[kept[1:]] = True
    with adapted(compressor, chosen), eager(model):
        first = model.get_decoder()(torch.tensor([ids]), **{CACHE: cache}).last_hidden_state
    for index, layer in enumerate(cache.layers):
        reading.update(layer.keys[:, :, kept], layer.values[:, :, kept], index)
    where = len(ids) + torch.arange(len(text))[None]
    with adapted(compressor, torch.zeros(len(text), dtype=torch.bool)), eager(model):
        out = model.get_decoder()(torch.tensor([text]), position_ids=where, **{CACHE: reading}).last_hidden_state
    return torch.cat([first[:, -1:], out], 1)[0]


def test_the_losses_are_the_divergences_from_the_base_model_in_both_directions():
    compressor = made(losses={"kl": 0.6, "reverse_kl": 0.4})
    contexts, questions, answers = tokens(2, 9), tokens(2, 3), tokens(2, 4)
    losses = compressor(contexts, question_ids=questions, answer_ids=answers)
    text = torch.cat([questions, answers], 1)
    with torch.no_grad():
        memory = compressor.encode(contexts)
        q = compressor.logits(compressor.decode(memory, "qa", text))[:, 3:-1].log_softmax(-1)
        with adapted(compressor, torch.zeros(99, dtype=torch.bool)), eager(compressor.model):
            p = compressor.model(torch.cat([torch.full((2, 1), BOS), contexts, text], 1)).logits[:, 12:-1]
        p = p.log_softmax(-1)
    forward, reverse = (p.exp() * (p - q)).sum(-1).mean(), (q.exp() * (q - p)).sum(-1).mean()
    torch.testing.assert_close(losses["kl"], forward.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses["reverse_kl"], reverse.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses["loss"], (0.6 * forward + 0.4 * reverse).float(), rtol=1e-4, atol=1e-5)
    # A continuation is an answer without a question.
    assert compressor(contexts, question_ids=tokens(2, 0), answer_ids=answers)["loss"] > 0


def test_the_reverse_divergence_has_its_own_gradient():
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 8, dtype=torch.float64)
    weight = torch.randn(20, 8, dtype=torch.float64)
    student.requires_grad_()
    (found,) = torch.autograd.grad(divergence_loss(teacher, student, weight, chunk=2), student)
    q, p = ((states @ weight.T).log_softmax(-1) for states in (student, teacher))
    (expected,) = torch.autograd.grad((q.exp() * (q - p)).sum(-1).mean(), student)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_what_it_cannot_do_is_refused_by_name():
    with pytest.raises(TypeError, match="compressor: expected a Dodo, got KVDistill"):
        MixedResolution(made())
