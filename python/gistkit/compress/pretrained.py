"""Compressors on disk: settings as JSON, tensors as safetensors, the adapter as PEFT writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from gistkit import hf
from gistkit.compress.checks import check_count
from gistkit.compress.files import read_tensors, replacing

if TYPE_CHECKING:
    from gistkit.compress.base import Compressor

FORMAT = "gistkit-compressor"
VERSION = 1
_NAMES = {
    "method", "chunk", "memory_tokens", "layout", "losses", "window", "end_token", "joint_head", "adapter", "structure",
    "fingerprint",
}  # fmt: skip
SETTINGS, TENSORS, MODEL = "compressor.json", "compressor.safetensors", "model"


def save(compressor: Compressor, folder: Path) -> None:
    """Writes compressor.json, compressor.safetensors and the adapter, or the model where it trains itself."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: p.detach().cpu().contiguous() for name, p in compressor.named_parameters() if not _of_model(name)}
    with replacing(folder / TENSORS) as path:
        save_file(own, path)
    adapter = compressor.adapter
    if adapter is None:
        compressor.model.save_pretrained(folder / MODEL)
    else:
        adapter.peft.save_pretrained(str(folder), selected_adapters=[adapter.name], save_embedding_layers=False)
    head = compressor.compression_head
    settings = {
        "format": FORMAT,
        "version": VERSION,
        "method": compressor.method,
        "chunk": compressor.chunk,
        "memory_tokens": compressor.memory_tokens,
        "layout": compressor.layout,
        "losses": compressor.loss_weights,
        "window": compressor.window,
        "end_token": compressor.end_token,
        "joint_head": type(head).__name__ == "JointHead",
        "adapter": None if adapter is None else adapter.name,
        "structure": compressor.structure,
        "fingerprint": None if adapter is None else compressor.fingerprint(),
    }
    with replacing(folder / SETTINGS) as path:
        path.write_text(json.dumps(settings, indent=2) + "\n")


def load(cls: type[Compressor], folder: Path, model: PreTrainedModel | None) -> Compressor:
    """See `Compressor.from_pretrained`."""
    settings, given = _settings(folder), model is not None
    method = _method(cls, settings["method"], folder)
    if model is None and settings["adapter"] is not None:
        raise ValueError(f"model: expected the base model of {folder}, which does not hold one, got None")
    if model is None:
        model = _trained(folder)
    # Before anything is changed in it.
    _check_model(model, settings, folder)
    if given and settings["adapter"] is None:
        model.load_state_dict(_trained(folder).state_dict())
    lora = None
    if settings["adapter"] is not None:
        from peft import LoraConfig

        if not (folder / settings["adapter"] / "adapter_config.json").is_file():
            raise FileNotFoundError(f"{folder}: expected the adapter {settings['adapter']} in it, got none there")
        lora = LoraConfig.from_pretrained(str(folder / settings["adapter"]))
        lora.inference_mode = False
    compressor = method(
        model,
        chunk=settings["chunk"],
        ratio=settings["chunk"] / settings["memory_tokens"],
        layout=settings["layout"],
        losses=settings["losses"],
        lora=lora,
        window=settings["window"],
        end_token=settings["end_token"],
        joint_head=settings["joint_head"],
    )
    _load_tensors(compressor, folder, settings["adapter"])
    return compressor


def _trained(folder: Path) -> PreTrainedModel:
    if not (folder / MODEL).is_dir():
        raise FileNotFoundError(f"{folder / MODEL}: expected the trained model of a compressor without LoRA, got none")
    return AutoModelForCausalLM.from_pretrained(folder / MODEL)


def _check_model(model: PreTrainedModel, settings: dict[str, Any], folder: Path) -> None:
    if hf.structure(model) != settings["structure"]:
        raise ValueError(
            f"model: expected the base model of {folder} with structure {settings['structure']}, got one with "
            f"{hf.structure(model)}: another architecture or size"
        )
    if settings["fingerprint"] not in (None, hf.fingerprint(model)):
        raise ValueError(
            f"model: expected the base model of {folder} with fingerprint {settings['fingerprint']}, got one with "
            f"{hf.fingerprint(model)}: other weights"
        )


def _load_tensors(compressor: Compressor, folder: Path, adapter: str | None) -> None:
    tensors = read_tensors(folder / TENSORS, "a file of tensors")[1]
    own = {name: p for name, p in compressor.named_parameters() if not _of_model(name)}
    if tensors.keys() != own.keys():
        raise ValueError(f"{folder / TENSORS}: expected the tensors {sorted(own)}, got {sorted(tensors)}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
    if adapter is not None and compressor.adapter is not None:
        from peft import set_peft_model_state_dict

        weights = read_tensors(folder / adapter / "adapter_model.safetensors", "a file of tensors")[1]
        peft: Any = compressor.adapter.peft
        found: Any = set_peft_model_state_dict(peft, weights, adapter_name=compressor.adapter.name)
        if found.unexpected_keys:
            raise ValueError(f"{folder}: expected an adapter of this model, got weights {found.unexpected_keys[:3]}")


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: expected a folder with {SETTINGS}, got none there")
    try:
        settings = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got a file that cannot be read ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected settings by name, got {type(settings).__name__}")
    if settings.get("format") != FORMAT or settings.get("version") != VERSION:
        raise ValueError(
            f"{path}: expected format {FORMAT}, version {VERSION}, got {settings.get('format')}, "
            f"version {settings.get('version')}"
        )
    missing = sorted(_NAMES - settings.keys())
    if missing:
        raise ValueError(f"{path}: expected the settings {', '.join(sorted(_NAMES))}, got none for {missing[0]}")
    check_count("memory_tokens", settings["memory_tokens"])
    return settings


def _method(cls: type[Compressor], name: str, folder: Path) -> type[Compressor]:
    known = {vars(kind)["method"]: kind for kind in _subclasses(cls) | {cls} if "method" in vars(kind)}
    if name not in known:
        raise ValueError(f"{folder}: expected a compressor of method {' or '.join(sorted(known))}, got {name}")
    return known[name]


def _subclasses(cls: type) -> set[Any]:
    children: list[type] = cls.__subclasses__()
    return {kind for child in children for kind in {child} | _subclasses(child)}


def _of_model(name: str) -> bool:
    return name.startswith("model.")
