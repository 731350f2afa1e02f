# make train   set up .venv, install, train a small GPT on 2 ranks
# make test    set up .venv, install, run every test
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test
.DELETE_ON_ERROR:
.PHONY: train test lint bench sanitize setup clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := CMakeLists.txt setup.py $(wildcard csrc/*/*.h csrc/*/*.cpp)
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
TORCHRUN := OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node=2
TRAIN ?=
BENCH ?= -b 1K -e 16M -f 4 --peer gloo

setup: $(VENV)/.installed

# What the build and the tests need, then the project itself on the torch that is now there.
$(VENV)/.tools: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel pybind11 cmake ninja torch numpy rich matplotlib pytest pytest-timeout hypothesis ruff mypy clang-format \
	  accelerate lightning
	touch $@

$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	$(PIP) --no-build-isolation -e .
	touch $@

train: setup
	$(TORCHRUN) examples/train_gpt.py $(TRAIN)

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*/*.h csrc/*/*.cpp tests/cpp/*.cpp)

bench: setup
	$(TORCHRUN) -m ringcomm.cli bench $(BENCH)

# The core and the CPU engine under the sanitizers, a part of `make test`.
sanitize: setup
	$(BIN)/python -m pytest tests/test_native.py

clean:
	rm -rf build dist *.egg-info ringcomm/*.so $(VENV)/.installed
