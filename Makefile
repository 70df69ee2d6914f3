# Every target sets up what it needs: a virtual environment in .venv, pinned by constraints.txt.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed
DOCS := .venv/.installed-docs
# Each test process gets one thread.
export OMP_NUM_THREADS ?= 1
# In few large pages the memory of a test process, which is forked for each worker, is copied within a moment.
export PYTHONMALLOC ?= malloc
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
# pytest keeps the test files as it has rewritten them, whatever is set here; each process needs all of them.
unexport PYTHONDONTWRITEBYTECODE

# What depends most on the versions of Lightning, Hugging Face's datasets and NumPy, in a virtual environment of its own.
OLDEST := .venv-oldest/.installed
OLDEST_TESTS := tests/test_dependencies.py tests/test_state.py tests/streams tests/stream_nodes tests/core tests/mixture \
	tests/loaders/test_combined_loaders.py tests/loaders/test_source_datasets.py tests/loaders/test_length_cache.py \
	tests/trainer/resume tests/trainer/loaders/test_structures.py tests/trainer/loaders/test_samplers.py \
	tests/trainer/test_internals.py tests/trainer/test_streams.py tests/trainer/test_ddp.py

.PHONY: install demo test test-slow test-all test-oldest test-wheel check bench bench-fast docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@# torch first and by its exact version: a range would admit a newer build.
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/kill_and_resume.py

# More processes than cores: tests with ranks wait for one another most of the time.
test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile

# What make test leaves out for its time.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m slow

# All examples of all properties too, and what make test leaves out for its time.
test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow or not slow" --hypothesis-profile=thorough

$(OLDEST): pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet "$$(grep '^torch==' constraints-oldest.txt)"
	.venv-oldest/bin/python -m pip install --quiet -c constraints-oldest.txt -e ".[dev]"
	@touch $(OLDEST)

test-oldest: $(OLDEST)
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile $(OLDEST_TESTS)

# The built wheel, in a virtual environment of its own and with the sources out of sight.
WHEEL_TESTS := test_package.py core cli data_modules/test_module_moments.py trainer/test_ddp.py streams/test_chunk_streams.py

test-wheel: $(STAMP)
	rm -rf dist build/wheel .venv-wheel
	$(BIN)/python -m hatchling build
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	.venv-wheel/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[dev]"
	mkdir -p build/wheel
	cp -r tests examples benchmarks pyproject.toml README.md build/wheel
	cd build/wheel && ../../.venv-wheel/bin/python -m pytest -n 2 --dist loadfile $(addprefix tests/,$(WHEEL_TESTS))

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

# The packages that are measured beside this one, in a virtual environment of its own that has all of .venv too.
PEERS := .venv-peers/.installed
PEERS_PYTHON := .venv-peers/bin/python
SITE := import site; print(site.getsitepackages()[0])

$(PEERS): $(STAMP) benchmarks/peers.txt
	$(PYTHON) -m venv .venv-peers
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > "$$($(PEERS_PYTHON) -c '$(SITE)')/venv.pth"
	@# One by one: what cannot be installed is left out of the tables.
	grep -v '^#' benchmarks/peers.txt | while read -r peer; do \
		$(PEERS_PYTHON) -m pip install --quiet --no-deps "$$peer" || echo "$$peer is left out"; \
	done
	@touch $(PEERS)

# Within an hour.
bench: $(PEERS)
	$(PEERS_PYTHON) -m benchmarks
	$(PEERS_PYTHON) docs/pictures/peers.py

# Within five minutes: this package beside others, up to 1e6 samples; tables and pictures into build/bench-fast.
bench-fast: $(PEERS)
	$(PEERS_PYTHON) -m benchmarks.peers --fast
	$(PEERS_PYTHON) docs/pictures/peers.py build/bench-fast build/bench-fast/peers.json
	@echo "Look at build/bench-fast/*.svg"

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,docs]"
	@touch $(DOCS)

# A warning, such as of a link that leads nowhere, is an error; of pages that are not read again there would be none.
docs: $(DOCS)
	$(BIN)/python -m sphinx -b html -E -W --keep-going -q -d build/doctrees docs site
	@echo "Open site/index.html"

clean:
	rm -rf .venv .venv-oldest .venv-wheel .venv-peers build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
