"""gistkit inside Hugging Face transformers models (`pip install gistkit[hf]`)."""

from gistkit.hf.attach import attach
from gistkit.hf.attention import ATTENTION_NAME

__all__ = ["ATTENTION_NAME", "attach"]
