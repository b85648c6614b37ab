"""Experts as a chain of steps: the laws, and the numbers, the bytes and the params of the one op."""

import pytest
import torch
from cases import experts as of_experts

from funcops import ExpertsConfig, WithExtras, chain, experts, random
from funcops.models import plain_experts
from funcops.ops.experts import ExpertsParams
from funcops.residuals.report import report
from funcops.testing import LAWS, Case
from funcops.testing.tolerances import assert_close
from funcops.trees import paths


def as_experts(tree):
    return ExpertsParams(tree["up"], tree["down"])


def as_chain(given):
    weights, tokens, indices = given
    return WithExtras(weights, {"tokens": tokens, "indices": indices})


def steps_of(one):
    """The case of the op as one of its chain."""

    def reference(params, x, cfg):
        given = x.main, x.extras["tokens"], x.extras["indices"]
        return of_experts.reference(as_experts(params), given, one.cfg)

    return Case(op=chain, cfg=plain_experts(one.cfg), x=lambda d: as_chain(one.x(d)), reference=reference, name=one.name)


BIASED = next(one for one in of_experts.CASES if one.cfg.bias and one.cfg.kind == "clamped_swiglu")  # with dropped choices
EMPTY = next(one for one in of_experts.CASES if "experts-(0,)" in one.name)
FIRST_TIER = [(law, of_experts.CASES[0]) for law in ("split", "right", "frugal")] + [("right", BIASED), ("split", EMPTY)]


@pytest.mark.parametrize(
    ("law", "one", "dtype"),
    [
        pytest.param(law, one, dtype, marks=() if (law, one) in FIRST_TIER and dtype is torch.float64 else pytest.mark.slow)
        for one in of_experts.CASES
        for law in LAWS
        for dtype in (torch.float64, torch.bfloat16)
        if (one is of_experts.CASES[0] or one is BIASED or law not in ("compiles", "traceable")) and dtype in one.dtypes
    ],
    ids=str,
)
def test_laws_of_the_chain(law, one, dtype):
    LAWS[law](steps_of(one), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_chain_gives_and_keeps_what_the_op_does(dtype):
    for one in (of_experts.CASES[0], BIASED, EMPTY):
        params, given = one.make(dtype)
        cfg, apart = plain_experts(one.cfg), {"sort": None, "up": params.up, "act": None, "down": params.down, "combine": None}
        y, kept = experts.fwd(params, given, one.cfg)
        found, kept_apart = chain.fwd(apart, as_chain(given), cfg)
        dparams, (d_weights, dx, _) = experts.bwd(kept, y, one.cfg)
        dparts, d_given = chain.bwd(kept_apart, y, cfg)
        got = found, as_experts(dparts), d_given.main, d_given.extras["tokens"]
        assert_close(got, (y, dparams, d_weights, dx), dtype=dtype, length=64)
        own = [report(r, p, x).kept_bytes for r, p, x in ((kept, params, given), (kept_apart, apart, as_chain(given)))]
        assert own[0] == own[1]


def test_params_have_the_paths_of_the_ops():
    cfg = ExpertsConfig(3, 4, 2, bias=True)
    shapes = [{path: t.shape for path, t in paths(op.init(of, key=random.key(0))).items() if t is not None}
              for op, of in ((experts, cfg), (chain, plain_experts(cfg)))]  # fmt: skip
    assert shapes[0] == shapes[1]
    with pytest.raises(TypeError, match="plain_experts: cfg must be ExpertsConfig, got 3"):
        plain_experts(3)
