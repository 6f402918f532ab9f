"""Compress a folder of texts into a store once, then ask any document by name.

python examples/ask_a_folder.py                      # three notes
python examples/ask_a_folder.py notes/ "What was decided?"
"""

import sys
import tempfile
from pathlib import Path

from gistkit.compress import Compressor
from gistkit.hf.smollm2 import load_smollm2
from gistkit_serve.store import Document, Store, compress_documents

NOTES = {
    "ferry.txt": "The ferry to Askoy leaves at 7:40 from pier 3. "
    "Tickets are sold by Ingrid Lund in the red kiosk.",
    "garden.txt": "The garden of the school was planted by Tomas Berg. "
    "Its oldest tree is a pear tree from 1911.",
    "museum.txt": "The museum of clocks opens on Sunday. "
    "Its director is Marta Silva, and a ticket costs 12 euros.",
}
QUESTIONS = {
    "ferry.txt": "Who sells the tickets?",
    "museum.txt": "Who is the director of the museum?",
}

with tempfile.TemporaryDirectory() as scratch:
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    else:
        folder = Path(scratch)
        for name, note in NOTES.items():
            (folder / name).write_text(note)
    paths = sorted(folder.glob("*.txt"))
    model, tokenizer = load_smollm2()
    # Notes of two sentences: a memory token for every two tokens.
    compressor = Compressor.from_pretrained("smollm2-avgpool-2x", model).eval()

    # A second run adds only new files, as `gistkit compress FOLDER -o STORE` does.
    documents = [
        Document(path.name, path.stat().st_size, path.read_text) for path in paths
    ]
    count = compress_documents(
        compressor, tokenizer, documents, Path(scratch) / "notes.store"
    )
    store = Store(Path(scratch) / "notes.store")
    states = sum(memory.lengths[0] for memory in store.values())
    print(f"{count} documents -> {states} memory tokens in {store}")

    asked = dict.fromkeys(store, sys.argv[2]) if len(sys.argv) > 2 else QUESTIONS
    for name, question in asked.items():
        answer = compressor.ask(store[name], question, max_new_tokens=12)
        print(f"{name}> {question}\n{answer}")
