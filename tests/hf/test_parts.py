"""Parts: in a pass of tokens of several rows each token sees what it sees in a pass of its row alone."""

import pytest
import torch
from torch import nn

from gistkit.hf import PackedLayers, attach
from gistkit.hf.attention import Part, Parts, attention
from gistkit.hf.packed import spans_of
from gistkit.layouts import Plan, causal_plan
from tests.helpers.models import tiny_llama

HEADS, GROUP, DIM, ROOM = 2, 2, 12, 9
# Of each row the first token's keys, and how many tokens; rows 0 and 1 have one token each.
ROWS = [(4, 1), (7, 1), (0, 3), (5, 1), (2, 2)]
# Packed keys of each row's heads.
COUNTS = torch.tensor([[3, 0], [1, 4], [0, 0], [2, 5], [1, 1]])


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spans(first, count, most):
    """Causal over a row's keys; what is behind a shorter row sees nothing."""
    ends = torch.zeros(most, dtype=torch.int32)
    ends[:count] = torch.arange(first + 1, first + count + 1)
    return torch.stack([torch.zeros_like(ends), ends], -1)[:, None]


def part(rows, memory, bias):
    own = ROWS[rows]
    most, seen = max(count for _, count in own), max(first + count for first, count in own)
    plan = Plan(torch.stack([spans(first, count, most) for first, count in own]), seen)
    starts = torch.tensor([0, *(count for _, count in ROWS)]).cumsum(0)[rows.start : rows.stop]
    tokens = (starts[:, None] + torch.arange(most)).clamp(max=sum(count for _, count in ROWS) - 1)
    real = (torch.arange(most) < torch.tensor([count for _, count in own])[:, None]).flatten()
    return Part(tokens, rows, plan, memory, bias), real


@pytest.mark.parametrize("kind", ["plain", "biased", "packed"])
def test_each_token_sees_what_it_sees_alone(kind):
    tokens, module = sum(count for _, count in ROWS), nn.Module()
    module.layer_idx = 0
    query = numbers(1, HEADS * GROUP, tokens, DIM)
    key, value = (numbers(len(ROWS), HEADS, ROOM, DIM, seed=seed) for seed in (1, 2))
    bias = numbers(len(ROWS), HEADS, ROOM, seed=3) if kind == "biased" else torch.zeros(len(ROWS), HEADS, ROOM)
    counts = COUNTS if kind == "packed" else COUNTS * 0
    packed = [numbers(int(counts.sum()), DIM, seed=seed) for seed in (4, 5)]
    held = PackedLayers([tuple(packed)], torch.zeros(0, HEADS, 2), [HEADS])
    blocks = key, value
    if kind == "packed":
        blocks = held.room(0, len(ROWS), ROOM, key, value)
        for block, own in zip(blocks, (key, value), strict=True):
            block.copy_(own)
    each, real = [], []
    for rows in (slice(0, 2), slice(2, 5)):
        memory = held.seen(spans_of([counts])[rows], None) if kind == "packed" else None
        one, own = part(rows, memory, [bias[rows]] if kind == "biased" else None)
        each.append(one)
        real.append(own)
    with torch.no_grad():
        parts = Parts(each, torch.cat(real).nonzero()[:, 0])
        out, _ = attention(module, query, *blocks, None, parts=parts)
    assert out.shape == (1, tokens, HEADS * GROUP, DIM)
    own = [tensor.split(counts.flatten().tolist()) for tensor in packed]
    place = 0
    for row, (first, count) in enumerate(ROWS):
        for end in range(first + 1, first + count + 1):
            for head in range(HEADS * GROUP):
                index = row * HEADS + head // GROUP
                keys, values = (
                    torch.cat([extra[index], block[row, head // GROUP, :end]])
                    for extra, block in zip(own, (key, value), strict=True)
                )
                logits = keys @ query[0, head, place] * DIM**-0.5
                logits[len(own[0][index]) :] += bias[row, head // GROUP, :end]
                torch.testing.assert_close(out[0, place, head], logits.softmax(0) @ values)
            place += 1


def test_other_arguments_beside_parts_are_refused():
    plan = causal_plan(3, 3, torch.device("cpu"))
    with attach(tiny_llama()) as model, pytest.raises(ValueError, match="plan: expected none with parts"):
        model(torch.tensor([[3, 4, 5]]), plan=plan, parts=Parts([], None))
