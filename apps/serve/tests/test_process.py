"""`gistkit serve` as a process: its help, its address, its memories after a restart, and its end."""

import asyncio
import json
import os
import re
import signal
import socket
from contextlib import contextmanager

import httpx
import pytest
from clients import added, answer_of
from starlette.testclient import TestClient

from gistkit import cli
from gistkit_serve.server import running
from gistkit_serve.server.app import LOOPBACK
from tests.helpers.models import byte_tokenizer
from tests.helpers.programs import Program
from tests.helpers.stores import make_compressor


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and a compressor of it, as commands load them."""
    place = tmp_path_factory.mktemp("serve")
    compressor = make_compressor()
    compressor.model.save_pretrained(place / "model")
    byte_tokenizer().save_pretrained(place / "model")
    compressor.save_pretrained(place / "tiny")
    return place


def command(folders, *words, port=0):
    """The words of `gistkit serve`."""
    own = ("serve", "--model", folders / "model", "--compressor", folders / "tiny", "--port", port)
    return [*map(str, (*own, *words))]


@contextmanager
def process(folders, *words, **options):
    """A server on a free port, and its address."""
    words = command(folders, "--memory-dtype", "float32", *words)
    environment = os.environ | {"TMPDIR": str(folders)}
    with Program("-m", "gistkit.cli", *words, env=environment, **options) as server:
        line = server.line()
        server.greeting = re.fullmatch(r"(\w+) at (http://127\.0\.0\.1:\d+), (.*), (\d+) there; Ctrl-C ends it\n", line)
        assert server.greeting, line + server.errors()
        server.url = server.greeting[2]
        with httpx.Client(base_url=server.url, timeout=30) as client:
            yield server, client


def greets_and_answers(server, client, kept, there=0):
    """What a new server prints first, and that it answers as its examples ask; the id of the memory."""
    assert server.greeting.group(1, 3, 4) == ("tiny", f"memories in {kept}", str(there))
    shown = [server.line() for _ in range(3)]
    assert all(f"curl {server.url}/v1/" in line for line in shown[1:])
    text, question = (re.search(r"-d '(.*)'", line)[1] for line in shown[1:])
    headers = {"content-type": "application/json"}
    memory = client.post("/v1/memories", content=text, headers=headers).json()["id"]
    body = question.replace("ID", memory)
    answer = answer_of(client.post("/v1/chat/completions", content=body, headers=headers))
    compressor = make_compressor()
    compressor.tokenizer = byte_tokenizer()
    assert answer == compressor.ask(json.loads(text)["text"], "What is the gate code?")
    return memory


@pytest.mark.slow
@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN], ids=["heard", "ignored"])
def test_a_process_prints_what_works_and_ends_with_a_line(folders, tmp_path, before):
    """Also where who started it has Ctrl-C ignored, as `nohup` and `&` do."""
    kept = tmp_path / "memories"
    start = {"preexec_fn": lambda: signal.signal(signal.SIGINT, before)}
    with process(folders, "--memories", kept, **start) as (server, client):
        memory = greets_and_answers(server, client, kept)
        server.process.send_signal(signal.SIGINT)
        assert server.status() == 130
        assert server.errors().endswith(f"\ngistkit: interrupted; memories are in {kept}\n")
    assert [path.stem for path in kept.iterdir()] == [memory]


@pytest.mark.slow
@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_process_from_outside_ends_a_server_in_order(folders, tmp_path, number):
    """A closed terminal too."""
    with process(folders, "--memories", tmp_path / "memories") as (server, client):
        assert client.get("/health").status_code == 200
        server.process.send_signal(number)
        assert server.status() == 128 + number
        assert server.errors().endswith(f"gistkit: terminated; memories are in {tmp_path / 'memories'}\n")


@pytest.mark.slow
def test_without_a_folder_memories_end_with_the_process(folders):
    with process(folders) as (server, client):
        assert server.greeting[3] == "memories end with it"
        added(client, "text")
        assert len(list(folders.glob("gistkit-serve-*/memories/*.gist"))) == 1
        server.process.terminate()
        assert server.status() == 143
        assert server.errors().endswith("; its memories are gone, --memories FOLDER keeps them\n")
    assert list(folders.glob("gistkit-serve-*")) == []


@pytest.mark.slow
def test_memories_that_a_killed_process_left_are_gone_at_the_next_start(folders):
    with process(folders) as (server, client), process(folders) as (_, other):
        added(client, "text")
        name = added(other, "text")
        server.process.kill()
        server.process.wait(30)
        assert len(list(folders.glob("gistkit-serve-*/memories/*.gist"))) == 2
        with process(folders):
            # That of the one that lives is not touched.
            assert [path.stem for path in folders.glob("gistkit-serve-*/memories/*.gist")] == [name]
            assert other.get(f"/v1/memories/{name}").status_code == 200


@pytest.mark.slow
def test_who_comes_before_the_model_is_loaded_waits_for_it(folders):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Connections are tried again until the process listens.
    client = httpx.Client(transport=httpx.HTTPTransport(retries=12), timeout=300)
    with Program("-m", "gistkit.cli", *command(folders, port=port)) as server, client:
        assert client.get(f"http://127.0.0.1:{port}/health").status_code == 200, server.errors()


async def fill(app, count):
    """The statuses of requests that are there at a time, and of one more."""
    begun, held = [], asyncio.Event()

    @app.get("/held")
    async def hold():
        begun.append(1)
        await held.wait()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        there = [asyncio.ensure_future(client.get("/held")) for _ in range(count)]
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(begun) == count
        more = await client.get("/held")
        held.set()
        return [response.status_code for response in (*await asyncio.gather(*there), more)]


def test_the_command_greets_and_gives_its_limits_on(folders, capsys, monkeypatch, tmp_path):
    """In this process, with a client in place of uvicorn."""
    served, stored = [], tmp_path / "stored.gist"
    compressor = make_compressor()
    compressor.encode([[1, 2, 3]]).save(stored)

    class Server:
        def __init__(self, app, listener):
            self.url = "http://{}:{}".format(*listener.getsockname())
            self.lines = iter(capsys.readouterr().out.splitlines())
            self.greeting = re.fullmatch(r"(\w+) at (\S+), (.*), (\d+) there; Ctrl-C ends it", next(self.lines))
            served.append(self)
            with TestClient(app, base_url=self.url) as client:
                self.listed = [one["id"] for one in client.get("/v1/memories").json()["data"]]
                greets_and_answers(self, client, "memories", there=1)
                self.refused = client.post("/v1/memories", json={"text": "t" * 99})
            self.full = asyncio.run(fill(app, 11))

        def line(self):
            return next(self.lines)

    monkeypatch.setattr(running, "run", Server)
    words = ["--memories", "memories", "--memory-dtype", "float32", "--store", stored]
    words += ["--batch", 3, "--queue", 4, "--max-text-tokens", 80]
    assert cli.main(command(folders, *words)) == 0
    (server,) = served
    assert server.listed == ["stored"]
    assert server.greeting[2] == server.url and server.refused.status_code == 413
    # Both queues of --queue and an answered --batch.
    assert server.full == [200] * 11 + [503]


@pytest.mark.parametrize("given", ["option", "variable"])
def test_a_key_is_asked_for_and_its_commands_show_where_it_goes(folders, capsys, monkeypatch, given):
    found = []

    def run(app, listener):
        with TestClient(app, base_url="http://127.0.0.1") as client:
            for key in ("secret", "other"):
                found.append(client.get("/v1/models", headers={"authorization": f"Bearer {key}"}))

    monkeypatch.setattr(running, "run", run)
    words = ["--api-key", "secret"] if given == "option" else []
    if given == "variable":
        monkeypatch.setenv("GISTKIT_API_KEY", "secret")
    assert cli.main(command(folders, "--served-model-name", "one", "two", *words)) == 0
    shown = capsys.readouterr().out
    assert [response.status_code for response in found] == [200, 401]
    assert [one["id"] for one in found[0].json()["data"]] == ["one", "two"]
    assert shown.count('-H "authorization: Bearer $GISTKIT_API_KEY"') == 2 and "secret" not in shown


@pytest.mark.parametrize(("option", "variable"), [("", "secret"), (" \n", None), (None, ""), (None, "\n")])
def test_a_key_that_is_empty_is_no_open_server(capsys, monkeypatch, tmp_path, option, variable):
    if variable is not None:
        monkeypatch.setenv("GISTKIT_API_KEY", variable)
    words = [] if option is None else ["--api-key", option]
    assert cli.main(["serve", "--model", str(tmp_path), "--port", "0", *words]) == 2
    name = "GISTKIT_API_KEY" if option is None else "--api-key"
    assert capsys.readouterr().err == f"gistkit: {name}: expected a key, got an empty one\n"


def test_another_address_of_this_machine_answers_by_the_name_that_it_prints(folders, capsys, monkeypatch):
    answered = []

    def run(app, listener):
        url = re.search(r"curl (http://127\.0\.0\.2:\d+)/", capsys.readouterr().out)[1]
        with TestClient(app, base_url=url) as client:
            answered.append(client.get("/v1/models").status_code)
            answered.append(client.get("/v1/models", headers={"host": "127.0.0.3"}).status_code)

    monkeypatch.setattr(running, "run", run)
    assert cli.main(command(folders, "--host", "127.0.0.2")) == 0
    assert answered == [200, 403]


def test_a_server_listens_to_this_machine_alone_unless_told_otherwise():
    parse = cli.parser().parse_args
    assert parse(["serve"]).host == "127.0.0.1" in LOOPBACK


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port), "--model", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        f"gistkit: --port: expected a free address, got 127.0.0.1 and {port}: Address already in use\n"
    )


def test_chat_needs_a_model_with_a_template(folders, capsys):
    assert cli.main(command(folders, "--chat")) == 2
    assert "--chat: tokenizer: expected one with a chat template" in capsys.readouterr().err
