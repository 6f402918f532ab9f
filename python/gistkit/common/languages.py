"""Whether a text may be in a language, by its commonest words."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Words that make up a third of English prose.
COMMON = {
    "en": {
        "the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "on", "with", "as", "was", "are", "be", "by",
        "this", "from", "at", "or", "an", "not", "you", "can", "have", "has", "if", "he", "she", "we", "they", "his",
        "her", "their", "its", "my", "our", "your", "him", "them", "but", "all", "were", "had", "been", "which", "what",
        "when", "who", "there", "then", "than", "would", "after", "about", "into", "these", "more", "one", "out", "up",
    }
}  # fmt: skip
# Bytes of letters in UTF-8: in less a notice or a recipe has few of them too. Prose has four times this share.
LETTERS, SHARE = 400, 0.07


def is_language(tag: object) -> bool:
    """Whether something is a language's tag, such as "en" or "pt-BR"."""
    return isinstance(tag, str) and re.fullmatch(r"[a-zA-Z]{2,8}(-[a-zA-Z0-9]{1,8}){0,3}", tag) is not None


def unlike(text: str, languages: Iterable[str]) -> bool:
    """Whether a text is hardly prose in any of these languages; False where gistkit does not know their words."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    known = [COMMON.get(language.split("-")[0].lower()) for language in languages]
    if len("".join(words).encode()) < LETTERS or not known:
        return False
    return all(common is not None and sum(map(common.__contains__, words)) < SHARE * len(words) for common in known)
