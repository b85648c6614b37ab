PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
ARGS ?=
CORE_SECONDS ?= 0
SEED ?= $(shell git rev-parse --short HEAD)
RESULTS ?= docs/benchmarks

.PHONY: help train train-parallel test test-rest test-all interpreters newest newest-part gpu aot traffic check mutants mutants-drawn docs release-check clean

help:
	@echo "make train   set up, then train the language model (ARGS=... for its flags)"
	@echo "make train-parallel   the same on four processes, by torchrun (MESH='--dp 4' for another mesh, ARGS=... for other flags)"
	@echo "make test    set up, then run the first tier: a test of every op, law, adapter and example (ARGS=... for pytest's)"
	@echo "make test-all   both tiers: all tests that need no GPU; make test-rest: those marked slow alone (CORE_SECONDS=600: as many as take so long, drawn by SEED)"
	@echo "make interpreters   import everything and run tests/test_tiny.py on each Python, 3.10 to 3.13, that the machine has"
	@echo "make newest  both tiers with the newest torch and Triton that pip finds, in $(NEWEST), 6 GB (VERSION=2.11.0 for that torch)"
	@echo "make newest-part   one test in ten of the first tier, drawn by SEED, with the packages of $(VENV) beside that torch and Triton"
	@echo "make gpu     checks, benchmarks and tests that need a GPU, in PYTHON's own environment, within twelve minutes; results below OUT ($(OUT)); CALLS=first or second for a part"
	@echo "make aot     set up, then compile the Triton kernels whose source changed, and write docs/benchmarks/aot.csv"
	@echo "make traffic set up, then count the bytes that changed kernels move, and write docs/benchmarks/traffic.csv"
	@echo "make check   set up, then lint and type-check, the code blocks of the pages too"
	@echo "make mutants plant known faults one at a time in a copy, and say which the tests notice (ARGS=... for its flags)"
	@echo "make mutants-drawn  draw faults over the package by a seed, and say which of them the first tier notices"
	@echo "make docs    build the site, of docs/, the docstrings and the notebooks, into site/: strict, any warning fails"
	@echo "make release-check   build the wheel and the source archive, and try them with each Python that the machine has (ARGS=--here for one)"
	@echo "make clean   remove the environments; all that these install is in $(VENV), $(NEWEST), $(NEWEST)-part and .interpreters, and each says how much before"

PIP = $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "installing torch, Triton and the examples' packages into $(VENV): 1.8 GB with torch's CPU build, 5.5 GB where pip takes that for CUDA"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[examples]'
	@touch $@

$(VENV)/.test: $(VENV)/.ready
	@echo "installing pytest, hypothesis, transformers, accelerate, peft and lightning into $(VENV): 0.4 GB"
	$(PIP) -e '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	@echo "installing ruff and mypy into $(VENV): 0.1 GB"
	$(PIP) -e '.[dev]'
	@touch $@

train: $(VENV)/.ready
	$(PY) examples/train_lm.py --dtype auto --optimizer muon $(ARGS)  # of two flags of a name the last one counts

MESH ?= --dp 2 --tp 2

train-parallel: $(VENV)/.ready  # heads that two ranks can share out; a thread a process, as four of them share the machine
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 4 \
		examples/train_lm.py --heads 4 --kv-heads 4 $(MESH) $(ARGS)

unexport PYTHONDONTWRITEBYTECODE  # some hundred processes would each compile the library's sources again

PYTEST_OF = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -q -n 2 --dist worksteal
PYTEST = $(call PYTEST_OF,$(VENV))

test: $(VENV)/.test  # tests/opinfo, all of the second tier, takes seconds to import
	$(PYTEST) --ignore tests/opinfo -m "not gpu and not slow" $(ARGS)

test-rest: $(VENV)/.test
	$(PYTEST) -m "not gpu and slow" -p drawn_part --seconds $(CORE_SECONDS) --seed "$(SEED)" $(ARGS)

test-all: $(VENV)/.test
	$(PYTEST) -m "not gpu" $(ARGS)

interpreters: $(VENV)/.test
	$(PY) tests/interpreters.py $(ARGS)

NEWEST ?= .newest
VERSION ?=

newest: $(VENV)/.ready  # whose pip installs
	$(PY) tests/newest.py $(NEWEST) --torch "$(VERSION)"
	$(call PYTEST_OF,$(NEWEST)) -m "not gpu" $(ARGS)

newest-part: $(VENV)/.test
	$(PY) tests/newest.py $(NEWEST)-part --torch "$(VERSION)" --beside $(VENV)
	$(call PYTEST_OF,$(NEWEST)-part) --ignore tests/opinfo -m "not gpu and not slow" -p drawn_part --part 10 --seed "$(SEED)" $(ARGS)

OUT ?= runs/gpu

gpu:  # every stage has a limit of its own, 700 s in all; a bench says where there is no device
	OUT="$(OUT)" PYTHON="$(PYTHON)" tests/smoke/on_device.sh $(CALLS)

aot: $(VENV)/.ready
	$(PY) -m benchmarks aot --changed $(RESULTS)/aot.csv --csv $(RESULTS)/aot.csv

traffic: $(VENV)/.ready
	$(PY) -m benchmarks traffic --changed $(RESULTS)/traffic.csv --csv $(RESULTS)/traffic.csv $(ARGS)

check: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tests/typed_pages.py

mutants: $(VENV)/.test
	$(PY) tests/mutants/run.py $(ARGS)

mutants-drawn: $(VENV)/.dev
	$(PY) tests/mutants/drawn.py $(ARGS)

release-check: $(VENV)/.test
	$(PY) tests/release.py $(ARGS)

$(VENV)/.docs: $(VENV)/.ready
	@echo "installing MkDocs, Material, mkdocstrings and what runs notebooks into $(VENV): 0.1 GB"
	$(PIP) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)  # --quiet would hide warnings from --strict, too
	$(PY) tests/built_site.py

clean:
	rm -rf $(VENV) $(NEWEST) $(NEWEST)-part .interpreters site
