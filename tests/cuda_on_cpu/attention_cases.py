"""Attention's params as ctypes structures, plans and inputs for its kernels' tests, the yardstick of their errors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from emulation import DTYPES, Bool, Double, Int, Long, Pointer, mirror
from torch import Tensor

import gistkit
from gistkit import Plan
from gistkit.ops import reference
from tests.helpers import rounding
from tests.helpers.rounding import plain_attention

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_key_bias")


class Rows(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, t: Tensor) -> Rows:
        """Of [B, H, N, D], or with strides of 0 before N, of [N, D]."""
        strides = (0, 0, *t.stride())[-4:-1]
        return cls(t.data_ptr(), *(stride * t.element_size() for stride in strides))


_PROBLEM = (
    ("dtype", Int),
    ("batch query_heads key_heads num_queries num_keys", Long),
    ("dim_qk dim_v", Int),
    ("scale softcap", Double),
    ("spans", Pointer),
    ("spans_shared", Bool),
    ("num_spans", Int),
    ("key_bias", Pointer),
    ("bias_batch_stride bias_head_stride", Long),
    ("query key value", Rows),
)
Forward = mirror("Forward", *_PROBLEM, ("out", Rows), ("lse", Pointer))
Backward = mirror(
    "Backward",
    *_PROBLEM,
    ("out grad_out", Rows),
    ("lse grad_lse", Pointer),
    ("grad_query grad_key grad_value", Rows),
    ("grad_key_bias", Pointer),
    ("deterministic", Bool),
)
DeviceTiles = mirror(
    "DeviceTiles", ("offsets counts entries order", Pointer), ("last_offset", Long), ("lists tiles", Int)
)
Device = mirror("Device", ("key_tiles query_tiles", DeviceTiles), ("splits shared_limit", Int), ("workspace", Pointer))


STRUCTS = [
    ("common/attention.h", "gistkit::AttentionDevice", Device),
    ("common/attention.h", "gistkit::AttentionForward", Forward),
    ("common/attention.h", "gistkit::AttentionBackward", Backward),
]


@dataclass
class TileLists:
    """One direction of a plan's tiles; `tiles`: how many the other side has."""

    offsets: Tensor
    counts: Tensor
    entries: Tensor
    order: Tensor
    tiles: int

    @classmethod
    def of(cls, mask: Tensor, rows: int, columns: int) -> TileLists:
        """From bool [batch, rows, columns], for tiles of so many rows and columns; one list for each tile of rows."""
        batch, num_rows, num_columns = mask.shape
        lists = []
        for b in range(batch):
            for row in range(0, max(1, num_rows), rows):
                kinds = []
                for column in range(0, num_columns, columns):
                    tile = mask[b, row : row + rows, column : column + columns]
                    if tile.any():
                        kinds.append(column // columns * 2 + (not tile.all()))
                lists.append(kinds)
        counts = torch.tensor([len(kinds) for kinds in lists], dtype=torch.int32)
        tiles = max(1, -(-num_columns // columns))
        # One behind the other, but for what lies between them.
        offsets = (counts + 1).cumsum(0) - counts
        entries = torch.full((int((counts + 1).sum()) + tiles,), -(2**30), dtype=torch.int32)
        for offset, kinds in zip(offsets.tolist(), lists, strict=True):
            entries[offset : offset + len(kinds)] = torch.tensor(kinds, dtype=torch.int32)
        order = counts.argsort(descending=True, stable=True).int()
        return cls(offsets, counts, entries, order, tiles)

    @property
    def params(self) -> DeviceTiles:
        pointers = (t.data_ptr() for t in self.tensors("").values())
        return DeviceTiles(*pointers, len(self.entries) - self.tiles, len(self.counts), self.tiles)

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {f"{name}.{field}": getattr(self, field) for field in ("offsets", "counts", "entries", "order")}

    def spoiled(self, seed: int) -> TileLists:
        """Lists of any values, some near what is there. Blocks still differ in what they write."""
        g = torch.Generator().manual_seed(seed)

        def any_values(like: Tensor) -> Tensor:
            info = torch.iinfo(like.dtype)
            wild = torch.randint(info.min, info.max, like.shape, generator=g, dtype=like.dtype)
            near = torch.randint(-3, 2 * len(self.entries), like.shape, generator=g, dtype=like.dtype)
            return torch.where(torch.rand(like.shape, generator=g) < 0.3, wild, near)

        offsets, counts, entries, order = (any_values(t) for t in self.tensors("").values())
        return TileLists(offsets, counts, entries, order if len(order) == 1 else self.order, self.tiles)


def spans_of(kind: str, queries: int, keys: int, batch: int, generator: torch.Generator) -> Tensor:
    """int32 [batch, queries, S, 2]; `batch` is 1 for the kinds that are one for all."""
    if kind == "full":
        return torch.tensor([0, keys], dtype=torch.int32).expand(1, queries, 1, 2).contiguous()
    if kind == "causal":
        end = torch.arange(1, queries + 1, dtype=torch.int32) + (keys - queries)
        return torch.stack([torch.zeros_like(end), end.clamp(0)], -1)[None, :, None].contiguous()
    if kind == "gistpool":
        context = max(1, (queries - 1) * 5 // 8)
        layout = gistkit.layouts.gistpool(
            context=context, ratio=min(4, context), text=max(1, queries - 1 - context - -(-context // 4))
        )
        spans = layout.compile().spans
        return _fit(spans, queries, keys)
    if kind == "dodo":
        row = torch.arange(queries)
        recent, far = (row - 30).clamp(0), torch.minimum(row // 4, (row - 30).clamp(0) // 4)
        spans = torch.stack([torch.zeros_like(row), far, recent + (keys - queries), row + 1 + (keys - queries)], -1)
        return spans.view(1, queries, 2, 2).int().clamp(0, keys).contiguous()
    if kind == "random":
        cuts = torch.randint(0, keys + 1, (batch, queries, 6), generator=generator, dtype=torch.int32)
        spans = cuts.sort(-1).values.view(batch, queries, 3, 2)
        spans[torch.rand(batch, queries, generator=generator) < 0.2] = keys
        return spans
    raise ValueError(kind)


def _fit(spans: Tensor, queries: int, keys: int) -> Tensor:
    """The first rows of a layout's spans, repeated where it has too few."""
    rows = torch.arange(queries) % spans.shape[1]
    return spans[:, rows].clamp(0, keys).contiguous()


@dataclass
class Case:
    """Shapes and options; `make` draws the tensors."""

    queries: int
    keys: int | None = None
    kind: str = "random"
    batch: int = 2
    heads: int = 2
    key_heads: int = 1
    dim: int = 16
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    bias: str = ""  # letters of the dimensions it has: b, h; i: some are -inf
    layout: str = "plain"  # plain, tokens (heads inside of tokens), odd (no row is aligned)
    seed: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = self.queries if self.keys is None else self.keys
        self.value_dim = self.dim if self.value_dim is None else self.value_dim
        g = torch.Generator().manual_seed(self.seed)
        spans = spans_of(self.kind, self.queries, self.keys, self.batch, g)
        self.plan = Plan(spans, self.keys)
        sides = {
            "query": (self.heads, self.queries, self.dim),
            "key": (self.key_heads, self.keys, self.dim),
            "value": (self.key_heads, self.keys, self.value_dim),
            "grad_out": (self.heads, self.queries, self.value_dim),
        }
        for name, (heads, rows, dim) in sides.items():
            values = torch.randn(self.batch, heads, rows, dim, generator=g).to(self.dtype)
            self.tensors[name] = self.empty(heads, rows, dim).copy_(values)
        self.tensors["grad_lse"] = torch.randn(self.batch, self.heads, self.queries, generator=g)
        if self.bias:
            shape = (self.batch if "b" in self.bias else 1, self.heads if "h" in self.bias else 1, self.keys)
            self.tensors["key_bias"] = torch.randn(shape, generator=g)
            if "i" in self.bias:
                self.tensors["key_bias"][..., ::5] = -torch.inf

    def empty(self, heads: int, rows: int, dim: int) -> Tensor:
        """NaN in the layout that the case asks for."""
        fill = lambda *shape: torch.full(shape, torch.nan, dtype=self.dtype)  # noqa: E731
        if self.layout == "tokens":
            return fill(self.batch, rows, heads, dim).transpose(1, 2)
        if self.layout == "odd":
            return fill(self.batch, heads, rows, dim + 3)[..., 1 : dim + 1]
        return fill(self.batch, heads, rows, dim)

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def fill(self, params: ctypes.Structure) -> None:
        """Sets what both directions share."""
        t = self.tensors
        params.dtype = DTYPES[self.dtype]
        params.batch, params.query_heads, params.key_heads = self.batch, self.heads, self.key_heads
        params.num_queries, params.num_keys = self.queries, self.keys
        params.dim_qk, params.dim_v = self.dim, self.value_dim
        params.scale, params.softcap = self.scale, self.softcap or 0.0
        params.spans, params.num_spans = self.plan.spans.data_ptr(), self.plan.spans.shape[2]
        params.spans_shared = self.plan.spans.shape[0] == 1
        if self.bias:
            bias = t["key_bias"]
            params.key_bias = bias.data_ptr()
            params.bias_batch_stride = bias.stride(0) if bias.shape[0] > 1 else 0
            params.bias_head_stride = bias.stride(1) if bias.shape[1] > 1 else 0
        for name in ("query", "key", "value"):
            setattr(params, name, Rows.of(t[name]))

    def inputs(self, *names: str) -> dict[str, Tensor | None]:
        return {"spans": self.plan.spans, **{name: self.tensors.get(name) for name in names}}

    def run(self, dtype: torch.dtype, function: object = reference.attention) -> list[Tensor]:
        """[out, lse, gradients ...] of a torch form in a given precision."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        inputs = [self.tensors[n].detach().to(dtype).requires_grad_() for n in ("query", "key", "value")]
        if self.bias:
            inputs.append(self.tensors["key_bias"].to(wide).requires_grad_())
        out, lse = function(  # type: ignore[operator]
            *inputs[:3],
            self.plan,
            scale=self.scale,
            softcap=self.softcap,
            key_bias=inputs[3] if self.bias else None,
            return_lse=True,
        )
        finite = torch.where(lse == -torch.inf, 0, lse)
        total = (out * self.tensors["grad_out"].to(dtype)).sum() + (finite * self.tensors["grad_lse"].to(wide)).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(total, inputs)]


def lists_of(case: Case) -> tuple[TileLists, TileLists]:
    """Key tiles of query tiles, and the other way round, for tiles of 128 queries and 64 keys."""
    mask = reference.dense_mask(case.plan)
    return TileLists.of(mask, 128, 64), TileLists.of(mask.transpose(1, 2), 64, 128)


def forward_of(case: Case) -> tuple[Forward, dict[str, Tensor]]:
    """Params of a forward pass, and the results that it will write."""
    params = Forward()
    case.fill(params)
    out = case.empty(case.heads, case.queries, case.value_dim)
    lse = torch.full_like(case.tensors["grad_lse"], torch.nan)
    params.out, params.lse = Rows.of(out), lse.data_ptr()
    return params, {"out": out, "lse": lse}


def backward_of(case: Case, out: Tensor, lse: Tensor) -> tuple[Backward, dict[str, Tensor]]:
    """Params of a backward pass from the results of a forward pass, and the gradients that it will write."""
    params = Backward()
    case.fill(params)
    params.out, params.lse = Rows.of(out), lse.data_ptr()
    params.grad_out, params.grad_lse = Rows.of(case.tensors["grad_out"]), case.tensors["grad_lse"].data_ptr()
    grads = {
        "grad_query": case.empty(case.heads, case.queries, case.dim),
        "grad_key": case.empty(case.key_heads, case.keys, case.dim),
        "grad_value": case.empty(case.key_heads, case.keys, case.value_dim),
    }
    for name, t in grads.items():
        setattr(params, name, Rows.of(t))
    if case.bias:
        grads["grad_key_bias"] = torch.full((case.batch, case.heads, case.keys), torch.nan, dtype=lse.dtype)
        params.grad_key_bias = grads["grad_key_bias"].data_ptr()
    return params, grads


def check(case: Case, got: list[Tensor], names: tuple[str, ...], form: object = plain_attention) -> None:
    """No error beyond twice that of a torch form of the same inputs, both measured against fp64."""
    exact, low = (dict(zip(NAMES, case.run(*how), strict=False)) for how in ((torch.float64,), (case.dtype, form)))
    if case.bias and "grad_key_bias" in names:
        # Gradients of a broadcast bias are summed by the caller.
        bias = case.tensors["key_bias"]
        at = names.index("grad_key_bias")
        for d in (0, 1):
            if bias.shape[d] == 1:
                got[at] = got[at].sum(d, keepdim=True)
    rounding.check(got, *([results[name] for name in names] for results in (low, exact)), 1e-6, str(names))
