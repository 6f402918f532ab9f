"""PackedLayers: attention over heads of different lengths is one softmax of each over its own keys and the text."""

import pytest
import torch

from gistkit.hf import PackedLayers, attach
from gistkit.layouts import causal_plan
from gistkit.ops import attention
from tests.helpers.models import tiny, tiny_llama

DIM, GROUP = 12, 2
# Rows, key heads: a head without keys, and one that fills more than one block of the kernel.
COUNTS = torch.tensor([[3, 0, 700], [5, 1, 2]])


def numbers(*shape, seed=0, **options):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), **options)


def dense(query, key, value, text_key, text_value, counts, visible):
    """[B, Hq, N, D] by plain softmaxes; rows of the text without `visible` keys see the memory alone."""
    kept = [part.split(counts.flatten().tolist()) for part in (key, value)]
    out, copies, heads = [], len(query) // len(counts), counts.shape[1]
    for row in range(len(query)):
        for head in range(query.shape[1]):
            place = row // copies * heads + head // GROUP
            for index, one in enumerate(query[row, head]):
                end = visible[index]
                keys = torch.cat([kept[0][place], text_key[row, head // GROUP, :end]])
                values = torch.cat([kept[1][place], text_value[row, head // GROUP, :end]])
                out.append((keys @ one * DIM**-0.5).softmax(0) @ values)
    return torch.stack(out).view(*query.shape[:3], -1)


@pytest.mark.parametrize(
    ("rows", "copies", "length"),
    [(1, 1, 1), (1, 1, 5), (1, 3, 4), (2, 1, 1), (2, 1, 3), (2, 2, 3)],
)
def test_attention_and_its_gradients_are_those_of_plain_softmaxes(rows, copies, length):
    counts, batch = COUNTS[:rows], rows * copies
    total = int(counts.sum())
    tensors = [numbers(total, DIM), numbers(total, DIM, seed=1)]
    tensors += [numbers(batch, length, heads, DIM, seed=heads) for heads in (3 * GROUP, 3, 3)]
    plan = causal_plan(length, length, torch.device("cpu"))

    def packed(key, value, *text):
        query, text_key, text_value = (part.transpose(1, 2) for part in text)
        memory = PackedLayers.of([(key, value)], [counts])
        out, lse = attention(query, text_key, text_value, plan, return_lse=True)
        return memory.beside(0, query, out, lse)

    def plainly(key, value, *text):
        return dense(*(part.transpose(1, 2) for part in text[:1]), key, value,
                     *(part.transpose(1, 2) for part in text[1:]), counts, range(1, length + 1))  # fmt: skip

    weights = numbers(batch, 3 * GROUP, length, DIM, seed=9)
    found = []
    for run in (packed, plainly):
        own = [tensor.clone().requires_grad_() for tensor in tensors]
        out = run(*own)
        found.append([out, *torch.autograd.grad((out * weights).sum(), own)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_query_that_sees_no_text_sees_the_memory_and_one_that_sees_nothing_is_zero():
    memory = PackedLayers.of([(numbers(3, DIM), numbers(3, DIM, seed=1))], [torch.tensor([[3, 0]])])
    query = numbers(1, 2, 1, DIM, seed=2)
    nothing = torch.zeros(1, 2, 1, DIM, dtype=torch.float64), torch.full((1, 2, 1), -torch.inf, dtype=torch.float64)
    out = memory.beside(0, query, *nothing)
    key, value = memory.layers[0]
    torch.testing.assert_close(out[0, 0, 0], (key @ query[0, 0, 0] * DIM**-0.5).softmax(0) @ value)
    assert not out[0, 1].any()


def test_plans_of_many_numbers_of_queries_are_not_all_kept():
    layers = [(numbers(3, DIM), numbers(3, DIM, seed=1))] * 2
    memory = PackedLayers.of(layers, [torch.tensor([[3, 0]])] * 2)
    for length in range(1, 30):
        for layer in range(2):
            memory.attend(layer, numbers(1, 2, length, DIM))
            plan = memory._plan(layer, 1)
    assert len(memory._plans) < 10 and memory._plan(1, 1) is plan


def test_what_cannot_be_packed_is_refused():
    layers = [(numbers(3, 12).float(), numbers(3, 12).float())] * 2
    memory = PackedLayers.of(layers, [torch.tensor([[1, 2]])] * 2)
    ids = torch.tensor([[3, 4, 5]])
    with attach(tiny_llama()) as model, torch.no_grad():
        assert model(ids, memory=memory, use_cache=False).logits.isfinite().all()
        with pytest.raises(ValueError, match="key_bias: expected none over a memory whose heads"):
            model(ids, memory=memory, key_bias=torch.zeros(1, 1, 3), use_cache=False)
        three = PackedLayers.of(layers, [torch.tensor([[1, 0, 2]])] * 2)
        with pytest.raises(ValueError, match="memory: expected queries of 1 rows or a multiple, and of 3 heads"):
            model(ids, memory=three, use_cache=False)
    with attach(tiny("mistral", sliding_window=2)) as model, pytest.raises(ValueError, match="sliding_window: exp"):
        model(ids, memory=memory, use_cache=False)


def test_dropout_is_that_of_all_weights_together():
    model, ids = tiny_llama(attention_dropout=0.5).train(), torch.tensor([[3, 4, 5]])
    layers = [(numbers(4, 12, seed=layer).float(), numbers(4, 12, seed=layer + 9).float()) for layer in range(2)]
    packed = PackedLayers.of(layers, [torch.tensor([[1, 3]])] * 2)
    with attach(model), torch.no_grad():
        drawn = torch.stack([model(ids, memory=packed, use_cache=False).logits for _ in range(4)])
        whole = model.eval()(ids, memory=packed, use_cache=False).logits
        model.train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 1e-9
        almost = model(ids, memory=packed, use_cache=False).logits
    assert len({tuple(one.flatten().tolist()) for one in drawn}) == 4
    torch.testing.assert_close(almost, whole)


def test_a_backward_pass_has_columns_for_the_head_with_most_only():
    # 64 heads of 8 keys: a gradient of all keys for each head would have 64 times as many.
    counts = torch.full((16, 4), 8)
    key, value = (numbers(512, DIM, seed=seed, requires_grad=True) for seed in (0, 1))
    query = numbers(16, 4, 1, DIM, seed=2)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: shapes.append(tensor.shape) or tensor, lambda it: it):
        out, _ = PackedLayers.of([(key, value)], [counts]).attend(0, query)
    out.sum().backward()
    assert max(shape.numel() for shape in shapes) == key.numel()
