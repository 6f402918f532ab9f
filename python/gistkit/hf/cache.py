"""memory_cache: a transformers cache that starts with a compressed context and grows with the tokens after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaModel, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from gistkit.hf.packed import PackedLayers, Room, plain_room

# The name of models' and layers' argument for a cache: transformers 5.24 renamed it, and takes the old one until 5.40.
CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"
# Tokens that fit into a block, at least.
LEAST_ROOM = 64


class MemoryLayer(CacheLayerMixin):
    """One layer's memory and the tokens after it. It never writes to the tensors of the memory.

    Without gradients new tokens go into a block with room for more; with gradients they are concatenated.

    Args:
        memory: keys, rotated, and values [B, H, K, D]; B = 1 serves any number of rows, and more a multiple of them,
            such as several beams of each. None: there is no memory, and the first tokens decide the shape.
        logical_length: position of the next token, at least 0; need not be K.
        capacity: tokens after the memory that fit into the first block; more tokens make a larger one.
        room: makes the blocks.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self, memory: tuple[Tensor, Tensor] | None, logical_length: int, capacity: int = 0, room: Room = plain_room
    ) -> None:
        super().__init__()
        for name, number in (("logical_length", logical_length), ("capacity", capacity)):
            if number < 0:
                raise ValueError(f"{name}: expected at least 0, got {number}")
        # Position of the first token after the memory, and tokens after it.
        self.logical_length, self.added = int(logical_length), 0
        self._rows, self._capacity, self._make = 0, int(capacity), room
        self._blocks: tuple[Tensor, Tensor] | None = None
        if memory is None:
            return
        key, value = memory
        if key.dim() != 4 or value.shape[:3] != key.shape[:3]:
            raise ValueError(
                f"memory: expected keys and values [B, H, K, D], got shapes {tuple(key.shape)} and {tuple(value.shape)}"
            )
        self.keys: Tensor = key
        self.values: Tensor = value
        self.is_initialized, self._rows = True, key.shape[0]

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self.keys.shape[0]

    @property
    def num_keys(self) -> int:
        """Number of keys, memory and tokens."""
        return self.keys.shape[2] if self.is_initialized else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes the shapes of the first tokens where there is no memory."""
        if not self.is_initialized:
            self.keys, self.values = key_states[:1, :, :0], value_states[:1, :, :0]
            self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends [B, H, N, D] and returns all keys and values, [B, H, K + N, D]."""
        self.lazy_initialization(key_states, value_states)
        copies, odd = divmod(key_states.shape[0], self.batch_size)
        if not self.added and self.batch_size > 1 and copies > 1 and not odd:
            # Beams, or several sequences, of each row.
            self.batch_repeat_interleave(copies)
        count, used = key_states.shape[2], self.num_keys
        if torch.is_grad_enabled():
            # What autograd saved must not be written to.
            rows = key_states.shape[0]
            keys = torch.cat([self.keys.expand(rows, -1, -1, -1), key_states.to(self.keys)], 2)
            values = torch.cat([self.values.expand(rows, -1, -1, -1), value_states.to(self.values)], 2)
            self._replace(keys, values)
        else:
            keys, values = self._room(used + count, key_states.shape[0])
            keys[:, :, used : used + count] = key_states
            values[:, :, used : used + count] = value_states
            self.keys, self.values = keys[:, :, : used + count], values[:, :, : used + count]
        self.added += count
        return self.keys, self.values

    def _room(self, length: int, rows: int) -> tuple[Tensor, Tensor]:
        """Blocks of at least `length` keys and values that begin with the current ones."""
        if self._blocks is not None and self._blocks[0].shape[0] == rows and length <= self._blocks[0].shape[2]:
            # A block made in inference mode cannot be written to outside.
            writable = torch.is_inference_mode_enabled() or not self._blocks[0].is_inference()
            if writable:
                return self._blocks
        memory = self.num_keys - self.added
        room = memory + max(self._capacity, 2 * (length - memory), LEAST_ROOM)
        blocks = self._make(rows, room, self.keys, self.values)
        for block, tensor in zip(blocks, (self.keys, self.values), strict=True):
            block[:, :, : tensor.shape[2]] = tensor
        self._blocks = blocks
        return self._blocks

    def get_seq_length(self) -> int:
        """The position of the next token: `logical_length` plus the tokens added since."""
        return self.logical_length + self.added

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys after `query_length` more tokens, and 0."""
        return self.num_keys + query_length, 0

    def get_max_length(self) -> int:
        """-1, for no limit."""
        return -1

    def reset(self) -> None:
        """Drops the tokens and keeps the memory, with the rows that it was given with."""
        if not self._rows:
            self.added, self.is_initialized = 0, False
            self._replace(*cast("tuple[Tensor, Tensor]", (None, None)))
            return
        self.crop(-self.added)
        copies, odd = divmod(self.batch_size, self._rows)
        if copies > 1 and not odd:
            # Rows and beams of the last run, of which each group has the same memory.
            self._replace(self.keys[::copies].clone(), self.values[::copies].clone())

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens, as a negative number; a ValueError for more than were added or a positive number.

        The rows stay those of the tokens, even if none are left.
        """
        if not -self.added <= tokens_to_remove <= 0:
            raise ValueError(
                f"tokens_to_remove: expected -{self.added} to 0, as {self.added} tokens were added to the memory, "
                f"got {tokens_to_remove}"
            )
        if not tokens_to_remove:
            return
        length = self.num_keys + tokens_to_remove
        self.added += tokens_to_remove
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Takes the rows `beam_idx`, int64 [B]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, int64 or bool [B]."""
        if self.keys is None:
            # Beams are chosen before a text without a prompt has keys; all rows are alike.
            return
        self._replace(self.keys[indices.to(self.keys.device)], self.values[indices.to(self.values.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        if self.keys is None:
            return
        self._replace(self.keys.repeat_interleave(repeats, 0), self.values.repeat_interleave(repeats, 0))

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values, self._blocks = keys, values, None


class MemoryCache(Cache):
    """A transformers cache of `MemoryLayer`s, made by `memory_cache`.

    `guard`, if it is set, is called before each pass that `cover_memory` sees with the number of tokens after the
    memory after it, and raises where the model would read the memory otherwise than its compressor does.
    """

    guard: Callable[[int], None] | None = None
    # What passes of a compressor add to the logits of the memory's keys, [B, Hk, K] of each layer.
    key_biases: Sequence[Tensor] | None = None
    # What passes of a compressor read as `memory`, before the keys of the cache.
    packed: PackedLayers | None = None
    # Tokens of the pass whose frequencies of RoPE the keys have; None: the first pass over the cache decides.
    rope_length: int | None = None

    @property
    def held(self) -> list[tuple[Tensor, Tensor]]:
        """(key, value) of each layer, memory and tokens, [B, H, K + N, D]."""
        return [(layer.keys, layer.values) for layer in cast("list[MemoryLayer]", self.layers)]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The number of keys: transformers' masks count keys, while positions count tokens."""
        return cast(MemoryLayer, self.layers[layer_idx]).num_keys


def memory_cache(layers: Sequence[tuple[Tensor, Tensor]], logical_length: int, capacity: int = 0) -> MemoryCache:
    """A cache for a transformers model that starts with a memory, which is never changed.

    Models take it as `cache`, before transformers 5.24 as `past_key_values`.

    `model.generate` over it takes new tokens [B, N] with an attention_mask [B, logical_length + N] of ones, which gives
    their positions. If prompts are padded on the left, call `cover_memory` first. Over the cache of
    `Compressor.to_cache`, a mask is needed only for padding.

    Position IDs continue from `logical_length`, masks from the number of keys. Any number of caches may start from the
    same memory. Layers with a sliding window keep all their keys too, so a plan must say what they see.

    Args:
        layers: (key, value) of each layer of the model, [B, H, K, D], keys rotated; B = 1 serves any number of rows.
        logical_length: position of the next token, such as the context's length in tokens.
        capacity: number of tokens that will be added, if it is known; avoids copies while the cache grows.
    """
    return MemoryCache(layers=[MemoryLayer(pair, logical_length, capacity) for pair in layers])


def cover_memory(model: PreTrainedModel) -> None:
    """Makes passes of this model respect left padding of the tokens after a memory.

    Transformers expects one column of a 2-D attention mask per key. A mask with one column per position, [B,
    logical_length + N], is changed to have as many columns for the memory as it has keys. Other caches, and masks [B, K
    + N] by keys, are not changed. A second call has no effect.

    Passes raise a ValueError for masks of another width, zeros at the memory's positions, and padding inside a sliding
    window.
    """
    for module in {model, model.get_decoder()}:
        if _cover not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_cover, with_kwargs=True)


def _cover(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a pass with a mask that counts keys; None: they are right."""
    given = dict(zip(signature(module.forward).parameters, args, strict=False)) | kwargs if args[1:] else kwargs
    cache = given.get("cache", given.get("past_key_values"))
    mask = given.get("attention_mask")
    if not isinstance(cache, MemoryCache):
        return None
    ids = given.get("input_ids", args[0] if args else None)
    count = (given["inputs_embeds"] if ids is None else ids).shape[1]
    if cache.guard is not None:
        cache.guard(cast(MemoryLayer, cache.layers[0]).added + count)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    keys, places = cache.get_query_offset() + count, cache.get_seq_length() + count
    if mask.shape[1] not in (keys, places):
        raise ValueError(
            f"attention_mask: expected [B, {places}], as {places - count} tokens came before, got {tuple(mask.shape)}"
        )
    config = module.config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    # Transformers counts padding as what a window holds, so that less of the memory would be seen.
    if window is not None and window < keys and not bool(mask.all()):
        raise ValueError(
            f"attention_mask: expected no padding over more keys than the model's sliding window of {window}, got "
            f"{keys}; Compressor.generate takes any"
        )
    if mask.shape[1] == keys:
        return None
    memory = cast(MemoryLayer, cache.layers[0]).logical_length
    if not bool(mask[:, :memory].all()):
        raise ValueError(
            f"attention_mask: expected ones in its first {memory} columns, the positions of the memory, got a 0"
        )
    mask = torch.nn.functional.pad(mask, (keys - places, 0), value=1)
    if "attention_mask" in kwargs:
        return args, {**kwargs, "attention_mask": mask}
    return tuple(mask if value is given["attention_mask"] else value for value in args), kwargs


def empty_cache(
    num_layers: int, logical_length: int, capacity: int = 0, packed: PackedLayers | None = None
) -> MemoryCache:
    """`memory_cache` of no memory, for keys and values of any shape.

    Args:
        num_layers: of the model.
        logical_length, capacity: as for `memory_cache`.
        packed: a memory that passes also read; only this cache may store a text after it.
    """
    rooms: list[Room] = [plain_room if packed is None else partial(packed.room, layer) for layer in range(num_layers)]
    cache = MemoryCache(layers=[MemoryLayer(None, logical_length, capacity, room) for room in rooms])
    cache.packed = packed
    return cache
