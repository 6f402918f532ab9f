"""run: one compressor beside the baselines, the model's own summary among them, and a judge's scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gistkit import evaluate
from gistkit.compress import Compressor
from gistkit.evaluate import Example, Markers, Report
from gistkit.evaluate.prompts import INST
from gistkit_lab.evaluate.judge import Judge, judge_report, questions_of
from gistkit_lab.evaluate.summary_context import SummaryContext


def run(
    compressor: Compressor,
    tokenizer: Any | None,
    examples: Sequence[Example],
    *,
    baselines: Sequence[str] = ("none", "full"),
    markers: Markers = INST,
    judge: Judge | None = None,
    **settings: Any,
) -> Report:
    """`gistkit.evaluate.run` with one more baseline, and perhaps a judge.

    Args:
        compressor, tokenizer, examples: as there.
        baselines: some of "none", "full" and "summary" (`SummaryContext` at the compressor's ratio), or none of them.
        markers: of the user's message in which "summary" asks for summaries.
        judge: see `judge_report`; of several processes only the first asks it.
        settings: the other arguments.

    Raises:
        ValueError: as there, and for a judge without questions.
    """
    others = {}
    if "summary" in baselines and not isinstance(baselines, str):
        if tokenizer is None:
            raise ValueError("tokenizer: expected one for the baseline 'summary', which writes text, got None")
        summary = SummaryContext(compressor.model, tokenizer, ratio=compressor.ratio, markers=markers)
        others[summary.title] = summary
        baselines = [name for name in baselines if name != "summary"]
    asked = None
    if judge is not None:
        tasks = settings.get("tasks")
        if not callable(judge) or (tasks is not None and "qa" not in tasks):
            raise ValueError(f"judge: expected a function beside the task 'qa', got {judge!r} and the tasks {tasks}")
        asked = questions_of(examples, tokenizer)
    report = evaluate.run(compressor, tokenizer, examples, baselines=baselines, others=others, **settings)
    processes = settings.get("processes")
    if judge is None or asked is None or not (processes is None or processes.is_first):
        return report
    return judge_report(report, asked, judge, progress=settings.get("progress", True))
