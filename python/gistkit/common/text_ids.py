"""Token ids of texts, in which names of special tokens are text, and of templates, in which they are these tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class Filled(str):
    """A template with `text` at each `slot`: names of special tokens are these tokens in the template alone."""

    parts: tuple[str, str, str]

    def __new__(cls, template: str, slot: str = "", text: str = "") -> Filled:
        filled = super().__new__(cls, template.replace(slot, text) if slot else template)
        filled.parts = template, slot, text
        return filled


def text_ids(text: str, tokenizer: Any, *, special_tokens: bool = True, control_tokens: bool = False) -> list[int]:
    """The token ids of a text; of a `Filled` one those of `filled_ids`.

    Args:
        tokenizer: one of transformers, or a function of a string that returns token ids; None: UTF-8 bytes.
        special_tokens: the tokenizer adds its own around the text, such as a first token.
        control_tokens: the name of a special token in the text, such as <|im_end|>, is that token; else it is text.

    Raises:
        TypeError: if the tokenizer returns anything else.
    """
    if tokenizer is None:
        return list(text.encode())
    if isinstance(text, Filled):
        return filled_ids(*text.parts, tokenizer, special_tokens=special_tokens, control_tokens=control_tokens)
    options = {}
    if hasattr(tokenizer, "add_special_tokens"):
        # A text longer than the model's window is no mistake here.
        options = {"add_special_tokens": special_tokens, "split_special_tokens": not control_tokens, "verbose": False}
    try:
        output = tokenizer(text, **options)
    except ValueError as error:
        # That of mistral-common refuses the option, as it reads every name as text anyway.
        if "split_special_tokens" not in str(error):
            raise
        del options["split_special_tokens"]
        output = tokenizer(text, **options)
    output = output["input_ids"] if isinstance(output, Mapping) else output
    ids = np.asarray(output)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise TypeError(
            f"tokenizer: expected a list of integers for a string, got {type(output).__name__} with shape {ids.shape}"
        )
    return ids.astype(np.int64).tolist()


def filled_ids(
    template: str, slot: str, text: str, tokenizer: Any, *, special_tokens: bool = False, control_tokens: bool = False
) -> list[int]:
    """`text_ids` of a template with `text` at each `slot`; the template's own special tokens always count."""
    options = {"special_tokens": special_tokens, "control_tokens": True}
    plain = text_ids(text, tokenizer, special_tokens=False)
    if control_tokens or plain == text_ids(text, tokenizer, special_tokens=False, control_tokens=True):
        return text_ids(template.replace(slot, text), tokenizer, **options)
    first, *others = template.split(slot)
    ids = text_ids(first, tokenizer, **options)
    for part in others:
        ids += plain + text_ids(part, tokenizer, special_tokens=False, control_tokens=True)
    return ids
