# Everything works in a fresh clone. What is made stays in .venv and .sparkd of this folder.
PYTHON   ?= python3
PORT     ?= 4000
N        ?= 10
LOAD     ?= 0
MODEL    ?=
ENGINE   ?= auto
QUESTION ?= What is the capital of France?

STATE    := $(CURDIR)/.sparkd
EMBEDDED := $(STATE)/models/SmolLM2-135M-Instruct
BIN      := $(CURDIR)/.venv/bin
DEMO     := smollm2-135m-instruct
# The first word of so small a model's answer is nearly a toss-up, and a CPU's matrix unit rounds it to the wrong side in bfloat16.
PRECISE  := $(if $(wildcard /dev/nvidia0),,-o models.$(DEMO).dtype=float32)

.PHONY: help serve test test-all test-repeat lint bench wheels lock clean dev python promtool chromium page programs
.SILENT:

help:
	echo "make serve                install, load a model, ask it one question, serve it on 127.0.0.1:4000 (Ctrl-C ends it)"
	echo "     MODEL=X              a folder or a hub id instead of the embedded SmolLM2-135M-Instruct"
	echo "     PORT=N PYTHON=X      another port, another Python 3.11 to 3.13"
	echo "     ENGINE=X             auto, cpu, cuda or a requirement such as vllm==0.33.0"
	echo "make test                 install what the tests need, check style and types, run the tests"
	echo "make test-all             the same, and every test that takes long: formats, two nodes, chaos, benches at their smallest"
	echo "make test-repeat          make test again and again in new orders, and a table of what failed"
	echo "     N=10 LOAD=4          so many times, beside so many busy processes"
	echo "make dev                  install what the tests need; then .venv/bin/pytest FILE runs one file"
	echo "make lint                 ruff, import-linter, mypy"
	echo "make promtool             fetch Prometheus's checker into .venv/bin, for deploy/observability/"
	echo "make bench                what the gateway costs, beside nginx"
	echo "make wheels               show that every dependency has wheels for aarch64 and x86_64, Python 3.11 to 3.13"
	echo "make lock                 a new .venv with the newest versions; writes them to deploy/constraints*.txt, which the others follow"
	echo "make clean                remove .venv, .sparkd and caches"

serve: python
	mkdir -p -m 700 "$(STATE)"
	"$(PYTHON)" deploy/setup.py --engine "$(ENGINE)" --port "$(PORT)" $(if $(MODEL),,--model "$(EMBEDDED)")
	exec "$(BIN)/sparkd" serve --state-dir "$(STATE)" --port "$(PORT)" --ask "$(QUESTION)" \
		$(if $(MODEL),--model "$(MODEL)",--model "$(EMBEDDED)" --name $(DEMO) $(PRECISE))

# tests/conftest.py says how many workers. What does not fit in one session is marked `rest`.
PYTEST := "$(BIN)/python" -m pytest -n auto --dist loadfile --no-loadscope-reorder
# Every process that a test starts would compile sparkd anew where an environment forbids to keep bytecode.
test test-all test-repeat: export PYTHONDONTWRITEBYTECODE :=
# pip would compile 25,000 files, and the tests import few of them.
test test-all test-repeat: export PIP_COMPILE := 0

test: dev promtool chromium page
	$(PYTEST) -m "not rest"

test-all: dev promtool chromium page programs
	$(PYTEST) --hypothesis-profile=search

test-repeat: dev promtool chromium page
	"$(BIN)/python" -m tests.repeat --times $(N) --load $(LOAD) -- $(PYTEST) -m "not rest"

lint: dev
	"$(BIN)/ruff" check --quiet
	"$(BIN)/lint-imports" --no-logo
	"$(BIN)/mypy"

promtool: dev
	deploy/promtool.sh "$(BIN)/promtool"

chromium:
	deploy/chromium.sh

# What checks the page's types. A machine without npm tests everything else.
page:
	if command -v npm >/dev/null; then npm ci --prefix tests/web --silent --no-audit --no-fund; else echo "The page's types are not checked: npm is not here" >&2; fi

# What people point at an endpoint: Codex, Claude Code, the AI SDK.
programs:
	if command -v npm >/dev/null; then npm ci --prefix tests/sparkd/gateway/programs --silent --no-audit --no-fund; else echo "Programs of npm are not tried: npm is not here" >&2; fi

bench: dev
	"$(BIN)/python" -m tests.bench.gateway

wheels: dev
	"$(BIN)/python" deploy/wheels.py

lock: python
	mkdir -p -m 700 "$(STATE)"
	"$(PYTHON)" deploy/setup.py --dev --newest --engine cpu
	"$(BIN)/python" deploy/lock.py

clean:
	rm -rf .venv .sparkd build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

dev: python
	mkdir -p -m 700 "$(STATE)"
	"$(PYTHON)" deploy/setup.py --dev --engine "$(ENGINE)" --model "$(EMBEDDED)"

python:
	command -v "$(PYTHON)" >/dev/null || { echo "$(PYTHON) is not here; install Python 3.11, 3.12 or 3.13, or name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
