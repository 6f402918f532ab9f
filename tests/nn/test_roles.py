"""RoleLinear: each role's rows through its own parameters, and nothing but those rows."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gistkit.nn import LowRank, RoleLinear

IN, OUT, RANK, ROWS = 12, 10, 3, 16
SLICES = {"text": slice(0, 11), "memory": slice(11, ROWS)}


def adapter(base, scale=0.5):
    down, up = nn.Linear(IN, RANK, bias=False).double(), nn.Linear(RANK, OUT, bias=False).double()
    nn.init.normal_(up.weight)
    return LowRank(down, up, scale)


def make(kinds):
    torch.manual_seed(0)
    base = nn.Linear(IN, OUT).double()
    roles = {name: adapter(base) if kind == "adapter" else nn.Linear(IN, OUT).double() for name, kind in kinds.items()}
    return base, roles


def whole(base, role, x):
    """All rows through one role's parameters."""
    if isinstance(role, LowRank):
        return x @ (base.weight + role.scale * role.up.weight @ role.down.weight).T + base.bias
    return role(x)


@pytest.mark.parametrize(
    "kinds",
    [
        {"text": "adapter", "memory": "adapter"},
        {"memory": "adapter"},
        {"text": "adapter", "memory": "copy"},
        {"memory": "copy"},
    ],
)
@pytest.mark.parametrize("shape", [(2, ROWS, IN), (ROWS, IN), (2, 3, ROWS, IN)])
@pytest.mark.parametrize("frozen", [False, True])
def test_rows_and_gradients_are_those_of_whole_maps_chosen_by_row(kinds, shape, frozen):
    base, roles = make(kinds)
    base.requires_grad_(not frozen)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    slices = {name: SLICES[name] for name in kinds}
    ours = RoleLinear(base, roles)(x, slices)
    row = torch.arange(ROWS)[:, None]
    expected = base(x)
    for name, role in roles.items():
        inside = (row >= slices[name].start) & (row < slices[name].stop)
        expected = torch.where(inside, whole(base, role, x), expected)
    torch.testing.assert_close(ours, expected)
    own = base.parameters() if not frozen else ()
    weights = [x, *own, *(p for role in roles.values() for p in role.parameters())]
    upstream = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, weights, upstream), torch.autograd.grad(expected, weights, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rows", [2, 8])
def test_work_and_memory_are_those_of_the_slice(rows):
    base, roles = make({"memory": "adapter"})
    base.requires_grad_(False)
    x = torch.randn(ROWS, IN, dtype=torch.float64, requires_grad=True)
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with FlopCounterMode(display=False) as counter, keep:
        out = RoleLinear(base, roles)(x, {"memory": slice(ROWS - rows, ROWS)})
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    plain, own = 2 * ROWS * IN * OUT, 2 * rows * RANK * (IN + OUT)
    assert counter.get_total_flops() == plain + own
    # Backward: the input's gradient through the frozen base, twice the adapter's own.
    assert backward.get_total_flops() == plain + 2 * own
    # Of activations only the slice is saved: its input and what `down` made of it.
    activations = [
        t
        for t in saved
        if not any(t.data_ptr() == p.data_ptr() for p in [*base.parameters(), *roles["memory"].parameters()])
    ]
    assert sum(t.shape[0] for t in activations if t.dim() == 2 and t.shape[0] in (rows, ROWS)) == 2 * rows


def test_factors_that_train_in_float32_beside_a_bfloat16_map():
    torch.manual_seed(0)
    base, rank = nn.Linear(64, 96, bias=False).bfloat16().requires_grad_(False), 8
    role = LowRank(nn.Linear(64, rank, bias=False), nn.Linear(rank, 96, bias=False), 0.5)
    x, upstream = torch.randn(3, 50, 64).bfloat16(), torch.randn(3, 50, 96).bfloat16()

    def outcome(dtype, run):
        weights = [t.detach().to(dtype).requires_grad_() for t in (x, role.down.weight, role.up.weight)]
        out = run(*weights)
        return [out.detach(), *torch.autograd.grad(out, weights, upstream.to(out.dtype))]

    def formula(dtype):
        return lambda x, down, up: x @ base.weight.to(dtype).T + 0.5 * (x @ down.T) @ up.T

    # The roundings of factors count, the roundings of inputs do not.
    exact = outcome(torch.float64, formula(torch.float64))
    plain = outcome(torch.bfloat16, formula(torch.bfloat16))
    leaf = x.clone().requires_grad_()
    out = RoleLinear(base, {"text": role}).all_rows(leaf, "text")
    ours = [out.detach(), *torch.autograd.grad(out, [leaf, role.down.weight, role.up.weight], upstream)]
    assert [t.dtype for t in ours] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for mine, wanted, theirs in zip(ours, exact, plain, strict=True):
        assert (mine.double() - wanted).norm() <= 2 * (theirs.double() - wanted).norm()


def test_adapters_of_a_frozen_map_are_what_modules_would_be():
    """Results changed in place, no rows at all, one dimension, a backward pass under autocast, weights that train."""
    base, roles = make({"text": "adapter"})
    module, role = RoleLinear(base.requires_grad_(False), roles), roles["text"]
    x = torch.randn(2, ROWS, IN, dtype=torch.float64, requires_grad=True)
    module.all_rows(x, "text").clamp_(-1, 1).sum().backward()
    for shape in ((2, 0, IN), (0, IN), (0, 3, IN), (IN,)):
        rows = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(module.all_rows(rows, "text"), whole(base, role, rows))
    out = module.all_rows(x, "text").sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.backward()
    calls = []
    role.up.register_full_backward_hook(lambda *_: calls.append(1))
    base.bias.requires_grad_(True)
    module.all_rows(x, "text").sum().backward()
    assert base.bias.grad is not None and calls


@pytest.mark.parametrize("rows", [{"text": slice(0, ROWS)}, SLICES, {"memory": slice(2, 5)}])
@pytest.mark.parametrize("kinds", [{"text": "adapter", "memory": "adapter"}, {"text": "adapter", "memory": "copy"}])
def test_transforms_of_torch_func_pass_through(kinds, rows):
    base, roles = make(kinds)
    module, x = RoleLinear(base.requires_grad_(False), roles), torch.randn(3, ROWS, IN, dtype=torch.float64)
    expected = torch.autograd.grad(module(x.requires_grad_(), rows).square().sum(), x)[0]

    def loss(x):
        return module(x, rows).square().sum()

    x, along = x.detach(), torch.randn_like(x)
    for found in (torch.func.grad(loss)(x), torch.func.vmap(torch.func.grad(loss))(x)):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (along,))[1], (expected * along).sum())


class Quantised(torch.Tensor):
    """Refuses whatever a linear map does not need."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function not in (torch.mm, torch.addmm)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_weight_of_another_kind_is_left_to_its_map():
    base, roles = make({"text": "adapter"})
    base.weight = nn.Parameter(base.weight.detach().as_subclass(Quantised), requires_grad=False)
    x = torch.randn(2, ROWS, IN, dtype=torch.float64)
    out = RoleLinear(base.requires_grad_(False), roles).all_rows(x, "text")
    torch.testing.assert_close(out.as_subclass(torch.Tensor), base(x).as_subclass(torch.Tensor) + roles["text"](x))


def test_under_autocast_roles_have_the_dtype_of_their_maps():
    base, roles = make({"text": "adapter", "memory": "copy"})
    module, x = RoleLinear(base, roles).float(), torch.randn(2, ROWS, IN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x, SLICES).dtype == module.all_rows(x, "text").dtype == torch.bfloat16


def test_slices_may_be_empty_or_missing():
    base, roles = make({"text": "adapter", "memory": "copy"})
    module, x = RoleLinear(base, roles), torch.randn(ROWS, IN, dtype=torch.float64)
    assert torch.equal(module(x, {}), base(x))
    assert torch.equal(module(x, {"text": slice(3, 3), "memory": slice(9, 9)}), base(x))


def test_odd_slices_say_what_was_expected():
    base, roles = make({"text": "adapter", "memory": "adapter"})
    module, x = RoleLinear(base, roles), torch.zeros(ROWS, IN, dtype=torch.float64)
    with pytest.raises(ValueError, match="slices: expected roles among text, memory, got gist"):
        module(x, {"gist": slice(0, 1)})
    for odd in ({"text": slice(0, ROWS + 1)}, {"text": slice(0, 9), "memory": slice(8, 10)}, {"text": slice(0, 4, 2)}):
        with pytest.raises(ValueError, match=r"slices: expected disjoint slices within \[0, 16\)"):
            module(x, odd)


def test_compiled_it_is_the_same():
    base, roles = make({"text": "adapter", "memory": "adapter"})
    module, x = RoleLinear(base, roles), torch.randn(ROWS, IN, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    weights = list(module.parameters())
    ours, expected = (form(x, SLICES) for form in (compiled, module))
    torch.testing.assert_close(ours, expected)
    for a, b in zip(
        torch.autograd.grad(ours.sum(), weights), torch.autograd.grad(expected.sum(), weights), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_each_row_of_a_batch_of_its_own_role():
    torch.manual_seed(0)
    base = nn.Linear(5, 4)
    adapter, whole = LowRank(nn.Linear(5, 2, bias=False), nn.Linear(2, 4, bias=False), 1.5), nn.Linear(5, 4)
    layer = RoleLinear(base, {"adapted": adapter, "whole": whole})
    x = torch.randn(5, 3, 5)
    roles = ("whole", "none", "adapted", "none", "whole")
    maps = {"none": base, "adapted": lambda row: base(row) + adapter(row), "whole": whole}
    wanted = torch.stack([maps[role](row) for role, row in zip(roles, x, strict=True)])
    with torch.inference_mode():
        torch.testing.assert_close(layer.of_rows(x, roles), wanted)
    # What was made in inference mode serves training too.
    out = layer.of_rows(x.requires_grad_(), roles)
    torch.testing.assert_close(out, wanted)
    out.sum().backward()
    assert x.grad.abs().sum((1, 2)).gt(0).all()
    torch.testing.assert_close(layer.of_rows(x[:2], ("whole", "whole")), whole(x[:2]))
    assert layer.of_rows(x[:0], ()).shape == (0, 3, 4)
    with pytest.raises(ValueError, match="roles: expected 5, one for each row, got 2"):
        layer.of_rows(x, ("whole", "none"))
