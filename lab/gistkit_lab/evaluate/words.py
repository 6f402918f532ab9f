"""Perplexity a word, from the losses of the tokens that words are made of."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from gistkit.evaluate.metrics import perplexity
from gistkit.evaluate.token_texts import token_texts

# The word of WikiText that stands for every word out of its vocabulary.
UNKNOWN = ("<unk>",)
# Tokens before the measured ones that say whether their last word goes on.
BEFORE = 8
_WORD = re.compile(r"\S+")


@dataclass(frozen=True)
class WordLoss:
    """The loss of the complete words of a text, or of several by `+`.

    Args:
        nats: summed cross entropy of the tokens of the words.
        words: how many they are.
        excluded: complete words that were left out because they were named.
    """

    nats: float = 0.0
    words: int = 0
    excluded: int = 0

    def __add__(self, other: WordLoss) -> WordLoss:
        return WordLoss(self.nats + other.nats, self.words + other.words, self.excluded + other.excluded)

    @property
    def perplexity(self) -> float:
        """exp of the mean loss in nats a word; NaN where there is no word."""
        return perplexity(self.nats / self.words) if self.words else math.nan


def check_excluded(excluded: Any) -> tuple[str, ...]:
    """The words to exclude, each a text without white space; (): none."""
    if isinstance(excluded, str) or not isinstance(excluded, Collection):
        raise ValueError(f"excluded_words: expected a sequence of words, got {excluded!r}")
    for word in excluded:
        if not isinstance(word, str) or not _WORD.fullmatch(word):
            raise ValueError(f"excluded_words: expected words without white space, got {word!r}")
    return tuple(excluded)


def word_loss(
    tokenizer: Any,
    ids: Sequence[int],
    nats: Sequence[float],
    *,
    before: Sequence[int] = (),
    excluded: Collection[str] = UNKNOWN,
) -> WordLoss:
    """The loss of the complete words among measured tokens: the product over a word's tokens is its probability.

    Words are what white space separates, so the text should be one that is tokenised, as WikiText-103 is, where
    punctuation marks are words. A token counts for the word of its first character that is no white space; a token of
    only white space, such as a line's end, for the word after it. A word that begins in `before`, or is the last one
    and may be cut, is left out with its loss.

    Other tokens could spell a word too, so that its true perplexity is somewhat lower (Dodo, section 5.1, says so too).
    Dodo excludes the words that Merity et al. define as out of vocabulary, "<unk>" in WikiText-103. It does not say
    whether an end of line is a word; here it is none.

    Args:
        tokenizer: of transformers.
        ids: the measured token ids, in order.
        nats: the loss of each of them, given all tokens before it.
        before: the tokens before them; the last few decide whether the first word is complete.
        excluded: words that are left out with their losses, but are read.

    Raises:
        ValueError: if there is not one loss for each token, or `excluded` holds no words.

    Paper: Dodo, section 5.1 and Table 1 ("word").
    """
    if len(ids) != len(nats):
        raise ValueError(f"nats: expected one for each of {len(ids)} tokens, got {len(nats)}")
    known = [*before][-BEFORE:]
    excluded = check_excluded(excluded)
    pieces = token_texts(tokenizer, [*known, *ids])
    text = "".join(pieces)
    words = list(_WORD.finditer(text))
    # A token of white space at the end belongs to a word that is not there.
    losses, is_cut = [0.0] * (len(words) + 1), [False] * (len(words) + 1)
    at = index = 0
    for place, piece in enumerate(pieces):
        first = _WORD.search(piece)
        if piece:
            # The word of that character, or the next one.
            start = at + (first.start() if first else len(piece))
            while index < len(words) and words[index].end() <= start:
                index += 1
        at += len(piece)
        if place < len(known):
            is_cut[index] = True
        else:
            losses[index] += float(nats[place - len(known)])
    complete = [index for index, word in enumerate(words) if not is_cut[index] and word.end() < len(text)]
    counted = [index for index in complete if words[index].group() not in excluded]
    return WordLoss(math.fsum(losses[index] for index in counted), len(counted), len(complete) - len(counted))
