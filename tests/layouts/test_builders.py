"""Each builder against the rule of its layout, a mask and position IDs written out by hand from its paper's words."""

import inspect
import re
from collections.abc import Callable

import numpy as np
import pytest

from gistkit import layouts
from gistkit.layouts import BUILDERS, Layout, Role, upl
from gistkit.layouts.builders import EXAMPLES
from tests.helpers.rules import CASES, RULES, Rule

ROLE = {"bos": Role.BOS, "context": Role.CONTEXT, "memory": Role.MEMORY, "task": Role.TASK, "text": Role.TEXT}


def check(layout: Layout, rule: Rule) -> None:
    """Its roles, position IDs and mask, in logical order, are those of the rule, and so is what it compiles to."""
    tokens, sees, ids = rule
    assert layout.roles.tolist() == [ROLE[kind] for kind, _ in tokens]
    assert layout.positions.tolist() == list(ids)
    expected = np.array([[sees(i, q, j, k) for j, k in enumerate(tokens)] for i, q in enumerate(tokens)])
    assert (layout.dense_mask() == expected).all()
    for grouped in (True, False):
        plan = layout.compile(grouped=grouped)
        compiled = np.zeros_like(expected)
        for row, intervals in zip(plan.order[0].tolist(), plan.spans[0].tolist(), strict=True):
            for start, end in intervals:
                compiled[row, plan.order[0].numpy()[start:end]] = True
        assert (compiled == expected).all()


@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_follows_its_rule(name: str) -> None:
    for given, options in CASES[name]:
        try:
            check(BUILDERS[name](*given, **options), RULES[name](*given, **options))
        except AssertionError as error:
            error.add_note(f"{name}{given} {options}")
            raise


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_argument_below_what_the_docstring_says_is_named(title: str) -> None:
    name, arguments = EXAMPLES[title]
    words = re.findall(r"^    (\w+): .+?at least ([01])\b", str(inspect.getdoc(BUILDERS[name])), re.MULTILINE)
    least = {argument: int(number) for argument, number in words if isinstance(arguments.get(argument), int)}
    assert least
    for argument, number in least.items():
        with pytest.raises(ValueError, match=rf"\w+: expected {argument} >= {number}, got {number - 1}"):
            BUILDERS[name](**arguments | {argument: number - 1})


def test_a_decoder_of_cached_keys_has_rows_for_the_task_and_the_text() -> None:
    cached = layouts.decoder(11, 4, 3, task="qa", question=3, text=2).compile(queries=slice(9, None))
    assert cached.num_queries == 6 and cached.num_keys == 15
    assert cached.spans[0, :, 0].tolist() == [[0, 10 + i] for i in range(6)]


def test_gist_separate_positions() -> None:
    # BOS c c c c c g g g t t
    assert layouts.gist(5, 2, 2, separate_positions=True).positions.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 6, 7]


def test_gistpool_separate_positions() -> None:
    layout = layouts.gistpool(5, 2, 2, separate_positions=True)
    # BOS c c g c c g c g t t
    assert layout.positions.tolist() == [0, 1, 2, 1, 3, 4, 2, 5, 3, 6, 7]


def test_avgpool_at_ratio_1_reads_what_full_context_does() -> None:
    full = layouts.full_context(6, 3)
    read = layouts.avgpool(6, 1, 3)
    read = read.take(read.roles != Role.CONTEXT)
    assert read.positions.tolist() == full.positions.tolist()
    text = full.roles == Role.TEXT
    assert (read.dense_mask()[text] == full.dense_mask()[text]).all()


def test_one_number_of_voco_is_that_of_all_images() -> None:
    one, all_ = layouts.voco(7, 3, 4, before=2, images=3), layouts.voco([7] * 3, [3] * 3, 4, before=2)
    arrays = layouts.voco(np.array([7] * 3), np.array([3] * 3), 4, before=2)
    for same in (one, arrays):
        assert (same.roles == all_.roles).all() and (same.positions == all_.positions).all()


def test_voco_ids_of_the_paper() -> None:
    ids = layouts.voco(576, 128, 10).positions
    assert ids[:576].tolist() == list(range(1, 577))
    assert ids[576:704].tolist() == upl(1, 576, 128).tolist()
    assert ids[704:].tolist() == list(range(577, 587))
    # The example in the released code: an image at 250..825 and two tokens of the prompt behind it; text goes on at
    # 828, as if there were no memory tokens.
    ids = layouts.voco(576, 2, 2, before=250, gap=2).positions
    assert ids[250 + 576 :].tolist() == [826, 827, 394, 682, 828, 829]


def test_voco_spreads_over_each_axis_of_ids() -> None:
    # A prompt of 2 tokens, an image of 2 x 4 patches at (time, row, column), and a token of text behind its wider side.
    grid = [[2, 2 + i // 4, 2 + i % 4] for i in range(8)]
    plain = np.array([[0] * 3, [1] * 3, *grid, [6] * 3]).T
    epl = layouts.voco(8, 4, 1, before=2, ids=plain).positions
    assert epl[:, :10].tolist() == plain[:, :10].tolist() and epl[:, 14].tolist() == [6, 6, 6]
    assert epl[:, 10:14].tolist() == [[2] * 4, upl(2, 3, 4).tolist(), [2, 3, 4, 5]]
    dpl = layouts.voco(8, 4, 1, before=2, ids=plain, positions="dpl").positions
    assert dpl[:, :10].tolist() == plain[:, :10].tolist()
    assert dpl[:, 10:].tolist() == [[6, 7, 8, 9, 10]] * 3
    upl_ids = layouts.voco(8, 4, 1, before=2, ids=plain, positions="upl").positions
    assert upl_ids.tolist() == np.hstack([epl[:, :14], dpl[:, 14:]]).tolist()
    cpl = layouts.voco(8, 4, 1, before=2, ids=plain, positions="cpl").positions
    assert cpl.tolist() == np.hstack([dpl[:, :14], epl[:, 14:]]).tolist()
    # A second image counts on from the first, and its memory tokens with it.
    twice = np.hstack([plain, plain[:, 2:] + 5])
    two = layouts.voco([8, 8], 4, 1, before=2, between=1, ids=twice, positions="upl").positions
    rows = upl(2 + 9, 3 + 9, 4).tolist()  # half to even, of the ids that there are
    assert two[:, 15:23].tolist() == (upl_ids[:, 2:10] + 9).tolist()
    assert two[:, 23:].tolist() == [[11] * 4 + [19], [*rows, 19], [11, 12, 13, 14, 19]]


@pytest.mark.parametrize("builder", [layouts.gist, layouts.gistpool, layouts.avgpool])
def test_a_context_shorter_than_the_ratio_has_one_memory_token(builder: Callable[..., Layout]) -> None:
    short, exact = builder(3, 8, 2), builder(3, 3, 2)
    assert (short.roles == Role.MEMORY).sum() == 1
    assert (short.dense_mask() == exact.dense_mask()).all() and (short.positions == exact.positions).all()


def test_methods_compile_to_few_intervals() -> None:
    for most, layout in (
        (1, layouts.causal(5)),
        (1, layouts.full_context(5, 3)),
        (1, layouts.no_context(3)),
        (2, layouts.icae_encoder(11, 4, 3)),
        (2, layouts.avgpool(7, 3, 3)),
        (3, layouts.gist(50, 4, 9)),
        (3, layouts.gistpool(50, 4, 9)),
        (3, layouts.voco(12, 3, 4, before=2)),
        (3, layouts.dodo(np.arange(40) % 7 == 0, 5)),
        (3, layouts.dodo(np.arange(40) % 7 == 0, 6, segment=3, bos=True)),
    ):
        assert layout.compile().spans.shape[2] <= most
    assert layouts.gistpool(50, 4, 9).compile(grouped=False).spans.shape[2] > 3
    assert layouts.sac(13, 6, 3).compile(grouped=False).spans.shape[2] == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: layouts.causal("3"), TypeError, r"causal: expected length to be an int, got str"),
        (lambda: layouts.decoder(4, 4, 2, task="lm"), ValueError, r"expected text, the number of tokens after"),
        (lambda: layouts.decoder(4, 4, 2, question=2), ValueError, r"expected question to be 0 for task 'ae', got 2"),
        (lambda: layouts.decoder(4, 4, 2, task="lm", text=-2), ValueError, r"decoder: expected text >= 0, got -2"),
        (lambda: layouts.gist(8, 0.5), ValueError, r"gist: expected ratio >= 1, got 0.5"),
        (lambda: layouts.gist(8), ValueError, r"gist: expected either ratio or memory, got ratio None and memory None"),
        (lambda: layouts.gistpool(8, 1.5), TypeError, r"gistpool: expected ratio to be an int, got float"),
        (lambda: layouts.gist(8, memory=0), ValueError, r"gist: expected memory >= 1, got 0"),
        (lambda: layouts.voco(0, 2), ValueError, r"voco: expected vision >= 1, got 0"),
        (lambda: layouts.voco([4, 0], 2), ValueError, r"voco: expected vision >= 1, got 0"),
        (lambda: layouts.voco([4, 5], [2]), ValueError, r"voco: expected memory to be one number or 2, got 1"),
        (lambda: layouts.voco(4, 2, between=[3]), ValueError, r"voco: expected between to be one number or 0, got 1"),
        (lambda: layouts.voco(4, "2"), TypeError, r"voco: expected memory to be an int, got str"),
        (lambda: layouts.voco(4, 2, gap=-1), ValueError, r"voco: expected gap >= 0, got -1"),
        (lambda: layouts.voco(4, 2, positions="abc"), ValueError, r"voco: expected positions to be one of dpl, upl"),
        (lambda: layouts.voco(4, 2, gap=1, bidirectional=True), ValueError, r"expected gap 0 with bidirectional"),
        (lambda: layouts.voco(4, 2, ids=range(5)), ValueError, r"voco: expected ids to be integers \[4\] or \[A, 4\]"),
        (lambda: layouts.voco(1, 2, ids=[0.5]), ValueError, r"voco: expected ids to be integers .* got float64"),
        (lambda: layouts.dodo([1, 0], 2), TypeError, r"dodo: expected selected of dtype bool, got int64"),
        (lambda: layouts.dodo([True], 0), ValueError, r"dodo: expected tau >= 1, got 0"),
        (lambda: layouts.dodo([True], 4, segment=3), ValueError, r"expected tau to be a multiple of segment, 3, got 4"),
        (lambda: layouts.dodo([True], 4, segment=0), ValueError, r"dodo: expected segment >= 1, got 0"),
        (lambda: layouts.dodo(np.zeros(0, bool), 1), ValueError, r"dodo: expected selected of shape \[N\] with N >= 1"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], Layout], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
