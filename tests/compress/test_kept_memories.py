"""Memories that a user keeps: no graph behind them, no other tensor's storage, copies, and a line to look at."""

import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from gistkit.compress import Compressive, Memory, MixedResolution
from gistkit.evaluate import FullContext
from tests.compress.test_contract import CASES, QUICK, make
from tests.helpers.models import tiny_llama
from tests.helpers.tiers import tiers

CONTEXTS = [list(range(2, 15)), list(range(20, 27))]
ALL = [*CASES, "full context"]


def made(name):
    return FullContext(tiny_llama().double()) if name == "full context" else make(name)


def encode(name):
    return made(name).encode(CONTEXTS)


def all_tensors(memory):
    found = [*memory.tensors, memory.positions]
    return found + [tensor for tensor in (memory.last, memory.key_bias) if tensor is not None]


@pytest.mark.parametrize("name", tiers(ALL, [*QUICK, "full context"]))
def test_encode_saves_nothing_for_a_backward_pass(name):
    compressor, saved = made(name), []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.shape), lambda packed: None):
        memory = compressor.encode(CONTEXTS)
    assert saved == []
    for tensor in all_tensors(memory):
        assert not tensor.requires_grad and tensor.grad_fn is None and not tensor.is_inference()
        # A view would keep the tensor alive that it is of.
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, tensor.shape


@pytest.mark.parametrize("name", tiers(ALL, ["icae", "gistpool", "full context"]))
def test_a_kept_memory_is_a_constant_of_a_later_backward_pass(name):
    compressor = made(name)
    memory = compressor.encode(CONTEXTS)
    prompt = torch.nn.Parameter(torch.zeros(2, 4, 48, dtype=torch.float64))
    hidden_states = compressor.decode(memory, "lm", torch.full((2, 4), 7))
    (hidden_states[:, :4] + prompt).sum().backward()
    assert bool(prompt.grad.abs().sum() > 0)


@pytest.mark.parametrize("name", tiers(CASES, ["icae", "avgpool", "dodo"]))
def test_a_memory_with_gradient_equals_one_without_and_reaches_the_weights(name):
    compressor = make(name)
    plain, memory = compressor.encode(CONTEXTS), compressor.encode(CONTEXTS, gradient=True)
    torch.testing.assert_close(plain.tensors, memory.tensors, rtol=1e-12, atol=1e-12)
    assert (plain.lengths, plain.fingerprint, plain.maker) == (memory.lengths, memory.fingerprint, memory.maker)
    for _, parameter in compressor.trainable():
        parameter.grad = None
    compressor.decode(memory, "lm", torch.full((2, 4), 7)).sin().sum().backward()
    assert any(p.grad is not None and bool(p.grad.abs().sum() > 0) for _, p in compressor.trainable())
    with torch.no_grad():
        assert not any(tensor.requires_grad for tensor in all_tensors(compressor.encode(CONTEXTS, gradient=True)))


@pytest.mark.parametrize("name", ["icae", "dodo", "full context"])
def test_a_memory_is_copied_deeply(name):
    memory = encode(name)
    for original in (memory, memory[1], memory[:1].repeat(3), Memory.stack([memory[0]])):
        copied = copy.deepcopy(original)
        assert (type(copied), copied.source, copied.lengths) == (type(original), original.source, original.lengths)
        for a, b in zip(all_tensors(original), all_tensors(copied), strict=True):
            assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


@pytest.mark.parametrize("name", ["icae", "dodo", "full context"])
def test_a_memory_is_shown_in_a_line(name):
    memory = encode(name)
    shown = repr(memory)
    assert shown == str(memory) and "\n" not in shown and len(shown) < 160
    kind = type(memory).__name__
    assert shown.startswith(f"{kind}({memory.source.method}: ") and str(sum(memory.lengths)) in shown
    assert f"{sum(memory.context_lengths)} context tokens in 2 rows" in shown and "float64 on cpu" in shown
    assert "1 row," in repr(memory[0])
    assert len(repr(memory[0].repeat(10_000))) < 160


@pytest.mark.parametrize("reading", ["mixed", "compressive"])
def test_a_stream_saves_nothing_for_a_backward_pass(reading):
    compressor = make("dodo" if reading == "mixed" else "avgpool")
    reader = {"mixed": MixedResolution, "compressive": Compressive}[reading](compressor, tau=6, segment=3)
    if reading == "mixed":
        reader.calibrate([torch.tensor([CONTEXTS[0]])])
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.shape), lambda packed: None):
        stream = reader.start([CONTEXTS[0] * 2, CONTEXTS[0]])
        for token in range(8):
            last = stream.step(torch.tensor([token, token]))
        answer = reader.generate([CONTEXTS[0]], max_new_tokens=3)
    assert saved == [] and not last.requires_grad and not stream.last.requires_grad and not answer.requires_grad
    held = [tensor for layer in stream._cache.cache.held for tensor in layer]
    assert held and not any(tensor.requires_grad for tensor in held)
