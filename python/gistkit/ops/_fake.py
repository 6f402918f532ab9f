"""Fake kernels: shapes for torch.compile, which refuse by name what is no tensor or has too few dimensions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

import gistkit.ops._library  # noqa: F401  loads torch.ops.gistkit


def register_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`torch.library.register_fake`, for a function whose parameters of type Tensor must be tensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        needed = [
            (place, parameter.name)
            for place, parameter in enumerate(signature(function, eval_str=True).parameters.values())
            if parameter.annotation is Tensor
        ]

        @wraps(function)
        def checked(*args: Any) -> Any:
            for place, argument in needed:
                if not isinstance(args[place], Tensor):
                    raise TypeError(f"{name}: expected a tensor for {argument}, got {type(args[place]).__name__}")
            try:
                return function(*args)
            except IndexError as error:
                shapes = ", ".join(f"{argument} of shape {tuple(args[place].shape)}" for place, argument in needed)
                raise ValueError(f"{name}: expected tensors of other numbers of dimensions, got {shapes}") from error

        torch.library.register_fake(name)(checked)
        return function

    return register
