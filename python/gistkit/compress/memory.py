"""Memory: a compressed context in the form that the decoder reads."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from transformers import Cache

from gistkit.common.checks import POSITIONS
from gistkit.common.files import read_tensors, write_tensors
from gistkit.common.messages import one_line
from gistkit.hf.fingerprint import differing
from gistkit.hf.packed import PackedLayers

T = TypeVar("T")
# The purpose of reading a memory: to reconstruct the context, to continue it, or to answer questions about it.
Task = Literal["ae", "lm", "qa"]
TASKS = ("ae", "lm", "qa")
FORMAT = "gistkit-memory"
# That of memories with biases of keys, which earlier releases would not see, is higher.
VERSION, BIASED = 2, 3
# Whose files are read.
VERSIONS = ("1", "2", "3")
CHECKSUM = "checksum"
_NO_CACHE = "cache: expected compressor.to_cache(memory), got the Memory itself, whose keys stand elsewhere"
# The header of files that have no checksum.
_UNSIGNED = {"format", "version", "memory"}


@dataclass(frozen=True)
class Source:
    """Where a memory comes from; only a compressor with an equal source can read it.

    Args:
        method: the compressor's `method`, such as "icae" or "gistpool".
        carrier: "embedding" or "kv".
        options: the method's arguments that change its memories, by name; JSON values.
        chunk: chunk size L in tokens.
        memory_tokens: memory tokens M per chunk, without BOS.
        structure: the base model's shape, `gistkit.hf.structure`.
        cache_width: numbers in the model's full KV cache per token, over all layers.
    """

    method: str
    carrier: str
    options: Mapping[str, Any] = field(hash=False)
    chunk: int
    memory_tokens: int
    structure: str
    cache_width: int

    @property
    def ratio(self) -> float:
        """Context tokens per memory token, L / M."""
        return self.chunk / self.memory_tokens

    @property
    def layout(self) -> str | None:
        """The position layout, "dpl", "upl", "cpl" or "epl", of a method that has these."""
        return self.options.get("layout")

    @property
    def consistent(self) -> bool:
        """Whether the decoder's tokens keep the position ids of the uncompressed sequence (CPL, EPL)."""
        return self.layout in ("cpl", "epl")

    @staticmethod
    def of(content: Mapping[str, Any]) -> Source:
        """The source that a file describes; of files of version 1 too, whose `layout` is a name or options as JSON."""
        content = dict(content)
        if isinstance(content.get("layout"), str):
            layout = content.pop("layout")
            content["options"] = json.loads(layout) if layout.startswith("{") else {"layout": layout}
        source = Source(**content)
        if any(type(getattr(source, name)) is not kind for name, kind in _KINDS.items()):
            raise ValueError(f"{source}")
        return source


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
        positions: int64 or float64 [B, K] on the CPU, the position ids of the memory tokens in the decoder (embeddings)
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
        frequencies: per layer [B, R/2], the RoPE frequencies of its keys, which depend on the length of the pass in
            some types (dynamic, longrope). None without a known RoPE, and in files of earlier releases.
        last: [B, hidden], the output that predicts the token after the memory if there is no task token between them.
        ordinals: int64 [B, K] on the CPU, ascending in each row: the places of the memory tokens in the logical order
            of the pass that made them, which sliding windows count by. The text's places follow the last one. None: the
            method derives them (VoCo cannot, because images differ in size).
        key_bias: float32 or float64, added to the logits of the memory's keys. In `Select` [B, K, A], fitted ones of A
            layers and key heads, with `counts` [T of all layers]. In Dodo [B, K], zeros through which the scores of
            nuggets get gradients; not saved.
        documents: the compressed context tokens of each document of each row; several where memories were joined.
        rest: token ids of each row after the compressor's window, which the decoder reads uncompressed. (The file
            format has the names `rest` and `maker`.)
        fingerprint: of the base model's weights, `gistkit.hf.fingerprint`; None inside `Compressor.forward`.
        maker: fingerprint of the compressor's own weights, `gistkit.hf.digest`; None inside `Compressor.forward`.
        model: the base model's identity for messages, `gistkit.hf.identity`; None also in files of earlier releases.
    """

    source: Source
    lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    positions: Tensor
    starts: tuple[int, ...]
    embeddings: Tensor | None = None
    layers: tuple[tuple[Tensor, Tensor], ...] | None = None
    counts: tuple[Tensor, ...] | None = None
    frequencies: tuple[Tensor, ...] | None = None
    last: Tensor | None = None
    ordinals: Tensor | None = None
    key_bias: Tensor | None = None
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
            return sum(tensor.nbytes for tensor in [*self.tensors, *([] if self.fitted is None else [self.fitted])])
        size, more = self.tensors[0].element_size(), 0 if self.fitted is None else self.fitted.element_size()
        numbers = sum(tensor.numel() for tensor in self.tensors) // (self.batch_size * max(self.num_tokens, 1))
        return sum(self.lengths) * (numbers * size + (more * self.positions.shape[-1] if more else 0))

    @property
    def fitted(self) -> Tensor | None:
        """`key_bias` where it is fitted, as in `Select`."""
        return None if self.key_bias is None or self.key_bias.dim() == 2 else self.key_bias

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
        return PackedLayers.of(self.layers, self.counts, self.packed_biases)

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
        memory = self._with(lambda tensor: tensor.to(device=device, dtype=dtype))
        return replace(
            memory,
            frequencies=_each(self.frequencies, lambda f: f.to(device)),
            last=None if self.last is None else self.last.to(device=device, dtype=dtype),
            key_bias=None if self.key_bias is None else self.key_bias.to(device),
        )

    def __getitem__(self, rows: int | slice | Sequence[int]) -> Memory:
        """The memory of some of the rows."""
        rows_here = range(self.batch_size)
        try:
            if isinstance(rows, slice):
                row_indices = list(rows_here[rows])
            else:
                row_indices = [rows_here[row] for row in (rows if isinstance(rows, Iterable) else [rows])]
        except (IndexError, TypeError) as error:
            raise type(error)(f"rows: expected some of {self.batch_size} rows, got {rows!r}") from error
        if not row_indices:
            raise ValueError(f"rows: expected at least one of {self.batch_size} rows, got none")
        width = max(self.lengths[row] for row in row_indices)
        index = torch.tensor(row_indices, device=self.device)
        packed = self.counts is not None
        pick = lambda values: tuple(values[row] for row in row_indices)  # noqa: E731
        picked = replace(
            self,
            lengths=pick(self.lengths),
            context_lengths=pick(self.context_lengths),
            positions=self.positions if packed else self.positions[row_indices, :width],
            ordinals=None if self.ordinals is None else self.ordinals[row_indices, :width],
            starts=pick(self.starts),
            documents=pick(self.documents),
            rest=pick(self.rest),
        )
        if packed:
            # One that all rows read serves any of them.
            picked = picked._with_rows(row_indices) if len((self.counts or ())[0]) > 1 else picked
        else:
            picked = picked._with(lambda tensor: tensor.index_select(0, index).narrow(-2, 0, width))
        return replace(
            picked,
            frequencies=_each(self.frequencies, lambda f: f.index_select(0, index.to(f.device))),
            last=None if self.last is None else self.last.index_select(0, index),
            key_bias=picked.key_bias
            if packed or self.key_bias is None
            else self.key_bias.index_select(0, index)[:, :width],
        )

    def repeat(self, count: int) -> Memory:
        """The one row `count` times, without copying it.

        Raises:
            ValueError: if the memory has several rows, or count is below 1.
        """
        if self.batch_size != 1 or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"repeat: expected a memory of one row and count >= 1, got {self.batch_size} rows and count {count}"
            )
        packed = self.counts is not None
        repeated = replace(
            self,
            lengths=self.lengths * count,
            context_lengths=self.context_lengths * count,
            positions=self.positions if packed else self.positions.expand(count, *self.positions.shape[1:]),
            ordinals=None if self.ordinals is None else self.ordinals.expand(count, -1),
            starts=self.starts * count,
            documents=self.documents * count,
            rest=self.rest * count,
        )
        if not packed:
            repeated = repeated._with(lambda tensor: tensor.expand(count, *tensor.shape[1:]))
        return replace(
            repeated,
            frequencies=_each(self.frequencies, lambda f: f.expand(count, -1)),
            last=None if self.last is None else self.last.expand(count, -1),
            key_bias=self.key_bias
            if packed or self.key_bias is None
            else self.key_bias.expand(count, *self.key_bias.shape[1:]),
        )

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
            for name in ("last", "key_bias", "ordinals", "counts"):
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

        def widen(tensor: Tensor) -> Tensor:
            return torch.nn.functional.pad(tensor, (0, 0, 0, width - tensor.shape[-2]))

        def joined(*parts: Tensor) -> Tensor:
            return torch.cat([widen(part) if first.counts is None else part for part in parts])

        summed = lambda name: sum((getattr(memory, name) for memory in memories), ())  # noqa: E731
        pad_columns = lambda t: torch.nn.functional.pad(t, (0, 0) * (t.dim() - 2) + (0, width - t.shape[1]))  # noqa: E731
        biases = [m.key_bias if m.counts else pad_columns(m.key_bias) for m in memories if m.key_bias is not None]
        return replace(
            first,
            lengths=summed("lengths"),
            context_lengths=summed("context_lengths"),
            positions=torch.cat([pad_columns(m.positions) if m.counts is None else m.positions for m in memories]),
            counts=None
            if first.counts is None
            else tuple(torch.cat(layer) for layer in zip(*(m.counts or () for m in memories), strict=True)),
            ordinals=None
            if first.ordinals is None
            else torch.cat([pad_columns(m.ordinals) for m in memories if m.ordinals is not None]),
            starts=summed("starts"),
            documents=summed("documents"),
            rest=summed("rest"),
            frequencies=None
            if any(m.frequencies is None for m in memories)
            else tuple(torch.cat(f) for f in zip(*(m.frequencies or () for m in memories), strict=True)),
            last=None if first.last is None else torch.cat([m.last for m in memories if m.last is not None]),
            key_bias=torch.cat(biases) if biases else None,
            embeddings=None
            if first.embeddings is None
            else joined(*(m.embeddings for m in memories if m.embeddings is not None)),
            layers=None
            if first.layers is None
            else tuple(
                (joined(*(key for key, _ in layer)), joined(*(value for _, value in layer)))
                for layer in zip(*(m.layers or () for m in memories), strict=True)
            ),
        )

    def differing(self, source: Source, model: Mapping[str, Any] | None) -> tuple[str, str]:
        """What tells this memory's source and another apart, for a message: this one's and the other's."""
        mine, theirs = (
            {
                "method": one.method,
                "carrier": one.carrier,
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
        if self.positions.dim() != 2 and self.ordinals is None:
            raise ValueError(
                f"memory: expected positions of shape {(rows, columns)}, got {tuple(self.positions.shape)}"
            )
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

        if (
            self.fitted is not None
            and self.counts is None
            and self.fitted.shape[2] != sum(heads for heads, _ in head_shapes)
        ):
            raise ValueError(
                f"memory: expected biases of {sum(heads for heads, _ in head_shapes)} layers and heads, got "
                f"{self.fitted.shape[2]}"
            )
        if self.last is not None and tuple(self.last.shape) != (rows, hidden_size):
            raise ValueError(f"memory: expected last of shape {(rows, hidden_size)}, got {tuple(self.last.shape)}")

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
            verify: refuse a file whose contents do not match its checksum, which finds damage but not forgery. Files of
                earlier releases have no checksum and give a warning. False: neither.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is cut short, damaged, not a memory, or of another version.
        """
        content = read_tensors(Path(path), "a memory file", "one that is cut short or no safetensors")
        return unpacked(str(path), *content, verify=verify).to(device, dtype)

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
            key_bias=None if self.fitted is None else self.fitted.mT[held.to(self.device)],
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

    def _with(self, change: Callable[[Tensor], Tensor]) -> Memory:
        return replace(
            self,
            embeddings=None if self.embeddings is None else change(self.embeddings),
            layers=None if self.layers is None else tuple((change(key), change(value)) for key, value in self.layers),
        )


def last_places(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """int64 [B, K], the places in logical order right before each row's start, and 0 behind each row's length."""
    length, columns = torch.tensor(lengths)[:, None], torch.arange(max(lengths))
    return (torch.tensor(starts)[:, None] - length + columns).where(columns < length, 0)


def _each(frequencies: tuple[Tensor, ...] | None, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...] | None:
    return None if frequencies is None else tuple(change(layer) for layer in frequencies)


def check_memory(memory: object) -> None:
    """Raises a TypeError for anything but a memory."""
    if not isinstance(memory, Memory):
        raise TypeError(f"memory: expected a Memory as encode returns, got {type(memory).__name__}")


_BIASES = (torch.float32, torch.float64)
# Files are safetensors, with a JSON header that says what they are. Nothing is pickled.
_KINDS = {field.name: {"str": str, "int": int}.get(str(field.type), dict) for field in fields(Source)}


def packed(memory: Memory) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the header of a memory's file."""
    memory = memory.of_each_row()
    tensors = {"positions": memory.positions}
    if memory.embeddings is not None:
        tensors["embeddings"] = memory.embeddings
    if memory.last is not None:
        tensors["last"] = memory.last
    if memory.ordinals is not None:
        tensors["ordinals"] = memory.ordinals
    if memory.fitted is not None:
        tensors["key_bias"] = memory.fitted
    for index, (key, value) in enumerate(memory.layers or ()):
        tensors |= {f"layers.{index}.key": key, f"layers.{index}.value": value}
    for index, frequencies in enumerate(memory.frequencies or ()):
        # Layers may share one tensor, which safetensors does not write.
        tensors[f"layers.{index}.frequencies"] = frequencies.clone()
    content = {
        "source": asdict(memory.source),
        "lengths": memory.lengths,
        "context_lengths": memory.context_lengths,
        "starts": memory.starts,
        "documents": memory.documents,
        "rest": memory.rest,
        "fingerprint": memory.fingerprint,
        "maker": memory.maker,
        "model": None if memory.model is None else dict(memory.model),
        "layers": len(memory.layers or ()),
    }
    for index, own in enumerate(memory.counts or ()):
        tensors[f"layers.{index}.counts"] = own
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    version = VERSION if memory.fitted is None else BIASED
    header = {"format": FORMAT, "version": str(version), "memory": json.dumps(content)}
    return tensors, header | {CHECKSUM: _checksum(header["memory"], tensors)}


def _checksum(content: str, tensors: dict[str, Tensor]) -> str:
    """The CRC-32 of a memory's values, and of the names, dtypes and shapes of its tensors, in order of their names.

    It finds every change of one bit and of one run of 32, and all but one in 4 billion of the others, at twice the
    speed of SHA-256; whoever forges a file can write its checksum as well.
    """
    names = sorted(tensors)
    kinds = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    total = zlib.crc32(json.dumps([content, kinds]).encode())
    for name in names:
        values: Any = tensors[name].flatten().view(torch.uint8).numpy()
        total = zlib.crc32(values, total)
    return f"crc32:{total:08x}"


def _verify(path: str, header: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Refuses contents that differ from their checksum, and warns where there is none."""
    if not header.keys() - _UNSIGNED:
        warnings.warn(
            f"{path}: this file of an earlier release has no checksum, so damage cannot be detected; save it again "
            "with Memory.save",
            stacklevel=4,
        )
        return
    found = _checksum(header["memory"], tensors)
    if header.get(CHECKSUM) != found:
        raise ValueError(
            f"{path}: expected contents of the checksum {header.get(CHECKSUM)}, got {found}: the file is damaged; "
            "verify=False reads it all the same"
        )


def unpacked(path: str, header: dict[str, str], tensors: dict[str, Tensor], *, verify: bool) -> Memory:
    """The memory of a file's header and tensors, see `Memory.load`; `path` names it in errors."""
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a file of format {FORMAT}, got format {header.get('format')}")
    if header.get("version") not in VERSIONS:
        raise ValueError(
            f"{path}: expected version {' or '.join(VERSIONS)} of {FORMAT}, got version {header.get('version')}"
        )
    if "memory" not in header:
        raise ValueError(f"{path}: expected the contents of a memory, got none for memory")
    if verify:
        _verify(path, header, tensors)
    try:
        return _build(json.loads(header["memory"]), tensors)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        kind = "none for " if isinstance(error, KeyError) else ""
        raise ValueError(f"{path}: expected the contents of a memory, got {kind}{one_line(error)}") from error


def _numbers(values: Tensor | None) -> list[int]:
    return [] if values is None else values.flatten().tolist()


def _check_counts(memory: Memory) -> None:
    """Refuses counts that a file's keys, values, positions or lengths do not have."""
    counts, batch = memory.counts or (), memory.batch_size
    for own in counts:
        if own.dim() != 2 or len(own) != batch or own.dtype != torch.int64 or not own.numel():
            raise ValueError(f"counts {own.dtype} of shape {tuple(own.shape)} for {batch} rows")
    for tensor, own in [
        (memory.positions, torch.cat(counts, 1)),
        *((tensor, own) for layer, own in zip(memory.layers or (), counts, strict=True) for tensor in layer),
    ]:
        # No sum of those below the tensor's length is too large for its dtype.
        if int(own.min()) < 0 or int(own.max()) > len(tensor) or int(own.sum()) != len(tensor):
            raise ValueError(f"{len(tensor)} rows for heads of {int(own.min())} to {int(own.max())} keys")
    for tensor in memory.tensors:
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise ValueError(f"a tensor {tensor.dtype} of shape {tuple(tensor.shape)} for heads of different lengths")
    if bool((torch.cat(counts, 1).amax(1) > torch.tensor(memory.lengths)).any()):
        raise ValueError(f"lengths {memory.lengths} for heads of more keys")


def _build(content: dict[str, Any], tensors: dict[str, Tensor]) -> Memory:
    layers = tuple(
        (tensors[f"layers.{index}.key"], tensors[f"layers.{index}.value"]) for index in range(content["layers"])
    )
    counts = tuple(tensors[name] for index in range(content["layers"]) if (name := f"layers.{index}.counts") in tensors)
    # Files of earlier releases have none.
    frequencies = tuple(
        tensors[name] for index in range(content["layers"]) if (name := f"layers.{index}.frequencies") in tensors
    )
    memory = Memory(
        source=Source.of(content["source"]),
        lengths=tuple(map(int, content["lengths"])),
        context_lengths=tuple(map(int, content["context_lengths"])),
        positions=tensors["positions"],
        starts=tuple(map(int, content["starts"])),
        embeddings=tensors.get("embeddings"),
        layers=layers or None,
        counts=counts or None,
        frequencies=frequencies or None,
        last=tensors.get("last"),
        ordinals=tensors.get("ordinals"),
        key_bias=tensors.get("key_bias"),
        # Files of earlier releases have none.
        documents=tuple(tuple(map(int, row)) for row in content.get("documents", ())),
        rest=tuple(tuple(map(int, row)) for row in content["rest"]),
        fingerprint=content["fingerprint"],
        maker=content.get("maker"),
        model=content.get("model"),
    )
    # Packed, positions are as wide as keys are many.
    dims, kinds = ((1,), (torch.int32,)) if counts else ((2, 3), (torch.int64, torch.float64))
    if memory.positions.dim() not in dims or not memory.positions.shape[-1]:
        raise ValueError(f"positions of shape {tuple(memory.positions.shape)}")
    batch, width = (len(memory.lengths), memory.num_tokens) if counts else memory.positions.shape[:2]
    rows = (memory.lengths, memory.context_lengths, memory.starts, memory.documents, memory.rest)
    if any(len(values) != batch for values in rows) or memory.positions.dtype not in kinds:
        raise ValueError(f"rows that disagree with {batch} rows of positions")
    ordinals = memory.ordinals
    if ordinals is not None and (ordinals.shape != (batch, width) or ordinals.dtype != torch.int64):
        raise ValueError(f"ordinals of shape {tuple(ordinals.shape)} for {batch} rows of {width} memory tokens")
    if not memory.tensors or (memory.layers is None) == (memory.embeddings is None):
        raise ValueError("neither embeddings nor layers, or both")
    if counts:
        _check_counts(memory)
    for tensor in memory.tensors if not counts else ():
        if tensor.shape[0] != batch or tensor.shape[-2] != width or not tensor.is_floating_point():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} for {batch} rows of {width} memory tokens")
    for layer in frequencies:
        if len(frequencies) != len(layers) or layer.dim() != 2 or len(layer) != batch or not layer.is_floating_point():
            raise ValueError(f"frequencies of shape {tuple(layer.shape)} for {batch} rows and {len(layers)} layers")
    bias = memory.key_bias
    if bias is not None and (bias.shape != memory.positions.shape or bias.dim() == 2 or bias.dtype not in _BIASES):
        raise ValueError(f"key_bias of shape {tuple(bias.shape)} for positions {tuple(memory.positions.shape)}")
    if bias is not None and not bool(bias.isfinite().all()):
        raise ValueError("key_bias that is not finite")
    last = memory.last
    if last is not None and (last.dim() != 2 or last.shape[0] != batch or not last.is_floating_point()):
        raise ValueError(f"a last hidden state of shape {tuple(last.shape)} for {batch} rows")
    if max(memory.lengths) > width or min(memory.lengths) < 0:
        raise ValueError(f"lengths {memory.lengths} for {width} memory tokens")
    for row, length in zip(memory.documents, memory.context_lengths, strict=True):
        if min(row, default=0) < 1 or sum(row) != length:
            raise ValueError(f"documents {row!s:.60} of a context of {length} tokens")
    tokens = (token for row in memory.rest for token in row)
    numbers = (*memory.context_lengths, *memory.starts, *_numbers(memory.positions), *_numbers(ordinals), *tokens)
    if not all(0 <= number < POSITIONS for number in numbers):
        raise ValueError(f"lengths, position ids, ordinals or token ids outside [0, {POSITIONS})")
    if not all(isinstance(value, str | None) for value in (memory.fingerprint, memory.maker)):
        raise ValueError("a fingerprint or a maker that is no text")
    if not isinstance(memory.model, dict | None):
        raise ValueError(f"model {memory.model!r:.60}")
    # Rows of texts shorter than a chunk may have fewer memory tokens.
    chunk, memory_tokens = memory.source.chunk, memory.source.memory_tokens
    if not 1 <= memory_tokens <= chunk < POSITIONS:
        raise ValueError(f"chunk {chunk} and memory_tokens {memory_tokens}")
    # Earlier releases leave nothing out where heads happen to keep as many each.
    padded = not counts and memory.positions.dim() == 3 and memory.source.options.get("shares", "equal") != "equal"
    return memory.without_padding() if padded else memory
