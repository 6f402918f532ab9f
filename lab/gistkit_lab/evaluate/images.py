"""evaluate_images: answers to questions about images, from the memory of a VoCo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from gistkit.common.processes import Processes
from gistkit.compress import VoCo
from gistkit.evaluate.data import Prepared, words_of
from gistkit.evaluate.evaluation import method_name
from gistkit.evaluate.metrics import need
from gistkit.evaluate.report import Report
from gistkit.evaluate.runner import Runner, end_tokens
from gistkit.hf.image_contexts import join_contexts
from gistkit.train import ImageQuestion
from gistkit_lab.evaluate.image_measures import choice_match, chosen_letter, vqa_accuracy
from gistkit_lab.evaluate.judge import Answered, Judge, judge_report


class _Numbered:
    """A VoCo whose contexts are numbers of examples: images are read when their batch comes."""

    def __init__(self, compressor: VoCo, examples: Sequence[ImageQuestion]) -> None:
        self.compressor, self.model, self.examples = compressor, compressor.model, examples
        self.decode, self.logits, self.generate = compressor.decode, compressor.logits, compressor.generate

    def encode(self, input_ids: Sequence[Sequence[int]]) -> Any:
        return self.compressor.encode(join_contexts([self.examples[number].context for (number,) in input_ids]))


def evaluate_images(
    compressor: VoCo,
    tokenizer: Any,
    examples: Sequence[ImageQuestion],
    *,
    batch_size: int = 8,
    max_new_tokens: int | None = None,
    progress: bool = True,
    judge: Judge | None = None,
    processes: Processes | None = None,
) -> Report:
    """A report on the answers of a compressor of images; the figures of "qa" in `evaluate.compare`, and two more.

    "qa_vqa", the mean `vqa_accuracy`, is there where a question has several answers. "qa_choice" is there where every
    answer names an option by its letter: the share of questions whose answer names it (`choice_match`), each time for
    those that are asked in several orders of the options (`ImageQuestion.group`, MMBench's circular evaluation).

    Args:
        compressor: of images.
        tokenizer: of its model's processor.
        examples: questions, at least one, each with an answer. They may be made when they are asked for, as by
            `gistkit.train.ConversationQuestions`; each is asked for twice, and none is kept.
        batch_size, max_new_tokens, progress, processes: as in `gistkit.evaluate.compare`.
        judge: as in `judged`; it sees no image.

    Raises:
        ValueError: if there is no example, or one has no answer.
    """
    if not len(examples):
        raise ValueError("examples: expected at least one question, got none")
    for module in ("sacrebleu", "rouge_score.rouge_scorer", "text_to_num", *(["tqdm"] if progress else [])):
        need(module)
    stops = tuple(end_tokens(compressor.model, tokenizer))
    rows, groups = [], []
    for number, example in enumerate(examples):
        if not example.answers:
            raise ValueError(f"examples[{number}]: expected at least one right answer, got none")
        # The end token is not asked for, as in other evaluations.
        right = list(example.answer[:-1] if example.answer[-1] in stops else example.answer)
        rows.append(Prepared([number], [], list(example.question), tuple(example.answers), right))
        groups.append(example.group or number)
    runner = Runner(rows, tokenizer, ("qa",), batch_size, max_new_tokens, stops, 0, progress, processes or Processes())
    numbered: Any = _Numbered(compressor, examples)
    row = runner.row(method_name(compressor), numbered)
    if any(len(each.answers) > 1 for each in rows):
        score = 100 * fmean(vqa_accuracy(each.prediction or "", each.answers or ()) for each in row.examples)
        row = replace(row, metrics={**row.metrics, "qa_vqa": score})
    if all(chosen_letter(answer) for each in rows for answer in each.answers):
        scores = dict.fromkeys(groups, 1.0)
        for group, each in zip(groups, row.examples, strict=True):
            scores[group] *= choice_match(each.prediction or "", each.answers or ())
        metrics, counts = {"qa_choice": 100 * fmean(scores.values())}, {"qa_choices": len(scores)}
        row = replace(row, metrics={**row.metrics, **metrics}, counts={**row.counts, **counts})
    settings = {"tasks": ["qa"], "batch_size": batch_size, "max_new_tokens": max_new_tokens, "stop_tokens": list(stops)}
    report = Report((row,), settings)
    if judge is None or not (processes is None or processes.is_first):
        return report
    asked = [Answered(words_of(each.question, tokenizer).strip(), each.answers) for each in rows]
    return judge_report(report, asked, judge, progress=progress)
