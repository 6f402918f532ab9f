"""Questions about real text: for codes inserted between its sentences, and for the continuation of a passage."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from gistkit.common.text_ids import text_ids
from gistkit.compress import Compressor
from gistkit.train.batches import Batch, collate
from gistkit.train.data import Corpus
from gistkit_lab.studies.draws import SPLITS, check_bytes

# A code's name and its word come from so many frequent words of the text.
WORDS = 256

Ids = tuple[int, ...]


class Question(NamedTuple):
    """Token ids of a context, of the text between it and the answer, and of the answer."""

    context: Ids
    question: Ids
    answer: Ids


class Needles:
    """Contexts of consecutive sentences with `lines` codes between them, and a question about each context.

    The questions of a batch alternate between the kinds: "code" asks for one of the codes, and "passage" gives `cue`
    tokens of the context and asks for the `answer` tokens after them. All contexts of a batch have one length, uniform
    in [min_length, max_length], so that they need no padding. The sentences of the text's held-out part that do not
    occur in the training text make two splits: "held_out", and "test" for figures without any choice based on them.

    Args:
        corpus: bytes, from `load_corpus` without a tokenizer.
        tokenizer: as in `load_corpus`; None: bytes.
        size: rows B of a batch.
        min_length, max_length: tokens of a context.
        lines: codes in a context; 0: only passages.
        cue, answer: tokens of a passage in the question, and in the answer.
        seed: of the training batches, at least 0; the held-out splits are the same for every seed.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Any,
        size: int,
        min_length: int,
        max_length: int,
        *,
        lines: int = 3,
        cue: int = 8,
        answer: int = 8,
        seed: int = 0,
    ) -> None:
        check_bytes(corpus)
        if not cue + answer <= min_length <= max_length:
            raise ValueError(
                f"min_length, max_length: expected cue + answer <= min <= max, got {cue} + {answer}, {min_length} and "
                f"{max_length}"
            )
        self.tokenizer, self.size, self.seed = tokenizer, size, seed
        self.min_length, self.max_length = min_length, max_length
        self.lines, self.cue, self.answer = lines, cue, answer
        self.kinds = ("code", "passage") if lines else ("passage",)
        self._digest = corpus.digest
        train, held_out = (
            _sentences(bytes(part.tolist()).decode("utf-8", "replace")) for part in (corpus.train, corpus.held_out)
        )
        self._words = _frequent_words(train)
        # Texts repeat sentences: one is held out only if training does not have it.
        trained = set(train)
        held_out = [sentence for sentence in dict.fromkeys(held_out) if sentence not in trained]
        half = len(held_out) // 2
        self._sentences = {
            split: [self._ids(sentence) for sentence in sentences]
            for split, sentences in (("train", train), ("held_out", held_out[:half]), ("test", held_out[half:]))
        }
        for split, sentences in self._sentences.items():
            tokens = sum(map(len, sentences))
            if tokens < max_length:
                raise ValueError(f"corpus: expected at least {max_length} tokens in the split {split}, got {tokens}")

    def __call__(self, step: int) -> Batch:
        """{"input_ids": [B, p], "question_ids": [B, q], "answer_ids": [B, a]}; the last two are padded with -100."""
        return as_batch(self._questions("train", [self.seed, step], self.size))

    def groups(self, split: str, rows: int, kind: str | None = None, *, size: int = 16) -> list[list[Question]]:
        """Questions of the split "held_out" or "test", in groups of at most `size` with contexts of one length.

        `rows` in all, of one kind; None: kinds alternate.
        """
        counts = [min(size, rows - start) for start in range(0, rows, size)]
        return [self._questions(split, [index], count, kind) for index, count in enumerate(counts)]

    @property
    def identity(self) -> dict[str, Any]:
        """The text, the sizes and the seed."""
        return {
            "text": self._digest,
            "size": self.size,
            "lengths": [self.min_length, self.max_length],
            "lines": self.lines,
            "passages": [self.cue, self.answer],
            "seed": self.seed,
        }

    def _questions(self, split: str, numbers: Sequence[int], count: int, kind: str | None = None) -> list[Question]:
        random = np.random.default_rng([SPLITS[split], *numbers])
        length = int(random.integers(self.min_length, self.max_length + 1))
        kinds = [kind or self.kinds[row % len(self.kinds)] for row in range(count)]
        return [self._question(random, split, length, kind) for kind in kinds]

    def _question(self, random: np.random.Generator, split: str, length: int, kind: str) -> Question:
        names = random.choice(self._words, 2 * self.lines, replace=False).tolist()
        codes = [
            (name, f" {word}-{number}.")
            for name, word, number in zip(
                names[::2], names[1::2], random.integers(10, 100, self.lines).tolist(), strict=True
            )
        ]
        needles = [self._ids(f" The code of {name} is{code}") for name, code in codes]
        pieces = [(piece, True) for piece in self._text(random, split, length - sum(map(len, needles)))]
        # Each code precedes a sentence; none follows the last sentence, which may be cut.
        for needle, place in zip(needles, random.integers(0, len(pieces), len(needles)).tolist(), strict=True):
            pieces.insert(place, (needle, False))
        context = sum((piece for piece, _ in pieces), ())
        if kind == "code":
            name, code = codes[int(random.integers(self.lines))]
            return Question(context, self._ids(f"\nWhat is the code of {name}? It is"), self._ids(code))
        cue, answer = self._passage(random, context, [text for piece, text in pieces for _ in piece])
        return Question(context, self._ids("\n...") + cue, answer)

    def _text(self, random: np.random.Generator, split: str, length: int) -> list[Ids]:
        """Consecutive sentences, `length` tokens in all; the last one may be cut."""
        if length < 1:
            raise ValueError(f"min_length: expected more tokens than the codes take, got {length} left for text")
        sentences = self._sentences[split]
        remaining = np.cumsum([len(sentence) for sentence in reversed(sentences)])[::-1]
        at, pieces = int(random.integers(0, int((remaining >= length).sum()))), []
        while length > 0:
            pieces.append(sentences[at][:length])
            length -= len(pieces[-1])
            at += 1
        return pieces

    def _passage(self, random: np.random.Generator, context: Ids, text: Sequence[bool]) -> tuple[Ids, Ids]:
        """A cue and the tokens after it, all of them `text` and the cue unique in the context, if that is possible."""
        span = self.cue + self.answer
        starts = range(len(context) - span + 1)
        text_starts = [start for start in starts if all(text[start : start + span])] or list(starts)
        count = Counter(context[start : start + self.cue] for start in range(len(context) - self.cue + 1))
        unique_starts = [start for start in text_starts if count[context[start : start + self.cue]] == 1] or text_starts
        start = int(random.choice(unique_starts))
        middle = start + self.cue
        return context[start:middle], context[middle : middle + self.answer]

    def _ids(self, text: str) -> Ids:
        return tuple(text_ids(text, self.tokenizer, special_tokens=False))


def as_batch(questions: Sequence[Question]) -> Batch:
    """Questions with contexts of one length, as keyword arguments of a compressor."""
    rows = [{"input_ids": each.context, "question_ids": each.question, "answer_ids": each.answer} for each in questions]
    batch = collate(rows)
    return {name: batch[name] for name in rows[0]}


@torch.no_grad()
def evaluate(
    compressor: Compressor, data: Needles, split: str, count: int, device: str = "cpu"
) -> dict[str, dict[str, float]]:
    """{"loss", "exact"} over `count` questions of each kind, by kind, and their mean as "all".

    An answer is exact where each of its tokens is the likeliest behind those before it, so that greedy decoding gives
    it.
    """
    figures: dict[str, dict[str, float]] = {}
    for kind in data.kinds:
        loss = tokens = exact = 0.0
        for group in data.groups(split, count, kind):
            contexts = torch.tensor([question.context for question in group], device=device)
            texts = [[*question.question, *question.answer[:-1]] for question in group]
            hidden_states = compressor.decode(compressor.encode(contexts), "qa", texts)
            for states, question in zip(hidden_states, group, strict=True):
                start, answer = len(question.question), torch.tensor(question.answer, device=device)
                logits = compressor.logits(states[start : start + len(answer)])
                loss += float(cross_entropy(logits, answer, reduction="sum"))
                tokens += len(answer)
                exact += bool((logits.argmax(-1) == answer).all())
        figures[kind] = {"loss": loss / tokens, "exact": exact / count}
    # The kinds count alike, however many tokens their answers have.
    names = ("loss", "exact")
    figures["all"] = {name: sum(figures[kind][name] for kind in data.kinds) / len(data.kinds) for name in names}
    return figures


def _sentences(text: str) -> list[str]:
    """Sentences, each with a leading space and single spaces."""
    parts = (" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text))
    return [" " + part for part in parts if part]


def _frequent_words(sentences: Sequence[str]) -> list[str]:
    """The most frequent words of 5 to 8 small letters, in the order of the alphabet."""
    counts = Counter(word for sentence in sentences for word in re.findall(r"\b[a-z]{5,8}\b", sentence))
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return sorted(ordered[:WORDS])
