"""Good arguments of the public callables of `funcops.lora`: see `good_arguments`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from good_rows import CHAIN, Row, chain_params

from funcops import lora, random
from funcops.engine.errors import describe
from funcops.engine.trees import paths, put, tree_map_tensors

CFG = lora.LowRankConfig(4, 4, 2, scale=0.5)
ADAPTED = lora.with_lora(CHAIN, 2, ("a",), alpha=4.0)


def params() -> Any:
    return lora.lora_init(chain_params(), ADAPTED, key=random.key(1))


class Shown(str):
    """A tensor as tests/contract/test_wrong_values.py labels it."""

    __repr__ = str.__str__


def elsewhere(argument: str, tree: Any, *inside: str) -> dict[Any, str]:
    """Wrong leaves of a tree outside the paths that begin with `inside`: only adapted parts are read."""
    shown, found = tree_map_tensors(lambda t: Shown(describe(t)), tree), {}
    for path, t in paths(tree).items():
        if t is not None and not path.startswith(inside):
            for bad in ("x", Shown(describe(1j * t))):
                found[argument, repr(put(shown, path, bad))] = "a leaf that is handed on"
    return found


def saved() -> Path:
    lora.save_adapter(folder := Path("adapter"), params(), ADAPTED)
    return folder


def own() -> Any:
    return lora.adapter(params(), ADAPTED)


LORA = {
    "lora.with_lora": Row(
        lambda: {"cfg": CHAIN, "rank": 2, "targets": ("a",), "alpha": 4.0, "dropout": 0.5, "key": "key"},
        {"rank": (0,), "targets": ((), ("head",), "a"), "dropout": (1.0,), "key": ("a key",)},
        {("alpha", "-1.0"): "a factor may be negative", ("alpha", "None"): "the rank"},
    ),
    "lora.lora_init": Row(
        lambda: {"params": chain_params(), "cfg": ADAPTED, "key": random.key(0), "dtype": torch.float32},
        accepts={("key", "int64[2]"): "a key on the meta device gives values there", **elsewhere("params", chain_params(), "a.")},
    ),
    "lora.lora_needs": Row(lambda: {"cfg": ADAPTED, "x": False}, accepts={"x": "a mask, which the forward checks"}),
    "lora.adapter": Row(lambda: {"tree": params(), "cfg": ADAPTED}, accepts=elsewhere("tree", params(), "a.both.lora")),
    "lora.with_adapter": Row(
        lambda: {"params": params(), "adapter": own(), "cfg": ADAPTED}, accepts=elsewhere("params", params(), "nothing")
    ),
    "lora.merge": Row(lambda: {"params": params(), "cfg": ADAPTED}, accepts=elsewhere("params", params(), "a.")),
    "lora.unmerge": Row(
        lambda: {"params": chain_params(), "adapter": own(), "cfg": ADAPTED}, accepts=elsewhere("params", chain_params(), "a.")
    ),
    "lora.save_adapter": Row(
        lambda: {"folder": "adapter", "params": params(), "cfg": ADAPTED, "names": {"a": "b"}, "base": "c", "task": "CAUSAL_LM"},
        {"names": ({"b": "c"}, {"*": "c"}, {3: "c"})},
        {"base": "any name", "task": "any type of PEFT", ("folder", "'no such'"): "is made"}
        | elsewhere("params", params(), "a.both.lora"),
    ),
    "lora.load_adapter": Row(
        lambda: {"folder": saved(), "params": params(), "cfg": ADAPTED, "names": {"a": "a"}, "dtype": torch.float32},
        {"names": ({"b": "c"}, {"a": "other"}), "folder": (Path("none"),)},
        elsewhere("params", params(), "a.both.lora"),
    ),
    "lora.RowsOf": Row(
        lambda: {"module": "m", "rows": 4, "at": (0, 2)},
        {"rows": (0, 2), "at": ((), (0, 0), (4,), (-1,), [0])},
        {"module": "any name"},
    ),
    "lora.ParameterOf": Row(
        lambda: {"parameter": "m.w", "at": (1, 0)}, {"at": ((0, 0), (1,), (-1,), [0])}, {"parameter": "any name"}
    ),
    "lora.with_adapter_of": Row(
        lambda: {"cfg": CHAIN, "folder": saved(), "names": {"a": "a"}},
        {"names": ({"b": "c"}, {"a": "other"}), "folder": (Path("none"),)},
    ),
    "lora.LowRankConfig": Row(
        lambda: {"in_features": 4, "out_features": 4, "rank": 2, "scale": 0.5, "dropout": 0.5, "shared": ()},
        {"rank": (0,), "dropout": (1.0,), "shared": ([], 3)},
        {("scale", "-1.0"): "a factor may be negative"},
    ),
}
