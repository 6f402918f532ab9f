"""Several processes as a launcher starts them, forked from one that has imported torch, and what they run."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

# Who forks the processes imports these once; none of them starts threads.
IMPORTED = ("tests.helpers.train_worker", "torch._dynamo", "accelerate.utils.fsdp_utils", "gistkit.cli")
# What `accelerate launch --config_file fsdp.yaml` tells the processes.
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def launch(count, action, *arguments, logs, environment=(), expected=0, seconds=300):
    """Runs a function of a module in `count` processes, which end with the status `expected`.

    Args:
        arguments: of the function, picklable.
        logs: folder for what the processes print.
        environment: variables beside those of a launcher.
    """
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(list(IMPORTED))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = []
    for rank in range(count):
        variables = {**dict(environment), **shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
        log = Path(logs) / f"process-{rank}.log"
        processes.append(forking.Process(target=_run, args=(variables, log, seconds, action, arguments)))
        processes[-1].start()
    for process in processes:
        process.join(seconds + 10)
        if process.exitcode is None:
            process.kill()
    ends = [process.exitcode for process in processes]
    told = "\n".join(path.read_text() for path in sorted(Path(logs).glob("process-*.log")))
    assert ends == [expected] * count, f"{ends}\n{told}"


def _run(variables, log, seconds, action, arguments):
    os.environ.update({name: str(value) for name, value in variables.items()})
    file = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False, buffering=1) for number in (1, 2))  # noqa: SIM115
    # Processes that wait for each other say where, and end.
    faulthandler.dump_traceback_later(seconds, exit=True)
    import torch

    torch.set_num_threads(1)
    try:
        status = action(*arguments)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's end, where gloo's threads may wait for processes that are gone.
    os._exit(status or 0)


def train_sharded(out, names, runs):
    """Runs of `tests.helpers.train_worker` with FSDP2, for which Accelerate wants GPUs: it takes processes for some."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    from tests.helpers import train_worker

    state = PartialState(cpu=True)
    state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    for run in runs:
        for name in names:
            getattr(train_worker, run)(Path(out) / run / name, name)


def command(*words):
    """A command of gistkit."""
    from gistkit.cli import main

    return main(list(words))


def fill(folder, texts, batch_tokens, stop=None):
    """This process's share of a store; `stop` says where it is killed, see `stop_at`."""
    from gistkit.common.processes import launched
    from gistkit_serve.store import compress_documents
    from tests.helpers.stores import documents, make_compressor, make_tokenizer

    processes = launched()
    if stop is not None:
        stop_at(*stop)
    compress_documents(
        make_compressor(), make_tokenizer(), documents(texts), folder, batch_tokens=batch_tokens,
        part=processes.index, parts=processes.count,
    )  # fmt: skip


def stop_at(where, count):
    """This process kills itself "before" or "after" the move of its count-th memory file to its place."""
    kept, left = os.replace, [count]

    def replace(partial, path):
        left[0] -= str(path).endswith(".gist")
        if where == "after":
            kept(partial, path)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        if where == "before":
            kept(partial, path)

    os.replace = replace
