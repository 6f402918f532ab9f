"""What the connector decides by itself, without vLLM: nothing of it is called here but names that are imported."""

import importlib
import logging
import os
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch

from gistkit_vllm import memory_files

BASE = "distributed.kv_transfer.kv_connector.v1.base"
NAMES = {
    **{name: BASE for name in ("KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorTransferResults")},
    "init_logger": "logger", "extract_layer_index": "model_executor.models.utils",
    "cached_tokenizer_from_config": "tokenizers", "FullAttentionSpec": "v1.kv_cache_interface",
}  # fmt: skip
ABOUT = {"tokens": 3, "context_tokens": 3, "placeholder": 7, "text": "<x>", "reader": "r"}


class Any:
    def __init__(self, *_):
        pass


@pytest.fixture
def connector(monkeypatch):
    """The module."""
    for name, module in NAMES.items():
        monkeypatch.setitem(sys.modules, f"vllm.{module}", sys.modules.get(f"vllm.{module}", ModuleType(module)))
        setattr(sys.modules[f"vllm.{module}"], name, logging.getLogger if name == "init_logger" else Any)
    yield importlib.import_module("gistkit_vllm.connector")
    del sys.modules["gistkit_vllm.connector"]


@pytest.fixture
def engine(connector, monkeypatch):
    """Makes a connector of a folder."""
    monkeypatch.setattr(connector, "_check", lambda *_: None)

    def made(folder, save):
        config = MagicMock()
        config.cache_config.block_size = 16
        given = {"store": folder, "save": save}
        config.kv_transfer_config.get_from_extra_config = lambda name, default: given.get(name, default)
        return connector.GistConnector(config, None, None)

    return made


@pytest.mark.parametrize("save", [False, True])
def test_an_engine_that_saves_removes_what_killed_ones_left(engine, tmp_path, save):
    (tmp_path / ".left.partial").touch()
    os.utime(tmp_path / ".left.partial", (0, 0))
    engine(tmp_path, save)
    assert any(tmp_path.iterdir()) != save


@pytest.mark.parametrize(
    ("loads", "saved"),
    [
        ([], True), ([(0, [1, 2, 3], True)], True), ([(0, [1, 2, 3], False)], False),
        ([(0, [1, 2, 3], False), (0, [1, 2, 3], True)], True), ([(0, [4, 5, 6], False)], True),
        # Of a request that found the first's blocks in the cache, empty as they are.
        ([(0, [1, 2, 4], False), (32, [1, 2, 3], True)], False),
        ([(32, [1, 2, 4], False), (32, [1, 2, 3], True)], True),
        # Another's whole load of the same memory.
        ([(0, [1, 2, 3], False), (0, [4, 5, 6], True)], False), ([(32, [1, 2, 3], False), (0, [4, 5, 6], True)], False),
        # A block that belonged to another memory and has the question now.
        ([(0, [7, 8, 9], False), (0, [1, 2, 3], True)], True),
    ],
)  # fmt: skip
def test_nothing_is_saved_behind_blocks_that_were_not_loaded(connector, engine, tmp_path, monkeypatch, loads, saved):
    made = engine(tmp_path, True)
    good = iter([good for _, _, good in loads])

    def load(_):
        if not next(good):
            raise OSError("a disk that is gone for a moment")

    steps = [connector.Load("a", "digest", start, 48, blocks) for start, blocks, _ in loads]
    monkeypatch.setattr(made, "_load", load)
    monkeypatch.setattr(made, "_get_connector_metadata", lambda: connector.Step(steps), raising=False)
    made.start_load_kv(None)
    made._layers = MagicMock(side_effect=LookupError("reads the cache"))
    with pytest.raises((LookupError, ValueError), match="reads the cache" if saved else "which could not be loaded"):
        made._save(connector.Save("b", {"tokens": 50}, 48, [1, 2, 3, 7]))


def test_a_damaged_memory_can_be_saved_again(connector, engine, tmp_path):
    memory_files.add(tmp_path, "whole", torch.rand(2, 2, 3, 1, 4), source="s", **ABOUT)
    memory_files.path_of(tmp_path, "cut").touch()
    made = engine(tmp_path, True)
    for name, saved in {"whole": True, "cut": False, "new": False}.items():
        assert made._is_saved(connector.Save(name, {"source": "s"}, 0)) == saved
    with pytest.raises(ValueError, match=r"expected a new name or the same prompt's"):
        made._is_saved(connector.Save("whole", {"source": "another"}, 0))


def test_an_adapter_of_others_is_not_the_base_model_that_a_memory_expects(engine, tmp_path):
    memory_files.add(tmp_path, "a", torch.rand(2, 2, 3, 1, 4), **ABOUT | {"reader": "base:x"})
    made = engine(tmp_path, False)
    made._shape, made._model.model, made._weights = (2, 2, 1, 4), tmp_path, "own"
    request = MagicMock(
        lora_request=None, skip_reading_prefix_cache=False, prompt_embeds=None, prompt_token_ids=[7, 7, 7, 1]
    )
    assert made._checked(request, "a").tokens == 3
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").touch()
    request.lora_request = MagicMock(lora_path=tmp_path / "adapter")
    with pytest.raises(ValueError, match="memory 'a': expected the reader base:x, got other weights"):
        made._checked(request, "a")


def test_weights_that_vllm_changes_are_others(engine, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(999))

    def weights(overrides=None, quantization=None, of_files=None):
        made = engine(tmp_path, True)
        made._model.model, made._model.hf_overrides, made._model.quantization_config = tmp_path, overrides or {}, None
        made._model.quantization, made._model.model_arch_config.quantization_config = quantization, of_files
        return made._weights

    plain = memory_files.weights_of(tmp_path)
    assert weights() == plain == weights(quantization="gptq", of_files={"quant_method": "gptq"})
    others = [weights({"rope_theta": 1}), weights({"rope_theta": 2}), weights(quantization="fp8"), plain]
    assert len(set(others)) == 4 and weights({"rope_theta": 1}) == others[0]
