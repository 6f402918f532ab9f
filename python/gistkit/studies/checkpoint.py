"""Training state on disk as safetensors: weights, optimizer moments and the data generator. Nothing is pickled."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

FORMAT = "gistkit-study-1"


def save(
    path: Path,
    identity: dict[str, Any],
    progress: dict[str, Any],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    """Writes the state of what trains, replacing `path` in one move so that an interrupted write loses nothing.

    Args:
        identity: what decides the run; `load` refuses a state of another one.
        progress: JSON values to get back.
    """
    trained = ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    tensors = {f"model.{name}": parameter.detach().contiguous() for name, parameter in trained}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    tensors["generator"] = generator.get_state()
    header = {"format": FORMAT, "identity": json.dumps(identity, sort_keys=True), "progress": json.dumps(progress)}
    partial = path.with_suffix(".partial")
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, partial, metadata=header)
    os.replace(partial, path)


def load(
    path: Path,
    identity: dict[str, Any],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Puts a saved state back and returns its `progress`.

    Raises:
        ValueError: if the file is not such a state, or belongs to a run with another identity.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a training state, got a file that cannot be read ({error})") from error
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a training state of format {FORMAT}, got {header.get('format')}")
    saved = json.loads(header["identity"])
    if saved != json.loads(json.dumps(identity)):
        changed = sorted(key for key in saved.keys() | identity.keys() if saved.get(key) != identity.get(key))
        raise ValueError(
            f"{path}: the saved run differs in {', '.join(changed)}; use the same settings, or another --out folder"
        )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(tensors[f"model.{name}"])
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    generator.set_state(tensors["generator"])
    return json.loads(header["progress"])
