"""Memory files: safetensors with a JSON header that says what they are, and a checksum. Nothing is pickled."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor

from gistkit.common.checks import POSITIONS
from gistkit.common.messages import one_line
from gistkit.compress.source import Source

Kind = TypeVar("Kind")
FORMAT = "gistkit-memory"
# That of memories with biases of keys is higher, and those whose files are read.
VERSION, BIASED = 2, 3
VERSIONS = ("2", "3")
CHECKSUM = "checksum"
_BIASES = (torch.float32, torch.float64)
# The fields of a memory that its header has, and those that are tensors; of layers the parts, in that order.
_VALUES = ("lengths", "context_lengths", "starts", "documents", "rest", "fingerprint", "maker")
_TENSORS = ("positions", "embeddings", "last", "ordinals", "key_bias")
_LAYERS = ("key", "value")


def packed(memory: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the header of a memory's file."""
    memory = memory.of_each_row()
    tensors = {name: tensor for name in _TENSORS if (tensor := getattr(memory, name)) is not None}
    for index, layer in enumerate(memory.layers or ()):
        tensors |= {f"layers.{index}.{name}": part for name, part in zip(_LAYERS, layer, strict=True)}
    # Layers may share one tensor, which safetensors does not write.
    tensors |= {f"layers.{index}.counts": own.clone() for index, own in enumerate(memory.counts or ())}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = {
        "source": asdict(memory.source),
        **{name: getattr(memory, name) for name in _VALUES},
        "model": None if memory.model is None else dict(memory.model),
        "layers": len(memory.layers or ()),
    }
    version = VERSION if memory.key_bias is None else BIASED
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
    """Refuses contents that differ from their checksum."""
    found = _checksum(header["memory"], tensors)
    if header.get(CHECKSUM) != found:
        raise ValueError(
            f"{path}: expected contents of the checksum {header.get(CHECKSUM)}, got {found}: the file is damaged; "
            "verify=False reads it all the same"
        )


def unpacked(
    kind: Callable[..., Kind], path: str, header: dict[str, str], tensors: dict[str, Tensor], *, verify: bool
) -> Kind:
    """The memory, of class `kind`, of a file's header and tensors; see `Memory.load`."""
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
        return _checked(kind(**_fields(json.loads(header["memory"]), tensors)))  # type: ignore[no-any-return]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        missing = "none for " if isinstance(error, KeyError) else ""
        raise ValueError(f"{path}: expected the contents of a memory, got {missing}{one_line(error)}") from error


def _numbers(values: Tensor | None) -> list[int]:
    return [] if values is None else values.flatten().tolist()


def _check_counts(memory: Any) -> None:
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
    if torch.cat(counts, 1).amax(1).tolist() != [*memory.lengths]:
        raise ValueError(f"lengths {memory.lengths} for heads of at most {torch.cat(counts, 1).amax(1).tolist()} keys")


def _fields(content: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A memory's fields."""
    if not 0 <= content["layers"] <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors for {content['layers']} layers")

    def of_layers(name: str) -> list[Tensor]:
        names = [f"layers.{index}.{name}" for index in range(content["layers"])]
        return [tensors[each] for each in names if each in tensors or name in _LAYERS]

    whole = {name: tuple(map(int, content[name])) for name in ("lengths", "context_lengths", "starts")}
    by_row = {name: tuple(tuple(map(int, row)) for row in content[name]) for name in ("documents", "rest")}
    given = {name: content[name] for name in ("fingerprint", "maker", "model")}
    layers = tuple(zip(*map(of_layers, _LAYERS), strict=True)) or None
    named = {name: tensors.get(name) for name in _TENSORS[1:]} | {"counts": tuple(of_layers("counts")) or None}
    source, positions = Source.of(content["source"]), tensors["positions"]
    return {"source": source, "positions": positions, **whole, **by_row, **given, **named, "layers": layers}


def _checked(memory: Any) -> Any:
    """The memory, if its fields fit together."""
    counts = memory.counts
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
        raise ValueError(f"lengths, position IDs, ordinals or token ids outside [0, {POSITIONS})")
    if not all(isinstance(value, str | None) for value in (memory.fingerprint, memory.maker)):
        raise ValueError("a fingerprint or a maker that is no text")
    if not isinstance(memory.model, dict | None):
        raise ValueError(f"model {memory.model!r:.60}")
    # Rows of texts shorter than a chunk may have fewer memory tokens.
    chunk, memory_tokens = memory.source.chunk, memory.source.memory_tokens
    if not 1 <= memory_tokens <= chunk < POSITIONS:
        raise ValueError(f"chunk {chunk} and memory_tokens {memory_tokens}")
    return memory
