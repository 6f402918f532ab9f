"""rope: messages for bad input, and the op's own checks of what memory safety needs."""

import pytest
import torch

import gistkit

Q = torch.zeros(2, 4, 5, 8)
K = torch.zeros(2, 2, 5, 8)
P = torch.arange(5)
F = torch.ones(4)
GRAD = torch.ones(4, requires_grad=True)

CASES = [
    ((Q[0], K, P, F), ValueError, r"query: expected \[B, Hq, N, D\], got shape \(4, 5, 8\)"),
    ((Q, K[0], P, F), ValueError, r"key: expected \[B, Hk, N, D\], got shape \(2, 5, 8\)"),
    ((Q.int(), K, P, F), TypeError, r"query: expected float32, float64, bfloat16 or float16, got torch.int32"),
    ((Q.cfloat(), K, P, F), TypeError, r"query: expected float32, .* got torch.complex64"),
    ((Q, K.double(), P, F), TypeError, r"key: expected query's dtype torch.float32, got torch.float64"),
    ((Q, K[:1], P, F), ValueError, r"key: expected \[2, Hk, 5, 8\] as query's, got shape \(1, 2, 5, 8\)"),
    ((Q, K[:, :, :4], P, F), ValueError, r"key: expected \[2, Hk, 5, 8\] as query's, got shape \(2, 2, 4, 8\)"),
    ((Q, K[..., :6], P, F), ValueError, r"key: expected \[2, Hk, 5, 8\] as query's, got shape \(2, 2, 5, 6\)"),
    ((Q, K, P[:4], F), ValueError, r"positions: expected .* with B = 2, N = 5, got shape \(4,\)"),
    ((Q, K, P.expand(3, 5), F), ValueError, r"positions: expected .* with B = 2, N = 5, got shape \(3, 5\)"),
    ((Q, K, P.expand(2, 1, 5), F), ValueError, r"positions: expected 1 axes to match .* got 2 in shape \(2, 1, 5\)"),
    ((Q, K, P, F.expand(2, 4)), ValueError, r"positions: expected 2 axes to match inv_freq \(2, 4\), got 1"),
    ((Q, K, P.expand(1, 1, 1, 5), F), ValueError, r"positions: expected \[N\], .* got shape \(1, 1, 1, 5\)"),
    ((Q, K, P[0], F), ValueError, r"positions: expected \[N\], .* got shape \(\)"),
    ((Q, K, P.bool(), F), TypeError, r"positions: expected an integer or floating dtype, got torch.bool"),
    ((Q, K, P.cfloat(), F), TypeError, r"positions: expected an integer or floating dtype, got torch.complex64"),
    ((Q, K, P / 0, F), ValueError, r"positions: expected finite values, got nan"),
    ((Q, K, -1 / P, F), ValueError, r"positions: expected finite values, got -inf"),
    ((Q, K, P, F.int()), TypeError, r"inv_freq: expected a floating dtype, got torch.int32"),
    ((Q, K, P, F[0]), ValueError, r"inv_freq: expected \[R/2\], \[A, R/2\] or \[H, A, R/2\], got shape \(\)"),
    ((Q, K, P, torch.ones(5)), ValueError, r"inv_freq: expected at most D/2 = 4 frequencies for head dim 8, got 5"),
    ((Q[..., :7], K[..., :7], P, F), ValueError, r"inv_freq: expected at most D/2 = 3 frequencies for head dim 7, got"),
    ((Q, K, P, torch.ones(0, 4)), ValueError, r"inv_freq: expected at least one axis, got shape \(0, 4\)"),
    ((Q, K, P, torch.ones(4, 1, 4)), ValueError, r"inv_freq: expected .* got H = 4 for Hq = 4, Hk = 2"),
    ((Q.to("meta"), K, P, F), ValueError, r"key: expected query's device meta, got cpu"),
    ((Q, K, P.to("meta"), F), ValueError, r"positions: expected query's device cpu, got meta"),
    ((Q, K, P, F.to("meta")), ValueError, r"inv_freq: expected query's device cpu, got meta"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), CASES)
def test_bad_input(arguments, kind, message):
    with pytest.raises(kind, match=message):
        gistkit.rope(*arguments)


def test_bad_delta():
    with pytest.raises(ValueError, match="delta: expected a finite number, got nan"):
        gistkit.rerotate(K, float("nan"), F)
    with pytest.raises(ValueError, match=r"key: expected \[B, Hk, N, D\], got shape \(5, 8\)"):
        gistkit.rerotate(K[0, 0], 1, F)


P3, F3 = P.expand(1, 1, 5), F.expand(1, 1, 4).contiguous()
UNSAFE = [
    (Q[0], K, P3, F3),
    (Q, K.double(), P3, F3),
    (Q.int(), K.int(), P3, F3),
    (Q, K[:, :, :4], P3, F3),
    (Q, K[:1], P3, F3),
    (Q.mT.contiguous().mT, K, P3, F3),
    (Q, K, P3[None], F3),
    (Q, K, P3, F3[None]),
    (Q, K, P[0], F3),
    (Q, K, P3[..., :4], F3),
    (Q, K, P3.expand(1, 3, 5), F3),
    (Q, K, P3.expand(2, 1, 5), F3),
    (Q, K, P3.short(), F3),
    (Q, K, P3, F3.half()),
    (Q, K, P3, F3.expand(1, 2, 4)),
    (Q, K, P3, F3.expand(4, 1, 4)),
    (Q, K, P3, torch.ones(1, 1, 5)),
    (Q, K, P3, torch.ones(4, 1, 4)),
    (Q, K, P3, torch.ones(1, 1, 8)[..., ::2]),
]


@pytest.mark.parametrize("arguments", UNSAFE)
def test_the_op_itself_refuses_what_it_could_not_read(arguments):
    with pytest.raises(RuntimeError, match=r"gistkit(::rope)?: "):
        torch.ops.gistkit.rope(*arguments, 1.0, False, False)
    with pytest.raises(RuntimeError, match=r"gistkit(::rope)?: "):
        torch.ops.gistkit.rope_angle_grad(*arguments[:2], *arguments, 1.0, False, False)
    with pytest.raises(RuntimeError, match=r"gistkit(::rope)?: "):
        torch.ops.gistkit.rope_angle_grad(Q[:, :3], K, Q, K, P3, F3, 1.0, False, False)


def test_the_op_itself_takes_positions_and_frequencies_of_fewer_dimensions():
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    positions, inv_freq = torch.rand(5, dtype=torch.float64), torch.rand(4)
    full = positions[None, None], inv_freq[None, None]
    op, gradient = torch.ops.gistkit.rope, torch.ops.gistkit.rope_angle_grad
    expected = op(query, key, *full, 1.0, False, False)
    expected_gradient = gradient(query, key, query, key, *full, 1.0, False, False)
    for angles in ((positions, inv_freq), (positions[None], inv_freq[None]), (full[0], inv_freq)):
        for a, b in zip(op(query, key, *angles, 1.0, False, False), expected, strict=True):
            assert torch.equal(a, b)
        found = gradient(query, key, query, key, *angles, 1.0, False, False)
        for a, b, of in zip(found, expected_gradient, angles, strict=True):
            assert a.shape == of.shape and torch.equal(a, b.view_as(a))
