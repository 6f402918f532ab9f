"""Each builder against a mask and position IDs written out by hand from its paper's words, token by token."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from gistkit import layouts
from gistkit.layouts import Layout, Role, decoder_positions, encoder_positions, upl

# A token as the papers speak of it: its kind and the chunk, window or image it belongs to.
Token = tuple[str, int]
ROLE = {"bos": Role.BOS, "context": Role.CONTEXT, "memory": Role.MEMORY, "task": Role.TASK, "text": Role.TEXT}


def check(layout: Layout, tokens: list[Token], sees: Callable[[int, Token, int, Token], bool], ids: list[int]) -> None:
    """`sees(i, query, j, key)` says whether token i sees token j, in logical order."""
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


def test_causal() -> None:
    check(layouts.causal(5), [("text", 0)] * 5, lambda i, q, j, k: j <= i, list(range(5)))
    assert layouts.causal(5).compile().spans.shape[2] == 1


def test_full_and_no_context() -> None:
    tokens: list[Token] = [("bos", 0)] + [("context", 0)] * 5 + [("text", 0)] * 3
    check(layouts.full_context(5, 3), tokens, lambda i, q, j, k: j <= i, list(range(9)))
    check(layouts.no_context(3), [("bos", 0)] + [("text", 0)] * 3, lambda i, q, j, k: j <= i, list(range(4)))
    for layout in (layouts.full_context(5, 3), layouts.no_context(3)):
        assert layout.compile().spans.shape[2] == 1


@pytest.mark.parametrize("positions", ["dpl", "upl", "cpl", "epl"])
@pytest.mark.parametrize(("context", "chunk", "memory"), [(12, 4, 2), (11, 4, 3), (3, 8, 5), (5, 1, 1), (9, 4, 6)])
def test_icae_encoder(context: int, chunk: int, memory: int, positions: str) -> None:
    ids = encoder_positions(positions, context, chunk, memory)
    tokens: list[Token] = []
    wanted: list[int] = []
    for c, start in enumerate(range(0, context, chunk)):
        size = min(chunk, context - start)
        tokens += [("context", c)] * size + [("memory", c)] * memory
        wanted += [*ids.context[start : start + size], *ids.memory[c * memory : (c + 1) * memory]]
    layout = layouts.icae_encoder(context, chunk, memory, positions)
    # Each [chunk; memory] is a sequence of its own under a causal mask.
    check(layout, tokens, lambda i, q, j, k: q[1] == k[1] and j <= i, wanted)
    assert layout.compile().spans.shape[2] <= 2


@pytest.mark.parametrize("carrier", ["embedding", "kv"])
@pytest.mark.parametrize(("task", "question", "text"), [("ae", 0, None), ("lm", 0, 5), ("qa", 3, 2), ("lm", 0, 0)])
@pytest.mark.parametrize("positions", ["dpl", "epl"])
def test_decoder(task: str, question: int, text: int | None, positions: str, carrier: str) -> None:
    layout = layouts.decoder(11, 4, 3, task=task, carrier=carrier, positions=positions, text=text, question=question)
    count = 11 if text is None else question + text
    ids = decoder_positions(positions, task, carrier, 11, 4, 3, count)
    tokens: list[Token] = [("memory", 0)] * 9 + [("task", 0)] + [("text", 0)] * count
    check(layout, tokens, lambda i, q, j, k: j <= i, [*ids.memory, ids.task, *ids.text])
    cached = layout.compile(queries=slice(9, None))
    assert cached.num_queries == 1 + count
    assert cached.num_keys == 10 + count
    assert cached.spans[0, :, 0].tolist() == [[0, 10 + i] for i in range(1 + count)]


@pytest.mark.parametrize(("count", "arguments"), [(5, {"ratio": 4}), (4, {"ratio": 4.5}), (2, {"memory": 2})])
def test_gist(count: int, arguments: dict) -> None:
    tokens = [("bos", 0)] + [("context", 0)] * 18 + [("memory", 0)] * count + [("text", 0)] * 3

    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        if j > i:
            return False
        return k[0] == "bos" or q[0] != "text" or k[0] != "context"

    check(layouts.gist(18, text=3, **arguments), tokens, sees, list(range(22 + count)))


def test_gist_separate_positions() -> None:
    # BOS c c c c c g g g t t
    assert layouts.gist(5, 2, 2, separate_positions=True).positions.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 6, 7]


@pytest.mark.parametrize(("context", "windows"), [(12, 1), (13, 2), (13, None), (4, 5), (12, None)])
def test_gistpool(context: int, windows: int | None) -> None:
    tokens: list[Token] = [("bos", 0)]
    for w, start in enumerate(range(0, context, 3)):
        tokens += [("context", w)] * min(3, context - start) + [("memory", w)]
    tokens += [("text", 0)] * 4
    options = ("memory_sees_memory", "memory_sees_itself", "memory_sees_bos", "context_sees_memory")
    for values in itertools.product((False, True), repeat=4):
        chosen = dict(zip(options, values, strict=True))

        def sees(i: int, q: Token, j: int, k: Token, chosen: dict[str, bool] = chosen) -> bool:
            if j > i:
                return False
            match q[0], k[0]:
                case "bos", _:
                    return True
                case "memory", "bos":
                    return chosen["memory_sees_bos"]
                case "memory", "context":
                    return windows is None or k[1] > q[1] - windows
                case "memory", "memory":
                    return chosen["memory_sees_itself" if i == j else "memory_sees_memory"]
                case "context", "memory":
                    return chosen["context_sees_memory"]
                case "text", "context":
                    return False
            return True

        layout = layouts.gistpool(context, 3, 4, windows=windows, **chosen)
        check(layout, tokens, sees, list(range(len(tokens))))
        assert layout.compile().spans.shape[2] <= 3


def test_gistpool_separate_positions() -> None:
    layout = layouts.gistpool(5, 2, 2, separate_positions=True)
    # BOS c c g c c g c g t t
    assert layout.positions.tolist() == [0, 1, 2, 1, 3, 4, 2, 5, 3, 6, 7]


@pytest.mark.parametrize(("context", "ratio"), [(6, 2), (7, 3), (5, 5), (4, 1)])
def test_avgpool(context: int, ratio: int) -> None:
    tokens: list[Token] = [("bos", 0)]
    ids: list[float] = [0]
    for w, start in enumerate(range(0, context, ratio)):
        its = list(range(start + 1, min(start + ratio, context) + 1))
        tokens += [("context", w)] * len(its) + [("memory", w)]
        ids += [*its, sum(its) / len(its)]
    tokens += [("text", 0)] * 3
    ids += range(context + 1, context + 4)

    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        match q[0], k[0]:
            case "memory", _:
                return k == ("context", q[1])
            case "context", "memory":
                return False
            case "text", "context":
                return False
        return j <= i

    layout = layouts.avgpool(context, ratio, 3)
    check(layout, tokens, sees, ids)
    assert layout.compile().spans.shape[2] <= 2


def test_avgpool_at_ratio_1_reads_what_full_context_does() -> None:
    full = layouts.full_context(6, 3)
    read = layouts.avgpool(6, 1, 3)
    read = read.take(read.roles != Role.CONTEXT)
    assert read.positions.tolist() == full.positions.tolist()
    text = full.roles == Role.TEXT
    assert (read.dense_mask()[text] == full.dense_mask()[text]).all()


@pytest.mark.parametrize(
    ("positions", "text_sees_before"), [("dpl", True), ("upl", False), ("cpl", True), ("epl", False), ("epl", True)]
)
@pytest.mark.parametrize(
    ("vision", "memory", "options"),
    [
        ([7], [3], {}),
        ([7], [3], {"before": 3}),
        ([7] * 3, [3] * 3, {"before": 2}),
        ([7, 1, 5], [3, 2, 4], {"before": 2, "between": [1, 2], "gap": 2}),
        ([4, 6], [2, 2], {"between": [3], "gap": 1}),
        ([4, 6], [2, 9], {"before": 1, "between": [3], "bidirectional": True}),
    ],
)
def test_voco(vision: list[int], memory: list[int], options: dict, positions: str, text_sees_before: bool) -> None:
    before, gap, text = options.get("before", 0), options.get("gap", 0), 4
    after = [*options.get("between", [0] * (len(vision) - 1)), text]
    tokens: list[Token] = [("text", -1)] * before
    ids = list(range(before))
    # UPL counts all tokens as DPL does, and CPL none of the memory tokens, as EPL.
    consistent = positions in ("cpl", "epl")
    at = max(before, 1) if consistent else before
    for image, (seen, gists, rest) in enumerate(zip(vision, memory, after, strict=True)):
        tokens += [("context", image)] * (seen + gap) + [("memory", image)] * gists + [("text", image)] * rest
        end = at + seen + gap
        ids += range(at, end)
        ids += upl(at, at + seen - 1, gists).tolist() if positions in ("upl", "epl") else range(end, end + gists)
        at = end if consistent else end + gists
        ids += range(at, at + rest)
        at += rest
    if positions == "dpl":
        assert ids == list(range(len(tokens)))

    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        if options.get("bidirectional") and q == k and q[0] == "context":
            return True
        if j > i:
            return False
        if k[0] == "context":
            return q[0] != "text" and q[1] == k[1]
        return text_sees_before or k[0] == "memory" or q[0] != "text" or q[1] == k[1]

    options |= {"positions": positions, "text_sees_before": text_sees_before}
    check(layouts.voco(vision, memory, text, **options), tokens, sees, ids)
    if len(set(vision)) == len(set(memory)) == 1 and "between" not in options:
        one = layouts.voco(vision[0], memory[0], text, images=len(vision), **options)
        assert (one.roles == layouts.voco(vision, memory, text, **options).roles).all()


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


@pytest.mark.parametrize("tau", [1, 4, 100])
def test_dodo(tau: int) -> None:
    selected = np.zeros(23, bool)
    selected[[2, 3, 9, 14, 20, 22]] = True
    tokens: list[Token] = [("memory" if nugget else "context", 0) for nugget in selected]

    # Token t sees the nuggets of w_1..t-tau and all of the last tau tokens, itself included.
    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        return (j <= i - tau and k[0] == "memory") or i - tau < j <= i

    check(layouts.dodo(selected, tau), tokens, sees, list(range(23)))


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(("tau", "segment"), [(4, 4), (6, 2), (6, 3), (40, 8)])
def test_dodo_whose_segments_share_a_split(tau: int, segment: int, bos: bool) -> None:
    selected = np.zeros(23, bool)
    selected[[0, 2, 3, 9, 14, 20, 22]] = True
    tokens: list[Token] = [("memory" if nugget else "context", i // segment) for i, nugget in enumerate(selected)]
    if bos:
        tokens[0] = ("bos", 0)

    # What is uncompressed begins at the same token for a whole segment.
    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        if j > i:
            return False
        return k[0] != "context" or j >= i // segment * segment - (tau - segment)

    layout = layouts.dodo(selected, tau, segment=segment, bos=bos)
    check(layout, tokens, sees, list(range(23)))
    assert layout.compile().spans.shape[2] <= 3


def test_methods_compile_to_few_intervals() -> None:
    for layout in (
        layouts.gist(50, 4, 9),
        layouts.gistpool(50, 4, 9),
        layouts.voco(12, 3, 4, before=2),
        layouts.dodo(np.arange(40) % 7 == 0, 5),
    ):
        assert layout.compile().spans.shape[2] <= 3
    assert layouts.gistpool(50, 4, 9).compile(grouped=False).spans.shape[2] > 3


@pytest.mark.parametrize(("context", "chunk", "ratio"), [(12, 6, 3), (13, 6, 3), (8, 4, 4), (2, 8, 6), (5, 1, 1)])
def test_sac(context: int, chunk: int, ratio: int) -> None:
    tokens: list[Token] = []
    for c, start in enumerate(range(0, context, chunk)):
        size = min(chunk, context - start)
        anchors = [place for place in range(size) if place % ratio == (ratio - 1) // 2] or [0]
        tokens += [("memory" if place in anchors else "context", c) for place in range(size)]
    layout = layouts.sac(context, chunk, ratio)
    check(layout, tokens, lambda i, q, j, k: q[1] == k[1], list(range(1, context + 1)))
    assert layout.compile(grouped=False).spans.shape[2] == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: layouts.causal(0), ValueError, r"causal: expected length >= 1, got 0"),
        (lambda: layouts.causal("3"), TypeError, r"causal: expected length to be an int, got str"),
        (lambda: layouts.icae_encoder(0, 4, 2), ValueError, r"encoder_positions: expected context >= 1, got 0"),
        (lambda: layouts.icae_encoder(4, 4, 0), ValueError, r"expected memory >= 1, got 0"),
        (lambda: layouts.decoder(4, 4, 2, task="lm"), ValueError, r"expected text, the number of tokens after"),
        (lambda: layouts.decoder(4, 4, 2, question=2), ValueError, r"expected question to be 0 for task 'ae', got 2"),
        (lambda: layouts.decoder(4, 4, 2, task="lm", text=-2), ValueError, r"decoder: expected text >= 0, got -2"),
        (lambda: layouts.gist(8, 0.5), ValueError, r"gist: expected ratio >= 1, got 0.5"),
        (lambda: layouts.gist(8), ValueError, r"gist: expected either ratio or memory, got ratio None and memory None"),
        (lambda: layouts.gist(0, 2), ValueError, r"gist: expected context >= 1, got 0"),
        (lambda: layouts.gistpool(8, 0), ValueError, r"gistpool: expected ratio >= 1, got 0"),
        (lambda: layouts.gistpool(8, 1.5), TypeError, r"gistpool: expected ratio to be an int, got float"),
        (lambda: layouts.gist(8, memory=0), ValueError, r"gist: expected memory >= 1, got 0"),
        (lambda: layouts.avgpool(8, 0), ValueError, r"avgpool: expected ratio >= 1, got 0"),
        (lambda: layouts.beacon(8, 0), ValueError, r"beacon: expected ratio >= 1, got 0"),
        (lambda: layouts.beacon(8, 2, segment=0), ValueError, r"beacon: expected segment >= 1, got 0"),
        (lambda: layouts.sac(8, 4, 0), ValueError, r"sac: expected ratio >= 1, got 0"),
        (lambda: layouts.full_context(0), ValueError, r"full_context: expected context >= 1, got 0"),
        (lambda: layouts.no_context(0), ValueError, r"no_context: expected text >= 1, got 0"),
        (lambda: layouts.gistpool(8, 2, windows=0), ValueError, r"gistpool: expected windows >= 1, got 0"),
        (lambda: layouts.voco(0, 2), ValueError, r"voco: expected vision >= 1, got 0"),
        (lambda: layouts.voco([4, 0], 2), ValueError, r"voco: expected vision >= 1, got 0"),
        (lambda: layouts.voco([4, 5], [2]), ValueError, r"voco: expected memory to be one number or 2, got 1"),
        (lambda: layouts.voco(4, 2, images=0), ValueError, r"voco: expected images >= 1, got 0"),
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


@pytest.mark.parametrize(
    ("context", "ratio", "segment", "units"), [(12, 2, 4, 2), (13, 3, 7, 2), (5, 4, 1, 1), (3, 9, 20, 2)]
)
def test_beacon(context: int, ratio: int, segment: int, units: int) -> None:
    tokens: list[Token] = [("bos", 0)]
    for w, start in enumerate(range(0, context, ratio)):
        tokens += [("context", w // units)] * min(ratio, context - start) + [("memory", w // units)]
    tokens += [("text", 0)] * 3

    def sees(i: int, q: Token, j: int, k: Token) -> bool:
        return j <= i and (k[0] != "context" or (q[0] != "text" and k[1] == q[1]))

    check(layouts.beacon(context, ratio, 3, segment=segment), tokens, sees, list(range(len(tokens))))
