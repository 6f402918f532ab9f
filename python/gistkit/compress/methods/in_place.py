"""InPlace: one pass over [BOS][context][gists]. The text reads some of its keys and values in place of the context."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gistkit import hf, ops
from gistkit._checks import POSITIONS, moved, placed, whole
from gistkit.compress.compressor import Compressor, Task, draw_like
from gistkit.compress.files import ADDED_SETTINGS
from gistkit.compress.losses import HEAD
from gistkit.compress.memory import Memory
from gistkit.compress.model import Use, active_adapters
from gistkit.compress.plans import Builder, InPlacePass, check_text, in_place_pass
from gistkit.compress.tokens import Rows, join_rows
from gistkit.hf.attach import decoder_of
from gistkit.hf.keep import LlamaRope, Rope
from gistkit.hf.lora import Maps, adapter_config, maps_of
from gistkit.layouts import Role

if TYPE_CHECKING:
    from peft import LoraConfig

TEXT, GISTS = "text", "memory"
# The keys and values that the text reads in each layer for a compressed token: those that the layer made; those made
# from the layer's output; those made from means of the layer's input; or means of keys and values.
Reads = Literal["keys", "outputs", "means", "means_of_keys"]
FLAGS = {
    "offset", "separate", "full_copy", "copy_norms", "separate_positions", "memory_sees_memory", "memory_sees_itself",
    "memory_sees_bos", "context_sees_memory", "train_scorer", "soft_prompt",
}  # fmt: skip
# What only reading on uses, and no memory.
READING = {"past", "soft_prompt"}


class InPlaceOptions(TypedDict, total=False):
    """The keyword arguments that all in-place methods share, see `InPlace`; NoContext has no window."""

    losses: Iterable[str] | Mapping[str, float]
    lora: int | LoraConfig | None
    embedding_lora: int | None
    train_norms: bool
    window: int | None
    end_token: int | None
    bos_token: int | None


class InPlace(Compressor):
    """Base of the methods that compress in place: Gist, AvgPool and GistPool (Getting to the Gist of Gisting), Dodo.

    The model reads BOS and the context once. The memory holds the keys and values of BOS and of one compressed token
    for every `ratio` context tokens. The text follows directly, at the position ids that it has behind the whole
    context; a learned [AE] token precedes it only for a reconstruction. Without that token, and where no tokens
    follow the window, the last state of the encoder, which has read the whole context, predicts the text's first token.
    The papers predict only what follows a prompt or that token; `evaluate` leaves such a first token out.

    Args:
        model: a transformers causal language model; one copy of its weights reads context and text.
        ratio: context tokens a compressed token stands for, a whole number >= 1; a shorter context has one.
        layout: arguments of the layout's builder besides context and ratio, by name; None: the method encodes without a
            builder (Dodo).
        options: the method's other arguments by name; JSON values.
        reads: the keys and values that the text reads for a compressed token, see `Reads`; with gists, `offset`
            decides.
        offset: in layer l the text reads what leaves layer l at the gists, instead of what enters it.
        gists: number of gist embeddings, one for each gist; None: one embedding for all.
        separate: compressed tokens have their own parameters.
        full_copy: with `separate`, these are a copy of the layers' linear maps, whatever `lora` is.
        copy_norms: where they are a copy, it has the layers' norms too, so that gists and text share no parameter of a
            layer, as in the paper; otherwise they share the norms.
        losses, end_token: as in `Compressor`.
        lora: rank of a PEFT LoRA on all linear maps of the layers (alpha is twice the rank), or a peft.LoraConfig; with
            `separate` one for context and text and, without `full_copy`, one for gists. The base weights are frozen.
            None: the model's own weights train, and with `separate` a copy of its linear maps.
        embedding_lora: beside a rank, that of LoRA on the input embedding, for each role that has adapters; None: no
            LoRA there.
        train_norms: beside a rank, each role that has adapters has norms of its own, which train; with `full_copy`
            gists share those of the text, or with `copy_norms` have the model's.
        window: the first `window` tokens of a longer context are compressed, and the text reads the others directly.
        bos_token: id of the first token, which all others see; None: the first token, or else the end token, of the
            model's configuration. A context that begins with it does not get a second one.
    """

    carrier = "kv"
    encoder_predicts_first = True
    # Compressed tokens are learned tokens of the pass, beside the context's; offset, separate, full_copy and gists are
    # then among the method's settings, as far as it takes them.
    has_gists = False
    shared_arguments = frozenset(InPlaceOptions.__annotations__)
    # The linear maps that get LoRA where `lora` is a rank.
    maps: Maps = "all"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ratio: int,
        layout: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        reads: Reads = "keys",
        offset: bool = False,
        gists: int | None = None,
        separate: bool = False,
        full_copy: bool = False,
        copy_norms: bool = False,
        losses: Iterable[str] | Mapping[str, float] = ("qa",),
        lora: int | LoraConfig | None = 64,
        embedding_lora: int | None = None,
        train_norms: bool = False,
        window: int | None = None,
        end_token: int | None = None,
        bos_token: int | None = None,
    ) -> None:
        options = {**(layout or {}), **(options or {})}
        if self.has_gists:
            options |= {"offset": offset, "separate": separate, "full_copy": full_copy, "gists": gists}
            options["copy_norms"] = copy_norms
            reads = "outputs" if offset else "keys"
        ratio = whole("ratio", ratio, high=POSITIONS, floats=True)
        gists = None if gists is None else whole("gists", gists, high=POSITIONS, floats=True)
        builder = None
        if layout is not None:
            builder = Builder(self.method, ratio, tuple(sorted(layout.items())))
            # Refuses options that the layout does not take before the first context.
            few = min(ratio, 4)
            check_text(self.method, Builder(self.method, few, builder.options)(3 * few))
        for name in FLAGS & options.keys():
            if not isinstance(options[name], bool):
                raise ValueError(f"{name}: expected True or False, got {options[name]!r}")
        settings = {"ratio": ratio, "window": window, "bos_token": bos_token} | options
        super().__init__(
            model,
            chunk=ratio,
            memory_tokens=1,
            layout=json.dumps(_of_layout(options), sort_keys=True),
            losses=losses,
            reader=TEXT,
            window=window,
            end_token=end_token,
            settings={name: value for name, value in settings.items() if name in self.arguments()},
        )
        self._options, self.builder, self.reads = options, builder, reads
        self.offset, self.gists = offset, gists
        if full_copy and not separate:
            raise ValueError("full_copy: expected separate=True with it, got separate=False")
        if copy_norms and not (separate and (full_copy or lora is None)):
            raise ValueError(
                "copy_norms: expected gists with a copy of the maps, full_copy=True or separate=True without lora, got "
                "none; beside LoRA train_norms gives them norms of their own"
            )
        if reads == "means_of_keys":
            hf.check_rotates(model)
        elif reads != "keys" or separate:
            hf.check_projects(model)
        if separate and self.lm.traits.maps is not None:
            raise TypeError(
                "model: expected one whose linear maps gists can have copies of, for separate=True, got "
                f"{type(model).__name__}: {self.lm.traits.maps}"
            )
        if "compression" in self.loss_weights and not self.has_gists:
            raise ValueError(
                f"losses: expected no 'compression' for {self.method}, which has no gists, "
                f"got {', '.join(self.loss_weights)}"
            )
        self.bos_token = self._settings["bos_token"] = self.lm.first_token("bos_token", bos_token)
        self.separate = separate
        config = adapter_config(model, lora, self.maps, embedding_lora=embedding_lora, train_norms=train_norms)
        if full_copy and config is not None:
            _check_copied(model, config)
        copies = GISTS if separate and (config is None or full_copy) else None
        self.install(None if config is None else dict.fromkeys(self.roles(options), config), copies, norms=copy_norms)
        if self.has_gists and self.adapters is not None and GISTS in self.adapters.names:
            # Gists are learned embeddings.
            self.adapters.drop_embedding(GISTS)
        self.task_embeddings = nn.ParameterDict({"ae": draw_like(self.embed, 1)})
        self.memory_embeddings = draw_like(self.embed, gists or 1) if self.has_gists else None

    @classmethod
    def roles(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Whose adapters one made with these settings has, where it has any."""
        return (TEXT, GISTS) if settings.get("separate") and not settings.get("full_copy") else (TEXT,)

    @classmethod
    def own_shapes(cls, settings: Mapping[str, Any], width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
        """See `Compressor.own_shapes`."""
        if not cls.has_gists:
            return {}
        gists = 1 if settings["gists"] is None else whole("gists", settings["gists"], floats=True)
        ratio = whole("ratio", settings["ratio"], floats=True)
        return {"memory_embeddings": (gists, width), HEAD: (ratio * width, width)}

    @property
    def title(self) -> str:
        """What a table calls it."""
        return f"{type(self).__name__} {self.chunk}x"

    def contexts(self, input_ids: Any, attention_mask: Any = None) -> Rows:
        """`rows` of contexts, each of at least one token besides BOS."""
        rows = super().contexts(input_ids, attention_mask)
        fewest = min(
            length - has_bos for length, has_bos in zip(rows.lengths, self._begins_with_bos(rows), strict=True)
        )
        if fewest < 1:
            raise ValueError(f"input_ids: expected at least 1 token beside the first token, got {fewest}")
        return rows

    def uncompressed(self, contexts: Rows) -> Rows:
        """Contexts as the base model reads them whole."""
        return self.with_bos(contexts)

    def with_bos(self, rows: Rows) -> Rows:
        """The rows with BOS before them, where they do not begin with it."""
        have_bos = self._begins_with_bos(rows)
        if all(have_bos):
            return rows
        bos = torch.full((rows.batch_size, 1), self.bos_token)
        return join_rows(Rows.of(bos, tuple(1 - has_bos for has_bos in have_bos), rows.ids.device), rows)

    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 1, d], the learned [AE] token, or [B, 0, d] for other tasks, whose text follows the memory directly."""
        embedding = self.task_embeddings["ae"][: int(task == "ae")]
        return embedding.expand(memory.batch_size, -1, -1).to(self.embed.weight.dtype)

    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor]:
        """One pass over BOS, all contexts, and their gists if there are any."""
        input_rows = self._input_rows(self.with_bos(rows))
        batch = self.pass_over(input_rows)
        self.lm.check_positions("input_ids", max(batch.starts) - 1)
        inputs = self.lm.embedded(TEXT, input_rows.ids)
        if self.memory_embeddings is not None:
            inputs = torch.cat([inputs, self._slots(max(batch.lengths) - 1, rows.batch_size).to(inputs.dtype)], 1)
        keep = self._keeper(batch)
        out = self.lm.run(self._roles_of(batch), inputs_embeds=inputs, plan=batch.plan, keep=keep)
        hidden_states = out.last_hidden_state
        memory = Memory(
            source=self.source,
            lengths=batch.lengths,
            context_lengths=rows.lengths,
            positions=batch.positions.clone(),
            starts=batch.starts,
            layers=keep.close(),
            last=hidden_states.take_along_dim(batch.last_rows[:, None, None], 1)[:, 0],
        )
        return memory, hidden_states[:, batch.gists]

    def pass_over(self, input_rows: Rows) -> InPlacePass:
        """The plan of a pass over BOS and contexts, and which of its tokens the memory keeps."""
        if self.builder is None:
            raise TypeError(f"{self.method}: expected a method with a layout of its own for each length of a context")
        lengths = tuple(length - 1 for length in input_rows.lengths)
        return in_place_pass(self.builder, lengths, not self.has_gists, self.lm.windows, str(self.device))

    def ordinals(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """The uncompressed order, with gists: the position ids, if all tokens share one counter."""
        if self.builder is None or not self._options.get("separate_positions"):
            return memory.positions.floor().long(), memory.starts
        ordinals = torch.zeros(memory.positions.shape, dtype=torch.int64)
        text_ordinals = []
        for row, start in enumerate(memory.starts):
            # The context has the positions between BOS and the text.
            layout = self.builder(start - 1)
            in_memory = np.isin(layout.roles, (Role.BOS, Role.MEMORY))
            ordinals[row, : int(in_memory.sum())] = torch.from_numpy(layout.ordinals[in_memory])
            text_ordinals.append(int(layout.ordinals[-1]))
        return ordinals, tuple(text_ordinals)

    def stands_for(self, memory: Memory) -> Tensor:
        """See `Compressor.stands_for`: a compressed token stands for its window, and BOS for nothing."""
        spans = torch.zeros(memory.batch_size, memory.num_tokens, 2, dtype=torch.int64)
        for row, (length, context) in enumerate(zip(memory.lengths, memory.context_lengths, strict=True)):
            first = self._own_bos(memory, row)
            starts = first + torch.arange(length - 1) * self.chunk
            spans[row, 1:length] = torch.stack([starts, (starts + self.chunk).clamp(max=context)], -1)
        return spans

    def _own_bos(self, memory: Memory, row: int) -> int:
        """1 if the row's context began with BOS, which is then one of its tokens, else 0."""
        if self.builder is None:
            raise TypeError(f"{self.method}: expected a method with a layout of its own for each length of a context")
        # The text's first position tells how many tokens stood between BOS and it.
        return int(int(self.builder(memory.context_lengths[row]).positions[-1]) != memory.starts[row])

    def _check_window(self, window: int | None) -> None:
        super()._check_window(window)
        if window is not None and window < self.chunk:
            raise ValueError(f"window: expected at least the ratio, {self.chunk} tokens, got {window}")

    def limits(self, rows: Rows, window: int) -> tuple[int, ...]:
        """How many tokens of each row a window compresses; BOS is not counted."""
        return tuple(window + has_bos for has_bos in self._begins_with_bos(rows))

    def as_text(self) -> AbstractContextManager[None]:
        """A context in which a layer uses the text's parameters for all rows."""
        return self.lm.all_rows_as(TEXT) if self.separate else nullcontext()

    def of_gists(self, name: str) -> bool:
        """Whether a parameter, by its name, serves gists alone."""
        if name.startswith(("memory_embeddings", "copies.")):
            return True
        adapter = None if self.adapters is None else self.adapters.names.get(GISTS)
        return adapter is not None and adapter in name.split(".")

    def join(self, memories: Sequence[Memory]) -> Memory:
        """Refused: documents that are compressed in place must be read together."""
        raise ValueError(
            f"memories: expected those of a method that compresses chunks by themselves, got {self.method}'s; encode "
            "the documents as one context"
        )

    def _input_rows(self, rows: Rows) -> Rows:
        """The part of BOS and context that the pass reads."""
        return rows

    def _slots(self, count: int, rows: int) -> Tensor:
        embeddings: Any = self.memory_embeddings
        if self.gists is not None and count > self.gists:
            raise ValueError(
                f"input_ids: expected contexts of at most {self.gists} gists x {self.chunk} tokens, got {count} gists"
            )
        return (embeddings[:count] if self.gists is not None else embeddings.expand(count, -1)).expand(rows, -1, -1)

    def _roles_of(self, batch: InPlacePass) -> Use:
        if not self.separate:
            return TEXT
        return {TEXT: slice(0, batch.gists.start), GISTS: batch.gists}

    def _keeper(self, batch: InPlacePass) -> hf.Keeper:
        """Collects the keys and values of [BOS][compressed tokens] from every layer of the pass."""
        if self.reads == "outputs":
            return OffsetKeys(batch.gists, self.as_text)
        if self.reads == "keys":
            rows = [0, *range(batch.gists.start, batch.gists.stop)]
            return hf.KeptKeys(placed(rows, batch.plan.spans.device))
        positions = moved(batch.positions[:, 1:], self.device)
        return PooledKeys(batch.context, batch.windows, positions, self.reads == "means", self.as_text)

    def _begins_with_bos(self, rows: Rows) -> list[int]:
        """1 for each row that begins with BOS, 0 for the others."""
        return (rows.known[:, 0] == self.bos_token).int().tolist()  # type: ignore[no-any-return]

    def _segments(self, compressed: Rows) -> Tensor:
        context = self.with_bos(compressed)
        return super()._segments(context.columns(slice(1, None), tuple(length - 1 for length in context.lengths)))


def _of_layout(options: Mapping[str, Any]) -> dict[str, Any]:
    # A memory that was saved before such a setting existed names the same layout.
    return {
        name: value
        for name, value in options.items()
        if name not in READING and (name not in ADDED_SETTINGS or value != ADDED_SETTINGS[name])
    }


def _check_copied(model: PreTrainedModel, config: LoraConfig) -> None:
    """Refuses adapters that would be missing from the gists' copies of the linear maps."""
    if active := active_adapters(model):
        raise ValueError(f"full_copy: expected a model without other active adapters, got {', '.join(active)}")
    paths = [name.split(".") for name in maps_of(model, decoder_of(model))]
    holders = {".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    # As PEFT selects them, by the ends of names.
    saved = [name for name in config.modules_to_save or () if any(holder.endswith(name) for holder in holders)]
    if saved:
        raise ValueError(f"lora: expected no modules_to_save of linear maps beside full_copy, got {sorted(saved)}")


# A context in which a layer projects with the text's parameters, whatever adapters the pass uses.
AsText = Callable[[], AbstractContextManager[None]]


class _WithBos(hf.Keeper):
    """Keeps BOS's keys and values as attention made them, followed by those that `_compressed` makes from a layer."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Holds key and value until the layer is left."""
        self._pending[layer_idx] = key, value

    def leave(self, layer_idx: int, layer: nn.Module, before: Tensor, after: Tensor, rope: Rope) -> None:
        """Keeps [BOS][compressed tokens]; only the first call of a layer counts."""
        key, value = self._pending.pop(layer_idx)
        made_key, made_value = self._compressed(layer, before, after, key, value, rope)
        self.keep(layer_idx, torch.cat([key[:, :, :1], made_key], 2), torch.cat([value[:, :, :1], made_value], 2))

    def _compressed(
        self, layer: nn.Module, before: Tensor, after: Tensor, key: Tensor, value: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class OffsetKeys(_WithBos):
    """Keys and values of layer l from the gists' OUTPUT of layer l, with the text's norm and projections of that layer.

    The last layer's output is taken before the model's final norm; BOS is not offset (GistPool, Section 5.1, Figure 3).

    Args:
        rows: of the gists.
        as_text: see `AsText`.
    """

    def __init__(self, rows: slice, as_text: AsText) -> None:
        super().__init__()
        self.rows, self.as_text = rows, as_text

    def _compressed(
        self, layer: nn.Module, before: Tensor, after: Tensor, key: Tensor, value: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        with self.as_text():
            return rope.project(layer, after[:, self.rows], rope.positions[..., self.rows])


class PooledKeys(_WithBos):
    """Keys and values of means over windows of the context (GistPool, Section 4).

    Args:
        rows: of the context.
        windows: int64 [W + 1] or [B, W + 1], where windows begin and end among these rows.
        positions: int64 or float64 [W] or [B, W], position ids of the pooled keys.
        of_hidden: means of a layer's input hidden states, through the layer's norm and projections; otherwise of the
            layer's values and of its keys as they are before rotation.
        as_text: see `AsText`.
    """

    def __init__(self, rows: slice, windows: Tensor, positions: Tensor, of_hidden: bool, as_text: AsText) -> None:
        super().__init__()
        self.rows, self.windows, self.positions = rows, windows, positions
        self.of_hidden, self.as_text = of_hidden, as_text

    def _compressed(
        self, layer: nn.Module, before: Tensor, after: Tensor, key: Tensor, value: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor]:
        if self.of_hidden:
            means = ops.window_pool(before[:, self.rows], windows=self.windows)
            with self.as_text():
                return rope.project(layer, means, self.positions)
        # Keys carry RoPE's factor already: rotating them back and forth must not apply it twice.
        inv_freq = cast(LlamaRope, rope).inv_freq
        unrotated = ops.rerotate(key[:, :, self.rows], -rope.positions[..., self.rows], inv_freq)
        return ops.window_pool(
            unrotated, value[:, :, self.rows], windows=self.windows, positions=self.positions, inv_freq=inv_freq
        )
