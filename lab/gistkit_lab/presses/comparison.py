"""Presses: selections that need no training beside trained compressors, on one model, with one prompt and equal bytes.

A memory of a ratio has BOS and ceil(n / ratio) tokens of a context of n, whichever row it is in. Every context is read
once in each state of the model, plain and with the adapter that a trained compressor answers with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional as F

from gistkit.common.checks import check_int
from gistkit.common.files import write_text
from gistkit.common.text_ids import text_ids
from gistkit.compress import Compressor, Memory, Select
from gistkit.compress.methods.in_place import TEXT
from gistkit.compress.scores import SCORES
from gistkit.compress.tokens import pad
from gistkit.evaluate.data import Example, Prepared, prepare, words_of
from gistkit.evaluate.evaluation import display_name
from gistkit.evaluate.metrics import contains_answer, exact_match, token_f1
from gistkit.evaluate.runner import end_tokens, evaluating, greedy_rows, prediction_of, scored_tokens
from gistkit.hf import fingerprint
from gistkit.info import machine
from gistkit_lab import digests
from gistkit_lab.presses.reader import PressReader, Text

RATIOS = (2, 4, 8, 16)
PLAIN = "plain"
FULL, NONE, NEWEST, OLDEST, POOLED = (
    "full context",
    "no context",
    "newest tokens",
    "oldest tokens",
    "AvgPool, untrained",
)
# How heads share what is kept, as of `Select`, with what a row says of it.
SHARED = {"equal": "", "heads": ", heads of a layer share", "all": ", heads share", "pyramid": ", as a pyramid"}
# Rows of a batch of answers, and memory tokens that they may have in all.
ROWS, TOKENS = 32, 32768


@dataclass(frozen=True)
class Entry:
    """A row of the comparison.

    Args:
        reader: "plain", or the name of the trained compressor whose adapter reads.
        memory: what is read: "full context", "no context", "newest tokens", "oldest tokens", "AvgPool, untrained", a
            trained compressor, or the name of a score.
        ratio: context tokens for each that is kept; None where that is not chosen.
        aware: whether the question was there when the memory was made.
        shares: of a score, as of `Select`: each head keeps as many tokens, or all share what they keep.
        fit: of a score, as of `Select`: what is kept has fitted values and biases.
    """

    reader: str
    memory: str
    ratio: float | None = None
    aware: bool = False
    shares: str = "equal"
    fit: bool = False


@dataclass(frozen=True)
class Outcome:
    """What an entry gave.

    Args:
        entry: the row.
        tokens, bytes: of each context's memory; means over questions where each has its own.
        exact, within, f1: of each question, 0..1: exact match, an answer within the output, F1 of words.
        nats, answer_tokens: of each question's first right answer, given the tokens before.
        following_nats, following_tokens: of each context's continuation but its first token; empty without any.
        seconds: taken for reading memories, without the passes over the contexts that entries share.
    """

    entry: Entry
    tokens: list[float]
    bytes: list[float]
    exact: list[float]
    within: list[float]
    f1: list[float]
    nats: list[float]
    answer_tokens: list[int]
    following_nats: list[float] = field(default_factory=list)
    following_tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Outcomes about the same questions.

    Args:
        settings: model, dtype, new tokens, machine, and those that measured some of the outcomes before; "digests" of
            the model's weights, the questions, and the compressors by name. Without these none can be added.
        sets: the set of each question.
        contexts: the number of each question's context.
        lengths: tokens of each context.
        outcomes: of each entry.
    """

    settings: Mapping[str, Any]
    sets: list[str]
    contexts: list[int]
    lengths: list[int]
    outcomes: list[Outcome]

    def save(self, path: str | Path) -> Path:
        """Writes JSON lines: one of the questions, then one of each outcome."""
        head = {"settings": self.settings, "sets": self.sets, "contexts": self.contexts, "lengths": self.lengths}
        rounded = lambda values: [int(value) if float(value).is_integer() else round(value, 4) for value in values]  # noqa: E731
        lines = [head]
        for outcome in self.outcomes:
            line = asdict(outcome)
            lines.append({key: rounded(value) if isinstance(value, list) else value for key, value in line.items()})
        path = Path(path)
        write_text(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """What `save` wrote.

        Raises:
            ValueError: if the file holds something else.
        """
        try:
            head, *lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
            outcomes = [Outcome(**{**line, "entry": Entry(**line["entry"])}) for line in lines]
            return cls(head["settings"], head["sets"], head["contexts"], head["lengths"], outcomes)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: expected a comparison with presses, got another file ({error})") from error


def kept(length: int, ratio: float) -> int:
    """Tokens of a memory at a ratio, BOS among them, of `length` tokens without BOS."""
    return min(length, math.ceil(length / ratio)) + 1


def entries(
    trained: Mapping[str, Compressor],
    *,
    ratios: Sequence[int] = RATIOS,
    by: Sequence[str] = tuple(SCORES),
    shares: Sequence[str] = ("equal",),
    fit: bool = False,
) -> list[Entry]:
    """The rows of each reader: the whole context, none of it, the trained compressor, then those of each ratio.

    Args:
        trained: compressors around one model, by name; a selection has a row at each ratio.
        ratios: whole numbers of at least 1.
        by: names of `gistkit.compress.scores.SCORES`.
        shares: how heads share what scores keep, as of `Select`.
        fit: whether each row of a score has a second one, whose values and biases are fitted.

    Raises:
        ValueError: if a ratio or a score is none.
    """
    for ratio in ratios:
        check_int("ratios", ratio, 1)
    if unknown := sorted({*by} - {*SCORES}):
        raise ValueError(f"by: expected some of {', '.join(SCORES)}, got {unknown[0]!r}")
    adapted = {name: one for name, one in trained.items() if _adapts(one)}
    found = []
    for reader in (*adapted, PLAIN):
        found += [Entry(reader, FULL, 1), Entry(reader, NONE)]
        found += [
            Entry(reader, name, ratio)
            for name, one in trained.items()
            if name == reader or (reader == PLAIN and name not in adapted)
            for ratio in (sorted({one.ratio, *ratios}) if isinstance(one, Select) and not one.budget else [one.ratio])
        ]
        for ratio in ratios:
            for fits in (False, True)[: 1 + fit]:
                found += [Entry(reader, score, ratio, shares=each, fit=fits) for each in shares for score in by]
            found += [Entry(reader, score, ratio, aware=True) for score in by if SCORES[score].reads_question]
            found += [Entry(reader, NEWEST, ratio), Entry(reader, OLDEST, ratio)]
            own = adapted.get(reader)
            # Means of its own ratio under AvgPool's adapter are the trained compressor itself.
            if own is None or (own.method, own.ratio) != ("avgpool", ratio):
                found.append(Entry(reader, POOLED, ratio))
    return found


def _adapts(compressor: Compressor) -> bool:
    """Whether a compressor's memory is read with an adapter, and contexts with one too, as full ones can be then."""
    return compressor.adapters is not None and {TEXT, compressor.reader} <= {*compressor.adapters.names}


@torch.no_grad()
def against_presses(
    model: Any,
    tokenizer: Any,
    sets: Mapping[str, Sequence[Example]],
    *,
    trained: Mapping[str, Compressor] | None = None,
    rows: Sequence[Entry] | None = None,
    max_new_tokens: int = 24,
    done: Comparison | None = None,
    on_outcome: Callable[[Comparison], None] = lambda comparison: None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Comparison:
    """Answers to the same questions from every kind of memory, each with the same number of tokens at a ratio.

    Greedy; the prompt is the examples' own. Questions about one context share its memories, but where the question is
    there when the memory is made. All contexts' keys and values are held at once, in the model's dtype.

    Args:
        model: a transformers decoder model, with the trained compressors' adapters in it if there are any.
        tokenizer: of transformers.
        sets: examples by the name of their set, with questions; of a context one continuation counts.
        trained: compressors around `model`, by name.
        rows: the entries to measure; None: those that `entries` gives by default.
        max_new_tokens: of an answer.
        done: a comparison whose entries need not be measured again.
        on_outcome: called with all that there is after each entry.
        on_step: called with what is done next, in words.

    Raises:
        ValueError: if there is no question, a trained compressor is called as a score or another row, or `done` is
            about other questions or another model.
    """
    trained = dict(trained or {})
    if taken := sorted({*trained} & {PLAIN, FULL, NONE, NEWEST, OLDEST, POOLED, *SCORES}):
        raise ValueError(f"trained: expected names that no other row has, got {taken[0]!r}")
    asked = asked_of(sets, tokenizer)
    settings: dict[str, Any] = {"model": display_name(model), "dtype": str(model.dtype).removeprefix("torch.")}
    settings |= {"max_new_tokens": max_new_tokens, "machine": machine()}
    known = {name: digests.of_compressor(one) for name, one in trained.items()}
    settings["digests"] = {"weights": fingerprint(model), "questions": asked.digest(), "compressors": known}
    if done is not None:
        before = [*done.settings.get("earlier", []), done.settings["machine"]]
        settings["earlier"] = [each for each in before if each != settings["machine"]]
    lengths = [len(context.context) for context in asked.contexts]
    found = Comparison(settings, asked.sets, asked.owners, lengths, [] if done is None else list(done.outcomes))
    if done is not None:
        _check_same(done, found)
        known.update(done.settings["digests"]["compressors"])
    have = {outcome.entry for outcome in found.outcomes}
    left = [entry for entry in rows or entries(trained) if entry not in have]
    for name in dict.fromkeys(entry.reader for entry in left):
        own = [entry for entry in left if entry.reader == name]
        fits = any(entry.fit for entry in own)
        # References for fits are queries of KVzip's passes.
        needed = {entry.memory for entry in own} | ({"kvzip"} if fits else set())
        scores = {score: SCORES[score]() for score in SCORES if score in needed}
        reader = PressReader(model, tokenizer, scores, trained.get(name), fits)
        with evaluating(reader.select), reader.select.folded():
            texts = []
            for number, context in enumerate(asked.contexts, 1):
                on_step(f"{name}: reads context {number} of {len(asked.contexts)}")
                texts.append(reader.read(context.context))
            for entry in own:
                on_step(f"{name}: {shown(entry)}")
                found.outcomes.append(Measure(reader, texts, asked, entry, trained, max_new_tokens)(tokenizer))
                on_outcome(found)
    return found


def shown(entry: Entry) -> str:
    """What a table calls a memory."""
    times = "" if entry.ratio is None or entry.memory == FULL else f" {entry.ratio:g}x"
    fitted = ", fitted" if entry.fit else ""
    return f"{entry.memory}{times}{SHARED[entry.shares]}{fitted}{', question known' if entry.aware else ''}"


def _check_same(done: Comparison, now: Comparison) -> None:
    same = (done.sets, done.contexts, done.lengths) == (now.sets, now.contexts, now.lengths)
    for name in ("model", "dtype", "max_new_tokens"):
        same &= done.settings.get(name) == now.settings[name]
    if not same:
        raise ValueError("done: expected a comparison of the same model, questions and lengths, got another one")
    before, own = done.settings.get("digests"), now.settings["digests"]
    if before is None:
        raise ValueError("done: expected a comparison with digests of what was measured, got one without, only to show")
    for name, part in (("weights", "model's weights"), ("questions", "contexts, questions and answers")):
        if before[name] != own[name]:
            raise ValueError(f"done: expected a comparison of the same {part}, {own[name]}, got {before[name]}")
    for name, digest in own["compressors"].items():
        if (other := before["compressors"].get(name, digest)) != digest:
            raise ValueError(f"done: expected rows of the same compressor {name}, {digest}, got another's, {other}")


@dataclass(frozen=True)
class Asked:
    """Contexts, and of each question its set and the number of its context."""

    contexts: list[Prepared] = field(default_factory=list)
    questions: list[Prepared] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)

    def digest(self) -> str:
        """Of contexts with what follows them, and of questions with all answers."""
        contexts = [(row.context, row.continuation) for row in self.contexts]
        return digests.of_values([contexts, [(row.question, row.answers) for row in self.questions]])


def asked_of(sets: Mapping[str, Sequence[Example]], tokenizer: Any) -> Asked:
    """The questions of sets of examples and their contexts, each context once."""
    asked = Asked()
    known: dict[tuple[int, ...], int] = {}
    for name, examples in sets.items():
        for row in prepare(examples, tokenizer, ["qa"]):
            number = known.setdefault(tuple(row.context), len(known))
            if number == len(asked.contexts):
                asked.contexts.append(row)
            elif row.continuation:
                asked.contexts[number] = replace(asked.contexts[number], continuation=row.continuation)
            if row.question:
                asked.questions.append(row)
                asked.answers.append(text_ids(row.answers[0], tokenizer, special_tokens=False))
                asked.sets.append(name)
                asked.owners.append(number)
    if not asked.questions:
        raise ValueError("sets: expected at least one question, got none")
    return asked


class Measure:
    """Asks all questions of one entry's memories; arguments as in `against_presses`."""

    def __init__(
        self,
        reader: PressReader,
        texts: Sequence[Text],
        asked: Asked,
        entry: Entry,
        trained: Mapping[str, Compressor],
        max_new_tokens: int,
    ) -> None:
        self.presses, self.texts, self.asked, self.entry, self.most = reader, texts, asked, entry, max_new_tokens
        self.pooled = reader.pooled(int(entry.ratio or 1)) if entry.memory == POOLED else trained.get(entry.memory)
        if self.pooled is not None and entry.ratio not in (None, self.pooled.ratio):
            self.pooled = self.pooled.at(int(entry.ratio))
        self.reader: Any = self.pooled or reader.select
        self.following: dict[int, tuple[float, int]] = {}

    def memory(self, owner: int, question: Sequence[int]) -> Memory:
        """The memory of a context, for a question if the entry is aware of it."""
        presses, text, context = self.presses, self.texts[owner], self.asked.contexts[owner].context
        if self.pooled is not None:
            return self.pooled.encode_contexts(self.pooled.contexts([context]))[0]
        count = kept(text.length - 1, self.entry.ratio or 1)
        if self.entry.memory == NEWEST:
            newest = presses.read(context[len(context) - (count - 1) :], scored=False)
            return presses.first(newest, newest.length)
        if self.entry.memory in (FULL, OLDEST):
            return presses.first(text, count)
        if self.entry.memory == NONE:
            return presses.first(text, 1)
        if self.entry.aware:
            return presses.asked(text, self.entry.memory, question, count)
        return presses.scored(text, self.entry.memory, count, self.entry.shares, self.entry.fit)

    def __call__(self, tokenizer: Any) -> Outcome:
        """The outcome."""
        started = perf_counter()
        count, contexts = len(self.asked.questions), len(self.texts)
        exact, within, f1, nats = ([0.0] * count for _ in range(4))
        found = Outcome(self.entry, [0.0] * contexts, [0.0] * contexts, exact, within, f1, nats, [0] * count)
        with evaluating(self.reader):
            for batch in self._batches():
                self._ask(batch, found, tokenizer)
            for owner in range(contexts):
                if self._goes_on(owner):
                    self._continue(owner, self.memory(owner, ()))
        for _, (own, tokens) in sorted(self.following.items()):
            found.following_nats.append(own)
            found.following_tokens.append(tokens)
        return replace(found, seconds=round(perf_counter() - started, 1))

    def _goes_on(self, owner: int) -> bool:
        """Whether a context has a continuation that is still to be read, from its second token on."""
        long = len(self.asked.contexts[owner].continuation) > 1
        return long and owner not in self.following and not self.entry.aware

    def _continue(self, owner: int, memory: Memory) -> None:
        ((nats, _),) = scored_tokens(self.reader, memory, "lm", [self.asked.contexts[owner].continuation])
        # The first token says nothing of a memory in place: the encoder's last state predicts it.
        self.following[owner] = float(nats[1:].sum()), len(nats) - 1

    def _batches(self) -> list[list[int]]:
        """Questions, those of the longest contexts first, and of a context together."""
        owners = self.asked.owners
        order = sorted(range(len(owners)), key=lambda index: (-self.texts[owners[index]].length, owners[index]))
        batches: list[list[int]] = [[]]
        for index in order:
            first = owners[batches[-1][0]] if batches[-1] else owners[index]
            tokens = kept(self.texts[first].length, self.entry.ratio or 1)
            if len(batches[-1]) == min(ROWS, max(TOKENS // tokens, 1)):
                batches.append([])
            batches[-1].append(index)
        return batches

    def _ask(self, batch: Sequence[int], found: Outcome, tokenizer: Any) -> None:
        asked, memories, rows = self.asked, {}, []
        for index in batch:
            owner = asked.owners[index]
            if self.entry.aware or owner not in memories:
                memories[owner] = self.memory(owner, asked.questions[index].question)
                found.tokens[owner], found.bytes[owner] = memories[owner].sizes[0], memories[owner].nbytes
                if self._goes_on(owner):
                    self._continue(owner, memories[owner])
            rows.append(memories[owner])
        alone = len(memories) == 1 and not self.entry.aware
        memory = rows[0].repeat(len(rows)) if alone else Memory.stack(rows)
        questions = [asked.questions[index].question for index in batch]
        stops = tuple(end_tokens(self.reader.model, tokenizer))
        generated = greedy_rows(self.reader, memory, "qa", questions, self.most, stops)
        right = [asked.answers[index] for index in batch]
        nats = _answer_nats(self.reader, memory, questions, right)
        for index, ids, own, answer in zip(batch, generated, nats, right, strict=True):
            output, answers = words_of(ids, tokenizer).strip(), asked.questions[index].answers
            prediction = prediction_of(output, answers)
            found.exact[index] = exact_match(prediction, answers)
            found.within[index] = contains_answer(output, answers)
            found.f1[index] = token_f1(prediction, answers)
            found.nats[index], found.answer_tokens[index] = own, len(answer)


def _answer_nats(
    reader: Any, memory: Memory, questions: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[float]:
    """The summed nats of each answer after its question; logits are those of answers alone."""
    inputs = pad(
        [[*question, *answer[:-1]] for question, answer in zip(questions, answers, strict=True)], reader.device
    )
    states = reader.decode(memory, "qa", inputs.ids, inputs.valid)
    ends = [(len(question), len(question) + len(answer)) for question, answer in zip(questions, answers, strict=True)]
    behind = torch.cat([states[row, first:last] for row, (first, last) in enumerate(ends)])
    targets = torch.tensor([token for answer in answers for token in answer], device=behind.device)
    nats = F.cross_entropy(reader.logits(behind), targets, reduction="none").double()
    return [float(part.sum()) for part in nats.split([len(answer) for answer in answers])]
