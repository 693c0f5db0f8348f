# make demo: install the package into .venv, then train, predict and evaluate on the built-in phantom data.
# make test: lint and the default tests, as CI runs them; about six minutes on two cores.
# make nightly: lint and every test, including slow and rare ones; about 20 minutes.
# make docs: build the site in site/; open site/index.html in a browser.
# make pictures: draw the pictures of the product in docs/ anew; needs Chromium and a few minutes.
# PYTHON=python3.12 chooses the interpreter for .venv (3.11.1 or newer).

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal

.PHONY: demo test nightly lint docs pictures clean

demo: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/demo.sh

test: lint
	$(PYTEST)

nightly: lint
	UNET3D_EXAMPLES=150 $(PYTEST) -m ""

lint: .venv/tools
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: .venv/tools
	$(BIN)/python docs/draw_tour.py
	$(BIN)/python docs/draw_microscopy.py

# The stamp is written last, so an interrupted installation starts again.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("unet3d needs Python 3.11.1 or newer; set PYTHON=" if sys.version_info < (3, 11, 1) else 0)'
	@echo "Installing into .venv: downloads 0.3 GB with a CPU build of PyTorch, 3 GB with CUDA's libraries."
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	@touch $@

.venv/tools: .venv/installed
	@echo "Installing the tools of development: downloads 0.2 GB."
	$(PIP) -e '.[dev,docs,microscopy,remote]'
	@touch $@

clean:
	rm -rf .venv demo build dist site
