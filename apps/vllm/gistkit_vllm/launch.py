"""`gistkit-vllm FOLDER`: vLLM's server with what `gistkit export` wrote."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gistkit_vllm.memory_files import ADAPTER, MEMORIES, READER, SETTINGS, TEMPLATE

DESCRIPTION = "Serves what gistkit export wrote by vLLM: memories that requests name in kv_transfer_params."


def command(folder: Path, options: Sequence[str], save: bool = False) -> list[str]:
    """The words that start vLLM's server.

    Args:
        folder: what `gistkit export` wrote.
        options: of `vllm serve`, which come last.
        save: whether requests may write memories into it.

    Raises:
        FileNotFoundError: if there is no such folder.
        ValueError: if the reader is an adapter and no option says of which model.
    """
    settings = json.loads((folder / SETTINGS).read_text())
    transfer = {
        "kv_connector": "GistConnector",
        "kv_connector_module_path": "gistkit_vllm.connector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"store": str((folder / MEMORIES).resolve()), "save": save},
    }
    # `vllm serve` asks for the version of a package vllm, which builds for CPUs are not.
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--kv-transfer-config", json.dumps(transfer), "--middleware", "gistkit_vllm.front.Front"]
    words += ["--chat-template", str(folder / TEMPLATE)]
    if (folder / READER).is_dir():
        return [*words, "--model", str(folder / READER), "--served-model-name", settings["name"], *options]
    if not any(option.partition("=")[0] == "--model" for option in options):
        raise ValueError(f"--model: expected that of {settings['base']}, of which {folder} has the adapter, got none")
    if (folder / ADAPTER).is_dir():
        rank = json.loads((folder / ADAPTER / "adapter_config.json").read_text())["r"]
        # vLLM takes the last list alone.
        lists = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        lists.add_argument("--lora-modules", "--lora_modules", nargs="+", action="extend", default=[])
        others, options = lists.parse_known_args(options)
        modules = [f"{settings['name']}={folder / ADAPTER}", *others.lora_modules]
        # vLLM's kernels for CPUs give requests without an adapter that of the last slot: it stays empty.
        words += ["--enable-lora", "--lora-modules", *modules, "--max-loras", str(len(modules) + 1)]
        words += ["--max-lora-rank", str(_rank(rank))]
    else:
        words += ["--served-model-name", settings["name"]]
    return [*words, *options]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `gistkit-vllm`."""
    parser = argparse.ArgumentParser(prog="gistkit-vllm", description=DESCRIPTION)
    parser.add_argument("folder", type=Path, help="what gistkit export wrote")
    parser.add_argument("--save", action="store_true", help="requests may save their prompts as memories in FOLDER")
    parser.add_argument("--print", action="store_true", dest="shown", help="prints vLLM's command and ends")
    known, options = parser.parse_known_args(arguments)
    try:
        words = command(known.folder, options, known.save)
    except (OSError, ValueError, KeyError) as error:
        print(f"gistkit-vllm: {error}", file=sys.stderr)
        return 2
    if known.shown:
        import shlex

        print(shlex.join(words))
        return 0
    os.execv(words[0], words)


def _rank(rank: int) -> int:
    """The smallest of vLLM's ranks that holds an adapter's."""
    return next((most for most in (8, 16, 32, 64, 128, 256, 320, 512) if rank <= most), rank)
