"""SharedModel: one transformers model in all passes, each with the adapters of its rows."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gistkit import hf, layouts
from gistkit.hf.families import Standing, checkpointed
from gistkit.layouts import Plan

if TYPE_CHECKING:
    from peft import LoraConfig

    from gistkit.compress.adapters import Adapters, Use
    from gistkit.compress.copies import Copies


Maps = Literal["query_value", "query_key_value", "all"]


def adapter_config(
    model: PreTrainedModel, lora: int | LoraConfig | None, maps: Maps = "query_value"
) -> LoraConfig | None:
    """The LoRA configuration that a compressor's `lora` stands for: a rank, one as it is, or None.

    `maps` says which linear maps of the layers a rank is that of.
    """
    if isinstance(lora, bool | str | float):
        raise TypeError(f"lora: expected a rank, a peft.LoraConfig or None, got {lora!r}")
    if not isinstance(lora, int):
        # PEFT writes into what it is given.
        return copy.deepcopy(lora)
    if not isinstance(model, nn.Module):
        return None
    from gistkit.compress.adapters import lora_config

    return lora_config(model, lora, maps)


def tuned(model: nn.Module) -> str | None:
    """The name of a module in `model` that PEFT has put an adapter around; None if there is none."""
    return next((name for name, _ in model.named_modules() if name.endswith(".base_layer")), None)


class _Weights(NamedTuple):
    """The parameters of the base model, and those of its own by name, with the modules that hold them."""

    standing: Standing
    base: list[nn.Parameter]
    own: dict[str, nn.Parameter]


class SharedModel(nn.Module):
    """A causal language model that encodes and decodes, on gistkit's attention, with LoRA adapters by role.

    Args:
        model: a transformers causal language model; its one copy of the weights serves all passes. It is changed by
            `install` alone, which comes after everything that may be refused.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a transformers causal language model, got {type(model).__name__}")
        self.structure = hf.structure(model)
        self.model = model
        if self.head is None:
            raise TypeError(f"model: expected one with a language model head, got {type(model).__name__}")
        if self.logit_scale != 1.0 and self.head.bias is not None:
            raise TypeError(f"model: expected scaled logits without a bias, got {type(model).__name__} with both")
        self.vocabulary = self.embed.weight.shape[0]
        self.windows = hf.sliding_windows(model)
        self._use: Use = None
        self._fingerprint: tuple[Any, str] | None = None
        self._own_fingerprint: tuple[Any, str] | None = None
        self._found_weights: _Weights | None = None
        self.adapters: Adapters | None = None
        self.copies: Copies | None = None

    def install(self, lora: Mapping[str, LoraConfig] | None) -> None:
        """Puts LoRA adapters {role: config} into the model; None: its own weights train, beside no adapters."""
        if lora is not None:
            from gistkit.compress.adapters import Adapters

            self.adapters = Adapters(cast(Any, self.model), lora)
        elif (found := tuned(self.model)) is not None:
            raise ValueError(
                f"lora: expected a model without adapters for None, which trains the model's own weights, got one with "
                f"an adapter at {found}"
            )

    @property
    def embed(self) -> nn.Embedding:
        """The model's input embedding."""
        return cast(Any, self.model).get_input_embeddings()

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
    def head_shape(self) -> tuple[int, int]:
        """Key heads of a layer, and the head dim."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.embed.weight.device

    def causal_plan(self, length: int) -> Plan:
        """Plain causal attention with the model's sliding windows; rows padded at their end need no other."""
        return layouts.causal(length).compile(windows=self.windows, device=self.device)

    def no_keys(self) -> tuple[Tensor, Tensor]:
        """Keys and values [1, Hk, 0, D] of a layer that nothing is cached for."""
        heads, head_dim = self.head_shape
        empty = self.embed.weight.new_empty(1, heads, 0, head_dim)
        return empty, empty

    @property
    def softcap(self) -> float | None:
        """The model's cap on its final logits, if it has one."""
        return getattr(self.config, "final_logit_softcapping", None)

    @property
    def logit_scale(self) -> float:
        """The model's factor of its logits (Cohere's logit_scale, Granite's 1 / logits_scaling)."""
        scale = getattr(self.config, "logit_scale", None)
        divisor = getattr(self.config, "logits_scaling", None)
        return float(1.0 if scale is None else scale) / float(1.0 if divisor is None else divisor)

    def first_token(self, name: str, token: int | None) -> int:
        """`token`, or where it is None the first token, or else the end token, of the model's configuration.

        `name` is the argument that errors are about.
        """
        if token is None:
            named = (getattr(self.config, f"{kind}_token_id", None) for kind in ("bos", "eos"))
            found = (each[0] if isinstance(each, list) and each else each for each in named)
            token = next((each for each in found if isinstance(each, int)), None)
            if token is None:
                raise ValueError(
                    f"{name}: expected a token id, as the model's configuration names no first and no end token, "
                    "got None"
                )
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocabulary:
            raise ValueError(f"{name}: expected a token id in [0, {self.vocabulary}), got {token!r}")
        return token

    def readout(self, hidden: Tensor) -> Tensor:
        """Hidden states as the losses take them, of which the output embedding and its bias make the logits."""
        return hidden if self.logit_scale == 1.0 else hidden * self.logit_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states, fp32, scaled and capped where the model scales or caps them."""
        logits = self.head(self.readout(hidden)).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def run(self, use: Use, **inputs: Any) -> Any:
        """One pass of the decoder stack; takes and returns what the model does.

        `use` is the role whose adapter serves the pass, or {role: rows}, or None: the base model.
        """
        with self.using(use):
            return self.decoder(use_cache="past_key_values" in inputs, **inputs)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that train, by name; other adapters in the model are not this compressor's."""
        for name, parameter in self.named_parameters():
            own = "lora_" not in name if self.adapters is None else self.adapters.owns(name)
            if parameter.requires_grad and (own or not name.startswith("model.")):
                yield name, parameter

    def fingerprint(self) -> str:
        """The base model's, computed again only where its weights have changed."""
        return self.fingerprints()[0]

    def own_fingerprint(self) -> str:
        """Of the weights that are the compressor's and not the base model's, computed again only where they changed."""
        return self.fingerprints()[1]

    def fingerprints(self) -> tuple[str, str]:
        """`fingerprint` and `own_fingerprint`, from one look at the weights."""
        weights = self._weights()
        base, own = _versions(weights.base), _versions(weights.own.values())
        if self._fingerprint is None or self._fingerprint[0] != base:
            self._fingerprint = base, hf.fingerprint(self.model)
        if self._own_fingerprint is None or self._own_fingerprint[0] != own:
            self._own_fingerprint = own, hf.digest(weights.own.items())
        return self._fingerprint[1], self._own_fingerprint[1]

    def _weights(self) -> _Weights:
        """The base model's weights and the compressor's own, found again only where one is another parameter."""
        found = self._found_weights
        if found is None or not found.standing.unchanged:
            base, own = [], {}
            for name, parameter in self.named_parameters():
                adapter = self.adapters is not None and self.adapters.owns(name)
                if self.adapters is not None and adapter:
                    own[self.adapters.plain(name)] = parameter
                elif name.startswith("model."):
                    base.append(parameter)
                else:
                    own[name] = parameter
            found = self._found_weights = _Weights(Standing(self.modules()), base, own)
        return found

    def gradient_checkpointing_enable(self) -> None:
        """Keeps only the inputs of each layer for the backward pass, and computes the rest again there."""
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
        """Inside, layers keep their cache, which gradient checkpointing takes from them in training mode."""
        modules: list[Any] = checkpointed(self.decoder)
        for module in modules:
            module.gradient_checkpointing = False
        try:
            yield
        finally:
            for module in modules:
                module.gradient_checkpointing = True

    def refuse_foreign_checkpointing(self) -> None:
        """Refuses gradient checkpointing that would run layers again without the state they first ran in."""
        for module in checkpointed(self.decoder):
            if module.training:
                function = getattr(module, "_gradient_checkpointing_func", None)
                if getattr(function, "keywords", {}).get("context_fn") != self._checkpoint_contexts:
                    raise ValueError(
                        "model: expected gradient checkpointing to be off or switched on by the compressor's own "
                        "gradient_checkpointing_enable(), got it switched on by the model's"
                    )

    def check_positions(self, name: str, last: int) -> None:
        """Warns of position ids that the model was not made for; an error where it has a table of them."""
        limit = getattr(self.config, "max_position_embeddings", None)
        if limit is not None and last >= limit:
            if not hasattr(self.decoder, "rotary_emb"):
                raise ValueError(
                    f"{name}: expected position ids below {limit}, of which the model has a table, got {last} as the "
                    "last"
                )
            warnings.warn(
                f"position ids reach {last}, beyond the model's max_position_embeddings of {limit}", stacklevel=4
            )

    @contextmanager
    def using(self, use: Use) -> Iterator[None]:
        """The model attached, and what `run` says in use."""
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
    def all_rows_as(self, role: str) -> Iterator[None]:
        """Inside a pass by role, the layers' maps serve `role` alone, for whatever rows they are given."""
        with ExitStack() as stack:
            for each in (self.adapters, self.copies):
                if each is not None:
                    stack.enter_context(each.all_rows_as(role))
            yield

    def _checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        # A layer that runs again in the backward pass does so as it ran: attached, the same adapters in use.
        return nullcontext(), self.using(self._use)


def _versions(weights: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    # Weights made in inference mode count no versions, and cannot be changed outside it.
    return tuple((weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights)
