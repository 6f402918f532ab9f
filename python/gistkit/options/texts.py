"""The texts that a command reads, with the file that each result goes to."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

STDIN = "-"


@dataclass(frozen=True)
class Text:
    """One text: `name` is its origin, `target` the file of its memory."""

    name: str
    target: Path
    content: str


def read_texts(inputs: list[str], pattern: str, out: Path | None) -> list[Text]:
    """Reads every text that `inputs` name, in order.

    Args:
        inputs: files, folders, or "-" for standard input.
        pattern: which files of a folder, such as "**/*.txt".
        out: for one file, its memory or the folder of its memory; otherwise the folder of all memories, where those of
            a folder keep their relative paths. None: X.txt goes to X.gist beside it.

    Raises:
        FileNotFoundError: if an input is not there, or a folder has no such files.
        ValueError: for an empty text, one that is not UTF-8, or two memories with the same name.
    """
    for name in inputs:
        if not name.strip() or "\0" in name:
            raise ValueError(f"TEXT: expected a text file, a folder or -, got {name!r}")
    if inputs.count(STDIN) > 1:
        raise ValueError("TEXT: expected - once, got it again")
    folder = out is not None and (len(inputs) > 1 or Path(inputs[0]).is_dir() or out.is_dir())
    texts: list[Text] = []
    for name in inputs:
        if name == STDIN:
            if out is None:
                raise ValueError("-o: expected a file for the memory of standard input, got none")
            texts.append(Text("standard input", out / "stdin.gist" if folder else out, _read_stdin()))
            continue
        root = Path(name)
        for path in _files(root, pattern):
            target = path.with_suffix(".gist")
            if out is not None:
                target = out / target.relative_to(root if root.is_dir() else root.parent) if folder else out
            texts.append(Text(str(path), target, _read(path)))
    _check_targets(texts, inputs)
    return texts


def read_contents(inputs: list[str], pattern: str) -> list[str]:
    """The texts that `inputs` name, in order; arguments and errors are those of `read_texts`."""
    return [
        content
        for name in inputs
        for content in ([_read_stdin()] if name == STDIN else map(_read, _files(Path(name), pattern)))
    ]


def _files(root: Path, pattern: str) -> list[Path]:
    if not root.is_dir():
        if not root.exists():
            raise FileNotFoundError(f"{root}: expected a text file or a folder of them, got none there")
        if root.is_char_device() and root.resolve() != Path("/dev/null"):
            # Some have no end.
            raise ValueError(f"{root}: expected a text file or a folder of them, got a device")
        return [root]
    try:
        paths = sorted(path for path in root.glob(pattern) if path.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"--glob: expected a pattern such as '**/*.txt', got {pattern!r} ({error})") from error
    if not paths:
        raise FileNotFoundError(f"{root}: expected files that match {pattern!r}, got none; --glob says which to take")
    return paths


def _read(path: Path) -> str:
    return _decode(str(path), path.read_bytes())


def _read_stdin() -> str:
    return _decode("standard input", sys.stdin.buffer.read())


def decode(name: str, content: bytes) -> str:
    """UTF-8 text, without a byte order mark; a ValueError names what is not."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected UTF-8 text, got byte {content[error.start]:#x} at {error.start}") from error


def check_text(name: str, text: str) -> None:
    """Refuses a word of the command line that was not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: expected UTF-8 text, got {text!r:.80}") from error


def _decode(name: str, content: bytes) -> str:
    text = decode(name, content)
    if not text.strip():
        raise ValueError(f"{name}: expected a text to compress, got an empty one")
    return text


def _check_targets(texts: list[Text], inputs: list[str]) -> None:
    """Refuses targets that overwrite another memory or a text."""
    names_by_target: dict[Path, str] = {}
    sources = {Path(text.name).resolve() for text in texts}
    for text in texts:
        target = text.target.resolve()
        if target in names_by_target:
            raise ValueError(
                f"{text.name}: its memory would overwrite that of {names_by_target[target]}, {text.target}"
            )
        if target in sources:
            raise ValueError(f"-o: expected another file than the texts, got {text.target}")
        names_by_target[target] = text.name
