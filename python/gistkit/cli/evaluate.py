"""`gistkit evaluate`: how much of a text a compressor keeps."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.cli.plugins import add_evaluations
from gistkit.common.processes import launched
from gistkit.options.arguments import add_command, add_questions, device, existing, names, path, positive
from gistkit.options.models import add_compressor, add_model, chosen_compressor, load_model
from gistkit.options.outputs import check_file

if TYPE_CHECKING:
    from gistkit.compress import Compressor
    from gistkit.evaluate import Example, Report
    from gistkit.train import Corpus

EXAMPLES = """\
example: gistkit evaluate --model smollm2 --compressor runs/small/compressor --out runs/small/evaluation.json
example: gistkit evaluate --model ./llama --compressor runs/first/compressor --text book.txt --context 1020 --tasks lm
example: gistkit evaluate --model ./llama --compressor runs/qa/compressor --questions dev.jsonl --baselines full
example: accelerate launch --num_processes 4 -m gistkit.cli evaluate --model ./llama --compressor runs/qa/compressor \\
             --questions dev.jsonl --out runs/qa/dev.json"""

CONTEXT = 510
# Packages that measure.
MEASURES = ("sacrebleu", "rouge_score", "text_to_num")


def add(commands: Any) -> None:
    purpose = "measure reconstruction, continuation and answers, compared with no context and full context"
    parser = add_command(commands, "evaluate", _run, purpose, EXAMPLES)
    add_model(parser)
    add_compressor(parser)
    parser.add_argument(
        "--text",
        type=existing,
        help="text file or folder, as for gistkit train; evaluates on its held-out part (default: Python's topics)",
    )
    add_questions(
        parser, "instead of --text", "validation",
        "; test also selects a --text's test split if file names show it, as wiki.test.tokens",
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
        help="some of none,full, or ''; with the lab also summary: the model reads its own summary, as short as the "
        "compressor's memory (default: none,full)",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="most tokens of a reconstruction (default: the context's) or an answer (default: 64)",
    )
    parser.add_argument(
        "--out", type=path, default=Path("runs/evaluation.json"), metavar="FILE", help="report (default: %(default)s)"
    )
    parser.add_argument("--keep-examples", action="store_true", help="also save what was generated for each example")
    parser.set_defaults(plugins=add_evaluations(parser))


def _run(arguments: argparse.Namespace) -> int:
    check_file("--out", arguments.out, [arguments.text, *(arguments.questions or [])])
    for plugin in arguments.plugins:
        if plugin.asked(arguments):
            return int(plugin.run(arguments))
    check_data(arguments)
    processes = launched()
    device_name = processes.on(device(arguments.device))
    baselines = ["none", "full"] if arguments.baselines is None else arguments.baselines
    if unknown := sorted({*baselines} - {"none", "full"}):
        raise ValueError(
            f"--baselines: expected some of none, full, got {unknown[0]}; pip install ./lab provides others"
        )

    from gistkit import evaluate
    from gistkit.formats import question_sets

    chosen = question_sets(arguments.questions or [], arguments.split)
    if len(chosen) > 1:
        raise ValueError(f"--questions: expected one set, got {len(chosen)}; pip install ./lab for several in a report")
    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name, needs=MEASURES)
    compressor = compressor_or_baseline(arguments, model)
    if chosen:
        found = evaluate.iter_questions(chosen[0].path, split=arguments.split)
        examples = list(islice(found, arguments.examples))
    else:
        examples = text_examples(arguments, tokenizer, compressor)
    return show(evaluate.run(compressor, tokenizer, examples, baselines=baselines, **measuring(arguments)), arguments)


def check_data(arguments: argparse.Namespace) -> None:
    """Refuses options of a text beside questions, and the training split of a text."""
    if arguments.questions is not None:
        refuse(arguments, "--questions", text=None, context=None, continuation=None)
    elif arguments.split == "train":
        raise ValueError("--split: expected validation or test without --questions, got train")


def refuse(arguments: argparse.Namespace, beside: str, **plain: Any) -> None:
    """Refuses options that have no meaning with another one, unless they have their default."""
    for name, value in plain.items():
        if getattr(arguments, name) != value:
            word = name.replace("_", "-")
            raise ValueError(f"--{word}: not allowed with {beside}, got {getattr(arguments, name)}")


def measuring(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `gistkit.evaluate.run` that say how to measure."""
    names = ("tasks", "batch_size", "max_new_tokens")
    return {**{name: getattr(arguments, name) for name in names}, "processes": launched()}


def show(report: Report | Any, arguments: argparse.Namespace) -> int:
    """Saves and prints a report, or one of several sets, in the first process."""
    if not launched().is_first:
        return 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report.save(arguments.out, examples=arguments.keep_examples)
    print(report.table())
    print(f"\nWritten: {arguments.out}")
    return 0


def compressor_or_baseline(arguments: argparse.Namespace, model: Any) -> Compressor:
    """The compressor of the arguments, or the baseline whose task tokens --compressor names."""
    from gistkit.evaluate.baselines import has_baseline, load_baseline

    if arguments.compressor is not None and has_baseline(arguments.compressor):
        return load_baseline(arguments.compressor, model)
    return chosen_compressor(arguments, model)


def context_of(arguments: argparse.Namespace, compressor: Compressor) -> int:
    """Tokens of a context; methods that compress in place have no chunks."""
    return int(arguments.context or (compressor.chunk if compressor.memory_tokens > 1 else CONTEXT))


def text_examples(arguments: argparse.Namespace, tokenizer: Any, compressor: Compressor) -> list[Example]:
    from gistkit import evaluate

    context = context_of(arguments, compressor)
    corpus = corpus_of(arguments, tokenizer, held_out_only=True)
    rows = passages_of(arguments, corpus, context + (arguments.continuation or context))
    return [evaluate.Example(row[:context], row[context:]) for row in rows]


def corpus_of(arguments: argparse.Namespace, tokenizer: Any, *, held_out_only: bool) -> Corpus:
    """The text of the options; `held_out_only` as of `gistkit.train.load_corpus`."""
    from gistkit import train
    from gistkit.train.data import CACHE

    cache = arguments.out.parent / CACHE
    # Of texts the first split that is held out is the default.
    split = None if arguments.split == "validation" else arguments.split
    return train.load_corpus(
        arguments.text, tokenizer=tokenizer, cache=cache, held_out_only=held_out_only, split=split,
        progress=launched().is_first,
    )  # fmt: skip


def passages_of(arguments: argparse.Namespace, corpus: Corpus, length: int) -> list[list[int]]:
    rows: list[list[int]] = corpus.chunks(length, count=arguments.examples).tolist()
    if not rows:
        raise ValueError(
            f"--context: expected at most the held-out part of {corpus.name} with its continuation, "
            f"{corpus.held_out.numel()} tokens, got {length}"
        )
    return rows
