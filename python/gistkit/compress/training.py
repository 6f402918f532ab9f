"""What trains a compressor: its losses, all from one compression, and its parameters as an optimizer takes them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gistkit import hf
from gistkit.common.checks import IGNORE, placed
from gistkit.common.languages import unlike
from gistkit.compress.losses import HEAD, check_losses, divergence_loss, hidden_loss, token_loss
from gistkit.compress.memory import Memory, Task
from gistkit.compress.model import of_models
from gistkit.compress.tokens import Rows, join_rows, label_rows, pad

# Losses of a teacher, the base model with the whole context; of divergences the order in which `divergence_loss` takes
# the model's states and the teacher's.
DIVERGENCES = {"kl": 1, "reverse_kl": -1}
TAUGHT = (*DIVERGENCES, "hidden")
# Tokens of a context that show its language.
LANGUAGE = 1024


def forward(
    compressor: Any,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    continuation_ids: Any = None,
    question_ids: Any = None,
    answer_ids: Any = None,
    **images: Any,
) -> dict[str, Tensor]:
    """Returns the losses named at construction, from one compression, and their weighted mean as "loss".

    In training mode it draws one of `train_ratios`, if there are any, and keeps the longest context's length as
    `trained_length`. The mode is the model's, and transformers loads models in eval mode: call `train()` first.

    Args:
        input_ids, attention_mask: the contexts, as in `encode`.
        continuation_ids: int64 [B, t], the tokens after each context, padded with -100 at the end, or lists; only for
            the loss "lm".
        question_ids, answer_ids: the same for the losses "qa", "kl", "reverse_kl" and "hidden": the answer is predicted
            after the question.
        images: for `VoCo`, pixel_values and what belongs to them, if `input_ids` are only token ids.

    In in-place methods the loss "lm" includes the first token of a continuation, which the encoder's last state
    predicts. That token says nothing about the memory, so `evaluate` leaves it out.

    Returns:
        fp32 scalars in nats per token, one for each loss and "loss"; "hidden" is in standard deviations.
    """
    if images and "images" not in signature(compressor.contexts).parameters:
        raise TypeError(f"forward() got an unexpected keyword argument {next(iter(images))!r}")
    thaw(compressor)
    if torch.is_grad_enabled():
        compressor.identity.forget()
    weights, lm = compressor.loss_weights, compressor.lm
    if "compression" in weights:
        compressor.check_head()
    contexts = compressor.contexts(input_ids, attention_mask, **images)
    answers = next((name for name in ("qa", *TAUGHT) if name in weights), "")
    labels = {
        "continuation_ids": ("lm", continuation_ids),
        "question_ids": (answers, question_ids),
        "answer_ids": (answers, answer_ids),
    }
    texts = {
        name: compressor.text(name, _given(name, task, ids, compressor, contexts))
        for name, (task, ids) in labels.items()
        if task in weights
    }
    losses: dict[str, Tensor] = {}
    with lm.attached():
        memory, hidden_states, compressed = _at_drawn_ratio(compressor).compress_rows(contexts)
        if compressor.training:
            compressor.trained_length = max(compressor.trained_length or 0, *compressed.lengths)
        for name in weights:
            if name == "compression" and compressor.compression_head is not None:
                if hidden_states is None:
                    raise TypeError("encode_rows: expected hidden states, which the loss compression reads, got None")
                losses[name] = compressor.compression_head(
                    lm.readout(hidden_states), targets=compressor.segments(compressed), **compressor.output_embedding
                )
            elif name == "ae":
                losses[name] = _text_loss(compressor, memory, "ae", _with_end_token(compressor, compressed))
            elif name == "lm":
                losses[name] = _text_loss(compressor, memory, "lm", texts["continuation_ids"])
        if answers:
            losses |= _answer_losses(compressor, memory, contexts, texts["question_ids"], texts["answer_ids"])
    weighted = [weight * losses[name] for name, weight in weights.items()]
    losses["loss"] = torch.stack(weighted).sum() / sum(weights.values())
    return losses


def output_embedding(compressor: Any) -> dict[str, Any]:
    """The output embedding, as keyword arguments of the losses."""
    head = compressor.lm.head
    return {"weight": head.weight, "bias": head.bias, "softcap": compressor.lm.softcap}


def _at_drawn_ratio(compressor: Any) -> Any:
    """The compressor at one of its `train_ratios` in training mode, if it has any."""
    ratios = compressor.train_ratios
    if not ratios or not compressor.training:
        return compressor
    return compressor.at(ratios[int(torch.randint(len(ratios), ()))])


def _given(name: str, task: str, ids: Any, compressor: Any, contexts: Rows) -> Rows:
    """The rows of an argument that a loss needs."""
    if ids is None:
        raise ValueError(f"{name}: expected int64 [B, t] for the {task} loss, got None")
    rows = label_rows(name, ids, vocabulary=compressor.vocabulary, device=compressor.device)
    if rows.batch_size != contexts.batch_size:
        raise ValueError(f"{name}: expected {contexts.batch_size} rows as input_ids has, got {rows.batch_size}")
    if not rows.ids.shape[1] and name != "question_ids":
        raise ValueError(f"{name}: expected tokens to predict, got empty rows")
    return rows


def _with_end_token(compressor: Any, rows: Rows) -> Rows:
    if compressor.end_token is None:
        return rows
    return join_rows(rows, pad([[compressor.end_token]] * rows.batch_size, rows.ids.device))


def _text_loss(compressor: Any, memory: Memory, task: Task, text: Rows) -> Tensor:
    """Mean loss of the tokens of a text after the memory; a row's last token predicts nothing."""
    hidden_states = compressor.read(memory, task, _but_last(text))
    targets = text.ids.where(text.valid, IGNORE)
    return token_loss(compressor.lm.readout(hidden_states), targets=targets, **compressor.output_embedding)


def _answer_losses(compressor: Any, memory: Memory, contexts: Rows, question: Rows, answer: Rows) -> dict[str, Tensor]:
    """Those of the losses "qa", "kl", "reverse_kl" and "hidden" that the compressor has, over the answers' tokens."""
    lm, text, by_layer = compressor.lm, join_rows(question, answer), "hidden" in compressor.loss_weights
    hidden_states, *layers = _reader_states(compressor, memory, text, by_layer)
    columns = torch.arange(text.ids.shape[1], device=text.ids.device)
    in_answer = text.valid & (columns >= placed(question.lengths, text.ids.device)[:, None])
    losses = {}
    if "qa" in compressor.loss_weights:
        targets = text.ids.where(in_answer, IGNORE)
        losses["qa"] = token_loss(lm.readout(hidden_states), targets=targets, **compressor.output_embedding)
    if taught := [name for name in TAUGHT if name in compressor.loss_weights]:
        teacher, *teacher_layers = _teacher_states(lm, compressor.uncompressed(contexts), text, by_layer)
        both = [lm.readout(states[in_answer]) for states in (hidden_states, teacher)]
        for name in (name for name in taught if name in DIVERGENCES):
            losses[name] = divergence_loss(*both[:: DIVERGENCES[name]], **compressor.output_embedding)
    if by_layer:
        # The first token of a text follows a token of the memory, which the teacher does not have.
        later = in_answer[:, 1:].nonzero(as_tuple=True)
        own = [out[later] for out in layers]
        goals = [out[:, 1:][later] for out in teacher_layers]
        losses["hidden"] = hidden_loss(own, goals)
    return losses


def _listening(lm: Any, by_layer: bool) -> AbstractContextManager[list[Tensor]]:
    return hf.layer_outputs(lm.model) if by_layer else nullcontext([])


def _reader_states(compressor: Any, memory: Memory, text: Rows, by_layer: bool) -> list[Tensor]:
    """Hidden states [B, T, d] before each token of `text`, and `by_layer` those [B, T - 1, d] of each layer at it."""
    if compressor.lm.changing_rope and memory.batch_size > 1:
        # As `read` does.
        alone = enumerate(text.alone())
        return _together([_reader_states(compressor, memory[row], own, by_layer) for row, own in alone], text)
    with _listening(compressor.lm, by_layer) as layers:
        hidden_states = compressor.read(memory, "qa", _but_last(text))
    if by_layer and not layers:
        # Of one token, which the memory's last state predicts, there is no pass.
        layers = [hidden_states[:, :0]] * len(compressor.lm.head_shapes)
    return [hidden_states, *(out[:, out.shape[1] + 1 - hidden_states.shape[1] :] for out in layers)]


def _together(rows: list[list[Tensor]], text: Rows) -> list[Tensor]:
    """States [1, n, d] of rows that were read by themselves as those of a batch."""
    width = text.ids.shape[1]
    return [
        torch.cat([F.pad(row, (0, 0, 0, width - row.shape[1])) for row in states]) for states in zip(*rows, strict=True)
    ]


@torch.no_grad()
def _teacher_states(lm: Any, contexts: Rows, text: Rows, by_layer: bool) -> list[Tensor]:
    """Hidden states [B, T, d] before each token of `text`, of the base model on the whole context.

    The last ones, and `by_layer` those of each layer.
    """
    if lm.changing_rope and contexts.batch_size > 1:
        # As the rows of memories are read.
        alone = zip(contexts.alone(), text.alone(), strict=True)
        return _together([_teacher_states(lm, context, own, by_layer) for context, own in alone], text)
    rows = _but_last(join_rows(contexts, text))
    plan = lm.causal_plan(rows.ids.shape[1])
    with _listening(lm, by_layer) as layers:
        last = lm.run(None, inputs_embeds=lm.embed(rows.ids), plan=plan).last_hidden_state
    start = placed(contexts.lengths, last.device)[:, None] - 1
    index = (start + torch.arange(text.ids.shape[1], device=last.device)).clamp(max=last.shape[1] - 1)[..., None]
    return [states.take_along_dim(index, 1) for states in (last, *layers)]


def _but_last(rows: Rows) -> Rows:
    return rows.columns(slice(-1), tuple(max(length - 1, 0) for length in rows.lengths))


def set_losses(compressor: Any, losses: Iterable[str] | Mapping[str, float]) -> None:
    """Changes the losses that `forward` returns; "compression" needs a compressor that was made with it."""
    options = replace(compressor.options, losses=check_losses(losses))
    check_base(options.losses, compressor.keeps_base)
    if "compression" in options.losses and compressor.compression_head is None:
        raise ValueError(
            "losses: expected no 'compression' for a compressor that was made without it, got "
            + ", ".join(options.losses)
        )
    compressor.options = options


def check_base(losses: Mapping[str, float], base_frozen: bool) -> None:
    """Refuses the losses whose teacher is the base model, if that trains."""
    found = next((name for name in TAUGHT if name in losses), None)
    if found is not None and not base_frozen:
        raise ValueError(
            f"losses: expected LoRA with '{found}', because its teacher is the unchanged base model, got lora None"
        )


def add_compression_head(compressor: Any) -> None:
    """Adds the untrained head of the compression loss."""
    compressor.compression_head = compressor.options.head(compressor.lm.width, compressor.vocabulary).to(
        compressor.device
    )


def check_head(compressor: Any) -> None:
    """Refuses another ratio than that of the head of the compression loss."""
    head = compressor.compression_head
    if head is not None and head.offsets != -(-compressor.chunk // compressor.memory_tokens):
        raise ValueError(
            f"ratio: expected {head.offsets} to train or save, that of the head of the loss 'compression', got "
            f"{compressor.chunk}"
        )


def warn_of_unlike(compressor: Any, contexts: Rows) -> None:
    """Warns of contexts unlike those that the compressor was trained on."""
    longest, languages = compressor.trained_length, compressor.languages
    if longest is not None and max(contexts.lengths) > longest:
        count = max(len(compressor.part_ends(row)) for row in contexts.lists())
        in_parts, parts = (f", which are read in {count} parts", compressor.trained_parts) if count > 1 else ("", 1)
        if not 1 < count <= parts:
            warnings.warn(
                f"input_ids: expected at most {parts * longest} tokens, the longest context that the compressor was "
                f"trained on, got {max(contexts.lengths)}{in_parts}: answers from its memory may be worse",
                stacklevel=3,
            )
    if languages is None:
        return
    with suppress(ValueError), compressor.lm.turn():
        tokenizer = compressor.tokenizer
        if any(unlike(tokenizer.decode(row[:LANGUAGE]), languages) for row in contexts.lists()):
            warnings.warn(
                f"input_ids: expected prose in {', '.join(languages)}, which the compressor was trained on, got a text "
                "with few common words of it: answers from its memory may be worse",
                stacklevel=3,
            )


def trainable(compressor: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The trainable parameters by name, without other adapters in the model."""
    thaw(compressor)
    adapters = compressor.adapters
    for name, parameter in compressor.named_parameters():
        belongs = "lora_" not in name if adapters is None else adapters.owns(name)
        if name == HEAD and "compression" not in compressor.loss_weights:
            continue
        if parameter.requires_grad and (belongs or not of_models(name)):
            yield name, parameter


def thaw(compressor: Any) -> None:
    """Undoes what PEFT's `set_adapter` and `disable_adapter` do for a user's adapter: they freeze all others."""
    adapters = compressor.adapters
    # Asked at each step: the first one that trains is enough.
    if adapters is None or any(parameter.requires_grad for parameter in adapters.parameters()):
        return
    # Who froze the compressor's own parameters too meant all of it.
    if any(p.requires_grad for name, p in compressor.named_parameters() if not of_models(name)):
        for parameter in adapters.parameters():
            parameter.requires_grad_(True)


def print_trainable_parameters(compressor: Any) -> None:
    """Prints the number of trainable and of all parameters in one line, as PEFT's models do."""
    trained = sum({id(parameter): parameter.numel() for _, parameter in compressor.trainable()}.values())
    total = sum(parameter.numel() for parameter in compressor.parameters())
    print(f"trainable params: {trained:,} || all params: {total:,} || trainable%: {100 * trained / total:.4f}")


def parameter_groups(compressor: Any, learning_rate: float, memory_factor: float = 3.0) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer; those of the gists have `memory_factor` times the learning rate.

    GistPool, Section 5.2: parameters that compress need a higher learning rate.
    """
    if not memory_factor > 0:
        raise ValueError(f"memory_factor: expected a number > 0, got {memory_factor}")
    gist_parameters: list[nn.Parameter] = []
    text_parameters: list[nn.Parameter] = []
    for name, parameter in compressor.trainable():
        (gist_parameters if compressor.of_gists(name) else text_parameters).append(parameter)
    groups = [
        {"params": text_parameters, "lr": learning_rate},
        {"params": gist_parameters, "lr": learning_rate * memory_factor},
    ]
    return [group for group in groups if group["params"]]
