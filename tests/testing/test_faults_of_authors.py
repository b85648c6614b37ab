"""Faults that an author makes in an op, each named with the function and the leaf, and what make_op refuses at once."""

import re
from dataclasses import field

import pytest
import torch

from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import OpConfig, config, dgrad_of, forward, make_op, recompute_of, wgrad_of
from funcops.engine.contract.schema import DGRAD, RECOMPUTE, WGRAD, Pending, Residuals, saved
from funcops.engine.errors import FLOATS, check
from funcops.engine.trees import leaf, tree
from funcops.testing import check_op


@config
class SreluConfig(OpConfig):
    scale: float = field(kw_only=False)


class SreluResiduals(Residuals):
    x: torch.Tensor = saved("[*]", alias="x", needed_by=DGRAD | RECOMPUTE)


def formula(x, cfg):
    return cfg.scale * torch.relu(x).square()


def gradient(x, dy, cfg):
    return dy * (2 * cfg.scale) * torch.relu(x)


def srelu_of(formula=formula, gradient=gradient, checks=FLOATS):
    """y = s relu(x)^2, with this forward and this dx; `checks`: the dtypes of dy."""

    @forward(SreluConfig)
    def srelu_fwd(params, x, cfg, *, needs=Needs.ALL):
        check("srelu_fwd", "x", x, (...,), FLOATS)
        return formula(x, cfg), SreluResiduals.keep(cfg, needs, x=x)

    @recompute_of(SreluResiduals)
    def srelu_recompute(residuals, cfg):
        return formula(residuals.x, cfg)

    @dgrad_of(SreluResiduals)
    def srelu_dgrad(residuals, dy, cfg):
        check("srelu_dgrad", "dy", dy, residuals.x.shape, checks or residuals.x.dtype, residuals.x)
        return gradient(residuals.x, dy.to(residuals.x.dtype), cfg), None

    return make_op("srelu", SreluConfig, fwd=srelu_fwd, dgrad=srelu_dgrad, recomputable="elementwise", recompute=srelu_recompute)


def run(op, **options):
    reference = lambda params, x, cfg: cfg.scale * torch.clamp(x, min=0) ** 2  # noqa: E731
    check_op(op, cfg=SreluConfig(0.3), x=lambda draw: draw.randn(3, 5), reference=reference, free=("x",), **options)


def test_the_op_itself_obeys():
    run(srelu_of(checks=None))


FAULTS = {
    "a wider y": (
        dict(formula=lambda x, cfg: formula(x, cfg).double()),
        r"law 'mirror', torch.float32: y is torch.float64 for an x of",
    ),
    "a float32 y": (
        dict(formula=lambda x, cfg: formula(x, cfg).float()),
        r"y is torch.float32 for an x of .*: give the case casts=True",
    ),
    "writes x": (
        dict(formula=lambda x, cfg: cfg.scale * x.relu_().square()),
        r"law 'pure', .*: srelu_fwd wrote to x: its arguments",
    ),
    "writes dy": (
        dict(gradient=lambda x, dy, cfg: dy.mul_(2 * cfg.scale).mul_(torch.relu(x))),
        r"srelu_dgrad wrote to dy: its arguments",
    ),
    "a summed dx": (dict(gradient=lambda x, dy, cfg: gradient(x, dy, cfg).sum(0)), r"dx is float64\[5\], wanted float64\[3, 5\]"),
    "a float32 dx": (
        dict(gradient=lambda x, dy, cfg: gradient(x, dy, cfg).float()),
        r"dx is float32\[3, 5\], wanted float64\[3, 5\]",
    ),
    "no dx": (dict(gradient=lambda x, dy, cfg: None), r"dx is None, wanted a gradient"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    made, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        run(srelu_of(**made))


def test_a_wrong_call_that_goes_through_is_named_with_its_remedy():
    """A backward that does not look at the shape of dy takes one that broadcasts, too."""

    def srelu_dgrad(residuals, dy, cfg):
        check("srelu_dgrad", "dy", dy, (...,), residuals.x.dtype, residuals.x)
        return gradient(residuals.x, dy[:3, :5], cfg), None

    right = srelu_of(checks=None)
    dgrad = dgrad_of(SreluResiduals)(srelu_dgrad)
    op = make_op("srelu", SreluConfig, fwd=right.fwd, dgrad=dgrad, recomputable="elementwise", recompute=right.recompute)
    remedy = r"dy too large went through without an error: check its shape \(funcops.contract.check\), or pass free=\('dy',\) if"
    with pytest.raises(AssertionError, match=remedy):
        run(op, laws=("loud",))


def test_another_dtype_may_be_declared():
    reference = lambda params, x, cfg: cfg.scale * torch.clamp(x, min=0) ** 2  # noqa: E731
    wide = srelu_of(formula=lambda x, cfg: formula(x, cfg).double(), checks=FLOATS)
    options = dict(cfg=SreluConfig(0.3), x=lambda draw: draw.randn(3, 5), reference=reference, laws=("mirror",))
    check_op(wide, casts=True, **options)


@tree
class AffineParams:
    weight: torch.Tensor = leaf("[D]")


class AffinePending(Pending):
    dy: torch.Tensor = saved("[*]", alias="dy", needed_by=WGRAD)


@forward(SreluConfig, AffineParams)
def affine_fwd(params, x, cfg, *, needs=Needs.ALL):
    return x * params.weight, SreluResiduals.keep(cfg, needs, x=x)


def plain(*given):
    return None


@dgrad_of(SreluResiduals)
def affine_dgrad(residuals, dy, cfg):
    return dy, None


def affine_init(cfg, *, key=None, device=None, dtype=None):
    return AffineParams(torch.ones(3))


def test_make_op_names_what_is_missing():
    with pytest.raises(
        TypeError, match=r"make_op 'affine': dgrad must be decorated with @dgrad_of\(Residuals\), or given together"
    ):
        make_op("affine", SreluConfig, init=affine_init, fwd=affine_fwd, dgrad=plain, wgrad=plain)
    with pytest.raises(TypeError, match=r"make_op 'affine': wgrad must be decorated with @wgrad_of\(Pending, Params\), or given"):
        make_op("affine", SreluConfig, init=affine_init, fwd=affine_fwd, dgrad=affine_dgrad, wgrad=plain)
    with pytest.raises(TypeError, match=r"make_op 'affine': wgrad must be given, as fwd takes params \(AffineParams\), got None"):
        make_op("affine", SreluConfig, init=affine_init, fwd=affine_fwd, dgrad=affine_dgrad)


def test_an_alias_that_leads_nowhere_is_refused():
    for wrong in (dict(alias="xx"), dict(alias="param.weight"), dict(of=("y",)), dict(of=("params.weight", "z"))):
        with pytest.raises(ValueError, match=r"saved: (alias|of) must be a path below .*, got"):
            saved("[*]", needed_by=DGRAD, **wrong)
    for right in (None, "x", "x.1", "params.weight", "y", "dy", "residuals.x"):
        saved("[*]", needed_by=DGRAD, alias=right)


class KeptResiduals(Residuals, static=("shape",)):
    x: torch.Tensor = saved("[*, D]", alias="x", needed_by=DGRAD | WGRAD)
    weight: torch.Tensor = saved("[D]", alias="params.weight", needed_by=DGRAD)


class KeptPending(Pending):
    x: torch.Tensor = saved("[*, D]", alias="residuals.x", needed_by=WGRAD)
    dy: torch.Tensor = saved("[*, D]", alias="dy", needed_by=WGRAD)


def kept_of(omitted="", accumulates=True, keep=KeptResiduals.keep):
    """y = x * weight; `keep` is not given one field or is another, or wgrad returns new tensors in place of accumulators."""

    @forward(SreluConfig, AffineParams)
    def kept_fwd(params, x, cfg, *, needs=Needs.ALL):
        check("kept_fwd", "x", x, (..., 3), FLOATS)
        check("kept_fwd", "params.weight", params.weight, (3,), x.dtype, x)
        fields = dict(x=x, weight=params.weight, shape=x.shape)
        fields.pop(omitted, None)
        return x * params.weight, keep(cfg, needs, **fields)

    @dgrad_of(KeptResiduals)
    def kept_dgrad(kept, dy, cfg):
        dx = (dy * kept.weight.to(dy.dtype)).reshape(kept.shape[0], 3) if kept.needs.x else None
        return dx, KeptPending.keep(cfg, kept.needs, x=kept.x.to(dy.dtype), dy=dy)

    @wgrad_of(KeptPending, AffineParams)
    def kept_wgrad(pending, cfg, *, into=None):
        made = AffineParams((pending.x * pending.dy).sum(0))
        if accumulates or into is None:
            return accumulate("kept_wgrad", made, into)
        return AffineParams(into.weight + made.weight)

    return make_op("kept", SreluConfig, init=affine_init, fwd=kept_fwd, dgrad=kept_dgrad, wgrad=kept_wgrad)


def run_kept(op, *laws):
    reference = lambda params, x, cfg: x * params.weight  # noqa: E731
    x = lambda draw: draw.randn(2, 3)  # noqa: E731
    check_op(op, cfg=SreluConfig(0.3), x=x, reference=reference, dtypes=(torch.float64,), laws=laws)


@pytest.mark.parametrize("omitted", ["x", "weight", "shape"])
@pytest.mark.parametrize("law", ["pure", "split", "right"])
def test_a_field_that_was_not_given_to_keep_is_named(omitted, law):
    run_kept(kept_of(), law)
    said = rf"law '{law}', .*: the op raised .*NoneType.*; KeptResiduals.{omitted} is None: was it given to keep\?$"
    with pytest.raises(AssertionError, match=said):
        run_kept(kept_of(omitted), law)


def test_a_wgrad_that_returns_no_accumulator_is_named_with_the_leaf():
    with pytest.raises(AssertionError, match="kept_bwd returns another tensor for into.weight: it must add to that one"):
        run_kept(kept_of(accumulates=False), "split")


def with_weight(cfg, needs, **fields):
    """A `keep` of the weight too, whatever gradient is requested."""
    kept = KeptResiduals.keep(cfg, needs, **fields)
    if kept is not None:
        kept.weight = fields["weight"]
    return kept


def without_weight(cfg, needs, **fields):
    """A `keep` of the weight only if every gradient is requested."""
    return KeptResiduals.keep(cfg, needs, **fields | ({} if needs is Needs.ALL else {"weight": None}))


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (with_weight, "Needs(x=False, params=True): keeps ['weight'] too many, lacks []"),
        (without_weight, "Needs(x=True, params=False): keeps [] too many, lacks ['weight']"),
    ],
)
def test_a_field_kept_under_other_needs_than_it_declares_is_named(keep, said):
    run_kept(kept_of(), "frugal")
    with pytest.raises(AssertionError, match=f"^law 'frugal', torch.float64: {re.escape(f'residuals under {said}')}"):
        run_kept(kept_of(keep=keep), "frugal")


class ViewedResiduals(Residuals):
    x: torch.Tensor = saved("[*]", needed_by=DGRAD)


def viewed_of(keep):
    """y = s x, whose residuals `keep` makes."""

    @forward(SreluConfig)
    def viewed_fwd(params, x, cfg, *, needs=Needs.ALL):
        check("viewed_fwd", "x", x, (...,), FLOATS)
        return cfg.scale * x, keep(cfg, needs, x)

    @dgrad_of(ViewedResiduals)
    def viewed_dgrad(residuals, dy, cfg):
        check("viewed_dgrad", "dy", dy, residuals.x.shape, FLOATS, residuals.x)
        return cfg.scale * dy, None

    return make_op("viewed", SreluConfig, fwd=viewed_fwd, dgrad=viewed_dgrad)


def run_viewed(op, size):
    check_op(
        op,
        cfg=SreluConfig(0.3),
        x=lambda draw: draw.randn(size),
        reference=lambda params, x, cfg: cfg.scale * x,
        dtypes=(torch.float64,),
        laws=("frugal",),
    )


@pytest.mark.parametrize("size", [1, 3])
def test_a_view_of_an_input_is_no_residual(size):
    run_viewed(viewed_of(lambda cfg, needs, x: ViewedResiduals.keep(cfg, needs, x=x)), size)
    with pytest.raises(AssertionError, match="a residual that aliases an input must be that same object"):
        run_viewed(viewed_of(lambda cfg, needs, x: ViewedResiduals.keep(cfg, needs, x=x.view_as(x))), size)


def test_residuals_without_a_gradient_are_named():
    with pytest.raises(AssertionError, match=r"Needs\.NONE keeps nothing"):
        run_viewed(viewed_of(lambda cfg, needs, x: ViewedResiduals.keep(cfg, needs if needs else Needs.ALL, x=x)), 3)


def test_a_wgrad_that_returns_a_tensor_of_its_pending_is_found():
    """A caller who writes to the gradient writes to what a second call reads."""

    class SummedPending(Pending):
        sums: torch.Tensor = saved("[D]", needed_by=WGRAD)

    def summed_of(own):
        @dgrad_of(KeptResiduals)
        def summed_dgrad(kept, dy, cfg):
            dx = (dy * kept.weight.to(dy.dtype)).reshape(kept.shape[0], 3)
            return dx, SummedPending.keep(cfg, kept.needs, sums=(kept.x * dy).sum(0))

        @wgrad_of(SummedPending, AffineParams)
        def summed_wgrad(pending, cfg, *, into=None):
            return accumulate("summed_wgrad", AffineParams(pending.sums.clone() if own else pending.sums), into)

        return make_op("kept", SreluConfig, init=affine_init, fwd=kept_of().fwd, dgrad=summed_dgrad, wgrad=summed_wgrad)

    run_kept(summed_of(own=True), "split")
    with pytest.raises(AssertionError, match="wgrad after a write to the gradients of an earlier one"):
        run_kept(summed_of(own=False), "split")


@pytest.mark.parametrize("changes", ["", "residuals", "pending"])
def test_a_backward_that_changes_what_it_reads_is_found(changes):
    """Each backward finds equal values there, in another tensor."""
    right = kept_of()

    @dgrad_of(KeptResiduals)
    def kept_dgrad(kept, dy, cfg):
        found = right.dgrad(kept.copy(), dy, cfg)
        if changes == "residuals":
            kept.x = kept.x.clone()
        return found

    @wgrad_of(KeptPending, AffineParams)
    def kept_wgrad(pending, cfg, *, into=None):
        found = right.wgrad(pending.copy(), cfg, into=into)
        if changes == "pending":
            pending.dy = pending.dy.clone()
        return found

    op = make_op("kept", SreluConfig, init=affine_init, fwd=right.fwd, dgrad=kept_dgrad, wgrad=kept_wgrad)
    if not changes:
        return run_kept(op, "pure")
    with pytest.raises(AssertionError, match="^law 'pure', torch.float64: a backward changes residuals or pending"):
        run_kept(op, "pure")


def test_a_run_of_the_law_compiles_is_no_recompilation_of_the_one_before(monkeypatch):
    """The compiler refuses a function that it has compiled too often, if it does not forget it."""
    called = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: called.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda step, **how: called.append("compile") or step)
    run(srelu_of(checks=None), laws=("compiles",))
    assert called == ["reset", "compile"]
