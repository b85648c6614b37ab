"""Code that is made for a structure finds the leaves that a general walk finds, or refuses the tree."""

import collections
import random
import threading

import pytest
import torch

from funcops import LinearConfig, LinearParams, qlinear, trees
from funcops.engine.random import key
from funcops.library.ops.rms_norm import RMSNormParams
from funcops.low_precision import Fp8Block, quantize_params, with_recipe
from funcops.optim import AdamWConfig, _walk, adamw_init, adamw_update, global_norm
from funcops.optim._walk import leaves_of, rows_of

Pair = collections.namedtuple("Pair", "a b")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The code that was made, none at first."""
    monkeypatch.setattr(_walk, "_known", found := {})
    return found


def leaf(rng):
    return rng.choice((torch.ones(1), torch.nn.Parameter(torch.ones(1)), None, True))


def drawn(rng, depth=3):
    kind = rng.choice(("leaf", "dict", "list", "tuple", "linear", "norm")) if depth else "leaf"
    if kind == "leaf":
        return leaf(rng)
    if kind == "linear":
        return LinearParams(leaf(rng), leaf(rng))
    if kind == "norm":
        return RMSNormParams(leaf(rng))
    children = [drawn(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == "dict":
        return dict(zip(rng.sample(["a", "b", "10", "9", "it's", "x.y"], len(children)), children, strict=True))
    return children if kind == "list" else tuple(children)


def same(found, wanted):
    return len(found) == len(wanted) and all(a is b for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_drawn_trees_have_the_leaves_of_a_general_walk(seed):
    """In any order, and each again: the code of one tree is tried on others of the same root."""
    rng = random.Random(seed)
    each = [drawn(rng) for _ in range(12)] + [{"a": drawn(rng), "b": drawn(rng, 1)} for _ in range(12)]
    for tree in rng.choices(each, k=60):
        assert same(leaves_of(tree), trees.leaves(tree)), tree
        other = rng.choice(each)
        rows = rows_of(tree, other)
        if rows is not None:
            assert trees.same_structure(tree, other) and same(rows[1], trees.leaves(other))


OTHERS = {
    "a subtree for a leaf": {"a": {"w": {"z": None}}, "b": torch.ones(1)},
    "a leaf for a subtree": {"a": torch.ones(1), "b": torch.ones(1)},
    "another key": {"a": {"v": None}, "b": torch.ones(1)},
    "a key more": {"a": {"w": None, "z": None}, "b": torch.ones(1)},
    "a subclass": collections.OrderedDict(a={"w": None}, b=torch.ones(1)),
    "a number": {"a": {"w": 1.0}, "b": torch.ones(1)},
    "a named tuple": {"a": Pair(None, None), "b": torch.ones(1)},
    "numbers for keys": {"a": {0: None}, "b": torch.ones(1)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_tree_of_another_kind_is_no_row(name):
    wanted, other = {"a": {"w": None}, "b": torch.ones(1)}, OTHERS[name]
    assert rows_of(wanted, {"b": None, "a": {"w": torch.ones(2)}}) is not None
    assert rows_of(wanted, other) is None and rows_of(other, wanted) is None
    assert same(leaves_of(other), trees.leaves(other))


def test_static_fields_are_compared(known):
    """A weight in codes has a format beside its tensors: its node has no code."""
    cfg = with_recipe(LinearConfig(128, 128, bias=False), Fp8Block())
    codes = quantize_params(qlinear.init(cfg, key=key(0)), cfg)
    for _ in range(_walk.EACH + 3):
        assert rows_of(codes, codes) is None and same(leaves_of(codes), trees.leaves(codes))


def test_a_tree_without_code_is_not_tried_at_every_step(known, monkeypatch):
    made, make = [], _walk._made
    monkeypatch.setattr(_walk, "_made", lambda tree: made.append(tree) or make(tree))
    tree = {"a": Pair(torch.ones(1), None)}
    for _ in range(20):
        assert same(leaves_of(tree), trees.leaves(tree))
    assert len(made) == _walk.EACH


def test_code_is_made_for_so_many_structures(known):
    for i in range(_walk.ROOTS + 3):
        for depth in range(_walk.EACH + 3):
            tree = {f"root{i}": [torch.ones(1)] * depth}
            assert same(leaves_of(tree), trees.leaves(tree))
    assert len(known) == _walk.ROOTS and all(len(walks) <= _walk.EACH for walks in known.values())


def test_a_step_makes_code_once(known, monkeypatch):
    """Params, gradients and means have one structure; threads may make it at once."""
    made, make = [], _walk._made
    monkeypatch.setattr(_walk, "_made", lambda tree: made.append(tree) or make(tree))
    params, cfg = {"w": LinearParams(torch.ones(2, 2), torch.ones(2)), "frozen": None}, AdamWConfig()
    state = adamw_init(params, cfg)
    for _ in range(3):
        adamw_update(params, params, state, cfg, in_place=True)
        global_norm(params)
    assert len(made) == 1
    threads = [threading.Thread(target=global_norm, args=({"of threads": params},)) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert same(leaves_of({"of threads": params}), trees.leaves(params))


def test_a_tracer_walks_in_the_general_way(known):
    torch.fx.experimental.proxy_tensor.make_fx(lambda t: global_norm({"a": t}))(torch.ones(2))
    assert not known
