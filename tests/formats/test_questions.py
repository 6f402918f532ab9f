"""Questions in every format that data sets are published in: small files written by hand, and what is wrong in them."""

import gzip
import json
import re
from importlib.metadata import EntryPoint

import pytest

from gistkit.evaluate import iter_questions, load_questions
from gistkit.formats import question_sets, read_questions
from tests.helpers.disks import zstd

TEMPLATE = "Q: {question} A:"


def written(path, content):
    """A file of JSON lines, of a JSON document, or of text as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def asked(path, split=None):
    """(context, question, answers) of every question."""
    return [each[1:] for each in read_questions(path, split)]


MRQA = [
    {"header": {"dataset": "HotpotQA", "split": "dev"}},
    {
        "id": "a",
        "context": "The well is dry . [SEP] The mill stands still .",
        "qas": [
            {"qid": "1", "question": "What is dry ?", "detected_answers": [{"text": "well"}], "answers": ["The well"]},
            {"qid": "2", "question": "What stands ?", "answers": ["The mill", "the mill"]},
        ],
    },
]
MRQA_ASKED = [
    (MRQA[1]["context"], "What is dry ?", ("The well",)),
    (MRQA[1]["context"], "What stands ?", ("The mill", "the mill")),
]


def article(context, *asked):
    """One of SQuAD's, of a paragraph; each question with its fields."""
    return {"title": "A", "paragraphs": [{"context": context, "qas": [{"id": "1"} | each for each in asked]}]}


SINCE = [{"text": text, "answer_start": 18} for text in ("May", "since May", "May")]
SQUAD = {
    "version": "v2.0",
    "data": [
        article(
            "The well is dry since May.",
            {"question": "Since when is it dry?", "answers": SINCE, "is_impossible": False},
            {"question": "Who dug it?", "answers": [], "plausible_answers": SINCE[:1], "is_impossible": True},
        ),
        article("A mill grinds.", {"question": "What grinds?", "answers": [{"text": "A mill"}]}),
    ],
}
SQUAD_ASKED = [
    ("The well is dry since May.", "Since when is it dry?", ("May", "since May")),
    ("A mill grinds.", "What grinds?", ("A mill",)),
]
DATE = {"day": "", "month": "", "year": ""}


def answer(number="", *spans, **date):
    """One of DROP's."""
    return {"number": number, "date": DATE | date, "spans": list(spans)}


LOST = {"question": "How many games were lost?", "answer": answer("2"), "query_id": "1"}
DROP = {
    "nfl_1": {
        "passage": "They won 3 of 5 games in May 1950.",
        "qa_pairs": [
            LOST | {"validated_answers": [answer("2"), answer("", "two"), answer()]},
            {"question": "When was it?", "answer": answer(month="May", year="1950")},
        ],
        "wiki_url": "none",
    },
    "nfl_2": {
        "passage": "Ann and Bob ran.",
        "qa_pairs": [{"question": "Who ran?", "answer": answer("", "Ann", "Bob") | {"date": {}}}],
    },
}
DROP_ASKED = [
    ("They won 3 of 5 games in May 1950.", "How many games were lost?", ("2", "two")),
    ("They won 3 of 5 games in May 1950.", "When was it?", ("May 1950",)),
    ("Ann and Bob ran.", "Who ran?", ("Ann, Bob",)),
]
RACE = {
    "article": "Ann found a coin. She gave it away.",
    "questions": ["What did Ann find?", "Ann gave it _ ."],
    "options": [["A coin.", "A key.", "A dog.", "A hat."], ["back", "away", "up", "in"]],
    "answers": ["A", "B"],
    "id": "high1.txt",
}
RACE_ASKED = [
    (RACE["article"], "What did Ann find?\nA. A coin.\nB. A key.\nC. A dog.\nD. A hat.", ("A coin.",)),
    (RACE["article"], "Ann gave it _ .\nA. back\nB. away\nC. up\nD. in", ("away",)),
]
ALPACA = [
    {"instruction": "Name the colour.", "input": "grass", "output": "Green", "source": "alpaca"},
    {"instruction": "Name a fruit.", "input": "", "output": "Plum", "source": "self_instruct"},
    {"instruction": "Say nothing.", "input": "", "output": "", "source": "self_instruct"},
]
ALPACA_ASKED = [("Name the colour.", "grass", ("Green",)), ("Name a fruit.", "", ("Plum",))]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("mrqa.jsonl", [*MRQA, {"context": "No question .", "qas": []}], MRQA_ASKED),
        ("squad.json", SQUAD, SQUAD_ASKED),
        ("squad_1.json", {"data": SQUAD["data"], "version": "1.1"}, SQUAD_ASKED),
        ("indented.json", json.dumps(SQUAD, indent=2), SQUAD_ASKED),
        ("drop.json", DROP, DROP_ASKED),
        ("drop_indented.json", json.dumps(DROP, indent=4), DROP_ASKED),
        ("race.jsonl", [RACE], RACE_ASKED),
        ("alpaca.json", json.dumps(ALPACA), ALPACA_ASKED),
        ("self_instruct.jsonl", ALPACA, ALPACA_ASKED),
        ("alpaca.csv", 'instruction,input,output\n"Name, please, the\ncolour.",grass,Green\n', [
            ("Name, please, the\ncolour.", "grass", ("Green",))
        ]),
        ("pwc.jsonl", [{"input": "A well.", "prompt": "What is it?", "answer": "A well"}], [
            ("A well.", "What is it?", ("A well",))
        ]),
        ("cnn.jsonl", [
            {"article": "It rained.", "highlights": "Rain .", "id": "1"}, {"article": "", "highlights": "x"}
        ], [("It rained.", None, ("Rain .",))]),
        ("squad_rows.jsonl", [
            {"context": "A mill.", "question": "What?", "answers": {"text": ["A mill", "A mill"], "answer_start": [0]}},
            {"context": "A mill.", "question": "Why?", "answers": {"text": [], "answer_start": []}},
        ], [("A mill.", "What?", ("A mill",))]),
        ("race_rows.jsonl", [
            {"article": "Ann ran.", "question": "Who?", "options": ["Bob", "Ann"], "answer": "B", "example_id": "x"}
        ], [("Ann ran.", "Who?\nA. Bob\nB. Ann", ("Ann",))]),
        ("drop_rows.jsonl", [
            {"passage": "Ann, Bob.", "question": "Who?", "answers_spans": {"spans": ["Ann", "Bob"], "types": ["span"]}}
        ], [("Ann, Bob.", "Who?", ("Ann, Bob",))]),
        ("narrative_rows.jsonl", [
            {
                "document": {"id": "1", "summary": {"text": "A king rules."}},
                "question": {"text": "Who rules?"},
                "answers": [{"text": "A king"}, {"text": "the king"}],
            }
        ], [("A king rules.", "Who rules?", ("A king", "the king"))]),
    ],
)  # fmt: skip
def test_every_format_is_known_by_what_it_holds(tmp_path, name, content, expected):
    path = written(tmp_path / name, content)
    assert asked(path) == expected
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert asked(tmp_path / f"{name}.gz") == expected
    # The bytes say that it is compressed, not the name.
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert asked(path) == expected


def test_zstd_of_several_frames(tmp_path):
    lines = [json.dumps(row).encode() + b"\n" for row in MRQA]
    path = tmp_path / "mrqa.jsonl.zst"
    path.write_bytes(b"".join(map(zstd, lines)))
    assert asked(path) == MRQA_ASKED
    (tmp_path / "squad.json.zst").write_bytes(zstd(json.dumps(SQUAD).encode()))
    assert asked(tmp_path / "squad.json.zst") == SQUAD_ASKED
    for kept in (-20, 6):
        path.write_bytes(zstd(b"".join(lines))[:kept])
        with pytest.raises(ValueError, match=r"mrqa\.jsonl\.zst.*: expected whole zstd data, got damaged data"):
            asked(path)


def test_zstd_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(ImportError, match=r"a\.jsonl\.zst: zstd needs pyarrow; run pip install 'gistkit\[zstd\]'"):
        asked(tmp_path / "a.jsonl.zst")


def test_a_summary_is_asked_for_in_the_papers_words(tmp_path):
    path = written(tmp_path / "cnn.jsonl", [{"article": "It rained.", "highlights": "Rain ."}])
    (example,) = load_questions(path, template=TEMPLATE)
    assert example.question == "Q: Please summarize the above document in one sentence. A:"
    # A question that is empty is none about a summary.
    alpaca = written(tmp_path / "alpaca.jsonl", ALPACA)
    questions = [each.question for each in load_questions(alpaca, template=TEMPLATE)]
    assert questions == ["Q: grass A:", "Q:  A:"]


def broken(change, document):
    """The document with a change in it."""
    copy = json.loads(json.dumps(document))
    change(copy)
    return copy


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", broken(lambda d: d["data"][1]["paragraphs"][0].pop("context"), SQUAD),
         r"a\.json, data\[1\], 'paragraphs'\[0\], 'context': expected a text that is not empty, got None"),
        ("a.json", broken(lambda d: d["data"][0]["paragraphs"][0]["qas"][0].update(answers=[]), SQUAD),
         r"'qas'\[0\], 'answers': expected at least one, or is_impossible, got \[\]"),
        ("a.json", broken(lambda d: d["data"].append(7), SQUAD), r"data\[2\]: expected a JSON object, got int"),
        ("a.json", '{"version": "1.1", "data": [\n{"paragraphs": []},\n{"paragraphs": [}]}', "line 3: expected JSON"),
        ("a.json", '{"data": [\n{"paragraphs": []}\n]}\n}', "line 4: expected JSON, got text that is not: Extra data"),
        ("a.json", broken(lambda d: d["nfl_2"].pop("passage"), DROP), r"a\.json, 'nfl_2', 'passage': expected a text"),
        ("a.json", broken(lambda d: d["nfl_1"]["qa_pairs"][1]["answer"].update(date=DATE), DROP),
         r"'nfl_1', 'qa_pairs'\[1\], 'answer': expected a number, spans or a date"),
        ("a.jsonl", [RACE | {"answers": ["A", "E"]}], r"'questions'\[1\], 'answer': expected a letter from A to D"),
        ("a.jsonl", [RACE | {"options": [["x"]]}], r"line 1, 'options': expected a list of options for each of 2"),
        ("a.jsonl", [{"input": "a", "prompt": 7, "answer": "b"}], "line 1, 'prompt': expected a text .*, got 7"),
        ("a.jsonl", [{"article": "a", "highlights": ""}], "line 1, 'highlights': expected a text that is not empty"),
        ("a.jsonl", [{"instruction": "", "output": "b"}], "line 1, 'instruction': expected a text that is not empty"),
        ("a.jsonl", [MRQA[1], ["c", "q"]], r"a\.jsonl, line 2: expected a JSON object, got list"),
        ("a.jsonl", json.dumps(MRQA[1]) + '\n{"context"', "line 2: expected a JSON object, got text that is not"),
        ("a.jsonl", [{"question": "q", "answers": ["a"]}], "'context': expected a text that is not empty, got None"),
        ("a.jsonl", [{"context": "c", "answers": ["a"]}], "line 1, 'question': expected a text, got None"),
        ("a.jsonl", [{"header": {}, "question": "q", "answers": ["a"]}], "line 1, 'context': expected a text that is"),
        ("a.jsonl", [{"context": "c", "qas": {}}], r"line 1, 'qas': expected a list of objects, got \{\}"),
        ("a.jsonl", [{"context": "c", "qas": ["q"]}], r"line 1, 'qas': expected a list of objects, got \['q'\]"),
        ("a.jsonl", [{"context": "c", "qas": [MRQA[1]["qas"][1], {"question": "q"}]}],
         r"line 1, 'qas'\[1\], 'answers': expected a list .* got None"),
        *(
            ("a.jsonl", [{"context": "c", "question": "q", "answers": bad}], f"'answers': .* {re.escape(repr(bad))}")
            for bad in ("a", [], [1])
        ),
        ("a.json", "[\n7]", r"a\.json, \[0\]: expected a JSON object, got int"),
        ("a.json", '[{"header": 1},\n{"a": tru}]', "line 2: expected JSON, got text that is not"),
        ("a.csv", "instruction,output\nx,y\nx\n", r"a\.csv, line 3: expected 2 cells as in the header, got 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_file_line_and_field(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        asked(written(tmp_path / name, content))


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 99)[:-12])
    with pytest.raises(ValueError, match=r"a\.jsonl: expected whole gzip data, got damaged data"):
        asked(path)
    path.write_bytes(b'{"context": "c", "question": "q", "answers": ["a"]}\n{"context": "\xff"}')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: expected UTF-8 text, got byte 0xff at 13"):
        asked(path)
    path.write_bytes(b'[{"context": "\xff"}]')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: expected UTF-8 text, got byte 0xff"):
        asked(path)


def test_only_what_is_asked_for_is_read(tmp_path):
    path = written(tmp_path / "a.jsonl", MRQA)
    with path.open("a") as file:
        file.write("this is no JSON\n")
    examples = iter_questions(path)
    assert [next(examples).answers, next(examples).answers] == [("The well",), ("The mill", "the mill")]
    with pytest.raises(ValueError, match="line 3: expected a JSON object"):
        next(examples)


def test_the_files_of_a_folder_are_sets_by_name(tmp_path):
    names = {"in": ["SQuAD", "TriviaQA-web"], "out": ["DROP", "DuoRC.ParaphraseRC"]}
    for domain, each in names.items():
        for name in each:
            path = tmp_path / domain / f"{name}.jsonl.gz"
            path.parent.mkdir(exist_ok=True)
            header = {"header": {"dataset": name.split(".")[0], "split": "dev"}}
            path.write_bytes(gzip.compress("\n".join(map(json.dumps, [header, MRQA[1]])).encode()))
    sets = question_sets([tmp_path])
    assert {each.name for each in sets} == {*names["in"], *names["out"]}
    assert all(asked(each.path) == MRQA_ASKED for each in sets)
    squad = written(tmp_path / "dev-v1.1.json", SQUAD)
    assert question_sets([squad]) == [("dev-v1.1", squad)]
    other = tmp_path / "other"
    (other / "SQuAD.jsonl").parent.mkdir()
    written(other / "SQuAD.jsonl", MRQA)
    same = [tmp_path / "in" / "SQuAD.jsonl.gz", other / "SQuAD.jsonl", tmp_path / "out" / "DROP.jsonl.gz"]
    assert [each.name for each in question_sets(same)] == ["in/SQuAD", "other/SQuAD", "DROP"]
    deep = [written(tmp_path / "more" / f"{root}" / "in" / "a.jsonl", MRQA) for root in "xy"]
    assert [each.name for each in question_sets([tmp_path / "more"])] == list(map(str, deep))
    with pytest.raises(ValueError, match=r"questions: expected different sets, got .*SQuAD\.jsonl twice"):
        question_sets([other / "SQuAD.jsonl", other])
    with pytest.raises(FileNotFoundError, match="none: expected a file of questions or a folder of them"):
        question_sets([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty: expected \.csv, .*, \.parquet files of questions"):
        question_sets([tmp_path / "empty"])


@pytest.mark.parametrize(
    ("train", "validation", "test"),
    [
        ("train.jsonl", "valid.jsonl", "test.jsonl"),
        ("train-v1.1.json", "dev-v1.1.json", "test-v1.1.json"),
        ("drop_dataset_train.json", "drop_dataset_dev.json", "drop_dataset_test.json"),
        ("train-00000-of-00001.jsonl", "validation-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"),
        ("train/SQuAD.jsonl.gz", "dev/SQuAD.jsonl.gz", "test/SQuAD.jsonl.gz"),
        ("data/train.0.csv", "data/val.0.csv", "data/test.0.csv"),
    ],
)
def test_of_a_folder_whose_names_show_splits_one_is_taken(tmp_path, train, validation, test):
    names = {"train": train, "validation": validation, "test": test}
    for name in names.values():
        written(tmp_path / name, MRQA)
    for split, name in names.items():
        assert [each.path for each in question_sets([tmp_path], split)] == [tmp_path / name]
    assert len(question_sets([tmp_path])) == 3
    # A file that is named is taken, whatever its name is; a folder of one split has nothing to leave out.
    assert [each.path for each in question_sets([tmp_path / test], "train")] == [tmp_path / test]
    (tmp_path / train).unlink()
    with pytest.raises(FileNotFoundError, match="expected files of the split 'train', got those of test, validation"):
        question_sets([tmp_path], "train")
    (tmp_path / validation).unlink()
    assert [each.path for each in question_sets([tmp_path], "train")] == [tmp_path / test]
    # Names that show no split are of each.
    more = written(tmp_path / "contested.jsonl", MRQA)
    assert [each.path for each in question_sets([tmp_path], "train")] == [more]


def test_names_of_the_hub_are_streamed(monkeypatch):
    import sys
    import types

    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        return iter([MRQA[1], ALPACA[0]])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert asked("hf:owner/name:small", "validation") == [*MRQA_ASKED, ALPACA_ASKED[0]]
    assert calls == [(("owner/name", "small"), {"split": "validation", "streaming": True})]
    assert question_sets(["hf:owner/name"])[0].name == "owner/name"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'gistkit\[datasets\]'"):
        asked("hf:owner/name")


def test_rows_are_read_as_files_are():
    class Split:
        """As a split of `datasets`: rows by number, made when they are asked for."""

        def __iter__(self):
            yield from ({**row} for row in (MRQA[1], ALPACA[0]))

    assert asked(Split()) == [*MRQA_ASKED, ALPACA_ASKED[0]]
    examples = list(iter_questions(Split()))
    assert len(examples) == len(MRQA_ASKED) + 1 and examples == load_questions(Split())
    with pytest.raises(ValueError, match=r"rows\[1\]: expected a JSON object, got list"):
        asked([MRQA[1], []])
    with pytest.raises(ValueError, match="rows: expected at least one question, got none"):
        load_questions([])


def test_a_broken_reader_of_folders_is_named_and_the_files_are_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"context": "c", "question": "q", "answers": ["a"]}\n')
    broken = EntryPoint("folders", "nowhere.at.all", "gistkit.formats")
    monkeypatch.setattr("gistkit.formats.sets.brought", lambda group: [broken])
    with pytest.warns(UserWarning, match=r"nowhere\.at\.all: cannot be loaded: No module named 'nowhere'; .* ./lab"):
        assert [each.name for each in question_sets([tmp_path])] == ["a"]
