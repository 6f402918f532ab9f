"""gistkit.window_pool against copying as many bytes, and against torch's ways to average windows.

Keys and values of Llama 3.1 8B: 8 heads of 128. Forward is pooling both; backward is spreading their gradients. The
copy reads half of the bytes that pooling reads and writes, and writes as many. reshape-mean leaves out the tokens of a
short last window. With rotation, pooled keys are rotated: in the same pass, or by gistkit.rope afterwards.

malloc is told to keep what is freed: pages that the system has yet to clear would cost every contender more than its
work.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import harness
import torch
from torch import Tensor

import gistkit

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


@dataclass(frozen=True)
class Shape:
    """Sizes of one case."""

    tokens: int
    ratio: int
    dtype: torch.dtype
    heads: int = 8
    dim: int = 128

    @property
    def windows(self) -> int:
        return -(-self.tokens // self.ratio)

    @property
    def traffic(self) -> int:
        """Bytes read and written, of keys and values together."""
        return 2 * self.heads * (self.tokens + self.windows) * self.dim * self.dtype.itemsize


def reshape_mean(x: Tensor, ratio: int) -> Tensor:
    """Means of whole windows."""
    whole = x.shape[2] // ratio
    return x[:, :, : whole * ratio].unflatten(2, (whole, ratio)).mean(3)


def avg_pool1d(x: Tensor, ratio: int) -> Tensor:
    """Means by torch's pooling, which wants channels in front of tokens."""
    return torch.nn.functional.avg_pool1d(x.flatten(0, 1).mT, ratio, ceil_mode=True).mT.unflatten(0, x.shape[:2])


def segment_reduce(x: Tensor, lengths: Tensor) -> Tensor:
    """Means of windows of any lengths."""
    return torch.segment_reduce(x, "mean", lengths=lengths.expand(*x.shape[:2], -1), axis=2, unsafe=True)


def forms(shape: Shape, backward: bool) -> harness.Forms:
    """The contenders of a shape."""
    key, value = (
        torch.randn(1, shape.heads, shape.tokens, shape.dim).to(shape.dtype).requires_grad_(backward) for _ in range(2)
    )
    lengths = torch.full((shape.windows,), shape.ratio)
    lengths[-1] = shape.tokens - (shape.windows - 1) * shape.ratio
    # torch has segment_reduce's gradient by the data for contiguous lengths alone.
    lengths = lengths.expand(1, shape.heads, -1).contiguous()
    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "gistkit": lambda: gistkit.window_pool(key, value, windows=shape.ratio),
        "reshape-mean": lambda: (reshape_mean(key, shape.ratio), reshape_mean(value, shape.ratio)),
        "avg_pool1d": lambda: (avg_pool1d(key, shape.ratio), avg_pool1d(value, shape.ratio)),
        "segment_reduce": lambda: (segment_reduce(key, lengths), segment_reduce(value, lengths)),
    }
    return with_copy(shape, ways, (key, value), backward)


def rotated_forms(shape: Shape, backward: bool) -> harness.Forms:
    """With rotation, fused and not."""
    key, value = (
        torch.randn(1, shape.heads, shape.tokens, shape.dim).to(shape.dtype).requires_grad_(backward) for _ in range(2)
    )
    positions = torch.arange(shape.windows) * shape.ratio + (shape.ratio - 1) / 2
    inv_freq = 500000.0 ** -(torch.arange(0, shape.dim, 2) / shape.dim)

    def apart() -> tuple[Tensor, Tensor]:
        pooled, pooled_value = gistkit.window_pool(key, value, windows=shape.ratio)
        return gistkit.rope(pooled, pooled[:, :0], positions, inv_freq)[0], pooled_value

    ways: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "gistkit": lambda: gistkit.window_pool(key, value, windows=shape.ratio, positions=positions, inv_freq=inv_freq),
        "gistkit, then rope": apart,
    }
    return with_copy(shape, ways, (key, value), backward)


def with_copy(
    shape: Shape, ways: dict[str, Callable[[], tuple[Tensor, Tensor]]], inputs: tuple[Tensor, Tensor], backward: bool
) -> harness.Forms:
    """The forms themselves or their backward alone, and the copy."""
    source = torch.randn(shape.traffic // 2 // shape.dtype.itemsize).to(shape.dtype)
    target = torch.empty_like(source)
    copy = {"copy of as many bytes": lambda: target.copy_(source)}
    if not backward:
        return ways | copy
    outputs = {name: way() for name, way in ways.items()}
    grads = {name: tuple(torch.randn_like(x) for x in out) for name, out in outputs.items()}
    return {
        name: lambda out=out, grad=grads[name]: torch.autograd.grad(out, inputs, grad, retain_graph=True)
        for name, out in outputs.items()
    } | copy


def cases() -> Iterator[harness.Case]:
    """Every length, ratio and dtype, forward and backward, plain and rotated."""
    for make, what in ((forms, ""), (rotated_forms, " rotated")):
        for dtype in (torch.float32, torch.bfloat16):
            for tokens in (4096, 16384):
                for ratio in (2, 5, 8, 10):
                    for backward in (False, True):
                        shape = Shape(tokens, ratio, dtype)
                        name = str(dtype).removeprefix("torch.")
                        passes = "backward" if backward else "forward"
                        yield harness.Case(
                            f"pool {ratio}x{what}, N {tokens}, B1 H8 D128 {name}, {passes}",
                            partial(make, shape, backward),
                            facts={**asdict(shape), "dtype": name, "pass": passes, "rotated": bool(what)},
                            traffic=shape.traffic,
                        )


def keep_freed_memory() -> None:
    """glibc's malloc neither maps large blocks anew nor returns memory to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not (mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1)):
        print("pool: this malloc cannot be told to keep memory: large results are made of fresh pages")


def main() -> None:
    """Runs all cases; of N 4096 in float32 at 8x alone if quick."""
    options = harness.parser(__doc__, "python benchmarks/pool.py --quick --json pool.json", appends=True).parse_args()
    keep_freed_memory()
    found = [
        case for case in cases() if not options.quick or re.fullmatch("pool 8x.*, N 4096, .* float32, .*", case.name)
    ]
    harness.run("pool", found, options, seconds=2)


if __name__ == "__main__":
    main()
