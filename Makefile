# make demo   install, run real generation on the demo model, write a page and a recording
# make lab    open the tutorials in JupyterLab
# make test   install what the tests need, and run all of them
#
# Also: make lint, js, bundles, format, bench, fuzz, soak, docs, images, gallery, hooks. Everything
# is installed into .venv, with the versions of constraints.txt, and again only when they change.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DEFAULT_GOAL := help

# The first of these that is new enough makes .venv.
PYTHON ?= python3 python3.13 python3.12 python3.11

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
REQUIREMENTS := pyproject.toml constraints.txt
CORE := $(VENV)/.core
LAB := $(VENV)/.lab
DEV := $(VENV)/.dev
TRITON36 := .venv-triton36
NODE_MODULES := widgets/node_modules/.installed

.PHONY: help demo lab test lint js bundles format bench fuzz soak images hooks chromium triton36
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(CORE)
	@$(BIN)/python -m lmscope.cli demo

lab: $(LAB)
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) tutorials

test: lint js chromium triton36
	@$(BIN)/python -m pytest

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Interleaved rounds against transformers, and vLLM and llama.cpp where VLLM_PYTHON and LLAMA_PYTHON
# name interpreters that have them; takes half an hour and wants a quiet machine. BENCH adds options.
bench: $(CORE)
	@mkdir -p build
	$(BIN)/python kernels/benchmarks/peers.py --out build/bench.json $(BENCH)

# The tests that draw their own inputs, with new and many more of them than in `make test`.
fuzz: $(DEV)
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=fuzz

# 6,000 requests with two views open: the memory at the end is that after 1,000.
soak: $(CORE)
	$(BIN)/python widgets/benchmarks/soak.py

# The README's pictures, from a real run.
images: $(DEV) chromium
	$(BIN)/python docs/images/make_images.py

# Every view in every state, light and dark, to look at: make gallery RUN=x.lmscope FOLDER=y
gallery: $(DEV) chromium
	$(BIN)/python docs/images/gallery.py "$(RUN)" "$(FOLDER)"

# The tutorials with their outputs, as HTML, in docs/_build.
docs: $(DEV)
	$(BIN)/python docs/build_tutorials.py

# The checks of .pre-commit-config.yaml before each commit.
hooks: $(DEV)
	$(BIN)/pre-commit install

# --- the front end -------------------------------------------------------------------------

# An install needs no node, because the bundles are committed; only working on them does.
ifneq ($(shell command -v npm),)
js: $(NODE_MODULES)
	cd widgets && npm run --silent check
	cd widgets && npm run --silent test
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && cd widgets \
	    && OUTDIR="$$fresh" npm run --silent build \
	    && diff -r "$$fresh" lmscope_widgets/static >&2 \
	    || { echo "the bundles differ from widgets/src: run make bundles, commit them" >&2; exit 1; }

bundles: $(NODE_MODULES)
	cd widgets && npm run --silent build
else ifneq ($(filter true,$(CI))$(findstring node,$(LMSCOPE_REQUIRE)),)
js bundles:
	@echo "npm is missing, and the JavaScript checks must run here: install Node 20 or newer" >&2
	@exit 1
else
js bundles:
	@echo "npm is missing: the JavaScript checks are skipped"
endif

$(NODE_MODULES): widgets/package.json widgets/package-lock.json
	cd widgets && npm ci --no-audit --no-fund
	@touch $@

# --- installation --------------------------------------------------------------------------

$(BIN)/python:
	@for python in $(PYTHON); do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        $$python -m venv --clear $(VENV) && exit 0; \
	        rm -rf $(VENV); \
	        echo "$$python cannot make a virtual environment; on Debian and Ubuntu," \
	            "apt-get install python3-venv" >&2; \
	        exit 1; \
	    fi; \
	done; \
	echo "lmscope needs Python 3.11 or newer, and none of these is: $(PYTHON)." \
	    "Install one, or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; \
	exit 1

$(CORE): $(REQUIREMENTS) | $(BIN)/python
	$(PIP_INSTALL) -e .
	@touch $@

$(LAB): $(REQUIREMENTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[lab]'
	@touch $(CORE) $@

$(DEV): $(REQUIREMENTS) | $(BIN)/python
	$(PIP_INSTALL) -e '.[lab,dev]'
	@touch $(CORE) $(LAB) $@

# Kernels are compiled with the oldest Triton that is served, too. All else comes from .venv, which
# its interpreter reads after its own packages.
triton36: $(if $(filter Linux,$(shell uname -s)),$(TRITON36)/.installed)

$(TRITON36)/.installed: $(DEV)
	$(BIN)/python -m venv --clear $(TRITON36)
	$(TRITON36)/bin/python -m pip install --disable-pip-version-check --no-deps triton==3.6.0
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" \
	    % sysconfig.get_path("purelib"))' >$$(echo $(TRITON36)/lib/python3*/site-packages)/main.pth
	@touch $@

# Without Chromium the browser tests are skipped, or fail where LMSCOPE_REQUIRE names them.
chromium:
	@if command -v chromium chromium-browser google-chrome >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    export DEBIAN_FRONTEND=noninteractive; \
	    apt-get update -qq && apt-get install -y -qq chromium; \
	else \
	    echo "Chromium is missing: install it for the browser tests"; \
	fi
