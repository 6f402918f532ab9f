"""A folder of memories as vLLM reads them: a file each, safetensors, which any number of engines may share."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT, VERSION = "gistkit-vllm", 1
# What a served folder holds.
MEMORIES, READER, ADAPTER, SETTINGS, TEMPLATE = "memories", "reader", "adapter", "gistkit.json", "chat_template.jinja"
_CONFIGS = "config.json", "adapter_config.json"
_LONGEST = 200


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
    if not isinstance(name, str) or not (_file(name) and name.isprintable()) or {"", ".", ".."} & set(name.split("/")):
        raise ValueError(f"save: expected a name without parts that are empty, . or .., got {name!a:.80}")


def add(folder: Path, name: str, values: Tensor, replace: bool = True, **about: Any) -> About:
    """Writes a memory, in one move.

    Args:
        values: [layers, 2, tokens, heads, size], keys and values of the first tokens of a prompt.
        replace: whether in place of one of the same name.
        about: fields of `About`.

    Raises:
        FileExistsError: if there is one, and `replace` is false.
    """
    values = values.detach().cpu().contiguous()
    described = About(digest=digest(values), **about)
    path = path_of(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{secrets.token_hex(8)}.partial"
    header = {"format": FORMAT, "version": str(VERSION), "memory": json.dumps(asdict(described))}
    try:
        # With the rights that the user's files have: other users' engines may read them.
        partial.write_bytes(save({"values": values}, header))
        (os.replace if replace else os.link)(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return described


def about(folder: Path, name: object) -> tuple[About, tuple[int, ...]]:
    """What a memory's file says of itself, and the shape of its values.

    Raises:
        Missing: if there is none.
        ValueError: if its file is damaged or none of a memory.
    """
    with _opened(folder, name) as file:
        found, shape = _about(name, file), tuple(file.get_slice("values").get_shape())
    if len(shape) != 5:
        raise ValueError(
            f"memory {name!r}: expected keys and values [layers, 2, tokens, heads, size], got shape {list(shape)}, as "
            f"of an earlier gistkit's embeddings; export it again"
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


def _opened(folder: Path, name: object) -> Any:
    path = path_of(folder, name)
    if not path.is_file():
        raise Missing(f"memory: there is none of the name {name!r}")
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"memory {name!r}: expected a file of gistkit export, got a damaged one: {error}") from error


def _about(name: object, file: Any) -> About:
    header = file.metadata() or {}
    if header.get("format") != FORMAT or header.get("version") != str(VERSION) or "values" not in file.keys():  # noqa: SIM118
        raise ValueError(f"memory {name!r}: expected a file of gistkit export, version {VERSION}, got another")
    return About(**json.loads(header["memory"]))
