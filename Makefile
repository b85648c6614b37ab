PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
ARGS ?=
CORE_SECONDS ?=
SEED ?= $(shell git rev-parse --short HEAD)
RESULTS ?= docs/benchmarks

.PHONY: help packages train train-parallel test test-rest test-all interpreters newest newest-part gpu aot traffic check mutants mutants-drawn docs release-build release-check clean

help:
	@echo "make train   set up, then train the language model (ARGS=... for its flags)"
	@echo "make train-parallel   the same on four processes, by torchrun (MESH='--dp 4' for another mesh, ARGS=... for other flags)"
	@echo "make test    set up, then run the first tier: a test of every op, law, adapter and example (ARGS=... for pytest's;"
	@echo "             CORE_SECONDS=120: beside it as many of the second tier as take so long on a core, drawn by SEED)"
	@echo "make test-all   both tiers: all tests that need no GPU; make test-rest: those marked slow alone"
	@echo "make interpreters   read the sources with each Python, 3.10 to 3.13, that the machine has, and run tests/test_tiny.py with the"
	@echo "             oldest and the newest (ARGS=--every: with each)"
	@echo "make newest  both tiers with the newest torch and Triton that pip finds, in $(NEWEST), 6 GB (VERSION=2.11.0 for that torch)"
	@echo "make newest-part   the first tier of one file in twenty, drawn by SEED, with the packages of $(VENV) beside that torch and Triton"
	@echo "make gpu     checks, benchmarks and tests that need a GPU, in PYTHON's own environment, within twelve minutes, with results"
	@echo "             below OUT, $(OUT) (CALLS=first or CALLS=second: a part of them)"
	@echo "make aot     set up, then compile the Triton kernels whose source changed, and write docs/benchmarks/aot.csv"
	@echo "make traffic set up, then count the bytes that changed kernels move, and write docs/benchmarks/traffic.csv"
	@echo "make check   set up, then lint and type-check, the code blocks of the pages too"
	@echo "make mutants plant known faults one at a time in a copy, and say which the tests notice (ARGS=... for its flags)"
	@echo "make mutants-drawn  draw faults over the package by a seed, and say which of them the first tier notices"
	@echo "make docs    build the site, of docs/, the docstrings and the notebooks, into site/: strict, any warning fails"
	@echo "make release-build   build the wheel and the source archive into dist/ (ARGS='--address URL --tag vX.Y.Z' for an index)"
	@echo "make release-check   build both, and try them with four Pythons, with the oldest packages of the metadata and with the newest torch"
	@echo "             (ARGS=--cuda: also where torch comes for CUDA, 3 GB a time; ARGS=--here: with this Python alone)"
	@echo "make packages   set up for all of these at once: torch and every package that they install"
	@echo "make clean   remove the environments; all that these install is in $(VENV), $(NEWEST), $(NEWEST)-part and .interpreters, and each says how much before"

# Each set of packages is installed by one run of pip. It compiles none: most modules are never imported.
PIP = $(PY) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	-$(PY) -m pip install --quiet --disable-pip-version-check --upgrade pip  # Python's own takes twice as long, but serves, too
	@touch $@

$(VENV)/.build: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) build 'setuptools>=77'
	@touch $@

$(VENV)/.ready: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing torch, Triton and the examples' packages into $(VENV): 1.8 GB with torch's CPU build, 5.5 GB where pip takes that for CUDA"
	$(PIP) -e '.[examples]'
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing torch, Triton and the tests' packages into $(VENV): 2.2 GB with torch's CPU build, 5.9 GB where pip takes that for CUDA"
	$(PIP) -e '.[examples,test]'
	@touch $(VENV)/.build $(VENV)/.ready $@

$(VENV)/.dev: $(VENV)/.test
	@echo "installing ruff, mypy, pyright, zizmor and check-jsonschema into $(VENV): 0.1 GB"
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.ready
	@echo "installing MkDocs, Material, mkdocstrings and what runs notebooks into $(VENV): 0.1 GB"
	$(PIP) -e '.[docs]'
	@touch $@

packages: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing all that the targets here use into $(VENV): 2.4 GB with torch's CPU build, 6.1 GB where pip takes that for CUDA"
	$(PIP) -e '.[examples,test,dev,docs]'
	@touch $(addprefix $(VENV)/,.build .ready .test .dev .docs)

train: $(VENV)/.ready
	$(PY) examples/train_lm.py --dtype auto --optimizer muon $(ARGS)  # of two flags of a name the last one counts

MESH ?= --dp 2 --tp 2

train-parallel: $(VENV)/.ready  # heads that two ranks can share out; a thread a process, as four of them share the machine
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 4 \
		examples/train_lm.py --heads 4 --kv-heads 4 $(MESH) $(ARGS)

unexport PYTHONDONTWRITEBYTECODE  # some hundred processes would each compile the library's sources again

PYTEST_OF = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -q -n 2 --dist worksteal
PYTEST = $(call PYTEST_OF,$(VENV))

# tests/opinfo, all of the second tier, takes seconds to import
FIRST_TIER = --ignore tests/opinfo -m "not gpu and not slow"
AND_A_PART = -m "not gpu" -p drawn_part --slow-seconds $(CORE_SECONDS) --seed "$(SEED)"

test: $(VENV)/.test
	$(PYTEST) $(if $(CORE_SECONDS),$(AND_A_PART),$(FIRST_TIER)) $(ARGS)

test-rest: $(VENV)/.test
	$(PYTEST) -m "not gpu and slow" $(ARGS)

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
	$(call PYTEST_OF,$(NEWEST)-part) $(FIRST_TIER) -p drawn_part --part 20 --seed "$(SEED)" $(ARGS)

OUT ?= runs/gpu

gpu:  # every stage has a limit of its own, 700 s in all; a bench says where there is no device
	OUT="$(OUT)" PYTHON="$(PYTHON)" bash tests/smoke/on_device.sh $(CALLS)

aot: $(VENV)/.ready
	$(PY) -m benchmarks aot --changed $(RESULTS)/aot.csv --csv $(RESULTS)/aot.csv

traffic: $(VENV)/.ready
	$(PY) -m benchmarks traffic --changed $(RESULTS)/traffic.csv --csv $(RESULTS)/traffic.csv $(ARGS)

check: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tests/typed_pages.py
	$(VENV)/bin/zizmor --quiet --offline .github
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[0-9]*.yml
	$(VENV)/bin/check-jsonschema --default-filetype yaml --builtin-schema vendor.citation-file-format CITATION.cff

mutants: $(VENV)/.test
	$(PY) tests/mutants/run.py $(ARGS)

mutants-drawn: $(VENV)/.dev
	$(PY) tests/mutants/drawn.py $(ARGS)

release-build: $(VENV)/.build
	$(PY) tests/release.py --build dist $(ARGS)

release-check: $(VENV)/.build
	$(PY) tests/release.py $(ARGS)

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)  # --quiet would hide warnings from --strict, too
	$(PY) tests/built_site.py

clean:
	rm -rf $(VENV) $(NEWEST) $(NEWEST)-part .interpreters dist site
