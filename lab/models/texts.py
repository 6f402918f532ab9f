"""The corpora of the trained compressors: token ids of the manuals' pages, and of those of another domain."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from text import OUT as TEXT
from text import write

from gistkit.hf.smollm2 import load_smollm2
from gistkit.train import Corpus, load_corpus
from gistkit.train.document_files import file_documents
from gistkit.train.documents import HELD

KEPT = TEXT.with_name("tokens.npz")


def manuals(tokenizer: Any = None) -> Corpus:
    """The manuals, of which a tenth of the pages is held out; pages are written first where none are there.

    Args:
        tokenizer: of transformers; None: SmolLM2's, whose token ids are kept beside the pages.
    """
    if not (TEXT / "text.json").exists():
        write()
    if tokenizer is not None:
        return load_corpus(TEXT / "manuals", tokenizer=tokenizer, progress=True)
    tokenizer = load_smollm2()[1]
    if KEPT.exists() and KEPT.stat().st_mtime > (TEXT / "text.json").stat().st_mtime:
        with np.load(KEPT) as arrays:
            train, held_out = (torch.from_numpy(arrays[name]) for name in ("train", "held_out"))
            return Corpus(str(arrays["name"]), train, held_out, str(arrays["digest"]), tokenizer)
    corpus = load_corpus(TEXT / "manuals", tokenizer=tokenizer, progress=True)
    np.savez(KEPT, train=corpus.train, held_out=corpus.held_out, name=corpus.name, digest=corpus.digest)
    return corpus


def held_out_pages() -> list[Path]:
    """The files of the manuals' held-out pages."""
    documents = file_documents(TEXT / "manuals").documents
    # They come before those to train on.
    return [Path(document.source) for document in takewhile(lambda document: document.part == HELD, documents)]


def training_pages() -> list[Path]:
    """The files of the others."""
    return sorted({*(TEXT / "manuals").rglob("*.txt")} - {*held_out_pages()})


def other_domain() -> Corpus:
    """The pages of another domain, none of which is trained on: all are held out."""
    corpus = load_corpus(TEXT / "other", tokenizer=load_smollm2()[1])
    whole = torch.cat([corpus.held_out, corpus.train])
    return Corpus(corpus.name, whole, whole, corpus.digest, corpus.tokenizer)
