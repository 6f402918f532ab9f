"""Generation from a memory: greedy, ragged, sampled, with beams or an assistant, to each row's stop."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TextStreamer

from gistkit.ask import Conversation
from gistkit.compress import ICAE, AvgPool, FiveHundredX, Select
from gistkit.compress.generation import padded_at_start
from gistkit.compress.tokens import Rows
from gistkit.hf.cache import CACHE
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import byte_tokenizer, small, tiny, tiny_llama
from tests.helpers.tiers import slow

METHODS = [ICAE, FiveHundredX]


def made(method=FiveHundredX, rows=1, model=None, **settings):
    """A compressor and the memory of random texts of 12 tokens."""
    compressor = method(tiny_llama() if model is None else model, **{"chunk": 8, "ratio": 4, "lora": None} | settings)
    return compressor, compressor.encode(torch.randint(0, 50, (rows, 12)))


def step_by_step(compressor, memory, task, prompt, count):
    """Greedy decoding of one row that runs everything again for each token."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = compressor.decode(memory, task, [tokens])
        tokens.append(int(compressor.logits(hidden[:, -1]).argmax(-1)))
    return tokens[len(prompt) :]


# Each method once; GPT-2's maps are no plain linear maps, of which gists and nuggets have others.
QUICK = [("llama", "icae", "dpl"), ("gemma3", "x500", "epl"), ("gpt2", "avgpool", ""), ("qwen3", "gistpool", "")]
QUICK += [("llama", "dodo", "")]
MORE = [("gemma3", "icae", "epl"), ("gpt2", "icae", "epl"), ("gpt2", "x500", "dpl"), ("llama", "x500", "dpl")]
MORE += [("gemma3", "avgpool", ""), ("gemma3", "gistpool", ""), ("gemma3", "dodo", "")]


@pytest.mark.parametrize(("family", "name", "scheme"), [*QUICK, *slow(*MORE)])
def test_transformers_loop_chooses_what_decoding_step_by_step_does(family, name, scheme):
    compressor = unsettle(small(name, tiny(family, bos_token_id=1), scheme)).eval()
    # One that fits the window and one with tokens behind it; prompts of different lengths, one of them empty.
    memory = compressor.encode([torch.randint(3, 50, (n,)).tolist() for n in (9, 19)])
    prompts = [torch.randint(3, 50, (n,)).tolist() for n in (4, 0)]
    answer = compressor.generate(memory, prompts, task="qa", max_new_tokens=4)
    for row, prompt in enumerate(prompts):
        assert answer[row].tolist() == step_by_step(compressor, memory[row], "qa", prompt, 4)


def whole_context(seed=0):
    """AvgPool that keeps every token, so that the model on the whole context is an oracle; context and prompt."""
    model = tiny_llama(bos_token_id=1)
    compressor = AvgPool(model, ratio=1, lora=None)
    numbers = torch.Generator().manual_seed(seed)
    context, prompt = (torch.randint(3, 50, (2, n), generator=numbers) for n in (11, 4))
    return compressor, context, prompt


def read_whole(model, context, prompt, **options):
    ids = torch.cat([torch.ones(len(context), 1, dtype=torch.int64), context, prompt], 1)
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, pad_token_id=0, **options)[:, ids.shape[1] :]


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.8},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
        {"do_sample": True, "num_beams": 2},
        {"min_new_tokens": 3, "eos_token_id": [7, 8]},
        {"bad_words_ids": [[5], [9]]},
    ],
    ids=", ".join,
)
def test_options_are_those_of_the_model_that_reads_everything(options):
    compressor, context, prompt = whole_context()
    memory = compressor.encode(context)
    torch.manual_seed(3)
    expected = read_whole(compressor.model, context, prompt, max_new_tokens=6, **options)
    torch.manual_seed(3)
    found = compressor.generate(memory, prompt, max_new_tokens=6, pad_token=0, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["icae", "dodo"])
def test_one_memory_serves_many_prompts(name):
    compressor = small(name, tiny_llama(bos_token_id=1))
    memory = compressor.encode(torch.randint(0, 50, (1, 12)))
    prompts = torch.randint(0, 50, (3, 4))
    answers = compressor.generate(memory, prompts, max_new_tokens=4)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert torch.equal(compressor.generate(memory, prompt, max_new_tokens=4)[0], answer)


def test_rows_stop_by_themselves():
    compressor, memory = made(rows=4)
    free = compressor.generate(memory, max_new_tokens=8)
    stop = int(free[0, 2])
    # One id or several, and any number behind the end.
    for ends, filler in (([stop], 49), (stop, -100)):
        stopped = compressor.generate(memory, max_new_tokens=8, stop_tokens=ends, pad_token=filler)
        for row, plain in zip(stopped.tolist(), free.tolist(), strict=True):
            end = plain.index(stop) + 1 if stop in plain else len(plain)
            assert row[:end] == plain[:end][: len(row)] and set(row[end:]) <= {filler}
    alone = compressor.generate(memory[0], max_new_tokens=8, stop_tokens=[stop])
    assert alone.shape[1] == free[0].tolist().index(stop) + 1


@pytest.mark.parametrize("listed", [False, True])
def test_rows_stop_at_the_models_end_token_by_default(listed):
    compressor, memory = made()
    free = compressor.generate(memory, max_new_tokens=8)[0].tolist()
    stop = free[3]
    compressor.model.generation_config.eos_token_id = [49, stop] if listed else stop
    expected = free[: free.index(stop) + 1]
    assert compressor.generate(memory, max_new_tokens=8)[0].tolist() == expected
    config = GenerationConfig(max_new_tokens=8)
    assert compressor.generate(memory, generation_config=config)[0].tolist() == expected
    for options in ({"stop_tokens": ()}, {"generation_config": GenerationConfig(eos_token_id=-1)}):
        assert compressor.generate(memory, max_new_tokens=8, **options)[0].tolist() == free


def test_a_configuration_is_taken_with_overrides_and_stays_as_it_is():
    compressor, context, prompt = whole_context()
    memory = compressor.encode(context)
    config = GenerationConfig(num_beams=3, max_new_tokens=5, pad_token_id=0)
    before = copy.deepcopy(config).to_dict()
    beams = compressor.generate(memory, prompt, generation_config=config)
    assert torch.equal(beams, compressor.generate(memory, prompt, num_beams=3, max_new_tokens=5))
    greedy = compressor.generate(memory, prompt, generation_config=config, num_beams=1)
    assert torch.equal(greedy, compressor.generate(memory, prompt, max_new_tokens=5)) and not torch.equal(greedy, beams)
    assert config.to_dict() == before
    # As in transformers, max_length counts the prompt.
    assert compressor.generate(memory, prompt, max_length=prompt.shape[1] + 2).shape == (2, 2)
    # The model's own ways count only where they are given.
    compressor.model.generation_config.num_beams = 3
    assert torch.equal(compressor.generate(memory, prompt, max_new_tokens=5), greedy)
    own = compressor.generate(memory, prompt, generation_config=compressor.model.generation_config, max_new_tokens=5)
    assert torch.equal(own, beams)
    output = compressor.generate(memory, prompt, max_new_tokens=3, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(output.sequences, greedy[:, :3]) and torch.equal(output.logits[2].argmax(-1), greedy[:, 2])


@pytest.mark.parametrize("implementation", ["static", "dynamic", "quantized"])
def test_the_cache_of_an_answer_is_the_memorys_whatever_a_configuration_says(implementation, recwarn):
    compressor, context, prompt = whole_context()
    memory = compressor.encode(context)
    expected = compressor.generate(memory, prompt, max_new_tokens=5)
    config = GenerationConfig(max_new_tokens=5, cache_implementation=implementation)
    if implementation == "static":
        config.max_cache_len = 7
    assert torch.equal(compressor.generate(memory, prompt, generation_config=config), expected)
    option = {"max_new_tokens": 5, "cache_implementation": implementation}
    assert torch.equal(compressor.generate(memory, prompt, **option), expected)
    one = compressor.encode(context[:1])
    assert Conversation(compressor, one).reply(prompt[:1], generation_config=config).tolist() == (
        compressor.generate(one, prompt[:1], task="qa", max_new_tokens=5)[0].tolist()
    )
    assert not recwarn.list


@pytest.mark.parametrize("settings", [{}, {"shares": "all"}, {"fit": True}])
def test_a_returned_cache_is_read_on_only_if_the_model_reads_all_of_the_memory_in_it(settings):
    compressor = Select(tiny_llama(vocab_size=257), ratio=3, by="key_norm", bos_token=256, **settings).eval()
    compressor.tokenizer = byte_tokenizer()
    memory = compressor.encode([torch.randint(3, 50, (30,)).tolist()])
    token = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
    output = compressor.generate(memory, [[5, 6]], **token)
    more = {CACHE: getattr(output, CACHE, None) or output.past_key_values}
    if not settings:
        logits = compressor.model(torch.tensor([[7]]), **more).logits[:, -1]
        expected = compressor.generate(memory, [[5, 6, 7]], **token).logits[0]
        torch.testing.assert_close(logits.float(), expected, rtol=1e-5, atol=1e-6)
        return
    with pytest.raises(ValueError, match=f"{CACHE}: expected the same number of tokens in each head"):
        compressor.model(torch.tensor([[7]]), **more)
    assert torch.equal(compressor.generate(memory, [[5, 6]], **token).sequences, output.sequences)


def test_repetition_is_penalised_in_prompt_and_answer():
    compressor, memory = made()
    text, penalty = torch.randint(0, 50, (1, 3)), RepetitionPenaltyLogitsProcessor(3.0)
    found = compressor.generate(memory, text, max_new_tokens=20, repetition_penalty=3.0)
    same = compressor.generate(memory, text, max_new_tokens=20, logits_processor=LogitsProcessorList([penalty]))
    tokens = text
    for _ in range(20):
        logits = compressor.logits(compressor.decode(memory, "lm", tokens)[:, -1])
        tokens = torch.cat([tokens, penalty(tokens, logits).argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, tokens[:, 3:]) and torch.equal(found, same)
    assert not torch.equal(found, compressor.generate(memory, text, max_new_tokens=20))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}])
@pytest.mark.parametrize(
    "compressor",
    [
        lambda model: ICAE(model, chunk=8, ratio=4, window=16, lora=None),
        lambda model: Select(model, ratio=3, by="key_norm", shares="heads"),
    ],
    ids=["embeddings", "packed keys"],
)
def test_beams_of_a_ragged_batch_are_those_of_each_row(compressor, options):
    compressor = compressor(tiny_llama(bos_token_id=1))
    memory = compressor.encode([torch.randint(0, 50, (n,)).tolist() for n in (16, 4, 21)])
    prompts = [torch.randint(0, 50, (n,)).tolist() for n in (3, 0, 5)]
    answers = compressor.generate(memory, prompts, max_new_tokens=5, **options)
    count = options.get("num_return_sequences", 1)
    for row, prompt in enumerate(prompts):
        alone = compressor.generate(memory[row], [prompt] if prompt else None, max_new_tokens=5, **options)
        assert torch.equal(answers[row * count : (row + 1) * count], alone)


@pytest.mark.parametrize(("method", "scheme"), [(FiveHundredX, "epl"), *slow((ICAE, "dpl"))])
def test_an_assistant_changes_no_token(method, scheme):
    (compressor, memory), text = made(method, layout=scheme), torch.randint(0, 50, (1, 3))
    plain = compressor.generate(memory, text, max_new_tokens=20)
    # Without the memory the model drafts tokens of which some are kept and others rolled back.
    drafted = compressor.generate(memory, text, max_new_tokens=20, assistant_model=copy.deepcopy(compressor.model))
    looked_up = compressor.generate(memory, text, max_new_tokens=20, prompt_lookup_num_tokens=3)
    assert torch.equal(drafted, plain) and torch.equal(looked_up, plain)


def test_random_numbers_of_another_device_are_refused():
    # Its draws would not be those of the generator.
    other = SimpleNamespace(device=torch.device("cuda", 0))
    compressor, memory = made(ICAE)
    with pytest.raises(ValueError, match="generator: expected one on cpu, got one on cuda:0"):
        compressor.generate(memory, do_sample=True, generator=other)


def test_sampling_follows_its_seed():
    compressor, memory = made(ICAE)
    draw = lambda seed, **options: compressor.generate(  # noqa: E731
        memory, max_new_tokens=4, do_sample=True, generator=torch.Generator().manual_seed(seed), **options
    )
    assert torch.equal(draw(0), draw(0)) and any(not torch.equal(draw(0), draw(seed)) for seed in range(1, 5))
    assert torch.equal(draw(3, top_k=1), compressor.generate(memory, max_new_tokens=4))


def test_streamer_receives_the_prompt_and_every_token(capsys):
    class Recorder:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens.append(value)

        def end(self):
            self.ended = True

    (compressor, memory), streamer, text = made(ICAE, rows=2), Recorder(), torch.tensor([[3, 4], [5, 6]])
    answer = compressor.generate(memory, text, max_new_tokens=3, streamer=streamer)
    prompt, *tokens = streamer.tokens
    assert torch.equal(prompt, text) and torch.equal(torch.stack(tokens, 1), answer) and streamer.ended
    words = byte_tokenizer()
    for prompt in (None, text[:1]):
        answer = compressor.generate(
            memory[0], prompt, max_new_tokens=3, streamer=TextStreamer(words, skip_prompt=True)
        )
        assert capsys.readouterr().out == words.decode(answer[0]) + "\n"


def test_errors_say_what_was_expected():
    compressor, memory = made(ICAE, rows=2)
    for options, message in [
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number >= 1, got 0"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens: expected a whole number >= 1, got 2\.5"),
        ({"prompt_ids": torch.zeros(3, 1, dtype=torch.long)}, "prompt_ids: expected 2 rows as the memory has, got 3"),
        ({"do_sample": True, "temperature": 0.0}, r"`temperature` \(=0.0\) has to be a strictly positive float"),
        ({"max_new_token": 3}, "max_new_token"),
        (
            {"prefill_chunk_size": 2},
            "prefill_chunk_size: expected none, because each step has only the logits of one pass .* got 2",
        ),
        ({"guidance_scale": 1.5}, "guidance_scale: expected none, .* got 1.5"),
        ({"output_hidden_states": True}, "output_hidden_states: expected none"),
        ({"task": "sum"}, "task: expected one of ae, lm, qa, got 'sum'"),
        ({"prompt_ids": [[60], [1]]}, r"prompt_ids: expected token ids in \[0, 50\), got 60"),
    ]:
        with pytest.raises(ValueError, match=message):
            compressor.generate(memory, **options)
    for options, message in [
        ({"memory": None}, "memory: expected a Memory as encode returns, got NoneType"),
        ({"stop_tokens": "</s>"}, "stop_tokens: expected token ids"),
        ({"stop_tokens": [0.5]}, "stop_tokens: expected token ids"),
    ]:
        with pytest.raises(TypeError, match=message):
            compressor.generate(**{"memory": memory} | options)
    with pytest.raises(TypeError, match="memory: expected a Memory as encode returns, got dict"):
        compressor.decode({}, "lm", [[1]])
    with pytest.raises(ValueError, match=r"dtype: expected one of floating point, got torch\.int64"):
        memory.to(dtype=torch.int64)
    with pytest.raises(ValueError, match=r"repeat: expected .* count 1\.5"):
        memory[0].repeat(1.5)


@pytest.mark.parametrize("method", METHODS)
def test_a_memory_of_another_dtype_is_read_in_the_models(method):
    compressor, memory = made(method, rows=2)
    half = memory.to(dtype=torch.bfloat16)
    expected = compressor.generate(half.to(dtype=torch.float32), max_new_tokens=4)
    assert torch.equal(compressor.generate(half, max_new_tokens=4), expected)
    assert half.dtype == torch.bfloat16


def test_gradient_checkpointing_does_not_take_the_cache_away():
    compressor, memory = made(rows=2, lora=4)
    expected = compressor.generate(memory, max_new_tokens=5)
    compressor.train().gradient_checkpointing_enable()
    assert torch.equal(compressor.generate(memory, max_new_tokens=5), expected)
    assert any(getattr(module, "gradient_checkpointing", False) for module in compressor.model.modules())


def test_a_model_made_in_inference_mode_is_read():
    with torch.inference_mode():
        model = tiny_llama()
    compressor, memory = made(model=model, lora=4)
    assert memory.fingerprint == compressor.fingerprint()
    assert compressor.generate(memory, max_new_tokens=2).shape == (1, 2)


def test_the_loop_sees_prompts_with_their_padding_before_them():
    rows = Rows(torch.tensor([[5, 6, 7], [8, 0, 0], [9, 4, 0]]), (3, 1, 2))
    padded = padded_at_start(rows, GenerationConfig(pad_token_id=2))
    assert padded.tolist() == [[5, 6, 7], [2, 2, 8], [2, 9, 4]]


def test_answers_end_at_a_token_0_and_at_stop_strings():
    compressor = AvgPool(tiny_llama(vocab_size=257, bos_token_id=1), ratio=4, lora=None).eval()
    compressor.tokenizer = byte_tokenizer()
    memory = compressor.compress("The gate code is 4471.")
    allowed = compressor.tokenizer("abcdefghijklmnopqrstuvwxyz")["input_ids"]
    letters = {"suppress_tokens": [token for token in range(257) if token not in allowed], "max_new_tokens": 8}
    full = compressor.ask(memory, "Who?", **letters)
    for more in ({}, {"tokenizer": compressor.tokenizer}):
        assert compressor.ask(memory, "Who?", stop_strings=[full[1:3]], **more, **letters) == full[:3]
    # No token but 0 is left.
    ends = {"suppress_tokens": list(range(1, 257)), "max_new_tokens": 8}
    assert compressor.ask(memory, "Who?", eos_token_id=0, **ends) == compressor.ask(
        memory, "Who?", stop_tokens=0, **ends
    )
    assert len(compressor.ask(memory, "Who?", stop_tokens=(), **ends)) == 8
