"""Data sets that are published as folders, written by hand; and what reads them where the lab is missing."""

import pytest

from gistkit.formats import question_sets
from tests.formats.test_questions import RACE, asked, written


def test_narrativeqa_is_a_folder_with_summaries_beside(tmp_path):
    head = "document_id,set,summary,summary_tokenized\n"
    written(
        tmp_path / "third_party/wikipedia/summaries.csv",
        f'{head}d1,train," A king rules,\nlong ago.",x\nd2,valid,A boat sinks.,x\nd3,test,A boy runs.,x\n',
    )
    head = "document_id,set,question,answer1,answer2,question_tokenized,answer1_tokenized,answer2_tokenized\n"
    questions = (
        "d1,train,Who rules?,A king,the king,x,x,x\nd2,valid,What sinks?,A boat,,x,x,x\nd3,test,Who?,a,b,x,x,x\n"
    )
    written(tmp_path / "qaps.csv", head + questions)
    train = ("A king rules,\nlong ago.", "Who rules?", ("A king", "the king"))
    assert asked(tmp_path, "train") == [train]
    assert asked(tmp_path, "validation") == [("A boat sinks.", "What sinks?", ("A boat",))]
    assert [each[0] for each in asked(tmp_path)] == [train[0], "A boat sinks.", "A boy runs."]
    assert [each.name for each in question_sets([tmp_path])] == [tmp_path.name]
    with pytest.raises(ValueError, match="split: expected one of train, validation, test, got 'valid'"):
        asked(tmp_path, "valid")
    for rows, message in (
        (f"{head}d9,train,Who?,a,b,x,x,x\n", r"line 2, 'document_id': expected one of .*\.csv, got 'd9'"),
        ("document_id,set,question\nd1,train,Who?\n", "line 2, 'answer1': expected a column of this name"),
        (f"{head}d1,train,Who?\n", "line 2: expected 8 cells as in the header, got 3"),
    ):
        written(tmp_path / "qaps.csv", rows)
        with pytest.raises(ValueError, match=rf"qaps\.csv, {message}"):
            asked(tmp_path, "train")


def test_fairytaleqa_asks_about_whole_stories(tmp_path):
    head = "question_id,local-or-sum,cor_section,attribute1,attribute2,question,ex-or-im1,answer1,answer2,answer3"
    for split, name in (("train", "the-goose"), ("val", "the-fox")):
        base = tmp_path / "data-by-train-split"
        written(base / f"section-stories/{split}/{name}-story.csv", f'section,text\n1,"{name}, one."\n2,It ended.\n')
        rows = f"{head},ex-or-im2,answer4,answer5,answer6\n1,local,1,a,,Who?,explicit,it,,,explicit,{name},it,\n"
        written(base / f"questions/{split}/{name}-questions.csv", rows)
    # The published data has every file twice.
    written(tmp_path / "data-by-origin/questions/green/the-fox-questions.csv", "none of these\n")
    assert asked(tmp_path, "train") == [("the-goose, one.\nIt ended.", "Who?", ("it", "the-goose"))]
    assert asked(tmp_path, "validation") == [("the-fox, one.\nIt ended.", "Who?", ("it", "the-fox"))]
    assert len(asked(tmp_path)) == 2
    with pytest.raises(FileNotFoundError, match="expected files in a folder test, got none"):
        asked(tmp_path, "test")


def test_race_and_stories_are_folders(tmp_path):
    for split in ("train", "dev"):
        written(tmp_path / f"RACE/{split}/high/1.txt", RACE)
        written(tmp_path / f"RACE/{split}/middle/2.txt", RACE | {"article": split})
    assert [each[0] for each in asked(tmp_path / "RACE", "validation")] == [RACE["article"]] * 2 + ["dev"] * 2
    assert len(asked(tmp_path / "RACE")) == 8
    # One split alone is that, whichever is asked for.
    assert len(asked(tmp_path / "RACE" / "train", "validation")) == 4
    story = "It rained .\n\nThe mill stood .\n\n@highlight\n\nRain fell\n\n@highlight\n\nA mill stood\n"
    written(tmp_path / "cnn/stories/a.story", story)
    written(tmp_path / "cnn/stories/b.story", "\n@highlight\n\nNothing\n")
    assert asked(tmp_path / "cnn") == [("It rained .\nThe mill stood .", None, ("Rain fell\nA mill stood",))]
    written(tmp_path / "cnn/stories/b.story", "No highlights .\n")
    with pytest.raises(ValueError, match=r"b\.story: expected a line @highlight"):
        asked(tmp_path / "cnn")
    written(tmp_path / "RACE/train/high/1.txt", "[1")
    with pytest.raises(ValueError, match=r"high/1\.txt: expected a JSON object"):
        asked(tmp_path / "RACE", "train")


def test_without_the_lab_they_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("gistkit.formats.sets.brought", lambda group: [])
    written(tmp_path / "qaps.csv", "document_id,set,question,answer1,answer2\nd1,train,Who?,a,b\n")
    written(tmp_path / "race/high/1.txt", RACE)
    message = "NarrativeQA, FairytaleQA, RACE and CNN/DailyMail's stories are read with pip install ./lab"
    for folder in (tmp_path, tmp_path / "race"):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            question_sets([folder])
        with pytest.raises(FileNotFoundError, match=message):
            asked(folder)
