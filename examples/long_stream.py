"""Read a long text with a small cache: recent tokens, and a compressed past.

    python examples/long_stream.py                       # 2,000 tokens
    python examples/long_stream.py 8000

The past is kept as means or as nuggets. The model is small and has random weights;
the sizes of the caches do not depend on them.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gistkit.compress import AvgPool, Compressive, Dodo, MixedResolution
from gistkit.train import load_corpus

count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
torch.manual_seed(0)
shape = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
config = LlamaConfig(
    vocab_size=257, bos_token_id=256, max_position_embeddings=count + 200, **shape
)
text = load_corpus().train[: count + 50].long()[None]

means = Compressive(
    AvgPool(LlamaForCausalLM(config), ratio=8).eval(), tau=128, segment=32
)
nuggets = MixedResolution(
    Dodo(LlamaForCausalLM(config), ratio=8, layer=1).eval(), tau=128, segment=32
)
# Sets the score threshold so that one token in 8 is a nugget.
nuggets.calibrate([text[:, :500]])

for name, reader in (("means of 8 tokens", means), ("one token in 8", nuggets)):
    print(f"the last 128 to 159 tokens, and of the past {name}:")
    # The beginning is read in one pass, the rest token by token.
    for begin in (count // 4, count):
        stream = reader.start(text[:, :begin])
        for token in text[0, begin : begin + 50]:
            stream.step(token[None])
        read = begin + 50
        print(
            f"  {read:5} tokens read: {stream.states[0]:4} states a layer, "
            f"{stream.nbytes / 1024:.0f} KiB in all"
        )
full = 2 * config.num_hidden_layers * (count + 51) * config.hidden_size * 4
print(
    f"the plain model's cache: {count + 51} states a layer, {full / 1024:.0f} KiB"
)
