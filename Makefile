# On a fresh clone, `make train` and `make test` need python3 >= 3.10 with venv and pip, and nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/peers
METRICS := $(VENV)/metrics
OLDEST ?= .venv-oldest

# Tests run in so many processes: those that use a Ray cluster in one of them, one after another (see tests/conftest.py).
TEST_PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
# What Ray's processes say while no test captures it, errors that tests have made on purpose above all, is shown where one fails.
define tested
@mkdir -p build
$(PYTEST) $(1) $(ARGS) 2>build/test.log || { cat build/test.log; exit 1; }
endef

.PHONY: train test test-slow test-all faults check docs oldest bench clean

train: $(STAMP)
	$(BIN)/python examples/ray_train/digits.py $(ARGS)

# Every guarantee, in some ten minutes on two cores.
test: $(STAMP) $(METRICS)/.installed
	$(call tested,-m "not slow")

# The rest: whole programs, worker groups that are resized, rounds of kills.
test-slow: $(STAMP) $(METRICS)/.installed
	$(call tested,-m slow)

test-all: test test-slow

# What kills processes, fails requests or damages tables on purpose. `make test-all` runs each of these once, too, but of the
# 50 kill rounds a tenth. KILL_SEED=n is another schedule of them. Streams that are driven at random are driven for longer
# here, in FUZZ_RUNS runs that are others each time.
FUZZ_RUNS ?= 500
faults: $(STAMP)
	KILL_ROUNDS=all FUZZ_RUNS=$(FUZZ_RUNS) $(BIN)/python -m pytest -m faults $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Into build/site; takes no warnings. Not with --quiet, which lets them pass.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel, in an environment of its own with the oldest versions that pyproject.toml allows. Byte code is made as needed.
oldest:
	rm -rf $(OLDEST) build/lib
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w $(OLDEST)/dist .
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints-oldest.txt $(OLDEST)/dist/*.whl
	cd $(OLDEST) && env -u PYTHONPATH bin/python -I $(CURDIR)/tests/oldest/check.py

bench: $(STAMP) $(PEERS)/.installed
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.10 is needed, this is " + sys.version if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint,examples,docs]'
	@# Transformers has thousands of modules, of which few are imported: their byte code is made as needed.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[integrations]'
	@touch $@

# Beside the environment, not in it: only the test of exported metrics sees these packages.
$(METRICS)/.installed: $(STAMP) tests/requirements-metrics.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --upgrade --target $(METRICS) \
		-r tests/requirements-metrics.txt
	@touch $@

# Beside the environment, not in it: only the processes of the benchmarked peers see these packages.
$(PEERS)/.installed: $(STAMP) benchmarks/requirements-peers.txt
	@mkdir -p $(PEERS)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(PEERS) \
		-r benchmarks/requirements-peers.txt
	@touch $@
