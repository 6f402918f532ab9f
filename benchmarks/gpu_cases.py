"""What the GPU benchmark times: every op of gistkit beside what torch has for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from contenders import LONGEST_DENSE, MASK_CREATION, block_mask
from masks import FEW, PLANS, dense, visible_pairs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import gistkit
from gistkit.nn import DigitTrie, SeqPE
from gistkit.ops import ancestor_attention, bias_gelu, reference, trie_mix

plan_of = cache(lambda mask, length: PLANS[mask](length))
trie_of = cache(lambda length: DigitTrie.of(torch.arange(length)))

Forms = dict[str, Callable[[], object]]
BF16 = torch.bfloat16
OURS = "gistkit"


@dataclass(frozen=True)
class Sizes:
    """Of the models that the cases are taken from; small ones try the cases on a CPU."""

    heads: int = 16
    dims: tuple[int, ...] = (64, 128)
    rope_heads: tuple[int, int] = (32, 8)
    rope_dim: int = 128
    seqpe_dim: int = 768
    seqpe_heads: int = 12


TINY = Sizes(heads=2, dims=(16,), rope_heads=(2, 1), rope_dim=16, seqpe_dim=32, seqpe_heads=2)


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Args:
        name: unique.
        length: N of its tokens.
        make: makes the contenders on a device: those that are compiled first where asked for these, else the others.
        work: floating-point operations that a call cannot do without; 0 if memory bounds it.
        traffic: bytes that a call must move; 0 if arithmetic bounds it.
        unrated: contenders that do other work than that.
        shared: whether the rate has a limit of the chip's to be a share of: sums of float32 have another one.
    """

    name: str
    length: int
    make: Callable[[str, bool], Forms]
    work: float = 0
    traffic: float = 0
    unrated: tuple[str, ...] = ()
    shared: bool = True


def _backward(forms: Forms, inputs: list[Tensor]) -> Forms:
    """Forward and backward of each, for an upstream gradient of ones."""

    # Made in the first call, which warms up.
    ones: dict[str, list[Tensor]] = {}

    def both(name: str, form: Callable[[], Any]) -> object:
        out = form()
        outs = list(out) if isinstance(out, tuple | list) else [out]
        if name not in ones:
            ones[name] = [torch.ones_like(x) for x in outs]
        return torch.autograd.grad(outs, inputs, ones[name])

    return {name: partial(both, name, form) for name, form in forms.items()}


def _sdpa(backend: SDPBackend, heads: list[Tensor], **options: Any) -> Tensor:
    with sdpa_kernel(backend):
        return sdpa(*heads, **options)


def _attention(mask: str, length: int, dim: int, backward: bool, heads: int, device: str, compiled: bool) -> Forms:
    plan = plan_of(mask, length).to(device)
    rows = plan.num_queries, plan.num_keys, plan.num_keys
    tensors = _inputs([(1, heads, n, dim) for n in rows], device, backward)
    forms: Forms = {}
    if compiled:
        make = block_mask(plan, compiled=True, device=device)
        blocks = make()
        flex = torch.compile(flex_attention, fullgraph=True)
        forms["FlexAttention, compiled"] = lambda: flex(*tensors, block_mask=blocks)
    else:
        forms[OURS] = lambda: gistkit.attention(*tensors, plan)
        if mask == "causal":
            forms["SDPA, FlashAttention"] = partial(_sdpa, SDPBackend.FLASH_ATTENTION, tensors, is_causal=True)
            forms["SDPA, cuDNN"] = partial(_sdpa, SDPBackend.CUDNN_ATTENTION, tensors, is_causal=True)
        elif length <= LONGEST_DENSE:
            seen = dense(plan)
            forms["SDPA, dense mask"] = lambda: sdpa(*tensors, attn_mask=seen)
    if backward:
        return _backward(forms, tensors)
    return {**forms, MASK_CREATION[0]: make} if compiled else forms


def _beside(
    ours: Callable[..., object],
    plain: Callable[..., object] | None,
    inputs: list[Tensor],
    backward: bool,
    compiled: bool,
    copied: int = 0,
) -> Forms:
    """Ours beside a copy of the first inputs; or the plain form, compiled, where there is one."""
    forms: Forms = {}
    if compiled and plain is not None:
        made = torch.compile(plain, fullgraph=True)
        forms = {"plain torch, compiled": lambda: made(*inputs)}
    elif not compiled:
        forms = {OURS: lambda: ours(*inputs)}
        if copied and not backward:
            forms["copy"] = lambda: [x.clone() for x in inputs[:copied]]
    return _backward(forms, inputs) if backward else forms


def _inputs(shapes: Iterable[Sequence[int]], device: str, backward: bool, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [torch.randn(*shape, device=device, dtype=dtype, requires_grad=backward) for shape in shapes]


def _frequencies(dim: int, device: str) -> Tensor:
    return 1e4 ** -(torch.arange(0, dim, 2, device=device) / dim)


def _rope(length: int, heads: tuple[int, int], dim: int, backward: bool, device: str, compiled: bool) -> Forms:
    inputs = _inputs([(1, n, length, dim) for n in heads], device, backward)
    angles = torch.arange(length, device=device), _frequencies(dim, device)
    ours, plain = (lambda q, k, form=form: form(q, k, *angles) for form in (gistkit.rope, reference.rope))
    return _beside(ours, plain, inputs, backward, compiled, copied=2)


def _pool(length: int, heads: int, dim: int, rotated: bool, backward: bool, device: str, compiled: bool) -> Forms:
    inputs = _inputs([(1, heads, length, dim)] * 2, device, backward)
    options: dict[str, Any] = {"windows": 8}
    if rotated:
        options |= {"positions": torch.arange(0, length, 8, device=device), "inv_freq": _frequencies(dim, device)}
    ours, plain = (partial(form, **options) for form in (gistkit.window_pool, reference.window_pool))
    return _beside(ours, plain, inputs, backward, compiled, copied=2)


def _trie_mix(length: int, dim: int, heads: int, backward: bool, device: str, compiled: bool) -> Forms:
    trie = trie_of(length).to(device)
    symbols = len(trie.symbols)
    shapes = (*trie.paths.rows.shape, heads), (symbols, heads, dim), (symbols, dim)
    inputs = _inputs(shapes, device, backward, torch.float32)
    return _beside(lambda *x: trie_mix(*x, trie.paths), None, inputs, backward, compiled)


def _ancestors(length: int, dim: int, heads: int, backward: bool, device: str, compiled: bool) -> Forms:
    trie = trie_of(length).to(device)
    inputs = _inputs([(trie.nodes, heads, dim // heads)] * 3, device, backward, torch.float32)
    return _beside(lambda *x: ancestor_attention(*x, trie.ancestors), None, inputs, backward, compiled)


def _gelu(rows: int, columns: int, backward: bool, device: str, compiled: bool) -> Forms:
    inputs = _inputs([(rows, columns), (columns,), (rows,)], device, backward, torch.float32)
    return _beside(bias_gelu, reference.bias_gelu, inputs, backward, compiled, copied=1)


def _seqpe(length: int, dim: int, heads: int, backward: bool, device: str, compiled: bool) -> Forms:
    """The whole encoder, its trie made before, against a table of learned positions."""
    if compiled:
        return {}
    encoder = SeqPE(dim, heads=heads).to(device)
    trie = encoder.trie(torch.arange(length))
    (table,) = _inputs([(length, dim)], device, backward, torch.float32)
    positions = torch.arange(length, device=device)
    if backward:
        weights = list(encoder.parameters())
        ours = _backward({OURS: lambda: encoder.encode(trie)}, weights)
        return ours | _backward({"F.embedding": lambda: F.embedding(positions, table)}, [table])
    return {
        OURS: torch.no_grad()(lambda: encoder.encode(trie)),
        "F.embedding": lambda: F.embedding(positions, table),
    }


def cases(length: int, sizes: Sizes) -> Iterator[Case]:
    """All cases of about so many tokens."""
    for backward in (False, True):
        name = "forward + backward" if backward else "forward"
        for mask in FEW:
            pairs = visible_pairs(plan_of(mask, length))
            for dim in sizes.dims:
                yield Case(
                    f"attention, {mask}, N {length}, H{sizes.heads} D{dim} bfloat16, {name}",
                    length,
                    partial(_attention, mask, length, dim, backward, sizes.heads),
                    work=pairs * sizes.heads * 4 * dim * (3.5 if backward else 1),
                    unrated=MASK_CREATION,
                )
        # Backward reads and writes as much as forward, and forward is part of it.
        passes = 2 if backward else 1
        (queries, keys), dim = sizes.rope_heads, sizes.rope_dim
        yield Case(
            f"rope, N {length}, H{queries}/{keys} D{dim} bfloat16, {name}",
            length,
            partial(_rope, length, sizes.rope_heads, dim, backward),
            traffic=passes * 2 * 2 * (queries + keys) * length * dim,
        )
        for rotated in (False, True):
            op = "window_pool rotated" if rotated else "window_pool"
            yield Case(
                f"{op}, N {length}, H{keys} D{dim} bfloat16, windows of 8, {name}",
                length,
                partial(_pool, length, keys, dim, rotated, backward),
                traffic=passes * 2 * 2 * keys * length * dim * 9 / 8,
                unrated=("copy",),
            )
        yield from _of_seqpe(length, sizes, backward, name)


def _of_seqpe(length: int, sizes: Sizes, backward: bool, name: str) -> Iterator[Case]:
    dim, heads, passes = sizes.seqpe_dim, sizes.seqpe_heads, 3 if backward else 1
    trie = trie_of(length)
    entries = int((trie.paths.rows >= 0).sum())
    shape = f"N {length}, H{heads} of {dim} float32, {name}"
    yield Case(
        f"trie_mix, {shape}", length, partial(_trie_mix, length, dim, heads, backward),
        work=passes * 2 * entries * heads * dim, shared=False,
    )  # fmt: skip
    yield Case(
        f"ancestor_attention, {shape}", length, partial(_ancestors, length, dim, heads, backward),
        traffic=(3 if backward else 1) * 4 * 4 * trie.nodes * dim,
    )  # fmt: skip
    yield Case(
        f"bias_gelu, {trie.nodes} x {4 * dim} float32, {name}", length, partial(_gelu, trie.nodes, 4 * dim, backward),
        # Forward: read and write; backward: two read, one written.
        traffic=(5 if backward else 2) * 4 * trie.nodes * 4 * dim,
    )  # fmt: skip
    yield Case(f"SeqPE's encoder, {shape}", length, partial(_seqpe, length, dim, heads, backward))


# Whose kernels are looked at one by one.
PROFILED = ("attention, causal", "attention, Dodo", "rope", "window_pool rotated", "trie_mix")
