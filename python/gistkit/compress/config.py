"""Config: declares a method's arguments once; and the registry of methods.

The fields of a config are the keyword arguments of its compressor, the JSON of a saved compressor, the options of
commands, and what a file is checked against. `setting` adds constraints on a field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from gistkit.common.checks import POSITIONS, check_bool, check_int
from gistkit.compress.losses import LOSSES, CompressionHead, JointHead, check_losses
from gistkit.hf.lora import Maps, embedding_scale

if TYPE_CHECKING:
    from peft import LoraConfig

REGISTRY: dict[str, type[Config]] = {}
"""The config of each method by its name; `register` adds one."""
# What an adapter's own configuration holds.
OF_ADAPTERS = {"lora", "embedding_lora", "train_norms"}
_ALWAYS = object()

Kind = TypeVar("Kind", bound="type[Config]")


def embedding_statistics(embed: nn.Embedding, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Mean [d] and standard deviation (a scalar) of the vocabulary's embeddings as the first layer reads them, fp32.

    They are computed where the embeddings are, or on a `device`.
    """
    table = embed.weight.detach().to(device or embed.weight.device).float() * embedding_scale(embed)
    return table.mean(0), table.std()


def matched_to(embed: nn.Embedding) -> tuple[nn.Parameter, nn.Parameter]:
    """Gain and shift, fp32 [d] each, that give normed states the spread and the mean of the vocabulary's embeddings."""
    mean, spread = embedding_statistics(embed)
    return nn.Parameter(spread.expand(len(mean)).clone()), nn.Parameter(mean.clone())


def draw_like(embed: nn.Embedding, rows: int, generator: torch.Generator | None = None) -> nn.Parameter:
    """New embeddings [rows, d] with the mean and standard deviation of the vocabulary's, fp32.

    A generator of the CPU draws the same for a model on any device.
    """
    mean, spread = embedding_statistics(embed, None if generator is None else generator.device)
    drawn = mean + spread * torch.randn(rows, len(mean), device=mean.device, generator=generator)
    return nn.Parameter(drawn.to(embed.weight.device))


def register(name: str) -> Callable[[Kind], Kind]:
    """Registers a config class under its name in files and commands."""

    def registered(config: Kind) -> Kind:
        config.method = name
        # Plans are kept by config. A dataclass would hash all of its fields, some of which have no hash.
        config.__eq__, config.__hash__ = object.__eq__, object.__hash__  # type: ignore[method-assign, assignment]
        REGISTRY[name] = config
        return config

    return registered


def setting(
    default: Any,
    *,
    least: int | None = None,
    among: Iterable[Any] = (),
    before: Any = _ALWAYS,
    in_memory: bool = True,
) -> Any:
    """A field of a config. A field with a bool default takes only bools.

    Args:
        default: its value if none is given.
        least: it is a whole number >= this, or None if its type allows None.
        among: its allowed values.
        before: the value for compressors saved before the field existed; memories do not record it.
        in_memory: memories are readable only by compressors with the same value.
    """
    return field(
        default=default,
        metadata={"least": least, "among": tuple(among), "before": before, "in_memory": in_memory},
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Arguments shared by all methods.

    Args:
        losses: what `forward` returns, names or {name: weight}: "ae" (reconstruct the context), "lm" (continue it),
            "compression" (each memory token predicts its own segment), "qa" (answer a question about it), "kl" (match
            the base model's answer from the full context), "reverse_kl" (the same with the divergence reversed),
            "hidden" (match its hidden states in every layer, CompLLM). An answer without a question is a continuation.
        lora: rank of a PEFT LoRA (alpha is twice the rank), or a peft.LoraConfig; the base weights are frozen. None:
            the model's own weights train.
        embedding_lora: with a rank for `lora`, the rank of LoRA on the input embedding; None: no LoRA there.
        train_norms: with a rank for `lora`, each role with adapters also trains its own norms.
    """

    method: ClassVar[str]
    carrier: ClassVar[str] = "kv"
    """What the memory holds: "kv", keys and values, or "embedding"."""
    needs_training: ClassVar[bool] = True
    """Whether a memory is noise to a model before the compressor was trained."""
    any_ratio: ClassVar[bool] = False
    """Whether the same weights compress at any ratio, see `Compressor.at`."""
    allowed_losses: ClassVar[tuple[str, ...]] = LOSSES
    free: ClassVar[frozenset[str]] = frozenset()
    """The settings that may change without training, see `Compressor.changed`."""
    maps: ClassVar[Maps] = "query_value"
    """The linear maps that get LoRA where `lora` is a rank."""
    compressor: ClassVar[type[Any]]
    """The class that runs the method."""

    losses: Iterable[str] | Mapping[str, float] = setting(("qa",), in_memory=False)
    lora: int | LoraConfig | None = setting(64, in_memory=False)
    embedding_lora: int | None = setting(None, in_memory=False)
    train_norms: bool = setting(False, in_memory=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, rules = getattr(self, each.name), each.metadata
            if isinstance(each.default, bool):
                check_bool(each.name, value)
            if (least := rules.get("least")) is not None and not (value is None and "None" in str(each.type)):
                self._set(each.name, check_int(each.name, value, least, POSITIONS, floats=True))
            if (among := rules.get("among")) and value not in among:
                raise ValueError(f"{each.name}: expected one of {', '.join(map(str, among))}, got {value!r}")
        weights = check_losses(self.losses)
        if not weights.keys() <= set(self.allowed_losses):
            raise ValueError(
                f"losses: expected some of {', '.join(self.allowed_losses)} for {self.method}, got {', '.join(weights)}"
            )
        self._set("losses", weights)

    def _set(self, name: str, value: Any) -> None:
        """Gives a field its checked value, as only `__post_init__` may."""
        object.__setattr__(self, name, value)

    @property
    def chunk(self) -> int:
        """Context tokens of a chunk, which is compressed to `memory_tokens` memory tokens."""
        raise NotImplementedError

    @property
    def memory_tokens(self) -> int:
        """Memory tokens of a chunk."""
        return 1

    @property
    def window(self) -> int | None:
        """Tokens of a longer context that are compressed; None: all."""
        return None

    @property
    def train_ratios(self) -> Sequence[int]:
        """The ratios of which `forward` draws one at each call in training mode; (): none is drawn."""
        return ()

    @property
    def budget(self) -> int | None:
        """Tokens that are kept of any longer context, in place of a share of them; None: a share."""
        return None

    @property
    def end_token(self) -> int | None:
        """The token that ends the reconstruction of a context; None: no token."""
        return None

    @property
    def title(self) -> str:
        """The compressor's title in tables, such as FiveHundredX EPL 5x: the position layout too, if it was chosen."""
        choices = next((each.metadata.get("among", ()) for each in fields(self) if each.name == "layout"), ())
        layout = f" {getattr(self, 'layout', '').upper()}" if len(choices) > 1 else ""
        return f"{self.compressor.__name__}{layout} {self.chunk / self.memory_tokens:g}x"

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that have adapters."""
        raise NotImplementedError

    @property
    def copied(self) -> str | None:
        """The role whose tokens have copies of the layers' linear maps; None: there are none."""
        return None

    @property
    def copy_norms(self) -> bool:
        """Whether they have copies of the norms too."""
        return False

    def at(self, ratio: int) -> Self:
        """The method at another ratio; a ValueError where its weights have one."""
        if ratio == getattr(self, "ratio", None):
            return self
        raise ValueError(f"ratio: expected none for {self.method}, which is trained for one ratio, got {ratio:g}")

    def changed(self, **settings: Any) -> Self:
        """The method with other settings, some of `free`."""
        return replace(self, **settings)

    def check_model(self, model: nn.Module) -> None:
        """Raises a TypeError for an unsupported model."""

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        """The modules and parameters that train beside the model, by name, for a model with this input embedding."""
        return {}

    def head(self, width: int, vocabulary: int) -> nn.Module:
        """The untrained head of the compression loss."""
        offsets = -(-self.chunk // self.memory_tokens)
        if getattr(self, "joint_head", False):
            return JointHead(width, offsets, vocabulary)
        return CompressionHead(width, offsets)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments by name, without those of adapters; JSON values, which the constructor takes back."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in OF_ADAPTERS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @cached_property
    def of_memory(self) -> dict[str, Any]:
        """The settings, besides `chunk` and `memory_tokens`, that a memory's reader must share."""
        settings = self.settings
        return {
            each.name: settings[each.name]
            for each in fields(self)
            if each.metadata.get("in_memory", True) and settings[each.name] != each.metadata.get("before", _ALWAYS)
        }

    @classmethod
    def sizes(cls, chunk: int, memory_tokens: int) -> dict[str, Any]:
        """The settings that give these values of `chunk` and `memory_tokens`."""
        return {"ratio": chunk}

    @classmethod
    def names(cls) -> set[str]:
        """The names of all fields."""
        return {each.name for each in fields(cls)}

    @classmethod
    def added(cls) -> dict[str, Any]:
        """The settings that older files lack, with their values for those files."""
        values = {each.name: each.metadata.get("before", _ALWAYS) for each in fields(cls)}
        return {name: value for name, value in values.items() if value is not _ALWAYS}

    @classmethod
    def check_names(cls, given: Iterable[str]) -> None:
        """Refuses an argument that is not a field."""
        if unknown := sorted(set(given) - cls.names()):
            raise TypeError(f"{unknown[0]}: expected some of {', '.join(sorted(cls.names()))}, got {unknown[0]}")

    @classmethod
    def unnamed(cls) -> dict[str, Any]:
        """The settings that `of_memory` leaves out, with the values that it leaves out."""
        return {each.name: cls.added()[each.name] for each in fields(cls)
                if each.name in cls.added() and each.metadata.get("in_memory", True)}  # fmt: skip

    @classmethod
    def signature(cls) -> Signature:
        """That of a compressor's constructor: the model, and the fields as keyword arguments."""
        keywords = [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in fields(cls)
        ]
        return Signature([Parameter("model", Parameter.POSITIONAL_OR_KEYWORD), *keywords])


@dataclass(frozen=True, kw_only=True)
class RatioConfig(Config):
    """Arguments of methods whose weights compress at any ratio.

    Args:
        ratio: context tokens per compressed token, a whole number >= 1; a shorter context has one. The same weights
            compress at any other ratio, see `Compressor.at`.
        train_ratios: `forward` draws one of these ratios at each call in training mode; (): it always uses `ratio`.
        window: only the first `window` tokens of a longer context are compressed; the text reads the others directly.
        end_token: token id that ends the reconstruction of a context, such as the tokenizer's eos. None: no token.
    """

    any_ratio: ClassVar[bool] = True
    # Settings that hold at one ratio, with what they are at another.
    at_other_ratios: ClassVar[Mapping[str, Any]] = {}
    allowed_losses: ClassVar[tuple[str, ...]] = ("ae", "lm", "qa", "kl", "reverse_kl", "hidden")

    ratio: int = setting(5, least=1, in_memory=False)
    train_ratios: Sequence[int] = setting((), before=(), in_memory=False)
    window: int | None = setting(None, least=1, in_memory=False)
    end_token: int | None = setting(None, in_memory=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.train_ratios, Sequence) or isinstance(self.train_ratios, str):
            raise TypeError(f"train_ratios: expected whole numbers, got {self.train_ratios!r}")
        self._set(
            "train_ratios",
            tuple(check_int("train_ratios", ratio, high=POSITIONS, floats=True) for ratio in self.train_ratios),
        )
        largest = max((self.ratio, *self.train_ratios))
        if self.window is not None and self.window < largest:
            which = "the ratio" if largest == self.ratio else "the largest of train_ratios"
            raise ValueError(f"window: expected at least {which}, {largest} tokens, got {self.window}")
        if self.train_ratios and "compression" in self.losses:
            raise ValueError(
                "losses: expected no 'compression' with train_ratios, because its head has one ratio, got it"
            )

    def at(self, ratio: int) -> Self:
        """See `Config.at`; plans are kept by config, so that there is one for each ratio."""
        if not self.any_ratio:
            return super().at(ratio)
        ratio = check_int("ratio", ratio, high=POSITIONS, floats=True)
        if self.window is not None and ratio > self.window:
            raise ValueError(f"ratio: expected at most the window, {self.window} tokens, got {ratio}")
        if ratio not in self._others:
            self._others[ratio] = replace(self, ratio=ratio, **self.at_other_ratios)
        return self._others[ratio]

    def of(self, ratio: int) -> Self:
        """The method at a memory's ratio, to read it: no window cuts what is compressed already."""
        return self if ratio == self.ratio else replace(self, ratio=ratio, train_ratios=(), window=None)

    @cached_property
    def _others(self) -> dict[int, Self]:
        return {self.ratio: self}

    @property
    def chunk(self) -> int:
        """Context tokens per compressed token."""
        return self.ratio
