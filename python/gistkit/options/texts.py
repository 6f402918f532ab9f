"""The texts and images that a command reads, and the output file of each."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gistkit.options.messages import warn

STDIN = "-"
# Default patterns of text files in a folder: for a store, and for memories beside their texts.
TEXTS, TEXT_FILES = ("**/*.txt", "**/*.md"), "**/*.txt"

# How the names of images end.
PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Source:
    """A text or an image: `name` is its origin, `target` its memory file, `path` None for standard input."""

    name: str
    target: Path
    path: Path | None

    @property
    def is_image(self) -> bool:
        """Whether it is an image, by its file extension."""
        return self.path is not None and is_picture(self.path)

    def read(self) -> str:
        """The text; a ValueError if it is empty or not UTF-8."""
        return read_content(STDIN) if self.path is None else read_text(self.path)


def is_picture(path: Path) -> bool:
    """Whether a file is an image, by its extension."""
    return path.suffix.lower() in PICTURES


def find_sources(inputs: list[str], pattern: str, out: Path | None) -> list[Source]:
    """Finds every text and image that `inputs` name, in order.

    Args:
        inputs: files, folders, or "-" for standard input.
        pattern: which files of a folder, such as "**/*.txt".
        out: for one input file, the memory file or its folder; otherwise the folder of all memories. Files of an input
            folder keep their relative paths there. None: X.txt goes to X.gist beside it.
    """
    for name in inputs:
        if not name.strip() or "\0" in name:
            raise ValueError(f"TEXT: expected a text file, a folder or -, got {name!r}")
    if inputs.count(STDIN) > 1:
        raise ValueError("TEXT: - (standard input) may be given only once")
    folder = out is not None and (len(inputs) > 1 or Path(inputs[0]).is_dir() or out.is_dir())
    sources: list[Source] = []
    for name in inputs:
        if name == STDIN:
            if out is None:
                raise ValueError("-o: expected a file name for the memory of standard input; give one with -o FILE")
            sources.append(Source("standard input", out / "stdin.gist" if folder else out, None))
            continue
        root = Path(name)
        for path in _files(root, pattern):
            target = path.with_suffix(".gist")
            if out is not None:
                target = out / target.relative_to(root if root.is_dir() else root.parent) if folder else out
            sources.append(Source(str(path), target, path))
    _check_targets(sources)
    return sources


def folder_texts(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """The files of a folder by their relative path, sorted; hidden folders are skipped."""
    found: dict[str, Path] = {}
    for pattern in patterns:
        try:
            paths = [path for path in folder.glob(pattern) if path.is_file()]
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"--glob: expected a pattern such as '**/*.txt', got {pattern!r} ({error})") from error
        for path in paths:
            name = path.relative_to(folder)
            if not any(part.startswith(".") for part in name.parts):
                found[name.as_posix()] = path
    if not found:
        shown = " or ".join(map(repr, patterns))
        raise FileNotFoundError(f"{folder}: no file matches {shown}; choose other files with --glob")
    return dict(sorted(found.items()))


def read_text(path: Path) -> str:
    """The text of a file; a ValueError if it is empty or not UTF-8, or no file."""
    # Some devices never end.
    if path.is_dir() or (path.is_char_device() and path.resolve() != Path("/dev/null")):
        raise ValueError(f"{path}: expected a text file, got {'a folder' if path.is_dir() else 'a device'}")
    return _decode(str(path), path.read_bytes())


def read_content(name: str) -> str:
    """`read_text`, or for "-" that of standard input."""
    return _decode("standard input", sys.stdin.buffer.read()) if name == STDIN else read_text(Path(name))


def read_contents(inputs: list[str], pattern: str) -> list[str]:
    """Reads the texts that `inputs` name, in order; arguments and errors as in `find_sources`."""
    files = ([name] if name == STDIN else map(str, _files(Path(name), pattern)) for name in inputs)
    return [read_content(name) for names in files for name in names]


def _files(root: Path, pattern: str) -> list[Path]:
    if not root.exists():
        raise FileNotFoundError(f"{root}: no such file or folder")
    return list(folder_texts(root, (pattern,)).values()) if root.is_dir() else [root]


def decode(name: str, content: bytes) -> str:
    """Decodes UTF-8 without a byte order mark; a ValueError names the first bad byte."""
    # Some PDFs are valid UTF-8.
    if content.startswith(b"%PDF-"):
        raise ValueError(f"{name}: expected a text, got a PDF; convert it with pdftotext first")
    if content.startswith(b"PK\3\4"):
        raise ValueError(f"{name}: expected a text, got an archive, such as a .docx; convert it with pandoc -t plain")
    if is_memory(content):
        raise ValueError(f"{name}: expected a text, got a memory file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: expected UTF-8 text, got byte {content[error.start]:#x} at {error.start}; convert it with iconv"
        ) from error


def is_memory(start: bytes) -> bool:
    """Whether a file that begins so is a memory: with a length of eight bytes and an object of JSON."""
    return b"\0" in start[:8] and start[8:9] == b"{"


def check_text(name: str, text: str) -> None:
    """Refuses a command-line word that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: expected UTF-8 text, got {text!r:.80}") from error


def _decode(name: str, content: bytes) -> str:
    text = decode(name, content)
    if not text.strip():
        raise ValueError(f"{name}: the text is empty")
    if re.match(r"\s*<(!doctype\s+html|html)\b", text, re.IGNORECASE):
        warn(f"{name}: the text is HTML, and its tags are read too; convert it first, for example with pandoc -t plain")
    return text


def _check_targets(sources: list[Source]) -> None:
    """Refuses targets that would overwrite another memory or a text."""
    names_by_target: dict[Path, str] = {}
    paths = {source.path.resolve() for source in sources if source.path is not None}
    for source in sources:
        target = source.target.resolve()
        if target in names_by_target:
            raise ValueError(
                f"{source.name}: its memory would overwrite that of {names_by_target[target]}, {source.target}"
            )
        if target in paths:
            raise ValueError(f"-o: the memory would overwrite the text {source.target}; give another file")
        names_by_target[target] = source.name
