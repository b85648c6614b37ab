"""Good arguments of the functions of each op, from the op's first case, for `good_arguments.py`."""

from __future__ import annotations

from typing import Any

import torch
from dist_cases import PLAIN
from good_rows import Row
from law_cases import FIRST

from funcops import Needs, Op, random, trees
from funcops.engine.trees import tree_map_tensors
from funcops.testing.checks import float_like


def op_rows() -> dict[str, Row]:
    """A row for each function of each op, from the op's first case."""
    found = {}
    for case in [*FIRST, *PLAIN.values()]:
        op, cfg = case.op, case.cfg
        name = f"dist.{op.name}" if op.name in PLAIN else op.name

        def given(case: Any = case) -> dict[str, Any]:
            params, x = case.make(torch.float32)
            y, residuals = case.op.fwd(params, x, case.cfg)
            dy = float_like(y, 7)
            return {
                "params": params,
                "x": x,
                "residuals": residuals,
                "dy": dy,
                "pending": case.op.dgrad(residuals, dy, case.cfg)[1],
            }

        def part(names: tuple[str, ...], more: Any, given: Any = given, cfg: Any = cfg, case: Any = case) -> Row:
            first = given()
            accepts = {(name, "None"): "documented: zero, or nothing to do" for name in ("dy", "pending")}
            accepts |= {("params", "None"): "this op has none"} if first["params"] is None else {}
            if case.op.name == "identity":
                accepts["cfg", "IdentityConfig()"] = "its own"
            for t in (
                trees.tensors(first["dy"])
                if len(trees.tensors(first["residuals"])) == 0 or case.op.name in ("embedding", "bias")
                else ()
            ):
                accepts["dy", trees.describe(t)] = "on another device: nothing is kept, or nothing that this half reads"
            if isinstance(first["x"], torch.Tensor):
                accepts["x", trees.describe(first["x"])] = "one tensor may be anywhere, the meta device included"
            if {"x", "x.0"} & {*case.free}:
                accepts["x", trees.describe(trees.tensors(first["x"])[0].new_zeros(3, 5))] = "of any size"
            return Row(lambda: {**{n: v for n, v in given().items() if n in names}, "cfg": cfg, **more(given())}, accepts=accepts)

        def zeros(given: dict[str, Any]) -> dict[str, Any]:
            return {"into": tree_map_tensors(torch.zeros_like, given["params"])}

        found[f"{name}_fwd"] = part(("params", "x"), lambda given: {"needs": Needs.ALL})
        found[f"{name}_dgrad"] = part(("residuals", "dy"), lambda given: {})
        found[f"{name}_bwd"] = part(("residuals", "dy"), zeros)
        found[f"{name}_wgrad"] = part(("pending",), zeros)
        found[f"{name}_init"] = Row(
            lambda cfg=cfg: {"cfg": cfg, "key": random.key(0), "device": "cpu", "dtype": torch.float32},
            accepts={
                **({} if tensors_of(op, cfg) else dict.fromkeys(("key", "device", "dtype"), "no params are made")),
                **({("cfg", "IdentityConfig()"): "its own"} if op.name == "identity" else {}),
            },
        )
    return found


def tensors_of(op: Op, cfg: Any) -> list[Any]:
    return trees.tensors(op.init(cfg, device="meta"))
