"""Residuals and pendings whose leaves were cast, moved or replaced, of every operator: the backward gives right numbers, or names
itself and the leaf before it computes anything. Leaves edited one by one are in the law Guarded."""

import copy
import dataclasses
import re

import pytest
import torch
from law_cases import FIRST

from funcops import (
    ActivationConfig,
    ChainConfig,
    LinearConfig,
    Offload,
    ParallelConfig,
    Policy,
    Recompute,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    activation,
    chain,
    donate,
    linear,
    parallel,
    random,
    remat,
    repeat,
    rms_norm,
    skip,
    with_policy,
)
from funcops.engine.contract.schema import Saved
from funcops.engine.trees import at, paths, put, replace, structure, tensors, tree_map, tree_map_tensors, unflatten
from funcops.library.formats import dense
from funcops.low_precision import NF4, weight_only

FLOAT = lambda t: t.is_floating_point() and t.dtype.itemsize > 1  # noqa: E731


def to(dtype):
    return lambda tree: tree_map_tensors(lambda t: t.to(dtype) if FLOAT(t) else t, tree)


EDITS = {
    "float64": to(torch.float64),
    "bfloat16": to(torch.bfloat16),
    "complex64": to(torch.complex64),
    "meta": lambda tree: tree_map_tensors(lambda t: t.to("meta"), tree),
    "flat": lambda tree: tree_map_tensors(lambda t: t[None], tree),
}


def gradient_of(y):
    floats = tree_map(lambda t: t if t is not None and t.is_floating_point() else None, dense(y))
    return tree_map_tensors(lambda t: torch.sin(torch.arange(t.numel(), dtype=torch.float64)).reshape(t.shape).to(t), floats)


def waiting(op, params, x, cfg):
    """Rows of the residuals or the pending of a case, a call that takes them, and new accumulators, which must stay as they are if
    the call raises."""
    y, kept = op.fwd(params, x, cfg)
    dy = gradient_of(y)
    dx, pending = op.dgrad(kept, dy, cfg)
    grads = op.bwd(kept, dy, cfg)[0]
    sums = lambda: tree_map_tensors(torch.zeros_like, grads)  # noqa: E731
    rows = [
        ("bwd", kept, lambda node, into: op.bwd(node, dy, cfg)),
        ("bwd", kept, lambda node, into: op.bwd(donate(node), dy, cfg)),
        ("dgrad", kept, lambda node, into: op.dgrad(node, dy, cfg)[0]),
    ]
    if pending is not None:
        rows += [("wgrad", pending, lambda node, into: op.wgrad(node, cfg))]
        rows += [("wgrad", pending, lambda node, into: op.wgrad(donate(node), cfg))]
    if grads is not None:
        rows += [("bwd", kept, lambda node, into: op.bwd(node, dy, cfg, into=into))]
        rows += [("wgrad", pending, lambda node, into: op.wgrad(node, cfg, into=into))] * (pending is not None)
    return [(half, tree, run, sums) for half, tree, run in rows]


def unchanged(tree, edited):
    """Whether the edit changed no leaf's form."""
    form = lambda t: (t.dtype, t.shape, t.device)  # noqa: E731
    return [form(t) for t in tensors(tree)] == [form(t) for t in tensors(edited)]


def check_edited(op, params, x, cfg, edit):
    """Returns the number of calls that were refused."""
    refused = 0
    for half, tree, run, sums in waiting(op, params, x, cfg):
        want, into = run(tree_map(lambda t: t, tree), sums()), sums()
        moved = edit is EDITS["meta"] and half == "wgrad"
        try:
            found = run(edit(tree), into)
        except (TypeError, ValueError) as error:
            kind = "(pending|residuals)" if half == "wgrad" else "residuals"  # a chain's pending holds what it recomputes from
            expected = rf"{kind}\.\S+ must be .*, got .*(Put back|move both)|into\.\S+ must be on device meta"
            assert re.search(expected, str(error)), str(error)
            assert re.search(r"donate:|_(bwd|dgrad|wgrad|recompute): ", str(error)), str(error)
            assert not any(t.any() for t in tensors(into)), "added before it raised"
            refused += 1
        else:
            if moved:  # with its dy: the gradients are there
                continue
            assert unchanged(tree, edit(tree)), f"{half} went through"
            for a, b in zip(tensors(found), tensors(want), strict=True):
                torch.testing.assert_close(a, b, equal_nan=True)
    return refused


ASSIGNED = {
    "float64": lambda t: t.double(),
    "another dtype": lambda t: t.to(torch.float16 if t.dtype is not torch.float16 else torch.int64),
    "flat": lambda t: t[None],
    "one row": lambda t: t[:1],
    "no rows": lambda t: t[:0],
    "longer": lambda t: torch.cat([t, t]),
    "None": lambda t: None,
    "a number": lambda t: 3.0,
}


def nodes(tree):
    """The nodes of residuals or a pending."""
    inside = [node for one in tree.values() for node in nodes(one)] if isinstance(tree, dict) else []
    return inside + [tree] * isinstance(tree, Saved)


def change(t, edit):
    """The edited tensor, if the edit changes its form."""
    found = None if t.dim() == 0 and edit in (ASSIGNED["one row"], ASSIGNED["no rows"], ASSIGNED["longer"]) else [edit(t)]
    same = lambda a: isinstance(a, torch.Tensor) and (a.dtype, a.shape) == (t.dtype, t.shape)  # noqa: E731
    return None if found is None or same(found[0]) else found


@pytest.mark.turns("edit", "case", every=8)
@pytest.mark.parametrize("edit", ASSIGNED)
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_field_that_was_assigned(case, edit):
    """An assignment is compared as `replace` is: another form raises by name, and what was there before may be put back."""
    params, x = case.make(torch.float32 if torch.float32 in case.dtypes else case.dtypes[0])
    op, cfg = case.op, case.cfg
    y, kept = op.fwd(params, x, cfg)
    dy = gradient_of(y)
    calls = [(kept, lambda: op.bwd(kept, dy, cfg)), (kept, lambda: op.dgrad(kept, dy, cfg)[0])]
    pending = op.dgrad(kept, dy, cfg)[1]
    for tree, run in [*calls, (pending, lambda: op.wgrad(pending, cfg))]:
        want = run()
        for node in nodes(tree):
            for name in [name for name, field in node.fields.items() if field.wanted(node.needs)]:
                before = getattr(node, name)
                found = change(before, ASSIGNED[edit]) if isinstance(before, torch.Tensor) else None
                if found is None:
                    continue
                setattr(node, name, found[0])
                with pytest.raises((TypeError, ValueError), match=rf"\.{name} must be .*, as the forward kept it, got"):
                    run()
                setattr(node, name, before)
        for a, b in zip(tensors(run()), tensors(want), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


WRAPPED = {
    "remat": remat,
    "remat, x on the host": lambda op: remat(op, True),
    "offloaded": lambda op: with_policy(op, Policy({"*": Offload()})),
    "minimal": lambda op: with_policy(op, "minimal"),
}


@pytest.mark.turns("edit", "case", every=4)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_tree_that_was_edited_as_a_whole(case, edit):
    params, x = case.make(torch.float32 if torch.float32 in case.dtypes else case.dtypes[0])
    check_edited(case.op, params, x, case.cfg, EDITS[edit])


@pytest.mark.turns("edit", every=2)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_op(name, edit):
    case = next(case for case in FIRST if case.op.name == ("chain" if "off" in name or name == "minimal" else "linear"))
    params, x = case.make(torch.float32)
    assert check_edited(WRAPPED[name](case.op), params, x, case.cfg, EDITS[edit])


@pytest.mark.parametrize("edit", EDITS)
def test_weights_in_a_format(edit):
    op, cfg = weight_only(linear, NF4()), linear.config(64, 64)
    assert check_edited(op, op.init(cfg, key=random.key(0)), torch.randn(3, 64), cfg, EDITS[edit])


MLP = ChainConfig(
    steps=(
        Step("norm", rms_norm, RMSNormConfig(dim=8)),
        Step("up", linear, LinearConfig(8, 12)),
        Step("act", activation, ActivationConfig("silu")),
        Step("down", linear, LinearConfig(12, 8)),
    )
)
BRANCHES = ParallelConfig(branches=(Step("a", chain, MLP), Step("b", skip, SkipConfig(chain, MLP))))
RECOMPUTING = {
    "chain": (chain, MLP),
    "skip": (skip, SkipConfig(chain, MLP)),
    "repeat": (repeat, RepeatConfig(skip, SkipConfig(chain, MLP), 2)),
    "repeat, stacked": (repeat, RepeatConfig(skip, SkipConfig(chain, MLP), 2, stacked=True)),
    "parallel": (parallel, BRANCHES),
    "a chain in a chain": (chain, ChainConfig(steps=(Step("in", chain, MLP), Step("out", skip, SkipConfig(chain, MLP))))),
    "Recompute": (with_policy(chain, Policy({"up.x": Recompute()}, outputs="none")), MLP),
    "of norms": (with_policy(repeat, "recompute_norms"), RepeatConfig(chain, MLP, 2)),
    "another field packed": (with_policy(chain, Policy({"act.x": Offload()})), MLP),
    "remat of a step": (chain, dataclasses.replace(MLP, steps=(*MLP.steps[:3], Step("down", remat(linear), LinearConfig(12, 8))))),
}
FILLED = {
    "put": put,
    "tree_map": lambda tree, path, t: unflatten(structure(tree), [t if p == path else v for p, v in paths(tree).items()]),
    "replace": lambda tree, path, t: _in_its_node(tree, path, lambda node, name: replace(node, **{name: t})),
    "dataclasses": lambda tree, path, t: _in_its_node(tree, path, lambda node, name: dataclasses.replace(node, **{name: t})),
    "deepcopy": lambda tree, path, t: copy.deepcopy(put(tree, path, t)),
    "twice": lambda tree, path, t: put(put(tree, path, t[:1]), path, t),
}


def _in_its_node(tree, path, change):
    above, _, name = path.rpartition(".")
    return put(tree, above, change(at(tree, above), name))


def left_out(tree):
    """The paths of the fields that a program computes again."""
    above = dict.fromkeys(path.rpartition(".")[0] for path, leaf in paths(tree).items() if leaf is None)
    owners = [(path, node) for path in above if path and isinstance(node := at(tree, path), Saved)]
    dropped = [(path, node, name) for path, node in owners for name in node.needs.drop if name in node.fields]
    return [f"{path}.{name}" for path, node, name in dropped if getattr(node, name) is None]


@pytest.mark.turns("value", "way", "name", every=10)
@pytest.mark.parametrize("value", ["right", "zeros", "another shape", "another dtype"])
@pytest.mark.parametrize("way", FILLED)
@pytest.mark.parametrize("name", RECOMPUTING)
def test_a_residual_that_is_recomputed_is_not_edited_in_silence(name, way, value):
    """A value in a field that the backward computes again would be overwritten: every half refuses it, by path and with a remedy;
    a field that is emptied again is as the forward left it."""
    op, cfg = RECOMPUTING[name]
    params, x = op.init(cfg, key=random.key(0)), torch.randn(3, 8)
    t = {"right": torch.randn(3, 12), "zeros": torch.zeros(3, 12), "another shape": torch.ones(5), "another dtype": torch.arange(3)}
    tried = 0
    for half, tree, run, sums in waiting(op, params, x, cfg):
        for path in left_out(tree):
            *steps, field = path.split(".")
            # a walk gives new nodes, as some calls give theirs away
            edited, back = (FILLED[way](tree_map(lambda leaf: leaf, tree), path, t[value]) for _ in range(2))
            said = rf"\.{field} must be None, because the chain recomputes it .*Keep it, with Save"
            with pytest.raises(ValueError, match=said) as error:
                run(edited, sums())
            assert ".".join(steps) in str(error.value).replace(": ", "."), str(error.value)
            assert f"_{half}: " in str(error.value) or ": donate: " in str(error.value), str(error.value)
            tried += 1
            want = run(tree_map(lambda leaf: leaf, tree), sums())
            for a, b in zip(tensors(run(put(back, path, None), sums())), tensors(want), strict=True):
                assert torch.equal(a, b)
    assert tried > 4, "nothing is recomputed here"
