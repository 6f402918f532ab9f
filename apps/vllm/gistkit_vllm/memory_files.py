"""A folder of memories as vLLM reads them: a file each, safetensors, which any number of engines may share."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT, VERSION = "gistkit-vllm", 1
# What a served folder holds.
MEMORIES, READER, ADAPTER, SETTINGS, TEMPLATE = "memories", "reader", "adapter", "gistkit.json", "chat_template.jinja"
_CONFIGS = "config.json", "adapter_config.json"
_LONGEST = 200
_LENGTH = f"of 1 to {_LONGEST} characters, counted as in a URL (ä is %C3%A4)"
_PARTIAL = ".partial"
# Seconds after its last change that a partial file is of an engine that was killed.
_STALE = 3600


@dataclass(frozen=True)
class About:
    """What a request must know of a memory.

    Args:
        tokens: memory tokens, with the task token.
        context_tokens: tokens of the text that they stand for.
        placeholder, text: id and text of the token that stands for each of them in a prompt.
        digest: SHA-256 of the values.
        reader: what reads it, `reader` of the settings beside its weights.
        source: of a memory that an engine saved, what tells its prompt from others.
    """

    tokens: int
    context_tokens: int
    placeholder: int
    text: str
    digest: str
    reader: str
    source: str = ""


class Missing(LookupError):
    """There is no memory of this name."""


class Damaged(ValueError):
    """The file of a memory was cut, or is none of safetensors."""


def path_of(folder: Path, name: object) -> Path:
    """The file of a memory.

    Raises:
        Missing: for what is no name.
    """
    if not (file := _file(name)):
        raise Missing(f"memory: expected the name of one, got {name!a:.80}")
    return folder / f"{file}.safetensors"


def check_new(name: object) -> None:
    """Raises ValueError for a name that no client may give to a memory."""
    if not isinstance(name, str) or {"", ".", ".."} & set(name.split("/")):
        raise ValueError(f"save: expected a name without parts that are empty, . or .., got {name!a:.80}")
    if not name.isprintable():
        raise ValueError(f"save: expected a name of characters that can be printed, got {name!a:.80}")
    if not _file(name):
        raise ValueError(f"save: expected a name {_LENGTH}, got {name!a:.80}")


def add(folder: Path, name: str, values: Tensor, replace: bool = True, **about: Any) -> About:
    """Writes a memory, in one move.

    Args:
        values: [layers, 2, tokens, heads, size], keys and values of the first tokens of a prompt.
        replace: whether in place of one of the same name; a damaged one is always replaced.
        about: fields of `About`.

    Raises:
        FileExistsError: if there is one, and `replace` is false.
        ValueError: if the name is too long for a file.
        OSError: if the file cannot be written.
    """
    if not _file(name):
        raise ValueError(f"memory: expected a name {_LENGTH}, got {name!a:.80}")
    values = values.detach().cpu().contiguous()
    described = About(digest=digest(values), **about)
    path = path_of(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    header = {"format": FORMAT, "version": str(VERSION), "memory": json.dumps(asdict(described))}
    # safetensors writes beside the file that it is told, under a name of its own.
    with TemporaryDirectory(_PARTIAL, ".", folder, ignore_cleanup_errors=True) as private:
        partial = Path(private) / path.name
        partial.touch()
        # The rights that the user's files have, which safetensors does not give: other users' engines may read them.
        rights = stat.S_IMODE(partial.stat().st_mode)
        try:
            save_file({"values": values}, partial, header)
        except SafetensorError as error:
            raise OSError(f"{path}: expected a file that can be written, got {error}") from error
        partial.chmod(rights)
        with partial.open("rb") as file:
            # On the disk before it has its name.
            os.fsync(file.fileno())
        if replace or _is_damaged(folder, name):
            os.replace(partial, path)
        else:
            _claim(partial, path)
    return described


def remove_partials(folder: Path) -> None:
    """Removes what killed engines left half written; other engines may be writing theirs."""
    for path in folder.glob(f".*{_PARTIAL}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def about(folder: Path, name: object) -> tuple[About, tuple[int, ...]]:
    """What a memory's file says of itself, and the shape of its values.

    Raises:
        Missing: if there is none.
        Damaged: if its file is cut.
        ValueError: if its file is none of a memory.
    """
    with _opened(folder, name) as file:
        found, shape = _about(name, file), tuple(file.get_slice("values").get_shape())
    if len(shape) != 5 or shape[2] != found.tokens:
        raise ValueError(
            f"memory {name!r}: expected keys and values [layers, 2, {found.tokens} tokens, heads, size], got shape "
            f"{list(shape)}, as of an earlier gistkit's embeddings; export it again"
        )
    return found, shape


def values(folder: Path, name: str, expected: str) -> Tensor:
    """The values of a memory whose digest is `expected`; errors as `about`."""
    with _opened(folder, name) as file:
        found: Tensor = file.get_tensor("values")
    if digest(found) != expected:
        raise ValueError(f"memory {name!r}: expected values of digest {expected}, got others: changed or damaged")
    return found


def digest(values: Tensor) -> str:
    """SHA-256 of shape, dtype and values."""
    total = hashlib.sha256(f"{values.dtype} {tuple(values.shape)} ".encode())
    content: Any = values.flatten().view(torch.uint8).numpy()
    total.update(content)
    return total.hexdigest()


def reader_of(folder: str | os.PathLike[str]) -> str | None:
    """What `gistkit export` says of the weights in a folder; None: it did not write them."""
    try:
        content = json.loads((Path(folder) / SETTINGS).read_text())
    except FileNotFoundError:
        return None
    return str(content["reader"])


def weights_of(folder: str | os.PathLike[str]) -> str:
    """16 hex digits of a model's or an adapter's files, from 256 pieces of each.

    Raises:
        ValueError: if there are no weights.
    """
    files = sorted(path for path in Path(folder).iterdir() if path.suffix == ".safetensors" or path.name in _CONFIGS)
    if all(path.name in _CONFIGS for path in files):
        raise ValueError(f"model: expected weights in safetensors files, got none in {folder}")
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name} {(size := path.stat().st_size)} ".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(size // 256, 64)):
                file.seek(start)
                total.update(file.read(64))
    return total.hexdigest()[:16]


def _file(name: object) -> str:
    """A name as a file's, without its ending; empty for what is no name."""
    # Halves of surrogate pairs are no characters of a name.
    file = quote(name, safe=" ", errors="replace") if isinstance(name, str) else ""
    return file if len(file) <= _LONGEST else ""


def _is_damaged(folder: Path, name: object) -> bool:
    try:
        _opened(folder, name)
    except Damaged:
        return True
    except Missing:
        pass
    return False


def _claim(partial: Path, path: Path) -> None:
    """Moves a file to a place where there is none."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # Some disks have no links; until the move, the name is that of a damaged file.
        path.open("xb").close()
        os.replace(partial, path)


def _opened(folder: Path, name: object) -> Any:
    path = path_of(folder, name)
    if not path.is_file():
        raise Missing(f"memory: there is none of the name {name!r}")
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise Damaged(f"memory {name!r}: expected a file of gistkit export, got a damaged one: {error}") from error


def _about(name: object, file: Any) -> About:
    header = file.metadata() or {}
    if header.get("format") != FORMAT or header.get("version") != str(VERSION) or "values" not in file.keys():  # noqa: SIM118
        raise ValueError(f"memory {name!r}: expected a file of gistkit export, version {VERSION}, got another")
    try:
        return About(**json.loads(header["memory"]))
    except (KeyError, TypeError, ValueError) as error:
        # A later release may have more to say.
        raise ValueError(f"memory {name!r}: expected fields of this release, got others: {error}") from error
