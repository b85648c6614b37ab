"""Good arguments of `funcops.low_precision`, for `good_arguments.py`."""

from __future__ import annotations

import torch
from good_rows import ANY, CHAIN, META_KEY, Row, chain_params, grads

from funcops import Needs, linear, low_precision, random

LOW = low_precision.with_recipe(CHAIN, low_precision.Fp8Delayed(history=2), only=("a",))
OTHER_LEAVES = {
    (
        "params",
        f"{{'a': LinearParams(weight=float32[4, 4], bias={a}), 'b': LinearParams(weight={b}, bias=None)}}",
    ): "leaves that no recipe is for, which ops look at"
    for a, b in [
        ("'x'", "float32[4, 4]"),
        ("complex64[4]", "float32[4, 4]"),
        ("float32[4]", "'x'"),
        ("float32[4]", "complex64[4, 4]"),
    ]
}


LOW_PRECISION = {
    "low_precision.with_recipe": Row(
        lambda: {"cfg": CHAIN, "recipe": low_precision.Fp8Block(), "only": ("*",), "skip": (), "attention": ()},
        {"only": (("head",),), "skip": (("head",),), "attention": (("a",),)},
        {(name, "[]"): "none" for name in ("only", "skip", "attention")},
    ),
    "low_precision.with_weight_only": Row(
        lambda: {"cfg": CHAIN, "format": low_precision.NF4(), "only": ("*",), "skip": ()},
        {"only": (("head",),), "skip": (("head",),)},
        {(name, "[]"): "none" for name in ("only", "skip")},
    ),
    "low_precision.weight_only": Row(lambda: {"op": linear, "format": low_precision.NF4()}),
    "low_precision.quantize_weight": Row(
        lambda: {"weight": torch.ones(4, 4), "format": low_precision.NF4()},
        accepts={("weight", f"float32[{shape}]"): "any matrix" for shape in ("3, 5", "4, 4")},
    ),
    "low_precision.quantize_weights": Row(
        lambda: {"params": chain_params(), "cfg": low_precision.with_weight_only(CHAIN, low_precision.NF4())},
        accepts={given: why for given, why in OTHER_LEAVES.items() if "bias=float32" not in given[1]},
    ),
    "low_precision.quantize_params": Row(
        lambda: {
            "params": chain_params(),
            "cfg": LOW,
            "dtype": torch.float32,
            "columns": True,
            "state": low_precision.recipe_init(LOW, chain_params()),
            "key": random.key(0),
        },
        accepts={**OTHER_LEAVES, **META_KEY},
    ),
    "low_precision.rounding_logs": Row(lambda: {"cfg": LOW, "skip": ()}, {"skip": (3, (3,))}, {("skip", "[]"): "none"}),
    "low_precision.weight_rounding": Row(
        lambda: {"params": chain_params(), "work": chain_params()},
        accepts={"params": "of a tree without codes nothing is read", "work": "any tree; its leaves in codes are measured"},
    ),
    "low_precision.recipe_init": Row(
        lambda: {"cfg": LOW, "params": chain_params(), "amaxes": {"a.weight": torch.ones(3)}},
        {"cfg": (None, 3)},
        {"cfg": "any config: one without a recipe has no state", **OTHER_LEAVES},
    ),
    "low_precision.recipe_update": Row(
        lambda: {
            "state": low_precision.recipe_init(LOW, chain_params()),
            "amaxes": {"a.weight": torch.ones(3)},
            "recipe": low_precision.Fp8Delayed(history=2),
            "reduce": torch.clone,
        }
    ),
    "low_precision.begin_step": Row(
        lambda: {
            "params": chain_params(),
            "cfg": LOW,
            "state": low_precision.recipe_init(LOW, chain_params()),
            "dtype": torch.float32,
            "columns": True,
            "key": random.key(0),
            "needs": Needs.ALL,
        },
        {"cfg": (None, 3)},
        {**OTHER_LEAVES, **META_KEY},
    ),
    "low_precision.end_step": Row(
        lambda: {
            "main_grad": low_precision.begin_step(chain_params(), LOW, {})[1],
            "cfg": LOW,
            "state": low_precision.recipe_init(LOW, chain_params()),
            "over_ranks": dict,
        },
        accepts={"main_grad": ANY},
    ),
    "low_precision.split_amaxes": Row(lambda: {"dparams": grads()}, accepts={"dparams": ANY}),
    "low_precision.gradients_like": Row(
        lambda: {"work": chain_params(), "dtype": torch.float32, "needs": Needs.ALL}, accepts={"work": ANY}
    ),
    "low_precision.with_keys": Row(
        lambda: {"work": chain_params(), "cfg": LOW, "key": random.key(0)},
        accepts={"work": ANY, "cfg": "any config: one without a stochastic recipe has no keys", **META_KEY},
    ),
}
