"""Compressors on disk, and files that are either complete or absent.

A compressor is a folder: settings as JSON, tensors as safetensors, adapters as PEFT writes them. A file is written
    under
another name and then moved; reading a broken file raises an error that names it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from gistkit import hf
from gistkit.compress.model import first_adapter

if TYPE_CHECKING:
    from peft import LoraConfig

FORMAT = "gistkit-compressor"
VERSION = 2
# Settings that older folders do not have, with the value that their compressors were made with.
ADDED_SETTINGS = {"full_copy": False, "past": "kv", "scorer_norm": True, "soft_prompt": False}
_NAMES = {"method", "settings", "adapters", "structure", "fingerprint"}
SETTINGS, TENSORS, MODEL = "compressor.json", "compressor.safetensors", "model"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which replaces `path` in one move; if writing fails, `path` stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        # On the disk before it replaces a good file.
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_tensors(
    path: Path, content: str, broken: str = "a file that cannot be read"
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors, on the CPU, of a safetensors file; errors say that it should be `content`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is truncated or not a safetensors file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected {content}, got none there")
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path}: expected {content}, got {broken} ({error})") from error


def save_compressor(compressor: Any, folder: Path) -> None:
    """Writes compressor.json, compressor.safetensors, and the adapters or, without LoRA, the model."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().cpu().contiguous() for name, p in compressor.named_parameters() if not _of_model(name)}
    with replacing(folder / TENSORS) as path:
        save_file(tensors, path)
    adapters = compressor.adapters
    if adapters is None:
        if (adapter := first_adapter(compressor.model)) is not None:
            raise ValueError(
                f"model: expected no adapters in a model whose own weights were trained, got one at {adapter}"
            )
        compressor.model.save_pretrained(folder / MODEL)
    else:
        names = list(adapters.names.values())
        adapters.peft.save_pretrained(str(folder), selected_adapters=names, save_embedding_layers=False)
    settings = {
        "format": FORMAT,
        "version": VERSION,
        "method": compressor.method,
        "settings": compressor.settings,
        "adapters": None if adapters is None else adapters.names,
        "structure": compressor.lm.structure,
        "fingerprint": None if adapters is None else compressor.fingerprint(),
    }
    with replacing(folder / SETTINGS) as path:
        path.write_text(json.dumps(settings, indent=2) + "\n")


def load_compressor(cls: type[Any], folder: Path, model: PreTrainedModel | None) -> Any:
    """See `Compressor.from_pretrained`."""
    settings, is_given = _read_settings(folder), model is not None
    method = _method(cls, settings["method"], folder)
    later = {name: value for name, value in ADDED_SETTINGS.items() if name in method.arguments()}
    settings["settings"] = later | settings["settings"]
    if model is None and settings["adapters"] is not None:
        raise ValueError(f"model: expected the base model of {folder}, which does not hold one, got None")
    if model is None:
        model = _load_model(folder)
    _check_names(method, settings, folder)
    # Before anything in the model is changed.
    _check_model(model, settings, folder)
    if is_given and settings["adapters"] is None:
        model.load_state_dict(_load_model(folder).state_dict())
    compressor = method(model, lora=_lora(folder, settings["adapters"]), **settings["settings"])
    _load_tensors(compressor, folder, settings["adapters"])
    return compressor


def _lora(folder: Path, adapters: dict[str, str] | None) -> LoraConfig | None:
    if adapters is None:
        return None
    from peft import LoraConfig

    for name in adapters.values():
        if not (folder / name / "adapter_config.json").is_file():
            raise FileNotFoundError(f"{folder}: expected the adapter {name} in it, got none there")
    # The adapters of all roles have the same configuration.
    config = LoraConfig.from_pretrained(str(folder / next(iter(adapters.values()))))
    config.inference_mode = False
    return config  # type: ignore[return-value]


def _load_model(folder: Path) -> PreTrainedModel:
    if not (folder / MODEL).is_dir():
        raise FileNotFoundError(f"{folder / MODEL}: expected the trained model of a compressor without LoRA, got none")
    reads_images = hasattr(AutoConfig.from_pretrained(folder / MODEL), "vision_config")
    kind: Any = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    loaded: Any = kind.from_pretrained(folder / MODEL, output_loading_info=True)
    model, loading_info = loaded
    if missing := sorted(loading_info["missing_keys"]):
        raise ValueError(f"{folder / MODEL}: expected all weights of the model, got none for {missing[0]}")
    return cast(PreTrainedModel, model)


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


def _load_tensors(compressor: Any, folder: Path, adapters: dict[str, str] | None) -> None:
    tensors = read_tensors(folder / TENSORS, "a file of tensors")[1]
    parameters = {name: p for name, p in compressor.named_parameters() if not _of_model(name)}
    if tensors.keys() != parameters.keys():
        raise ValueError(f"{folder / TENSORS}: expected the tensors {sorted(parameters)}, got {sorted(tensors)}")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise ValueError(
                f"{folder / TENSORS}: expected {name} of shape {tuple(parameter.shape)}, got "
                f"{tuple(tensors[name].shape)}"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    if adapters is None or compressor.adapters is None:
        return
    from peft import set_peft_model_state_dict

    for role, name in compressor.adapters.names.items():
        weights = read_tensors(folder / adapters[role] / "adapter_model.safetensors", "a file of tensors")[1]
        result: Any = set_peft_model_state_dict(compressor.adapters.peft, weights, adapter_name=name)
        if result.unexpected_keys:
            raise ValueError(f"{folder}: expected an adapter of this model, got weights {result.unexpected_keys[:3]}")


def _read_settings(folder: Path) -> dict[str, Any]:
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
    if not isinstance(settings["settings"], dict) or not isinstance(settings["adapters"], dict | None):
        raise ValueError(f"{path}: expected settings and adapters by name, got {settings['settings']!r:.60}")
    return settings


def _check_names(method: type[Any], settings: dict[str, Any], folder: Path) -> None:
    expected = method.arguments() - {"lora"}
    options, adapters = settings["settings"], settings["adapters"]
    mismatches = sorted(expected ^ options.keys())
    if mismatches:
        difference = "one that it does not have" if mismatches[0] in options else "none"
        raise ValueError(
            f"{folder / SETTINGS}: expected the settings {', '.join(sorted(expected))} of {method.method}, "
            f"got {difference} for {mismatches[0]}"
        )
    roles = set(method.roles(options))
    if adapters is not None and (adapters.keys() != roles or not all(isinstance(n, str) for n in adapters.values())):
        raise ValueError(f"{folder / SETTINGS}: expected the names of adapters for {sorted(roles)}, got {adapters}")


def _method(cls: type[Any], name: str, folder: Path) -> type[Any]:
    # A baseline may have the name of a compressor, but writes other files.
    classes = (k for k in _subclasses(cls) | {cls} if "method" in vars(k) and k.save_pretrained is cls.save_pretrained)
    methods = {vars(method)["method"]: method for method in classes}
    if not isinstance(name, str) or name not in methods:
        raise ValueError(f"{folder}: expected a compressor of method {' or '.join(sorted(methods))}, got {name}")
    return methods[name]


def _subclasses(cls: type) -> set[Any]:
    children: list[type] = cls.__subclasses__()
    return {kind for child in children for kind in {child} | _subclasses(child)}


def _of_model(name: str) -> bool:
    return name.startswith("model.")
