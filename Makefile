# Everything runs in .venv, which the first target that needs it creates. Needs Python >= 3.11, a C compiler, and a package index.

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast fuzz asan bench sweep lint types docs wheel picture clean distclean

PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
STAMP := .venv/.installed
# Modules are compiled as they are imported: all of them at once would take as long as the rest of the set-up.
PIP_FLAGS := --quiet --no-compile --disable-pip-version-check -c .constraints.txt
JOBS ?= 2
PYTEST_ARGS ?=
# One thread a worker: torch would start as many as there are cores in each of the JOBS workers.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# Benches that need no argument; `make bench INSTANCES=dir` also runs the planners on the graphs in that folder.
BENCHES ?= accuracy versus_torch
INSTANCES ?=
RESULTS := bench/results

help:
	@echo "make venv       create .venv and install fxmem with its development tools"
	@echo "make demo       train a real model under several budgets"
	@echo "make test       every test    (PYTEST_ARGS='-k offload' to choose)"
	@echo "make test-fast  without those marked slow"
	@echo "make fuzz       random models, graphs, programs and plans, 10,000 of each or for FUZZ_SECONDS each"
	@echo "make asan       planner tests over a kernel built with address and undefined-behaviour sanitizers"
	@echo "make bench      benches into $(RESULTS)/"
	@echo "make sweep      torch's operators and modules, and architectures, under budgets (SAMPLE=50: some of them)"
	@echo "make lint types ruff, import-linter; mypy --strict"
	@echo "make docs       the documentation as a site in build/site; warnings are errors"
	@echo "make wheel      a wheel that needs no compiler, into dist/"
	@echo "make picture    the picture of a report in the README; needs Chromium"
	@echo "make clean      build products and caches (distclean: .venv too)"

venv: $(STAMP)

# torch comes from the pin: without one, pip would take the newest build with several gigabytes of CUDA libraries.
$(STAMP): pyproject.toml .constraints.txt $(wildcard fxmem/planners/kernel/*.[ch])
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; set PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/fxmem demo

test: $(STAMP)
	$(PYTEST) $(PYTEST_ARGS)

test-fast: $(STAMP)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

# Of each strategy FUZZ_EXAMPLES, or as many as fit into FUZZ_SECONDS; says how many there were.
FUZZ_EXAMPLES ?= 10000
FUZZ_SECONDS ?= 1800
fuzz: $(STAMP)
	FXMEM_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) FXMEM_FUZZ_SECONDS=$(FUZZ_SECONDS) \
		$(PYTEST) -rP --show-capture=stdout tests/testing/test_strategies.py $(PYTEST_ARGS)

# Python isn't built with the sanitizers, so their runtimes are loaded first; its own leaks at exit aren't looked for.
ASAN := build/asan/_kernel.so
asan: $(STAMP)
	@mkdir -p $(dir $(ASAN))
	$(CC) -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined -std=c99 -shared \
		-fPIC -o $(ASAN) fxmem/planners/kernel/_*.c -lm
	OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 FXMEM_KERNEL=$(ASAN) \
		LD_PRELOAD="$(foreach l,asan ubsan stdc++,$(shell $(CC) -print-file-name=lib$(l).so))" \
		$(BIN)/python -m pytest -s tests/planners -m "not slow" $(PYTEST_ARGS)

# Benches run one after the other, whatever -j says: they measure time. A failed one leaves no result behind.
bench: $(STAMP)
	@mkdir -p $(RESULTS)
	@run() { name=$$1; shift; echo "bench.$$name"; \
		$(BIN)/python -m bench.$$name "$$@" --json > $(RESULTS)/$$name.json.part \
		&& mv $(RESULTS)/$$name.json.part $(RESULTS)/$$name.json || { rm -f $(RESULTS)/$$name.json.part; exit 1; }; }; \
	for name in $(BENCHES); do run $$name; done; \
	if [ -n "$(INSTANCES)" ]; then run planners "$(INSTANCES)"; fi

# Goes on where it was ended: what $(SWEEP) holds is not run again. Fails in the end if a row is a fault.
SAMPLE ?=
SWEEP := build/sweep
sweep: $(STAMP)
	@mkdir -p $(SWEEP)
	@status=0; for kind in modules ops models; do \
		OMP_NUM_THREADS=1 $(BIN)/python -m bench.sweep $$kind --jobs $(JOBS) $(addprefix --sample ,$(SAMPLE)) \
			--resume $(SWEEP)/$$kind.jsonl || status=1; \
	done; exit $$status

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[docs]'
	$(BIN)/mkdocs build --strict --site-dir build/site

# A wheel for this platform and every Python that needs no compiler; `cibuildwheel` makes those of other platforms.
wheel: $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[wheels]'
	$(BIN)/python -m build --wheel --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --strip -w dist build/wheel/*.whl

# Needs Chromium or Chrome.
picture: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.picture

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis bench/scratch
	find fxmem passes tests bench \( -name __pycache__ -o -name '*.so' \) -prune -exec rm -rf {} +
	rm -f $(STAMP)

distclean: clean
	rm -rf .venv
