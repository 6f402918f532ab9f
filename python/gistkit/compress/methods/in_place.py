"""InPlace: one pass over BOS and the context, of which the text reads some keys and values instead of the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gistkit import hf
from gistkit.compress.compressor import Compressor
from gistkit.compress.config import RatioConfig, draw_like, setting
from gistkit.compress.memory import Memory, Task
from gistkit.compress.parts import equal_ends, moves
from gistkit.compress.plans import InPlacePass, check_text, in_place_pass
from gistkit.compress.tokens import Rows, join_rows
from gistkit.hf.lora import Maps
from gistkit.layouts import Layout, Role

TEXT, GISTS = "text", "memory"


@dataclass(frozen=True, kw_only=True)
class InPlaceConfig(RatioConfig):
    """Arguments shared by methods that compress in place, beside those of `RatioConfig`.

    Args:
        lora: rank of a PEFT LoRA on all linear maps of the layers (alpha is twice the rank), or a peft.LoraConfig; with
            `separate` one for context and text and one for compressed tokens. The base weights are frozen. None: the
            model's own weights train, and with `separate` a copy of its linear maps.
        embedding_lora, train_norms: as in `Config`, for each role that has adapters.
        part: tokens of a longer context that one pass of `encode` reads: as few parts as there can be, of equal sizes,
            each by itself from position 0 on. `join` then moves them behind the parts before. None: the trained length,
            if that is known. 0: one pass reads all, as in `forward` and in training. No part is shorter than a chunk.
        bos_token: id of the first token, which all others see; None: the BOS token, or else the end token, of the
            model's configuration. It is not added to a context that already begins with it.
    """

    maps: ClassVar[Maps] = "all"
    free: ClassVar[frozenset[str]] = frozenset({"part"})

    bos_token: int | None = setting(None, in_memory=False)
    part: int | None = setting(None, least=0, before=None, in_memory=False)

    @property
    def separate(self) -> bool:
        """Whether compressed tokens have parameters of their own."""
        return False

    @property
    def full_copy(self) -> bool:
        """Whether these are copies of the layers' maps also with LoRA."""
        return False

    @property
    def copied(self) -> str | None:
        """Compressed tokens' role, if they are apart with all weights."""
        return GISTS if self.separate and (self.lora is None or self.full_copy) else None

    @property
    def roles(self) -> tuple[str, ...]:
        return (TEXT, GISTS) if self.separate and not self.full_copy else (TEXT,)

    def check_model(self, model: nn.Module) -> None:
        if self.part:
            hf.check_moves(model)
        if self.separate:
            hf.check_projects(model)

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        return {"task_embeddings": nn.ParameterDict({"ae": draw_like(embed, 1)})}


class InPlace(Compressor):
    """Base of the methods that compress in place: Gist, AvgPool, GistPool, Dodo, Select.

    The model reads BOS and the context once, and the memory holds keys and values of that pass. The text follows
    directly, at the position IDs that it has after the whole context; a learned [AE] token precedes it only for a
    reconstruction. Without that token, and if no tokens follow the window, the encoder's last state predicts the text's
    first token. It has read the whole context, but of one in parts only the last part, as of joined documents the last.
    The papers predict only what follows a prompt or that token; `evaluate` leaves such a first token out.

    Args:
        model: a transformers causal language model; one copy of its weights reads context and text.
        config: an `InPlaceConfig`; its fields may be given by name instead.
    """

    options: Any
    task_embeddings: nn.ParameterDict
    reader: str | None = TEXT
    encoder_predicts_first = True

    def install(self) -> None:
        options = self.options = replace(
            self.options, bos_token=self.lm.first_token("bos_token", self.options.bos_token)
        )
        if options.separate and self.lm.traits.maps is not None:
            raise TypeError(
                "model: expected one whose linear maps gists can have copies of, for separate=True, got "
                f"{type(self.model).__name__}: {self.lm.traits.maps}"
            )
        super().install()

    def contexts(self, input_ids: Any, attention_mask: Any = None) -> Rows:
        """`rows` of contexts, each of at least one token besides BOS."""
        rows = super().contexts(input_ids, attention_mask)
        fewest = min(
            length - has_bos for length, has_bos in zip(rows.lengths, self._begins_with_bos(rows), strict=True)
        )
        if fewest < 1:
            raise ValueError(f"input_ids: expected at least 1 token after the first one, got {fewest}")
        return rows

    def uncompressed(self, contexts: Rows) -> Rows:
        return self.with_bos(contexts)

    def with_bos(self, rows: Rows) -> Rows:
        """The rows with BOS before them, where they do not begin with it."""
        have_bos = self._begins_with_bos(rows)
        if all(have_bos):
            return rows
        bos = torch.full((rows.batch_size, 1), self.bos_token)
        return join_rows(Rows.of(bos, tuple(1 - has_bos for has_bos in have_bos), rows.ids.device), rows)

    def limits(self, rows: Rows, window: int) -> tuple[int, ...]:
        """How many tokens of each row a window compresses; BOS is not counted."""
        return tuple(window + has_bos for has_bos in self._begins_with_bos(rows))

    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 1, d], the learned [AE] token, or [B, 0, d] for other tasks, whose text follows the memory directly."""
        embedding = self.task_embeddings["ae"][: int(task == "ae")]
        return embedding.expand(memory.batch_size, -1, -1).to(self.embed.weight)

    def ordinals(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """The uncompressed order, in which position IDs count."""
        return memory.positions.floor().long(), memory.starts

    def as_text(self) -> AbstractContextManager[None]:
        """A context in which a layer uses the text's parameters for all rows."""
        return self.lm.all_rows_as(TEXT) if self.separate else nullcontext()

    def size(self, context: int, ratio: int | None = None) -> int:
        return -(-context // (ratio or self.chunk))

    def of_gists(self, name: str) -> bool:
        """Whether a parameter, by its name, serves gists alone."""
        if name.startswith(("memory_embeddings", "copies.")):
            return True
        adapter = None if self.adapters is None else self.adapters.names.get(GISTS)
        return adapter is not None and adapter in name.split(".")

    @property
    def reach(self) -> int | None:
        length = self.trained_length if self.options.part is None else self.options.part
        return length if length and not self.training and moves(self.model) else None

    def part_ends(self, row: Sequence[int]) -> list[int]:
        """See `Compressor.part_ends`; parts are whole numbers of chunks."""
        bos = int(row[0] == self.bos_token)
        return [bos + end for end in equal_ends(len(row) - bos, self.reach, self.chunk)]

    def encode_parts(self, parts: Sequence[Sequence[int]]) -> list[Memory]:
        """See `Compressor.encode_parts`; all parts but the first have a BOS before them."""
        # Else one that begins with the same token, as separators of documents are, would lose it in `join`.
        memories = super().encode_parts([*parts[:1], *([self.bos_token, *part] for part in parts[1:])])
        lengths = [(len(part),) for part in parts]
        return [
            replace(memory, context_lengths=length, documents=(length,))
            for memory, length in zip(memories, lengths, strict=True)
        ]

    # BOS.
    shared_columns = 1

    def offsets(self, memory: Memory) -> tuple[int, ...]:
        """What follows begins where the memory's text does, without a BOS of its own."""
        return tuple(start - self.shared_columns for start in memory.starts)

    def check_documents(self, memories: Sequence[Memory]) -> None:
        """Refuses a model whose keys cannot be moved, and documents of which some begin with BOS and others do not."""
        hf.check_moves(self.model)
        have_bos = [[self.documents_of(memory, row)[0] for row in range(memory.batch_size)] for memory in memories]
        if any(len({*row}) > 1 for row in zip(*have_bos, strict=True)):
            raise ValueError(
                "memories: expected documents that all begin with the first token, or none, got some with it and some "
                "without"
            )

    def documents_of(self, memory: Memory, row: int) -> tuple[int, Sequence[int]]:
        for bos in (0, 1):
            lengths = [document - bos for document in memory.documents[row]]
            if 1 + sum(self.start_behind(memory, tokens) - 1 for tokens in lengths) == memory.starts[row]:
                return bos, lengths
        raise ValueError(
            "memory: expected documents of one ratio that all begin with the first token, or none of them, got others"
        )

    def start_behind(self, memory: Memory, context: int) -> int:
        """The position id of the text behind BOS and a context, at a memory's ratio."""
        return context + 1

    def segments(self, compressed: Rows) -> Tensor:
        """See `Compressor.segments`; BOS is in no segment."""
        context = self.with_bos(compressed)
        return super().segments(context.columns(slice(1, None), tuple(length - 1 for length in context.lengths)))

    def _begins_with_bos(self, rows: Rows) -> list[int]:
        """1 for each row that begins with BOS, 0 for the others."""
        return (rows.known[:, 0] == self.bos_token).int().tolist()  # type: ignore[no-any-return]


# A context in which a layer projects with the text's parameters, whatever adapters the pass uses.
AsText = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class OnePassConfig(InPlaceConfig):
    """What `OnePass` needs from a method: its layout, and what the memory keeps of a layer."""

    # Whether compressed tokens are learned tokens of the pass; otherwise `kept` makes them from the context's.
    has_gists: ClassVar[bool] = False

    def layout(self, context: int) -> Layout:
        """The layout of a context and one text token after it, whose position is where the text begins."""
        raise NotImplementedError

    # What follows from a layout is computed without it where that can be: files may claim contexts of any length.
    def start(self, context: int) -> int:
        """Where the text begins in `layout`."""
        return int(self.layout(context).positions[-1])

    def gist_ordinals(self, context: int) -> NDArray[np.int64]:
        """The places [K] of gists in `layout`, for gists with positions of their own."""
        layout = self.layout(context)
        return layout.ordinals[layout.roles == Role.MEMORY]

    def kept(self, batch: InPlacePass, as_text: AsText) -> hf.Keeper:
        """Collects the keys and values of [BOS][compressed tokens] from every layer of a pass."""
        raise NotImplementedError

    def check_model(self, model: nn.Module) -> None:
        """See `Config.check_model`; also refuses a layout that decoding would read differently."""
        super().check_model(model)
        few = self if self.ratio <= 4 else replace(self, ratio=4, window=None)
        check_text(self.method, few.layout(3 * few.ratio))

    @property
    def separate_positions(self) -> bool:
        """Whether compressed tokens have their own position counter."""
        return False


class OnePass(InPlace):
    """Methods with one compressed token per `ratio` context tokens, under a layout."""

    memory_embeddings: nn.Parameter

    def install(self) -> None:
        super().install()
        if self.adapters is not None and GISTS in self.adapters.names:
            # Gists are learned embeddings.
            self.adapters.drop_embedding(GISTS)

    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor]:
        """One pass over BOS, all contexts, and their gists if there are any."""
        input_rows = self._read_by_pass(self.with_bos(rows))
        batch = self.pass_over(input_rows)
        self.lm.check_positions("input_ids", batch.last)
        inputs = self.lm.embedded(TEXT, input_rows.ids)
        use: Any = TEXT
        if self.options.has_gists:
            inputs = torch.cat([inputs, self._slots(max(batch.lengths) - 1, rows.batch_size).to(inputs)], 1)
            use = {TEXT: slice(0, batch.gists.start), GISTS: batch.gists} if self.separate else TEXT
        keep = self.options.kept(batch, self.as_text)
        hidden_states = self.lm.run(use, inputs_embeds=inputs, plan=batch.plan, keep=keep).last_hidden_state
        return self.remember(batch, rows, hidden_states, layers=keep.close()), hidden_states[:, batch.gists]

    def pass_over(self, input_rows: Rows) -> InPlacePass:
        """The plan of a pass over BOS and contexts, and which of its tokens the memory keeps."""
        lengths = tuple(length - 1 for length in input_rows.lengths)
        return in_place_pass(self.options, lengths, self.lm.windows, str(self.device))

    def check_documents(self, memories: Sequence[Memory]) -> None:
        """Also refuses memories of different ratios, as the places of compressed tokens follow from one."""
        if len(ratios := list(dict.fromkeys(memory.source.chunk for memory in memories))) > 1:
            raise ValueError(f"memories: expected the same ratio in each, got {' and '.join(map(str, ratios))}")
        super().check_documents(memories)

    def ordinals(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """The uncompressed order, with gists: the position IDs, if all tokens share one counter."""
        if not self.options.separate_positions:
            return super().ordinals(memory)
        ordinals, options = torch.zeros(memory.positions.shape, dtype=torch.int64), self.options.of(memory.source.chunk)
        text_ordinals = []
        for row, places in enumerate(ordinals):
            column, before = 1, 0
            documents = self.documents_of(memory, row)[1]
            self.check_size(memory, row, documents)
            for context in documents:
                own = options.gist_ordinals(context)
                places[column : column + len(own)] = before + torch.from_numpy(own)
                column, before = column + len(own), before + context + len(own)
            text_ordinals.append(before + 1)
        return ordinals, tuple(text_ordinals)

    def start_behind(self, memory: Memory, context: int) -> int:
        return int(self.options.of(memory.source.chunk).start(context))

    def parts_of(self, memory: Memory, context: int) -> NDArray[np.int64]:
        starts = np.arange(0, context, memory.source.chunk)
        return np.stack([starts, np.minimum(starts + memory.source.chunk, context)], -1)

    def _read_by_pass(self, rows: Rows) -> Rows:
        """The part of BOS and context that the pass reads."""
        return rows

    def _slots(self, count: int, rows: int) -> Tensor:
        embeddings, gists = self.memory_embeddings, self.options.gists
        if gists is not None and count > gists:
            raise ValueError(
                f"input_ids: expected contexts of at most {gists} gists x {self.chunk} tokens, got {count} gists"
            )
        return (embeddings[:count] if gists is not None else embeddings.expand(count, -1)).expand(rows, -1, -1)
