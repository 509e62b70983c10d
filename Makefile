# Every target makes the environment it needs; a second run reuses it.
PYTHON ?= python3
PAIRS  ?= 100000
JOBS   ?= 2
ARGS   ?=

BIN   := .venv/bin
PY    := $(BIN)/python
READY := .venv/.ready
DOCS  := .venv/.ready-docs

.DEFAULT_GOAL := help
.PHONY: help setup docs-setup demo test soak campaign mutations versions check docs docs-check screenshots fuzz bench clean distclean

help: ## show this list
	@echo "make <target>   [PYTHON=$(PYTHON)] [ARGS=...]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

setup: $(READY) ## make .venv with reshard, torch (CPU tests) and the tools

# torch is pinned in the same command: an unpinned one would pull another build and gigabytes with it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"reshard needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}; try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	@touch $@

demo: $(READY) ## plan, prove, simulate and run a move of a real model; convert a checkpoint
	$(PY) -m reshard demo

# Tests start hundreds of processes, which would compile everything where Python may not write. A job
# for each core, each with one thread, and one for the tests that mostly wait (tests/conftest.py): on
# two cores 391 s instead of 446 s with two jobs. A soak promises times, and has none of these.
test: JOBS = 3
test: export OMP_NUM_THREADS = 1
test: export PYTHONDONTWRITEBYTECODE =
test: $(READY) ## run the tests (JOBS=3 at a time; ARGS="-k box")
	$(PY) -m compileall -q src tests
	$(PY) -m pytest -n $(JOBS) $(ARGS)

soak: $(READY) ## run all tests with all their cases; takes about 40 minutes on two cores
	RESHARD_SOAK=1 $(PY) -m pytest -n $(JOBS) $(ARGS)

campaign: $(READY) ## random kills, stops, late ranks, interrupts and options; half an hour on 16 cores
	$(PY) -m tests.campaign --kills 500 --stops 200 --late 200 --interrupts 1000 --options 20000 --jobs $(JOBS) $(ARGS)

mutations: $(READY) ## plant mistakes in a copy of the source, one at a time; the tests must notice (ARGS="live")
	$(PY) -m tests.mutations $(ARGS)

versions: $(READY) ## the tests on other versions of Python and torch, as far as they are there
	$(PY) -m tests.versions $(ARGS)

check: $(READY) ## style, types and layers
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pyright
	$(BIN)/lint-imports --no-logo

docs-setup: $(DOCS) ## add what builds the site to .venv

docs: $(DOCS) ## build the site into docs/_build; warnings and broken links are errors
	$(PY) -m sphinx -W --keep-going -q docs docs/_build/html
	$(PY) docs/links.py docs/_build/html
	@echo "see docs/_build/html/index.html"

# Beside the tools of the tests: sphinx and its themes are only for the site.
$(DOCS): $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,docs]'
	@touch $@

docs-check: $(READY) ## run every snippet of README.md and docs/
	$(PY) -m pytest tests/docs $(ARGS)

screenshots: docs ## make the pictures of the page and the site in docs/pictures (needs chromium)
	$(PY) -m tests.show.screenshots docs/pictures

fuzz: $(READY) ## compare PAIRS=100000 random pairs of layouts with the definition
	$(PY) -m tests.fuzz --pairs $(PAIRS) $(ARGS)

bench: $(READY) ## run the benchmarks
	$(PY) -m reshard bench $(ARGS)

clean: ## remove caches and build outputs
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf .venv
