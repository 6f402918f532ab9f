"""The text that a model's chat template writes around the questions of a conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jinja2 import TemplateError

from gistkit.common.messages import one_line
from gistkit.common.text_ids import filled_ids
from gistkit.evaluate.prompts import QUESTION, chat_markers

ANSWER = "{answer}"


class Turns(NamedTuple):
    """Templates with {question}: of the `first` question, and of a `later` one with what ends the answer before it."""

    first: str
    later: str

    def ids(self, tokenizer: Any, question: str, before: int | None) -> list[int]:
        """The token ids of a question.

        Args:
            tokenizer: the model's own.
            question: a text, in which names of special tokens are text.
            before: the last token of the previous answer, which is not repeated if it is the answer's end token; None:
                this is the first question.
        """
        template = self.first if before is None else self.later
        ids = filled_ids(template, QUESTION, question, tokenizer)
        return ids[1:] if ids[:1] == [before] else ids


def chat_turns(tokenizer: Any) -> Turns:
    """The turns of a tokenizer's chat template.

    The memory is the user's document, which starts the first message: the question follows on its own line, then the
    template's end of a message. What the template writes before a message, such as a system message, would have to
    precede the memory and is left out.

    Raises:
        ValueError: if there is no chat template, or it changes messages or takes no second question.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"tokenizer: expected one with a chat template, got {type(tokenizer).__name__} without")
    return Turns(f"\n{QUESTION}{chat_markers(tokenizer).close}", later_turn(tokenizer, [_message("user", "?")], str))


def later_turn(processor: Any, first: list[dict[str, Any]], content: Callable[[str], Any]) -> str:
    """What a chat template writes after an answer for one more {question}.

    Args:
        processor: a tokenizer or a processor with a chat template.
        first: the messages before the answer.
        content: a text as the template takes a message's content.

    Raises:
        ValueError: if the template changes messages or takes no second question.
    """
    messages = [*first, _message("assistant", content(ANSWER)), _message("user", content(QUESTION))]
    try:
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TypeError, TemplateError) as error:
        raise ValueError(
            f"tokenizer: expected a chat template that takes a second question, got one that fails on it: "
            f"{one_line(error)}"
        ) from error
    later = str(text).rpartition(ANSWER)[2]
    if text.count(ANSWER) != 1 or QUESTION not in later:
        raise ValueError(f"tokenizer: expected a chat template that keeps all messages, got {text!r}")
    return later


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}
