# Two commands do everything on a machine with Python 3.11+, make and pip:
#   make demo    train three models on the copy task and show what came out (1 to 2 minutes on 2 cores)
#   make test    lint, types, tests
#   make docs    build the documentation site in build/site; warnings are errors. The live page is part of it where npm
#                is there, or RUNTIME=a copy of onnxruntime-web; a line says so where it is not
# On a machine with an NVIDIA GPU, `make test-gpu` runs the tests that need one.
# `make test-slow` runs what takes minutes: compiled exports, and the live page in a browser. It needs npm and Chromium
# (Debian: apt-get install chromium npm; or .venv/bin/playwright install chromium) and skips the page without them.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-gpu test-slow docs lint clean

demo: $(INSTALLED)
	@$(BIN)/retreever demo --out runs/demo --overwrite

test: $(INSTALLED) lint
	@$(BIN)/python -m pytest -n auto --dist worksteal

test-gpu: $(INSTALLED)  # the tests marked gpu, on a machine that has one
	@$(BIN)/python -m pytest -m gpu -n 4

test-slow: $(INSTALLED)
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check playwright
	@$(BIN)/python -m pytest -m slow -rs

docs: $(INSTALLED)
	@$(BIN)/python docs/live.py build/live $(if $(RUNTIME),"$(RUNTIME)")
	@$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs . build/site
	@echo "written: build/site/index.html"

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	@echo "setting up .venv (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "retreever needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@$(PYTHON) -m venv .venv
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,plot]"
	@touch $@

clean:
	rm -rf .venv runs build docs/api/names .pytest_cache .mypy_cache .ruff_cache
