# Each target does its own set-up: `make calibrate` and `make test` are the first commands on a fresh machine.
#
#   make calibrate ARGS="..."       python -m calib, with Hydra overrides
#   make test TESTARGS="-k pages"   the tests, all or some
#   make lint | wheel | docs | clean
#
# PYTHON makes the virtual environment (3.11 or newer, with venv). TORCH is what pip installs first, from the index that
# pip is configured with; it may carry options, so a machine with a GPU can choose its build (`make clean` before changing it):
#       make test TORCH="torch==2.13.0 --index-url <index of the CUDA 13.0 builds>"
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
TESTARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1

PY := .venv/bin/python
STAMP := .venv/.installed

.PHONY: help calibrate test lint wheel docs clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   make/make/p' Makefile

$(STAMP): pyproject.toml hatch_build.py
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Signpost needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": say make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install $(TORCH)
	$(PY) -m pip install -e '.[dev]'
	@touch $@

calibrate: $(STAMP)
	$(PY) -m calib $(ARGS)

# A process a core, each of one thread: with two threads beside other load, small matrix products take fifty times as
# long. Each process starts with one stretch of the tests and keeps to it: tests of a file share what their fixtures make.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist worksteal $(TESTARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The wheel is built from the sdist, so that both are proven complete.
wheel: $(STAMP)
	rm -rf dist
	$(PY) -m build --no-isolation --outdir dist .

# The site of docs/, in dist/site.
docs: $(STAMP)
	$(PY) -m mkdocs build -f .ci/mkdocs.yml

clean:
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
