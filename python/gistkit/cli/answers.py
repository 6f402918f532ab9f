"""Prints answers from one memory as they are generated, with their sources on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.common.messages import plain
from gistkit.options.texts import read_content

if TYPE_CHECKING:
    from gistkit.ask import Conversation
    from gistkit.compress import Memory

# The token ids of a question's prompt; the last token of the answer before it, None for the first question.
Prompts = Callable[[str, "int | None"], list[int]]


class Answers:
    """A conversation on standard output.

    Args:
        conversation: which answers go on.
        tokenizer: of the model.
        prompts: see `Prompts`.
        settings: of `Conversation.reply`.
        names: of the memories.
        texts: token ids of each memory's text, for its passages; empty: there are none.
        sources: whether sources follow each answer.
    """

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: Any,
        prompts: Prompts,
        settings: dict[str, Any],
        names: Sequence[str],
        texts: Sequence[list[int]] = (),
        sources: bool = False,
    ) -> None:
        self.conversation, self.tokenizer, self.prompts, self.settings = conversation, tokenizer, prompts, settings
        self.names, self.texts, self.sources = names, texts, sources

    def answer(self, question: str, stopped: Callable[[], Any] = lambda: False) -> int:
        """Prints the answer and perhaps its sources; returns how many of the oldest turns went for it.

        Args:
            question: a text.
            stopped: asked after each token; the answer ends once it returns something true.
        """
        from transformers import TextStreamer

        conversation = self.conversation
        before = conversation.turns
        prompt = self.prompts(question, conversation.text[-1] if before else None)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with conversation.unchanged_on_error():
            conversation.make_room(len(prompt) + self.settings["max_new_tokens"])
            if before and not conversation.turns:
                # No answer is left that it could end.
                prompt = self.prompts(question, None)
            conversation.reply(prompt, streamer=streamer, stopped=stopped, **self.settings)
        if self.sources and not stopped():
            self._print_sources()
        return before + 1 - conversation.turns

    def _print_sources(self) -> None:
        from gistkit.ask import sources

        for passage in sources(self.conversation):
            memory = self.conversation.memories[passage.document]
            name = f"{self.names[passage.document]}, " if len(self.names) > 1 else ""
            size = memory.context_lengths[0] + len(memory.rest[0])
            text = ""
            if self.texts:
                words = self.tokenizer.decode(self.texts[passage.document][passage.start : passage.end])
                text = f": {' '.join(plain(words).split())}"
            print(f"  [{name}tokens {passage.start} to {passage.end} of {size}, {passage.share:.0%}]{text}", flush=True)


def source_ids(
    paths: Sequence[Path], names: Sequence[str], memories: Sequence[Memory], tokenizer: Any, read: Mapping[Path, Any]
) -> list[list[int]]:
    """The token ids of the texts of memories, as `gistkit compress` makes them; `read` has those that were read."""
    from gistkit.common.text_ids import text_ids

    if len(paths) != len(memories):
        raise ValueError(f"--text: expected the text of each of {len(memories)} memories, got {len(paths)}")
    rows = []
    for path, name, memory in zip(paths, names, memories, strict=True):
        known = read.get(path)
        ids = text_ids(known if isinstance(known, str) else read_content(str(path)), tokenizer)
        size = memory.context_lengths[0] + len(memory.rest[0])
        if len(ids) != size:
            raise ValueError(
                f"--text: expected the text that {name} was made from, {size} tokens, got {path}, {len(ids)} tokens"
            )
        rows.append(ids)
    return rows
