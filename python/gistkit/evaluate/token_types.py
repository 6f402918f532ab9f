"""Tokens as text, and which kinds of them a selection prefers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

# What decoders give for the bytes of a part of a character, and the most bytes that a character has.
UNFINISHED, MOST_BYTES = "\ufffd", 4


def token_types(tokens: Sequence[str], selected: ArrayLike) -> list[tuple[str, float, float]]:
    """(type, share of the selected tokens, share of all tokens) of every token type, the most often selected first.

    Of types selected equally often the one more frequent in the text comes first, then the one that appears earlier.
    Each of the two shares sums to 1 over the list; types that are never selected stand at its end.

    Args:
        tokens: decoded pieces of text, of one text or of several on end; equal pieces are one type.
        selected: bool [number of tokens], True at the nuggets, at least one.

    Raises:
        TypeError: if a token is no string or `selected` is not bool.
        ValueError: if there is no token, no nugget, or not one entry of `selected` a token.

    Paper: Dodo, Figure 5.
    """
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise TypeError("tokens: expected a sequence of strings, one a token")
    if not len(tokens):
        raise ValueError("tokens: expected at least one, got none")
    is_nugget = np.asarray(selected)
    if is_nugget.dtype != bool:
        raise TypeError(f"selected: expected dtype bool, got {is_nugget.dtype}")
    if is_nugget.shape != (len(tokens),):
        raise ValueError(f"selected: expected shape [{len(tokens)}], one a token, got {list(is_nugget.shape)}")
    if not is_nugget.any():
        raise ValueError("selected: expected at least one nugget, got none")
    everywhere = Counter(tokens)
    among = Counter(token for token, token_selected in zip(tokens, is_nugget, strict=True) if token_selected)
    # Sorting keeps the order of appearance, which is a Counter's, between equals.
    ranked = sorted(everywhere, key=lambda token: (-among[token], -everywhere[token]))
    return [(token, among[token] / among.total(), everywhere[token] / len(tokens)) for token in ranked]


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
