"""The models and compressors that commands load by name."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.common.files import write_text
from gistkit.common.hub import check_name, loading
from gistkit.common.smollm2 import cache_folder, gguf_file
from gistkit.common.trained import SETTINGS, find, trained
from gistkit.options.arguments import CHECKS, LAYOUTS, add_device, number, path, positive
from gistkit.options.messages import warn

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from gistkit.compress import Compressor, Memory

DTYPES = ("float32", "bfloat16", "float16")


def model_name(text: str) -> str:
    """Argument type: smollm2, or the folder or hub name of a model."""
    return text


def trained_folder(text: str) -> Path:
    """Argument type: the folder of a trained compressor, or the name of one that comes with gistkit."""
    return path(text)


def method(text: str) -> str:
    """Argument type: the name of a method of the package, or of one that a script has registered."""
    return text


def _check_trained(name: str, folder: Path) -> None:
    if not find(folder).is_dir():
        names = ", ".join(trained())
        raise FileNotFoundError(f"{name}: expected a folder with a trained compressor or {names}, got {folder}")


def _check_method(name: str, value: str) -> None:
    # Imports torch.
    from gistkit.compress.config import REGISTRY

    if value not in REGISTRY:
        raise ValueError(f"{name}: expected one of {', '.join(REGISTRY)}, got {value!r:.80}")


def _check_model(name: str, value: str) -> None:
    check_name(name, value)
    if value == "smollm2":
        gguf_file()


CHECKS.update({model_name: _check_model, trained_folder: _check_trained, method: _check_method})


# The method that compresses images.
IMAGES = "voco"
# An untrained compressor's embeddings are drawn from this seed, so that `ask` reads what `compress` wrote.
SEED = 0


def add_model(parser: argparse.ArgumentParser) -> None:
    add_model_name(parser, "smollm2")
    add_dtype(parser)
    add_device(parser)


def add_model_name(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Adds --model, required without a default."""
    parser.add_argument(
        "--model",
        type=model_name,
        default=default,
        required=default is None,
        help="smollm2, or the folder or hub name of a transformers decoder (for images: of a vision-language model)"
        f"{'' if default is None else f' (default: {default})'}",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the model (default: float32 on a CPU, else bfloat16)")


def add_memory_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-dtype", choices=DTYPES, help="dtype of memory files (default: the model's, or bfloat16 for a float32 "
        "model, which halves the files)",
    )  # fmt: skip


def memory_dtype(name: str | None, model: PreTrainedModel) -> torch.dtype:
    """The dtype of memory files, from the option's value and the model's dtype."""
    import torch

    if name is not None:
        return getattr(torch, name)  # type: ignore[no-any-return]
    return torch.bfloat16 if model.dtype == torch.float32 else model.dtype


def load_model(
    name: str, dtype: str | None, device: str, images: bool = False, needs: Sequence[str] = ()
) -> tuple[PreTrainedModel, Any]:
    """The model, in eval mode, and its tokenizer.

    Args:
        name: "smollm2", or what transformers' `from_pretrained` takes.
        dtype: one of `DTYPES`; None: float32 on a CPU, bfloat16 elsewhere.
        device: where the model goes.
        images: whether it is a vision-language model; its processor then replaces the tokenizer.
        needs: packages that the command imports later; a missing one is reported before the model is loaded.
    """
    import torch

    for package in ("peft", "tqdm", *needs):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    number_type: torch.dtype = getattr(torch, dtype or ("float32" if device == "cpu" else "bfloat16"))
    if name == "smollm2" and images:
        raise ValueError("--model: expected a vision-language model for images, got smollm2, which reads text")
    if name == "smollm2":
        from gistkit.hf.smollm2 import load_smollm2

        model, tokenizer = load_smollm2(number_type)
    else:
        model, tokenizer = _from_transformers(name, number_type, images)
    return model.eval().to(device), tokenizer


def _from_transformers(name: str, dtype: torch.dtype, images: bool) -> tuple[PreTrainedModel, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

    from gistkit.hf.chat import check_chat

    kind = "a vision-language model for images" if images else "smollm2, or a decoder model"
    with loading("--model", f"{kind} that transformers can load", name) as place:
        if images:
            processor = AutoProcessor.from_pretrained(place)
            check_chat(processor)
            return AutoModelForImageTextToText.from_pretrained(place, dtype=dtype), processor
        tokenizer = AutoTokenizer.from_pretrained(place)
        return AutoModelForCausalLM.from_pretrained(place, dtype=dtype), tokenizer


def load_empty(name: str, dtype: str, images: bool = False) -> PreTrainedModel:
    """A model without weights, on device "meta", by `load_model`'s arguments; only the configuration is read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    if name == "smollm2":
        config = load_model(name, dtype, "cpu", images)[0].config
    else:
        with loading("--model", "a folder or hub name with a config.json", name) as place:
            config = AutoConfig.from_pretrained(place)
    kind: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
    wanted = "vision-language model for images" if images else "decoder model"
    try:
        with torch.device("meta"):
            return kind.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-any-return]
    except ValueError as error:
        raise ValueError(
            f"--model: expected a {wanted} of transformers, got {name!r}, of type {config.model_type}"
        ) from error


TRAINED = "the trained one that comes with gistkit for the model, else --method select, which needs no training"


def add_compressor(parser: argparse.ArgumentParser) -> None:
    """Adds --compressor and the options of an untrained compressor."""
    add_trained(parser, TRAINED)
    parser.add_argument(
        "--method", type=method, metavar="METHOD",
        help="method of an untrained compressor, such as gistpool (default: select, which keeps the keys and values "
        "with the highest scores; x500 with --layout or --chunk; voco for images)",
    )  # fmt: skip
    parser.add_argument("--layout", choices=LAYOUTS, help="position layout of icae and x500 (default: epl)")
    parser.add_argument(
        "--ratio", type=number(1), help="context tokens per memory token (default: 4 for select, else 5); a "
        "trained compressor of an in-place method compresses at this ratio instead of its own",
    )  # fmt: skip
    parser.add_argument("--chunk", type=positive, help="chunk size of icae and x500 in tokens (default: 510)")
    add_option(parser)


def add_trained(parser: Any, default: str) -> None:
    parser.add_argument(
        "--compressor", type=trained_folder, metavar="FOLDER",
        help=f"folder of a trained compressor, or name of one that comes with gistkit (default: {default})",
    )  # fmt: skip
    parser.add_argument(
        "--encoder", metavar="MODEL",
        help="second model of a separate_encoder: smollm2, or a folder or hub name (default: the one that the "
        "compressor names; for a new compressor, the model itself)",
    )  # fmt: skip


def add_option(parser: Any) -> None:
    parser.add_argument(
        "--option", type=option, action="append", default=[], metavar="NAME=VALUE",
        help="any other argument of the method, such as windows=1 or offset=true for gistpool; repeatable",
    )  # fmt: skip


def option(text: str) -> tuple[str, Any]:
    """Argument type: (name, value) from "name=value"; the value is JSON, or else text."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    if value in ("True", "False", "None"):
        return name, {"True": True, "False": False, "None": None}[value]
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def with_options(settings: dict[str, Any], options: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A method's arguments with those of `--option`; each may be given only once."""
    arguments = dict(settings)
    for name, value in options:
        if name in arguments:
            raise ValueError(f"--option {name}: given twice, as {arguments[name]} and {value}")
        arguments[name] = value
    return arguments


def load_compressor(folder: Path, model: PreTrainedModel, encoder: str | None = None) -> Compressor:
    """The trained compressor in `folder`, or of that name, in eval mode; `encoder` as of --encoder."""
    from gistkit.compress import Compressor

    with model_errors():
        return Compressor.from_pretrained(folder, model, encoder=encoder).eval().to(model.device)


def notes() -> Path:
    """The folder with a file for each compressor that a command was given, of its fingerprints: where it lies."""
    return cache_folder() / "compressors"


def noted_folder(memory: Memory) -> Path | None:
    """Where the compressor that made a memory was when a command of this user last had it; None: not known."""
    name = _note_name(memory.fingerprint, memory.maker)
    # It comes from anybody's file.
    if re.fullmatch("[0-9a-f]{16}(-[0-9a-f]{16}){2}", name):
        with suppress(OSError, RuntimeError):
            return Path((notes() / name).read_text())
    return None


def _note_name(fingerprint: str | None, maker: str | None) -> str:
    # Without adapters the weights that train may be only the base model's.
    return f"{fingerprint}-{maker}"


def given_compressor(folder: Path, model: PreTrainedModel, encoder: str | None = None) -> Compressor:
    """`load_compressor` of a folder that a user named, which is noted for later memories of it."""
    compressor = load_compressor(folder, model, encoder)
    if compressor.identity.weights().own:
        # Whoever cannot write there, or has no home, can name it again.
        with suppress(OSError, RuntimeError):
            write_text(notes() / _note_name(*compressor.fingerprints()), str(find(folder).resolve()))
    return compressor


def makers_of(memory: Memory) -> list[str]:
    """The trained compressors whose model, method and sizes a memory has, by name: those of its ratio, defaults first.

    The weights of one in place made memories of any ratio.
    """
    from gistkit.common.trained import DEFAULTS
    from gistkit.compress.config import REGISTRY

    source, found = memory.source, []
    if source.method not in REGISTRY:
        return []
    kind = REGISTRY[source.method]
    sizes, made = kind.sizes(source.chunk, source.memory_tokens), _made(memory)
    # Others, at the memory's settings, have its maker's weights, if it names them.
    free = frozenset() if memory.maker is None else kind.free
    for name in trained():
        content = json.loads((find(name) / SETTINGS).read_text())
        settings = kind.added() | content["settings"]
        of_its_ratio = all(settings.get(key) == value for key, value in sizes.items())
        if (
            (content["method"], content["structure"]) == (source.method, source.structure)
            and content["fingerprint"] in (None, memory.fingerprint)
            and all(settings.get(key) == value for key, value in made.items() if key not in free)
            and (of_its_ratio or kind.any_ratio)
        ):
            as_it_is = of_its_ratio and all(settings.get(key) == value for key, value in made.items())
            found.append((not as_it_is, name not in DEFAULTS.values(), name))
    return [name for *_, name in sorted(found)]


def _made(memory: Memory) -> dict[str, Any]:
    """The settings that a memory was made with; what it does not name has the value from before it could."""
    from gistkit.compress.config import REGISTRY

    return REGISTRY[memory.source.method].unnamed() | dict(memory.source.options)


def as_made(compressor: Compressor, memory: Memory) -> Compressor:
    """The compressor with those of a memory's settings that its weights do not depend on."""
    if memory.source.method != compressor.method:
        return compressor
    now = compressor.settings
    changes = {key: value for key, value in _made(memory).items() if key in compressor.options.free}
    changes = {key: value for key, value in changes.items() if now[key] != value}
    return compressor.changed(**changes) if changes else compressor


class OtherWeightsError(ValueError):
    """A new compressor is not the one that made a memory."""


def new_compressor(
    model: PreTrainedModel, method: str = "select", maker: str | None = None, **settings: Any
) -> Compressor:
    """A new compressor in eval mode, the same for the same model and settings; warns if its memory is noise.

    If `maker`, the fingerprint of a memory's compressor, is not its own, it raises an OtherWeightsError, and the model
    is as it was.
    """
    import torch

    from gistkit import compress

    with torch.random.fork_rng(devices=[]), model_errors():
        torch.manual_seed(SEED)
        kind = compress.METHODS[method]
        takes = kind.config_class.names()
        if unknown := sorted(settings.keys() - takes):
            raise ValueError(f"{unknown[0]}: {method} does not have it; expected some of {', '.join(sorted(takes))}")
        compressor = kind(model, **settings).eval().to(model.device)
    if maker not in (None, compressor.own_fingerprint()):
        if compressor.adapters is not None:
            compressor.adapters.remove()
        raise OtherWeightsError(
            "it has other weights than a new one: it has trained, or was made with another --dtype or --option"
        )
    if compressor.needs_training:
        warn(
            "the compressor is UNTRAINED, so its memory is noise; train one with gistkit train and pass its folder "
            "as --compressor, or use --method select"
        )
    return compressor


def chosen_compressor(arguments: argparse.Namespace, model: PreTrainedModel, processor: Any = None) -> Compressor:
    """The compressor that the arguments of `add_compressor` choose; warns if it is untrained.

    The default is the one that comes with gistkit for the model. It, or `--compressor`, is changed to such settings as
    its weights do not depend on. With the processor of a vision-language model the compressor is one for images.
    """
    from gistkit.common.trained import default_for

    settings = {name: getattr(arguments, name) for name in ("method", "layout", "ratio", "chunk", "encoder")}
    settings = with_options({name: value for name, value in settings.items() if value is not None}, arguments.option)
    wanted = "texts" if processor is None else f"images, {IMAGES}"
    if "method" in settings and (settings["method"] == IMAGES) != (processor is not None):
        raise ValueError(f"--method: expected one for {wanted}, got {settings['method']}")
    folder = arguments.compressor
    if folder is None and processor is None and not settings.keys() & {"method", "layout", "chunk", "encoder"}:
        folder = default_for(arguments.model)
        own = set() if folder is None else settings.keys() - _free(folder) - {"ratio"}
        if folder is not None and own:
            warn(f"--{min(own)}: using an untrained select, because {folder} was trained without this option")
            folder = None
    if folder is None:
        if processor is not None:
            settings = image_settings(model, processor, settings)
        elif settings.keys() & {"layout", "chunk"}:
            # Only methods with chunks have these.
            settings = {"method": "x500", **settings}
        return new_compressor(model, **settings)
    ratio, encoder = settings.pop("ratio", None), settings.pop("encoder", None)
    for name in settings:
        if name not in _free(folder):
            raise ValueError(f"--{name}: not allowed with --compressor, which has its own, got {settings[name]}")
    load = load_compressor if arguments.compressor is None else given_compressor
    compressor = load(Path(folder), model, encoder)
    if (compressor.method == IMAGES) != (processor is not None):
        raise ValueError(f"--compressor: expected one for {wanted}, got one of method {compressor.method}")
    with model_errors():
        compressor = compressor.changed(**settings) if settings else compressor
        return compressor if ratio is None else compressor.at(ratio)


def _free(folder: str | Path) -> frozenset[str]:
    """The settings of the trained compressor in a folder that may change without training; none without a folder."""
    from gistkit.compress.config import REGISTRY

    try:
        content = json.loads((find(folder) / SETTINGS).read_text())
        return REGISTRY[content["method"]].free
    except (OSError, ValueError, KeyError, TypeError):
        # Whatever is wrong with it, loading names it.
        return frozenset()


def image_settings(model: PreTrainedModel, processor: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a compressor of images: VoCo, with the separators of this processor's tiles."""
    from gistkit.hf.chat import tile_separators

    with model_errors():
        return {"method": IMAGES, "separators": tile_separators(model, processor), **settings}


@contextmanager
def model_errors() -> Iterator[None]:
    """Turns a TypeError about an argument, such as an unsupported model, into a ValueError for the user."""
    try:
        yield
    except TypeError as error:
        # Other TypeErrors are not about the user's arguments.
        if re.match(r"\w+: expected ", str(error)) is None:
            raise
        raise ValueError(f"{'--' if str(error).startswith('model: ') else ''}{error}") from error
