"""How well a compressor's memory serves: reconstruction, continuation, answers (`pip install gistkit[evaluate]`)."""

from gistkit.evaluate.baselines import FullContext, NoContext
from gistkit.evaluate.data import QUESTION, Example, cloze_questions, load_questions, passages
from gistkit.evaluate.evaluation import compare, evaluate
from gistkit.evaluate.lengths import LengthBleu, bleu_by_length
from gistkit.evaluate.metrics import (
    bleu4,
    contains_answer,
    exact_match,
    normalise_answer,
    normalise_output,
    perplexity,
    rouge1_f1,
    rouge2_f1,
    rougel_f1,
    token_f1,
)
from gistkit.evaluate.report import Report, Result, Row
from gistkit.evaluate.run import run

__all__ = [
    "QUESTION",
    "Example",
    "FullContext",
    "LengthBleu",
    "NoContext",
    "Report",
    "Result",
    "Row",
    "bleu4",
    "bleu_by_length",
    "cloze_questions",
    "compare",
    "contains_answer",
    "evaluate",
    "exact_match",
    "load_questions",
    "normalise_answer",
    "normalise_output",
    "passages",
    "perplexity",
    "rouge1_f1",
    "rouge2_f1",
    "rougel_f1",
    "run",
    "token_f1",
]
