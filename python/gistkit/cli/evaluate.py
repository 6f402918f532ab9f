"""`gistkit evaluate`: how much of a text a compressor keeps."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.cli.arguments import add_command, device, names, positive
from gistkit.cli.models import add_compressor, add_model, chosen_compressor, load_model

if TYPE_CHECKING:
    from gistkit.compress import Compressor
    from gistkit.evaluate import Example

EXAMPLES = """\
example: gistkit evaluate --model smollm2 --compressor runs/small/compressor --out runs/small/evaluation.json
example: gistkit evaluate --model ./llama --compressor runs/first/compressor --text book.txt --context 1020 --tasks lm
example: gistkit evaluate --model ./llama --compressor runs/qa/compressor --questions dev.jsonl --baselines full
example: gistkit evaluate --model ./chat --questions dev.jsonl --prompt dodo --baselines none,full,summary"""

CONTEXT = 510


def add(commands: Any) -> None:
    """Adds the command."""
    purpose = "measure reconstruction, continuation and answers beside the model with no and with full context"
    parser = add_command(commands, "evaluate", _run, purpose, EXAMPLES)
    add_model(parser)
    add_compressor(parser)
    parser.add_argument(
        "--text", type=Path, help="text file or folder; its held-out tenth is measured (default: Python's topics)"
    )
    parser.add_argument("--cloze", action="store_true", help="ask which word follows a phrase of that text")
    parser.add_argument(
        "--questions", type=Path, metavar="FILE", help="JSON lines of context, question and answers, in place of a text"
    )
    parser.add_argument(
        "--prompt", choices=("plain", "dodo"), default="plain",
        help="of questions; plain: ### Question: and ### Answer: lines; dodo: that of Dodo as a message of the model's "
        "chat template, or between [INST] and [/INST] (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=positive, metavar="N", help="tokens of a context (default: one chunk; without chunks, 510)"
    )
    parser.add_argument("--continuation", type=positive, metavar="N", help="tokens after it (default: as the context)")
    parser.add_argument("--examples", type=positive, default=64, metavar="N", help="at most (default: %(default)s)")
    parser.add_argument(
        "--tasks", type=names("ae", "lm", "qa"), help="some of ae,lm,qa (default: all that the text or questions allow)"
    )
    parser.add_argument(
        "--baselines", type=names("none", "full", "summary", empty=True), default="none,full",
        help="some of none,full,summary, or ''; summary: the model reads a summary it writes, as many times shorter as "
        "the compressor's memory (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="of a reconstruction or answer (default: the context's, 64)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/evaluation.json"), metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument("--keep-examples", action="store_true", help="write what was generated for each example too")


def _run(arguments: argparse.Namespace) -> int:
    where = device(arguments.device)
    for name in ("text", "cloze", "context", "continuation"):
        if arguments.questions is not None and getattr(arguments, name):
            raise ValueError(f"--{name}: expected none beside --questions, got {getattr(arguments, name)}")
    if arguments.prompt != "plain" and arguments.questions is None and not arguments.cloze:
        raise ValueError(f"--prompt: expected plain without --questions and --cloze, got {arguments.prompt}")

    from gistkit import evaluate

    model, tokenizer = load_model(arguments.model, arguments.dtype, where)
    compressor = chosen_compressor(arguments, model)
    # A chat template that cannot be used matters only here.
    chat = arguments.prompt == "dodo" or "summary" in arguments.baselines
    markers = evaluate.chat_markers(tokenizer) if chat else evaluate.INST
    template = evaluate.QUESTION if arguments.prompt == "plain" else evaluate.question_template(markers)
    examples = _examples(arguments, tokenizer, compressor, template)
    report = evaluate.run(
        compressor,
        tokenizer,
        examples,
        baselines=arguments.baselines,
        tasks=arguments.tasks,
        markers=markers,
        batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens,
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report.save(arguments.out, examples=arguments.keep_examples)
    print(report.table())
    print(f"\nWritten: {arguments.out}")
    return 0


def _examples(arguments: argparse.Namespace, tokenizer: Any, compressor: Compressor, template: str) -> list[Example]:
    from gistkit import evaluate, train

    if arguments.questions is not None:
        return evaluate.load_questions(arguments.questions, template=template)[: arguments.examples]
    # Methods that compress in place have no chunks.
    context = arguments.context or (compressor.chunk if compressor.memory_tokens > 1 else CONTEXT)
    length = context + (arguments.continuation or context)
    corpus = train.load_corpus(arguments.text, tokenizer=tokenizer, progress=True)
    if arguments.cloze:
        text = tokenizer.decode(corpus.held_out.tolist())
        return evaluate.cloze_questions(text, template=template)[: arguments.examples]
    rows = corpus.chunks(length, count=arguments.examples).tolist()
    if not rows:
        raise ValueError(
            f"--context: expected at most the held-out tenth of {corpus.name} with its continuation, "
            f"{corpus.held_out.numel()} tokens, got {length}"
        )
    return [evaluate.Example(row[:context], row[context:]) for row in rows]
