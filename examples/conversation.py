"""Ask follow-up questions about one memory, and show the sources of answers.

python examples/conversation.py
"""

from pathlib import Path

from gistkit.ask import Conversation, sources
from gistkit.compress import Compressor
from gistkit.evaluate import QUESTION
from gistkit.hf.smollm2 import load_smollm2

text = (Path(__file__).parents[1] / "docs" / "report.txt").read_text()
model, tokenizer = load_smollm2()
compressor = Compressor.from_pretrained("smollm2-select-4x", model).eval()
conversation = Conversation(compressor, compressor.compress(text))

ids = tokenizer(text)["input_ids"]
for question in ("Who started the survey?", "When did the survey end?"):
    # The prompt template of training.
    prompt = tokenizer(QUESTION.format(question=question), add_special_tokens=False)
    answer = conversation.reply(prompt, max_new_tokens=12)
    words = tokenizer.decode(answer, skip_special_tokens=True).strip()
    print(f"> {question}\n{words}")
    # The passage of 16 tokens that the answer attended to most.
    passage = sources(conversation, count=1, length=16)[0]
    print(
        f"  from: ...{tokenizer.decode(ids[passage.start : passage.end])!r}... "
        f"({passage.share:.0%} of the attention)"
    )

print(
    f"{conversation.turns} turns: {len(conversation.text)} tokens "
    f"after {conversation.memory.sizes[0]} of memory"
)
