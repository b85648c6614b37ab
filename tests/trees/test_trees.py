"""Trees: two pytree libraries agree, None is a leaf, every leaf has a path."""

import copy
import pickle

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree

from funcops import LinearConfig, LinearParams, linear_dgrad, linear_fwd, trees
from funcops.engine.trees import (
    NAMESPACE,
    at,
    cast,
    leaves,
    nbytes,
    nothing_like,
    paths,
    put,
    replace,
    same_structure,
    tensors,
    tree_map,
    tree_map_with_path,
    with_leaves,
)


def model():
    return {"blocks": (LinearParams(torch.ones(2, 3), None), LinearParams(torch.zeros(1, 2), torch.ones(1))), "n": None}


def test_paths_name_every_leaf_in_the_order_of_leaves():
    found = paths(model())
    assert list(found) == ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "n"]
    tree = model()
    assert all(a is b for a, b in zip(paths(tree).values(), leaves(tree), strict=True))
    assert list(paths(torch.ones(1))) == [""]


def test_none_is_a_leaf():
    tree = model()
    assert len(leaves(tree)) == 5 and len(tensors(tree)) == 3
    assert same_structure(tree, nothing_like(tree))
    assert tree_map(lambda t: t is None, tree)["n"] is True


def test_both_libraries_take_a_node_apart_and_put_it_together_alike():
    params = LinearParams(torch.ones(2, 3), None)
    flat, spec = torch_pytree.tree_flatten(params)
    theirs = torch_pytree.tree_unflatten(flat, spec)
    ours, treespec = optree.tree_flatten(params, none_is_leaf=True, namespace=NAMESPACE)
    for made in (theirs, optree.tree_unflatten(treespec, ours)):
        assert type(made) is LinearParams and made.weight is params.weight and made.bias is None
    keys = [torch_pytree.keystr(path) for path, _ in torch_pytree.tree_flatten_with_path(params)[0]]
    assert keys[0] == "['weight']"


def test_residuals_and_pending_are_trees_and_stay_usable_through_a_map():
    cfg = LinearConfig(3, 2, bias=False)
    params, x, dy = LinearParams(torch.randn(2, 3), None), torch.randn(4, 3), torch.randn(4, 2)
    _, residuals = linear_fwd(params, x, cfg)
    clone = tree_map(torch.clone, residuals)
    x.add_(1)  # the clone does not alias it
    dx, pending = linear_dgrad(clone, dy, cfg)
    assert list(paths(residuals)) == ["x", "weight"] and list(paths(pending)) == ["x", "dy", "sums"]
    assert torch.equal(dx, dy @ params.weight)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["deepcopy", "pickle"])
def test_trees_survive(through):
    tree = model()
    again = through(tree)
    assert same_structure(tree, again)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(leaves(tree), leaves(again), strict=True))


def test_cast_returns_tensors_of_the_dtype_and_integers_unchanged():
    tree = {"w": torch.ones(2), "i": torch.arange(2), "none": None, "half": torch.ones(2, dtype=torch.bfloat16)}
    made = cast(tree, torch.bfloat16)
    assert made["w"].dtype is torch.bfloat16 and made["i"] is tree["i"]
    assert made["half"] is tree["half"] and made["none"] is None


def test_casting_many_at_once_equals_casting_each(monkeypatch):
    """All tensors are cast by one call, as on a GPU; a tensor in two places is cast for each, and one that requires grad apart."""
    shared, strided = torch.randn(3, 4), torch.randn(4, 3).mT
    tree = {"a": shared, "b": [shared, None, torch.arange(2)], "c": strided, "d": torch.ones(2, dtype=torch.bfloat16)}
    want = cast(tree, torch.bfloat16)
    assert not trees._copied_at_once(shared)
    monkeypatch.setattr(trees, "_copied_at_once", lambda t: not t.requires_grad)
    got = cast(tree, torch.bfloat16)
    assert got["d"] is tree["d"] and got["b"][2] is tree["b"][2] and got["a"] is not got["b"][0]
    for one, other in zip(tensors(got), tensors(want), strict=True):
        assert one.dtype is other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    assert cast({"w": shared.clone().requires_grad_()}, torch.float64)["w"].requires_grad


def test_at_and_put():
    tree = model()
    assert at(tree, "blocks.1.weight") is tree["blocks"][1].weight
    new = put(tree, "blocks.1.bias", None)
    assert at(new, "blocks.1.bias") is None and at(tree, "blocks.1.bias") is not None
    assert at(new, "blocks.0") is tree["blocks"][0]
    with pytest.raises(ValueError, match="at: path must be one of blocks.0.weight, .*, got 'blocks.2.weight'"):
        at(tree, "blocks.2.weight")


def test_replace_leaves_the_original():
    params = LinearParams(torch.ones(2, 3), None)
    other = replace(params, bias=torch.ones(2))
    assert params.bias is None and other.weight is params.weight


def test_bytes_count_a_storage_once():
    t = torch.ones(8)
    assert nbytes({"a": t, "b": t, "view": t[:2]}) == 32
    assert nbytes({"a": t, "b": t.clone()}) == 64


def test_map_with_path_and_with_leaves():
    tree = {"a": (1, None), "b": 2}
    assert tree_map_with_path(lambda path, value: path, tree) == {"a": ("a.0", "a.1"), "b": "b"}
    assert with_leaves(tree, [7, 8, 9]) == {"a": (7, 8), "b": 9}


def test_a_node_shows_shapes_not_numbers():
    assert repr(LinearParams(torch.ones(2, 3), None)) == "LinearParams(weight=float32[2, 3], bias=None)"


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("register: cls must be a dataclass, got 3", lambda: trees.register(3)),
        ("register: cls must be a dataclass, got dict", lambda: trees.register(dict)),
        ("show: node must be a node of a tree with named fields, got dict", lambda: trees.show({})),
        ("tree_map: fn must be a function, got 3", lambda: tree_map(3, {})),
        ("tree_map: is_leaf must be a function, got 3", lambda: tree_map(str, {}, is_leaf=3)),
        ("cast: dtype must be a floating dtype of at least 8 bits, got int64", lambda: cast({}, torch.int64)),
        ("cast: dtype must be a floating dtype of at least 8 bits, got float4", lambda: cast({}, torch.float4_e2m1fn_x2)),
    ],
)
def test_wrong_arguments_are_named(message, call):
    with pytest.raises(TypeError) as caught:
        call()
    assert message in str(caught.value).replace("torch.", "")


def test_what_is_put_aside_is_no_part_of_a_structure():
    """Two of them are equal, are one key of a dict, and look alike; a copy is empty."""
    one, other = trees.Aside([1]), trees.Aside()
    assert one == other and one != () and {one: "found"}[other] == "found" and repr(one) == "Aside()"
    for made in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert type(made) is trees.Aside and made.value is None
