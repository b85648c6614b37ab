"""Good arguments of `funcops.trees`, for `good_arguments.py`."""

from __future__ import annotations

import dataclasses

import torch
from good_rows import ANY, Row, doubled, params, tree, x

from funcops.engine import trees

LEAVES = {("tree", "{'a': 'x', 'b': None}"): ANY, ("tree", "{'a': complex64[2, 2], 'b': None}"): ANY}
NODES = {
    ("node", f"LinearParams(weight={weight}, bias={bias})"): ANY
    for weight, bias in [
        ("'x'", "float32[4]"),
        ("complex64[4, 4]", "float32[4]"),
        ("float32[4, 4]", "'x'"),
        ("float32[4, 4]", "complex64[4]"),
    ]
}


TREES = {
    "trees.at": Row(
        lambda: {"tree": tree(), "path": "a"}, {"path": ("no.such", "a.0")}, {("path", "''"): "the tree itself", **LEAVES}
    ),
    "trees.has": Row(
        lambda: {"tree": tree(), "path": "a"}, accepts={"tree": ANY, ("path", "'no such'"): "no", ("path", "''"): "no"}
    ),
    "trees.put": Row(lambda: {"tree": tree(), "path": "a", "value": 3}, {"path": ("no.such", "a.0", "")}, {"value": ANY, **LEAVES}),
    "trees.cast": Row(lambda: {"tree": tree(), "dtype": torch.float64}, {"dtype": (None,)}, {"tree": ANY}),
    "trees.fake": Row(
        lambda: {"t": x(), "dtype": torch.float32},
        accepts={
            **{("t", value): "of any kind" for value in ("complex64[2, 4]", "float32[3, 5]", "float32[2, 4]")},
            ("dtype", "torch.int64"): "any dtype",
        },
    ),
    "trees.leaf": Row(
        lambda: {"shape": "[*]", "gradient": False, "each_of": "means"}, accepts={"shape": "words", "each_of": "any name, or none"}
    ),
    "trees.elements": Row(lambda: {"tree": tree()}, accepts={"tree": ANY}),
    "trees.dense": Row(lambda: {"tree": tree()}, accepts={"tree": ANY}),
    "trees.constant_paths": Row(lambda: {"tree": tree()}, accepts={"tree": ANY}),
    "trees.static": Row(lambda: {"default": None}, accepts={"default": "any value"}),
    "trees.tree_map": Row(lambda: {"fn": doubled, "tree": {"a": 1}, "is_leaf": lambda leaf: False}, accepts={"tree": ANY}),
    "trees.tree_map_tensors": Row(lambda: {"fn": doubled, "tree": tree()}, accepts={"tree": ANY}),
    "trees.tree_map_with_path": Row(
        lambda: {"fn": lambda path, leaf: leaf, "tree": tree(), "is_leaf": lambda node: False}, accepts={"tree": ANY}
    ),
    "trees.unflatten": Row(lambda: {"spec": trees.structure(tree()), "values": [1, 2]}, {"values": ([1], [1, 2, 3])}),
    "trees.with_leaves": Row(lambda: {"tree": tree(), "values": [1, 2]}, {"values": ([1], [1, 2, 3])}, {"tree": ANY}),
    "trees.replace": Row(lambda: {"node": params()}, accepts=NODES),
    "trees.same_structure": Row(lambda: {"a": tree(), "b": tree()}, accepts={"a": ANY, "b": ANY}),
    "trees.Aside": Row(lambda: {"value": None}, accepts={"value": "any value"}),
    "trees.show": Row(lambda: {"node": params()}, accepts=NODES),
    "trees.register": Row(
        lambda: {"cls": dataclasses.make_dataclass("Fresh", ["a"]), "aside": ""},
        {"cls": (int,)},
        {("aside", value): "any attribute" for value in ("'no such'", "''")},
    ),
    "trees.register_node": Row(
        lambda: dict(cls=type("Fresh", (), {}), children=vars, context=vars, rebuild=lambda v, c: None, entries=vars)
    ),
    **{f"trees.{name}": Row(lambda: {"cls": type("Fresh", (), {})}) for name in ("tree", "stands_in")},
    "trees.stands_for_one": Row(lambda: {"node": params()}, accepts={"node": ANY}),
    **{
        f"trees.{name}": Row(lambda: {"tree": tree()}, accepts={"tree": ANY})
        for name in ("flatten", "nbytes", "nothing_like", "structure", "tensors")
    },
    "trees.leaves": Row(lambda: {"tree": tree(), "is_leaf": lambda node: False}, accepts={"tree": ANY}),
    "trees.paths": Row(lambda: {"tree": tree(), "is_leaf": lambda leaf: False}, accepts={"tree": ANY}),
}
