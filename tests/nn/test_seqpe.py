"""SeqPE's encoder: the fast form against the plain one and against loops, frozen weights, released ones, errors."""

import copy
import io
import math
import threading

import pytest
import torch

from gistkit.nn import DigitTrie, SeqPE
from gistkit.nn.seqpe import kept
from gistkit.nn.seqpe.layers import ROWS
from tests.helpers.encodings import counted

LAST = 2**63 - 1
CASES = {
    "text": (dict(digits=4), torch.randint(0, 10**4, (5, 8))),
    "range": (dict(digits=3), torch.arange(150)),
    "one layer": (dict(layers=1, base=16, digits=2), torch.arange(40)),
    "three layers": (dict(layers=3, base=3, digits=4), torch.randint(0, 81, (30,))),
    "images": (dict(axes=2, digits=2), torch.randint(0, 100, (4, 5, 2))),
    "all places": (dict(axes=2, digits=2, shared_places=False), torch.randint(0, 100, (9, 2))),
    "64 bits": (dict(digits=20), torch.tensor([2**63 - 1, 10**18 + 7, 0, 2**62, 9])),
    "64 bits, a power of 2": (dict(base=2, digits=64, layers=1), torch.tensor([2**63 - 1, 2**62 + 1, 5])),
    "three axes": (dict(axes=3, digits=1, base=5, out_dim=7), torch.randint(0, 5, (20, 3))),
    "one": (dict(digits=2), torch.tensor(42)),
    "none": (dict(digits=2), torch.empty(0, dtype=torch.int64)),
}


def encoder(dim=24, heads=3, **sizes):
    model = SeqPE(dim, heads=heads, **sizes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def by_loops(model, coordinates):
    """One position, written down from the paper: digits, embeddings, pre-norm blocks, [CLS] last."""

    def norm(layer, x):
        return (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + layer.eps) * layer.weight + layer.bias

    states = []
    for axis, coordinate in enumerate(coordinates):
        text, rest = [], coordinate
        for _ in range(model.digits):
            text.insert(0, rest % model.base)
            rest //= model.base
        for place, digit in enumerate(text):
            row = place if model.shared_places else axis * model.digits + place
            state = model.tokens[digit] + model.places[row]
            states.append(state if model.dimensions is None else state + model.dimensions[axis])
    states.append(model.cls)
    for block in model.blocks:
        head_dim = model.dim // model.heads
        projected = [block.qkv(norm(block.norm_1, state)).split(model.dim) for state in states]
        for n, (query, _, _) in reversed(list(enumerate(projected))):
            mixed = []
            for h in range(model.heads):
                part = slice(h * head_dim, (h + 1) * head_dim)
                scores = torch.stack([query[part] @ key[part] for _, key, _ in projected[: n + 1]])
                weights = (scores / math.sqrt(head_dim)).exp()
                values = torch.stack([value[part] for _, _, value in projected[: n + 1]])
                mixed.append((weights / weights.sum()) @ values)
            states[n] = states[n] + block.attention_out(torch.cat(mixed))
        for n, state in enumerate(states):
            z = block.up(norm(block.norm_2, state))
            gelu = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
            states[n] = state + block.down(gelu)
    return model.out(norm(model.norm, states[-1]))


@pytest.mark.parametrize("autocast", [False, True])
def test_without_gradients_rows_in_parts_give_the_same(autocast):
    model, positions = encoder(digits=4, layers=3).double(), torch.arange(7000, 8100)
    model = model.float() if autocast else model
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        whole = model(positions)
        with torch.no_grad():
            parts = model(positions)
    assert parts.dtype == whole.dtype and len(positions) > 2 * ROWS
    torch.testing.assert_close(
        parts, whole.detach(), rtol=1e-2 if autocast else 1e-12, atol=1e-2 if autocast else 1e-12
    )


def test_without_gradients_several_encoders_run_under_vmap():
    models, positions = [encoder(digits=3) for _ in range(2)], torch.arange(600)
    stacked = {name: torch.stack([model.state_dict()[name] for model in models]) for name in models[0].state_dict()}
    with torch.no_grad():
        found = torch.func.vmap(lambda its: torch.func.functional_call(models[0], its, (positions,)))(stacked)
        for one, model in zip(found, models, strict=True):
            torch.testing.assert_close(one, model(positions))


@pytest.mark.parametrize("name", CASES)
def test_by_loops(name):
    sizes, positions = CASES[name]
    model = encoder(**sizes).double()
    rows = positions.reshape(-1, model.axes)[:6]
    given = rows if model.axes > 1 else rows[:, 0]
    right = torch.stack([by_loops(model, row) for row in rows.tolist()]) if len(rows) else torch.empty(0, model.out_dim)
    torch.testing.assert_close(model(given), right.double(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.plain(given), right.double(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_plain_form_in_outputs_and_all_gradients(name):
    sizes, positions = CASES[name]
    model = encoder(**sizes).double()
    fast, plain = model(positions), model.plain(positions)
    shape = positions.shape if model.axes == 1 else positions.shape[:-1]
    assert fast.shape == plain.shape == (*shape, model.out_dim)
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(plain)
    names = [name for name, _ in model.named_parameters()]
    found, right = (
        torch.autograd.grad(x, list(model.parameters()), grad, allow_unused=not positions.numel())
        for x in (fast, plain)
    )
    for name, mine, theirs in zip(names, found, right, strict=True):
        if mine is None:
            assert not theirs.any(), name
            continue
        scale = max(1.0, float(theirs.abs().max()))
        assert (mine - theirs).abs().max() <= 1e-10 * scale, name


def test_single_precision_is_as_good_as_the_plain_form():
    sizes, positions = CASES["range"]
    model = encoder(dim=64, heads=4, **sizes)
    exact = copy.deepcopy(model).double()
    grad = torch.randn(len(positions), 64)

    def run(form, dtype):
        out = form(positions)
        module = form.__self__ if hasattr(form, "__self__") else form
        return out.detach(), *torch.autograd.grad(out, list(module.parameters()), grad.to(dtype))

    right = run(exact.plain, torch.float64)
    mine, plain = run(model, torch.float32), run(model.plain, torch.float32)
    for fast, own, expected in zip(mine, plain, right, strict=True):
        error, measure = (((x.double() - expected) ** 2).mean().sqrt() for x in (fast, own))
        assert error <= 2 * measure + 2**-24 * (expected**2).mean().sqrt()


def test_half_precision_and_autocast():
    model = encoder(**CASES["text"][0])
    positions = CASES["text"][1]
    right = model(positions)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(positions)
    mixed.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert (mixed.float() - right).abs().max() < 0.05 * right.abs().max()
    half = copy.deepcopy(model).bfloat16()(positions)
    assert half.dtype == torch.bfloat16
    assert (half.float() - right).abs().max() < 0.1 * right.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_trie_compiles_whole(dropout):
    torch._dynamo.reset()
    model = encoder(digits=3, dropout=dropout)
    trie = model.trie(torch.tensor([7, 3, 7, 120]))
    out = torch.compile(model.encode, fullgraph=True, backend="aot_eager")(trie)
    if not dropout:
        torch.testing.assert_close(out, model.encode(trie))
    out.sum().backward()
    assert model.tokens.grad is not None


def test_dropout_in_training_has_masks_of_each_distinct_position():
    model = encoder(digits=3, dropout=0.5)
    positions = torch.tensor([[7, 3], [7, 8]])
    first, second = model(positions), model(model.trie(positions))
    assert not torch.allclose(first, second)
    assert torch.equal(first[0, 0], first[1, 0])
    assert not torch.allclose(model.eval()(positions), first)
    torch.testing.assert_close(model(positions), model.plain(positions))


class GivenMasks(torch.nn.Module):
    """In the place of a layer's dropout: the same masks of every position and digit at each second call."""

    def __init__(self, masks):
        super().__init__()
        self.masks, self.calls = masks, 0

    def forward(self, added):
        self.calls += 1
        return added * self.masks[self.calls % 2][:, -added.shape[1] :]


@pytest.mark.parametrize(
    ("name", "attention_dropout"),
    [*((name, 1e-12) for name in CASES if name != "none"), ("text", 0.0), ("images", 0.0)],
)
def test_with_equal_masks_the_form_under_dropout_equals_the_plain_one(name, attention_dropout):
    sizes, positions = CASES[name]
    model = encoder(**sizes, dropout=0.5, attention_dropout=attention_dropout).double()
    distinct, inverse = positions.reshape(-1, model.axes).unique(dim=0, return_inverse=True)
    tokens = model.axes * model.digits + 1
    for block in model.blocks:
        block.dropout = GivenMasks(2 * torch.randint(0, 2, (2, len(distinct), tokens, model.dim)).double())
    fast = model(positions)
    plain = model.plain(distinct if model.axes > 1 else distinct[:, 0])[inverse].view(fast.shape)
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(fast, model.eval()(positions))
    grad = torch.randn_like(plain)
    found, right = (torch.autograd.grad(x, list(model.parameters()), grad) for x in (fast, plain))
    for mine, theirs in zip(found, right, strict=True):
        assert (mine - theirs).abs().max() <= 1e-10 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize(
    "rates", [(0.2, 0.2), *(pytest.param(rates, marks=pytest.mark.slow) for rates in ((0.3, 0.0), (0.0, 0.4)))]
)
def test_draws_under_dropout_are_distributed_as_the_plain_form_s_and_independent(rates):
    """Mean, variance, and covariance between positions whose digits differ in the last alone."""
    model = encoder(dim=8, heads=2, digits=3, dropout=rates[0], attention_dropout=rates[1]).double()
    positions, draws = torch.tensor([120, 121, 128]), 900
    with torch.no_grad():
        fast = torch.stack([model(positions) for _ in range(draws)])
        plain = model.plain(positions.repeat(20 * draws)).view(20 * draws, 3, -1)
    deviation = plain.std(0)
    assert deviation.min() > 0.01
    # Five standard errors; those of a variance, from the fourth moment.
    error = (fast.mean(0) - plain.mean(0)) / (deviation * math.sqrt(1.05 / draws))
    assert error.abs().max() < 5
    fourth = ((plain - plain.mean(0)) / deviation).pow(4).mean(0)
    error = (fast.var(0) / deviation**2 - 1) / (1.05 * (fourth - 1) / draws).sqrt()
    assert error.abs().max() < 5
    noise = (fast - plain.mean(0)) / deviation
    for first, second in ((0, 1), (0, 2), (1, 2)):
        # Of equal channels, and of different ones.
        correlation = noise[:, first].T @ noise[:, second] / draws
        assert correlation.abs().max() < 5 / math.sqrt(draws)


@torch.enable_grad()
def fused_step(model):
    model(torch.arange(3)).sum().backward()
    torch.optim.AdamW(model.parameters(), 0.1, fused=True).step()


CHANGES = {
    "in place": lambda model: model.tokens.mul_(1.5),
    "other data": lambda model: setattr(model.tokens, "data", model.tokens.data * 1.5),
    "fused optimizer": fused_step,
    "loaded": lambda model: model.load_state_dict(encoder(digits=3).state_dict()),
    "another dtype": lambda model: model.double(),
    "module replaced": lambda model: setattr(model, "out", torch.nn.Linear(24, 24)),
    "block replaced": lambda model: model.blocks.__setitem__(0, encoder(digits=3).blocks[0]),
}


class TestFrozen:
    @pytest.fixture(autouse=True)
    def _no_gradients(self):
        with torch.no_grad():
            yield

    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_no_look_up_finds_embeddings_of_other_weights(self, change):
        model, positions = encoder(digits=3).eval(), torch.arange(20)
        with model.frozen(positions[:7]):
            before = model(positions)
            change(model)
            found = model(positions)
            torch.testing.assert_close(found, model.plain(positions))
            assert before.dtype != found.dtype or not torch.allclose(before, found)
        torch.testing.assert_close(model(positions), model.plain(positions))

    def test_reads_each_position_once_and_few_others(self):
        model = encoder(digits=7).eval()
        calls = counted(model)
        asked = [torch.tensor([9_876_543]), torch.tensor([[3, 19], [19, 9_876_543]]), torch.tensor(3), torch.arange(4)]
        expected = [model.plain(positions) for positions in asked]
        with model.frozen(), model.frozen(asked[0]):
            for positions, right in zip(asked, expected, strict=True):
                found = model(positions)
                assert found.shape == right.shape
                torch.testing.assert_close(found, right)
                found.zero_()
        # 64 from the first on; from 3 and from 19 on; and those before 3.
        assert calls == [64, 80, 3]
        model(asked[0])
        assert calls[-1] == 1

    def test_of_images(self):
        model = encoder(axes=2, digits=2).eval()
        calls = counted(model)
        with model.frozen():
            for positions in ([[2, 3]], [[1, 1], [0, 3]], [[5, 0]], [[5, 0], [2, 3]]):
                torch.testing.assert_close(model(torch.tensor(positions)), model.plain(torch.tensor(positions)))
            assert calls == [1, 2, 1]
            # Another position's number, were it not refused.
            with pytest.raises(ValueError, match="position"):
                model(torch.tensor([[1, 103]]))
            assert model.table(6, 4).shape == (6, 4, 24)

    @pytest.mark.parametrize("starts", [[0], [5, 40, 41, 900], [9_990]])
    def test_a_count_one_by_one_is_read_ahead(self, starts):
        model = encoder(digits=4).eval()
        calls, steps = counted(model), min(200, 10**4 - max(starts))
        with model.frozen():
            for step in range(steps):
                positions = torch.tensor(starts)[:, None] + step
                torch.testing.assert_close(model(positions), model.plain(positions))
        distinct = len({start + step for start in starts for step in range(steps)})
        assert len(calls) <= len(starts) * (1 + steps // 64) and distinct <= sum(calls) <= distinct + 64 * len(starts)

    def test_many_are_read_in_parts_and_a_failure_leaves_what_was_kept(self, monkeypatch):
        monkeypatch.setattr(kept, "PART", 8)
        monkeypatch.setattr(kept, "AHEAD", 1)
        model = encoder(digits=3).eval()
        with model.frozen(torch.arange(5)):
            with monkeypatch.context() as patch:
                patch.setattr(model, "encode", lambda trie: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(torch.arange(9))
            calls = counted(model)
            torch.testing.assert_close(model(torch.arange(30)), model.plain(torch.arange(30)))
            assert calls == [8, 8, 8, 1]
        with pytest.raises(ZeroDivisionError), model.frozen(torch.arange(5)):
            raise ZeroDivisionError
        assert not model._kept

    def test_refuses_as_outside(self):
        model = encoder(digits=2).eval()
        with model.frozen(torch.arange(5)):
            for positions in (torch.tensor([4, 5]), torch.arange(9, dtype=torch.int32).view(3, 3)):
                torch.testing.assert_close(model(positions), model.plain(positions))
            assert model(torch.empty(0, dtype=torch.int64)).shape == (0, model.out_dim)
            for positions in (torch.tensor([-1]), torch.tensor([3, 100])):
                with pytest.raises(ValueError, match="position"):
                    model(positions)
            for dtype in (torch.float32, torch.bool):
                with pytest.raises(TypeError, match="position"):
                    model(torch.ones(3, dtype=dtype))
        with pytest.raises(ValueError, match="position"), model.frozen(torch.tensor([100])):
            pass

    def test_is_of_one_thread_and_no_copys(self):
        model, positions = encoder(digits=3).eval(), torch.arange(20)
        calls, counts = counted(model), []
        with model.frozen(positions):
            other = threading.Thread(target=torch.no_grad()(lambda: counts.append(model(positions).shape[0])))
            other.start()
            other.join()
            del model.encode
            twin, file = copy.deepcopy(model), io.BytesIO()
            torch.save(model, file)
            assert not twin._kept and not torch.load(io.BytesIO(file.getvalue()), weights_only=False)._kept
        assert calls == [83, 20] and counts == [20] and "_kept" not in str(model.state_dict().keys())

    def test_gradients_and_dropout_are_those_of_training(self):
        model, positions = encoder(digits=3, dropout=0.5).eval(), torch.arange(20)
        with model.frozen(positions), torch.enable_grad():
            model(positions).sum().backward()
            assert model.tokens.grad is not None
            model.train()
            first, second = model(positions), model(positions)
            assert not torch.allclose(first, second) and first.requires_grad

    def test_other_weights_in_its_place_are_read(self):
        models, positions = [encoder(digits=3).eval() for _ in range(2)], torch.arange(20)
        with models[0].frozen(positions):
            found = torch.func.functional_call(models[0], models[1].state_dict(), (positions,))
            torch.testing.assert_close(found, models[1](positions))
            torch.testing.assert_close(models[0](positions), models[0].plain(positions))

    def test_weights_that_want_no_gradient_are_read_once(self):
        model, positions = encoder(digits=3).eval().requires_grad_(False), torch.arange(20)
        calls = counted(model)
        with torch.enable_grad(), model.frozen():
            for _ in range(2):
                torch.testing.assert_close(model(positions), model.plain(positions))
            assert calls == [83]
            model.out.bias.requires_grad_(True)
            assert model(positions).requires_grad and calls == [83, 20]

    def test_weights_of_a_vmap_are_read_as_outside(self):
        models, positions = [encoder(digits=3).eval() for _ in range(2)], torch.arange(20)
        stacked = torch.func.stack_module_state(models)[0]

        def call(weights):
            return torch.func.functional_call(models[0], weights, (positions,))

        with models[0].frozen(positions):
            found = torch.func.vmap(call)(stacked)
            torch.testing.assert_close(models[0](positions), models[0].plain(positions))
        torch.testing.assert_close(found, torch.stack([model(positions) for model in models]))

    def test_autocast_has_rows_of_its_own(self):
        model, positions = encoder(digits=3).eval(), torch.arange(20)
        with torch.autocast("cpu", torch.bfloat16):
            coarse = model(positions)
        with model.frozen(positions):
            with torch.autocast("cpu", torch.bfloat16):
                found = model(positions)
            assert found.dtype == coarse.dtype == torch.bfloat16
            torch.testing.assert_close(model(positions), model.plain(positions))

    @pytest.mark.parametrize("made_inside", [False, True])
    def test_inference_mode(self, made_inside):
        with torch.inference_mode(made_inside):
            model = encoder(digits=3).eval()
        with model.frozen():
            for inside, positions in ((True, torch.arange(5)), (False, torch.arange(90)), (True, torch.arange(300))):
                with torch.inference_mode() if inside else torch.no_grad():
                    torch.testing.assert_close(model(positions), model.plain(positions))
                    torch.testing.assert_close(model(positions), model.plain(positions))

    @pytest.mark.parametrize(
        ("sizes", "positions"),
        [
            ({"axes": 4, "digits": 5}, [[99999, 0, 0, 0], [0, 99999, 0, 1], [0, 0, 99999, 99999]]),
            ({"axes": 4, "digits": 20}, [[LAST, 0, 0, 0], [0, LAST, 0, 1], [0, 0, LAST, LAST]]),
            ({"digits": 20}, [LAST - 3, LAST - 2, LAST - 1, LAST]),
        ],
    )
    def test_far_positions_one_by_one(self, sizes, positions):
        model = encoder(**sizes).eval()
        with model.frozen():
            for position in positions:
                given = torch.tensor([position])
                torch.testing.assert_close(model(given), model.plain(given))

    @pytest.mark.slow
    def test_compiled_code_sees_the_block_begin_and_end(self):
        torch._dynamo.reset()
        model, positions = encoder(digits=3).eval(), torch.arange(20)
        compiled = torch.compile(lambda its: model(its) * 2, backend="eager")
        torch.testing.assert_close(compiled(positions), model.plain(positions) * 2)
        with model.frozen():
            torch.testing.assert_close(compiled(positions), model.plain(positions) * 2)
            calls = counted(model)
            compiled(positions)
            assert not calls
        model.tokens.data.mul_(2)
        torch.testing.assert_close(compiled(positions), model.plain(positions) * 2)


def test_a_table_is_the_callers_own():
    model = encoder(digits=2)
    assert model.table(30).shape == (30, 24)
    assert model.table(30).requires_grad
    with torch.no_grad(), model.eval().frozen():
        model.table(30).zero_()
        torch.testing.assert_close(model.table(30), model.plain(torch.arange(30)))
    with pytest.raises(ValueError, match="table: expected extents from 1 to 100, got 101"):
        model.table(101)
    with pytest.raises(ValueError, match="table: expected 1 extents, one for each axis, got 2"):
        model.table(3, 4)


@pytest.mark.parametrize("mode", ["train", "eval", "dropout", "plain"])
def test_positions_out_of_range(mode):
    model = encoder(digits=2, dropout=0.1 if mode == "dropout" else 0.0).train(mode != "eval")
    form = model.plain if mode == "plain" else model
    with torch.no_grad():
        for wrong in (-1, 100):
            with pytest.raises(ValueError, match=rf"0 <= position < 100 \(2 digits of base 10\), got {wrong}"):
                form(torch.tensor([3, wrong]))
        with pytest.raises(TypeError, match=r"expected an int32 or int64 tensor, got torch\.float32"):
            form(torch.tensor([3.0]))


def test_positions_elsewhere():
    with pytest.raises(ValueError, match="expected a tensor on the CPU in training, got one on meta; with wait=True"):
        encoder()(torch.arange(3, device="meta"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(dim=10, heads=3), "expected dim to be a multiple of heads, got dim 10 and heads 3"),
        (dict(dim=64, base=1), "expected base >= 2, got 1"),
        (dict(dim=64, digits=0), "expected digits >= 1, got 0"),
        (dict(dim=64, layers=0), "expected layers >= 1, got 0"),
    ],
)
def test_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        SeqPE(**sizes)


def test_a_trie_may_be_planned_ahead():
    model = encoder(digits=3)
    positions = torch.tensor([[4, 9], [4, 300]])
    trie = DigitTrie.of(positions, digits=3)
    assert torch.equal(model(trie), model(positions))
    for code in ({"digits": 5}, {"base": 11, "digits": 3}, {"digits": 3, "axes": 2}):
        with pytest.raises(ValueError, match=r"trie: expected one of axes, base and digits .* got \(1, 10, 3\)"):
            encoder(**code)(trie)
