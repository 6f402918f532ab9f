"""Evaluation shared by processes: the report of one process, whoever measured what."""

import json

import pytest

from gistkit import cli
from gistkit.common.processes import Processes
from tests.helpers.launched import command, launch
from tests.helpers.models import byte_tokenizer
from tests.helpers.stores import make_compressor

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_hold_every_item_once_and_join_in_order(count):
    items = list(range(5))
    shares = [Processes(index, count).share(items) for index in range(count)]
    assert sorted(item for share in shares for item in share) == items

    class Gathered(Processes):
        def gathered(self, value):
            return shares

    assert Gathered(0, count).joined(shares[0]) == items
    assert Processes(0, count, 3).on("cuda") == ("cuda:3" if count > 1 else "cuda")
    assert Processes(0, count, 3).on("cpu") == "cpu" and Processes(0, count, 3).on("cuda:1") == "cuda:1"


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 1), (0, 0)])
def test_a_process_that_is_not_there_is_refused(index, count):
    with pytest.raises(ValueError, match=rf"expected a number below {count} of this process, got {index}"):
        Processes(index, count)


def without_times(report):
    """A report without what a clock says."""
    for row in report["rows"]:
        del row["seconds"]
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--context", "24", "--chunk", "6", "--ratio", "3", "--keep-examples"),
        pytest.param(
            (
                *("--method", "avgpool", "--ratio", "4", "--option", "bos_token=0"),
                *("--tau", "8", "--segment", "4", "--context", "24", "--continuation", "12"),
            ),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_two_processes_report_what_one_does(tmp_path, words):
    make_compressor().model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    text = " ".join(f"Number {number} is {number * number} when it is squared." for number in range(300))
    (tmp_path / "text.txt").write_text(text)
    words = ("evaluate", "--model", tmp_path / "model", "--text", tmp_path / "text.txt", "--examples", 7, *words)
    words = (*map(str, words), "--batch-size", "2", "--out")
    assert cli.main([*words, str(tmp_path / "one.json")]) == 0
    launch(2, command, *words, str(tmp_path / "two.json"), logs=tmp_path)
    one, two = (without_times(json.loads((tmp_path / f"{name}.json").read_text())) for name in ("one", "two"))
    assert one == two and one["rows"]
    told = [(tmp_path / f"process-{rank}.log").read_text() for rank in range(2)]
    assert "Written: " in told[0] and "Written: " not in told[1]
