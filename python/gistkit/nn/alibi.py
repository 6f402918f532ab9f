"""ALiBi: attention that falls off linearly with distance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gistkit.nn.positions import PositionEncoding, rows_of


class ALiBi(PositionEncoding):
    """Linear biases: the logit of query i and key j loses slope * (i - j) (arXiv 2108.12409, section 3).

    As `key_bias` it is slope * j less a constant of each row, which a softmax does not see. The slopes of a power of
    two n of heads are 2 ** (-8 h / n), h = 1 .. n; other numbers of heads take those of the next lower power of two,
    then every other one of twice as many heads.

    Args:
        heads: at least 1.
    """

    def __init__(self, heads: int) -> None:
        super().__init__(1, 0)
        if heads < 1:
            raise ValueError(f"heads: expected at least 1, got {heads}")
        power = 1 << (int(heads).bit_length() - 1)
        steps = torch.tensor([*range(2, 2 * power + 1, 2), *range(1, 2 * (heads - power), 2)])
        self.heads, self.power = heads, power
        # Whole numbers follow the model to its device, and not to a dtype that would round slopes.
        self.register_buffer("steps", steps, persistent=False)

    steps: Tensor

    @property
    def slopes(self) -> Tensor:
        """float64 [H]."""
        return 2.0 ** (-4.0 / self.power * self.steps.double())

    def forward(self, query: Tensor, key: Tensor, prepared: Any, layer: int) -> tuple[Tensor, Tensor]:
        if query.shape[1] != self.heads:
            raise ValueError(f"query: expected {self.heads} heads, as ALiBi has slopes, got shape {tuple(query.shape)}")
        return query, key

    def key_bias(self, key_positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """[1 or B, H, Nk], slope * (position - the row's highest position)."""
        points = rows_of(key_positions, 1).to(self.steps.device, torch.float64)
        if points.shape[1]:
            # The dtype would round large positions, and with them the small distances between them.
            points = points - points.amax(1, keepdim=True)
        return (points[..., 0].unsqueeze(1) * self.slopes[:, None]).to(dtype)
