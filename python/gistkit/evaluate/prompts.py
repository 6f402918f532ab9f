"""Templates of prompts, and the markers of chat templates."""

from __future__ import annotations

from typing import Any, NamedTuple

from gistkit.common.text_ids import Filled

CONTEXT, QUESTION = "{context}", "{question}"
SUMMARIZE = "Please summarize the above document in one sentence."


class Markers(NamedTuple):
    """The text around a user's message in a chat: `open` before it, `close` between it and the answer."""

    open: str
    close: str


# Llama 2's, as Dodo's paper prints them.
INST = Markers("[INST]\n", "\n[/INST]")


class Prompt(NamedTuple):
    """A prompt for an `Example`: `context` ends with the context, `question` is the text after it."""

    context: str
    question: str


def fill(template: str, context: str, question: str = "") -> Prompt:
    """A template with {context} and {question} filled in; without {context}, it follows the context."""
    before, _, after = template.rpartition(CONTEXT)
    return Prompt(Filled(before + CONTEXT, CONTEXT, context) if before else context, Filled(after, QUESTION, question))


def check_template(template: str) -> None:
    """Raises a ValueError unless there is a {question}, and at most one {context}, which precedes it."""
    if QUESTION not in template:
        raise ValueError(f"template: expected a text with {QUESTION} in it, got {template!r}")
    if template.count(CONTEXT) > 1 or QUESTION in template.rpartition(CONTEXT)[0]:
        raise ValueError(f"template: expected {CONTEXT} at most once and before {QUESTION}, got {template!r}")


def chat_markers(tokenizer: Any) -> Markers:
    """The text around a user's message in a tokenizer's chat template; without a template, `INST`.

    A first token that the tokenizer puts before every text is left out.

    Raises:
        ValueError: if the template changes the message.
    """
    if not getattr(tokenizer, "chat_template", None):
        return INST
    message = [{"role": "user", "content": CONTEXT}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, separator, after = text.partition(CONTEXT)
    if not separator:
        raise ValueError(f"tokenizer: expected a chat template that keeps a user's message, got {text!r}")
    first = tokenizer.bos_token
    if first and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        before = before.removeprefix(first)
    return Markers(before, after)
