"""Needs: masks by path, interned, hashable."""

import copy
import importlib.util
import pickle
import sys

import pytest
import torch
from law_cases import CASES, FIRST

from funcops import (
    LinearConfig,
    LinearCrossEntropyConfig,
    LinearCrossEntropyParams,
    LinearParams,
    Needs,
    linear_cross_entropy,
    linear_fwd,
    random,
)
from funcops.engine.contract import needs as needs_module
from funcops.engine.contract.needs import sub_mask
from funcops.engine.trees import leaves, nothing_like, paths, same_structure, tree_map
from funcops.library.formats import dense
from funcops.testing.checks import float_like, same_bits


def test_equal_needs_are_one_object():
    assert Needs() is Needs.ALL and Needs(x=False, params=False) is Needs.NONE
    assert Needs(params=("b", "a")) is Needs(params=["a", "b", "a"])
    assert copy.deepcopy(Needs(x=False)) is pickle.loads(pickle.dumps(Needs(x=False))) is Needs(x=False)
    assert copy.copy(Needs(x=False)) is Needs(x=False)
    assert {Needs(params="a"): 1}[Needs(params=["a"])] == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (True, True),
        (False, False),
        ((), False),
        ("weight", ("weight",)),
        (["up.weight", "down"], ("down", "up.weight")),
        ({"weight": True, "bias": False}, ("weight",)),
        ({"weight": True, "bias": True}, ("bias", "weight")),
        ({"weight": True}, ("weight",)),  # what a tree does not name needs none
        (LinearParams(False, True), ("bias",)),
        ((LinearParams(True, True), LinearParams(False, True)), ("0.bias", "0.weight", "1.bias")),
    ],
)
def test_masks(given, kept):
    assert Needs(params=given).params == kept


def test_a_path_covers_what_is_below_it_and_reaches_what_holds_it():
    needs = Needs(params=("blocks.1", "head.weight"))
    asked = ["blocks", "blocks.1", "blocks.1.up.weight", "blocks.10", "blocks.0", "head.weight", "head.bias"]
    assert [needs.param(path) for path in asked] == [True, True, True, False, False, True, False]


def test_a_part_of_a_tuple():
    needs = Needs(x=("0", "2"))
    assert [needs.input(i) for i in range(3)] == [True, False, True] and needs.input("0")
    assert all(Needs.ALL.input(i) for i in range(3)) and not Needs.NONE.input(0)


def test_a_sub_mask_holds_the_paths_under_a_name():
    assert sub_mask(("a.x", "a.y", "b"), "a") == ("x", "y")
    assert sub_mask(("a.x", "b"), "b") is True and sub_mask(("a.x",), "c") is False
    assert sub_mask(True, "a") is True and sub_mask(False, "a") is False


def test_needs_are_true_where_anything_is_needed():
    assert Needs.ALL and Needs(x=False) and Needs(params="a") and not Needs.NONE


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Needs(params={"weight": 1}), TypeError, "Needs: params at 'weight' must be a bool, or every entry a path, got 1"),
        (lambda: Needs(x=[1, 2]), TypeError, "Needs: x at '0' must be a bool, or every entry a path, got 1"),
    ],
)
def test_bad_masks(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_unknown_path_is_named():
    params = LinearParams(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(ValueError, match="linear_fwd: needs.params must be paths among weight, bias, got 'wieght'"):
        linear_fwd(params, torch.ones(1, 3), LinearConfig(3, 2), needs=Needs(params="wieght"))


INPUTS = {str(case): case for case, _ in CASES}


@pytest.mark.turns("case", every=3, each="op")
@pytest.mark.parametrize("case", INPUTS.values(), ids=str)
def test_paths_that_x_does_not_have_are_refused(case):
    params, x = case.make(case.dtypes[0])
    known = [path for path in paths(x) if path]
    for path in ["nonsense", str(len(leaves(x))), "-1", *[f"{path}.0" for path in known], *[f"{path}0" for path in known]]:
        with pytest.raises(ValueError, match=r"_fwd: needs\.x must be (paths among|a bool).*, got '"):
            case.op.fwd(params, x, case.cfg, needs=Needs(x=[*known, path]))
    for path in known:
        case.op.fwd(params, x, case.cfg, needs=Needs(x=[path]))


@pytest.mark.parametrize("x", [True, False])
@pytest.mark.parametrize("params", [True, False])
def test_a_compiler_that_asks_first_gets_the_same_object(x, params, monkeypatch):
    """In a module that is loaded anew, so that nothing has asked before."""
    spec = importlib.util.spec_from_file_location(f"needs_for_{x}_{params}", needs_module.__file__)
    anew = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, anew)
    spec.loader.exec_module(anew)
    asked = torch.compile(lambda t: (t + 1, anew.Needs(x, params)), backend="eager", fullgraph=True)
    assert asked(torch.ones(2))[1] is anew.Needs(x, params)


@pytest.mark.parametrize("gradient", ["forward", "backward"])
def test_a_loss_of_which_only_labels_are_asked_gives_nothing(gradient):
    """They have no gradient, as in a chain whose other parts are frozen."""
    cfg = LinearCrossEntropyConfig(4, 5, gradient=gradient)
    params, x = linear_cross_entropy.init(cfg, key=random.key(0)), (torch.randn(3, 4), torch.tensor([0, 1, 2]))
    _, kept = linear_cross_entropy.fwd(params, x, cfg, needs=Needs(params=False, x=["1"]))
    dparams, dx = linear_cross_entropy.bwd(kept, torch.ones(()), cfg)
    assert type(dparams) is LinearCrossEntropyParams and dparams.weight is None and dx == (None, None)
    into = LinearCrossEntropyParams(torch.ones_like(params.weight))
    assert linear_cross_entropy.bwd(kept, torch.ones(()), cfg, into=into)[0] is into and into.weight.eq(1).all()
    assert linear_cross_entropy.dgrad(kept, torch.ones(()), cfg)[0] == (None, None)


SEVERAL = ("fork", "latent_split", "parallel", "permute", "qkv_split", "route")  # outputs, each with a dy


@pytest.mark.parametrize("case", [case for case in FIRST if case.op.name in SEVERAL], ids=lambda case: case.op.name)
def test_outputs_of_which_none_has_a_gradient_give_none(case):
    params, x = case.make(torch.float32)
    y, kept = case.op.fwd(params, x, case.cfg)
    dx, _ = case.op.dgrad(kept, tree_map(lambda t: None, y), case.cfg)
    assert all(t is None for t in leaves(dx))


def without_gradient(case):
    """The paths of x that hold integers or None."""
    return [
        path for path, t in paths(dense(case.make(torch.float32)[1])).items() if path and (t is None or not t.is_floating_point())
    ]


@pytest.mark.parametrize("case", [case for case in FIRST if without_gradient(case)], ids=lambda case: case.op.name)
def test_an_x_of_which_only_integers_are_asked_has_no_gradient(case):
    params, x = case.make(torch.float32)
    y, kept = case.op.fwd(params, x, case.cfg, needs=Needs(x=without_gradient(case), params=True))
    dx, pending = case.op.dgrad(kept, float_like(y, 7), case.cfg)
    whole, found = case.op.bwd(case.op.fwd(params, x, case.cfg)[1], float_like(y, 7), case.cfg)
    assert all(t is None for t in leaves(dx)) and (dx is None or same_structure(nothing_like(dx), nothing_like(found)))
    if case.op.params is not type(None):
        same_bits(case.op.wgrad(pending, case.cfg), whole, "params")


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.op.name)
def test_residuals_that_recompute_y_alone_give_no_gradient(case):
    """Each part of x that would have a gradient gets None, and nothing waits for a weight gradient."""
    params, x = case.make(torch.float32)
    y, kept = case.op.fwd(params, x, case.cfg, needs=Needs.NONE.with_recompute())
    dy = tree_map(lambda t: float_like(t, 7) if t is not None and t.is_floating_point() else None, dense(y))
    dx, pending = case.op.dgrad(kept, dy, case.cfg)
    found, _ = case.op.dgrad(case.op.fwd(params, x, case.cfg)[1], dy, case.cfg)
    assert all(t is None for t in [*leaves(dx), *leaves(pending)]) and (pending is None or case.op.params is not type(None))
    assert dx is None if isinstance(found, torch.Tensor) else same_structure(dx, nothing_like(found))


RECOMPUTED = {case.op.name: case for case, dtype in CASES if case.op.recompute is not None and dtype is torch.float64}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_residuals_for_a_recomputation_alone_have_a_backward_without_gradients(name):
    case = RECOMPUTED[name]
    y, kept = case.op.fwd(*case.make(torch.float64), case.cfg, needs=Needs.NONE.with_recompute())
    dparams, dx = case.op.bwd(kept, float_like(y, 0), case.cfg)
    found, pending = case.op.dgrad(kept, float_like(y, 0), case.cfg)
    assert [t for t in leaves((dparams, dx, found, case.op.wgrad(pending, case.cfg))) if t is not None] == []
