"""Tables of judges, masks, languages and lengths, each made end to end with tiny models."""

import json

import pytest
from endpoint import Server, reply
from paper_tables import cells, lines
from test_tables import call, folder  # noqa: F401 - a fixture

from gistkit_lab.tables import find_table
from tests.helpers.models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
# The tables of these kinds, one of each of which runs here.
OTHERS = {"cl-3", "dodo-6", "dodo-figure-4", "gistpool-10"}


@pytest.fixture
def texts(tmp_path):
    rows = [{"text": f"On day {day} it rained {day * 7 % 10} times. " * 8} for day in range(30)]
    return lines(tmp_path / "text.jsonl", rows)


@pytest.fixture
def questions(tmp_path):
    rows = [{"context": f"It rained on day {n}. " * 3, "question": "When?", "answers": [f"day {n}"]} for n in range(3)]
    return lines(tmp_path / "questions.jsonl", rows)


def data(names, path):
    return [word for name in names for word in ("--data", f"{name}={path}")]


def settings_of(train):
    return json.loads((train / "compressor" / "compressor.json").read_text())["settings"]


@pytest.mark.slow
def test_table_3_of_the_compression_loss(folder, texts, questions, tmp_path, capsys):  # noqa: F811
    small = "--steps 1 --batch 2 --held-out 2 --max-length 60"
    words = (
        "cl-3", "--model", folder, "--out", tmp_path / "cl", "--arms", "wo CL vs wo CL + PI",
        "--more", f"pretrain={small} --min-length 60 --longer-than 100 --chunk 30 --option lora=2",
        "--more", f"finetune={small} --min-length 8", "--more", "answers=--max-new-tokens 4",
        *data(["text"], texts), *data(["train", "test"], questions),
    )  # fmt: skip
    # Who likes the first place has no say, and the first question gets no verdict.
    answer = lambda number, body: (  # noqa: E731
        (404, {}, "") if "day 0" in body["messages"][0]["content"] else (200, {}, reply('{"better": "A"}'))
    )
    with Server(answer) as server:
        assert call(*words, "--more", f"judge=--judge {server.url} --judge-model grader") == 0, capsys.readouterr().err
        assert len(server.requests) == 1 + 2 * 2 + 1
    shown = {"Win": "0.0 (37.1)", "Lose": "0.0 (16.7)", "Tie": "66.7 (45.0)"}
    assert cells(tmp_path / "cl", "cl-3") == {"wo CL vs wo CL + PI": shown}
    # The runs are those of Table 2.
    assert (tmp_path / "cl" / "15x-ae-lm-dpl" / "finetune" / "compressor").is_dir()


@pytest.mark.slow
def test_table_10_of_gistpool(folder, questions, tmp_path, capsys):  # noqa: F811
    sets = ("drop", "fairytaleqa", "squad")
    arms = ["1 window + gists see BOS", "all windows + gists see themselves + gists see BOS"]
    words = (
        "gistpool-10", "--model", folder, "--out", tmp_path / "out", "--arms", ";".join(arms),
        "--more", "train=--epochs 1 --batch 3 --held-out 1", "--more", "answers=--max-new-tokens 2",
        *data([f"{name}-{split}" for name in sets for split in ("train", "test")], questions),
    )  # fmt: skip
    assert call(*words) == 0, capsys.readouterr().err
    found = cells(tmp_path / "out", "gistpool-10")
    assert list(found) == arms and all(list(row) == list(sets) for row in found.values())
    papers = [[cell.partition(" ")[2] for cell in row.values()] for row in found.values()]
    assert papers[0] == ["(0.812)", "(1.315)", "(0.468)"]
    assert papers[1] == ["(0.766 or 0.753)", "(1.160 or 1.177)", "(0.405 or 0.393)"]
    assert all(float(cell.split()[0]) > 0 for row in found.values() for cell in row.values())
    for folder_name, windows, itself in (("mask-1-0001", 1, False), ("mask-all-0011", None, True)):
        settings = settings_of(tmp_path / "out" / folder_name / "train-drop")
        assert (settings["windows"], settings["memory_sees_itself"]) == (windows, itself)
        assert settings["memory_sees_bos"] and settings["copy_norms"] and not settings["context_sees_memory"]
        assert settings["gists"] == 1639


def test_masks_of_gistpool_are_each_choice_once_and_its_own_has_its_figures():
    table = find_table("gistpool-10")
    assert len({arm.title for arm in table.arms}) == len({arm.folder for arm in table.arms}) == len(table.arms) == 40
    # GistPool at 5x, of Appendix B.
    own = {name: find_table(f"gistpool-{name}") for name in ("drop", "fairytaleqa", "squad")}
    losses = {
        name: next(arm.published["loss"] for arm in each.arms if arm.title == "GistPool 5x")
        for name, each in own.items()
    }
    (found,) = (arm for arm in table.arms if arm.published == {name: [loss] for name, loss in losses.items()})
    assert found.title == "5 windows + gists see gists + gists see themselves + gists see BOS"
    # That is the mask with which it runs.
    stage = next(arm.stages["train"] for arm in own["squad"].arms if arm.title == "GistPool 5x")
    assert "memory_sees_memory=true" in stage.settings and any("pool mask" in each for each in own["squad"].open)
    # Where a row's figures are open there are two, which another row has too.
    two = [arm for arm in table.arms if len(arm.published["drop"]) == 2]
    assert len(two) == 20 and all(sum(arm.published == other.published for other in two) == 2 for arm in two)


AE = "train=--steps 1 --batch 2 --held-out 2 --lora 2 --min-length 20 --max-length 24"


@pytest.mark.slow
def test_figure_4_of_dodo_is_a_table_and_a_picture(folder, texts, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "dodo"
    short = []
    for length in (100, 200, 300, 400, 500):
        short += ["--more", f"length-{length}=--context {length // 20} --examples 2 --max-new-tokens 4"]
    assert call("dodo-figure-4", "--model", folder, "--out", out, "--more", AE, *short, *data(["text"], texts)) == 0
    shown = capsys.readouterr().out
    found = cells(out, "dodo-figure-4")
    assert list(found) == ["Dodo 20x", "Dodo 10x", "ICAE with 128 slots"]
    assert all(list(row) == ["100", "200", "300", "400", "500"] for row in found.values())
    assert all(0 <= float(cell) <= 100 for row in found.values() for cell in row.values())
    assert (out / "dodo-figure-4.png").read_bytes().startswith(b"\x89PNG") and "dodo-figure-4.png" in shown
    icae = settings_of(out / "ae-icae" / "train")
    assert (icae["chunk"], icae["ratio"]) == (512, 4)
    # Each length is that of its stage.
    report = json.loads((out / "ae-icae" / "length-300" / "evaluation.json").read_text())
    assert report["rows"][0]["counts"]["ae_tokens"] == 2 * 15 and report["rows"][0]["metrics"]["tokens_read"] == 128


@pytest.mark.slow
def test_table_6_of_dodo(folder, texts, tmp_path, capsys):  # noqa: F811
    out, german, dutch = tmp_path / "dodo", tmp_path / "de.jsonl", tmp_path / "nl.jsonl"
    lines(german, [{"text": f"Es regnet {n}."} for n in ("nicht", "heute", "noch oft")])
    lines(dutch, [{"text": "Het regent. " * 100}])
    words = ("dodo-6", "--model", folder, "--out", out, "--arms", "German;Dutch", "--more", AE, *data(["text"], texts))
    more = ("--more", "documents=--max-new-tokens 4", *data(["german"], german), *data(["dutch"], dutch))
    assert call(*words, *more) == 0, capsys.readouterr().err
    found = {row: [cell.partition(" ")[2] for cell in its.values()] for row, its in cells(out, "dodo-6").items()}
    assert found == {"German": ["(98.80)", "(1.02)"], "Dutch": ["(97.90)", "(1.02)"]}
    # Whole documents of their own lengths, and what is longer cut to 512; none is held out. One training for both.
    first = len(byte_tokenizer()("")["input_ids"])
    counts = [
        json.loads((out / f"ae-10x-{name}" / "documents" / "evaluation.json").read_text())["rows"][0]["counts"]
        for name in ("german", "dutch")
    ]
    lengths = [len(f"Es regnet {n}.") for n in ("nicht", "heute", "noch oft")]
    assert [each["examples"] for each in counts] == [3, 1]
    assert sum(lengths) <= counts[0]["ae_tokens"] <= sum(lengths) + 3 * first
    assert 512 - first <= counts[1]["ae_tokens"] <= 512 and len(list(out.glob("*/train"))) == 1
