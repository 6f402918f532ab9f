"""RoPE whose frequencies depend on the length of a pass: a memory is read with those that its keys have."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from transformers import TextStreamer

from gistkit.ask import Conversation
from gistkit.compress import ICAE, METHODS, AvgPool, Compressive, FiveHundredX, Select, training
from gistkit.evaluate import FullContext
from tests.compress.test_contract import CASES, make
from tests.helpers.models import TOLERANCE, byte_tokenizer, tiny

pytestmark = pytest.mark.filterwarnings("ignore:position IDs reach")
LIMIT = 40
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [9.0] * 6, "factor": 4.0},
}
CARRIED = [name for name, (method, _) in CASES.items() if METHODS[method].carrier == "kv" and "offset" not in name]
# Tokens of a text and of what follows it, on both sides of the limit and across it.
SIZES = [(12, 9), (30, 20), (60, 20)]
BATCHED = ["icae", "x500, own weights", "avgpool, own weights", "gist", "select", "dodo", "full context"]
# Select with passes of each kind that read what follows a text.
ASKED = {"question": "Why?"}
READERS = [{}, {"shares": "heads"}, {"fit": True}, ASKED, ASKED | {"by": "snapkv"}]


def of_rope(family, rope, **changes):
    parameters = ROPES[rope] | {"rope_theta": 1e4, "original_max_position_embeddings": LIMIT}
    settings = {"max_position_embeddings": LIMIT if rope == "dynamic" else 8 * LIMIT, "rope_parameters": parameters}
    own = {"sliding_window": None, "original_max_position_embeddings": LIMIT} if family == "phi3" else {}
    return tiny(family, **settings | own | changes)


def pinned(model, length):
    """The model with the frequencies of a pass of `length` tokens at any length."""
    model = copy.deepcopy(model)
    rotary = model.model.rotary_emb
    rotary(torch.zeros(1, 1, 1).double(), torch.tensor([[length - 1]]))
    rotary.rope_type = "default"
    return model


def tokens(*shape):
    return torch.randint(2, 50, shape, generator=torch.Generator().manual_seed(3))


def assert_same(found, expected):
    assert found.lengths == expected.lengths and torch.equal(found.positions, expected.positions)
    torch.testing.assert_close(found.tensors, expected.tensors, **TOLERANCE)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("length", [12, LIMIT + 20])
@pytest.mark.parametrize("name", CARRIED)
def test_a_memory_is_read_with_the_frequencies_of_its_keys(name, length, rope, monkeypatch):
    monkeypatch.setattr("tests.compress.test_contract.tiny_llama", lambda: of_rope("llama", rope))
    compressor, seen = make(name).eval(), []
    rotary = compressor.model.get_decoder().rotary_emb
    rotary.register_forward_hook(lambda module, args, out: seen.append((*out.inv_freq.tolist(),)))
    memory = compressor.encode([tokens(length).tolist()])
    of_keys = seen[-1]
    seen.clear()
    compressor.decode(memory, "lm", tokens(1, 50))
    compressor.generate(memory, tokens(1, 20), max_new_tokens=30)
    assert len(seen) > 20 and {*seen} == {of_keys}


@pytest.mark.parametrize("length", [1, 12, LIMIT, LIMIT + 1])
@pytest.mark.parametrize("task_tokens", [False, True])
def test_a_baseline_reads_with_the_frequencies_of_its_keys(length, task_tokens):
    model = of_rope("llama", "longrope")
    context, text = tokens(1, length), tokens(1, 20)
    found, expected = (FullContext(one, task_tokens=task_tokens).eval() for one in (model, pinned(model, length)))
    if length == 1 and not task_tokens:
        # It keeps no keys, and the text has the frequencies of its own pass.
        expected = FullContext(model).eval()
    torch.manual_seed(0)
    found.task_embeddings, expected.task_embeddings = [expected.task_embeddings] * 2
    states = [one.decode(one.encode(context), "lm", text) for one in (found, expected)]
    torch.testing.assert_close(*states, **TOLERANCE)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("family", "rope"), [("llama", "dynamic"), ("llama", "longrope"), ("phi3", "longrope")])
def test_all_keys_of_a_text_are_read_as_by_a_model_with_its_frequencies(family, rope, sizes):
    model, (length, more) = of_rope(family, rope), sizes
    compressor, plain = Select(model, ratio=1, by="key_norm", bos_token=1).eval(), pinned(model, 1 + length)
    memory, ids = compressor.encode(tokens(length)), torch.cat([torch.ones(1, 1).long(), tokens(1, length + more)], 1)
    with torch.no_grad():
        expected = plain(ids).logits[:, length:]
        found = compressor.logits(compressor.decode(memory, "lm", ids[:, 1 + length :]))
        # Transformers' RoPE computes angles in single precision.
        torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-3)
        answer = compressor.generate(memory, max_new_tokens=more)
        written = torch.cat([ids[:, : 1 + length], answer], 1)
        assert torch.equal(plain(written).logits[:, length:-1].argmax(-1), answer)
        # A pass over all of it has other frequencies.
        same = torch.allclose(model(ids).logits[:, length:], expected, atol=0.1)
        assert same == (length + more < LIMIT or (rope == "longrope" and length >= LIMIT))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("settings", READERS, ids=str)
def test_selecting_and_its_readers_have_the_texts_frequencies(settings, sizes):
    (length, more), tokenizer = sizes, byte_tokenizer()
    model = of_rope("llama", "longrope", vocab_size=257)
    context, text = tokens(1, length), tokens(1, more)
    made = []
    for one in (model, pinned(model, 1 + length)):
        compressor = Select(one, ratio=4, bos_token=256, **settings).eval()
        compressor.tokenizer = tokenizer
        memory = compressor.encode(context)
        conversation = Conversation(compressor, memory)
        replies = [conversation.reply(part, max_new_tokens=9, stop_tokens=()) for part in (text[:, :5], text[:, 5:])]
        answer = compressor.generate(memory, text, max_new_tokens=12, stop_tokens=())
        made.append((memory, compressor.decode(memory, "qa", text), answer, *replies))
    (memory, states, *answers), (memory_expected, states_expected, *answers_expected) = made
    assert_same(memory, memory_expected)
    torch.testing.assert_close(states, states_expected, **TOLERANCE)
    assert all(map(torch.equal, answers, answers_expected))


def test_an_answer_goes_on_with_the_frequencies_of_what_was_read():
    model = of_rope("llama", "longrope")
    compressors = [ICAE(one, chunk=16, ratio=4, lora=None).eval() for one in (model, pinned(model, LIMIT))]
    compressors[1].load_state_dict(compressors[0].state_dict(), strict=False)
    context, prompt = tokens(1, 16), tokens(1, 15)
    found, expected = (one.generate(one.encode(context), prompt, max_new_tokens=30) for one in compressors)
    assert torch.equal(found, expected)


def test_a_pass_that_rotates_otherwise_leaves_the_gradients_of_the_one_before():
    model = of_rope("llama", "longrope")
    compressor = AvgPool(model, ratio=4, lora=None, bos_token=1)
    memory = compressor.encode(tokens(1, 20), gradient=True)
    loss = compressor.decode(memory, "lm", tokens(1, 30)).sum()
    loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    memory = compressor.encode(tokens(1, 20), gradient=True)
    loss = compressor.decode(memory, "lm", tokens(1, 30)).sum()
    compressor.encode(tokens(1, 60))
    loss.backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", BATCHED)
def test_rows_are_made_read_and_answered_as_they_are_alone(name, rope, monkeypatch):
    monkeypatch.setattr("tests.compress.test_contract.tiny_llama", lambda: of_rope("llama", rope))
    compressor = (FullContext(of_rope("llama", rope)) if name == "full context" else make(name)).eval()
    contexts = [tokens(length).tolist() for length in (12, 60, 20)]
    unused = copy.deepcopy(compressor)
    memory = compressor.encode(contexts)
    for row, context in enumerate(contexts):
        # Nor does it depend on earlier texts.
        expected = copy.deepcopy(unused).encode([context])
        for found in (memory[row], compressor.encode([context])):
            assert_same(found, expected)
    texts = [tokens(length).tolist() for length in (50, 3, 0)]
    alone = [(memory[row], [text]) for row, text in enumerate(texts)]
    for task in ("ae", "lm"):
        states = compressor.decode(memory, task, texts)
        assert states.shape[:2] == (3, 51)
        for row, (one, text) in zip(states, alone, strict=True):
            torch.testing.assert_close(row[: 1 + len(text[0])], compressor.decode(one, task, text)[0], **TOLERANCE)
    for options in ({}, {"num_beams": 2}, {"num_beams": 3, "num_return_sequences": 2}):
        settings = {"max_new_tokens": 12, "stop_tokens": range(8), "pad_token": 49} | options
        given = [compressor.generate(one, text, **settings) for one, text in alone]
        width = max(rows.shape[1] for rows in given)
        expected = torch.cat([F.pad(rows, (0, width - rows.shape[1]), value=49) for rows in given])
        assert torch.equal(compressor.generate(memory, texts, **settings), expected)
    # One text that several questions are asked about.
    many = compressor.generate(memory[1], texts, max_new_tokens=5)
    assert torch.equal(many, torch.cat([compressor.generate(memory[1], [text], max_new_tokens=5) for text in texts]))
    for settings in ({"return_dict_in_generate": True}, {"streamer": TextStreamer(byte_tokenizer())}):
        with pytest.raises(ValueError, match=rf"{min(settings)}: expected none for several rows, .* got 3 rows"):
            compressor.generate(memory, texts, **settings)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("window", [None, 40])
def test_rows_train_as_they_are_alone(rope, window, monkeypatch):
    # Its own scale is that of all rows.
    monkeypatch.setattr(
        training, "hidden_loss", lambda own, goals: (torch.stack(own) - torch.stack(goals)).abs().mean()
    )
    losses = ("ae", "lm", "qa", "kl", "hidden")
    model = of_rope("llama", rope)
    compressor = AvgPool(model, ratio=4, lora=2, bos_token=1, window=window, losses=losses)
    contexts, questions = [tokens(20).tolist(), tokens(60).tolist()], [tokens(3).tolist(), tokens(30).tolist()]
    texts = {"continuation_ids": tokens(2, 40), "question_ids": questions, "answer_ids": tokens(2, 5)}
    found = compressor(contexts, **texts)
    found["loss"].backward()
    assert all(parameter.grad.isfinite().all() for _, parameter in compressor.trainable())
    alone = [
        compressor(contexts[row : row + 1], **{name: ids[row : row + 1] for name, ids in texts.items()})
        for row in range(2)
    ]
    for name in losses[1:]:
        mean = torch.stack([one[name] for one in alone]).mean()
        torch.testing.assert_close(found[name], mean, rtol=1e-5, atol=1e-5)


def test_the_compression_loss_of_rows_reaches_the_memory_tokens():
    settings = {"chunk": 16, "ratio": 4, "window": 96, "lora": 2, "losses": ("ae", "compression")}
    compressor = ICAE(of_rope("llama", "dynamic"), **settings)
    compressor([tokens(length).tolist() for length in (80, 120, 20)])["loss"].backward()
    assert bool(compressor.memory_embeddings.grad.abs().sum() > 0)


@pytest.mark.parametrize("rope", ROPES)
def test_joining_needs_frequencies_that_are_the_same_at_any_length(rope):
    for method, carries_keys in ((FiveHundredX, True), (ICAE, False)):
        compressor = method(of_rope("llama", rope), chunk=16, ratio=4, lora=None)
        memory, same = compressor.encode(tokens(20)), "model: expected RoPE of the same frequencies at any length, got"
        with pytest.raises(TypeError, match=f"{same} {rope}") if carries_keys else nullcontext():
            assert compressor.join([memory, memory]).context_lengths == (40,)


def test_a_language_model_reads_rows_of_one_length():
    reader = Compressive(
        AvgPool(of_rope("llama", "longrope"), ratio=2, lora=None, bos_token=1).eval(), tau=8, segment=4
    )
    assert reader(tokens(2, 30))["loss"].isfinite()
    with pytest.raises(ValueError, match=r"input_ids: expected rows of one length, .* got 6 to 31 tokens"):
        reader.generate([tokens(30).tolist(), tokens(5).tolist()], max_new_tokens=2)
