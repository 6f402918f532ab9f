"""VoCo: a vision-language model compresses images into learned tokens, whose keys and values the text reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gistkit import hf, layouts
from gistkit.compress.compressor import Compressor
from gistkit.compress.config import Config, draw_like, register, setting
from gistkit.compress.images import ImagePass, ImageRow, ImageRows, image_pass, image_rows, marked
from gistkit.compress.memory import Memory, Task, ordinals_of
from gistkit.compress.methods.in_place import TEXT
from gistkit.compress.tokens import Rows
from gistkit.hf.lora import Maps, maps_of
from gistkit.hf.vision import Vision, VisionFamily
from gistkit.layouts import Layout
from gistkit.layouts.positions import SCHEMES

if TYPE_CHECKING:
    from peft import LoraConfig


@register("voco")
@dataclass(frozen=True, kw_only=True)
class VoCoConfig(Config):
    """VoCo-LLaMA (Ye et al.), with the position layouts of Position IDs Matter (Section 4.4, Figure 8).

    Args:
        memory_tokens: VoCo tokens M of each image, at least 1; all images have the same learned embeddings. There may
            be more than an image has vision tokens, with a warning.
        layout: position IDs, "dpl", "upl", "epl" or "cpl", see `gistkit.layouts.voco`. In models with three axes of
            position IDs (Qwen2-VL, Qwen2.5-VL) "upl" and "epl" spread VoCo tokens over the image's ids on each axis by
            itself: the same time, and rows and columns along the image's diagonal.
        text_sees_before: text sees the text before the last image, as in the paper. False: it does not, as in the
            released code, and the memory does not hold that text.
        gap: tokens after each image that its VoCo tokens summarise with it, such as an end-of-image token; at least 0.
            Text does not see them.
        separators: token ids between the tiles of an image, such as those of SmolVLM's processor. Image tokens with
            only separators between them are one image. Without separators each run of image tokens is an image.
        losses: what `forward` returns, names or {name: weight}: "qa" (answer a question about the images), "lm"
            (continue the text).
        lora: rank of a PEFT LoRA on all linear maps of the language model's layers (alpha is twice the rank), or a
            peft.LoraConfig, which names the maps itself; the base weights are frozen. None: the language model's own
            weights train.
        embedding_lora, train_norms: beside a rank, the rank of LoRA on the input embedding, and whether copies of the
            language model's norms train.
        train_projector: also train the map from the vision tower to embeddings; with LoRA, a copy of it trains.
        train_vision: also train the vision tower; with LoRA, by LoRA on its linear maps. Otherwise it is frozen.
    """

    allowed_losses: ClassVar[tuple[str, ...]] = ("lm", "qa")
    maps: ClassVar[Maps] = "all"

    memory_tokens: int = setting(128, least=1, in_memory=False)
    layout: str = setting("epl", among=SCHEMES)
    text_sees_before: bool = True
    gap: int = setting(0, least=0)
    separators: Iterable[int] = ()
    train_projector: bool = setting(False, in_memory=False)
    train_vision: bool = setting(False, in_memory=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        values = self.separators
        ids = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else None
        if ids is None or not all(isinstance(each, int) and each >= 0 for each in ids):
            raise ValueError(f"separators: expected token ids of at least 0, got {values!r}")
        self._set("separators", tuple(sorted({*ids})))

    @property
    def chunk(self) -> int:
        """Images differ in size: a chunk is as many vision tokens as there happen to be."""
        return self.memory_tokens

    @property
    def roles(self) -> tuple[str, ...]:
        return (TEXT,)

    @property
    def title(self) -> str:
        return f"VoCo {self.layout.upper()} {self.memory_tokens}"

    @classmethod
    def sizes(cls, chunk: int, memory_tokens: int) -> dict[str, Any]:
        return {"memory_tokens": memory_tokens}

    def check_model(self, model: nn.Module) -> None:
        vision = Vision(model)
        if vision.image_token in self.separators:
            raise ValueError(
                f"separators: expected token ids other than the image token's, {vision.image_token}, got "
                f"{self.separators}"
            )
        if vision.family.bidirectional and (self.gap or self.separators):
            raise ValueError(
                f"{'gap' if self.gap else 'separators'}: expected none for {vision.name}, whose image tokens see "
                f"each other, got {self.gap or [*self.separators]}"
            )

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        return {"memory_embeddings": draw_like(embed, self.memory_tokens)}

    def layout_of(self, row: ImageRow, family: VisionFamily) -> Layout:
        """The layout of a row, in a model of this family, and one more token of text."""
        ids = None
        if row.ids:
            own = np.frombuffer(row.ids, np.int64).reshape(family.axes, -1)
            ids = np.pad(own, ((0, 0), (0, 1)), constant_values=own.max() + 1)
        return layouts.voco(
            row.vision,
            self.memory_tokens,
            row.after[-1] + 1,
            before=row.before,
            between=row.after[:-1],
            gap=self.gap,
            positions=self.layout,
            text_sees_before=self.text_sees_before,
            bidirectional=family.bidirectional,
            ids=ids,
        )


class VoCo(Compressor, config=VoCoConfig):
    """VoCo; arguments are those of `VoCoConfig`.

    One pass of the language model reads [text before][image][VoCo tokens][text], several images if there are. The VoCo
    tokens see their image; the text sees only the VoCo tokens. The memory holds the keys and values of the VoCo tokens
    and of the text between images; the text that reads it follows directly, and no vision token is in its cache.

    A context is what the model's own processor returns for a text with images: input_ids with its image tokens,
    pixel_values, and what belongs to them (image_sizes, image_grid_thw, pixel_attention_mask); `encode` and `forward`
    take it as `input_ids`. `split` cuts a whole prompt, as a chat template makes it, into such a context and the
    question after the last image.
    """

    options: VoCoConfig
    memory_embeddings: nn.Parameter
    reader: str | None = TEXT
    encoder_predicts_first = True

    def install(self) -> None:
        self.vision = Vision(self.model)
        super().install()
        if self.adapters is None:
            _freeze_vision(self.vision, self.options)

    def adapter_config(self) -> LoraConfig | None:
        lora = super().adapter_config()
        if lora is not None:
            _add_vision(lora, self.vision, self.model, self.options)
        return lora

    def rows(self, name: str, ids: Any, attention_mask: Any = None, shortest: int = 0) -> Rows:
        """A user's token ids of a text without images, checked and padded at the end of rows."""
        if isinstance(ids, Mapping) and ids.get("pixel_values") is not None:
            raise ValueError(
                f"{name}: expected only text after a memory, got pixel_values: encode images with the context, see "
                "VoCo.split"
            )
        return self.text(name, super().rows(name, ids, attention_mask, shortest))

    def contexts(self, input_ids: Any, attention_mask: Any = None, **images: Any) -> ImageRows:
        """A processor's output, checked: texts of at least one image each, padded at the end of rows."""
        if images:
            input_ids = {**(input_ids if isinstance(input_ids, Mapping) else {"input_ids": input_ids}), **images}
        rows, is_image = marked(self.vision, self.lm, input_ids, attention_mask)
        without = [row for row, count in enumerate(is_image.sum(1).tolist()) if not count]
        if without:
            pictures = "pixel_values" in input_ids and len(without) == rows.batch_size
            reason = "although there are pixel_values" if pictures else "a text without images has nothing to compress"
            raise ValueError(
                f"input_ids: expected at least one image, as image tokens of id {self.vision.image_token}, in each "
                f"row, got none in row {without[0]}: {reason}"
            )
        contexts = ImageRows(rows.ids.masked_fill(is_image, 0), rows.lengths)
        contexts.is_image = is_image
        contexts.pixels = self.vision.pixels(input_ids, self.device, self.embed.weight.dtype)
        return contexts

    def split(self, inputs: Any, attention_mask: Any = None) -> tuple[dict[str, Any], list[list[int]]]:
        """Splits a processor's output into `encode`'s context and the token ids after each row's last image and gap.

        Args:
            inputs: what the processor returned for whole prompts, such as a chat template makes them.
            attention_mask: [B, N], 0 on padding; None: no padding, or the one in `inputs`.
        """
        rows, is_image = marked(self.vision, self.lm, inputs, attention_mask)
        contexts, texts = [], []
        for ids, marks in zip(rows.lists(), is_image.tolist(), strict=True):
            end = max((index + 1 + self.options.gap for index, mark in enumerate(marks) if mark), default=0)
            contexts.append(ids[:end])
            texts.append(ids[end:])
        others = {name: value for name, value in inputs.items() if name in self.vision.names}
        return {"input_ids": contexts, **others}, texts

    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 0, d]: text follows the memory directly. Refused for the task "ae": text cannot reconstruct an image."""
        if task == "ae":
            raise ValueError("task: expected lm or qa for voco, which compresses images, got 'ae'")
        return self.embed.weight.new_zeros(memory.batch_size, 0, self.lm.width)

    def ordinals(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """The places that the pass over the images had for the memory tokens, and the next place."""
        ordinals = ordinals_of(memory)
        last = [int(row[length - 1]) for row, length in zip(ordinals, memory.lengths, strict=True)]
        return ordinals, tuple(place + 1 for place in last)

    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor]:
        if not isinstance(rows, ImageRows):
            raise TypeError(f"rows: expected those of `contexts`, with images, got {type(rows).__name__}")
        # With the adapters of the pass, which the tower's layers need again where checkpointing runs them again.
        with self.lm.using(TEXT):
            features = self.vision.features(rows.pixels)
        batch = self.pass_over(rows, features)
        self.lm.check_positions("input_ids", batch.last)
        embedded = self.lm.embedded(TEXT, rows.ids)
        merged = embedded.masked_scatter(rows.is_image[..., None], torch.cat(features).to(embedded))
        slots = self.memory_embeddings.to(embedded).expand(rows.batch_size, -1, -1)
        inputs = torch.cat([merged, slots], 1).take_along_dim(batch.sources[..., None], 1)
        keep = hf.KeptKeys(batch.kept)
        ids, own = batch.plan.positions, dict[str, Any]()
        if ids is not None and ids.dim() == 3:
            own["position_ids"] = ids.expand(-1, rows.batch_size, -1)
        out = self.lm.run(TEXT, inputs_embeds=inputs, plan=batch.plan, keep=keep, **own)
        hidden_states = out.last_hidden_state
        memory = self.remember(batch, rows, hidden_states, layers=keep.close())
        return memory, hidden_states.take_along_dim(batch.kept[..., None], 1)

    def pass_over(self, rows: ImageRows, features: Sequence[Tensor]) -> ImagePass:
        """The plan of a pass over rows whose images have these features, and which of its tokens the memory keeps."""
        options, family = self.options, self.vision.family
        made = image_rows(rows, features, self.vision, options.gap, tuple(options.separators))
        fewest = min(min(row.vision) for row in made)
        if fewest < self.memory_tokens:
            warnings.warn(
                f"memory_tokens: expected at most the vision tokens of an image, got {self.memory_tokens} for an image "
                f"of {fewest}: its memory is larger than itself",
                stacklevel=5,
            )
        return image_pass(made, options, family, rows.ids.shape[1], self.lm.windows, str(self.device))

    def check_documents(self, memories: Sequence[Memory]) -> NoReturn:
        """Refuses all: images and texts that are read in one pass see each other."""
        raise ValueError(
            "memories: expected those of a method that compresses chunks by themselves, got voco's; encode the images "
            "as one context"
        )

    def text(self, name: str, rows: Rows) -> Rows:
        if bool(((rows.ids == self.vision.image_token) & rows.valid).any()):
            raise ValueError(
                f"{name}: expected text without image tokens, got id {self.vision.image_token}: encode images with the "
                "context, see VoCo.split"
            )
        return rows


def _add_vision(config: LoraConfig, vision: Vision, model: PreTrainedModel, options: VoCoConfig) -> None:
    """Adds those parts of the vision that train."""
    # Of a LoraConfig the maps are the user's choice.
    if options.train_vision and isinstance(options.lora, int):
        # The tower may hold the projector.
        tower = {*maps_of(model, vision.tower)} - {*maps_of(model, vision.projector)}
        config.target_modules = sorted({*(config.target_modules or ()), *tower})
    if options.train_projector:
        projector = next(name for name, module in model.named_modules() if module is vision.projector)
        config.modules_to_save = sorted({*(config.modules_to_save or ()), projector})


def _freeze_vision(vision: Vision, options: VoCoConfig) -> None:
    """Freezes what does not train where the model's own weights train."""
    projector = set(vision.projector_weights())
    for parameter in {*vision.tower.parameters()} - projector:
        parameter.requires_grad_(parameter.requires_grad and options.train_vision)
    for parameter in projector:
        parameter.requires_grad_(parameter.requires_grad and options.train_projector)
