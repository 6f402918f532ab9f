"""Training state on disk as safetensors: trained weights, optimizer state and progress. Nothing is pickled.

Parameters may be sharded (FSDP2): every process then calls `save` and `load`, and the file holds whole tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gistkit._files import read_tensors, remove_partials, write_tensors
from gistkit.compress.files import ADDED_SETTINGS

FORMAT = "gistkit-training-1"
NamedParameters = Iterable[tuple[str, nn.Parameter]]


def path_of(folder: Path, step: int) -> Path:
    """The file of the state after `step` updates."""
    return folder / f"step-{step:08d}.safetensors"


def find(folder: Path) -> list[Path]:
    """The states in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*.safetensors") if re.fullmatch(r"step-\d{8,}", path.stem))


def prune(folder: Path, keep: int) -> None:
    """Removes all but the last `keep` states, and the files of interrupted writes."""
    # Earlier releases wrote beside the state, under a name of its own.
    for path in [*find(folder)[:-keep], *folder.glob("step-*.partial")]:
        path.unlink(missing_ok=True)
    remove_partials(folder)


def save(
    path: Path,
    identity: dict[str, Any],
    progress: dict[str, Any],
    parameters: NamedParameters,
    optimizer: torch.optim.Optimizer,
    *,
    write: bool = True,
) -> None:
    """Writes the state, replacing `path` in one move: an interrupted write loses nothing.

    Args:
        identity: JSON values that determine the run; `load` refuses a state of another run.
        progress: JSON values that `load` returns.
        parameters: the trained parameters, by name.
        optimizer: of these parameters.
        write: False in all processes but one; the others take part in gathering sharded tensors.
    """
    tensors = {}
    for name, parameter in parameters:
        tensors[f"model.{name}"] = _whole(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = _whole(torch.as_tensor(value))
    if not write:
        return
    header = {"format": FORMAT, "identity": json.dumps(identity, sort_keys=True), "progress": json.dumps(progress)}
    write_tensors(path, tensors, header)


def load(
    path: Path, identity: dict[str, Any], parameters: NamedParameters, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Restores a saved state and returns its `progress`.

    Raises:
        ValueError: if the file is truncated, not a state, or of a run with another identity or other parameters.
    """
    header, tensors = _read(path)
    saved, expected = json.loads(header["identity"]), json.loads(json.dumps(identity))
    added = {name: value for name, value in ADDED_SETTINGS.items() if name in expected}
    if "past" in added and "tau" not in expected:
        # Only reading on uses it.
        added["past"] = expected["past"]
    saved = added | saved
    if saved != expected:
        changed = sorted(key for key in saved.keys() | expected.keys() if saved.get(key) != expected.get(key))
        raise ValueError(
            f"{path}: the saved run differs in {', '.join(changed)}; use the same settings, or another --out folder"
        )
    parameters = list(parameters)
    _copy_weights(path, tensors, parameters)
    state: dict[str, dict[str, Tensor]] = {name: {} for name, _ in parameters}
    for full, tensor in tensors.items():
        if full.startswith("optimizer."):
            name, _, key = full.removeprefix("optimizer.").rpartition(".")
            state[name][key] = tensor
    names = {parameter: name for name, parameter in parameters}
    groups = optimizer.state_dict()["param_groups"]
    loaded: dict[int, dict[str, Tensor]] = {}
    for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
        for parameter, index in zip(group["params"], saved_group["params"], strict=True):
            values = state[names[parameter]]
            if values:
                loaded[index] = {key: _like(value, parameter) for key, value in values.items()}
    optimizer.load_state_dict({"state": loaded, "param_groups": groups})
    return json.loads(header["progress"])


def restore(path: Path, parameters: NamedParameters) -> dict[str, Any]:
    """Copies the trained weights of a saved state into `parameters` and returns its `progress`.

    Raises:
        ValueError: if the file is truncated, not a state, or of other parameters.
    """
    header, tensors = _read(path)
    _copy_weights(path, tensors, list(parameters))
    return json.loads(header["progress"])


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    header, tensors = read_tensors(path, "a training state")
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a training state of format {FORMAT}, got {header.get('format')}")
    return header, tensors


def _copy_weights(path: Path, tensors: dict[str, Tensor], parameters: list[tuple[str, nn.Parameter]]) -> None:
    expected = {f"model.{name}": tuple(parameter.shape) for name, parameter in parameters}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith("model.")}
    if shapes != expected:
        name = min(key for key in shapes.keys() | expected.keys() if shapes.get(key) != expected.get(key))
        raise ValueError(
            f"{path}: expected {name.removeprefix('model.')} with shape {expected.get(name)}, got {shapes.get(name)}; "
            "the state is of another compressor"
        )
    with torch.no_grad():
        for name, parameter in parameters:
            parameter.copy_(_like(tensors[f"model.{name}"], parameter))


def _whole(tensor: Tensor) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).detach().cpu().contiguous()


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value`, sharded like `parameter` if it has its shape."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements)  # type: ignore[attr-defined]
