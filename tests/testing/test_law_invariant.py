"""The law Invariant notices orders that depend on the batch, each planted in an op that says it has none."""

import re

import pytest
import torch
import torch.nn.functional as F
from law_cases import CASES, FIRST, turns

from funcops import LinearConfig, LinearParams
from funcops.contract import DGRAD, FLOATS, Needs, OpConfig, Residuals, check, config, dgrad_of, forward, make_op, saved
from funcops.engine.backend import kernel
from funcops.library.kernels.pins import vectorized
from funcops.testing import Case
from funcops.testing.invariant import count_compared, exempt, law_invariant

WIDTH = 70


@config
class PlantedConfig(OpConfig):
    """Which order is planted; of y, or of dx."""

    where: str
    how: str


class PlantedResiduals(Residuals):
    x: torch.Tensor = saved("[*, D]", alias="x", needed_by=DGRAD)


def by_halves(t, at):
    """A sum over the last dimension in two parts."""
    return t[..., :at].sum(-1, keepdim=True) + t[..., at:].sum(-1, keepdim=True)


def total(t):
    return t.sum(-1, keepdim=True)


def tail(t):
    """The last rows, beyond a multiple of 16, by another order."""
    whole = len(t) - len(t) % 16
    return torch.cat((total(t[:whole]), by_halves(t[whole:], 33)))


def tail_of_elements(t):
    """A third of each element; beyond a multiple of 32 by another formula, as torch's loops have one."""
    flat, whole = t.reshape(-1), t.numel() - t.numel() % 32
    return torch.cat((flat[:whole] / 3, flat[whole:] * (1 / 3))).view(t.shape)


# each computes something of a row in a way that the batch decides
ORDERS = {
    "a choice by the number of rows": lambda t: total(t) if len(t) < 32 else by_halves(t, 31),
    "one row by itself": lambda t: by_halves(t, 9) if len(t) == 1 else total(t),
    "a split by the number of rows": lambda t: by_halves(t, max(1, WIDTH // max(1, 64 // len(t)))),
    "a threshold on numel": lambda t: total(t) if t.numel() < 1 << 14 else by_halves(t, 17),
    "a tail of rows": tail,
    "a tail of elements": tail_of_elements,
    "a mean over the batch": lambda t: total(t) - t.mean(),
    "a scale of the whole tensor": lambda t: total((t / t.abs().amax() * 127).round()),
    "a running sum over rows": lambda t: total(t).cumsum(0),
    "the parity of a row": lambda t: torch.where((torch.arange(len(t)) % 2 == 0).unsqueeze(-1), total(t), by_halves(t, 40)),
    "a product of all rows": lambda t: t @ t.new_ones(WIDTH, 1),
    "the number of rows in a quotient": lambda t: total(t / len(t)),
}


def planted(cfg, t, half):
    order = ORDERS[cfg.how] if cfg.where == half else total
    return t * order(t)


@forward(PlantedConfig)
def planted_fwd(params, x, cfg, *, needs=Needs.ALL):
    check("planted_fwd", "x", x, (..., WIDTH), FLOATS)
    return planted(cfg, x, "y"), PlantedResiduals.keep(cfg, needs, x=x)


@dgrad_of(PlantedResiduals)
def planted_dgrad(residuals, dy, cfg):
    return planted(cfg, dy, "dx"), None


op = make_op("planted", PlantedConfig, fwd=planted_fwd, dgrad=planted_dgrad, mixes="")


def case_of(where, how):
    return Case(op=op, cfg=PlantedConfig(where=where, how=how), x=lambda draw: draw.randn(5, WIDTH), reference=None)


@pytest.mark.parametrize("where", ["y", "dx"])
@pytest.mark.parametrize("how", ORDERS)
def test_an_order_that_depends_on_the_batch_is_noticed(how, where):
    said = rf"^{where} of \d rows differs in a batch of \d+, from row \d+ on\nEither rows mix, .*vectorized\(fn, x\)"
    with pytest.raises(AssertionError, match=re.compile(said, re.DOTALL)):
        law_invariant(case_of(where, how), torch.float32)


@pytest.mark.parametrize("where", ["y", "dx"])
@pytest.mark.parametrize("fn", [tail_of_elements, F.softplus], ids=lambda fn: fn.__name__)
def test_whole_vectors_as_the_error_says_are_the_remedy(monkeypatch, fn, where):
    monkeypatch.setitem(ORDERS, "whole vectors", lambda t: vectorized(fn, t))
    assert count_compared(case_of(where, "whole vectors"), torch.float32) == 6


def test_the_op_without_a_planted_order_obeys():
    assert count_compared(case_of("neither", "a tail of rows"), torch.float32) == 6


def test_a_kernel_that_does_not_say_what_its_rows_depend_on_is_refused_by_name():
    @kernel()
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    other = make_op(
        "other",
        PlantedConfig,
        fwd=forward(PlantedConfig)(lambda params, x, cfg, *, needs=Needs.ALL: (doubled(x), PlantedResiduals.keep(cfg, needs, x=x))),
        dgrad=planted_dgrad,
        mixes="",
    )
    case = Case(op=other, cfg=PlantedConfig(where="y", how="tail"), x=lambda draw: draw.randn(5, WIDTH), reference=None)
    with pytest.raises(ValueError, match="^doubled in invariant mode: rows must be 'each' or 'pinned' .*, got 'mixed'$"):
        law_invariant(case, torch.float32)


@pytest.mark.slow
def test_every_op_that_says_so_is_compared():
    """No op is let off because its batches cannot be put together."""
    wanted = {case.op.name for case in FIRST if not exempt(case)}
    compared = {
        case.op.name for case, _ in CASES if case.op.name in wanted and not exempt(case) and count_compared(case, torch.float32)
    }
    assert len(wanted) > 20
    assert compared == wanted


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_case(dtype):
    for case, _ in turns():
        if dtype in case.dtypes:
            law_invariant(case, dtype)


SHAPES = [(1, 256, 300), (7, 64, 5), (7, 5, 5), (3, 1000, 7), (4, 1024, 256), (2, 5, 1), (2, 1, 64), (6, 2048, 130)]


@pytest.mark.parametrize(("rows", "wide", "out"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_real_widths(rows, wide, out, dtype):
    """Widths at which torch's own products choose another order for few rows than for many."""
    from funcops import linear

    cfg = LinearConfig(wide, out)
    case = Case(
        op=linear,
        cfg=cfg,
        x=lambda draw: draw.randn(rows, wide),
        reference=None,
        params=lambda draw: LinearParams(draw.randn(out, wide), draw.randn(out)),
    )
    assert count_compared(case, dtype) == 6
