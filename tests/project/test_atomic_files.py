"""Files are complete or absent, whoever writes them at the same time and however full the disk is."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gistkit.common import files
from gistkit.common.files import remove_partials, replacing, write_bytes, write_tensors, write_text


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def left(folder):
    """What is in a folder beside the file that tests write."""
    return sorted(path.name for path in folder.iterdir() if path.name != "file")


@pytest.mark.parametrize("write", ["bytes", "text", "tensors"])
def test_a_file_is_written_whole_with_the_mode_of_the_umask(write, tmp_path, umask):
    path = tmp_path / "new" / "file"
    if write == "tensors":
        write_tensors(path, {"a": torch.arange(6.0).view(2, 3).T}, {"x": "y"})
        assert torch.equal(load_file(path)["a"], torch.arange(6.0).view(2, 3).T)
    else:
        write_bytes(path, "é".encode()) if write == "bytes" else write_text(path, "é")
        assert path.read_text("utf-8") == "é"
    assert path.stat().st_mode & 0o777 == 0o640 and left(path.parent) == []


def test_of_a_link_the_file_is_replaced_where_it_is(tmp_path):
    link, place = tmp_path / "link", tmp_path / "big" / "file"
    link.symlink_to("big/file")
    for text in ("new", "newer"):
        write_text(link, text)
        assert link.is_symlink() and place.read_text() == text and left(place.parent) == []


def test_a_write_that_fails_leaves_the_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_text(path, "before")
    with pytest.raises(KeyError), replacing(path) as partial:
        partial.write_text("half")
        raise KeyError
    assert path.read_text() == "before" and left(tmp_path) == []


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt, PermissionError])
@pytest.mark.parametrize("step", ["sync", "stale", "first", "first after stale", "second"])
def test_files_that_replace_others_leave_the_old_ones_or_no_mixture(tmp_path, monkeypatch, step, failure):
    """What fails is the folder's sync, the removal of a stale file, or the move of the first or second new one."""
    folder, moves = tmp_path / "folder", []
    stale = [] if step == "first" else [folder / "stale"]
    for name in ("a", "last", "stale"):
        write_text(folder / name, "old")
    sync, unlink, replace = files.sync, Path.unlink, os.replace

    def fails(at):
        if failure is not None and step.removesuffix(" after stale") == at:
            raise failure(errno.EACCES, "refused")

    def moved(source, place):
        moves.append(Path(place).name)
        fails({"a": "first", "b": "second"}.get(moves[-1]))
        replace(source, place)

    monkeypatch.setattr(files, "sync", lambda path: fails("sync" if path == folder else None) or sync(path))
    monkeypatch.setattr(Path, "unlink", lambda path, **how: fails("stale") or unlink(path, **how))
    monkeypatch.setattr(os, "replace", moved)
    try:
        with files.replacing_files(folder, last="last", stale=stale) as partial:
            for name in ("a", "b", "last"):
                (partial / name).write_text("new")
    except (KeyboardInterrupt, PermissionError):
        told = True
    else:
        told = False
    found = {path.name: path.read_text() for path in folder.iterdir()}
    # Some file systems refuse the sync of folders.
    assert told == (failure is not None and (failure, step) != (PermissionError, "sync"))
    if not told:
        assert found == {"a": "new", "b": "new", "last": "new"} | ({} if stale else {"stale": "old"})
    elif step in ("sync", "stale", "first"):
        assert found == {"a": "old", "last": "old", "stale": "old"}
    else:
        assert "last" not in found
    assert [*tmp_path.iterdir()] == [folder]


def test_of_concurrent_writers_the_last_wins_and_none_fails(tmp_path):
    path, failures = tmp_path / "file", []

    def write(letter):
        try:
            for _ in range(20):
                write_bytes(path, letter * 10_000)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(bytes([65 + k]),)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    content = path.read_bytes()
    assert failures == [] and len(content) == 10_000 and len(set(content)) == 1 and left(tmp_path) == []


def _stall(path, ready):
    with replacing(path) as partial:
        partial.write_text("half")
        ready.set()
        signal.pause()


def test_what_a_killed_writer_leaves_is_removed_and_a_running_one_keeps_its_own(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    writer = context.Process(target=_stall, args=(tmp_path / "file", ready))
    writer.start()
    assert ready.wait(20)
    remove_partials(tmp_path)
    (partial,) = left(tmp_path)
    assert partial.startswith(files.PREFIX) and partial.endswith(files.SUFFIX)
    writer.kill()
    writer.join()
    assert left(tmp_path) == [partial]
    remove_partials(tmp_path)
    assert left(tmp_path) == []


def test_only_our_own_folders_are_removed(tmp_path):
    (tmp_path / "other.partial").write_text("x")
    (tmp_path / ".gistkit-kept").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / f"{files.PREFIX}link{files.SUFFIX}").symlink_to(tmp_path / "target")
    before = left(tmp_path)
    remove_partials(tmp_path)
    assert left(tmp_path) == before
    remove_partials(tmp_path / "absent")


FULL = """
import sys
from pathlib import Path
import torch
from gistkit.common.files import write_tensors
folder = Path(sys.argv[1])
write_tensors(folder / "file", {"a": torch.zeros(10)})
try:
    write_tensors(folder / "file", {"a": torch.zeros(1_000_000)})
except OSError as error:
    print(error.errno, error)
print(*(path.name for path in folder.iterdir()), (folder / "file").stat().st_size < 1000)
"""


@pytest.mark.slow
def test_a_full_disk_is_told_with_the_space_in_one_line(tmp_path):
    script = 'mount -t tmpfs -o size=2m t "$1" && shift && exec "$@"'
    space = ["unshare", "-Urm", "sh", "-c", script, "sh", tmp_path]
    try:
        if subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
            pytest.skip("no file system may be mounted here")
    except FileNotFoundError:
        pytest.skip("no unshare")
    shown = subprocess.run([*space, sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, check=True)
    error, folder = shown.stdout.splitlines()
    assert folder == "file True"
    assert error.startswith(f"{errno.ENOSPC} {tmp_path}/file: expected 4.0 MB of space to write it, got 2.1 MB free (")


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("x")
    cases = {
        tmp_path / "file" / "below": FileExistsError,
        tmp_path: OSError,
        Path("/dev/null"): OSError,
        tmp_path / ("n" * 300): OSError,
    }
    for path, kind in cases.items():
        with pytest.raises(kind, match=f"^{re.escape(str(path))}: expected a file that can be written, got ") as caught:
            write_text(path, "x")
        assert "\n" not in str(caught.value) and "[Errno" not in str(caught.value)
        assert caught.value.errno is not None
    assert Path("/dev/null").is_char_device()


def test_a_partial_that_another_start_removes_before_it_is_opened_is_made_again(tmp_path, monkeypatch):
    opened, own = [], os.open

    def removed_first(path, *arguments, **options):
        if Path(path).is_dir() and not opened:
            opened.append(path)
            remove_partials(tmp_path)
        return own(path, *arguments, **options)

    monkeypatch.setattr("gistkit.common.files.os.open", removed_first)
    write_text(tmp_path / "a.txt", "whole")
    assert opened and (tmp_path / "a.txt").read_text() == "whole" and os.listdir(tmp_path) == ["a.txt"]
