# Everything a fresh machine needs is done by `make train` and `make test`: both create .venv first, with the newest
# Python here that the suite has run on. pyenv shows a version only to who asks for it.
python = $(shell PYENV_VERSION=$(1) python$(1) -c 'import sys; print(sys.executable)' 2>/dev/null)
PYTHON ?= $(or $(call python,3.13),$(call python,3.12),$(OLDEST),python3)
OLDEST ?= $(call python,3.11)
VENV := .venv
BIN := $(VENV)/bin
comma := ,

# install FOLDER EXTRAS: the package in editable form, with the exact versions that the folder's Python can have.
versions = $$($(1)/bin/python -c 'import sys; print("constraints.txt" if sys.version_info >= (3, 12) else "constraints-oldest.txt")')
install = $(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint $(versions) --editable '.[$(2)]'

# Modules are compiled where they are first imported, and that is kept, whatever the environment says of it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install train demo test test-release quick mutants oldest maniskill packages lint docs check-docs pictures dist gpu-compile gpu bench clean
.PHONY: gpu-tests gpu-steps gpu-loops gpu-policies gpu-others gpu-serving gpu-checkpoint gpu-run

$(VENV)/.installed: pyproject.toml constraints.txt constraints-oldest.txt | $(BIN)/python
	@echo "pip installs the tested versions into $(VENV): a few minutes"
	$(call install,$(VENV),dev)
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# As root on a Debian: the packages that tests need (Slurm); elsewhere those tests are skipped.
packages: | $(BIN)/python
	OPENPI_TRAIN_INSTALL_PACKAGES=1 $(BIN)/python tests/debian.py

install: $(VENV)/.installed

train: $(VENV)/.installed
	$(BIN)/python -m openpi_train data prepare
	$(BIN)/python -m openpi_train launch local --processes 2 -- pi0_bridge_traj_tiny --exp-name first_run --overwrite

demo: $(VENV)/.installed
	$(BIN)/python -m benchmarks demo --out checkpoints/demo
	$(BIN)/python -m openpi_train arithmetic_sft --exp-name demo --overwrite
	@echo "The language model has 0.13 M parameters and 800 steps: it answers about half of such sums right (51 % of 1,100"
	@echo "held-out ones, docs/howto/language_models.md). So some of these 8 answers to one sum are wrong:"
	$(BIN)/python -m openpi_train generate checkpoints/arithmetic_sft/demo --prompt '27+48=' --samples 8 --max-new-tokens 8

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# A worker that crashes ends the suite: xdist would wait without end for tests that it has not given to another.
# As many processes run files of tests at the same time.
WORKERS ?= 2
IN_WORKERS := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# These tests mostly wait, for hosts that are lost or programs that end: they run beside the others, in a process of
# their own, and so does pyright, which has one thread. Both are heard at the end.
WAITING := tests/hosts tests/launch tests/slurm tests/runs/test_lost_peers.py tests/test_fault_drill.py $(patsubst %,tests/runtime/test_%.py,agree selftest session)
WITHOUT_WAITING := $(IN_WORKERS) $(WAITING:%=--ignore=%)

# Where the oldest Python is here beside a newer one, each runs a part: the oldest all that is slow, since its XLA compiles
# in two thirds of the time, the newer one the other nine tenths of the tests. Else one Python runs all.
QUICK := -m 'not slow and not multiprocess'
BESIDE := $(and $(OLDEST),$(filter-out $(OLDEST),$(PYTHON)),.venv-oldest)
SUITE := OPENPI_TRAIN_INSTALL_PACKAGES=1 $(or $(BESIDE),$(VENV))/bin/python -m pytest
NEWER := $(if $(BESIDE),$(BIN)/python -m pytest $(WITHOUT_WAITING) $(QUICK),true)

# Debian's packages wait for the network, and are installed beside the environments.
test:
	@$(MAKE) --no-print-directory --jobs 3 $(VENV)/.installed packages $(BESIDE:%=%/.installed)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/pyright > $(VENV)/pyright.txt 2>&1 & types=$$!; \
	$(SUITE) $(WAITING) > $(VENV)/waiting.txt 2>&1 & waiting=$$!; \
	$(NEWER); newer=$$?; \
	$(SUITE) $(WITHOUT_WAITING) $(if $(BESIDE),-m 'slow or multiprocess'); code=$$?; \
	test $$newer = 0 || code=$$newer; \
	wait $$waiting || code=1; echo tests that wait: && cat $(VENV)/waiting.txt; \
	wait $$types || code=1; echo pyright: && cat $(VENV)/pyright.txt; exit $$code

quick: $(VENV)/.installed
	$(BIN)/python -m pytest $(QUICK) $(IN_WORKERS)

# The quick suite on the oldest Python and jax, in an environment of its own.
oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest $(QUICK) $(IN_WORKERS)

# ManiSkill, which wants torch (3 GB) and Vulkan: on a Debian 12 Mesa's of its backports, unpacked into a folder.
maniskill: $(BIN)/python
	test -x .venv-maniskill/bin/python || $(OLDEST) -m venv .venv-maniskill
	$(call install,.venv-maniskill,dev$(comma)maniskill$(comma)aloha)
	.venv-maniskill/bin/python tests/vulkan.py .venv-maniskill/mesa .venv-maniskill/bin/python -m pytest -m '' tests/envs/test_real_simulators.py

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	test -x .venv-oldest/bin/python || $(OLDEST) -m venv .venv-oldest
	$(call install,.venv-oldest,dev)
	touch $@

# The whole suite in earnest, in an environment of its own (docs/understand/testing.md): an XLA_FLAGS that is set, though empty, keeps
# tests/conftest.py from telling XLA to spare effort; TensorFlow, which wants an older h5py, reads what our RLDS reader
# reads; openpi's client talks to our server.
RELEASE := .venv-release
test-release:
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	grep -v '^h5py==' $(call versions,$(RELEASE)) > $(RELEASE)/constraints.txt
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(RELEASE)/constraints.txt --editable '.[dev,rlds-check]'
	$(RELEASE)/bin/python -c 'import tensorflow; from benchmarks import openpi_peer; openpi_peer.environment()'
	XLA_FLAGS= OPENPI_TRAIN_INSTALL_PACKAGES=1 $(RELEASE)/bin/python -m pytest $(IN_WORKERS)

# Every deliberate mistake of tests/mutants/*.toml in turn; ends with 1 where one is not noticed. With SINCE=COMMIT small
# ones in what has changed since then, in place of the list's. A mistake may have the
# size and the second of what it stands for, by which Python knows whether what it keeps is of this text.
mutants: export PYTHONDONTWRITEBYTECODE := 1
mutants: $(VENV)/.installed
	$(BIN)/python -m tests.mutants $(if $(SINCE),--since $(SINCE))

# The documentation as a site in site/; ends with an error at every warning, such as a broken link.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What is cut on its pages, 1400 and 400 pixels wide; needs Chromium.
check-docs: docs
	$(BIN)/python docs/check_site.py site

# The pictures of README and pages, from real runs; needs Chromium. Ten minutes.
pictures: $(VENV)/.installed
	$(BIN)/python docs/pictures/make.py

# The wheel and the sdist of the commit in dist/: built twice with the same bytes, checked, and tried in an empty environment
# (docs/install.md). DIST_FLAGS=--no-trial installs nothing there.
DIST := .venv-dist
dist:
	test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-dist.txt build setuptools twine
	$(DIST)/bin/python scripts/build_dist.py $(DIST_FLAGS)

# Steps at full size by XLA's GPU compiler, in an environment of its own with jax's CUDA plugin (4 GB; no GPU is needed).
# The tables go to the terminal, all figures to $(GPU)/gpu_compile.json. It takes two cores more than an hour; GPU_SETS=attention
# takes six minutes. GPU_SETS=flags compares XLA's flags, GPU_SETS=loops other models' layers in a loop and unrolled.
GPU := .venv-gpu
GPU_SETS ?= openpi families tight strategies attention programs sampling layers
GPU_COMPILATIONS ?= $(shell nproc)
gpu-compile:
	test -x $(GPU)/bin/python || $(PYTHON) -m venv $(GPU)
	$(call install,$(GPU),dev$(comma)cuda12)
	JAX_PLATFORMS=cpu $(GPU)/bin/python -m benchmarks gpu_compile --sets $(GPU_SETS) --processes $(GPU_COMPILATIONS) --json $(GPU)/gpu_compile.json

# What a GPU says, in pieces of less than ten minutes each (docs/understand/benchmarks.md); tables and traces go to $(GPU_OUT). Without
# a network: GPU_PYTHON=python3, of an environment that has what pyproject.toml names. A piece that fails does not keep
# the others from running; an interrupted one tells what it has.
GPU_PYTHON ?= $(GPU)/bin/python
GPU_OUT ?= gpu_results
GPU_PIECES ?= tests steps loops policies others serving checkpoint run
GPU_CUDA ?= cuda12
PIECE = timeout --signal INT 590
gpu:
	test "$(GPU_PYTHON)" != $(GPU)/bin/python || test -x $(GPU_PYTHON) || $(PYTHON) -m venv $(GPU)
	test "$(GPU_PYTHON)" != $(GPU)/bin/python || $(call install,$(GPU),dev$(comma)$(GPU_CUDA))
	@JAX_PLATFORMS=cuda $(GPU_PYTHON) -c 'import jax; jax.devices()' >/dev/null 2>&1 || { \
	echo "make gpu: $(GPU_PYTHON) finds no GPU; JAX_PLATFORMS=cuda $(GPU_PYTHON) -c 'import jax; jax.devices()' says why."; \
	echo "Without a GPU, make gpu-compile compiles for GPUs."; exit 2; } >&2
	mkdir -p $(GPU_OUT)
	$(MAKE) --keep-going $(GPU_PIECES:%=gpu-%)

# Products in full float32, as the reference was computed.
gpu-tests:
	JAX_PLATFORMS=cuda XLA_FLAGS= JAX_DEFAULT_MATMUL_PRECISION=highest $(PIECE) $(GPU_PYTHON) -m pytest --tb=short tests/nn/test_attention.py tests/nn/test_attention_check.py tests/golden

gpu-steps:
	$(PIECE) $(GPU_PYTHON) -m benchmarks gpu_steps --details $(GPU_OUT)/steps --traced 5 --json $(GPU_OUT)/steps.json

gpu-loops:
	$(PIECE) $(GPU_PYTHON) -m benchmarks gpu_steps --sets loops --details $(GPU_OUT)/loops --traced 1 --json $(GPU_OUT)/loops.json

gpu-policies:
	$(PIECE) $(GPU_PYTHON) -m benchmarks gpu_steps --sets policies offload --details $(GPU_OUT)/policies --json $(GPU_OUT)/policies.json

gpu-others:
	$(PIECE) $(GPU_PYTHON) -m benchmarks gpu_steps --sets lora pi05 tokens dp llama --details $(GPU_OUT)/others --json $(GPU_OUT)/others.json

gpu-serving:
	$(PIECE) $(GPU_PYTHON) -m benchmarks gpu_serving --json $(GPU_OUT)/serving.json

gpu-checkpoint:
	$(PIECE) $(GPU_PYTHON) -m benchmarks checkpoint --experiment pi0_bridge_traj_lora --batch-size 32 --directory $(GPU_OUT) --json $(GPU_OUT)/checkpoint.json

gpu-run:
	$(PIECE) $(GPU_PYTHON) -m openpi_train benchmarks/full_size.py:full_size --exp-name x --overwrite --checkpoint-base-dir $(GPU_OUT)/run --profile 3
	$(PIECE) $(GPU_PYTHON) -m openpi_train benchmarks/full_size.py:full_size --exp-name x --resume --num-train-steps 70 --checkpoint-base-dir $(GPU_OUT)/run

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

clean:
	rm -rf build site *.egg-info .pytest_cache .ruff_cache .jax_cache
