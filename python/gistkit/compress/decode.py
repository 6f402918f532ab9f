"""How a text reads a memory: what is checked first, the plan of the pass, and the pass."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gistkit import hf
from gistkit.common.checks import placed
from gistkit.compress.memory import TASKS, Memory, Task, check_memory
from gistkit.compress.plans import ReadingRow, decoder_plan
from gistkit.compress.tokens import Rows, check_rows, pad
from gistkit.layouts import Plan


def decode(compressor: Any, memory: Memory, task: Task, input_ids: Any, attention_mask: Any = None) -> Tensor:
    """Hidden states [B, 1 + T, d] before `input_ids` (at the task token, or the memory) and at each of them.

    T are the tokens of the longest row, without padding at either end: states of shorter rows are padded at the end.

    Args:
        memory: returned by `encode`. Its `rest` is read between the task token and the text.
        task: "ae" reconstructs the context, "lm" continues it, "qa" answers a question about it.
        input_ids, attention_mask: as in `encode`; rows may be empty. As there, they are read one at a time if RoPE's
            frequencies depend on the length of a pass.
    """
    return compressor.read(memory, task, compressor.rows("input_ids", input_ids, attention_mask))  # type: ignore[no-any-return]


def read(compressor: Any, memory: Memory, task: Task, rows: Rows, plan: Plan | None = None) -> Tensor:
    """`decode` of checked rows, under `reading_plan`'s plan or the given one."""
    check_memory(memory)
    check_rows("input_ids", rows, memory.batch_size)
    lm, reader = compressor.lm, compressor.reader
    if plan is None and lm.changing_rope and memory.batch_size > 1:
        # Frequencies of RoPE depend on the length of a pass, which is a row's own.
        states = [read(compressor, memory[row], task, one)[0] for row, one in enumerate(rows.alone())]
        width = 1 + rows.ids.shape[1]
        return torch.stack([F.pad(row, (0, 0, 0, width - len(row))) for row in states])
    remainder = pad(memory.rest if task != "ae" else ((),) * memory.batch_size, compressor.device)
    if plan is None:
        plan = compressor.reading_plan(memory, task, (remainder, rows))
    texts = [lm.embedded(reader, part.ids) for part in (remainder, rows)]
    inputs = torch.cat([compressor.task_embedding(task, memory), *texts], 1)
    tokens, skip = inputs.shape[1], 0
    if memory.embeddings is not None:
        skip = memory.num_tokens
        inputs = torch.cat([memory.embeddings.to(inputs.dtype), inputs], 1)
    hidden_states = inputs
    if inputs.shape[1]:
        bias: Any = compressor.key_biases(memory)
        if memory.straight_through is not None and torch.is_grad_enabled():
            # The text's keys have none. Without gradients it is zeros.
            bias = F.pad(memory.straight_through, (0, inputs.shape[1]))[:, None]
        reading = {"memory": memory.read_as, "key_bias": bias, "rope_length": rope_length(compressor, memory)}
        out = lm.run(reader, inputs_embeds=inputs, plan=plan, **reading)
        hidden_states = out.last_hidden_state[:, skip:]
    if tokens == remainder.ids.shape[1] + rows.ids.shape[1]:
        hidden_states = torch.cat([last_of(memory)[:, None].to(hidden_states.dtype), hidden_states], 1)
    if not remainder.ids.shape[1]:
        return hidden_states
    last = placed(remainder.lengths, hidden_states.device)[:, None, None]
    return torch.cat([hidden_states.take_along_dim(last, 1), hidden_states[:, 1 + remainder.ids.shape[1] :]], 1)


def rope_length(compressor: Any, memory: Memory) -> int | None:
    """Tokens of the pass whose frequencies a memory's keys have; None: they depend on no pass, or there are no keys."""
    keys = memory.layers is not None and memory.num_tokens
    return compressor.rotated_over(memory) if keys and compressor.lm.changing_rope else None


def reading_plan(compressor: Any, memory: Memory, task: Task, texts: Sequence[Rows], name: str = "input_ids") -> Plan:
    """The plan of [memory][task token][text]...; memory tokens that are cached keys have no query row.

    Errors about the length of the text name the argument `name`.
    """
    if task not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    compressor.check_readable(memory)
    compressor.rows("memory", memory.rest)
    lm, cached = compressor.lm, compressor.carrier == "kv"
    ordinals, text_ordinals = compressor.ordinals(memory)
    starts = compressor.starts(memory, task)
    tasks = compressor.task_embedding(task, memory).shape[1]
    widths = (tasks, *(text.ids.shape[1] for text in texts))
    # What a token sees of packed keys no plan counts; but a plan has a column at least.
    columns = memory.num_tokens if memory.counts is None else int(not any(widths))
    reading = tuple(
        ReadingRow(
            min(columns, memory.lengths[row]),
            # Cached keys are rotated already.
            b"" if cached else memory.positions[row].numpy().tobytes(),
            ordinals[row].numpy().tobytes(),
            starts[row],
            text_ordinals[row],
            (tasks, *(text.lengths[row] for text in texts)),
        )
        for row in range(memory.batch_size)
    )
    lm.check_positions(name, max(row.start + sum(row.text) - 1 for row in reading))
    return decoder_plan(reading, columns, widths, cached, lm.windows, str(compressor.device))


def last_of(memory: Memory) -> Tensor:
    """`Memory.last`; a ValueError if the memory has none."""
    if memory.last is None:
        raise ValueError("memory: expected its hidden state `last`, got None; compress the text again")
    return memory.last


def check_readable(compressor: Any, memory: Memory) -> None:
    """Refuses a memory of another method, shape or model, or on another device."""
    lm = compressor.lm
    source = compressor.source
    if compressor.options.any_ratio:
        source = replace(source, chunk=memory.source.chunk)
    if memory.source != source:
        got, expected = memory.differing(source, hf.identity(lm.model))
        raise ValueError(f"memory: expected one made with {expected}, got one made with {got}")
    memory.check_shapes(lm.head_shapes, lm.width)
    base, own = (None, None)
    if (memory.fingerprint, memory.maker) != (None, None):
        base, own = compressor.fingerprints()
    if memory.fingerprint is not None and memory.fingerprint != base:
        got, expected = hf.differing(memory.model, hf.identity(lm.model))
        raise ValueError(
            f"memory: expected one of the base model {expected}, got one of {got}: "
            "a model of the same shape with other weights"
        )
    if memory.maker is not None and memory.maker != own:
        warnings.warn(
            "memory: expected one that this compressor made, got one from another compressor, or from this one before "
            "further training",
            stacklevel=4,
        )
    if memory.device != compressor.device:
        raise ValueError(
            f"memory: expected one on {compressor.device}, got one on {memory.device}; use memory.to(device)"
        )
