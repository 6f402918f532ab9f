"""Adapters folded into the weights of their maps: the same numbers as beside them, and only where they apply."""

import pytest
import torch
from torch import nn

from gistkit.ask import Conversation
from gistkit.compress import AvgPool, Compressive, Dodo, FiveHundredX, GistPool, MixedResolution
from gistkit.compress.steps import LEAST
from gistkit.nn import adapted
from gistkit.nn.folded import fold, foldable
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import TOLERANCE, tiny, tiny_llama, tokens
from tests.helpers.tiers import slow

BOS = 1


class Own(torch.Tensor):
    pass


@pytest.fixture
def counted(monkeypatch):
    """The number of products with LoRA's first factors, in a list that grows."""

    def of(compressor):
        calls = []
        first = {down.weight.data_ptr() for layer in compressor.adapters._layers for down in layer.lora_A.values()}

        def watch(holder, name, which):
            plain = getattr(holder, name)

            def counting(*arguments):
                calls.extend([1] * (arguments[which].data_ptr() in first))
                return plain(*arguments)

            monkeypatch.setattr(holder, name, counting)

        watch(torch.nn.functional, "linear", 1)
        watch(adapted, "_scaled", 2)
        return calls

    return of


def test_scaling_and_hooks_that_change_are_heard(counted):
    compressor = gistpool()
    memory, question = compressor.encode(tokens(1, 12)), tokens(1, 3)

    def states():
        with torch.no_grad(), compressor.folded():
            return compressor.decode(memory, "qa", question)

    before = states()
    layers = [layer for layer in compressor.adapters._layers if hasattr(layer, "lora_B")]
    name = compressor.adapters.names["text"]
    for layer in layers:
        layer.scaling[name] *= 3
    scaled = states()
    assert not torch.allclose(scaled, before)
    hooks = [layer.lora_B[name].register_forward_hook(lambda *_: torch.zeros(())) for layer in layers]
    with compressor.folded():
        assert not torch.allclose(states(), scaled)
    for hook in hooks:
        hook.remove()
    assert torch.equal(states(), scaled)


def gistpool(**options):
    return unsettle(GistPool(tiny_llama(), ratio=3, lora=2, bos_token=BOS, **options).double()).eval()


READERS = {
    "recent": lambda model: MixedResolution(
        unsettle(Dodo(model, ratio=3, selection="none", layer=1, lora=2, bos_token=BOS).double()), tau=6, segment=3
    ),
    "strided": lambda model: MixedResolution(
        unsettle(Dodo(model, ratio=3, selection="strided", layer=1, lora=2, bos_token=BOS).double()), tau=6, segment=3
    ),
    "means": lambda model: Compressive(
        unsettle(AvgPool(model, ratio=3, lora=2, bos_token=BOS).double()), tau=6, segment=3
    ),
}


@pytest.mark.parametrize(
    ("reader", "family"),
    # The maps of a GPT-2 are none that are folded.
    [("means", "llama"), ("strided", "qwen3"), *slow(("recent", "llama"), ("means", "gpt2"))],
)
def test_a_stream_reads_on_as_one_pass_with_adapters_beside_the_maps(reader, family):
    reader = READERS[reader](tiny(family))
    reader.compressor.eval()
    ids = tokens(2, 26)
    wanted = reader.hidden(reader.rows(ids))
    stream = reader.start(ids[:, :7])
    with reader.compressor.folded():
        for at in range(7, 26):
            torch.testing.assert_close(stream.step(ids[:, at]), wanted[:, at + 1], **TOLERANCE)


def test_the_readers_tokens_pass_no_adapter_and_others_do(counted):
    reader = READERS["means"](tiny_llama())
    reader.compressor.eval()
    ids, calls = tokens(1, 20), counted(reader.compressor)
    stream = reader.start(ids)
    assert calls
    calls.clear()
    with reader.compressor.folded():
        stream.step(ids[:, 0])
        assert not calls
        reader.compressor.train()
        stream.step(ids[:, 0])
    assert calls


def test_a_memory_is_made_and_read_as_before(counted):
    compressor = gistpool()
    ids, question = tokens(2, 13), tokens(2, 4)
    with torch.no_grad():
        memory = compressor.encode(ids)
        wanted, answer = compressor.decode(memory, "lm", question), compressor.generate(memory, max_new_tokens=9)
        with compressor.folded():
            calls = counted(compressor)
            got, again = compressor.decode(memory, "lm", question), compressor.generate(memory, max_new_tokens=9)
            assert not calls
            # The gists' adapter is another one.
            torch.testing.assert_close(compressor.encode(ids).tensors, memory.tensors, **TOLERANCE)
            assert calls
    torch.testing.assert_close(got, wanted, **TOLERANCE)
    assert torch.equal(again, answer)


def test_answers_of_several_tokens_fold_by_themselves_and_keep_the_weights(monkeypatch, counted):
    folds = []
    monkeypatch.setattr("gistkit.compress.adapters.fold", lambda *its: folds.append(1) or fold(*its))
    compressor = gistpool()
    memory = compressor.encode(tokens(2, 13))
    calls = counted(compressor)
    short = compressor.generate(memory, max_new_tokens=LEAST - 1)
    assert calls and not folds
    calls.clear()
    answer = compressor.generate(memory, max_new_tokens=LEAST + 3)
    assert torch.equal(answer[:, : LEAST - 1], short) and not calls
    made = len(folds)
    assert made == len([layer for layer in compressor.adapters._layers if foldable(layer, "gistkit_0_text")])
    conversation = Conversation(compressor, memory[0])
    conversation.reply([4, 5], max_new_tokens=LEAST)
    compressor.generate(memory, max_new_tokens=LEAST)
    assert len(folds) == made and not calls
    # Afterwards adapters stand beside their maps again, and training frees the copies.
    compressor.decode(memory, "lm", tokens(2, 4))
    assert calls
    compressor.train()
    assert not compressor.adapters._folds
    calls.clear()
    compressor.generate(memory, max_new_tokens=LEAST)
    assert calls and len(folds) == made


def test_an_answer_without_room_for_folded_weights_is_the_same(monkeypatch, counted):
    compressor = gistpool()
    memory = compressor.encode(tokens(2, 13))
    expected, calls = compressor.generate(memory, max_new_tokens=9), counted(compressor)
    compressor.lm.release()

    def full(*its):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("gistkit.compress.adapters.fold", full)
    assert torch.equal(compressor.generate(memory, max_new_tokens=9), expected) and calls
    monkeypatch.undo()
    calls.clear()
    assert torch.equal(compressor.generate(memory, max_new_tokens=9), expected) and not calls


def test_gradients_are_those_beside_the_maps():
    compressor = gistpool()
    memory, question = compressor.encode(tokens(1, 9)), tokens(1, 4)
    compressor.decode(memory, "lm", question).square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in compressor.trainable()}
    compressor.zero_grad()
    with compressor.folded():
        compressor.decode(memory, "lm", question).square().sum().backward()
    for name, parameter in compressor.trainable():
        assert (parameter.grad is None) == (wanted[name] is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[name], **TOLERANCE, msg=name)


def test_afterwards_the_model_is_as_it_was_and_parameters_count_again():
    compressor = gistpool()
    before = [vars(module).get("forward") for module in compressor.model.modules()]
    memory, question = compressor.encode(tokens(1, 9)), tokens(1, 4)
    with torch.no_grad():
        with compressor.folded():
            old = compressor.decode(memory, "lm", question)
        assert [vars(module).get("forward") for module in compressor.model.modules()] == before
        for _, parameter in compressor.trainable():
            parameter.mul_(2)
        new = compressor.decode(memory, "lm", question)
        with compressor.folded():
            torch.testing.assert_close(compressor.decode(memory, "lm", question), new, **TOLERANCE)
    assert (new - old).abs().max() > 1e-3


def test_a_reader_without_adapter_has_nothing_to_fold():
    compressor = FiveHundredX(tiny_llama(), chunk=6, ratio=3, lora=2)
    before = dict(vars(compressor.model))
    with compressor.folded():
        assert vars(compressor.model) == before
        assert not any("forward" in vars(layer) for layer in compressor.adapters._layers)


def test_a_folded_weight_is_rounded_once():
    compressor = unsettle(GistPool(tiny_llama().bfloat16(), ratio=3, lora=2, bos_token=BOS))
    name = compressor.adapters.names["text"]
    layers = [layer for layer in compressor.adapters._layers if foldable(layer, name)]
    assert layers
    for layer in layers:
        base, down, up = layer.base_layer.weight, layer.lora_A[name].weight, layer.lora_B[name].weight
        wanted = base.double() + layer.scaling[name] * up.double() @ down.double()
        got = fold(layer, name)
        assert got.dtype == torch.bfloat16
        # Half a unit in the last place of 8 bits, and what float32's sum adds.
        assert ((got.double() - wanted).abs() <= wanted.abs() * (2**-8 + 1e-5) + 1e-6).all()
    # A subclass, such as a quantised weight, has no sum to be rounded.
    layers[0].base_layer.weight = nn.Parameter(base.detach().as_subclass(Own), requires_grad=False)
    assert not foldable(layers[0], name)
