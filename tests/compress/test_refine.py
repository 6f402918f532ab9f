"""refine trains what a memory holds: its divergence as the model's own attention gives it."""

import random

import pytest
import torch
from transformers import DynamicCache

from gistkit.compress import ICAE, AvgPool, FiveHundredX, Memory, Select, refine
from gistkit.hf import CACHE
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import byte_tokenizer, eager, tiny_llama
from tests.helpers.tiers import tiers

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 2
METHODS = {
    "select": lambda model: Select(model, ratio=8, by="even"),
    "shared by heads": lambda model: Select(model, ratio=8, by="kvzip", shares="all"),
    "adapter": lambda model: AvgPool(model, ratio=8, lora=2, window=100),
    "embeddings": lambda model: ICAE(model, chunk=40, ratio=8, lora=2),
    "chunks": lambda model: FiveHundredX(model, chunk=40, ratio=8, lora=2),
}


def made(name="select", **changes):
    torch.manual_seed(0)
    compressor = METHODS[name](tiny_llama(vocab_size=258, bos_token_id=257, **changes)).eval()
    compressor.tokenizer = byte_tokenizer(start=True)
    return compressor


def divergence(compressor, memory, ids, exercises):
    """Mean KL of next tokens with the whole text before them and with the memory, by the model's own attention."""
    model, nats = compressor.model, []
    with torch.no_grad(), eager(model):
        for exercise in exercises:
            cache = DynamicCache()
            for index, (key, value) in enumerate(memory.layers):
                cache.update(key, value, index)
            text = torch.tensor([exercise.ids])
            places = torch.arange(len(ids), len(ids) + text.shape[1])[None]
            student = model(text, position_ids=places, **{CACHE: cache}).logits[0]
            teacher = model(torch.cat([torch.tensor([ids]), text], 1)).logits[0, len(ids) :]
            p, q = (part[exercise.first - 1 : -1].log_softmax(-1) for part in (teacher, student))
            nats += (p.exp() * (p - q)).sum(-1).tolist()
    return sum(nats) / len(nats)


def test_the_divergence_is_that_of_the_model_s_own_attention():
    from gistkit.compress.refining import Clock, _exercises

    compressor = made()
    memory, ids = compressor.compress(TEXT), compressor.tokenizer(TEXT)["input_ids"]
    with torch.no_grad():
        trained, held = _exercises(compressor, ids, random.Random(0), Clock(None))
    found = refine(compressor, memory, TEXT, steps=3)
    assert found.texts == len(trained) and len(held) == 9
    assert found.before == pytest.approx(divergence(compressor, memory, ids, held), rel=1e-5)
    assert found.after == pytest.approx(divergence(compressor, found.memory, ids, held), rel=1e-5)
    # Passages of the text end what is recited, and no exercise measures what another trains.
    recited = [token for exercise in trained[:3] for token in exercise.ids[exercise.first :]]
    assert sorted(recited) == sorted(ids)
    assert not {tuple(one.ids) for one in held} & {tuple(one.ids) for one in trained}


@pytest.mark.parametrize("own_reader", [False, True])
def test_the_teacher_reads_the_text_as_the_compressor_does(own_reader):
    model = tiny_llama(vocab_size=258, bos_token_id=257)
    compressor = unsettle(Select(model, ratio=1, by="kvzip", lora=2, own_reader=own_reader)).eval()
    compressor.tokenizer = byte_tokenizer(start=True)
    # A memory with all keys and values has nothing to learn.
    found = refine(compressor, compressor.compress(TEXT), TEXT, steps=1)
    assert found.before == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", tiers(METHODS, ["select", "embeddings"]))
def test_a_memory_trains_towards_the_whole_text_and_stays_a_memory(name, tmp_path):
    compressor = made(name)
    memory, weights = compressor.compress(TEXT), compressor.fingerprints()
    before = [tensor.clone() for tensor in memory.tensors]
    found = refine(compressor, memory, TEXT, steps=25, rate=2e-2)
    assert found.steps == 25 and found.after < found.before - 0.03
    assert all(torch.equal(a, b) for a, b in zip(memory.tensors, before, strict=True))
    assert compressor.fingerprints() == weights
    assert all(parameter.grad is None for parameter in compressor.parameters())
    assert (found.memory.source, found.memory.nbytes) == (memory.source, memory.nbytes)
    found.memory.save(tmp_path / "refined.gist")
    loaded = Memory.load(tmp_path / "refined.gist")
    assert compressor.ask(loaded, "Who sleeps?", max_new_tokens=5) == compressor.ask(
        found.memory, "Who sleeps?", max_new_tokens=5
    )


def test_the_same_steps_give_the_same_memory():
    compressor = made()
    memory = compressor.compress(TEXT)
    shares = []
    one = refine(compressor, memory, TEXT, steps=4, progress=shares.append)
    torch.rand(3)
    two = refine(compressor, memory, compressor.tokenizer(TEXT)["input_ids"], steps=4)
    other = refine(compressor, memory, TEXT, steps=4, seed=1)
    assert one.after == two.after != other.after
    assert all(torch.equal(a, b) for a, b in zip(one.memory.tensors, two.memory.tensors, strict=True))
    assert shares == [0.25, 0.5, 0.75, 1.0]
    joined, value = compressor.join([one.memory, memory]).layers[0][1], one.memory.layers[0][1]
    assert torch.equal(joined[:, :, : memory.num_tokens], value) and not torch.equal(value, memory.layers[0][1])


def test_seconds_hold_all_that_is_done(monkeypatch):
    compressor, now = made(), [0.0]
    memory = compressor.compress(TEXT)

    def pass_takes_a_second(*_):
        now[0] += 1

    compressor.model.model.layers[0].register_forward_pre_hook(pass_takes_a_second)
    monkeypatch.setattr("gistkit.compress.refining.time.monotonic", lambda: now[0])
    texts = []
    for seconds in (40, 300):
        begun = now[0]
        found = refine(compressor, memory, TEXT, seconds=seconds)
        assert seconds - 10 < now[0] - begun <= seconds
        assert found.steps > seconds / 10 and found.after < found.before
        texts.append(found.texts)
    assert texts[0] < texts[1]
    # Too few seconds have one step, in which the memory changes.
    begun, found = now[0], refine(compressor, memory, TEXT, seconds=1)
    assert found.steps == 1 and found.after != found.before and now[0] - begun < 20


def test_a_memory_that_did_not_gain_comes_back():
    compressor = made()
    memory = compressor.compress(TEXT)
    found = refine(compressor, memory, TEXT, steps=2, rate=1e20)
    assert found.memory is memory and found.after == found.before


def test_modes_and_random_numbers_are_as_before():
    compressor = made("adapter").train()
    compressor.model.model.layers[1].eval()
    memory = compressor.compress(TEXT)
    modes, numbers = [module.training for module in compressor.modules()], torch.get_rng_state()
    refine(compressor, memory, TEXT, steps=1)
    assert [module.training for module in compressor.modules()] == modes and {True, False} == set(modes)
    assert torch.equal(torch.get_rng_state(), numbers)


def test_a_text_with_control_tokens_is_read_as_the_memory_s():
    compressor, text = made(), "Read this <end> and that."
    memory = compressor.compress(text, control_tokens=True)
    assert refine(compressor, memory, text, steps=1, control_tokens=True).steps == 1
    with pytest.raises(ValueError, match=f"text: expected the {memory.context_lengths[0]} tokens"):
        refine(compressor, memory, text, steps=1)


def test_what_it_cannot_refine_is_refused_by_name():
    compressor = made()
    memory = compressor.compress(TEXT)
    for match, arguments in [
        ("memory: expected one row", (compressor.encode([[2, 3, 4], [5, 6]]), TEXT)),
        ("text: expected the 137 tokens that the memory is of, got 14", (memory, "Another text.")),
        ("memory: expected a Memory", (TEXT, TEXT)),
    ]:
        with pytest.raises((ValueError, TypeError), match=match):
            refine(compressor, *arguments, steps=1)
    for match, options in [("steps", {"steps": 0}), ("seconds", {"seconds": 0}), ("rate", {"rate": -1.0})]:
        with pytest.raises(ValueError, match=f"{match}: expected"):
            refine(compressor, memory, TEXT, **options)
    with pytest.raises(ValueError, match="memory: expected one made with"):
        refine(made("chunks"), memory, TEXT, steps=1)
