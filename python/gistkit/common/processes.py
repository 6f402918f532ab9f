"""The processes of a launcher, such as `accelerate launch`: which one this is, and what all of them found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

Item = TypeVar("Item")
# Some processes have more to do than others.
_PATIENCE = timedelta(days=7)
_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


@dataclass(frozen=True)
class Processes:
    """This process, number `index` of `count`; on its machine it is number `local`.

    Raises:
        ValueError: if there is no such process.
    """

    index: int = 0
    count: int = 1
    local: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"processes: expected a number below {self.count} of this process, got {self.index}")

    @property
    def is_first(self) -> bool:
        """Whether this process writes and says what all of them found."""
        return self.index == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Every `count`-th of some items, which are the same in all processes."""
        return items[self.index :: self.count]

    def on(self, device: str) -> str:
        """The device of this process: of "cuda" without a number its own one."""
        return f"cuda:{self.local}" if device == "cuda" and self.count > 1 else device

    def gathered(self, value: Any) -> list[Any]:
        """What every process gives here, in their order; every process must call it."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        _group().all_gather_object(values, value)
        return values

    def joined(self, found: Sequence[Item]) -> list[Item]:
        """What all processes found for each item, in the items' order; `found` is for this one's `share`."""
        parts = self.gathered(list(found))
        return [parts[place % self.count][place // self.count] for place in range(sum(map(len, parts)))]


def _group() -> Any:
    """torch.distributed, in the group of all processes."""
    from torch import cuda, distributed

    if not distributed.is_initialized():
        distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda.is_available() else "gloo", timeout=_PATIENCE)
    return distributed


def launched() -> Processes:
    """The processes that `accelerate launch` or `torchrun` started, by the variables that they set; otherwise one."""
    index, count, local = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
    return Processes(index, count, local)
