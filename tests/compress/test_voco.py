"""VoCo around vision-language models, against one dense pass of plain transformers in double precision."""

import pytest
import torch

from gistkit.compress import VoCo
from tests.helpers.vision import SIZES, Image, processed, tiny_vision, written_out

FAMILIES = list(SIZES)
QUESTION = [11, 12, 13, 14]


def rows_of(family):
    """A row with two images of different sizes and text between, and a shorter one with a single image."""
    first, second = SIZES[family]
    return [[1, 5, 6, Image(first, 1), 7, 8, Image(second, 2), 9], [1, 10, Image(second, 3)]]


def parts_of(family, row):
    """Runs of image tokens of each image: tiles of Idefics3 follow separators."""
    if family not in ("idefics3", "smolvlm"):
        return None
    return [part.size for part in row if isinstance(part, Image)]


def build(family, **options):
    options = {"memory_tokens": 3, "lora": None} | options
    if family in ("idefics3", "smolvlm"):
        options.setdefault("separators", [50, 51, 52])
    torch.manual_seed(1)
    return VoCo(tiny_vision(family), **options).double().eval()


@pytest.mark.filterwarnings("ignore:memory_tokens")
@pytest.mark.parametrize("layout", ["dpl", "upl", "epl", "cpl"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_one_dense_pass(family, layout):
    compressor = build(family, layout=layout)
    rows = rows_of(family)
    with torch.no_grad():
        memory = compressor.encode(processed(family, rows, side="left"))
        logits = compressor.logits(compressor.decode(memory, "qa", [QUESTION, QUESTION[:2]]))
    for row, (parts, question) in enumerate(zip(rows, [QUESTION, QUESTION[:2]], strict=True)):
        hidden, layers, tokens, ids = written_out(
            compressor.model, family, parts + question, compressor.memory_embeddings, layout, parts=parts_of(family, parts)
        )
        kept = [i for i, (kind, _) in enumerate(tokens[: -len(question)]) if kind != "vision"]
        assert memory.lengths[row] == len(kept)
        for (key, value), (own_key, own_value) in zip(memory[row].layers, layers, strict=True):
            torch.testing.assert_close(key[0], own_key[:, kept], rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(value[0], own_value[:, kept], rtol=1e-7, atol=1e-9)
        ids_kept = ids[:, 0, kept].T
        assert memory[row].positions[0].reshape(len(kept), -1).tolist() == ids_kept.tolist()
        assert memory.starts[row] == int(ids[:, 0, -len(question)].max())
        expected = compressor.model.lm_head(hidden[-len(question) - 1 :])
        torch.testing.assert_close(logits[row, : len(question) + 1], expected.float(), rtol=1e-6, atol=1e-6)
