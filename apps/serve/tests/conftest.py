"""A server of a tiny compressor in this process."""

import logging
import socket
import threading
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("prometheus_client", reason="prometheus-client, which gistkit-serve brings, is not installed")
pytest.importorskip("httpx", reason="httpx, which the test extra brings, is not installed")

import httpx
import uvicorn
from clients import GIGA, Letters
from starlette.testclient import TestClient

from gistkit_serve.server import MemoryRepository, Offline, application, rows, running
from tests.helpers.stores import make_compressor


def made():
    compressor = make_compressor()
    compressor.tokenizer = Letters()
    return compressor


@pytest.fixture(scope="session")
def compressor():
    """The server's own, which nothing else may use while it runs."""
    return made()


@pytest.fixture(scope="session")
def same():
    """A compressor of the same weights, for what an answer has to be."""
    return made()


@pytest.fixture
def serving(compressor, tmp_path):
    """A function that opens a client of a server, with limits of the application and of its repository."""

    @contextmanager
    def serve(folder=tmp_path / "memories", most=100, ram_bytes=GIGA, disk_bytes=GIGA, store=(), **options):
        offline = Offline(store, compressor)
        repository = MemoryRepository(
            folder, compressor, most=most, ram_bytes=ram_bytes, disk_bytes=disk_bytes, offline=offline
        )
        app = application(compressor, repository, **{"names": ["tiny"], **options})
        try:
            with TestClient(app, base_url="http://127.0.0.1") as client:
                client.repository, client.state = repository, app.state
                yield client
        finally:
            repository.close()

    return serve


@pytest.fixture
def client(serving):
    with serving() as client:
        yield client


@pytest.fixture
def live(serving):
    """A function that opens a client of a server on a port of its own, which notices who goes."""

    @contextmanager
    def serve(**options):
        with serving(**options) as inner, socket.create_server(("127.0.0.1", 0)) as listener:
            server = running._Server(
                uvicorn.Config(inner.app, log_level="warning", lifespan="off", http=running._Connection)
            )
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=30) as client:
                    client.state, client.server = inner.state, server
                    yield client
            finally:
                server.should_exit = True
                thread.join(60)
                assert not thread.is_alive(), "expected the server's end within 60 s"

    return serve


@pytest.fixture
def gate(monkeypatch):
    """Prompts wait until this event is set; `gate.begun` is set when one waits."""
    opened, read = threading.Event(), rows.Rows.read
    opened.begun = threading.Event()

    def gated(block, tokens, reading):
        if reading:
            opened.begun.set()
            assert opened.wait(30)
        return read(block, tokens, reading)

    monkeypatch.setattr(rows.Rows, "read", gated)
    yield opened
    opened.set()


@pytest.fixture
def sizes(monkeypatch):
    """How many answers each pass goes on with."""
    found, read = [], rows.Rows.read

    def counted(self, tokens, reading):
        if tokens:
            found.append(len(tokens))
        return read(self, tokens, reading)

    monkeypatch.setattr(rows.Rows, "read", counted)
    return found


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.WARNING, "gistkit_serve")
    return caplog
