"""Good arguments of the public callables of `funcops.dist`, and of the functions in `funcops.testing` for ops over ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from dist_cases import ONE as ALONE
from good_rows import NAME, Row, x

from funcops import ChainConfig, LinearConfig, Step, dist, linear, random, testing


def tree() -> dict[str, Any]:
    return {"a": torch.ones(2, 2), "b": None}


def dist_case() -> dict[str, Any]:
    return {
        "cfg": dist.GatherConfig,
        "x": lambda d: d.randn(4),
        "reference": lambda params, x, n: 1.0 * x,
        "params": None,
        "buffers": True,
        "placed_x": testing.Placed("shard"),
        "placed_y": testing.Placed("replicate"),
    }


CHAIN = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 6)), Step("down", linear, LinearConfig(6, 4))))
SPECS = {"weight": dist.Spec("tp", 0)}
NUMBERS = itertools.count()  # a save that is not finished keeps its path
WRONG_SPECS = (
    {3: dist.Spec()},
    {"weight": 3},
    {"no.such": dist.Spec()},
    {"weight": dist.Spec("dp")},
    {"weight": dist.Spec("tp", 2)},
)


def saved() -> Path:
    path = Path("good checkpoint")
    dist.save({"weight": x()}, path, SPECS, dist.Mesh(axes=(ALONE,)))
    return path


def sharded(tree: str) -> Row:
    return Row(
        lambda: {tree: {"weight": x()}, "specs": SPECS, "mesh": dist.Mesh(axes=(ALONE,))},
        {"specs": WRONG_SPECS},
        {(tree, "{'weight': complex64[2, 4]}"): "of any dtype"},
    )


def empty(name: str) -> dict[Any, str]:
    return {(name, value): "a tree without tensors" for value in ("None", "[]")}


DIST = {
    **{
        f"dist.{name}": sharded(tree)
        for name, tree in (
            ("shard", "tree"),
            ("unshard", "tree"),
            ("sum_gradients", "dparams"),
            ("part_axes", "tree"),
            ("sum_axes", "dparams"),
        )
    },
    "dist.fsdp_specs": Row(
        lambda: {"like": {"weight": x()}, "specs": {"weight": dist.Spec()}, "mesh": dist.Mesh(axes=(ALONE,)), "axis": "tp"},
        {"specs": WRONG_SPECS, "axis": ("no such",)},
        {("like", "{'weight': complex64[2, 4]}"): "of any dtype", **empty("like")},
    ),
    "dist.save": Row(
        lambda: {"tree": {"weight": x()}, "path": saved(), "specs": SPECS, "mesh": dist.Mesh(axes=(ALONE,))},
        {"specs": WRONG_SPECS, "path": (Path("no such") / "folder",)},
        {("tree", "{'weight': complex64[2, 4]}"): "of any dtype"},
    ),
    "dist.save_start": Row(
        lambda: {
            "tree": {"weight": x()},
            "path": Path(f"good checkpoint {next(NUMBERS)}"),
            "specs": SPECS,
            "mesh": dist.Mesh(axes=(ALONE,)),
        },
        {"specs": WRONG_SPECS, "path": (Path("no such") / "folder",)},
        {("tree", "{'weight': complex64[2, 4]}"): "of any dtype"},
    ),
    "dist.load": Row(
        lambda: {"path": saved(), "like": {"weight": x()}, "specs": SPECS, "mesh": dist.Mesh(axes=(ALONE,)), "verify": True},
        {"specs": WRONG_SPECS},
    ),
    "dist.load_values": Row(lambda: {"path": saved()}),
    "dist.is_saved": Row(lambda: {"path": saved()}, accepts={"path": "a folder that does not exist holds no checkpoint"}),
    "dist.init_tree": Row(
        lambda: {
            "make": lambda: linear.init(LinearConfig(4, 6), key=random.key(0)),
            "specs": SPECS,
            "mesh": dist.Mesh(axes=(ALONE,)),
        },
        {"specs": WRONG_SPECS},
    ),
    "dist.specs_of": Row(lambda: {"op": dist.column_linear, "cfg": dist.ColumnLinearConfig(4, 6, axis=ALONE)}),
    "dist.init": Row(
        lambda: {
            "op": linear,
            "cfg": LinearConfig(4, 6),
            "specs": SPECS,
            "mesh": dist.Mesh(axes=(ALONE,)),
            "key": random.key(0),
            "device": "cpu",
            "dtype": torch.float32,
        },
        {"specs": WRONG_SPECS},
    ),
    "dist.parallel": Row(
        lambda: {
            "cfg": CHAIN,
            "rules": {"up": "column", "down": "row"},
            "mesh": dist.Mesh(axes=(ALONE,)),
            "axis": "tp",
            "overlap": "none",
            "sequence_parallel": False,
            "context": "cp",
            "experts": "ep",
            "rows": (),
            "capacity": 0.5,
        },
        {
            "rules": ({"up": "no such"}, {"up": 3}, {3: "row"}, {"no such": "row"}),
            "capacity": (0.0, 1.5, "all"),
            "context": ("tp", ("cp", "no such")),
            "experts": ("cp",),
            "rows": (("tp",), ["dp"], ("no such",)),
        },
        {(name, "None"): "no axis" for name in ("context", "experts")},
    ),
    "dist.Shared": Row(lambda: {"dim": 1, "axis": ALONE, "zigzag": True}, accepts={("dim", "-1"): "the last"}),
    "dist.Spec": Row(
        lambda: {"axis": "tp", "dim": 1, "parts": (2, 4), "fsdp": "dp", "alike": "cp", "whole": (6, 6)},
        {"whole": ([6, 6], (6,), (-1, 6)), "parts": ((0,), [2], (1.5,)), "dim": (-1,)},
    ),
    **{
        f"dist.{name}_start": Row(lambda: {"x": x(), "axis": ALONE}, accepts={"x": "any tensor, but one without dimensions"})
        for name in ("gather", "scatter_sum", "sum_over", "all_to_all")
    },
    **{
        f"dist.{name}": Row(
            lambda: {"t": x(), "axis": ALONE, "dim": 1},
            {"dim": (2, -3)},
            {"t": "any tensor of that dimension", ("dim", "-1"): "the last", ("dim", "0"): "the first"},
        )
        for name in ("zigzag", "unzigzag")
    },
    "dist.zigzag_positions": Row(lambda: {"length": 8, "axis": ALONE, "device": "cpu"}),
    "dist.Axis": Row(
        lambda: {"name": "tp", "size": 2, "rank": 1, "group": "a"},
        {"size": (0,), "rank": (2,)},
        {("group", "'no such'"): "looked up where it is used"},
    ),
    "dist.Mesh": Row(lambda: {"axes": (ALONE,), "device": "cpu"}),
    "dist.finish": Row(lambda: {"h": dist.reduce_start(tree(), ALONE), "into": tree()}),
    "dist.reduce_start": Row(
        lambda: {"dparams": tree(), "over": ALONE, "shard": ALONE, "ordered": True, "dtype": torch.float32, "bucket_bytes": 64},
        {"over": ((3,), {"a": 3}, {"c": ()}), "bucket_bytes": (0,)},
        empty("dparams"),
    ),
    "dist.own_shards": Row(lambda: {"tree": tree(), "axis": ALONE}, accepts=empty("tree")),
    "dist.gather_shards_start": Row(
        lambda: {"shards": tree(), "like": tree(), "axis": ALONE, "bucket_bytes": 64},
        {"bucket_bytes": (0,)},
        {"like": "looked at for its shapes"},
    ),
    "dist.zero3": Row(
        lambda: {
            "cfg": CHAIN,
            "axis": ALONE,
            "also": (),
            "dtype": torch.float32,
            "ordered": True,
            "bucket_bytes": 64,
            "reshard_after_forward": True,
        },
        {"also": ((3,), (ALONE,)), "bucket_bytes": (0,)},
    ),
    "dist.data_parallel": Row(
        lambda: {
            "cfg": CHAIN,
            "axis": ALONE,
            "also": (),
            "dtype": torch.float32,
            "grad_dtype": torch.float32,
            "shard": True,
            "ordered": True,
            "bucket_bytes": 64,
        },
        {"also": ((3,), (ALONE,)), "bucket_bytes": (0,)},
    ),
    "dist.global_norm": Row(
        lambda: {"tree": tree(), "over": ALONE, "parts": {"a": (ALONE,)}, "device": "cpu"},
        {"over": ((3,),), "parts": ({"a": 3}, {"c": ()})},
        {**empty("tree"), ("device", "None"): "torch's own"},
    ),
    "dist.amaxes_over": Row(
        lambda: {"amaxes": {"a": torch.ones(3)}, "over": ALONE, "specs": None}, {"amaxes": ({"a": 3},), "over": ((3,),)}
    ),
    "dist.all_ranks": Row(lambda: {"ok": torch.tensor(True), "over": ALONE}, {"over": ((3,),)}),
    "dist.raise_on_all_ranks": Row(
        lambda: {"fault": "", "mesh": dist.Mesh(axes=(ALONE,))}, {}, {"fault": "a text is raised, none is not"}
    ),
    "dist.record": Row(lambda: {"step": lambda: None}),
    "dist.handshake": Row(lambda: {"mesh": dist.Mesh(axes=(ALONE,)), "step": lambda: None}),
    "dist.check_program": Row(
        lambda: {"step": lambda mesh: None, "sizes": {"tp": 2}, "ranks": (0, 1)}, {"sizes": ({"tp": 0},), "ranks": ((2,), (1.5,))}
    ),
    "testing.Placed": Row(lambda: {"kind": "shard", "dim": 1}, accepts={("dim", "-1"): "the last"}),
    "testing.DistCase": Row(
        lambda: {**dist_case(), "placed_params": None, "name": "a", "twin": None, "near": None},
        {},
        {**NAME, **{name: "looked at where it is used" for name in ("placed_x", "placed_y", "placed_params")}},
    ),
    "testing.check_dist": Row(
        lambda: {"op": dist.gather, "cases": testing.DistCase(**dist_case()), "sizes": (1,), "tolerance": 1e-12},
        {"sizes": ((), (0,), 3)},
        {("cases", "[]"): "none"},
    ),
    "testing.run_ranks": Row(lambda: {"sizes": {"tp": 2}, "fn": lambda mesh: mesh.rank}, {"sizes": ({"tp": 0},)}),
}
