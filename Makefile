# The environment, uv and its cache are in .venv; runs go to runs/. What can be computed again (the
# synthetic benchmark, features) goes to the user's cache folder, or to FEDLENS_CACHE.
PYTHON ?= python3
UV := uv==0.12.24
BIN := .venv/bin
export UV_CACHE_DIR ?= $(CURDIR)/.venv/.uv-cache
READY := .venv/.ready
# What .venv takes on Linux, where torch comes with CUDA; elsewhere it is a third of that.
DISK_GB := 8
# Processes that share the tests, with one thread each; a gigabyte or two of memory for each. One more
# than two cores: it has the tests that wait (tests/conftest.py).
JOBS ?= 3

# Bytecode is written even if the user tells Python not to: tests start some hundred processes, and
# each would compile again what it imports.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=40

.PHONY: help quickstart setup test test-fast lint docs check format lock clean

help: ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

quickstart: $(READY) ## Set up, run a small version of the study on the synthetic benchmark, and make its report (offline, minutes).
	$(BIN)/fedlens suite quick --jobs 2
	$(BIN)/fedlens report runs --out report
	@echo
	@echo "Next:  $(BIN)/fedlens suite                   all suites, what each costs and answers"
	@echo "       $(BIN)/fedlens config                  all experiments, their cost and what to expect"
	@echo "       $(BIN)/fedlens suite quick --seeds 4   another seed: only new runs are started"
	@echo "       make test                            the whole test suite"
	@echo
	@echo "The report: $(CURDIR)/report/index.html"

setup: $(READY) ## Make the environment in .venv from requirements.lock.

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("fedlens needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.x ..." if sys.version_info < (3, 11) else 0)'
	@test -e .venv || $(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage(".").free / 1e9; sys.exit(f"The environment needs $(DISK_GB) GB, and the disk of this folder has {free:.1f} GB left: free some space, then run make again." if sys.platform == "linux" and free < $(DISK_GB) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --no-cache-dir --disable-pip-version-check "$(UV)"
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@# Compile once here, even if the user tells Python not to: otherwise every process compiles torch's and Flower's Python again.
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import fedlens.notebook, fedlens.experiments.run, fedlens.reporting.report'
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import fedlens.experiments.flower.apps, flwr.simulation, flwr.supercore.cli, flwr.superlink.cli, flwr.supernode.cli, ray'
	@touch $@

test: $(READY) ## Set up, then run the whole test suite.
	$(PYTEST)

test-fast: $(READY) ## Run the tests that take a moment each: no whole runs, no other processes (two minutes).
	$(PYTEST) -m "not slow" --hypothesis-profile=few

lint: $(READY) ## Check style, spelling, types (mypy --strict) and the layers of the architecture.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports

docs: $(READY) ## Build the documentation into site/; warnings are errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: lint test docs ## Everything CI asks for; in tests, warnings are errors.

format: $(READY) ## Format the code and sort imports.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(READY) ## Pin the newest versions that fit pyproject.toml.
	$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --universal --upgrade \
		--python-version 3.11 --no-header --no-annotate --quiet -o requirements.lock

clean: ## Remove the environment and caches, not the runs.
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis site
