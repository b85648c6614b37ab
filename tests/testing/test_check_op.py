"""`check_op` names the faults of a wrong op, and of a wrong call of `check_op` itself."""

import re
from dataclasses import field

import pytest
import torch

from funcops import Compress, LinearConfig, Policy, linear, with_policy
from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import OpConfig, config, dgrad_of, forward, make_op, recompute_of, wgrad_of
from funcops.engine.contract.schema import DGRAD, RECOMPUTE, WGRAD, Pending, Residuals, saved
from funcops.engine.errors import FLOATS, check
from funcops.engine.residuals.forms import Packed
from funcops.engine.trees import leaf, tree
from funcops.testing import Error, check_op
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close

# y = x exp(a): both halves and y once more read both fields


@config
class GrowConfig(OpConfig):
    dim: int = field(kw_only=False)


@tree
class GrowParams:
    a: torch.Tensor = leaf("[D]")


def grow_of(needed_by=DGRAD | WGRAD | RECOMPUTE, rows=lambda t: t.reshape(-1, t.shape[-1]).sum(0)):
    """The op with `a` declared to be needed by this, and with these sums over rows."""

    class GrowResiduals(Residuals):
        x: torch.Tensor = saved("[*, D]", alias="x", needed_by=DGRAD | WGRAD | RECOMPUTE)
        a: torch.Tensor = saved("[D]", alias="params.a", needed_by=needed_by)

    class GrowPending(Pending):
        x: torch.Tensor = saved("[*, D]", alias="residuals.x", needed_by=WGRAD)
        a: torch.Tensor = saved("[D]", alias="residuals.a", needed_by=WGRAD)
        dy: torch.Tensor = saved("[*, D]", alias="dy", needed_by=WGRAD)

    def grow_init(cfg, *, key=None, device=None, dtype=None):
        return GrowParams(torch.ones(cfg.dim, device=device, dtype=dtype))

    @forward(GrowConfig, GrowParams)
    def grow_fwd(params, x, cfg, *, needs=Needs.ALL):
        check("grow_fwd", "x", x, (..., cfg.dim), FLOATS)
        check("grow_fwd", "params.a", params.a, (cfg.dim,), x.dtype, x)
        return x * params.a.exp(), GrowResiduals.keep(cfg, needs, x=x, a=params.a)

    @recompute_of(GrowResiduals)
    def grow_recompute(residuals, cfg):
        return residuals.x * residuals.a.exp()

    @dgrad_of(GrowResiduals)
    def grow_dgrad(residuals, dy, cfg):
        x, a = residuals.x, residuals.a
        check("grow_dgrad", "dy", dy, x.shape, x.dtype, x)
        dx = dy * a.exp() if residuals.needs.x else None
        return dx, GrowPending.keep(cfg, residuals.needs, x=x, a=a, dy=dy)

    @wgrad_of(GrowPending, GrowParams)
    def grow_wgrad(pending, cfg, *, into=None):
        wide = torch.promote_types(pending.dy.dtype, torch.float32)
        x, a, dy = (t.to(wide) for t in (pending.x, pending.a, pending.dy))
        da = rows(dy * x * a.exp())
        if into is None or getattr(into.a, "dtype", None) is not wide:
            da = da.to(pending.dy.dtype)
        return accumulate("grow_wgrad", GrowParams(da), into)

    return make_op(
        "grow",
        GrowConfig,
        init=grow_init,
        fwd=grow_fwd,
        dgrad=grow_dgrad,
        wgrad=grow_wgrad,
        recomputable="elementwise",
        recompute=grow_recompute,
    )


def checked(op, *laws, dtypes=(torch.float64, torch.bfloat16), x=lambda draw: draw.randn(3, 5), **options):
    def reference(params, x, cfg):
        return x * params.a.exp()

    check_op(op, cfg=GrowConfig(5), x=x, reference=reference, laws=laws, dtypes=dtypes, **options)


def test_a_field_that_both_halves_read():
    checked(grow_of(), "split", "pure", "mirror", "frugal", "right", "edges", "loud", unrounded=("params.a",))
    checked(grow_of(), "edges", x=lambda draw: draw.randn(5))


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5)], ids=str)
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (lambda t: t.flatten(0, -2).sum(0), "raised IndexError"),
        (lambda t: t.sum(tuple(range(t.dim() - 1)), keepdim=t.dim() == 1), "a is float64"),  # dim=() is all of them
    ],
)
def test_a_sum_over_rows_that_takes_no_x_without_any(rows, said, shape):
    with pytest.raises(AssertionError, match=rf"law 'edges', .*: .* of an x without leading dimensions.*{said}"):
        checked(grow_of(rows=rows), "edges", x=lambda draw: draw.randn(*shape))


@pytest.mark.parametrize(
    ("needed_by", "call"),
    [
        (DGRAD | RECOMPUTE, "bwd under Needs(x=False, params=True)"),
        (WGRAD | RECOMPUTE, "bwd under Needs(x=True, params=False)"),
        (DGRAD | WGRAD, "recompute under Needs(x=False, params=False, recompute=True)"),
    ],
)
def test_a_field_that_is_read_and_not_declared_is_named(needed_by, call):
    said = f"law 'frugal', torch.float64: {call} raised AttributeError: "
    declared = "|".join(p.name for p in (DGRAD, WGRAD, RECOMPUTE) if p in needed_by)
    with pytest.raises(
        AssertionError, match=f"^{re.escape(said)}.*; residuals.a is None there: {re.escape(f'needed_by={declared}')}"
    ):
        checked(grow_of(needed_by), "frugal")


@pytest.mark.parametrize("option", ["free", "cancels", "unrounded"])
@pytest.mark.parametrize("path", ["params.nope", "nope", "x.7"])
def test_a_path_that_the_op_does_not_have_is_refused(option, path):
    with pytest.raises(ValueError, match=rf"check_op: {option} must be paths among .*params\.weight.*, got '{path}'"):
        check_op(
            linear, cfg=LinearConfig(5, 3), x=lambda draw: draw.randn(3, 5), reference=lambda params, x, cfg: x, **{option: (path,)}
        )


def test_an_op_with_params_and_no_init_is_refused():
    """A chain would treat it as an op without params, and give them no gradient."""
    op = grow_of()
    with pytest.raises(ValueError, match="make_op 'grow': init must be given together with wgrad"):
        make_op("grow", GrowConfig, fwd=op.fwd, dgrad=op.dgrad, wgrad=op.wgrad)


@pytest.mark.parametrize(("got", "want"), [("a", torch.ones(1)), (torch.ones(1), None), (True, 1.0), (1.0, "a")], ids=str)
def test_values_of_two_kinds_are_a_difference_and_not_an_error(got, want):
    with pytest.raises(AssertionError, match="instead of"):
        assert_close({"x": got}, {"x": want}, dtype=torch.float32, length=1)
    with pytest.raises(AssertionError, match="x: complex numbers instead of real numbers"):
        assert_close({"x": torch.ones(1) * 1j}, {"x": torch.ones(1)}, dtype=torch.float32, length=1)
    assert_close({"x": None}, {"x": None}, dtype=torch.float32, length=1)


def test_differences_of_form_are_all_named():
    with pytest.raises(AssertionError, match=r"structure: \['x', 'y'\] instead of \['x', 'z'\]; x: shape \[2\] instead of \[3\]$"):
        assert_close({"x": torch.ones(2), "y": 1}, {"x": torch.ones(3), "z": 1}, dtype=torch.float32)


def test_a_leaf_too_many_or_too_few_is_a_difference():
    one, both = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    for got, want in ((one, both), (both, one)):
        with pytest.raises(AssertionError, match=r"structure: \['a'.*\] instead of \['a'"):
            assert_close(got, want, dtype=torch.float32)


@pytest.mark.parametrize("laws", [(), ("right", "nope"), ["right"], "right", None], ids=repr)
def test_laws_of_other_names_or_none_are_refused(laws):
    with pytest.raises(ValueError, match="check_op: laws must be a tuple of some of .*right.*, got "):
        check_op(linear, cfg=LinearConfig(5, 3), x=lambda draw: draw.randn(3, 5), reference=lambda params, x, cfg: x, laws=laws)


def test_no_dtypes_at_all_are_refused():
    with pytest.raises(ValueError, match=r"check_op: dtypes must be at least one dtype, got \(\)"):
        check_op(linear, cfg=LinearConfig(5, 3), x=lambda draw: draw.randn(3, 5), reference=lambda params, x, cfg: x, dtypes=())


@pytest.mark.parametrize("wrong", [{"call": 1}, {"match": None}, {"match": re.compile("x")}, {"error": "ValueError"}], ids=str)
def test_an_error_that_is_expected_is_described_by_a_function_text_and_class(wrong):
    with pytest.raises(TypeError, match=f"^Error: {next(iter(wrong))} must be"):
        Error(**{"call": lambda: None, "match": "x must be", **wrong})


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
def test_a_compressed_tensor_is_decoded_for_an_op_that_does_not_say_it_reads_codes(codec):
    op, cfg, params = grow_of(), GrowConfig(4), GrowParams(torch.zeros(4))
    packed, x = with_policy(op, Policy({"x": Compress(codec)})), torch.ones(3, 4)
    y, kept = packed.fwd(params, x, cfg)
    assert type(kept.x) is Packed
    assert_close(packed.bwd(kept, torch.ones_like(y), cfg), op.bwd(op.fwd(params, x, cfg)[1], y, cfg), dtype=torch.bfloat16)


UNLIKE = {  # what two trees must have alike, and got: the message of a law that compares bits
    "dx: a differs: must be equal to the bit, got 2 of 6 elements that are not, as at [0, 1]: 1.0 and 2.0": (
        {"a": torch.ones(2, 3)},
        {"a": torch.tensor([[1.0, 2, 1]] * 2)},
    ),
    "dx: value differs: must be equal to the bit, got 1 of 2 elements that are not, as at [1]: inf and 3.4028234663852886e+38": (
        torch.tensor([float("nan"), float("inf")]),
        torch.tensor([float("nan"), torch.finfo(torch.float32).max]),
    ),
    "dx: value differs: must be tensors of one shape and dtype, got float32[2] and float64[2]": (
        torch.ones(2),
        torch.ones(2, dtype=torch.float64),
    ),
    "dx: 0 differs: must be tensors of one shape and dtype, got float32[1] and None": ((torch.ones(1),), (None,)),
    "dx: structures differ: must be equal trees, got one with missing ['b'], extra ['a']": ({"a": None}, {"b": None}),
}


@pytest.mark.parametrize("said", UNLIKE)
def test_trees_that_differ_are_told_apart_by_path_and_by_how_much(said):
    with pytest.raises(AssertionError, match=f"^{re.escape(said)}$"):
        same_bits(*UNLIKE[said], "dx")
    for tree_ in UNLIKE[said]:
        same_bits(tree_, tree_, "dx")
