"""`gistkit demo`: compresses a report, answers from its memory, and shows what that saved beside the full text."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from copy import deepcopy
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from gistkit.cli.compress import cache_bytes
from gistkit.common.files import write_picture
from gistkit.options.arguments import add_command, device, existing, path
from gistkit.options.models import add_compressor, add_model, chosen_compressor, load_model, memory_dtype
from gistkit.options.outputs import check_folder
from gistkit.options.texts import read_text

if TYPE_CHECKING:
    from torch import Tensor

    from gistkit.compress import Compressor, Memory

EXAMPLES = """\
example: gistkit demo
example: gistkit demo --text report.txt --question "Who signed it?" --model ./llama"""
# About demo.txt, with what a right answer contains.
QUESTIONS = {
    "Who started the survey?": "Ines Moreau",
    "Which company does the work?": "Halvorsen Marine",
    "When does the work begin?": "6 May",
    "What is the budget of the repair?": "8200 dollars",
    "Who keeps the key of the tool shed?": "Olga Singh",
    "What is the access code of the harbour office?": "4471",
}
ANSWER = 16
FULL, CACHED, MEMORY = "full text", "full text, KV cache kept", "memory"


class Measured(NamedTuple):
    """One way to answer: its answers, the seconds of each, and the bytes of keys and values that it reads."""

    answers: list[str]
    seconds: float
    nbytes: int


def add(commands: Any) -> None:
    parser = add_command(commands, "demo", _run, "compress a report, and answer from its memory", EXAMPLES)
    parser.add_argument("--text", type=existing, help="a text file of your own (default: a report of a page)")
    parser.add_argument(
        "--question", action="append", metavar="QUESTION", help="about the text; may be repeated (default: six)"
    )
    add_model(parser)
    add_compressor(parser)
    parser.add_argument(
        "--out",
        type=path,
        default=Path("runs/demo"),
        help="folder for the memory and the picture (default: %(default)s)",
    )


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.text is None) != (arguments.question is None):
        raise ValueError("--question: expected it with --text and only then")
    check_folder("--out", arguments.out)
    own = files("gistkit.cli") / "demo.txt"
    text = own.read_text() if arguments.text is None else read_text(arguments.text)

    from gistkit.viz import draw_savings

    right = QUESTIONS if arguments.text is None else dict.fromkeys(arguments.question, "")
    questions = list(right)
    print(f"loading {arguments.model}", flush=True)
    model, tokenizer = load_model(arguments.model, arguments.dtype, device(arguments.device))
    compressor = chosen_compressor(arguments, model)
    compressor.tokenizer = tokenizer
    if arguments.text is None:
        print(f"\n{text}")
    start = time.perf_counter()
    memory = compressor.compress(text)
    seconds = time.perf_counter() - start
    arguments.out.mkdir(parents=True, exist_ok=True)
    saved = arguments.out / "report.gist"
    memory.to(dtype=memory_dtype(None, model)).save(saved)
    rest = len(memory.rest[0])
    tokens, kept = memory.context_lengths[0] + rest, memory.sizes[0]
    uncompressed = f" and {rest} kept as they are" if rest else ""
    print(f"{tokens} tokens -> {kept} memory tokens{uncompressed} ({compressor.title}) in {seconds:.1f} s: {saved}\n")

    ways = _measured(compressor, memory, text, questions)
    print(_answers(right, ways))
    print(_savings(ways, tokens, kept + rest))
    picture = arguments.out / "demo.png"
    figure = draw_savings({name: (way.seconds, way.nbytes) for name, way in ways.items()})
    write_picture(picture, figure, dpi=120)
    print(f"\n{picture} shows the same.")
    return 0


def _measured(compressor: Compressor, memory: Memory, text: str, questions: list[str]) -> dict[str, Measured]:
    """Answers from the full text and from the memory: the same prompt, with the reader's adapter."""
    import torch

    from gistkit.common.text_ids import text_ids
    from gistkit.compress.tokens import QUESTION
    from gistkit.hf import CACHE

    model: Any = compressor.model
    tokenizer = compressor.tokenizer
    context = torch.tensor([text_ids(text, tokenizer)], device=compressor.device)
    prompts = [
        torch.tensor(
            [text_ids(QUESTION.format(question=question), tokenizer, special_tokens=False)], device=context.device
        )
        for question in questions
    ]
    with torch.no_grad(), compressor.using(compressor.reader), compressor.folded():
        kept = getattr(model(context, use_cache=True), CACHE)

        def full(prompt: Tensor, cache: Any = None) -> str:
            ids, more = torch.cat([context, prompt], 1), {} if cache is None else {CACHE: cache}
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False,
                pad_token_id=tokenizer.eos_token_id, **more,
            )  # fmt: skip
            return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()

        nbytes, whole = cache_bytes(memory)
        ways = {
            FULL: _timed(full, zip(prompts), whole),
            # A copy for each answer, made before its time begins.
            CACHED: _timed(full, ((prompt, deepcopy(kept)) for prompt in prompts), whole),
        }
    ask = lambda question: str(compressor.ask(memory, question, max_new_tokens=ANSWER))  # noqa: E731
    return {**ways, MEMORY: _timed(ask, zip(questions), nbytes)}


def _timed(answer: Callable[..., str], given: Iterable[tuple[Any, ...]], nbytes: int) -> Measured:
    answers, seconds = [], []
    for each in given:
        start = time.perf_counter()
        answers.append(answer(*each))
        seconds.append(time.perf_counter() - start)
    return Measured(answers, median(seconds), nbytes)


def _answers(right: dict[str, str], ways: dict[str, Measured]) -> str:
    """The questions with both answers, the full text's only where it differs, and which are wrong."""
    lines, wrong = [], 0
    for question, full, answer in zip(right, ways[FULL].answers, ways[MEMORY].answers, strict=True):
        notes = [f"from the full text: {full}"] * (answer != full)
        if right[question] not in answer:
            wrong += 1
            notes.insert(0, f"wrong: {right[question]}")
        lines += [f"> {question}", f"{answer}    ({'; '.join(notes)})" if notes else answer]
    if wrong:
        lines.append(f"\n{len(right) - wrong} of {len(right)} answers are right; a larger model makes fewer mistakes")
    return "\n".join(lines) + "\n"


def _savings(ways: dict[str, Measured], tokens: int, kept: int) -> str:
    from gistkit.evaluate.report import format_table

    read = {FULL: tokens, CACHED: tokens, MEMORY: kept}
    rows = [["", "tokens", "keys and values kept", "an answer"]]
    rows += [
        [name, str(read[name]), f"{way.nbytes / 1e6:.1f} MB", f"{way.seconds:.2f} s"] for name, way in ways.items()
    ]
    return format_table(rows)
