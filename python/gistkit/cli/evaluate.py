"""`gistkit evaluate`: how much of a text a compressor keeps."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.cli.plugins import add_against
from gistkit.common.processes import Processes, launched
from gistkit.options.arguments import add_command, add_questions, device, names, number, path, positive
from gistkit.options.endpoints import add_endpoint, chosen_endpoint
from gistkit.options.messages import warn
from gistkit.options.models import add_compressor, add_model, chosen_compressor, load_model, load_tokenizer
from gistkit.options.outputs import check_file

if TYPE_CHECKING:
    from gistkit.compress import Compressor
    from gistkit.evaluate import Example, OpenAIJudge, Report, SetReports
    from gistkit.train import Corpus

EXAMPLES = """\
example: gistkit evaluate --model smollm2 --compressor runs/small/compressor --out runs/small/evaluation.json
example: gistkit evaluate --model ./llama --compressor runs/first/compressor --text book.txt --context 1020 --tasks lm
example: gistkit evaluate --model ./llama --compressor runs/qa/compressor --questions dev.jsonl --baselines full
example: gistkit evaluate --model ./llama --compressor runs/qa/compressor --questions mrqa/dev/ --out runs/qa/mrqa.json
example: gistkit evaluate --model smollm2 --compressor runs/reader/compressor --tau 128 --context 960 --continuation 60
example: gistkit evaluate --model ./chat --questions dev.jsonl --prompt dodo --baselines none,full,summary
example: accelerate launch --num_processes 4 -m gistkit.cli evaluate --model ./llama --compressor runs/qa/compressor \\
             --questions mrqa/dev/ --out runs/qa/mrqa.json
example: gistkit evaluate --model ./llama --compressor runs/qa/compressor --questions dev.jsonl \\
             --judge http://localhost:8000/v1 --judge-model grader
example: gistkit evaluate --model ./llama --questions dev.jsonl --written-ratio 5 \\
             --writer http://localhost:8000/v1 --writer-model large
example: gistkit evaluate --against presses --model smollm2 --examples 8 --context 256 --ratios 4 --by kvzip,key_diff"""

CONTEXT = 510
# Packages that measure.
MEASURES = ("sacrebleu", "rouge_score")
# The options of a writer that are None by default.
WRITER = ("writer", "writer_model", "writer_prompt", "writer_concurrency", "written_ratio")


def add(commands: Any) -> None:
    """Adds the command."""
    purpose = "measure reconstruction, continuation and answers, compared with no context and full context"
    parser = add_command(commands, "evaluate", _run, purpose, EXAMPLES)
    add_model(parser)
    add_compressor(parser)
    parser.add_argument(
        "--text",
        type=path,
        help="text file or folder, as for gistkit train; evaluates on its held-out part (default: Python's topics)",
    )
    parser.add_argument(
        "--documents", action="store_true",
        help="use each document of --text, cut to --context tokens, as a context; holds out nothing; for the task ae",
    )  # fmt: skip
    parser.add_argument("--cloze", action="store_true", help="ask which word follows a phrase of the text")
    add_questions(
        parser, "instead of --text; one row a set, and the means of MRQA's domains", "validation",
        "; test also selects a --text's test split if file names show it, as wiki.test.tokens",
    )  # fmt: skip
    parser.add_argument(
        "--images", type=path, metavar="FOLDER",
        help="folder of images, for the method voco; --questions are then files of image, question and answer or "
        "answers, as for gistkit train, or in LLaVA's format, and every question is measured",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", choices=("plain", "dodo"), default="plain",
        help="prompt around a question; plain: ### Question: and ### Answer: lines; dodo: Dodo's prompt in the model's "
        "chat template, or between [INST] and [/INST] (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="tokens of a context (default: one chunk, or 510 for methods without chunks)",
    )
    parser.add_argument(
        "--continuation", type=positive, metavar="N", help="tokens of a continuation (default: as --context)"
    )
    parser.add_argument(
        "--examples", type=positive, default=64, metavar="N", help="most examples of each set (default: %(default)s)"
    )
    parser.add_argument(
        "--tasks", type=names("ae", "lm", "qa"), help="some of ae,lm,qa (default: all that the data allow)"
    )
    parser.add_argument(
        "--baselines", type=names("none", "full", "summary", "recent", empty=True),
        help="some of none,full,summary, or ''; summary: the model reads its own summary, as short as the compressor's "
        "memory (default: none,full). With --tau some of recent,full; recent: only the last tokens, as many as the "
        "reader keeps states (default: recent,full)",
    )  # fmt: skip
    parser.add_argument(
        "--tau", type=positive, metavar="N",
        help="evaluate the language model that sees its last N tokens, and only nuggets (dodo) or means (avgpool) of "
        "earlier ones: the perplexity of continuations, and how many states it keeps",
    )  # fmt: skip
    parser.add_argument(
        "--segment", type=positive, metavar="N", help="tokens that share the start of the --tau window (default: 32)"
    )
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="most tokens of a reconstruction (default: the context's) or an answer (default: 64)",
    )
    parser.add_argument(
        "--excluded-words", type=words, metavar="WORDS",
        help="also measure the perplexity of words of continuations, without these comma-separated words; <unk> for "
        "WikiText, '' to exclude none",
    )  # fmt: skip
    fields = "{question}, {reference}, {answer} and perhaps {context}"
    add_endpoint(parser.add_argument_group("judge of answers"), "judge", "scores answers", fields)
    _add_writer(parser.add_argument_group("writer of shortened contexts"))
    presses = add_against(parser.add_argument_group("comparison with training-free selection"))
    parser.set_defaults(presses=presses)
    parser.add_argument("--trained-on", metavar="NAME", help="the compressor's training set, for gistkit view matrix")
    parser.add_argument("--tested-on", metavar="NAME", help="this test set, for gistkit view matrix")
    parser.add_argument(
        "--out", type=path, default=Path("runs/evaluation.json"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--keep-examples", action="store_true", help="also save what was generated for each example")


def words(text: str) -> tuple[str, ...]:
    """Argument type: comma-separated words, possibly none."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _add_writer(group: Any) -> None:
    does = "replaces the compressor: it shortens the contexts of --questions and answers from what it wrote"
    add_endpoint(group, "writer", does, "{words} and {context}")
    group.add_argument(
        "--written-ratio",
        type=number(1),
        metavar="N",
        help="words of a context per word that it may write (default: 5)",
    )
    group.add_argument(
        "--cut", action="store_true", help="cut what it wrote to the number of tokens of a compressor at that ratio"
    )


def _run(arguments: argparse.Namespace) -> int:
    check_file("--out", arguments.out)
    if arguments.presses is not None and arguments.presses.asked(arguments):
        return int(arguments.presses.run(arguments))
    if any(getattr(arguments, name) is not None for name in WRITER) or arguments.cut:
        return _written(arguments)
    if arguments.questions is None and arguments.split == "train":
        raise ValueError("--split: expected validation or test without --questions, got train")
    if arguments.tau is not None or arguments.segment is not None:
        return _read_on(arguments)
    processes = launched()
    device_name = processes.on(device(arguments.device))
    for name in ("text", "documents", "cloze", "context", "continuation"):
        if arguments.questions is not None and getattr(arguments, name):
            raise ValueError(f"--{name}: not allowed with --questions, got {getattr(arguments, name)}")
    if arguments.prompt != "plain" and arguments.questions is None and not arguments.cloze:
        raise ValueError(f"--prompt: expected plain without --questions and --cloze, got {arguments.prompt}")
    if arguments.documents:
        _refuse(arguments, "--documents", cloze=False, continuation=None)
        if arguments.text is None:
            raise ValueError("--documents: not allowed without --text")
    baselines = ["none", "full"] if arguments.baselines is None else arguments.baselines
    if "recent" in baselines:
        raise ValueError("--baselines: expected some of none, full, summary without --tau, got recent")

    from gistkit.evaluate.judge import OpenAIJudge

    judge = chosen_endpoint(arguments, "judge", OpenAIJudge)
    if arguments.images is not None:
        return _about_images(arguments, device_name, judge, processes)

    from gistkit import evaluate
    from gistkit.formats import question_sets

    chosen = question_sets(arguments.questions or [])
    for name in ("trained_on", "tested_on"):
        if len(chosen) > 1 and (value := getattr(arguments, name)) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')}: expected one set of questions, got {value} and {len(chosen)}"
            )
    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name, needs=MEASURES)
    compressor = _chosen(arguments, model)
    # An unusable chat template is an error only here.
    chat = arguments.prompt == "dodo" or "summary" in baselines
    markers = evaluate.chat_markers(tokenizer) if chat else evaluate.INST
    template = evaluate.QUESTION if arguments.prompt == "plain" else evaluate.question_template(markers)
    settings: dict[str, Any] = {
        "baselines": baselines,
        "tasks": arguments.tasks,
        "markers": markers,
        "batch_size": arguments.batch_size,
        "max_new_tokens": arguments.max_new_tokens,
        "excluded_words": arguments.excluded_words,
        "judge": judge,
        "processes": processes,
    }
    if arguments.questions is None:
        examples = _examples(arguments, tokenizer, compressor, template)
        return _show_one(evaluate.run(compressor, tokenizer, examples, **settings), arguments)
    templates = {"template": template}
    if arguments.prompt == "dodo":
        templates["summary_template"] = evaluate.summary_template(markers)
    sets = {each.name: partial(_questions, each.path, arguments, templates) for each in chosen}
    if len(sets) == 1:
        report = evaluate.run(compressor, tokenizer, *(read() for read in sets.values()), **settings)
        return _show_one(report, arguments)
    domains = {each.name: each.domain for each in chosen if each.domain is not None}
    return _show_sets(evaluate.run_sets(compressor, tokenizer, sets, domains=domains, **settings), arguments)


def _refuse(arguments: argparse.Namespace, beside: str, **plain: Any) -> None:
    """Refuses options that have no meaning with another one, unless they have their default."""
    for name, value in plain.items():
        if getattr(arguments, name) != value:
            word = name.replace("_", "-")
            raise ValueError(f"--{word}: not allowed with {beside}, got {getattr(arguments, name)}")


def _written(arguments: argparse.Namespace) -> int:
    """A writer instead of a compressor."""
    _refuse(
        arguments, "--writer", compressor=None, method=None, text=None, images=None, cloze=False, tau=None,
        segment=None, tasks=None, prompt="plain", max_new_tokens=None, excluded_words=None, documents=False,
        ratio=None, layout=None, chunk=None, option=[], baselines=None, context=None, continuation=None,
    )  # fmt: skip
    if not arguments.questions:
        raise ValueError("--questions: required with --writer")
    if not launched().is_first:
        # Only one process asks.
        return 0

    from gistkit import evaluate
    from gistkit.evaluate.metrics import need
    from gistkit.formats import question_sets

    writer = chosen_endpoint(arguments, "writer", evaluate.OpenAIWriter)
    if writer is None:
        raise ValueError("--writer: expected a URL, such as http://localhost:8000/v1, got none")
    judge = chosen_endpoint(arguments, "judge", evaluate.OpenAIJudge)
    tokenizer = load_tokenizer(arguments.model)
    reports, templates = {}, {"template": "{question}"}
    for each in question_sets(arguments.questions):
        examples = _questions(each.path, arguments, templates)
        with need("tqdm").tqdm(total=len(examples), desc=each.name, unit="answer") as bar:
            reports[each.name] = evaluate.evaluate_written(
                writer, examples, ratio=arguments.written_ratio or 5, tokenizer=tokenizer, cut=arguments.cut,
                judge=judge, on_answer=bar.update,
            )  # fmt: skip
        if unwritten := reports[each.name].rows[0].counts["unwritten"]:
            warn(f"the writer gave {unwritten} contexts of {each.name} no text")
    if len(reports) == 1:
        return _show_one(next(iter(reports.values())), arguments)
    return _show_sets(evaluate.SetReports(reports), arguments)


def _read_on(arguments: argparse.Namespace) -> int:
    """A language model that reads with the compressor."""
    if arguments.tau is None:
        raise ValueError(f"--segment: not allowed without --tau, got {arguments.segment}")
    _refuse(
        arguments, "--tau", questions=None, images=None, cloze=False, documents=False, tasks=None,
        prompt="plain", max_new_tokens=None, keep_examples=False, judge=None, judge_model=None, judge_prompt=None,
        judge_concurrency=None,
    )  # fmt: skip
    baselines = ["recent", "full"] if arguments.baselines is None else arguments.baselines
    if unknown := sorted({*baselines} - {"recent", "full"}):
        raise ValueError(f"--baselines: expected some of recent, full with --tau, got {unknown[0]}")
    processes = launched()
    device_name = processes.on(device(arguments.device))

    import torch

    from gistkit import evaluate
    from gistkit.compress import MixedResolution, language_model

    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name, needs=MEASURES)
    compressor: Any = chosen_compressor(arguments, model)
    reader = language_model(compressor, arguments.tau, arguments.segment)
    context = arguments.context or CONTEXT
    continuation = arguments.continuation or context
    corpus = _corpus(arguments, tokenizer, held_out_only=False)
    rows = _passages(arguments, corpus, context + continuation)
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
    report = evaluate.read_on(
        reader,
        rows,
        continuation,
        baselines=baselines,
        batch_size=arguments.batch_size,
        tokenizer=tokenizer,
        excluded_words=arguments.excluded_words,
        processes=processes,
    )
    return _show_one(report, arguments)


def _show_one(report: Report, arguments: argparse.Namespace) -> int:
    if not launched().is_first:
        return 0
    _warn_of_missing_scores(report, arguments)
    sets = {name: getattr(arguments, name) for name in ("trained_on", "tested_on") if getattr(arguments, name)}
    return _show(dataclasses.replace(report, settings=report.settings | sets), arguments)


def _show_sets(reports: SetReports, arguments: argparse.Namespace) -> int:
    if not launched().is_first:
        return 0
    for name, each in reports.reports.items():
        _warn_of_missing_scores(each, arguments, f" to {name}")
    return _show(reports, arguments)


def _warn_of_missing_scores(report: Report, arguments: argparse.Namespace, where: str = "") -> None:
    for row in report.rows if arguments.judge is not None else ():
        if missing := row.counts["qa_examples"] - row.counts.get("qa_judged", 0):
            warn(f"the judge gave {missing} of {row.counts['qa_examples']} answers{where} of {row.method} no score")


def _show(report: Report | SetReports, arguments: argparse.Namespace) -> int:
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report.save(arguments.out, examples=arguments.keep_examples)
    print(report.table())
    print(f"\nWritten: {arguments.out}")
    return 0


def _about_images(
    arguments: argparse.Namespace, device_name: str, judge: OpenAIJudge | None, processes: Processes
) -> int:
    """Questions about images, of which a compressor of images has the memory."""
    _refuse(
        arguments, "--images", baselines=None, tasks=None, prompt="plain", split="validation", excluded_words=None
    )  # fmt: skip
    if arguments.questions is None:
        raise ValueError("--questions: expected files of questions about the images, got none")

    from gistkit import evaluate, train

    model, processor = load_model(arguments.model, arguments.dtype, device_name, images=True, needs=MEASURES)
    compressor: Any = chosen_compressor(arguments, model, processor)
    reports = {}
    for file in arguments.questions:
        name = file.name.partition(".")[0]
        if name in reports:
            raise ValueError(f"--questions: expected files of different names, got {name} twice")
        conversations = train.load_conversations(file, arguments.images, "test")
        questions = train.ConversationQuestions(conversations, compressor, processor)
        reports[name] = evaluate.evaluate_images(
            compressor,
            processor.tokenizer,
            questions,
            limit=arguments.examples,
            batch_size=arguments.batch_size,
            max_new_tokens=arguments.max_new_tokens,
            judge=judge,
            processes=processes,
        )
    if len(reports) == 1:
        return _show_one(next(iter(reports.values())), arguments)
    return _show_sets(evaluate.SetReports(reports), arguments)


def _chosen(arguments: argparse.Namespace, model: Any) -> Compressor:
    """The compressor of the arguments, or the baseline whose task tokens --compressor names."""
    from gistkit.evaluate.baselines import has_baseline, load_baseline

    if arguments.compressor is not None and has_baseline(arguments.compressor):
        return load_baseline(arguments.compressor, model)
    return chosen_compressor(arguments, model)


def _examples(arguments: argparse.Namespace, tokenizer: Any, compressor: Compressor, template: str) -> list[Example]:
    from gistkit import evaluate

    # Methods that compress in place have no chunks.
    context = arguments.context or (compressor.chunk if compressor.memory_tokens > 1 else CONTEXT)
    if arguments.documents:
        return _documents(arguments, tokenizer, context)
    corpus = _corpus(arguments, tokenizer, held_out_only=True)
    if arguments.cloze:
        text = tokenizer.decode(corpus.held_out.tolist())
        return evaluate.cloze_questions(text, template=template)[: arguments.examples]
    rows = _passages(arguments, corpus, context + (arguments.continuation or context))
    return [evaluate.Example(row[:context], row[context:]) for row in rows]


def _documents(arguments: argparse.Namespace, tokenizer: Any, length: int) -> list[Example]:
    """The first documents of a text, each without what is beyond `length` tokens."""
    from gistkit import evaluate
    from gistkit.compress.tokens import text_ids
    from gistkit.train.document_files import whole_documents

    rows = (text_ids(text, tokenizer)[:length] for text in whole_documents(arguments.text))
    return [evaluate.Example(row) for row in islice(filter(None, rows), arguments.examples)]


def _questions(source: Path, arguments: argparse.Namespace, templates: dict[str, str]) -> list[Example]:
    """The first questions of a set; no more of it is read."""
    from gistkit import evaluate

    return list(islice(evaluate.iter_questions(source, split=arguments.split, **templates), arguments.examples))


def _corpus(arguments: argparse.Namespace, tokenizer: Any, *, held_out_only: bool) -> Corpus:
    from gistkit import train
    from gistkit.train.data import CACHE

    cache = arguments.out.parent / CACHE
    # Of texts the first split that is held out is the default.
    split = None if arguments.split == "validation" else arguments.split
    return train.load_corpus(
        arguments.text, tokenizer=tokenizer, cache=cache, held_out_only=held_out_only, split=split,
        progress=launched().is_first,
    )  # fmt: skip


def _passages(arguments: argparse.Namespace, corpus: Corpus, length: int) -> list[list[int]]:
    """Held-out passages of `length` tokens."""
    rows: list[list[int]] = corpus.chunks(length, count=arguments.examples).tolist()
    if not rows:
        raise ValueError(
            f"--context: expected at most the held-out part of {corpus.name} with its continuation, "
            f"{corpus.held_out.numel()} tokens, got {length}"
        )
    return rows
