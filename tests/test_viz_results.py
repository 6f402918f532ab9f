"""Results files of every study as tables and pictures, and the command that shows them."""

import argparse
import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the viz extra is not installed")

from gistkit.cli import view_results
from gistkit.studies import greedy, resolution, retrieval
from gistkit.studies import results as files
from gistkit.viz import results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = {"processor": "some"}
# The pages' tables are made of the same files by other code; some leave a column out.
NUGGETS = {"perplexity", "ae-types", "ae-text", "lm-types", "lm-text"}
COMMITTED: dict[str, tuple[str, set[str], str | None]] = {
    "epl": ("demo.json", {"loss"}, "demo table"),
    "compression-loss": ("compression-loss.json", {"loss"}, None),
    "smollm2": ("smollm2/x500-short-0.001-*.json", {"loss", "attention"}, None),
    "pooling": ("pooling*.json", set(), "pooling table"),
    "in-place": ("in_place/short-100-*.json", {"ratios", "curves"}, "in-place table"),
    "in-place, quick": ("in_place/quick-*.json", {"ratios", "curves"}, "in-place table"),
    "nuggets": ("nuggets/short-60-*.json", NUGGETS, "nuggets table"),
    "nuggets, quick": ("nuggets/quick-*.json", NUGGETS, "nuggets table"),
    "length": ("length/*.json", {"length"}, None),
    "retrieval": ("retrieval/*.json", {"retrieval"}, None),
}


def committed(study: str) -> list[Path]:
    return sorted(RESULTS.glob(COMMITTED[study][0]))


@pytest.mark.parametrize("study", COMMITTED)
def test_the_table_is_that_of_the_pages(study: str) -> None:
    shown = results.table(*committed(study)).splitlines()
    rows = [line for line in shown if line.startswith("|") and not line.startswith("|--")]
    assert len(rows) > 3
    if (heading := COMMITTED[study][2]) is not None:
        page = (ROOT if study == "epl" else RESULTS) / "README.md"
        table = page.read_text().partition(f"<!-- {heading} -->")[2].partition("<!-- end of ")[0]
        assert set(rows) <= set(table.splitlines())


@pytest.mark.parametrize("study", COMMITTED)
def test_the_pictures_by_name(study: str) -> None:
    assert set(results.draw(*committed(study))) == COMMITTED[study][1]


def test_curves_are_those_of_the_file() -> None:
    (path,) = committed("compression-loss")
    runs = json.loads(path.read_text())["runs"]
    (axes,) = results.draw(path)["loss"].axes
    lines = axes.lines[: len(runs)]
    assert [line.get_label() for line in lines] == [run["layout"] for run in runs]
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == len(runs)
    for line, run in zip(lines, runs, strict=True):
        assert line.get_ydata().tolist() == [loss for _, loss, _ in run["curve"]]


def test_studies_without_committed_results(tmp_path: Path) -> None:
    answers = {"128": {"loss": 0.0, "exact": 0.75}, "256": {"loss": 1.0, "exact": 0.5}}
    run = retrieval.Run("nope", 0, [(0, 1.0, 0.0)], answers, answers)
    files.write(tmp_path / "a.json", "retrieval", [run], retrieval.PRESETS["quick"], None, MACHINE)
    assert "| NoPE              | 0.750   | 0.500   |" in results.table(tmp_path / "a.json")
    assert set(results.draw(tmp_path / "a.json")) == {"retrieval"}

    one = resolution.Run("nope", 0, [(0, 1.0, 0.1, 0.1)], {"8": 0.5, "16": 0.25}, {"8": 0.5, "16": 0.25})
    files.write(tmp_path / "b.json", "resolution", [one], resolution.PRESETS["quick"], None, MACHINE)
    assert "| NoPE              | 50.0    | 25.0      |" in results.table(tmp_path / "b.json")
    assert set(results.draw(tmp_path / "b.json")) == {"resolution"}

    improved = greedy.Improved((1, 3), (2, 3), 2.0, 1.0, 5)
    text = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(improved).items()}
    content = {"study": "greedy", "compressor": {"title": "Dodo 3x"}, "texts": [text]}
    (tmp_path / "c.json").write_text(json.dumps(content))
    assert "| Dodo 3x         | 50.0% (0.0%) | 7.39 " in results.table(tmp_path / "c.json")
    assert results.draw(tmp_path / "c.json") == {}


def test_every_study_that_writes_results_is_known() -> None:
    from gistkit import cli

    (commands,) = (action for action in cli.parser()._actions if isinstance(action.choices, dict))
    (studies,) = (action for action in commands.choices["study"]._actions if isinstance(action.choices, dict))
    assert set(studies.choices) | {"smollm2"} == set(results.STUDIES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing", "expected a study's results as JSON, got another file"),
        ("[1]", "expected results of one of the studies epl, .* got no field study"),
        ('{"study": "other"}', "expected results of one of the studies epl, .* got study 'other'"),
        ('{"study": ["epl"]}', "got study "),
        ('{"study": "in-place", "runs": [{"step": 1}]}', "expected results of the study in-place, got others: "),
        ('{"study": "nuggets", "recipe": {}, "runs": []}', "expected at least one run, got none"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    for show in (results.table, results.draw):
        with pytest.raises(ValueError, match=f"a.json: .*{message}"):
            show(path)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    first, other = committed("in-place")[:2]
    with pytest.raises(ValueError, match=r"expected results of the study in-place, as .*, got pooling"):
        results.table(first, *committed("pooling"))
    content = json.loads(other.read_text())
    content["recipe"]["steps"] += 1
    (tmp_path / "longer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"longer.json: expected the recipe of .*, got another steps"):
        results.table(first, tmp_path / "longer.json")
    with pytest.raises(ValueError, match=r"json: expected runs that no file before has, got some a second time"):
        results.table(first, other, first)
    with pytest.raises(ValueError, match="paths: expected at least one results file, got none"):
        results.table()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = argparse.ArgumentParser()
    view_results.add(root.add_subparsers(required=True))
    options = root.parse_args(["results", str(RESULTS / "demo.json"), "-o", str(tmp_path / "pictures")])
    assert options.run(options) == 0
    shown = capsys.readouterr().out
    assert "| EPL    | 208 (200-225) " in shown and f"Written: {tmp_path / 'pictures' / 'loss.png'}" in shown
    assert (tmp_path / "pictures" / "loss.png").read_bytes().startswith(b"\x89PNG")
    options = root.parse_args(["results", str(RESULTS / "demo.json")])
    assert options.run(options) == 0 and "Written" not in capsys.readouterr().out
