"""Training on several processes: what is saved is what one process saves, whether weights are copied or sharded."""

import pytest
import safetensors.torch
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gistkit.compress import Compressor
from gistkit.compress.files import base_fingerprints, save_pretrained
from gistkit.train import checkpoints, read_metrics
from gistkit.train.losses import Losses
from gistkit.train.sharding import reshard, whole_weights
from tests.helpers.launched import SHARDED, launch, train_sharded
from tests.helpers.train_worker import (
    SHORT_RUNS,
    close,
    evaluated_first,
    exported,
    make_batches,
    make_compressor,
    make_model,
    same_run,
    short_run,
    stopping_run,
    streamed,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_sharded_runs_save_what_one_process_does(tmp_path):
    """Also those that go on, and those that end early, with the weights of their lowest loss."""
    runs = {"broken_run": short_run, "stopping_run": stopping_run}
    launch(2, train_sharded, str(tmp_path), tuple(SHORT_RUNS), tuple(runs), logs=tmp_path, environment=SHARDED)
    for kind, run in runs.items():
        for name, make in SHORT_RUNS.items():
            ours, theirs = tmp_path / kind / name, tmp_path / "alone" / kind / name
            run(theirs, name)
            same_run(ours, theirs)
            states = [checkpoints.find(each)[-1] for each in (ours, theirs)]
            kept, expected = (safetensors.torch.load_file(state / checkpoints.OPTIMIZER) for state in states)
            assert kept.keys() == expected.keys(), "each trained weight has its optimizer state"
            if kind == "stopping_run":
                continue
            compressor = make()
            compressor = getattr(compressor, "compressor", compressor)
            checkpoints.restore(states[0], compressor.trainable())
            weights = exported(ours)
            assert all(torch.equal(weights[key], weight) for key, weight in compressor.trainable())
    # One process goes on with what two have sharded.
    for name in ("x500", "own"):
        ours, theirs = tmp_path / "broken_run" / name, tmp_path / "alone" / "broken_run" / name
        for each in (ours, theirs):
            short_run(each, name, steps=6, resume=True)
        same_run(ours, theirs)


def test_processes_train_the_same_weights_after_an_evaluation(tmp_path):
    launch(2, evaluated_first, tmp_path, logs=tmp_path)
    ours, theirs = (torch.load(tmp_path / f"weights-{rank}.pt") for rank in range(2))
    before = [weight for _, weight in make_compressor().trainable()]
    assert all(map(torch.equal, ours, theirs)) and not all(map(torch.equal, ours, before))


def test_processes_share_a_stream(tmp_path):
    """Some batches have a mask, and some have none."""
    launch(2, streamed, tmp_path / "two", 2, logs=tmp_path)
    streamed(tmp_path / "one", 4)
    close(*(read_metrics(tmp_path / name / "metrics.jsonl") for name in ("two", "one")))


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
    with torch.no_grad():
        module(**make_batches().held_out(4)[0])
    reshard(module)
    sharded = dict(compressor.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in sharded.values())
    with whole_weights(compressor, keep=True):
        save_pretrained(compressor, tmp_path, base_fingerprints(expected))
    assert all(parameter is sharded[name] for name, parameter in compressor.named_parameters())
    loaded = Compressor.from_pretrained(tmp_path, make_model() if lora else None)
    assert all(
        torch.equal(weight, value) for weight, value in zip(loaded.parameters(), expected.parameters(), strict=True)
    )
