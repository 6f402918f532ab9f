"""Position encodings against the formulas of their papers, written out densely in float64."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gistkit.nn import (
    IMAGE_ENCODINGS,
    TEXT_ENCODINGS,
    ALiBi,
    Learned,
    Learned2D,
    NoPE,
    PoPE,
    PositionEncoding,
    RoPE,
    RoPE2D,
    RoPE2DMix,
    SeqPE,
    SeqPEPositions,
    Sinusoidal,
    grid_positions,
)
from tests.helpers import encodings
from tests.helpers.encodings import close

pytestmark = pytest.mark.usefixtures("double")
HEADS, DIM, LAYERS = 3, 8, 2
WIDTH = HEADS * DIM
TEXT = torch.tensor([0, 7, 12, 305, 9999])
ROWS = torch.tensor([[0, 1, 2, 3, 4], [120, 121, 122, 123, 124]])
GRID = grid_positions(3, 2, start=(4, 9))


def heads(tokens: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, tokens, DIM), torch.randn(batch, HEADS, tokens, DIM)


def logits(encoding: PositionEncoding, query: Tensor, key: Tensor, positions: Tensor, layer: int = 0) -> Tensor:
    """What attention's softmax sees, times sqrt(D)."""
    query, key = encoding(query, key, encoding.prepare(positions), layer)
    return query @ key.transpose(-1, -2)


def made(name: str, **options: Any) -> Any:
    return encodings.encoding(name, heads=HEADS, head_dim=DIM, layers=LAYERS, **options)


# ALiBi's slopes for any number of heads, and tables that are stretched, have tests of their own.
FORMULAS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in TEXT_ENCODINGS if name != "alibi"),
    *((f"seqpe-{how}", {"projection": each}) for how in ("sum", "mul", "bias") for each in ("layer", "none")),
    *((name, {"extra_tokens": 1}) for name in IMAGE_ENCODINGS if name != "learned-2d"),
]


@pytest.mark.parametrize(("name", "options"), FORMULAS)
def test_logits_sums_and_gradients_are_those_of_the_papers_formulas(name: str, options: dict[str, Any]) -> None:
    encoding = encodings.encoding(name, heads=2, head_dim=8, layers=LAYERS, **options)
    for bias in (p for key, p in encoding.named_parameters() if key.startswith("projections") and p.dim() == 1):
        torch.nn.init.normal_(bias)
    axes = 2 if encoding.extra_tokens else 1
    for positions in (GRID, torch.stack([GRID, GRID + 30])) if axes == 2 else (TEXT, ROWS):
        if name == "learned" and positions is TEXT:
            continue
        rows = positions if positions.dim() > axes else positions[None]
        count = rows.shape[1] + encoding.extra_tokens
        inputs = [torch.randn(2, 2, count, 8, requires_grad=True) for _ in range(2)]
        hidden, weights = torch.randn(2, count, 16), torch.randn(2, count, 16)
        for layer in range(LAYERS):
            added = encodings.added(name, encoding, rows, 16)
            added = F.pad(added, (0, 0, encoding.extra_tokens, 0)) if isinstance(added, Tensor) else added
            query, key, more = encodings.integrated(name, encoding, *inputs, rows, layer)
            found = logits(encoding, *inputs, positions, layer), encoding.embed(hidden, positions)
            wanted = query @ key.mT + more, hidden + added
            gradients = []
            for pair in (found, wanted):
                total = pair[0].square().sum() + (pair[1] * weights).sum()
                gradients.append(torch.autograd.grad(total, [*inputs, *encoding.parameters()], materialize_grads=True))
            for ours, its in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
                torch.testing.assert_close(ours, its, rtol=1e-9, atol=1e-9 * max(1.0, float(its.detach().abs().max())))


@pytest.mark.parametrize("projection", ["shared", "none"])
def test_mul_start_is_added_to_the_factors(projection: str) -> None:
    options = {"projection": projection, "encoder": SeqPE(16, out_dim=WIDTH, digits=4, std=0.3)}
    paper, start = (made("seqpe-mul", mul_start=start, **options) for start in (0.0, 1.0))
    start.load_state_dict(paper.state_dict())
    for its, one in zip(start.prepare(TEXT), paper.prepare(TEXT), strict=True):
        close(its, one + 1)


def test_attention_with_factors_of_one_is_attention_without_positions() -> None:
    encoding = made("seqpe-mul", mul_start=1.0, std=0.0)
    q, k = heads(5)
    assert torch.equal(logits(encoding, q, k, TEXT), q @ k.transpose(-1, -2))


@pytest.mark.parametrize("count", [1, 3, 8, 12, 20])
def test_alibi_is_minus_slope_times_distance(count: int) -> None:
    """Slopes by the paper's recursion, and the biased softmax by distances."""

    def slopes(n: int) -> list[float]:
        if math.log2(n).is_integer():
            return [2 ** (-8 * (h + 1) / n) for h in range(n)]
        lower = 2 ** int(math.log2(n))
        return slopes(lower) + slopes(2 * lower)[::2][: n - lower]

    encoding, positions = ALiBi(count), torch.arange(1000, 1009)
    bias = encoding.key_bias(positions, torch.float64)
    close(encoding.slopes, torch.tensor(slopes(count)))
    assert torch.equal(encoding.key_bias(positions + 10**7), bias.float())
    scores = torch.randn(count, 9, 9)
    distance = torch.tensor([[i - j for j in range(9)] for i in range(9)])
    paper = scores - torch.tensor(slopes(count))[:, None, None] * distance
    hidden = distance < 0
    close(
        (scores + bias[0][:, None]).masked_fill(hidden, -math.inf).softmax(-1),
        paper.masked_fill(hidden, -math.inf).softmax(-1),
    )


def test_pope_is_the_papers_equation_and_learns_its_phases_within_a_turn() -> None:
    encoding = PoPE(HEADS, DIM, LAYERS, spread=2 * math.pi, extra_tokens=1)
    phases = encoding.phases.detach()
    assert -2 * math.pi <= phases.min() < -3.2 < -3 < phases.max() <= 0
    with torch.no_grad():
        encoding.phases[1, 0, 0, 0] = 1.0
    q, k = heads(6)
    points = F.pad(ROWS, (1, 0)).double()
    expected = torch.zeros(2, HEADS, 6, 6, dtype=torch.float64)
    phase = torch.cat([torch.zeros(1), phases[1].flatten()[1:]]).view(HEADS, DIM).requires_grad_()
    lengths = [torch.log1p(x.exp()) for x in (q, k)]
    for c in range(DIM):
        apart = (points[:, None, None, :] - points[:, None, :, None]) * 10000 ** (-c / DIM)
        turned = (apart + phase[:, c, None, None]).cos()
        expected = expected + lengths[0][..., :, None, c] * lengths[1][..., None, :, c] * turned
    actual = logits(encoding, q, k, ROWS, layer=1)
    close(actual, expected)
    weights = torch.randn_like(expected)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    # A phase beyond the turn counts as 0, and is led back.
    close(encoding.phases.grad[1, :, 0], phase.grad)  # type: ignore[arg-type, index]


def test_pope_rounds_keys_of_bfloat16_once() -> None:
    encoding, (_, k) = PoPE(HEADS, DIM, 1, spread=2 * math.pi), heads(5)
    encoding, k = encoding.float(), 3 * k.bfloat16()
    phases = encoding.phases.detach().double()[0]
    exact = torch.cat([F.softplus(k.double()) * phases.cos(), F.softplus(k.double()) * phases.sin()], -1)
    # At 0 nothing is rotated.
    _, found = encoding(k, k, encoding.prepare(torch.zeros(5, dtype=torch.int64)), 0)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * (2**-8 + 2**-20) + 1e-6).all()


def test_rope2d_mix_starts_with_two_directions_at_right_angles_in_each_head() -> None:
    frequencies = RoPE2DMix(HEADS, DIM, LAYERS).inv_freq.detach()
    sizes = torch.tensor([10 ** (-4 * i / DIM) for i in range(DIM // 4)]).repeat(2)
    close(frequencies.norm(dim=2), sizes.expand(LAYERS, HEADS, -1))
    first, second = frequencies[..., : DIM // 4], frequencies[..., DIM // 4 :]
    close((first * second).sum(2), torch.zeros(LAYERS, HEADS, DIM // 4))
    assert frequencies[0, 0, 0, 0] != frequencies[0, 1, 0, 0]


@pytest.mark.parametrize("length", [8, 9, 20, 64])
def test_learned_stretches_its_table_over_what_is_beyond(length: int) -> None:
    encoding = Learned(8, 4)
    stretched = F.interpolate(encoding.table.T[None], size=length, mode="linear", align_corners=True)[0].T
    added = encoding.embed(torch.zeros(1, length, 4), torch.arange(length))
    close(added[0], stretched)
    (given,) = torch.autograd.grad(added.pow(3).sum(), encoding.table)
    close(given, torch.autograd.grad(stretched.pow(3).sum(), encoding.table)[0])


def test_learned_stretches_each_row_for_itself_or_to_a_fixed_extent() -> None:
    encoding = Learned(8, 4)
    alone = [encoding.embed(torch.zeros(1, 5, 4), row) for row in ROWS]
    close(encoding.embed(torch.zeros(2, 5, 4), ROWS), torch.cat(alone))
    close(alone[0][0], encoding.table[:5])
    encoding.extent = 5
    shrunk = F.interpolate(encoding.table.T[None], size=5, mode="linear", align_corners=True)[0].T
    close(encoding.embed(torch.zeros(1, 5, 4), ROWS[0])[0], shrunk)


def test_learned_takes_no_positions_at_all() -> None:
    for encoding, none in ((Learned(8, 4), (0,)), (Learned(8, 4, extent=9), (2, 0)), (Learned2D((2, 3), 4), (0, 2))):
        assert encoding.embed(torch.zeros(2, 0, 4), torch.zeros(none, dtype=torch.int64)).shape == (2, 0, 4)


@pytest.mark.parametrize("size", [(4, 5), (6, 5), (12, 15), (7, 11)])
def test_learned_2d_is_its_grid_resized_as_images_are(size: tuple[int, int]) -> None:
    encoding = Learned2D((4, 5), 6, extra_tokens=1)
    resized = F.interpolate(encoding.table.permute(2, 0, 1)[None], size=size, mode="bicubic", align_corners=False)
    expected = torch.cat([encoding.extra, resized[0].permute(1, 2, 0).flatten(0, 1)])  # type: ignore[list-item]
    added = encoding.embed(torch.zeros(1, 1 + size[0] * size[1], 6), grid_positions(*size))
    close(added[0], expected)
    encoding.extent = (2, 3)
    small = F.interpolate(encoding.table.permute(2, 0, 1)[None], size=(2, 3), mode="bicubic", align_corners=False)
    added = encoding.embed(torch.zeros(1, 7, 6), grid_positions(2, 3))
    close(added[0, 1:], small[0].permute(1, 2, 0).flatten(0, 1))


@pytest.mark.parametrize("name", sorted({*TEXT_ENCODINGS, *IMAGE_ENCODINGS}))
def test_a_row_of_shifted_starts_is_what_it_is_alone(name: str) -> None:
    encoding = made(name, **({} if name in TEXT_ENCODINGS else {"extra_tokens": 0}))
    positions = torch.stack([GRID, GRID + 20]) if encoding.axes == 2 else torch.stack([torch.arange(6), GRID[:, 0]])
    hidden, (q, k) = torch.randn(2, 6, WIDTH), heads(6)
    embedded, turned = encoding.embed(hidden, positions), encoding(q, k, encoding.prepare(positions), 1)
    bias = encoding.key_bias(positions)
    for b, row in enumerate(positions):
        rows = slice(b, b + 1)
        close(encoding.embed(hidden[rows], row), embedded[rows])
        for its, one in zip(encoding(q[rows], k[rows], encoding.prepare(row), 1), turned, strict=True):
            close(its, one[rows])
        if bias is not None:
            assert torch.equal(encoding.key_bias(row), bias[rows])  # type: ignore[arg-type]


def test_options_go_to_the_class() -> None:
    encoding = made("seqpe-mul", projection="layer", mul_start=1.0, extra_tokens=1)
    assert isinstance(encoding, SeqPEPositions)
    assert (len(encoding.projections), encoding.mul_start, encoding.extra_tokens) == (LAYERS, 1.0, 1)
    assert made("rope-1e6", base=3e6).base == 3e6


def test_frequencies_and_slopes_are_not_rounded_with_a_model() -> None:
    for encoding in (RoPE(DIM), RoPE2D(DIM)):
        before = encoding.frequencies()
        assert torch.equal(encoding.bfloat16().frequencies(), before)
    assert torch.equal(ALiBi(5).bfloat16().slopes, ALiBi(5).slopes)


Q = torch.zeros(1, HEADS, 5, DIM)
ENCODER = SeqPE(16, digits=4, layers=1, heads=2)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "name": (lambda: made("seqpe"), ValueError, "name: expected one of nope, .*alibi.*rope-2d-mix.*, got 'seqpe'"),
    "no encoder": (
        lambda: made("seqpe-sum", encoder=None),
        ValueError,
        "encoder: expected one for seqpe-sum, got None",
    ),
    "no length": (lambda: made("learned", length=None), ValueError, "length: expected one for learned"),
    "no grid": (lambda: made("learned-2d", grid=None), ValueError, "grid: expected one for learned-2d"),
    "option": (lambda: made("alibi", base=3.0), TypeError, "base"),
    "integration": (
        lambda: SeqPEPositions(ENCODER, HEADS, DIM, integration="add"),  # type: ignore[arg-type]
        ValueError,
        "integration: expected sum, mul, bias, got 'add'",
    ),
    "projection": (lambda: made("seqpe-sum", projection="one"), ValueError, "projection: expected shared, layer, none"),
    "width": (lambda: made("seqpe-sum", projection="none"), ValueError, "out_dim of 3 heads x 8 = 24 .* got 16"),
    "start": (lambda: made("seqpe-bias", mul_start=1.0), ValueError, "mul_start: expected 0 for integration 'bias'"),
    "tokens": (
        lambda: (e := made("seqpe-sum"))(Q, Q, e.prepare(torch.arange(4)), 0),
        ValueError,
        r"query: expected \[B, 3, 4, 8\], got shape \(1, 3, 5, 8\)",
    ),
    "rows": (lambda: (e := made("seqpe-bias"))(Q, Q, e.prepare(ROWS), 0), ValueError, "query: expected"),
    "embeddings": (
        lambda: made("seqpe-sum").prepare(TEXT, torch.zeros(4, 16)),
        ValueError,
        r"embeddings: expected \[5, 16\] or \[B, 5, 16\], got shape \(4, 16\)",
    ),
    "no embeddings": (
        lambda: RoPE(8).prepare(TEXT, torch.zeros(5, 8)),
        ValueError,
        "embeddings: expected none for RoPE",
    ),
    "heads": (lambda: ALiBi(0), ValueError, "heads: expected at least 1, got 0"),
    "odd": (lambda: RoPE(7), ValueError, "head_dim: expected a multiple of 2, got 7"),
    "four": (lambda: RoPE2D(6), ValueError, "head_dim: expected a multiple of 4, got 6"),
    "four mixed": (lambda: RoPE2DMix(2, 6, 1), ValueError, "head_dim: expected a multiple of 4, got 6"),
    "key heads": (lambda: PoPE(3, 8, 1, key_heads=2), ValueError, "key_heads: expected a divisor of 3 heads, got 2"),
    "spread": (lambda: PoPE(1, 8, 1, spread=7.0), ValueError, "spread: expected 0 to 2 pi, got 7.0"),
    "queries": (
        lambda: logits(PoPE(2, DIM, 1), *heads(5), TEXT),
        ValueError,
        r"query: expected \[B, 2, 5, 8\], got shape \(2, 3, 5, 8\)",
    ),
    "shared keys": (
        lambda: logits(PoPE(3, DIM, 1), heads(5)[0], heads(5)[1][:, :1], TEXT),
        ValueError,
        r"key: expected \[B, 3, 5, 8\], got shape \(2, 1, 5, 8\)",
    ),
    "base": (lambda: RoPE(8, base=1.0), ValueError, "base: expected above 1"),
    "channels": (lambda: Sinusoidal(6, axes=2), ValueError, "dim: expected a multiple of 4 for 2 axes, got 6"),
    "length": (lambda: Learned(0, 4), ValueError, "length: expected at least 1, got 0"),
    "grid": (lambda: Learned2D((0, 4), 4), ValueError, "grid: expected"),
    "axes": (lambda: NoPE(axes=0), ValueError, "axes: expected at least 1"),
    "extra": (lambda: NoPE(extra_tokens=-1), ValueError, "extra_tokens: expected at least 0"),
    "shape": (
        lambda: RoPE2D(8).prepare(TEXT),
        ValueError,
        r"positions: expected \[N, 2\] or \[B, N, 2\], got shape \(5,\)",
    ),
    "below 0": (lambda: RoPE(8).prepare(TEXT - 1), ValueError, "positions: expected at least 0, got -1"),
    "bool": (lambda: RoPE(8).prepare(TEXT > 1), TypeError, "positions: expected an integer dtype, got torch.bool"),
    "list": (lambda: RoPE(8).prepare([0, 1]), TypeError, "positions: expected a torch tensor, got list"),  # type: ignore[arg-type]
    "extent": (
        lambda: Learned(4, 4, extent=8).embed(torch.zeros(1, 5, 4), TEXT),
        ValueError,
        r"positions: expected below the extent \(8,\), got \(9999,\)",
    ),
    "tokens embedded": (
        lambda: Sinusoidal(4).embed(torch.zeros(1, 6, 4), TEXT),
        ValueError,
        "positions: expected one for each of 6 tokens, got 5",
    ),
    "width embedded": (
        lambda: Learned(9, 1).embed(torch.zeros(1, 5, 4), ROWS[0]),
        ValueError,
        "dim: expected that of the hidden states, 4, got 1",
    ),
    "rows embedded": (
        lambda: Learned(9, 4).embed(torch.zeros(1, 5, 4), ROWS),
        ValueError,
        "positions: expected 1 or 1 rows, got 2",
    ),
    "narrow": (
        lambda: logits(RoPE(4), *heads(5), TEXT),
        ValueError,
        r"query: expected \[B, H, N, 4\], as head_dim of RoPE says, got shape \(2, 3, 5, 8\)",
    ),
    "narrow axial": (lambda: logits(RoPE2D(4), *heads(6), GRID), ValueError, r"query: expected \[B, H, N, 4\]"),
    "slopes": (lambda: logits(ALiBi(1), *heads(5), TEXT), ValueError, r"query: expected 1 heads, .* \(2, 3, 5, 8\)"),
    "wide": (lambda: PoPE(2, 256, 1), ValueError, "head_dim: expected 1 to 128, as .* twice as wide .* got 256"),
    "wide bias": (lambda: SeqPEPositions(ENCODER, 2, 192), ValueError, "head_dim: expected 1 to 128, .* got 192"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()
