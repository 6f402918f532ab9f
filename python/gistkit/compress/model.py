"""SharedModel: one transformers model for all passes, each with the adapters or the copied maps of its rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import RLock
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gistkit import hf, layouts
from gistkit.compress.adapters import Adapters, Copies, Use, check_copied, first_adapter
from gistkit.compress.steps import Steps
from gistkit.hf.attach import checkpointed, pretrained, probed
from gistkit.hf.cache import CACHE, MemoryCache
from gistkit.hf.logits import logits_of
from gistkit.hf.rotation import rotating_as
from gistkit.layouts import Plan

if TYPE_CHECKING:
    from peft import LoraConfig

# By decoder: a copy of a model has its own.
_TURNS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()


class SharedModel:
    """A causal language model that encodes and decodes, on gistkit's attention, with LoRA adapters by role.

    Args:
        model: a transformers causal language model; all passes use its one copy of the weights. Only `install` changes
            it, after all arguments have been checked.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a transformers causal language model, got {type(model).__name__}")
        _refuse_learned_prompts(model)
        self.model = model
        # Refuses what is no transformers model, before anything is asked of it.
        self._structure = 0, hf.structure(model)
        if self.head is None:
            raise TypeError(f"model: expected one with a language model head, got {type(model).__name__}")
        self._refuse_offloaded(model.modules())
        self.traits = probed(model)
        if self.traits.embeddings is not None:
            raise TypeError(
                "model: expected one that reads embeddings in place of tokens, as all compressors do, got "
                f"{type(model).__name__}: {self.traits.embeddings}"
            )
        self._logits = logits_of(pretrained(model))
        if self._logits.after != 1.0 and self.head.bias is not None:
            raise TypeError(f"model: expected scaled logits without a bias, got {type(model).__name__} with both")
        self.windows = hf.sliding_windows(model)
        # Whether RoPE's frequencies depend on the length of a pass.
        self.changing_rope = bool(hf.changing_rope(model))
        # Key heads and head dim of each layer.
        self.head_shapes: list[tuple[int, int]] = hf.head_shapes(self.config)
        self._use: Use = None
        self.adapters: Adapters | None = None
        self.copies: Copies | None = None
        # How often each role is folded now, and what undoes it.
        self._folded: dict[str, tuple[int, ExitStack]] = {}
        self.steps = Steps()
        # The model's own, once it is loaded.
        self.tokenizer: Any = None

    def install(
        self,
        lora: Mapping[str, LoraConfig] | None,
        copies: str | None = None,
        *,
        norms: bool = False,
        by_role: bool = False,
    ) -> None:
        """Puts LoRA adapters {role: config} into the model, or none, and copies of its linear maps beside it.

        Args:
            lora: None: the model's own weights train, without adapters.
            copies: the role whose tokens have copies of the layers' linear maps; None: there are none.
            norms: and copies of their norms.
            by_role: a single adapter is for the tokens of its role, and tokens of no role have none.
        """
        if lora is None and (adapter := first_adapter(self.model)) is not None:
            raise ValueError(
                f"lora: expected a model without adapters for lora=None, which trains the model's own weights, got an "
                f"adapter at {adapter}"
            )
        for config in (lora or {}).values() if copies is not None else ():
            check_copied(self.model, config)
        if lora is not None:
            self.adapters = Adapters(cast(Any, self.model), lora, by_role)
        if copies is not None:
            self.copies = Copies(self.model, copies, norms=norms)

    @property
    def embed(self) -> nn.Embedding:
        """The model's input embedding."""
        return cast(Any, self.model).get_input_embeddings()

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows; `resize_token_embeddings` changes them."""
        return int(self.embed.weight.shape[0])

    @property
    def structure(self) -> str:
        """See `gistkit.hf.structure`."""
        if self._structure[0] != self.vocabulary:
            self._structure = self.vocabulary, hf.structure(self.model)
        return self._structure[1]

    @property
    def width(self) -> int:
        """Size d of an input embedding."""
        return int(self.embed.weight.shape[1])

    @property
    def head(self) -> nn.Linear:
        """The model's output embedding, weight [V, d]."""
        return cast(Any, self.model).get_output_embeddings()

    @property
    def decoder(self) -> nn.Module:
        """The decoder stack, without the language model head."""
        return cast(Any, self.model).get_decoder()  # type: ignore[no-any-return]

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        return cast(Any, self.model).config.get_text_config()

    @property
    def device(self) -> torch.device:
        """Where the model is; a ValueError if accelerate offloads its weights."""
        self._refuse_offloaded([self.embed])
        return self.embed.weight.device

    def _refuse_offloaded(self, modules: Iterable[nn.Module]) -> None:
        # Without accelerate's hook a model on device meta has only shapes, which are enough to make a compressor.
        hooked = (module for module in modules if hasattr(module, "_hf_hook"))
        if any(weight.is_meta for module in hooked for weight in module.parameters(recurse=False)):
            raise ValueError(
                "model: expected weights that stay on a device, got some on device meta, as accelerate.cpu_offload "
                "leaves them between passes; a compressor reads weights itself, such as the embeddings"
            )

    def causal_plan(self, length: int) -> Plan:
        """Plain causal attention with the model's sliding windows, also for rows that are padded at their end."""
        return layouts.causal(length).compile(windows=self.windows, device=self.device)

    @property
    def softcap(self) -> float | None:
        """The model's cap on its final logits, if it has one."""
        return self._logits.softcap

    @property
    def logit_scale(self) -> float:
        """The model's factor of its logits, such as Cohere's logit_scale or Granite's 1 / logits_scaling."""
        return self._logits.before * self._logits.after

    def first_token(self, name: str, token: int | None) -> int:
        """`token`; if it is None, the first token, or else the end token, of the model's configuration.

        Errors name the argument `name`.
        """
        if token is None:
            values = (getattr(self.config, f"{kind}_token_id", None) for kind in ("bos", "eos"))
            candidates = (value[0] if isinstance(value, list) and value else value for value in values)
            token = next((value for value in candidates if isinstance(value, int)), None)
            if token is None:
                raise ValueError(
                    f"{name}: expected a token id, because the model's configuration has no first or end token, "
                    "got None"
                )
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocabulary:
            raise ValueError(f"{name}: expected a token id in [0, {self.vocabulary}), got {token!r}")
        return token

    def readout(self, hidden_states: Tensor) -> Tensor:
        """Hidden states as the losses take them: the output embedding and its bias make the logits from them."""
        return hidden_states if self.logit_scale == 1.0 else hidden_states * self.logit_scale

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [..., V] of hidden states, fp32, with the model's scale and cap if it has them."""
        logits = self.head(self.readout(hidden_states)).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def run(self, use: Use, cache: MemoryCache | None = None, rope_length: int | None = None, **inputs: Any) -> Any:
        """One pass of the decoder stack with a cache, or without; other arguments and the result are the model's.

        Args:
            use: the role whose adapter the pass runs with, or {role: rows}, or None for the base model.
            rope_length: tokens of another pass, whose frequencies a RoPE that changes with it has; None: this one's.
        """
        other = rope_length is not None and self.changing_rope
        with self.using(use), rotating_as(self.model, cast(int, rope_length)) if other else nullcontext():
            return self.decoder(use_cache=cache is not None, **inputs, **({} if cache is None else {CACHE: cache}))

    def embedded(self, use: Use, ids: Tensor) -> Tensor:
        """Input embeddings [B, N, d] of ids with the adapters of `use`, as in `run`: LoRA may be on embeddings."""
        with self.turn(), nullcontext() if self.adapters is None else self.adapters.using(use):
            return cast(Tensor, self.embed(ids))

    def gradient_checkpointing_enable(self) -> None:
        """Keeps only each layer's inputs for the backward pass, which computes everything else again."""
        # The name differs between releases of transformers.
        enable = getattr(self.model, "activation_checkpointing_enable", None)
        (enable or self.model.gradient_checkpointing_enable)(
            {"use_reentrant": False, "context_fn": self._checkpoint_contexts}
        )

    def gradient_checkpointing_disable(self) -> None:
        """Undoes `gradient_checkpointing_enable`."""
        disable = getattr(self.model, "activation_checkpointing_disable", None)
        (disable or self.model.gradient_checkpointing_disable)()

    @contextmanager
    def without_checkpointing(self) -> Iterator[None]:
        """Inside, layers keep their cache, which gradient checkpointing disables in training mode."""
        modules: list[Any] = checkpointed(self.decoder)
        for module in modules:
            module.gradient_checkpointing = False
        try:
            yield
        finally:
            for module in modules:
                module.gradient_checkpointing = True

    def refuse_foreign_checkpointing(self) -> None:
        """Refuses gradient checkpointing that would run layers again in another state than the first time."""
        for module in checkpointed(self.decoder):
            if module.training:
                function = getattr(module, "_gradient_checkpointing_func", None)
                if getattr(function, "keywords", {}).get("context_fn") != self._checkpoint_contexts:
                    raise ValueError(
                        "model: expected gradient checkpointing to be off, or enabled by the compressor's own "
                        "gradient_checkpointing_enable(), got it enabled on the model"
                    )

    def check_positions(self, name: str, last: int) -> None:
        """Warns of position IDs beyond the model's limit; raises an error if the model has a table of positions."""
        limit = getattr(self.config, "max_position_embeddings", None)
        if limit is not None and last >= limit:
            if not hasattr(self.decoder, "rotary_emb"):
                raise ValueError(
                    f"{name}: expected position IDs below {limit}, the size of the model's table of positions, "
                    f"got {last}"
                )
            warnings.warn(
                f"position IDs reach {last}, beyond the model's max_position_embeddings of {limit}", stacklevel=4
            )

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """The model attached, with the adapters of `use` as in `run`. One thread at a time: others wait."""
        with self.turn(), self._as(use):
            yield

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The model attached, for passes that follow each other. One thread at a time: others wait."""
        with self.turn(), hf.attach(self.model):
            yield

    def turn(self) -> RLock:
        """The lock of a thread that changes the model for a pass; compressors of one model share it."""
        return _TURNS.setdefault(self.decoder, RLock())

    @contextmanager
    def _as(self, use: Use) -> Iterator[None]:
        before = self._use
        with ExitStack() as stack:
            stack.enter_context(hf.attach(self.model))
            if self.adapters is not None:
                stack.enter_context(self.adapters.using(use))
            if self.copies is not None:
                stack.enter_context(self.copies.using(use))
            self._use = use
            try:
                yield
            finally:
                self._use = before

    @contextmanager
    def folded(self, role: str | None, versions: Any) -> Iterator[None]:
        """Inside, the adapter of a role is part of the weights it is on; see `Adapters.folded`.

        Openings of one role may overlap in any order, as those of threads do: the last to close undoes the first.
        """
        if self.adapters is None or role is None:
            yield
            return
        with self.turn():
            count, stack = self._folded.get(role, (0, ExitStack()))
            if not count:
                stack.enter_context(self.adapters.folded(role, versions))
            self._folded[role] = count + 1, stack
        try:
            yield
        finally:
            with self.turn():
                count, stack = self._folded.pop(role)
                if count > 1:
                    self._folded[role] = count - 1, stack
                else:
                    stack.close()

    def release(self) -> None:
        """Frees what `folded` and `steps` have kept for the next answer."""
        with self.turn():
            self.steps.clear()
            if self.adapters is not None:
                self.adapters.unfold()

    @contextmanager
    def all_rows_as(self, role: str) -> Iterator[None]:
        """Inside a pass by role, the layers' maps use those of `role` for all rows."""
        with ExitStack() as stack:
            for holder in (self.adapters, self.copies):
                if holder is not None:
                    stack.enter_context(holder.role_maps.all_rows_as(role))
            yield

    def _checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # A layer runs again in the backward pass as it did in the forward pass: attached, with the same adapters. On a
        # GPU that is a thread of autograd, for which the one that has its turn waits.
        return nullcontext(), self._as(self._use)


class ModelMixin:
    """What a compressor has of its model: what it is made of, its adapters, and the fingerprints of the weights."""

    lm: SharedModel
    identity: Any

    @property
    def embed(self) -> nn.Embedding:
        """The model's input embedding."""
        return self.lm.embed

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        return self.lm.config

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.lm.device

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return self.lm.vocabulary

    @property
    def encoder_lm(self) -> SharedModel:
        """The model that encodes, whose adapters or own weights train: `lm` itself without a second model."""
        return self.lm

    @property
    def adapters(self) -> Adapters | None:
        """The compressor's LoRA adapters by role; None if the encoding model's own weights train."""
        return self.encoder_lm.adapters

    @property
    def keeps_base(self) -> bool:
        """Whether the model that reads stays as it was."""
        return self.adapters is not None or self.encoder_lm is not self.lm

    @property
    def needs_base(self) -> bool:
        """Whether its folder holds no model that reads, because nothing has changed the one it was made around."""
        return self.keeps_base or self.identity.untouched

    def fingerprints(self) -> tuple[str, str]:
        """Fingerprints of the base model and of the compressor's own weights, computed again if weights change."""
        return self.identity.fingerprints()

    def fingerprint(self) -> str:
        """That of the base model."""
        return self.fingerprints()[0]

    def own_fingerprint(self) -> str:
        """That of the compressor's own weights."""
        return self.fingerprints()[1]

    def using(self, use: Use) -> AbstractContextManager[None]:
        """See `SharedModel.using`."""
        return self.lm.using(use)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [..., V] of hidden states, fp32, scaled and capped as the model does."""
        return self.lm.logits(hidden_states)

    def gradient_checkpointing_enable(self) -> None:
        """Keeps only each layer's inputs for the backward pass, which computes everything else again."""
        for lm in {self.lm, self.encoder_lm}:
            lm.gradient_checkpointing_enable()

    def gradient_checkpointing_disable(self) -> None:
        """Undoes `gradient_checkpointing_enable`."""
        for lm in {self.lm, self.encoder_lm}:
            lm.gradient_checkpointing_disable()


def of_models(name: str) -> bool:
    """Whether a compressor's parameter, by its name, is one of the model's, or of an encoder's beside it."""
    return name.startswith(("model.", "encoder."))


def _refuse_learned_prompts(model: nn.Module) -> None:
    """Refuses what acts in the forward of a PEFT model, which no pass of a compressor runs."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for name, config in (configs if isinstance(configs, dict) else {}).items():
            if getattr(config, "is_prompt_learning", False) or getattr(config, "alora_invocation_tokens", None):
                kind = getattr(config.peft_type, "value", config.peft_type)
                raise TypeError(
                    "model: expected one without a learned prompt or an adapter that tokens invoke, which act only "
                    f"in the forward of {type(module).__name__}, got the adapter {name} of type {kind}"
                )
