"""Compressors on disk: a folder with settings as JSON, tensors as safetensors, and adapters as PEFT writes them.

Reading checks all that a folder claims before anything is built or changed (`gistkit.compress.folder`); a broken one
raises a ValueError or an OSError that names the file.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from huggingface_hub import HfApi, ModelCardData, snapshot_download
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gistkit import hf
from gistkit.common.files import read_json, read_tensors, replacing_files, write_tensors, write_text
from gistkit.common.hub import hub_or_cache, loading
from gistkit.common.languages import is_language
from gistkit.common.messages import one_line, shown
from gistkit.common.trained import find
from gistkit.compress.adapters import first_adapter
from gistkit.compress.config import OF_ADAPTERS, REGISTRY, Config
from gistkit.compress.folder import (
    ADAPTER_CONFIG,
    ENCODER_TOKENIZER,
    TOKENIZER,
    Fits,
    check_adapters,
    check_name,
    check_own,
    inside,
    is_whole,
    load_model,
    read_lora,
    weights_of,
)
from gistkit.compress.losses import HEAD
from gistkit.compress.model import of_models
from gistkit.hf import smollm2
from gistkit.hf.lora import unchanged_on_error

if TYPE_CHECKING:
    from peft import LoraConfig

Kind = TypeVar("Kind")

FORMAT = "gistkit-compressor"
VERSION = 2
_NAMES = {"method", "settings", "adapters", "structure", "fingerprint"}
# What older folders lack, and what it is there.
_ADDED = {"trained_length": None, "trained_parts": 1, "languages": None, "encoder": None}
_are_languages = lambda values: 0 < len(values) < 100 and all(map(is_language, values))  # noqa: E731
# What settings must be, in code and in words.
_RULES: dict[str, tuple[Fits, str]] = {
    "settings": (lambda value: isinstance(value, dict), "arguments by name"),
    "adapters": (lambda value: isinstance(value, dict | None), "folders by role, or null"),
    "encoder": (
        lambda value: value is None or (isinstance(value, dict) and {"structure", "fingerprint"} <= value.keys()),
        "the structure and the fingerprint of a model, or null",
    ),
    "structure": (lambda value: isinstance(value, str), "a text"),
    "fingerprint": (lambda value: isinstance(value, str | None), "a text"),
    "shares_tokens": (lambda value: isinstance(value, bool | None), "true or false"),
    "trained_length": (lambda value: value is None or is_whole(value, 1), "a whole number >= 1"),
    "trained_parts": (lambda value: is_whole(value, 1), "a whole number >= 1"),
    "languages": (
        lambda value: value is None or (isinstance(value, list) and _are_languages(value)),
        'a list such as ["en"]',
    ),
}
SETTINGS, TENSORS, MODEL = "compressor.json", "compressor.safetensors", "model"
CARD = "README.md"
# "owner/name" of the hub.
_REPOSITORY = r"\w[\w.-]*/\w[\w.-]*"
# What a repository may hold beside, such as other weights, is not fetched.
_FETCHED = ["*.json", "*.safetensors", "*.md", "*.jinja"]


def save_pretrained(compressor: Any, folder: str | Path, fingerprints: tuple[str, str] | None = None) -> None:
    """Saves what training changed: safetensors, PEFT adapters, compressor.json with the settings, and a card.

    Without adapters the model is saved too, unless its weights are those that the compressor was made around: then, as
    with adapters, loading takes the base model.

    An existing card is kept. The tokenizer is saved too if one is set or was used. Each adapter is a folder that
    `peft.PeftModel.from_pretrained` loads; of the compressors in a wheel, which share files, not each is. The model and
    adapters of a compressor that was in the folder go, where they are not replaced. If writing fails, the folder stays
    as it was; if it is interrupted while files move there, the folder is refused until it is saved again, and the older
    model and adapters stay beside what that saves.

    Args:
        fingerprints: `base_fingerprints`, of a model whose weights are sharded; None: computed.
    """
    folder = Path(folder)
    compressor.check_head()
    size = sum(parameter.nbytes for _, parameter in compressor.trainable())
    with replacing_files(folder, size, last=SETTINGS, stale=_models_in(folder)) as partial:
        _write(compressor, partial, fingerprints)
        write_text(partial / CARD, _own_card(folder) or model_card(compressor, folder.name))


def from_pretrained(
    cls: type[Kind],
    folder: str | Path,
    model: PreTrainedModel | None = None,
    *,
    tokenizer: Any = None,
    encoder: PreTrainedModel | str | None = None,
    allow_regex: bool = False,
    **options: Any,
) -> Kind:
    """Loads a compressor that `save_pretrained` saved, around its base model.

    Folders from strangers are safe to load: none of their code runs, nothing outside the folder is opened but an
    encoder of the hub that it names, and sizes are checked against the files and the model before memory is allocated.
    Of gistkit's own compressors some share the file of an adapter in a wheel.

    Args:
        folder: a folder of `save_pretrained`, the name of a compressor that comes with gistkit (see `trained`), or
            "owner/name" on the Hugging Face hub.
        model: the base model; None if the folder holds it (one that trained, without LoRA).
        tokenizer: see `gistkit.compress.texts.tokenizer`; None: as it says.
        encoder: that of a method with a second model, or its name on the hub or folder; None: the folder holds it, or
            has its name on the hub.
        allow_regex: allow adapters that select modules by regular expressions, as your own `LoraConfig` may; a hostile
            expression never ends.
        options: for a repository, what `huggingface_hub.snapshot_download` takes, such as revision and token.

    Raises:
        TypeError: for options with a local folder.
        FileNotFoundError, ValueError: if the folder has no compressor, or one of another model, method or version. The
            model is then unchanged.
    """
    home = find(folder)
    if not home.is_dir():
        home = download(folder, **options) or home
    elif options:
        raise TypeError(f"{min(options)}: expected no such argument for {home}, which is no repository of the hub")
    settings = _read_settings(home)
    kind, adapters, beside = _config_class(cls, settings["method"], home), settings["adapters"], settings["encoder"]
    holds_model = _holds_model(settings)
    if model is None and (not holds_model or beside is not None):
        raise ValueError(f"model: expected the base model of {home}, which does not hold one, got None")
    if encoder is not None and beside is None:
        raise TypeError(f"encoder: expected none for {home}, which has no second model, got {encoder!r:.80}")
    config = _config(kind, settings, home)
    # One that settings name only in passing would be opened without being looked at.
    if (named := getattr(config, "encoder", None)) is not None and beside is None:
        raise ValueError(f"{home / SETTINGS}: expected the identity of the encoder {shown(named)}, got none")
    own = _load_model(home) if holds_model else None
    model = own if model is None else model
    _check_model("model", cast(PreTrainedModel, model), settings, home)
    trained: Any = model
    if beside is not None:
        trained = _found_encoder(home, config, own, encoder, model)
        # Weights that the folder has itself need no fingerprint.
        _check_model("encoder", trained, beside if own is None else beside | {"fingerprint": None}, home)
        config = replace(config, **{"encoder": trained})
    weights = None if own is None or own is trained else _fitting(home, own, trained)
    embed = cast(Any, model).get_input_embeddings().weight
    with _settings_errors(home):
        shapes = _shapes(config, *embed.shape)
    # Training may have gone on without the loss that the head is of.
    names = check_own(inside(home, TENSORS), shapes, () if "compression" in config.losses else (HEAD,))
    config = replace(config, lora=None if adapters is None else _lora(home, adapters, trained, allow_regex))
    # All checks come before anything in the model is changed.
    with unchanged_on_error(cast(Any, model)), unchanged_on_error(trained):
        with _settings_errors(home, ("model:", "encoder:")):
            compressor: Any = kind.compressor(cast(Any, model), config)
            if HEAD in names & shapes.keys() and compressor.compression_head is None:
                compressor.add_compression_head()
        _load_tensors(compressor, home, adapters)
    if weights is not None:
        trained.load_state_dict(weights)
    if beside is not None:
        compressor.shares_tokens = beside.get("shares_tokens")
        compressor.named_by_folder = encoder is None
    compressor.trained_length, compressor.trained_parts = settings["trained_length"], settings["trained_parts"]
    compressor.languages = None if settings["languages"] is None else tuple(settings["languages"])
    if own is not None:
        # Nothing else has these weights.
        compressor.identity.forget()
    if settings["fingerprint"] is not None:
        compressor.identity.known_as(settings["fingerprint"])
    compressor._home, compressor._tokenizer = home, tokenizer
    return cast(Kind, compressor)


def base_fingerprints(compressor: Any) -> tuple[str, str]:
    """The fingerprint of a compressor's base model, and that of a copy of it in float16."""
    return compressor.fingerprint(), hf.fingerprint(compressor.model, torch.float16)


def _holds_model(settings: Mapping[str, Any]) -> bool:
    """Whether a folder with these settings has a model: without adapters, one that has trained, or an encoder."""
    return settings["adapters"] is None and (settings["encoder"] is not None or settings["fingerprint"] is None)


def _models_in(folder: Path) -> list[Path]:
    """The files of the model or the adapters that an earlier save wrote in a folder, by its settings."""
    try:
        settings = _read_settings(folder)
        names = [MODEL] if _holds_model(settings) else [*(settings["adapters"] or {}).values()]
        places = [inside(folder, check_name(folder / SETTINGS, "adapters", name)) for name in names]
    except (OSError, ValueError):
        return []
    return [path for place in places for pattern in _FETCHED for path in place.glob(pattern) if path.is_file()]


def _write(compressor: Any, folder: Path, fingerprints: tuple[str, str] | None) -> None:
    write_tensors(folder / TENSORS, {name: p for name, p in compressor.named_parameters() if not of_models(name)})
    adapters, trained = compressor.adapters, compressor.encoder_lm.model
    has_encoder, needs_base = trained is not compressor.model, compressor.needs_base
    if adapters is None:
        if has_encoder or not needs_base:
            if (adapter := first_adapter(trained)) is not None:
                raise ValueError(
                    f"{'encoder' if has_encoder else 'model'}: expected no adapters in a model with its own weights "
                    f"trained, got one at {adapter}"
                )
            trained.save_pretrained(folder / MODEL)
    else:
        names = list(adapters.names.values())
        adapters.peft.save_pretrained(str(folder), selected_adapters=names, save_embedding_layers=False)
        for name in names:
            _without_place(folder / name / ADAPTER_CONFIG, trained)
    _write_tokenizer(folder / TOKENIZER, compressor._tokenizer)
    if has_encoder:
        _write_tokenizer(folder / ENCODER_TOKENIZER, compressor._encoder_tokenizer)
    own, of_float16 = fingerprints or base_fingerprints(compressor) if needs_base else (None, None)
    settings = {
        "format": FORMAT,
        "version": VERSION,
        "method": compressor.method,
        "settings": compressor.settings,
        "adapters": None if adapters is None else adapters.names,
        "structure": compressor.lm.structure,
        "fingerprint": own,
        "float16": of_float16,
        "model": hf.identity(compressor.model),
        "trained_length": compressor.trained_length,
        "trained_parts": compressor.trained_parts,
        "languages": compressor.languages,
        "encoder": _encoder_of(compressor) if has_encoder else None,
    }
    write_text(folder / SETTINGS, json.dumps(settings, indent=2) + "\n")


def _encoder_of(compressor: Any) -> dict[str, Any]:
    """What tells the encoder beside the model from others; without adapters it is in the folder itself."""
    encoder, is_here = compressor.encoder, compressor.adapters is None
    return {
        "structure": hf.structure(encoder),
        "fingerprint": None if is_here else hf.fingerprint(encoder),
        "float16": None if is_here else hf.fingerprint(encoder, torch.float16),
        "model": hf.identity(encoder),
        "shares_tokens": compressor.shares_tokens,
    }


def _write_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Writes one that is set or was used, None where there is none."""
    if tokenizer is None:
        return
    tokenizer.save_pretrained(str(folder))
    if not (folder / "tokenizer.json").is_file():
        shutil.rmtree(folder)
        warnings.warn(
            f"{folder.name}: expected one with a tokenizer.json, the only file read from such a folder, got "
            f"{type(tokenizer).__name__}: it is not saved; set compressor.{folder.name} after loading",
            stacklevel=5,
        )


def _without_place(path: Path, model: Any) -> None:
    """Puts the base model's name into an adapter's configuration, where PEFT writes its place on this disk."""
    settings = json.loads(path.read_text())
    settings["base_model_name_or_path"] = hf.identity(model)["name"]
    write_text(path, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def download(name: str | Path, **options: Any) -> Path | None:
    """The folder of a repository of the hub, "owner/name", fetched if need be; None if it is no such name.

    Args:
        options: as `huggingface_hub.snapshot_download` takes them, such as revision, token and cache_dir.

    Raises:
        FileNotFoundError: if there is no such repository, or no way to it.
    """
    if not re.fullmatch(_REPOSITORY, str(name)):
        return None
    try:
        # Another endpoint may answer where the hub does not.
        asks = not (options.get("local_files_only") or options.get("endpoint"))
        with hub_or_cache(str(name)) if asks else nullcontext():
            return Path(snapshot_download(str(name), **{"allow_patterns": _FETCHED, **options}))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name}: expected a folder with {SETTINGS}, or such a repository of the hub, got neither: "
            f"{one_line(error)}"
        ) from error


def push_to_hub(compressor: Any, name: str, *, private: bool | None = None, **options: Any) -> str:
    """Uploads what `save_pretrained` saves to the Hugging Face hub, with a model card; returns the URL.

    The card is the README.md of the folder that the compressor was loaded from, or a minimal one.

    Args:
        name: "owner/name" of the repository, which is created if needed.
        private: whether a new repository is private.
        options: token, and what `huggingface_hub.HfApi.upload_folder` takes, such as commit_message and revision.
    """
    home: Path | None = compressor._home
    with TemporaryDirectory() as folder:
        compressor.save_pretrained(folder)
        card = None if home is None else _own_card(home)
        if card is None or home is None:
            card = model_card(compressor, name)
        else:
            # What a reader copies has to name the repository, not the folder.
            card = card.replace(f"# {home.name}\n", f"# {name}\n").replace(f'("{home.name}"', f'("{name}"')
        write_text(Path(folder) / CARD, card)
        api = HfApi(token=options.pop("token", None))
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder, **options)
    return str(repository)


def _own_card(folder: Path) -> str | None:
    """The card that somebody wrote into a folder; None where there is none, or PEFT's form with nothing filled in."""
    card = folder / CARD
    text = card.read_text("utf-8") if card.is_file() else ""
    return None if not text or "[More Information Needed]" in text else text


def model_card(compressor: Any, name: str) -> str:
    """What there is to say of any compressor, in Markdown with the hub's header."""
    base = hf.identity(compressor.model)["name"] or ""
    # Anything else is a place on somebody's disk.
    on_hub = base if re.fullmatch(_REPOSITORY, base) else None
    header = ModelCardData(
        base_model=on_hub,
        library_name="gistkit",
        tags=["context-compression", compressor.method],
    ).to_yaml()
    model = ", model" if compressor.needs_base else ""
    load = f'model = AutoModelForCausalLM.from_pretrained("{base}")\n' if model else ""
    return f"""---
{header}
---

# {name}

A context compressor made with gistkit: {compressor.title}, around {base or "a model of its own"}.

```python
from gistkit.compress import Compressor
from transformers import AutoModelForCausalLM

{load}compressor = Compressor.from_pretrained("{name}"{model})
memory = compressor.compress(text)
print(compressor.ask(memory, "Who wrote it?"))
```
"""


@contextmanager
def _settings_errors(folder: Path, others: tuple[str, ...] = ()) -> Iterator[None]:
    """Turns what settings of any content make a method raise into a ValueError that names their file.

    Args:
        others: how messages on what is not the folder's begin, such as the model's; they stay as they are.
    """
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
        if str(error).startswith(others):
            raise
        raise ValueError(f"{folder / SETTINGS}: expected settings of a compressor, got {one_line(error)}") from error


def _lora(folder: Path, adapters: dict[str, str], model: Any, allow_regex: bool) -> LoraConfig:
    configs = {name: read_lora(folder, name, allow_regex) for name in adapters.values()}
    check_adapters([weights_of(folder, name) for name in configs], [*configs.values()], model)
    # The adapters of all roles have the same configuration.
    config = next(iter(configs.values()))
    config.inference_mode = False
    return config


def _load_model(folder: Path) -> PreTrainedModel:
    if not (folder / MODEL).is_dir():
        raise FileNotFoundError(f"{folder / MODEL}: expected the trained model of a compressor without LoRA, got none")
    return load_model(inside(folder, MODEL))


def _fitting(folder: Path, own: PreTrainedModel, model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a folder's model, which must have the names and shapes of those of `model`."""
    weights, expected = own.state_dict(), model.state_dict()
    shapes = [{name: tuple(tensor.shape) for name, tensor in part.items()} for part in (weights, expected)]
    if shapes[0] != shapes[1]:
        name = min(key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key))
        raise ValueError(
            f"{folder / MODEL}: expected {name} of shape {shapes[1].get(name)}, as in model, got {shapes[0].get(name)}"
        )
    return weights


def _found_encoder(
    folder: Path, config: Any, own: PreTrainedModel | None, given: PreTrainedModel | str | None, model: Any
) -> PreTrainedModel:
    """The encoder beside the model: the given one, the trained one of the folder, or one of the hub by its name."""
    if given is not None and not isinstance(given, str):
        if own is not None and {*map(id, given.parameters())} & {*map(id, model.parameters())}:
            raise ValueError(
                f"encoder: expected a model for the weights of {folder / MODEL} that shares none with the reader, got "
                "one that does"
            )
        return given
    name = config.encoder
    if own is not None:
        if on_hub(name) or name == smollm2.NAME:
            # Its name is not where it lies.
            own.name_or_path = name
        return own.to(model.device)
    if given is not None or name == smollm2.NAME:
        return load_encoder(given or name, model)
    if not on_hub(name):
        raise ValueError(
            f"encoder: {folder} was saved with {shown(name)}, which is not on the hub; pass the model, or its folder, "
            "as encoder"
        )
    # A stranger chose it, so it is read as a model in the folder is.
    try:
        with hub_or_cache(name):
            found = load_model(Path(snapshot_download(name, allow_patterns=_FETCHED)))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"encoder: {shown(name)}, the encoder of {folder}, cannot be loaded from the hub: {one_line(error)}"
        ) from error
    found.name_or_path = name
    return found.to(model.device, model.dtype)


def load_encoder(name: str, like: PreTrainedModel) -> PreTrainedModel:
    """A model by its name on the hub or its folder, on the device and in the dtype of another, from safetensors."""
    if name in ("smollm2", smollm2.NAME):
        model: Any = smollm2.load_smollm2(like.dtype)[0]
        return model.to(like.device)  # type: ignore[no-any-return]
    with loading("encoder", "a decoder model that transformers can load", name) as place:
        if like.device.type == "meta":
            # A plan of a training needs no weights.
            config = AutoConfig.from_pretrained(place)
            return AutoModelForCausalLM.from_config(config, dtype=like.dtype)  # type: ignore[no-any-return]
        model = AutoModelForCausalLM.from_pretrained(place, dtype=like.dtype, use_safetensors=True)
        return model.to(like.device)  # type: ignore[no-any-return]


def on_hub(name: Any) -> bool:
    """Whether a name, which may come from anybody, is one of the hub alone."""
    return isinstance(name, str) and re.fullmatch(_REPOSITORY, name) is not None and not Path(name).exists()


def _check_model(kind: str, model: PreTrainedModel, settings: Mapping[str, Any], folder: Path) -> None:
    made_with = settings.get("model") if isinstance(settings.get("model"), dict) else None
    reason = ""
    if hf.structure(model) != settings["structure"]:
        reason = "another architecture or size"
    elif settings["fingerprint"] is not None and not hf.is_of(model, settings["fingerprint"], settings.get("float16")):
        reason = "other weights"
    if reason:
        expected, got = hf.differing(made_with, hf.identity(model))
        whose = "base model" if kind == "model" else kind
        raise ValueError(f"{kind}: expected the {whose} of {folder}, {expected}, got {got}: {reason}")


def _load_tensors(compressor: Any, folder: Path, adapters: dict[str, str] | None) -> None:
    parameters = {name: p for name, p in compressor.named_parameters() if not of_models(name)}
    tensors = _read_like(inside(folder, TENSORS), parameters)
    weights = {}
    if adapters is not None and compressor.adapters is not None:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        peft = compressor.adapters.peft
        for role, name in compressor.adapters.names.items():
            own = get_peft_model_state_dict(peft, adapter_name=name, save_embedding_layers=False)
            weights[name] = _read_like(weights_of(folder, adapters[role]), own)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    for name, values in weights.items():
        set_peft_model_state_dict(peft, values, adapter_name=name)


def _read_like(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file that has those of `expected`, by name and shape."""
    tensors = read_tensors(path, "a file of tensors")[1]
    if tensors.keys() != expected.keys():
        name = min(tensors.keys() ^ expected.keys())
        difference = "one that it does not have" if name in tensors else "none"
        raise ValueError(f"{path}: expected the tensors of its compressor, got {difference} for {shown(name)}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{path}: expected {name} of shape {tuple(expected[name].shape)}, got {tuple(tensor.shape)}"
            )
    return tensors


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: expected a folder with {SETTINGS}, found none")
    settings = read_json(inside(folder, SETTINGS), "settings by name")
    if settings.get("format") != FORMAT or settings.get("version") != VERSION:
        raise ValueError(
            f"{path}: expected format {FORMAT}, version {VERSION}, got {shown(settings.get('format'))}, "
            f"version {shown(settings.get('version'))}"
        )
    if missing := sorted(_NAMES - settings.keys()):
        raise ValueError(f"{path}: expected the settings {', '.join(sorted(_NAMES))}, got none for {missing[0]}")
    settings = _ADDED | settings
    # An encoder's are a part of them.
    for values in (settings, settings["encoder"]):
        for name, (fits, expected) in _RULES.items():
            if values is not None and name in values and not fits(values[name]):
                raise ValueError(f"{path}: expected {name} to be {expected}, got {shown(values[name])}")
    return settings


def _config(kind: type[Config], settings: dict[str, Any], folder: Path) -> Config:
    """The config of a compressor without its `lora`; what it says of adapters is checked."""
    path = folder / SETTINGS
    options, adapters = kind.added() | settings["settings"], settings["adapters"]
    expected = kind.names() - OF_ADAPTERS
    if mismatches := sorted(expected ^ options.keys()):
        difference = "one that it does not have" if mismatches[0] in options else "none"
        raise ValueError(
            f"{path}: expected the settings {', '.join(sorted(expected))} of {kind.method}, "
            f"got {difference} for {shown(mismatches[0])}"
        )
    with _settings_errors(folder):
        # A rank in place of the adapters, which are still to be read.
        config = kind(**options, lora=None if adapters is None else 1)
    if adapters is None:
        return config
    roles = set(config.roles)
    if adapters.keys() != roles or len({str(name) for name in adapters.values()}) < len(roles):
        raise ValueError(f"{path}: expected the names of adapters for {sorted(roles)}, got {shown(adapters)}")
    for role, name in adapters.items():
        inside(folder, check_name(path, f"adapters.{role}", name))
    return config


def _shapes(config: Config, vocabulary: int, width: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a compressor's own tensors but for copies of the model's, by name; no memory is taken for them."""
    with torch.device("meta"):
        parts = nn.Module()
        for name, part in config.parts(nn.Embedding(vocabulary, width)).items():
            setattr(parts, name, part)
        if "compression" in config.allowed_losses:
            parts.compression_head = config.head(width, vocabulary)
    return {name: tuple(parameter.shape) for name, parameter in parts.named_parameters()}


def _config_class(cls: type[Any], name: str, folder: Path) -> type[Config]:
    found = {name: kind for name, kind in REGISTRY.items() if issubclass(kind.compressor, cls)}
    if not isinstance(name, str) or name not in found:
        raise ValueError(f"{folder}: expected a compressor of method {' or '.join(sorted(found))}, got {shown(name)}")
    return found[name]
