"""PackedLayers: attention over heads of different lengths is one softmax of each over its own keys and the text."""

from dataclasses import replace

import pytest
import torch

from gistkit.common.checks import POSITIONS, padded
from gistkit.hf import CACHE, PackedLayers, attach, empty_cache
from gistkit.hf.attention import attention
from gistkit.layouts import Plan, causal, causal_plan
from tests.helpers.memory import Made
from tests.helpers.models import tiny, tiny_llama

DIM, GROUP = 12, 2
# Rows, key heads: a head without keys, and one that fills more than one block of the kernel.
COUNTS = torch.tensor([[3, 0, 700], [5, 1, 2]])


def numbers(*shape, seed=0, **options):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), **options)


# Where keys of each row and the first of a text stand, where there is a window; heads with fewer have the first ones.
PLACES = [[*range(10, 710)], [705, 706, 709, 710, 711]]
START = 712


def dense(query, text_key, text_value, key, value, biases, counts, window=10**9):
    """[B, Hq, N, D] by plain softmaxes, causal over the text."""
    kept = [part.split(counts.flatten().tolist()) for part in (key, value, biases)]
    out, copies, heads = [], len(query) // len(counts), counts.shape[1]
    for row in range(len(query)):
        for head in range(query.shape[1]):
            place = row // copies * heads + head // GROUP
            places = PLACES[row // copies][: len(kept[0][place])]
            for index, one in enumerate(query[row, head]):
                old = [i for i, at in enumerate(places) if START + index - at < window]
                new = slice(max(0, index + 1 - window), index + 1)
                keys = torch.cat([kept[0][place][old], text_key[row, head // GROUP, new]])
                values = torch.cat([kept[1][place][old], text_value[row, head // GROUP, new]])
                bias = torch.nn.functional.pad(kept[2][place][old], (0, new.stop - new.start))
                out.append((keys @ one * DIM**-0.5 + bias).softmax(0) @ values)
    return torch.stack(out).view(*query.shape[:3], -1)


def lying(memory, key, value, room):
    """A text's keys and values behind a memory's, with room for more."""
    blocks = memory.room(0, len(key), room, key, value)
    for block, part in zip(blocks, (key, value), strict=True):
        block[:, :, : part.shape[2]] = part
    return [block[:, :, : key.shape[2]] for block in blocks]


@pytest.mark.parametrize(
    ("rows", "copies", "length"),
    [(1, 1, 1), (1, 1, 5), (1, 3, 4), (2, 1, 1), (2, 1, 3), (2, 2, 3)],
)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("kept", "window"), [(1, None), (0, None), (1, 4)])
def test_attention_and_its_gradients_are_those_of_plain_softmaxes(rows, copies, length, biased, kept, window):
    # With shares of all layers one may keep nothing.
    counts, batch = COUNTS[:rows] * kept, rows * copies
    total = int(counts.sum())
    tensors = [numbers(total, DIM), numbers(total, DIM, seed=1)]
    tensors += [numbers(batch, length, heads, DIM, seed=heads) for heads in (3 * GROUP, 3, 3)]
    tensors.append(numbers(total, seed=5) if biased else torch.zeros(total, dtype=torch.float64))
    plan = causal_plan(length, length, torch.device("cpu"), window)
    plan, places = replace(plan, positions=START + torch.arange(length)), padded(PLACES[:rows], POSITIONS)

    def packed(key, value, query, *text, lie=None):
        *text, biases = text
        memory = PackedLayers.of([(key, value)], [counts], [biases] if biased else None, places)
        query, *text = (part.transpose(1, 2) for part in (query, *text))
        if lie is not None:
            text = lying(memory, *text, lie)
        return memory.attend(0, query, *text, plan, window)

    def plainly(key, value, query, *text):
        *text, biases = text
        return dense(*(part.transpose(1, 2) for part in (query, *text)), key, value, biases, counts, window or 10**9)

    weights = numbers(batch, 3 * GROUP, length, DIM, seed=9)
    found = []
    for run in (packed, plainly):
        own = [tensor.clone().requires_grad_(biased or place < 5) for place, tensor in enumerate(tensors)]
        out = run(*own)
        found.append([out, *torch.autograd.grad((out * weights).sum(), [one for one in own if one.requires_grad])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    # Without gradients the text may lie behind the memory, with and without room.
    for room in (length, length + 7):
        torch.testing.assert_close(packed(*tensors, lie=room), found[1][0].detach(), rtol=1e-10, atol=1e-12)


def test_a_query_that_sees_no_text_sees_the_memory_and_one_that_sees_nothing_is_zero():
    key, value = numbers(3, DIM), numbers(3, DIM, seed=1)
    memory = PackedLayers.of([(key, value)], [torch.tensor([[3, 0]])])
    query, text = numbers(1, 2, 1, DIM, seed=2), numbers(1, 2, 4, DIM, seed=3)
    nothing = Plan.from_spans(torch.zeros(1, 1, 1, 2, dtype=torch.int32), 4)
    for own in ([text, text], lying(memory, text, text, 6)):
        out = memory.attend(0, query, *own, nothing)
        torch.testing.assert_close(out[0, 0, 0], (key @ query[0, 0, 0] * DIM**-0.5).softmax(0) @ value)
        assert not out[0, 1].any()


def test_a_text_behind_a_memory_is_not_copied_and_a_plan_of_other_keys_is_refused():
    memory = PackedLayers.of([(numbers(300, DIM), numbers(300, DIM))], [torch.tensor([[100, 200]])])
    query, text = numbers(1, 4, 1, DIM), numbers(1, 2, 1, DIM)
    own = lying(memory, text, text, 64)
    with Made() as made:
        memory.attend(0, query, *own, causal_plan(1, 1, torch.device("cpu")))
    assert max(made.sizes) <= query.numel()
    with pytest.raises(ValueError, match="plan: expected one for the text's 1 keys, got"):
        memory.attend(0, query, *own, causal_plan(1, 2, torch.device("cpu")))


def test_what_cannot_be_packed_is_refused():
    layers = [(numbers(3, 12).float(), numbers(3, 12).float())] * 2
    memory, placed = (
        PackedLayers.of(layers, [torch.tensor([[1, 2]])] * 2, places=places)
        for places in (None, torch.tensor([[0, 1]]))
    )
    ids = torch.tensor([[3, 4, 5]])
    with attach(tiny_llama()) as model, torch.no_grad():
        assert model(ids, memory=memory, use_cache=False).logits.isfinite().all()
        with pytest.raises(ValueError, match="key_bias: expected none over a memory whose heads"):
            model(ids, memory=memory, key_bias=torch.zeros(1, 1, 3), use_cache=False)
        three = PackedLayers.of(layers, [torch.tensor([[1, 0, 2]])] * 2)
        with pytest.raises(ValueError, match="memory: expected queries of 1 rows or a multiple, and of 3 heads"):
            model(ids, memory=three, use_cache=False)
    with attach(tiny("mistral", sliding_window=2)) as model:
        # A plan with positions for keys without places, and places without a plan.
        plan = causal(3).compile(windows=(2,))
        for one, given in ((memory, {"plan": plan}), (placed, {})):
            with pytest.raises(ValueError, match="sliding_window: expected none over a memory whose heads keep"):
                model(ids, memory=one, use_cache=False, **given)


@pytest.mark.parametrize("shared", [False, True])
def test_each_key_of_a_memory_is_read_once_and_copied_once_by_passes_over_a_growing_text(shared, monkeypatch):
    monkeypatch.setattr("gistkit.hf.cache.LEAST_ROOM", 2)
    rows, heads, total = (1, 2, 500) if shared else (2, 4, 1000)
    layers = [(numbers(total, DIM, seed=layer), numbers(total, DIM, seed=layer + 9)) for layer in range(2)]
    counts = [torch.tensor([[100, 400], [1, 499]])[:rows], torch.tensor([[500, 0], [20, 480]])[:rows]]
    biases = [numbers(total), numbers(total, seed=1)]
    ids = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    packed = PackedLayers.of(layers, counts, biases)
    cache = empty_cache(2, 0, packed=packed)
    with attach(tiny_llama()) as model, torch.no_grad():
        expected = [model(one, memory=PackedLayers.of(layers, counts, biases)).logits for one in (ids, ids[[1, 1]])]
        for place, part in enumerate(ids.split((3, 1, 1, 1, 2, 1, 1, 1, 1), 1)):
            beams, first = shared and place > 4, cache.get_seq_length()
            with Made() as made:
                if beams:
                    # Beams change places.
                    cache.reorder_cache(torch.tensor([1, 1]))
                out = model(part[[1, 1]] if beams else part, memory=packed, use_cache=True, **{CACHE: cache}).logits
            torch.testing.assert_close(out, expected[beams][:, first : first + part.shape[1]])
            if shared:
                # Without the memory's call of all rows, one of the text.
                assert sorted(made.calls) == sorted([(heads, total), (2, first + part.shape[1])] * 2)
                assert max(made.sizes) < total * DIM
            else:
                assert [row for row, _ in made.calls] == [heads, heads]


def test_a_pass_without_a_cache_or_gradients_copies_no_memory():
    memory = PackedLayers.of([(numbers(900, DIM), numbers(900, DIM))], [torch.tensor([[800, 100]])])
    for batch in (1, 3):
        query, text = numbers(batch, 4, 2, DIM), numbers(batch, 2, 2, DIM)
        with torch.no_grad(), Made() as made:
            memory.attend(0, query, text, text, causal_plan(2, 2, torch.device("cpu")))
        assert max(made.sizes) <= query.numel() and sorted(made.calls) == sorted([(2, 900), (batch, 2)])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_outputs_are_contiguous_as_layers_of_some_families_view_them(dropout):
    memory = PackedLayers.of([(numbers(9, DIM), numbers(9, DIM))], [torch.tensor([[4, 5]])])
    query, text, module = numbers(1, 4, 3, DIM), numbers(1, 2, 3, DIM), torch.nn.Module()
    module.layer_idx, plan = 0, causal_plan(3, 3, query.device)
    for both in ([text, text], lying(memory, text, text, 8)):
        for packed in (None, memory):
            out, _ = attention(module, query, *both, None, plan=plan, memory=packed, dropout=dropout)
            assert out.is_contiguous()


def test_a_backward_pass_repeats_no_memory_for_rows_that_share_it():
    key, value = (numbers(64, DIM, seed=seed, requires_grad=True) for seed in (0, 1))
    query, text = numbers(8, 2, 1, DIM, seed=2), numbers(8, 2, 1, DIM)
    memory = PackedLayers.of([(key, value)], [torch.tensor([[32, 32]])])
    with Made() as made:
        memory.attend(0, query, text, text, causal_plan(1, 1, torch.device("cpu"))).sum().backward()
    assert max(made.sizes) <= key.numel()


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
    query, text = numbers(16, 4, 1, DIM, seed=2), numbers(16, 4, 0, DIM)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: shapes.append(tensor.shape) or tensor, lambda it: it):
        memory = PackedLayers.of([(key, value)], [counts])
        out = memory.attend(0, query, text, text, causal_plan(1, 0, torch.device("cpu")))
    out.sum().backward()
    assert max(shape.numel() for shape in shapes) == key.numel()
