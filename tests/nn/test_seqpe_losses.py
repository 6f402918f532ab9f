"""SeqPE's losses and the step that shares one encoder call, against the paper's equations and separate calls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.nn import SeqPE, SeqPERegularizer, contrastive_loss, ood_loss
from gistkit.nn.seqpe.losses import nearest_candidate


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_heads(embeddings, heads):
    """[W x heads, m, m]: of each window and head, the softmax over rows of the dot products."""
    parts = [part for window in embeddings for part in window.chunk(heads, -1)]
    return torch.stack([(part @ part.T).softmax(-1) for part in parts])


def test_the_contrastive_loss_is_equation_9():
    pivots, candidates = random(5, 6), random(5, 7, 6, seed=1)
    positive = torch.tensor([0, 6, 3, 3, 1])
    shares = [(its @ pivot).softmax(-1)[label] for pivot, its, label in zip(pivots, candidates, positive, strict=True)]
    expected = -torch.stack(shares).log().mean()
    torch.testing.assert_close(contrastive_loss(pivots, candidates, positive), expected, rtol=0, atol=1e-10)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_positive_is_the_nearest_and_of_equals_the_first(data):
    axes = data.draw(st.integers(1, 3))
    number = st.integers(0, data.draw(st.sampled_from([3, 10**6])))
    pivots = [[data.draw(number) for _ in range(axes)] for _ in range(2)]
    candidates = [[[data.draw(number) for _ in range(axes)] for _ in range(4)] for _ in range(2)]
    expected = []
    for pivot, its in zip(pivots, candidates, strict=True):
        distances = [sum((a - b) ** 2 for a, b in zip(pivot, one, strict=True)) for one in its]
        expected.append(distances.index(min(distances)))
    one, other = torch.tensor(pivots), torch.tensor(candidates)
    assert nearest_candidate(one, other).tolist() == expected
    if axes == 1:
        assert nearest_candidate(one[:, 0], other[..., 0]).tolist() == expected


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_the_loss_on_windows_is_equation_10_per_head(heads):
    teacher, student = random(3, 4, 6), random(3, 4, 6, seed=1)
    target, estimate = by_heads(teacher, heads), by_heads(student, heads)
    expected = torch.nn.functional.kl_div(estimate.log(), target, reduction="none").sum(-1).mean()
    torch.testing.assert_close(ood_loss(teacher, student, heads), expected, rtol=0, atol=1e-10)
    teacher, student = teacher.requires_grad_(), student.requires_grad_()
    ood_loss(teacher, student, heads).backward()
    assert student.grad is not None and teacher.grad is None


def test_losses_are_computed_in_single_precision_at_least():
    pivots, candidates, positive = random(4, 8).bfloat16(), random(4, 5, 8, seed=1).bfloat16(), torch.zeros(4).long()
    windows = random(2, 4, 8).bfloat16(), random(2, 4, 8, seed=1).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = contrastive_loss(pivots, candidates, positive), ood_loss(*windows, 2)
    exact = (
        contrastive_loss(pivots.double(), candidates.double(), positive),
        ood_loss(*(w.double() for w in windows), 2),
    )
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nearest_candidate(torch.zeros(2), torch.zeros(2)), r"candidates: expected \[B, C\] .* got \[2\]"),
        (lambda: nearest_candidate(torch.zeros(2), torch.zeros(3, 1)), r"expected rows and axes of pivots \[2\], got"),
        (lambda: contrastive_loss(random(2, 3), random(2, 4, 5), torch.zeros(2)), r"\[B, C, D\] .* got \[2, 4, 5\]"),
        (lambda: contrastive_loss(random(2, 3), random(2, 4, 3), torch.zeros(3)), r"positive: expected \[2\] .* \[3\]"),
        (lambda: ood_loss(random(2, 3, 4), random(2, 3, 5), 1), r"student: .* got \[2, 3, 5\] beside \[2, 3, 4\]"),
        (lambda: ood_loss(random(2, 3, 4), random(2, 3, 4), 3), r"heads: expected a divisor of .* 4, got 3"),
    ],
)
def test_bad_losses_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Seen(SeqPE):
    """An encoder that remembers what it was asked for."""

    def forward(self, positions):
        self.seen = getattr(self, "seen", [])
        self.seen.append(positions)
        return super().forward(positions)


def encoder(axes=1, digits=3, heads=2, **options):
    torch.manual_seed(0)
    return Seen(8, axes=axes, digits=digits, heads=heads, std=0.5, **options).double()


CASES = [(12, 300, 1, 3), ((3, 4), 20, 2, 2)]


@pytest.mark.parametrize(("shape", "limit", "axes", "digits"), CASES)
def test_a_step_is_one_call_on_distinct_positions_and_gives_what_separate_calls_give(shape, limit, axes, digits):
    model = encoder(axes, digits)
    small = dict(pivots=5, candidates=6, windows=4, window_positions=7, shift_rate=0.3)
    regularizer = SeqPERegularizer(model, shape, limit, 2, **small)
    kinds = set()
    for _ in range(10):
        model.seen = []
        step = regularizer.draw(3)
        encoded = model(step.positions)
        losses = regularizer.losses(step, encoded)
        (seen,) = model.seen
        rows = [tuple(row) if axes > 1 else row for row in seen.tolist()]
        assert rows == sorted(set(rows)) and seen.min() >= 0 and seen.max() < limit
        used = [step.main, step.pivots, step.candidates, step.teacher, step.student]
        reached = torch.cat([use.flatten() for use in used if use is not None])
        assert reached.unique().tolist() == list(range(len(rows)))

        own = lambda index: SeqPE.forward(model, step.positions[index])  # noqa: B023, E731
        torch.testing.assert_close(step.embeddings(encoded), own(step.main), rtol=0, atol=1e-10)
        pivots, candidates = step.positions[step.pivots], step.positions[step.candidates]
        assert torch.equal(step.positive, nearest_candidate(pivots, candidates))
        contrastive = contrastive_loss(own(step.pivots), own(step.candidates), step.positive)
        assert float(losses.contrastive.detach()) == pytest.approx(float(contrastive.detach()), abs=1e-10)
        ood = ood_loss(own(step.teacher), own(step.student), 2)
        assert float(losses.ood.detach()) == pytest.approx(float(ood.detach()), abs=1e-10)
        assert float(losses.total.detach()) == pytest.approx(
            0.1 * float((losses.contrastive + losses.ood).detach()), abs=1e-10
        )

        whole = [(i,) for i in range(12)] if axes == 1 else [(i, j) for i in range(3) for j in range(4)]
        grid = torch.tensor(whole)
        main = step.positions[step.main].view(*step.main.shape, axes)
        assert main.shape == ((3, 12, axes) if step.shifted.any() else (12, axes))
        for row, shifted in zip(main if main.dim() == 3 else main[None], step.shifted.tolist(), strict=False):
            assert torch.equal(row - row[0], grid) and (shifted or torch.equal(row, grid))
        kinds.add(bool(step.shifted.any()))
    assert kinds == {True, False}


def test_gradients_of_a_step_are_those_of_separate_calls():
    model = encoder()
    regularizer = SeqPERegularizer(model, 12, 300, 2, pivots=5, candidates=6, windows=4, window_positions=7)
    step = regularizer.draw(3)
    names = [name for name, _ in model.named_parameters()]

    def gradients(loss):
        return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))

    encoded = model(step.positions)
    found = gradients(step.embeddings(encoded).square().sum() + regularizer.losses(step, encoded).total)
    one = [model(step.positions[index]) for index in (step.main, step.pivots, step.candidates, step.student)]
    teacher = model(step.positions[step.teacher]).detach()
    loss = one[0].square().sum() + 0.1 * contrastive_loss(one[1], one[2], step.positive)
    expected = gradients(loss + 0.1 * ood_loss(teacher, one[3], 2))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)


def draws(regularizer, count=4):
    return [regularizer.draw(3) for _ in range(count)]


def same(one, other):
    return torch.equal(one.positions, other.positions) and torch.equal(one.main, other.main)


def test_draws_are_of_their_seed_and_step():
    model = encoder()
    new = lambda seed=0, **options: SeqPERegularizer(model, 12, 300, 2, seed=seed, shift_rate=0.5, **options)  # noqa: E731
    first = draws(new())
    assert all(map(same, first, draws(new()))) and not any(map(same, first, draws(new(1))))
    assert not same(first[0], first[1])
    torch.manual_seed(7)
    begun = new()
    draws(begun, 2)
    numbered = [new().draw(3, step) for step in range(4)]
    assert not any(map(same, numbered, numbered[1:])) and not any(map(same, numbered, [new(1).draw(3, 0), *first]))
    assert all(same(begun.draw(3, step), numbered[step]) for step in (2, 0, 3))
    # Without a loss its positions are not encoded, and the other's are the same.
    for name, kept in (("contrastive_weight", "student"), ("ood_weight", "candidates")):
        for whole, one in zip(first, draws(new(**{name: 0.0})), strict=True):
            assert (one.pivots is None) == (name == "contrastive_weight") == (one.teacher is not None)
            assert torch.equal(one.positions[one.main], whole.positions[whole.main]) and len(one.positions) < len(
                whole.positions
            )
            assert torch.equal(one.positions[getattr(one, kept)], whole.positions[getattr(whole, kept)])
    plain = new(contrastive_weight=0.0, ood_weight=0.0)
    step = plain.draw(3)
    assert float(plain.losses(step, model(step.positions)).total) == 0


def test_draws_do_not_touch_the_global_generator():
    regularizer = SeqPERegularizer(encoder(), 12, 300, 2)
    before = torch.get_rng_state()
    regularizer.draw(3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (3, 4)}, r"shape: expected the positions on 1 axes as encoder has, got \(3, 4\)"),
        ({"max_position": 1001}, r"max_position: expected at most 1000, what 3 digits of base 10 reach, got 1001"),
        ({"max_position": 12}, r"max_position: expected more than training's 12 positions, got 12"),
        ({"heads": 3}, r"heads: expected a divisor of the encoder's output width 8, got 3"),
        ({"ood_weight": -1.0}, r"ood_weight: expected a number of at least 0, got -1.0"),
        ({"shift_rate": 1.5}, r"rate: expected 0 to 1, got 1.5"),
        ({"window_positions": 13}, r"positions: expected 2 to 12, all of training's range, got 13"),
    ],
)
def test_bad_regularizers_are_named(options, message):
    arguments = {"encoder": encoder(), "shape": 12, "max_position": 300, "heads": 2, "window_positions": 8} | options
    with pytest.raises(ValueError, match=message):
        SeqPERegularizer(**arguments)


def test_embeddings_of_another_step_are_named():
    regularizer = SeqPERegularizer(encoder(), 12, 300, 2, window_positions=8)
    step = regularizer.draw(2)
    with pytest.raises(ValueError, match=rf"encoded: expected \[{len(step.positions)}, D\], .* got \[3, 8\]"):
        step.embeddings(random(3, 8))
