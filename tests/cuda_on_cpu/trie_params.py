"""The params of a trie's kernels for ctypes, calls of the launchers on tensors, and tries of random digits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import emulation
import torch
from emulation import DTYPES, Double, Int, Long, Pointer, mirror
from torch import Tensor

GELU_ROWS, PART_ENTRIES = 64, 1024
TriePaths = mirror(
    "TriePaths", ("nodes depth symbols", Long), ("paths entries entry_offsets", Pointer), ("num_entries", Long)
)
TrieMixParams = mirror(
    "TrieMixParams", ("trie", TriePaths), ("dtype", Int), ("heads columns", Long), ("weights table base out", Pointer)
)
TrieMixGradParams = mirror(
    "TrieMixGradParams",
    ("trie", TriePaths),
    ("dtype", Int),
    ("heads columns", Long),
    ("grad_out weights table grad_weights grad_table grad_base", Pointer),
)
AncestorAttentionParams = mirror(
    "AncestorAttentionParams",
    ("dtype", Int),
    ("queries keys depth heads head_dim", Long),
    ("ancestors query key value", Pointer),
    ("query_stride key_stride value_stride", Long),
    ("scale", Double),
    ("out weights", Pointer),
)
AncestorAttentionGradParams = mirror(
    "AncestorAttentionGradParams",
    ("dtype", Int),
    ("queries keys depth heads head_dim", Long),
    ("ancestors entries entry_offsets", Pointer),
    ("num_entries", Long),
    ("query key value", Pointer),
    ("query_stride key_stride value_stride", Long),
    ("scale", Double),
    ("grad_out weights grad_scores grad_query grad_key grad_value", Pointer),
)
BiasGeluParams = mirror("BiasGeluParams", ("dtype", Int), ("rows columns", Long), ("x scale bias out", Pointer))
BiasGeluGradParams = mirror(
    "BiasGeluGradParams",
    ("dtype", Int),
    ("rows columns", Long),
    ("grad_out x scale bias grad_x grad_scale partials grad_bias", Pointer),
)


MIRRORS = (TriePaths, TrieMixParams, TrieMixGradParams, AncestorAttentionParams, AncestorAttentionGradParams)
STRUCTS = tuple(
    ("common/trie.h", f"gistkit::{mirror.__name__}", mirror)
    for mirror in (*MIRRORS, BiasGeluParams, BiasGeluGradParams)
)


def transposed(table: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Lists by value: the flat places of 0, 1, ..., count - 1 in a table of int32, ascending, and where each begins."""
    flat = table.flatten()
    entries = [torch.nonzero(flat == value)[:, 0] for value in range(count)]
    offsets = torch.tensor([0, *(len(entry) for entry in entries)]).cumsum(0)
    return torch.cat([*entries, torch.empty(0, dtype=torch.int64)]).int(), offsets.int()


def linked(lengths: Sequence[int], depth: int) -> Tensor:
    """int32 [N, depth]: value v at so many places, scattered; a row's are ascending and different, then -1."""
    rows: list[list[int]] = [[] for _ in range(max(max(lengths), -(-sum(lengths) // depth)))]
    place = 0
    for value, length in enumerate(lengths):
        for _ in range(length):
            rows[place % len(rows)].append(value)
            place += 1
    table = torch.full((len(rows), depth), -1, dtype=torch.int32)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = torch.tensor(values, dtype=torch.int32)
    return table[torch.randperm(len(rows))].contiguous()


@dataclass
class Trie:
    """Nodes level by level, each sorted, the strings' ends last; a symbol is (place, digit), the last one the end."""

    symbols: int
    paths: Tensor  # [nodes, depth] of symbols
    ancestors: Tensor  # [nodes, depth] of nodes, each node its own last one
    ends: int

    @classmethod
    def of(cls, strings: set[tuple[int, ...]], base: int, places: int) -> Trie:
        prefixes = sorted({s[:length] for s in strings for length in range(1, len(s) + 1)}, key=lambda s: (len(s), s))
        keys = [*((s, False) for s in prefixes), *((s, True) for s in sorted(strings))]
        number = {key: node for node, key in enumerate(keys)}
        end, depth = places * base, places + 1
        paths, ancestors = (torch.full((len(keys), depth), -1, dtype=torch.int32) for _ in range(2))
        for node, (string, is_end) in enumerate(keys):
            for place, digit in enumerate(string):
                paths[node, place] = place * base + digit
                ancestors[node, place] = number[string[: place + 1], False]
            if is_end:
                paths[node, len(string)], ancestors[node, len(string)] = end, node
        return cls(end + 1, paths, ancestors, len(strings))

    @classmethod
    def random(cls, count: int, base: int, places: int, *, equal: bool = True) -> Trie:
        """Of `count` draws of strings of digits, all of `places` digits or of 1 to so many."""
        lengths = [places if equal else int(torch.randint(1, places + 1, ())) for _ in range(count)]
        return cls.of({tuple(torch.randint(base, (length,)).tolist()) for length in lengths}, base, places)


def unwritten(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype)


def _fill(params: ctypes.Structure, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        setattr(params, name, None if tensor is None else tensor.data_ptr())


def _run(
    source: str,
    name: str,
    params: ctypes.Structure,
    inputs: dict[str, Tensor | None],
    outputs: dict[str, Tensor | None],
    more: dict[str, Tensor],
    *,
    workspace: bool = False,
    **how: object,
) -> None:
    _fill(params, {**inputs, **outputs})
    library = emulation.build(source, [f"csrc/cuda/trie/{source}.cu"], structs=STRUCTS)
    addresses = []
    if workspace:
        size = library.function(f"gistkit::cuda::{name}_workspace")
        size.restype = Long
        numbers = size(Pointer(ctypes.addressof(params))) // 8
        outputs = {**outputs, "workspace": torch.full((numbers,), float("nan"), dtype=torch.float64)}
        addresses = [outputs["workspace"].data_ptr()]
    library.run(f"gistkit::cuda::{name}", params, *addresses, inputs={**inputs, **more}, outputs=outputs, **how)


def _paths(paths: Tensor, symbols: int, lists: tuple[Tensor, Tensor]) -> tuple[TriePaths, dict[str, Tensor]]:
    named = {"paths": paths, "entries": lists[0], "entry_offsets": lists[1]}
    trie = TriePaths(*paths.shape, symbols, num_entries=len(lists[0]))
    _fill(trie, named)
    return trie, named


def trie_mix(weights: Tensor, table: Tensor, base: Tensor, paths: Tensor, **how: object) -> Tensor:
    """weights [N, M, H], table [R, H, C], base [R, C], paths int32 [N, M]: [N, C]."""
    out = unwritten(len(paths), table.size(2), like=table)
    trie, more = _paths(paths, len(table), transposed(paths, len(table)))
    params = TrieMixParams(trie, DTYPES[table.dtype], *table.shape[1:])
    given = {"weights": weights, "table": table, "base": base}
    _run("mix", "trie_mix", params, given, {"out": out}, more, **how)
    return out


def trie_mix_backward(
    grad: Tensor,
    weights: Tensor,
    table: Tensor,
    paths: Tensor,
    *,
    lists: tuple[Tensor, Tensor] | None = None,
    **how: object,
) -> tuple[Tensor, ...]:
    """Gradients by weights, table and base."""
    out = [unwritten(*shape, like=table) for shape in (weights.shape, table.shape, (len(table), table.size(2)))]
    trie, more = _paths(paths, len(table), transposed(paths, len(table)) if lists is None else lists)
    params = TrieMixGradParams(trie, DTYPES[table.dtype], *table.shape[1:])
    given = {"grad_out": grad, "weights": weights, "table": table}
    written = dict(zip(("grad_weights", "grad_table", "grad_base"), out, strict=True))
    _run("mix", "trie_mix_backward", params, given, written, more, workspace=True, **how)
    return tuple(out)


def _attention(
    params: AncestorAttentionParams | AncestorAttentionGradParams,
    rows: tuple[Tensor, Tensor, Tensor],
    ancestors: Tensor,
    scale: float,
) -> None:
    query, key, value = rows
    params.dtype, params.scale = DTYPES[query.dtype], scale
    params.queries, params.depth, params.keys = *ancestors.shape, len(key)
    params.heads, params.head_dim = query.shape[1:]
    params.query_stride, params.key_stride, params.value_stride = (x.stride(0) for x in (query, key, value))


def ancestor_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ancestors: Tensor,
    *,
    scale: float,
    **how: object,
) -> tuple[Tensor, Tensor]:
    """query [Q, H, D], key and value [K, H, D], ancestors int32 [Q, M]: [Q, H, D] and weights [Q, M, H]."""
    params = AncestorAttentionParams()
    _attention(params, (query, key, value), ancestors, scale)
    out = unwritten(*query.shape, like=query), unwritten(*ancestors.shape, query.size(1), like=query)
    given = {"ancestors": ancestors, "query": query, "key": key, "value": value}
    written = dict(zip(("out", "weights"), out, strict=True))
    _run("ancestors", "ancestor_attention", params, given, written, {}, **how)
    return out


def ancestor_attention_backward(
    grad: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    weights: Tensor,
    ancestors: Tensor,
    *,
    scale: float,
    lists: tuple[Tensor, Tensor] | None = None,
    **how: object,
) -> tuple[Tensor, ...]:
    """Gradients by query, key and value."""
    params = AncestorAttentionGradParams()
    _attention(params, rows, ancestors, scale)
    entries, offsets = transposed(ancestors, len(rows[1])) if lists is None else lists
    params.num_entries = len(entries)
    out = [unwritten(*x.shape, like=x) for x in rows]
    given = {"ancestors": ancestors, "entries": entries, "entry_offsets": offsets, "grad_out": grad}
    given |= {"weights": weights, **dict(zip(("query", "key", "value"), rows, strict=True))}
    written = dict(zip(("grad_query", "grad_key", "grad_value"), out, strict=True))
    written["grad_scores"] = unwritten(*weights.shape, like=weights)
    _run("ancestors", "ancestor_attention_backward", params, given, written, {}, **how)
    return tuple(out)


def bias_gelu(x: Tensor, bias: Tensor, scale: Tensor | None = None, **how: object) -> Tensor:
    """x [N, C], bias [C], scale [N]."""
    out = unwritten(*x.shape, like=x)
    params = BiasGeluParams(DTYPES[x.dtype], *x.shape)
    _run("gelu", "bias_gelu", params, {"x": x, "scale": scale, "bias": bias}, {"out": out}, {}, **how)
    return out


def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor, scale: Tensor | None = None, **how: object
) -> tuple[Tensor, ...]:
    """Gradients by x, bias and, where there is one, scale."""
    by_x, by_bias = unwritten(*x.shape, like=x), unwritten(*bias.shape, like=x)
    by_scale = None if scale is None else unwritten(*scale.shape, like=x)
    parts = (len(x) + GELU_ROWS - 1) // GELU_ROWS
    written = {
        "grad_x": by_x,
        "grad_scale": by_scale,
        "grad_bias": by_bias,
        "partials": unwritten(parts, x.size(1), like=x),
    }
    params = BiasGeluGradParams(DTYPES[x.dtype], *x.shape)
    given = {"grad_out": grad, "x": x, "scale": scale, "bias": bias}
    _run("gelu", "bias_gelu_backward", params, given, written, {}, **how)
    return (by_x, by_bias) if by_scale is None else (by_x, by_bias, by_scale)
