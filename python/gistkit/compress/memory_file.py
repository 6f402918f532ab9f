"""Memories on disk: safetensors with a JSON header that says what the file is. Nothing is pickled."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gistkit.compress.files import read_tensors, replacing
from gistkit.compress.memory import Memory, Source

FORMAT = "gistkit-memory"
VERSION = 1
_POSITIONS = 2**31
_KINDS = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(Source)}


def save(memory: Memory, path: Path) -> None:
    """Writes `memory`; an interrupted write leaves what was there before."""
    tensors = {"positions": memory.positions}
    if memory.embeddings is not None:
        tensors["embeddings"] = memory.embeddings
    if memory.last is not None:
        tensors["last"] = memory.last
    for index, (key, value) in enumerate(memory.layers or ()):
        tensors |= {f"layers.{index}.key": key, f"layers.{index}.value": value}
    content = {
        "source": asdict(memory.source),
        "lengths": memory.lengths,
        "context_lengths": memory.context_lengths,
        "starts": memory.starts,
        "rest": memory.rest,
        "fingerprint": memory.fingerprint,
        "maker": memory.maker,
        "layers": len(memory.layers or ()),
    }
    header = {"format": FORMAT, "version": str(VERSION), "memory": json.dumps(content)}
    with replacing(path) as partial:
        save_file({k: t.detach().cpu().contiguous() for k, t in tensors.items()}, partial, metadata=header)


def load(path: Path) -> Memory:
    """Reads a memory file; see `Memory.load`."""
    header, tensors = read_tensors(path, "a memory file", "one that is cut short or no safetensors")
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a file of format {FORMAT}, got format {header.get('format')}")
    if header.get("version") != str(VERSION):
        raise ValueError(f"{path}: expected version {VERSION} of {FORMAT}, got version {header.get('version')}")
    try:
        return _build(json.loads(header["memory"]), tensors)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: expected the contents of a memory, got {error!r}") from error


def _build(content: dict[str, Any], tensors: dict[str, Tensor]) -> Memory:
    layers = tuple(
        (tensors[f"layers.{index}.key"], tensors[f"layers.{index}.value"]) for index in range(content["layers"])
    )
    memory = Memory(
        source=Source(**content["source"]),
        lengths=tuple(map(int, content["lengths"])),
        context_lengths=tuple(map(int, content["context_lengths"])),
        positions=tensors["positions"],
        starts=tuple(map(int, content["starts"])),
        embeddings=tensors.get("embeddings"),
        layers=layers or None,
        last=tensors.get("last"),
        rest=tuple(tuple(map(int, row)) for row in content["rest"]),
        fingerprint=content["fingerprint"],
        maker=content.get("maker"),
    )
    batch, width = memory.positions.shape
    rows = (memory.lengths, memory.context_lengths, memory.starts, memory.rest)
    if any(len(values) != batch for values in rows) or memory.positions.dtype not in (torch.int64, torch.float64):
        raise ValueError(f"rows that disagree with {batch} rows of positions")
    if not memory.tensors or (memory.layers is None) == (memory.embeddings is None):
        raise ValueError("neither embeddings nor layers, or both")
    for tensor in memory.tensors:
        if tensor.shape[0] != batch or tensor.shape[-2] != width or not tensor.is_floating_point():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} for {batch} rows of {width} memory tokens")
    last = memory.last
    if last is not None and (last.dim() != 2 or last.shape[0] != batch or not last.is_floating_point()):
        raise ValueError(f"a last hidden state of shape {tuple(last.shape)} for {batch} rows")
    if max(memory.lengths) > width or min(memory.lengths) < 0:
        raise ValueError(f"lengths {memory.lengths} for {width} memory tokens")
    numbers = (*memory.context_lengths, *memory.starts, *memory.positions.flatten().tolist())
    if not all(0 <= number < _POSITIONS for number in numbers):
        raise ValueError(f"lengths or position ids outside [0, {_POSITIONS})")
    if any(type(getattr(memory.source, name)) is not kind for name, kind in _KINDS.items()):
        raise ValueError(f"{memory.source}")
    if min(memory.source.chunk, memory.source.memory_tokens) < 1:
        raise ValueError(f"chunk {memory.source.chunk} and memory_tokens {memory.source.memory_tokens}")
    return memory
