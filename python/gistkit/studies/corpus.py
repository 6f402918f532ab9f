"""Text for the studies, as bytes or tokens: Python's own documentation by default, any file instead."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HELD_OUT = 0.1


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, bytes or token ids [n]; the held-out part is the last tenth of each document.

    Args:
        name: where the text comes from.
        digest: first 12 hexadecimal digits of the SHA-256 of all bytes, to tell one text from another.
        tokenizer: what made token ids of the text; None where they are its bytes.
    """

    name: str
    train: Tensor
    held_out: Tensor
    digest: str
    tokenizer: Any = None

    def text(self, row: Tensor) -> str:
        """The text of a row of tokens."""
        if self.tokenizer is not None:
            return self.tokenizer.decode(row.tolist())
        return bytes(row.tolist()).decode("utf-8", "replace")

    def chunks(self, length: int) -> Tensor:
        """The held-out text as consecutive chunks, int64 [n, length], in a fixed shuffled order."""
        count = self.held_out.numel() // length
        whole = self.held_out[: count * length].view(count, length).long()
        return whole[torch.randperm(count, generator=torch.Generator().manual_seed(7))]

    def batch(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """`rows` random training passages, int64 [rows, length]."""
        starts = torch.randint(0, self.train.numel() - length + 1, (rows, 1), generator=generator)
        return self.train[starts + torch.arange(length)].long()


def load_corpus(path: str | Path | None = None, *, chunk: int, tokenizer: Any = None) -> Corpus:
    """The text of a file, or of `pydoc_data.topics` (the standard library's English documentation).

    Args:
        path: a text file; None for the default.
        chunk: passage length in tokens that a study will cut; both parts must hold at least one passage.
        tokenizer: a transformers tokenizer; None: the tokens are the bytes.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the text is too short for one passage of `chunk` bytes in each part.
    """
    if path is None:
        from pydoc_data.topics import topics

        name, documents = "pydoc_data.topics", [topics[key].encode() for key in sorted(topics)]
    else:
        name, documents = Path(path).name, [Path(path).read_bytes()]
    cuts = [int(len(document) * (1 - HELD_OUT)) for document in documents]
    train = b"\n\n".join(document[:cut] for document, cut in zip(documents, cuts, strict=True))
    held_out = b"\n\n".join(document[cut:] for document, cut in zip(documents, cuts, strict=True))
    parts = [_tokens(data, tokenizer) for data in (train, held_out)]
    if min(map(len, parts)) < chunk:
        unit = "bytes" if tokenizer is None else "tokens"
        raise ValueError(
            f"text: expected at least {chunk} {unit} in the held-out tenth of {name}, got {len(parts[1])} "
            f"(and {len(parts[0])} to train on)"
        )
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()[:12]
    return Corpus(name, parts[0], parts[1], digest, tokenizer)


def _tokens(data: bytes, tokenizer: Any) -> Tensor:
    if tokenizer is None:
        return torch.tensor(list(data), dtype=torch.uint8)
    return torch.tensor(tokenizer(data.decode("utf-8", "replace"), verbose=False)["input_ids"], dtype=torch.int64)
