"""Every operator and combinator, every case, every law."""

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import funcops
from funcops.op import Op
from funcops.testing import LAWS

FILES = sorted((Path(__file__).parent / "cases").glob("*.py"))


def _load(path):
    spec = importlib.util.spec_from_file_location(f"cases_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODULES = {path.stem: _load(path) for path in FILES}
CASES = [(case, dtype) for m in MODULES.values() for case in m.CASES for dtype in case.dtypes]
FIRST = [m.CASES[0] for m in MODULES.values()]
DRAWN = ("traceable",)  # a trace is the same in every dtype but for the dtypes: the first tier has one for each case
ELSEWHERE = ("compiles", *DRAWN, "finite_differences")


def turns():
    """Every case and dtype, those marked slow whose turn is not theirs: the dtypes take turns from case to case."""
    for i, case in enumerate(case for m in MODULES.values() for case in m.CASES):
        for j, dtype in enumerate(case.dtypes):
            yield pytest.param(case, dtype, marks=() if i % len(case.dtypes) == j else pytest.mark.slow)


def test_every_exported_op_has_a_case():
    exported = {value.name for value in vars(funcops).values() if isinstance(value, Op)}
    assert exported
    assert exported == set(MODULES)


@pytest.mark.parametrize("law", [name for name in LAWS if name not in ELSEWHERE])
@pytest.mark.parametrize(("case", "dtype"), CASES, ids=lambda v: str(v))
def test_law(law, case, dtype):
    if law not in case.exempt:
        LAWS[law](case, dtype)


@pytest.mark.parametrize("law", DRAWN)
@pytest.mark.parametrize(("case", "dtype"), list(turns()), ids=lambda v: str(v))
def test_law_in_turns(law, case, dtype):
    if law not in case.exempt:
        LAWS[law](case, dtype)


@pytest.mark.parametrize("case", [case for case, dtype in CASES if dtype is torch.float64], ids=str)
def test_finite_differences(case):
    if "finite_differences" not in case.exempt:
        LAWS["finite_differences"](case, torch.float64)


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_compiles(case):
    LAWS["compiles"](case, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dynamic"), [("eager", True), ("aot_eager", True), ("inductor", True), ("inductor", False)])
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_compiles_by_every_backend(case, backend, dynamic):
    """`test_compiles` is this by aot_eager for static shapes. Inductor compiles what it is given by aot_eager."""
    LAWS["compiles"](case, torch.float32, backend, dynamic)


@pytest.mark.parametrize("name", [name for name, m in MODULES.items() if hasattr(m, "drawn")])
@given(data=st.data())
def test_drawn_shapes(name, data):
    case = data.draw(MODULES[name].drawn())
    for law in ("split", "mirror", "right", "frugal"):
        LAWS[law](case, torch.float64)


def test_the_table_of_bad_calls_is_long():
    rows = {error.match for m in MODULES.values() for error in getattr(m, "ERRORS", [])}
    assert len(rows) >= 40


@pytest.mark.parametrize(
    ("name", "error"), [(n, e) for n, m in MODULES.items() for e in getattr(m, "ERRORS", [])], ids=lambda v: getattr(v, "match", v)
)
def test_errors_name_what_is_wrong(name, error):
    with pytest.raises(error.error) as raised:
        error.call()
    assert error.match in str(raised.value)
