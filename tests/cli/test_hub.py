"""A hub that does not answer: commands look into its cache, and say so within seconds."""

import io
import json
import ssl
from http.client import BadStatusLine, InvalidURL
from urllib.error import HTTPError, URLError

import pytest
from huggingface_hub import constants
from torch.nn import Linear

from gistkit.cli import main
from gistkit.compress import Compressor
from gistkit.hf.smollm2 import NAME as SMOLLM2
from gistkit.options import hub
from gistkit.options.models import load_compressor
from tests.helpers.models import tiny_llama

NAME = "some-owner/some-model"


def answers(monkeypatch, result):
    def urlopen(*_, **__):
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(hub, "urlopen", urlopen)


@pytest.mark.parametrize(
    "broken",
    [
        URLError(OSError("no route")),
        TimeoutError("timed out"),
        BadStatusLine("SSH-2.0"),
        InvalidURL("nonnumeric port"),
        ValueError("unknown url type: 'hub'"),
    ],
)
def test_without_the_hub_only_its_cache_is_asked(broken, monkeypatch, tmp_path, capsys):
    answers(monkeypatch, broken)
    (tmp_path / "text.txt").write_text("A text.")
    assert main(["compress", str(tmp_path / "text.txt"), "--model", NAME]) == 2
    assert not constants.HF_HUB_OFFLINE
    warning, error = capsys.readouterr().err.splitlines()
    assert f"does not answer within 5 s: looking for {NAME} only in " in warning
    assert error.startswith("gistkit: --model: expected smollm2, or a decoder model")


@pytest.mark.parametrize(
    "result", [io.BytesIO(), HTTPError("https://hub", 404, "none", {}, None), URLError(ssl.SSLError("certificates"))]
)
def test_a_hub_that_answers_is_asked(result, monkeypatch, tmp_path):
    answers(monkeypatch, result)
    with hub.hub_or_cache(NAME):
        assert not constants.HF_HUB_OFFLINE
    answers(monkeypatch, AssertionError("a folder is no name of the hub"))
    with hub.hub_or_cache(str(tmp_path)):
        assert not constants.HF_HUB_OFFLINE


def test_the_hub_is_asked_for_encoders_that_it_has(monkeypatch, tmp_path, capsys):
    answers(monkeypatch, TimeoutError("timed out"))
    monkeypatch.setattr(Compressor, "from_pretrained", lambda *_, **__: Linear(1, 1))
    settings = tmp_path / "compressor.json"
    for named, given, asked in ((NAME, None, NAME), (None, NAME, NAME), (NAME, "smollm2", None), (SMOLLM2, None, None)):
        settings.write_text(json.dumps({"settings": {"encoder": named}}))
        load_compressor(tmp_path, tiny_llama(), given)
        told = capsys.readouterr().err
        assert told == "" if asked is None else f"looking for {asked} only in " in told
