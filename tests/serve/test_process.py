"""`gistkit serve` as a process: its help, its address, its memories after a restart, and its end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from gistkit import cli
from gistkit.serve.app import LOOPBACK
from tests.helpers.models import byte_tokenizer
from tests.helpers.stores import make_compressor
from tests.serve.helpers import added, answer_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and a compressor of it, as commands load them."""
    place = tmp_path_factory.mktemp("serve")
    compressor = make_compressor()
    compressor.model.save_pretrained(place / "model")
    byte_tokenizer().save_pretrained(place / "model")
    compressor.save_pretrained(place / "tiny")
    return place


def make_compressor_with_bytes():
    compressor = make_compressor()
    compressor.tokenizer = byte_tokenizer()
    return compressor


@contextmanager
def process(folders, *words):
    """A server on a free port, and its address."""
    command = [
        sys.executable,
        "-m",
        "gistkit.cli",
        "serve",
        "--model",
        folders / "model",
        "--compressor",
        folders / "tiny",
    ]
    with subprocess.Popen(
        [*command, "--port", "0", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(folders)},
    ) as server:  # fmt: skip
        try:
            line = server.stdout.readline()
            found = re.fullmatch(r"(\w+) at (http://127\.0\.0\.1:\d+), (.*), (\d+) there; Ctrl-C ends it\n", line)
            assert found, line + server.stderr.read()
            server.greeting, server.url = found, found[2]
            yield server
        finally:
            server.kill()


def test_a_process_prints_what_works_and_ends_with_a_line(folders, tmp_path):
    kept = tmp_path / "memories"
    with process(folders, "--memories", kept) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert server.greeting.group(1, 3, 4) == ("tiny", f"memories in {kept}", "0")
        shown = [server.stdout.readline() for _ in range(3)]
        assert all(f"curl {server.url}/v1/" in line for line in shown[1:])
        text, question = (re.search(r"-d '(.*)'", line)[1] for line in shown[1:])
        headers = {"content-type": "application/json"}
        memory = client.post("/v1/memories", content=text, headers=headers).json()["id"]
        body = question.replace("ID", memory)
        answer = answer_of(client.post("/v1/chat/completions", content=body, headers=headers))
        assert answer == make_compressor_with_bytes().ask(json.loads(text)["text"], "What is the gate code?")
        server.send_signal(signal.SIGINT)
        assert server.communicate(timeout=30)[1].endswith(f"\ngistkit: interrupted; memories are in {kept}\n")
        assert server.returncode == 130 and [path.stem for path in kept.iterdir()] == [memory]


@pytest.mark.slow
def test_without_a_folder_memories_end_with_the_process(folders):
    with process(folders) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert server.greeting[3] == "memories end with it"
        added(client, "text")
        assert len(list(folders.glob("gistkit-serve-*/*.gist"))) == 1
        server.terminate()
        assert server.communicate(timeout=30)[1].endswith("; its memories are gone, --memories FOLDER keeps them\n")
        assert server.returncode == 143
    assert list(folders.glob("gistkit-serve-*")) == []


def test_a_server_listens_to_this_machine_alone_unless_told_otherwise():
    parse = cli.parser().parse_args
    assert parse(["serve"]).host == "127.0.0.1" in LOOPBACK


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port), "--model", "/nowhere"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"gistkit: --port: expected a free address, got 127.0.0.1 and {port}: ")


def test_chat_needs_a_model_with_a_template(folders, capsys):
    words = ["--model", str(folders / "model"), "--compressor", str(folders / "tiny"), "--port", "0", "--chat"]
    assert cli.main(["serve", *words]) == 2
    assert "--chat: tokenizer: expected one with a chat template" in capsys.readouterr().err


def test_the_help_has_an_example_of_every_kind(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "example: gistkit serve\n" in shown
    for option in ("--memories", "--ram", "--disk", "--timeout", "--queue", "--batch", "--max-text-tokens"):
        assert option in shown
