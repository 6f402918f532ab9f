"""Tokens read in a cache of fixed size by a captured pass: those of the model's own loop, and captured where it serves.

Capturing is a GPU's own. Elsewhere a stand-in takes its place, which runs the pass again for each token.
"""

import copy
import pickle
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from gistkit.ask import Conversation
from gistkit.compress import FiveHundredX, Select
from gistkit.compress.steps import LEAST, Shape, captured
from gistkit.hf.cache import CACHE
from gistkit.inspect import AttentionRecorder
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import byte_tokenizer, small, tiny
from tests.helpers.tiers import slow

COUNT = 14
METHODS = {name: partial(small, name) for name in ("icae", "avgpool", "gistpool", "dodo")}
METHODS |= {
    "x500": lambda model: small("x500", model, "dpl"),
    # Heads with different numbers of keys, alone and with biases, and equal heads with biases.
    "packed": lambda model: Select(model, ratio=3, by="key_diff", shares="all", lora=4),
    "fitted": lambda model: Select(model, ratio=3, by="kvzip", shares="all", fit=True, window=16, lora=4),
    "biased": lambda model: Select(model, ratio=3, by="kvzip", fit=True, lora=4),
}
# Families with full attention, with sliding windows, and without gistkit's RoPE; each method once.
QUICK = [("llama", "gistpool"), ("qwen3", "icae"), ("gemma3", "x500"), ("gpt2", "avgpool"), ("mistral", "dodo")]
QUICK += [("gemma3", "packed"), ("qwen3", "fitted"), ("qwen2", "biased")]
MORE = [("gemma2", "gistpool"), ("gemma3", "avgpool"), ("qwen2", "x500"), ("qwen2", "dodo"), ("phi3", "avgpool")]
MORE += [("llama", "packed"), ("mistral", "packed"), ("qwen2", "fitted")]
MORE += [("gpt2", "icae"), ("gemma2", "x500"), ("llama", "icae"), ("mistral", "gistpool"), ("qwen3", "dodo")]


class Captures:
    """A stand-in for a GPU's capture, which counts passes."""

    def __init__(self):
        self.passes, self.made, self.error = 0, 0, None

    def __call__(self, run):
        if self.error is not None:
            raise self.error
        self.made += 1

        def replay():
            self.passes += 1
            return run()

        return replay


def made(name="avgpool", family="llama", dtype=torch.float64, **changes):
    # A fit repeats the text in bytes.
    changes = {"vocab_size": 258} | changes if name in ("fitted", "biased") else changes
    compressor = unsettle(METHODS[name](tiny(family, bos_token_id=1, **changes))).eval().to(dtype)
    compressor.tokenizer = byte_tokenizer()
    return compressor


def ids(count, seed=0):
    return torch.randint(3, 50, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def memories(compressor, *counts):
    return compressor.encode([ids(count, seed) for seed, count in enumerate(counts)])


def written(compressor, memory, prompts, captures=None, **options):
    """What `generate` returns, with captures or by the model's own loop."""
    compressor.lm.steps.capture = captures
    options = {"max_new_tokens": COUNT, "pad_token": 0} | options
    generator = torch.Generator().manual_seed(3)
    return compressor.generate(memory, prompts, generator=generator, **options)


def ready(name="avgpool", **changes):
    """A compressor, captures, and a memory with a prompt."""
    compressor = made(name, **changes)
    return compressor, Captures(), memories(compressor, 9), [ids(4)]


@pytest.mark.parametrize(("family", "name"), [*QUICK, *slow(*MORE)])
def test_tokens_are_those_of_the_models_own_loop(family, name):
    compressor, captures = made(name, family), Captures()
    # One context fits the window and two have tokens behind it; prompts of different lengths, one of them empty.
    memory, prompts = memories(compressor, 9, 19, 17), [ids(4), [], ids(2)]
    for rows in (slice(None), [1]):
        for options in ({}, {"do_sample": True, "top_p": 0.9}):
            part = memory if rows == slice(None) else memory[rows]
            asked = prompts if rows == slice(None) else [prompts[row] for row in rows]
            expected = written(compressor, part, asked, **options)
            before = captures.passes
            assert torch.equal(written(compressor, part, asked, captures, **options), expected)
            # Where nothing stands between a memory and the first token, that is read in a cache without keys.
            nothing = name in ("packed", "biased") and asked == [[]]
            assert captures.passes == before + COUNT - 1 - nothing
            assert compressor.lm.steps.refused is None


def test_hidden_states_are_those_of_the_models_own_loop():
    compressor = made("gistpool", "gemma3")
    memory, prompts = memories(compressor, 9, 19), [ids(4), ids(2)]
    options = {"return_dict_in_generate": True, "output_logits": True}
    expected = written(compressor, memory, prompts, **options)
    found = written(compressor, memory, prompts, Captures(), **options)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-6, atol=1e-6)
    # The cache that comes with them has all tokens but the last.
    torch.testing.assert_close(getattr(found, CACHE).held, getattr(expected, CACHE).held)


def test_rows_end_at_stop_tokens():
    compressor, captures = made("gistpool"), Captures()
    memory, prompts = memories(compressor, 9, 19, 17), [ids(4), ids(1), ids(2)]
    free = written(compressor, memory, prompts, stop_tokens=())
    stops = {"stop_tokens": [int(free[0, 2]), int(free[1, 5]), int(free[2, 9])], "pad_token": 49}
    expected = written(compressor, memory, prompts, **stops)
    found = written(compressor, memory, prompts, captures, **stops)
    assert torch.equal(found, expected) and found.shape[1] < COUNT
    assert captures.passes == found.shape[1] - 1


def test_a_pass_is_captured_once_for_answers_of_a_kind():
    compressor, captures = made(), Captures()
    steps = compressor.lm.steps
    for counts, prompts, more in [
        ((9, 19, 17), [ids(4), [], ids(2)], 1),
        # Four rows share the pass of three.
        ((9, 19, 17, 12), [ids(4), [], ids(2), ids(3)], 0),
        ((9,), [ids(4)], 1),
        ((19,), [ids(1, 5)], 0),
        ((9,), [ids(300)], 1),
        ((9,), [ids(4)], 0),
    ]:
        before, memory = captures.made, memories(compressor, *counts)
        expected = written(compressor, memory, prompts)
        assert torch.equal(written(compressor, memory, prompts, captures), expected)
        assert captures.made == before + more, prompts
    # All of them lie in one block, as large as the largest needs.
    assert len({step.layers[0].keys.untyped_storage().data_ptr() for step in steps._kept.values()}) == 1


def test_a_longer_answer_needs_a_larger_block_and_no_address_of_the_old_one_stays():
    compressor, captures, memory, _ = ready()
    for prompt in (4, 300, 4):
        expected = written(compressor, memory, [ids(prompt)])
        assert torch.equal(written(compressor, memory, [ids(prompt)], captures), expected)
    assert {step.layers[0].keys.untyped_storage().data_ptr() for step in compressor.lm.steps._kept.values()} == {
        compressor.lm.steps._block.untyped_storage().data_ptr()
    }
    assert captures.made == 3


def test_so_many_passes_are_kept_as_were_used_last(monkeypatch):
    monkeypatch.setattr("gistkit.compress.steps.MOST", 2)
    compressor, captures, memory, _ = ready()
    for rows, more in [(8, 1), (1, 1), (8, 0), (2, 1), (8, 0), (1, 1)]:
        before = captures.made
        written(compressor, memory, [ids(4)] * rows, captures)
        assert captures.made == before + more and len(compressor.lm.steps._kept) <= 2


@pytest.mark.parametrize("change", ["adapter", "base", "embedding", "replaced", "activation"])
def test_changed_weights_are_captured_again(change):
    compressor, captures, memory, prompt = ready()
    # Another model's memory would be refused.
    memory = replace(memory, fingerprint=None, maker=None)
    first = written(compressor, memory, prompt, captures)
    with torch.no_grad():
        if change == "adapter":
            for _, parameter in compressor.trainable():
                parameter += 0.3 * torch.randn_like(parameter)
        elif change == "activation":
            compressor.lm.decoder.layers[0].mlp.act_fn = torch.nn.Tanh().eval()
        elif change == "replaced":
            norm = compressor.lm.decoder.norm
            norm.weight = torch.nn.Parameter(torch.randn_like(norm.weight))
        else:
            weight = compressor.embed.weight if change == "embedding" else compressor.lm.decoder.norm.weight
            weight.add_(torch.randn_like(weight))
    found = written(compressor, memory, prompt, captures)
    assert torch.equal(found, written(compressor, memory, prompt)) and not torch.equal(found, first)
    assert captures.made == 2


def test_a_users_own_adapter_counts_while_it_is_on():
    compressor, captures = FiveHundredX(tiny("llama"), chunk=8, ratio=4, lora=None).eval(), Captures()
    memory, prompt = replace(memories(compressor, 9), fingerprint=None, maker=None), [ids(4)]
    config = LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)
    adapted = get_peft_model(compressor.model, config).eval()
    first = written(compressor, memory, prompt, captures)
    with adapted.disable_adapter():
        found = written(compressor, memory, prompt, captures)
        assert torch.equal(found, written(compressor, memory, prompt)) and not torch.equal(found, first)
    assert captures.made == 2


@pytest.mark.parametrize("change", ["train", "double", "copied", "pickled"])
def test_what_was_kept_is_freed_in_training_by_a_move_and_in_a_copy(change):
    compressor = made()
    memory, prompt = memories(compressor, 9), [ids(4)]
    # A stand-in of a function can be pickled; a graph cannot, and is in no copy.
    expected = written(compressor, memory, prompt, Captures())
    assert compressor.lm.steps._kept and compressor.lm.adapters._folds
    if change == "train":
        compressor.train()
        compressor.eval()
    elif change == "double":
        compressor.double()
    elif change == "copied":
        compressor = copy.deepcopy(compressor)
    else:
        compressor = pickle.loads(pickle.dumps(compressor))
    assert not compressor.lm.steps._kept and not compressor.lm.adapters._folds and compressor.lm.steps._block is None
    assert torch.equal(written(compressor, memory, prompt, Captures()), expected)


@contextmanager
def hooked(compressor):
    seen = []
    handle = compressor.lm.decoder.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    try:
        yield
    finally:
        handle.remove()
    # The prompt, and each token but the last.
    assert len(seen) == COUNT


@contextmanager
def recorded(compressor):
    with AttentionRecorder(rows=slice(-1, None)) as recorder:
        yield
    assert len(recorder.maps) == 2 * COUNT


@contextmanager
def training(compressor):
    compressor.lm.decoder.layers[1].train()
    try:
        yield
    finally:
        compressor.lm.decoder.layers[1].eval()


INSTEAD = {
    "hooks": hooked,
    "a recorder": recorded,
    "training": training,
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("why", INSTEAD)
def test_the_models_own_loop_reads_where_a_captured_pass_would_miss_something(why):
    compressor, captures, memory, prompt = ready("gistpool", dtype=torch.float32)
    with INSTEAD[why](compressor):
        expected = written(compressor, memory, prompt)
    with INSTEAD[why](compressor):
        assert torch.equal(written(compressor, memory, prompt, captures), expected)
    assert not captures.made
    # Only then.
    assert torch.equal(written(compressor, memory, prompt, captures), written(compressor, memory, prompt))
    assert captures.made == 1


def test_beams_drafts_and_short_answers_are_read_by_the_models_own_loop():
    compressor, captures, memory, prompt = ready("gistpool")
    for options in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"max_new_tokens": LEAST}):
        expected = written(compressor, memory, prompt, **options)
        assert torch.equal(written(compressor, memory, prompt, captures, **options), expected)
    assert not captures.made
    options = {"do_sample": True, "num_return_sequences": 3}
    expected = written(compressor, memory, prompt, **options)
    assert torch.equal(written(compressor, memory, prompt, captures, **options), expected)
    assert captures.made == 1


def test_frequencies_of_a_passs_length_are_read_by_the_models_own_loop():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    compressor, captures, memory, prompt = ready("icae", rope_parameters=rope, max_position_embeddings=16)
    with pytest.warns(UserWarning, match="max_position_embeddings"):
        expected = written(compressor, memory, prompt)
        assert torch.equal(written(compressor, memory, prompt, captures), expected)
    assert not captures.made


def test_a_model_that_cannot_be_captured_is_not_tried_again():
    compressor, captures, memory, prompt = ready("gistpool")
    expected = written(compressor, memory, prompt)
    captures.error = RuntimeError("operation not permitted when stream is capturing")
    assert torch.equal(written(compressor, memory, prompt, captures), expected)
    assert compressor.lm.steps.refused == "operation not permitted when stream is capturing"
    captures.error = None
    assert torch.equal(written(compressor, memory, prompt, captures), expected) and not captures.made
    # With other weights it is another model.
    with torch.no_grad():
        next(parameter for _, parameter in compressor.trainable()).mul_(1.5)
    memory = memories(compressor, 9)
    expected = written(compressor, memory, prompt)
    assert torch.equal(written(compressor, memory, prompt, captures), expected) and captures.made
    assert compressor.lm.steps.refused is None


def test_an_answer_without_room_is_read_by_the_models_own_loop():
    compressor, captures, memory, prompt = ready("gistpool")
    expected = written(compressor, memory, prompt)
    captures.error = torch.OutOfMemoryError("no room")
    assert torch.equal(written(compressor, memory, prompt, captures), expected)
    assert compressor.lm.steps.refused is None and compressor.lm.steps._block is None
    captures.error = None
    assert torch.equal(written(compressor, memory, prompt, captures), expected) and captures.made == 1


def test_a_family_that_counts_tokens_by_the_cache_is_read_by_its_own_loop(monkeypatch):
    compressor, captures, memory, prompt = ready("gistpool")
    family = type(compressor.lm.decoder)
    plain = family.forward

    def forward(self, **inputs):
        count = inputs["inputs_embeds"].shape[1]
        return plain(self, **inputs | {"position_ids": inputs[CACHE].get_seq_length() + torch.arange(count)[None]})

    monkeypatch.setattr(family, "forward", forward)
    expected = written(compressor, memory, prompt)
    assert torch.equal(written(compressor, memory, prompt, captures), expected)
    assert not captures.made and "cache's length" in compressor.lm.steps.refused


def test_an_answer_inside_another_leaves_it_as_it_is():
    compressor, captures = made("gistpool"), Captures()
    memory, other = memories(compressor, 9), memories(compressor, 19)
    expected, inner = written(compressor, memory, [ids(4)]), written(compressor, other, [ids(2)])
    found = []

    class Asking:
        def put(self, value):
            found.append(compressor.generate(other, [ids(2)], max_new_tokens=COUNT, pad_token=0))

        def end(self):
            pass

    assert torch.equal(written(compressor, memory, [ids(4)], captures, streamer=Asking()), expected)
    assert len(found) == COUNT + 1 and all(torch.equal(answer, inner) for answer in found)


def test_inference_mode_leaves_nothing_that_other_passes_cannot_write_to():
    compressor, captures, memory, prompt = ready("gistpool")
    expected = written(compressor, memory, prompt)
    with torch.inference_mode():
        assert torch.equal(written(compressor, memory, prompt, captures), expected)
    assert torch.equal(written(compressor, memory, prompt, captures), expected) and captures.made == 1


@pytest.mark.parametrize("name", ["gistpool", *slow(("icae",), ("x500",))])
def test_a_conversation_goes_on_behind_what_captured_passes_have_read(name):
    compressor, captures = made(name), Captures()
    plain, captured = (Conversation(compressor, memories(compressor, 19)) for _ in range(2))
    for turn in range(3):
        # The first prompt is one token.
        prompt, options = ids(1 + turn, turn), {"max_new_tokens": 10, "stop_tokens": ()}
        compressor.lm.steps.capture = None
        expected = plain.reply(prompt, **options)
        compressor.lm.steps.capture = captures
        assert torch.equal(captured.reply(prompt, **options), expected)
        torch.testing.assert_close(captured.attention(), plain.attention())
        # Another answer lies in the same block.
        compressor.generate(memories(compressor, 9), [ids(4)], max_new_tokens=10)
    assert captures.passes and compressor.lm.steps.refused is None
    captured.new()
    plain.new()
    assert torch.equal(captured.reply(ids(3), **options), plain.reply(ids(3), **options))


class Waits(TorchDispatchMode):
    """Operations that wait for a GPU, or bring something there from the CPU."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "lift_fresh", "masked_select", "equal", "unique")

    def __init__(self):
        super().__init__()
        self.found, self.count = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if func.__name__.split(".")[0] in self.NAMES:
            self.found.append(func.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("family", "name"), [*QUICK, *slow(*MORE)])
def test_a_pass_waits_for_nothing(family, name):
    compressor, waits = made(name, family), Waits()

    def capture(run):
        def replay():
            with waits:
                return run()

        return replay

    written(compressor, memories(compressor, 9, 19), [ids(4), []], capture)
    assert waits.count and not waits.found


def test_a_shape_has_room_for_its_plan_and_little_more():
    compressor = made(max_position_embeddings=4096)
    for tokens in (1, 250, 700, 3000):
        memory = memories(compressor, 9)
        (prompt,) = [compressor.rows("prompt_ids", [ids(tokens)])]
        plan = compressor.reading_plan(memory, "lm", (prompt,))
        shape = Shape.of(plan, 5)
        assert shape.batch == 8
        assert plan.num_keys <= shape.room <= max(256, 1.25 * plan.num_keys + 1)


def test_a_graph_is_captured_on_a_stream_of_the_current_device(monkeypatch):
    """Not on torch's own for captures, which one device has; after an error the stream before is current again."""
    streams = ["device's"]

    @contextmanager
    def graph(kept, stream, capture_error_mode):
        streams.append(stream)
        yield
        # What torch leaves undone where a capture cannot be ended.
        streams.pop()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "new")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.append(stream))
    seen = []
    assert captured(lambda: seen.append(streams[-1]) or "out")() == "out"
    assert seen == ["new"] and streams == ["device's"]

    def waits():
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        captured(waits)
    assert streams[-1] == "device's"
