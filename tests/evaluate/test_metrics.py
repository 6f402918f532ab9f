"""Figures of generated text, each against one worked out by hand, and the files and texts that questions come from."""

import json
import math
import random
import re
import string
import sys
from collections import Counter

import pytest

from gistkit.evaluate import (
    Example,
    bleu4,
    contains_answer,
    exact_match,
    load_questions,
    normalise_answer,
    normalise_output,
    perplexity,
    rouge1_f1,
    rouge2_f1,
    rougel_f1,
    token_f1,
    token_texts,
)
from gistkit.evaluate.data import prepare
from tests.helpers.models import byte_tokenizer


def test_bleu4_by_hand():
    text = "the cat sat on the mat today"
    assert bleu4([text], [text]) == pytest.approx(100)
    # 4/5 words, 3/4 pairs, 2/3 triples and 1/2 fours are right, and nothing is missing.
    assert bleu4(["a b c d e"], ["a b c d f"]) == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    # All that is there is right, but it is 5 of 10 words: the brevity penalty exp(1 - 10 / 5).
    assert bleu4(["a b c d e"], ["a b c d e f g h i j"]) == pytest.approx(100 * math.exp(-1))
    # Counts are summed over the corpus, not scores averaged: 5/10, 4/8, 3/6, 2/4.
    assert bleu4(["a b c d e", "u v w x y"], ["a b c d e", "1 2 3 4 5"]) == pytest.approx(50)
    assert bleu4(["u v w x"], ["a b c d"]) < 15
    assert bleu4([""], ["a b c d"]) == 0


def test_bleu4_of_words_that_are_separated_already():
    assert bleu4(["7 , 8 9 1"], ["7 , 8 9 2"], tokenize="none") == pytest.approx(100 * (1 / 5) ** 0.25)
    # 13a would split the point off.
    assert bleu4(["a b c d."], ["a b c d ."]) == pytest.approx(100)
    assert bleu4(["a b c d."], ["a b c d ."], tokenize="none") < 100


def test_bleu4_of_several_references_is_nltks():
    from nltk.translate.bleu_score import corpus_bleu

    draw = random.Random(0)
    words = lambda low, high: [draw.choice("abcde") for _ in range(draw.randint(low, high))]  # noqa: E731
    predictions = [words(6, 12) for _ in range(20)]
    references = [[words(4, 14) for _ in range(draw.randint(1, 4))] for _ in predictions]
    ours = bleu4([" ".join(p) for p in predictions], [[" ".join(r) for r in row] for row in references])
    assert 5 < ours < 95
    assert ours == pytest.approx(100 * corpus_bleu(references, predictions))
    with pytest.raises(ValueError, match=r"references\[1\]: expected at least one text, got none"):
        bleu4(["a", "b"], ["a", []])


def official_squad_answer(text):
    """normalize_answer of SQuAD's evaluation script, which MRQA's has too, written out."""
    without_punctuation = "".join(ch for ch in text.lower() if ch not in {*string.punctuation})
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", without_punctuation).split())


def official_squad_f1(prediction, truth):
    prediction, truth = official_squad_answer(prediction).split(), official_squad_answer(truth).split()
    same = sum((Counter(prediction) & Counter(truth)).values())
    if same == 0:
        return 0
    precision, recall = same / len(prediction), same / len(truth)
    return 2 * precision * recall / (precision + recall)


def test_exact_match_and_token_f1_are_those_of_squads_script():
    draw = random.Random(1)
    pieces = ["a", "An", "THE", "the.", "cat", "Cat's", "U.S.", "-", "“x”", "é", "12", "12,5", "\t", "\n", "an apple"]
    scores = set()
    for _ in range(500):
        prediction, *references = (
            "".join(draw.choice(pieces) + draw.choice(["", " ", "  "]) for _ in range(draw.randint(0, 5)))
            for _ in range(draw.randint(2, 4))
        )
        official = max(official_squad_answer(prediction) == official_squad_answer(r) for r in references)
        assert normalise_answer(prediction) == official_squad_answer(prediction)
        assert exact_match(prediction, references) == official
        best = max(official_squad_f1(prediction, r) for r in references)
        assert token_f1(prediction, references) == pytest.approx(best)
        scores.add((official, round(best, 3)))
    assert len(scores) > 8


def test_rouge_by_hand():
    # 2 of 3 words are right, of 4 wanted: 2 * 2/3 * 2/4 / (2/3 + 2/4) = 4/7.
    assert rouge1_f1("the big Dog!", "a dog, the brown") == pytest.approx(4 / 7)
    assert rouge1_f1("Paris", ["London", "Paris, France"]) == pytest.approx(2 / 3)
    assert rouge1_f1("", "word") == 0
    assert rouge1_f1("12 7", "7 12") == 1
    # "a b c" and "a b d" are the longest common subsequences, 3 of 4.
    assert rougel_f1("a b c d", "A, b: d c.") == pytest.approx(3 / 4)
    # 2 of 5 pairs are right, of 2 wanted: 2 * 2/5 / (2/5 + 1); 3 of 6 words, of 3 wanted.
    assert rouge2_f1("it is x b c d", ["z", "b c d"]) == pytest.approx(4 / 7)
    assert rougel_f1("it is b x c d", ["z", "b c d"]) == pytest.approx(2 / 3)
    assert rouge2_f1("word", "word") == 0 and rougel_f1("word", "word") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two", "2"),
        ("zero, one and ten", "0 1 and 10"),
        ("twenty-one", "21"),
        ("Twenty One dogs.", "21 dogs"),
        ("one hundred and five", "105"),
        ("One-hundred-and-five!", "105"),
        ("five hundred thousand", "500000"),
        ("a twenty-one-year-old", "a 21 year old"),
        ("the Second World War", "the 2nd world war"),
        ("“Three”", "3"),
        ("  Washington, D.C. \n", "washington d c"),
        ("Seven Years' War—1756/63", "7 years war 1756 63"),
        ("Zürich, ¿dónde?", "zürich dónde"),
        ("often someone", "often someone"),
        ("3.5% of $4", "3 5 of 4"),
        ("?!", ""),
    ],
)
def test_normalise_output(text, expected):
    assert normalise_output(text) == expected


def test_contains_answer_by_hand():
    assert contains_answer("There were twenty-one of them.", "21") == 1
    assert contains_answer("There were 21 of them.", ["a few", "Twenty-One"]) == 1
    assert contains_answer("It was in\nWashington D.C. that", "Washington, D.C.") == 1
    assert contains_answer("Washington", "Washington, D.C.") == 0
    # As a string, not as whole words.
    assert contains_answer("There were 12.", "two") == 1
    assert contains_answer("theatre", "the") == 1
    # What is empty after normalisation is in nothing.
    assert contains_answer("anything!", "!") == contains_answer("", "") == contains_answer("a", ["", " "]) == 0
    assert contains_answer("anything!", ["!", "thing"]) == 1


def test_measures_need_a_reference():
    assert token_f1("", "") == 0
    for measure in (exact_match, token_f1, rouge1_f1, rouge2_f1, rougel_f1, contains_answer):
        with pytest.raises(ValueError, match="references: expected at least one text, got none"):
            measure("word", [])


def test_perplexity():
    assert perplexity(math.log(17)) == pytest.approx(17)
    assert perplexity(0) == 1
    assert perplexity(1e4) == math.inf


def test_bleu4_refuses_what_does_not_pair_up():
    with pytest.raises(ValueError, match="got 1 predictions and 2 references"):
        bleu4(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="at least one reference, got 0 predictions and 0"):
        bleu4([], [])
    with pytest.raises(ValueError, match="expected sequences of texts, got one text"):
        bleu4("a b", "a b")


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    from gistkit.evaluate import metrics

    metrics._rouge.cache_clear()
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ImportError, match=r"sacrebleu is missing; run pip install 'gistkit\[evaluate\]'") as error:
        bleu4(["a"], ["a"])
    assert isinstance(error.value.__cause__, ImportError)
    with pytest.raises(ImportError, match="rouge_score is missing"):
        rouge1_f1("a", "a")
    monkeypatch.setitem(sys.modules, "text_to_num", None)
    with pytest.raises(ImportError, match=r"text_to_num is missing; run pip install 'gistkit\[evaluate\]'"):
        contains_answer("a", "a")


def test_questions_of_a_file(tmp_path):
    path = tmp_path / "questions.jsonl"
    items = [
        {"context": "It rained {much}.", "question": "Did it {rain}?", "answers": ["yes", "it did"]},
        {"context": "Zürich", "question": "Where?", "answers": ["Zürich"], "source": "made up"},
    ]
    path.write_text("\n\n".join(json.dumps(item, ensure_ascii=False) for item in items) + "\n", encoding="utf-8")
    examples = load_questions(path)
    assert examples[0] == Example(
        "It rained {much}.",
        question="\n### Question:\nDid it {rain}?\n### Answer:\n",
        answers=("yes", "it did"),
    )
    assert load_questions(path, template="Q: {question} A:")[1].question == "Q: Where? A:"
    # What stands before the context is part of it; braces of the file's own are no places of the template.
    example = load_questions(path, template="Read {context}! Q: {question} A:")[0]
    assert (example.context, example.question) == ("Read It rained {much}.", "! Q: Did it {rain}? A:")


def test_an_empty_question_asks_what_the_template_says(tmp_path):
    path = tmp_path / "cnn.jsonl"
    path.write_text(json.dumps({"context": "Long article.", "question": "", "answers": ["Summary."]}) + "\n")
    template = "<{context}\nPlease summarize the above document in one sentence.{question}>"
    (example,) = load_questions(path, template=template)
    asked = "\nPlease summarize the above document in one sentence.>"
    assert example == Example("<Long article.", question=asked, answers=("Summary.",))
    assert prepare([example], byte_tokenizer(), ["qa"])[0].answers == ("Summary.",)
    with pytest.raises(
        ValueError, match="line 1, 'question': expected a text, because the template has no other, got ''"
    ):
        load_questions(path, template="{context}{question}")


def test_files_without_questions(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: expected at least one question, got none"):
        load_questions(tmp_path / "empty.jsonl")
    with pytest.raises(FileNotFoundError):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"template: expected a text with \{question\} in it, got 'Q:'"):
        load_questions(tmp_path / "empty.jsonl", template="Q:")
    for template in ("{question} {context}", "{context} {context} {question}", "{question} {context} {question}"):
        with pytest.raises(ValueError, match=r"template: expected \{context\} at most once and before \{question\}"):
            load_questions(tmp_path / "empty.jsonl", template=template)


def test_characters_of_several_tokens_are_text():
    text = "naïve 日本 \U0001f600\n ok é"
    tokenizer = byte_tokenizer()
    texts = token_texts(tokenizer, tokenizer(text)["input_ids"])
    # A token a byte: a character stands with its first byte.
    assert texts == [part for char in text for part in (char, *[""] * (len(char.encode()) - 1))]
    # A part of a character at the end, and bytes that are none, remain what a decoder gives for them.
    ids = tokenizer(text)["input_ids"]
    assert token_texts(tokenizer, ids[:3]) == ["n", "a", "\ufffd"]
    broken = [tokenizer("é")["input_ids"][0]] * 6
    assert "".join(token_texts(tokenizer, broken)) == "\ufffd" * 6
    assert token_texts(tokenizer, []) == []


def test_spaces_between_words_are_kept():
    """A decoder like SentencePiece's strips the first space, and so that of every token by itself."""

    class Words:
        def decode(self, ids):
            return "".join(" " + "abcdefg"[token] for token in ids).removeprefix(" ")

    assert token_texts(Words(), [0, 2, 1]) == ["a", " c", " b"]
