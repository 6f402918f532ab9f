"""Stores: the memories of a corpus by name, made by any number of processes.

    from gistkit_serve.store import Document, Store, compress_documents, index_documents

    documents = [Document(path.name, path.stat().st_size, path.read_text) for path in Path("notes").glob("*.md")]
    compress_documents(compressor, tokenizer, documents, "notes.store")
    memory = Store("notes.store")["march.md"]
    index_documents("notes.store", documents)
    ((name, score),) = Store("notes.store").nearest("What was decided in spring?")

`gistkit compress FOLDER -o STORE --index` does the same. Under `accelerate launch` every process calls
`compress_documents` and `index_documents` with its `part` of `parts`.
"""

from gistkit_serve.store.documents import Document, compress_documents
from gistkit_serve.store.indexing import index_documents
from gistkit_serve.store.store import Entry, Store

__all__ = ["Document", "Entry", "Store", "compress_documents", "index_documents"]
