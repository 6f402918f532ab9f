"""Errors reach no further than their cause: a tokenizer that panics, a disk that is full or read-only, a file."""

import errno
import logging
import os
import re
import shutil

import pytest
import safetensors
from clients import added, answer_of, asked

from gistkit_serve.server import repository as repositories
from gistkit_serve.server.errors import storage_failed
from tests.helpers.stores import make_compressor


class Panic(BaseException):
    """What a panic in Rust is to Python: no Exception."""


def test_a_panic_of_the_tokenizer_is_one_requests_error(client, monkeypatch, compressor, logged):
    memory = added(client, "The gate code is 4471.")
    want = answer_of(asked(client, memory, "What is it?"))

    def panic(*_, **__):
        raise Panic("retry-limit-in-match over")

    with monkeypatch.context() as patch:
        patch.setattr(type(compressor.tokenizer), "__call__", panic)
        response = client.post("/v1/memories", json={"text": "x"})
    assert response.status_code == 500 and response.json()["error"]["code"] == "failed"
    assert client.get("/health").status_code == 200
    assert answer_of(asked(client, memory, "What is it?")) == want


def test_health_says_when_nobody_answers(client):
    worker = client.state.worker
    worker.close()
    response = client.get("/health")
    assert response.status_code == 503 and response.json()["error"]["code"] == "worker_ended"


@pytest.mark.parametrize(
    ("number", "status", "code"), [(errno.ENOSPC, 507, "disk_full"), (errno.EROFS, 503, "storage_failed")]
)
def test_a_disk_that_takes_nothing_leaves_answers_as_they_are(client, monkeypatch, number, status, code):
    memory = added(client, "The gate code is 4471.")
    want = answer_of(asked(client, memory, "What is it?"))

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(repositories.Memory, "save", refuse)
        patch.setattr(repositories.Path, "unlink", refuse)
        patch.setattr(repositories.os, "utime", refuse)
        added_now = client.post("/v1/memories", json={"text": "more"})
        removed = client.delete(f"/v1/memories/{memory}")
        for response in (added_now, removed):
            assert response.status_code == status and response.json()["error"]["code"] == code
        assert answer_of(asked(client, memory, "What is it?")) == want
    # What could not be removed is there, and goes when it can.
    assert client.get(f"/v1/memories/{memory}").status_code == 200
    assert client.delete(f"/v1/memories/{memory}").status_code == 200
    assert not list(client.repository.folder.glob("*.gist"))


def test_an_error_without_a_number_says_nothing_of_paths():
    assert "/srv" not in str(storage_failed(OSError("/srv/memories/a.gist: damaged")))


def test_an_error_of_a_route_has_the_shape_of_all_and_its_line(client, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "gistkit_serve")

    def fails():
        raise RuntimeError("/srv/memories")

    monkeypatch.setattr(client.repository, "entries", fails)
    response = client.get("/v1/memories", headers={"x-request-id": "mine"})
    error = {"message": "the server failed: RuntimeError", "type": "server_error", "param": None, "code": "failed"}
    assert response.status_code == 500 and response.json() == {"error": error}
    assert response.headers["x-request-id"] == "mine"
    assert any(record.exc_info and "/srv" in str(record.exc_info[1]) for record in caplog.records)
    assert re.search(r"^mine .* GET /v1/memories 500 ", caplog.messages[-1])


def test_another_compressors_file_fails_its_own_question(serving):
    with serving(ram_bytes=0) as client:
        good, bad = added(client, "The gate code is 4471."), added(client, "Olga keeps the key.")
        want = answer_of(asked(client, good, "What is it?"))
        make_compressor(seed=1).encode([[1, 2, 3, 4]]).save(client.repository.folder / "foreign")
        shutil.move(client.repository.folder / "foreign", client.repository.folder / f"{bad}.gist")
        assert asked(client, bad, "Who?").status_code == 404
        assert answer_of(asked(client, good, "What is it?")) == want


@pytest.mark.parametrize(
    "error",
    # As safetensors tells of too many open files, and of an mmap.
    [FileNotFoundError("none"), RuntimeError("unable to mmap"), MemoryError("none"), OSError(errno.EIO, "broken")],
)
def test_a_file_that_cannot_be_read_for_now_answers_again_later(serving, monkeypatch, error):
    def fails(*_, **__):
        raise error

    with serving(ram_bytes=0) as client:
        memory = added(client, "The gate code is 4471.")
        want, size = answer_of(asked(client, memory, "What is it?")), client.repository.disk_bytes
        with monkeypatch.context() as patch:
            patch.setattr(safetensors, "safe_open", fails)
            response = asked(client, memory, "What is it?")
            assert response.status_code == 503 and response.json()["error"]["code"] == "storage_failed"
            assert len(client.repository) == 1 and client.repository.disk_bytes == size
        assert answer_of(asked(client, memory, "What is it?")) == want
    # At a start too.
    with monkeypatch.context() as patch:
        patch.setattr(safetensors, "safe_open", fails)
        with serving() as client:
            about = f"/v1/memories/{memory}"
            for response in (asked(client, memory, "What is it?"), client.get(about), client.delete(about)):
                assert response.status_code == 503 and response.json()["error"]["code"] == "storage_failed"
            patch.undo()
            assert client.get(about).json()["id"] == memory and client.repository.disk_bytes == size
            assert answer_of(asked(client, memory, "What is it?")) == want


def test_a_start_reads_each_file_once_and_keeps_the_newest_in_ram(serving, monkeypatch, compressor):
    with serving() as client:
        names = [added(client, f"text {number}") for number in range(6)]
        nbytes = client.repository.entry(names[0]).nbytes
    reads, load = [], repositories.Memory.load
    monkeypatch.setattr(repositories.Memory, "load", lambda path, *rest: reads.append(path) or load(path, *rest))
    looks, fingerprints = [], compressor.fingerprints
    monkeypatch.setattr(compressor, "fingerprints", lambda: looks.append(1) or fingerprints())
    with serving(ram_bytes=2 * nbytes, most=5) as client:
        # The weights are looked at for the folder and for --store, not for each file.
        assert len(reads) == 6 and len(looks) == 2
        entries = client.repository.entries()
        assert [entry.id for entry in entries] == names[1:]
        assert [entry.memory is not None for entry in entries] == [False, False, False, True, True]
