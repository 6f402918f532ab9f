"""The chat template of a vLLM server: memory tokens, and behind them what `gistkit ask` writes around questions."""

from __future__ import annotations

import json
import re
from typing import Any

# MEMORY is the placeholder of a memory token, FIRST and LATER are expressions of a question's turn, END what ends an
# answer. The number is the client's, where no memory is named: more tokens than a prompt has are not written.
_BEHIND = """\
{%- if memory_tokens is defined -%}
{{- MEMORY * [memory_tokens, 1048576] | min -}}
{%- set turn = namespace(first=true) -%}
{%- for message in messages -%}
CONTENT
{%- if message['role'] == 'user' and turn.first -%}{%- set turn.first = false -%}{{- FIRST -}}
{%- elif message['role'] == 'user' -%}{{- LATER -}}
{%- elif message['role'] == 'assistant' -%}{{- content ~ END -}}
{%- else -%}{{- raise_exception('messages: expected roles user and assistant after a memory') -}}
{%- endif -%}
{%- endfor -%}
{%- else -%}
PLAIN
{%- endif -%}"""
_PLAIN = """\
{%- for message in messages -%}
CONTENT
{{- FIRST if message['role'] == 'user' else content -}}
{%- endfor -%}"""
# vLLM gives parts to a model whose own template loops over them; a loop here would tell it that this one does.
_CONTENT = (
    "{%- set content = message['content'] if message['content'] is string "
    "else (message['content'] or []) | map(attribute='text') | join -%}"
)


def chat_template(tokenizer: Any, template: str | None, chat: bool) -> str:
    """A template that renders as `gistkit ask` does behind a memory, and elsewhere as the tokenizer's own.

    Args:
        tokenizer: the model's.
        template: text around a {question}; None: that of training.
        chat: the tokenizer's own chat template goes around questions.

    Raises:
        ValueError: if the template has no {question}, or the tokenizer no chat template that can be cut, or several of
            which none is the default.
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
    if isinstance(own, dict):
        if "default" not in own:
            raise ValueError(f"--model: expected a tokenizer with a chat template named default, got {', '.join(own)}")
        own = own["default"]
    parts = {"MEMORY": _quoted(placeholder_of(tokenizer)[1]), "CONTENT": _CONTENT, "END": _quoted(end)}
    parts |= {"FIRST": _around(turns.first), "LATER": _around(turns.later.removeprefix(end))}
    parts["PLAIN"] = own or _filled(_PLAIN, parts)
    return _filled(_BEHIND, parts)


def placeholder_of(tokenizer: Any) -> tuple[int, str]:
    """A special token that stands for a memory token: one that ends nothing, if there is one."""
    special = {token: index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = {str(token): index for token, index in special.items()}
    last = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    for text, index in sorted(named.items(), key=lambda item: (item[0] in last, item[1])):
        if tokenizer(f"{text}{text}\n", add_special_tokens=False)["input_ids"][:2] == [index, index]:
            return index, text
    raise ValueError("--model: expected a tokenizer with special tokens, which stand for memory tokens, got none")


def _filled(template: str, parts: dict[str, str]) -> str:
    """At once: a part may have another's name in it."""
    return re.sub("PLAIN|MEMORY|CONTENT|FIRST|LATER|END", lambda name: parts[name[0]], template)


def _around(turn: str) -> str:
    """An expression of Jinja: a message's content within a turn."""
    return " ~ content ~ ".join(_quoted(part) for part in turn.split("{question}"))


def _quoted(text: str) -> str:
    """A text of Jinja, which takes the halves of JSON's surrogate pairs for characters."""
    return json.dumps(text, ensure_ascii=False)
