"""SAC against a chunk-by-chunk form on transformers' own attention, without a causal mask in the encoder."""

import pytest
import torch
from transformers import DynamicCache

from gistkit.compress import SAC
from gistkit.hf import CACHE
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import TOLERANCE, double_angles, tiny_llama, tokens


def made(**options):
    torch.manual_seed(0)
    compressor = SAC(tiny_llama(), **{"chunk": 12, "ratio": 4, "lora": 2} | options)
    return unsettle(compressor.double())


def places_of(compressor, length):
    """For each chunk its start, its end, and its anchors counted from its start."""
    chunk, ratio = compressor.chunk, int(compressor.ratio)
    for start in range(0, length, chunk):
        size = min(chunk, length - start)
        yield start, start + size, [p for p in range(size) if p % ratio == (ratio - 1) // 2] or [0]


def plain_decode(compressor, ids, text):
    """Hidden states at [LM] and each token of `text` [1, T] behind ids [1, N]: a forward a chunk, one for the text."""
    model, reading = compressor.model, DynamicCache()
    embed = model.get_input_embeddings()
    with double_angles(model):
        for start, end, anchors in places_of(compressor, ids.shape[1]):
            inputs = embed(ids[:, start:end]).clone()
            for slot, place in enumerate(anchors):
                inputs[:, place] += compressor.memory_embeddings[slot]
            cache = DynamicCache()
            with compressor.adapters.using("encoder"):
                model.model(
                    inputs_embeds=inputs, position_ids=torch.arange(start, end)[None] + 1,
                    attention_mask=torch.zeros(1, 1, end - start, end - start, dtype=inputs.dtype), **{CACHE: cache},
                )  # fmt: skip
            for index, layer in enumerate(cache.layers):
                reading.update(layer.keys[:, :, anchors], layer.values[:, :, anchors], index)
        inputs = torch.cat([compressor.task_embeddings["lm"].double()[None], embed(text)], 1)
        where = ids.shape[1] + torch.arange(inputs.shape[1])[None]
        return model.model(inputs_embeds=inputs, position_ids=where, **{CACHE: reading}).last_hidden_state


@pytest.mark.parametrize("length", [24, 17, 13, 3])
def test_reading_anchors_equals_the_method_written_out(length):
    compressor, ids, text = made(), tokens(1, length), tokens(1, 5)
    memory = compressor.encode(ids)
    expected = [start + place for start, _, anchors in places_of(compressor, length) for place in anchors]
    assert memory.positions[0].tolist() == [place + 1 for place in expected] and memory.starts == (length,)
    torch.testing.assert_close(compressor.decode(memory, "lm", text), plain_decode(compressor, ids, text), **TOLERANCE)
    spans = compressor.context_spans(memory)[0].tolist()
    assert all(first <= place < last for place, (first, last) in zip(expected, spans, strict=True))
    assert [token for first, last in spans for token in range(first, last)] == list(range(length))


def test_joined_documents_are_one_text():
    compressor, text = made(), tokens(1, 4)
    contexts = [tokens(length).tolist() for length in (24, 5)]
    # Chunks do not see each other: whole ones are compressed by themselves.
    joined = compressor.join([compressor.encode([contexts[0]]), compressor.encode([contexts[1]])])
    together = compressor.encode([contexts[0] + contexts[1]])
    torch.testing.assert_close(compressor.decode(joined, "lm", text), compressor.decode(together, "lm", text))
