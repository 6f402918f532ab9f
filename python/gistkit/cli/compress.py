"""`gistkit compress`: texts or images in, memory files or a store of them out."""

from __future__ import annotations

import argparse
import shlex
import time
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.cli.plugins import missing, stores
from gistkit.common.processes import launched
from gistkit.options.arguments import add_command, device, number, path, positive, typed
from gistkit.options.messages import warn
from gistkit.options.models import (
    add_compressor,
    add_memory_dtype,
    add_model,
    chosen_compressor,
    load_model,
    memory_dtype,
)
from gistkit.options.outputs import check_file
from gistkit.options.texts import (
    STDIN,
    TEXT_FILES,
    TEXTS,
    Source,
    check_text,
    find_sources,
    folder_texts,
    is_picture,
)

if TYPE_CHECKING:
    from gistkit.compress import Compressor, Memory

EXAMPLES = """\
example: gistkit compress report.txt -o report.gist
example: gistkit compress notes/ --glob '**/*.md' -o notes.store --model ./llama --ratio 10
example: gistkit compress notes/ -o notes.store --index --model ./llama --compressor runs/x500
example: gistkit compress notes/ -o notes.store --embed ./bge-small --model ./llama --compressor runs/x500
example: accelerate launch --num_processes 4 -m gistkit.cli compress wiki/ -o wiki.store --model ./llama \\
             --compressor runs/x500
example: gistkit compress report.txt -o signed.gist --question "Who signed it?"
example: gistkit compress report.txt --ratio 16 --option shares=all --refine 60
example: gistkit compress photo.png --model ./llava --compressor runs/voco/compressor
example: pdftotext paper.pdf - | gistkit compress - -o paper.gist --model ./llama --compressor runs/x500"""

# Tokens encoded at a time.
BATCH_TOKENS = 8192
# SmolLM2's default answers from as many memory tokens of a short text as from all of it, and not from fewer.
LEAST = 8


def add(commands: Any) -> None:
    parser = add_command(
        commands, "compress", _run, "compress texts or images once, into memories to ask many times", EXAMPLES
    )
    parser.set_defaults(words="texts")
    parser.add_argument(
        "texts", type=typed, nargs="+", metavar="TEXT",
        help="text file, image, folder of either, or - for standard input",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--out", type=path, help="memory file; for several texts, a folder for their files; for one folder of "
        "texts, a store, which has a file for each text and which the same command continues after a stop (default: "
        "X.gist beside X.txt)",
    )  # fmt: skip
    parser.add_argument(
        "--glob", help="files to read in a folder (default: **/*.txt, and for a store **/*.md too; a store takes no "
        "images)",
    )  # fmt: skip
    parser.add_argument(
        "--index", action="store_true", help="also index the store's documents by their words, so that gistkit ask "
        "finds those nearest to a question",
    )  # fmt: skip
    parser.add_argument(
        "--embed", metavar="MODEL", help="also index the store's documents by vectors, for gistkit ask --embed MODEL; "
        "a sentence-transformers model, as a folder or hub name",
    )  # fmt: skip
    parser.add_argument(
        "--question", help="keep what this question and the model's answer attend to; the memory then answers other "
        "questions less well",
    )  # fmt: skip
    parser.add_argument(
        "--fit", action="store_true", help="fit a selection's values and biases, so that attention gives nearly the "
        "same as over the full text",
    )  # fmt: skip
    parser.add_argument(
        "--refine", type=number(1), metavar="SECONDS", help="train each memory for this time, so that the model "
        "predicts from it what it predicts from the full text",
    )  # fmt: skip
    add_model(parser)
    add_memory_dtype(parser)
    add_compressor(parser)
    parser.add_argument(
        "--batch-tokens", type=positive, default=BATCH_TOKENS, help="most tokens to encode at a time, including "
        "padding; a longer text and an image are encoded separately (default: %(default)s)"
    )  # fmt: skip


def _run(arguments: argparse.Namespace) -> int:
    if arguments.question is not None:
        check_text("--question", arguments.question)
        arguments.option = [*arguments.option, ("question", arguments.question)]
    if arguments.fit:
        arguments.option = [*arguments.option, ("fit", True)]
    processes = launched()
    if arguments.out is not None and str(arguments.out) == STDIN:
        check_file("-o", arguments.out)
    if (documents := _documents(arguments)) is not None:
        if arguments.refine is not None:
            raise ValueError("--refine: expected texts for memory files, got a folder of texts for a store")
        if (plugin := stores()) is None:
            raise missing("-o", "apps/serve")
        device_name = processes.on(device(arguments.device))
        return int(plugin.compress_folder(documents, arguments, processes, device_name))
    if arguments.index or arguments.embed is not None:
        option = "--index" if arguments.index else "--embed"
        raise ValueError(f"{option}: expected a folder of texts and -o for a store of them, got other texts")
    if processes.count > 1:
        raise ValueError(f"TEXT: expected a folder of texts and -o for {processes.count} processes, got other texts")
    sources = find_sources(arguments.texts, arguments.glob or TEXT_FILES, arguments.out)
    if arguments.glob is not None and not any(Path(name).is_dir() for name in arguments.texts):
        raise ValueError(f"--glob: expected a folder to look in, got {arguments.texts[0]}")
    images = sources[0].is_image
    for source in sources:
        if source.is_image != images:
            raise ValueError(f"TEXT: expected only texts or only images, got {sources[0].name} and {source.name}")
        check_file("-o", source.target)
    if images and arguments.refine is not None:
        raise ValueError("--refine: expected texts, got images")
    if images and arguments.batch_tokens != BATCH_TOKENS:
        raise ValueError("--batch-tokens: expected texts, got images, which are encoded one at a time")
    # Of a signal that comes between two files.
    arguments.written, arguments.saved = [], _saved
    texts = [] if images else [source.read() for source in sources]
    device_name = device(arguments.device)
    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name, images)
    compressor = chosen_compressor(arguments, model, tokenizer if images else None)
    compressor.tokenizer = tokenizer
    if images:
        memories = _image_memories(sources, tokenizer, compressor)
    else:
        from gistkit.common.text_ids import text_ids

        rows = [array("i", text_ids(text, tokenizer)) for text in texts]
        _check_lengths(sources, rows, compressor)
        memories = text_memories(rows, compressor, arguments.batch_tokens)
    start = time.perf_counter()
    lines = [""] * len(sources)
    home = compressor._home
    title = compressor.title if home is None else f"{home.resolve().name}: {compressor.title}"
    total = Total("image" if images else "text", title)
    # The progress bar ends before an error is reported.
    with closing(memories):
        for index, tokens, made in memories:
            gained = ""
            if arguments.refine is not None:
                made, gained = _refined(compressor, made, rows[index], arguments.refine, sources[index].name)
            memory = made.to(dtype=memory_dtype(arguments.memory_dtype, model))
            memory.save(sources[index].target)
            arguments.written.append(str(sources[index].target))
            parts = 1 if images else len(compressor.part_ends(rows[index]))
            lines[index] = total.add(sources[index], tokens, memory, parts) + gained
    print("\n".join(lines))
    print(total.line(time.perf_counter() - start))
    words = ["gistkit", "ask", str(sources[0].target)]
    words += [] if arguments.model == "smollm2" else ["--model", arguments.model]
    words += [] if arguments.dtype is None else ["--dtype", arguments.dtype]
    words += [] if arguments.encoder is None else ["--encoder", arguments.encoder]
    print(f"Ask it: {shlex.join(words)}, which is a conversation, or with questions after it")
    warn_of_sizes(total.texts, compressor, total.kind)
    return 0


def _saved(arguments: argparse.Namespace) -> str:
    return f"written: {', '.join(arguments.written)}" if arguments.written else "nothing is written yet"


def _documents(arguments: argparse.Namespace) -> dict[str, Path] | None:
    """The documents for a store by name; None where memory files are asked for."""
    name, *others = arguments.texts
    folder = Path(name)
    if arguments.out is None or others or not name.strip() or not folder.is_dir():
        return None
    documents = folder_texts(folder, TEXTS if arguments.glob is None else (arguments.glob,))
    return None if any(is_picture(path) for path in documents.values()) else documents


def text_memories(
    rows: Sequence[Sequence[int]], compressor: Compressor, batch_tokens: int, **options: Any
) -> Generator[tuple[int, int, Memory]]:
    """(index, number of tokens, memory) of each text, those of similar lengths together; `options` of the bar."""
    import torch
    from tqdm import tqdm

    from gistkit.compress.tokens import batches

    total = sum(map(len, rows))
    with torch.no_grad(), tqdm(total=total, desc="compress", unit="token", unit_scale=True, **options) as bar:
        for batch in batches([len(row) for row in rows], batch_tokens):
            done = bar.n + sum(len(rows[index]) for index in batch)
            with passes(compressor, bar):
                memory = compressor.encode([list(rows[index]) for index in batch])
            # Some tokens may be kept as they are.
            bar.update(done - bar.n)
            for place, index in enumerate(batch):
                yield index, len(rows[index]), memory[place]


@contextmanager
def passes(compressor: Compressor, bar: Any) -> Iterator[None]:
    """Inside, each pass over contexts moves a progress bar of tokens: a long text is read in many."""
    encode_rows = compressor.encode_rows

    def counted(rows: Any, *arguments: Any) -> Any:
        made = encode_rows(rows, *arguments)
        bar.update(sum(rows.lengths))
        return made

    compressor.encode_rows = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del compressor.encode_rows


def _refined(compressor: Compressor, memory: Memory, ids: array[int], seconds: float, name: str) -> tuple[Memory, str]:
    """The trained memory, and what that gained."""
    from tqdm import tqdm

    from gistkit.compress import refine

    with tqdm(total=100, desc=f"refine {name}", bar_format="{l_bar}{bar}| {elapsed}", leave=False) as bar:
        found = refine(
            compressor, memory, ids.tolist(), seconds=seconds, progress=lambda done: bar.update(int(100 * done) - bar.n)
        )
    gained = f"{found.before:.3f} to {found.after:.3f} nats a token from the whole text's words"
    return found.memory, f"; refined in {found.steps} steps, {gained}"


def _image_memories(sources: Sequence[Source], processor: Any, compressor: Any) -> Generator[tuple[int, int, Memory]]:
    """(index, number of tokens, memory) of each image and the text before it in a message."""
    import torch
    from tqdm import tqdm

    from gistkit.hf.chat import image_prompt, open_image

    for index, source in enumerate(tqdm(sources, desc="compress", unit="image")):
        image = open_image(source.name)
        with torch.no_grad():
            try:
                context, _ = compressor.split(image_prompt(processor, [image]))
                memory = compressor.encode(context)
            except ValueError as error:
                raise ValueError(f"{source.name}: {error}") from error
            yield index, len(context["input_ids"][0]), memory


def _check_lengths(texts: Sequence[Source], rows: Sequence[array[int]], compressor: Compressor) -> None:
    for text, row in zip(texts, rows, strict=True):
        try:
            compressor.contexts([row.tolist()])
        except ValueError as error:
            raise ValueError(f"{text.name}: {error}") from error


def warn_of_few(texts: Sequence[tuple[str, int, int]], compressor: Compressor) -> None:
    """Warns of a ratio that leaves texts, each a name, tokens and memory tokens, too few to answer from."""
    options = compressor.options
    few = [text for text in texts if text[2] < min(LEAST, text[1])]
    if few and options.any_ratio and getattr(options, "budget", None) is None:
        name, tokens, kept = few[0]
        more = f" and {len(few) - 1} more" if len(few) > 1 else ""
        warn(
            f"{name}{more}: {kept} memory tokens are too few to answer from; gistkit compress --ratio "
            f"{max(1, tokens // LEAST)} keeps more"
        )


def warn_of_sizes(texts: Sequence[tuple[str, int, int]], compressor: Compressor, kind: str = "text") -> None:
    """Warns of texts or images, as of `warn_of_few`, that have grown, and of texts of which too little is kept."""
    if kind == "text":
        warn_of_few(texts, compressor)
    grown = [name for name, tokens, kept in texts if kept > tokens]
    # At the ratio 1 only BOS is more.
    if grown and compressor.chunk > 1:
        more = f" and {len(grown) - 1} more" if len(grown) > 1 else ""
        unit = "an image" if kind == "image" else f"a chunk of up to {compressor.chunk} tokens"
        small = "small images" if kind == "image" else "short texts"
        warn(
            f"{grown[0]}{more}: the memory has more tokens than the {kind}; {unit} has "
            f"{compressor.memory_tokens} memory tokens, so {small} grow"
        )


class Total:
    """Sums over the memories written, of texts or images as `kind` says, by the compressor of a title."""

    def __init__(self, kind: str, title: str) -> None:
        self.kind, self.title = kind, title
        # (name, tokens, memory tokens) of each, and (tokens, memory tokens, others that are kept, bytes, full bytes).
        self.texts: list[tuple[str, int, int]] = []
        self._sizes: list[tuple[int, ...]] = []

    def add(self, text: Source, tokens: int, memory: Memory, parts: int) -> str:
        """Counts one memory and returns its line."""
        kept, uncompressed = memory.sizes[0], len(memory.rest[0])
        self._sizes.append((tokens, kept, uncompressed, *cache_bytes(memory)))
        self.texts.append((text.name, tokens, kept + uncompressed))
        remainder = f" and {uncompressed} kept as they are" if uncompressed else ""
        remainder += f", read in {parts} parts" if parts > 1 else ""
        remainder += ", more than it has" if kept + uncompressed > tokens else ""
        return f"{text.name} -> {text.target}: {tokens} tokens to {kept} memory tokens{remainder}"

    def line(self, seconds: float) -> str:
        tokens, kept, uncompressed, nbytes, full = map(sum, zip(*self._sizes, strict=True))
        count = f"{len(self.texts)} {self.kind}{'' if len(self.texts) == 1 else 's'}"
        remainder = f" and {uncompressed} kept as they are" if uncompressed else ""
        return (
            f"{count}: {tokens} tokens to {kept} memory tokens{remainder} ({self.title}); "
            f"{size(nbytes)}, the full cache has {size(full)} ({full / max(nbytes, 1):.1f}x); "
            f"{seconds:.1f} s, {tokens / seconds:.0f} tokens/s"
        )


def cache_bytes(memory: Memory) -> tuple[int, int]:
    """Bytes of keys and values of a memory and of its whole text; those of tokens after the window are in both."""
    rest = sum(map(len, memory.rest)) * memory.source.cache_width * memory.tensors[0].element_size()
    return memory.nbytes + rest, memory.full_cache_bytes + rest


def size(count: int) -> str:
    """Bytes for a reader, such as 1.2 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"
