"""Use transformers' `generate` over a memory: as a KV cache, and in a pipeline.

python examples/generate_with_transformers.py
"""

from pathlib import Path

from transformers import TextStreamer, pipeline

from gistkit.ask import register_pipeline
from gistkit.compress import Compressor
from gistkit.evaluate import QUESTION
from gistkit.hf.smollm2 import load_smollm2

text = (Path(__file__).parents[1] / "docs" / "report.txt").read_text()
model, tokenizer = load_smollm2()
# transformers' cache holds the same number of tokens for each head;
# smollm2-select-4x keeps different numbers.
compressor = Compressor.from_pretrained("smollm2-avgpool-2x", model).eval()
memory = compressor.compress(text)

prompt = tokenizer(
    QUESTION.format(question="Who started the survey?"),
    add_special_tokens=False,
    return_tensors="pt",
)
cache = compressor.to_cache(memory, task="qa")
print(
    f"{memory.context_lengths[0]} tokens -> a cache of {memory.lengths[0]} states; "
    "model.generate streams:"
)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
with compressor.using(compressor.reader):  # the adapter that reads the memory
    # named past_key_values before transformers 5.24
    model.generate(**prompt, cache=cache, max_new_tokens=12, streamer=streamer)

register_pipeline()
pipe = pipeline(
    "gist-text-generation", model=model, tokenizer=tokenizer, compressor=compressor
)
print(
    pipe(
        text,
        questions=["When did the survey end?"],
        template=QUESTION,
        max_new_tokens=12,
    )
)
