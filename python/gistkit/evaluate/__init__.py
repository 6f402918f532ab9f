"""How well a compressor's memory serves: reconstruction, continuation, answers (`pip install gistkit[evaluate]`)."""

# Each of these two names stands for a class of another package too, so the classes have longer ones.
from gistkit.evaluate.baselines import FullContext, load_baseline
from gistkit.evaluate.baselines import NoContextBaseline as NoContext
from gistkit.evaluate.cross import CrossTable, cross_table
from gistkit.evaluate.data import QUESTION, Example, cloze_questions, iter_questions, load_questions, passages
from gistkit.evaluate.evaluation import compare, evaluate
from gistkit.evaluate.images import evaluate_images
from gistkit.evaluate.judge import Answered, Judge, JudgeError, OpenAIJudge, judged
from gistkit.evaluate.lengths import LengthBleu, bleu_by_length
from gistkit.evaluate.metrics import (
    bleu4,
    choice_match,
    contains_answer,
    exact_match,
    normalise_answer,
    normalise_output,
    perplexity,
    rouge1_f1,
    rouge2_f1,
    rougel_f1,
    token_f1,
    vqa_accuracy,
)
from gistkit.evaluate.pairs import OpenAIPairJudge, Pair, compare_answers, compared
from gistkit.evaluate.prompts import (
    INST,
    Markers,
    Prompt,
    chat_markers,
    question_prompt,
    question_template,
    sentence_summary_prompt,
    summary_template,
    word_summary_prompt,
)
from gistkit.evaluate.reading import read_on
from gistkit.evaluate.report import ExampleResult as Result
from gistkit.evaluate.report import Report, Row
from gistkit.evaluate.run import run
from gistkit.evaluate.sets import SetReports, run_sets
from gistkit.evaluate.summary_context import SummaryContext
from gistkit.evaluate.token_losses import token_losses
from gistkit.evaluate.token_types import token_texts, token_types
from gistkit.evaluate.words import WordLoss, word_loss
from gistkit.evaluate.written import OpenAIWriter, WriterError, evaluate_written

__all__ = [
    "INST",
    "QUESTION",
    "Answered",
    "CrossTable",
    "Example",
    "FullContext",
    "Judge",
    "JudgeError",
    "LengthBleu",
    "Markers",
    "NoContext",
    "OpenAIJudge",
    "OpenAIPairJudge",
    "OpenAIWriter",
    "Pair",
    "Prompt",
    "Report",
    "Result",
    "Row",
    "SetReports",
    "SummaryContext",
    "WordLoss",
    "WriterError",
    "bleu4",
    "bleu_by_length",
    "chat_markers",
    "choice_match",
    "cloze_questions",
    "compare",
    "compare_answers",
    "compared",
    "contains_answer",
    "cross_table",
    "evaluate",
    "evaluate_images",
    "evaluate_written",
    "exact_match",
    "iter_questions",
    "judged",
    "load_baseline",
    "load_questions",
    "normalise_answer",
    "normalise_output",
    "passages",
    "perplexity",
    "question_prompt",
    "question_template",
    "read_on",
    "rouge1_f1",
    "rouge2_f1",
    "rougel_f1",
    "run",
    "run_sets",
    "sentence_summary_prompt",
    "summary_template",
    "token_f1",
    "token_losses",
    "token_texts",
    "token_types",
    "vqa_accuracy",
    "word_loss",
    "word_summary_prompt",
]
