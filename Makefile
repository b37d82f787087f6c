# Everything runs in .venv, which `make` fills on first use and again when pyproject.toml or constraints-dev.txt has changed.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-dev.txt

# Two tests at a time: many wait for processes that start, and worlds of several processes fill the cores of more.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# The documentation's theme announces its successor on every build.
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: help demo test proof check docs format clean

help:  ## list what there is to make
	@sed -n 's/^\([a-z]*\):.*##\(.*\)/  make \1\t\2/p' Makefile | expand -t 18

demo: $(INSTALLED)  ## plan, fine-tune, stop, resume, export and ask a small model, on this machine
	$(BIN)/python demo/run.py

test: check  ## everything in `check`, then every test
	$(PYTEST)

proof: $(INSTALLED)  ## every case of the proofs, of which `make test` runs a set that touches each axis and family
	$(PYTEST) --whole tests/proof tests/run/test_compiled.py tests/run/test_loop.py tests/run/test_other_ranks.py

check: $(INSTALLED)  ## format, lint, types, import contracts, documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check
	$(BIN)/mkdocs build --strict --quiet

docs: $(INSTALLED)  ## write the generated parts of the documentation again, then build it into site/
	$(BIN)/python docs/generate.py
	$(BIN)/mkdocs build --strict

format: $(INSTALLED)  ## format, and repair what lint can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove .venv and everything built; runs/ stays
	rm -rf .venv site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by itself: no later resolver pass then has a reason to pick another build of it.
$(INSTALLED): pyproject.toml constraints-dev.txt
	@test -n "$(PYTHON)" || { echo "error: no python3.11 or python3 on PATH" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[train,remote,dev]'
	@touch $@

# Not two copies of the same work when a command line names several targets with -j.
.NOTPARALLEL:
