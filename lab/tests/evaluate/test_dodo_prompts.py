"""The prompts of Dodo's appendix, in full."""

import json

from gistkit.evaluate import Example, Markers
from gistkit_lab.evaluate.prompts import iter_questions, question_prompt, sentence_summary_prompt, word_summary_prompt

CHAT = Markers("<user>\n", "<end>\n<model>\n")


def test_prompts_of_the_paper():
    context, rest = question_prompt("It {rained}.", "Did it {rain}?")
    assert context == "[INST]\nIt {rained}."
    assert rest == ("\nBased on the provided document, answer the following question:\nDid it {rain}?\n[/INST]")
    close = "\n[/INST]"
    sentence = "\nPlease summarize the above document in one sentence."
    assert sentence_summary_prompt("It rained.") == ("[INST]\nIt rained.", sentence + close)
    words = "[INST]\nPlease summarize the following text into 7 words: It rained."
    assert word_summary_prompt("It rained.", 7) == (words, close)


def test_prompts_within_other_markers():
    assert question_prompt("It rained.", "Did it?", CHAT) == (
        "<user>\nIt rained.",
        "\nBased on the provided document, answer the following question:\nDid it?<end>\n<model>\n",
    )
    for prompt in (sentence_summary_prompt("x", CHAT), word_summary_prompt("x", 1, CHAT)):
        assert prompt.context.startswith(CHAT.open) and prompt.context.endswith("x")
        assert prompt.question.endswith(CHAT.close) and "INST" not in "".join(prompt)


def test_questions_of_a_file_in_the_papers_prompt(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = (
        {"context": "A {question} b.", "question": "Who?", "answers": ["b"]},
        {"article": "It is.", "highlights": "b"},
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = question_prompt("A {question} b.", "Who?", CHAT), sentence_summary_prompt("It is.", CHAT)
    wanted = [Example(prompt.context, question=prompt.question, answers=("b",)) for prompt in prompts]
    assert list(iter_questions(path, CHAT)) == wanted
