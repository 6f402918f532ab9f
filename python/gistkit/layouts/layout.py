"""Layout: one row per token, and a table of which roles see which. Everything else is derived from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from gistkit._compiled import planner as _planner
from gistkit.common.checks import at_least, widths
from gistkit.layouts.plan import Plan
from gistkit.layouts.relations import Relation, Role

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Sees = Mapping[Role, Mapping[Role, Relation | tuple[Relation, ...]]]
# Tokens of documents with one table; the table, and its rows as the planner takes them.
Run = tuple[slice, Sees, NDArray[np.int64]]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Layout:
    """An attention mask with position IDs: one row per token, in logical order. Immutable.

    Args:
        roles: uint8 [N], values of `Role`.
        segments: int32 [N], the chunk, pooling window or image of a token; nondecreasing among the tokens of one role
            of one document. None is all zero.
        positions: int64 [N] or [A, N] (A axes), or float64 where fractional; at least 0, repeats and disorder are
            legal. None is the index in the document.
        documents: int32 [N], nondecreasing; tokens of different documents do not see each other. None is all zero.
        sees: {query role: {key role: relation or tuple of relations}}; several relations see the union; absent is
            nothing. PAD neither sees nor is visible. Documents of different methods: a sequence of such tables, one for
            each document in order.
        ordinals: int64 [N], ascending within each document (PAD may repeat the one before it): the place in logical
            order that causal and recent relations count by. None is the index in the document; `take` keeps the
            original ones.
        name: title in pictures and messages.
    """

    roles: NDArray[np.uint8]
    sees: Sees | Sequence[Sees]
    segments: NDArray[np.int32] = None  # type: ignore[assignment]
    positions: NDArray[np.int64] | NDArray[np.float64] = None  # type: ignore[assignment]
    documents: NDArray[np.int32] = None  # type: ignore[assignment]
    ordinals: NDArray[np.int64] = None  # type: ignore[assignment]
    name: str = ""
    _runs: tuple[Run, ...] = field(init=False)
    _counts: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        roles = _array("roles", self.roles, np.uint8)
        if roles.ndim != 1 or not roles.size:
            raise ValueError(f"Layout: expected roles of shape [N] with N >= 1, got shape {roles.shape}")
        if roles.max() > Role.PAD:
            raise ValueError(f"Layout: expected roles to be values of Role, at most {Role.PAD}, got {roles.max()}")
        shape = roles.shape
        zeros = np.zeros(shape, np.int32)
        documents = zeros if self.documents is None else _array("documents", self.documents, np.int32, shape)
        # Compared, not subtracted: differences of int32 and int64 values may overflow.
        if (documents[1:] < documents[:-1]).any():
            raise ValueError("Layout: expected documents to be nondecreasing, got a smaller one after a larger one")
        segments = zeros if self.segments is None else _array("segments", self.segments, np.int32, shape)
        _check_segments(roles, segments, documents)
        index = _index_in_document(documents)
        ordinals = index if self.ordinals is None else _array("ordinals", self.ordinals, np.int64, shape)
        if ordinals.min() < 0 or ordinals.max() >= 2**62:
            raise ValueError(f"Layout: expected ordinals in [0, 2**62), got {ordinals.min()} to {ordinals.max()}")
        # Padding counts nowhere: it may repeat the ordinal before it.
        step = (ordinals[1:] < ordinals[:-1]) | ((ordinals[1:] == ordinals[:-1]) & (roles[1:] != Role.PAD))
        if (step & (documents[1:] == documents[:-1])).any():
            raise ValueError("Layout: expected ordinals to ascend within each document")
        positions = index if self.positions is None else _positions(self.positions, shape[0])
        sees, runs = _tables(self.sees, documents)
        for key, value in (("roles", roles), ("segments", segments), ("positions", positions), ("documents", documents),
                           ("ordinals", ordinals)):  # fmt: skip
            value = value.view()
            value.flags.writeable = False
            object.__setattr__(self, key, value)
        object.__setattr__(self, "sees", sees)
        object.__setattr__(self, "_runs", runs)
        object.__setattr__(self, "_counts", np.bincount(roles, minlength=len(Role)))

    def __len__(self) -> int:
        return len(self.roles)

    def compile(
        self,
        *,
        window: int | None = None,
        windows: Iterable[int] = (),
        queries: slice | ArrayLike | None = None,
        grouped: bool = True,
        device: torch.device | str = "cpu",
    ) -> Plan:
        """Compiles the layout into a plan, which attention and RoPE take.

        Args:
            window: sliding window; a query sees only keys less than `window` before it in logical order.
            windows: sliding-window widths of a model's layers; the plan of each width is in `Plan.windowed`.
            queries: logical rows that are queries (slice, indices or bool [N]), for decoding; all tokens remain keys.
                None: all.
            grouped: sort tokens by (document, role, logical order), which makes every relation one key interval; False
                keeps logical order, with as many intervals a row as that takes.
            device: device of the plan's tensors.
        """
        order, spans, positions, slices = self.compile_arrays(window, queries, grouped)
        plan = Plan(
            torch.from_numpy(spans)[None],
            len(self),
            torch.from_numpy(positions if positions.ndim == 1 else positions[:, None]),
            torch.from_numpy(order)[None],
            slices=slices,
            reach=self.reach,
        )
        cuts = {
            asked: torch.from_numpy(self.compile_arrays(width, queries, grouped)[1])[None]
            for asked, width in widths("compile", windows, window).items()
        }
        return plan.with_windows(cuts).to(device)

    @property
    def reach(self) -> int:
        """Number of places in logical order of the longest document; a sliding window of this width has no effect."""
        if self.documents[0] == self.documents[-1]:
            return int(self.ordinals[-1] - self.ordinals[0]) + 1
        changes = self.documents[1:] != self.documents[:-1]
        first, last = self.ordinals[np.append(True, changes)], self.ordinals[np.append(changes, True)]
        return int((last - first).max()) + 1

    def compile_arrays(
        self, window: int | None, queries: slice | ArrayLike | None, grouped: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[Any], dict[Role, slice] | None]:
        """Order [Nq], spans [Nq, S, 2], positions [.., Nq] and slices of `compile`, as NumPy arrays."""
        if window is not None:
            window = at_least("compile", "window", window, 1)
        parts = [self._compile_run(tokens, relations, window, grouped) for tokens, _, relations in self._runs]
        order, spans = parts[0] if len(parts) == 1 else _joined(parts)
        if queries is not None:
            wanted = np.zeros(len(self), bool)
            wanted[_token_index("compile", "queries", queries, len(self))] = True
            rows = np.flatnonzero(wanted[order])
            order, spans = order[rows], spans[rows]
            used = (spans[..., 0] < spans[..., 1]).any(0).sum()
            spans = np.ascontiguousarray(spans[:, : max(1, used)])
        slices = None
        if grouped and self.documents[0] == self.documents[-1]:
            counts = self._counts if queries is None else np.bincount(self.roles[order], minlength=len(Role))
            bounds = np.concatenate([[0], np.cumsum(counts)])
            slices = {r: slice(int(bounds[r]), int(bounds[r + 1])) for r in Role if bounds[r] < bounds[r + 1]}
        return order, spans, np.take(self.positions, order, axis=-1), slices

    def _compile_run(
        self, tokens: slice, relations: NDArray[np.int64], window: int | None, grouped: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Order [n] and spans [n, S, 2] of documents with one table, counted from their first token."""
        if window is not None:
            relations = relations.copy()
            reach = relations[:, 4]
            relations[:, 4] = np.where(reach < 0, window, np.minimum(reach, window))
        return _planner.compile(
            self.roles[tokens], self.segments[tokens], self.documents[tokens], self.ordinals[tokens], relations,
            grouped=grouped,
        )  # fmt: skip

    def dense_mask(self, order: str = "logical", window: int | None = None) -> NDArray[np.bool_]:
        """bool [N, N], True where the query row sees the key column: the slow oracle, from the relations' definitions.

        Args:
            order: "logical", or "physical" for the grouped order of `compile`.
            window: as in `compile`.
        """
        if order not in ("logical", "physical"):
            raise ValueError(f"dense_mask: expected order to be 'logical' or 'physical', got {order!r}")
        same_document = self.documents[:, None] == self.documents[None, :]
        mask = np.zeros((len(self), len(self)), bool)
        for tokens, sees, _ in self._runs:
            own = np.zeros(len(self), bool)
            own[tokens] = True
            for query_role, keys in sees.items():
                for key_role, relations in keys.items():
                    rows = own & (self.roles == query_role)
                    pairs = rows[:, None] & (self.roles == key_role)[None, :] & same_document
                    for relation in _as_tuple(relations):
                        mask |= pairs & _related(self, relation)
        if window is not None:
            mask &= self.ordinals[:, None] - self.ordinals[None, :] < window
        if order == "physical":
            rows = physical_order(self)
            mask = mask[np.ix_(rows, rows)]
        return mask

    def take(self, index: slice | ArrayLike, name: str | None = None) -> Layout:
        """The layout of some of the tokens, with their original positions and ordinals.

        Args:
            index: slice, bool [N], or ascending indices int [M].
        """
        chosen = _token_index("take", "index", index, len(self))
        sees = self.sees
        if not isinstance(sees, Mapping):
            remaining = np.isin(np.unique(self.documents), self.documents[chosen])
            sees = [table for table, stays in zip(sees, remaining, strict=True) if stays]
        return replace(
            self, sees=sees, roles=self.roles[chosen], segments=self.segments[chosen],
            positions=self.positions[..., chosen], documents=self.documents[chosen], ordinals=self.ordinals[chosen],
            name=self.name if name is None else name,
        )  # fmt: skip

    @classmethod
    def pack(cls, layouts: Sequence[Layout], name: str = "") -> Layout:
        """Packs documents into one layout; they do not see each other and may use different methods."""
        if not layouts:
            raise ValueError("Layout.pack: expected at least one layout, got none")
        if len({layout.positions.shape[:-1] for layout in layouts}) > 1:
            axes = [layout.positions.shape for layout in layouts]
            raise ValueError(f"Layout.pack: expected positions with the same number of axes, got shapes {axes}")
        documents, start = [], 0
        tables: list[Sees] = []
        for layout in layouts:
            changes = np.append(False, layout.documents[1:] != layout.documents[:-1])
            documents.append(np.cumsum(changes) + start)
            tables += [layout.sees] * (changes.sum() + 1) if isinstance(layout.sees, Mapping) else layout.sees
            start = int(documents[-1][-1]) + 1
        join = lambda key: np.concatenate([getattr(layout, key) for layout in layouts], axis=-1)  # noqa: E731
        same = all(layout.name == layouts[0].name for layout in layouts)
        return cls(
            roles=join("roles"), sees=tables, segments=join("segments"), positions=join("positions"),
            documents=np.concatenate(documents), ordinals=join("ordinals"),
            name=name or (layouts[0].name if same else "packed"),
        )  # fmt: skip

    def draw(self, **options: Any) -> Figure:
        """A matplotlib figure of the mask, in logical and in physical order, and of the position IDs."""
        from gistkit.viz.layout import draw_layout

        return draw_layout(self, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {
            key: getattr(self, key) for key in ("roles", "segments", "positions", "documents", "ordinals", "name")
        }
        tables = [self.sees] if isinstance(self.sees, Mapping) else self.sees
        plain = [{query: dict(keys) for query, keys in table.items()} for table in tables]
        return _rebuild, ({**fields, "sees": plain[0] if isinstance(self.sees, Mapping) else plain},)

    def __repr__(self) -> str:
        lines = [f"Layout {self.name!r}: {len(self)} tokens" if self.name else f"Layout: {len(self)} tokens"]
        count = len(np.unique(self.documents))
        if count > 1:
            lines[0] += f" in {count} documents"
        for role in Role:
            tokens = self.roles == role
            if tokens.any():
                at = self.positions[..., tokens]
                ids = f"{at.min()}..{at.max()}" if at.min() < at.max() else f"{at.min()}"
                segments = len(np.unique(self.segments[tokens]))
                note = f", {segments} segments" if segments > 1 else ""
                # Documents of different methods: each answer once.
                rows = [table.get(role, {}) for documents, table, _ in self._runs if tokens[documents].any()]
                words = (
                    ", ".join(f"{k.name} {relation_words(r)}" for k, r in row.items()) or "nothing" for row in rows
                )
                sees = "; or ".join(dict.fromkeys(words))
                lines.append(f"  {role.name:<8}{tokens.sum():>7}  positions {ids}{note}; sees {sees}")
        return "\n".join(lines)


def physical_order(layout: Layout) -> NDArray[np.int64]:
    """int64 [N], the logical index of each row of the grouped order: by document, then role, then logical order."""
    return np.lexsort((layout.ordinals, layout.roles, layout.documents))


def _related(layout: Layout, relation: Relation) -> NDArray[np.bool_]:
    query, key = layout.ordinals[:, None], layout.ordinals[None, :]
    query_segment, key_segment = layout.segments[:, None].astype(np.int64), layout.segments[None, :].astype(np.int64)
    kind, size = relation.kind, relation.size
    if kind == "all":
        return np.ones((len(layout), len(layout)), bool)
    if kind == "causal":
        return key <= query
    if kind == "segment":
        return key_segment == query_segment
    if kind == "segment_causal":
        return (key_segment == query_segment) & (key <= query)
    if kind == "self":
        return key == query
    if kind == "windows":
        return (key_segment <= query_segment) & (key_segment > query_segment - size)
    if kind == "windows_causal":
        return (key_segment <= query_segment) & (key_segment > query_segment - size) & (key <= query)
    if kind == "recent":
        return (key <= query) & (key > query - size)
    if kind == "older":
        return key <= query - size
    raise ValueError(f"dense_mask: unknown relation {relation!r}")


def _rebuild(fields: dict[str, Any]) -> Layout:
    return Layout(**fields)


def relation_words(relations: Relation | tuple[Relation, ...]) -> str:
    """One entry of a sees table in words."""
    return "(" + " or ".join(map(repr, _as_tuple(relations))) + ")"


def _as_tuple(relations: Relation | tuple[Relation, ...]) -> tuple[Relation, ...]:
    return relations if isinstance(relations, tuple) else (relations,)


def _joined(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int32]]],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Orders and spans of runs of documents after each other, each counted from its first token."""
    orders, at = [], 0
    spans = np.zeros((sum(len(order) for order, _ in parts), max(part.shape[1] for _, part in parts), 2), np.int32)
    for order, part in parts:
        orders.append(order + at)
        spans[at : at + len(order), : part.shape[1]] = np.where((part[..., :1] < part[..., 1:]), part + at, 0)
        at += len(order)
    return np.concatenate(orders), spans


def _tables(sees: Any, documents: NDArray[np.int32]) -> tuple[Sees | tuple[Sees, ...], tuple[Run, ...]]:
    """`sees` after checks, one table if all are equal; and each run of documents with one table."""
    if isinstance(sees, Mapping) or not isinstance(sees, Sequence):
        table = _check_sees(sees)
        return table, ((slice(0, len(documents)), table, _relation_rows(table)),)
    starts = np.append(0, np.flatnonzero(documents[1:] != documents[:-1]) + 1)
    if len(sees) != len(starts):
        raise ValueError(f"Layout: expected one sees table for each of {len(starts)} documents, got {len(sees)}")
    # A layout packed many times gives one table many times.
    checked = {id(table): _check_sees(table) for table in sees}
    tables = [checked[id(table)] for table in sees]
    new = [i == 0 or (tables[i] is not tables[i - 1] and tables[i] != tables[i - 1]) for i in range(len(tables))]
    first = [i for i, begins in enumerate(new) if begins]
    if len(first) == 1:
        return tables[0], ((slice(0, len(documents)), tables[0], _relation_rows(tables[0])),)
    ends = [int(starts[i]) for i in first[1:]] + [len(documents)]
    runs = tuple(
        (slice(int(starts[i]), end), tables[i], _relation_rows(tables[i])) for i, end in zip(first, ends, strict=True)
    )
    return tuple(tables), runs


def _relation_rows(sees: Sees) -> NDArray[np.int64]:
    """int64 [R, 5]: query role, key role and the bounds of each relation, -1 for none."""
    rows = [
        (query, key, *(-1 if bound is None else bound for bound in r.bounds))
        for query, keys in sees.items() for key, relations in keys.items() for r in _as_tuple(relations)
    ]  # fmt: skip
    return np.array(rows, np.int64).reshape(-1, 5)


def _array(name: str, value: Any, dtype: type, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
    """A contiguous copy of `value` in `dtype`, refusing values that do not fit."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"Layout: expected {name} to hold integers, got dtype {array.dtype}")
    if shape is not None and array.shape != shape:
        raise ValueError(f"Layout: expected {name} of shape [{shape[0]}] as roles, got shape {array.shape}")
    limits = np.iinfo(dtype)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ValueError(f"Layout: expected {name} to fit {limits.dtype}, got {array.min()} to {array.max()}")
    return np.array(array, dtype, order="C")


def _positions(value: Any, count: int) -> NDArray[Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"Layout: expected positions to hold integers or floats, got dtype {array.dtype}")
    if array.ndim not in (1, 2) or array.shape[-1] != count or not array.size:
        raise ValueError(f"Layout: expected positions of shape [{count}] or [A, {count}], got shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("Layout: expected finite positions, got NaN or infinity")
    if array.min() < 0:
        raise ValueError(f"Layout: expected positions >= 0, got {array.min()}")
    if array.dtype.kind == "u" and array.max() >= 2**63:
        raise ValueError(f"Layout: expected positions to fit int64, got {array.max()}")
    return np.array(array, np.float64 if array.dtype.kind == "f" else np.int64, order="C")


def _index_in_document(documents: NDArray[np.int32]) -> NDArray[np.int64]:
    index = np.arange(len(documents))
    starts = np.flatnonzero(documents[1:] != documents[:-1]) + 1
    first = np.zeros_like(index)
    first[starts] = starts
    return index - np.maximum.accumulate(first)


def _check_segments(roles: NDArray[np.uint8], segments: NDArray[np.int32], documents: NDArray[np.int32]) -> None:
    # Otherwise "my segment" would not be one interval of the role's tokens.
    if not segments.any():
        return
    for role in Role:
        tokens = np.flatnonzero(roles == role)
        segment, document = segments[tokens], documents[tokens]
        bad = (segment[1:] < segment[:-1]) & (document[1:] == document[:-1])
        if bad.any():
            at = tokens[1:][bad][0]
            raise ValueError(
                f"Layout: expected segments to be nondecreasing among the {role.name} tokens of a document, got "
                f"segment {segments[at]} at token {at} after a larger one"
            )


def _check_sees(sees: Any) -> Mapping[Role, Mapping[Role, Relation | tuple[Relation, ...]]]:
    if not isinstance(sees, Mapping):
        raise TypeError(f"Layout: expected sees to be {{Role: {{Role: relation}}}}, got {type(sees).__name__}")
    table: dict[Role, Mapping[Role, Relation | tuple[Relation, ...]]] = {}
    for query, keys in sees.items():
        if not isinstance(keys, Mapping):
            raise TypeError(f"Layout: expected sees[{query!r}] to be {{Role: relation}}, got {type(keys).__name__}")
        for role in (query, *keys):
            if not isinstance(role, Role) or role is Role.PAD:
                raise ValueError(f"Layout: expected the keys of sees to be roles other than PAD, got {role!r}")
        for key, relations in keys.items():
            if not all(isinstance(relation, Relation) for relation in _as_tuple(relations)) or relations == ():
                raise TypeError(
                    f"Layout: expected sees[{query.name}][{key.name}] to be a relation or a tuple of them, "
                    f"got {relations!r}"
                )
        table[query] = MappingProxyType({key: keys[key] for key in sorted(keys)})
    return MappingProxyType({query: table[query] for query in sorted(table)})


def _token_index(function: str, name: str, value: Any, count: int) -> NDArray[np.int64]:
    if isinstance(value, slice):
        return np.arange(count)[value]
    index = np.asarray(value)
    if not index.size:
        index = index.astype(np.int64)
    if index.dtype == bool:
        if index.shape != (count,):
            raise ValueError(f"{function}: expected {name} of shape [{count}] where bool, got shape {index.shape}")
        return np.flatnonzero(index)
    if index.dtype.kind not in "iu" or index.ndim != 1:
        raise TypeError(
            f"{function}: expected {name} to be a slice, bool [{count}] or 1D indices, got {index.dtype} of shape "
            f"{index.shape}"
        )
    if index.size and (index.min() < 0 or index.max() >= count):
        raise ValueError(f"{function}: expected {name} within [0, {count}), got {index.min()} to {index.max()}")
    return index
