PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
ARGS ?=

.PHONY: help train test check clean

help:
	@echo "make train   set up, then train the language model (ARGS=... for its flags)"
	@echo "make test    set up, then run all tests that need no GPU (ARGS=... for pytest's)"
	@echo "make check   set up, then lint and type-check"
	@echo "make clean   remove the environment"

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[examples,test]'
	touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

train: $(VENV)/.ready
	$(PY) examples/train_lm.py $(ARGS)

test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 -m "not gpu" $(ARGS)

check: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m mypy

clean:
	rm -rf $(VENV)
