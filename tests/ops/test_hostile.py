"""Every op, public and raw, on arguments that hypothesis spoils: a clear error, or what the reference gives.

What matters most is what is not asserted: no access leaves its tensor. `make sanitize` runs this file under the address
and undefined-behaviour sanitizers. `--hypothesis-profile fuzz` runs it longer, on other arguments each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gistkit
from gistkit import Plan, _planner, ops
from gistkit.layouts import Links
from gistkit.nn import DigitTrie
from gistkit.ops import reference
from gistkit.ops._library import ISA_NAMES
from tests.helpers.isas import highest_isa

pytestmark = pytest.mark.fuzz
RAW = torch.ops.gistkit
Arguments = dict[str, Any]
Results = tuple[Tensor | None, ...]

# Of the profile's, which are for one test: here are many.
EXAMPLES = settings(max_examples=max(1, settings.default.max_examples // 3))
# What an error may be; NotImplementedError is a RuntimeError.
ERRORS = (ValueError, TypeError, RuntimeError)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
FEW = st.sampled_from([0, 1, 2, 3, 5])
SOME = st.sampled_from([1, 2, 3, 5])
LENGTHS = st.sampled_from([0, 1, 2, 7, 33, 70])
DIMS = st.sampled_from([1, 2, 8, 16, 33])


# ---- arguments that every op takes


def floats(draw: st.DrawFn, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def integers(draw: st.DrawFn, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """From low up to high, both included."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    return torch.randint(low, high + 1, shape, generator=generator, dtype=dtype)


def attention_arguments(draw: st.DrawFn) -> Arguments:
    dtype, batch, key_heads, keys, rows = (
        draw(x) for x in (st.sampled_from(FLOATS), SOME, st.sampled_from([1, 2]), LENGTHS, LENGTHS)
    )
    heads, dim, value_dim = key_heads * draw(st.sampled_from([1, 2, 3])), draw(DIMS), draw(DIMS)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bias = [draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), keys]
    return {
        "query": floats(draw, dtype, batch, heads, rows, dim),
        "key": floats(draw, dtype, batch, key_heads, keys, dim),
        "value": floats(draw, dtype, batch, key_heads, keys, value_dim),
        "spans": integers(draw, -3, keys + 3, draw(st.sampled_from([1, batch])), rows, draw(FEW), 2),
        "key_bias": floats(draw, wide, *bias) if draw(st.booleans()) else None,
        "scale": draw(st.sampled_from([0.3, -1.0, 0.0])),
        "softcap": draw(st.sampled_from([0.0, 5.0])),
    }


def attended(a: Arguments) -> Results:
    plan = Plan(a["spans"], a["key"].shape[2])
    return reference.attention(  # type: ignore[return-value]
        a["query"], a["key"], a["value"], plan, scale=a["scale"], softcap=a["softcap"] or None,
        key_bias=a["key_bias"], return_lse=True,
    )  # fmt: skip


def attention_backward_arguments(draw: st.DrawFn) -> Arguments:
    forward = attention_arguments(draw)
    out, lse = attended(forward)
    assert out is not None and lse is not None
    return {
        "grad_out": floats(draw, out.dtype, *out.shape),
        "grad_lse": floats(draw, lse.dtype, *lse.shape) if draw(st.booleans()) else None,
        **{name: forward.pop(name) for name in ("query", "key", "value")},
        "out": out,
        "lse": lse,
        **forward,
        "need_key_bias": draw(st.booleans()),
    }


def with_own_results(a: Arguments) -> Arguments:
    """The arguments of a backward pass whose inputs have other values than their results were computed from."""
    own = {name: x for name, x in zip(("out", "lse"), attended(a), strict=True) if not torch.equal(x, a[name])}
    return a | own


def attended_backward(a: Arguments) -> Results:
    inputs = [a[name].detach().requires_grad_() for name in ("query", "key", "value")]
    names = dict(zip(("query", "key", "value"), inputs, strict=True))
    shape = a["query"].shape[0], a["query"].shape[1], a["key"].shape[2]
    # Without a bias the gradient is that of zeros, and it has a row for each head of each sequence.
    bias = torch.zeros(shape, dtype=a["lse"].dtype) if a["key_bias"] is None else a["key_bias"].expand(shape)
    bias = bias.detach().requires_grad_()
    out, lse = attended({**a, **names, "key_bias": bias})
    grad_lse = torch.zeros_like(lse) if a["grad_lse"] is None else a["grad_lse"]
    # A row without keys has no gradient.
    grads = [a["grad_out"], grad_lse.masked_fill(lse == -torch.inf, 0)]
    found = torch.autograd.grad([out, lse], [*inputs, bias], grads)
    return *found[:3], found[3] if a["need_key_bias"] else None


def rope_arguments(draw: st.DrawFn) -> Arguments:
    dtype, batch, tokens, dim, axes = (draw(x) for x in (st.sampled_from(FLOATS), FEW, LENGTHS, DIMS, SOME))
    heads, key_heads, own = draw(SOME), draw(FEW), draw(st.booleans())
    key_heads = draw(st.sampled_from([0, heads])) if own else key_heads
    kind = draw(st.sampled_from([torch.int32, torch.int64, torch.float32, torch.float64]))
    rows = draw(st.sampled_from([1, batch]))
    frequencies = draw(st.integers(0, dim // 2))
    return {
        "query": floats(draw, dtype, batch, heads, tokens, dim),
        "key": floats(draw, dtype, batch, key_heads, tokens, dim),
        "positions": integers(draw, -9, 99, axes, rows, tokens, dtype=torch.int64).to(kind),
        "inv_freq": floats(draw, draw(st.sampled_from(FLOATS[:2])), heads if own else 1, axes, frequencies),
        "scaling": draw(st.sampled_from([1.0, 1.5])),
        "interleaved": draw(st.booleans()),
        "inverse": draw(st.booleans()),
    }


def rotated(a: Arguments) -> Results:
    sign = -1 if a["inverse"] else 1
    options = {"scaling": a["scaling"], "interleaved": a["interleaved"]}
    angles = a["positions"], a["inv_freq"] * sign
    # The reference has frequencies of each head for keys as well, also where there are none.
    turned = (reference.rope(x, x, *angles, **options)[0] if x.shape[1] else x for x in (a["query"], a["key"]))
    return tuple(turned)


def angle_grad_arguments(draw: st.DrawFn) -> Arguments:
    forward = rope_arguments(draw)
    grads = {f"grad_{name}": floats(draw, x.dtype, *x.shape) for name, x in list(forward.items())[:2]}
    return {**grads, **forward}


def angles_backward(a: Arguments) -> Results:
    positions, inv_freq = (a[name].double().detach().requires_grad_() for name in ("positions", "inv_freq"))
    heads = {name: a[name].double() for name in ("query", "key")}
    out = rotated({**a, **heads, "positions": positions, "inv_freq": inv_freq})
    grads = [a["grad_query"].double(), a["grad_key"].double()]
    pairs = [(x, grad) for x, grad in zip(out, grads, strict=True) if x is not None and x.requires_grad]
    if not pairs:
        return torch.zeros_like(positions), torch.zeros_like(inv_freq)
    outs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outs, [positions, inv_freq], grads, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, (positions, inv_freq), strict=True))


def pool_arguments(draw: st.DrawFn) -> Arguments:
    dtype, batch, tokens, dim = draw(st.sampled_from(FLOATS)), draw(SOME), draw(LENGTHS), draw(DIMS)
    windows, rows = draw(SOME), draw(st.sampled_from([1, batch]))
    angles = draw(st.booleans())
    return {
        "key": floats(draw, dtype, batch, draw(FEW), tokens, dim),
        "value": floats(draw, dtype, batch, draw(FEW), tokens, draw(DIMS)),
        "offsets": integers(draw, 0, tokens, rows, windows + 1, dtype=torch.int64).sort(-1).values,
        "positions": floats(draw, torch.float32, rows, windows) if angles else None,
        "inv_freq": floats(draw, torch.float32, draw(st.integers(0, dim // 2))) if angles else None,
        "scaling": draw(st.sampled_from([1.0, 1.5])),
        "interleaved": draw(st.booleans()),
    }


def pooled(a: Arguments) -> Results:
    options = {name: a[name] for name in ("positions", "inv_freq", "scaling", "interleaved")}
    found = reference.window_pool(a["key"], a["value"], windows=a["offsets"], **options)
    assert isinstance(found, tuple)
    return found


def spread_arguments(draw: st.DrawFn) -> Arguments:
    forward = pool_arguments(draw)
    windows = forward["offsets"].shape[1] - 1
    tokens = forward["key"].shape[2]
    for name in ("key", "value"):
        batch, heads, _, dim = forward[name].shape
        forward[name] = floats(draw, forward[name].dtype, batch, heads, windows, dim)
    return {**forward, "tokens": tokens, "tokens_first": draw(st.booleans())}


def spread(a: Arguments) -> Results:
    """The transpose of the means, in float64."""
    tokens = {
        name: a[name].new_zeros((*a[name].shape[:2], a["tokens"], a[name].shape[3]), dtype=torch.float64)
        for name in ("key", "value")
    }
    inputs = [x.requires_grad_() for x in tokens.values()]
    found = pooled({**a, **dict(zip(tokens, inputs, strict=True))})
    return torch.autograd.grad(found, inputs, [a["key"].double(), a["value"].double()])


def mix_arguments(draw: st.DrawFn) -> Arguments:
    dtype, nodes, depth, symbols = draw(st.sampled_from(FLOATS[:2])), draw(LENGTHS), draw(SOME), draw(SOME)
    heads, columns = draw(FEW), draw(st.sampled_from([0, 1, 7, 33]))
    length = integers(draw, 1, depth, nodes, 1)
    rows = integers(draw, 0, symbols - 1, nodes, depth).masked_fill(torch.arange(depth) >= length, -1)
    return {
        "weights": floats(draw, dtype, nodes, depth, heads),
        "table": floats(draw, dtype, symbols, heads, columns),
        "base": floats(draw, dtype, symbols, columns),
        **linked("paths", rows, symbols),
    }


def linked(name: str, rows: Tensor, values: int) -> Arguments:
    links = Links.grouped(rows.numpy(), values)
    return {name: links.rows, "entries": links.entries, "offsets": links.offsets}


def mixed(a: Arguments) -> Results:
    return (reference.trie_mix(a["weights"], a["table"], a["base"], a["paths"]),)


def mix_backward_arguments(draw: st.DrawFn) -> Arguments:
    forward = mix_arguments(draw)
    base = forward.pop("base")
    return {"grad_out": floats(draw, base.dtype, len(forward["paths"]), base.shape[1]), **forward}


def mixed_backward(a: Arguments) -> Results:
    weights, table = (a[name].detach().requires_grad_() for name in ("weights", "table"))
    base = table.new_zeros((table.shape[0], table.shape[2])).requires_grad_()
    return gradients(mixed({**a, "weights": weights, "table": table, "base": base}), (weights, table, base), a)


def gradients(found: Results, inputs: tuple[Tensor, ...], a: Arguments) -> Results:
    return torch.autograd.grad(found[:1], inputs, a["grad_out"])


def ancestor_arguments(draw: st.DrawFn) -> Arguments:
    dtype, queries, keys, depth = draw(st.sampled_from(FLOATS[:2])), draw(LENGTHS), draw(SOME), draw(FEW)
    heads, dim = draw(SOME), draw(DIMS)
    ancestors = integers(draw, -1, keys - 1, queries, depth)
    return {
        "query": floats(draw, dtype, queries, heads, dim),
        "key": floats(draw, dtype, keys, heads, dim),
        "value": floats(draw, dtype, keys, heads, dim),
        **linked("ancestors", ancestors, keys),
        "scale": draw(st.sampled_from([0.3, 0.0])),
    }


def ancestors_attended(a: Arguments) -> Results:
    found = reference.ancestor_attention(a["query"], a["key"], a["value"], a["ancestors"], scale=a["scale"])
    # By softmax a row without any key is not a number.
    return (found.masked_fill(~(a["ancestors"] >= 0).any(1)[:, None, None], 0), None)


def ancestor_backward_arguments(draw: st.DrawFn) -> Arguments:
    a = ancestor_arguments(draw)
    scale = a.pop("scale")
    _, weights = RAW.ancestor_attention(*a.values(), scale)
    return {"grad_out": floats(draw, a["query"].dtype, *a["query"].shape), **a, "weights": weights, "scale": scale}


def ancestors_backward(a: Arguments) -> Results:
    inputs = tuple(a[name].detach().requires_grad_() for name in ("query", "key", "value"))
    found = ancestors_attended({**a, **dict(zip(("query", "key", "value"), inputs, strict=True))})
    return gradients(found, inputs, a)


def gelu_arguments(draw: st.DrawFn) -> Arguments:
    dtype, rows, columns = draw(st.sampled_from(FLOATS[:2])), draw(LENGTHS), draw(st.sampled_from([0, 1, 7, 33]))
    return {
        "x": floats(draw, dtype, rows, columns),
        "bias": floats(draw, dtype, columns),
        "scale": floats(draw, dtype, rows) if draw(st.booleans()) else None,
    }


def gelu(a: Arguments) -> Results:
    return (reference.bias_gelu(a["x"], a["bias"], a["scale"]),)


def gelu_backward_arguments(draw: st.DrawFn) -> Arguments:
    forward = gelu_arguments(draw)
    return {"grad_out": floats(draw, forward["x"].dtype, *forward["x"].shape), **forward}


def gelu_backward(a: Arguments) -> Results:
    inputs = [None if a[name] is None else a[name].detach().requires_grad_() for name in ("x", "bias", "scale")]
    found = gelu(dict(zip(("x", "bias", "scale"), inputs, strict=True)))
    grads = torch.autograd.grad(found, [x for x in inputs if x is not None], a["grad_out"])
    return *grads, *[None] * (3 - len(grads))


# ---- what spoils them


def spoiled(draw: st.DrawFn, arguments: Arguments) -> tuple[Arguments, bool]:
    """Arguments of which some are spoiled, and whether they still mean something: only memory lies otherwise."""
    changed, sound = dict(arguments), True
    for name in draw(st.lists(st.sampled_from(list(arguments)), max_size=3, unique=True)):
        changed[name], harmless = spoil(draw, changed[name])
        sound = sound and harmless
    return changed, sound


def spoil(draw: st.DrawFn, value: Any) -> tuple[Any, bool]:
    if isinstance(value, Tensor):
        # What kernels index with is worth most tries.
        ways = WAYS if value.is_floating_point() else WAYS + (of_wild_values,) * len(WAYS)
        return draw(st.sampled_from(ways))(draw, value)
    if isinstance(value, bool):
        return not value, True
    if isinstance(value, float):
        return draw(st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e300, 1e-300, None, "x"])), False
    if isinstance(value, int):
        return draw(st.sampled_from([-1, 0, 1, 7, 2**63 - 1, -(2**63), 2**64, None, 1.5])), False
    return draw(st.sampled_from([3, "x", torch.zeros(()), torch.zeros(2, 3)])), False


def strided(draw: st.DrawFn, x: Tensor) -> tuple[Tensor, bool]:
    return torch.stack([x, x], -1)[..., 0], True


def transposed_in_memory(draw: st.DrawFn, x: Tensor) -> tuple[Tensor, bool]:
    return (x.mT.contiguous().mT if x.dim() > 1 else x), True


def at_an_offset(draw: st.DrawFn, x: Tensor) -> tuple[Tensor, bool]:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), True


def expanded(draw: st.DrawFn, x: Tensor) -> tuple[Tensor, bool]:
    """One of a dimension in all its places, by a stride of 0."""
    if x.dim() == 0 or 0 in x.shape:
        return x, True
    dim = draw(st.integers(0, x.dim() - 1))
    return x.narrow(dim, 0, 1).expand_as(x), x.is_floating_point()


def of_another_type(draw: st.DrawFn, x: Tensor) -> tuple[Tensor, bool]:
    return x.nan_to_num().to(draw(st.sampled_from([d for d in FLOATS + OTHERS if d != x.dtype]))), False


def longer_or_shorter(draw: st.DrawFn, x: Tensor) -> tuple[Tensor, bool]:
    if x.dim() == 0:
        return x[None], False
    dim = draw(st.integers(0, x.dim() - 1))
    size = draw(st.sampled_from([0, x.shape[dim] // 2, max(0, x.shape[dim] - 1), x.shape[dim] + 1]))
    padded = torch.cat([x, torch.zeros_like(x[tuple([slice(None)] * dim + [slice(0, 1)])])], dim)
    if size > padded.shape[dim]:
        return x.new_zeros([size if d == dim else n for d, n in enumerate(x.shape)]), False
    return padded.narrow(dim, 0, size), False


def of_another_rank(draw: st.DrawFn, x: Tensor) -> tuple[Tensor, bool]:
    ways = [lambda: x[None], lambda: x[..., None], lambda: x.flatten(), lambda: x.sum()]
    return draw(st.sampled_from(ways))(), False


def of_other_axes(draw: st.DrawFn, x: Tensor) -> tuple[Tensor, bool]:
    return x.permute(*draw(st.permutations(range(x.dim())))), False


def of_wild_values(draw: st.DrawFn, x: Tensor) -> tuple[Tensor, bool]:
    """Some values beyond any bounds, in place of those that are there."""
    if not x.numel() or x.dtype == torch.bool:
        return x, False
    if x.is_floating_point() or x.is_complex():
        wild = [math.nan, math.inf, -math.inf, torch.finfo(x.dtype).max, torch.finfo(x.dtype).tiny, -0.0]
    else:
        info = torch.iinfo(x.dtype)
        wild = [n for n in (-2, -1, 0, 1, 3, 63, 64, 1 << 16, info.max - 1) if n >= info.min] + [info.min, info.max]
    x = x.clone()
    for _ in range(draw(st.integers(1, 3))):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from(wild))
    return x, False


def elsewhere(draw: st.DrawFn, x: Tensor) -> tuple[Tensor, bool]:
    return x.to("meta"), False


def no_tensor(draw: st.DrawFn, x: Tensor) -> tuple[Any, bool]:
    return draw(st.sampled_from([None, 3, "x", x.detach().tolist()])), False


WAYS = (
    strided, transposed_in_memory, at_an_offset, expanded, of_another_type, longer_or_shorter, of_another_rank,
    of_other_axes, of_wild_values, elsewhere, no_tensor,
)  # fmt: skip


# ---- what must hold


@contextmanager
def instruction_set(draw: st.DrawFn) -> Iterator[None]:
    before = ops.cpu_isa()
    ops.cpu_isa(draw(st.sampled_from(ISA_NAMES[: ISA_NAMES.index(highest_isa()) + 1])))
    try:
        yield
    finally:
        ops.cpu_isa(before)


def holds(draw: st.DrawFn, arguments: Arguments, call: Callable[[Arguments], Any], right: Callable) -> None:
    """The call with arguments as they are or spoiled raises a clear error, or gives what is right where they are sound.

    Sound arguments are refused only if their memory lies as an op does not take it.
    """
    arguments, sound = spoiled(draw, arguments)
    if sound and "lse" in arguments:
        arguments = with_own_results(arguments)
    is_meta = any(isinstance(x, Tensor) and x.is_meta for x in arguments.values())
    with instruction_set(draw):
        try:
            found = call(arguments)
        except ERRORS as error:
            assert str(error)
            return
        except (AttributeError, IndexError):
            # Without values a raw op reads shapes alone, and does not say which one it cannot read.
            assert is_meta
            return
    if is_meta:
        return
    assert in_bounds(arguments), "indices outside of what they point into were taken"
    if not sound:
        return
    found = found if isinstance(found, tuple | list) else (found,)
    for got, expected in zip(found, right(arguments), strict=False):
        if expected is None or not expected.numel():
            continue
        close = tolerance(arguments)
        size = max(1.0, float(expected.double().abs().nan_to_num(0, 0, 0).max()))
        torch.testing.assert_close(got.double(), expected.double(), rtol=close, atol=close * size, equal_nan=True)


def in_bounds(a: Arguments) -> bool:
    """Whether indices point into what they are for: paths, ancestors and windows. Spans may be any."""
    if "paths" in a:
        return all(is_path(row, len(a["table"])) for row in a["paths"].tolist())
    if "ancestors" in a:
        return all(-1 <= key < len(a["key"]) for row in a["ancestors"].tolist() for key in row)
    if "offsets" in a:
        tokens = a.get("tokens", a["key"].shape[-2])
        return all([0, *row, tokens] == sorted([0, *row, tokens]) for row in a["offsets"].tolist())
    return True


def is_path(row: list[int], symbols: int) -> bool:
    length = sum(symbol != -1 for symbol in row)
    return length > 0 and all(0 <= symbol < symbols for symbol in row[:length])


def tolerance(arguments: Arguments) -> float:
    """That of the coarsest tensor that goes in: lse and gradients of angles come out finer."""
    return max(TOLERANCE[x.dtype] for x in arguments.values() if isinstance(x, Tensor) and x.is_floating_point())


def raw(name: str) -> Callable[[Arguments], Any]:
    return lambda a: getattr(RAW, name)(*a.values())


OPS: dict[str, tuple[Callable, Callable, Callable]] = {
    "attention": (attention_arguments, raw("attention"), attended),
    "attention_backward": (attention_backward_arguments, raw("attention_backward"), attended_backward),
    "rope": (rope_arguments, raw("rope"), rotated),
    "rope_angle_grad": (angle_grad_arguments, raw("rope_angle_grad"), angles_backward),
    "window_pool": (pool_arguments, raw("window_pool"), pooled),
    "window_spread": (spread_arguments, raw("window_spread"), spread),
    "trie_mix": (mix_arguments, raw("trie_mix"), mixed),
    "trie_mix_backward": (mix_backward_arguments, raw("trie_mix_backward"), mixed_backward),
    "ancestor_attention": (ancestor_arguments, raw("ancestor_attention"), ancestors_attended),
    "ancestor_attention_backward": (
        ancestor_backward_arguments, raw("ancestor_attention_backward"), ancestors_backward
    ),
    "bias_gelu": (gelu_arguments, raw("bias_gelu"), gelu),
    "bias_gelu_backward": (gelu_backward_arguments, raw("bias_gelu_backward"), gelu_backward),
}  # fmt: skip
ON_A_GPU_ONLY = {"attention_tiles"}


def test_every_op_is_here() -> None:
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("gistkit::")}
    assert names == set(OPS) | ON_A_GPU_ONLY


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
@EXAMPLES
@given(data=st.data())
def test_raw_ops(name: str, data: st.DataObject) -> None:
    make, call, right = OPS[name]
    holds(data.draw, make(data.draw), call, right)


# ---- the public functions


def public_attention(a: Arguments) -> Any:
    if not isinstance(a["spans"], Tensor):
        raise TypeError("a plan holds a tensor")
    plan = Plan(a["spans"], a["key"].shape[2] if isinstance(a["key"], Tensor) and a["key"].dim() == 4 else 3)
    options = {"scale": a["scale"], "softcap": a["softcap"] or None, "key_bias": a["key_bias"]}
    return gistkit.attention(a["query"], a["key"], a["value"], plan, **options, return_lse=True)


def public_rope(a: Arguments) -> Any:
    # Rotating back is a matter of gradients.
    options = {name: a[name] for name in ("scaling", "interleaved")}
    return gistkit.rope(*list(a.values())[:4], **options)


def public_pool(a: Arguments) -> Any:
    options = {name: a[name] for name in ("positions", "inv_freq", "scaling", "interleaved")}
    return gistkit.window_pool(a["key"], a["value"], windows=a["offsets"], **options)


def public_mix(a: Arguments) -> Any:
    links = Links(a["paths"], a["entries"], a["offsets"])
    return ops.trie_mix(a["weights"], a["table"], a["base"], links)


def public_ancestors(a: Arguments) -> Any:
    links = Links(a["ancestors"], a["entries"], a["offsets"])
    return ops.ancestor_attention(a["query"], a["key"], a["value"], links, scale=a["scale"])


def without_inverse(a: Arguments) -> Results:
    return rotated({**a, "inverse": False})


PUBLIC: dict[str, tuple[Callable, Callable, Callable]] = {
    "attention": (attention_arguments, public_attention, attended),
    "rope": (rope_arguments, public_rope, without_inverse),
    "window_pool": (pool_arguments, public_pool, pooled),
    "trie_mix": (mix_arguments, public_mix, mixed),
    "ancestor_attention": (ancestor_arguments, public_ancestors, ancestors_attended),
    "bias_gelu": (gelu_arguments, lambda a: ops.bias_gelu(*a.values()), gelu),
}


def with_backward(call: Callable[[Arguments], Any], names: tuple[str, ...]) -> Callable[[Arguments], Any]:
    """The call's results, after a backward of their sum by the floating tensors."""

    def run(a: Arguments) -> Any:
        a = dict(a)
        for name in names:
            if isinstance(a[name], Tensor) and a[name].is_floating_point():
                a[name] = a[name].detach().requires_grad_()
        found = call(a)
        out = (found if isinstance(found, tuple) else (found,))[0]
        if out.requires_grad:
            out.sum().backward()
        return tuple(x.detach() for x in found) if isinstance(found, tuple) else found.detach()

    return run


DIFFERENTIABLE = {
    "attention": ("query", "key", "value", "key_bias"),
    "rope": ("query", "key", "positions", "inv_freq"),
    "window_pool": ("key", "value"),
    "trie_mix": ("weights", "table", "base"),
    "ancestor_attention": ("query", "key", "value"),
    "bias_gelu": ("x", "bias", "scale"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
@EXAMPLES
@given(data=st.data())
def test_public_functions(name: str, data: st.DataObject) -> None:
    make, call, right = PUBLIC[name]
    if name in DIFFERENTIABLE and data.draw(st.booleans()):
        call = with_backward(call, DIFFERENTIABLE[name])
    holds(data.draw, make(data.draw), call, right)


# ---- tensors without elements, of sizes whose products are no numbers

# torch forms the product of the sizes up to the first 0.
MANY, BIG = 2**40, 2**31


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def index(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


NOTHING: dict[str, tuple[Callable, tuple[Any, ...]]] = {
    "attention, rows": (
        RAW.attention,
        (empty(1, 0, MANY, 8), empty(1, 0, 3, 8), empty(1, 0, 3, 8), empty(1, MANY, 0, 2).int(), None, 1.0, 0.0),
    ),
    "attention, sequences": (
        RAW.attention,
        (*(empty(BIG, BIG, 0, 8) for _ in range(3)), empty(BIG, 0, BIG, 2).int(), None, 1.0, 0.0),
    ),
    "rope, heads": (
        RAW.rope,
        (empty(BIG, BIG, 0, 8), empty(BIG, 1, 0, 8), empty(1, 1, 0), empty(1, 1, 4), 1.0, False, False),
    ),
    "rope, axes": (
        RAW.rope,
        (
            *(torch.ones(1, 1, 2, 8) for _ in range(2)),
            *(torch.zeros(1, 1, 1).expand(MANY, 1, 2), empty(1, MANY, 0)),
            *(1.0, False, False),
        ),
    ),
    "rope_angle_grad": (
        RAW.rope_angle_grad,
        (*(empty(BIG, BIG, 0, 8) for _ in range(4)), empty(1, 1, 0), empty(1, 1, 4), 1.0, False, False),
    ),
    "window_pool, dims": (
        RAW.window_pool,
        (torch.ones(1, 1, 2, 8), empty(1, 0, 2, MANY), torch.tensor([[0, 2]]), None, None, 1.0, False),
    ),
    "window_spread, tokens": (
        RAW.window_spread,
        (empty(2, 0, 1, 8), empty(2, 0, 1, 8), torch.tensor([[0, 2]]), None, None, 1.0, False, 2**62, False),
    ),
    "trie_mix_backward, heads": (
        RAW.trie_mix_backward,
        (empty(0, 0), empty(0, 1, MANY), empty(3, MANY, 0), index(0, 1), index(0), index(4)),
    ),
    "trie_mix_backward, depth": (
        RAW.trie_mix_backward,
        (empty(0, 3), empty(0, MANY, 2), torch.ones(3, 2, 3), empty(0, MANY).int(), index(0), index(4)),
    ),
    "ancestor_attention, heads": (
        RAW.ancestor_attention,
        (empty(0, MANY, 8), *(empty(0, MANY, 8) for _ in range(2)), index(0, 1 << 20), index(0), index(1), 1.0),
    ),
    "ancestor_attention, queries": (
        RAW.ancestor_attention,
        (empty(MANY, 1, 0), *(empty(0, 1, 0) for _ in range(2)), empty(MANY, 0).int(), index(0), index(1), 1.0),
    ),
    "bias_gelu, rows": (RAW.bias_gelu, (empty(MANY, 0), empty(0), None)),
    "bias_gelu_backward, rows": (RAW.bias_gelu_backward, (empty(MANY, 0), empty(MANY, 0), empty(0), None)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_much_of_nothing(name: str) -> None:
    """Refused, or done at once."""
    op, arguments = NOTHING[name]
    try:
        op(*arguments)
    except RuntimeError as error:
        assert "expected" in str(error) or "too many" in str(error)


# ---- the planner, and what is made of positions

WILD = st.one_of(st.integers(-3, 9), st.sampled_from([2**31 - 1, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64]))


@pytest.mark.slow
@EXAMPLES
@given(data=st.data())
def test_planner(data: st.DataObject) -> None:
    """Array of any values, and numbers beyond those that can be."""
    draw = data.draw
    spans = integers(draw, -3, 40, draw(FEW), draw(LENGTHS), draw(FEW), 2)
    spans, _ = of_wild_values(draw, spans) if draw(st.booleans()) else (spans, True)
    keys = draw(st.sampled_from([0, 1, 17, 300, -1, 2**31, 2**63 - 1, 2**64]))
    table, _ = of_wild_values(draw, integers(draw, -1, 5, draw(LENGTHS), draw(FEW)))
    positions, _ = of_wild_values(draw, integers(draw, 0, 99, draw(FEW), draw(FEW), dtype=torch.int64))
    calls = (
        lambda: _planner.lists(spans.numpy(), keys),
        lambda: _planner.group(table.numpy(), draw(WILD)),
        lambda: _planner.trie(positions.numpy(), draw(WILD), draw(WILD)),
        lambda: DigitTrie.of(positions, axes=draw(WILD), base=draw(WILD), digits=draw(WILD)),
        lambda: DigitTrie.check(positions, axes=draw(WILD), base=draw(WILD), digits=draw(WILD)),
    )
    try:
        draw(st.sampled_from(calls))()
    except ERRORS as error:
        assert str(error)


@pytest.mark.parametrize(
    ("shape", "keys"), [((2**33, 0, 1, 2), 2**31 - 1), ((0, 2**55, 1, 2), 5), ((2**20, 2**35, 0, 2), 5)]
)
def test_planner_of_nothing(shape: tuple[int, ...], keys: int) -> None:
    spans = np.empty(shape, np.int32)
    with pytest.raises(ValueError, match=r"spans: expected at most 2\*\*40 tiles of rows or keys"):
        _planner.lists(spans, keys)
