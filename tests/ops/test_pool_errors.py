"""window_pool: messages for bad input, and the op's own checks of what memory safety needs."""

import pytest
import torch

import gistkit

K = torch.zeros(2, 4, 5, 8)
V = torch.zeros(2, 3, 5, 6)
HIDDEN = K[:, 0]
TWO = torch.tensor([0, 2, 5])
P = torch.tensor([0.5, 3])
F = torch.ones(4)
GRAD = torch.ones(4, requires_grad=True)


def offsets(*values):
    return torch.tensor(values)


CASES = [
    ((None, None, 2), TypeError, r"key: expected a torch tensor, got NoneType"),
    ((K, 3, 2), TypeError, r"value: expected a torch tensor, got int"),
    ((K[0, 0], None, 2), ValueError, r"key: expected \[B, H, N, D\] or \[B, N, D\], got shape \(5, 8\)"),
    ((K.int(), None, 2), TypeError, r"key: expected float32, float64, bfloat16 or float16, got torch.int32"),
    ((K, V.double(), 2), TypeError, r"value: expected key's dtype torch.float32, got torch.float64"),
    ((K, V[:1], 2), ValueError, r"value: expected \[2, H, 5, D\] as key's, got shape \(1, 3, 5, 6\)"),
    ((K, V[:, :, :4], 2), ValueError, r"value: expected \[2, H, 5, D\] as key's, got shape \(2, 3, 4, 6\)"),
    ((HIDDEN, V, 2), ValueError, r"value: expected \[2, 5, D\] as key's, got shape \(2, 3, 5, 6\)"),
    ((K, V.to("meta"), 2), ValueError, r"value: expected key's device cpu, got meta"),
    ((K, V, 0), ValueError, r"windows: expected at least 1 token in a window, got 0"),
    ((K, V, -3), ValueError, r"windows: expected at least 1 token in a window, got -3"),
    ((K[:, :, :0], None, 1), ValueError, r"key: expected at least 1 token, got shape"),
    ((K, V, 2.0), TypeError, r"windows: expected an int or a tensor of offsets, got float"),
    ((K, V, True), TypeError, r"windows: expected an int or a tensor of offsets, got bool"),
    ((K, V, TWO.int()), TypeError, r"windows: expected offsets of dtype torch.int64, got torch.int32"),
    ((K, V, TWO.to("meta")), ValueError, r"windows: expected key's device cpu, got meta"),
    ((K, V, TWO[:1]), ValueError, r"windows: expected offsets \[W \+ 1\] or \[2, W \+ 1\] .* got shape \(1,\)"),
    ((K, V, TWO.expand(3, 3)), ValueError, r"windows: expected offsets .* got shape \(3, 3\)"),
    ((K, V, TWO[None, None]), ValueError, r"windows: expected offsets .* got shape \(1, 1, 3\)"),
    ((K, V, offsets(0, 6)), ValueError, r"windows: expected offsets from 0 to N = 5, got 6 in row 0"),
    ((K, V, offsets(-1, 3)), ValueError, r"windows: expected offsets from 0 to N = 5, got -1 in row 0"),
    ((K, V, offsets(0, 3, 2, 5)), ValueError, r"windows: expected ascending offsets, got 3, then 2 in row 0"),
    ((K, V, offsets([0, 3], [4, 1])), ValueError, r"windows: expected ascending offsets, got 4, then 1 in row 1"),
    (
        (K, V, offsets(0, 2, 2, 5)),
        ValueError,
        r"windows: expected a token in every window, got window 1 of row 0 from 2",
    ),
    ((K, V, offsets(0, 2, 2)), ValueError, r"windows: expected a token in every window, got window 1 of row 0 from 2"),
    ((K, V, offsets([0, 1, 2], [3, 3, 4])), ValueError, r"windows: .* got window 0 of row 1 from 3 to 3"),
    ((K, V, 3, P), ValueError, r"inv_freq: expected positions and inv_freq together, got inv_freq None"),
    ((K, V, 3, None, F), ValueError, r"positions: expected positions and inv_freq together, got positions None"),
    ((HIDDEN, None, 3, P, F), ValueError, r"positions: expected None for hidden states \[B, N, D\], got shape \(2,\)"),
    ((K, V, 2, P, F), ValueError, r"positions: expected \[W\] or \[B, W\] with B = 2, W = 3, got shape \(2,\)"),
    ((K, V, 3, P.expand(3, 2), F), ValueError, r"positions: expected .* B = 2, W = 2, got shape \(3, 2\)"),
    ((K, V, 3, P.bool(), F), TypeError, r"positions: expected an integer or floating dtype, got torch.bool"),
    ((K, V, 3, P / 0, F), ValueError, r"positions: expected finite values, got inf"),
    ((K, V, 3, P.to("meta"), F), ValueError, r"positions: expected key's device cpu, got meta"),
    ((K, V, 3, P, F.int()), TypeError, r"inv_freq: expected a floating dtype, got torch.int32"),
    (
        (K, V, 3, P, F[None]),
        ValueError,
        r"inv_freq: expected \[R/2\] of at most D/2 = 4 frequencies, got shape \(1, 4\)",
    ),
    ((K, V, 3, P, torch.ones(5)), ValueError, r"inv_freq: expected \[R/2\] of at most D/2 = 4 .* got shape \(5,\)"),
    ((K, V, 3, P, GRAD), ValueError, r"inv_freq: expected no gradient to be recorded, got one that requires grad"),
    ((K, V, 3, P * GRAD[0], F), ValueError, r"positions: expected no gradient to be recorded, got one that"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), CASES)
def test_bad_input(arguments, kind, message):
    key, value, windows, *angles = arguments
    angles += [None] * (2 - len(angles))
    with pytest.raises(kind, match=message):
        gistkit.window_pool(key, value, windows=windows, positions=angles[0], inv_freq=angles[1])


def test_a_frozen_inv_freq_of_a_module_is_welcome():
    with torch.no_grad():
        gistkit.window_pool(K, windows=3, positions=P, inv_freq=GRAD)


O2, P2 = TWO[None], P[None]
UNSAFE = [
    (K[0], V, O2, None, None),
    (K, V.double(), O2, None, None),
    (K.int(), V.int(), O2, None, None),
    (K, V[:, :, :4], O2, None, None),
    (K, V[:1], O2, None, None),
    (K.mT.contiguous().mT, V, O2, None, None),
    (K, V, TWO, None, None),
    (K, V, O2.int(), None, None),
    (K, V, O2[:, :1], None, None),
    (K, V, O2.expand(3, 3).contiguous(), None, None),
    (K, V, O2.expand(2, 3), None, None),
    (K, V, O2 + 1, None, None),
    (K, V, O2 - 1, None, None),
    (K, V, offsets([0, 3, 2]), None, None),
    (K, V, offsets([0, 2, 5], [0, 3, 9]), None, None),
    (K, V, O2, P2, None),
    (K, V, O2, None, F),
    (K, V, O2, P, F),
    (K, V, O2, P2.expand(3, 2), F),
    (K, V, O2, P2[:, :1], F),
    (K, V, O2, P2.half(), F),
    (K, V, O2, P2, F[None]),
    (K, V, O2, P2, F.half()),
    (K, V, O2, P2, torch.ones(5)),
    (K, V, O2, P2, torch.ones(8)[::2]),
]


@pytest.mark.parametrize("arguments", UNSAFE)
def test_the_op_itself_refuses_what_it_could_not_read(arguments):
    with pytest.raises(RuntimeError, match=r"gistkit(::window_pool)?: "):
        torch.ops.gistkit.window_pool(*arguments, 1.0, False)
    key, value, *windows = arguments
    with pytest.raises(RuntimeError, match=r"gistkit(::window_pool)?: "):
        torch.ops.gistkit.window_spread(key[..., :2, :], value[..., :2, :], *windows, 1.0, False, 4, False)


def test_spreading_needs_a_row_for_each_window():
    with pytest.raises(RuntimeError, match="expected a row for each window"):
        torch.ops.gistkit.window_spread(K, V, O2, None, None, 1.0, False, 5, False)
