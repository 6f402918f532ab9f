"""The CUDA kernels on a GPU: the cases of the CPU tests, and what only a GPU has.

The bodies run on the CPU too, with fewer cases, so that a GPU meets none that is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

import gistkit
from gistkit import Plan, layouts
from gistkit.layouts import lists
from gistkit.ops import reference
from gistkit.ops._library import CUDA_LIBRARY
from tests.helpers import nonfinite
from tests.helpers.devices import assert_as_good, gpu, grid, moved, on
from tests.helpers.rounding import check, rounded_weights
from tests.ops.test_attention import EPSILON, SHAPES, Case, causal_plan
from tests.ops.test_rope import SHAPES as ROPE_SHAPES
from tests.ops.test_rope import error, frequencies, heads_of, oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_attention(case: Case, device: str, **options: Any) -> None:
    """As on a CPU with a matrix unit: tensor cores take their operands rounded.

    They cut sums off where `EPSILON` has room: of 256 products in steps of 16, cut to 24 bits of the largest, a logit
    loses up to 1.5e-6, and a row's lse, up to 8 here, may lose 8e-6.
    """
    dtype, dim = case.inputs[0].dtype, case.inputs[0].shape[-1]
    attention = on(device, gistkit.attention)
    small = device == "cuda" and torch.cuda.get_device_properties(0).shared_memory_per_block_optin <= 99 * 1024
    if small and dim == 256 and dtype != torch.float32:
        with pytest.raises(RuntimeError, match=r"head dims 256 .* and 256 .* bytes of shared memory a block"):
            case.run(attention, **options)
        pytest.skip("heads as wide need more shared memory than this GPU has")
    low, exact = case.run_low(True, **options), case.run(reference.attention, torch.float64, **options)
    if dtype != torch.float32 and device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        low[0] = case.run(rounded_weights, **options)[0]
    check(case.run(attention, **options), low, exact, EPSILON[dtype])


@pytest.mark.skipif("libgistkit_cuda" in CUDA_LIBRARY and torch.version.cuda is not None, reason="they are there")
def test_absent_cuda_kernels_say_why() -> None:
    with pytest.raises(RuntimeError, match=r"CUDA library: (not )?built") as raised:
        torch.ops.gistkit.rope.default.redispatch(
            torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA),
            *[torch.zeros(1, 1, 1, 2)] * 2,
            *[torch.zeros(1, 1, 1)] * 2,
            1.0,
            False,
            False,
        )
    assert CUDA_LIBRARY in str(raised.value)


@grid("shape,dtype", SHAPES.values(), DTYPES)
def test_attention(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_attention(Case(shape, dtype), device)


@grid("shape,softcap,bias,dtype", ["few-queries", "gqa-odd"], [None, 3.0], ["b", "h", "bh", "i"], DTYPES)
def test_attention_with_bias_and_cap(
    device: str, shape: str, softcap: float | None, bias: str, dtype: torch.dtype
) -> None:
    check_attention(Case(SHAPES[shape], dtype, bias=bias), device, softcap=softcap)


@grid("dtype,dim", DTYPES, [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 72)])
def test_head_dims(device: str, dtype: torch.dtype, dim: tuple[int, int]) -> None:
    check_attention(Case((1, 4, 2, 333, 517, *dim, 2, True), dtype), device)


# Gradients that a GPU with wgmma leaves to it, of one tile and of several that are cut off (csrc/cuda/README.md).
WGMMA = {
    "64": (1, 2, 2, 400, 520, 64, 64, 2, True),
    "128": (1, 2, 2, 400, 520, 128, 128, 2, True),
    "40": (2, 2, 1, 300, 200, 40, 40, 2, False),
    "96-72": (1, 2, 1, 300, 200, 96, 72, 2, False),
    "gqa": (3, 6, 2, 333, 517, 128, 128, 3, False),
    "mqa": (2, 4, 1, 333, 517, 64, 64, 3, False),
    "one tile": (1, 1, 1, 128, 128, 64, 64, 1, True),
}


@grid("shape,bias,dtype", WGMMA.values(), ["", "bh"], (torch.bfloat16, torch.float16))
def test_gradients_of_wgmma(device: str, shape: tuple[int, ...], bias: str, dtype: torch.dtype) -> None:
    check_attention(Case(shape, dtype, bias=bias), device)


@grid("shape", [WGMMA["gqa"], WGMMA["mqa"]])
def test_gradients_summed_in_any_order(device: str, shape: tuple[int, ...]) -> None:
    case = Case(shape, torch.bfloat16)
    low, exact = case.run_low(True), case.run(reference.attention, torch.float64)
    check(case.run(on(device, gistkit.attention), deterministic=False), low, exact, EPSILON[torch.bfloat16])


@grid("dtype,keys,dim,options", DTYPES[1:], [250, 517], [40, 64, 80, 128], [("", None), ("bh", None), ("h", 3.0)])
def test_tiles_enough_for_wgmma(
    device: str, dtype: torch.dtype, keys: int, dim: int, options: tuple[str, float | None]
) -> None:
    """As many as multiprocessors, or keys that are not cut into parts: a GPU with wgmma leaves the results to it."""
    bias, softcap = options
    shape = (2, 24 if device == "cuda" else 2, 2, 333, keys, dim, dim, 3, False)
    check_attention(Case(shape, dtype, bias=bias), device, softcap=softcap)


@grid("dtype,dim", DTYPES[1:], [64, 128])
def test_scores_that_outgrow_what_they_are_weighed_against(device: str, dtype: torch.dtype, dim: int) -> None:
    """Results alone; a GPU with wgmma weighs scores against those of some steps ago."""
    case = Case((1, 24 if device == "cuda" else 2, 2, 400, 600, dim, dim, 1, True), dtype)
    case.inputs[1] *= torch.linspace(0.1, 9, 600)[:, None]
    low, exact = case.run(rounded_weights), case.run(reference.attention, torch.float64)
    check(case.run(on(device, gistkit.attention))[:2], low[:2], exact[:2], EPSILON[dtype])


@grid("dtype,name", DTYPES, ["causal", "gistpool", "dodo", "icae"])
def test_layouts_of_papers(device: str, dtype: torch.dtype, name: str) -> None:
    g = torch.Generator().manual_seed(0)
    plan = {
        "causal": layouts.causal(700),
        "gistpool": layouts.gistpool(600, 8, 90),
        "dodo": layouts.dodo((torch.arange(700) % 10 == 0).numpy(), 64),
        "icae": layouts.icae_encoder(600, 100, 20),
    }[name].compile()
    case = Case((1, 2, 1, 1, 1, 64, 64, 1, True), dtype)
    make = lambda heads, rows: torch.randn(1, heads, rows, 64, generator=g).to(dtype)  # noqa: E731
    case.plan = plan
    case.inputs = [make(2, plan.num_queries), make(1, plan.num_keys), make(1, plan.num_keys)]
    case.grad_out, case.grad_lse = make(2, plan.num_queries), torch.zeros(1, 2, plan.num_queries)
    check_attention(case, device)


@grid("layout,dtype,bias", nonfinite.PLANS, DTYPES, [False, True])
def test_what_is_not_finite_reaches_only_what_sees_it(device: str, layout: str, dtype: torch.dtype, bias: bool) -> None:
    plan = nonfinite.PLANS[layout]()
    for what, inputs, grad_out, grad_lse in nonfinite.spoiled(plan, dtype, 2, 1, 64, 40, bias, seed=plan.num_keys):
        tensors, upstream = list(moved(tuple(inputs), device)), moved((grad_out, grad_lse), device)
        got = nonfinite.run(tensors, *upstream, moved(plan, device))
        nonfinite.check(got, nonfinite.gathered_attention(inputs, grad_out, grad_lse, plan), dtype, what)


@grid("dtype", DTYPES)
def test_a_long_sequence(device: str, dtype: torch.dtype) -> None:
    """Lists of hundreds of tiles, sums of thousands of terms; the dense form in float64 on the same device."""
    length = 8192 if device == "cuda" else 500
    heads = [torch.randn(1, 1, length, 64, device=device, dtype=dtype) for _ in range(3)]
    upstream = torch.randn_like(heads[0])
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT * 64**-0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ value

    def run(function: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.to(dtype).detach().clone().requires_grad_() for t in heads]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, upstream.to(dtype))]

    plan = causal_plan(length).to(device)
    found = run(lambda *x: gistkit.attention(*x, plan), dtype)
    plain = run(lambda *x: scaled_dot_product_attention(*x, is_causal=True), dtype)
    assert_as_good(found, plain, run(exact, torch.float64))


def results(
    inputs: list[Tensor], plan: Plan, grad_out: Callable[[Tensor], Tensor] = torch.cos, **options: Any
) -> list[Tensor]:
    """Attention's result and gradients, for what comes from above a function of the result."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = gistkit.attention(*inputs, plan, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad_out(out.detach()))]


def in_aligned_rows(t: Tensor) -> Tensor:
    """The tensor in rows of whole 16 bytes, the rest of them NaN."""
    wide = t.new_full((*t.shape[:-1], -(-t.shape[-1] // 8) * 8), torch.nan)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


@grid("dtype,dim", DTYPES, [1, 33, 60, 100, 130, 250])
def test_head_dims_within_aligned_rows(device: str, dtype: torch.dtype, dim: int) -> None:
    """Rows that wide copies may read, the last of them in part: what follows is NaN."""
    case = Case((1, 2, 2, 300, 300, dim, dim, 1, True), dtype)
    case.plan = causal_plan(300)

    def attention(query: Tensor, key: Tensor, value: Tensor, plan: Plan, **options: Any) -> Any:
        out, lse = gistkit.attention(*map(in_aligned_rows, (query, key, value)), plan, **options)
        out.register_hook(in_aligned_rows)
        return out, lse

    low, exact = case.run_low(True), case.run(reference.attention, torch.float64)
    check(case.run(on(device, attention)), low, exact, EPSILON[dtype])


@grid("dtype,queries", DTYPES, [1, 70, 300])
def test_keys_that_no_row_sees_are_never_read(device: str, dtype: torch.dtype, queries: int) -> None:
    query, key, value = (torch.randn(1, 2, n, 64, device=device, dtype=dtype) for n in (queries, 1500, 1500))
    spans = torch.tensor([0, 700], dtype=torch.int32, device=device).expand(1, queries, 1, 2).contiguous()
    found = []
    for rest in (0, torch.nan):
        key[:, :, 700:], value[:, :, 700:] = rest, rest
        found.append(results([query, key, value], Plan(spans, 1500)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@grid("dtype,queries", DTYPES, [3, 300], cpu=6)
def test_malformed_spans_mean_their_union(device: str, dtype: torch.dtype, queries: int) -> None:
    """Plan(...) checks nothing, as spans may be made on a device; kernels clamp, sort and merge."""
    low, high = -(2**31), 2**31 - 1
    rows = [
        ([[150, 250], [-7, 130]], [[0, 130], [150, 250]]),
        ([[low, high], [4, 4]], [[0, 300], [300, 300]]),
        ([[200, 20], [high, low]], [[300, 300], [300, 300]]),
        ([[30, 180], [100, 999]], [[30, 300], [300, 300]]),
    ]
    index = torch.arange(queries, device=device) % len(rows)
    heads = [torch.randn(1, 2, n, 64, device=device, dtype=dtype) for n in (queries, 300, 300)]
    found = []
    for spans in zip(*rows, strict=True):
        plan = Plan(torch.tensor(spans, dtype=torch.int32, device=device)[index][None].contiguous(), 300)
        found.append(results(heads, plan))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@grid("dtype,queries", DTYPES, [3, 300])
def test_lists_of_the_device_are_those_of_the_host(
    device: str, dtype: torch.dtype, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = torch.randint(-9, 310, (2, queries, 3, 2), dtype=torch.int32)
    spans[:, 1::4] = 0
    spans = spans.to(device)
    heads = [torch.randn(2, 2, n, 64, device=device, dtype=dtype) for n in (queries, 300, 300)]
    found = []
    for most in (lists.MOST_TILES, 0):
        monkeypatch.setattr(lists, "MOST_TILES", most)
        found.append(results(heads, Plan(spans, 300)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@grid("dtype,shape,bias", [torch.bfloat16], [WGMMA["gqa"], WGMMA["mqa"]], ["", "h"])
def test_same_bits_every_time(device: str, dtype: torch.dtype, shape: tuple[int, ...], bias: str) -> None:
    case = Case(shape, dtype, bias=bias)
    attention = on(device, gistkit.attention)
    first = case.run(attention)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, case.run(attention), strict=True))


@grid("shape,dtype,interleaved", ROPE_SHAPES, DTYPES, [False, True])
def test_rope(device: str, shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool) -> None:
    batch, queries, keys, tokens, dim, rotary = shape
    query, key = heads_of(batch, queries, tokens, dim, dtype), heads_of(batch, keys, tokens, dim, dtype, 1)
    positions = torch.randint(0, 2**30, (batch, tokens), generator=torch.Generator().manual_seed(2))
    inv_freq, scaling = frequencies(rotary), 1.25
    options = {"scaling": scaling, "interleaved": interleaved}
    for mine, given in zip(
        on(device, gistkit.rope)(query, key, positions, inv_freq, **options), (query, key), strict=True
    ):
        exact = oracle(given, positions, inv_freq, **options)
        # In units of 2^-24, half an ulp of float32 at 1, each times |x| scaling: an angle of 2^30 in double has an
        # error of 1; its cosine and sine, times scaling, rounded 2; their product with an element and the sum 2. Two
        # elements take part. Then the result is rounded to its dtype.
        arithmetic = 2 * 5 * 2**-24 * scaling * given.abs().max().item()
        rounding = torch.finfo(dtype).eps / 2 * float(abs(exact).max())
        assert error(mine, exact) <= arithmetic + rounding


def with_gradients(function: Callable[..., Any], inputs: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients of heads in a dtype; other inputs stay in float64."""
    inputs = tuple((x if x.dtype == torch.float64 else x.to(dtype)).detach().requires_grad_() for x in inputs)
    out = function(*inputs)
    total = sum(x.double().square().sin().sum() for x in out)
    return [*(x.detach() for x in out), *torch.autograd.grad(total, inputs)]


@grid("dtype", DTYPES)
def test_rope_gradients(device: str, dtype: torch.dtype) -> None:
    positions = torch.rand(2, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).mul(50)
    inputs = heads_of(2, 4, 37, 32), heads_of(2, 2, 37, 32, seed=1), positions, frequencies(32).double()
    found = with_gradients(on(device, gistkit.rope), inputs, dtype)
    exact = with_gradients(reference.rope, tuple(x.to(dtype).double() for x in inputs[:2]) + inputs[2:], torch.float64)
    assert_as_good(found, with_gradients(reference.rope, inputs, dtype), exact)


@grid("windows,dtype,rotated", [1, 5, 37, torch.tensor([[0, 1, 30, 30], [3, 4, 5, 36]])], DTYPES, [False, True])
def test_window_pool(device: str, windows: int | Tensor, dtype: torch.dtype, rotated: bool) -> None:
    count = windows.shape[1] - 1 if isinstance(windows, Tensor) else -(-37 // windows)
    options: dict[str, Any] = {"windows": windows}
    if rotated:
        options |= {"positions": torch.arange(count) * 2.5, "inv_freq": frequencies(48), "scaling": 1.25}
    inputs = tuple(heads_of(2, 3, 37, dim, dtype, dim) for dim in (64, 24))
    found = with_gradients(lambda *x: on(device, gistkit.window_pool)(*x, **options), inputs, dtype)
    plain = lambda *x: reference.window_pool(*x, **options)  # noqa: E731
    exact = with_gradients(plain, tuple(x.double() for x in inputs), torch.float64)
    assert_as_good(found, with_gradients(plain, inputs, dtype), exact)


CHECKED = ("rope", "rerotate", "window_pool", "equal windows")


def calls_with_values(query: Tensor, key: Tensor) -> dict[str, Callable[[], Any]]:
    """Calls with arguments whose values are checked on a CPU. Heads [1, 4, N, 64], N at least 8."""
    device, tokens = query.device, query.shape[2]
    positions = torch.arange(tokens, device=device) + 0.5
    inv_freq = torch.linspace(1, 0.1, 32, device=device)
    offsets = torch.cat([torch.arange(0, 6, 3, device=device), torch.full((1,), tokens, device=device)])
    pooled = {"positions": positions[:2], "inv_freq": inv_freq}
    return {
        "rope": lambda: gistkit.rope(query, key, positions, inv_freq),
        "rerotate": lambda: gistkit.ops.rerotate(key, 3.5, inv_freq),
        "window_pool": lambda: gistkit.window_pool(key, query, windows=offsets, **pooled),
        "equal windows": lambda: gistkit.window_pool(key, windows=4),
    }


@pytest.mark.parametrize("name", CHECKED)
def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tensors without values fail where values are asked for; they need no GPU to say that they are on one."""
    with FakeTensorMode():
        call = calls_with_values(*torch.empty(2, 1, 4, 8, 64))[name]
        if name != "equal windows":
            with pytest.raises(DataDependentOutputException):
                call()
        monkeypatch.setattr(FakeTensor, "is_cpu", False, raising=False)
        call()


def example(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, length: int = 500) -> tuple[Any, ...]:
    """Query, key, value and a plan."""
    heads = [torch.randn(1, 4, length, 64, device=device, dtype=dtype) for _ in range(3)]
    return *heads, causal_plan(length).to(device)


@gpu
def test_graph_capture() -> None:
    query, key, value, plan = example()
    wanted = gistkit.attention(query, key, value, plan)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gistkit.attention(query, key, value, plan)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = gistkit.attention(query, key, value, plan)
    query.copy_(query.flip(2))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, gistkit.attention(query, key, value, plan)) and not torch.equal(out, wanted)


@gpu
def test_graph_capture_of_gradients() -> None:
    query, key, value, plan = example()
    out, lse = gistkit.attention(query, key, value, plan, return_lse=True)
    plan = plan.spans, None, 64**-0.5, 0.0, False

    def gradients() -> tuple[Tensor, ...]:
        return torch.ops.gistkit.attention_backward(query, None, query, key, value, out, lse, *plan)

    wanted = gradients()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@gpu
@pytest.mark.parametrize("name", CHECKED)
def test_graph_capture_without_checks_of_values(name: str) -> None:
    query, key, *_ = example()
    call = calls_with_values(query, key)[name]
    before = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    query.copy_(query.flip(2))
    key.copy_(key.flip(2))
    graph.replay()
    torch.cuda.synchronize()
    for mine, wanted, old in zip(*(x if isinstance(x, tuple) else (x,) for x in (out, call(), before)), strict=True):
        assert torch.equal(mine, wanted) and not torch.equal(mine, old)


@gpu
def test_the_current_stream_is_used() -> None:
    query, key, value, plan = example()
    wanted = gistkit.attention(query, key, value, plan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = query.clone()
        out = gistkit.attention(late, key, value, plan)
    stream.synchronize()
    assert torch.equal(out, wanted)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_another_device_than_the_current_one() -> None:
    first, second = example("cuda:0"), moved(example("cuda:0"), "cuda:1")
    out = gistkit.attention(*second)
    assert out.device.index == 1 and torch.cuda.current_device() == 0
    assert gistkit.attention(*first).device.index == 0


@gpu
def test_offsets_beyond_32_bits() -> None:
    """Heads that lie more than 2^31 bytes apart."""
    rows = 2**31 // (64 * 2) + 4096
    if torch.cuda.get_device_properties(0).total_memory < 12 * rows * 64:
        pytest.skip("too little memory")
    far = torch.zeros(1, 2, rows, 64, device="cuda", dtype=torch.bfloat16)
    near = torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
    far[:, :, -300:] = near
    view, plan = far[:, :, -300:], causal_plan(300).to("cuda")
    assert torch.equal(gistkit.attention(view, view, view, plan), gistkit.attention(near, near, near, plan))


@gpu
def test_torch_compile() -> None:
    query, key, value, plan = example()
    compiled = torch.compile(lambda q, k, v: gistkit.attention(q, k, v, plan), fullgraph=True)
    assert torch.equal(compiled(query, key, value), gistkit.attention(query, key, value, plan))


@gpu
def test_float64_is_refused_by_name() -> None:
    query, key, value, plan = example(dtype=torch.float64)
    with pytest.raises(RuntimeError, match="got float64"):
        gistkit.attention(query, key, value, plan)
