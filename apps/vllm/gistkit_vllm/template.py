"""The chat template of a vLLM server: memory tokens, and behind them what `gistkit ask` writes around questions."""

from __future__ import annotations

import json
from typing import Any

# FIRST and LATER are expressions of a question's turn, END what ends an answer.
_BEHIND = """\
{%- if memory_tokens is defined -%}
{{- memory_text * memory_tokens -}}
{%- set turn = namespace(first=true) -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' and turn.first -%}{%- set turn.first = false -%}{{- FIRST -}}
{%- elif message['role'] == 'user' -%}{{- LATER -}}
{%- elif message['role'] == 'assistant' -%}{{- message['content'] ~ END -}}
{%- else -%}{{- raise_exception('messages: expected roles user and assistant after a memory') -}}
{%- endif -%}
{%- endfor -%}
{%- else -%}
PLAIN
{%- endif -%}"""
_PLAIN = """\
{%- for message in messages -%}
{{- FIRST if message['role'] == 'user' else message['content'] -}}
{%- endfor -%}"""


def chat_template(tokenizer: Any, template: str | None, chat: bool) -> str:
    """A template that renders as `gistkit ask` does behind a memory, and elsewhere as the tokenizer's own.

    Args:
        tokenizer: the model's.
        template: text around a {question}; None: that of training.
        chat: the tokenizer's own chat template goes around questions.

    Raises:
        ValueError: if the template has no {question}, or the tokenizer no chat template that can be cut.
    """
    from gistkit.ask.turns import Turns, chat_turns
    from gistkit.compress.tokens import QUESTION

    plain = QUESTION if template is None else template
    if "{question}" not in plain:
        raise ValueError(f"--template: expected a text with {{question}} in it, got {plain!r}")
    try:
        turns = chat_turns(tokenizer) if chat else Turns(plain, plain)
    except ValueError as error:
        raise ValueError(f"--chat: {error}") from error
    end, own = tokenizer.eos_token or "", getattr(tokenizer, "chat_template", None)
    parts = {"PLAIN": own if isinstance(own, str) else _PLAIN, "END": json.dumps(end)}
    parts |= {"FIRST": _around(turns.first), "LATER": _around(turns.later.removeprefix(end))}
    rendered = _BEHIND
    for name, value in parts.items():
        rendered = rendered.replace(name, value)
    return rendered


def placeholder_of(tokenizer: Any) -> tuple[int, str]:
    """A special token that stands for a memory token: one that ends nothing, if there is one."""
    special = {token: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = {str(token): index for token, index in special.items()}
    last = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    for text, index in sorted(named.items(), key=lambda item: (item[0] in last, item[1])):
        if tokenizer(f"{text}{text}\n", add_special_tokens=False)["input_ids"][:2] == [index, index]:
            return index, text
    raise ValueError("--model: expected a tokenizer with special tokens, which stand for memory tokens, got none")


def _around(turn: str) -> str:
    """An expression of Jinja: a message's content within a turn."""
    return " ~ message['content'] ~ ".join(json.dumps(part) for part in turn.split("{question}"))
