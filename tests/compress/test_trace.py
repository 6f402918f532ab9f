"""How many of our files a reader follows through one warm call, and that the count does not grow with a model."""

import pytest
import torch

from gistkit.compress import ICAE, GistPool
from tests.helpers.models import tiny_llama
from tests.helpers.trace_calls import trace


def warm(method, layers, **options):
    """The trace of encoding the second time."""
    compressor = method(tiny_llama(num_hidden_layers=layers), ratio=5, lora=4, **options)
    ids = torch.randint(2, 50, (2, 45))
    with torch.no_grad():
        compressor.encode(ids)
        return trace(lambda: compressor.encode(ids))


@pytest.mark.parametrize(
    ("method", "options", "files"),
    [(ICAE, {"chunk": 20}, 15), (GistPool, {"bos_token": 1}, 18)],
    ids=["ICAE", "GistPool"],
)
def test_a_warm_encode_stays_in_few_files(method, options, files):
    found = warm(method, 2, **options)
    assert len(found.files) <= files, str(found)
    # The trace sees what it should: the kernels' doors, once a layer.
    assert found.functions["ops/attention.py:attention"] == 2


def test_a_pass_attaches_once_however_many_layers():
    few, many = (warm(GistPool, layers, bos_token=1).functions for layers in (2, 6))
    for name in ("attach.py:attach", "attach.py:decoder_of", "attach.py:parts_of", "attach.py:pretrained"):
        assert few[f"hf/{name}"] == many[f"hf/{name}"] > 0
