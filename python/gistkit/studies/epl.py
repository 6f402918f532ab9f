"""Study `epl`: one small autoencoder under several position layouts, trained from scratch on bytes.

A Llama of 0.4M parameters compresses 80 bytes into 16 memory tokens (ICAE carrier) and reconstructs them. Only the
position ids differ between the runs of a seed (Position IDs Matter, Tables 1-3 and the AE-loss curves).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from gistkit.compress import ICAE, Compressor, token_loss
from gistkit.hf import attach
from gistkit.studies import checkpoint
from gistkit.studies.corpus import Corpus
from gistkit.studies.tracking import measure_tracking, memory_attention

GOAL = 1.0


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run but its layout and seed."""

    steps: int = 450
    chunk: int = 80
    ratio: int = 5
    batch: int = 16
    learning_rate: float = 2e-3
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 25
    eval_chunks: int = 64
    final_chunks: int = 1000
    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 2
    heads: int = 4
    rope_theta: float = 1e4


@dataclass
class Run:
    """What one layout and seed gave. Losses are held-out, in nats a byte.

    `curve` holds (step, loss, accuracy) over the recipe's `eval_chunks`; `loss` and `accuracy` are those of the trained
    model over `final_chunks`.
    """

    layout: str
    seed: int
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    loss: float = float("nan")
    accuracy: float = float("nan")
    greedy_accuracy: float = float("nan")
    seconds: float = 0.0
    parameters: int = 0
    passage: dict[str, str] = field(default_factory=dict)
    tracking: list[dict[str, float]] = field(default_factory=list)
    attention: list[list[list[float]]] = field(default_factory=list)

    @property
    def steps_to_goal(self) -> int | None:
        """First evaluated step with a held-out loss of at most 1.0; None if it was not reached."""
        return next((step for step, loss, _ in self.curve if loss <= GOAL), None)


def build_compressor(recipe: Recipe, layout: str, seed: int) -> Compressor:
    """The untrained model of a seed: the same weights whatever the layout."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * recipe.layers) ** -0.5)
    return ICAE(model, chunk=recipe.chunk, ratio=recipe.ratio, layout=layout)


def build_optimizer(recipe: Recipe, compressor: Compressor) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone."""
    parameters = list(compressor.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))


@torch.no_grad()
def evaluate(compressor: Compressor, chunks: Tensor, *, batch: int = 64) -> tuple[float, float]:
    """Held-out (loss in nats a byte, accuracy) of teacher-forced reconstruction."""
    head = compressor.model.get_output_embeddings()
    loss = correct = 0.0
    for rows in chunks.split(batch):
        hidden = compressor.decode(compressor.encode(rows), "ae", rows[:, :-1])
        loss += float(token_loss(hidden, head.weight, rows)) * rows.numel()
        correct += float((head(hidden).argmax(-1) == rows).sum())
    return loss / chunks.numel(), correct / chunks.numel()


def train(
    recipe: Recipe, layout: str, seed: int, corpus: Corpus, out: Path, *, device: str, resume: bool, bar: Any
) -> Run:
    """Trains and measures one layout and seed; `out` keeps its state at every evaluation, so it can be resumed."""
    compressor = build_compressor(recipe, layout, seed).to(device)
    optimizer = build_optimizer(recipe, compressor)
    generator = torch.Generator().manual_seed(1000 + seed)
    chunks = corpus.chunks(recipe.chunk)[: recipe.final_chunks].to(device)
    run = Run(layout, seed, parameters=sum(p.numel() for p in compressor.parameters()))
    state = out / f"{layout}-{seed}.safetensors"
    identity = {"recipe": asdict(recipe), "corpus": corpus.digest, "layout": layout, "seed": seed}
    first = 0
    if resume and state.exists():
        progress = checkpoint.load(state, identity, compressor, optimizer, generator)
        first, run.seconds = progress["step"], progress["seconds"]
        run.curve = [(int(step), loss, accuracy) for step, loss, accuracy in progress["curve"]]
    bar.reset(total=recipe.steps)
    bar.update(first)

    clock = time.perf_counter()
    with attach(compressor.model):
        for step in range(first, recipe.steps + 1):
            last = step == recipe.steps
            fresh = not run.curve or run.curve[-1][0] < step
            if fresh and (last or step % recipe.eval_every == 0):
                run.seconds += time.perf_counter() - clock
                run.curve.append((step, *evaluate(compressor, chunks[: recipe.eval_chunks])))
                bar.set_postfix_str(f"held-out loss {run.curve[-1][1]:.3f}")
                progress = {"step": step, "seconds": run.seconds, "curve": run.curve}
                checkpoint.save(state, identity, progress, compressor, optimizer, generator)
                clock = time.perf_counter()
            if last:
                break
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * min(1.0, (step + 1) / recipe.warmup)
            rows = corpus.batch(recipe.batch, recipe.chunk, generator).to(device)
            optimizer.zero_grad()
            compressor(rows)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(compressor.parameters(), recipe.clip)
            optimizer.step()
            bar.update()
        run.loss, run.accuracy = evaluate(compressor, chunks)
        _reconstruct(run, compressor, chunks[: recipe.eval_chunks])
        _track(run, compressor, chunks[: recipe.eval_chunks])
    return run


def _reconstruct(run: Run, compressor: Compressor, chunks: Tensor) -> None:
    """Greedy reconstruction: its accuracy over `chunks`, and one passage to read."""
    answer = compressor.generate(compressor.encode(chunks), chunks.shape[1])
    run.greedy_accuracy = float((answer == chunks).float().mean())
    text = lambda row: bytes(row.tolist()).decode("utf-8", "replace")  # noqa: E731
    run.passage = {"original": text(chunks[0]), "reconstructed": text(answer[0])}


def _track(run: Run, compressor: Compressor, chunks: Tensor) -> None:
    """Attention of memory tokens over the context, mean over chunks and heads, for each layer."""
    for weights in memory_attention(compressor, chunks):
        run.tracking.append(measure_tracking(weights).as_dict())
        run.attention.append([[round(float(w), 5) for w in row] for row in weights])


def run_study(
    recipe: Recipe,
    layouts: list[str],
    seeds: list[int],
    corpus: Corpus,
    out: Path,
    *,
    device: str = "cpu",
    resume: bool = False,
) -> Iterator[Run]:
    """Yields one `Run` for each layout and seed, with a progress bar each."""
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for layout in layouts:
            with tqdm(total=recipe.steps, desc=f"{layout.upper()} seed {seed}", unit="step", dynamic_ncols=True) as bar:
                yield train(recipe, layout, seed, corpus, out, device=device, resume=resume, bar=bar)
