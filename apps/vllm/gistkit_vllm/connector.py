"""GistConnector: a memory as the computed prefix of a vLLM request.

A request names a memory in `kv_transfer_params` = {"memory": NAME}. Its prompt begins with as many placeholder tokens
as the memory has tokens, which `front.Front` writes. vLLM takes those as computed, and the connector writes the
memory's keys and values into their slots of the paged cache before the pass that reads the rest.

With {"save": NAME}, the keys and values of the whole prompt become the memory NAME after the pass that computes its
last token. What became of that is `kv_transfer_params` of the answer: {"saved": NAME}, or {"error": REASON}.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.kv_cache_interface import FullAttentionSpec

from gistkit_vllm import memory_files, paged
from gistkit_vllm.template import placeholder_of

logger = init_logger("vllm.gistkit")


@dataclass
class Load:
    """Tokens [start, stop) of a memory, and the blocks of the request that reads it, which hold positions from 0 on."""

    memory: str
    digest: str
    start: int
    stop: int
    block_ids: list[int]


@dataclass
class Save:
    """The memory that a prompt becomes.

    Args:
        memory: its name.
        about: fields of `memory_files.About`.
        before: tokens of the memory that the prompt begins with.
        block_ids: of the request, once the prompt is computed.
    """

    memory: str
    about: dict[str, Any]
    before: int
    block_ids: list[int] = field(default_factory=list)


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler tells the workers of one step: what to load and save, and ids of requests that are refused."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass
class Wanted:
    """What a request asks for, or the reasons why it cannot read (`refusal`) or save (`unsaved`)."""

    memory: str = ""
    tokens: int = 0
    context_tokens: int = 0
    digest: str = ""
    refusal: str | None = None
    save: Save | None = None
    unsaved: str | None = None


class GistConnector(KVConnectorBase_V1):
    """See the module. `kv_connector_extra_config` takes:

    store: the folder of memories that `gistkit export` wrote.
    save: whether requests may write memories there (default: false).
    host_bytes: of memories that a worker keeps on the cache's device for later requests (default: 1 GiB).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        _check(vllm_config, kv_cache_config)
        self._store = Path(transfer.get_from_extra_config("store", "."))
        if not self._store.is_dir():
            raise ValueError(f"store: expected a folder of memories that gistkit export wrote, got {self._store}")
        self._saves = bool(transfer.get_from_extra_config("save", False))
        if self._saves:
            memory_files.remove_partials(self._store)
        self._budget = int(transfer.get_from_extra_config("host_bytes", 1 << 30))
        self._block_size = vllm_config.cache_config.block_size
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._shape = model.get_num_layers(parallel), 2, model.get_num_kv_heads(parallel), model.get_head_size()
        self._dtype = model.dtype
        self._model = model
        # Of the scheduler.
        self._wanted: dict[str, Wanted] = {}
        self._to_save: dict[str, tuple[Any, Save]] = {}
        self._pending = Step()
        # Of a worker.
        self._held: OrderedDict[tuple[str, str], torch.Tensor] = OrderedDict()
        self._bad_blocks: set[int] = set()
        self._refused: set[str] = set()
        # Blocks without their memory, which other requests may find in the prefix cache until the scheduler hears.
        self._not_loaded: set[int] = set()
        self._orders: dict[Any, torch.Tensor] = {}

    # In the scheduler's process. What leaves a method here as an error ends the engine.

    def on_new_request(self, request: Any) -> None:
        """Looks for the request's memory, and tells its blocks of the prefix cache apart from those of others."""
        params = request.kv_transfer_params or {}
        if "memory" in params:
            self._wanted[request.request_id] = self._reading(request, params["memory"])
        if "save" in params:
            wanted = self._wanted.setdefault(request.request_id, Wanted())
            try:
                wanted.save = self._checked_save(request, params["save"], wanted)
                if not self._is_saved(wanted.save):
                    self._to_save[request.request_id] = request, wanted.save
            except Exception as error:
                logger.error("request %s: %s", request.request_id, error)
                wanted.save, wanted.unsaved = None, str(error)

    def _reading(self, request: Any, name: object) -> Wanted:
        try:
            wanted = self._checked(request, name)
            salt = wanted.digest
        except Exception as error:
            logger.error("request %s: %s", request.request_id, error)
            wanted, salt = Wanted(str(name), refusal=str(error)), request.request_id
            # vLLM asks no connector for requests that skip the cache, such as those for the prompt's logprobs.
            request.skip_reading_prefix_cache = False
        # Placeholders are the same for all memories.
        request.cache_salt = f"{salt}:{request.cache_salt or ''}"
        request.block_hashes.clear()
        request.update_block_hashes()
        return wanted

    def _checked(self, request: Any, name: object) -> Wanted:
        about, shape = memory_files.about(self._store, name)
        layers, two, heads, size = self._shape
        if shape != (layers, two, about.tokens, heads, size):
            expected = (layers, two, about.tokens, heads, size)
            raise ValueError(f"memory {name!r}: expected keys and values {expected}, got {shape}, of another model")
        reader = memory_files.reader_of(self._folder(request))
        # What gistkit export did not write may be the base model as it is, but not with another's adapter.
        plain = reader is None and request.lora_request is None
        if not (plain and about.reader.startswith("base:")) and about.reader != self._reader(request):
            raise ValueError(f"memory {name!r}: expected the reader {about.reader}, got {reader or 'other weights'}")
        if request.skip_reading_prefix_cache:
            raise ValueError("request: expected no prompt_logprobs and no skip_reading_prefix_cache with a memory")
        ids = request.prompt_token_ids
        if ids is None or request.prompt_embeds is not None:
            raise ValueError("request: expected a prompt of token ids after a memory")
        # One token must be left to compute.
        if len(ids) <= about.tokens or any(token != about.placeholder for token in ids[: about.tokens]):
            raise ValueError(
                f"prompt: expected {about.tokens} tokens {about.placeholder} and at least one more, got {len(ids)}"
            )
        return Wanted(str(name), about.tokens, about.context_tokens, about.digest)

    def _folder(self, request: Any) -> str:
        return str(self._model.model if request.lora_request is None else request.lora_request.lora_path)

    def _reader(self, request: Any) -> str:
        """What reads a memory that the request's weights saved: their files, if gistkit export did not write them."""
        if (known := memory_files.reader_of(self._folder(request))) is not None:
            return known
        adapter = "" if request.lora_request is None else f":{memory_files.weights_of(self._folder(request))}"
        return f"files:{self._weights}{adapter}"

    @cached_property
    def _weights(self) -> str:
        folder = self._model.model
        if not Path(folder).is_dir():
            from huggingface_hub import snapshot_download

            folder = snapshot_download(folder, revision=self._model.revision, local_files_only=True)
        weights, model = memory_files.weights_of(folder), self._model
        # What makes others of the files' weights; files that are quantized say so themselves.
        changes = [model.hf_overrides, model.quantization_config]
        changes += [model.quantization] * (model.model_arch_config.quantization_config is None)
        if not any(changes):
            return weights
        return f"{weights}-{hashlib.sha256(json.dumps(changes, sort_keys=True, default=str).encode()).hexdigest()[:8]}"

    @cached_property
    def _placeholder(self) -> tuple[int, str]:
        if (tokenizer := cached_tokenizer_from_config(self._model)) is None:
            raise ValueError("save: expected an engine with a tokenizer, got one with skip_tokenizer_init")
        return placeholder_of(tokenizer)

    def _checked_save(self, request: Any, name: object, wanted: Wanted) -> Save:
        memory_files.check_new(name)
        if not self._saves:
            raise ValueError(f"save {name!r}: expected an engine that saves, got one that only reads")
        ids = request.prompt_token_ids
        if ids is None or request.prompt_embeds is not None or request.mm_features:
            raise ValueError(f"save {name!r}: expected a prompt of token ids, got one with embeddings or images")
        (placeholder, text), reader = self._placeholder, self._reader(request)
        source = hashlib.sha256(json.dumps([reader, wanted.digest, ids]).encode()).hexdigest()
        about: dict[str, Any] = {"tokens": len(ids), "context_tokens": wanted.context_tokens + len(ids) - wanted.tokens}
        about |= {"placeholder": placeholder, "text": text, "reader": reader, "source": source}
        return Save(str(name), about, wanted.tokens)

    def _is_saved(self, save: Save) -> bool:
        try:
            about, _ = memory_files.about(self._store, save.memory)
        except (memory_files.Missing, memory_files.Damaged):
            return False
        if about.source != save.about["source"]:
            raise ValueError(f"save {save.memory!r}: expected a new name or the same prompt's, got another memory's")
        return True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The memory's tokens that no block of the prefix cache has."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None:
            return 0, False
        if wanted.refusal is not None:
            # A load that runs beside the passes can fail before one: the request ends with an error, and no other.
            return 1, True
        return max(wanted.tokens - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes what to load into the request's blocks."""
        wanted = self._wanted.get(request.request_id)
        if wanted is None or not num_external_tokens:
            return
        if wanted.refusal is not None:
            self._pending.refused.append(request.request_id)
            return
        start, blocks_here = wanted.tokens - num_external_tokens, list(blocks.get_block_ids()[0])
        self._pending.loads.append(Load(wanted.memory, wanted.digest, start, wanted.tokens, blocks_here))

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """What the workers of this step load, and which prompts they save, as it computes the last of their tokens."""
        pending, self._pending = self._pending, Step()
        for name, count in scheduler_output.num_scheduled_tokens.items():
            if name not in self._to_save:
                continue
            request, save = self._to_save[name]
            if request.num_computed_tokens + count >= request.num_prompt_tokens:
                (blocks,) = scheduler_output.kv_connector_block_state.get_block_ids(name)
                pending.saves.append(replace(save, block_ids=list(blocks)))
                del self._to_save[name]
        return pending

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request; reasons, and what was saved, go to where vLLM hands on such parameters."""
        self._to_save.pop(request.request_id, None)
        wanted = self._wanted.pop(request.request_id, None) or Wanted()
        if wanted.save is not None:
            try:
                if self._is_saved(wanted.save):
                    return False, {"saved": wanted.save.memory}
                wanted.unsaved = f"save {wanted.save.memory!r}: not written; the server's log has the reason"
            except Exception as error:
                wanted.unsaved = str(error)
        reason = wanted.refusal or wanted.unsaved
        return False, None if reason is None else {"error": reason}

    # In a worker's process.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Writes all layers of the step's memories; one that fails fails the requests of its blocks."""
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        self._refused.update(step.refused)
        for load in step.loads:
            blocks = load.block_ids[load.start // self._block_size : -(-load.stop // self._block_size)]
            try:
                self._load(load)
                self._not_loaded.difference_update(blocks)
            except Exception as error:
                logger.error("memory %r could not be loaded: %s", load.memory, error)
                self._not_loaded.update(blocks)
                self._bad_blocks.update(blocks)

    @torch.no_grad()
    def _load(self, load: Load) -> None:
        layers = self._layers()
        slots = self._slots(load.block_ids, load.start, load.stop, layers[0].kv_cache.device)
        memory = self._memory(load, slots.device)
        for index, layer in layers.items():
            # [2, tokens, heads, size]; each backend knows its own layout of the cache.
            key, value = memory[index][:, load.start : load.stop]
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)

    def _layers(self) -> dict[int, Any]:
        """The layers with a cache, by number."""
        return {
            extract_layer_index(name): layer
            for name, layer in self._vllm_config.compilation_config.static_forward_context.items()
            if isinstance(getattr(layer, "kv_cache", None), torch.Tensor) and hasattr(layer, "impl")
        }

    def _slots(self, block_ids: list[int], start: int, stop: int, device: torch.device) -> torch.Tensor:
        places = torch.arange(start, stop)
        slots = torch.tensor(block_ids)[places // self._block_size] * self._block_size
        return (slots + places % self._block_size).to(device)

    def _memory(self, load: Load, device: torch.device) -> torch.Tensor:
        """[layers, 2, tokens, heads, size], kept for the requests that follow."""
        place = load.memory, load.digest
        if place not in self._held:
            values = memory_files.values(self._store, load.memory, load.digest)
            self._held[place] = values.to(device, self._dtype)
        self._held.move_to_end(place)
        while len(self._held) > 1 and sum(held.nbytes for held in self._held.values()) > self._budget:
            self._held.popitem(last=False)
        return self._held[place]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The refused requests, as loads that failed."""
        refused, self._refused = self._refused, set()
        return KVConnectorTransferResults(finished_recving=refused, failed_recving=set(refused))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks whose memory could not be loaded."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: `start_load_kv` has written all layers."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: `wait_for_save` reads all layers."""

    def wait_for_save(self) -> None:
        """Writes the step's memories; the answers of those that fail say so."""
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        for save in step.saves:
            try:
                self._save(save)
            except FileExistsError:
                logger.info("save %r: another request was first", save.memory)
            except Exception as error:
                logger.error("save %r: %s", save.memory, error)

    @torch.no_grad()
    def _save(self, save: Save) -> None:
        if not self._not_loaded.isdisjoint(save.block_ids[: -(-save.before // self._block_size)]):
            raise ValueError("expected the memory that the prompt begins with, which could not be loaded")
        layers, (count, two, heads, size), tokens = self._layers(), self._shape, save.about["tokens"]
        slots = self._slots(save.block_ids, 0, tokens, layers[0].kv_cache.device)
        values = torch.empty(count, two, tokens, heads, size, dtype=self._dtype)
        for index, layer in layers.items():
            kind = type(layer.impl), layer.kv_cache.shape, layer.kv_cache.stride()
            if kind not in self._orders:
                self._orders[kind] = paged.order(layer, self._dtype, heads, size)
            values[index] = paged.read(layer.kv_cache, self._orders[kind], slots, heads, size)
        memory_files.add(self._store, save.memory, values, replace=False, **save.about)


def _check(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuses engines that would read a memory otherwise than its compressor does."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "fail":
        raise ValueError("kv_load_failure_policy: expected fail, as placeholders stand for no text to compute")
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise ValueError("tensor_parallel_size, pipeline_parallel_size: expected 1, as a memory is loaded whole")
    if vllm_config.speculative_config is not None:
        raise ValueError("speculative_config: expected none, as a draft model has no memory")
    if cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        raise ValueError(f"kv_cache_dtype: expected auto, got {cache.cache_dtype}")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    whole = all(type(spec) is FullAttentionSpec and spec.sliding_window is None for spec in specs)
    if len(specs) > 1 or not whole:
        raise ValueError("model: expected full attention and one kind of cache in all layers")
