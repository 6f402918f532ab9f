"""Objects of the package `datasets` as training data: the same text and questions as from files, read as streams."""

import json

import pytest
import torch

from gistkit.train import load_corpus, run
from tests.helpers.train_worker import make_model
from tests.train.test_corpora import DOCUMENTS, json_lines

datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [
    {"context": f"Number {n // 2} follows {n // 2 - 1}.", "question": f"And {n}?", "answers": [str(n)]}
    for n in range(40)
]


def stream(rows):
    """A stream without a length, whose columns nobody told."""

    def rows_of_it():
        yield from rows

    return datasets.IterableDataset.from_generator(rows_of_it)


def table(texts):
    return datasets.Dataset.from_dict({"id": list(range(len(texts))), "text": texts})


@pytest.mark.parametrize("limit", [None, 100])
def test_a_table_and_a_stream_are_the_text_of_a_file(tmp_path, limit):
    file = load_corpus(json_lines(tmp_path / "a.jsonl", DOCUMENTS), limit=limit)
    for dataset in (table(DOCUMENTS), stream([{"text": text} for text in DOCUMENTS]), [{"text": t} for t in DOCUMENTS]):
        corpus = load_corpus(dataset=dataset, limit=limit, cache=tmp_path / "cache")
        assert torch.equal(corpus.train, file.train) and torch.equal(corpus.held_out, file.held_out)
        assert corpus.digest == file.digest and corpus.test is None


def test_a_stream_is_not_read_behind_a_limit():
    read = []

    def rows():
        for number in range(1000):
            read.append(number)
            yield {"text": f"Document {number} ends."}

    corpus = load_corpus(dataset=datasets.IterableDataset.from_generator(rows), limit=200)
    assert corpus.train.numel() == 200 and len(read) < 20


@pytest.mark.slow
def test_a_whole_run_takes_texts_and_questions(tmp_path):
    shape = {"compressor": {"chunk": 8, "ratio": 4, "lora": 4}, "cpu": True, "progress": False}
    recipe = {"steps": 2, "batch": 2, "min_length": 16, "max_length": 32}
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    texts = {"file": {"text": json_lines(tmp_path / "a.jsonl", DOCUMENTS)}, "table": {"dataset": table(DOCUMENTS)}}
    tables = {"table": datasets.Dataset.from_list(ROWS), "stream": stream(ROWS), "rows": ROWS}
    questions = {name: {"questions": rows} for name, rows in tables.items()} | {
        "file": {"questions": tmp_path / "qa.jsonl"},
    }
    for preset, runs in (("epl-pretrain", texts), ("epl-finetune", questions)):
        losses = {
            name: run(
                make_model(), None, tmp_path / preset / name, preset=preset, recipe=recipe, **data, **shape
            ).held_out
            for name, data in runs.items()
        }
        assert all(found == losses["file"] for found in losses.values()), losses


@pytest.mark.slow
def test_several_tables_are_a_mixture_and_others_are_held_out(tmp_path):
    shape = {"compressor": {"chunk": 8, "ratio": 4, "lora": 4}, "cpu": True, "progress": False}
    recipe = {"steps": 1, "batch": 2, "max_length": 32, "min_length": 16}
    model = make_model()
    both = [datasets.Dataset.from_list(ROWS[:20]), stream(ROWS[20:])]
    options = {"preset": "epl-finetune", "recipe": recipe, **shape}
    result = run(model, None, tmp_path / "a", questions=both, weights=[2, 1], **options)
    assert set(result.held_out) == {"loss", "qa"}
    held_out = [
        run(make_model(), None, tmp_path / name, questions=both, validation=rows, **options).held_out
        for name, rows in (("b", stream(ROWS[:3])), ("c", ROWS[:3]), ("d", None))
    ]
    assert held_out[0] == held_out[1] != held_out[2]
    # Other shares are another run.
    with pytest.raises(ValueError, match="the saved run differs in batches"):
        run(make_model(), None, tmp_path / "a", questions=both, weights=[1, 1], resume=True, **options)
    with pytest.raises(ValueError, match="weights: expected one for each of several sets of questions, got 3"):
        run(make_model(), None, tmp_path / "e", questions=both, weights=[1, 2, 3], **options)


def test_mistakes_name_the_column(tmp_path):
    content = datasets.Dataset.from_dict({"content": ["a"], "id": [1]})
    with pytest.raises(ValueError, match="dataset: expected a column 'text' in Dataset, got content, id"):
        load_corpus(dataset=content)
    with pytest.raises(
        ValueError, match="dataset: expected a column 'text' in DatasetDict, validation, got content, id"
    ):
        load_corpus(dataset=datasets.DatasetDict({"train": table(["a"]), "validation": content}))
    with pytest.raises(ValueError, match="dataset: expected a split 'train' in DatasetDict, got test"):
        load_corpus(dataset=datasets.DatasetDict({"test": table(["a"])}))
    untold = stream([{"text": "a"}, {"content": "b"}])
    with pytest.raises(ValueError, match=r"IterableDataset\[1\], 'text': expected an object with a text, got None"):
        load_corpus(dataset=untold)
    with pytest.raises(ValueError, match="dataset: expected rows that can be read more than once, got list_iterator"):
        load_corpus(dataset=iter([{"text": "a"}]))
    with pytest.raises(ValueError, match=r"dataset: not allowed with a text, got 'Dataset' and 'a\.txt'"):
        load_corpus("a.txt", dataset=content)
    plain = {"preset": "epl-finetune", "cpu": True, "progress": False}
    rows = datasets.Dataset.from_list([{name: row[name] for name in ("context", "answers")} for row in ROWS])
    with pytest.raises(ValueError, match=r"rows\[0\], 'question': expected a text, got None"):
        run(make_model(), None, tmp_path, questions=rows, **plain)
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    with pytest.raises(
        ValueError, match=r"questions: expected rows, such as questions\['train'\], got splits .*: train"
    ):
        run(make_model(), None, tmp_path, questions=splits, **plain)
