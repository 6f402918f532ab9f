"""`--embed`: a model of sentence-transformers, whose vectors say which documents of a store are near to a question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gistkit.common.hub import check_name, loading


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
    check_name("--embed", name)
    expected = "a model that sentence-transformers loads"
    with loading("--embed", expected, name, ImportError, AttributeError) as place:
        model = SentenceTransformer(place, device=device)
    # Language models often have none; what is padded counts for nothing.
    if getattr(model.tokenizer, "pad_token", "") is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token or model.tokenizer.bos_token
    return Embedder(name, model)
