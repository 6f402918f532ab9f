"""refine trains what a memory holds: its divergence as the model's own attention gives it."""

import random

import pytest
import torch
from transformers import DynamicCache

from gistkit.compress import ICAE, AvgPool, FiveHundredX, Memory, Select, refine
from gistkit.hf import CACHE
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
    from gistkit.compress.refining import _exercises

    compressor = made()
    memory, ids = compressor.compress(TEXT), compressor.tokenizer(TEXT)["input_ids"]
    with torch.no_grad():
        trained, held = _exercises(compressor, ids, random.Random(0), lambda: False)
    found = refine(compressor, memory, TEXT, steps=3)
    assert found.texts == len(trained) and len(held) == 9
    assert found.before == pytest.approx(divergence(compressor, memory, ids, held), rel=1e-5)
    assert found.after == pytest.approx(divergence(compressor, found.memory, ids, held), rel=1e-5)
    # Passages of the text end what is recited, and no exercise measures what another trains.
    recited = [token for exercise in trained[:3] for token in exercise.ids[exercise.first :]]
    assert sorted(recited) == sorted(ids)
    assert not {tuple(one.ids) for one in held} & {tuple(one.ids) for one in trained}


@pytest.mark.parametrize("name", tiers(METHODS, ["select", "embeddings"]))
def test_a_memory_trains_towards_the_whole_text_and_stays_a_memory(name, tmp_path):
    compressor = made(name)
    memory, weights = compressor.compress(TEXT), compressor.fingerprints()
    before = [tensor.clone() for tensor in memory.tensors]
    found = refine(compressor, memory, TEXT, steps=25)
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


def test_seconds_end_the_training_and_the_writing_of_questions(monkeypatch):
    compressor, clock = made(), iter(range(10_000))
    memory = compressor.compress(TEXT)
    monkeypatch.setattr("gistkit.compress.refining.time.monotonic", lambda: next(clock))
    found = refine(compressor, memory, TEXT, seconds=20)
    # Each look at the clock is a second: before the step, and twice where it has one too many.
    assert 5 <= found.steps < 20
    assert refine(compressor, memory, TEXT, seconds=2).texts < found.texts


def test_joined_memories_have_what_was_trained():
    compressor = made()
    memories = [compressor.compress(TEXT), compressor.compress(TEXT[:60])]
    trained = refine(compressor, memories[0], TEXT, steps=2).memory
    joined = compressor.join([trained, memories[1]])
    torch.testing.assert_close(joined.layers[0][1][:, :, : trained.num_tokens], trained.layers[0][1])
    assert not torch.equal(joined.layers[0][1], compressor.join(memories).layers[0][1])


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
