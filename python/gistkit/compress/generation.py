"""Generation from a memory with transformers' own loop: batched and ragged; each row stops at its own stop token."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from operator import index
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import BaseStreamer, GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from gistkit import hf
from gistkit.common.checks import POSITIONS, check_int
from gistkit.compress.decode import last_of, rope_length
from gistkit.compress.memory import Memory, Task, check_memory
from gistkit.compress.model import SharedModel
from gistkit.compress.steps import LEAST, Tail
from gistkit.compress.tokens import Rows, check_rows, pad
from gistkit.hf.attach import pretrained
from gistkit.hf.cache import CACHE, MemoryCache
from gistkit.layouts import Plan

# New tokens where nothing says how many.
NEW_TOKENS = 256
_TOKEN_BY_TOKEN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Options for which transformers calls the model a second time, another way, or reads more of it than logits.
_BEYOND_LOGITS = (
    "prefill_chunk_size", "guidance_scale", "assistant_early_exit", "dola_layers", "use_mtp", "token_healing",
    "output_attentions", "output_hidden_states",
)  # fmt: skip


@torch.no_grad()
def generate(
    compressor: Any,
    memory: Memory,
    prompt_ids: Any = None,
    attention_mask: Any = None,
    *,
    task: Task = "lm",
    generation_config: GenerationConfig | None = None,
    stop_tokens: int | Iterable[int] | None = None,
    pad_token: int | None = None,
    streamer: BaseStreamer | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Any:
    """Generates tokens after [memory][task token, if any][prompt]; the memory is not changed.

    The loop is transformers' own, `GenerationMixin.generate`. It decodes greedily by default, even if the model's
    generation_config samples; pass `generation_config=model.generation_config` to use that.

    In eval mode, answers of 8 tokens or more are prepared: the reader's LoRA adapter is merged into its weights, as in
    `Compressor.folded`, and on a GPU single tokens run in a cache of fixed size, by a pass captured once as a CUDA
    graph. Both are kept for the next answer until weights change, `train()` is called or the model moves. Beams, drafts
    and the cases that `gistkit.compress.steps.Steps` lists run without them. In float32 the tokens are the same, unless
    two are equally likely to within rounding. In bfloat16 they may differ, because sums are rounded at other places.

    If the model's RoPE frequencies depend on the length of a pass (dynamic, longrope), rows are answered one at a time,
    so that an answer depends only on its own row.

    Args:
        memory: what `encode` returned; one row serves any number of prompts.
        prompt_ids: int64 [B, T], or lists of ids of any lengths, or a tokenizer's output; None: no prompt.
        attention_mask: [B, T], 0 on padding at either end of a row.
        task: "ae" reconstructs the context, "lm" continues it, "qa" answers the prompt.
        generation_config: of transformers. Lengths count the prompt and new tokens, without the memory.
        stop_tokens: ids after which a row ends: one id, several, or () for none. None: eos_token_id of
            `generation_config`, or else of the model's generation_config.
        pad_token: fills a row after its end; a token id or any other number. None: pad_token_id of the same
            configuration, or else the first stop id.
        streamer: receives the prompt, then the new tokens of each step, as transformers' streamers expect.
        generator: of the random numbers, on the model's device; None: torch's global one.
        options: other arguments of `model.generate`: fields of `GenerationConfig`, such as max_new_tokens (default:
            256), do_sample, temperature, top_k (default: all tokens), top_p, num_beams and repetition_penalty; or
            assistant_model, logits_processor, stopping_criteria. The cache is gistkit's own, whatever
            cache_implementation says.

    Returns:
        int64 [B, n], only the new tokens; fewer than max_new_tokens if every row has ended. B is multiplied by
        num_return_sequences if that is set. With return_dict_in_generate, transformers' output with these as
        `sequences`.
    """
    check_memory(memory)
    prompt = (
        pad(((),) * memory.batch_size, compressor.lm.device)
        if prompt_ids is None
        else compressor.rows("prompt_ids", prompt_ids, attention_mask)
    )
    if memory.batch_size == 1 < prompt.batch_size:
        memory = memory.repeat(prompt.batch_size)
    check_rows("prompt_ids", prompt, memory.batch_size)
    width = prompt.ids.shape[1]
    if generator is not None and generator.device != compressor.device:
        raise ValueError(f"generator: expected one on {compressor.device}, got one on {generator.device}")
    config, options = configured(compressor.lm, width, generation_config, stop_tokens, pad_token, options)
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    # Beams change places, and drafts are taken back.
    one_by_one = config.get_generation_mode(options.get("assistant_model")) in _TOKEN_BY_TOKEN

    def answered(memory: Memory, prompt: Rows) -> Any:
        rows = _repeated(memory, prompt, copies)
        reading = Reading(compressor, *rows, task, config.max_new_tokens, behind if one_by_one else None)
        answer = reading.write(padded_at_start(prompt, config), config, streamer, generator, options)
        if not isinstance(answer, Tensor):
            # It holds the cache.
            reading.close()
        return answer

    alone = compressor.lm.changing_rope and prompt.batch_size > 1
    if alone and (config.return_dict_in_generate or streamer is not None):
        name = "streamer" if streamer is not None else "return_dict_in_generate"
        raise ValueError(
            f"{name}: expected none for several rows, which a model whose RoPE depends on the length of a pass reads "
            f"one at a time, got {prompt.batch_size} rows"
        )
    with answering(compressor, config.max_new_tokens) as behind:
        if not alone:
            return answered(memory, prompt)
        answers = [answer for row, one in enumerate(prompt.alone()) for answer in answered(memory[row], one)]
        return pad_sequence(answers, batch_first=True, padding_value=_filler(config))


def _filler(config: GenerationConfig) -> int:
    """What fills rows after their end, as in transformers' loop; 0 if no token ends a row."""
    ends = config.eos_token_id
    first = (ends or [None])[0] if isinstance(ends, list) else ends
    return int((first if config.pad_token_id is None else config.pad_token_id) or 0)


def configured(
    model: SharedModel,
    width: int,
    generation_config: GenerationConfig | None,
    stop_tokens: int | Iterable[int] | None,
    pad_token: int | None,
    options: dict[str, Any],
) -> tuple[GenerationConfig, dict[str, Any]]:
    """A complete configuration of the loop, and the options that are no part of it.

    Args:
        width: tokens of the prompt, with padding.
        others: as in `generate`.
    """
    if options.get("max_new_tokens") is not None:
        check_int("max_new_tokens", options["max_new_tokens"], high=POSITIONS)
    config = GenerationConfig() if generation_config is None else copy.deepcopy(generation_config)
    rest = config.update(**options)
    for name in _BEYOND_LOGITS:
        value = getattr(config, name, None)
        if value and not (name == "guidance_scale" and value == 1):
            raise ValueError(
                f"{name}: expected none, because each step has only the logits of one pass over a memory and a prompt, "
                f"got {value}"
            )
    # The cache is the memory's own, whatever is asked of the model's.
    config.cache_implementation = config.max_cache_len = None
    if config.max_new_tokens is None:
        length = config.max_length
        config.max_new_tokens = NEW_TOKENS if length is None else length - width
    config.max_length = None
    check_int("max_new_tokens", config.max_new_tokens, high=POSITIONS)
    if generation_config is None and config.do_sample and config.top_k is None:
        # Transformers' own default is 50.
        config.top_k = 0
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(config, name) is None:
            setattr(config, name, getattr(special_tokens(model), name))
    if stop_tokens is not None:
        config.eos_token_id = stop_ids(model, stop_tokens) or None
    if pad_token is not None:
        config.pad_token_id = pad_token
    return config, rest


def special_tokens(model: SharedModel) -> Any:
    """What names the special tokens of a model: its generation_config, or else its configuration."""
    language_model: Any = pretrained(model.model)
    return getattr(language_model, "generation_config", None) or model.config


def _repeated(memory: Memory, prompt: Rows, copies: int) -> tuple[Memory, Rows]:
    """Each row `copies` times, as beams go on from it."""
    if copies == 1:
        return memory, prompt
    rows = [row for row in range(memory.batch_size) for _ in range(copies)]
    repeated = memory.repeat(copies) if memory.batch_size == 1 else memory[rows]
    return repeated, Rows(prompt.ids[rows], tuple(prompt.lengths[row] for row in rows))


def padded_at_start(rows: Rows, config: GenerationConfig) -> Tensor:
    """The ids [B, N] with their padding before each row, where transformers expects it."""
    width = rows.ids.shape[1]
    source = torch.arange(width) - (width - torch.tensor(rows.lengths)[:, None])
    ids = rows.ids.gather(1, source.clamp(min=0).to(rows.ids.device))
    return ids.masked_fill((source < 0).to(ids.device), max(config.pad_token_id or 0, 0))


def _refuse_pass(tokens: int) -> None:
    """The guard of a cache beside which passes of a compressor read more."""
    raise ValueError(
        f"{CACHE}: expected the same number of tokens in each head and no fitted biases, as the model's own attention "
        "needs, got a memory with packed keys or biases; use generate, which takes any"
    )


@contextmanager
def _drawing_from(generator: torch.Generator | None) -> Iterator[None]:
    """Inside, torch's global random numbers on a generator's device are that generator's."""
    if generator is None:
        yield
        return
    numbers: Any = torch if generator.device.type == "cpu" else getattr(torch, generator.device.type)
    where = () if generator.device.type == "cpu" else (generator.device,)
    before = numbers.get_rng_state(*where)
    numbers.set_rng_state(generator.get_state(), *where)
    try:
        yield
    finally:
        generator.set_state(numbers.get_rng_state(*where))
        numbers.set_rng_state(before, *where)


class Loop(GenerationMixin):
    """Whatever reads tokens one after another, as a model that transformers' generation loop runs.

    What the loop asks of it besides, such as the configuration, is the language model's.

    Args:
        lm: makes logits of hidden states.
        cache: what beams reorder, and what rejected drafts are cut from; None: there can be neither.
    """

    main_input_name = "input_ids"

    def __init__(self, lm: SharedModel, cache: MemoryCache | None = None) -> None:
        # What transformers' loop fills from it would hide what `configured` found.
        self.generation_config = GenerationConfig()
        self._model = pretrained(lm.model)
        self.lm, self.cache = lm, cache

    def __getattr__(self, name: str) -> Any:
        if name == "_model":
            raise AttributeError(name)
        return getattr(self._model, name)

    @abstractmethod
    def states(self, input_ids: Tensor) -> Tensor:
        """Reads what is new in the prompt's and the new tokens [B, P + n]; the hidden states [B, m, d] of its end.

        Those of the new tokens that were not read, and of the one before them if it was not read either, come last.
        """

    def write(
        self,
        prompt: Tensor,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
        generator: torch.Generator | None,
        options: dict[str, Any],
    ) -> Any:
        """What `generate` returns.

        Args:
            prompt: int64 [B, P], padded at the start; what `states` has of it need not be all.
            config, options: what `configured` returned.
            streamer, generator: as in `generate`.
        """
        kept: dict[str, Any] = {CACHE: self.cache}
        if self.cache is None:
            mode = config.get_generation_mode(options.get("assistant_model"))
            sequences = config.num_return_sequences or 1
            if mode not in _TOKEN_BY_TOKEN or sequences > 1:
                raise ValueError(
                    "generation_config: expected greedy_search or sample of one sequence, because the cache continues "
                    f"with one answer, got {mode.value} of {sequences}"
                )
            config.use_cache, kept = False, {}
        width = prompt.shape[1]
        if not width:
            # From no tokens transformers goes on only where there are embeddings, here none of its own.
            kept["inputs_embeds"] = self.lm.embed.weight.new_empty(len(prompt), 0, self.lm.width)
        with _drawing_from(generator):
            answer: Any = self.generate(
                prompt if width else None,
                generation_config=config,
                # `states` knows each row's padding.
                attention_mask=torch.ones_like(prompt),
                streamer=streamer,
                **kept,
                **options,
            )
        if isinstance(answer, Tensor):
            return answer[:, width:]
        answer.sequences = answer.sequences[:, width:]
        return answer

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The arguments of `forward`: all tokens, of which `states` knows those it has read."""
        return {"input_ids": input_ids}

    # The loop checks the names of arguments, of which the cache's depends on transformers' release.
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The logits of `states`."""
        logits = self.lm.logits(self.states(input_ids.to(self.lm.device)))
        kept: dict[str, Any] = {} if self.cache is None else {CACHE: self.cache}
        return CausalLMOutputWithPast(logits=logits, **kept)

    __call__ = forward


# What reads single tokens behind a cache, the rows of a plan from one on; None: nothing but the model's own loop.
Behind = Callable[[MemoryCache, Plan, int], Tail | None]


def folded(compressor: Any) -> AbstractContextManager[None]:
    """Inside, memories are read by copies of the linear maps with the LoRA adapter merged into their weights.

    A token then needs no separate products with the adapter. `generate`, `ask` and `Conversation` do this automatically
    for answers of several tokens; a `LanguageModel` and its `Stream`s also run faster inside. The copies take as much
    memory as the maps with LoRA, until the compressor is trained or moved. They are sums in float32, rounded to the
    weights' dtype. In float32 the tokens are the same, unless two are equally likely to within rounding; in bfloat16 an
    answer may differ. Only passes without gradients in eval mode use the copies, and parameters must not change inside.
    Maps with adapters other than plain LoRA are not copied.
    """
    return compressor.lm.folded(compressor.reader, compressor.identity.versions())


@contextmanager
def answering(compressor: Any, tokens: int) -> Iterator[Behind | None]:
    """Inside, the model reads a memory and writes at most so many tokens, prepared for that as far as it pays.

    The weights have the reader's adapter in them (`Compressor.folded`), and what is given makes a `steps.Tail`.
    """
    lm, role = compressor.lm, compressor.reader
    with lm.using(role), lm.without_checkpointing(), ExitStack() as stack:
        if tokens < LEAST or lm.decoder.training:
            yield None
            return
        versions = compressor.identity.versions()
        # An answer without is slower, and needs no more memory than the model.
        with suppress(torch.OutOfMemoryError):
            stack.enter_context(lm.folded(role, versions))
        if not lm.steps.serves(lm.device):
            yield None
            return
        with lm.steps.used():
            yield partial(lm.steps.behind, lm, role, versions)


class Passes:
    """Passes over the rows of a plan, one after another, with one cache.

    Args:
        compressor: reads, inside `using(compressor.reader)`.
        cache: what they go on from.
        behind: reads single tokens where it can.
    """

    def __init__(self, compressor: Any, cache: MemoryCache, behind: Behind | None = None) -> None:
        self._compressor, self._cache, self.behind = compressor, cache, behind
        self._tail: Tail | None = None
        # What was asked for the tail, and for which plan.
        self._asked: tuple[Behind | None, Plan | None] = None, None

    def settle(self) -> None:
        """Gives the cache what single tokens have left elsewhere, which another answer may overwrite."""
        if self._tail is not None:
            self._tail.settle()
            self._tail, self._asked = None, (None, None)

    @property
    def cache(self) -> MemoryCache:
        """The cache, with all that was read."""
        self.settle()
        return self._cache

    @property
    def position(self) -> int:
        """The cache's position of the next token."""
        return self._cache.get_seq_length() + (0 if self._tail is None else self._tail.count)

    def read(self, tokens: Tensor, plan: Plan, first: int, lead: Tensor | None = None) -> Tensor:
        """Hidden states [B, k + n, d] of the rows of a plan from `first` on; new ones may overwrite those of one row.

        Args:
            tokens: int64 [B, n].
            lead: embeddings [B, k, d] before them.
        """
        if tokens.shape[1] == 1 and lead is None and self.behind is not None:
            if self._asked[0] is not self.behind or self._asked[1] is not plan:
                self._tail, self._asked = self.behind(self.cache, plan, first), (self.behind, plan)
            if self._tail is not None:
                return self._tail.read(tokens)
        compressor, lm = self._compressor, self._compressor.lm
        # Models may choose tokens for which they have no embedding, and rows that have ended are fed any token.
        inputs = lm.embedded(compressor.reader, tokens.clamp(0, lm.vocabulary - 1))
        if lead is not None:
            inputs = torch.cat([lead, inputs], 1)
        if not inputs.shape[1]:
            return inputs
        end = first + inputs.shape[1]
        rows = plan.rows(first, end, num_keys=plan.num_keys - plan.num_queries + end)
        cache = self.cache
        more: dict[str, Any] = {"memory": cache.packed, "key_bias": cache.key_biases, "rope_length": cache.rope_length}
        if lm.changing_rope and cache.rope_length is None:
            # What follows has the frequencies of the keys that are cached now.
            cache.rope_length = int(cast(Tensor, rows.positions).max()) + 1
        out = lm.run(compressor.reader, inputs_embeds=inputs, plan=rows, cache=cache, **more)
        return cast(Tensor, out.last_hidden_state)


class Reading(Loop):
    """[memory][task token, if any][rest][prompt], and the new tokens after them.

    It is used inside `compressor.lm.using(compressor.reader)`.

    Args:
        compressor, memory, task: as in `generate`; the memory on the model's device.
        prompt: checked, of the memory's rows.
        count: tokens to generate, of which the last one is not read; more make a longer plan.
        behind: what `answering` gave.
    """

    cache: MemoryCache

    def __init__(
        self,
        compressor: Any,
        memory: Memory,
        prompt: Rows,
        task: Task,
        count: int,
        behind: Behind | None = None,
    ) -> None:
        lm, batch = compressor.lm, memory.batch_size
        super().__init__(lm)
        if not torch.is_autocast_enabled(lm.device.type):
            memory = memory.to(dtype=lm.embed.weight.dtype)
        self._compressor, self._memory, self._prompt, self._task = compressor, memory, prompt, task
        self._remainder = pad(memory.rest if task != "ae" else ((),) * batch, lm.device)
        self.plan = self._plan(count - 1)
        lead = compressor.task_embedding(task, memory)
        parts = [lead, *(lm.embedded(compressor.reader, part.ids) for part in (self._remainder, prompt))]
        skip = 0
        if memory.embeddings is not None:
            skip = memory.num_tokens
            parts = [memory.embeddings.to(lead.dtype), *parts]
        self.lead = torch.cat(parts, 1)
        self._predicts_first = not lead.shape[1]
        # A row's last token is the prompt's, or that of the remainder, or what precedes it: the task token, or the
        # memory.
        self._last = torch.tensor(
            [
                skip + (self._remainder.ids.shape[1] + length if length else previous)
                for previous, length in zip(self._remainder.lengths, prompt.lengths, strict=True)
            ]
        )
        # Captured passes have a cache of their own.
        room = self.plan.num_queries if behind is None else self.lead.shape[1]
        self.cache = new_cache(compressor, memory, room)
        self._passes = Passes(compressor, self.cache, behind)
        self._start = self._passes.position

    def _plan(self, new_tokens: int) -> Plan:
        new = Rows(
            torch.zeros(self._memory.batch_size, new_tokens, dtype=torch.int64), (new_tokens,) * self._memory.batch_size
        )
        texts = (self._remainder, self._prompt, new)
        return self._compressor.reading_plan(self._memory, self._task, texts, "max_new_tokens")

    def read(self, tokens: Tensor) -> Tensor:
        """Reads new tokens int64 [B, n] and returns their hidden states [B, n, d].

        At first it reads what stands before them too, and returns [B, 1 + n, d]; the first predicts the first new one.
        """
        before = self._passes.position - self._start
        new_tokens = max(before - self.lead.shape[1], 0) + tokens.shape[1]
        if self.lead.shape[1] + new_tokens > self.plan.num_queries:
            self.plan = self._plan(new_tokens)
        out = self._passes.read(tokens, self.plan, before, None if before else self.lead)
        if before:
            return out
        new = out[:, self.lead.shape[1] :]
        if self._predicts_first:
            out = torch.cat([last_of(self._memory)[:, None].to(out.dtype), out], 1)
        return torch.cat([out[torch.arange(len(out)), self._last][:, None], new], 1)

    def close(self) -> None:
        """Leaves all that was read in the cache, over which the model itself may read on, if it can."""
        self._passes.settle()
        if self.cache.packed is not None or self.cache.key_biases is not None:
            hf.cover_memory(self._model)
            self.cache.guard = _refuse_pass

    def states(self, input_ids: Tensor) -> Tensor:
        read = max(self._passes.position - self._start - self.lead.shape[1], 0)
        return self.read(input_ids[:, self._prompt.ids.shape[1] + read :])


def stop_ids(model: SharedModel, stop_tokens: int | Iterable[int] | None) -> list[int]:
    """The ids that end a row, sorted; None: those of the model's generation_config."""
    if stop_tokens is None:
        stop_tokens = special_tokens(model).eos_token_id
        stop_tokens = () if stop_tokens is None else stop_tokens
    try:
        return sorted(map(index, stop_tokens if isinstance(stop_tokens, Iterable) else [stop_tokens]))
    except TypeError as error:
        raise TypeError(f"stop_tokens: expected token ids, got {stop_tokens!r}") from error


def new_cache(compressor: Any, memory: Memory, capacity: int) -> MemoryCache:
    """A cache with the memory's keys, or empty where the memory is embeddings or packed, for `capacity` more rows."""
    start, read_as = max(memory.starts), memory.read_as
    if read_as is None or isinstance(read_as, hf.PackedLayers):
        cache = hf.empty_cache(compressor.lm.config.num_hidden_layers, start, capacity, read_as)
    else:
        cache = hf.memory_cache(read_as, start, capacity=capacity)
        cache.key_biases = compressor.key_biases(memory)
    cache.rope_length = rope_length(compressor, memory)
    return cache
