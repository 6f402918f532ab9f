"""Memories made offline, .gist files and stores, are asked about by name, and stay as they are."""

from pathlib import Path

import pytest
from clients import added, answer_of, asked

from gistkit_serve.server import Offline
from gistkit_serve.store import Store
from tests.helpers.stores import make_compressor

TEXTS = {"v1.2": "The gate code is 4471.", "a/b.txt": "Olga keeps the key.", "c.txt": "The survey began in May."}


@pytest.fixture
def made(tmp_path, same):
    """A memory file and a store of two documents."""
    same.compress(TEXTS["v1.2"]).save(tmp_path / "v1.2")
    store = Store.of(tmp_path / "store", same)
    for name in ("a/b.txt", "c.txt"):
        store.add(name, TEXTS[name], len(TEXTS[name]), same.compress(TEXTS[name]))
    return [tmp_path / "v1.2", tmp_path / "store"]


def files(paths):
    return {one: one.read_bytes() for path in paths for one in [path, *path.rglob("*")] if one.is_file()}


def test_memories_made_offline_are_asked_about_listed_and_never_removed(serving, same, made):
    before = files(made)
    with serving(store=made, most=1, ram_bytes=0) as client:
        for name, text in TEXTS.items():
            assert answer_of(asked(client, name, "Who?", max_tokens=12)) == same.ask(text, "Who?", max_new_tokens=12)
            entry = client.get(f"/v1/memories/{name}").json()
            assert (entry["id"], entry["tokens"]) == (name, len(text))
            assert entry["memory_tokens"] == same.compress(text).lengths[0]
            assert client.delete(f"/v1/memories/{name}").status_code == 403
        own = [added(client, text) for text in ("one", "two")]
        listed = [one["id"] for one in client.get("/v1/memories").json()["data"]]
        assert listed == [own[1], "c.txt", "a/b.txt", "v1.2"]
        joined = same.join([same.compress(TEXTS["v1.2"]), same.compress("two")])
        assert answer_of(asked(client, ["v1.2", own[1]], "Who?")) == same.ask(joined, "Who?", max_new_tokens=8)
        assert client.get("/health").json()["memories"] == 4
    assert files(made) == before


def test_what_another_compressor_made_or_two_call_alike_is_refused_with_its_file(compressor, made, tmp_path):
    other = make_compressor(seed=1)
    for path in made:
        with pytest.raises(ValueError, match="by another"):
            Offline([path], other)
    with pytest.raises(ValueError, match=r"v1\.2: expected names that no other store or file has, got 'v1.2'"):
        Offline([made[0], made[0]], compressor)
    with pytest.raises(OSError, match="nothing"):
        Offline([tmp_path / "nothing.gist"], compressor)


def test_a_memory_that_is_damaged_or_gone_since_fails_its_own_question(serving, made, logged):
    def damage(path):
        path.write_bytes(path.read_bytes()[:100])

    with serving(store=made) as client:
        for change in (damage, Path.unlink):
            change(made[0])
            response = asked(client, "v1.2", "Who?")
            error = response.json()["error"]
            assert response.status_code == 503 and error["code"] == "storage_failed"
            assert error["message"] == "the memory cannot be read" and str(made[0]) in logged.messages[-1]
        assert answer_of(asked(client, "a/b.txt", "Who?"))
