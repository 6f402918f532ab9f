"""`gistkit compress`: texts or images in, memory files out."""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from gistkit.options.arguments import add_command, device, path, positive
from gistkit.options.messages import warn
from gistkit.options.models import add_compressor, add_model, chosen_compressor, load_model
from gistkit.options.outputs import check_file
from gistkit.options.texts import STDIN, Source, find_sources

if TYPE_CHECKING:
    from gistkit.compress import Compressor, Memory

EXAMPLES = """\
example: gistkit compress report.txt -o report.gist
example: gistkit compress notes/ --glob '**/*.md' -o memories/ --model ./llama --ratio 10
example: gistkit compress photo.png --model ./llava --compressor runs/voco/compressor
example: pdftotext paper.pdf - | gistkit compress - -o paper.gist --model ./llama --compressor runs/x500"""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(
        commands, "compress", _run, "compress texts or images once, into memories to ask many times", EXAMPLES
    )
    parser.set_defaults(words="texts")
    parser.add_argument(
        "texts", nargs="+", metavar="TEXT", help="text file, image, folder of either, or - for standard input"
    )
    parser.add_argument(
        "-o", "--out", type=path, help="memory file, or a folder for several (default: X.gist beside X.txt)"
    )
    parser.add_argument("--glob", default="**/*.txt", help="which files of a folder (default: %(default)s)")
    add_model(parser)
    add_compressor(parser)
    parser.add_argument(
        "--batch-tokens", type=positive, default=8192, help="most tokens encoded at a time, including padding; "
        "a longer text is encoded by itself, as images are (default: %(default)s)"
    )  # fmt: skip


def batches(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices of rows of similar length, longest first, at most `limit` tokens with padding in each batch."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        size = max(1, limit // max(lengths[order[0]], 1))
        yield order[:size]
        order = order[size:]


def _run(arguments: argparse.Namespace) -> int:
    device_name = device(arguments.device)
    if arguments.out is not None and str(arguments.out) == STDIN:
        check_file("-o", arguments.out)
    sources = find_sources(arguments.texts, arguments.glob, arguments.out)
    images = sources[0].is_image
    for source in sources:
        if source.is_image != images:
            raise ValueError(f"TEXT: expected texts alone or images alone, got {sources[0].name} and {source.name}")
        check_file("-o", source.target)
    texts = [] if images else [source.read() for source in sources]

    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name, images)
    compressor = chosen_compressor(arguments, model, tokenizer if images else None)
    if images:
        memories = _image_memories(sources, tokenizer, compressor)
    else:
        rows = [array("i", tokenizer(text, verbose=False)["input_ids"]) for text in texts]
        _check_lengths(sources, rows, compressor)
        memories = _text_memories(rows, compressor, arguments.batch_tokens)
    start = time.perf_counter()
    lines = [""] * len(sources)
    total = Total("image" if images else "text")
    # The progress bar ends before an error is told.
    with closing(memories):
        for index, tokens, memory in memories:
            memory.save(sources[index].target)
            lines[index] = total.add(sources[index], tokens, memory)
    print("\n".join(lines))
    print(total.line(len(sources), time.perf_counter() - start))
    total.warn_of_growth(compressor)
    return 0


def _text_memories(
    rows: Sequence[array[int]], compressor: Compressor, batch_tokens: int
) -> Generator[tuple[int, int, Memory]]:
    """(index, number of tokens, memory) of each text, those of similar lengths together."""
    import torch
    from tqdm import tqdm

    with torch.no_grad(), tqdm(total=sum(map(len, rows)), desc="compress", unit="token", unit_scale=True) as bar:
        for batch in batches([len(row) for row in rows], batch_tokens):
            memory = compressor.encode([rows[index].tolist() for index in batch])
            for place, index in enumerate(batch):
                yield index, len(rows[index]), memory[place]
                bar.update(len(rows[index]))


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


class Total:
    """Sums over the memories written, of texts or images as `kind` says."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.tokens = self.memory_tokens = self.nbytes = self.full = 0
        self.grown: list[str] = []

    def add(self, text: Source, tokens: int, memory: Memory) -> str:
        """Counts one memory and returns its line."""
        uncompressed = len(memory.rest[0])
        full = memory.full_cache_bytes
        self.tokens += tokens
        self.memory_tokens += memory.lengths[0]
        self.nbytes += memory.nbytes
        self.full += full
        remainder = f" and {uncompressed} kept as they are" if uncompressed else ""
        if memory.lengths[0] + uncompressed > tokens:
            self.grown.append(text.name)
            remainder += ", more than it has"
        return f"{text.name} -> {text.target}: {tokens} tokens to {memory.lengths[0]} memory tokens{remainder}"

    def warn_of_growth(self, compressor: Compressor) -> None:
        """Warns of texts or images that have grown."""
        if self.grown:
            more = f" and {len(self.grown) - 1} more" if len(self.grown) > 1 else ""
            unit = "an image" if self.kind == "image" else f"a chunk of up to {compressor.chunk} tokens"
            small = "small images" if self.kind == "image" else "short texts"
            warn(
                f"{self.grown[0]}{more}: the memory has more tokens than the {self.kind}; {unit} has "
                f"{compressor.memory_tokens} memory tokens, so that {small} grow"
            )

    def line(self, count: int, seconds: float) -> str:
        """The sums, as a line."""
        kind = self.kind if count == 1 else f"{self.kind}s"
        return (
            f"{count} {kind}: {self.tokens} tokens to {self.memory_tokens} memory tokens; "
            f"{size(self.nbytes)}, the full cache has {size(self.full)} ({self.full / max(self.nbytes, 1):.1f}x); "
            f"{seconds:.1f} s, {self.tokens / seconds:.0f} tokens/s"
        )


def size(count: int) -> str:
    """Bytes for a reader, such as 1.2 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"
