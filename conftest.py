"""Shared test set-up: memory that gistkit allocates without filling starts as NaN, so a forgotten write is seen."""

import gc
import os
import signal

# Threads must not differ between machines, or timings of the suite would: two, or one where processes share the cores,
# whatever they inherit. Tests of threads choose their number.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.helpers.isas import BEYOND, ISAS, best_isas, highest_isa

# The same examples everywhere, however slow or busy the machine is.
settings.register_profile("gistkit", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# Other examples each time, and many: `make fuzz`.
settings.register_profile(
    "fuzz",
    parent=settings.get_profile("gistkit"),
    derandomize=False,
    max_examples=int(os.environ.get("GISTKIT_FUZZ", "5000")),
)
settings.load_profile("gistkit")


# Whoever starts the tests in the background may have it ignored; they, and their children, need it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What benchmarks compute, and what a GPU runs, here on a CPU.
SLOW_FOLDERS = ("benchmarks", "cuda")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make test` leaves to `make check` every instruction set but the best, browsers, and some folders."""
    best = best_isas()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        isa = params.get("isa") or params.get("attention_isa")
        elsewhere = "chromium" in getattr(item, "fixturenames", ()) or item.path.parent.name in SLOW_FOLDERS
        if elsewhere or (isa is not None and isa not in best):
            item.add_marker("slow")


def pytest_collection_finish():
    """Every training run ends by collecting garbage, which among all that is imported takes longer than a short run."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def hangups():
    """SIGHUP is heard during the test, and by its children, also where nohup started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def poison_uninitialised_memory():
    """`torch.empty` and its kin fill with NaN (integers with their maximum) while a test runs."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(autouse=True)
def poison_scratch():
    """The memory that attention's kernels keep from call to call holds NaN when a test starts."""
    import gistkit

    query, keys = torch.full((1, 2, 32, 64), torch.nan), torch.full((1, 2, 1024, 64), torch.nan)
    spans = torch.tensor([0, 1024], dtype=torch.int32).expand(1, 32, 1, 2)
    gistkit.attention(query, keys, keys, gistkit.Plan(spans.contiguous(), 1024))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A test neither reads nor writes the folder that the tests were started from."""
    monkeypatch.chdir(tmp_path)
    # Nor what commands note of compressors.
    monkeypatch.setattr("gistkit.options.models.notes", lambda: tmp_path.with_name(f"{tmp_path.name}-notes"))


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same random state."""
    # That of torch.manual_seed formats its caller's stack for every kind of device that is not there.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def cached_smollm2(tmp_path_factory, monkeypatch):
    """SmolLM2's weights, unpacked once for all tests and all processes of a run; skips where they are missing."""
    from tests.helpers.smollm2 import skip_without_smollm2, unpacked

    skip_without_smollm2()
    base = tmp_path_factory.getbasetemp()
    unpacked((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smollm2", monkeypatch)


@pytest.fixture
def one_thread():
    """Torch uses one thread while the test runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def double():
    """From one seed, with float64 as the default dtype."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=ISAS)
def isa(request):
    """Runs the test with each instruction set, then puts back the one in use."""
    yield from using(request.param)


@pytest.fixture(params=[*ISAS, *BEYOND])
def attention_isa(request):
    """The same, with those that have kernels of attention alone."""
    yield from using(request.param)


def using(name):
    """Chooses an instruction set and gives its name, then puts back the one in use."""
    from gistkit.ops import cpu_isa
    from gistkit.ops._library import ISA_NAMES

    before, most = cpu_isa(), highest_isa()
    if ISA_NAMES.index(name) > ISA_NAMES.index(most):
        pytest.skip(f"this processor, system, build or GISTKIT_ISA offers {most} at most, not {name}")
    yield cpu_isa(name)
    cpu_isa(before)
