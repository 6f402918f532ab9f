"""Calls of every op in the process that `glue.run` starts: what they launch, and how they compare with plain torch.

Each case is (ours, plain, inputs): functions of the same inputs, which are leaves that take gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import emulation
import glue
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gistkit
from gistkit import Plan, _gpu, layouts
from gistkit.layouts import lists
from gistkit.nn import DigitTrie
from gistkit.ops import reference

FORMS = (gistkit.attention, reference.attention)
Case = tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]
# What makes a host wait for a GPU.
WAITS = ("_local_scalar_dense", "nonzero", "equal", "item", "is_nonzero", "masked_select", "unique")


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def heads(dtype: torch.dtype, batch: int = 1, tokens: int = 150, dim: int = 32) -> list[Tensor]:
    return [leaf(batch, count, tokens, dim, dtype=dtype) for count in (4, 2, 2)]


def frequencies(rotary: int) -> Tensor:
    return 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)


def attention(plan: Plan, inputs: list[Tensor], **options: Any) -> Case:
    """Ours takes a fourth input as key_bias."""

    def of(form: Callable[..., Any]) -> Callable[..., Any]:
        def run(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Any:
            return form(query, key, value, plan, key_bias=bias, return_lse=True, **options)

        return run

    return of(gistkit.attention), of(reference.attention), inputs


def cases() -> dict[str, Case]:
    """Of sizes that the emulator runs in a second."""
    torch.manual_seed(0)
    causal = layouts.causal(150).compile()
    ragged = layouts.compile_batch([layouts.gistpool(90, 8, 20), layouts.causal(150)])
    inv_freq, found = frequencies(24), {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        found[f"attention {name}"] = attention(listed(causal), heads(dtype))
        bias = leaf(2, 1, ragged.num_keys)
        found[f"attention {name} ragged"] = attention(
            listed(ragged), [*heads(dtype, 2, ragged.num_keys), bias], softcap=5.0
        )
        found[f"attention {name} without lists"] = attention(Plan(causal.spans, causal.num_keys), heads(dtype))
        positions = torch.arange(150) * 1.5
        found[f"rope {name}"] = (
            lambda q, k, p=positions: gistkit.rope(q, k, p, inv_freq),
            lambda q, k, p=positions: reference.rope(q, k, p, inv_freq),
            heads(dtype)[:2],
        )
        offsets = torch.tensor([0, 1, 60, 150])
        rotation = {"positions": torch.arange(3), "inv_freq": inv_freq}
        found[f"window_pool {name}"] = (
            lambda k, v, o=offsets, r=rotation: gistkit.window_pool(k, v, windows=o, **r),
            lambda k, v, o=offsets, r=rotation: reference.window_pool(k, v, windows=o, **r),
            heads(dtype)[1:],
        )
    query, key, _ = heads(torch.float32)
    found["rope by angles"] = (
        gistkit.rope,
        reference.rope,
        [query, key, torch.rand(150).mul(9).requires_grad_(), frequencies(24).requires_grad_()],
    )
    trie = DigitTrie.of(torch.arange(70), digits=2)
    nodes, depth = trie.paths.rows.shape
    symbols = len(trie.paths.offsets) - 1
    found["trie_mix"] = (
        lambda *x: gistkit.ops.trie_mix(*x, trie.paths),
        lambda *x: reference.trie_mix(*x, trie.paths.rows),
        [leaf(nodes, depth, 4), leaf(symbols, 4, 48), leaf(symbols, 48)],
    )
    found["ancestor_attention"] = (
        lambda *x: gistkit.ops.ancestor_attention(*x, trie.ancestors),
        lambda *x: reference.ancestor_attention(*x, trie.ancestors.rows),
        [leaf(nodes, 4, 16) for _ in range(3)],
    )
    found["bias_gelu"] = (gistkit.ops.bias_gelu, reference.bias_gelu, [leaf(40, 64), leaf(64), leaf(40)])
    return found


def listed(plan: Plan) -> Plan:
    """As moved from another device: with lists."""
    plan = Plan(plan.spans.clone(), plan.num_keys)
    plan._keep(lists.lists_on(plan.spans, plan.num_keys, plan.spans))
    return plan


def results(form: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """[results ..., gradients ...]"""
    out = form(*inputs)
    outs = list(out) if isinstance(out, tuple) else [out]
    total = sum((x.double().clamp(-1e30) * torch.arange(1, x.numel() + 1).view(x.shape).sin()).sum() for x in outs)
    return [*(x.detach() for x in outs), *torch.autograd.grad(total, inputs)]


def parity() -> dict[str, list[float]]:
    """For each case, our error as a share of what is allowed: twice that of plain torch in the same precision."""
    shares = {}
    for name, (ours, plain, inputs) in cases().items():
        exact = results(plain, [x.detach().double().requires_grad_() for x in inputs])
        shares[name] = []
        for mine, low, right in zip(results(ours, inputs), results(plain, inputs), exact, strict=True):
            mine, low, right = (x.double().clamp(-1e30) for x in (mine, low, right))
            scale = torch.finfo(inputs[0].dtype).eps * (right.abs().max() + 1)
            shares[name].append(float((mine - right).abs().max() / (2 * (low - right).abs().max() + scale)))
    return shares


def other_spans() -> dict[str, list[float]]:
    """Errors where a plan's lists would be those of other spans: replaced, cut, changed in place, ..."""
    query, key, value = heads(torch.bfloat16)
    few = torch.tensor([[5, 70]], dtype=torch.int32).expand(1, 150, 1, 2)
    plan = listed(layouts.causal(150).compile())
    gistkit.attention(query, key, value, plan)
    changed = listed(plan)
    changed.spans.copy_(few)
    plans = {"replaced": replace(plan, spans=few.contiguous()), "changed": changed, "again": changed, "first": plan}
    with torch.no_grad():
        plans["made without gradient"] = Plan(few.contiguous(), 150)
        gistkit.attention(query, key, value, plans["made without gradient"])
    found = {}
    for name, its in plans.items():
        ours, plain = (results(lambda *x, f=form, p=its: f(*x, p), [query, key, value]) for form in FORMS)
        found[name] = [float((a.float() - b.float()).abs().max()) for a, b in zip(ours, plain, strict=True)]
    return found


def on_the_host() -> dict[str, dict[str, Any]]:
    """Plans whose lists are too many to be made on the device: errors, launches, and whether lists are kept."""
    most, lists.MOST_TILES = lists.MOST_TILES, 0
    g = torch.Generator().manual_seed(1)
    messy = torch.randint(-9, 310, (2, 200, 3, 2), generator=g, dtype=torch.int32)
    messy[:, 40:60] = 0
    plans = {
        "messy": Plan(messy, 300),
        "shared": Plan(messy[1:].contiguous(), 300),
        "causal": Plan(layouts.causal(150).compile().spans, 150),
        "nothing is seen": Plan(torch.zeros(1, 70, 1, 2, dtype=torch.int32), 70),
        "no queries": Plan(torch.zeros(2, 0, 1, 2, dtype=torch.int32), 70),
        "no keys": Plan(torch.zeros(2, 70, 1, 2, dtype=torch.int32), 0),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, plan in plans.items():
        sizes = ((4, plan.num_queries), (2, plan.num_keys), (2, plan.num_keys))
        inputs = [leaf(2, count, rows, 32) for count, rows in sizes]
        glue.calls()
        ours, plain = (results(lambda *x, f=form, p=plan: f(*x, p), inputs) for form in FORMS)
        pairs = zip(ours, plain, strict=True)
        errors = [float((a - b).abs().max()) for a, b in pairs if a.numel()]
        kept = plan._lists
        gistkit.attention(*inputs, plan)
        launched = [call.removeprefix("launch ") for call in glue.calls() if call.startswith("launch ")]
        found[name] = {"errors": errors, "launches": launched, "kept": plan._lists is kept and kept is not None}
    lists.MOST_TILES = most
    return found


def bounds() -> dict[str, dict[str, Any]]:
    """At the bounds of what the device makes and one key beyond: whether lists are made there, or refused; bytes."""
    glue.dry(True)
    found: dict[str, dict[str, Any]] = {}
    for name, (batch, rows, keys) in {"tiles": (1, 2**19, 2**18), "lists": (2**17, 1, 64)}.items():
        begin = torch.arange(rows, dtype=torch.int32) // 2
        spans = torch.stack([begin, begin + 50], -1)[None, :, None].expand(batch, -1, -1, -1).contiguous()
        for where, more in (("at", 0), ("beyond", 1)):
            plan, inputs = Plan(spans, keys + more), [leaf(batch, 1, n, 1) for n in (rows, keys + more, keys + more)]
            case: dict[str, Any] = {}
            glue.calls()
            out = gistkit.attention(*inputs, plan)
            case["device"] = "launch key_lists" in glue.calls()
            case["bytes"] = plan._lists.tiles.numel() * 4
            torch.autograd.grad(out.sum(), inputs)
            _gpu.capturing = lambda: True
            try:
                torch.autograd.grad(gistkit.attention(*inputs, Plan(spans, keys + more)).sum(), inputs)
                case["refused"] = ""
            except RuntimeError as error:
                case["refused"] = str(error)
            gistkit.attention(*inputs, plan)
            _gpu.capturing = lambda: False
            glue.calls()
            with torch.no_grad():
                gistkit.attention(*inputs, Plan(spans, keys + more))
            case["forward"] = "launch key_lists" in glue.calls()
            found[f"{name} {where}"] = case
    glue.dry(False)
    return found


def captured() -> dict[str, list[bool]]:
    """Whether a plan's lists are used while a graph is captured: those that came with it, and those a call made."""
    glue.dry(True)
    found, inputs = {}, heads(torch.bfloat16)
    with torch.no_grad():
        for name, plan in (("brought", listed(layouts.causal(150).compile())), ("made", layouts.causal(150).compile())):
            used = []
            for capturing in (False, True, False):
                _gpu.capturing = lambda now=capturing: now
                glue.calls()
                gistkit.attention(*inputs, plan)
                used.append("launch key_lists" not in glue.calls())
            found[name] = used
    glue.dry(False)
    return found


def compiled() -> dict[str, float]:
    """The largest difference between eager and one graph without breaks, forward and backward."""
    inputs, found = heads(torch.bfloat16), {}
    for name, plan in (("lists", listed(layouts.causal(150).compile())), ("none", layouts.causal(150).compile())):
        eager = results(lambda *x, p=plan: gistkit.attention(*x, p), inputs)
        graph = torch.compile(lambda *x, p=plan: gistkit.attention(*x, p), fullgraph=True, backend="aot_eager")
        pairs = zip(results(graph, inputs), eager, strict=True)
        found[name] = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
    return found


class Watch(TorchDispatchMode):
    """Notes what a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITS or (name == "_to_copy" and (kwargs or {}).get("device") is not None):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(into: dict[str, dict[str, int]], part: str) -> Iterator[None]:
    glue.calls()
    yield
    into[part] = dict(glue.calls())


def counts() -> dict[str, dict[str, Any]]:
    """For each case, what its first and second forward and backward call, and what waits. Nothing is run."""
    glue.dry(True)
    found: dict[str, dict[str, Any]] = {}
    for name, (ours, _, inputs) in cases().items():
        parts: dict[str, Any] = {}
        watch = Watch()
        for turn in ("first", "second"):
            with watch:
                with counted(parts, f"{turn} forward"):
                    out = ours(*inputs)
                outs = out if isinstance(out, tuple) else (out,)
                grads = [torch.ones_like(x) for x in outs]
                with counted(parts, f"{turn} backward"):
                    torch.autograd.grad(outs, inputs, grads)
        with watch, torch.no_grad(), counted(parts, "no grad"):
            ours(*inputs)
        parts["waits"] = watch.seen
        found[name] = parts
    glue.dry(False)
    return found


def show() -> None:
    """All that is found; first what a process asks only once."""
    parts = counts, captured, bounds, parity, other_spans, compiled, on_the_host
    print(json.dumps({part.__name__: part() for part in parts}))


def show_wgmma() -> None:
    """In a process of its own, since a device is asked what it is once: gradients on one that has wgmma."""
    emulation.configure(capability=90)
    torch.manual_seed(0)
    found = {}
    for name, tokens, options in (("ordered", 300, {}), ("free", 300, {"deterministic": False}), ("few", 100, {})):
        plan = listed(layouts.causal(tokens).compile())
        inputs = heads(torch.bfloat16, tokens=tokens)
        out = gistkit.attention(*inputs, plan, **options)
        upstream = torch.randn_like(out)
        glue.calls()
        grads = torch.autograd.grad(out, inputs, upstream)
        counts = glue.calls()
        wide = [t.detach().double().requires_grad_() for t in inputs]
        exact = torch.autograd.grad(reference.attention(*wide, plan), wide, upstream.double())
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(grads, exact, strict=True)]
        found[name] = {"calls": counts, "errors": errors}
    print(json.dumps(found))
