"""Context embeddings of the study `pooling`: from a sphere, from a vocabulary, from a sphere that is not centred."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gistkit.hf.smollm2 import load_smollm2

INPUTS = ("sphere", "vocabulary", "sphere+common")


@dataclass(frozen=True, eq=False)
class Inputs:
    """A distribution of embeddings whose root mean square norm, a common vector aside, is sqrt(width).

    Args:
        width: of an embedding.
        common: [width], added to every embedding; None: nothing.
        table: [V, width], whose rows are drawn; None: from the sphere.
        device: where embeddings are put.
    """

    width: int
    common: Tensor | None = None
    table: Tensor | None = None
    device: str = "cpu"

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Embeddings [batch, length, width], independent of each other; drawn on the CPU, whatever the device."""
        if self.table is not None:
            rows = self.table[torch.randint(len(self.table), (batch, length), generator=generator)]
        else:
            rows = normalize(torch.randn(batch, length, self.width, generator=generator), dim=-1) * self.width**0.5
        if self.common is not None:
            rows = rows + self.common
        return rows.to(self.device)

    def to(self, device: str) -> Inputs:
        """The same distribution with its embeddings on `device`."""
        return replace(self, device=device)


@lru_cache(maxsize=4)
def make_inputs(name: str, width: int) -> Inputs:
    """The inputs of a name in `INPUTS`.

    - sphere: uniform on the sphere of radius sqrt(width).
    - vocabulary: rows of SmolLM2-135M's embedding matrix [49152, 576] through one random projection onto `width`
      orthonormal axes, all scaled by one factor. A random projection favours no coordinate and keeps lengths, angles
      and the rows' common part in expectation; principal components would instead keep what the rows have in common
      and drop what tells them apart. The paper has Gemma2's matrix, and does not say how it comes to width 128.
    - sphere+common: the sphere and one fixed vector of the same norm, which no paper has: what a common part does.
    """
    if name == "sphere":
        return Inputs(width)
    if name == "sphere+common":
        direction = torch.randn(width, generator=torch.Generator().manual_seed(0))
        return Inputs(width, common=normalize(direction, dim=0) * width**0.5)
    if name == "vocabulary":
        model: Any = load_smollm2()[0]
        return Inputs(width, table=project(model.get_input_embeddings().weight.detach().float(), width))
    raise ValueError(f"inputs: expected one of {', '.join(INPUTS)}, got {name!r}")


def project(table: Tensor, width: int, seed: int = 0) -> Tensor:
    """Rows [V, d] on `width` random orthonormal axes, scaled to a root mean square norm of sqrt(width).

    Raises:
        ValueError: if the rows are narrower than `width`.
    """
    if table.shape[1] < width:
        raise ValueError(f"width: expected at most the rows' width {table.shape[1]}, got {width}")
    random = torch.randn(table.shape[1], width, generator=torch.Generator().manual_seed(seed))
    axes, _ = torch.linalg.qr(random)
    rows = table @ axes
    return rows * math.sqrt(width / float(rows.square().sum(-1).mean()))
