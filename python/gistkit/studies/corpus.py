"""Text for the studies, as bytes: Python's own documentation by default, any file instead."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.1


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text, uint8 bytes [n]; the held-out part is the last tenth of each document.

    Args:
        name: where the text comes from.
        digest: first 12 hexadecimal digits of the SHA-256 of all bytes, to tell one text from another.
    """

    name: str
    train: Tensor
    held_out: Tensor
    digest: str

    def chunks(self, length: int) -> Tensor:
        """The held-out text as consecutive chunks, int64 [n, length], in a fixed shuffled order."""
        count = self.held_out.numel() // length
        whole = self.held_out[: count * length].view(count, length).long()
        return whole[torch.randperm(count, generator=torch.Generator().manual_seed(7))]

    def batch(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """`rows` random training passages, int64 [rows, length]."""
        starts = torch.randint(0, self.train.numel() - length + 1, (rows, 1), generator=generator)
        return self.train[starts + torch.arange(length)].long()


def load_corpus(path: str | Path | None = None, *, chunk: int) -> Corpus:
    """The text of a file, or of `pydoc_data.topics` (the standard library's English documentation).

    Args:
        path: a text file; None for the default.
        chunk: passage length in bytes that a study will cut; both parts must hold at least one passage.

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
    if min(len(train), len(held_out)) < chunk:
        raise ValueError(
            f"text: expected at least {chunk} bytes in the held-out tenth of {name}, got {len(held_out)} "
            f"(and {len(train)} to train on)"
        )
    to_tensor = lambda data: torch.frombuffer(bytearray(data), dtype=torch.uint8)  # noqa: E731
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()[:12]
    return Corpus(name, to_tensor(train), to_tensor(held_out), digest)
