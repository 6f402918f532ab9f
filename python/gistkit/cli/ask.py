"""`gistkit ask`: questions to compressed texts and images."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.options.arguments import LAYOUTS, add_command, device, number, path, positive, whole
from gistkit.options.models import (
    IMAGES,
    METHODS,
    add_model,
    add_trained,
    load_compressor,
    load_model,
    new_compressor,
    warn_untrained,
)
from gistkit.options.texts import check_text, decode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gistkit.compress import Compressor, Memory

# The token ids of a question's prompt, as one row.
Prompts = Callable[[str], list[list[int]]]
EXAMPLES = """\
example: gistkit ask report.gist "Who wrote it?" "When?"
example: gistkit ask report.gist --with appendix.gist --model ./llama --compressor runs/x500 < questions.txt
example: gistkit ask photo.gist "What is on the table?" --model ./llava --compressor runs/voco/compressor
example: gistkit ask report.gist --task ae --max-new-tokens 500 --model smollm2 --compressor runs/x500"""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "ask", _run, "ask a compressed text or image", EXAMPLES)
    parser.set_defaults(words="questions")
    parser.add_argument("memory", type=path, help="memory file that gistkit compress wrote")
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help="default: the lines of standard input")
    parser.add_argument(
        "--with", dest="others", type=path, action="append", default=[], metavar="MEMORY",
        help="another memory to read after the first; may be repeated",
    )  # fmt: skip
    add_model(parser)
    add_trained(parser, "the one that comes with gistkit and may have made the memory")
    parser.add_argument(
        "--task", choices=("qa", "lm", "ae"), default="qa",
        help="qa: answer questions; lm: continue the text; ae: reconstruct it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--template",
        help="text around a {question}, as in training (default: ### Question: and ### Answer: lines; of "
        "an image, the model's own chat template)",
    )
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="default: %(default)s")
    parser.add_argument("--temperature", type=number(0), help="0 is greedy (default: 0, or 1 with --top-p)")
    parser.add_argument("--top-p", type=number(0, 1), help="sample from the likeliest tokens of this total probability")
    parser.add_argument("--seed", type=whole(), default=0, help="of the samples (default: %(default)s)")


def _run(arguments: argparse.Namespace) -> int:
    device_name = device(arguments.device)
    if arguments.task != "qa" and arguments.questions:
        raise ValueError(f"QUESTION: expected none with --task {arguments.task}, got {arguments.questions[0]!r}")

    import torch

    from gistkit.compress import Memory
    from gistkit.evaluate.data import QUESTION

    template = QUESTION if arguments.template is None else arguments.template
    if "{question}" not in template:
        raise ValueError(f"--template: expected a text with {{question}} in it, got {template!r}")
    for name, text in (("--template", template), *(("QUESTION", question) for question in arguments.questions)):
        check_text(name, text)
    paths = [arguments.memory, *arguments.others]
    memories = [Memory.load(path) for path in paths]
    for memory_path, memory in zip(paths, memories, strict=True):
        if memory.batch_size != 1:
            raise ValueError(f"{memory_path}: expected the memory of one text, got {memory.batch_size} rows")
    images = memories[0].source.method == IMAGES
    if images and arguments.template is not None:
        raise ValueError(f"--template: expected none for {paths[0]}, a memory of images, got {arguments.template!r}")
    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name, images)
    compressor = _compressor(arguments, model, memories[0])
    memories = [memory.to(model.device, model.dtype) for memory in memories]
    for memory_path, memory in zip(paths, memories, strict=True):
        try:
            compressor.check_readable(memory)
        except ValueError as error:
            raise ValueError(f"{memory_path}: {str(error).removeprefix('memory: ')}") from error
    memory_to_read = compressor.join(memories) if len(memories) > 1 else memories[0]
    answer = Answer(arguments, compressor, tokenizer.tokenizer if images else tokenizer, memory_to_read)
    with torch.no_grad():
        if arguments.task != "qa":
            answer.stream(None)
            return 0
        prompt_ids = _image_prompts(compressor, tokenizer) if images else _text_prompts(tokenizer, template)
        for question in _questions(arguments):
            if len(arguments.questions) != 1:
                print(f"> {question}", flush=True)
            answer.stream(prompt_ids(question))
    return 0


def _text_prompts(tokenizer: Any, template: str) -> Prompts:
    """The token ids of a question in its template."""

    def prompt_ids(question: str) -> list[list[int]]:
        return [tokenizer(template.replace("{question}", question), add_special_tokens=False)["input_ids"]]

    return prompt_ids


def _image_prompts(compressor: Any, processor: Any) -> Prompts:
    """The token ids of a question in the chat template, behind whatever image."""
    from gistkit.hf.chat import blank, image_prompt

    before, _ = compressor.split(image_prompt(processor, [blank()]))

    def prompt_ids(question: str) -> list[list[int]]:
        try:
            context, texts = compressor.split(image_prompt(processor, [blank()], question))
        except ValueError as error:
            raise ValueError(
                f"QUESTION: expected a text that the model's processor reads, got {question!r}: {error}"
            ) from error
        if context["input_ids"] != before["input_ids"]:
            raise ValueError(
                "QUESTION: expected a text without image tokens, in a chat template that puts it behind the image and "
                f"its gap, got {question!r}"
            )
        return texts  # type: ignore[no-any-return]

    return prompt_ids


def _compressor(arguments: argparse.Namespace, model: PreTrainedModel, memory: Memory) -> Compressor:
    if arguments.compressor is not None:
        return load_compressor(arguments.compressor, model)
    from gistkit.compress.named import default_for, may_have_made

    source = memory.source
    name = default_for(arguments.model)
    if name is not None and may_have_made(name, source):
        return load_compressor(Path(name), model)
    warn_untrained()
    if source.method not in METHODS:
        raise ValueError(f"MEMORY: expected one made by {' or '.join(METHODS)}, got method {source.method!r}")
    if source.layout in LAYOUTS:
        return new_compressor(model, source.method, layout=source.layout, ratio=source.ratio, chunk=source.chunk)
    try:
        size = {"no_context": {}, IMAGES: {"memory_tokens": source.chunk}}
        ratio = size.get(source.method, {"ratio": source.chunk})
        return new_compressor(model, source.method, **ratio, **json.loads(source.layout))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"MEMORY: expected one whose compressor can be made again, got {source.method}: {error}"
        ) from error


def _questions(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.questions:
        yield from arguments.questions
        return
    if sys.stdin.isatty():
        print("A question a line; end with Ctrl-D.", file=sys.stderr)
    for line in sys.stdin.buffer:
        if question := decode("standard input", line).strip():
            yield question


class Answer:
    """Generates from one memory, printing tokens as they come."""

    def __init__(self, arguments: argparse.Namespace, compressor: Compressor, tokenizer: Any, memory: Memory) -> None:
        import torch

        from gistkit.evaluate.runner import end_tokens

        self.compressor, self.tokenizer, self.memory = compressor, tokenizer, memory
        temperature = arguments.temperature
        if temperature is None:
            temperature = 0.0 if arguments.top_p is None else 1.0
        self.settings = {
            "task": arguments.task,
            "max_new_tokens": arguments.max_new_tokens,
            "stop_tokens": end_tokens(compressor.model, tokenizer),
            "do_sample": temperature > 0,
            "temperature": temperature or 1.0,
            "top_p": arguments.top_p,
            "generator": torch.Generator(compressor.model.device).manual_seed(arguments.seed),
        }

    def stream(self, prompt_ids: list[list[int]] | None) -> None:
        """Prints the text that follows the memory and the prompt, if there is one."""
        from transformers import TextStreamer

        streamer = TextStreamer(self.tokenizer, skip_special_tokens=True)
        self.compressor.generate(self.memory, prompt_ids, streamer=streamer, **self.settings)
