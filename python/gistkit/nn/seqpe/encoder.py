"""SeqPE's position encoder: a small transformer reads a position's digits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gistkit.common.checks import at_least
from gistkit.nn.seqpe.kept import KeptEmbeddings
from gistkit.nn.seqpe.layers import DigitLayer, encode, encode_dropped
from gistkit.nn.seqpe.samplers import as_number, as_position
from gistkit.nn.seqpe.trie import DigitTrie, shape_of
from gistkit.ops._private import uncompiled


class SeqPE(nn.Module):
    """Embeddings of positions, read digit by digit (SeqPE, section 3.2 and equation 8).

    A coordinate is written with `digits` digits of `base`, the most significant first; a digit's embedding is the sum
    of those of the digit, of its place and, with several axes, of its axis. A causal transformer reads the digits and
    then [CLS], whose state is normed and projected.

    Digits that positions share are read once, and layer 1 comes from a table (`gistkit.nn.seqpe.layers`): same outputs
    and gradients as `plain`, several times faster. With dropout in training each distinct position has its own masks,
    as in `plain`, so less is shared (`layers.encode_dropped`): the same distribution, at half of `plain`'s work instead
    of a quarter. Nothing is cached between calls, except inside `frozen`.

    Use no weight decay for its parameters, as in the paper.

    Args:
        dim: width of the encoder, a multiple of heads.
        out_dim: width of an embedding; dim by default.
        base: of the digits, 2 or more.
        digits: of a coordinate, 1 or more: coordinates lie in [0, base^digits).
        axes: coordinates of a position: 1 for text, 2 for images.
        layers: 1 or more.
        heads: dim / 64 by default, at least 1.
        shared_places: places are numbered anew on each axis, as in the paper; False: from the first axis to the last,
            as the paper's released code has it.
        dropout: after each block's two halves, in training; the paper uses 0.1.
        attention_dropout: of the attention's weights, in training.
        std: of the normal distribution that weights and embeddings start from.

    Raises:
        ValueError: a size out of range, or a dim that heads do not divide.
    """

    def __init__(
        self,
        dim: int,
        *,
        out_dim: int | None = None,
        base: int = 10,
        digits: int = 5,
        axes: int = 1,
        layers: int = 2,
        heads: int | None = None,
        shared_places: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        heads = max(dim // 64, 1) if heads is None else heads
        lowest = {"dim": 1, "base": 2, "digits": 1, "axes": 1, "layers": 1, "heads": 1, "out_dim": 1}
        sizes = (dim, base, digits, axes, layers, heads, dim if out_dim is None else out_dim)
        for (name, least), value in zip(lowest.items(), sizes, strict=True):
            at_least("SeqPE", name, value, least)
        if dim % heads:
            raise ValueError(f"SeqPE: expected dim to be a multiple of heads, got dim {dim} and heads {heads}")
        self.dim, self.base, self.digits, self.axes, self.heads = dim, base, digits, axes, heads
        self.out_dim, self.layers, self.shared_places = sizes[-1], layers, shared_places
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.tokens = nn.Parameter(torch.empty(base, dim))
        self.places = nn.Parameter(torch.empty(digits if shared_places else axes * digits, dim))
        self.dimensions = nn.Parameter(torch.empty(axes, dim)) if axes > 1 else None
        self.cls = nn.Parameter(torch.empty(dim))
        self.blocks = nn.ModuleList(DigitLayer(dim, heads, dropout, attention_dropout) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, self.out_dim)
        self.dropped = dropout > 0 or attention_dropout > 0
        # By thread, each in a `frozen` block of its own.
        self._kept: dict[int, KeptEmbeddings] = {}
        self.reset_parameters(std)

    @property
    def limit(self) -> int:
        """Coordinates are below this."""
        return int(self.base**self.digits)

    def reset_parameters(self, std: float = 0.02) -> None:
        """Weights and embeddings from a normal distribution, biases 0, norms 1."""
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.constant_(parameter, float(name.endswith("weight")))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)

    def forward(self, positions: Tensor | DigitTrie, *, wait: bool = False) -> Tensor:
        """Embeddings of positions.

        Args:
            positions: int32 or int64, [...] with one axis and [..., axes] with several, or their trie (`trie`). They
                are on the CPU, whatever the encoder's device, so that planning does not wait for a GPU.
            wait: allows positions on a GPU in training; they are copied to the CPU, which waits for the GPU. In eval
                mode they are always copied.

        Returns:
            [..., out_dim], on the encoder's device. Rows of equal positions are equal.

        Raises:
            TypeError: positions that are not whole numbers.
            ValueError: a coordinate outside [0, base^digits), a last dimension that is not `axes`, a trie of another
                code, or positions on a GPU in training without `wait`.
        """
        if isinstance(positions, DigitTrie):
            return self.encode(positions)
        if positions.device.type != "cpu":
            if self.training and not wait:
                raise ValueError(
                    f"positions: expected a tensor on the CPU in training, got one on {positions.device}; with "
                    f"wait=True it is copied, which waits for the device"
                )
            positions = positions.cpu()
        if self._kept:
            kept = self._look_up(positions)
            if kept is not None:
                return kept
        return self.encode(self.trie(positions))

    @contextmanager
    def frozen(self, positions: Tensor | None = None) -> Iterator[None]:
        """Inside the `with` block each position is encoded once.

        In eval mode, where no weight gets a gradient, embeddings are kept until the block ends or the weights change:
        those requested, and some following ones, as positions may come one by one. In training or with gradients the
        encoder runs as outside, and kept embeddings are dropped. A change that torch does not count, such as one
        through a weight's `.data`, is not noticed. A block belongs to its thread; nested blocks share what is kept.
        Copies of the encoder are not frozen.

        Args:
            positions: encoded when the block begins; as in `forward`.
        """
        thread = threading.get_ident()
        outer = self._kept.get(thread)
        self._kept[thread] = self._keep() if outer is None else outer
        try:
            if positions is not None:
                with torch.no_grad():
                    self._look_up(positions.cpu())
            yield
        finally:
            if outer is None:
                del self._kept[thread]

    def trie(self, positions: Tensor) -> DigitTrie:
        """The plan of what positions on the CPU share, on the encoder's device; for `encode`, which torch.compile takes
        whole."""
        trie = DigitTrie.of(positions, axes=self.axes, base=self.base, digits=self.digits)
        return trie if self.cls.device.type == "cpu" else trie.to(self.cls.device)

    def encode(self, trie: DigitTrie) -> Tensor:
        """Embeddings [..., out_dim] of the positions of a trie; in training with dropout, of each distinct one."""
        code = self.axes, self.base, self.digits
        if trie.code != code:
            raise ValueError(f"trie: expected one of axes, base and digits {code} as the encoder has, got {trie.code}")
        if trie.nodes == 0:
            return self.out.bias.expand(*trie.shape, self.out_dim)
        symbols = F.embedding(trie.symbols, self._symbols())
        form = encode_dropped if self.training and self.dropped else encode
        out = self.out(self.norm(form(cast(Sequence[DigitLayer], self.blocks), symbols, trie)))
        if trie.inverse is not None:
            out = F.embedding(trie.inverse, out)
        return out.view(*trie.shape, self.out_dim)

    def table(self, *extents: int) -> Tensor:
        """A lookup table of all positions below `extents`, one for each axis: [extent (x extent), out_dim].

        The tensor is a copy; later changes of the weights do not affect it.
        """
        if len(extents) != self.axes:
            raise ValueError(f"table: expected {self.axes} extents, one for each axis, got {len(extents)}")
        for extent in extents:
            if not 0 < extent <= self.limit:
                raise ValueError(f"table: expected extents from 1 to {self.limit}, got {extent}")
        grid = torch.cartesian_prod(*(torch.arange(extent) for extent in extents))
        return self(grid).view(*extents, self.out_dim)

    def plain(self, positions: Tensor) -> Tensor:
        """The same as `forward`, but each digit of each position is read separately: the reference of the fast form.

        In training with dropout, equal positions have different masks too.
        """
        return self.read(self.symbols(positions)).view(*shape_of(positions, self.axes), self.out_dim)

    def symbols(self, positions: Tensor) -> Tensor:
        """The (place x base + digit) of each digit, [P, axes x digits], on the encoder's device."""
        DigitTrie.check(positions, axes=self.axes, base=self.base, digits=self.digits)
        rest, lowest_first = positions.reshape(-1, self.axes).long(), []
        # Powers of the base may lie beyond int64.
        for _ in range(self.digits):
            lowest_first.append(rest % self.base)
            rest = rest // self.base
        digits = torch.stack(lowest_first[::-1], -1).flatten(1)
        places = torch.arange(digits.shape[1], device=rest.device) * self.base
        return (digits + places).to(self.cls.device)

    def read(self, symbols: Tensor) -> Tensor:
        """Embeddings [P, out_dim] of rows of symbols [P, axes x digits], each row read separately."""
        hidden = F.embedding(symbols, self._symbols())
        hidden = torch.cat([hidden, self.cls.expand(len(symbols), 1, -1)], 1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(self.norm(hidden[:, -1]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def _keep(self) -> KeptEmbeddings:
        def encode(numbers: Tensor) -> Tensor:
            positions = numbers if self.axes == 1 else as_position(numbers, self.limit, self.axes)
            return self.encode(self.trie(positions))

        # Images ask for all their positions at once.
        return KeptEmbeddings(self, encode, min(self.limit**self.axes, 1 << 63) - 1, ahead=self.axes == 1)

    @uncompiled
    def _look_up(self, positions: Tensor) -> Tensor | None:
        """What `frozen` keeps of positions on the CPU; None where the encoder has to run."""
        kept = self._kept.get(threading.get_ident())
        # int64 does not have all positions of many axes as one number.
        whole = self.axes == 1 or self.limit**self.axes <= 1 << 63
        if kept is None:
            return None
        if self.training or (torch.is_grad_enabled() and any(one.requires_grad for one in self.parameters())):
            # A fused optimizer that follows changes weights without a count.
            kept.forget()
            return None
        if not positions.numel() or not whole:
            return None
        DigitTrie.check(positions, axes=self.axes, base=self.base, digits=self.digits)
        numbers = as_number(positions.reshape(-1, self.axes).long(), self.limit)
        found = kept.look_up(numbers)
        return None if found is None else found.view(*shape_of(positions, self.axes), self.out_dim)

    def _symbols(self) -> Tensor:
        """Embeddings [axes x digits x base + 1, dim] of every digit at every place, and of [CLS]."""
        places = self.places.repeat(self.axes, 1) if self.shared_places else self.places
        if self.dimensions is not None:
            places = places + self.dimensions.repeat_interleave(self.digits, 0)
        return torch.cat([(places[:, None] + self.tokens).flatten(0, 1), self.cls[None]])
