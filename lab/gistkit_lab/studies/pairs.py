"""Study `pairs`: contexts of keys and values, every key of which is asked for, under each method at several ratios.

A mean of tokens loses what belongs to what, so that a method has to learn what to keep. A small decoder first learns
to look values up in the full context; from there each arm learns to read its compressed form. All arms of a seed have
the same model, steps and contexts (Long Context In-Context Compression by Getting to the Gist of Gisting (GistPool),
Figure 2 and Table 3, where the contexts are SQuAD's and others and the model is Gemma2 2B).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import ArceeConfig, ArceeForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from gistkit import compress
from gistkit.compress import Compressor
from gistkit.compress.memory import Memory
from gistkit.hf import attach
from gistkit.layouts import Plan
from gistkit.train.recipe import adamw
from gistkit.train.stages import Stage, selecting_at
from gistkit_lab.studies import in_place
from gistkit_lab.studies.draws import SPLITS
from gistkit_lab.studies.fitting import Carried, FallingRecipe, Progress, Session
from gistkit_lab.studies.in_place import Arm, Run, arm_compressor
from gistkit_lab.studies.pages import machine_caption
from gistkit_lab.studies.study import Names, SavedRun

# Methods of the study `in-place` that run unless others are asked for.
METHODS = ("no", "full", "gist", "sep-offset-gist", "avgpool", "gistpool")
# Methods that came after the papers' and those that they are nearest to, read by the frozen decoder but for Dodo and
# Beacon, with this rank of LoRA.
SUCCESSORS, RANK = ("icae", "separate-encoder", "x500", "sac", "dodo", "kv-distill", "beacon"), 32
# Here gists learn to pool by training alone.
MORE_METHODS = ("offset-gist", *in_place.OTHER_METHODS, *SUCCESSORS)
# Contexts of a group, all of one length.
GROUP = 32


@dataclass(frozen=True)
class Recipe(FallingRecipe):
    """Everything that determines a run except its arm and seed.

    Args:
        keys, values: different tokens of each kind.
        fewest, most: pairs of a context; each key occurs once in it.
        length, filler: tokens of a context, and different tokens of the third kind, among which its pairs then lie at
            random places; 0 and 0: pairs alone.
        base_steps, base_rate: of the training on the full context that the arms of a seed share.
        memory_factor: learning rate of the gists' own parameters, over that of the others.
        dim, layers, heads, rope_theta, weight_std: of the decoder; its first embeddings are three times as large as its
            other weights.
        gated: whether its layers' maps have a gate, as Llama's and Gemma's do.
        alone: whether each key is asked by itself; otherwise they follow each other in one text.
        eval_contexts, test_contexts: at every evaluation, and of each split at the end.
    """

    steps: int = 2000
    batch: int = 32
    learning_rate: float = 1e-3
    warmup: int = 50
    weight_decay: float = 0.01
    eval_every: int = 100
    keys: int = 32
    values: int = 8
    fewest: int = 15
    most: int = 15
    length: int = 0
    filler: int = 0
    base_steps: int = 1500
    base_rate: float = 2e-3
    memory_factor: float = 3.0
    dim: int = 64
    layers: int = 2
    heads: int = 8
    rope_theta: float = 100.0
    weight_std: float = 0.1
    gated: bool = False
    alone: bool = True
    eval_contexts: int = 256
    test_contexts: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.fewest <= self.most <= self.keys:
            raise ValueError(
                f"fewest, most: expected 1 <= fewest <= most <= keys, got {self.fewest}, {self.most} and {self.keys}"
            )
        if self.length and (self.length < 2 * self.most or not self.filler):
            raise ValueError(
                f"length, filler: expected at least the tokens of {self.most} pairs and a token to lie among them, got "
                f"{self.length} and {self.filler}"
            )

    @property
    def bos(self) -> int:
        """The token before a context."""
        return self.keys + self.values

    @property
    def vocabulary(self) -> int:
        """Keys, values, the token before a context, and filler, in this order."""
        return self.bos + 1 + self.filler


PRESETS = {
    # Contexts of 30 tokens; two minutes of a core for each arm.
    "quick": Recipe(),
    # Contexts of 16 to 40 tokens.
    "varied": Recipe(fewest=8, most=20),
}


class Pairs(NamedTuple):
    """Contexts of keys and values in turn, and the keys in another order with their values.

    Args:
        contexts: int64 [B, 2 n], or [B, length] with filler.
        keys, answers: int64 [B, n]; answers count from the first value.
    """

    contexts: Tensor
    keys: Tensor
    answers: Tensor


def draw(recipe: Recipe, split: str, *numbers: int, rows: int) -> Pairs:
    """Random contexts of one length, the same for the same numbers."""
    random = np.random.default_rng([SPLITS[split], *numbers])
    count = int(random.integers(recipe.fewest, recipe.most + 1))
    keys = random.permuted(np.tile(np.arange(recipe.keys), (rows, 1)), axis=1)[:, :count]
    answers = random.integers(recipe.values, size=(rows, count))
    order = random.permuted(np.tile(np.arange(count), (rows, 1)), axis=1)
    contexts = np.stack([keys, recipe.keys + answers], -1).reshape(rows, -1)
    if recipe.length:
        contexts = _among_filler(contexts, recipe, random)
    asked, expected = (np.take_along_axis(array, order, 1) for array in (keys, answers))
    return Pairs(*(torch.from_numpy(array) for array in (contexts, asked, expected)))


def _among_filler(pairs: np.ndarray, recipe: Recipe, random: np.random.Generator) -> np.ndarray:
    """[B, length] of pairs [B, 2 n]: the pairs in their order, each whole, at random places among filler."""
    rows, count = len(pairs), pairs.shape[1] // 2
    contexts = recipe.bos + 1 + random.integers(recipe.filler, size=(rows, recipe.length))
    # A pair is one of length - n items; those before it have one token more each where they are pairs.
    items = np.tile(np.arange(recipe.length - count), (rows, 1))
    places = np.sort(random.permuted(items, axis=1)[:, :count], 1) + np.arange(count)
    np.put_along_axis(contexts, places, pairs[:, ::2], 1)
    np.put_along_axis(contexts, places + 1, pairs[:, 1::2], 1)
    return contexts


def fresh_model(recipe: Recipe, seed: int) -> PreTrainedModel:
    """The untrained decoder of a seed: a Llama, whose layers have a gate or not."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": recipe.vocabulary, "hidden_size": recipe.dim, "intermediate_size": 2 * recipe.dim,
        "num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": recipe.weight_std,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta}, "bos_token_id": recipe.bos,
        "eos_token_id": None,
    }  # fmt: skip
    model: Any
    if recipe.gated:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        # Arcee's is a Llama without gates.
        model = ArceeForCausalLM(ArceeConfig(hidden_act="gelu", **sizes))
    with torch.no_grad():
        # Larger, so that attention tells tokens apart from the first step on.
        model.model.embed_tokens.weight.mul_(3)
    return model  # type: ignore[no-any-return]


def train(session: Session) -> Run:
    """Trains and measures one arm and seed, from a decoder that the arms of the seed share."""
    recipe, arm, seed = session.recipe, session.arm, session.seed
    model = fresh_model(recipe, seed)
    with session.shared("base", steps=recipe.base_steps, learning_rate=recipe.base_rate) as shared:
        fit(shared, arm_compressor(Arm("full"), model, lora=None).to(session.device), part=0)
    torch.manual_seed(seed)
    compressor = build_compressor(recipe, arm, model).to(session.device)
    progress = fit(session, compressor, part=1)
    with attach(compressor.model):
        figures = lambda split: {"all": measure(compressor, recipe, split, recipe.test_contexts)}  # noqa: E731
        run: Run = session.run(Run, vars(arm), progress, compressor.trainable(), figures)
    return run


def build_compressor(recipe: Recipe, arm: Arm, model: PreTrainedModel) -> Compressor:
    """The untrained compressor of an arm around the base of its seed."""
    options: dict[str, Any] = {"ratio": arm.ratio, "losses": ("qa",)}
    chunk = recipe.length or 2 * recipe.most
    match arm.method:
        case "icae" | "x500" | "sac":
            options |= {"chunk": chunk, "lora": RANK}
        case "dodo" | "kv-distill":
            options |= {"layer": 1, "lora": RANK}
        case "separate-encoder":
            options |= {"encoder": copy.deepcopy(model), "segment": chunk, "lora": None}
        case "beacon":
            options |= {"segment": 2 * arm.ratio, "lora": None}
        case _:
            return arm_compressor(arm, model, lora=None)
    compressor: Compressor = compress.METHODS[arm.method.replace("-", "_")](model, **options)
    return compressor


def fit(
    session: Session, compressor: Compressor, *, part: int, stages: Sequence[Stage] = (),
    before: Callable[[int], None] | None = None, carried: Carried | None = None,
) -> Progress:  # fmt: skip
    """Trains a compressor on the answers of a recipe's contexts, which differ from `part` to part.

    `before` is called before the loss of step 0, 1, ...; `stages` are those of `gistkit.train.stages`.
    """
    recipe: Recipe = session.recipe
    parameter_groups = compressor.parameter_groups(recipe.learning_rate, memory_factor=recipe.memory_factor)

    def loss(step: int) -> Tensor:
        if before is not None:
            before(step)
        pairs = _on(draw(recipe, "train", session.seed, part, step, rows=recipe.batch), session.device)
        with selecting_at(compressor, stages, step):
            return cross_entropy(logits(compressor, pairs, recipe).flatten(0, 1), pairs.answers.flatten())

    def figures() -> tuple[float, ...]:
        return tuple(measure(compressor, recipe, "held_out", recipe.eval_contexts).values())

    optimizer = adamw(parameter_groups, recipe.learning_rate, recipe.weight_decay)
    return session.fit(
        compressor, loss, figures, session.decides("test_contexts"), optimizer=optimizer, carried=carried
    )


def logits(compressor: Compressor, pairs: Pairs, recipe: Recipe, memory: Memory | None = None) -> Tensor:
    """[B, n, values], those of the values where each key is asked for, behind a memory; None: the context's.

    All keys are asked at once. Where each is `alone` none knows of the others: it has the position id that follows the
    context, and sees the memory, the task token if there is one, and itself. Otherwise the keys are a text without
    values: a value beside its key would tell what the others are not.
    """
    if memory is None:
        memory, _, _ = compressor.compress_rows(compressor.contexts(pairs.contexts))
    plan = None
    if recipe.alone:
        tasks = compressor.task_embedding("qa", memory).shape[1]
        plan = _each_alone(memory, tasks, pairs.keys.shape[1]).to(compressor.device)
    # The first state is the one before the first key.
    states = compressor.read(memory, "qa", compressor.rows("keys", pairs.keys), plan)[:, 1:]
    return compressor.logits(states)[..., recipe.keys : recipe.bos]


def _each_alone(memory: Memory, tasks: int, questions: int) -> Plan:
    """Memories of embeddings are rows of the pass too; with the task token they see what is before them."""
    before, start = memory.num_tokens + tasks, memory.starts[0]
    own = torch.arange(before + questions, dtype=torch.int32)
    shared = torch.stack([torch.zeros_like(own), (own + 1).clamp(max=before)], -1)
    # Of the keys; a row of the memory has no other span.
    alone = torch.stack([own, own + 1], -1) * (own >= before)[:, None]
    spans = torch.stack([shared, alone], 1)
    after = start + torch.arange(tasks + questions).clamp(max=tasks)
    first = 0 if memory.embeddings is not None else memory.num_tokens
    position_ids = torch.cat([memory.positions[0], after])
    return Plan.from_spans(spans[first:], len(own), position_ids[first:])


@torch.no_grad()
def measure(compressor: Compressor, recipe: Recipe, split: str, contexts: int) -> dict[str, float]:
    """{"loss", "exact"} over contexts of a split: nats an answer, and the share of right answers."""
    loss = right = count = 0.0
    for pairs in groups(recipe, split, contexts):
        pairs = _on(pairs, compressor.device)
        scores = logits(compressor, pairs, recipe)
        loss += float(cross_entropy(scores.flatten(0, 1), pairs.answers.flatten(), reduction="sum"))
        right += float((scores.argmax(-1) == pairs.answers).sum())
        count += pairs.answers.numel()
    return {"loss": loss / count, "exact": right / count}


def groups(recipe: Recipe, split: str, contexts: int) -> Iterator[Pairs]:
    """The contexts of a split, in groups of one length."""
    for group, start in enumerate(range(0, contexts, GROUP)):
        yield draw(recipe, split, group, rows=min(GROUP, contexts - start))


def _on(pairs: Pairs, device: torch.device | str) -> Pairs:
    return Pairs(*(tensor.to(device) for tensor in pairs))


class PairsStudy(in_place.InPlaceStudy):
    """Looking up keys and values in a context that each method compresses in place."""

    name = "pairs"
    recipe_type = Recipe
    presets = PRESETS
    sizes = "quick: contexts of 30 tokens, some 30 minutes of a core a seed; varied: of 16 to 40 tokens"
    lists: ClassVar[Mapping[str, Names]] = {
        **in_place.InPlaceStudy.lists,
        "methods": Names((*METHODS, *MORE_METHODS), METHODS, f"; there are also {', '.join(MORE_METHODS)}"),
    }
    text = ""
    measured = "Held-out contexts", "Contexts that no choice was made on"
    train = staticmethod(train)

    def add_own(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gated", action="store_true", help="layers with gates, as Llama's")
        parser.add_argument(
            "--one-text", action="store_true", help="the keys are one text, in place of each being asked alone"
        )

    def recipe_for(self, options: argparse.Namespace) -> Any:
        return replace(super().recipe_for(options), gated=options.gated, alone=not options.one_text)

    def about(self, recipe: Any, arms: Sequence[Arm], source: Any) -> str:
        return (
            f"Contexts of {recipe.fewest} to {recipe.most} pairs of {recipe.keys} keys and {recipe.values} values, "
            f"{len(arms)} arms of {recipe.steps} steps of {recipe.batch} after {recipe.base_steps} on the full context"
        )

    def variant(self, recipe: Any) -> str:
        return "-".join(["gated"] * recipe.gated + ["text"] * (not recipe.alone))

    def captions(self, group: Sequence[SavedRun]) -> Sequence[str]:
        recipe: Recipe = group[0].recipe
        most = f"{2 * recipe.most}"
        length = most if recipe.fewest == recipe.most else f"{2 * recipe.fewest} to {most}"
        return [
            f"Loss in nats an answer among {recipe.values}, and the share of right answers, on contexts on which "
            f"nothing was chosen; {length} tokens; {recipe.steps} steps of {recipe.batch} after {recipe.base_steps} on "
            f"the full context that the arms share{', layers with gates' if recipe.gated else ''}"
            f"{'' if recipe.alone else ', keys in one text'}. {machine_caption(group)}."
        ]


STUDY = PairsStudy()
