"""A memory as a cache of the plain model, over which transformers generates as it does behind any text."""

import copy
import dataclasses
import pickle

import pytest
import torch

from gistkit.hf import CACHE, memory_cache
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import double_angles, small, tiny, tiny_llama
from tests.helpers.tiers import slow, tiers


def over_the_cache(compressor, memory, prompt, task="lm", **options):
    """What the model itself writes behind the cache; 8 new tokens alone."""
    cache = compressor.to_cache(memory, task)
    ids = compressor.model.generate(prompt, **{CACHE: cache}, max_new_tokens=8, pad_token_id=0, **options)
    return ids[:, prompt.shape[1] :]


@pytest.mark.parametrize(
    ("family", "name", "scheme"),
    [("llama", "icae", "dpl"), ("gemma3", "x500", "epl"), *slow(("mistral", "icae", "epl"), ("qwen3", "x500", "dpl"))],
)
def test_the_model_goes_on_as_the_compressor_does(family, name, scheme):
    compressor = unsettle(small(name, tiny(family, bos_token_id=1), scheme)).eval()
    memory = compressor.encode(torch.randint(3, 50, (2, 19)))
    prompt = torch.randint(3, 50, (2, 5))
    told = {"return_dict_in_generate": True, "output_logits": True}
    expected = compressor.generate(memory, prompt, max_new_tokens=8, **told)
    assert torch.equal(over_the_cache(compressor, memory, prompt), expected.sequences)
    # The memory is as it was, and so are the logits, which positions change.
    with double_angles(compressor.model):
        cache = compressor.to_cache(memory)
        found = compressor.model.generate(prompt, **{CACHE: cache}, max_new_tokens=8, pad_token_id=0, **told)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-6, atol=1e-6)
        layers = [(layer.keys, layer.values) for layer in compressor.to_cache(memory).layers]
        ids = {"attention_mask": torch.ones(2, 9 + 5), CACHE: memory_cache(layers, 9)}
        moved = compressor.model.generate(prompt, **ids, max_new_tokens=1, pad_token_id=0, **told)
    assert (moved.logits[0] - expected.logits[0]).abs().max() > 1e-3
    beams = compressor.generate(memory, prompt, max_new_tokens=8, num_beams=3, num_return_sequences=2)
    assert torch.equal(over_the_cache(compressor, memory, prompt, num_beams=3, num_return_sequences=2), beams)


@pytest.mark.parametrize("name", tiers(["avgpool", "gistpool", "dodo"], ["gistpool"]))
def test_with_an_adapter_of_the_text_it_goes_on_inside_using(name):
    compressor = unsettle(small(name, tiny_llama(bos_token_id=1))).eval()
    memory = compressor.encode(torch.randint(3, 50, (1, 19)))
    prompt = torch.randint(3, 50, (3, 5))
    expected = compressor.generate(memory, prompt, task="qa", max_new_tokens=8)
    with compressor.using(compressor.reader):
        assert torch.equal(over_the_cache(compressor, memory, prompt, "qa"), expected)
    with pytest.raises(ValueError, match=r"expected a pass inside `with compressor.using\(compressor.reader\)`"):
        over_the_cache(compressor, memory, prompt, "qa")


def test_a_reconstruction_reads_no_rest():
    compressor = unsettle(small("icae", tiny_llama())).eval()
    memory = compressor.encode(torch.randint(3, 50, (1, 19)))
    prompt = torch.randint(3, 50, (1, 2))
    expected = compressor.generate(memory, prompt, task="ae", max_new_tokens=8)
    assert torch.equal(over_the_cache(compressor, memory, prompt, "ae"), expected)
    assert compressor.to_cache(memory, "ae").layers[0].num_keys == compressor.to_cache(memory).layers[0].num_keys - 3


def test_assistants_work():
    compressor = unsettle(small("x500", tiny_llama())).eval()
    memory = compressor.encode(torch.randint(3, 50, (1, 16)))
    prompt = torch.randint(3, 50, (1, 5))
    expected = compressor.generate(memory, prompt, max_new_tokens=8)
    assistant = copy.deepcopy(compressor.model)
    assert torch.equal(over_the_cache(compressor, memory, prompt, assistant_model=assistant), expected)
    assert torch.equal(over_the_cache(compressor, memory, prompt, prompt_lookup_num_tokens=2), expected)


def padded(rows, width):
    """Rows [B, width] with zeros at their start, and the mask that says so."""
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    return ids, torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()


@pytest.mark.parametrize(
    ("family", "lengths", "attention"),
    [("llama", (3, 5), "sdpa"), ("gemma3", (1, 9), "eager"), *slow(("mistral", (3, 5), "eager"))],
)
def test_prompts_padded_at_their_start_are_read_as_each_alone(family, lengths, attention):
    wide = {} if family == "llama" else {"sliding_window": 40}
    compressor = unsettle(small("x500", tiny(family, bos_token_id=1, **wide))).eval()
    compressor.model.set_attn_implementation(attention)
    memory = compressor.encode(torch.randint(3, 50, (2, 16)))
    rows = [torch.randint(3, 50, (length,)) for length in lengths]
    ids, mask = padded(rows, max(lengths))
    found = over_the_cache(compressor, memory, ids, attention_mask=mask)
    for row, (prompt, answer) in enumerate(zip(rows, found, strict=True)):
        assert torch.equal(over_the_cache(compressor, memory[row], prompt[None])[0], answer)
    beams = over_the_cache(compressor, memory, ids, attention_mask=mask, num_beams=3)
    assert torch.equal(over_the_cache(compressor, memory[0], rows[0][None], num_beams=3)[0], beams[0])


def test_padding_in_a_sliding_window_is_refused():
    compressor = unsettle(small("x500", tiny("mistral", bos_token_id=1))).eval()
    memory = compressor.encode(torch.randint(3, 50, (1, 8)))
    ids, mask = padded([torch.full((2,), 7), torch.full((4,), 7)], 4)
    message = "attention_mask: expected no padding over more keys than the model's sliding window of 6, got 7"
    with pytest.raises(ValueError, match=message):
        over_the_cache(compressor, memory, ids, attention_mask=mask)
    assert over_the_cache(compressor, memory, ids, attention_mask=mask | 1).shape == (2, 8)
    assert compressor.generate(memory, ids, mask, max_new_tokens=8).shape == (2, 8)


def test_a_mask_of_the_prompt_is_read_as_none():
    compressor = unsettle(small("x500", tiny_llama())).eval()
    model, memory, prompt = compressor.model, compressor.encode(torch.randint(3, 50, (1, 16))), torch.full((1, 5), 7)
    with torch.no_grad():
        expected = model(prompt, **{CACHE: compressor.to_cache(memory)}).logits
        for shape in ((1, 5), (1, 5 + compressor.to_cache(memory).layers[0].num_keys)):
            mask = torch.ones(shape)
            for given in ({"attention_mask": mask}, {"attention_mask": mask.bool()}):
                found = model(prompt, **{CACHE: compressor.to_cache(memory)}, **given).logits
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
            found = model.model(prompt, mask, **{CACHE: compressor.to_cache(memory)}).last_hidden_state
            torch.testing.assert_close(model.lm_head(found), expected, rtol=1e-10, atol=1e-10)
        with pytest.raises(
            ValueError, match=r"attention_mask: expected \[B, 5\], as 0 tokens came before, got \(1, 6\)"
        ):
            model(prompt, attention_mask=torch.ones(1, 6), **{CACHE: compressor.to_cache(memory)})
    # Whatever has no memory is as it was, and nothing gathers with each cache.
    assert torch.equal(model(prompt, attention_mask=torch.ones(1, 5)).logits, model(prompt).logits)
    assert len(model._forward_pre_hooks) == 1


def test_a_memory_in_place_of_a_cache_says_what_makes_one():
    compressor = small("x500", tiny_llama())
    memory, prompt = compressor.encode([[3] * 16]), torch.full((1, 5), 7)
    message = r"cache: expected compressor.to_cache\(memory\), got the Memory itself"
    with pytest.raises(TypeError, match=message):
        compressor.model.generate(prompt, **{CACHE: memory}, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(AttributeError, match=message):
        compressor.model(prompt, **{CACHE: memory})
    with pytest.raises(AttributeError, match="'Memory' object has no attribute 'size'"):
        memory.size  # noqa: B018
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'rest'"):
        memory.rest = ()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(memory)))
    assert torch.equal(over_the_cache(compressor, copied, prompt), over_the_cache(compressor, memory, prompt))


def test_a_cache_goes_on_or_is_reset():
    compressor = unsettle(small("x500", tiny_llama())).eval()
    memory, told = compressor.encode(torch.randint(3, 50, (1, 16))), {"max_new_tokens": 4, "pad_token_id": 0}
    prompt, more = torch.randint(3, 50, (1, 5)), torch.randint(3, 50, (1, 3))
    cache = compressor.to_cache(memory)
    first = compressor.model.generate(prompt, **{CACHE: cache}, **told)
    longer = torch.cat([first, more], 1)
    expected = compressor.model.generate(longer, **{CACHE: compressor.to_cache(memory)}, **told)
    assert torch.equal(compressor.model.generate(longer, **{CACHE: cache}, **told), expected)
    cache.reset()
    assert torch.equal(compressor.model.generate(prompt, **{CACHE: cache}, **told), first)


def test_what_the_plain_model_cannot_read_is_refused():
    compressor = small("x500", tiny("gpt2"))
    with pytest.raises(TypeError, match="so that its keys can be rotated, got GPT2Model"):
        compressor.to_cache(compressor.encode([[3] * 8]))
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    compressor = small("x500", tiny_llama(rope_parameters=scaled))
    with pytest.raises(TypeError, match="model: expected RoPE of the same frequencies at any length, got dynamic"):
        compressor.to_cache(compressor.encode([[3] * 8]))
    compressor = small("x500", tiny_llama())
    for contexts, what in (
        ([[3] * 8, [3] * 16], "memory tokens"),
        ([[3] * 17, [3] * 19], "tokens after the window"),
    ):
        with pytest.raises(ValueError, match=f"memory: expected rows with equal numbers of {what}"):
            compressor.to_cache(compressor.encode(contexts))
    with pytest.raises(TypeError, match="memory: expected a Memory as encode returns, got list"):
        compressor.to_cache([])
    # Mistral's window here is 6.
    compressor = small("avgpool", tiny("mistral", bos_token_id=1))
    with pytest.raises(ValueError, match="memory: expected fewer than 6 context tokens, the model's sliding win"):
        compressor.to_cache(compressor.encode([[3] * 8]))
    assert compressor.to_cache(compressor.encode([[3] * 4])).layers[0].num_keys == 2
