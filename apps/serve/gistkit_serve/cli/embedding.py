"""`--embed`: a model of sentence-transformers, whose vectors say which documents of a store are near to a question."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Embedder:
    """What makes the vectors of documents and of questions, which some models tell apart.

    Args:
        name: as on the command line.
        model: a SentenceTransformer.
    """

    name: str
    model: Any

    def documents(self, texts: list[str]) -> Any:
        """[N, D] of N parts of documents."""
        return self.model.encode_document(texts, show_progress_bar=False)

    def questions(self, texts: list[str]) -> Any:
        """[N, D] of N questions."""
        return self.model.encode_query(texts, show_progress_bar=False)


def load_embedder(name: str, device: str) -> Embedder:
    """The model of `--embed`, which runs no code that comes with it.

    Raises:
        ImportError: if sentence-transformers is missing.
        ValueError, FileNotFoundError: if there is no such model.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError("sentence-transformers is missing; run pip install './apps/serve[embed]'") from error
    folder = Path(name).expanduser()
    if not folder.is_dir() and (folder.is_file() or name.startswith(("/", "./", "../", "~"))):
        raise FileNotFoundError(f"--embed: expected a folder with a model, found none at {name}")
    try:
        model = SentenceTransformer(str(folder), device=device)
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        reason = str(error).strip().splitlines() or [repr(error)]
        raise ValueError(
            f"--embed: expected a model that sentence-transformers loads, got {name!r}: {reason[0]}"
        ) from error
    # Language models often have none; what is padded counts for nothing.
    if getattr(model.tokenizer, "pad_token", "") is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token or model.tokenizer.bos_token
    return Embedder(name, model)
