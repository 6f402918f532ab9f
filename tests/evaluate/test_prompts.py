"""The markers of chat templates."""

from types import SimpleNamespace

import pytest

from gistkit.evaluate import Markers, chat_markers
from tests.helpers.models import byte_tokenizer

CHAT = Markers("<user>\n", "<end>\n<model>\n")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<model>\n{% endif %}"
)


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
