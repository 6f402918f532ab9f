"""A hub that does not answer: its cache is asked, and that is said within seconds."""

import json

import huggingface_hub
import pytest
from huggingface_hub import constants

from gistkit.cli import main
from gistkit.common import hub
from gistkit.compress import Compressor, Select, SeparateEncoder
from tests.helpers.models import tiny_llama

NAME = "some-owner/some-model"


def answers(monkeypatch, result):
    class Session:
        def head(self, *_, **__):
            if isinstance(result, Exception):
                raise result
            return result

    monkeypatch.setattr(huggingface_hub, "get_session", Session)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://127.0.0.1:port", "hub"])
def test_without_the_hub_only_its_cache_is_asked(endpoint, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    (tmp_path / "text.txt").write_text("A text.")
    assert main(["compress", str(tmp_path / "text.txt"), "--model", NAME]) == 2
    assert not constants.HF_HUB_OFFLINE
    warning, error = capsys.readouterr().err.splitlines()
    assert f"does not answer within 5 s: looking for {NAME} only in " in warning
    assert error.startswith("gistkit: --model: expected smollm2, or a decoder model")


def test_a_hub_that_answers_is_asked(monkeypatch, tmp_path):
    answers(monkeypatch, "404, not found")
    with hub.hub_or_cache(NAME):
        assert not constants.HF_HUB_OFFLINE
    answers(monkeypatch, AssertionError("a place on the disk is no name of the hub"))
    for place in (tmp_path, tmp_path / "none", "./none", "a/b/c"):
        with hub.hub_or_cache(str(place)):
            assert not constants.HF_HUB_OFFLINE


def test_python_asks_only_the_cache_of_a_hub_that_does_not_answer(monkeypatch, tmp_path):
    answers(monkeypatch, TimeoutError("timed out"))
    model = tiny_llama(bos_token_id=1)
    with pytest.warns(UserWarning, match=f"looking for {NAME} only in "):
        with pytest.raises(FileNotFoundError, match=f"^{NAME}: expected a folder with compressor.json"):
            Compressor.from_pretrained(NAME, model)
        with pytest.raises(ValueError, match=f"^encoder: expected a decoder model .*, got '{NAME}'"):
            SeparateEncoder(model, encoder=NAME)
        model.name_or_path = NAME
        with pytest.raises(ValueError, match=f"^tokenizer: .* loaded from '{NAME}', which has none that loads"):
            Select(model).compress("A text.")
    SeparateEncoder(model, encoder=tiny_llama()).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "compressor.json").read_text())
    settings["settings"]["encoder"] = NAME
    (tmp_path / "compressor.json").write_text(json.dumps(settings))
    broken = f"^encoder: {NAME}, the encoder of .*, cannot be loaded from the hub"
    with pytest.warns(UserWarning, match=f"looking for {NAME} only in "), pytest.raises(ValueError, match=broken):
        Compressor.from_pretrained(tmp_path, model)
