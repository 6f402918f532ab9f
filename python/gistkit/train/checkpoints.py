"""Checkpoint folders: each whole or not there, with the digests of its files; only trained tensors are in them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gistkit.common.files import one_line_errors, read_tensors, sync, write_tensors
from gistkit.train.sharding import whole

WEIGHTS, OPTIMIZER, DIGESTS = "trainable.safetensors", "optimizer.safetensors", "digests.json"
# Where a checkpoint is written, and one goes before it is removed; in it, one that another of its step replaces.
PARTIAL, REPLACED = ".gistkit-checkpoint", "replaced"
NamedParameters = Iterable[tuple[str, nn.Parameter]]


class Damaged(ValueError):
    """A folder that holds no whole checkpoint."""


def path_of(out: Path, step: int) -> Path:
    return out / f"checkpoint-{step}"


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def find(out: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((path for path in out.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)), key=_step)


def remove_partial(out: Path) -> None:
    """Removes what an interrupted write left; a checkpoint whose old one had made room for it gets its place first."""
    partial = out / PARTIAL
    for path in partial.glob("checkpoint-*") if (partial / REPLACED).exists() else ():
        # All of it is on the disk, and a kill came between the two moves.
        if not (out / path.name).exists():
            os.rename(path, out / path.name)
    shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def writing(out: Path, step: int, *, write: bool, wait: Callable[[], None]) -> Iterator[Path]:
    """A folder to write, which becomes the checkpoint of `step` in one move when all of it is on the disk.

    `write` is False in all processes but one, which moves it, and `wait` waits for all.
    """
    partial = path_of(out / PARTIAL, step)
    if write:
        remove_partial(out)
        partial.mkdir(parents=True)
    wait()
    try:
        with one_line_errors(path_of(out, step)):
            yield partial
        wait()
        if write:
            digests = {file.name: _digest(file) for file in sorted(partial.iterdir()) if file.is_file()}
            (partial / DIGESTS).write_text(json.dumps(digests))
            for place in (*(each for each in partial.rglob("*") if each.is_file()), partial):
                sync(place)
            place = path_of(out, step)
            if place.exists():
                os.rename(place, out / PARTIAL / REPLACED)
            os.rename(partial, place)
            sync(out)
    finally:
        if write:
            remove_partial(out)
    wait()


def rotate(out: Path, keep: int, step: int, best: str | None) -> None:
    """Removes all but the last `keep` checkpoints up to `step`, and the best one.

    Those of later steps are of a run before this one, and older than all of its own.
    """
    for path in sorted(find(out), key=lambda path: _step(path) <= step)[:-keep]:
        if str(path) != best:
            _remove(path)


def _remove(path: Path) -> None:
    """Removes a checkpoint, of which nothing is ever half there."""
    if path.exists():
        gone = path.parent / PARTIAL
        shutil.rmtree(gone, ignore_errors=True)
        os.rename(path, gone)
        remove_partial(path.parent)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def checked(path: Path) -> Path:
    """A checkpoint that is as it was written, or else `Damaged`."""
    try:
        digests = json.loads((path / DIGESTS).read_text())
        changed = [name for name, digest in digests.items() if _digest(path / name) != digest]
    except (OSError, ValueError, AttributeError) as error:
        raise Damaged(f"{path}: expected a whole checkpoint, got a folder that cannot be read ({error})") from error
    if changed:
        raise Damaged(f"{path}: expected the content that was written, got another: the digest of {changed[0]} differs")
    return path


def last_whole(out: Path, *, remove: bool) -> Path:
    """The last checkpoint of a run that is not damaged; those after it are named in a warning, and removed.

    `remove` is False in all processes but one.
    """
    damages: list[Damaged] = []
    states = find(out)
    for path in reversed(states):
        try:
            checked(path)
        except Damaged as damage:
            damages.append(damage)
            continue
        for found, bad in zip(damages, reversed(states), strict=False) if remove else ():
            warnings.warn(f"{found}; the run goes on from {path} instead", stacklevel=2)
            _remove(bad)
        return path
    if not damages:
        raise Damaged(f"{out}: expected a checkpoint, got none")
    more = f"; the {len(damages) - 1} before it are damaged too" if len(damages) > 1 else ""
    raise Damaged(f"{damages[0]}{more}")


def save_weights(folder: Path, parameters: NamedParameters, header: Mapping[str, Any], *, write: bool) -> None:
    """Writes the trained tensors; `header` holds JSON values, `write` is False in all processes but one."""
    tensors = {name: _whole(parameter) for name, parameter in _numbered(parameters)}
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / WEIGHTS, tensors, {"training": json.dumps(header)})


def restore(path: str | Path, parameters: NamedParameters, identity: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Copies the trained weights of a checkpoint into `parameters` and returns its header.

    Args:
        identity: of the run that continues; None: any.

    Raises:
        ValueError: if the file is cut short, not a checkpoint's, of another run or of other parameters.
    """
    header, tensors = read_tensors(Path(path) / WEIGHTS, "the weights of a checkpoint")
    values: dict[str, Any] = json.loads(header["training"])
    if identity is not None:
        _check_identity(Path(path), values["identity"], json.loads(json.dumps(identity)))
    parameters, named = _numbered(parameters), {_first(name): tensor for name, tensor in tensors.items()}
    expected = {name: tuple(parameter.shape) for name, parameter in parameters}
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    if shapes != expected:
        name = min(key for key in shapes.keys() | expected.keys() if shapes.get(key) != expected.get(key))
        raise ValueError(
            f"{path}: expected {name} with shape {expected.get(name)}, got {shapes.get(name)}; "
            "the checkpoint is of another compressor"
        )
    with torch.no_grad():
        for name, parameter in parameters:
            parameter.copy_(_like(named[name], parameter))
    return values


def _check_identity(path: Path, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    changed = sorted(key for key in saved.keys() | expected.keys() if saved.get(key) != expected.get(key))
    if changed:
        raise ValueError(
            f"{path}: the saved run differs in {', '.join(changed)}; use the same settings, or another --out folder"
        )


def save_optimizer(folder: Path, parameters: NamedParameters, state: Mapping[Any, Any], *, write: bool) -> None:
    """Writes an optimizer's tensors by parameter and key, whole where they are sharded."""
    tensors = {
        f"{name}.{key}": _whole(torch.as_tensor(value))
        for name, parameter in _numbered(parameters)
        for key, value in state.get(parameter, {}).items()
    }
    if write:
        write_tensors(folder / OPTIMIZER, tensors)


def load_optimizer(folder: Path, parameters: NamedParameters, optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer what `save_optimizer` wrote."""
    _, tensors = read_tensors(folder / OPTIMIZER, "the optimizer of a checkpoint")
    state: dict[str, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition(".")
        state.setdefault(_first(name), {})[key] = tensor
    names = {parameter: name for name, parameter in _numbered(parameters)}
    groups = optimizer.state_dict()["param_groups"]
    loaded: dict[int, dict[str, Tensor]] = {}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for parameter, index in zip(group["params"], saved["params"], strict=True):
            if values := state.get(names[parameter]):
                loaded[index] = {key: _like(value, parameter) for key, value in values.items()}
    optimizer.load_state_dict({"state": loaded, "param_groups": groups})


def _first(name: str) -> str:
    """A parameter's name as in the first compressor of a model, whose adapters have the number 0."""
    return re.sub(r"\bgistkit_\d+_", "gistkit_0_", name)


def _numbered(parameters: NamedParameters) -> list[tuple[str, nn.Parameter]]:
    """The parameters by those names: a run goes on in any compressor of the model."""
    return [(_first(name), parameter) for name, parameter in parameters]


def _whole(tensor: Tensor) -> Tensor:
    return whole(tensor).detach().cpu().contiguous()


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """`value`, sharded like `parameter` if it has its shape."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements)  # type: ignore[attr-defined]
