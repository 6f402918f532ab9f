"""Compress a text to a quarter of its tokens, then ask questions about it.

SmolLM2-135M answers, with the trained compressor that comes with gistkit.

python examples/ask_a_text.py                        # docs/report.txt
python examples/ask_a_text.py notes.txt "Who signed it?"
"""

import sys
import time
from pathlib import Path

from gistkit.compress import Compressor
from gistkit.hf.smollm2 import load_smollm2

REPORT = Path(__file__).parents[1] / "docs" / "report.txt"
QUESTIONS = [
    "Who started the survey?",
    "When did the survey end?",
    "Who keeps the key of the tool shed?",
]

text = Path(sys.argv[1]).read_text() if len(sys.argv) > 1 else REPORT.read_text()
questions = sys.argv[2:] or QUESTIONS

model, tokenizer = load_smollm2()
compressor = Compressor.from_pretrained("smollm2-select-4x", model).eval()

start = time.perf_counter()
memory = compressor.compress(text)
print(f"{memory.context_lengths[0]} tokens -> {memory.sizes[0]} memory tokens")

# Only the memory is read from here on.
for question, answer in zip(
    questions, compressor.ask(memory, questions, max_new_tokens=12), strict=True
):
    print(f"> {question}\n{answer}")
print(f"{time.perf_counter() - start:.1f} s")
