# Everything a fresh machine needs is done by `make train` and `make test`: both create .venv first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

NEWEST ?= python3.13

.PHONY: train demo test quick newest lint bench clean

# The environment: exact versions from constraints.txt, the package itself in editable form.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

train: $(VENV)/.installed
	$(BIN)/python -m openpi_train data prepare
	$(BIN)/python -m openpi_train launch local --processes 2 -- pi0_bridge_traj_tiny --exp-name first_run --overwrite

demo: $(VENV)/.installed
	$(BIN)/python -m benchmarks demo --out checkpoints/demo

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# As root on a Debian it also installs the packages that tests need (Slurm); elsewhere those tests are skipped.
test: lint
	OPENPI_TRAIN_INSTALL_PACKAGES=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

quick: $(VENV)/.installed
	$(BIN)/python -m pytest -m 'not slow and not multiprocess' --numprocesses 2 --dist loadfile

# The quick suite on the newest Python and jax, in an environment of its own.
newest:
	test -x .venv-newest/bin/python || $(NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-newest.txt --editable '.[dev]'
	.venv-newest/bin/python -m pytest -m 'not slow and not multiprocess'

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

clean:
	rm -rf build *.egg-info .pytest_cache .ruff_cache .jax_cache
