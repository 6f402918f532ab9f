"""Memory: a compressed context in the form that the decoder reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from gistkit.common.checks import POSITIONS
from gistkit.common.files import read_tensors, write_tensors
from gistkit.compress.config import REGISTRY
from gistkit.compress.memory_files import packed, unpacked
from gistkit.compress.source import Source
from gistkit.hf.fingerprint import differing
from gistkit.hf.packed import PackedLayers

T = TypeVar("T")
# A memory's tensors with rows: the dimension of their columns, if they have columns.
_COLUMNS = {
    "positions": 1, "ordinals": 1, "key_bias": 1, "straight_through": 1, "embeddings": -2, "layers": -2,
    "last": None,
}  # fmt: skip
# Those that `counts` packs: the keys of one row after those of another.
_PACKED = ("positions", "key_bias", "layers", "counts")
# The purpose of reading a memory: to reconstruct the context, to continue it, or to answer questions about it.
Task = Literal["ae", "lm", "qa"]
TASKS = ("ae", "lm", "qa")
_NO_CACHE = "cache: expected compressor.to_cache(memory), got the Memory itself, whose keys stand elsewhere"


def _no_cache(cls: type[T]) -> type[T]:
    """Transformers writes to a cache before it reads it: what that says of a frozen class names the way out."""
    frozen = cls.__setattr__

    def __setattr__(self: T, name: str, value: object) -> None:
        if name == "_is_user_defined":
            raise TypeError(_NO_CACHE)
        frozen(self, name, value)

    cls.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]
    return cls


@_no_cache
@dataclass(frozen=True, eq=False, repr=False)
class Memory:
    """The compressed contexts of B rows with at most K memory tokens each; decoding does not change it.

    Args:
        source: what made the memory.
        lengths: number of memory tokens in each row; the other columns are padding.
        context_lengths: number of compressed context tokens of each row.
        positions: int64 or float64 [B, K] on the CPU, the position IDs of the memory tokens in the decoder (embeddings)
            or the ids that their keys were rotated with (kv); 0 on padding. [B, K, A] in models with A axes of them; in
            `Select` 2 + the index of the context token that each of A layers and key heads keeps, 1 for a BOS before
            them.
        starts: position id of the token after the memory, each row's [LM] token or its text.
        embeddings: [B, K, hidden] for methods that keep embeddings (ICAE).
        layers: per layer (key, value), each [B, heads, K, head_dim], for methods that keep the KV cache
            (500xCompressor). With `counts` each [T, head_dim], without padding.
        counts: per layer int64 [B, heads] on the CPU: how many keys each head keeps, where numbers may differ. Keys and
            values are then those of one head after another, row by row, and so are positions, int32 [T of all layers].
            [1, heads]: all rows read the same.
        last: [B, hidden], the output that predicts the token after the memory if there is no task token between them.
        ordinals: int64 [B, K] on the CPU, ascending in each row: the places of the memory tokens in the logical order
            of the pass that made them, which sliding windows count by. The text's places follow the last one. None: the
            method derives them (VoCo cannot, because images differ in size). With `counts` those of the keys in layers
            with a sliding window, which keep as many in each head, and then zeros.
        key_bias: float32 or float64 [B, K, A], fitted biases on the logits of the keys of A layers and key heads, in
            `Select`; with `counts` [T of all layers].
        straight_through: [B, K], zeros on the logits of the keys of all layers and heads, through which the scores of
            nuggets get gradients, in Dodo. It is not saved.
        documents: the compressed context tokens of each document of each row; several where memories were joined.
        rest: token ids of each row after the compressor's window, which the decoder reads uncompressed. (The file
            format has the names `rest` and `maker`.)
        fingerprint: of the base model's weights, `gistkit.hf.fingerprint`; None inside `Compressor.forward`.
        maker: fingerprint of the compressor's own weights, `gistkit.hf.digest`; None inside `Compressor.forward`.
        model: the base model's identity for messages, `gistkit.hf.identity`; None inside `Compressor.forward`.
    """

    _numbers: ClassVar[tuple[str, ...]] = ("lengths", "context_lengths", "starts", "documents", "rest")
    """What a memory has of each row."""

    source: Source
    lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    positions: Tensor
    starts: tuple[int, ...]
    embeddings: Tensor | None = None
    layers: tuple[tuple[Tensor, Tensor], ...] | None = None
    counts: tuple[Tensor, ...] | None = None
    last: Tensor | None = None
    ordinals: Tensor | None = None
    key_bias: Tensor | None = None
    straight_through: Tensor | None = None
    documents: tuple[tuple[int, ...], ...] = field(default=())
    rest: tuple[tuple[int, ...], ...] = field(default=())
    fingerprint: str | None = None
    maker: str | None = None
    model: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.rest:
            object.__setattr__(self, "rest", ((),) * len(self.lengths))
        if not self.documents:
            object.__setattr__(self, "documents", tuple((length,) for length in self.context_lengths))

    def __getattr__(self, name: str) -> Any:
        # Of a `Cache`, not of a memory.
        if not name.startswith("__") and hasattr(Cache, name):
            raise AttributeError(f"{name}: {_NO_CACHE}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        tokens = f"{sum(self.sizes):,} memory tokens for {sum(self.context_lengths):,} context tokens"
        rows = "1 row" if self.batch_size == 1 else f"{self.batch_size:,} rows"
        held = f", {self.dtype} on {self.device}, {self.nbytes / 1e6:,.3f} MB" if self.tensors else ""
        return f"{type(self).__name__}({self.source.method}: {tokens} in {rows}{held})".replace("torch.", "")

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Columns K, the memory tokens of the longest row, or of the head with most."""
        return self.positions.shape[1] if self.counts is None else max(self.lengths)

    @property
    def tensors(self) -> list[Tensor]:
        """The embeddings, or the keys and values of all layers."""
        if self.embeddings is not None:
            return [self.embeddings]
        return [tensor for layer in self.layers or () for tensor in layer]

    @property
    def device(self) -> torch.device:
        """The device of `tensors`."""
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `tensors`."""
        return self.tensors[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of `tensors` and fitted biases, without padding."""
        if self.counts is not None:
            return sum(tensor.nbytes for tensor in [*self.tensors, *([] if self.key_bias is None else [self.key_bias])])
        size, more = self.tensors[0].element_size(), 0 if self.key_bias is None else self.key_bias.element_size()
        numbers = sum(tensor.numel() for tensor in self.tensors) // (self.batch_size * max(self.num_tokens, 1))
        return sum(self.lengths) * (numbers * size + (more * self.positions.shape[-1] if more else 0))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Memory tokens of each row; the mean of heads where these have different numbers."""
        if self.counts is None:
            return self.lengths
        means = torch.cat(self.counts, 1).double().mean(1).round().long()
        return tuple(means.expand(self.batch_size).tolist())

    @property
    def read_as(self) -> Sequence[tuple[Tensor, Tensor]] | PackedLayers | None:
        """`layers` as a pass takes them."""
        if self.layers is None or self.counts is None:
            return self.layers
        return PackedLayers.of(self.layers, self.counts, self.packed_biases, self.places)

    @property
    def places(self) -> Tensor:
        """With `counts` int64 [R, n], `ordinals` of rows with keys of their own; `POSITIONS` where a row has less."""
        ordinals = ordinals_of(self)[: len(cast("tuple[Tensor, ...]", self.counts)[0])]
        # Only the first may be 0.
        real = F.pad(ordinals[:, 1:] > 0, (1, 0), value=True)
        return ordinals.where(real, POSITIONS)[:, : int(real.sum(1).max())]

    @property
    def packed_biases(self) -> list[Tensor] | None:
        """`key_bias` of each layer in the order of its packed keys; None where nothing was fitted."""
        if self.key_bias is None:
            return None
        counts = self.counts or ()
        rows = self.key_bias.split(torch.cat(counts, 1).sum(1).tolist())
        parts = (row.split([int(own[index].sum()) for own in counts]) for index, row in enumerate(rows))
        return [torch.cat(layer) for layer in zip(*parts, strict=True)]

    def in_columns(self, values: Tensor) -> Tensor:
        """What `counts` packs, [T of all layers], as [B, K, A] of A layers and key heads; 0 where a head has less."""
        held = torch.arange(self.num_tokens) < torch.cat(self.counts or (), 1)[..., None]
        columns = values.new_zeros(held.shape)
        columns[held] = values
        return columns.mT.expand(self.batch_size, -1, -1)

    @property
    def full_cache_bytes(self) -> int:
        """Bytes of the cache of the uncompressed contexts, in the same dtype."""
        return sum(self.context_lengths) * self.source.cache_width * self.tensors[0].element_size()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Memory:
        """The same memory on `device` and in the floating-point `dtype`; None: unchanged."""
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype: expected one of floating point, got {dtype}")
        moved = self._with(lambda tensor: tensor.to(device), ("key_bias", "straight_through"))
        return moved._with(lambda tensor: tensor.to(device=device, dtype=dtype), ("embeddings", "layers", "last"))

    def __getitem__(self, rows: int | slice | Sequence[int]) -> Memory:
        """The memory of some of the rows."""
        rows_here = range(self.batch_size)
        try:
            if isinstance(rows, slice):
                row_indices = list(rows_here[rows])
            else:
                given = rows.tolist() if isinstance(rows, Tensor) else rows
                numbers = [*given] if isinstance(given, Iterable) else [given]
                if any(isinstance(row, bool) for row in numbers):
                    # A mask, which would pick the rows 0 and 1.
                    raise TypeError("expected numbers of rows")
                row_indices = [rows_here[row] for row in numbers]
        except (IndexError, TypeError) as error:
            raise type(error)(f"rows: expected some of {self.batch_size} rows, got {rows!r}") from error
        if not row_indices:
            raise ValueError(f"rows: expected at least one of {self.batch_size} rows, got none")
        width = max(self.lengths[row] for row in row_indices)
        index = torch.tensor(row_indices)

        def taken(tensor: Tensor, columns: int | None) -> Tensor:
            rows = tensor.index_select(0, index.to(tensor.device))
            return rows if columns is None else rows.narrow(columns, 0, width)

        # Packed keys that all rows read serve any of them.
        alone = self.counts is not None and len(self.counts[0]) > 1
        picked = self._with_rows(row_indices) if alone else self
        return picked._by_rows(lambda values: tuple(values[row] for row in row_indices), taken)

    def repeat(self, count: int) -> Memory:
        """The one row `count` times, without copying it.

        Raises:
            ValueError: if the memory has several rows, or count is below 1.
        """
        if self.batch_size != 1 or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"repeat: expected a memory of one row and count >= 1, got {self.batch_size} rows and count {count}"
            )
        return self._by_rows(lambda values: values * count, lambda tensor, _: tensor.expand(count, *tensor.shape[1:]))

    @staticmethod
    def stack(memories: Sequence[Memory]) -> Memory:
        """One memory with the rows of several, padded to the longest; all must come from the same source."""
        if not memories:
            raise ValueError("stack: expected at least one memory, got none")
        first = memories[0]
        for memory in memories[1:]:
            if memory.source != first.source:
                one, other = first.differing(memory.source, memory.model)
                raise ValueError(f"stack: expected memories of one source, got {one} and {other}")
            if memory.fingerprint != first.fingerprint:
                one, other = differing(first.model, memory.model)
                raise ValueError(f"stack: expected memories of one base model, got {one} and {other}: other weights")
            for name in ("last", "key_bias", "straight_through", "ordinals", "counts"):
                if (getattr(memory, name) is None) != (getattr(first, name) is None):
                    raise ValueError(
                        f"stack: expected `{name}` in all memories or in none, got some with it and some without"
                    )
            if memory.maker != first.maker:
                raise ValueError("stack: expected memories of one compressor, got those of two")
            if (memory.device, memory.dtype) != (first.device, first.dtype):
                raise ValueError(
                    f"stack: expected memories of one device and dtype, got {first.device} {first.dtype} and "
                    f"{memory.device} {memory.dtype}; use memory.to"
                )
        width = max(memory.num_tokens for memory in memories)
        if first.counts is not None:
            memories = [memory.of_each_row() for memory in memories]

        def joined(tensors: Sequence[Tensor], columns: int | None) -> Tensor:
            if columns is not None:
                before = (0, 0) * (tensors[0].dim() - 1 - columns % tensors[0].dim())
                tensors = [F.pad(tensor, (*before, 0, width - tensor.shape[columns])) for tensor in tensors]
            return torch.cat([*tensors])

        tensors = first._columns | (dict.fromkeys(_PACKED) if first.counts is not None else {})
        numbers = first._numbers
        changed: dict[str, Any] = {name: sum((getattr(memory, name) for memory in memories), ()) for name in numbers}
        for name, columns in tensors.items():
            parts = [getattr(memory, name) for memory in memories]
            changed[name] = _changed(parts, partial(joined, columns=columns))
        return replace(first, **changed)

    def differing(self, source: Source, model: Mapping[str, Any] | None) -> tuple[str, str]:
        """The differences between this memory's source and another, for a message: this one's and the other's."""
        mine, theirs = (
            {
                "method": one.method,
                "carrier": one.carrier,
                # Settings at which earlier releases had no choice are in no file.
                **(REGISTRY[one.method].unnamed() if one.method in REGISTRY else {}),
                **one.options,
                "chunk": one.chunk,
                "memory_tokens": one.memory_tokens,
            }
            for one in (self.source, source)
        )
        names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        if not names:
            one, other = differing(self.model, model)
            return f"the model {one}", f"the model {other}"
        one, other = (f"{names[0]} {values.get(names[0])!r:.200}" for values in (mine, theirs))
        return one, other

    def check_shapes(self, head_shapes: Sequence[tuple[int, int]], hidden_size: int) -> None:
        """Refuses tensors that a model with (key heads, head dim) of each layer and `hidden_size` cannot read."""
        rows, columns = self.batch_size, self.num_tokens
        shapes: dict[str, tuple[int, ...]] = {"last": (rows, hidden_size)}
        if self.counts is None:
            shapes["key_bias"] = (rows, columns, sum(heads for heads, _ in head_shapes))
        if self.ordinals is None:
            shapes["positions"] = (rows, columns)
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"memory: expected {name} of shape {shape}, got {tuple(tensor.shape)}")
        if self.source.carrier == "embedding" and self.positions.dtype != torch.int64:
            raise ValueError(f"memory: expected positions of dtype int64, got {self.positions.dtype}")
        if self.source.carrier == "embedding":
            expected: list[tuple[int, ...]] = [(rows, columns, hidden_size)]
            tensors = [] if self.embeddings is None else [self.embeddings]
        else:
            expected = [(rows, heads, columns, dim) for heads, dim in head_shapes for _ in range(2)]
            tensors = self.tensors
            if self.counts is not None:
                heads, got = [count for count, _ in head_shapes], [own.shape[1] for own in self.counts]
                if got != heads:
                    raise ValueError(f"memory: expected counts of {heads} key heads, got those of {got}")
                sizes = zip(self.counts, head_shapes, strict=True)
                expected = [(int(own.sum()), dim) for own, (_, dim) in sizes for _ in range(2)]
        if [tuple(tensor.shape) for tensor in tensors] != expected:
            raise ValueError(
                f"memory: expected {len(expected)} tensors {expected[0]} of the {self.source.carrier} carrier, "
                f"got {len(tensors)}" + (f", the first {tuple(tensors[0].shape)}" if tensors else "")
            )

    def save(self, path: str | Path) -> None:
        """Writes the memory as safetensors with a versioned header and a checksum, replacing `path` atomically."""
        write_tensors(Path(path), *packed(self))

    @staticmethod
    def load(
        path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        verify: bool = True,
    ) -> Memory:
        """Reads a memory that `save` wrote.

        Args:
            path: of the file.
            device, dtype: as in `to`.
            verify: refuse a file whose contents do not match its checksum, which finds damage but not forgery.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is cut short, damaged, not a memory, or of another version.
        """
        content = read_tensors(Path(path), "a memory file", "one that is cut short or no safetensors")
        return unpacked(Memory, str(path), *content, verify=verify).to(device, dtype)

    def without_padding(self) -> Memory:
        """The memory of `Select` with `counts`: what has no position is left out."""
        held = self.positions.mT > 0
        layers = self.layers or ()
        parts = held.split([key.shape[1] for key, _ in layers], 1)

        def pick(values: Tensor, own: Tensor) -> Tensor:
            return values[own[..., : values.shape[2]].to(values.device)]

        return replace(
            self,
            positions=self.positions.mT[held].int(),
            key_bias=None if self.key_bias is None else self.key_bias.mT[held.to(self.device)],
            counts=tuple(own.sum(-1) for own in parts),
            layers=tuple((pick(key, own), pick(value, own)) for (key, value), own in zip(layers, parts, strict=True)),
        )

    def of_each_row(self) -> Memory:
        """The same with keys of its own for each row, where `counts` says that all read the same."""
        shared = self.counts is not None and len(self.counts[0]) < self.batch_size
        return self._with_rows([0] * self.batch_size) if shared else self

    def _with_rows(self, rows: Sequence[int]) -> Memory:
        """The keys, values and positions of some rows of what `counts` packs."""
        counts = self.counts or ()

        def pick(values: Tensor, own: Tensor) -> Tensor:
            parts = values.split(own.sum(1).tolist())
            return torch.cat([parts[row] for row in rows])

        layers = zip(self.layers or (), counts, strict=True)
        return replace(
            self,
            positions=pick(self.positions, torch.cat(counts, 1)),
            key_bias=None if self.key_bias is None else pick(self.key_bias, torch.cat(counts, 1)),
            layers=tuple((pick(key, own), pick(value, own)) for (key, value), own in layers),
            counts=tuple(own[rows] for own in counts),
        )

    def _with(self, change: Callable[[Tensor], Tensor], names: Sequence[str] = ("embeddings", "layers")) -> Memory:
        """The same with some of its tensors changed."""
        return replace(self, **{name: _changed([getattr(self, name)], lambda one: change(*one)) for name in names})

    @property
    def _columns(self) -> dict[str, int | None]:
        """`_COLUMNS` of the tensors that are not packed."""
        return {name: at for name, at in _COLUMNS.items() if self.counts is None or name not in _PACKED}

    def _by_rows(
        self, numbers: Callable[[tuple[Any, ...]], Any], tensors: Callable[[Tensor, int | None], Tensor]
    ) -> Memory:
        """Other rows: what each has, and tensors with rows, given the dimension of their columns."""
        changed = {name: numbers(getattr(self, name)) for name in self._numbers}
        for name, columns in self._columns.items():
            changed[name] = _changed([getattr(self, name)], lambda one, columns=columns: tensors(one[0], columns))  # type: ignore[misc]
        return replace(self, **changed)


def last_places(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """int64 [B, K], the places in logical order right before each row's start, and 0 behind each row's length."""
    length, columns = torch.tensor(lengths)[:, None], torch.arange(max(lengths))
    return (torch.tensor(starts)[:, None] - length + columns).where(columns < length, 0)


def ordinals_of(memory: Memory) -> Tensor:
    """`Memory.ordinals`; a ValueError if the memory has none."""
    if memory.ordinals is None:
        raise ValueError(f"memory: expected one with ordinals, as {memory.source.method} makes it, got one without")
    return memory.ordinals


def _changed(values: Sequence[Any], change: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """Tensors of several memories as one, or tuples of them one by one; None where a memory has none."""
    if any(value is None for value in values):
        return None
    if isinstance(values[0], tuple):
        return tuple(_changed(parts, change) for parts in zip(*values, strict=True))
    return change(values)


def check_memory(memory: object) -> None:
    """Raises a TypeError for anything but a memory."""
    if not isinstance(memory, Memory):
        raise TypeError(f"memory: expected a Memory as encode returns, got {type(memory).__name__}")
