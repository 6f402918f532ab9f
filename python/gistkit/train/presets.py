"""Presets: the papers' experiments by name, each with what it follows and what its paper does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gistkit.train.recipe import Recipe


@dataclass(frozen=True)
class Preset:
    """A recipe, the compressor it was made for, and where both come from.

    Args:
        recipe: the schedule.
        compressor: keyword arguments of the method, the layout left out. A "lora" may be the keyword arguments of a
            peft.LoraConfig.
        method: of `gistkit.compress.METHODS`.
        tau, segment: of the language model that reads with the compressor, in place of losses; None: there is none.
        longer_than: characters of the texts that have a passage each, see `gistkit.train.Windows`; None: passages are
            at random places of the joined text.
        rows: of the paper's training data, for plans of epochs; None: it has none.
        row_length: mean number of tokens of a row of questions, for plans; None: they count the longest.
        model: the paper's.
        data: the paper's.
        follows: the paper and where it says so.
        open: what the paper does not say, and what is chosen here.
    """

    recipe: Recipe = field(default_factory=Recipe)
    compressor: Mapping[str, Any] = field(default_factory=dict)
    method: str = "x500"
    tau: int | None = None
    segment: int | None = None
    longer_than: int | None = None
    rows: int | None = None
    row_length: int | None = None
    model: str = "any"
    data: str = "any"
    follows: str = "no paper"
    open: tuple[str, ...] = ()


EPL = "Position IDs Matter"
LOSS = "More Effective LLM Compressed Tokens"
DODO = "Dodo: Dynamic Contextual Compression for Decoder-only LMs"
GISTING = "Long Context In-Context Compression by Getting to the Gist of Gisting"

_CHUNKS = {"chunk": 510, "ratio": 5, "lora": 128}
_EPL_OPEN = (
    "dropout of LoRA: none, as in its code",
    "AdamW's eps: torch's 1e-8",
    "precision: --precision",
)
_EPL_TEXT_OPEN = (
    *_EPL_OPEN,
    "how lengths are drawn: one for all passages of a batch",
    "what a passage is: tokens at a random place of the joined text, across the ends of documents",
)
_VOCO = Recipe(
    epochs=2, batch=128, learning_rate=2e-5, schedule="cosine", warmup=312, betas=(0.9, 0.999), weight_decay=0.0,
    clip=1.0, min_length=2, max_length=2048,
)  # fmt: skip
_VOCO_OPEN = (
    "the schedule: it follows VoCo-LLaMA's, here that of the released script, 2 epochs in batches of 128, 2e-5 along a "
    "cosine, no weight decay, and transformers' betas of 0.9 and 0.999 and clipping at 1.0",
    "warm-up: 312 steps, the script's 3% of two epochs of LLaVA's 665k conversations; --warmup for other data",
    "what trains: the language model and the projector, as in the script; the vision tower rests",
    "what text sees of the text before the image: all of it, since its mask is said to hide vision tokens alone; "
    "nothing in the released code, --option text_sees_before=false",
    "a row: an answer, with the questions and answers before it; in the script all answers of a conversation. Rows "
    "without an image are not taken",
    "the length of rows: whatever they have; --dry-run counts memory of 2048 tokens, where the script cuts them",
)
_LLAMA_2_MAPS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_DODO = Recipe(
    steps=150_000, batch=32, learning_rate=1e-4, warmup=2000, schedule="cosine", eps=1e-5, clip=1.0, memory_factor=1.0,
    patience=5, context_share=1.0, min_length=64, max_length=512,
)  # fmt: skip
_DODO_OPEN = (
    "weight decay and clipping: 0.1 and 1.0, of Llama 2, whose training setup it follows",
    "whether 150k is a half or a whole period of the cosine: half, so that the learning rate reaches 0 there",
    "when training stops: after 5 evaluations without a lower loss (--patience), with the weights of the lowest",
    "the frozen model's precision: --dtype; it trains with mixed precision",
)
_DODO_TEXTS = "lengths of the texts: {}"
_PILE = "the Pile, split by hand into train, dev and test"
# Passes over each set of questions (Section 3).
GISTPOOL_EPOCHS = {"alpaca": 2, "squad": 2, "drop": 3, "race": 1, "narrativeqa": 2, "fairytaleqa": 2}
# Training rows, and tokens of context, question and answer (Table 1); NarrativeQA's questions, each with one answer.
GISTPOOL_ROWS = {
    "alpaca": (133_441, 70), "squad": (87_559, 185), "drop": (77_399, 327), "race": (87_863, 415),
    "narrativeqa": (32_747, 755), "fairytaleqa": (8_548, 3_501),
}  # fmt: skip
_GISTPOOL = Recipe(
    batch=16, optimizer="adafactor", learning_rate=1e-4, warmup=0, weight_decay=0.0, clip=1.0, max_length=8192
)
_GISTPOOL_ARGUMENTS: Mapping[str, Any] = {"ratio": 5, "lora": None, "losses": ("qa",)}
_GISTPOOL_OPEN = (
    "the learning rate and the factor of the gists' own parameters as text (they are formulas in Sections 3 and 5.2): "
    "1e-4, relative to a parameter's size, and 3; set both from the paper",
    "batch size, warm-up, clipping and weight decay: 16, none, 1.0 and none",
    "how many gist embeddings: one for all, as in Table 5 (--option gists=N for one each, as in Figure 2)",
)


def _gistpool(name: str, epochs: float) -> Preset:
    rows, row_length = GISTPOOL_ROWS[name]
    return Preset(
        Recipe(**{**_fields(_GISTPOOL), "epochs": epochs}),
        _GISTPOOL_ARGUMENTS,
        method="gistpool",
        rows=rows,
        row_length=row_length,
        model="Gemma 2 2B",
        data=f"{name}, as --questions",
        follows=f"{GISTING}, Sections 3 and 5 at 5x; --ratio 1, 2 and 10, --method gist and avgpool for its other arms",
        open=_GISTPOOL_OPEN,
    )


def _fields(recipe: Recipe) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in recipe.__dataclass_fields__}


PRESETS: Mapping[str, Preset] = {
    "epl-pretrain": Preset(
        Recipe(),
        _CHUNKS | {"losses": ("ae", "lm")},
        model="Llama 3.2 1B or 3B",
        data="SlimPajama-6B, as --text or --dataset",
        follows=f"{EPL}, Section 4.1 and Table 8; --method icae is its other arm, --layout dpl its baseline",
        open=_EPL_TEXT_OPEN,
    ),
    "epl-pretrain-8b": Preset(
        Recipe(max_length=4080),
        _CHUNKS | {"losses": ("ae", "lm")},
        model="Llama 3.1 8B",
        data="SlimPajama-6B, as --text or --dataset",
        follows=f"{EPL}, Section 4.6, Appendix C and Table 8",
        open=_EPL_TEXT_OPEN,
    ),
    "epl-finetune": Preset(
        Recipe(learning_rate=5e-5),
        _CHUNKS | {"losses": ("qa",)},
        model="Llama 3.2 1B, pretrained with epl-pretrain (--compressor)",
        data="MRQA's six training sets, as --questions",
        follows=f"{EPL}, Section 4.2 and Table 8",
        open=(*_EPL_OPEN, "how long contexts may be: cut to 2040 tokens", "shares of the sets: as many as each has"),
    ),
    "voco-llama": Preset(
        _VOCO,
        {"memory_tokens": 128, "lora": None, "train_projector": True, "losses": ("qa",)},
        method="voco",
        # Answers in conversations with an image, about, and an image of 576 tokens with what is read of a conversation.
        rows=3_400_000,
        row_length=700,
        model="LLaVA 1.5's parts: Vicuna 7B, CLIP at 336 pixels, 576 tokens an image, and a pretrained projector",
        data="LLaVA's 665k conversations, as --questions with --images",
        follows=f"{EPL}, Section 4.4 and Table 5, 128 VoCo tokens an image; --layout dpl for its baseline, --option "
        "memory_tokens=2 for Table 10",
        open=_VOCO_OPEN,
    ),
    "cl-llama2": Preset(
        Recipe(steps=43_000, batch=32, learning_rate=1e-4, warmup=300, min_length=1020, max_length=1020),
        {
            "chunk": 510,
            "ratio": 15,
            "losses": ("ae", "lm", "compression"),
            "lora": {
                "r": 16,
                "lora_alpha": 32,
                "target_modules": [*_LLAMA_2_MAPS, "embed_tokens"],
                "rank_pattern": {"embed_tokens": 128},
                "alpha_pattern": {"embed_tokens": 256},
                "modules_to_save": ["input_layernorm", "post_attention_layernorm", "norm"],
            },
        },
        method="icae",
        longer_than=4096,
        model="Llama 2 7B",
        data="SlimPajama (--text or --dataset), a passage of each text of more than 4096 characters (--longer-than)",
        follows=f"{LOSS}, Section 3: 1.4B tokens are 43,000 steps; --ratio 5, or 31 with --chunk 496, --min-length 992 "
        "and --max-length 992, for Table 1. Its released code has one LoRA for encoder and decoder: --option "
        "shared_lora=true",
        open=(
            "alpha of LoRA: twice the rank; dropout: none",
            "whether the decoder trains: it stays as it is, as ICAE's, on which it is based",
            "warm-up and schedule: 300 steps, then constant, as its authors' later paper",
            "clipping: 2.0, as there",
            "the head of the compression loss: a map for each offset, then the model's output embedding; its released "
            "code has one map to all logits of a segment, --option joint_head=true",
            "two instances of about 500 tokens from each text: a context of 510, and the 510 behind it as its "
            "continuation, at a random place of the text, as in its released code",
            "which 1,000 passages are held out: those of the official split's texts, or of the first tenth; --held-out "
            "1000 measures as many",
        ),
    ),
    "dodo-ae": Preset(
        _DODO,
        {"ratio": 20, "lora": 32, "losses": ("ae",)},
        method="dodo",
        model="LLaMA 7B",
        data=_PILE,
        follows=f"{DODO}, Sections 3 and 4 and Appendix B; --ratio 10 for its other ratio",
        open=(*_DODO_OPEN, _DODO_TEXTS.format("64 to 512 tokens; its figures end there")),
    ),
    "dodo-lm": Preset(
        Recipe(**{**_fields(_DODO), "min_length": 1440, "max_length": 1440}),
        {"ratio": 10, "lora": 32},
        method="dodo",
        tau=128,
        segment=32,
        model="Llama 2 7B",
        data=_PILE,
        follows=f"{DODO}, Sections 2.2 and 5 and Table 1: 128 nuggets and 128 tokens, --tau 64 and 32 for its "
        "other rows; to begin with the scorer of a dodo-ae run, give its folder as --compressor",
        open=(
            *_DODO_OPEN,
            "length of a segment: 32 tokens",
            _DODO_TEXTS.format("1440, the 1280 compressed and 128 recent tokens of Table 1 and a segment"),
        ),
    ),
    "dodo-continue": Preset(
        Recipe(**{**_fields(_DODO), "context_share": 0.8, "min_length": 640, "max_length": 640}),
        {"ratio": 10, "lora": 32, "losses": ("lm",)},
        method="dodo",
        model="Llama 2 7B chat",
        data=_PILE,
        follows=f"{DODO}, Section 6, zero-shot: 512 tokens, and 128 to continue them with; --ratio 5 for Table 3",
        open=(*_DODO_OPEN, _DODO_TEXTS.format("always 512 and 128, where it says up to")),
    ),
    "dodo-finetune": Preset(
        Recipe(**{**_fields(_DODO), "min_length": 2, "max_length": 4096}),
        {"ratio": 10, "lora": 32, "losses": ("qa",)},
        method="dodo",
        model="Llama 2 7B chat",
        data="CNN/DailyMail 3.0.0, as --questions with --validation",
        follows=f"{DODO}, Section 6.2 and Table 4",
        open=(*_DODO_OPEN, "how long documents may be: cut to 4096 tokens", "whether it begins as dodo-continue ends"),
    ),
    **{f"gistpool-{name}": _gistpool(name, epochs) for name, epochs in GISTPOOL_EPOCHS.items()},
    "gistpool-mixture": Preset(
        Recipe(**{**_fields(_GISTPOOL), "steps": 30_000}),
        _GISTPOOL_ARGUMENTS,
        method="gistpool",
        row_length=420,
        model="Gemma 2 2B",
        data="three of SQuAD, DROP, RACE and NarrativeQA, as --questions with --weights 1,1,1",
        follows=f"{GISTING}, Section 7 and Tables 8 and 9",
        open=(*_GISTPOOL_OPEN, "shares of the sets: equal ones"),
    ),
    "smollm2-small": Preset(
        Recipe(steps=95, batch=4, learning_rate=1e-3, warmup=10, weight_decay=0.0, min_length=128, max_length=128),
        {"chunk": 64, "ratio": 4, "lora": 64, "losses": ("ae",)},
        model="SmolLM2 135M",
        data="Python's topics",
        follows="no paper: contexts of 64 tokens, minutes on a CPU",
    ),
}
# SeqPE's experiments train models of their own, not compressors.
STUDIES = (
    "gistkit study length --preset seqpe-wikitext, gistkit study retrieval --preset seqpe-squad and gistkit study "
    "resolution --preset seqpe-imagenet"
)


def find_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ValueError: if there is none; for SeqPE, whose experiments are studies, with their commands.
    """
    if name.startswith("seqpe"):
        raise ValueError(f"preset: expected one that trains a compressor, got {name}; SeqPE's are {STUDIES}")
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def notes(name: str) -> str:
    """What a preset follows, and what its paper does not say, in lines."""
    preset = find_preset(name)
    lines = [f"{name} follows {preset.follows}", f"  its model: {preset.model}", f"  its data: {preset.data}"]
    if preset.open:
        lines.append("  what the paper does not say, and what is chosen here:")
    return "\n".join([*lines, *(f"  - {point}" for point in preset.open)])
