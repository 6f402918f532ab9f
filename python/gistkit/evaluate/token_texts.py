"""Tokens as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What decoders give for the bytes of a part of a character, and the most bytes that a character has.
UNFINISHED, MOST_BYTES = "\ufffd", 4


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to that of the tokens before it; together they are the text of all.

    A character whose bytes are spread over several tokens belongs to the first of them; the others get "".

    Args:
        tokenizer: of transformers; its `decode` may use the tokens before one, as that of SentencePiece does.
        ids: token ids.
    """
    texts = [""] * len(ids)
    before, start = 0, 0
    for end in range(1, len(ids) + 1):
        known, text = tokenizer.decode(ids[before:start]), tokenizer.decode(ids[before:end])
        if text.endswith(UNFINISHED) and end < len(ids) and end - start < MOST_BYTES:
            continue
        texts[start] = text[len(known) :] if text.startswith(known) else tokenizer.decode(ids[start:end])
        before, start = start, end
    return texts
