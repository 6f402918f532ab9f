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
    position_encoding,
)

pytestmark = pytest.mark.usefixtures("double")
HEADS, DIM, LAYERS = 3, 8, 2
WIDTH = HEADS * DIM
TEXT = torch.tensor([0, 7, 12, 305, 9999])
ROWS = torch.tensor([[0, 1, 2, 3, 4], [120, 121, 122, 123, 124]])
GRID = grid_positions(3, 2, start=(4, 9))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def heads(tokens: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, HEADS, tokens, DIM), torch.randn(batch, HEADS, tokens, DIM)


def logits(encoding: PositionEncoding, query: Tensor, key: Tensor, positions: Tensor, layer: int = 0) -> Tensor:
    """What attention's softmax sees, times sqrt(D)."""
    query, key = encoding(query, key, encoding.prepare(positions), layer)
    return query @ key.transpose(-1, -2)


def seqpe(integration: str, axes: int = 1, **options: Any) -> SeqPEPositions:
    encoder = SeqPE(16, out_dim=options.pop("out_dim", 10), digits=4, axes=axes, layers=2, heads=2, std=0.3)
    options = {"layers": LAYERS, "std": 0.3} | options
    return SeqPEPositions(encoder, HEADS, DIM, integration=integration, **options)  # type: ignore[arg-type]


def e_of(encoding: SeqPEPositions, e: Tensor, layer: int) -> tuple[list[Tensor], list[Tensor]]:
    """e_q and e_k [B or 1, N, D] of each head: equation 11, the channels of queries first, heads side by side."""
    parts = []
    for part in (0, 1):
        for head in range(HEADS):
            if encoding.projection == "none":
                parts.append(e[..., head * DIM : (head + 1) * DIM])
                continue
            its = encoding.projections[layer if encoding.projection == "layer" else 0]
            rows = slice(part * WIDTH + head * DIM, part * WIDTH + (head + 1) * DIM)
            parts.append(e @ its.weight[rows].T + its.bias[rows])  # type: ignore[operator, index]
    parts = [p if p.dim() == 3 else p[None] for p in parts]
    return parts[:HEADS], parts[HEADS:]


@pytest.mark.parametrize(
    ("positions", "projection"), [(TEXT, "shared"), (ROWS, "shared"), (ROWS, "layer"), (TEXT, "none")]
)
@pytest.mark.parametrize("integration", ["sum", "mul", "bias"])
def test_seqpe_is_the_papers_equations(integration: str, projection: str, positions: Tensor) -> None:
    encoding = seqpe(integration, projection=projection, out_dim=WIDTH)
    for projected in encoding.projections:
        torch.nn.init.normal_(projected.bias)  # type: ignore[arg-type]
    q, k = heads(5)
    for layer in range(LAYERS):
        e_q, e_k = e_of(encoding, encoding.encoder(positions), layer)
        actual = logits(encoding, q, k, positions, layer)
        for b in range(2):
            for h in range(HEADS):
                eq, ek = e_q[h][min(b, len(e_q[h]) - 1)], e_k[h][min(b, len(e_k[h]) - 1)]
                for i in range(5):
                    for j in range(5):
                        qi, kj = q[b, h, i], k[b, h, j]
                        if integration == "sum":
                            score = (qi + eq[i]) @ (kj + ek[j])
                        elif integration == "mul":
                            score = (qi * eq[i]) @ (kj * ek[j])
                        else:
                            score = qi @ kj + eq[i] @ ek[j]
                        close(actual[b, h, i, j], score)


@pytest.mark.parametrize("integration", ["sum", "mul", "bias"])
def test_seqpe_gives_extra_tokens_an_embedding_of_their_own_before_the_projection(integration: str) -> None:
    encoding = seqpe(integration, axes=2, extra_tokens=1)
    q, k = heads(7)
    e = torch.cat([encoding.extra, encoding.encoder(GRID)])  # type: ignore[list-item]
    e_q, e_k = (torch.cat(each) for each in e_of(encoding, e, 0))
    expected = {
        "sum": torch.einsum("bhid,bhjd->bhij", q + e_q, k + e_k),
        "mul": torch.einsum("bhid,bhjd->bhij", q * e_q, k * e_k),
        "bias": torch.einsum("bhid,bhjd->bhij", q, k) + torch.einsum("hid,hjd->hij", e_q, e_k),
    }
    close(logits(encoding, q, k, GRID), expected[integration])


@pytest.mark.parametrize("projection", ["shared", "none"])
def test_mul_start_is_added_to_the_factors(projection: str) -> None:
    paper = seqpe("mul", projection=projection, out_dim=WIDTH)
    start = seqpe("mul", projection=projection, out_dim=WIDTH, mul_start=1.0)
    start.load_state_dict(paper.state_dict())
    for its, one in zip(start.prepare(TEXT), paper.prepare(TEXT), strict=True):
        close(its, one + 1)


def test_attention_with_factors_of_one_is_attention_without_positions() -> None:
    encoding = seqpe("mul", mul_start=1.0, std=0.0)
    q, k = heads(5)
    assert torch.equal(logits(encoding, q, k, TEXT), q @ k.transpose(-1, -2))


@pytest.mark.parametrize(("projection", "positions"), [("shared", TEXT), ("layer", ROWS)])
def test_embeddings_of_the_caller_take_the_encoders_place(projection: str, positions: Tensor) -> None:
    encoding = seqpe("bias", projection=projection)
    q, k = heads(5)
    expected = encoding(q, k, encoding.prepare(positions), 1)
    # One call serves these positions and others.
    both = encoding.encoder(torch.cat([positions.flatten(), torch.arange(40)]))
    embeddings = both[: positions.numel()].view(*positions.shape, -1)
    # Only its width is asked for.
    encoding.encoder = type("Width", (torch.nn.Module,), {"out_dim": 10, "axes": 1})()
    for its, one in zip(encoding(q, k, encoding.prepare(positions, embeddings), 1), expected, strict=True):
        close(its, one)


@pytest.mark.parametrize("integration", ["sum", "mul", "bias"])
@pytest.mark.parametrize("projection", ["shared", "layer"])
def test_gradients_reach_the_encoder_and_the_projections(integration: str, projection: str) -> None:
    encoding = seqpe(integration, projection=projection, axes=2, extra_tokens=1)
    q, k = heads(7)
    prepared = encoding.prepare(GRID)
    sum((q @ k.mT).pow(2).sum() for q, k in (encoding(q, k, prepared, i) for i in range(LAYERS))).backward()  # type: ignore[union-attr]
    names = {name for name, p in encoding.named_parameters() if p.grad is None or not p.grad.abs().any()}
    assert not names
    assert {"extra", "encoder.cls", "projections.0.weight"} <= {name for name, _ in encoding.named_parameters()}


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


def test_alibi_has_the_slopes_of_the_paper_for_8_heads() -> None:
    assert ALiBi(8).slopes.tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def complex_logits(q: Tensor, k: Tensor, angles: Tensor) -> Tensor:
    """Re(sum of (q e^(i angle)) conj(k e^(i angle))), pairs (f, f + D/2). `angles`: [B or 1, H or 1, N, D/2]."""
    turn = torch.polar(torch.ones_like(angles), angles)
    q, k = (torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) * turn for x in (q, k))
    return torch.einsum("bhif,bhjf->bhij", q, k.conj()).real


@pytest.mark.parametrize(("base", "positions"), [(1e4, ROWS), (1e8, TEXT)])
def test_rope_turns_pairs(base: float, positions: Tensor) -> None:
    q, k = heads(5)
    frequencies = torch.tensor([base ** (-2 * f / DIM) for f in range(DIM // 2)])
    angles = positions[..., None] * frequencies
    angles = angles[:, None] if angles.dim() == 3 else angles[None, None]
    close(logits(RoPE(DIM, base=base), q, k, positions), complex_logits(q, k, angles))


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


def test_rope2d_turns_half_of_the_pairs_with_each_axis_and_leaves_cls() -> None:
    q, k = heads(7)
    f = torch.tensor([100 ** (-2 * i / (DIM // 2)) for i in range(DIM // 4)])
    positions = torch.cat([torch.zeros(1, 2), GRID])
    angles = torch.cat([positions[:, :1] * f, positions[:, 1:] * f], 1)
    encoding = RoPE2D(DIM, extra_tokens=1)
    close(logits(encoding, q, k, GRID), complex_logits(q, k, angles[None, None]))
    turned, _ = encoding(q, k, encoding.prepare(GRID), 0)
    assert torch.equal(turned[:, :, 0], q[:, :, 0])
    assert not torch.isclose(turned[:, :, 1:], q[:, :, 1:]).all(-1).any()


@pytest.mark.parametrize("positions", [GRID, torch.stack([GRID, GRID + 30])], ids=["one row", "starts"])
def test_rope2d_mix_turns_each_heads_pairs_by_its_own_frequencies(positions: Tensor) -> None:
    encoding = RoPE2DMix(HEADS, DIM, LAYERS, extra_tokens=1)
    q, k = heads(7)
    rows = F.pad(positions if positions.dim() == 3 else positions[None], (0, 0, 1, 0)).double()
    for layer in range(LAYERS):
        inv_freq = encoding.inv_freq.detach().clone().requires_grad_()
        angles = torch.stack(
            [rows[..., :1] * inv_freq[layer, h, 0] + rows[..., 1:] * inv_freq[layer, h, 1] for h in range(HEADS)], 1
        )
        expected, actual = complex_logits(q, k, angles), logits(encoding, q, k, positions, layer)
        close(actual, expected)
        encoding.zero_grad()
        weights = torch.randn_like(expected)
        (actual * weights).sum().backward()
        (expected * weights).sum().backward()
        close(encoding.inv_freq.grad, inv_freq.grad)  # type: ignore[arg-type]
        assert inv_freq.grad[layer].abs().min() > 0  # type: ignore[index]


def test_rope2d_mix_starts_with_two_directions_at_right_angles_in_each_head() -> None:
    frequencies = RoPE2DMix(HEADS, DIM, LAYERS).inv_freq.detach()
    sizes = torch.tensor([10 ** (-4 * i / DIM) for i in range(DIM // 4)]).repeat(2)
    close(frequencies.norm(dim=2), sizes.expand(LAYERS, HEADS, -1))
    first, second = frequencies[..., : DIM // 4], frequencies[..., DIM // 4 :]
    close((first * second).sum(2), torch.zeros(LAYERS, HEADS, DIM // 4))
    assert frequencies[0, 0, 0, 0] != frequencies[0, 1, 0, 0]


def test_sinusoidal_alternates_sines_and_cosines() -> None:
    added = Sinusoidal(6, scale=0.5).embed(torch.zeros(2, 5, 6), ROWS)
    for b in range(2):
        for n in range(5):
            for c in range(6):
                angle = ROWS[b, n].item() / 10000 ** ((c - c % 2) / 6)
                assert added[b, n, c].item() == pytest.approx(0.5 * (math.cos if c % 2 else math.sin)(angle), abs=1e-12)


def test_sinusoidal_of_two_axes_gives_each_half_of_the_channels() -> None:
    one = Sinusoidal(6)
    rows, columns = (one.embed(torch.zeros(1, 6, 6), GRID[:, axis]) for axis in (0, 1))
    added = Sinusoidal(12, axes=2, extra_tokens=1).embed(torch.zeros(1, 7, 12), GRID)
    close(added, F.pad(torch.cat([rows, columns], -1), (0, 0, 1, 0)))


def test_learned_is_its_table_within_its_range() -> None:
    encoding = Learned(130, 4)
    hidden = torch.randn(2, 5, 4)
    assert torch.equal(encoding.embed(hidden, ROWS), hidden + encoding.table[ROWS])


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


def made(name: str, **options: Any) -> PositionEncoding:
    image = name in IMAGE_ENCODINGS and name not in TEXT_ENCODINGS
    encoder = SeqPE(WIDTH, digits=4, axes=2 if image else 1, layers=1, heads=2, std=0.3)
    given = {"length": 16, "grid": (3, 4), "encoder": encoder} | options
    return position_encoding(name, heads=HEADS, head_dim=DIM, layers=LAYERS, **given)


@pytest.mark.parametrize("name", sorted({*TEXT_ENCODINGS, *IMAGE_ENCODINGS}))
def test_a_row_of_shifted_starts_is_what_it_is_alone(name: str) -> None:
    encoding = made(name)
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


@pytest.mark.parametrize(
    ("name", "kind", "its"),
    [
        ("nope", NoPE, {}),
        ("sinusoidal", Sinusoidal, {"axes": 1, "base": 10000.0}),
        ("learned", Learned, {"length": 16}),
        ("rope-1e4", RoPE, {"base": 1e4}),
        ("rope-1e6", RoPE, {"base": 1e6}),
        ("rope-1e8", RoPE, {"base": 1e8}),
        ("pope", PoPE, {"base": 1e4, "spread": 0.0}),
        ("alibi", ALiBi, {}),
        ("sinusoidal-2d", Sinusoidal, {"axes": 2}),
        ("learned-2d", Learned2D, {"grid": (3, 4)}),
        ("rope-2d", RoPE2D, {"base": 100.0}),
        ("rope-2d-mix", RoPE2DMix, {}),
        ("seqpe-sum", SeqPEPositions, {"integration": "sum"}),
        ("seqpe-mul", SeqPEPositions, {"integration": "mul", "mul_start": 0.0}),
        ("seqpe-bias", SeqPEPositions, {"integration": "bias", "projection": "shared"}),
    ],
)
def test_every_name_makes_its_encoding(name: str, kind: type, its: dict[str, Any]) -> None:
    encoding = made(name)
    assert type(encoding) is kind
    assert {attribute: getattr(encoding, attribute) for attribute in its} == its
    assert name in {*TEXT_ENCODINGS, *IMAGE_ENCODINGS}


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
    "integration": (lambda: seqpe("add"), ValueError, "integration: expected sum, mul, bias, got 'add'"),
    "projection": (lambda: seqpe("sum", projection="one"), ValueError, "projection: expected shared, layer, none"),
    "width": (lambda: seqpe("sum", projection="none"), ValueError, "out_dim of 3 heads x 8 = 24 .* got 10"),
    "start": (lambda: seqpe("bias", mul_start=1.0), ValueError, "mul_start: expected 0 for integration 'bias'"),
    "tokens": (
        lambda: (e := seqpe("sum"))(Q, Q, e.prepare(torch.arange(4)), 0),
        ValueError,
        r"query: expected \[B, 3, 4, 8\], got shape \(1, 3, 5, 8\)",
    ),
    "rows": (lambda: (e := seqpe("bias"))(Q, Q, e.prepare(ROWS), 0), ValueError, "query: expected"),
    "embeddings": (
        lambda: seqpe("sum").prepare(TEXT, torch.zeros(4, 10)),
        ValueError,
        r"embeddings: expected \[5, 10\] or \[B, 5, 10\], got shape \(4, 10\)",
    ),
    "no embeddings": (
        lambda: RoPE(8).prepare(TEXT, torch.zeros(5, 8)),
        ValueError,
        "embeddings: expected none for RoPE",
    ),
    "heads": (lambda: ALiBi(0), ValueError, "heads: expected at least 1, got 0"),
    "odd": (lambda: RoPE(7), ValueError, "head_dim: expected an even number, got 7"),
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
