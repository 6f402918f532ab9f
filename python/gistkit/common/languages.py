"""Whether a text may be in a language, by its commonest words."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Words that make up a quarter of English prose.
COMMON = {
    "en": {
        "the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "on", "with", "as", "was", "are", "be", "by",
        "this", "from", "at", "or", "an", "not", "you", "can", "have", "has", "if",
    }
}  # fmt: skip
# Fewer letters say too little; prose has two to three times this share.
LETTERS, SHARE = 150, 0.1


def is_language(tag: object) -> bool:
    """Whether something is a language's tag, such as "en" or "pt-BR"."""
    return isinstance(tag, str) and re.fullmatch(r"[a-zA-Z]{2,8}(-[a-zA-Z0-9]{1,8}){0,3}", tag) is not None


def unlike(text: str, languages: Iterable[str]) -> bool:
    """Whether a text is hardly prose in any of these languages; False where gistkit does not know their words."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    known = [COMMON.get(language) for language in languages]
    if sum(map(len, words)) < LETTERS or not known:
        return False
    return all(common is not None and sum(map(common.__contains__, words)) < SHARE * len(words) for common in known)
