"""The prompts of Dodo's appendix, in full, and the markers of chat templates."""

import json
from types import SimpleNamespace

import pytest

from gistkit.evaluate import (
    Example,
    Markers,
    chat_markers,
    load_questions,
    question_prompt,
    question_template,
    sentence_summary_prompt,
    word_summary_prompt,
)
from tests.helpers.models import byte_tokenizer

CHAT = Markers("<user>\n", "<end>\n<model>\n")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<model>\n{% endif %}"
)


def test_prompts_of_the_paper():
    context, rest = question_prompt("It {rained}.", "Did it {rain}?")
    assert context == "[INST]\nIt {rained}."
    assert rest == ("\nBased on the provided document, answer the following question:\nDid it {rain}?\n[/INST]")
    assert sentence_summary_prompt("It rained.") == (
        "[INST]\nIt rained.",
        "\nPlease summarize the above document in one sentence.\n[/INST]",
    )
    assert "".join(word_summary_prompt("It rained.", 7)) == (
        "[INST]\nPlease summarize the following text into 7 words: It rained.\n[/INST]"
    )
    assert word_summary_prompt("It rained.", 7).question == "\n[/INST]"


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
    path.write_text(json.dumps({"context": "A {question} b.", "question": "Who?", "answers": ["b"]}) + "\n")
    prompt = question_prompt("A {question} b.", "Who?", CHAT)
    wanted = Example(prompt.context, question=prompt.question, answers=("b",))
    assert load_questions(path, template=question_template(CHAT)) == [wanted]


def test_markers_of_a_chat_template():
    tokenizer = byte_tokenizer()
    assert chat_markers(tokenizer) == ("[INST]\n", "\n[/INST]")
    tokenizer.chat_template = TEMPLATE
    assert chat_markers(tokenizer) == CHAT
    # A first token that the tokenizer writes itself is not written twice.
    tokenizer = byte_tokenizer(start=True)
    tokenizer.chat_template = "<start>" + TEMPLATE
    assert chat_markers(tokenizer) == CHAT
    assert tokenizer(CHAT.open)["input_ids"].count(257) == 1
    tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ValueError, match=r"expected a chat template that keeps a user's message, got '\{CONTEXT"):
        chat_markers(tokenizer)
    assert chat_markers(SimpleNamespace()) == ("[INST]\n", "\n[/INST]")
