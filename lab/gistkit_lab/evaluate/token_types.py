"""Which kinds of tokens a selection prefers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


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
    check_tokens("token_types", tokens)
    is_nugget = check_selected("token_types", selected, len(tokens))
    if not is_nugget.any():
        raise ValueError("token_types: expected selected to have at least one nugget, got none")
    everywhere = Counter(tokens)
    among = Counter(token for token, token_selected in zip(tokens, is_nugget, strict=True) if token_selected)
    # Sorting keeps the order of appearance, which is a Counter's, between equals.
    ranked = sorted(everywhere, key=lambda token: (-among[token], -everywhere[token]))
    return [(token, among[token] / among.total(), everywhere[token] / len(tokens)) for token in ranked]


def check_tokens(function: str, tokens: Sequence[str]) -> None:
    """Refuses what are no decoded tokens."""
    if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
        raise TypeError(f"{function}: expected tokens to be a sequence of strings, one a token")
    if not len(tokens):
        raise ValueError(f"{function}: expected at least one token, got none")


def check_selected(function: str, selected: ArrayLike, count: int) -> NDArray[np.bool_]:
    """`selected` as bool [count]."""
    is_nugget = np.asarray(selected)
    if is_nugget.dtype != bool:
        raise TypeError(f"{function}: expected selected of dtype bool, got {is_nugget.dtype}")
    if is_nugget.shape != (count,):
        raise ValueError(f"{function}: expected selected of shape [{count}], one a token, got {list(is_nugget.shape)}")
    return is_nugget
