"""A repository keeps its limits, gives memories back to the bit, also to the next process, and opens no other file."""

import errno
import fcntl
import os
import tempfile
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
import torch

from gistkit.compress.memory import Memory
from gistkit_serve.server import Limits, MemoryRepository
from gistkit_serve.server.repository import temporary_folder
from tests.helpers.stores import make_compressor

GIGA = 10**9


def opened(folder, compressor, most=100, ram_bytes=GIGA, disk_bytes=GIGA):
    return MemoryRepository(folder, compressor, most=most, ram_bytes=ram_bytes, disk_bytes=disk_bytes)


def memory_of(compressor, number):
    return compressor.encode([[(number * 7 + index) % 250 for index in range(12)]])


def assert_same(one, other):
    assert one.source == other.source and one.lengths == other.lengths and one.maker == other.maker
    assert all(map(torch.equal, one.tensors, other.tensors)) and torch.equal(one.positions, other.positions)


def test_memories_come_back_to_the_bit_from_ram_from_their_files_and_after_a_restart(compressor, tmp_path):
    memories = [memory_of(compressor, number) for number in range(4)]
    # Two of them fit into RAM.
    repository = opened(tmp_path, compressor, ram_bytes=2 * memories[0].nbytes)
    names = [repository.add(memory).id for memory in memories]
    assert len(set(names)) == 4 and repository.ram_bytes == 2 * memories[0].nbytes
    assert [entry.memory is None for entry in repository.entries()] == [True, True, False, False]
    for name, memory in zip(names, memories, strict=True):
        assert_same(repository.get(name), memory)
        assert repository.ram_bytes <= 2 * memories[0].nbytes
    repository.get(names[0])
    with closing(
        MemoryRepository(tmp_path / "half", compressor, most=9, ram_bytes=GIGA, disk_bytes=GIGA, dtype=torch.half)
    ) as half:
        assert_same(half.get(half.add(memories[0]).id), memories[0].to(dtype=torch.half))
    repository.close()
    again = opened(tmp_path, compressor, ram_bytes=memories[0].nbytes)
    assert [entry.id for entry in again.entries()] == [*names[1:], names[0]]
    assert [entry.memory is None for entry in again.entries()] == [True, True, True, False]
    assert [(entry.tokens, entry.memory_tokens) for entry in again.entries()] == [(12, 4)] * 4
    for name, memory in zip(names, memories, strict=True):
        assert_same(again.get(name), memory)
    again.close()


@pytest.mark.parametrize("limit", ["number", "disk"])
def test_what_was_not_used_for_longest_goes_for_good_and_is_named(compressor, tmp_path, limit, logged):
    probe = opened(tmp_path / "probe", compressor)
    size = probe.add(memory_of(compressor, 0)).size
    repository = opened(
        tmp_path / "kept", compressor, **({"most": 2} if limit == "number" else {"disk_bytes": 2 * size})
    )
    first, second = (repository.add(memory_of(compressor, number)).id for number in range(2))
    repository.get(first)
    added = repository.add(memory_of(compressor, 2))
    third = added.id
    assert added.removed == (second,) and f"{second} is removed for good" in logged.text
    assert [entry.id for entry in repository.entries()] == [first, third]
    assert {path.stem for path in (tmp_path / "kept").iterdir()} == {first, third}
    assert repository.disk_bytes == 2 * size
    with pytest.raises(KeyError):
        repository.get(second)


def test_a_memory_larger_than_the_disk_may_hold_is_refused_and_leaves_no_file(compressor, tmp_path):
    repository = opened(tmp_path, compressor, disk_bytes=100)
    with pytest.raises(ValueError, match=r"text: expected a memory of at most 100 bytes, got [\d,]+"):
        repository.add(memory_of(compressor, 0))
    assert len(repository) == 0 and list(tmp_path.iterdir()) == []


def test_damaged_and_foreign_files_are_left_with_a_line_in_the_log(compressor, tmp_path, logged):
    repository = opened(tmp_path, compressor)
    good, bad, cut = (repository.add(memory_of(compressor, number)).id for number in range(3))
    repository.close()
    content = bytearray((tmp_path / f"{bad}.gist").read_bytes())
    content[-3] ^= 1
    (tmp_path / f"{bad}.gist").write_bytes(content)
    (tmp_path / f"{cut}.gist").write_bytes(content[:100])
    other = make_compressor(seed=1)
    memory_of(other, 0).save(tmp_path / f"{'a' * 32}.gist")
    (tmp_path / "notes.txt").write_text("mine")
    memory_of(compressor, 5).save(tmp_path / "report.gist")
    (tmp_path / f"{'b' * 32}.gist").symlink_to(tmp_path / f"{good}.gist")
    before = {path.name for path in tmp_path.iterdir()}
    again = opened(tmp_path, compressor, most=1)
    assert [entry.id for entry in again.entries()] == [good]
    assert {path.name for path in tmp_path.iterdir()} == before
    lines = [record.getMessage() for record in logged.records]
    assert len(lines) == 3 and all(line.startswith("left as it is: ") and "\n" not in line for line in lines)
    assert all(any(name in line for line in lines) for name in (bad, cut, "a" * 32))


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"nothing")], ids=["gone", "damaged"])
def test_a_file_that_is_gone_or_damaged_is_a_memory_less(compressor, tmp_path, logged, damage):
    repository = opened(tmp_path, compressor, ram_bytes=0)
    name = repository.add(memory_of(compressor, 0)).id
    damage(tmp_path / f"{name}.gist")
    with pytest.raises(KeyError):
        repository.get(name)
    assert len(repository) == 0 and f"left as it is: {tmp_path}" in logged.text


def test_a_folder_has_one_repository_at_a_time(compressor, tmp_path):
    repository = opened(tmp_path, compressor)
    with pytest.raises(OSError, match="expected a folder of no other server, got one that is in use"):
        opened(tmp_path, compressor)
    repository.close()
    opened(tmp_path, compressor).close()


def test_a_disk_without_locks_is_refused_and_folders_of_others_stay(compressor, tmp_path, monkeypatch):
    def unsupported(*given):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    others = tmp_path / "gistkit-serve-1.partial"
    others.mkdir()
    monkeypatch.setattr(fcntl, "flock", unsupported)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="not supported"), temporary_folder() as folder:
        opened(folder, compressor)
    assert list(tmp_path.iterdir()) == [others]


def test_what_another_user_left_stays(tmp_path, monkeypatch):
    others = tmp_path / "gistkit-serve-1.partial"
    others.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: others.stat().st_uid + 1)
        with temporary_folder():
            assert others.is_dir()
    with temporary_folder():
        assert not others.exists()


def test_what_cannot_be_read_at_the_start_is_read_later_and_stops_no_other(compressor, tmp_path, monkeypatch, logged):
    repository = opened(tmp_path, compressor)
    names = [repository.add(memory_of(compressor, number)).id for number in range(2)]
    repository.close()
    load = Memory.load

    def full(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Memory, "load", full)
        repository = opened(tmp_path, compressor)
        assert len(repository) == 0
        with pytest.raises(OSError, match="Too many open files"):
            repository.entry(names[0])

    def others(*given):
        """Another thread uses the repository at the same time."""
        thread = Thread(target=repository.entries)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        return load(*given)

    monkeypatch.setattr(Memory, "load", others)
    assert repository.entry(names[0]).id == names[0] and len(repository) == 1
    (tmp_path / f"{names[1]}.gist").write_bytes(b"nothing")
    for _ in range(2):
        with pytest.raises(KeyError):
            repository.get(names[1])
    assert logged.text.count("left as it is: ") == 1


def test_a_folder_that_cannot_be_written_is_named_at_the_start(compressor, tmp_path, monkeypatch, logged):
    monkeypatch.setattr(os, "access", lambda *_: False)
    opened(tmp_path, compressor).close()
    assert f"{tmp_path} cannot be written: " in logged.text


def test_what_an_interrupted_write_left_is_removed(compressor, tmp_path, monkeypatch):
    repository = opened(tmp_path, compressor)
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(5, "broken")))
    with pytest.raises(OSError, match="broken"):
        repository.add(memory_of(compressor, 0))
    assert len(repository) == 0 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["../report", "..", "", "a" * 31, "a" * 33, "A" * 32, "a" * 31 + "\n", "a" * 32 + "\n", "\0" * 32, "\u0660" * 32],
)
def test_no_other_name_than_an_id_becomes_a_file(compressor, tmp_path, name):
    (tmp_path / "report.gist").write_text("mine")
    repository = opened(tmp_path / "memories", compressor)
    for use in (repository.get, repository.entry, repository.remove, repository._path):
        with pytest.raises(KeyError):
            use(name)
    assert (tmp_path / "report.gist").read_text() == "mine"


def test_limits_are_checked(compressor, tmp_path):
    for name, value in (("most", 0), ("ram_bytes", -1), ("disk_bytes", 0)):
        with pytest.raises(ValueError, match=f"{name}: expected a whole number"):
            opened(tmp_path, compressor, **{name: value})
    with pytest.raises(ValueError, match="batch: expected a whole number >= 1, got 0"):
        Limits(batch=0)
