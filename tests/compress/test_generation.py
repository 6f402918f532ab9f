"""Generation from a memory: greedy, ragged, sampled, to each row's stop."""

import pytest
import torch

from gistkit.compress import ICAE, FiveHundredX
from tests.helpers.models import tiny_llama

METHODS = [ICAE, FiveHundredX]


def step_by_step(compressor, memory, task, prompt, count):
    """Greedy decoding of one row that runs everything again for each token."""
    tokens = list(prompt)
    for _ in range(count):
        hidden = compressor.decode(memory, task, [tokens])
        tokens.append(int(compressor.logits(hidden[:, -1]).argmax(-1)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", ["dpl", "epl"])
def test_ragged_prompts_and_memories_equal_each_row_step_by_step(method, scheme):
    compressor = method(tiny_llama(), chunk=8, ratio=4, layout=scheme, window=16, lora=None)
    contexts = [torch.randint(0, 50, (n,)).tolist() for n in (16, 4, 21, 9)]
    prompts = [torch.randint(0, 50, (n,)).tolist() for n in (3, 1, 0, 5)]
    memory = compressor.encode(contexts)
    before = [tensor.clone() for tensor in memory.tensors]
    for task in ("ae", "lm"):
        answer = compressor.generate(memory, prompts, task=task, max_new_tokens=5)
        for row, prompt in enumerate(prompts):
            assert answer[row].tolist() == step_by_step(compressor, memory[row], task, prompt, 5)
        assert torch.equal(compressor.generate(memory, prompts, task=task, max_new_tokens=5), answer)
    assert all(map(torch.equal, before, memory.tensors))


@pytest.mark.parametrize("method", METHODS)
def test_one_memory_serves_many_prompts(method):
    compressor = method(tiny_llama(), chunk=8, ratio=4, lora=None)
    memory = compressor.encode(torch.randint(0, 50, (1, 12)))
    prompts = torch.randint(0, 50, (3, 4))
    answers = compressor.generate(memory, prompts, max_new_tokens=4)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert torch.equal(compressor.generate(memory, prompt, max_new_tokens=4)[0], answer)


def test_rows_stop_by_themselves():
    compressor = FiveHundredX(tiny_llama(), chunk=8, ratio=4, lora=None)
    memory = compressor.encode(torch.randint(0, 50, (4, 12)))
    free = compressor.generate(memory, max_new_tokens=8)
    stop = int(free[0, 2])
    stopped = compressor.generate(memory, max_new_tokens=8, stop_tokens=[stop], pad_token=49)
    for row, plain in zip(stopped.tolist(), free.tolist(), strict=True):
        end = plain.index(stop) + 1 if stop in plain else len(plain)
        assert row[:end] == plain[:end][: len(row)] and set(row[end:]) <= {49}
    alone = compressor.generate(memory[0], max_new_tokens=8, stop_tokens=[stop])
    assert alone.shape[1] == free[0].tolist().index(stop) + 1


def test_sampling_follows_the_distribution_and_its_seed():
    compressor = ICAE(tiny_llama(), chunk=8, ratio=4, lora=None)
    memory = compressor.encode(torch.randint(0, 50, (1, 8)))
    draw = lambda seed, **options: compressor.generate(  # noqa: E731
        memory, max_new_tokens=4, do_sample=True, generator=torch.Generator().manual_seed(seed), **options
    )
    assert torch.equal(draw(0), draw(0)) and any(not torch.equal(draw(0), draw(seed)) for seed in range(1, 5))
    assert torch.equal(draw(3, top_k=1), compressor.generate(memory, max_new_tokens=4))
    many = compressor.generate(
        memory.repeat(4000), max_new_tokens=1, do_sample=True, temperature=0.5,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    exact = (compressor.logits(compressor.decode(memory, "lm", [[]])[:, -1]) / 0.5).softmax(-1)[0]
    share = torch.bincount(many[:, 0], minlength=50) / 4000
    assert (share - exact).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_streamer_receives_every_token():
    class Recorder:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens.append(value)

        def end(self):
            self.ended = True

    compressor, streamer = ICAE(tiny_llama(), chunk=8, ratio=4, lora=None), Recorder()
    answer = compressor.generate(compressor.encode([[1] * 8, [2] * 8]), max_new_tokens=3, streamer=streamer)
    assert torch.equal(torch.stack(streamer.tokens, 1), answer) and streamer.ended


def test_errors_say_what_was_expected():
    compressor = ICAE(tiny_llama(), chunk=8, ratio=4, lora=None)
    memory = compressor.encode([[1] * 8, [2] * 8])
    for options, message in [
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number >= 1, got 0"),
        ({"prompt_ids": torch.zeros(3, 1, dtype=torch.long)}, "prompt_ids: expected 2 rows as the memory has, got 3"),
        ({"do_sample": True, "temperature": 0.0}, "temperature: expected a number > 0, got 0.0"),
        ({"task": "sum"}, "task: expected one of ae, lm, qa, got 'sum'"),
        ({"prompt_ids": [[60], [1]]}, r"prompt_ids: expected token ids in \[0, 50\), got 60"),
    ]:
        with pytest.raises(ValueError, match=message):
            compressor.generate(memory, **options)


@pytest.mark.parametrize("method", METHODS)
def test_a_memory_of_another_dtype_is_read_in_the_models(method):
    compressor = method(tiny_llama(), chunk=8, ratio=4, lora=None)
    memory = compressor.encode(torch.randint(0, 50, (2, 12)))
    half = memory.to(dtype=torch.bfloat16)
    expected = compressor.generate(half.to(dtype=torch.float32), max_new_tokens=4)
    assert torch.equal(compressor.generate(half, max_new_tokens=4), expected)
    assert half.dtype == torch.bfloat16


def test_gradient_checkpointing_does_not_take_the_cache_away():
    compressor = FiveHundredX(tiny_llama(), chunk=8, ratio=4, lora=4).eval()
    memory = compressor.encode(torch.randint(0, 50, (2, 12)))
    expected = compressor.generate(memory, max_new_tokens=5)
    compressor.train().gradient_checkpointing_enable()
    assert torch.equal(compressor.generate(memory, max_new_tokens=5), expected)
    assert any(getattr(module, "gradient_checkpointing", False) for module in compressor.model.modules())


def test_any_number_may_stand_behind_the_end_of_a_row_and_one_id_may_stop_it():
    compressor = FiveHundredX(tiny_llama(), chunk=8, ratio=4, lora=None)
    memory = compressor.encode(torch.randint(0, 50, (4, 12)))
    stop = int(compressor.generate(memory, max_new_tokens=1)[0, 0])
    memory = memory[[0, 0, 1, 2]]
    plain = compressor.generate(memory, max_new_tokens=6, stop_tokens=[stop], pad_token=0)
    padded = compressor.generate(memory, max_new_tokens=6, stop_tokens=stop, pad_token=-100)
    assert (padded[0, 1:] == -100).all() and torch.equal(padded.clamp(min=0), plain)
    for wrong in (None, "</s>", [0.5]):
        with pytest.raises(TypeError, match="stop_tokens: expected token ids"):
            compressor.generate(memory, stop_tokens=wrong)


def test_what_is_no_memory_or_count_is_named():
    compressor = FiveHundredX(tiny_llama(), chunk=8, ratio=4, lora=None)
    memory = compressor.encode(torch.randint(0, 50, (1, 12)))
    with pytest.raises(TypeError, match="memory: expected a Memory as encode returns, got NoneType"):
        compressor.generate(None)
    with pytest.raises(TypeError, match="memory: expected a Memory as encode returns, got dict"):
        compressor.decode({}, "lm", [[1]])
    with pytest.raises(ValueError, match=r"max_new_tokens: expected a whole number >= 1, got 2\.5"):
        compressor.generate(memory, max_new_tokens=2.5)
    with pytest.raises(ValueError, match=r"dtype: expected one of floating point, got torch\.int64"):
        memory.to(dtype=torch.int64)
    with pytest.raises(ValueError, match=r"repeat: expected .* count 1\.5"):
        memory.repeat(1.5)


def test_a_model_made_in_inference_mode_is_read():
    with torch.inference_mode():
        model = tiny_llama()
    compressor = FiveHundredX(model, chunk=8, ratio=4, lora=4)
    with torch.no_grad():
        memory = compressor.encode(torch.randint(0, 50, (1, 12)))
    assert memory.fingerprint == compressor.fingerprint()
    assert compressor.generate(memory, max_new_tokens=2).shape == (1, 2)
