"""Every operator and combinator, every case, every law."""

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_cases import CASES, CONFIGS, FIRST, MODULES, turns

import funcops
from funcops.engine.contract.op import Op
from funcops.testing import LAWS
from funcops.testing.checks import float_like

DRAWN = (
    "traceable",
    "guarded",
    "mirror",
    "loud",
    "invariant",
)  # structures, marks and errors hardly know the dtype: each case has them in one
ELSEWHERE = ("compiles", *DRAWN, "finite_differences")


def test_every_exported_op_has_a_case():
    exported = {value.name for value in vars(funcops).values() if isinstance(value, Op)}
    assert exported
    assert exported == set(MODULES)


def laws_and_dtypes():
    """Right in every dtype, of which the first tier has two in turn; the other laws, which compare an op with itself, in one, and
    in the first tier for every other case of an op."""
    for law in [name for name in LAWS if name not in ELSEWHERE]:
        for i, (case, own) in enumerate(turns()):
            for j, dtype in enumerate(case.dtypes if law == "right" else (own,)):
                in_turn = pytest.mark.slow if (i + j) % 2 else ()
                yield pytest.param(
                    law, case, dtype, marks=in_turn if law == "right" else pytest.mark.turns("case", "dtype", every=2, each="op")
                )


@pytest.mark.parametrize(("law", "case", "dtype"), list(laws_and_dtypes()), ids=str)
def test_law(law, case, dtype):
    if law not in case.exempt:
        LAWS[law](case, dtype)


def structural_laws():
    """The first case of an op under all laws; in the first tier every other one of the others under one in turn. Tracing takes ten
    times as long as other laws, so its turn comes half as often."""
    first = {id(case) for case in FIRST}
    order = [*DRAWN, *(law for law in DRAWN if law != "traceable")]
    for i, (case, dtype) in enumerate(turns()):
        for law in DRAWN:
            chosen = id(case) in first or (law == order[i // 2 % len(order)] and i % 2 == 0)
            yield pytest.param(law, case, dtype, marks=() if chosen else pytest.mark.slow)


@pytest.mark.parametrize(("law", "case", "dtype"), list(structural_laws()), ids=str)
def test_law_in_turns(law, case, dtype):
    if law not in case.exempt:
        LAWS[law](case, dtype)


@pytest.mark.turns("case", every=2, each="op")
@pytest.mark.parametrize("case", [case for case, dtype in CASES if dtype is torch.float64], ids=str)
def test_finite_differences(case):
    if "finite_differences" not in case.exempt:
        LAWS["finite_differences"](case, torch.float64)


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_compiles(case):
    """The backend "eager" traces, and does no more: aot_eager takes as long again."""
    LAWS["compiles"](case, torch.float32, "eager")


LONG_IN_SYMBOLS = {"gated_delta_rule", "grouped_qlinear", "qattention"}


def ways_to_compile():
    """Each operator by both backends, with symbols for sizes by one of them, so two operators have all four ways. Dynamo traces
    the library; aot_eager rewrites the operators of torch that it met, and inductor goes on from there: both on the same sizes
    would prove the former twice. Hundreds of operators on quotients of symbols take the two a minute: there symbols are for dynamo
    alone, and for inductor in qlinear, which has the same quotients."""
    for i, (name, module) in enumerate(MODULES.items()):
        long = name in LONG_IN_SYMBOLS
        backends = ("eager" if long else "aot_eager", "inductor") if i % 2 or long else ("inductor", "aot_eager")
        yield from ((module.CASES[0], backend, dynamic) for backend, dynamic in zip(backends, (True, False), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "backend", "dynamic"), list(ways_to_compile()), ids=str)
def test_compiles_by_every_backend(case, backend, dynamic):
    LAWS["compiles"](case, torch.float32, backend, dynamic)


DRAWN_SHAPES = pytest.mark.parametrize("name", [name for name, m in MODULES.items() if hasattr(m, "drawn")])


@DRAWN_SHAPES
@settings(max_examples=5)
@given(data=st.data())
def test_drawn_shapes(name, data):
    holds_for_a_drawn_case(name, data)


@pytest.mark.slow
@DRAWN_SHAPES
@settings(max_examples=40)
@given(data=st.data())
def test_more_drawn_shapes(name, data):
    holds_for_a_drawn_case(name, data)


def holds_for_a_drawn_case(name, data):
    case = data.draw(MODULES[name].drawn())
    for law in ("split", "mirror", "right", "frugal"):
        LAWS[law](case, torch.float64)


def test_the_table_of_bad_calls_is_long():
    rows = {error.match for m in MODULES.values() for error in getattr(m, "ERRORS", [])}
    assert len(rows) >= 40


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_an_op_names_the_classes_of_its_trees_and_how_to_call_it(case):
    op, (params, x) = case.op, case.make(torch.float32)
    y, residuals = op.fwd(params, x, case.cfg)
    _, pending = op.dgrad(residuals, float_like(y, 7), case.cfg)
    assert op.keeps is None or type(residuals) is op.residuals_of(case.cfg)
    assert pending is None or op.pending is None or type(pending) is op.pending
    assert op.params is None or type(params) is op.params
    with pytest.raises(TypeError, match=re.escape(f"{op.name}: must be called by its functions: {op.name}.fwd(params, x, cfg)")):
        op(params, x)


@pytest.mark.parametrize(
    ("name", "error"), [(n, e) for n, m in MODULES.items() for e in getattr(m, "ERRORS", [])], ids=lambda v: getattr(v, "match", v)
)
def test_errors_name_the_fault(name, error):
    with pytest.raises(error.error) as raised:
        error.call()
    assert error.match in str(raised.value)


NAN = float("nan")
WRONG = {  # by a field's annotation: what may stand nowhere
    "int": (True, 1.5, "3", NAN, None),
    "int | None": (True, 1.5, "3", NAN),
    "float": (True, "0.5", NAN, None),
    "float | None": (True, "0.5", NAN),
    "bool": (1, 0, "yes", None),
    "str": (3, None, "", "no such"),
    "torch.dtype": ("float32", None, torch.int64),
    "tuple[int, ...]": (3, None, "ab", (-1,), (0,), (1.5,), (True,), [1]),
    "Any": (-1, 0, 1.5, "ab", None, ()),
    "Op": (3, None, "linear"),
}
SIGNED = {"factor", "alpha", "offset", "ignore_index"}  # these may be negative, and others zero
ZERO = SIGNED | {"eps", "p", "label_smoothing", "z_loss", "padding_idx", "aux", "z", "jitter", "replays"}
INFINITE = {"limit"}  # where nothing is clamped
OTHERS = {
    ("GLUConfig", "gate"): ("left", 3),  # "" is right for a pair
    ("SinkAttentionConfig", "over"): (3, None, "no such"),  # "" is right where no axis shards the heads
    ("QKVSplitConfig", "rope"): (3, "no such"),
    ("RopeConfig", "scaling"): (3, "no such"),
    ("RopeConfig", "sections"): (3, "ab", (-1,), (0,), (1.5,), (True,), [1]),
    ("ChainConfig", "ties"): (-1, 1.5, "ab", None),
}


def wrong_values(cfg, field):
    yield from OTHERS.get((type(cfg).__name__, field.name), WRONG.get(field.type, (3, "no such", None)))
    numbers = field.type.startswith(("int", "float"))
    yield from (-1, -0.5)[: numbers + field.type.startswith("float")] if field.name not in SIGNED else ()
    yield from (0,) if numbers and field.name not in ZERO else ()
    yield from (float("inf"), float("-inf")) if field.type.startswith("float") and field.name not in INFINITE else ()


FIELDS = [(cfg, field) for cfg in CONFIGS for field in dataclasses.fields(cfg)]


@pytest.mark.parametrize(("cfg", "field"), FIELDS, ids=lambda v: getattr(v, "name", type(v).__name__))
def test_a_wrong_value_of_a_config_field_raises(cfg, field):
    for value in wrong_values(cfg, field):
        with pytest.raises((ValueError, TypeError)) as raised:
            dataclasses.replace(cfg, **{field.name: value})
            pytest.fail(f"{type(cfg).__name__}({field.name}={value!r}) went through")
        message = str(raised.value)
        assert "must be" in message and "got" in message and (type(cfg).__name__ in message or field.type == "Any"), (
            value,
            message,
        )
