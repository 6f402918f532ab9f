"""Dodo written out on transformers' own attention, a row at a time, with dense masks and parameters by row."""

import math

import torch
from transformers import DynamicCache

from gistkit.hf import CACHE
from tests.helpers.in_place_oracle import maps_by_row, masks_of
from tests.helpers.models import eager


def features(compressor, ids, mask=None):
    """Hidden states [N, d] of the base model's layer that is scored; `ids` with BOS, `mask` bool [N, N]."""
    decoder, count = compressor.model.get_decoder(), len(ids)
    mask = torch.ones(count, count).tril().bool() if mask is None else mask
    outputs = []
    hooks = [layer.register_forward_hook(lambda *call: outputs.append(call[-1])) for layer in decoder.layers]
    with eager(compressor.model):
        decoder(
            input_ids=torch.tensor([ids]), attention_mask=masks_of(compressor.model, mask, list(range(count))),
            position_ids=torch.arange(count)[None], use_cache=False,
        )  # fmt: skip
    for hook in hooks:
        hook.remove()
    states = outputs[compressor.layer - 1]
    states = states[0] if isinstance(states, tuple) else states
    return (decoder.norm(states) if compressor.settings["scorer_norm"] else states)[0].detach()


def scores_of(compressor, ids, mask=None):
    """Scores [N] of `ids`, which begin with BOS."""
    inner = features(compressor, ids, mask) @ compressor.scorer.up.weight.T + compressor.scorer.up.bias
    return torch.relu(inner) @ compressor.scorer.down.weight[0] + compressor.scorer.down.bias


def best(scores, ratio):
    """Places of BOS, of the highest scores among the others, and of the last token."""
    tokens = range(1, len(scores))
    count = math.ceil(len(tokens) / ratio)
    ranked = sorted(tokens[:-1], key=lambda i: (-scores[i].item(), i))
    return [0, *sorted([*ranked[: count - 1], tokens[-1]])]


def read(compressor, ids, kept, text, bias=None, start=None):
    """Hidden states [T + 1, d] after the nuggets at `kept` and at each token of `text`; `ids` begin with BOS.

    `bias` [K] is added to the nuggets' logits; `start` is [1, 1, d], an embedding before the text.
    """
    model, count = compressor.model, len(ids)
    decoder, own = model.get_decoder(), compressor.separate
    cache, reading = DynamicCache(), DynamicCache()
    causal = torch.ones(count, count).tril().bool()
    with maps_by_row(compressor, torch.full((count,), own)), eager(model):
        out = decoder(
            inputs_embeds=compressor.embed(torch.tensor([ids])), position_ids=torch.arange(count)[None],
            attention_mask=masks_of(model, causal, list(range(count))), **{CACHE: cache}, use_cache=True,
        ).last_hidden_state  # fmt: skip
    for index, layer in enumerate(cache.layers):
        reading.update(layer.keys[:, :, kept], layer.values[:, :, kept], index)
    with maps_by_row(compressor, torch.zeros(len(text), dtype=torch.bool)):
        inputs = compressor.embed(torch.tensor([text]))
    if start is not None:
        inputs = torch.cat([start, inputs], 1)
    rows = inputs.shape[1]
    seen = torch.ones(rows, len(kept) + rows).tril(len(kept)).bool()
    positions = list(range(count, count + rows))
    masks = masks_of(model, seen, [*kept, *positions])
    if bias is not None:
        added = torch.cat([bias, bias.new_zeros(rows)])
        masks = {k: m + added for k, m in masks.items()} if isinstance(masks, dict) else masks + added
    with maps_by_row(compressor, torch.zeros(rows, dtype=torch.bool)), eager(model):
        states = decoder(
            inputs_embeds=inputs, attention_mask=masks, position_ids=torch.tensor([positions]),
            **{CACHE: reading}, use_cache=True,
        ).last_hidden_state  # fmt: skip
    return states[0] if start is not None else torch.cat([out[:, -1:], states], 1)[0]


def first_of(i, tau, segment):
    """The first token that token i sees uncompressed."""
    return max(0, i // segment * segment - (tau - segment))


def mixed_mask(chosen, tau, segment):
    """bool [N, N]: BOS, nuggets before, and the uncompressed part, which begins alike for a segment."""
    count = len(chosen)
    mask = torch.zeros(count, count, dtype=torch.bool)
    for i in range(count):
        for j in range(i + 1):
            mask[i, j] = j == 0 or j >= first_of(i, tau, segment) or bool(chosen[j])
    mask[0, 1:] = False
    return mask


def mixed(compressor, ids, chosen, tau, segment, bias=None):
    """Hidden states [N, d] of the mixed-resolution language model; `ids` begin with BOS, `chosen` bool [N].

    `bias` [N] is added to the logits of older tokens (Equations 9, 10, 18: z is of the tokens before the recent ones).
    """
    model, count = compressor.model, len(ids)
    masks = masks_of(model, mixed_mask(chosen, tau, segment), list(range(count)))
    if bias is not None:
        older = torch.tensor([[j < first_of(i, tau, segment) for j in range(count)] for i in range(count)])
        pairs = bias * older
        masks = {k: m + pairs for k, m in masks.items()} if isinstance(masks, dict) else masks + pairs
    is_nugget = chosen if compressor.separate else torch.zeros_like(chosen)
    with maps_by_row(compressor, is_nugget), eager(model):
        return model.get_decoder()(
            inputs_embeds=compressor.embed(torch.tensor([ids])), attention_mask=masks,
            position_ids=torch.arange(count)[None], use_cache=False,
        ).last_hidden_state[0]  # fmt: skip
