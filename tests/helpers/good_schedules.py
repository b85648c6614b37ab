"""Good arguments of the public callables of `funcops.schedule`."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import timedelta
from typing import Any

import torch
from good_rows import CFG, CHAIN, NAME, Row, chain_params, params, x

from funcops import Needs, dist, linear, schedule
from funcops.engine.trees import tree_map_tensors


def one_step() -> Any:
    return schedule.one_f_one_b(2, 2)


def a_collective() -> schedule.Collective:
    return schedule.Collective("all_gather", "tp", 8.0, during="W")


def a_decoder() -> schedule.Decoder:
    return schedule.Decoder(8, 16, 2, 2, 32, 8, 4, kv_heads=1, residual_bytes=100.0)


def sizes() -> dict[str, Any]:
    return {"ranks": 2, "microbatches": 4}


def run_good() -> dict[str, Any]:
    return {
        "schedule": one_step(),
        "params": chain_params(),
        "xs": [x(), x()],
        "cfg": CHAIN,
        "dys": [x(), x()],
        "needs": Needs.ALL,
        "into": tree_map_tensors(torch.zeros_like, chain_params()),
        "done": lambda stage, dparams: None,
        "losses": (),
    }


NUMBERS = itertools.count()


def an_axis() -> dict[str, Any]:
    """An axis of one rank, with another name each time: it lends once."""
    name = f"axis{next(NUMBERS)}"
    return {"mesh": dist.Mesh.abstract({name: 1}, 0), "axis": name}


SCHEDULES = {
    "schedule.At": Row(lambda: {"rank": 1, "axis": dist.Mesh.abstract({"pp": 2}, 0)["pp"]}, {"rank": (2,)}),
    "schedule.lend": Row(
        lambda: {**an_axis(), "nbytes": 8, "host": "localhost", "wait": timedelta(seconds=1)},
        {"axis": ("no such",), "nbytes": ({3: 1}, {0: -1}), "wait": (timedelta(0),)},
        {("host", "''"): "one rank has nobody to reach", ("host", "'no such'"): "one rank has nobody to reach"},
    ),
    "schedule.Costs": Row(
        lambda: {
            **{f.name: 1.0 for f in dataclasses.fields(schedule.Costs)},
            "collectives": (a_collective(),),
            "moved": (schedule.Moved(1, 2.0),),
        }
    ),
    "schedule.Moved": Row(
        lambda: {"rank": 1, "nbytes": 8.0, "hidden_under": 1.0}, {}, {("hidden_under", "inf"): "all of it is hidden"}
    ),
    "schedule.Network": Row(
        lambda: {
            "latency": 1.0,
            "bandwidth": 2.0,
            "ranks_per_node": 2,
            "near_latency": 1.0,
            "near_bandwidth": 2.0,
            "axes": (schedule.Link("tp", 2),),
        },
        {"bandwidth": (0.0,), "near_bandwidth": (0.0,), "axes": ((3,), (schedule.Link("tp", 2), schedule.Link("tp", 3)))},
        {("bandwidth", "inf"): "no time", ("near_bandwidth", "inf"): "no time"},
    ),
    "schedule.Collective": Row(
        lambda: {"kind": "all_gather", "axis": "tp", "nbytes": 8.0, "hidden_under": 1.0, "during": "I", "times": 2},
        {"times": (0,)},
        {("axis", "'no such'"): "any name", ("hidden_under", "inf"): "always hidden"},
    ),
    "schedule.Link": Row(
        lambda: {"axis": "tp", "size": 2, "latency": 1.0, "bandwidth": 2.0},
        {"size": (0,), "bandwidth": (0.0,)},
        {("axis", "'no such'"): "any name", ("bandwidth", "inf"): "no time"},
    ),
    "schedule.GPU": Row(
        lambda: {**vars(schedule.GPUS["H100"])},
        {name: (0.0,) for name in ("flops", "efficiency", "attention", "memory_bandwidth", "near_bandwidth", "bandwidth")}
        | {"sms": (0,), "per_node": (0,)},
        NAME,
    ),
    "schedule.Decoder": Row(
        lambda: {**vars(a_decoder())},
        {"hidden": (0, 9), "heads": (0, 5), "kv_heads": (0, 3)},
        {("window", "3"): "a window", ("head_size", "3"): "a size"},
    ),
    "schedule.Layout": Row(
        lambda: {"dp": 2, "tp": 2, "pp": 2, "cp": 2, "chunks": 2, "microbatch": 2, "zero": 1, "recompute": "mlp", "ep": 2},
        {"zero": (4,), "dp": (0,)},
    ),
    "schedule.Mixture": Row(
        lambda: {"experts": 8, "choices": 2, "shared": 16}, {"experts": (0, 1), "choices": (0, 9), "shared": (-1,)}
    ),
    "schedule.predict": Row(
        lambda: {"model": a_decoder(), "layout": schedule.Layout(tp=2), "gpu": "A100"},
        {"layout": (schedule.Layout(tp=3), schedule.Layout(dp=3))},
    ),
    "schedule.plan_parallel": Row(
        lambda: {"model": a_decoder(), "gpus": 2, "memory": 1e9, "gpu": "A100", "fixed": {"tp": 2}, "show": 1, "margin": 0.1},
        {"gpus": (0,), "memory": (0.0, 1.0), "margin": (-0.1, 1.0), "show": (0,), "fixed": ({"ep": 2}, {"tp": 3}, {"tp": 0})},
        {("fixed", "[]"): "nothing is fixed"},
    ),
    "schedule.Schedule": Row(
        lambda: {"name": "mine", "ranks": one_step().ranks, "together": frozenset()}, {"ranks": ((), ((1,),), (("0F0",),))}, NAME
    ),
    "schedule.simulate": Row(
        lambda: {"schedule": one_step(), "costs": schedule.Costs(), "network": schedule.Network()},
        {"costs": ([schedule.Costs()], 1.0, "x")},
    ),
    "schedule.delay_w": Row(
        lambda: {"schedule": one_step(), "budget_bytes": 9.0, "costs": schedule.Costs(), "network": schedule.Network()},
        {"budget_bytes": (0.0,)},
        {("budget_bytes", "inf"): "no limit"},
    ),
    "schedule.Choice": Row(
        lambda: {"name": "all", "policy": "minimal", "extra": 0.5, "residual_bytes": 1.0, "pending_bytes": 2.0},
        {"policy": ("lost",)},
        NAME,
    ),
    "schedule.stage_choices": Row(
        lambda: {"cfg": CHAIN, "x": x(), "dtype": torch.float32, "needs": Needs.ALL, "count": 2},
        {"count": (0,)},
        {("x", "float32[2, 4]"): "nothing is run"},
    ),
    "schedule.level": Row(
        lambda: {
            "schedule": one_step(),
            "choices": [[schedule.Choice("all")]] * 2,
            "costs": schedule.Costs(),
            "network": schedule.Network(),
            "most": 2.0,
        },
        {"choices": ([], [[]] * 2, [[1]] * 2), "costs": ([schedule.Costs()], 1.0, "x"), "most": (0.5,)},
    ),
    "schedule.compile_stages": Row(lambda: {"cfg": CHAIN}),
    "schedule.fold": Row(
        lambda: {"schedule": one_step(), "ranks": 1, "costs": schedule.Costs(), "network": schedule.Network()}, {"ranks": (0, 3)}
    ),
    "schedule.draw": Row(
        lambda: {"simulated": schedule.simulate(one_step()), "path": None, "title": "one", "unit": "s", "ax": None},
        {"path": (["a"],)},
        {
            ("path", "'x'"): "a file of that name",
            **{(name, text): "words" for name in ("title", "unit") for text in ("''", "'no such'")},
        },
    ),
    "schedule.interleaved_1f1b": Row(lambda: {**sizes(), "chunks": 2}, {"chunks": (0,)}),
    "schedule.interleaved_zb": Row(lambda: {**sizes(), "chunks": 2}, {"chunks": (0,)}),
    **{
        f"schedule.{name}": Row(sizes, {"ranks": (0,), "microbatches": (0,)})
        for name in ("dualpipe_v", "gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_v")
    },
    "schedule.measure": Row(
        lambda: {"op": linear, "params": params(), "x": x(), "cfg": CFG, "needs": Needs.ALL, "repeats": 1}, {"repeats": (0,)}
    ),
    "schedule.measure_stages": Row(
        lambda: {"params": chain_params(), "x": x(), "cfg": CHAIN, "needs": Needs.ALL, "repeats": 1, "block": 1},
        {"repeats": (0,), "block": (0,)},
    ),
    "schedule.run": Row(run_good, {"xs": ([x()], []), "dys": ([x()],)}),
}
