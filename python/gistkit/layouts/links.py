"""Rows of indices with their inverse, which the gradients of the trie's ops gather by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gistkit._compiled import planner as _planner


class Links(NamedTuple):
    """Rows of indices, and the same entries grouped by index.

    rows: int32 [N, M], -1 where there is none. Entry n M + m is that of row n, column m; those that point to v are
    entries[offsets[v] : offsets[v + 1]], ascending.
    """

    rows: Tensor
    entries: Tensor
    offsets: Tensor

    def of(self, rows: slice) -> Links:
        """Some of the rows, without entries unless they are all rows; only gradients need entries."""
        if rows == slice(None):
            return self
        return Links(self.rows[rows], self.entries[:0], torch.zeros_like(self.offsets))

    @classmethod
    def grouped(cls, rows: NDArray[np.int32], values: int) -> Links:
        """The links of rows of indices int32 [N, M] below `values`, -1 where there is none."""
        entries, offsets = _planner.group(rows, values)
        return cls(torch.from_numpy(rows), torch.from_numpy(entries), torch.from_numpy(offsets))
