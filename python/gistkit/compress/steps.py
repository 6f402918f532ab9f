"""Steps: tokens read one after another in a cache of fixed size, by a pass that a GPU has captured as a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from gistkit.common.checks import POSITIONS
from gistkit.hf.cache import MemoryCache, MemoryLayer
from gistkit.hf.packed import PackedLayers
from gistkit.layouts import Plan
from gistkit.ops._private import dispatch_modes
from gistkit.ops.attention import keep_lists

# Fewer tokens than these do not pay for folded weights, or for a capture.
LEAST = 8
# Captured passes that are kept, by their shapes; the oldest goes.
MOST = 16
# A block of more than this part of a GPU's memory is freed after an answer.
LARGE = 8

Pass = Callable[[], Tensor]
Capture = Callable[[Pass], Pass]


class Shape(NamedTuple):
    """What a captured pass has fixed.

    Args:
        batch: rows, a power of two; the last ones may be nobody's.
        room: keys of a row.
        positions: rows of position IDs.
        spans: (width of the sliding window or 0, rows, spans a row) of the plan and of each of its windows.
        packed: packed keys of a layer, beside those of its rows; 0: nothing is packed.
        biased: whether keys of a memory have biases.
    """

    batch: int
    room: int
    positions: int
    spans: tuple[tuple[int, int, int], ...]
    packed: int = 0
    biased: bool = False

    @classmethod
    def of(cls, plan: Plan, batch: int, packed: PackedLayers | None = None, biased: bool = False) -> Shape:
        """That of single tokens under a plan, rounded up so that many answers share one."""
        plans = {0: plan, **plan.windowed}
        rows = 1 << (batch - 1).bit_length()
        return cls(
            rows,
            _rounded(plan.num_keys),
            1 if len(torch.atleast_2d(cast(Tensor, plan.positions))) == 1 else rows,
            tuple(
                (width, 1 if one.spans.shape[0] == 1 else rows, -(-one.spans.shape[2] // 4) * 4)
                for width, one in plans.items()
            ),
            0 if packed is None else _rounded(packed.most),
            biased,
        )

    def table(self, plan: Plan, first: int) -> Tensor:
        """int64 [N, columns]: for each row of a plan from `first` on its place among keys, position IDs and spans."""
        places = torch.arange(first, plan.num_queries, device=plan.spans.device) + plan.num_keys - plan.num_queries
        positions = torch.atleast_2d(cast(Tensor, plan.positions))[:, first:]
        columns = [places[:, None], F.pad(positions, (0, 0, 0, self.positions - len(positions))).T]
        for width, rows, count in self.spans:
            spans = (plan.windowed[width] if width else plan).spans[:, first:]
            # Rows that are nobody's see nothing.
            spans = F.pad(spans, (0, 0, 0, count - spans.shape[2], 0, 0, 0, rows - len(spans)))
            columns.append(spans.transpose(0, 1).flatten(1).long())
        return torch.cat(columns, 1)

    def plan(self, columns: Tensor) -> tuple[Tensor, Plan]:
        """The place [1] and the plan of a row of `table`."""
        sizes = [1, self.positions, *(rows * count * 2 for _, rows, count in self.spans)]
        place, positions, *spans = columns.split(sizes)
        shaped = {
            width: part.view(rows, 1, count, 2).to(torch.int32)
            for part, (width, rows, count) in zip(spans, self.spans, strict=True)
        }
        plan = Plan(shaped.pop(0), self.room, positions[:, None]).with_windows(shaped)
        # Over packed keys each layer has a plan of its own.
        for one in () if self.packed else (plan, *plan.windowed.values()):
            keep_lists(one)
        return place, plan


def _rounded(keys: int) -> int:
    """A number of keys that is at least as large, at least 256, and that many numbers share."""
    block = max(256, 1 << max(0, keys.bit_length() - 3))
    return -(-max(1, keys) // block) * block


class _Layer(CacheLayerMixin):
    """Keys and values [B, H, room, D] of one layer; a pass of one token writes it at `place` and sees all of them."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.place: Tensor | None = None
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # The size is fixed.
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes [B, H, 1, D] and returns all keys and values."""
        self.keys.index_copy_(2, cast(Tensor, self.place), key_states)
        self.values.index_copy_(2, cast(Tensor, self.place), value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """A number without meaning: tokens stand where the plan says."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class Step:
    """A pass of one token a row over tensors that stay where they are, so that it can be captured.

    Args:
        lm, role: what reads, inside `lm.using(role)`.
        heads: key heads of each layer.
        layers: keys and values of each layer, [packed + B H room, D].
    """

    def __init__(
        self,
        lm: Any,
        role: str | None,
        shape: Shape,
        heads: Sequence[int],
        layers: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.shape, device = shape, layers[0][0].device
        batch, room, kept = shape.batch, shape.room, shape.packed
        columns = 1 + shape.positions + sum(rows * count * 2 for _, rows, count in shape.spans)
        # What is kept outlives the call.
        with torch.inference_mode(False):
            self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.columns = torch.zeros(columns, dtype=torch.int64, device=device)
            self.packed: PackedLayers | None = None
            self.biases: list[Tensor] | None = None
            if kept:
                first = [(keys[:kept], values[:kept]) for keys, values in layers]
                places = torch.full((batch, kept), POSITIONS, device=device)
                self.packed = PackedLayers(first, torch.zeros(batch, sum(heads), 2), heads, places=places)
            elif shape.biased:
                self.biases = [_zeros(keys, batch, count, room) for (keys, _), count in zip(layers, heads, strict=True)]
            self.layers: list[_Layer] = []
            for index, (count, (keys, values)) in enumerate(zip(heads, layers, strict=True)):
                if self.packed is not None:
                    biases = _zeros(keys, len(keys)) if shape.biased else None
                    keys, values = self.packed.lie(index, batch, room, keys, values, biases)
                self.layers.append(_Layer(*(part.view(batch, count, room, -1) for part in (keys, values))))
        self.replay: Pass = lambda: _read(lm, role, self)

    def capture(self, capture: Capture) -> None:
        """Makes `replay` a captured pass.

        Raises:
            RuntimeError: for a model whose pass cannot be captured, or that asks the cache how many tokens it holds.
        """
        outputs = []
        for length in (self.shape.room - 1, 0):
            for layer in self.layers:
                layer.length = length
            outputs.append(self.replay().clone())
        eps = 8 * torch.finfo(outputs[0].dtype).eps
        if not torch.allclose(outputs[0], outputs[1], eps, eps, equal_nan=True):
            raise RuntimeError("model: expected only positions of the plan, got some of the cache's length")
        with torch.cuda.device_of(self.ids):
            self.replay = capture(self.replay)


def _zeros(keys: Tensor, *size: int) -> Tensor:
    """Biases for keys."""
    return keys.new_zeros(size, dtype=torch.promote_types(keys.dtype, torch.float32))


def _read(lm: Any, role: str | None, step: Step) -> Tensor:
    """Hidden states [B, 1, d] of the tokens of a step."""
    place, plan = step.shape.plan(step.columns)
    for layer in step.layers:
        layer.place = place
    # Models may choose tokens for which they have no embedding, and rows that have ended are fed any token.
    inputs = lm.embedded(role, step.ids.clamp(0, lm.vocabulary - 1))
    cache = cast(Any, Cache(layers=[*step.layers]))
    out = lm.run(role, inputs_embeds=inputs, plan=plan, cache=cache, memory=step.packed, key_bias=step.biases)
    return out.last_hidden_state  # type: ignore[no-any-return]


class Tail:
    """The tokens that are read behind a cache by a `Step`, one a row and call.

    Args:
        step: nobody else uses it meanwhile.
        cache: its keys and values are copied; `settle` adds those of the tokens.
        plan: of all rows; those from `first` on are read.
    """

    def __init__(self, step: Step, cache: MemoryCache, plan: Plan, first: int) -> None:
        self.plan, self.count = plan, 0
        self._step, self._cache = step, cache
        self._table = step.shape.table(plan, first)
        self._keys = plan.num_keys - plan.num_queries + first
        for (keys, values), fixed in zip(cache.held, step.layers, strict=True):
            fixed.keys[: len(keys), :, : self._keys] = keys
            fixed.values[: len(values), :, : self._keys] = values
        if step.packed is not None and cache.packed is not None:
            step.packed.take(cache.packed, cache.held[0][0].shape[0])
        for fixed_bias, bias in zip(step.biases or (), cache.key_biases or (), strict=True):
            fixed_bias.zero_()[: len(keys), :, : bias.shape[2]] = bias
        step.columns.copy_(self._table[0])

    def read(self, tokens: Tensor) -> Tensor:
        """Hidden states [B, 1, d] of the next tokens int64 [B, 1]; the next call overwrites them."""
        step, rows = self._step, len(tokens)
        step.columns.copy_(self._table[self.count])
        step.ids[:rows].copy_(tokens)
        self.count += 1
        return step.replay()[:rows]

    def settle(self) -> None:
        """Adds to the cache what was read; the tail is then done."""
        held = cast("list[MemoryLayer]", self._cache.layers)
        for layer, fixed in zip(held, self._step.layers, strict=True):
            new = slice(self._keys, self._keys + self.count)
            layer.update(*(tensor[: layer.batch_size, :, new] for tensor in (fixed.keys, fixed.values)))


class Steps:
    """The captured passes of a model for one role, and the one block of keys and values that they all use.

    They are kept as long as the weights have the same versions. Where no pass can be captured `behind` says None and
    the caller reads by the model's own loop: on the CPU; in training mode; under autocast; inside a dispatch mode, as
    an `AttentionRecorder` is; with frequencies of RoPE that depend on the length; with hooks on modules or weights on
    several devices; and for families whose pass waits for the device or counts tokens by the cache.
    """

    def __init__(self) -> None:
        # Takes the place of a GPU's.
        self.capture: Capture | None = None
        # Why the model's pass could not be captured, until the model is another.
        self.refused: str | None = None
        self._free = True
        self.clear()

    def __reduce__(self) -> Any:
        return Steps, ()

    def clear(self) -> None:
        """Frees everything."""
        self._kept: dict[Shape, Step] = {}
        self._key: Any = None
        self._block: Tensor | None = None

    def serves(self, device: torch.device) -> bool:
        """Whether passes may be captured on a device for the next answer."""
        return self._free and (self.capture is not None or device.type == "cuda")

    @contextmanager
    def used(self) -> Iterator[None]:
        """One answer at a time: inside, another one, such as a streamer may ask for, has no captured passes."""
        self._free = False
        try:
            yield
        finally:
            self._free = True
            block = self._block
            if block is not None and block.is_cuda:
                _, total = torch.cuda.mem_get_info(block.device)
                if LARGE * block.nbytes > total:
                    self.clear()

    def behind(
        self, lm: Any, role: str | None, versions: Any, cache: MemoryCache, plan: Plan, first: int
    ) -> Tail | None:
        """What reads single tokens, the rows of a plan from `first` on, behind a cache; None: the caller does.

        Inside `lm.using(role)`, and `lm.folded(role)` if it is to be so; without gradients.

        Args:
            versions: of the model's and the adapters' weights.
        """
        held = cache.held
        keys, _ = held[0]
        capture = self.capture or (captured if keys.is_cuda else None)
        if capture is None or plan.num_queries - first < LEAST:
            return None
        state = _state(lm, plan, keys.device)
        if state is None:
            return None
        key = role, versions, keys.dtype, keys.device, state
        if key != self._key:
            self.clear()
            self._key, self.refused = key, None
        if self.refused is not None:
            return None
        try:
            biases = cache.key_biases if cache.packed is None else cache.packed.biases
            shape = Shape.of(plan, len(keys), cache.packed, biases is not None)
            step = known = self._kept.pop(shape, None)
            if step is None:
                step = Step(lm, role, shape, [key.shape[1] for key, _ in held], self._layers(shape, held))
            tail = Tail(step, cache, plan, first)
            if known is None:
                step.capture(capture)
        except torch.OutOfMemoryError:
            self.clear()
            return None
        except (RuntimeError, NotImplementedError) as error:
            self.clear()
            self._key, self.refused = key, str(error)
            return None
        self._kept[shape] = step
        if len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]
        return tail

    def _layers(self, shape: Shape, held: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer in the block, [packed + B H room, D]; it grows where it must."""
        flat = [tensor for layer in held for tensor in layer]
        sizes = [(shape.packed + shape.batch * one.shape[1] * shape.room, one.shape[3]) for one in flat]
        numbers = [prod(size) for size in sizes]
        if self._block is None or self._block.numel() < sum(numbers):
            # Captured passes have the addresses of the old one.
            self._kept, self._block = {}, None
            # What is kept outlives the call. No key is NaN, which attention would look for.
            with torch.inference_mode(False):
                self._block = flat[0].new_zeros(sum(numbers))
        parts = self._block[: sum(numbers)].split(numbers)
        views = [part.view(size) for part, size in zip(parts, sizes, strict=True)]
        return list(zip(views[::2], views[1::2], strict=True))


def _state(lm: Any, plan: Plan, device: torch.device) -> tuple[Any, ...] | None:
    """What decides the course of a pass beside weights and shapes; None where a captured one would miss some of it."""
    positions = plan.positions
    if (
        lm.changing_rope
        or positions is None
        or positions.dtype != torch.int64
        or positions.dim() > 2
        or torch.is_autocast_enabled(device.type)
        or dispatch_modes()
    ):
        return None
    if getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: False)():
        return None
    state: list[Any] = []
    for module in lm.decoder.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        own = all(_home(hook).startswith("gistkit.hf.") for hook in hooks)
        alone = all(weight is None or weight.device == device for weight in module._parameters.values())
        if module.training or not own or not alone or not _ours(vars(module).get("forward")):
            return None
        state.append(module)
        state += ((buffer.data_ptr(), buffer._version) for buffer in module._buffers.values() if buffer is not None)
        its = vars(module)
        if "_active_adapter" in its:
            names = "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"
            state += (str(its.get(name)) for name in names)
    return tuple(state)


def _ours(forward: Any) -> bool:
    """Whether a module's forward is its class's, or one of gistkit's in its place."""
    return forward is None or _home(forward).startswith("gistkit.")


def _home(function: Any) -> str:
    """The name of the module that defines a function, or the function of a partial."""
    return str(getattr(getattr(function, "func", function), "__module__", None))


def captured(run: Pass) -> Pass:
    """A pass as a CUDA graph, which has run once before."""
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # On a stream of this device: torch's own for captures stays on the device of the process's first one. Other
        # threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            out = run()
    except BaseException:
        # A capture that cannot be ended leaves its stream the current one.
        torch.cuda.set_stream(before)
        raise

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay
