"""`gistkit ask`: questions to compressed texts and images."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.cli.answers import Answers, Prompts, source_ids
from gistkit.cli.dialogue import converse
from gistkit.cli.named import compressed, is_text, readable
from gistkit.cli.plugins import missing, stores
from gistkit.common.trained import default_for
from gistkit.options.arguments import add_command, device, existing, number, positive, whole
from gistkit.options.models import (
    IMAGES,
    OtherWeightsError,
    add_model,
    add_trained,
    as_made,
    given_compressor,
    load_compressor,
    load_model,
    makers_of,
    new_compressor,
    noted_folder,
)
from gistkit.options.texts import check_text, decode, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gistkit.compress import Compressor, Memory

EXAMPLES = """\
example: gistkit ask report.txt "Who wrote it?"
example: gistkit ask report.gist "Who wrote it?" "When?"
example: gistkit ask report.gist    # a conversation
example: gistkit ask report.gist --with appendix.gist --model ./llama --compressor runs/x500 < questions.txt
example: gistkit ask photo.gist "What is on the table?" --model ./llava --compressor runs/voco/compressor
example: gistkit ask report.gist "Who wrote it?" --sources --text report.txt
example: gistkit ask report.gist --text report.txt
example: gistkit ask notes.store "What was decided in March?" --nearest 2
example: gistkit ask notes.store "Who paid for the boat?" --embed ./bge-small
example: gistkit ask notes.store --document 2026/march.md "What was decided?"
example: gistkit ask report.gist --task ae --max-new-tokens 500 --model smollm2 --compressor runs/x500"""

# The least temperature: below it logits overflow, and the likeliest token has all of the probability long before.
COLDEST = 1e-3


def add(commands: Any) -> None:
    parser = add_command(commands, "ask", _run, "ask a compressed text or image", EXAMPLES)
    parser.set_defaults(words="questions")
    parser.add_argument(
        "memory",
        type=existing,
        help="memory file or store that gistkit compress wrote, or a text file, which is compressed for this call",
    )
    parser.add_argument(
        "questions", nargs="*", default=[], metavar="QUESTION",
        help="answered independently, for which the model is loaded once (default: in a terminal, a conversation, for "
        "which it is also loaded once; otherwise each line of standard input)",
    )  # fmt: skip
    parser.add_argument(
        "--document", dest="documents", action="append", default=[], metavar="NAME",
        help="a document of the store, by its path in the folder; repeat it to read several one after another "
        "(default: the nearest to each question by the store's index)",
    )  # fmt: skip
    parser.add_argument(
        "--nearest", type=positive, metavar="K",
        help="read the K nearest documents of the store as one context, the nearest first; standard error names them "
        "(default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--embed", metavar="MODEL", help="find them by the store's index of vectors, which gistkit compress --embed "
        "made with this model (default: by its index of words)",
    )  # fmt: skip
    parser.add_argument(
        "--with", dest="others", type=existing, action="append", default=[], metavar="MEMORY",
        help="another memory to read after the first, or beside a file another text; repeatable",
    )  # fmt: skip
    add_model(parser)
    add_trained(parser, "the one that made the memory, if it comes with gistkit or a command here was given its folder")
    parser.add_argument(
        "--task", choices=("qa", "lm", "ae"), default="qa",
        help="qa: answer questions; lm: continue the text; ae: reconstruct it (default: %(default)s)",
    )  # fmt: skip
    around = parser.add_mutually_exclusive_group()
    around.add_argument(
        "--template",
        help="text around a {question}, as in training (default: ### Question: and ### Answer: lines; of "
        "an image, the model's own chat template)",
    )
    around.add_argument(
        "--chat", action="store_true",
        help="use the model's own chat template; the first message starts with the text and ends with the question",
    )  # fmt: skip
    parser.add_argument(
        "--sources", action="store_true",
        help="show, after each answer, the parts of the text that it attended to most; other parts may matter too",
    )  # fmt: skip
    parser.add_argument(
        "--text", dest="texts", type=existing, action="append", default=[], metavar="FILE",
        help="the text of the memory, from which --sources quotes; once for each memory",
    )  # fmt: skip
    parser.add_argument("--max-new-tokens", type=positive, default=256, help="of an answer (default: %(default)s)")
    parser.add_argument("--temperature", type=temperature, help="0 is greedy (default: 0, or 1 with --top-p)")
    parser.add_argument("--top-p", type=number(0, 1), help="sample from the likeliest tokens of this total probability")
    parser.add_argument("--seed", type=whole(), default=0, help="random seed of sampling (default: %(default)s)")


def temperature(text: str) -> float:
    """Argument type: 0, or a temperature by which logits can be divided."""
    value = number(0)(text)
    if 0 < value < COLDEST:
        raise argparse.ArgumentTypeError(f"expected 0 or a number of at least {COLDEST:g}, got {text!r:.80}")
    return value


def _run(arguments: argparse.Namespace) -> int:
    if arguments.task != "qa" and arguments.questions:
        raise ValueError(f"QUESTION: expected none with --task {arguments.task}, got {arguments.questions[0]!r}")
    for name in ("sources", "template", "chat"):
        if arguments.task != "qa" and getattr(arguments, name) not in (None, False):
            raise ValueError(f"--{name}: expected none with --task {arguments.task}, which has no question")
    if arguments.temperature == 0 and arguments.top_p is not None:
        raise ValueError(f"--top-p: expected none with --temperature 0, which draws nothing, got {arguments.top_p}")
    in_terminal = arguments.task == "qa" and not arguments.questions and sys.stdin.isatty() and sys.stdout.isatty()
    if arguments.texts and not (arguments.sources or in_terminal):
        raise ValueError("--text: expected --sources with it, got none")
    device_name = device(arguments.device)

    import torch

    from gistkit.ask import Conversation
    from gistkit.compress import Memory
    from gistkit.evaluate.data import QUESTION

    template = QUESTION if arguments.template is None else arguments.template
    if "{question}" not in template:
        raise ValueError(f"--template: expected a text with {{question}} in it, got {template!r}")
    for name, text in (("--template", template), *(("QUESTION", question) for question in arguments.questions)):
        check_text(name, text)
        if not text.strip():
            raise ValueError(f"{name}: expected a text, got {text!r}")
    store, paths = _stores(arguments), [arguments.memory, *arguments.others]
    nearest = None if store is None else store.nearest_memories(arguments, in_terminal, device_name)
    # The memory or the text of each file, where MEMORY is no store.
    read: dict[Path, Any] = {}
    if store is None:
        if not arguments.texts and (arguments.sources or in_terminal) and all(map(is_text, paths)):
            arguments.texts = paths
        read = {path: read_text(path) if is_text(path) else Memory.load(path) for path in paths}
        made = [(str(path), content) for path, content in read.items() if not isinstance(content, str)]
    else:
        names, memories = store.document_memories(arguments) if nearest is None else nearest.any()
        made = list(zip(names, memories, strict=True))
    for name, memory in made:
        if memory.batch_size != 1:
            raise ValueError(f"{name}: expected the memory of one text, got {memory.batch_size} rows")
    has_texts = any(isinstance(content, str) for content in read.values())
    images = not has_texts and made[0][1].source.method == IMAGES
    if images:
        _check_images(arguments, made[0][0])
    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name, images)
    compressor = _compressor(arguments, model, made[0][1] if made else None)
    if read:
        memories_by_path = compressed(read, compressor, tokenizer)
        names, memories = list(map(str, paths)), [memories_by_path[path] for path in paths]
    texts = source_ids(arguments.texts, names, memories, tokenizer, read) if arguments.texts else []
    memories = readable(compressor, names, memories)
    words = tokenizer.tokenizer if images else tokenizer
    settings = _settings(arguments, compressor, words)
    with torch.no_grad():
        if arguments.task != "qa":
            _stream(arguments.task, compressor, words, memories, settings)
            return 0
        prompts = (
            _image_prompts(compressor, tokenizer) if images else _text_prompts(tokenizer, template, arguments.chat)
        )

        def answers_from(names: list[str], memories: list[Memory]) -> Answers:
            conversation = Conversation(compressor, *memories)
            return Answers(conversation, words, prompts, settings, names, texts, arguments.sources)

        if in_terminal:
            converse(answers_from(names, memories))
            return 0
        answers: Answers | None = None
        for question in _questions(arguments):
            if len(arguments.questions) != 1:
                print(f"> {question}", flush=True)
            if nearest is not None:
                answers = answers_from(*nearest.of(question, compressor))
            elif answers is None:
                answers = answers_from(names, memories)
            answers.conversation.new()
            answers.answer(question)
    return 0


def _check_images(arguments: argparse.Namespace, name: str) -> None:
    """Refuses options that are not for memories of images, of which `name` is one."""
    if arguments.template is not None:
        raise ValueError(f"--template: expected none for {name}, a memory of images, got {arguments.template!r}")
    if arguments.sources or arguments.texts:
        option = "--sources" if arguments.sources else "--text"
        raise ValueError(f"{option}: expected none for {name}, a memory of images, which has no text")


def _stores(arguments: argparse.Namespace) -> Any:
    """What reads a store, None where MEMORY is a file and nothing is asked of a store."""
    asked = arguments.documents or arguments.nearest or arguments.embed
    if not (asked or arguments.memory.is_dir()):
        return None
    if (plugin := stores()) is None:
        raise missing("MEMORY", "apps/serve")
    return plugin


def _text_prompts(tokenizer: Any, template: str, chat: bool) -> Prompts:
    """The token ids of a question in its template, or in the model's chat template."""
    from gistkit.ask.turns import Turns, chat_turns

    try:
        turns = chat_turns(tokenizer) if chat else Turns(template, template)
    except ValueError as error:
        raise ValueError(f"--chat: {error}") from error

    def prompt_ids(question: str, before: int | None) -> list[int]:
        return turns.ids(tokenizer, question, before)

    return prompt_ids


def _image_prompts(compressor: Any, processor: Any) -> Prompts:
    """The token ids of a question in the chat template, after whatever image."""
    from gistkit.ask.turns import Turns, later_turn
    from gistkit.common.text_ids import text_ids
    from gistkit.hf.chat import blank, image_prompt

    before, _ = compressor.split(image_prompt(processor, [blank()]))

    def content(text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    def prompt_ids(question: str, last: int | None) -> list[int]:
        if last is not None:
            shown = [{"role": "user", "content": [{"type": "image"}, *content("?")]}]
            later = later_turn(processor, shown, content)
            return Turns(later, later).ids(processor.tokenizer, question, last)
        words = processor.tokenizer
        if text_ids(question, words) != text_ids(question, words, control_tokens=True):
            raise ValueError(f"QUESTION: expected a text without special tokens of the model, got {question!r}")
        try:
            context, (text,) = compressor.split(image_prompt(processor, [blank()], question))
        except ValueError as error:
            raise ValueError(
                f"QUESTION: expected a text that the model's processor reads, got {question!r}: {error}"
            ) from error
        if context["input_ids"] != before["input_ids"]:
            raise ValueError(
                "QUESTION: expected a text without image tokens, in a chat template that puts it after the image and "
                f"its gap, got {question!r}"
            )
        return text  # type: ignore[no-any-return]

    return prompt_ids


def _compressor(arguments: argparse.Namespace, model: PreTrainedModel, memory: Memory | None) -> Compressor:
    """The one that made a memory, or without one the default of `gistkit compress`."""
    if arguments.compressor is not None:
        given = given_compressor(arguments.compressor, model, arguments.encoder)
        return given if memory is None else as_made(given, memory)
    chosen = {} if arguments.encoder is None else {"encoder": arguments.encoder}
    if memory is None:
        name = default_for(arguments.model)
        return new_compressor(model, **chosen) if name is None else load_compressor(Path(name), model, **chosen)
    from gistkit.compress.config import REGISTRY
    from gistkit.hf.fingerprint import is_of

    source = memory.source
    if (kind := REGISTRY.get(source.method)) is None:
        raise ValueError(f"MEMORY: expected one made by {' or '.join(REGISTRY)}, got method {source.method!r}")
    if chosen and "encoder" not in kind.names():
        raise ValueError(f"--encoder: expected none for a memory made by {source.method}, got {arguments.encoder}")
    for name in makers_of(memory):
        trained = load_compressor(Path(name), model, **chosen)
        # Others have its method too: its weights decide.
        if memory.maker in (None, trained.own_fingerprint()):
            return as_made(trained, memory)
        if trained.adapters is not None:
            trained.adapters.remove()
    wanted = f"--compressor: expected the folder of the {source.method} that made {arguments.memory}, got none"
    if (folder := noted_folder(memory)) is not None:
        print(f"{arguments.memory}: its compressor was in {folder}", file=sys.stderr)
        found = load_compressor(folder, model, arguments.encoder) if folder.is_dir() else None
        if found is None or found.own_fingerprint() != memory.maker:
            raise ValueError(f"{wanted}, which is no longer in {folder}")
        return as_made(found, memory)
    # If the model is another one, that is reported.
    own = memory.maker if memory.fingerprint is None or is_of(model, memory.fingerprint, None) else None
    settings = kind.sizes(source.chunk, source.memory_tokens) | dict(source.options) | chosen
    # What --dtype and --option lora=null gave a new one at compress is not in the file, and shows in its weights.
    dtypes: dict[Any, None] = {model.dtype: None}
    # A quantized model is in no other dtype than it was loaded in.
    if arguments.dtype is None and getattr(model, "quantization_method", None) is None:
        dtypes[memory.dtype] = None
    others = ({}, {"lora": None}) if "lora" in kind.names() - settings.keys() else ({},)
    reason: Exception | None = None
    for dtype, other in product(dtypes, others):
        try:
            cast = model if dtype == model.dtype else model.to(dtype)
            return new_compressor(cast, source.method, own, **settings, **other)
        except OtherWeightsError as error:
            reason = error
        except (TypeError, ValueError) as error:
            reason = error
            break
    raise ValueError(f"{wanted}: {reason}") from reason


def _questions(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.questions:
        yield from arguments.questions
        return
    if sys.stdin.isatty():
        print("A question a line; end with Ctrl-D.", file=sys.stderr)
    for line in sys.stdin.buffer:
        if question := decode("standard input", line).strip():
            yield question


def _settings(arguments: argparse.Namespace, compressor: Compressor, tokenizer: Any) -> dict[str, Any]:
    """How tokens are chosen, as arguments of `generate`."""
    import torch

    from gistkit.evaluate.runner import end_tokens

    temperature = arguments.temperature
    if temperature is None:
        temperature = 0.0 if arguments.top_p is None else 1.0
    return {
        "max_new_tokens": arguments.max_new_tokens,
        "stop_tokens": end_tokens(compressor.model, tokenizer),
        "do_sample": temperature > 0,
        "temperature": temperature or 1.0,
        "top_p": arguments.top_p,
        "generator": torch.Generator(compressor.model.device).manual_seed(arguments.seed),
    }


def _stream(
    task: Any, compressor: Compressor, tokenizer: Any, memories: list[Memory], settings: dict[str, Any]
) -> None:
    """Prints what follows the memories: their continuation, or their reconstruction."""
    from transformers import TextStreamer

    memory = compressor.join(memories) if len(memories) > 1 else memories[0]
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    compressor.generate(memory, task=task, streamer=streamer, **settings)
