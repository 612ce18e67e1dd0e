# Every target sets up what it needs: a virtual environment in .venv, installed again only when what it installs changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)

# torch would otherwise count the cores of the machine rather than those that this process may use.
export OMP_NUM_THREADS ?= $(CORES)

.DEFAULT_GOAL := help
.PHONY: help demo test check bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## Build experts for the bundled tiny model into demo-out, with a report
	$(BIN)/freemoe demo -o demo-out

test: $(STAMP) ## Run every test
	$(BIN)/python -m pytest

check: $(STAMP) ## Format, lint, types and tests, as a change must pass them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest

bench: $(STAMP) ## Run every benchmark: one line per figure, its target beside it
	$(BIN)/freemoe bench all $(if $(wildcard ../shared/data),--data-root ../shared/data)

clean: ## Remove the environment, caches and the demo's output
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist demo-out demo-out.partial bench-out
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null \
		|| { echo "freemoe needs Python 3.11 or newer, and there is no $(PYTHON). Name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "freemoe needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Name another: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "$(PYTHON) cannot make virtual environments; install its venv module (Debian: apt install python3-venv)." >&2; exit 1; }
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@
