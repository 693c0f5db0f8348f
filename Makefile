# make demo: install into .venv, then train, predict and evaluate on the built-in phantom data.
# make test: install into .venv, then everything that CI checks.
# make check: the same without slow tests and without trainings: what to run while working.
# make faults: kills, full disks and damaged files, many of each (FAULTS=50 kills); about a quarter of an hour.
# make docs: build the site in site/; look at it with python -m http.server --directory site.
# PYTHON=python3.12 picks the interpreter that .venv is made of (3.11 or newer).

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check faults lint docs clean

demo: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/demo.sh

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal

check: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal -m "not slow and not trains"

FAULTS ?= 50

faults: .venv/installed
	UNET3D_FAULTS=$(FAULTS) OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist worksteal -m slow tests/faults

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The stamp is the last thing written, so that an interrupted installation is begun again.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("unet3d needs Python 3.11.1 or newer; set PYTHON=" if sys.version_info < (3, 11, 1) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

clean:
	rm -rf .venv demo build dist site
