"""The dense mask of a layout, straight from the definitions of the relations; shares nothing with the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gistkit.layouts.relations import Relation

if TYPE_CHECKING:
    from gistkit.layouts.layout import Layout


def physical_order(layout: Layout) -> NDArray[np.int64]:
    """int64 [N], the logical index of each row of the grouped order: by document, then role, then logical order."""
    return np.lexsort((layout.ordinals, layout.roles, layout.documents))


def dense_mask(layout: Layout, order: str = "logical", window: int | None = None) -> NDArray[np.bool_]:
    """bool [N, N], True where the query row sees the key column."""
    if order not in ("logical", "physical"):
        raise ValueError(f"dense_mask: expected order to be 'logical' or 'physical', got {order!r}")
    same_document = layout.documents[:, None] == layout.documents[None, :]
    mask = np.zeros((len(layout), len(layout)), bool)
    for query_role, keys in layout.sees.items():
        for key_role, relations in keys.items():
            pairs = (layout.roles == query_role)[:, None] & (layout.roles == key_role)[None, :] & same_document
            for relation in relations if isinstance(relations, tuple) else (relations,):
                mask |= pairs & _related(layout, relation)
    if window is not None:
        mask &= layout.ordinals[:, None] - layout.ordinals[None, :] < window
    if order == "physical":
        rows = physical_order(layout)
        mask = mask[np.ix_(rows, rows)]
    return mask


def _related(layout: Layout, relation: Relation) -> NDArray[np.bool_]:
    query, key = layout.ordinals[:, None], layout.ordinals[None, :]
    mine, its = layout.segments[:, None].astype(np.int64), layout.segments[None, :].astype(np.int64)
    kind, size = relation.kind, relation.size
    if kind == "all":
        return np.ones((len(layout), len(layout)), bool)
    if kind == "causal":
        return key <= query
    if kind == "segment":
        return its == mine
    if kind == "segment_causal":
        return (its == mine) & (key <= query)
    if kind == "self":
        return key == query
    if kind == "windows":
        return (its <= mine) & (its > mine - size)
    if kind == "windows_causal":
        return (its <= mine) & (its > mine - size) & (key <= query)
    if kind == "recent":
        return (key <= query) & (key > query - size)
    if kind == "older":
        return key <= query - size
    raise ValueError(f"dense_mask: unknown relation {relation!r}")
