"""AttentionRecorder: attention maps of everything that runs on `gistkit.attention`, from its log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gistkit.common.checks import check_int

# By name, so that the op need not be loaded to be recognised.
ATTENTION = "gistkit::attention"
REDUCTIONS = ("none", "mean")
# Weights in memory at a time beside the map itself, and the most that a map may have (1 GiB of float32).
CHUNK = 2**20
LARGEST_MAP = 2**28

Choice = slice | Iterable[int] | None


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention weights of one call of `gistkit.attention`, on the CPU.

    Args:
        weights: [B, H, rows, keys], float32 (float64 for float64 inputs), for the chosen heads (H is 1 for their mean)
            and query rows. Each row of a head adds up to 1, or is 0 where the query sees no key.
        lse: [B, heads, rows], natural logarithm of the softmax's denominator, of every chosen head and row.
        layer: number of the call since the recorder was entered, see `AttentionRecorder`.
        heads: numbers of the chosen query heads.
        rows: int64 [rows], numbers of the chosen query rows.
    """

    weights: Tensor
    lse: Tensor
    layer: int
    heads: tuple[int, ...]
    rows: Tensor


class AttentionRecorder(TorchDispatchMode):
    """Records attention maps of everything that runs on `gistkit.attention` inside the `with` block; patches nothing.

    It intercepts each call of the op and recomputes the weights from query and key: the softmax of the logits inside
    the spans. At most 2^20 weights (or one row) are in memory besides the maps. It works the same for a layer, a
    `gistkit.nn.GPT`, a transformers model under `gistkit.hf.attach` and a compressor, in training and evaluation, and
    does not change their results. The maps have no gradient.

    A call's layer is its number since entering, so the layers of a second pass continue the count. Calls inside a
    backward pass (gradient checkpointing) and replays of a CUDA graph are neither recorded nor counted. Entering again
    starts over.

        with AttentionRecorder(layers=[0, 5], reduce="mean") as recorder, attach(model):
            model(ids)
        recorder[5].weights  # [B, 1, N, N]

    Args:
        layers: numbers of the layers to record, at least 0; None is all of them.
        heads: query heads to record, as numbers or a slice; None is all of them.
        rows: query rows to record, as numbers or a slice such as slice(-8, None); None is all of them. Under a
            compiled layout rows and keys are in its plan's physical order.
        reduce: "none", or "mean" over the recorded heads.

    Raises:
        TypeError, ValueError: an argument is none of these; from a recorded call, if it lacks a chosen head or row,
            or if its map would have more than 2^28 weights.
        RuntimeError: entered while it is already recording.
    """

    def __init__(
        self,
        layers: Iterable[int] | None = None,
        *,
        heads: Choice = None,
        rows: Choice = None,
        reduce: str = "none",
    ) -> None:
        super().__init__()
        if reduce not in REDUCTIONS:
            raise ValueError(f"reduce: expected one of {', '.join(REDUCTIONS)}, got {reduce!r}")
        self.layers = None if layers is None else _numbers("layers", layers)
        self.reduce = reduce
        self._chosen = {
            name: choice if choice is None or isinstance(choice, slice) else _numbers(name, choice)
            for name, choice in (("heads", heads), ("rows", rows))
        }
        self.calls = 0
        self.maps: list[AttentionMap] = []
        self._recording = False

    def __enter__(self) -> AttentionRecorder:
        """Starts with no maps."""
        if self._recording:
            raise RuntimeError("recorder: expected a recorder that is not recording, got it inside its own block")
        self.calls, self.maps, self._recording = 0, [], True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Records no more; the maps stay."""
        self._recording = False
        super().__exit__(*error)

    def __getitem__(self, layer: int) -> AttentionMap:
        """The map of a layer; a LookupError if there is none."""
        maps = {recorded.layer: recorded for recorded in self.maps}
        if layer not in maps:
            raise LookupError(f"recorder: expected a recorded layer, one of {', '.join(map(str, maps))}, got {layer!r}")
        return maps[layer]

    def take(self, found: AttentionMap) -> None:
        """Gets each map as it comes; a subclass may keep less than all of it."""
        self.maps.append(found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs each operation as it is, and looks at those that are attention."""
        result = func(*args, **(kwargs or {}))
        # Inside a backward pass only gradient checkpointing runs attention: a layer that was seen already.
        if func.name() == ATTENTION and getattr(torch._C, "_current_graph_task_id", lambda: -1)() < 0:
            if self.layers is None or self.calls in self.layers:
                # A plan's lists of tiles may come last.
                query, key, _, spans, key_bias, scale, softcap, *_ = args
                with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
                    self.take(self._record(query, key, spans, key_bias, scale, softcap, result[1]))
            self.calls += 1
        return result

    def _record(
        self,
        query: Tensor,
        key: Tensor,
        spans: Tensor,
        key_bias: Tensor | None,
        scale: float,
        softcap: float,
        lse: Tensor,
    ) -> AttentionMap:
        sizes = {"heads": query.shape[1], "rows": query.shape[2]}
        heads, rows = (_choose(name, self._chosen[name], size) for name, size in sizes.items())
        shape = (len(query), 1 if self.reduce == "mean" else len(heads), len(rows), key.shape[2])
        if shape[0] * shape[1] * shape[2] * shape[3] > LARGEST_MAP:
            raise ValueError(
                f"rows: expected a map of at most 2^28 weights, got {list(shape)} for sequences, heads, rows and keys; "
                "choose fewer with reduce, heads or rows"
            )
        device, group = query.device, query.shape[1] // key.shape[1]
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        lse = lse[:, heads][:, :, index]
        weights = torch.zeros(shape, dtype=lse.dtype, device=device)
        step = max(1, CHUNK // max(1, key.shape[2]))
        for b in range(len(query)):
            for first in range(0, len(rows), step):
                part = slice(first, first + step)
                row_spans = spans[0 if len(spans) == 1 else b, index[part]]
                low, high = _reach(row_spans)
                if low >= high:
                    continue
                hidden = _hidden(row_spans, low, high)
                for h, head in enumerate(heads):
                    bias = None
                    if key_bias is not None:
                        bias = key_bias[b if len(key_bias) > 1 else 0, head if key_bias.shape[1] > 1 else 0]
                        bias = bias[low:high]
                    q, k = query[b, head, index[part]], key[b, head // group, low:high]
                    share = _weights(q, k, bias, hidden, scale, softcap, lse.dtype)
                    weights[b, 0 if self.reduce == "mean" else h, part, low:high] += share
        if self.reduce == "mean":
            weights /= max(1, len(heads))
        return AttentionMap(weights.cpu(), lse.cpu(), self.calls, tuple(heads), index.cpu())


def _numbers(name: str, values: Any) -> list[int]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise TypeError(f"{name}: expected several ints, such as [0], got {values!r}")
    numbers = [check_int(name, value, 0) for value in (values.tolist() if isinstance(values, Tensor) else values)]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{name}: expected at least one number and each once, got {numbers}")
    return numbers


def _choose(name: str, choice: slice | list[int] | None, size: int) -> list[int]:
    """The numbers below `size` that were chosen."""
    if choice is None or isinstance(choice, slice):
        return list(range(size)[choice or slice(None)])
    if max(choice) >= size:
        raise ValueError(f"{name}: expected numbers below {size}, which the recorded call has, got {max(choice)}")
    return choice


def _reach(spans: Tensor) -> tuple[int, int]:
    """The first key that rows with spans [rows, S, 2] see, and the end of the last."""
    start, end = spans.unbind(-1)
    filled = start < end
    if not bool(filled.any()):
        return 0, 0
    return int(start[filled].min()), int(end[filled].max())


def _hidden(spans: Tensor, low: int, high: int) -> Tensor:
    """bool [rows, high - low], the keys outside spans [rows, S, 2]: counts up at each start, down at each end."""
    start, end = ((bound.long() - low).clamp_(0, high - low) for bound in spans.unbind(-1))
    change = torch.zeros(len(spans), high - low + 1, dtype=torch.int8, device=spans.device)
    one = torch.ones_like(start, dtype=torch.int8)
    return change.scatter_add_(1, start, one).scatter_add_(1, end, -one)[:, :-1].cumsum(1, dtype=torch.int8) == 0


def _weights(
    query: Tensor, key: Tensor, bias: Tensor | None, hidden: Tensor, scale: float, softcap: float, dtype: torch.dtype
) -> Tensor:
    """[rows, keys] of one head; 0 where a row sees none. Not from the op's lse, which large biases leave inexact."""
    logits = query.to(dtype) * scale @ key.to(dtype).T
    if softcap > 0:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        logits += bias
    logits.masked_fill_(hidden, -torch.inf)
    return logits.softmax(1).masked_fill_((logits == -torch.inf).all(1, keepdim=True), 0)
