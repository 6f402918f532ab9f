"""GistConnector: a memory as the computed prefix of a vLLM request.

A request names a memory in `kv_transfer_params` = {"memory": NAME}. Its prompt begins with as many placeholder tokens
as the memory has tokens, which `front.Front` writes. vLLM takes those as computed, and the connector writes the
memory's keys and values into their slots of the paged cache before the pass that reads the rest.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
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
from vllm.v1.kv_cache_interface import FullAttentionSpec

from gistkit_vllm import memory_files

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
class Loads(KVConnectorMetadata):
    """What the scheduler tells the workers of one step: what to load, and ids of requests that are refused."""

    loads: list[Load] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass
class Wanted:
    """What a request asks for, or the reason why it cannot have it."""

    memory: str
    tokens: int = 1
    digest: str = ""
    refusal: str | None = None


class GistConnector(KVConnectorBase_V1):
    """See the module. `kv_connector_extra_config` takes:

    store: the folder of memories that `gistkit export` wrote.
    host_bytes: of memories that a worker keeps on the cache's device for later requests (default: 1 GiB).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        _check(vllm_config, kv_cache_config)
        self._store = Path(transfer.get_from_extra_config("store", "."))
        if not self._store.is_dir():
            raise ValueError(f"store: expected a folder of memories that gistkit export wrote, got {self._store}")
        self._budget = int(transfer.get_from_extra_config("host_bytes", 1 << 30))
        self._block_size = vllm_config.cache_config.block_size
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._shape = model.get_num_layers(parallel), 2, model.get_num_kv_heads(parallel), model.get_head_size()
        self._dtype = model.dtype
        self._reader = memory_files.reader_of(model.model)
        # Of the scheduler.
        self._wanted: dict[str, Wanted] = {}
        self._pending = Loads()
        # Of a worker.
        self._held: OrderedDict[tuple[str, str], torch.Tensor] = OrderedDict()
        self._bad_blocks: set[int] = set()
        self._refused: set[str] = set()

    # In the scheduler's process. What leaves a method here as an error ends the engine.

    def on_new_request(self, request: Any) -> None:
        """Looks for the request's memory, and tells its blocks of the prefix cache apart from those of others."""
        params = request.kv_transfer_params or {}
        if "memory" not in params:
            return
        name = params["memory"]
        try:
            wanted = self._checked(request, name)
            salt = wanted.digest
        except Exception as error:
            logger.error("request %s: %s", request.request_id, error)
            wanted, salt = Wanted(str(name), refusal=str(error)), request.request_id
            # vLLM asks no connector for requests that skip the cache, such as those for the prompt's logprobs.
            request.skip_reading_prefix_cache = False
        self._wanted[request.request_id] = wanted
        # Placeholders are the same for all memories.
        request.cache_salt = f"{salt}:{request.cache_salt or ''}"
        request.block_hashes.clear()
        request.update_block_hashes()

    def _checked(self, request: Any, name: object) -> Wanted:
        about, shape = memory_files.about(self._store, name)
        layers, two, heads, size = self._shape
        if shape != (layers, two, about.tokens, heads, size):
            expected = (layers, two, about.tokens, heads, size)
            raise ValueError(f"memory {name!r}: expected keys and values {expected}, got {shape}, of another model")
        lora = request.lora_request
        reader = self._reader if lora is None else memory_files.reader_of(lora.lora_path)
        if reader != about.reader and not (reader is None and about.reader.startswith("base:")):
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
        return Wanted(str(name), about.tokens, about.digest)

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

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """What the workers of this step load."""
        pending, self._pending = self._pending, Loads()
        return pending

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request; the reason of a refusal goes to where vLLM hands on such parameters."""
        wanted = self._wanted.pop(request.request_id, None)
        return False, None if wanted is None or wanted.refusal is None else {"error": wanted.refusal}

    # In a worker's process.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Writes all layers of the step's memories; one that fails fails the requests of its blocks."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        self._refused.update(loads.refused)
        for load in loads.loads:
            try:
                self._load(load, forward_context.no_compile_layers)
            except Exception as error:
                logger.error("memory %r could not be loaded: %s", load.memory, error)
                first = load.start // self._block_size
                self._bad_blocks.update(load.block_ids[first : -(-load.stop // self._block_size)])

    @torch.no_grad()
    def _load(self, load: Load, layers: dict[str, Any]) -> None:
        places = torch.arange(load.start, load.stop)
        slots = torch.tensor(load.block_ids)[places // self._block_size] * self._block_size
        slots += places % self._block_size
        caches = {
            name: layer
            for name, layer in layers.items()
            if isinstance(getattr(layer, "kv_cache", None), torch.Tensor) and hasattr(layer, "impl")
        }
        device = next(iter(caches.values())).kv_cache.device
        memory, slots = self._memory(load, device), slots.to(device)
        for name, layer in caches.items():
            # [2, tokens, heads, size]; each backend knows its own layout of the cache.
            key, value = memory[extract_layer_index(name)][:, load.start : load.stop]
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)

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
        """Nothing: gistkit makes memories."""

    def wait_for_save(self) -> None:
        """Nothing."""


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
