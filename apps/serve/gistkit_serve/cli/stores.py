"""What `gistkit compress` and `gistkit ask` do with stores: fill one, and answer from its documents."""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.cli.compress import size, warn_of_sizes
from gistkit.cli.named import Named, other_memories, readable
from gistkit.common.hub import check_name, loading
from gistkit.common.messages import refuse
from gistkit.options.messages import warn
from gistkit.options.models import chosen_compressor, load_model, memory_dtype
from gistkit.options.texts import read_text

if TYPE_CHECKING:
    from gistkit.common.processes import Processes
    from gistkit.compress import Compressor, Memory
    from gistkit_serve.store import Store
    from gistkit_serve.store.store import Entry


def open_store(folder: Path) -> Store:
    """The memories of a store by name."""
    from gistkit_serve.store import Store

    return Store(folder)


def document_memories(arguments: argparse.Namespace) -> Named:
    """Documents of a store, and then the memories of --with.

    Raises:
        ValueError, OSError: if one is not there or damaged.
    """
    from gistkit_serve.store import Store

    store = Store(arguments.memory)
    for name in arguments.documents:
        if name not in store:
            near = difflib.get_close_matches(name, store, n=3)
            hint = f"; there is {' and '.join(near)}" if near else ""
            raise ValueError(f"--document: expected one of {arguments.memory}, got {name!r}{hint}")
    names, memories = other_memories(arguments)
    documents = [f"{arguments.memory}, {name}" for name in arguments.documents]
    return documents + names, [store[name] for name in arguments.documents] + memories


def nearest_memories(arguments: argparse.Namespace, in_terminal: bool, device: str) -> NearestMemories | None:
    """What finds the documents of a store for each question; None where the memories are named.

    Raises:
        ValueError: if the arguments go with the other of both only, or the store has no such index.
        ImportError: if a package is missing.
    """
    from gistkit_serve.store import Store
    from gistkit_serve.store.store import is_store

    named, options = arguments.documents, {"--nearest": arguments.nearest, "--embed": arguments.embed}
    if not is_store(arguments.memory):
        if (folder := arguments.memory).is_dir():
            made = f"make one with gistkit compress {folder} -o {folder.name or 'notes'}.store"
            raise ValueError(f"{folder}: expected a memory, a text or a store, got a folder of other files; {made}")
        refuse("with a memory file", {"--document": (named and repr(named[0])) or None} | options)
        return None
    if named:
        refuse("with --document", options)
        return None
    store = Store(arguments.memory)
    for given, what in (
        (in_terminal, "a conversation"),
        (arguments.task != "qa", f"--task {arguments.task}"),
        (arguments.texts, "--text"),
    ):
        if given:
            raise ValueError(
                f"--document: expected one of the {len(store)} documents of {arguments.memory} for {what}, got none"
            )
    if not store:
        raise ValueError(f"{arguments.memory}: expected a store of documents, got one without any")
    embedder = None if arguments.embed is None else load_embedder(arguments.embed, device)
    return NearestMemories(store, arguments.nearest or 1, other_memories(arguments), embedder)


class NearestMemories:
    """Finds the documents of a store that are nearest to a question.

    Args:
        store: with at least one document.
        count: how many are read.
        others: read after them.
        embedder: a SentenceTransformer, which made the store's vectors; None: by words.

    Raises:
        ValueError: if the store has no such index, or another model made its vectors.
    """

    def __init__(self, store: Store, count: int, others: Named, embedder: Any = None) -> None:
        self.store, self.count, self.others, self.embedder = store, count, others, embedder
        kind = "words" if embedder is None else "vectors"
        try:
            index = store.index(kind)
        except FileNotFoundError as error:
            what, option = ("", "--index") if embedder is None else (" of vectors", "--embed MODEL")
            raise ValueError(
                f"{store.folder}: expected an index{what} of its documents or a --document, got none; "
                f"gistkit compress FOLDER -o STORE {option} adds one"
            ) from error
        if embedder is not None:
            try:
                index.check(embedder.encode_document)
            except ValueError as error:
                raise ValueError(f"--{error}") from error
        if left := len(store.unindexed(kind)):
            warn(f"{store.folder}: {left} of {len(store)} documents are not in its index")

    def any(self) -> Named:
        """A document of the store, which says who made it, and the others."""
        name = next(iter(self.store))
        return [f"{self.store.folder}, {name}", *self.others[0]], [self.store[name], *self.others[1]]

    def of(self, question: str, compressor: Compressor) -> Named:
        """The memories for a question, nearest document first; standard error says which they are.

        A document with tokens behind the compressor's window is read last. Where the compressor cannot join the
        documents, the nearest alone is read.

        Raises:
            ValueError: if no document has a word of the question, or a memory is damaged or of another compressor.
        """
        embed = None if self.embedder is None else self.embedder.encode_query
        found = self.store.nearest(question, self.count, embed=embed)
        if not found:
            raise ValueError(f"QUESTION: expected one with a word of some document, got {question!r:.80}")
        scores = dict(found)
        read = {name: self.store[name] for name in scores}
        names = sorted(read, key=lambda name: any(read[name].rest))
        ready = self._ready(compressor, names, read)
        if len(names) > 1:
            try:
                compressor.join(ready[1])
            except ValueError as error:
                warn(f"--nearest: {len(names)} documents cannot be read as one context ({error}); the nearest is")
                names = [found[0][0]]
                ready = self._ready(compressor, names, read)
        told = ", ".join(f"{name} ({scores[name]:.2f})" for name in names)
        print(f"nearest: {told}", file=sys.stderr, flush=True)
        return ready

    def _ready(self, compressor: Compressor, documents: list[str], read: dict[str, Memory]) -> Named:
        names = [f"{self.store.folder}, {name}" for name in documents] + self.others[0]
        return names, readable(compressor, names, [read[name] for name in documents] + self.others[1])


def load_embedder(name: str, device: str) -> Any:
    """The SentenceTransformer of `--embed`, which runs no code that comes with it.

    Raises:
        ImportError: if sentence-transformers is missing.
        ValueError, FileNotFoundError: if there is no such model.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError("sentence-transformers is missing; run pip install './apps/serve[embed]'") from error
    check_name("--embed", name)
    with loading("--embed", "a model that sentence-transformers loads", name, ImportError, AttributeError) as place:
        model = SentenceTransformer(place, device=device)
    # Language models often have none; what is padded counts for nothing.
    if getattr(model.tokenizer, "pad_token", "") is None:
        model.tokenizer.pad_token = model.tokenizer.eos_token or model.tokenizer.bos_token
    return model


def compress_folder(
    documents: dict[str, Path], arguments: argparse.Namespace, processes: Processes, device_name: str
) -> int:
    """Compresses the documents that a store does not have, this process's share of them; a status."""
    from tqdm import tqdm

    from gistkit_serve.store import Document, compress_documents, index_documents
    from gistkit_serve.store.nearest import word_counter

    if arguments.index:
        # What is missing is told before the work.
        word_counter()
    embedder = None if arguments.embed is None else load_embedder(arguments.embed, device_name)
    texts = [Document(name, path.stat().st_size, partial(read_text, path)) for name, path in documents.items()]
    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name)
    compressor = chosen_compressor(arguments, model)
    compressor.tokenizer = tokenizer
    start = time.perf_counter()
    seen: list[Entry] = []
    share = len(processes.share(texts))
    with tqdm(total=share, desc="compress", unit="document", disable=not processes.is_first) as bar:

        def count(entries: Sequence[Entry]) -> None:
            seen.extend(entries)
            bar.update(len(entries))

        new = compress_documents(
            compressor, tokenizer, texts, arguments.out, batch_tokens=arguments.batch_tokens,
            part=processes.index, parts=processes.count, on_batch=count,
            dtype=memory_dtype(arguments.memory_dtype, model),
        )  # fmt: skip
    ways = [None] if arguments.index else []
    for embed in ways if embedder is None else [*ways, embedder.encode_document]:
        name = "index" if embed is None else "embed"
        with tqdm(total=share, desc=name, unit="document", disable=not processes.is_first) as bar:
            index_documents(
                arguments.out, texts, embed=embed, part=processes.index, parts=processes.count, on_file=bar.update
            )
    tokens, memory_tokens = sum(entry.tokens for entry in seen), sum(entry.memory_tokens for entry in seen)
    who = f"process {processes.index} of {processes.count}: " if processes.count > 1 else ""
    print(
        f"{who}{len(seen)} documents in {arguments.out}, {new} of them new: {tokens} tokens to {memory_tokens} "
        f"memory tokens ({compressor.title}); {size(sum(entry.nbytes for entry in seen))}; "
        f"{time.perf_counter() - start:.1f} s"
    )
    warn_of_sizes([(entry.name, entry.tokens, entry.memory_tokens) for entry in seen], compressor)
    return 0
