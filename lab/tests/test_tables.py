"""The papers' tables: their figures and commands, estimates beside counted operations, and one made end to end."""

import json
import shutil

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gistkit import cli
from gistkit.cli import evaluate, train
from gistkit.options.arguments import Parser
from gistkit.train.estimate import operations
from gistkit.train.prepare import prepare
from gistkit_lab.cli import paper_table
from gistkit_lab.evaluate import judge_command
from gistkit_lab.tables import TABLES, find_table
from gistkit_lab.tables.table import Choices, Run, TrainingLoss, WrongAnswers, missing_data, runs
from tests.cli.test_cli import small_llama
from tests.cli.test_images import save
from tests.helpers.models import byte_tokenizer
from tests.helpers.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")
# Llama 2 7B's.
LLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "bos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    # As many layers as Dodo's scorer reads.
    small_llama(num_hidden_layers=3).save_pretrained(root)
    byte_tokenizer().save_pretrained(root)
    return root


def call(*words):
    return cli.main(["study", "paper-table", *map(str, words)])


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return save("llava", tmp_path_factory.mktemp("llava"))


# Compressors, reading on, training alone, images, and choices of masks.
PLANNED = ("epl-4", "dodo-1", "cl-1", "epl-5", "gistpool-7")


@pytest.mark.parametrize("name", mostly_slow(TABLES, *PLANNED))
def test_every_command_is_one_of_gistkit_and_the_paper_has_its_figures(name, folder, llava, tmp_path, capsys):
    table = find_table(name)
    folder = llava if "images" in table.data else folder
    assert len({column.heading for column in table.columns}) == len(table.columns)
    headings = {column.heading for other in TABLES.values() if other.paper == table.paper for column in other.columns}
    for arm in table.arms:
        # A stage that an arm does not have leaves its columns empty, for which there is no figure then.
        stages = {column.heading: column.stage for column in table.columns}
        assert {stages[heading] for heading in arm.published if heading in stages} <= arm.stages.keys()
        # Nothing published is lost by a wrong heading, and each row has some of it but SAC's, which came later.
        assert arm.published.keys() <= headings
        assert any(column.heading in arm.published for column in table.columns) or table.picture or arm.title == "SAC"
    parser = Parser(prog="gistkit")
    commands = parser.add_subparsers(parser_class=Parser)
    for command in (train, evaluate, judge_command):
        command.add(commands)
    planned = list(runs(table, Choices(str(folder), tmp_path)))
    assert len({run.folder for run in planned}) == len(planned)
    for run in planned:
        parsed = parser.parse_args(list(run.words))
        assert parsed.out.is_relative_to(run.folder)
    # What a table names is read by some arm.
    assert missing_data(table, {}) == list(table.data)
    # Others differ in what their settings say, with which all rows of all tables are made at night.
    if name in PLANNED:
        assert call(name, "--model", folder, "--out", tmp_path / "out", "--dry-run") == 0
        shown = capsys.readouterr().out
        assert table.follows in shown and shown.count("\ngistkit ") == len(planned) and "hours of training" in shown
        assert "| 0 " not in shown and not (tmp_path / "out").exists()


def test_some_arms_need_their_own_data_alone():
    table = find_table("gistpool-6").choose(["trained on squad"])
    tests = {f"{name}-test": ["x"] for name in ("drop", "fairytaleqa", "narrativeqa", "race", "squad")}
    assert missing_data(table, tests) == ["squad-train"]


def test_figures_of_the_papers():
    """Some that the papers' tables show, by row and column."""
    for name, arm, heading, value in (
        ("epl-4", "500x(EPL)", "DuoRC F1", 39.07), ("epl-4", "ICAE(DPL)", "AE BLEU", 31.80),
        ("epl-6", "ICAE(UPL)", "Out-of-domain EM", 29.11), ("epl-7-8b", "ICAE(EPL)", "LM PPL", 7.61),
        ("epl-9-3b", "ICAE(DPL)", "PPL(AE)", 1.49), ("epl-16-8b", "500x(DPL)", "In-domain F1", 74.14),
        ("epl-17-1b", "ICAE(EPL)", "RE EM", 64.31), ("epl-18", "500x(UPL)", "NQ EM", 45.66),
        ("epl-19", "500x(EPL)", "Out-of-domain F1", 48.03), ("cl-1", "31x", "BLEU4", 84.4),
        ("cl-2", "wo AE", "answers' BLEU4", 26.5), ("dodo-1", "Compressive 64", "WikiText word", 13.39),
        ("dodo-3", "LMSumm 10x", "accuracy", 30.9), ("dodo-4", "Dodo 10x", "RL", 37.0),
        ("gistpool-squad", "GistPool 10x", "loss", 0.545), ("gistpool-race", "Full context", "loss", 0.083),
        ("gistpool-6", "trained on squad", "on narrativeqa", 2.886), ("epl-9-1b", "NoContext", "LM PPL", 13.25),
        ("epl-5", "EPL 128", "MMB", 64.6), ("epl-10", "DPL 2", "VQAv2", 73.7),
        ("dodo-4", "Full (fine-tuning)", "R2", 15.6), ("epl-16-3b", "FullContext", "NQ F1", 64.32),
        ("epl-17-8b", "NoContext", "TQA EM", 32.67),
        ("cl-2", "full, rank 256", "CL loss", 0.09), ("gistpool-drop", "SepGist 5x", "loss", 1.022),
        ("gistpool-fairytaleqa", "AvgPool 50x", "loss", 2.730), ("gistpool-2-race", "GistPool 10x", "wrong", 8.2),
        ("gistpool-race", "GistPool, one gist embedding 2x", "loss", 0.083),
        ("gistpool-8", "race 10x, trained on the other 3", "loss", 0.277),
        ("gistpool-9", "squad 5x, trained on the same", "wrong", 10.4),
        ("gistpool-7", "trained on race", "narrativeqa wrong", 71.4),
        ("gistpool-7", "trained on race", "on fairytaleqa", 9.317),
    ):  # fmt: skip
        found = {each.title: each for each in TABLES[name].arms}[arm]
        assert found.published[heading] == value
        assert heading in {column.heading for column in TABLES[name].columns}


@pytest.mark.parametrize(
    ("method", "losses", "lora"),
    [
        pytest.param("x500", ("ae", "lm"), 4, marks=pytest.mark.slow),
        ("icae", ("ae", "lm", "compression"), 4),
        ("avgpool", ("lm",), None),
    ],
)
def test_operations_of_a_step_as_torch_counts_them(method, losses, lora):
    length = 400
    compressor = {"losses": losses, "lora": lora, "ratio": 5}
    if method != "avgpool":
        compressor["chunk"] = 100
    recipe = {"min_length": length, "max_length": length, "batch": 2}
    # What the first and the last layer need not compute backward counts for little in many.
    made = prepare(small_llama(num_hidden_layers=12), method=method, compressor=compressor, recipe=recipe)
    ids = torch.randint(0, 256, (2, length))
    counter = FlopCounterMode(display=False)
    with counter:
        sum(
            made.compressor(input_ids=ids[:, : length // 2], continuation_ids=ids[:, length // 2 :]).values()
        ).backward()
    counted = sum(counter.get_flop_counts()["Global"].values())
    assert 2 * operations(made, length) == pytest.approx(counted, rel=0.12)


def given(**paths):
    return [word for name, path in paths.items() for word in ("--data", f"{name.replace('_', '-')}={path}")]


@pytest.mark.slow
def test_a_table_goes_on_where_a_mistake_ended_it_and_shares_its_runs(folder, tmp_path, capsys):
    questions, out = tmp_path / "questions.jsonl", tmp_path / "out"
    rows = [{"context": f"It rained on day {n}. " * 3, "question": "When?", "answers": [f"day {n}"]} for n in range(6)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Options of one stage add up.
    small = ("--more", "train=--steps 2 --batch 2", "--more", "train=--held-out 2 --lora 2")
    small += ("--more", "answers=--max-new-tokens 4")
    words = ("--model", folder, "--out", out, *small)
    one = ("gistpool-squad", *words, "--arms", "AvgPool 5x", *given(train=questions))
    assert call(*one) == 2
    complaint = capsys.readouterr().err
    assert "--data: expected test=PATH, got none" in complaint and complaint.count("\n") == 1

    # Hours are those of measured steps, and nothing is kept of them.
    assert call(*one, *given(test=questions), "--measure", 2) == 0
    assert "from 2 steps of each" in capsys.readouterr().out and not out.exists()

    # What ended before a mistake is kept.
    assert call(*one, *given(test=tmp_path / "none")) == 2
    train = out / "squad-avgpool-5x" / "train"
    assert "none" in capsys.readouterr().err and (train / "compressor").is_dir()
    before = (train / "metrics.jsonl").read_bytes()
    assert call(*one, *given(test=questions)) == 2
    assert "expected a folder of the same runs, got" in capsys.readouterr().err
    (out / "squad-avgpool-5x" / "answers" / "command.json").unlink()
    assert call(*one, *given(test=questions)) == 0
    assert capsys.readouterr().out.count("is there already") == 1 and (train / "metrics.jsonl").read_bytes() == before
    assert call(*one, *given(test=questions)) == 0 and capsys.readouterr().out.count("is there already") == 2

    # Another table of the paper has the same training.
    sets = ("drop", "fairytaleqa", "narrativeqa", "race", "squad")
    tests = given(squad_train=questions, **{f"{name}_test": questions for name in sets})
    assert call("gistpool-7", *words, "--arms", "trained on squad", *tests) == 0
    assert capsys.readouterr().out.count("is there already") == 1
    assert (train / "metrics.jsonl").read_bytes() == before


def test_rows_with_commas_are_chosen_and_epochs_have_hours(tmp_path, capsys):
    """SQuAD's 87,559 questions twice in batches of 16, of 185 tokens each, on Llama 2 7B."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arms = "GistPool, one gist embedding 5x;AvgPool 2x"
    words = ("--model", tmp_path, "--out", tmp_path / "out", "--dtype", "float16", "--dry-run")
    assert call("gistpool-squad", *words, "--arms", arms) == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:] if row[1] != "-"] == [
        "GistPool, one gist embedding 5x, train",
        "AvgPool 2x, train",
    ]
    steps, operations, hours = rows[-2][1:]
    assert steps == "about 10,945" and rows[-2][0] == "AvgPool 2x, train"
    # Six a weight and token, of 6.6 billion in the layers; the answers' logits are few.
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert float(operations) == pytest.approx(16 * 185 * 6 * weights, rel=0.05)
    assert float(hours) == pytest.approx(10945 * 16 * 185 * 6 * weights / 400e12 / 3600, rel=0.02)
    # Epochs of data whose size nobody knows have none.
    assert call("epl-4", *words, "--arms", "500x(DPL)", "--more", "pretrain=--epochs 1") == 0
    shown = capsys.readouterr().out
    assert "\nat least " in shown and "rows their data has: 500x(DPL), pretrain." in shown
    # The options of a judge that the table names are those of all its sets.
    assert call("gistpool-6", *words, "--more", "answers=--judge http://x/v1 --judge-model y") == 0
    planned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gistkit evaluate")]
    assert len(planned) == 25 and all("--judge http://x/v1 --judge-model y" in line for line in planned)


@pytest.mark.slow
def test_dodos_rows_begin_with_one_autoencoder_and_compressive_trains_what_its_paper_says(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    planned = list(runs(find_table("dodo-1"), Choices(str(tmp_path), tmp_path)))
    first = [run for run in planned if run.stage == "autoencoder"]
    began = [run for run in planned if run.stage == "train" and "--compressor" in run.words]
    assert len(first) == 1 and len(began) == 3
    for run in began:
        assert run.words[run.words.index("--compressor") + 1] == str(first[0].result)
    (compressive,) = [run for run in planned if (run.arm, run.stage) == ("Compressive 64", "train")]
    found = [train.dry_run_of(run.new[1:]).trained for run in (compressive, began[-1])]
    # Table 5: a decoder's LoRA and a soft prompt; Dodo has two and a scorer.
    assert found[0] == {"LoRA of the text": 25_165_824, "soft prompt": 4096, "task tokens": 4096}
    assert found[1]["LoRA of the text"] == found[1]["LoRA of the memory"] == 25_165_824
    assert found[1]["scorer"] == 16_785_409


def test_mistakes(folder, tmp_path, capsys):
    for words, complaint in (
        (("epl-8",), "table: expected one of epl-4, "),
        (("seqpe-1",), "gistkit study length --preset seqpe-wikitext prints"),
        (
            ("epl-4", "--arms", "ICAE"),
            "arms: expected some of ICAE(DPL), ICAE(EPL), 500x(DPL), 500x(EPL), SAC, got 'ICAE'",
        ),
        (("epl-4", "--data", "pile=x"), "data: expected some of text, train, test, got 'pile'"),
        (("epl-4", "--more", "train=--steps 1"), "more: expected some of "),
    ):
        assert call(*words, "--model", folder, "--out", tmp_path, "--dry-run") == 2
        shown = capsys.readouterr()
        assert complaint in shown.err and shown.err.count("\n") == 1
    with pytest.raises(SystemExit):
        call("epl-4", "--data", "text")
    assert "expected NAME=VALUE, got 'text'" in capsys.readouterr().err


def test_columns_of_a_judge_and_of_training(tmp_path):
    (tmp_path / "answers").mkdir()
    rows = [{"method": "GistPool 5x", "metrics": {"qa_judge": 90.4}}, {"method": "FullContext", "metrics": {}}]
    (tmp_path / "answers" / "evaluation.json").write_text(json.dumps({"rows": rows}))
    wrong = WrongAnswers("wrong", "answers", "qa_judge")
    assert wrong.form.format(wrong.value(tmp_path / "answers")) == "9.6"
    # Without a judge there is none.
    assert wrong.value(tmp_path / "answers", "FullContext") is None
    loss = TrainingLoss("CL loss", "pretrain", "compression")
    assert loss.value(tmp_path / "pretrain") is None
    (tmp_path / "pretrain").mkdir()
    records = [
        {"step": 0, "held_out": {"loss": 3.0, "compression": 2.0}},
        {"step": 1, "loss": 2.5, "compression": 1.0},
        {"step": 1, "held_out": {"loss": 2.0, "compression": 0.25}},
    ]
    (tmp_path / "pretrain" / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    assert loss.value(tmp_path / "pretrain") == 0.25
    assert TrainingLoss("AE", "pretrain", "ae").value(tmp_path / "pretrain") is None


def test_a_stage_that_was_interrupted_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(paper_table, "_call", lambda words: seen.append(words) or 0)
    stage = Run("ours", "pretrain", ["train", "--steps", "9"], [], tmp_path / "stage", tmp_path / "stage/compressor")
    paper_table._make(stage, None)
    (tmp_path / "stage" / "checkpoint-3").mkdir()
    paper_table._make(stage, None)
    assert seen == [stage.words, [*stage.words, "--resume"]]
    # What starts from it is of this run, until it is made anew.
    words, source = ["evaluate"], stage.folder
    later = Run("ours", "answers", words, [], tmp_path / "later", tmp_path / "later/evaluation.json", [source])
    paper_table._make(later, None)
    later.result.touch()
    paper_table._make(stage, None)
    assert paper_table._make(later, None) == 0 and len(seen) == 4
    shutil.rmtree(source)
    paper_table._make(stage, None)
    with pytest.raises(ValueError, match=f"got {later.folder}, made before {source} was made anew; remove it"):
        paper_table._make(later, None)
    # Earlier records have the words alone.
    for folder, own in ((source, stage.words), (later.folder, words)):
        (folder / "command.json").write_text(json.dumps(own))
    assert paper_table._make(later, None) == 0 and len(seen) == 5
