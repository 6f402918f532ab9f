"""Texts read on token by token, against one pass over the whole of them."""

import torch


def read_on(reader, ids, starts):
    """Yields the stream, and how many keys one pass shows each row's last token, after every token read.

    Rows of `ids` [B, n] are begun with as many tokens as `starts` says; hidden states must be those of one pass.
    """
    wanted, seen = reader.hidden(reader.rows(ids)), reader.states(reader.rows(ids))
    stream = reader.start([ids[row, :start].tolist() for row, start in enumerate(starts)])
    for step in range(ids.shape[1] - max(starts) + 1):
        if step:
            last = stream.step(torch.stack([ids[row, start + step - 1] for row, start in enumerate(starts)]))
            assert last is stream.last
        for row, start in enumerate(starts):
            torch.testing.assert_close(stream.last[row], wanted[row, start + step], rtol=1e-9, atol=1e-9)
        if step:
            yield stream, [int(seen[row, start + step]) for row, start in enumerate(starts)]
