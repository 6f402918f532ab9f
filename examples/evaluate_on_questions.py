"""Measure answers from a memory, compared with no context and full context.

The other two rows are the model without the adapter, which learned to answer.

python examples/evaluate_on_questions.py             # docs/report.txt
python examples/evaluate_on_questions.py dev.jsonl   # SQuAD, DROP, or your own
"""

import sys
from pathlib import Path

from gistkit.compress import Compressor
from gistkit.evaluate import FullContext, NoContext, compare, load_questions
from gistkit.hf.smollm2 import load_smollm2

ANSWERS = {
    "Who started the survey?": "Ines Moreau",
    "Which pile is the worst?": "pile 27",
    "Who keeps the key of the tool shed?": "Olga Singh",
    "What is the access code of the harbor office?": "4471",
    "What is the budget of the repair?": "8200 dollars",
}

report = (Path(__file__).parents[1] / "docs" / "report.txt").read_text()
rows = [
    {"context": report, "question": question, "answers": [answer]}
    for question, answer in ANSWERS.items()
]
examples = load_questions(sys.argv[1] if len(sys.argv) > 1 else rows)

model, tokenizer = load_smollm2()
compressor = Compressor.from_pretrained("smollm2-select-4x", model).eval()
methods = {
    "no context": NoContext(model),
    "memory": compressor,
    "full context": FullContext(model),
}
table = compare(
    methods,
    examples,
    tokenizer=tokenizer,
    tasks=("qa",),
    max_new_tokens=10,
    progress=False,
)

print(f"{len(examples)} questions")
for row in table.rows:
    figures = row.metrics
    print(
        f"{row.method:12}: {figures['qa_contains_answer']:5.1f}% of answers right, "
        f"loss {figures['qa_loss']:.2f} nats a token, "
        f"cache {figures['cache_bytes'] / 2**20:.1f} MiB"
    )
