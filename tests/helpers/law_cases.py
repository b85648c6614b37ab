"""The cases of every operator and combinator, from tests/cases."""

import importlib.util
from pathlib import Path

from funcops import walk

FILES = sorted((Path(__file__).resolve().parents[1] / "cases").glob("*.py"))


def _load(path):
    spec = importlib.util.spec_from_file_location(f"cases_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODULES = {path.stem: _load(path) for path in FILES}


CASES = [(case, dtype) for m in MODULES.values() for case in m.CASES for dtype in case.dtypes]


FIRST = [m.CASES[0] for m in MODULES.values()]


def turns():
    """Every case in one dtype, which changes from case to case."""
    for i, case in enumerate(case for m in MODULES.values() for case in m.CASES):
        yield case, case.dtypes[i % len(case.dtypes)]


CONFIGS = list({type(c.cfg).__name__: c.cfg for m in MODULES.values() for c in m.CASES[::-1]}.values())


def sums_codes(case):
    """Whether the case has a product of codes, whose sums keep some 14 bits on a device."""
    return any(part.cfg.low_recipe is not None for part in walk(case.cfg))
