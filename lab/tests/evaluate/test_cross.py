"""Matrices by training set and test set, from reports and from their files."""

import pytest

from gistkit.compress import ICAE
from gistkit.evaluate import Example, NoContext, Report, Row, compare
from gistkit_lab.evaluate.cross import cross_table
from tests.helpers.models import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")


def report_of(train, test, loss, **metrics):
    rows = (
        Row("NoContext", {"qa_loss": 9.0}, {}, 1.0),
        Row(f"GistPool {train}", {"qa_loss": loss, **metrics}, {}, 1.0),
        Row("full", {"qa_loss": 0.1}, {}, 1.0),
    )
    classes = {"NoContext": "NoContextBaseline", f"GistPool {train}": "GistPool", "full": "FullContext"}
    described = {name: {"class": kind} for name, kind in classes.items()}
    settings = {"methods": described, "trained_on": train, "tested_on": test}
    return Report(rows, settings, {})


REPORTS = [
    report_of("squad", "drop", 1.25),
    report_of("squad", "squad", 0.5, qa_judge=91.0),
    report_of("race+squad", "drop", 1.5),
    report_of("drop", "drop", 0.75),
]


def test_the_matrix_is_a_row_a_training_set(tmp_path):
    found = cross_table(REPORTS)
    assert found.values == {
        ("squad", "drop"): 1.25,
        ("squad", "squad"): 0.5,
        ("race+squad", "drop"): 1.5,
        ("drop", "drop"): 0.75,
    }
    # Tested sets in the order of the reports; the training sets in the same, with mixtures at the end.
    assert str(found).splitlines() == [
        "| QA loss: trained on | drop  | squad |",
        "|---------------------|-------|-------|",
        "| drop                | 0.750 | -     |",
        "| squad               | 1.250 | 0.500 |",
        "| race+squad          | 1.500 | -     |",
    ]
    files = [report.save(tmp_path / f"{index}.json") for index, report in enumerate(REPORTS)]
    assert cross_table([files[0], str(files[1]), *files[2:]]) == found
    assert cross_table([REPORTS[1]], metric="qa_judge").values == {("squad", "squad"): 91.0}
    assert cross_table(REPORTS, method="full").values[("squad", "drop")] == 0.1


def test_the_cells_of_a_real_evaluation_are_its_metrics():
    data = [Example([1, 2, 3], question=[4], answers=[[5]])]
    compressor = ICAE(tiny_llama(), chunk=8, ratio=4, lora=2).eval()
    methods = [NoContext(compressor.model, start_token=1), compressor]
    report = compare(methods, data, tasks=["qa"], max_new_tokens=2, progress=False)
    report = Report(report.rows, report.settings | {"trained_on": "a", "tested_on": "b"})
    assert cross_table([report]).values == {("a", "b"): report.rows[1].metrics["qa_loss"]}


def test_mistakes_name_the_report(tmp_path):
    other = Report(REPORTS[0].rows, REPORTS[0].settings | {"trained_on": None}, {})
    two = Report(REPORTS[0].rows, REPORTS[0].settings | {"methods": {}}, {})
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for reports, settings, message in [
        ([], {}, "reports: expected a sequence of at least one report, got"),
        ("a.json", {}, "reports: expected a sequence of at least one report, got 'a.json'"),
        (REPORTS, {"metric": "loss"}, "metric: expected one of ae_loss, .*, got 'loss'"),
        (REPORTS, {"metric": "qa_judge"}, r"reports\[0\]: expected the metric qa_judge of GistPool squad, got qa_loss"),
        (REPORTS, {"method": "x"}, r"reports\[0\]: method: expected one of NoContext, .*, got 'x'"),
        ([other], {}, r"reports\[0\]: expected a report with the setting trained_on \(--trained-on\), got None"),
        (
            [REPORTS[0], REPORTS[0]],
            {},
            r"reports\[1\]: expected one report trained on squad and tested on drop, got reports\[0\] too",
        ),
        ([two], {}, r"reports\[0\]: expected one method beside the baselines, .* got NoContext, GistPool squad, full"),
        ([tmp_path / "deep.json"], {}, r"deep\.json: expected the report of an evaluation, got another file"),
    ]:
        with pytest.raises(ValueError, match=message):
            cross_table(reports, **settings)
    with pytest.raises(FileNotFoundError):
        cross_table([tmp_path / "none.json"])
