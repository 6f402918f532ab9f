"""Texts read on token by token, against one pass over the whole of them."""

import pytest
import torch

from gistkit.hf.carry import layers_of


def read_on(reader, ids, starts):
    """Yields the stream, and how many keys one pass shows each row's last token, after every token read.

    Rows of `ids` [B, n] are begun with as many tokens as `starts` says; hidden states must be those of one pass.
    """
    wanted, seen = reader.hidden(reader.rows(ids)), reader.states(reader.rows(ids))
    stream = reader.start([ids[row, :start].tolist() for row, start in enumerate(starts)])
    last_layer = layers_of(reader.compressor.lm.decoder)[-1]
    for step in range(ids.shape[1] - max(starts) + 1):
        if step:
            token = torch.stack([ids[row, start + step - 1] for row, start in enumerate(starts)])
            if step % 3 == 0:
                # A step that is broken off between the layers leaves nothing.
                hook = last_layer.register_forward_pre_hook(interrupted)
                with pytest.raises(KeyboardInterrupt):
                    stream.step(token.flip(0))
                hook.remove()
            last = stream.step(token)
            assert last is stream.last
        for row, start in enumerate(starts):
            torch.testing.assert_close(stream.last[row], wanted[row, start + step], rtol=1e-9, atol=1e-9)
        if step:
            yield stream, [int(seen[row, start + step]) for row, start in enumerate(starts)]


def interrupted(*args):
    raise KeyboardInterrupt
