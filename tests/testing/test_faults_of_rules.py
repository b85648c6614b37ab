"""Rules of fusion that break their promise: the laws of a chain name the field that is a copy, and the rules that ran."""

import pytest
import torch

from funcops import (
    ActivationConfig,
    ChainConfig,
    LinearConfig,
    Rule,
    Saving,
    ScaleConfig,
    ScaleResiduals,
    SkipConfig,
    Step,
    activation,
    backend,
    chain,
    linear,
    register_fusion,
    scale,
    skip,
    unregister_fusion,
)
from funcops.library.ops.linear import LinearPending, LinearResiduals
from funcops.testing import LAWS, check_op

CFG = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)), Step("cool", scale, ScaleConfig(0.5))))


def match(window):
    return 2 if [call.op for call in window.calls[:2]] == [linear, scale] else None


def forward_of(copied, factor, match=match):
    """A rule whose residuals hold copies of these fields, and whose y is wrong by a factor."""

    def run(calls, params, main, values):
        (up, cool), (weight, bias) = calls, (params[0].weight, params[0].bias)
        y = torch.nn.functional.linear(main, weight, bias) * (0.5 * factor)
        kept = {name: t.clone() if name in copied else t for name, t in (("x", main), ("weight", weight))}
        first = LinearResiduals.keep(up.cfg, up.kept, **kept, y_shape=y.shape, dtype=y.dtype)
        return y, [first, ScaleResiduals.keep(cool.cfg, cool.kept, shape=y.shape, dtype=y.dtype)]

    return Rule("linear + scale", "forward", match, run, Saving(9, 9))


def backward_of(copied):
    def run(calls, residuals, dy, gradients):
        kept, d = residuals[0], dy * 0.5
        dx = d @ kept.weight if kept.needs.x else None
        given = {name: t.clone() if name in copied and t is not None else t for name, t in (("x", kept.x), ("dy", d))}
        return dx, [LinearPending.keep(calls[0].cfg, kept.needs, **given), None]

    return Rule("linear + scale", "backward", match, run, Saving(9, 9))


def checked(op, cfg, rule, *laws):
    def reference(params, x, cfg):
        y = 0.5 * torch.nn.functional.linear(x, params["up"].weight, params["up"].bias)
        y = torch.nn.functional.gelu(y) if len(cfg.steps if op is chain else ()) > 2 else y
        return x + y if op is skip else y

    register_fusion(rule)
    try:
        with backend("triton"):
            check_op(op, cfg=cfg, x=lambda d: d.randn(3, 4), reference=reference, dtypes=(torch.float32,), laws=laws)
    finally:
        unregister_fusion(rule)


@pytest.mark.parametrize(("op", "cfg"), [(chain, CFG), (skip, SkipConfig(chain, CFG))], ids=str)
def test_a_field_that_a_rule_copies_is_named(op, cfg):
    for field, alias in (("weight", "params.up.weight"), ("x", "x")):
        said = rf"(?s)law 'frugal', .*: residuals\.\S*{field} must be {alias} itself, as without rules"
        with pytest.raises(AssertionError, match=said):
            checked(op, cfg, forward_of((field,), 1.0), "frugal")
    with pytest.raises(AssertionError, match=r"(?s)law 'frugal', .*: pending\.\S*x must be x itself, as without"):
        checked(op, cfg, backward_of(("x",)), "frugal")
    for rule in (forward_of((), 1.0), backward_of(())):
        checked(op, cfg, rule, "frugal", "right")


def test_a_rule_with_a_wrong_y_is_named_with_the_law_right():
    laws = [law for law in LAWS if law not in ("compiles", "guarded")]
    with pytest.raises(AssertionError, match=r"(?s)law 'right', .*: y of .* differs.*; rules of fusion that ran: linear \+ scale$"):
        checked(chain, CFG, forward_of((), 1.01), *laws)
    whole = lambda window: match(window) if window.needs[0].x and window.needs[0].params else None  # noqa: E731
    longer = ChainConfig(steps=(*CFG.steps, Step("act", activation, ActivationConfig("gelu"))))
    with pytest.raises(AssertionError, match=r"law 'right'"):  # the masks of Frugal run other calls than the rule's
        checked(chain, longer, forward_of((), 1.01, whole), *laws)
    with pytest.raises(AssertionError, match=r"(?s)law 'frugal', .*; rules of fusion that ran: linear \+ scale$"):
        checked(chain, CFG, forward_of(("x",), 1.0), "frugal")


def test_a_rule_is_named_of_a_chain_without_params():
    """It counts whether the rules of a large x ran, however few params there are."""
    plain = ChainConfig(steps=tuple(Step(name, scale, ScaleConfig(0.5)) for name in "ab"))
    both = lambda window: 2 if [call.op for call in window.calls[:2]] == [scale, scale] else None  # noqa: E731

    def run(calls, params, main, values):
        keep = [ScaleResiduals.keep(call.cfg, call.kept, shape=main.shape, dtype=main.dtype) for call in calls]
        return main * 0.3, keep

    rule = register_fusion(Rule("scale + scale", "forward", both, run, Saving(9, 9), on_cpu=True))
    try:
        with pytest.raises(AssertionError, match=r"(?s)law 'right', .*; rules of fusion that ran: scale \+ scale$"):
            check_op(chain, cfg=plain, x=lambda d: d.randn(4096, 8), reference=lambda p, x, cfg: x / 4,
                     dtypes=(torch.float32,), laws=("right",))  # fmt: skip
    finally:
        unregister_fusion(rule)
