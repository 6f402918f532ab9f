"""trie_mix, ancestor_attention and bias_gelu: parity with loops, gradients, instruction sets, contracts."""

import math

import numpy as np
import pytest
import torch

from gistkit.layouts import Links
from gistkit.nn import DigitTrie
from gistkit.ops import ancestor_attention, bias_gelu, reference, trie_mix
from tests.helpers.threads import assert_same_for_any_number_of_threads
from tests.helpers.views import VIEWS

TRIES = {
    "range": lambda: DigitTrie.of(torch.arange(130), digits=3),
    "scattered": lambda: DigitTrie.of(torch.randint(0, 7**5, (50,)), base=7, digits=5),
    "grid": lambda: DigitTrie.of(torch.randint(0, 99, (60, 2)), axes=2, digits=2),
    "one": lambda: DigitTrie.of(torch.tensor([5]), base=2, digits=3),
    "none": lambda: DigitTrie.of(torch.empty(0, dtype=torch.int64), digits=2),
}
# heads, columns or head_dim
SIZES = [(12, 33), (1, 1), (3, 70)]


def rows_of(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def mix_by_loops(weights, table, base, paths):
    out = []
    for node, path in enumerate(paths.tolist()):
        path = [symbol for symbol in path if symbol >= 0]
        total = base[path[-1]]
        for i, symbol in enumerate(path):
            for h in range(table.shape[1]):
                total = total + weights[node, i, h] * table[symbol, h]
        out.append(total)
    return torch.stack(out) if out else base[:0]


def attend_by_loops(query, key, value, ancestors):
    out = torch.zeros_like(query)
    for n, row in enumerate(ancestors.tolist()):
        keys = [k for k in row if k >= 0]
        for h in range(query.shape[1]):
            scores = [float(query[n, h] @ key[k, h]) / math.sqrt(query.shape[2]) for k in keys]
            total = sum(math.exp(s - max(scores)) for s in scores)
            for k, score in zip(keys, scores, strict=True):
                out[n, h] += math.exp(score - max(scores)) / total * value[k, h]
    return out


def gelu_by_loops(x, bias, scale):
    def one(z):
        return 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    rows = [
        [one(s * v + b) for v, b in zip(row, bias.tolist(), strict=True)]
        for row, s in zip(x.tolist(), scale.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=x.dtype).view(x.shape)


def with_gradients(function, *inputs, dtype=torch.float64, power=1):
    inputs = [(x.to(dtype) ** power).requires_grad_() for x in inputs]
    out = function(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** power
    return out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))


def assert_as_good(fast, plain, *inputs, linear=False):
    """Exact in float64; in float32 the root mean square error is at most twice the plain form's own, and a rounding.

    A function that is linear in each input only sums products. Terms that cancel leave less than their sum was on its
    way, and the plain form's order may be a lucky one: a rounding then is one of the root of the terms' squared sum.
    """
    right = with_gradients(plain, *inputs)
    sizes = [x.sqrt() for x in with_gradients(plain, *inputs, power=2)] if linear else right
    for got, expected in zip(with_gradients(fast, *inputs), right, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    got, own = (with_gradients(f, *inputs, dtype=torch.float32) for f in (fast, plain))
    for mine, theirs, expected, size in zip(got, own, right, sizes, strict=True):
        if expected.numel():
            mine, theirs = (((x.double() - expected) ** 2).mean().sqrt() for x in (mine, theirs))
            assert mine <= 2 * theirs + 2**-24 * (size**2).mean().sqrt() + 1e-30


@pytest.mark.parametrize("name", ["scattered", "one", "grid"])
def test_mix_by_loops(name):
    links = TRIES[name]().paths
    (nodes, depth), symbols = links.rows.shape, len(links.offsets) - 1
    weights, table, base = rows_of(nodes, depth, 3), rows_of(symbols, 3, 11), rows_of(symbols, 11)
    torch.testing.assert_close(trie_mix(weights, table, base, links), mix_by_loops(weights, table, base, links.rows))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", TRIES)
def test_mix(name, size, isa):
    trie = TRIES[name]()
    heads, columns = size
    for links in (trie.paths, trie.leaf_paths):
        (nodes, depth), symbols = links.rows.shape, len(links.offsets) - 1
        inputs = rows_of(nodes, depth, heads), rows_of(symbols, heads, columns), rows_of(symbols, columns)
        assert_as_good(
            lambda *x, links=links: trie_mix(*x, links),
            lambda *x, rows=links.rows: reference.trie_mix(*x, rows),
            *inputs,
        )


def test_mix_over_more_than_a_block_of_columns_and_nodes(isa):
    links = DigitTrie.of(torch.arange(290), digits=3).paths
    inputs = (
        rows_of(*links.rows.shape, 2),
        rows_of(len(links.offsets) - 1, 2, 1100),
        rows_of(len(links.offsets) - 1, 1100),
    )
    assert_as_good(lambda *x: trie_mix(*x, links), lambda *x: reference.trie_mix(*x, links.rows), *inputs)


def test_weights_beyond_a_path_are_not_read():
    links = TRIES["range"]().paths
    weights = rows_of(*links.rows.shape, 2)
    table, base = rows_of(len(links.offsets) - 1, 2, 5), rows_of(len(links.offsets) - 1, 5)
    spoiled = weights.masked_fill((links.rows < 0)[..., None], torch.nan)
    assert torch.equal(trie_mix(spoiled, table, base, links), trie_mix(weights, table, base, links))
    gradient = torch.autograd.grad(trie_mix(weights.requires_grad_(), table, base, links).sum(), weights)[0]
    assert not gradient[links.rows < 0].any()


def test_attention_by_loops():
    links = TRIES["scattered"]().ancestors
    query, key, value = (rows_of(len(links.rows), 3, 9) for _ in range(3))
    torch.testing.assert_close(
        ancestor_attention(query, key, value, links), attend_by_loops(query, key, value, links.rows)
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", TRIES)
def test_attention(name, size, isa):
    trie = TRIES[name]()
    for links in (trie.ancestors, trie.leaf_ancestors):
        inputs = [rows_of(n, *size) * 2 for n in (len(links.rows), trie.nodes, trie.nodes)]
        assert_as_good(
            lambda *x, links=links: ancestor_attention(*x, links),
            lambda *x, rows=links.rows: reference.ancestor_attention(*x, rows),
            *inputs,
        )


def test_a_query_without_keys_gets_zero(isa):
    links = Links(
        torch.tensor([[0, -1], [-1, -1], [-1, 1]], dtype=torch.int32),
        torch.tensor([0, 5], dtype=torch.int32),
        torch.tensor([0, 1, 2, 2], dtype=torch.int32),
    )
    query, key, value = (rows_of(3, 2, 5) for _ in range(3))
    out, *gradients = with_gradients(lambda *x: ancestor_attention(*x, links), query, key, value)
    torch.testing.assert_close(out, torch.stack([value[0], torch.zeros(2, 5).double(), value[1]]))
    assert not gradients[0].any()
    assert not gradients[1].any()
    assert not gradients[2][2].any()


def test_far_apart_scores_do_not_overflow(isa):
    links = TRIES["range"]().leaf_ancestors
    query, key, value = (
        rows_of(n, 2, 8, dtype=torch.float32) for n in (130, len(links.offsets) - 1, len(links.offsets) - 1)
    )
    key = key * 1e4
    inputs = query, key, value
    out = ancestor_attention(*inputs, links)
    right = reference.ancestor_attention(*(x.double() for x in inputs), links.rows)
    torch.testing.assert_close(out.double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 33), (130, 64), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("scaled", [True, False])
def test_gelu(shape, scaled, isa):
    inputs = [rows_of(*shape) * 4, rows_of(shape[1]), *([rows_of(shape[0])] if scaled else [])]
    assert_as_good(bias_gelu, reference.bias_gelu, *inputs)
    if scaled:
        torch.testing.assert_close(bias_gelu(*inputs).detach(), gelu_by_loops(*inputs), rtol=1e-12, atol=1e-14)


def test_gelu_far_out(isa):
    x = torch.tensor([[-math.inf, -3e38, -1e30, -300.0, -20.0, 0.0, 20.0, 1e30]])
    torch.testing.assert_close(bias_gelu(x, torch.zeros(8)), torch.tensor([[0, 0, 0, 0, 0, 0, 20.0, 1e30]]))
    for far in (-1e30, -300.0, 300.0):
        out, grad_x, _ = with_gradients(bias_gelu, torch.full((1, 3), far), torch.zeros(3), dtype=torch.float32)
        assert out.isfinite().all()
        assert grad_x.isfinite().all()


@pytest.mark.parametrize("view", VIEWS)
def test_views(view):
    trie = TRIES["range"]()
    links = trie.leaf_ancestors
    inputs = [rows_of(n, 2, 8) for n in (130, trie.nodes, trie.nodes)]
    right = with_gradients(lambda *x: ancestor_attention(*x, links), *inputs)
    got = with_gradients(lambda *x: ancestor_attention(*map(lying_otherwise, x), links), *inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
    assert torch.equal(ancestor_attention(*(view(x[None])[0] for x in inputs), links), right[0])


def lying_otherwise(x):
    return torch.stack([x, -x], 1)[:, 0]


def test_the_same_for_any_number_of_threads():
    trie = DigitTrie.of(torch.arange(700), digits=4)
    paths, ancestors = trie.paths, trie.leaf_ancestors

    def run():
        torch.manual_seed(0)
        symbols = len(trie.symbols)
        mix = rows_of(*paths.rows.shape, 4, dtype=torch.float32), rows_of(symbols, 4, 200), rows_of(symbols, 200)
        attention = [rows_of(n, 4, 16) for n in (700, trie.nodes, trie.nodes)]
        gelu = rows_of(1000, 70), rows_of(70), rows_of(1000)
        return [
            *with_gradients(lambda *x: trie_mix(*x, paths), *mix, dtype=torch.float32),
            *with_gradients(lambda *x: ancestor_attention(*x, ancestors), *attention, dtype=torch.float32),
            *with_gradients(bias_gelu, *gelu, dtype=torch.float32),
        ]

    assert_same_for_any_number_of_threads(run)


def test_gradcheck():
    trie = DigitTrie.of(torch.tensor([0, 3, 4, 11]), base=3, digits=3)
    paths, symbols = trie.paths, len(trie.symbols)
    inputs = rows_of(*paths.rows.shape, 2), rows_of(symbols, 2, 3), rows_of(symbols, 3)
    assert torch.autograd.gradcheck(lambda *x: trie_mix(*x, paths), [x.requires_grad_() for x in inputs])
    inputs = [rows_of(n, 2, 3).requires_grad_() for n in (4, trie.nodes, trie.nodes)]
    assert torch.autograd.gradcheck(lambda *x: ancestor_attention(*x, trie.leaf_ancestors, scale=0.7), inputs)
    inputs = [rows_of(*shape).requires_grad_() for shape in ((3, 4), (4,), (3,))]
    assert torch.autograd.gradcheck(bias_gelu, inputs)


def test_opcheck():
    trie = DigitTrie.of(torch.tensor([0, 3, 4, 11]), base=3, digits=3)
    paths, symbols, ops = trie.paths, len(trie.symbols), torch.ops.gistkit
    weights, table, base = rows_of(*paths.rows.shape, 2), rows_of(symbols, 2, 3), rows_of(symbols, 3)
    mix = [x.requires_grad_() for x in (weights, table, base)]
    torch.library.opcheck(ops.trie_mix.default, (*mix, *paths))
    grad = rows_of(trie.nodes, 3)
    torch.library.opcheck(ops.trie_mix_backward.default, (grad, weights.detach(), table.detach(), *paths))
    rows = [rows_of(n, 2, 3).requires_grad_() for n in (4, trie.nodes, trie.nodes)]
    torch.library.opcheck(ops.ancestor_attention.default, (*rows, *trie.leaf_ancestors, 0.5))
    for scale in (None, rows_of(3).requires_grad_()):
        inputs = rows_of(3, 4).requires_grad_(), rows_of(4).requires_grad_(), scale
        torch.library.opcheck(ops.bias_gelu.default, inputs)


SMALL = DigitTrie.of(torch.arange(4), base=2, digits=2)
PATHS, ANCESTORS = SMALL.paths, SMALL.ancestors
W, T, B, HEADS = torch.ones(10, 3, 2), torch.ones(5, 2, 7), torch.ones(5, 7), torch.ones(10, 2, 4)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"),
    [
        (trie_mix, (W.half(), T, B, PATHS), TypeError, r"weights of dtype float32 or float64, got torch\.float16"),
        (trie_mix, (W, T.double(), B, PATHS), TypeError, r"table of weights's dtype and device .*float64"),
        (trie_mix, (W, T, B[:, :3], PATHS), ValueError, r"table \[R, H, C\] and base \[R, C\], got"),
        (trie_mix, (torch.ones(10, 3, 4), T, B, PATHS), ValueError, r"weights \[10, 3, 2\] .* got \[10, 3, 4\]"),
        (trie_mix, (W, T[:4], B[:4], PATHS), ValueError, "table with 5 rows, as the links, got 4"),
        (trie_mix, (W, T, B, tuple(PATHS)), TypeError, "paths to be Links of tensors, got tuple"),
        (trie_mix, (W, T.tolist(), B, PATHS), TypeError, "table to be a torch tensor, got list"),
        (ancestor_attention, (HEADS, HEADS[:, :1], HEADS, ANCESTORS), ValueError, r"query \[N, H, D\]"),
        (ancestor_attention, (*[HEADS[..., :0]] * 3, ANCESTORS), ValueError, r"query \[N, H, D\]"),
        (ancestor_attention, (HEADS[:9], HEADS, HEADS, ANCESTORS), ValueError, "ancestors of 9 queries, got 10 rows"),
        (
            ancestor_attention,
            (HEADS, *[torch.ones(11, 2, 4)] * 2, ANCESTORS),
            ValueError,
            "key with 10 rows, .* got 11",
        ),
        (ancestor_attention, (HEADS, HEADS, HEADS, ANCESTORS.rows), TypeError, "ancestors to be Links .*, got Tensor"),
        (bias_gelu, (torch.ones(3, 4), torch.ones(3)), ValueError, r"x \[N, C\], bias \[C\] and scale \[N\], got"),
    ],
)
def test_errors(op, arguments, error, message):
    with pytest.raises(error, match=f"{op.__name__}: expected {message}"):
        op(*arguments)


def test_the_op_refuses_indices_outside_of_its_tensors():
    trie = DigitTrie.of(torch.arange(4), base=2, digits=2)
    weights, table, base = torch.ones(10, 3, 2), torch.ones(5, 2, 7), torch.ones(5, 7)
    beyond = trie.paths._replace(rows=trie.paths.rows + 5)
    with pytest.raises(RuntimeError, match="expected paths from -1 to 4"):
        trie_mix(weights, table, base, beyond)
    empty = trie.paths._replace(rows=torch.full_like(trie.paths.rows, -1))
    with pytest.raises(RuntimeError, match="a path of one symbol or more"):
        trie_mix(weights, table, base, empty)
    # A symbol behind a gap: the path is as long as its last symbol says, and -1 is no row of the table.
    gap = trie.paths.rows.clone()
    gap[4] = torch.tensor([0, -1, 0])
    with pytest.raises(RuntimeError, match="paths with -1 behind their symbols only, got a symbol behind -1 in row 4"):
        trie_mix(weights, table, base, trie.paths._replace(rows=gap))
    with pytest.raises(RuntimeError, match="got a symbol behind -1 in row 4"):
        torch.ops.gistkit.trie_mix_backward(torch.ones(10, 7), weights, table, gap, *trie.paths[1:])
    far = trie.paths._replace(entries=trie.paths.entries + 30)
    with pytest.raises(RuntimeError, match="entries below 30"):
        trie_mix(weights.requires_grad_(), table, base, far).sum().backward()
    heads = torch.ones(10, 2, 4)
    with pytest.raises(RuntimeError, match="expected ancestors from -1 to 9"):
        ancestor_attention(heads, heads, heads, trie.ancestors._replace(rows=trie.ancestors.rows + 9))


def test_gradients_need_the_entries_of_the_rows():
    trie = DigitTrie.of(torch.arange(4), base=2, digits=2)
    weights, table, base = torch.ones(10, 3, 2), torch.ones(5, 2, 7, requires_grad=True), torch.ones(5, 7)
    heads = torch.ones(10, 2, 4, requires_grad=True)
    for op, inputs, links in (
        (trie_mix, (weights, table, base), trie.paths),
        (ancestor_attention, (heads, heads, heads), trie.ancestors),
    ):
        for other in (links._replace(entries=links.entries.flip(0)), links.of(slice(0, 10, 1))):
            with pytest.raises(RuntimeError, match="expected the entries of all rows, grouped by the value"):
                op(*inputs, other).sum().backward()


@pytest.mark.parametrize(
    ("nodes", "symbols", "heads", "columns"), [(3, 2, 0, 5), (3, 2, 2, 0), (0, 2, 1, 3), (0, 0, 0, 0)]
)
def test_mix_of_nothing(nodes, symbols, heads, columns):
    rows = np.zeros((nodes, 1), np.int32)
    inputs = rows_of(nodes, 1, heads), rows_of(symbols, heads, columns), rows_of(symbols, columns)
    links = Links.grouped(rows, symbols)
    assert_as_good(lambda *x: trie_mix(*x, links), lambda *x: reference.trie_mix(*x, links.rows), *inputs)
