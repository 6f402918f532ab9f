"""Results files of every study as tables and pictures, and the command that shows them."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from math import log
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from gistkit import cli
from gistkit_lab.cli import view_results
from gistkit_lab.studies import filler, positions, registry, results, shown
from tests.helpers.tiers import mostly_slow

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = {"processor": "some"}
# The pictures of each file.
NUGGETS = {"perplexity", "ae-types", "ae-text", "lm-types", "lm-text"}
VARIANTS = {f"{variant}-{name}" for variant in ("x500-0.001", "x500-0.003", "icae-0.001", "icae-0.003")
            for name in ("loss", "attention")}  # fmt: skip
STAGED = {
    f"icae-{variant}staged-bfloat16-0.001-{name}" for variant in ("matched-", "") for name in ("loss", "attention")
}
COMMITTED: dict[str, set[str]] = {
    "epl": {"loss"},
    "compression-loss": {"fine-tuning"},
    "smollm2-short": VARIANTS,
    "smollm2-long": {"x500-0.001-loss", "x500-0.001-attention"},
    "smollm2-staged": STAGED,
    "pooling": set(),
    "in-place-short": {"ratios", "curves"},
    "in-place-quick": {"ratios", "curves"},
    "in-place-long": {"ratios", "curves"},
    "pairs-quick": {"ratios", "curves", "gated-text-ratios", "gated-text-curves"},
    "pairs-varied": {"ratios", "curves"},
    "facts-quick": {"curves"},
    "nuggets-short": NUGGETS,
    "nuggets-quick": NUGGETS,
    "length-short": {"length"},
    "retrieval-short": {"retrieval", "documents-retrieval"},
    "resolution-digits-short": {"resolution", "canvas-resolution"},
    "voco-digits-quick": {"accuracy", "curves"},
    "greedy": set(),
}


def test_a_commit_is_marked_where_what_measures_differs_from_it(tmp_path) -> None:
    git = lambda *words: subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)  # noqa: E731
    git("init", "-q")
    own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    git(*own, "commit", "-q", "--allow-empty", "-m", "first")
    for name, marked in (("docs/a.md", False), ("benchmarks/results/a.jsonl", False), ("benchmarks/a.py", True)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        assert results.commit(tmp_path).endswith("+changes") == marked, name
    (tmp_path / "benchmarks/a.py").unlink()
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/study.py").touch()
    assert results.commit(tmp_path).endswith("+changes")


def committed(study: str) -> Path:
    return RESULTS / f"{study}.jsonl"


def test_the_committed_results_are_few_and_small() -> None:
    listed = subprocess.run(["git", "ls-files", RESULTS], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = [ROOT / name for name in listed.splitlines()]
    if not files:
        pytest.skip("no git here")
    # A file for each study and preset, one for each machine's speed, and a few pictures; another one needs a reason.
    assert len(files) <= 44
    assert sum(path.stat().st_size for path in files if path.exists()) <= 3_000_000
    studies = {path.stem for path in RESULTS.glob("*.jsonl")} - {
        "lengths",
        "lookup",
        "presses-smollm2",
        "presses-smollm2-by-hand",
        "presses-gemma3-long",
        "presses-smollm2-long",
        "refine-smollm2",
    }
    assert studies == set(COMMITTED)


def test_a_table_has_a_row_an_arm_with_the_seeds_mean_and_reach() -> None:
    study = registry.find("length")
    of = lambda seed: {"held_out": {"8": 1.0, "16": 2.0}, "test": {"8": log(4 + seed), "16": log(150)}}  # noqa: E731
    runs = [positions.Run(arm, seed=seed, seconds=9.6, **of(seed)) for seed in (1, 0) for arm in ("alibi", "nope")]
    header, nope, alibi = study.rows([*runs, positions.Run("alibi", seed=2, test=runs[0].test)], None)
    assert header == ["position encoding", "1x, 8", "2x, 16", "training", "seeds"]
    assert nope == ["NoPE", "4.50 (4.00-5.00)", "150 (150-150)", "10 s (10 s-10 s)", "2"]
    assert alibi[:2] == ["ALiBi", f"{14 / 3:.2f} (4.00-5.00)"] and alibi[-1] == "3"
    assert study.rows(runs[:1], None, "held_out")[1][1:3] == ["2.72", "7.39"]
    assert [positions.number(x) for x in (3.14159, 99.0, 150.2, 20_000.0)] == ["3.14", "99.00", "150", "2.0e+04"]


@pytest.mark.parametrize("name", COMMITTED)
def test_a_file_is_a_table(name: str) -> None:
    assert sum(line.startswith("| ") for line in shown.table(committed(name)).splitlines()) > 2


@pytest.mark.parametrize("study", mostly_slow(COMMITTED, "epl", "pooling", "greedy", "resolution-digits-short"))
def test_the_pictures_by_name(study: str) -> None:
    assert set(shown.draw(committed(study))) == COMMITTED[study]


def test_curves_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "first.jsonl"
    first = [line for line in results.load(committed("epl")) if line["run"]["seed"] == 0]
    results.write(path, first)
    runs = [line["run"] for line in first]
    assert len(runs) >= 2
    (axes,) = shown.draw(path)["loss"].axes
    lines = axes.lines[: len(runs)]
    assert [line.get_label() for line in lines] == [run["layout"].upper() for run in runs]
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == len(runs)
    for line, run in zip(lines, runs, strict=True):
        assert line.get_ydata().tolist() == [loss for _, loss, _ in run["curve"]]


def test_a_line_says_all_of_its_run(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    answers = {"128": {"loss": 1 / 3, "exact": 0.75}}
    runs = [positions.Run("nope", seed=seed, curve=[(0, 0.1, 0.0)], held_out=answers, test=answers) for seed in (0, 1)]
    recipe = filler.PRESETS["quick"]
    lines = [results.line("retrieval", run, recipe, None, MACHINE) for run in runs]
    results.write(path, lines[:1])
    results.append(path, lines[1])
    for text, run in zip(path.read_text().splitlines(), runs, strict=True):
        found = json.loads(text)
        assert (found["study"], found["machine"], found["recipe"]) == ("retrieval", MACHINE, asdict(recipe))
        assert found["run"]["test"] == run.test and found["run"]["seed"] == run.seed
    assert results.load(path) == json.loads(json.dumps(lines)) and not path.with_suffix(".npz").exists()
    # Written anew, nothing of before is left.
    results.write(path, lines[1:])
    assert len(results.load(path)) == 1


def test_attention_maps_stand_beside_in_steps_of_1e_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    maps = [[[[0.12345, 0.87655], [1.0, 0.0]]], [[[0.5, 0.5]]]]
    lines = [
        {"study": "epl", "machine": {}, "recipe": {}, "run": {"seed": i, "attention": m}} for i, m in enumerate(maps)
    ]
    moved: list[str] = []
    move = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (moved.append(Path(new).name), move(old, new)))
    results.write(path, lines[:1])
    # An interruption leaves no line without its map.
    assert moved == ["a.npz", "a.jsonl"]
    results.append(path, lines[1])
    results.append(path, {"study": "epl", "machine": {}, "recipe": {}, "run": {"seed": 2, "attention": []}})
    assert [line["run"]["attention"] for line in results.load(path)] == [*maps, []]
    assert "0.12345" not in path.read_text()
    with np.load(path.with_suffix(".npz")) as arrays:
        assert {array.dtype.kind for array in arrays.values()} == {"u"}
    path.with_suffix(".npz").unlink()
    with pytest.raises(ValueError, match=r"a.npz: expected the array attention-0, as a.jsonl has it"):
        results.load(path)


@pytest.mark.slow
def test_processes_that_add_lines_to_one_file_lose_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = (
        "import sys; from pathlib import Path; from gistkit_lab.studies.results import append\n"
        "for at in range(20): append(Path(sys.argv[1]), {'study': 'epl', 'run': {'of': sys.argv[2], 'at': at, "
        "'attention': [[0.5, at / 100]]}})"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, path, name]) for name in "ab"]
    assert [process.wait() for process in processes] == [0, 0]
    found = [line["run"] for line in results.load(path)]
    assert {(run["of"], run["at"]) for run in found} == {(name, at) for name in "ab" for at in range(20)}
    assert all(run["attention"] == [[0.5, run["at"] / 100]] for run in found)


def test_every_study_is_a_command() -> None:
    (commands,) = (action for action in cli.parser()._actions if isinstance(action.choices, dict))
    (studies,) = (action for action in commands.choices["study"]._actions if isinstance(action.choices, dict))
    assert tuple(studies.choices) == (*registry.STUDIES, "paper-table")
    assert all(registry.find(name).name == name for name in registry.STUDIES)
    with pytest.raises(ValueError, match=r"study: expected one of compression-loss, .*, got 'other'"):
        registry.find("other")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing", "expected a study's results, JSON lines; line 1: "),
        ("[1]", "expected a study's results, got no field study in line 1"),
        ('{"study": ["epl"]}', "got no field study in line 1"),
        ('{"study": "other"}', "expected results of one of the studies compression-loss, .* got study 'other'"),
        ('{"study": "epl"}\n{"study": "pooling"}', "expected results of the study epl alone, got pooling too"),
        (
            '{"study": "in-place", "recipe": {}, "run": {"step": 1}}',
            "expected results of the study in-place, got others: ",
        ),
        ("", "expected at least one run, got none"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    for show in (shown.table, shown.draw):
        with pytest.raises(ValueError, match=f"a.jsonl: .*{message}"):
            show(path)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    first = committed("in-place-short")
    with pytest.raises(ValueError, match=r"expected results of the study in-place, as .*, got pooling"):
        shown.table(first, committed("pooling"))
    (line, *_) = results.load(first)
    line["recipe"]["steps"] += 1
    results.write(tmp_path / "longer.jsonl", [line])
    with pytest.raises(ValueError, match=r"longer.jsonl: expected the recipe of .*, got another steps"):
        shown.table(first, tmp_path / "longer.jsonl")
    with pytest.raises(ValueError, match=r"jsonl: expected each run once, got some a second time"):
        shown.table(first, first)
    with pytest.raises(ValueError, match="paths: expected at least one results file, got none"):
        shown.table()


def test_several_files_of_a_study_join(tmp_path: Path) -> None:
    lines = results.load(committed("retrieval-short"))
    for name, part in (("a", lines[:10]), ("b", lines[10:])):
        results.write(tmp_path / f"{name}.jsonl", part)
    assert shown.table(tmp_path / "a.jsonl", tmp_path / "b.jsonl") == shown.table(committed("retrieval-short"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = argparse.ArgumentParser()
    view_results.add(root.add_subparsers(required=True))
    options = root.parse_args(["results", str(committed("epl")), "-o", str(tmp_path / "pictures")])
    assert options.run(options) == 0
    printed = capsys.readouterr().out
    assert "| EPL    | 208 (200-225) " in printed and f"Written: {tmp_path / 'pictures' / 'loss.png'}" in printed
    assert (tmp_path / "pictures" / "loss.png").read_bytes().startswith(b"\x89PNG")
    options = root.parse_args(["results", str(committed("epl"))])
    assert options.run(options) == 0 and "Written" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"PK\3\4garbage", b"no arrays", b"\x93NUMPY\1\0v\0{'descr': '<i8'"])
def test_damaged_arrays_are_a_line(content, tmp_path):
    path = tmp_path / "epl.jsonl"
    line = {"study": "epl", "recipe": {}, "run": {"attention": "a"}}
    path.write_text(json.dumps(line) + "\n")
    path.with_suffix(".npz").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"epl\.npz: expected arrays of attention maps, got a file that cannot be read"
    ):
        results.load(path)
