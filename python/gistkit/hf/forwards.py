"""forwards: modules with another forward for as long as a context is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def forwards(own: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Gives instances a forward of their own, and afterwards what they had: the instance's, or else the class's."""
    before = {module: vars(module).get("forward") for module in own}
    try:
        for module, forward in own.items():
            # What a module's own setter does of an attribute that is no module, parameter or buffer.
            vars(module)["forward"] = forward
        yield
    finally:
        for module, forward_before in before.items():
            if forward_before is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward_before
