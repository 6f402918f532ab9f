"""What runs on a GPU for `make gpu`, tried without one: every row's code, the clock, budgets, stages, reports."""

from __future__ import annotations

import json
import re
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import gpu
import gpu_hopper
import gpu_run
import masks
import pytest
import torch
from gpu_cases import OURS, TINY, Case, cases
from gpu_clock import GpuClock, Rows, Times, WallClock, at_most

from tests.helpers import small_cases

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


def measured(path: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    status = gpu.main(["--device", "cpu", "--quick", "--json", str(path), *options])
    return status, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_runs(tmp_path: Path) -> None:
    """All cases and contenders, on a CPU at tiny sizes; what a CPU lacks is a row with its error."""
    status, rows = measured(tmp_path / "rows.jsonl")
    assert status == 0
    errors = {(row["form"], row["case"].rpartition(", ")[2]) for row in rows if "error" in row}
    assert errors == {
        ("SDPA, cuDNN", "forward"),
        ("SDPA, cuDNN", "forward + backward"),
        ("FlexAttention, compiled", "forward + backward"),
    }
    timed = [row for row in rows if "ms" in row]
    assert {row["case"] for row in timed if row["form"] == OURS} == {case.name for case in cases(512, TINY)}
    assert len(timed) > 40 and all(row["low"] <= row["ms"] <= row["high"] and row["host_ms"] > 0 for row in timed)
    ops = {re.split(r",| rotated", row["case"])[0] for row in timed}
    assert ops >= {"attention", "rope", "window_pool", "trie_mix", "ancestor_attention", "SeqPE's encoder"}
    assert {row["form"] for row in timed} >= {
        "SDPA, FlashAttention", "SDPA, dense mask", "FlexAttention, mask creation alone", "plain torch, compiled",
        "copy", "F.embedding",
    }  # fmt: skip
    assert all(row["gpu"] and row["commit"] and row["torch"] == torch.__version__ for row in rows)


def test_the_order_of_the_work() -> None:
    """Two lengths, then what is compiled at these, then the other lengths."""
    found = [(case.length, compiled) for case, compiled in gpu.work([(512, 600), (700,)], TINY, "rope")]
    assert list(dict.fromkeys(found)) == [
        (512, False), (600, False), (512, True), (600, True), (700, False), (700, True),
    ]  # fmt: skip
    assert min(gpu.FIRST + gpu.REST) >= 8192


def test_rates_are_shares_of_the_chips_limits() -> None:
    chip = gpu.Ceilings(800.0, 4.0)
    product = Case("product", 1, lambda *_: {}, work=4e12, unrated=("other",))
    copy = Case("copy", 1, lambda *_: {}, traffic=1e9)
    assert gpu.rates(product, "any", 10.0, chip) == pytest.approx({"tflops": 400, "share": 0.5})
    assert gpu.rates(product, "other", 10.0, chip) == {}
    assert gpu.rates(copy, "any", 0.5, chip) == pytest.approx({"tbps": 2, "share": 0.5})
    assert gpu.rates(Case("sum", 1, lambda *_: {}, work=1e9, shared=False), "any", 1.0, chip) == {"tflops": 1.0}
    assert gpu.rates(Case("none", 1, lambda *_: {}), "any", 1.0, chip) == {}


def fails(*_: Any) -> Any:
    raise RuntimeError("no such\n kernel")


def test_the_chips_limits_are_measured() -> None:
    class Clock:
        def measure(self, call: Callable[[], object]) -> Times:
            # A product of two matrices takes 2 ms, a copy of eight 4 ms.
            found = call()
            assert isinstance(found, torch.Tensor) and found.shape[-2:] == (64, 64)
            return Times(0, 2.0 if found.dim() == 2 else 4.0, 9, 1, 0)

    found = gpu.Ceilings.measured(Clock(), "cpu", 64)
    assert found.tflops == pytest.approx(2 * 64**3 / 2e-3 * 1e-12)
    assert found.tbps == pytest.approx(2 * 8 * 64**2 * 2 / 4e-3 * 1e-12)


def run_of(path: Path, forms: Callable[[], dict[str, Callable[[], Any]]], seconds: float = 9.0) -> list[dict[str, Any]]:
    rows = Rows(path, {"gpu": "some"})
    case = Case("case", 1, lambda *_: forms())
    gpu.run(case, False, WallClock(), rows, "cpu", gpu.Ceilings(1.0, 1.0), time.monotonic() + seconds)
    # Not closed: what was added is there.
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_contender_that_fails_is_a_row(tmp_path: Path) -> None:
    rows = run_of(tmp_path / "rows", lambda: {"bad": fails, "good": lambda: 1})
    assert [(row["form"], "ms" in row) for row in rows] == [("bad", False), ("good", True)]
    assert rows[0]["error"] == "RuntimeError: no such kernel" and rows[0]["gpu"] == "some"
    (row,) = run_of(tmp_path / "others", fails)
    assert row["form"] == "making the contenders" and row["error"].endswith("no such kernel")


def test_a_contender_that_does_not_end_is_a_row(tmp_path: Path) -> None:
    (row,) = run_of(tmp_path / "rows", lambda: {"slow": lambda: time.sleep(5)}, seconds=0.05)
    assert row["error"].startswith("TimeoutError: expected an end within")
    with at_most(5):
        pass
    time.sleep(0.01)


def test_a_budget_ends_the_run(tmp_path: Path) -> None:
    status, rows = measured(tmp_path / "rows", "--budget", "0")
    assert (status, rows) == (0, [])


def test_a_gpu_that_is_lost_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "check", fails)
    monkeypatch.setattr(gpu.harness, "ROOT", tmp_path)
    status, rows = measured(tmp_path / "rows", "--save")
    assert status == 1 and rows[-1]["form"] == "SDPA, cuDNN"
    # What there was stays.
    assert not (tmp_path / "runs").exists()


def test_all_rows_are_saved_when_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.harness, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "work", lambda *_: iter([(next(cases(512, TINY)), False)]))
    rows = measured(tmp_path / "rows", "--save")[1]
    (saved,) = tmp_path.glob("runs/benchmarks/*/gpu.jsonl")
    assert rows and saved.read_text() == (tmp_path / "rows").read_text()
    measured(tmp_path / "rows", "--save", "--budget", "0")
    assert saved.read_text()
    with pytest.raises(SystemExit):
        measured(tmp_path / "rows", "--save", "--only", "rope")
    assert "--only: expected none with --save" in capsys.readouterr().err


@pytest.mark.slow
def test_the_clock_flushes_waits_and_times_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    times = iter(range(10**6))

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")
            self.at = next(times)

        def elapsed_time(self, end: Event) -> float:
            return 2.0 * (end.at - self.at)

    properties = SimpleNamespace(L2_cache_size=1 << 10, clock_rate=10**6)
    fake = SimpleNamespace(
        get_device_properties=lambda _: properties,
        synchronize=lambda: done.append("synchronize"),
        _sleep=lambda cycles: done.append("sleep") or cycles > 0 or fails(),
        Event=Event,
    )
    monkeypatch.setattr(torch, "cuda", fake)
    clock = GpuClock(device="cpu")
    found = clock.measure(lambda: done.append("call"))
    assert (found.low, found.median, found.high) == (2.0, 2.0, 2.0) and found.host >= 0
    assert (
        done[-1] == "synchronize"
        and done[-1 - 4 * found.runs : -1] == ["sleep", "record", "call", "record"] * found.runs
    )
    assert clock._flush.numel() >= 4 << 10


def test_one_call_for_a_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--once", "--quick", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name}" in f"\n{said}" for name in gpu.PROFILED)


@NO_GPU
def test_without_a_gpu_the_benchmark_and_the_run_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu.main([])
    assert stopped.value.code == 2
    assert gpu_run.main(["check", "--out", str(tmp_path / "out")]) == 3
    assert re.search("no GPU is there|built without CUDA", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_run.Run:
    monkeypatch.setattr(gpu_run, "BUILD", tmp_path)
    (tmp_path / "out").mkdir()
    return gpu_run.Run("check", tmp_path / "out", budget=60)


def test_stages_run_side_by_side_and_leave_a_log(run: gpu_run.Run, capsys: pytest.CaptureFixture[str]) -> None:
    def shell(command: str) -> list[str]:
        return ["sh", "-c", command]

    # Each waits for what the other leaves.
    meet = shell("touch $FOLDER/$0; until test -e $FOLDER/$1; do sleep 0.05; done; echo $SAID")
    folder = str(run.out)
    stage = run.stage("both", {"one": [*meet, "a", "b"], "other": [*meet, "b", "a"]}, SAID="hello", FOLDER=folder)
    assert stage.result == "passed" and run.log.read_text().count("\nhello\n") == 2
    endless = shell("sleep 600")
    stage = run.stage("bad", {"wrong": shell("echo what; exit 4"), "endless": endless}, limit=3)
    assert (stage.result, stage.note) == ("failed", "wrong, endless took too long")
    assert run.stage("late", {"endless": endless}, limit=0.1).result == "stopped"
    said = capsys.readouterr().out
    assert "\nwhat\n" in said and "check: bad failed," in said


def test_reports_become_one(tmp_path: Path) -> None:
    (tmp_path / "one.xml").write_text(
        '<testsuites><testsuite name="pytest" tests="3" failures="1" errors="0" skipped="1">'
        '<testcase name="a"/></testsuite></testsuites>'
    )
    found = gpu_run.join([tmp_path / "one.xml", tmp_path / "two.xml"], tmp_path / "junit.xml")
    assert found == {"tests": 3, "failures": 1, "errors": 0, "skipped": 1, "files without an end": 1}
    suites = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [suite.get("name") for suite in suites] == ["one", "two"] and suites.find(".//error") is not None


@pytest.mark.parametrize("rehearse", [False, True])
def test_the_calls_and_their_stages(
    rehearse: bool,
    run: gpu_run.Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All of it but the commands themselves, which are looked at."""
    seen: dict[str, str] = {}

    def stage(self: gpu_run.Run, name: str, commands: Any, limit: float | None = None, **env: str) -> gpu_run.Stage:
        assert limit is None or limit <= self.left
        seen[f"{self.name} {name}"] = " ".join(str(part) for command in commands.values() for part in command)
        return self.note(gpu_run.Stage(name, "passed", 0))

    facts = {"gpu": "some", "capability": "9.0"}
    monkeypatch.setattr(gpu_run, "gpu", lambda: ({}, "no GPU is there") if rehearse else (facts, ""))
    monkeypatch.setattr(gpu_run, "cuda_home", lambda: tmp_path)
    monkeypatch.setattr(gpu_run, "tool", lambda name: name)
    monkeypatch.setattr(gpu_run.Run, "stage", stage)
    out = tmp_path / "out"
    assert gpu_run.main(["all", "--out", str(out), *(["--rehearse"] if rehearse else [])]) == 0
    build = seen["check build"]
    assert all(part in build for part in ("--no-index", "--no-build-isolation", "--no-deps", "--target", "=90a-real"))
    only = "check memcheck, check racecheck, bench ncu"
    if rehearse:
        only = "check collect, check small cases"
    shared = "check build, check load, check tests, bench build, bench load, bench benchmark, bench hopper, bench steps"
    assert sorted(seen) == sorted([*only.split(", "), *shared.split(", ")])
    assert ("-m not gpu" if rehearse else "-m gpu") in seen["check tests"]
    assert ("--device cpu --quick" if rehearse else "--budget 570") in seen["bench benchmark"]
    for command in seen.values():
        assert all(Path(path).exists() for path in re.findall(rf"{gpu_run.ROOT}/(?:tests|benchmarks)/\S+\.py", command))
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary) == ["check", "bench"]
    for its in summary.values():
        assert its["rehearsal"] is rehearse and [x["name"] for x in its["stages"]][:2] == ["build", "load"]
    assert ("nothing ran on a GPU: no GPU is there" in capsys.readouterr().out) is rehearse
    assert len([path for path in out.rglob("*") if path.is_file()]) <= 5


def test_a_sitting_of_each_trained_compressor(
    run: gpu_run.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, tuple[list[str], float | None]] = {}

    def stage(self: gpu_run.Run, name: str, commands: Any, limit: float | None = None, **env: str) -> gpu_run.Stage:
        seen[name] = [str(part) for command in commands.values() for part in command], limit
        return self.note(gpu_run.Stage(name, "passed", 0))

    monkeypatch.setattr(gpu_run, "cuda_home", lambda: tmp_path)
    monkeypatch.setattr(gpu_run.Run, "stage", stage)
    monkeypatch.setattr(gpu_run, "ROOT", tmp_path)
    whole = gpu_run.Run("models", run.out, budget=1700)
    gpu_run.models(whole, "90a-real", rehearse=False)
    assert list(seen) == ["build", "load"] and "runs/models" in whole.stages[-1].note
    (tmp_path / "runs" / "models" / "text").mkdir(parents=True)
    (tmp_path / "runs" / "models" / "text" / "text.json").write_text("{}")
    gpu_run.models(whole, "90a-real", rehearse=False)
    assert list(seen)[2:] == list(gpu_run.TRAINED)
    source = (BENCHMARKS.parent / "lab" / "models" / "make.py").read_text()
    assert set(gpu_run.TRAINED) == set(re.findall(r'"(smollm2-\S+)": Model\(', source))
    for name in gpu_run.TRAINED:
        command, limit = seen[name]
        words = dict(zip(command[3::2], command[4::2], strict=True))
        assert command[2] == name and words["--batch"] == "80"
        # The time for writing the weights is left.
        assert limit is not None and limit - 70 < 60 * float(words["--minutes"]) < limit - 50
    # No time passed: the first has half of the budget, and the second all that is left.
    assert [round(seen[name][1] or 0) for name in gpu_run.TRAINED] == [850, 1700]


def test_tools_that_are_absent_are_said(run: gpu_run.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "tool", lambda name: None)
    gpu_run.sanitize(run, rehearse=False)
    gpu_run.profile(run)
    assert [(stage.name, stage.result) for stage in run.stages] == [
        ("memcheck", "absent"), ("racecheck", "absent"), ("ncu", "absent"),
    ]  # fmt: skip
    monkeypatch.setattr(gpu_run, "cuda_home", lambda: None)
    assert not gpu_run.build(run, "90a-real") and "nvcc" in run.stages[-1].note


def test_what_rounds_call_are_gradients() -> None:
    tensors = [torch.randn(1, heads, 40, 16) for heads in (4, 2, 2)]
    plan = masks.PLANS["causal"](40)
    calls = gpu_hopper.contenders_of_gradients(tensors, plan, False, gpu_hopper.FORMS)
    assert set(calls) == {*gpu_hopper.FORMS, "gistkit, sums in any order"}
    expected, *others = (call() for call in calls.values())
    assert [g.shape for g in expected] == [t.shape for t in tensors]
    assert all(torch.equal(a, b) for other in others for a, b in zip(expected, other, strict=True))


def test_architectures() -> None:
    assert [gpu_run.architecture(x) for x in ("8.0", "9.0", "10.0", "12.1")] == [
        "80-real", "90a-real", "100-real", "121-real",
    ]  # fmt: skip


def test_small_cases_have_a_command_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["small_cases.py", "--device", "cpu", "--cases", "gelu", "trie"])
    runpy.run_path(str(Path(small_cases.__file__)), run_name="__main__")
    assert re.findall(r"^(\w+): [\d.]+ s$", capsys.readouterr().out, re.MULTILINE) == ["gelu", "trie"]
