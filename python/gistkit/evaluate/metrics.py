"""Figures of generated text and of predicted tokens: BLEU-4, ROUGE, exact match, token F1, accuracy and perplexity."""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_HYPHEN = re.compile(r"(?<=\w)-(?=\w)")


def need(module: str) -> Any:
    """An optional module; if it is missing, an ImportError that names the extra."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{package} is missing; run pip install 'gistkit[evaluate]'", name=package) from error


def bleu4(predictions: Sequence[str], references: Sequence[str | Sequence[str]], *, tokenize: str = "13a") -> float:
    """Corpus BLEU-4 of sacrebleu, 0..100: n-gram counts are summed over all texts before the score is taken.

    Args:
        predictions: texts, one for each entry of `references`.
        references: of each prediction a text, or several, of which every n-gram counts and the closest length; at least
            one entry.
        tokenize: sacrebleu's tokeniser; "none" where words are separated by spaces already.

    Raises:
        ValueError: if there is no text, or not one prediction for each entry of references, or one is empty.
        ImportError: if sacrebleu is missing.
    """
    if isinstance(predictions, str) or isinstance(references, str):
        raise ValueError("predictions, references: expected sequences of texts, got one text")
    if not references or len(predictions) != len(references):
        raise ValueError(
            f"predictions: expected one for each of at least one reference, got {len(predictions)} predictions and "
            f"{len(references)} references"
        )
    rows = [[entry] if isinstance(entry, str) else list(entry) for entry in references]
    for index, row in enumerate(rows):
        if not row:
            raise ValueError(f"references[{index}]: expected at least one text, got none")
    # sacrebleu takes the first references of all texts, then the second ones, and None where a text has no more.
    streams = [[row[place] if place < len(row) else None for row in rows] for place in range(max(map(len, rows)))]
    score = need("sacrebleu").corpus_bleu(list(predictions), streams, tokenize=tokenize, force=True)
    return float(score.score)


@lru_cache
def _rouge(kind: str) -> Any:
    return need("rouge_score.rouge_scorer").RougeScorer([kind])


def _best(measure: Callable[[str, str], float], prediction: str, references: str | Sequence[str]) -> float:
    references = [references] if isinstance(references, str) else references
    if not references:
        raise ValueError("references: expected at least one text, got none")
    return max(measure(prediction, reference) for reference in references)


def _rouge_f1(kind: str, prediction: str, references: str | Sequence[str]) -> float:
    return _best(lambda p, r: float(_rouge(kind).score(r, p)[kind].fmeasure), prediction, references)


def rouge1_f1(prediction: str, references: str | Sequence[str]) -> float:
    """ROUGE-1 F1 of rouge-score without stemming, 0..1; the best over several references.

    Its words are runs of a-z and 0-9 of the lower-case text: other alphabets count for nothing. It is the F1 of all
    tables of Position IDs Matter, which does not mention stemming, nor several references.

    Raises:
        ValueError: if there is no reference.
        ImportError: if rouge-score is missing.
    """
    return _rouge_f1("rouge1", prediction, references)


def rouge2_f1(prediction: str, references: str | Sequence[str]) -> float:
    """ROUGE-2 F1, over pairs of words; all else as in `rouge1_f1`."""
    return _rouge_f1("rouge2", prediction, references)


def rougel_f1(prediction: str, references: str | Sequence[str]) -> float:
    """ROUGE-L F1, over the longest common subsequence of words of the whole text; all else as in `rouge1_f1`.

    Dodo's Table 4 names "LCS" and does not say whether texts are split into sentences first (ROUGE-Lsum); here they are
    not.
    """
    return _rouge_f1("rougeL", prediction, references)


def normalise_answer(text: str) -> str:
    """An answer as SQuAD and MRQA compare it: lower case, no ASCII punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(prediction: str, references: str | Sequence[str]) -> float:
    """1 where the normalised prediction is one of the normalised references, else 0. A ValueError without any."""
    return _best(lambda p, r: float(normalise_answer(p) == normalise_answer(r)), prediction, references)


def _token_f1(prediction: str, reference: str) -> float:
    words, reference_words = normalise_answer(prediction).split(), normalise_answer(reference).split()
    common = sum((Counter(words) & Counter(reference_words)).values())
    return 2 * common / (len(words) + len(reference_words)) if common else 0.0


def token_f1(prediction: str, references: str | Sequence[str]) -> float:
    """F1 over the words of the normalised answers as SQuAD and MRQA take it, 0..1, the best over several references.

    A prediction of no words scores 0, whatever the reference. A ValueError if there is no reference.
    """
    return _best(_token_f1, prediction, references)


def normalise_output(text: str) -> str:
    """An output or an answer as Dodo compares them, Appendix E.

    English numbers become digits ("two" is 2, "twenty-one" 21, "one hundred and five" 105, "second" 2nd), ASCII and
    Unicode punctuation becomes spaces, and the text lower case without space at its sides. Beyond the appendix, hyphens
    within words are spaces before numbers are looked for, so that "twenty-one-year-old" has its 21, and runs of space
    become one, so that "Washington, D.C." is in "Washington D.C."; the latter adds matches and takes none away.

    Raises:
        ImportError: if text2num is missing.
    """
    digits = need("text_to_num").alpha2digit(_HYPHEN.sub(" ", text), "en", 0)
    marks = string.punctuation
    words = "".join(" " if c in marks or unicodedata.category(c).startswith("P") else c for c in digits)
    return " ".join(words.lower().split())


def _contains(prediction: str, reference: str) -> float:
    answer = normalise_output(reference)
    return float(bool(answer) and answer in normalise_output(prediction))


def contains_answer(prediction: str, references: str | Sequence[str]) -> float:
    """1 where the normalised output contains one of the normalised references, else 0: Dodo's accuracy, Appendix E.

    References match as strings, not as whole words: 2 is in 12. A reference that is empty after normalisation is in no
    output.

    Raises:
        ValueError: if there is no reference.
        ImportError: if text2num is missing.
    """
    return _best(_contains, prediction, references)


def perplexity(nats_a_token: float) -> float:
    """exp of a mean cross entropy in nats a token; infinity beyond the range of a float."""
    try:
        return math.exp(nats_a_token)
    except OverflowError:
        return math.inf
