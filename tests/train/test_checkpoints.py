"""Checkpoints: at signals and by time, damaged ones, full disks, kills, and the metrics beside them."""

import contextlib
import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gistkit.common.signals import Interrupted
from gistkit.compress import FiveHundredX
from gistkit.train import checkpoint, read_metrics
from gistkit.train.metrics import Metrics
from gistkit.train.trainer import Trainer
from tests.helpers import train_worker
from tests.helpers.disks import limit
from tests.helpers.tiers import mostly_slow
from tests.helpers.train_worker import RECIPE, killed, make_batches, make_compressor, numbers, train, trained

pytestmark = pytest.mark.usefixtures("one_thread")

WORKER = Path(train_worker.__file__)
# Runs that are killed, each some times: one for 200 cases of other tests.
FUZZ = -(-int(os.environ.get("GISTKIT_FUZZ", "0")) // 200)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    train(out)
    return out


@pytest.fixture
def done(whole, tmp_path):
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "done")


def check_equal(out, whole):
    """Two runs have the same losses, and every step once; their last states are the same bit for bit."""
    assert numbers(read_metrics(out / "metrics.jsonl")) == numbers(read_metrics(whole / "metrics.jsonl"))
    ours, theirs = (load_file(checkpoint.find(folder)[-1]) for folder in (out, whole))
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def check_clean(out):
    """A folder holds what a run is to leave, and nothing else."""
    states = {path.name for path in checkpoint.find(out)}
    assert {path.name for path in out.iterdir()} == states | {"metrics.jsonl", "compressor"} and len(states) <= 2
    assert not list(out.rglob(".gistkit-*"))


def raising(at, *numbers):
    """Batches at whose step `at` the process gets signals."""

    def before(step):
        if step == at:
            for number in numbers:
                signal.raise_signal(number)

    return make_batches(before=before)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 3), (signal.SIGINT, 7)])
def test_a_signal_ends_a_run_after_its_step_and_it_goes_on_bit_for_bit(number, step, whole, tmp_path, capsys):
    before = signal.getsignal(number)
    with pytest.raises(
        Interrupted, match=rf"after step {step + 1} of 8; .*step-0000000{step + 1}.safetensors is saved"
    ):
        train(tmp_path, batches=raising(step, number), save_every=100)
    assert signal.getsignal(number) == before
    assert capsys.readouterr().err.count("ends after this step, with a checkpoint") == 1
    assert [path.name for path in checkpoint.find(tmp_path)] == [f"step-0000000{step + 1}.safetensors"]
    # Nothing is measured any more, not even where step 4 or the last one would be.
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == step + 1
    assert "loss" in read_metrics(tmp_path / "metrics.jsonl")[-1]
    train(tmp_path, resume=True, save_every=100)
    check_equal(tmp_path, whole)
    check_clean(tmp_path)


def test_a_run_goes_on_in_another_compressor_of_the_same_model(whole, tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path, batches=raising(3, signal.SIGTERM))
    # As in a notebook whose cell runs again: its adapters are the second of the model's.
    first = make_compressor()
    second = FiveHundredX(first.model, chunk=8, ratio=4, layout="epl", losses=("ae", "lm"), lora=4)
    assert second.adapters.names == {"encoder": "gistkit_1_encoder"}
    train(tmp_path, second, resume=True)
    check_equal(tmp_path, whole)


def test_a_kill_between_a_checkpoint_and_the_removal_of_the_oldest_leaves_none_too_many(tmp_path, monkeypatch):
    prune = checkpoint.prune

    def killed_at(folder, keep, step):
        if step == 6:
            raise RuntimeError("killed")
        prune(folder, keep, step)

    monkeypatch.setattr(checkpoint, "prune", killed_at)
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path, save_every=1, recipe=replace(RECIPE, steps=6))
    assert len(checkpoint.find(tmp_path)) == 3
    monkeypatch.undo()
    train(tmp_path, save_every=1, recipe=replace(RECIPE, steps=6), resume=True)
    assert [path.stem for path in checkpoint.find(tmp_path)] == ["step-00000005", "step-00000006"]


def test_a_second_signal_ends_a_run_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tmp_path, batches=raising(3, signal.SIGTERM, signal.SIGINT))
    assert not isinstance(caught.value, Interrupted)
    assert [path.stem for path in checkpoint.find(tmp_path)] == ["step-00000002"]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 3


def test_an_ignored_signal_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        train(tmp_path, batches=raising(1, signal.SIGINT), recipe=replace(RECIPE, steps=3), eval_every=None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpoint.find(tmp_path)[-1].stem == "step-00000003"


def test_checkpoints_come_by_time_too(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gistkit.train.trainer.time.monotonic", lambda: now[0])
    saved = []
    save = checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda path, *more, **named: (saved.append(path.stem), save(path, *more, **named))
    )

    def before(step):
        # Three minutes a step.
        now[0] += 180

    options = {"batches": make_batches(before=before), "save_every": 3, "eval_every": None}
    train(tmp_path / "a", **options)
    # Five minutes after the last one: not one step later, but two.
    assert [int(stem[-1]) for stem in saved] == [2, 3, 5, 6, 8]
    saved.clear()
    train(tmp_path / "b", save_minutes=None, **options)
    assert [int(stem[-1]) for stem in saved] == [3, 6, 8]


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def zeros(path):
    """As after a power cut, where a file has its length and nothing else."""
    path.write_bytes(bytes(path.stat().st_size))


def flip(path, place=0.7):
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 8
    path.write_bytes(content)


def flip_header(path):
    """A step more in the progress; the JSON stays right."""
    content = path.read_bytes()
    assert content.count(b'\\"step\\": 8,') == 1
    path.write_bytes(content.replace(b'\\"step\\": 8,', b'\\"step\\": 9,'))


def rewrite(path, change, keep_digest=True):
    """The file with changed tensors."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    change(tensors)
    if not keep_digest:
        del header["digest"]
    save_file(tensors, path, metadata=header)


def without_moments(path):
    rewrite(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("exp_avg_sq")])


DAMAGES = [cut, empty, zeros, flip, flip_header, without_moments]


@pytest.mark.parametrize("damage", mostly_slow(DAMAGES, cut, flip_header))
def test_a_damaged_checkpoint_gives_way_to_the_one_before(damage, whole, done):
    damage(checkpoint.find(done)[-1])
    told = r"step-00000008.safetensors: expected .*; the run goes on from .*step-00000006.safetensors instead"
    with pytest.warns(UserWarning, match=told):
        train(done, resume=True)
    check_equal(done, whole)
    check_clean(done)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(done, resume=True)


def test_a_damaged_checkpoint_does_not_count_among_those_kept(done):
    cut(checkpoint.find(done)[-1])
    with pytest.warns(UserWarning, match="goes on from"), pytest.raises(Interrupted):
        train(done, resume=True, batches=raising(6, signal.SIGINT))
    assert [path.stem for path in checkpoint.find(done)] == ["step-00000006", "step-00000007"]


def test_a_run_without_a_whole_checkpoint_is_refused_and_nothing_changes(done):
    for path in checkpoint.find(done):
        cut(path)
    before = {path.name: path.read_bytes() for path in done.glob("*.*")}
    compressor = make_compressor()
    weights = [parameter.clone() for _, parameter in compressor.trainable()]
    with pytest.raises(ValueError, match=r"00000008.safetensors: expected a training .*; the 1 before it are damaged"):
        train(done, compressor, resume=True)
    assert {path.name: path.read_bytes() for path in done.glob("*.*")} == before
    assert all(torch.equal(a, b) for a, (_, b) in zip(weights, compressor.trainable(), strict=True))


def test_a_trained_compressor_without_checkpoints_is_not_replaced(done):
    metrics = (done / "metrics.jsonl").read_bytes()
    for path in checkpoint.find(done):
        path.unlink()
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"expected checkpoints beside the trained compressor/ .*use another fold"):
            train(done, resume=resume)
    assert (done / "metrics.jsonl").read_bytes() == metrics


def test_what_a_state_lacks_or_has_too_much_is_named(done):
    """In states of earlier releases, without a digest: a digest finds all of it first."""
    path = checkpoint.find(done)[-1]
    content = path.read_bytes()
    first = next(name for name in load_file(path) if name.endswith("exp_avg_sq"))
    name = first.removesuffix(".exp_avg_sq")

    def refused(change, message):
        path.write_bytes(content)
        rewrite(path, change, keep_digest=False)
        compressor = make_compressor()
        optimizer = RECIPE.make_optimizer(parameter for _, parameter in compressor.trainable())
        with safe_open(path, framework="pt") as file:
            identity = json.loads(file.metadata()["identity"])
        with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: ')}{message}") as caught:
            checkpoint.load(path, identity, compressor.trainable(), optimizer)
        assert "\n" not in str(caught.value) and not optimizer.state
        fresh = make_compressor()
        for (_, ours), (_, theirs) in zip(compressor.trainable(), fresh.trainable(), strict=True):
            assert torch.equal(ours, theirs)
        return caught.type

    def without_all(tensors):
        for key in [key for key in tensors if key.startswith("optimizer.")]:
            del tensors[key]

    def set_(key, value):
        return lambda tensors: tensors.update({key: value})

    assert refused(lambda tensors: tensors.pop(first), re.escape(f"expected the tensor {first}, got none")) is (
        checkpoint.Damaged
    )
    told = "expected tensors of the optimizer after 8 steps, got none"
    assert refused(without_all, told) is checkpoint.Damaged
    refused(set_(first, torch.zeros(3)), rf"expected {re.escape(first)} with shape \(.*\), got \(3,\)")
    refused(
        set_("optimizer.other.step", torch.zeros(1)), "expected tensors of trained parameters, got optimizer.other.st"
    )
    weight = "model." + name.removeprefix("optimizer.")
    refused(set_(weight, torch.zeros(3)), r"expected .* with shape .*, got \(3,\); the state is of another compressor")
    # Such a state is otherwise read as ever.
    path.write_bytes(content)
    rewrite(path, lambda tensors: None, keep_digest=False)
    assert checkpoint.restore(path, make_compressor().trainable())["step"] == 8


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": "other"}, f"expected a training state of format {checkpoint.FORMAT}, got other"),
        ({"progress": "{"}, "expected progress in the header as JSON, got '{'"),
        ({"progress": "[]"}, "expected progress in the header by name, got list"),
        ({"identity": None}, "expected identity in the header as JSON, got None"),
        ({"digest": "0"}, "expected the content that was written, got another: its digest differs"),
    ],
)
def test_a_header_that_is_wrong_is_named(header, message, tmp_path):
    path = tmp_path / "step-00000001.safetensors"
    written = {"format": checkpoint.FORMAT, "identity": "{}", "progress": "{}"} | header
    save_file({"x": torch.zeros(1)}, path, metadata={name: text for name, text in written.items() if text is not None})
    with pytest.raises(checkpoint.Damaged, match=re.escape(f"{path}: {message}")):
        checkpoint.restore(path, [])


def test_every_flipped_bit_is_found(tmp_path):
    """Of a small state, in every byte of its header and its tensors."""
    layer = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = tmp_path / "step-00000001.safetensors"
    checkpoint.save(path, {"a": 1}, {"step": 1}, layer.named_parameters(), optimizer)
    content = path.read_bytes()
    unseen = []
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            found = checkpoint.load(path, {"a": 1}, layer.named_parameters(), optimizer)
        except ValueError:
            continue
        # What is spelled otherwise may mean the same.
        unseen.append(place) if found != {"step": 1} else None
    weights = load_file(path)["model.weight"] if path.write_bytes(content) else None
    assert unseen == [] and torch.equal(weights, layer.weight)


def test_old_orphans_are_removed_and_other_files_are_not(tmp_path):
    keep = [tmp_path / name for name in ("step-notes.partial", "mine.partial", ".gistkit-mine", ".tmpAbCdEf")]
    for path in keep:
        path.write_text("x")
    (tmp_path / "step-00000002.safetensors.partial").write_text("x")
    (tmp_path / ".gistkit-0123.partial").mkdir()
    (tmp_path / ".gistkit-0123.partial" / "step-00000003.safetensors").write_text("x")
    (tmp_path / "sub" / ".gistkit-4567.partial").mkdir(parents=True)
    before = os.umask(0o027)
    try:
        train(tmp_path)
    finally:
        os.umask(before)
    assert all(path.exists() for path in keep) and (tmp_path / "sub" / ".gistkit-4567.partial").exists()
    assert not list(tmp_path.glob("step-*.safetensors.partial")) and not list(tmp_path.glob(".gistkit-*.partial"))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("step-*.safetensors")} == {0o640}


def test_a_broken_line_of_metrics_is_named_and_a_cut_one_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for bad, why in (
        (b'{"step": 1, "l', "Unterminated"),
        (b"[1]", "no record with a step"),
        (b'{"loss": 1}', "no record"),
    ):
        path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 2}\n')
        with pytest.raises(
            ValueError, match=rf"metrics.jsonl, line 2: expected a record of metrics as JSON, got .*{why}"
        ):
            read_metrics(path)
        with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
            Metrics(tmp_path, step=2)
        assert path.read_bytes().count(b"\n") == 3
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    with pytest.warns(UserWarning, match=r"metrics.jsonl, line 2: left out, since it was cut short"):
        assert read_metrics(path) == [{"step": 1}]
    # A whole record of which only the end of the line is missing.
    path.write_bytes(b'{"step": 1}\n{"step": 2, "loss": 0.10}')
    assert read_metrics(path)[-1] == {"step": 2, "loss": 0.1}
    metrics = Metrics(tmp_path, step=2)
    metrics.write({"step": 3})
    metrics.close()
    # What is kept is kept to the letter.
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2, "loss": 0.10}\n{"step": 3}\n'


def test_a_line_that_finds_no_space_leaves_no_half(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path)
    metrics.write({"step": 1})
    file = metrics._file.file

    class Full:
        """A disk with space for five more bytes."""

        left = 5

        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, content):
            if not self.left:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            count, self.left = self.left, 0
            return file.write(content[:count])

    monkeypatch.setattr(metrics._file, "file", Full())
    with pytest.raises(OSError, match=r"metrics.jsonl: expected 12 bytes of space to write it, got .* free \(No space"):
        metrics.write({"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.fixture(scope="module")
def processes():
    """Processes that begin at once: a server imports what they need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.train_worker"])
    return context


def ended(process, seconds=300):
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        pytest.fail(f"waited {seconds} s for the end of {process}")
    return process.exitcode


def check_full_disk(out, told, place=None):
    """The line of an error names file and space, and what the run left in `out` is whole."""
    assert re.match(rf"{re.escape(str(place or out))}/\S+: expected .* of space to write it, got .* free", told), told
    assert "\n" not in told and not list(out.rglob(".gistkit-*"))
    for path in checkpoint.find(out):
        assert checkpoint.restore(path, make_compressor(dropout=0.1).trainable())["step"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps = [record["step"] for record in read_metrics(out / "metrics.jsonl") if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))


@pytest.fixture(scope="module")
def whole_with_dropout(tmp_path_factory):
    out = tmp_path_factory.mktemp("dropout")
    torch.set_num_threads(1)
    train(out, make_compressor(dropout=0.1))
    return out


@pytest.mark.parametrize("size", mostly_slow([50, 1000], 1000))
def test_a_full_disk_is_told_in_one_line_and_loses_nothing(size, whole_with_dropout, tmp_path):
    """Too small for the first line, and for a checkpoint."""
    out = tmp_path / "run"
    with limit(size), pytest.raises(OSError) as caught:
        trained(out)
    check_full_disk(out, str(caught.value))
    train(out, make_compressor(dropout=0.1), resume=True)
    check_equal(out, whole_with_dropout)
    check_clean(out)


def test_a_disk_that_is_full_at_the_end_keeps_what_there_was(done, monkeypatch):
    export, before = Trainer._export, {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}

    def full(self):
        with limit(60):
            export(self)

    monkeypatch.setattr(Trainer, "_export", full)
    told = rf"^{re.escape(str(done / 'compressor'))}: expected .* of space to write it, got .* free \(File too large\)$"
    with pytest.raises(OSError, match=told):
        train(done, resume=True)
    assert {path: path.read_bytes() for path in done.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_the_checkpoints_before(whole_with_dropout, tmp_path):
    """A file system with space for two checkpoints, and not for a third beside them."""
    out, kept = tmp_path / "disk" / "run", tmp_path / "kept"
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size="$2" t "$1" && shift 2 && "$@"'
    space = ["unshare", "-Urm", "sh", "-c", script, "sh", tmp_path / "disk", "52k"]
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    work = ["sh", "-c", '"$0" "$1" trained "$2"; cp -r "$2" "$3"', sys.executable, WORKER, out, kept]
    shown = subprocess.run([*space, *work], capture_output=True, text=True)
    check_full_disk(kept, shown.stderr.splitlines()[-1].removeprefix("OSError: "), out)
    assert len(checkpoint.find(kept)) == 2 and "No space left on device" in shown.stderr
    train(kept, make_compressor(dropout=0.1), resume=True)
    check_equal(kept, whole_with_dropout)
    check_clean(kept)


def check_kills(processes, out, whole, seed, rounds, longest):
    """Processes are killed at random times up to `longest` seconds; the run goes on from what each left."""
    chance, kills = random.Random(seed), 0
    for _ in range(rounds):
        process = processes.Process(target=trained, args=(out,))
        process.start()
        process.join(chance.random() * longest)
        if process.exitcode is None:
            kills += 1
            number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        process.join(300)
        assert process.exitcode is not None, f"waited 300 s for the end of {process}"
        if checkpoint.find(out) and process.exitcode == 0:
            break
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "metrics.jsonl, line")
        train(out, make_compressor(dropout=0.1), resume=True, save_every=1)
    check_equal(out, whole)
    check_clean(out)
    return kills


@pytest.mark.slow
def test_a_run_killed_while_it_writes_goes_on_to_the_same_losses(processes, whole_with_dropout, tmp_path):
    """With dropout, so that random numbers drawn in a pass count too."""
    out = tmp_path / "killed"
    assert ended(processes.Process(target=killed, args=(out,))) == -signal.SIGKILL
    assert read_metrics(out / "metrics.jsonl")[-1]["step"] == 6 and checkpoint.find(out)[-1].stem == "step-00000004"
    assert list(out.glob(".gistkit-*.partial/step-*"))
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    with pytest.warns(UserWarning, match=r"metrics.jsonl, line 9: left out, since it was cut short"):
        train(out, make_compressor(dropout=0.1), resume=True)
    check_equal(out, whole_with_dropout)
    check_clean(out)


@pytest.mark.nightly
@pytest.mark.fuzz
def test_runs_killed_at_any_time_go_on_to_the_same_end(processes, whole_with_dropout, tmp_path):
    # The server is up, and a run's time is known.
    assert ended(processes.Process(target=trained, args=(tmp_path / "first",))) == 0
    start = time.monotonic()
    assert ended(processes.Process(target=trained, args=(tmp_path / "timed",))) == 0
    longest = 0.8 * (time.monotonic() - start)
    kills = sum(
        check_kills(processes, tmp_path / str(seed), whole_with_dropout, seed, 3 + 5 * (FUZZ > 0), longest)
        for seed in range(max(1, FUZZ))
    )
    assert kills > 0
