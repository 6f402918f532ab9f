"""Ten questions about a long document, SmolLM2-135M: gistkit with a trained compressor against the full context.

The document is the docstrings of torch.nn, which no compressor was trained on, with ten made-up facts among their
paragraphs. gistkit compresses it, keeps the memory and answers from it, as `gistkit ask` does. Transformers, on its
own attention (sdpa), reads the document once and keeps its DynamicCache. Both write greedily and end an answer with
its line; each question stands for itself. Both answer in turn, so that other work on the machine affects them alike.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from gistkit.ask import Conversation
from gistkit.common.trained import DEFAULTS
from gistkit.compress import Compressor, trained
from gistkit.evaluate import contains_answer, exact_match
from gistkit.evaluate.data import QUESTION
from gistkit.hf.cache import CACHE
from gistkit.hf.smollm2 import load_smollm2

sys.path.append(str(Path(__file__).resolve().parents[1] / "lab" / "models"))

from questions import Fact, draw_fact

TOKENS, QUESTIONS, ANSWER = 8000, 10, 24
"""Of the document, about it, and tokens of an answer at most."""
FULL = "transformers sdpa, full context"

# From the token ids of a question to those of its answer.
Ask = Callable[[list[int]], list[int]]


def answering() -> list[str]:
    """The trained compressors that `gistkit ask` takes without being told."""
    return [name for name in trained() if name in DEFAULTS.values()]


@dataclass(frozen=True)
class Reader:
    """A document read so far: `ask` answers a question from what was kept of it, of which there are `nbytes`."""

    ask: Ask
    nbytes: int


@dataclass
class Times:
    """Seconds to read the document, of each answer, and the answers' token ids."""

    reading: float = 0.0
    answering: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


def docstrings() -> str:
    """The docstrings of the classes of torch.nn."""
    classes = [value for _, value in sorted(vars(torch.nn).items()) if inspect.isclass(value)]
    return "\n\n".join(inspect.cleandoc(one.__doc__) for one in classes if one.__doc__)


def document(tokenizer: Any, tokens: int, questions: int, seed: int = 0) -> tuple[list[int], list[Fact]]:
    """Token ids of docstrings, with facts as paragraphs evenly spread over them, and the facts with their questions.

    No two facts have the same question. A ValueError says that not all of them fit in.
    """
    random = np.random.default_rng(seed)
    facts: dict[str, Fact] = {}
    while len(facts) < questions:
        fact = draw_fact(random)
        facts.setdefault(fact.question, fact)
    chosen = list(facts.values())
    encode = lambda part: tokenizer(f"{part}\n\n", add_special_tokens=False)["input_ids"]  # noqa: E731
    paragraphs = [encode(paragraph) for paragraph in docstrings().split("\n\n")]
    # Long paragraphs push facts behind the cut: these then stand nearer to the beginning.
    for share in range(20, -1, -1):
        ids, placed, end = list[int](), 0, 0
        for paragraph in paragraphs:
            while placed < questions and len(ids) >= share / 20 * (placed + 0.5) * tokens / questions:
                ids += encode(chosen[placed].sentence)
                placed, end = placed + 1, len(ids)
            ids += paragraph
        if placed == questions and end <= tokens:
            return ids[:tokens], chosen
    raise ValueError(f"tokens: expected enough for {questions} facts, got {tokens}")


@torch.no_grad()
def read_all(model: PreTrainedModel, ids: list[int], stops: set[int]) -> Reader:
    """The model that has read the document `ids`, and keeps all of its keys and values."""
    cache = DynamicCache()
    model(torch.tensor([ids]), **{CACHE: cache}, logits_to_keep=1)
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    @torch.no_grad()
    def ask(question: list[int]) -> list[int]:
        tokens, answer = question, list[int]()
        while len(answer) < ANSWER and not (answer and answer[-1] in stops):
            logits = model(torch.tensor([tokens]), **{CACHE: cache}, logits_to_keep=1).logits
            tokens = [int(logits[0, -1].argmax())]
            answer += tokens
        cache.crop(len(ids) - cache.get_seq_length())
        return answer

    return Reader(ask, nbytes)


@torch.no_grad()
def compress(compressor: Compressor, ids: list[int], stops: set[int]) -> Reader:
    """A conversation behind the memory of the document `ids`."""
    memory = compressor.encode(torch.tensor([ids]))
    conversation = Conversation(compressor, memory)

    def ask(question: list[int]) -> list[int]:
        conversation.new()
        found: Tensor = conversation.reply(question, max_new_tokens=ANSWER, stop_tokens=stops)
        return found.tolist()

    return Reader(ask, memory.nbytes)


def take_turns(
    readers: Mapping[str, Callable[[], Reader]], questions: Sequence[list[int]], tell: Callable[[], object]
) -> dict[str, tuple[Times, int]]:
    """The times and answers of all, who read the document and then answer in turn, and the bytes that each keeps."""
    found = {name: Times() for name in readers}
    ready = {}
    for name, read in readers.items():
        start = time.perf_counter()
        ready[name] = read()
        found[name].reading = time.perf_counter() - start
        tell()
    for question in questions:
        for name, reader in ready.items():
            start = time.perf_counter()
            answer = reader.ask(question)
            found[name].answering.append(time.perf_counter() - start)
            found[name].answers.append(answer)
            tell()
    return {name: (times, ready[name].nbytes) for name, times in found.items()}


def row(name: str, rounds: Sequence[Times], nbytes: int, facts: Sequence[Fact], tokenizer: Any) -> dict[str, Any]:
    """What the rounds of one contender gave: seconds are medians over rounds, answers those of the first.

    Returns:
        "first": seconds from the document to the end of the first answer; "later": seconds of an answer after it;
        "token": milliseconds of answers for each of their tokens; "mib": kept of the document; "exact" and "within":
        percent of answers that are right, and that have the right one within; "seconds": after each answer.
    """
    texts = [tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in rounds[0].answers]
    right = [fact.answer for fact in facts]
    later = [seconds for times in rounds for seconds in times.answering[1:]]
    tokens = sum(len(answer) for times in rounds for answer in times.answers)
    ends = [np.cumsum([times.reading, *times.answering])[1:] for times in rounds]
    return {
        "form": name,
        "first": statistics.median(float(times[0]) for times in ends),
        "later": statistics.median(later),
        "token": 1e3 * sum(sum(times.answering) for times in rounds) / tokens,
        "mib": nbytes / 2**20,
        "exact": 100 * statistics.fmean(map(exact_match, texts, right)),
        "within": 100 * statistics.fmean(map(contains_answer, texts, right)),
        "answers": texts,
        "seconds": np.median(ends, 0).round(4).tolist(),
    }


def main() -> int:
    """Asks, prints a row for each contender, and keeps the rows with a picture where asked."""
    parser = harness.parser(__doc__, "python benchmarks/asking.py --compressor smollm2-avgpool-2x")
    parser.add_argument(
        "--compressor", nargs="+", default=answering(), metavar="NAME",
        help=f"trained compressors, names or folders (default: {', '.join(answering()) or 'none here'})",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, help=f"of the document (default: {TOKENS}; 1000 if --quick)")
    parser.add_argument("--rounds", type=int, default=3, help="all read and answer so often (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    options = parser.parse_args()
    if not options.compressor:
        parser.error("--compressor: expected a trained compressor's name or folder, got none, and none comes with this")
    tokens = options.tokens or (1000 if options.quick else TOKENS)
    rounds = 1 if options.quick else options.rounds
    found = harness.begin("asking", options)
    model, tokenizer = load_smollm2(dtype=getattr(torch, options.dtype))
    ids, facts = document(tokenizer, tokens, QUESTIONS)
    questions = [
        list(tokenizer(QUESTION.format(question=fact.question), add_special_tokens=False)["input_ids"])
        for fact in facts
    ]
    # A line is an answer: the model itself does not end there.
    stops = {tokenizer.eos_token_id, *tokenizer("\n", add_special_tokens=False)["input_ids"]}
    compressors = {
        Path(name).name: Compressor.from_pretrained(name, copy.deepcopy(model)).eval() for name in options.compressor
    }
    readers: dict[str, Callable[[], Reader]] = {
        f"gistkit, {name}": lambda it=compressor: compress(it, ids, stops) for name, compressor in compressors.items()
    }
    readers[FULL] = lambda: read_all(model, ids, stops)
    results: dict[str, tuple[list[Times], int]] = {name: ([], 0) for name in readers}
    steps = rounds * len(readers) * (1 + QUESTIONS)
    with tqdm(total=steps, desc="asking", unit="answer", dynamic_ncols=True) as bar:
        for _ in range(rounds):
            for name, (times, nbytes) in take_turns(readers, questions, bar.update).items():
                results[name] = ([*results[name][0], times], nbytes)
    rows = [row(name, times, nbytes, facts, tokenizer) for name, (times, nbytes) in results.items()]
    for one in rows:
        print(
            f"  {one['form']:36} first answer {one['first']:6.2f} s, later {one['later']:5.2f} s, "
            f"{one['token']:5.1f} ms a token, {one['mib']:6.1f} MiB, right {one['exact']:.0f}%, within "
            f"{one['within']:.0f}%"
        )
    content = {
        "machine": found, "dtype": options.dtype, "tokens": len(ids), "rounds": rounds,
        "facts": [fact._asdict() for fact in facts], "rows": rows,
    }  # fmt: skip
    if path := harness.write("asking", content, options):
        from picture import draw

        print(f"wrote {draw(path, 'asking')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
