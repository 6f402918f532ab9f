"""Train a compressor on your own text, with a callback; stop, resume, and load it.

    python examples/train_on_your_text.py                # Python's documentation
    python examples/train_on_your_text.py book.txt 2000

The model is small and has random weights, so that it learns something in seconds.
Replace it by `AutoModelForCausalLM.from_pretrained(...)` and its tokenizer.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from gistkit import train
from gistkit.compress import Compressor

text = sys.argv[1] if len(sys.argv) > 1 else None
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
torch.manual_seed(0)
shape = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, bos_token_id=None, eos_token_id=None, **shape)
)


class Report(TrainerCallback):
    """Prints evaluations, and the step that a run starts at."""

    def on_train_begin(self, args, state, control, **_):
        print(f"step {state.global_step} of {state.max_steps}")

    def on_evaluate(self, args, state, control, metrics, **_):
        print(
            f"  after {state.global_step:3} steps: "
            f"held-out loss {metrics['eval_loss']:.3f} nats a byte"
        )


with tempfile.TemporaryDirectory() as out:
    options = {
        "method": "x500",
        "compressor": {"chunk": 40, "ratio": 5, "lora": None, "losses": ("ae",)},
        "text": text,
        "eval_every": max(1, steps // 3),
        "callbacks": [Report()],
        "progress": False,
    }
    recipe = {
        "batch": 16,
        "min_length": 80,
        "max_length": 80,
        "learning_rate": 2e-3,
        "warmup": 5,
    }
    # With a tracker: track="tensorboard", or "wandb".
    train.run(model, None, out, recipe={**recipe, "steps": steps // 2}, **options)
    result = train.run(
        model, None, out, recipe={**recipe, "steps": steps}, resume=True, **options
    )
    kept = len(list(Path(out).glob("checkpoint-*")))
    print(f"{result.steps} steps, {result.seconds:.0f} s; {kept} checkpoints")
    trained = Compressor.from_pretrained(Path(out) / "compressor", model).eval()
    memory = trained.encode([list(b"A compressor keeps few tokens of a text.")])
    print(f"{memory.context_lengths[0]} bytes -> {memory.lengths[0]} memory tokens")
