"""The benchmarks' own arithmetic: statistics, cases, visible work, shares of the roof, and the commands' help."""

import argparse
import csv
import re
import runpy
import sys
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import contenders
import fitted
import harness
import masks
import pytest
import suites
import torch
from roof import UNRATED, Roof, measure, rated_isas
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.tiers import slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = (
    "attention", "rope", "pool", "planner", "memory", "roof", "picture", "demo", "readme", "gpu", "gpu_run",
    "gpu_steps", "registers", "compressor", "training", "compression_loss", "streaming", "calls", "greedy", "lengths",
    "seqpe", "asking", "shares",
)  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when told to: `clock.now` in seconds."""
    fake = SimpleNamespace(now=0.0)
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: fake.now))
    return fake


def lasting(clock, seconds):
    """A contender whose calls take the times of `seconds`, over and over."""
    following = cycle(seconds)

    def call():
        clock.now += next(following)

    return call


def test_quartiles_of_known_times(clock):
    forms = {"one": lasting(clock, [0.1]), "other": lasting(clock, [0.1, 0.1, 0.1, 0.2, 0.3, 0.4, 0.5])}
    one, other = harness.take_turns("case", forms, seconds=8, least=5)
    assert (one.low, one.median, one.high) == pytest.approx((100, 100, 100))
    assert one.runs == other.runs
    assert other.median == pytest.approx(200) and other.low < other.median < other.high


def test_contenders_take_turns_and_slow_ones_stop_early(clock):
    order = []
    quick, slow = lasting(clock, [0.1]), lasting(clock, [2.0])
    forms = {"quick": lambda: (order.append("quick"), quick()), "slow": lambda: (order.append("slow"), slow())}
    found = {timing.form: timing for timing in harness.take_turns("case", forms, seconds=8, least=3)}
    assert order[:10] == ["quick"] * 2 + ["slow"] * 2 + ["quick", "slow"] * 3
    assert found["slow"].runs == 3 and found["slow"].median == pytest.approx(2000)
    assert found["quick"].runs == pytest.approx(3 + (8 - 3 * 2.1) / 0.1, abs=2)


def test_slow_contenders_alone_end_after_their_rounds(clock):
    (only,) = harness.take_turns("case", {"slow": lasting(clock, [5.0])}, seconds=8, least=3)
    assert only.runs == 3


def test_rates_and_shares_are_those_of_the_form():
    roof = Roof({"avx2": [50.0, 100.0], "avx512": [100.0, 200.0]}, read_gbps=10.0, read_mib=1)
    case = harness.Case("case", dict, work=1e9, traffic=1e8, unrated=["other work"])
    first, avx2, other = (
        harness.Timing("case", form, 1, median, 1, 3)
        for form, median in (("gistkit avx512", 10.0), ("gistkit avx2", 20.0), ("other work", 5.0))
    )
    assert harness.figures(case, first, first, roof) == pytest.approx(
        {"ratio": 1, "gflops": 100, "gbps": 10, "flop_share": 0.5, "read_share": 1}
    )
    assert harness.figures(case, avx2, first, roof)["flop_share"] == pytest.approx(0.5)
    assert harness.figures(case, other, first, roof) == {"ratio": 0.5}
    assert roof.peak("SDPA, is_causal") == 200


@pytest.mark.parametrize(
    ("name", "isa", "folder"),
    [
        ("AMD EPYC", "avx512", "amd-epyc-avx512"),
        ("Intel(R) Xeon(R) Processor", "avx512", "intel-xeon-avx512"),
        ("Intel(R) Core(TM) i7-8650U CPU @ 1.90GHz", "avx2", "intel-core-i7-8650u-avx2"),
    ],
)
def test_a_machine_has_a_folder_of_its_own(name, isa, folder):
    assert harness.slug(name, isa) == folder


def test_parts_of_a_suite_have_the_highest_roof_that_was_measured(tmp_path):
    options = argparse.Namespace(
        threads=torch.get_num_threads(), quick=True, json=tmp_path / "some.json", save=False, append=True
    )
    case = harness.Case("sum", lambda: {"ours": lambda: sum(range(99))}, work=99)
    for roof in (Roof({"avx2": [10.0, 15.0]}, 5.0, 64), Roof({"avx2": [9.0, 16.0]}, 4.0, 64)):
        harness.run("some", [case], options, seconds=0.01, roof=roof)
    assert Roof(**suites.read(options.json)["some"]["roof"]) == Roof({"avx2": [10.0, 16.0]}, 5.0, 64)


@pytest.mark.parametrize("isa", ["neon", "avx512", *UNRATED])
def test_units_of_bfloat16_leave_a_machine_its_folder(isa, monkeypatch):
    if isa == "neon":
        monkeypatch.setattr(harness, "ISA_NAMES", ("generic", "neon"))
    monkeypatch.setattr(harness, "best_isa", lambda: isa)
    vectors = "neon" if isa == "neon" else "avx512"
    assert harness.results_folder(quick=False).name == harness.slug(harness.processor(), vectors)


@pytest.mark.parametrize("mask", masks.PLANS)
def test_visible_pairs_are_those_of_the_dense_mask(mask):
    plan = masks.PLANS[mask](1024)
    visible = masks.visible_pairs(plan)
    assert visible == int(masks.dense(plan).sum())
    shape = masks.Shape(mask, masks.Point(n=1024, batch=2, heads=8, key_heads=2, dim=128), backward=True)
    assert shape.visible == 16 * visible and shape.work == 16 * visible * 4 * 128 * 3.5


def test_the_cases_cover_the_axes():
    points = [point for name, axis in masks.AXES.items() if name != "quick" for point in axis]
    found = list(masks.shapes(points))
    assert len({shape.name for shape in found}) == len(found)
    assert {shape.point.n for shape in found} == {1024, 2048, 4096, 8192, 16384}
    assert {shape.point.dim for shape in found} == {64, 128}
    assert {shape.point.batch * shape.point.heads for shape in found} == {1, 8, 32}
    assert {shape.point.dtype for shape in found} == {"float32", "bfloat16", "float16"}
    assert any(shape.point.heads == 8 and shape.point.key_heads == 2 for shape in found)
    assert {shape.mask for shape in found if shape.point == masks.BASE} == set(masks.METHODS)
    for shape in found:
        changed = [size for size in ("n", "dim", "dtype") if getattr(shape.point, size) != getattr(masks.BASE, size)]
        assert len(changed) <= 1, shape
    assert {shape.backward for shape in found} == {False, True}


def test_the_command_line_selects_single_cases():
    command = runpy.run_path(str(BENCHMARKS / "attention.py"))

    def names(*arguments):
        return [case.name for case in command["cases"](command["parser"]().parse_args(arguments))]

    one = ["--masks", "causal", "--lengths", "512", "--heads", "4", "--dtype", "bfloat16", "--passes", "forward"]
    assert names(*one) == ["causal, N 512, B1 H4/4 D64 bfloat16, forward"]
    assert [name.split(",")[2] for name in names("--axes", "decode")] == [" 64 keys"] * 2 + [" 32768 keys"] * 4
    assert len(names()) == len(set(names())) > 70
    assert len(names("--quick")) == 6 + len(names("--axes", "decode"))
    study = names("--study", "gistpool")
    assert len(study) == len(set(study)) == 18
    assert {tuple(name.split(", ")[:2]) for name in study} == {
        (f"GistPool {ratio}x", f"N {n}") for ratio in (2, 5, 10) for n in (2048, 4096, 8192)
    }
    dodo = names("--study", "dodo")
    assert len(dodo) == len(set(dodo)) == 20
    assert {(name.split(", ")[0], *re.findall(r"tau \d+|segment \d+|N \d+", name)) for name in dodo} == {
        (*mask, f"N {n}")
        for mask in (
            ("Dodo 10x", "tau 128"), ("Dodo 10x", "tau 512"), ("Dodo 10x at random", "tau 128"),
            ("Dodo 10x at random", "tau 512"), ("Dodo 10x", "tau 128", "segment 32"),
        )
        for n in (4096, 8192)
    }  # fmt: skip
    assert {name.split(", ")[-1] for name in dodo} == {"forward", "forward + backward"}
    assert names("--study", "dodo", "--quick") == [name for name in dodo if ", N 4096," in name]


@pytest.mark.parametrize("mask", masks.STUDIES["dodo"][0])
def test_masks_of_dodo_show_the_recent_tokens_and_one_in_ten_before_them(mask):
    plan = masks.PLANS[mask](1000)
    tau, segment = (int((re.search(rf"{name} (\d+)", mask) or [0, 1])[1]) for name in ("tau", "segment"))
    order = plan.inverse[0]
    seen = masks.dense(plan)[order][:, order][:, :400]
    nuggets = seen[-1]
    row, column = torch.arange(1000)[:, None], torch.arange(400)
    recent = column >= row // segment * segment - (tau - segment)
    assert torch.equal(seen, (column <= row) & (nuggets | recent))
    assert int(nuggets.sum()) == pytest.approx(40, abs=10)
    gaps = nuggets.nonzero()[:, 0].diff().unique()
    assert len(gaps) > 5 if "random" in mask else gaps.tolist() == [10]


def test_the_study_of_dodo_makes_plans_too_and_all_contenders_agree(isa):
    shape = masks.Shape("Dodo 10x at random, tau 128", masks.Point(n=384, heads=2, key_heads=2), backward=False)
    forms = contenders.attention(shape, [isa], with_flex=False, slow=False, planned=True)
    assert list(forms) == [f"gistkit {isa}", f"gistkit, with plan creation, {isa}", "SDPA, dense mask"]
    ready, planned, dense = (form() for form in forms.values())
    assert torch.equal(ready, planned)
    torch.testing.assert_close(ready, dense, rtol=1e-4, atol=1e-5)


def test_time_for_a_visible_pair():
    proportion = runpy.run_path(str(BENCHMARKS / "attention.py"))["proportion"]
    found = [
        harness.Case(name, dict, work=1, facts={"pass": "forward", "visible": visible})
        for name, visible in (("short", 1e6), ("long", 4e6))
    ]
    timings = [
        harness.Timing(case, form, 0, median, 0, 3)
        for case, form, median in (("short", "ours", 2.0), ("short", "other", 9.0), ("long", "ours", 6.0))
    ]
    assert proportion(found, timings) == ["ours, forward: 1500 to 2000 ps a visible pair of a head"]


def test_how_far_the_others_are_behind():
    leads = runpy.run_path(str(BENCHMARKS / "attention.py"))["leads"]
    found = [
        harness.Case(name, dict, work=1, facts={"pass": name.split()[0]})
        for name in ("forward 1", "forward 2", "backward 1")
    ]
    timings = [
        harness.Timing(case, form, 0, median, 0, 3)
        for case, form, median in (
            ("forward 1", "ours", 2.0), ("forward 1", "other", 3.0), ("forward 1", contenders.MASK_CREATION[0], 9.0),
            ("forward 2", "ours", 1.0), ("forward 2", "other", 4.0), ("forward 2", "third", 0.5),
            ("backward 1", "ours", 5.0), ("backward 1", "other", 10.0),
        )
    ]  # fmt: skip
    assert leads(found, timings) == [
        "other, forward: 1.50 to 4.00 x ours",
        "third, forward: 0.50 to 0.50 x ours",
        "other, backward: 2.00 to 2.00 x ours",
    ]


def test_a_run_writes_json(tmp_path, capsys):
    options = argparse.Namespace(
        threads=torch.get_num_threads(), quick=True, json=tmp_path / "some.json", save=False, append=False
    )
    cases = [harness.Case("sum", lambda: {"ours": lambda: sum(range(99))}, work=99, facts={"n": 99})]
    harness.run("some", cases, options, seconds=0.01)
    content = suites.read(options.json)["some"]
    assert content["machine"]["commit"] and content["cases"] == [{"name": "sum", "work": 99, "traffic": 0, "n": 99}]
    (row,) = content["milliseconds"]
    assert row["form"] == "ours" and 0 < row["low"] <= row["median"] <= row["high"]
    assert "1.00 x ours" in capsys.readouterr().out
    options.append = True
    harness.run("some", [harness.Case("other", cases[0].make, work=99, facts={"n": 9}), *cases], options, seconds=0.01)
    harness.run("some", cases, options, seconds=0.01)
    content = suites.read(options.json)["some"]
    for found in ([case["name"] for case in content["cases"]], [row["case"] for row in content["milliseconds"]]):
        assert found == ["other", "sum"]
    suites.write(options.json, "some", content | {"machine": {"commit": "another"}})
    with pytest.raises(SystemExit, match=r"expected some in .* to be of this machine and commit, got"):
        harness.run("some", cases, options, seconds=0.01)


def test_arms_of_other_trainings_are_not_added_to(tmp_path):
    fitted.check_same(tmp_path, [{"steps": 2}], {"steps": 2})
    with pytest.raises(SystemExit, match=r"expected arms of .*3.*, got .*2.*; use the same options"):
        fitted.check_same(tmp_path, [{"steps": 3}, {"steps": 2}], {"steps": 3})


def test_a_machine_s_file_keeps_each_suite_with_its_own_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "results_folder", lambda quick: tmp_path / f"quick-{quick}")
    options = argparse.Namespace(json=None, save=True, quick=False)
    assert (
        harness.write("b", {"machine": {"commit": "1"}, "rows": [1]}, options) == tmp_path / "quick-False/suites.json"
    )
    path = harness.write("a", {"machine": {"commit": "2"}}, options)
    harness.write("b", {"machine": {"commit": "3"}, "rows": []}, options)
    found = suites.read(path)
    assert list(found) == ["a", "b"]
    assert found["a"] == {"suite": "a", "machine": {"commit": "2"}}
    assert found["b"] == {"suite": "b", "machine": {"commit": "3"}, "rows": []}
    # A file that --json names has what was measured, and no more.
    harness.write("c", {}, argparse.Namespace(json=path, save=True, quick=False))
    assert suites.read(path) == {"c": {"suite": "c"}}
    assert harness.write("c", {}, argparse.Namespace(json=None, save=False, quick=False)) is None
    assert suites.read(tmp_path / "none.json") == {}


@pytest.mark.slow
def test_the_roof_is_measured_for_each_instruction_set():
    from gistkit.ops import best_isa

    isas = rated_isas(best_isa())
    roof = measure(isas, 2, seconds=0.01, repeats=1, read_bytes=1 << 20)
    assert list(roof.gflops) == isas and all(len(peaks) == 2 and min(peaks) > 1 for peaks in roof.gflops.values())
    assert roof.read_gbps > 0.1 and roof.read_mib == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{command}.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(BENCHMARKS / f"{command}.py"), run_name="__main__")
    assert stopped.value.code == 0
    assert re.search(rf"^example: python benchmarks/{command}\.py", capsys.readouterr().out, re.MULTILINE)


def test_no_attention_kernel_for_head_dims_to_128_spills() -> None:
    """By the committed report of nvcc, which `make cuda` compares with a fresh one."""
    with (BENCHMARKS / "registers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    checked = 0
    for row in rows:
        dims = re.search(r"Shape<\w+, (\d+), (\d+)", row["kernel"])
        # The backward of wgmma spills outside of its products, which test_registers refuses among them.
        attends = re.match(r"attention/(?!hopper_backward)", row["source"])
        if attends and (dims is None or max(map(int, dims.groups())) <= 128):
            checked += 1
            assert row["spill_stores"] == row["spill_loads"] == "0", row
    assert checked >= 100


@pytest.mark.parametrize("method", ["500x", *slow(["ICAE"], ["Gist"], ["AvgPool"], ["GistPool"], ["Dodo"])])
def test_contenders_of_small_models_make_the_same_memories_and_tokens(method):
    # Both commands compare what their contenders return, and fail where it differs.
    command = runpy.run_path(str(BENCHMARKS / "compressor.py"))
    forms = [command[name](method, layers=4) for name in ("small_encode", "small_decode")]
    assert [list(contenders) for contenders in forms] == [["gistkit", "transformers eager"]] * 2


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("Dodo, reading on", "float32"),
        *slow(("ICAE", "bfloat16"), ("500x", "float32"), ("GistPool", "bfloat16")),
        *slow(("AvgPool", "float32"), ("Dodo", "bfloat16")),
    ],
)
def test_contenders_of_a_training_step_have_one_loss_and_one_gradient(method, dtype):
    # The command compares them, and fails where they differ.
    command = runpy.run_path(str(BENCHMARKS / "training.py"))
    ids = torch.randint(32, 512, (2, 160 if method == "Dodo, reading on" else 80))
    forms = command["compared"](method, small_llama(), ids, dtype)
    assert list(forms) == ["gistkit", "transformers sdpa, dense mask"]
    trained, forms = command["contenders"](method, small_llama(), ids, dtype)
    compressor = command["compressor_of"](trained)
    plain = "transformers sdpa, dense mask"
    other = {"doubled": lambda: doubled(compressor, forms["gistkit"]), plain: forms[plain]}
    with pytest.raises(ValueError, match=f"{method}: expected one loss and one gradient from both contenders, got"):
        command["compare"](method, trained, ids, other, dtype)


def doubled(compressor, step):
    """A step whose gradients are twice those of another, and whose loss is its own."""
    loss = step()
    for _, parameter in compressor.trainable():
        if parameter.grad is not None:
            parameter.grad = 2 * parameter.grad
    return loss


def small_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_cases_of_training_steps_are_chosen_by_name(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(harness, "run", lambda suite, cases, *rest, **options: seen.append((suite, cases)))
    threads = torch.get_num_threads()
    arguments = ["--methods", "500x", "Dodo, reading on", "--shapes", "4x240", "2x4096", "--dtype", "bfloat16"]
    monkeypatch.setattr(sys, "argv", ["training.py", "--threads", str(threads), *arguments])
    runpy.run_path(str(BENCHMARKS / "training.py"), run_name="__main__")
    ((suite, cases),) = seen
    assert suite == "training-bfloat16"
    assert [case.name for case in cases] == [
        f"{method}, {shape} tokens, bfloat16"
        for shape in ("4 x 240", "2 x 4096")
        for method in ("500x", "Dodo, reading on")
    ]
