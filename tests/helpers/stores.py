"""A tiny compressor and documents for stores."""

import torch

from gistkit.compress import FiveHundredX
from tests.helpers.models import byte_tokenizer, tiny_llama


def make_compressor(seed=0):
    """The same weights at every call with a seed."""
    model = tiny_llama(hidden_size=16, vocab_size=257)
    torch.manual_seed(seed)
    return FiveHundredX(model, chunk=6, ratio=3, lora=None).float().eval()


def make_tokenizer():
    """A token a byte."""
    return byte_tokenizer()


def documents(texts):
    """Documents of texts by name."""
    from gistkit_serve.store import Document

    return [Document(name, len(text.encode()), lambda text=text: text) for name, text in texts.items()]


def make_texts(count):
    """Texts of 1 to 40 bytes by name."""
    return {f"{number % 7}/{number}.txt": f"{number} {'word ' * 8}"[: 1 + number * 11 % 40] for number in range(count)}
