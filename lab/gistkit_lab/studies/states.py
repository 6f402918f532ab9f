"""Training state on disk as safetensors: trained weights, optimizer state and progress. Nothing is pickled.

A digest in the header covers all of it, so that a damaged file is found and `load_last` takes the one before.
Parameters may be sharded (FSDP2): every process then calls `save` and `load`, and the file holds whole tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gistkit.common.files import read_tensors, write_tensors
from gistkit.compress.files import ADDED_SETTINGS
from gistkit.train.sharding import whole

FORMAT = "gistkit-training-1"
# Tensors of the trained parameters and of the optimizer begin with these.
MODEL, OPTIMIZER = "model.", "optimizer."
NamedParameters = Iterable[tuple[str, nn.Parameter]]


class Damaged(ValueError):
    """A file that holds no whole training state."""


def save(
    path: Path,
    identity: dict[str, Any],
    progress: dict[str, Any],
    parameters: NamedParameters,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Writes the state, replacing `path` in one move: an interrupted write loses nothing.

    Args:
        identity: JSON values that determine the run; `load` refuses a state of another run.
        progress: JSON values that `load` returns.
        parameters: the trained parameters, by name.
        optimizer: of these parameters; None: weights alone, which `restore` reads.
    """
    tensors = {}
    for name, parameter in _numbered(parameters):
        tensors[f"{MODEL}{name}"] = _whole(parameter)
        for key, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
            tensors[f"{OPTIMIZER}{name}.{key}"] = _whole(torch.as_tensor(value))
    header = {"format": FORMAT, "identity": json.dumps(identity, sort_keys=True), "progress": json.dumps(progress)}
    header["digest"] = _digest(header, tensors)
    write_tensors(path, tensors, header)


def load(
    path: Path, identity: dict[str, Any], parameters: NamedParameters, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Restores a saved state and returns its `progress`. What is refused has changed nothing.

    Raises:
        Damaged: if the file is cut short, changed or not a state, or lacks tensors of the optimizer.
        ValueError: if it is of a run with another identity or other parameters.
    """
    content = _read(path)
    expected = json.loads(json.dumps(identity))
    added = {name: value for name, value in ADDED_SETTINGS.items() if name in expected}
    if "past" in added and "tau" not in expected:
        # Only reading on uses it.
        added["past"] = expected["past"]
    saved = added | content.identity
    if saved != expected:
        changed = sorted(key for key in saved.keys() | expected.keys() if saved.get(key) != expected.get(key))
        raise ValueError(
            f"{path}: the saved run differs in {', '.join(changed)}; use the same settings, or another --out folder"
        )
    parameters = _numbered(parameters)
    _check_weights(path, content.tensors, parameters)
    state = _optimizer_state(path, content, parameters)
    names = {parameter: name for name, parameter in parameters}
    groups = optimizer.state_dict()["param_groups"]
    loaded: dict[int, dict[str, Tensor]] = {}
    for group, saved_group in zip(optimizer.param_groups, groups, strict=True):
        for parameter, index in zip(group["params"], saved_group["params"], strict=True):
            values = state[names[parameter]]
            if values:
                loaded[index] = {key: _like(value, parameter) for key, value in values.items()}
    _copy_weights(content.tensors, parameters)
    optimizer.load_state_dict({"state": loaded, "param_groups": groups})
    return content.progress


def load_last(
    states: Sequence[Path],
    identity: dict[str, Any],
    parameters: NamedParameters,
    optimizer: torch.optim.Optimizer,
    *,
    warn: bool = True,
) -> dict[str, Any]:
    """`load` of the last of `states` that is not damaged; those after it are named in a warning.

    Args:
        states: at least one, oldest first.
        warn: False in all processes but one.

    Raises:
        Damaged: if all are.
        ValueError: if one of them is of another run.
    """
    parameters = list(parameters)
    damages: list[Damaged] = []
    for path in reversed(states):
        try:
            progress = load(path, identity, parameters, optimizer)
        except Damaged as damage:
            damages.append(damage)
            continue
        for found in damages if warn else ():
            warnings.warn(f"{found}; the run goes on from {path} instead", stacklevel=2)
        return progress
    more = f"; the {len(damages) - 1} before it are damaged too" if len(damages) > 1 else ""
    raise Damaged(f"{damages[0]}{more}")


def restore(path: Path, parameters: NamedParameters, *, step: int | None = None) -> dict[str, Any]:
    """Copies the trained weights of a saved state into `parameters` and returns its `progress`.

    Args:
        step: number of updates that they have seen; None: any.

    Raises:
        ValueError: if the file is cut short, changed, not a state, of other parameters, or of another step.
    """
    content, parameters = _read(path), _numbered(parameters)
    if step is not None and content.progress.get("step") != step:
        raise ValueError(f"{path}: expected the weights of step {step}, got those of {content.progress.get('step')}")
    _check_weights(path, content.tensors, parameters)
    _copy_weights(content.tensors, parameters)
    return content.progress


class _Content(NamedTuple):
    """A state as it is in its file."""

    identity: dict[str, Any]
    progress: dict[str, Any]
    tensors: dict[str, Tensor]
    has_digest: bool


def _read(path: Path) -> _Content:
    """Reads a state whose digest, if it has one, is right: those of earlier releases have none."""
    try:
        header, tensors = read_tensors(path, "a training state")
    except ValueError as error:
        raise Damaged(str(error)) from error
    if header.get("format") != FORMAT:
        raise Damaged(f"{path}: expected a training state of format {FORMAT}, got {header.get('format')}")
    digest = header.pop("digest", None)
    if digest is not None and digest != _digest(header, tensors):
        raise Damaged(f"{path}: expected the content that was written, got another: its digest differs")
    parts: dict[str, Any] = {}
    for name in ("identity", "progress"):
        try:
            parts[name] = json.loads(header.get(name, ""))
        except ValueError as error:
            raise Damaged(f"{path}: expected {name} in the header as JSON, got {header.get(name)!r:.60}") from error
        if not isinstance(parts[name], dict):
            raise Damaged(f"{path}: expected {name} in the header by name, got {type(parts[name]).__name__}")
    named = {_first(name): tensor for name, tensor in tensors.items()}
    return _Content(**parts, tensors=named, has_digest=digest is not None)


def _first(name: str) -> str:
    """A parameter's name as in the first compressor of a model, whose adapters have the number 0."""
    return re.sub(r"\bgistkit_\d+_", "gistkit_0_", name)


def _numbered(parameters: NamedParameters) -> list[tuple[str, nn.Parameter]]:
    """The parameters by those names: a run goes on in any compressor of the model."""
    return [(_first(name), parameter) for name, parameter in parameters]


def _digest(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a header, and of the names, kinds and bytes of tensors."""
    kinds = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in sorted(tensors.items())}
    found = hashlib.sha256(json.dumps([dict(header), kinds], sort_keys=True).encode())
    for name in kinds:
        found.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _optimizer_state(
    path: Path, content: _Content, parameters: list[tuple[str, nn.Parameter]]
) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by parameter and key; a parameter that never had a gradient has none."""
    shapes = {name: parameter.shape for name, parameter in parameters}
    state: dict[str, dict[str, Tensor]] = {name: {} for name in shapes}
    for full, tensor in content.tensors.items():
        if not full.startswith(OPTIMIZER):
            continue
        name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
        if name not in shapes:
            raise ValueError(f"{path}: expected tensors of trained parameters, got {full}, which belongs to none")
        # Adam counts steps in a scalar; Adafactor has a mean for each row and column.
        if tensor.dim() and not _broadcasts(tensor.shape, shapes[name]):
            raise ValueError(f"{path}: expected {full} with shape {tuple(shapes[name])}, got {tuple(tensor.shape)}")
        state[name][key] = tensor
    if content.has_digest:
        # It holds what the optimizer had.
        return state
    keys = set().union(*state.values())
    if not keys and content.progress.get("step"):
        raise Damaged(f"{path}: expected tensors of the optimizer after {content.progress['step']} steps, got none")
    for name, values in state.items():
        if values and (missing := sorted(keys - values.keys())):
            raise Damaged(f"{path}: expected the tensor {OPTIMIZER}{name}.{missing[0]}, got none")
    return state


def _broadcasts(shape: torch.Size, full: torch.Size) -> bool:
    return len(shape) == len(full) and all(one in (1, size) for one, size in zip(shape, full, strict=True))


def _check_weights(path: Path, tensors: dict[str, Tensor], parameters: list[tuple[str, nn.Parameter]]) -> None:
    expected = {f"{MODEL}{name}": tuple(parameter.shape) for name, parameter in parameters}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith(MODEL)}
    if shapes != expected:
        name = min(key for key in shapes.keys() | expected.keys() if shapes.get(key) != expected.get(key))
        raise ValueError(
            f"{path}: expected {name.removeprefix(MODEL)} with shape {expected.get(name)}, got {shapes.get(name)}; "
            "the state is of another compressor"
        )


def _copy_weights(tensors: dict[str, Tensor], parameters: list[tuple[str, nn.Parameter]]) -> None:
    with torch.no_grad():
        for name, parameter in parameters:
            parameter.copy_(_like(tensors[f"{MODEL}{name}"], parameter))


def _whole(tensor: Tensor) -> Tensor:
    return whole(tensor).detach().cpu().contiguous()


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value`, sharded like `parameter` if it has its shape."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements)  # type: ignore[attr-defined]
