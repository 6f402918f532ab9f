"""What the lab adds to `gistkit evaluate`: the papers' prompts, images, judges, and several sets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gistkit.cli.evaluate import (
    CONTEXT,
    MEASURES,
    check_data,
    compressor_or_baseline,
    context_of,
    corpus_of,
    measuring,
    passages_of,
    refuse,
    show,
    text_examples,
)
from gistkit.common.processes import launched
from gistkit.options.arguments import device, existing, positive
from gistkit.options.messages import warn
from gistkit.options.models import chosen_compressor, load_model
from gistkit_lab.evaluate.endpoint_options import add_judge, chosen_judge

if TYPE_CHECKING:
    from gistkit.evaluate import Example, Report
    from gistkit_lab.evaluate.sets import SetReports

# Options that are None by default.
JUDGE = ("judge", "judge_model", "judge_prompt", "judge_concurrency")
READING = ("tau", "segment", "excluded_words")


def add(parser: Any) -> None:
    """The options."""
    group = parser.add_argument_group("the papers' protocols")
    group.add_argument(
        "--documents", action="store_true",
        help="use each document of --text, cut to --context tokens, as a context; holds out nothing; for the task ae",
    )  # fmt: skip
    group.add_argument(
        "--images", type=existing, metavar="FOLDER",
        help="folder of images, for the method voco; --questions are then files of image, question and answer or "
        "answers, as for gistkit train, or in LLaVA's format, and every question is measured",
    )  # fmt: skip
    group.add_argument(
        "--prompt", choices=("plain", "dodo"), default="plain",
        help="prompt around a question; plain: ### Question: and ### Answer: lines; dodo: Dodo's prompt in the model's "
        "chat template, or between [INST] and [/INST] (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--tau", type=positive, metavar="N",
        help="evaluate the language model that sees its last N tokens, and only nuggets (dodo) or means (avgpool) of "
        "earlier ones: the perplexity of continuations, and how many states it keeps, beside --baselines recent, as "
        "many last tokens, and full (default: both)",
    )  # fmt: skip
    group.add_argument(
        "--segment", type=positive, metavar="N", help="tokens that share the start of the --tau window (default: 32)"
    )
    group.add_argument(
        "--excluded-words", type=_words, metavar="WORDS",
        help="also measure the perplexity of words with --tau, without these comma-separated words; <unk> for "
        "WikiText, '' to exclude none",
    )  # fmt: skip
    fields = "{question}, {reference}, {answer} and perhaps {context}"
    add_judge(parser.add_argument_group("judge of answers"), "scores answers", fields)


def _words(text: str) -> tuple[str, ...]:
    """Argument type: comma-separated words, possibly none."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def asked(arguments: argparse.Namespace) -> bool:
    """Whether the arguments ask for what the library alone does not do."""
    return (
        any(getattr(arguments, name) is not None for name in ("images", *READING, *JUDGE))
        or any((arguments.documents, arguments.prompt != "plain"))
        or not {"summary", "recent"}.isdisjoint(arguments.baselines or ())
        or _several(arguments.questions or [], arguments.split)
    )


def _several(questions: list[Path], split: str) -> bool:
    """Whether these are several sets; what is wrong with them is told by whoever reads them."""
    from gistkit.formats import question_sets

    try:
        return len(question_sets(questions, split)) > 1
    except (OSError, ValueError):
        return False


def run(arguments: argparse.Namespace) -> int:
    """Measures, and writes the report."""
    if any(getattr(arguments, name) is not None for name in READING):
        return _read_on(arguments)
    check_data(arguments)
    if arguments.prompt != "plain" and arguments.questions is None:
        raise ValueError(f"--prompt: expected plain without --questions, got {arguments.prompt}")
    if arguments.documents:
        refuse(arguments, "--documents", continuation=None, questions=None, split="validation")
        if arguments.text is None:
            raise ValueError("--documents: not allowed without --text")
    baselines = ["none", "full"] if arguments.baselines is None else arguments.baselines
    if "recent" in baselines:
        raise ValueError("--baselines: expected some of none, full, summary without --tau, got recent")

    from gistkit_lab.evaluate.judge import OpenAIJudge

    judge = chosen_judge(arguments, OpenAIJudge)
    if arguments.images is not None:
        return _about_images(arguments, judge)

    from gistkit import evaluate
    from gistkit.formats import question_sets
    from gistkit.formats.hub import name_of
    from gistkit_lab.evaluate import prompts
    from gistkit_lab.evaluate.run import run as measure
    from gistkit_lab.evaluate.sets import domain_of, run_sets

    chosen = question_sets(arguments.questions or [], arguments.split)
    device_name = launched().on(device(arguments.device))
    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name, needs=MEASURES)
    compressor = compressor_or_baseline(arguments, model)
    # An unusable chat template is an error only here.
    chat = arguments.prompt == "dodo" or "summary" in baselines
    markers = evaluate.chat_markers(tokenizer) if chat else evaluate.INST
    settings: dict[str, Any] = {"baselines": baselines, "markers": markers, "judge": judge, **measuring(arguments)}
    if not chosen:
        if arguments.documents:
            examples = _documents(arguments, tokenizer, context_of(arguments, compressor))
        else:
            examples = text_examples(arguments, tokenizer, compressor)
        return _show(measure(compressor, tokenizer, examples, **settings), arguments)
    read: Callable[..., Any] = evaluate.iter_questions
    if arguments.prompt == "dodo":
        read = partial(prompts.iter_questions, markers=markers)
    sets = {each.name: partial(_questions, read, each.path, arguments) for each in chosen}
    if len(sets) == 1:
        (examples,) = (each() for each in sets.values())
        return _show(measure(compressor, tokenizer, examples, **settings), arguments)
    local = {each.name: each.path for each in chosen if name_of(each.path) is None}
    domains = {name: domain for name, path in local.items() if (domain := domain_of(path)) is not None}
    return _show(run_sets(compressor, tokenizer, sets, domains=domains, **settings), arguments)


def _read_on(arguments: argparse.Namespace) -> int:
    """A language model that reads with the compressor."""
    if arguments.tau is None:
        name = "segment" if arguments.segment is not None else "excluded_words"
        raise ValueError(f"--{name.replace('_', '-')}: not allowed without --tau, got {getattr(arguments, name)}")
    plain: dict[str, Any] = dict.fromkeys(("questions", "images", "tasks", "max_new_tokens", *JUDGE))
    refuse(arguments, "--tau", documents=False, prompt="plain", keep_examples=False, **plain)
    check_data(arguments)
    baselines = ["recent", "full"] if arguments.baselines is None else arguments.baselines
    if unknown := sorted({*baselines} - {"recent", "full"}):
        raise ValueError(f"--baselines: expected some of recent, full with --tau, got {unknown[0]}")
    processes = launched()
    device_name = processes.on(device(arguments.device))

    import torch

    from gistkit.compress import MixedResolution, language_model
    from gistkit_lab.evaluate.reading import read_on

    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name, needs=MEASURES)
    compressor: Any = chosen_compressor(arguments, model)
    reader = language_model(compressor, arguments.tau, arguments.segment)
    context = arguments.context or CONTEXT
    continuation = arguments.continuation or context
    corpus = corpus_of(arguments, tokenizer, held_out_only=False)
    rows = passages_of(arguments, corpus, context + continuation)
    if arguments.tau >= len(rows[0]):
        raise ValueError(f"--tau: expected less than a passage, {len(rows[0])} tokens, got {arguments.tau}")
    if (
        isinstance(reader, MixedResolution)
        and compressor.samples_threshold
        and compressor.settings["threshold"] is None
    ):
        # After training on whole contexts there is no threshold: training text determines it.
        corpus.check(context + continuation)
        sampled = torch.Generator().manual_seed(0)
        reader.calibrate(corpus.batch(arguments.batch_size, context + continuation, sampled) for _ in range(4))
    report = read_on(
        reader, rows, continuation, baselines=baselines, batch_size=arguments.batch_size, tokenizer=tokenizer,
        excluded_words=arguments.excluded_words, processes=processes,
    )  # fmt: skip
    return show(report, arguments)


def _about_images(arguments: argparse.Namespace, judge: Any) -> int:
    """Questions about images, of which a compressor of images has the memory."""
    refuse(arguments, "--images", baselines=None, tasks=None, prompt="plain", split="validation")
    if arguments.questions is None:
        raise ValueError("--questions: expected files of questions about the images, got none")

    from gistkit import train
    from gistkit_lab.evaluate.choices import first, image_conversations
    from gistkit_lab.evaluate.images import evaluate_images
    from gistkit_lab.evaluate.sets import SetReports

    processes = launched()
    device_name = processes.on(device(arguments.device))
    model, processor = load_model(arguments.model, arguments.dtype, device_name, images=True, needs=MEASURES)
    compressor: Any = chosen_compressor(arguments, model, processor)
    reports = {}
    with TemporaryDirectory() as extracted:
        for file in arguments.questions:
            name = file.name.partition(".")[0]
            if name in reports:
                raise ValueError(f"--questions: expected files of different names, got {name} twice")
            conversations = first(image_conversations(file, arguments.images, Path(extracted)), arguments.examples)
            reports[name] = evaluate_images(
                compressor,
                processor.tokenizer,
                train.ConversationQuestions(conversations, compressor, processor),
                batch_size=arguments.batch_size,
                max_new_tokens=arguments.max_new_tokens,
                judge=judge,
                processes=processes,
            )
    (first_report, *others) = reports.values()
    return _show(SetReports(reports) if others else first_report, arguments)


def _show(found: Report | SetReports, arguments: argparse.Namespace) -> int:
    """Shows what was measured, and how many answers a judge gave no score."""
    reports: Mapping[str, Report] = getattr(found, "reports", {"": found})
    for name, row in ((name, row) for name, report in reports.items() for row in report.rows):
        count, where = row.counts.get("qa_examples", 0), f" to {name}" if name else ""
        missing = count - row.counts.get("qa_judged", 0)
        if missing and arguments.judge is not None and launched().is_first:
            warn(f"the judge gave {missing} of {count} answers{where} of {row.method} no score")
    return show(found, arguments)


def whole_documents(path: Path) -> Iterator[str]:
    """The documents of a file or a folder as `file_documents` takes them, in its order, none cut or held out."""
    from gistkit.formats.files import suffix_of
    from gistkit.train.document_files import ROWS, file_rows, files_in
    from gistkit.train.documents import articles

    if not path.exists():
        raise FileNotFoundError(f"text: expected a file or a folder, got {path}, which does not exist")
    chosen = files_in(path) if path.is_dir() else [path]
    if suffix_of(chosen[0]) in ROWS:
        yield from (content.decode() for _, content in articles(file_rows(chosen)))
    else:
        yield from (file.read_text(encoding="utf-8-sig") for file in chosen)


def _documents(arguments: argparse.Namespace, tokenizer: Any, length: int) -> list[Example]:
    """The first documents of a text, each without what is beyond `length` tokens."""
    from gistkit.common.text_ids import text_ids
    from gistkit.evaluate import Example

    rows = (text_ids(text, tokenizer)[:length] for text in whole_documents(arguments.text))
    return [Example(row) for row in islice(filter(None, rows), arguments.examples)]


def _questions(read: Callable[..., Any], source: Path, arguments: argparse.Namespace) -> list[Example]:
    """The first questions of a set; no more of it is read."""
    return list(islice(read(source, split=arguments.split), arguments.examples))
