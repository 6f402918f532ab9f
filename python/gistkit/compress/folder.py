"""What a compressor's folder claims, checked against its files' headers and the model before anything is built.

A folder may come from anybody: its numbers become sizes, its texts names of files, and PEFT takes some for regular
expressions or names of modules to import.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from gistkit.common.checks import POSITIONS
from gistkit.common.files import Shapes, read_json, tensor_shapes
from gistkit.common.messages import one_line, shown
from gistkit.common.trained import trained
from gistkit.hf.lora import not_honoured, plain_map
from gistkit.hf.vision import FAMILIES

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# In a wheel, in place of weights that another trained compressor has too.
SAME_WEIGHTS = "adapter_model.same.json"
TOKENIZER, ENCODER_TOKENIZER = "tokenizer", "encoder_tokenizer"
Fits = Callable[[Any], bool]
_NAMES = 1024
_BUFFERS = 2**24
# What makes transformers run code, or read files and kernels of other names.
_REFUSED = (
    "auto_map", "quantization_config", "transformers_weights", "attn_implementation", "experts_implementation",
    "model_args", "backbone",
)  # fmt: skip


def inside(folder: Path, *parts: str) -> Path:
    """The path of a folder's file or folder; a ValueError where a link leads out, unless to a hub cache's blobs."""
    path = folder.joinpath(*parts)
    try:
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path}: expected a file of {folder}, got a link that leads nowhere") from error
    blobs = [parent / "blobs" for below, parent in pairwise(root.parents) if below.name == "snapshots"]
    if not any(target.is_relative_to(place) for place in (root, *blobs)):
        raise ValueError(f"{path}: expected a file inside {folder}, got a link to {target}")
    return path


def check_name(path: Path, field: str, name: Any) -> str:
    """`name`, if it can be that of an entry of a folder."""
    plain = isinstance(name, str) and name not in ("", ".", "..") and len(name) <= 200
    if not plain or not name.isprintable() or set(name) & set("/\\"):
        raise ValueError(f"{path}: expected {field} to name a folder beside the file, got {shown(name)}")
    return str(name)


def check_own(path: Path, expected: Mapping[str, tuple[int, ...]], optional: Container[str] = ()) -> set[str]:
    """Refuses a file of tensors in which those of `expected`, whose sizes settings claim, have other shapes.

    Returns the names of the file's tensors, among which those of `optional` may be missing.
    """
    shapes = tensor_shapes(path, "a file of tensors")
    _check_filled(path, shapes)
    for name, shape in expected.items():
        if name not in shapes:
            if name in optional:
                continue
            raise ValueError(f"{path}: expected {name} among its tensors, got {shown(sorted(shapes))}")
        if shapes[name] != shape:
            raise ValueError(f"{path}: expected {name} of shape {shape}, as the settings say, got {shapes[name]}")
    return {*shapes}


def _check_filled(path: Path, shapes: Shapes) -> None:
    # An empty tensor could claim any size.
    for name, shape in shapes.items():
        if not math.prod(shape):
            raise ValueError(f"{path}: expected tensors with values, got {shown(name)} of shape {shape}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def is_whole(value: Any, low: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < POSITIONS


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.-]{1,200}", value) is not None


def _arguments(allow_regex: bool) -> dict[str, tuple[Fits, str]]:
    """For each argument of a LoraConfig that a file may set: what it must satisfy, in code and in words."""
    may = "" if allow_regex else "; regular expressions need allow_regex=True"

    def several(fits: Fits) -> Fits:
        return lambda value: isinstance(value, list) and len(value) <= _NAMES and all(map(fits, value))

    def by_name(fits: Fits) -> Fits:
        return lambda value: (
            value is None
            or (
                isinstance(value, dict)
                and several(lambda name: allow_regex or _is_plain(name))([*value])
                and all(map(fits, value.values()))
            )
        )

    names, wholes = several(_is_plain), several(is_whole)
    flag = lambda value: isinstance(value, bool)  # noqa: E731
    rank = lambda value: is_whole(value, 1)  # noqa: E731
    regex = lambda value: allow_regex and isinstance(value, str)  # noqa: E731
    flags = ("fan_in_fan_out", "use_rslora", "lora_bias", "ensure_weight_tying")
    beginnings = ("gaussian", "orthogonal", "eva")
    return {name: (flag, "true or false") for name in flags} | {
        "r": (rank, f"a whole number >= 1 and < {POSITIONS}"),
        "lora_alpha": (_is_number, "a number"),
        "lora_dropout": (lambda value: _is_number(value) and 0 <= value <= 1, "a number of 0 to 1"),
        "target_modules": (
            lambda value: names(value) or value == "all-linear" or regex(value),
            f"a list of names or all-linear{may}",
        ),
        "exclude_modules": (
            lambda value: value is None or names(value) or (value != "all-linear" and regex(value)),
            f"a list of names{may}",
        ),
        "modules_to_save": (lambda value: value is None or names(value), "a list of names"),
        "init_lora_weights": (
            lambda value: flag(value) or value in beginnings,
            "true, false, gaussian, orthogonal or eva",
        ),
        "task_type": (lambda value: value in (None, "CAUSAL_LM"), "CAUSAL_LM or null"),
        "layers_to_transform": (lambda value: value is None or is_whole(value) or wholes(value), "layers' numbers"),
        "layers_pattern": (
            lambda value: (
                value is None or _is_plain(value) or names(value) or (allow_regex and isinstance(value, str | list))
            ),
            f"a name, or a list of names{may}",
        ),
        "rank_pattern": (by_name(rank), f"ranks by name{may}"),
        "alpha_pattern": (by_name(_is_number), f"numbers by name{may}"),
    }


def read_lora(folder: Path, name: str, allow_regex: bool) -> LoraConfig:
    """The configuration of plain LoRA in an adapter's folder.

    Args:
        folder, name: the adapter's folder lies in the compressor's under this name.
        allow_regex: names of modules may be regular expressions, which can take forever.
    """
    from peft import LoraConfig

    if not (folder / name / ADAPTER_CONFIG).is_file():
        raise FileNotFoundError(f"{folder}: expected the adapter {name} in it, found none")
    path = inside(folder, name, ADAPTER_CONFIG)
    config, arguments = read_json(path, "the configuration of an adapter"), _arguments(allow_regex)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: expected peft_type LORA, got {shown(config.get('peft_type'))}")
    if missing := sorted({"r", "target_modules"} - config.keys()):
        raise ValueError(f"{path}: expected r and target_modules, got none for {missing[0]}")
    for field, value in config.items():
        if field in arguments and not arguments[field][0](value):
            raise ValueError(f"{path}: expected {field} to be {arguments[field][1]}, got {shown(value)}")
    if (other := not_honoured(config)) is not None:
        raise ValueError(f"{path}: expected plain LoRA, got {other}")
    chosen = {field: value for field, value in config.items() if field in arguments}
    if chosen.get("init_lora_weights") == "eva":
        # It needs data to begin with; here all weights come from the file.
        chosen["init_lora_weights"] = True
    try:
        return LoraConfig(**chosen)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: expected consistent fields, got {one_line(error)}") from error


def weights_of(folder: Path, adapter: str) -> Path:
    """The file of an adapter's weights; in a wheel one of gistkit's own compressors may name another that has it."""
    path, named = inside(folder, adapter, ADAPTER_WEIGHTS), inside(folder, adapter, SAME_WEIGHTS)
    if path.exists() or not named.exists():
        return path
    if folder.resolve() not in [own.resolve() for own in trained().values()]:
        raise ValueError(f"{named}: expected {ADAPTER_WEIGHTS} in its place, got a folder that came without gistkit")
    where = read_json(named, "where the adapter's weights are")
    name, other = (check_name(named, field, where.get(field)) for field in ("compressor", "adapter"))
    if name not in trained():
        raise ValueError(f"{named}: expected one of the compressors {', '.join(trained())}, got {shown(name)}")
    found = inside(trained()[name], other, ADAPTER_WEIGHTS)
    if not found.is_file() or sha256(found.read_bytes()).hexdigest() != where.get("sha256"):
        raise ValueError(f"{named}: expected {found} to have the SHA-256 {shown(where.get('sha256'))}, got others")
    return found


def check_adapters(paths: Sequence[Path], configs: Sequence[LoraConfig], model: nn.Module) -> None:
    """Refuses adapters' files whose tensors have other ranks than their configurations, or fit no map of the model."""
    ranks = [_ranks(path, model) for path in paths]
    for path, config, own in zip(paths, configs, ranks, strict=True):
        claimed = {config.r, *(config.rank_pattern or {}).values()}
        # Of a pattern for all modules r itself is not used.
        unused = {config.r} if config.rank_pattern and config.r <= max(own, default=0) else set()
        # A role that looks no tokens up has no adapter of the embedding.
        if not own <= claimed or not claimed - unused <= set().union(*ranks):
            raise ValueError(
                f"{path}: expected weights of the rank {shown(sorted(claimed))} of {ADAPTER_CONFIG}, got "
                f"{shown(sorted(own))}"
            )


def _ranks(path: Path, model: nn.Module) -> set[int]:
    """The ranks of an adapter's tensors, which must fit the model's maps."""
    shapes = tensor_shapes(path, "a file of tensors")
    _check_filled(path, shapes)
    ranks: set[int] = set()
    modules = dict(model.named_modules())
    for name, shape in shapes.items():
        found = re.fullmatch(r"base_model\.model\.(.+)\.lora_(embedding_)?([AB])(\.weight)?", name)
        if found is None:
            continue
        module = modules.get(found[1])
        sizes = None if module is None else _features(plain_map(module))
        if module is None or len(shape) != 2:
            raise ValueError(f"{path}: expected LoRA of the model's maps, got {shown(name)} of shape {shape}")
        rank, size = shape if found[3] == "A" else shape[::-1]
        if sizes is not None and size != sizes[found[3] == "B"]:
            raise ValueError(f"{path}: expected {shown(name)} to fit a map of sizes {sizes}, got shape {shape}")
        ranks.add(rank)
    return ranks


def _features(module: nn.Module) -> tuple[int, int] | None:
    """Sizes of what a map takes and gives; None where they are not known."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    weight = getattr(module, "weight", None)
    # Conv1D of transformers.
    return tuple(weight.shape) if hasattr(module, "nf") and isinstance(weight, torch.Tensor) else None  # type: ignore[return-value]


def load_model(folder: Path) -> PreTrainedModel:
    """The model that a compressor's folder holds, only from safetensors, without code of its own.

    Raises:
        OSError, ValueError: naming the file, before more memory is taken than the file has.
    """
    config_path = inside(folder, "config.json")
    for refused in (ADAPTER_CONFIG, "config.py"):
        if (folder / refused).exists():
            raise ValueError(f"{folder}: expected only a model, got {refused} too")
    raw = read_json(config_path, "the configuration of a model")
    _check_config(config_path, raw)
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: expected the weights of a model as safetensors, found none")
    for file in files:
        shapes |= tensor_shapes(inside(folder, file.name), "weights of a model")
    _check_index(folder)
    if (folder / "generation_config.json").exists():
        read_json(inside(folder, "generation_config.json"), "a JSON object")
    if max(_layers(raw), default=0) > len(shapes):
        raise ValueError(
            f"{config_path}: expected at most {len(shapes)} layers, as its files have tensors, got {max(_layers(raw))}"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        if hasattr(config, "vision_config") and config.model_type not in FAMILIES:
            raise ValueError(
                f"{config_path}: expected a model of text or one of {', '.join(FAMILIES)}, got "
                f"{shown(config.model_type)}"
            )
        # A small language model has 20 modules for 20 tensors.
        with torch.device("meta"), _few_modules(config_path, 1024 + 32 * len(shapes)):
            empty = kind.from_config(config, trust_remote_code=False)
        _check_weights(folder, empty, shapes)
        loaded: Any = kind.from_pretrained(
            folder, config=config, output_loading_info=True, trust_remote_code=False, use_safetensors=True
        )
    except Exception as error:
        # Configurations of any content reach any line of transformers.
        if isinstance(error, ValueError | OSError) and str(error).startswith(str(folder)):
            raise
        raise ValueError(f"{config_path}: expected a model that transformers loads, got {one_line(error)}") from error
    model, loading_info = loaded
    if missing := sorted(loading_info["missing_keys"]):
        raise ValueError(f"{folder}: expected all weights of the model, got none for {missing[0]}")
    return model  # type: ignore[no-any-return]


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuses fields that reach for code or other files, and numbers beyond any size."""
    for field, value in config.items():
        other_library = field == "model_type" and "timm" in str(value)
        if (any(name in field for name in _REFUSED) and value is not None) or other_library:
            raise ValueError(f"{path}: expected no {shown(field)}, got {shown(value)}")
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                _check_config(path, part)
            elif isinstance(part, int) and not -POSITIONS < part < 2 * POSITIONS:
                raise ValueError(f"{path}: expected {shown(field)} below {POSITIONS}, got {shown(part)}")


@contextmanager
def _few_modules(path: Path, most: int) -> Iterator[None]:
    """Inside, no more modules are made than the tensors of a model's files can fill, whatever field asks for them."""
    count = 0

    def counted(module: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise ValueError(f"{path}: expected at most {most} modules, as its files have tensors, got more")

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def _layers(config: Mapping[str, Any]) -> list[int]:
    """The numbers of layers and experts in a configuration, each of which is modules of its own."""
    found = []
    for field, value in config.items():
        if isinstance(value, dict):
            found += _layers(value)
        elif isinstance(value, int) and re.fullmatch(r"(n|num)_(\w+_)?(layers?|experts)|(en|de)coder_layers", field):
            found.append(value)
    return found


def _check_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    files = read_json(inside(folder, index.name), "an index of weights").get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{index}: expected weight_map by name, got {shown(files)}")
    for file in files.values():
        inside(folder, check_name(index, "weight_map", file))


def _check_weights(folder: Path, empty: nn.Module, shapes: Shapes) -> None:
    """Refuses a model, still without memory of its own, that would take much more than the weights of its files."""
    held = sum(map(math.prod, shapes.values()))
    # A file may leave out one of two tied weights.
    for kind, numbers in (("weights", empty.parameters()), ("buffers", empty.buffers())):
        size = sum(tensor.numel() for tensor in numbers)
        if size > 2 * held + (_BUFFERS if kind == "buffers" else 0):
            raise ValueError(
                f"{folder / 'config.json'}: expected {kind} of a model with {held} numbers in its files, got {size}"
            )
