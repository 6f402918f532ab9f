"""AttentionRecorder against softmax under a dense mask, and against transformers' own attention weights."""

import pytest
import torch

import gistkit as gk
from gistkit import layouts
from gistkit.compress import ICAE
from gistkit.hf import attach
from gistkit.inspect import AttentionRecorder
from gistkit.layouts import causal_plan, compile_batch
from gistkit.nn import GPT, RoPE
from tests.helpers.memory import Made
from tests.helpers.models import FAMILIES, OTHERS, checkpoint, eager, tiny, tiny_llama

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
LAYOUTS = [layouts.gistpool(20, 3, windows=1), layouts.gistpool(11, 2, windows=1)]


def softmax_weights(query, key, mask, scale, softcap=None, key_bias=None):
    """[B, Hq, Nq, Nk] under a bool mask [B, Nq, Nk]; rows that see nothing are 0."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if key_bias is not None:
        logits = logits + key_bias[:, :, None]
    return logits.masked_fill(~mask[:, None], -torch.inf).softmax(-1).nan_to_num(0)


def ragged():
    """A ragged batch with padded rows: its plan, and its dense mask from the layouts alone."""
    plan = compile_batch(LAYOUTS)
    mask = torch.zeros(len(LAYOUTS), plan.num_queries, plan.num_keys, dtype=torch.bool)
    for row, layout in enumerate(LAYOUTS):
        own = torch.from_numpy(layout.dense_mask("physical"))
        mask[row, : len(own), : len(own)] = own
    return plan, mask


def tensors(plan, batch=2, heads=(4, 2), dim=8, dtype=torch.float64):
    torch.manual_seed(1)
    query = torch.randn(batch, heads[0], plan.num_queries, dim, dtype=dtype)
    key, value = torch.randn(2, batch, heads[1], plan.num_keys, dim, dtype=dtype)
    return query, key, value


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias_shape", [None, (1, 1), (2, 4)])
def test_maps_are_the_softmax_under_the_dense_mask(softcap, bias_shape):
    plan, mask = ragged()
    query, key, value = tensors(plan)
    bias = None
    if bias_shape:
        bias = torch.randn(*bias_shape, plan.num_keys, dtype=torch.float64)
        bias[..., 3] = -torch.inf
        # A row whose every key is unseen by bias, beside the padded ones that have no key.
        bias[-1, -1, :4] = -torch.inf
        # So large that lse does not hold a sum of weights.
        bias[0] -= 1e9
    with AttentionRecorder() as recorder:
        out = gk.attention(query, key, value, plan, scale=0.7, softcap=softcap, key_bias=bias)
    expected = softmax_weights(query, key, mask, 0.7, softcap, bias)
    assert bool((expected.sum(-1) == 0).any()) and bool((expected.sum(-1) > 0.5).any())
    (found,) = recorder.maps
    torch.testing.assert_close(found.weights, expected, **CLOSE)
    assert found.weights[expected == 0].count_nonzero() == 0
    assert torch.equal(out, gk.attention(query, key, value, plan, scale=0.7, softcap=softcap, key_bias=bias))
    _, lse = gk.attention(query, key, value, plan, scale=0.7, softcap=softcap, key_bias=bias, return_lse=True)
    assert torch.equal(found.lse, lse)


def test_a_call_with_lists_of_tiles_is_recorded_too():
    """As calls on a GPU have them; the CPU's kernels pass them over."""
    plan, _ = ragged()
    arguments = (*tensors(plan), plan.spans, None, 8**-0.5, 0.0)
    with AttentionRecorder() as recorder:
        torch.ops.gistkit.attention(*arguments)
        torch.ops.gistkit.attention(*arguments, torch.zeros(1, 8, dtype=torch.int32))
    assert recorder.calls == 2 and torch.equal(recorder.maps[0].weights, recorder.maps[1].weights)


@pytest.mark.parametrize("reduce", ["none", "mean"])
def test_chosen_heads_and_rows_are_those_of_the_whole(reduce, monkeypatch):
    monkeypatch.setattr("gistkit.inspect.recorder.CHUNK", 200)
    plan, mask = ragged()
    query, key, value = tensors(plan)
    with AttentionRecorder(heads=[3, 1], rows=slice(4, None, 2), reduce=reduce) as recorder:
        gk.attention(query, key, value, plan)
    found, expected = recorder[0], softmax_weights(query, key, mask, 8**-0.5)[:, [3, 1], 4::2]
    expected = expected.mean(1, keepdim=True) if reduce == "mean" else expected
    torch.testing.assert_close(found.weights, expected, **CLOSE)
    assert found.heads == (3, 1)
    assert torch.equal(found.rows, torch.arange(plan.num_queries)[4::2])


def test_half_precision_under_autocast_is_exact_for_its_inputs():
    plan = causal_plan(12, 12, "cpu", None)
    query, key, value = tensors(plan, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), AttentionRecorder() as recorder:
        gk.attention(query, key, value, plan)
    expected = softmax_weights(query.double(), key.double(), torch.ones(2, 12, 12).tril().bool(), 8**-0.5)
    torch.testing.assert_close(recorder[0].weights, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_mean_over_heads_takes_little_beside_its_map():
    length = 2048
    plan = causal_plan(length, length, "cpu", None)
    query, key, value = tensors(plan, 1, (8, 2), 8, torch.float32)
    with Made() as made, AttentionRecorder(rows=slice(-1024, None), reduce="mean") as recorder:
        gk.attention(query, key, value, plan)
    assert max(made.sizes) <= 2**21
    direct = softmax_weights(query.double(), key.double(), torch.ones(1, length, length).tril().bool(), 8**-0.5)
    torch.testing.assert_close(recorder[0].weights[:, 0].double(), direct[:, :, -1024:].mean(1), rtol=1e-4, atol=1e-6)


def test_a_map_beyond_memory_is_refused():
    plan = causal_plan(16385, 16385, "cpu", None)
    query, key, value = tensors(plan, 1, (1, 1), 1, torch.float32)
    message = r"rows: expected a map of at most 2\^28 weights, got \[1, 1, 16385, 16385\] for sequences"
    with AttentionRecorder(), pytest.raises(ValueError, match=message):
        gk.attention(query, key, value, plan)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_maps_of_a_transformers_model_are_its_eager_weights(family):
    model = tiny(family)
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with eager(model):
            expected = model(ids, use_cache=False, output_attentions=True).attentions
        with AttentionRecorder() as recorder, attach(model):
            model(ids)
            model(ids[:, :4])
        with attach(model):
            model(ids)
    assert len(expected) == 2 and [one.layer for one in recorder.maps] == [0, 1, 2, 3]
    for one, weights in zip(recorder.maps, expected, strict=False):
        # The eager softmax is in float32, and so is what its rounding leaves for the second layer: sixteen steps.
        torch.testing.assert_close(one.weights, weights, rtol=16 * torch.finfo(torch.float32).eps, atol=1e-8)


def test_maps_of_gpt_follow_its_own_values():
    torch.manual_seed(0)
    model = GPT(40, 24, 3, 3, RoPE(8)).double().eval()
    seen = []
    hooks = [block.register_forward_hook(lambda *_: seen.append(len(recorder.maps))) for block in model.blocks]
    ids = torch.randint(0, 40, (2, 7))
    with torch.no_grad(), AttentionRecorder(layers=[0, 2]) as recorder:
        model(ids)
    for hook in hooks:
        hook.remove()
    assert seen == [1, 1, 2] and [one.layer for one in recorder.maps] == [0, 2]
    assert recorder[2].weights.shape == (2, 3, 7, 7) and not recorder[2].weights.triu(1).any()
    torch.testing.assert_close(recorder[2].weights.sum(-1), torch.ones(2, 3, 7).double())


def test_encoding_and_reading_of_a_compressor_are_recorded():
    model = tiny_llama()
    compressor = ICAE(model, layout="epl", chunk=12, ratio=4)
    ids = torch.randint(0, 50, (2, 12))
    with torch.no_grad(), AttentionRecorder(reduce="mean") as encoding, attach(model):
        memory = compressor.encode(ids)
        with AttentionRecorder(rows=slice(-1, None)) as reading:
            compressor.decode(memory, "ae", ids[:, :5])
    # The outer recorder sees both.
    assert [one.weights.shape for one in encoding.maps[:2]] == [(2, 1, 15, 15)] * 2
    assert len(encoding.maps) == 4 and [one.layer for one in reading.maps] == [0, 1]
    assert encoding[0].weights[:, :, :12].triu(1).count_nonzero() == 0
    torch.testing.assert_close(reading[1].weights.mean(1), encoding[3].weights[:, 0, -1:])


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_checkpointing_runs_again_are_recorded_once(reentrant):
    ids = torch.randint(0, 50, (1, 8), generator=torch.Generator().manual_seed(0))
    model = tiny_llama().train()
    plain = tiny_llama().train()
    checkpoint(model, use_reentrant=reentrant)
    with attach(plain):
        plain(ids, labels=ids).loss.backward()
    with AttentionRecorder() as recorder, attach(model):
        for _ in range(2):
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
    assert [one.layer for one in recorder.maps] == [0, 1, 2, 3]
    assert torch.equal(recorder[0].weights, recorder[2].weights)
    assert not any(one.weights.requires_grad or one.lse.requires_grad for one in recorder.maps)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


def test_entering_again_starts_over_and_leaving_stops():
    plan = causal_plan(4, 4, "cpu", None)
    query, key, value = tensors(plan)
    recorder = AttentionRecorder()
    for _ in range(2):
        with recorder:
            gk.attention(query, key, value, plan)
        gk.attention(query, key, value, plan)
        assert [one.layer for one in recorder.maps] == [0]
    with pytest.raises(RuntimeError, match="recorder: expected a recorder that is not recording"), recorder, recorder:
        pass
    gk.attention(query, key, value, plan)
    with recorder:
        gk.attention(query, key, value, plan)
    assert len(recorder.maps) == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_functions_are_recorded_in_training_too(backend):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = GPT(40, 24, 2, 3, RoPE(8))
    compiled, ids = torch.compile(model, backend=backend), torch.randint(0, 40, (2, 7))
    with AttentionRecorder() as plain:
        model(ids)
    # Compiled with a recorder there and without.
    for _ in range(2):
        with AttentionRecorder() as recorder:
            compiled(ids).sum().backward()
        compiled(ids)
        for one, expected in zip(recorder.maps, plain.maps, strict=True):
            torch.testing.assert_close(one.weights, expected.weights)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layers": [0, -1]}, ValueError, "layers: expected a whole number >= 0, got -1"),
        ({"layers": []}, ValueError, r"layers: expected at least one number and each once, got \[\]"),
        ({"layers": 3}, TypeError, r"layers: expected several ints, such as \[0\], got 3"),
        ({"heads": [1, 1]}, ValueError, r"heads: expected at least one number and each once, got \[1, 1\]"),
        ({"heads": [0.5]}, ValueError, r"heads: expected a whole number >= 0, got 0\.5"),
        ({"rows": "all"}, TypeError, "rows: expected several ints, such as"),
        ({"reduce": "sum"}, ValueError, "reduce: expected one of none, mean, got 'sum'"),
    ],
)
def test_errors_name_the_argument_and_what_came(arguments, error, message):
    with pytest.raises(error, match=message):
        AttentionRecorder(**arguments)


@pytest.mark.parametrize(("name", "size"), [("heads", 4), ("rows", 5)])
def test_what_a_call_does_not_have_is_refused(name, size):
    plan = causal_plan(5, 5, "cpu", None)
    query, key, value = tensors(plan)
    message = f"{name}: expected numbers below {size}, which the recorded call has, got {size}"
    with AttentionRecorder(**{name: [0, size]}), pytest.raises(ValueError, match=message):
        gk.attention(query, key, value, plan)


def test_a_layer_never_recorded_is_no_map():
    plan = causal_plan(5, 5, "cpu", None)
    with AttentionRecorder() as recorder:
        gk.attention(*tensors(plan), plan)
    with pytest.raises(LookupError, match=r"recorder: expected a recorded layer, one of 0, got 1"):
        recorder[1]


def test_no_rows_and_no_keys():
    plan = gk.Plan.from_spans(torch.zeros(1, 3, 1, 2, dtype=torch.int32), 0)
    with AttentionRecorder() as recorder:
        gk.attention(*tensors(plan), plan)
        empty = gk.Plan.from_spans(torch.zeros(1, 0, 1, 2, dtype=torch.int32), 4)
        gk.attention(*tensors(empty), empty)
    assert recorder[0].weights.shape == (2, 4, 3, 0) and recorder[1].weights.shape == (2, 4, 0, 4)
