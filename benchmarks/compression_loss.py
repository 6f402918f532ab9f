"""Peak memory of training SmolLM2-135M with the compression loss at 15x: 1530 tokens, 102 memory tokens, V = 49152.

Each case runs in a fresh process: a warm-up step, then one step of forward, backward and AdamW. Counted is what
is resident above the loaded model. Linux only. Target: 2 GiB with gradient checkpointing or in bfloat16.
"""

from __future__ import annotations

import gc

import harness
import torch
from compressor import load
from memory import reset_peak, status
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from gistkit.compress import FiveHundredX
from gistkit.compress.losses import CompressionHead

CHUNK, RATIO = 1530, 15
# Head, dtype, gradient checkpointing.
CASES = [
    ("a head an offset", "float32", True),
    ("a head an offset", "float32", False),
    ("a head an offset", "bfloat16", False),
    ("a head an offset, all logits at once", "float32", True),
    ("one joint head", "float32", True),
]


class AllAtOnce(CompressionHead):
    """The loss as it is usually written: every logit alive."""

    def forward(self, hidden, weight, targets, softcap=None):
        projected = self.projection(hidden.to(self.projection.weight.dtype)).unflatten(-1, (self.offsets, -1))
        logits = (projected.to(weight.dtype) @ weight.T).float()
        return cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100)


def measure(head: str, dtype: str, checkpointing: bool) -> float:
    """MiB above the loaded model at the peak of a training step."""
    torch.manual_seed(0)
    model = load(getattr(torch, dtype))
    gc.collect()
    before = status("VmRSS")
    compressor = FiveHundredX(
        model, chunk=CHUNK, ratio=RATIO, losses=("compression",), lora=128, joint_head=head == "one joint head"
    ).train()
    if "all logits" in head:
        compressor.compression_head = AllAtOnce(model.config.hidden_size, RATIO)
    if checkpointing:
        compressor.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([parameter for _, parameter in compressor.trainable()], lr=1e-4)
    ids = torch.randint(0, 49152, (1, CHUNK))
    for step in range(2):
        if step:
            reset_peak()
        optimizer.zero_grad()
        compressor(ids)["loss"].backward()
        optimizer.step()
    return (status("VmHWM") - before) / 2**20


def main() -> None:
    """Measures every case and keeps them where asked."""
    options = harness.parser(__doc__, "python benchmarks/compression_loss.py", apart=True).parse_args()
    if harness.measured_here(options, measure):
        return
    found, rows = harness.begin("compression_loss", options), []
    for head, dtype, checkpointing in tqdm(CASES[:1] if options.quick else CASES, unit="case"):
        mib = harness.measured_apart(options, head, dtype, checkpointing)
        rows.append({"head": head, "dtype": dtype, "checkpointing": checkpointing, "mib": mib})
        tqdm.write(f"{head}, {dtype}{', checkpointed' if checkpointing else ''}: {mib:.0f} MiB")
    harness.write("compression_loss", {"machine": found, "mebibytes": rows}, options)


if __name__ == "__main__":
    main()
