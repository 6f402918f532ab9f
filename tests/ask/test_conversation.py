"""A conversation equals generation behind everything said before, and reads each token once."""

import warnings
from itertools import cycle

import pytest
import torch
from transformers import GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from gistkit.ask import Conversation
from gistkit.compress import ICAE, SAC, AvgPool, Dodo, FiveHundredX, GistPool, KVDistill, SeparateEncoder, VoCo
from gistkit.inspect import AttentionRecorder
from tests.helpers.models import tiny_llama
from tests.helpers.vision import Image, processed, tiny_vision

METHODS = {
    "icae": (ICAE, {"chunk": 8, "ratio": 4}),
    "x500": (FiveHundredX, {"chunk": 8, "ratio": 4}),
    "x500 upl": (FiveHundredX, {"chunk": 8, "ratio": 4, "layout": "upl"}),
    "gistpool": (GistPool, {"ratio": 4, "bos_token": 1}),
    "avgpool": (AvgPool, {"ratio": 4, "bos_token": 1}),
    "dodo": (Dodo, {"ratio": 4, "layer": 1, "bos_token": 1}),
    "kv_distill": (KVDistill, {"ratio": 4, "layer": 1, "bos_token": 1}),
    "sac": (SAC, {"chunk": 8, "ratio": 4}),
    "separate_encoder": (SeparateEncoder, {"segment": 8, "ratio": 4}),
}


def made(name, **changes):
    method, settings = METHODS[name]
    torch.manual_seed(1)
    return method(tiny_llama(**changes), lora=2, window=20, **settings).eval()


def ids(count, seed=0):
    return torch.randint(2, 50, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def encoded(compressor, count=17, seed=0):
    return compressor.encode([ids(count, seed)])


def answer_behind(compressor, memory, text, count=6, **settings):
    """The answer of one call of `generate` whose prompt is the whole conversation."""
    return compressor.generate(memory, [text], task="qa", max_new_tokens=count, **settings)[0].tolist()


# The window of 20 tokens holds the first context of a kind, and not the second.
@pytest.mark.parametrize(("name", "context"), [*zip(METHODS, cycle([17, 26]), strict=False)])
def test_each_answer_is_that_of_the_whole_conversation_read_anew(name, context):
    compressor = made(name)
    memory = encoded(compressor, context)
    rest = list(memory.rest[0])
    assert len(rest) == max(0, context - 20)
    conversation, text = Conversation(compressor, memory), []
    for turn in range(3):
        prompt = ids(4 - turn, seed=turn)
        expected = answer_behind(compressor, memory, text + prompt)
        assert conversation.reply(prompt, max_new_tokens=6).tolist() == expected
        # Looking at the attention leaves no trace.
        conversation.attention()
        text += prompt + expected
        assert conversation.text == rest + text and conversation.turns == turn + 1
    conversation.new()
    assert (conversation.text, conversation.turns) == (rest, 0)
    assert conversation.reply(ids(3), max_new_tokens=6).tolist() == answer_behind(compressor, memory, ids(3))


def test_images_have_conversations():
    compressor = VoCo(tiny_vision("llava"), memory_tokens=2, lora=None).eval()
    memory, prompt = compressor.encode(processed("llava", [[3, Image()]])), [5, 6, 7, 8]
    conversation = Conversation(compressor, memory)
    first = conversation.reply(prompt, max_new_tokens=3).tolist()
    expected = answer_behind(compressor, memory, prompt + first + prompt[:2], 3)
    assert conversation.reply(prompt[:2], max_new_tokens=3).tolist() == expected


def test_answers_take_the_options_of_generate_but_for_beams_and_drafts():
    compressor = made("x500")
    memory = encoded(compressor)
    config = GenerationConfig(repetition_penalty=5.0, max_new_tokens=20)
    expected = compressor.generate(memory, [ids(4)], task="qa", generation_config=config)[0].tolist()
    conversation = Conversation(compressor, memory)
    assert conversation.reply(ids(4), generation_config=config).tolist() == expected
    assert expected != answer_behind(compressor, memory, ids(4), 20)
    first = StoppingCriteriaList([MaxLengthCriteria(4 + 3)])
    conversation.new()
    assert conversation.reply(ids(4), generation_config=config, stopping_criteria=first).tolist() == expected[:3]
    # What it returns is one answer's tokens, whatever else is asked of the loop.
    conversation.new()
    config.return_dict_in_generate = True
    assert conversation.reply(ids(4), generation_config=config, max_new_tokens=3).tolist() == expected[:3]
    for options, got in (
        ({"num_beams": 2}, "beam_search of 1"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation of 1"),
        ({"do_sample": True, "num_return_sequences": 2}, "sample of 2"),
    ):
        message = f"generation_config: expected greedy_search or sample of one sequence, .*, got {got}"
        with pytest.raises(ValueError, match=message):
            conversation.reply(ids(4), **options)
    assert conversation.turns == 1 and conversation.text == ids(4) + expected[:3]


@pytest.mark.parametrize("name", ["icae", "x500", "gistpool"])
def test_each_token_is_read_once(name):
    compressor = made(name)
    conversation, read = Conversation(compressor, encoded(compressor)), []
    seen = compressor.lm.decoder.register_forward_pre_hook(
        lambda module, args, inputs: read.append(inputs["inputs_embeds"].shape[1]), with_kwargs=True
    )
    conversation.reply(ids(4), max_new_tokens=3)
    memory = conversation.memory.num_tokens if name == "icae" else 0
    lead = 0 if name == "gistpool" else 1
    assert read == [memory + lead + 4, 1, 1]
    read.clear()
    # The last token of the answer was not read yet.
    conversation.reply(ids(5), max_new_tokens=2)
    assert read == [1 + 5, 1]
    read.clear()
    conversation.new()
    conversation.reply(ids(5), max_new_tokens=1)
    assert read == [5]
    seen.remove()


def test_an_answer_ends_at_a_stop_token_or_when_it_is_stopped():
    compressor = made("x500")
    memory = encoded(compressor)
    free = answer_behind(compressor, memory, ids(4), 8)
    stop = free[3]
    conversation = Conversation(compressor, memory)
    assert conversation.reply(ids(4), max_new_tokens=8, stop_tokens=stop).tolist() == free[: free.index(stop) + 1]
    asked = []
    conversation.new()
    answer = conversation.reply(ids(4), max_new_tokens=8, stopped=lambda: asked.append(0) or len(asked) == 3)
    assert answer.tolist() == free[:3] and conversation.text == ids(4) + free[:3]
    # What was written before the stop belongs to the conversation.
    expected = answer_behind(compressor, memory, ids(4) + free[:3] + ids(2, seed=5))
    assert conversation.reply(ids(2, seed=5), max_new_tokens=6).tolist() == expected


def test_samples_are_those_of_generate():
    compressor = made("icae")
    memory = encoded(compressor)
    settings = {"do_sample": True, "temperature": 2.0, "top_k": 20}
    draw = lambda seed: {**settings, "generator": torch.Generator().manual_seed(seed)}  # noqa: E731
    expected = answer_behind(compressor, memory, ids(4), **draw(3))
    assert Conversation(compressor, memory).reply(ids(4), max_new_tokens=6, **draw(3)).tolist() == expected
    assert Conversation(compressor, memory).reply(ids(4), max_new_tokens=6, **draw(4)).tolist() != expected


@pytest.mark.parametrize("name", [pytest.param("icae", marks=pytest.mark.slow), "x500", "gistpool"])
def test_the_oldest_turns_go_when_the_window_is_full(name):
    compressor = made(name, max_position_embeddings=60)
    memory = encoded(compressor, 26)
    conversation, prompts, answers = Conversation(compressor, memory), [], []
    with warnings.catch_warnings():
        # A position beyond the model's would be warned of.
        warnings.simplefilter("error")
        gone = 0
        for turn in range(5):
            prompts.append(ids(5, seed=turn))
            room = conversation.make_room(5 + 4)
            gone += room
            text = [
                token for pair in zip(prompts[gone:], answers[gone:], strict=False) for part in pair for token in part
            ]
            expected = answer_behind(compressor, memory, text + prompts[-1], 4)
            answers.append(conversation.reply(prompts[-1], max_new_tokens=4).tolist())
            assert answers[-1] == expected and conversation.turns == turn + 1 - gone
    assert gone >= 2
    limit = 60 - memory.starts[0] - len(memory.rest[0]) - (name != "gistpool")
    # As many stay as fit.
    assert 9 * conversation.turns <= limit < 9 * (conversation.turns + 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_answer_that_is_broken_off_leaves_no_trace(error):
    compressor = made("x500")
    memory = encoded(compressor)
    conversation = Conversation(compressor, memory)
    first = conversation.reply(ids(4), max_new_tokens=3).tolist()
    calls = []

    def fail(*_):
        calls.append(0)
        if len(calls) == 3:
            raise error

    # Between the first layer, which has stored its keys, and the second.
    hook = compressor.lm.decoder.layers[0].register_forward_hook(fail)
    with pytest.raises(error):
        conversation.reply(ids(5, seed=1), max_new_tokens=9)
    # The same while the answer is read a second time.
    calls.clear()
    with pytest.raises(error):
        for _ in range(3):
            conversation.attention()
    hook.remove()
    assert conversation.text == ids(4) + first and conversation.turns == 1
    attention = conversation.attention()
    assert float(attention[: memory.num_tokens].sum()) > 0
    expected = answer_behind(compressor, memory, ids(4) + first + ids(5, seed=1))
    assert conversation.reply(ids(5, seed=1), max_new_tokens=6).tolist() == expected


def test_turns_that_went_for_an_answer_are_back_when_it_is_broken_off():
    compressor = made("x500", max_position_embeddings=60)
    memory = encoded(compressor)
    conversation = Conversation(compressor, memory)
    for turn in (1, 2):
        conversation.reply(ids(9, turn), max_new_tokens=9)
    text = conversation.text

    def stop():
        raise KeyboardInterrupt

    for error, options in ((KeyboardInterrupt, {"stopped": stop}), (ValueError, {"misspelt": 1})):
        with pytest.raises(error):
            conversation.reply(ids(9), max_new_tokens=9, **options)
        assert conversation.text == text and conversation.turns == 2
    assert float(conversation.attention()[: memory.num_tokens].sum()) > 0
    conversation.reply(ids(9), max_new_tokens=9)
    assert conversation.turns == 2


def test_a_reply_is_not_recorded(monkeypatch):
    compressor = made("x500")
    conversation = Conversation(compressor, encoded(compressor))

    def refuse(_):
        raise AssertionError("recorded")

    monkeypatch.setattr(AttentionRecorder, "__enter__", refuse)
    conversation.reply(ids(4), max_new_tokens=3)
    with pytest.raises(AssertionError, match="recorded"):
        conversation.attention()


def test_mistakes_are_named():
    compressor = made("x500")
    conversation = Conversation(compressor, encoded(compressor))
    for match, call in [
        ("memories: expected at least one, got none", lambda: Conversation(compressor)),
        ("memories: expected the memory of one text in each, got 2 rows",
         lambda: Conversation(compressor, compressor.encode([ids(9), ids(9)]))),
        ("memory: expected a Memory as encode returns, got str", lambda: Conversation(compressor, "report.gist")),
        ("memory: expected one made with method 'x500', got one made with method 'icae'",
         lambda: Conversation(compressor, encoded(made("icae")))),
        ("attention: expected a conversation with an answer, got none yet", conversation.attention),
        ("prompt_ids: expected at least 1 token, got 0 in row 0", lambda: conversation.reply([[]])),
        ("prompt_ids: expected 1 rows as the memory has, got 2", lambda: conversation.reply([[3], [4]])),
        ("max_new_tokens: expected a whole number >= 1, got 0", lambda: conversation.reply([3], max_new_tokens=0)),
    ]:  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=match):
            call()
    assert conversation.text == []
