"""gistkit inside Hugging Face transformers models (`pip install gistkit[hf]`)."""

from gistkit.hf.attach import ATTENTION_NAME, attach, check_projects, check_rotates, forwards, sliding_windows
from gistkit.hf.cache import CACHE, cover_memory, empty_cache, memory_cache
from gistkit.hf.depth import first_layers, layer_outputs
from gistkit.hf.encode import encode_positions
from gistkit.hf.fingerprint import differing, digest, fingerprint, head_shapes, identity, is_of, structure
from gistkit.hf.keep import Keeper, KeptKeys
from gistkit.hf.packed import PackedLayers
from gistkit.hf.rotation import changing_rope, check_moves, frequencies

__all__ = [
    "ATTENTION_NAME",
    "CACHE",
    "Keeper",
    "KeptKeys",
    "PackedLayers",
    "attach",
    "changing_rope",
    "check_moves",
    "check_projects",
    "check_rotates",
    "cover_memory",
    "differing",
    "digest",
    "empty_cache",
    "encode_positions",
    "fingerprint",
    "first_layers",
    "forwards",
    "frequencies",
    "head_shapes",
    "identity",
    "is_of",
    "layer_outputs",
    "memory_cache",
    "sliding_windows",
    "structure",
]
