"""`gistkit export`: what reads a compressor's memories, and memories, as vLLM takes them."""

from __future__ import annotations

import argparse
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.cli.plugins import missing, stores
from gistkit.options.arguments import add_command, device, existing, path
from gistkit.options.models import add_compressor, add_model, as_made, chosen_compressor, load_model, trained_folder
from gistkit_vllm.template import chat_template, placeholder_of

if TYPE_CHECKING:
    import torch

    from gistkit.compress import Compressor, Memory

EXAMPLES = """\
example: gistkit export smollm2-avgpool-2x --out served --merged --memories notes.store
example: gistkit export runs/x500 --model ./llama --out served --memories report.gist
example: gistkit export --model ./llama --out served --merged --memories notes.store"""

# Of an adapter that vLLM serves.
_PLAIN = {"use_dora": False, "bias": "none", "modules_to_save": None, "trainable_token_indices": None}


def add(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "export", _run, "write memories and their reader for a vLLM server", EXAMPLES)
    parser.add_argument(
        "name", nargs="?", type=trained_folder, metavar="COMPRESSOR", help="the same as --compressor",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=path, required=True, metavar="FOLDER",
        help="folder for the reader and memories; you can add memories of the same reader later, also while it serves",
    )  # fmt: skip
    parser.add_argument(
        "--merged", action="store_true", help="write a whole model with the reader's adapter merged into its weights, "
        "instead of the adapter as a PEFT folder for vLLM's --enable-lora",
    )  # fmt: skip
    parser.add_argument(
        "--memories", type=existing, nargs="+", default=[], metavar="MEMORY",
        help="memory files, served under their names without .gist, and stores, served under their documents' names",
    )  # fmt: skip
    parser.add_argument("--task", choices=("qa", "lm", "ae"), default="qa", help="as for gistkit ask (default: qa)")
    around = parser.add_mutually_exclusive_group()
    around.add_argument("--template", help="text around a {question} (default: ### Question: and ### Answer: lines)")
    around.add_argument("--chat", action="store_true", help="the model's own chat template around questions")
    add_model(parser)
    add_compressor(parser)


def _run(arguments: argparse.Namespace) -> int:
    from gistkit.common.files import write_text
    from gistkit_vllm import memory_files

    if arguments.name is not None and arguments.compressor is not None:
        raise ValueError(f"--compressor: not allowed with COMPRESSOR, got {arguments.compressor}")
    arguments.compressor = arguments.name if arguments.compressor is None else arguments.compressor
    device_name = device(arguments.device)
    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name)
    compressor = chosen_compressor(arguments, model)
    compressor.tokenizer = tokenizer
    placeholder, text = placeholder_of(tokenizer)
    reader, name = _reader(compressor), _name(arguments, compressor)
    settings = json.dumps({"name": name, "base": arguments.model, "reader": reader}, indent=2) + "\n"
    _check_folder(arguments.out, reader)
    template = chat_template(tokenizer, arguments.template, arguments.chat)
    count = 0
    for memory_name, memory in _memories(arguments.memories):
        _check_heads(memory_name, memory)
        values = _values(as_made(compressor, memory), memory, arguments.task)
        if not count:
            # From the first memory on it is this reader's folder, wherever the command ends.
            write_text(arguments.out / memory_files.SETTINGS, settings)
        memory_files.add(
            arguments.out / memory_files.MEMORIES, memory_name, values,
            tokens=values.shape[2],
            context_tokens=memory.context_lengths[0] + len(memory.rest[0]), placeholder=placeholder, text=text,
            reader=reader,
        )  # fmt: skip
        count += 1
    write_text(arguments.out / memory_files.SETTINGS, settings)
    (arguments.out / memory_files.MEMORIES).mkdir(exist_ok=True)
    written = _write_reader(compressor, arguments, tokenizer, reader, settings)
    write_text(arguments.out / memory_files.TEMPLATE, template)
    whole = written is not None and written.name == memory_files.READER
    what = "the reader is a whole model" if whole else "the reader is an adapter of the base model"
    what = "the base model reads them as it is" if written is None else what
    made = f"{count} {'memory' if count == 1 else 'memories'} in {arguments.out}"
    print(f"{made}; {what}; gistkit-vllm {arguments.out}{'' if whole else ' --model MODEL'} serves it")
    return 0


def _name(arguments: argparse.Namespace, compressor: Compressor) -> str:
    """What clients call the model."""
    from gistkit.compress import trained

    if arguments.compressor is not None:
        return str(Path(arguments.compressor).resolve().name)
    # The one that came with gistkit for the model, or one that needs no training.
    base = Path(str(arguments.model)).name
    known = [name for name in trained() if name.startswith(f"{base}-{compressor.method}-")]
    return known[0] if len(known) == 1 else f"{base}-{compressor.method}"


def _reader(compressor: Compressor) -> str:
    """What tells readers apart; "base:" begins that of a model as it is."""
    base, own = compressor.fingerprints()
    adapters = compressor.adapters
    trained = _own_weights(compressor) or (adapters is not None and compressor.reader is not None)
    return f"{base}:{own}" if trained else f"base:{base}"


def _check_folder(folder: Path, reader: str) -> None:
    """Refuses a folder of another reader, whose memories this one would read wrongly."""
    from gistkit.common.files import read_json
    from gistkit_vllm import memory_files

    if not folder.exists() or not any(folder.iterdir()):
        return
    settings = folder / memory_files.SETTINGS
    before = read_json(settings, "settings that gistkit export wrote") if settings.is_file() else {}
    if before.get("reader") != reader:
        found = f"the reader {before['reader']}" if "reader" in before else "other files"
        raise ValueError(f"--out: expected a new folder or one of the reader {reader}, got {found}")


def _memories(paths: list[Path]) -> Iterator[tuple[str, Memory]]:
    """Memories by name."""
    from gistkit.compress import Memory

    seen = set()
    for place in paths:
        named = [(place.name.removesuffix(".gist"), place)] if place.is_file() else _store(place).items()
        for name, memory in named:
            memory = Memory.load(memory) if isinstance(memory, Path) else memory
            if name in seen:
                raise ValueError(f"--memories: expected names that differ, got {name} twice")
            if memory.batch_size != 1:
                raise ValueError(f"{name}: expected the memory of one text, got {memory.batch_size} rows")
            seen.add(name)
            yield name, memory


def _store(folder: Path) -> Mapping[str, Memory]:
    if (plugin := stores()) is None:
        raise missing("--memories: a store", "apps/serve")
    return plugin.open_store(folder)  # type: ignore[no-any-return]


def _check_heads(name: str, memory: Memory) -> None:
    """Refuses a selection that no cache of one length and without biases holds."""
    if memory.counts is not None or memory.key_bias is not None:
        got = "with fitted biases" if memory.counts is None else "whose heads keep different numbers"
        raise ValueError(
            f"{name}: expected a memory whose heads keep as many tokens each, without fitted biases, as vLLM's cache "
            f"holds them, got one {got}: compress the text again with --option shares=equal --option fit=false"
        )


def _values(compressor: Compressor, memory: Memory, task: Any) -> torch.Tensor:
    """What vLLM puts before a prompt: keys and values [layers, 2, tokens, heads, size]."""
    import torch

    from gistkit import hf, ops

    memory = memory.to(compressor.device, compressor.embed.weight.dtype)
    with torch.no_grad():
        layers = compressor.to_cache(memory, task).held
    count = layers[0][0].shape[2]
    # A cache has its prompt at position 0, and vLLM behind the placeholders.
    inv_freqs = [inv_freq.to(layers[0][0].device) for inv_freq in hf.frequencies(compressor.model)]
    keys = [ops.rerotate(key, count, inv_freq) for (key, _), inv_freq in zip(layers, inv_freqs, strict=True)]
    pairs = [torch.stack([key[0], value[0]]) for key, (_, value) in zip(keys, layers, strict=True)]
    return torch.stack(pairs).transpose(2, 3)


def _write_reader(
    compressor: Compressor, arguments: argparse.Namespace, tokenizer: Any, fingerprint: str, settings: str
) -> Path | None:
    """The adapter or the model, each in a folder of its own; None: the base model reads, and nothing was asked for."""
    from gistkit_vllm import memory_files

    adapters, role, out = compressor.adapters, compressor.reader, arguments.out
    whole = arguments.merged or _own_weights(compressor)
    place, partial = out / (memory_files.READER if whole else memory_files.ADAPTER), out / ".adapter"
    # Servers may be reading it; only one that is whole has settings.
    if memory_files.reader_of(place) == fingerprint:
        return place
    adapter = None
    try:
        if adapters is not None and role is not None:
            compressor.save_pretrained(partial)
            adapter = partial / adapters.names[role]
        if whole:
            made = partial / "merged"
            model: Any = compressor.model
            if adapters is not None:
                # A second copy of the model: the first has all adapters, which its files would name.
                model, _ = load_model(arguments.model, arguments.dtype, "cpu")
            if adapter is not None:
                from peft import PeftModel

                with warnings.catch_warnings():
                    # PEFT asks transformers by a name that it deprecates.
                    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
                    model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
        elif adapter is not None:
            made = adapter
            _check_adapter(made)
        else:
            return None
        (made / memory_files.SETTINGS).write_text(settings)
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)
        return place
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _own_weights(compressor: Compressor) -> bool:
    """Whether the model's own weights were trained, so that no other model has them."""
    return not compressor.needs_base


def _check_adapter(folder: Path) -> None:
    """Refuses an adapter that has what vLLM reads from no PEFT folder."""
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, plain in _PLAIN.items():
        if config.get(name) not in (plain, None, [], {}):
            raise ValueError(f"--merged: expected for an adapter with {name} {config[name]}, which vLLM does not read")
