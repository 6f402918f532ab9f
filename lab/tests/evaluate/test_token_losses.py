"""How well each token is reconstructed, by hand and as the autoencoding loss."""

import pytest
import torch

from gistkit.compress import ICAE, Dodo
from gistkit_lab.evaluate.token_losses import token_losses
from tests.evaluate.test_evaluation import DATA, VOCABULARY, Known, nats
from tests.helpers.models import tiny_llama


def test_token_losses_by_hand():
    losses = token_losses(Known(), [example.context for example in DATA])
    right, wrong = nats(1, 0), nats(0, 1)
    wanted = [[right] * 4, [wrong, *[right] * 4, wrong, right, right], [right] * 2]
    for row, expected in zip(losses, wanted, strict=True):
        # The tokens 5 and 10 are guessed wrong.
        assert row == pytest.approx(expected, rel=1e-6)
    with pytest.raises(TypeError, match="contexts: expected lists of token ids, one a text, got single ids"):
        token_losses(Known(), [1, 2, 3])
    with pytest.raises(TypeError, match="contexts: expected lists of token ids, one a text, got strings"):
        token_losses(Known(), "a text")


@pytest.mark.parametrize(
    "make",
    [
        lambda model: ICAE(model, chunk=8, ratio=4, losses=("ae",)),
        lambda model: Dodo(model, ratio=3, layer=1, losses=("ae",), bos_token=1),
        lambda model: ICAE(model, chunk=8, ratio=4, losses=("ae",), window=9),
    ],
    ids=["icae", "dodo", "icae-window"],
)
def test_the_mean_of_token_losses_is_the_autoencoding_loss(make):
    compressor = make(tiny_llama()).train()
    contexts = [torch.randint(0, VOCABULARY, (length,)).tolist() for length in (8, 13, 5)]
    losses = token_losses(compressor, contexts)
    assert compressor.training
    compressed = [min(length, compressor.window or length) for length in (8, 13, 5)]
    assert [len(row) for row in losses] == compressed
    with torch.no_grad():
        whole = compressor.eval()(contexts)["ae"]
    flat = [loss for row in losses for loss in row]
    assert sum(flat) / len(flat) == pytest.approx(float(whole), rel=1e-5)
    assert len(set(flat)) > len(flat) // 2
