"""Use a method with your own model, your own LoRA and your own training loop.

python examples/your_own_model.py                    # GistPool
python examples/your_own_model.py icae               # or x500, gist, avgpool
"""

import sys
import tempfile

import torch
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from gistkit.compress import METHODS, Compressor
from gistkit.train import load_corpus

method = METHODS[sys.argv[1] if len(sys.argv) > 1 else "gistpool"]
torch.manual_seed(0)
shape = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=257, bos_token_id=256, eos_token_id=None, **shape)
)

# The base model is frozen; the adapter and the method's memory tokens train.
lora = LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
)
# icae and x500 compress one chunk at a time
chunks = {"chunk": 64} if "chunk" in method.config_class.names() else {}
compressor = method(model, ratio=4, lora=lora, losses=("ae", "lm"), **chunks)
trained = sum(parameter.numel() for _, parameter in compressor.trainable())
whole = sum(parameter.numel() for parameter in compressor.parameters())
print(f"{compressor.method}: {trained:,} of {whole:,} parameters train")

corpus, generator = load_corpus(), torch.Generator().manual_seed(0)
optimizer = torch.optim.AdamW(compressor.parameter_groups(1e-2))
for step in range(1, 31):
    text = corpus.batch(8, 96, generator)
    losses = compressor(text[:, :64], continuation_ids=text[:, 64:])
    losses["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 or step % 10 == 0:
        print(
            f"step {step:2}: "
            + ", ".join(
                f"{name} {value.item():.3f}" for name, value in losses.items()
            )
        )

with tempfile.TemporaryDirectory() as folder:
    compressor.save_pretrained(folder)
    memory = Compressor.from_pretrained(folder, model).eval().encode(text[:1, :64])
    print(
        f"saved and loaded: {memory.context_lengths[0]} tokens -> "
        f"{memory.lengths[0]} memory tokens"
    )
