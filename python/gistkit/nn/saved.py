"""save_position and load_position: a position encoding in a folder, such as that of its model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gistkit.common.files import read_json, read_tensors, replacing_files, write_tensors, write_text
from gistkit.common.messages import one_line, shown
from gistkit.nn.absolute import Learned, Learned2D, Sinusoidal
from gistkit.nn.alibi import ALiBi
from gistkit.nn.positions import NoPE, PositionEncoding
from gistkit.nn.rotary import PoPE, RoPE, RoPE2D, RoPE2DMix
from gistkit.nn.seqpe.encoder import SeqPE
from gistkit.nn.seqpe.positions import SeqPEPositions

SETTINGS, TENSORS = "position.json", "position.safetensors"
_FORMAT, _VERSION = "gistkit-position", 1
_KINDS: Mapping[str, type[PositionEncoding]] = {
    kind.__name__: kind
    for kind in (NoPE, Sinusoidal, Learned, Learned2D, PoPE, RoPE, RoPE2D, RoPE2DMix, ALiBi, SeqPEPositions)
}
# A file may come from anybody; larger whole numbers are refused before anything has that size.
_LARGEST, _MOST_LAYERS = 2**24, 2**10


def save_position(position: PositionEncoding, folder: Path | str) -> None:
    """Writes position.json and position.safetensors, with SeqPE's encoder among its weights.

    The folder may be that of a model, whose files have other names. If writing fails, it stays as it was.

    Args:
        position: one of `gistkit.nn`'s.

    Raises:
        TypeError: a position encoding of another class, or none.
        OSError: the folder cannot be written.
    """
    if type(position) not in _KINDS.values():
        raise TypeError(f"position: expected one of {', '.join(_KINDS)}, got {type(position).__name__}")
    settings = _settings(position)
    if isinstance(position, SeqPEPositions):
        settings["encoder"] = _settings(position.encoder)
    content = {"format": _FORMAT, "version": _VERSION, "kind": type(position).__name__, "settings": settings}
    with replacing_files(Path(folder)) as partial:
        # NumPy's numbers are none to json.
        write_text(partial / SETTINGS, json.dumps(content, indent=2, default=lambda number: number.item()) + "\n")
        write_tensors(partial / TENSORS, position.state_dict())


def load_position(folder: Path | str) -> PositionEncoding:
    """The position encoding that `save_position` wrote, in eval mode, on the CPU, its weights in the dtype they had.

    Raises:
        OSError: a file that is not there, or cannot be opened.
        ValueError: a file is damaged, or its settings do not fit its tensors.
    """
    path = Path(folder) / SETTINGS
    content = read_json(path, "the settings of a position encoding")
    if (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
        got = content.get("format"), content.get("version")
        raise ValueError(f"{path}: expected format {_FORMAT} and version {_VERSION}, got {shown(got)}")
    kind, settings = str(content.get("kind")), content.get("settings")
    if kind not in _KINDS or not isinstance(settings, dict):
        raise ValueError(f"{path}: expected the settings of one of {', '.join(_KINDS)}, got {shown(kind)}")
    tensors = read_tensors(Path(folder) / TENSORS, "the weights of a position encoding")[1]
    _check_sizes(path, settings)
    try:
        # First without memory: the file has to have what the settings claim.
        with torch.device("meta"):
            claimed = {name: tensor.shape for name, tensor in _made(kind, settings).state_dict().items()}
        found = {name: tensor.shape for name, tensor in tensors.items()}
        if claimed != found:
            differing = sorted(name for name in claimed | found if claimed.get(name) != found.get(name))
            raise ValueError(f"other tensors than settings claim: {shown(differing)}")
        with torch.random.fork_rng(devices=[]):
            position = _made(kind, settings)
        position.load_state_dict(tensors, assign=True)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{path}: expected the settings of {kind}, got some that do not fit ({one_line(error)})"
        ) from error
    return position.eval()


def _settings(module: nn.Module) -> dict[str, Any]:
    """The arguments that a module was made with, but those of its first weights and other modules."""
    names = signature(type(module)).parameters.keys() - {"encoder", "std"}
    return {name: getattr(module, name) for name in sorted(names)}


def _made(kind: str, settings: Mapping[str, Any]) -> PositionEncoding:
    arguments = dict(settings)
    if kind == SeqPEPositions.__name__:
        arguments["encoder"] = SeqPE(**arguments["encoder"])
    for name in arguments.keys() & {"grid", "extent"}:
        arguments[name] = tuple(arguments[name]) if isinstance(arguments[name], list) else arguments[name]
    return _KINDS[kind](**arguments)


def _check_sizes(path: Path, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(value, dict):
            _check_sizes(path, value)
        if name == "extent":
            # Nothing has that size.
            continue
        most = _MOST_LAYERS if name == "layers" else _LARGEST
        if any(isinstance(each, int) and each > most for each in (value if isinstance(value, list) else [value])):
            raise ValueError(f"{path}: expected {name} of at most {most}, got {shown(value)}")
