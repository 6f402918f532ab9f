"""Training on several processes: what is saved is what one process saves, whether weights are copied or sharded."""

import shutil
import types

import pytest
import safetensors.torch
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gistkit.compress import Compressor
from gistkit.compress.files import save_compressor
from gistkit.train import checkpoint, read_metrics
from gistkit.train.passes import Losses, Passes
from gistkit.train.sharding import whole_weights
from tests.helpers.launched import SHARDED, launch, train_runs, train_sharded
from tests.helpers.train_worker import SHORT_RUNS, make_batches, make_compressor, make_model, numbers, short_run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The runs of one process."""
    out = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    for name in SHORT_RUNS:
        short_run(out / name, name)
    return out


def exported(run):
    """The weights that a run saved, by name."""
    model = None if (run / "compressor" / "model").is_dir() else make_model()
    return dict(Compressor.from_pretrained(run / "compressor", model).trainable())


def same_run(ours, theirs):
    """Both runs have the same records and save the same weights, up to the rounding of sums."""
    for record, other in zip(*(numbers(read_metrics(run / "metrics.jsonl")) for run in (ours, theirs)), strict=True):
        assert record.keys() == other.keys()
        for name, value in record.items():
            assert value == pytest.approx(other[name], rel=5e-6), (record["step"], name)
    weights, expected = exported(ours), exported(theirs)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(
            weight, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_copies_save_what_one_process_does(alone, tmp_path, count):
    launch(count, train_runs, str(tmp_path), ("x500", "reader"), logs=tmp_path)
    for name in ("x500", "reader"):
        same_run(tmp_path / name, alone / name)


@pytest.mark.slow
def test_a_sharded_run_saves_what_one_process_does(alone, tmp_path):
    launch(2, train_sharded, str(tmp_path), tuple(SHORT_RUNS), logs=tmp_path, environment=SHARDED)
    for name, make in SHORT_RUNS.items():
        same_run(tmp_path / name, alone / name)
        states = [checkpoint.find(run / name)[-1] for run in (tmp_path, alone)]
        kept, expected = map(safetensors.torch.load_file, states)
        assert kept.keys() == expected.keys(), "each trained weight has its optimizer state"
        compressor = make()
        compressor = getattr(compressor, "compressor", compressor)
        checkpoint.restore(states[0], compressor.trainable())
        weights = exported(tmp_path / name)
        assert all(torch.equal(weights[key], weight) for key, weight in compressor.trainable())
    # One process goes on with what two have sharded.
    shutil.copytree(alone / "x500", tmp_path / "one")
    for run in ("x500", "one"):
        short_run(tmp_path / run, "x500", steps=6, resume=True)
    same_run(tmp_path / "x500", tmp_path / "one")


@pytest.fixture
def group():
    """Torch's process group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("lora", [4, None])
def test_weights_are_sharded_between_passes_and_whole_where_they_are_saved(tmp_path, lora):
    compressor, expected = make_compressor(lora=lora), make_compressor(lora=lora)
    mesh = init_device_mesh("cpu", (1,))
    for layer in compressor.model.model.layers:
        fully_shard(layer, mesh=mesh)
    module = fully_shard(Losses(compressor), mesh=mesh)
    alone = types.SimpleNamespace(
        process_index=0, num_processes=1, device=torch.device("cpu"), reduce=lambda tensor, how: tensor
    )
    passes = Passes(alone, module, compressor)
    passes.evaluate([passes.read(make_batches().held_out(4)[0])])
    sharded = dict(compressor.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in sharded.values())
    with whole_weights(compressor, keep=True):
        save_compressor(compressor, tmp_path, fingerprint=expected.fingerprint())
    assert all(parameter is sharded[name] for name, parameter in compressor.named_parameters())
    loaded = Compressor.from_pretrained(tmp_path, make_model() if lora else None)
    assert all(
        torch.equal(weight, value) for weight, value in zip(loaded.parameters(), expected.parameters(), strict=True)
    )
