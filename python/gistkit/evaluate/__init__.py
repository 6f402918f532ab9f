"""How well a compressor's memory serves: reconstruction, continuation, answers (`pip install gistkit[evaluate]`)."""

from gistkit.evaluate.baselines import FullContext, NoContext
from gistkit.evaluate.data import QUESTION, Example, cloze_questions, load_questions, passages
from gistkit.evaluate.evaluation import compare, evaluate
from gistkit.evaluate.metrics import bleu4, exact_match, normalise_answer, perplexity, rouge1_f1, token_f1
from gistkit.evaluate.report import Report, Result, Row
from gistkit.evaluate.run import run
from gistkit.evaluate.token_types import token_types

__all__ = [
    "QUESTION",
    "Example",
    "FullContext",
    "NoContext",
    "Report",
    "Result",
    "Row",
    "bleu4",
    "cloze_questions",
    "compare",
    "evaluate",
    "exact_match",
    "load_questions",
    "normalise_answer",
    "passages",
    "perplexity",
    "rouge1_f1",
    "run",
    "token_f1",
    "token_types",
]
