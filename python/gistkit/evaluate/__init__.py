"""How well a compressor's memory serves: reconstruction, continuation, answers (`pip install gistkit[evaluate]`)."""

# Each of these two names stands for a class of another package too, so the classes have longer ones.
from gistkit.evaluate.baselines import FullContext, load_baseline
from gistkit.evaluate.baselines import NoContextBaseline as NoContext
from gistkit.evaluate.data import QUESTION, Example, iter_questions, load_questions
from gistkit.evaluate.evaluation import compare, evaluate
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
from gistkit.evaluate.prompts import INST, Markers, Prompt, chat_markers
from gistkit.evaluate.report import ExampleResult as Result
from gistkit.evaluate.report import Report, Row
from gistkit.evaluate.run import run
from gistkit.evaluate.token_texts import token_texts

__all__ = [
    "INST",
    "QUESTION",
    "Example",
    "FullContext",
    "Markers",
    "NoContext",
    "Prompt",
    "Report",
    "Result",
    "Row",
    "bleu4",
    "chat_markers",
    "compare",
    "contains_answer",
    "evaluate",
    "exact_match",
    "iter_questions",
    "load_baseline",
    "load_questions",
    "normalise_answer",
    "normalise_output",
    "perplexity",
    "rouge1_f1",
    "rouge2_f1",
    "rougel_f1",
    "run",
    "token_f1",
    "token_texts",
]
