"""eval_mode: a module without dropout, while a context is open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(root: nn.Module) -> Iterator[None]:
    """Inside, `root` and all its modules are in eval mode; afterwards each has its own mode again."""
    before = {module: module.training for module in root.modules()}
    for module in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
