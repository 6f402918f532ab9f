"""Attention written out: a model whose layers read, head by head, what a test says."""

import contextlib

import torch

from tests.helpers.models import by_hand, double_angles


@contextlib.contextmanager
def attention_by_hand(model, read, look=lambda layer, head, weights: None):
    """Inside, query heads read of each layer and key head what `read` returns: keys and values, and what logits add.

    Args:
        read: a function of the layer, the key head, and the pass's own keys and values [N, D] of it.
        look: called with the layer, the key head and the weights [N, keys] of each query head.
    """

    def attend(module, query, key, value, mask, scaling, **kwargs):
        group, out = query.shape[1] // key.shape[1], []
        for head, own in enumerate(query[0]):
            place = module.layer_idx, head // group
            keys, values, added = read(*place, key[0, place[1]], value[0, place[1]])
            weights = (own @ keys.mT * scaling + added).softmax(-1)
            look(*place, weights)
            out.append(weights @ values)
        return torch.stack(out, 1)[None], None

    with torch.no_grad(), double_angles(model), by_hand(model, attend):
        yield model


def hidden(rows, keys, window=None, at=None):
    """What logits [rows, keys] add where the keys end with the rows' own: -inf at keys that a row does not see.

    Args:
        window: a sliding window, by the places `at` [keys].
    """
    first = keys - rows
    away = torch.arange(first, keys)[:, None] - torch.arange(keys)
    unseen = away < 0
    if window is not None:
        unseen |= at[first:, None] - at >= window
    return torch.zeros(rows, keys, dtype=torch.float64).masked_fill(unseen, -torch.inf)
