"""Conversations about images from files, as questions for training a `gistkit.compress.VoCo`."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.common.text_ids import text_ids
from gistkit.formats import files, records
from gistkit.formats.questions import Fields
from gistkit.hf.chat import chat_prompt, check_chat, open_image
from gistkit.train.data import HELD_OUT
from gistkit.train.images import ImageQuestion

if TYPE_CHECKING:
    from gistkit.compress import VoCo

# Stands for an image in the text of a question.
IMAGE = "<image>"
# The beginning of ScienceQA's problems.json, an object of objects.
_PROBLEMS = re.compile(r'\s*\{\s*"\d+"\s*:\s*\{')
_SPEAKERS = ("human", "user"), ("gpt", "assistant")


@dataclass(frozen=True)
class Conversation:
    """Images, and questions about them in order with their answers.

    Args:
        images: files, one for each `<image>` in the first question; without one they come before its text.
        turns: (question, answer), at least one.
        others: more right answers to the last question, such as VQAv2 has from ten people.
        group: as of `ImageQuestion`.
    """

    images: tuple[Path, ...]
    turns: tuple[tuple[str, str], ...]
    others: tuple[str, ...] = ()
    group: str = ""


def load_conversations(path: str | Path, images: str | Path) -> list[Conversation]:
    """The conversations of a JSON array or of JSON lines, each an object of one of two forms.

    - {"image", "question", "answer"}, or "answers", a list of texts, the first of which is trained on;
    - LLaVA's {"image", "conversations": [{"from": "human", "value"}, {"from": "gpt", "value"}, ...]}.

    "image" is a file's name or a list of them. Every `<image>` is in the first question. LLaVA's conversations without
    an image are left out, with a warning that counts them.

    Args:
        path: of the file, in UTF-8; plain, gzip or zstd.
        images: the folder that the names of images are in; none leads out of it.

    Raises:
        FileNotFoundError: naming the file or the image that is not there.
        ValueError: naming the file, the line or the place in the array, and the field.
    """
    path, folder = Path(path), Path(images)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a file of conversations about images, found none")
    if not folder.is_dir():
        raise FileNotFoundError(f"images: expected the folder of the images, got {str(images)!r}")
    if is_choices(path):
        raise ValueError(
            f"{path}: expected a JSON array or JSON lines of conversations, got questions with options, as "
            "ScienceQA's or MMBench's; gistkit evaluate --images reads these with pip install ./lab"
        )
    found: list[Conversation] = []
    plain = 0
    for where, values in records(path):
        if isinstance(values, Mapping) and "conversations" in values and values.get("image") is None:
            plain += 1
        else:
            found.append(_conversation(where, values, folder))
    if plain:
        several = f"{plain} of {plain + len(found)} conversations"
        warnings.warn(f"{path}: {several} have no image and are left out", stacklevel=2)
    if not found:
        raise ValueError(f"{path}: expected at least one conversation about an image, got none")
    return found


def is_choices(path: Path) -> bool:
    """Whether a file is ScienceQA's problems.json or a .tsv file such as MMBench's, which only the lab reads."""
    return files.suffix_of(path) == ".tsv" or _PROBLEMS.match(files.head(path)) is not None


class ConversationQuestions(Sequence[ImageQuestion]):
    """Every question of conversations as an `ImageQuestion`, made when it is asked for: its images are read then.

    What a model reads is the processor's chat template of the questions and answers so far; all after the last image
    is the question. A text that names a special token of the model is refused. Give them to `ImageQuestions`, with
    their `held_out`.

    Args:
        conversations: such as from `load_conversations`.
        compressor: splits what the processor returns.
        processor: the model's own, with a chat template and a tokenizer.
        end_token: id after every answer; None: the tokenizer's end token, if it has one.
    """

    def __init__(
        self, conversations: Sequence[Conversation], compressor: VoCo, processor: Any, end_token: int | None = None
    ) -> None:
        check_chat(processor)
        if end_token is None:
            end_token = getattr(processor.tokenizer, "eos_token_id", None)
        self.conversations, self.compressor, self.processor = conversations, compressor, processor
        self._end = [] if end_token is None else [end_token]
        self._places = [(index, turn) for index, each in enumerate(conversations) for turn in range(len(each.turns))]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def held_out(self) -> list[int]:
        """The indices of all questions about the last tenth of the images; those that are asked of together are one."""
        groups = _groups(self.conversations)
        different = list(dict.fromkeys(groups))
        if len(different) < 2:
            raise ValueError(
                f"conversations: expected at least 2 that share no image, one to hold out, got {len(different)}"
            )
        last = set(different[-max(1, int(len(different) * HELD_OUT)) :])
        return [at for at, (index, _) in enumerate(self._places) if groups[index] in last]

    @property
    def digest(self) -> str:
        """First 12 hexadecimal digits of a SHA-256 of all texts and the images' names and sizes, to identify data."""
        values = [
            (
                [(image.name, image.stat().st_size) for image in each.images],
                each.turns,
                *([each.others] if each.others else []),
            )
            for each in self.conversations
        ]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]

    def __getitem__(self, index: Any) -> Any:
        """The question of an index, or a list of those of a slice."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        conversation, turn = self._places[index]
        return self._question(self.conversations[conversation], turn)

    def _question(self, conversation: Conversation, turn: int) -> ImageQuestion:
        question, answer = conversation.turns[turn]
        words = self.processor.tokenizer
        for said in chain.from_iterable(conversation.turns[: turn + 1]):
            plain = said.replace(IMAGE, "")
            # A processor would read their names as these tokens.
            if text_ids(plain, words) != text_ids(plain, words, control_tokens=True):
                raise ValueError(f"conversations: expected texts without special tokens of the model, got {said!r:.60}")
        context, (text,) = self.compressor.split(chat_prompt(self.processor, _messages(conversation, turn)))
        answer_ids = text_ids(answer, words, special_tokens=False)
        if not answer_ids:
            raise ValueError(
                f"conversations: expected an answer of at least 1 token to {question!r:.60}, got {answer!r}"
            )
        others = conversation.others if turn == len(conversation.turns) - 1 else ()
        return ImageQuestion(context, text, answer_ids + self._end, (answer, *others), conversation.group)


def _groups(conversations: Sequence[Conversation]) -> list[int]:
    """For each conversation the first of those that it shares an image with, also through others."""
    first: dict[Path, int] = {}
    parents = list(range(len(conversations)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    for index, conversation in enumerate(conversations):
        for image in conversation.images:
            one, other = root(index), root(first.setdefault(image.resolve(), index))
            parents[max(one, other)] = min(one, other)
    return [root(index) for index in range(len(conversations))]


def _messages(conversation: Conversation, turn: int) -> list[dict[str, Any]]:
    """What a chat template takes: the turns before `turn` with their answers, and its question."""
    messages: list[dict[str, Any]] = []
    for index, (question, answer) in enumerate(conversation.turns[: turn + 1]):
        content: list[dict[str, Any]] = [{"type": "text", "text": question.strip()}]
        if index == 0:
            content = list(_content(question, conversation.images))
        messages.append({"role": "user", "content": content})
        if index < turn:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return messages


def _content(question: str, images: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The text of a first question with its images in their places."""
    files = [{"type": "image", "image": open_image(image)} for image in images]
    parts = question.split(IMAGE)
    if len(parts) == 1:
        yield from files
        files = []
    for part, file in zip(parts, [*files, None], strict=False):
        if part.strip():
            yield {"type": "text", "text": part.strip()}
        if file is not None:
            yield file


def image_file(where: str, name: str, folder: Path) -> Path:
    """The image of a name in a folder, out of which none leads."""
    file = folder / name
    if "\0" in name or not file.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{where}: expected an image inside {folder}, got {name!r:.60}")
    if not file.is_file():
        raise FileNotFoundError(f"{where}: expected the image {file}, found none")
    return file


def _conversation(where: str, values: Any, folder: Path) -> Conversation:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(values).__name__}")
    names = values.get("image")
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: expected image, a file's name or several, got {values.get('image')!r:.60}")
    files = [image_file(where, name, folder) for name in names]
    turns, others = _turns(Fields(where, values))
    asked, answers = [question for question, _ in turns], [*(answer for _, answer in turns), *others]
    for text in (*asked, *answers):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: expected text of whole characters, got {text!r:.60}") from error
    if marked := [answer for answer in answers if IMAGE in answer or not answer.strip()]:
        raise ValueError(f"{where}: expected answers of some text and no {IMAGE}, got {marked[0]!r:.60}")
    marks = [question.count(IMAGE) for question in asked]
    if any(marks[1:]) or marks[0] not in (0, len(files)):
        raise ValueError(
            f"{where}: expected {len(files)} {IMAGE} in the first question, or none, and none in later ones, got "
            f"{', '.join(map(str, marks))}"
        )
    return Conversation(tuple(files), turns, others)


def _turns(row: Fields) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Questions with an answer each, and other right answers to the last one."""
    if "conversations" not in row.values:
        first, *others = row.texts("answers") if "answers" in row.values else (row.text("answer"),)
        return ((row.text("question"), first),), tuple(others)
    said = list(row.each("conversations"))
    if not said or len(said) % 2:
        raise row.error("conversations", "questions and answers in turn")
    for index, message in enumerate(said):
        if message.values.get("from") not in _SPEAKERS[index % 2]:
            raise message.error("from", " or ".join(_SPEAKERS[index % 2]))
    # A question may consist of images only.
    texts = [message.text("value", empty=True) for message in said]
    return tuple(zip(texts[::2], texts[1::2], strict=True)), ()
