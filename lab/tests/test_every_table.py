"""Every table of the papers end to end with tiny models: its own ratios, data and metrics.

Those of `OTHERS`, which have judges of pairs, masks, languages or pictures, are in test_kinds_of_tables.
"""

import itertools
import json
import math
from statistics import fmean

import paper_tables as papers
import pytest
from endpoint import Server, reply
from paper_tables import CALLED, INSIDE, OUTSIDE, SIZES
from test_kinds_of_tables import OTHERS
from transformers import AutoTokenizer

from gistkit_lab.tables import TABLES

pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:memory_tokens")]
# What is answered, in turn: tiny models say nothing that any metric counts.
ANSWERS = ("day 1", "The day 0.", "it rained on day 2. On day 3 it rained 1 times.", "", "Rain.", "on day 2 it rained")
CHOICES = ("", "(B) this", "C.", "A. who", "The answer is A.", "this", "B")
# A row or two of most kinds of tables; at night all rows of all.
SOME = {
    "epl-9-1b": ["NoContext", "500x(EPL)"], "epl-5": ["EPL 128"], "cl-2": ["full"],
    "dodo-1": ["Full 64", "Compressive 64", "Dodo 64"], "dodo-4": ["Full (zero-shot)", "Dodo 10x"],
    "gistpool-6": ["trained on squad"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return papers.models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return papers.data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def judge():
    """The options of an endpoint that finds every other answer right."""
    with Server(lambda number, body: (200, {}, reply(json.dumps({"score": number % 2})))) as server:
        yield f"--judge {server.url} --judge-model grader --judge-concurrency 1"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder for each paper, whose tables share their runs."""
    made = {}
    return lambda paper: made.get(paper) or made.setdefault(paper, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def check(folders, found, places, judge, monkeypatch, capsys):
    """Makes a table, or some of its rows, and reads its reports."""
    tokenizer = AutoTokenizer.from_pretrained(folders / "llama")
    texts, choices = itertools.cycle(ANSWERS), itertools.cycle(CHOICES)

    def answered(reader, memory, task, questions, most, stops):
        return [tokenizer(next(texts), add_special_tokens=False)["input_ids"] for _ in range(memory.batch_size)]

    def make(name, titles=None):
        table = TABLES[name]
        images = "images" in table.data
        if images:
            monkeypatch.setattr("gistkit.evaluate.runner.words_of", lambda ids, tokenizer: next(choices))
        else:
            monkeypatch.setattr("gistkit.evaluate.runner.greedy_rows", answered)
        model = folders / ("llava" if images else "gemma" if table.paper.startswith("gistpool") else "llama")
        given, out = papers.data_of(name, table, found), places(table.paper)
        status = papers.make(name, table, model, given, out, titles, judge if "gistpool" in name else "")
        assert status == 0, capsys.readouterr().err[-2000:]
        count(name, table if titles is None else table.choose(titles), given, out)

    return make


def count(name, table, given, out):
    printed = papers.cells(out, name)
    assert list(printed) == [arm.title for arm in table.arms]
    for arm in table.arms:
        folder = out / arm.folder
        for column in table.columns:
            shown = printed[arm.title][column.heading].split()[0]
            figure = figure_of(table, arm.title, column.heading, folder)
            assert shown == ("-" if figure is None else column.form.format(figure)), (arm.title, column.heading)
            assert figure is not None or column.heading not in arm.published, (arm.title, column.heading)
        check_compressor(table, arm.title, folder)
        check_data(name, table, arm, given, folder)
        {"epl": epl_ratio, "cl": cl_ratio, "dodo": dodo_states}.get(table.paper, ratio)(name, table, arm, folder)


def report_of(folder):
    return json.loads((folder / "evaluation.json").read_text())


# The reports' rows of arms that share an evaluation.
ROWS = {
    "NoDoc": "NoContext", "LMSumm 10x": "SummaryContext", "Full": "FullContext", "Full (zero-shot)": "FullContext",
    "Full (fine-tuning)": "AvgPool", "Dodo 5x": "Dodo", "Dodo 10x": "Dodo",
}  # fmt: skip


def row_of(folder, title):
    rows = report_of(folder)["rows"]
    return next(row for row in rows if row["method"].startswith(ROWS.get(title, "")))


# What the papers' headings mean.
METRICS = {
    "AE loss": "ae_loss", "LM loss": "lm_loss", "BLEU4": "ae_bleu4", "AE BLEU": "ae_bleu4", "PPL(AE)": "ae_perplexity",
    "LM PPL": "lm_perplexity", "answers' BLEU4": "qa_bleu4", "accuracy": "qa_contains_answer", "R1": "qa_rouge1_f1",
    "R2": "qa_rouge2_f1", "RL": "qa_rougel_f1", "F1": "qa_rouge1_f1", "EM": "qa_exact_match", "loss": "qa_loss",
    "wrong": "qa_judge", "SQA": "qa_choice", "MMB": "qa_choice", "VQAv2": "qa_vqa", "subword": "lm_perplexity",
    "Pile": "lm_perplexity", "word": "lm_word_perplexity",
}  # fmt: skip
STAGES = {
    "SQA": "sqa", "MMB": "mmb", "VQAv2": "vqav2", "R1": "summaries", "R2": "summaries", "RL": "summaries",
    "AE loss": "held-out", "LM loss": "held-out", "BLEU4": "held-out", "PPL(AE)": "reconstruction",
    "LM PPL": "reconstruction", "AE BLEU": "reconstruction",
}  # fmt: skip


def figure_of(table, title, heading, folder):
    """The figure of a cell, by its heading; None where there is none."""
    name, _, kind = heading.rpartition(" ")
    if table.paper == "dodo":
        row = report_of(folder / ("pile" if heading == "Pile" else "wikitext"))["rows"][title.startswith("Full")]
        # Words are told from their number.
        assert kind != "word" or row["counts"]["lm_excluded_words"] > row["counts"]["lm_words"] / 8
        return row["metrics"][METRICS[kind]]
    if kind in ("F1", "EM"):
        names = {"In-domain": INSIDE, "Out-of-domain": OUTSIDE}.get(name)
        names = names or [each for each in INSIDE + OUTSIDE if CALLED.get(each, each) == name]
        sets = [each for each in report_of(folder / "answers")["sets"] if each["name"] in names]
        assert len(sets) == len(names) > 0
        return fmean(each["rows"][0]["metrics"][METRICS[kind]] for each in sets)
    if heading == "CL loss":
        records = [json.loads(line) for line in (folder / "pretrain" / "metrics.jsonl").read_text().splitlines()]
        return [record["held_out"] for record in records if "held_out" in record][-1].get("compression")
    stage = STAGES.get(heading, "answers")
    if name == "on":
        stage, heading = f"answers-{kind}", "loss"
    elif kind == "wrong":
        stage, heading = f"answers-{name}" if name else stage, "wrong"
    row = row_of(folder / stage, title)
    found, (task, _, figure) = row["metrics"].get(METRICS[heading]), METRICS[heading].partition("_")
    if figure == "loss" and found is not None:
        nats, tokens = (sum(example[f"{task}_{unit}"] for example in row["examples"]) for unit in ("nats", "tokens"))
        assert found == pytest.approx(nats / tokens)
    return 100 - found if heading == "wrong" and found is not None else found


METHODS = {"ICAE": "icae", "500x": "x500", "SAC": "sac", "AvgPool": "avgpool", "Dodo": "dodo", "Compressive": "avgpool"}


def check_compressor(table, title, folder):
    """Its method and settings are those of the title."""
    train = next(path for path in (folder / "finetune", folder / "pretrain", folder / "train") if path.is_dir())
    path = train / "compressor" / "compressor.json"
    if not path.exists():
        assert title in ("NoContext", "FullContext")
        return
    saved = json.loads(path.read_text())
    settings = saved["settings"]
    if table.paper == "epl":
        titled = title if "(" in title else "SAC(EPL)" if title == "SAC" else f"VoCo({title.split()[0]})"
        method, layout = titled.strip(")").split("(")
        assert (METHODS.get(method, "voco"), layout.lower()) == (saved["method"], settings["layout"])
    elif table.paper == "cl":
        assert (settings["layout"] == "dpl") == ("PI" in title) and settings["ratio"] == ratio_of(title, 15)
        assert saved["method"] == "icae" and settings["window"] == (510 if train.name == "finetune" else None)
        losses = json.loads((folder / "pretrain" / "compressor" / "compressor.json").read_text())["settings"]["losses"]
        left_out = {"wo CL": {"compression"}, "wo AE": {"ae"}, "wo CL + PI": {"compression"}}.get(title, set())
        assert set(losses) == {"ae", "lm", "compression"} - left_out
    elif table.paper.startswith("gistpool"):
        assert saved["method"] == (
            "no_context" if title == "No context" else "avgpool" if title[0] in "AF" or "AvgPool" in table.follows
            else "gistpool" if "pool" in title.lower() or "GistPool" in table.follows.rpartition(",")[0] else "gist"
        )  # fmt: skip
        if saved["method"] in ("gist", "gistpool"):
            whole = title.startswith("GistPool") or not any(word in title for word in ("Gist", "Sep"))
            assert settings["offset"] == (whole or "Offset" in title)
            assert settings["separate"] == (whole or "Sep" in title)
            assert (settings["gists"] is None) == (not title[0].isupper() or "one gist embedding" in title)


def check_data(name, table, arm, given, folder):
    """What was trained on, by the commands, and tested on, by the numbers of examples and their texts."""
    title = arm.title
    for stage in arm.stages:
        words = json.loads((folder.parent / arm.folder_of(stage) / "command.json").read_text())["words"]
        at = words.index("--questions" if "--questions" in words else "--text") + 1
        read = set(itertools.takewhile(lambda word: not word.startswith("--"), words[at:]))
        if name in ("gistpool-6", "gistpool-7"):
            of = [title.split()[-1] + "-train"] if stage == "train" else [stage.partition("-")[2] + "-test"]
        elif name in ("gistpool-8", "gistpool-9"):
            own = title.split()[0]
            others = {"drop", "narrativeqa", "race", "squad"} - {own}
            trained = [f"{other}-train" for other in others] if title.endswith("other 3") else [f"{own}-train"]
            of = trained if stage == "train" else [f"{own}-test"]
        else:
            of = {
                "pretrain": ["text"], "reconstruction": ["text"], "held-out": ["text"], "autoencoder": ["text"],
                "pile": ["text"], "wikitext": ["wikitext"], "finetune": ["train"], "sqa": ["sqa"], "mmb": ["mmb"],
                "vqav2": ["vqav2"], "summaries": ["test"], "answers": ["squad" if "squad" in given else "test"],
                "train": ["conversations" if "images" in given else "text" if "text" in given else "train"],
            }[stage]  # fmt: skip
        assert read == {str(given[each]) for each in of}, (title, stage)
        if stage.startswith(("answers", "summaries")) and "sets" not in report_of(folder / stage):
            examples, (test,) = row_of(folder / stage, title)["examples"], of
            kind = table.paper.removesuffix("-9b")
            of_set = given[test].name.partition("-test")[0] if kind == "gistpool" or test == "squad" else ""
            assert len(examples) == {"cl": 3, "dodo-chat": 4}.get(kind if not of_set else "", SIZES.get(of_set))
            assert all(of_set in example["original"] or "ae" not in example for example in examples)
    for stage, count in (("sqa", 4), ("mmb", 8), ("vqav2", 2)):
        if "images" in given:
            assert row_of(folder / stage, title)["counts"]["qa_examples"] == count
    if table.paper == "epl" and "images" not in given:
        sets = report_of(folder / "answers")["sets"]
        counts = {each["name"]: each["rows"][0]["counts"]["qa_examples"] for each in sets}
        assert counts == {each: 2 + index % 2 for index, each in enumerate(INSIDE + OUTSIDE)}


def ratio_of(title, otherwise):
    """The number before the x of a title."""
    numbers = [word[:-1] for word in title.replace(",", " ").split() if word.endswith("x") and word[:-1].isdigit()]
    return int(numbers[0]) if numbers else otherwise


def epl_ratio(name, table, arm, folder):
    if "images" in table.data:
        # What is before the image is read too: "user :".
        tokens = [example["tokens_read"] for example in row_of(folder / "sqa", arm.title)["examples"]]
        assert tokens == [int(arm.title.split()[1]) + 2] * 4
        return
    context = 2040 if name.endswith("-8b") else 1020
    for example in row_of(folder / "reconstruction", "")["examples"]:
        assert example["tokens_read"] == {"NoContext": 0, "FullContext": context}.get(arm.title, context // 5)
        assert example["ae_tokens"] == example["lm_tokens"] == context


def cl_ratio(name, table, arm, folder):
    context = 496 if arm.title == "31x" else 510
    for example in row_of(folder / "held-out", "")["examples"]:
        assert example["ae_tokens"] == example["lm_tokens"] == context
        assert context / example["tokens_read"] == (int(arm.title[:-1]) if name == "cl-1" else 15)


def dodo_states(name, table, arm, folder):
    """The states of a row, and its passages, all of the test splits."""
    states = int(arm.title.split()[-1])
    length = states // 2 + states * 5 + 32
    size = len(papers.rain(range(100)))
    for stage in ("pile", "wikitext"):
        row = report_of(folder / stage)["rows"][arm.title.startswith("Full")]
        assert row["counts"]["examples"] == size // length and row["counts"]["lm_tokens"] == 32 * (size // length)
        # What predicts the last 32 sees BOS, the recent tokens of its segment, and what stands for those before them.
        recent = past = means = 0.0
        for place in range(length - 32, length):
            first = place // 8 * 8 - (states // 2 - 8)
            recent += (place - first + 2) / 32
            past += first / 32
            means += ((place - first // 10 * 10 + 2) + first // 10) / 32
        assert recent + past / 10 == pytest.approx(states, rel=0.01)
        if arm.title.startswith("Compressive"):
            assert row["metrics"]["states"] == pytest.approx(means)
        elif arm.title.startswith("Dodo"):
            # The threshold is of other text.
            assert 5 < past / (row["metrics"]["states"] - recent) < 20
        else:
            of_dodo = report_of(folder / stage)["rows"][0]["metrics"]["states"]
            assert row["metrics"]["states"] == pytest.approx(of_dodo, abs=0.5)


def ratio(name, table, arm, folder):
    """Tokens that stand for each context: BOS, and one for every so many tokens of it."""
    for stage in arm.stages:
        if not stage.startswith(("answers", "summaries")):
            continue
        examples = row_of(folder / stage, arm.title)["examples"]
        if table.paper.startswith("gistpool"):
            lengths = [len(example["original"]) for example in examples]
        else:
            lengths = [example["tokens_read"] for example in row_of(folder / stage, "Full")["examples"]]
        for example, length in zip(examples, lengths, strict=True):
            if arm.title.startswith("LMSumm"):
                assert 0 < example["tokens_read"] < length
                continue
            per = 1 if arm.title.startswith("Full") else ratio_of(arm.title, 5)
            states = 0 if arm.title.startswith("No") else math.ceil(length / per)
            assert example["tokens_read"] - states in (0, 1), (arm.title, example["tokens_read"], length)


def test_a_row(check):
    check("gistpool-squad", ["AvgPool 5x"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_some_rows(name, check):
    check(name, SOME[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(TABLES.keys() - OTHERS))
def test_every_row(name, check):
    check(name)
