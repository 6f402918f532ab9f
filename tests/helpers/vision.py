"""Small random vision-language models, what their processors would give, and VoCo written out on plain transformers."""

import math

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from gistkit.hf import CACHE
from tests.helpers.models import COMMON, additive, eager
from tests.helpers.rules import spread

IMAGE = 55
TEXT = COMMON | {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
_QWEN = {"image_token_id": IMAGE, "video_token_id": 56, "vision_start_token_id": 57, "vision_end_token_id": 58}
_PATCHES = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_TILES = {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0}
# Sizes of images: pixels in height and width for Qwen and LLaVA-NeXT, tiles for Idefics3; others have one size.
SIZES = {
    "llava": [None, None],
    "llava_next": [(8, 16), (16, 15)],
    "idefics3": [3, 1],
    "smolvlm": [3, 1],
    "qwen2_vl": [(16, 24), (8, 16)],
    "qwen2_5_vl": [(16, 24), (8, 16)],
    "gemma3": [None, None],
}


def tiny_vision(family, **text):
    """A two-layer vision-language model in double precision, in eval mode."""
    text = TEXT | text
    clip = transformers.CLIPVisionConfig(**TOWER, image_size=12, patch_size=4, projection_dim=16)
    if family == "llava":
        config = transformers.LlavaConfig(
            vision_config=clip, text_config=transformers.LlamaConfig(**text), image_token_id=IMAGE, image_seq_length=9
        )
    elif family == "llava_next":
        config = transformers.LlavaNextConfig(
            vision_config=transformers.CLIPVisionConfig(**TOWER, image_size=8, patch_size=4, projection_dim=16),
            text_config=transformers.MistralConfig(**{"sliding_window": 16} | text),
            image_token_id=IMAGE,
            image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]],
        )
    elif family in ("idefics3", "smolvlm"):
        name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family]
        module = getattr(transformers.models, family)
        tower = getattr(module, f"{name}VisionConfig")(**TOWER, image_size=16, patch_size=4)
        config = getattr(transformers, f"{name}Config")(
            vision_config=tower, text_config=transformers.LlamaConfig(**text), **_TILES
        )
    elif family == "qwen2_5_vl":
        tower = _PATCHES | {"hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 48}
        tower |= {"window_size": 16, "fullatt_block_indexes": [1], "in_channels": 3}
        text |= {"rope_parameters": _MROPE}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **_QWEN)
    elif family == "qwen2_vl":
        tower = _PATCHES | {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2, "in_channels": 3}
        text |= {"rope_parameters": _MROPE}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=tower, **_QWEN)
    else:
        own = {"head_dim": 16, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
        config = transformers.Gemma3Config(
            vision_config=transformers.SiglipVisionConfig(**TOWER, image_size=16, patch_size=4),
            text_config=transformers.Gemma3TextConfig(**own | text),
            image_token_id=IMAGE,
            boi_token_index=57,
            eoi_token_index=58,
            mm_tokens_per_image=4,
        )
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config).double().eval()


class Image:
    """An image as a row of a test names it: random pixels of a size of `SIZES`, which the same seed gives again."""

    def __init__(self, size=None, seed=0):
        self.size, self.seed = size, seed

    def draw(self, *shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)


def processed(family, rows, side="right"):
    """What the family's processor gives for rows of token ids and `Image`s, padded at one `side`."""
    ids, pictures = [], []
    for row in rows:
        tokens = []
        for part in row:
            if not isinstance(part, Image):
                tokens.append(part)
                continue
            pictures.append(part)
            tokens += _image_tokens(family, part.size)
        ids.append(tokens)
    width = max(map(len, ids))
    fill = [[0] * (width - len(row)) for row in ids]
    mask = [[1] * len(row) for row in ids]
    pad = (lambda row, zeros: zeros + row) if side == "left" else (lambda row, zeros: row + zeros)
    inputs = {
        "input_ids": torch.tensor([pad(row, zeros) for row, zeros in zip(ids, fill, strict=True)]),
        "attention_mask": torch.tensor([pad(row, zeros) for row, zeros in zip(mask, fill, strict=True)]),
    }
    return inputs | _pixels(family, rows, pictures) | _kinds(family, inputs["input_ids"])


def _image_tokens(family, size):
    if family == "llava":
        return [IMAGE] * 9
    if family == "gemma3":
        return [57, *[IMAGE] * 4, 58]
    if family in ("qwen2_vl", "qwen2_5_vl"):
        return [57, *[IMAGE] * (size[0] * size[1] // 64), 58]
    if family == "llava_next":
        # 2 x 2 features of the whole, and for each row of patches its features, unpadded, and the end of a line.
        height, width = size
        rows, columns = 2 * math.ceil(height / 8), 2 * math.ceil(width / 8)
        return [IMAGE] * (4 + rows * (columns + 1))
    return [token for tile in range(size) for token in (50 + tile, *[IMAGE] * 4)]


def _pixels(family, rows, pictures):
    if family in ("llava", "gemma3"):
        side = {"llava": 12, "gemma3": 16}[family]
        return {"pixel_values": torch.stack([picture.draw(3, side, side) for picture in pictures])}
    if family == "llava_next":
        sizes = [picture.size for picture in pictures]
        counts = [1 + math.ceil(height / 8) * math.ceil(width / 8) for height, width in sizes]
        values = torch.zeros(len(pictures), max(counts), 3, 8, 8, dtype=torch.float64)
        for index, (picture, count) in enumerate(zip(pictures, counts, strict=True)):
            values[index, :count] = picture.draw(count, 3, 8, 8)
        return {"pixel_values": values, "image_sizes": torch.tensor(sizes)}
    if family in ("idefics3", "smolvlm"):
        tiles = [[part for part in row if isinstance(part, Image)] for row in rows]
        values = torch.zeros(len(rows), max(sum(p.size for p in row) for row in tiles), 3, 16, 16, dtype=torch.float64)
        for index, row in enumerate(tiles):
            drawn = torch.cat([picture.draw(picture.size, 3, 16, 16) for picture in row])
            values[index, : len(drawn)] = drawn
        mask = torch.ones_like(values[:, :, 0], dtype=torch.int64)
        mask[..., 12:] = 0
        return {"pixel_values": values, "pixel_attention_mask": mask}
    grids = [(1, height // 4, width // 4) for height, width in (picture.size for picture in pictures)]
    values = [picture.draw(grid[1] * grid[2], 96) for picture, grid in zip(pictures, grids, strict=True)]
    return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}


def _kinds(family, ids):
    names = {"gemma3": "token_type_ids", "qwen2_vl": "mm_token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
    return {names[family]: (ids == IMAGE).long()} if family in names else {}


def whole(model, inputs):
    """What the model itself gives its language model for a processor's output: embeddings, position IDs, masks."""
    seen = {}

    def look(_, args, kwargs):
        seen.update(kwargs)

    handle = model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    with eager(model.get_decoder()), torch.no_grad():
        model.model(**inputs)
    handle.remove()
    count = seen["inputs_embeds"].shape[1]
    ids = seen.get("position_ids")
    ids = torch.arange(count)[None] if ids is None else ids.reshape(-1, count)[-3:]
    return seen["inputs_embeds"], ids, seen["attention_mask"]


def written_out(model, family, inputs, slots, layout, sees_before=True, gap=0, parts=None):
    """One dense pass of plain transformers over a row with VoCo tokens `slots` [M, d] in it.

    Args:
        inputs: a processor's output for one row, up to the end of the question.
        parts: runs of image tokens that each image has; None: one.

    Returns:
        Hidden states [N, d], (key, value) of each layer, and (kind, image) of each token.
    """
    embeds, base, _ = whole(model, inputs)
    kinds = _kinds_of(inputs["input_ids"][0].tolist(), gap, parts)
    memory = len(slots)
    tokens, vectors, ids = [], [], []
    added = 0
    for index, (kind, image) in enumerate(kinds):
        tokens.append((kind, image))
        vectors.append(embeds[0, index])
        ids.append((base[:, index] + (0 if layout in ("epl", "cpl") else added)).tolist())
        last = index + 1 == len(kinds) or kinds[index + 1] != (kind, image)
        if kind == "vision" and last:
            own = [place for place, other in enumerate(tokens) if other == (kind, image)]
            seen = own[: len(own) - gap]
            axes = list(zip(*(ids[place] for place in seen), strict=True))
            if layout in ("epl", "upl"):
                new = list(zip(*(spread(min(axis), max(axis), memory) for axis in axes), strict=True))
            else:
                end = max(max(ids[place]) for place in own) + 1
                new = [[end + slot] * len(axes) for slot in range(memory)]
            tokens += [("voco", image)] * memory
            vectors += list(slots)
            ids += [list(one) for one in new]
            added += memory
    count = len(tokens)
    mask = torch.zeros(count, count, dtype=torch.bool)
    for i, (kind, image) in enumerate(tokens):
        for j, (other, of) in enumerate(tokens):
            if other == "vision":
                mask[i, j] = kind != "text" and of == image and (j <= i or (kind == other and family == "gemma3"))
            else:
                before = sees_before or kind != "text" or other == "voco" or of == image
                mask[i, j] = j <= i and before
    config = model.config.get_text_config()
    near = torch.arange(count)[:, None] - torch.arange(count) < (getattr(config, "sliding_window", None) or count)
    masks = additive(mask & near)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        masks = {"full_attention": additive(mask), "sliding_attention": masks}
    position_ids = torch.tensor(ids).T[:, None]
    cache = transformers.DynamicCache()
    with eager(model.get_decoder()) as decoder:
        out = decoder(
            inputs_embeds=torch.stack(vectors)[None],
            attention_mask=masks,
            position_ids=position_ids if len(position_ids) > 1 else position_ids[0],
            **{CACHE: cache},
            use_cache=True,
        )
    return out.last_hidden_state[0], [(layer.keys[0], layer.values[0]) for layer in cache.layers], tokens, position_ids


def _kinds_of(ids, gap, parts):
    """("text" or "vision", image) of each token; text has the number of images before it."""
    runs, start = [], None
    for index, token in enumerate([*ids, None]):
        if token == IMAGE and start is None:
            start = index
        if token != IMAGE and start is not None:
            runs.append((start, index))
            start = None
    images = []
    for count in parts or [1] * len(runs):
        group, runs = runs[:count], runs[count:]
        images.append((group[0][0], group[-1][1] + gap))
    kinds = [("text", sum(end <= index for _, end in images)) for index in range(len(ids))]
    for image, (begin, end) in enumerate(images):
        kinds[begin:end] = [("vision", image)] * (end - begin)
    return kinds


WORDS = ["<pad>", "user", ":", "what", "is", "this", "who"]
# The names of the family's special tokens, which a tiny tokenizer of words has beside `WORDS`.
_SPECIAL = {
    "llava": {"<image>": IMAGE},
    "llava_next": {"<image>": IMAGE},
    "idefics3": {
        "<image>": IMAGE, "<fake_token_around_image>": 50, "<global-img>": 51, "<end_of_utterance>": 47,
        "<row_1_col_1>": 41, "<row_1_col_2>": 42, "<row_2_col_1>": 43, "<row_2_col_2>": 44,
    },
    "gemma3": {"<image_soft_token>": IMAGE, "<start_of_image>": 57, "<end_of_image>": 58},
}  # fmt: skip
PROMPTS = {"gemma3": "<start_of_image>"}


def processor(family):
    """A family's own processor, where it works without torchvision, at the sizes of `tiny_vision`."""
    special = _SPECIAL[family]
    model = models.WordLevel({word: index for index, word in enumerate(WORDS)} | special, unk_token="<pad>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        padding_side="left",
        extra_special_tokens=names if family == "gemma3" else list(special),
    )
    square = lambda side: {"height": side, "width": side}  # noqa: E731
    if family == "idefics3":
        images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
        return transformers.Idefics3Processor(images, words, image_seq_len=4)
    if family == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size=square(16))
        return transformers.Gemma3Processor(images, words, image_seq_length=4)
    options = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    if family == "llava":
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size=square(12))
        return transformers.LlavaProcessor(images, words, image_token="<image>", **options)
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 8}, crop_size=square(8), image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]]
    )
    return transformers.LlavaNextProcessor(images, words, image_token="<image>", **options)
