"""Questions about the wording of a text, whose answers are looked up in it."""

import pytest

from gistkit.evaluate import exact_match, normalise_answer
from gistkit_lab.evaluate.cloze import cloze_questions


def test_cloze_questions_have_one_right_answer():
    text = " ".join(f"w{i % 37}x{i % 11} (end{i})," for i in range(300))
    examples = cloze_questions(text, words=50, phrase=2, template="{question}")
    assert len(examples) == 12
    assert examples == cloze_questions(text, words=50, phrase=2, template="{question}")
    assert examples != cloze_questions(text, words=50, phrase=2, template="{question}", seed=1)
    framed = cloze_questions(text, words=50, phrase=2, template="<{context}|{question}>")
    assert [(e.context[1:], e.question[1:-1]) for e in framed] == [(e.context, e.question) for e in examples]
    assert {(e.context[0], e.question[0], e.question[-1]) for e in framed} == {("<", "|", ">")}
    for example in examples:
        phrase = example.question.split('"')[1]
        after = example.context.split(phrase)
        assert len(after) == 2
        assert exact_match(after[1].split()[0], example.answers) == 1
        assert normalise_answer(example.answers[0])


def test_cloze_questions_refuse_text_without_any():
    with pytest.raises(ValueError, match="text: expected a passage of 100 words with a word to ask for, got 2 words"):
        cloze_questions("two words")
    with pytest.raises(ValueError, match="with a word to ask for, got 200 words"):
        cloze_questions("same " * 200)
    with pytest.raises(ValueError, match="phrase: expected 1 to 4 words of a passage of 5, got 5"):
        cloze_questions("a b", words=5, phrase=5)
