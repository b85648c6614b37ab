"""Good arguments of `funcops.graphs` and `funcops.nn`, for `good_arguments.py`."""

from __future__ import annotations

import torch
from good_rows import ANY, CFG, CHAIN, META_KEY, NAME, ONE, Row, chain_params, doubled, params, x
from good_schedules import run_good

from funcops import Needs, graphs, linear, nn, note, random, recording
from funcops.engine.trees import tree_map_tensors
from funcops.library.formats.recipes import Fp8Block

GRAPHED = {"slots": 1, "outputs": "clone", "warmup": 1, "capture_error_mode": "global", "keep_graph": False, "debug": False}
GRAPHED["hooks"] = None
MODULE = "the module itself says what it takes"
DEVICES_OWN = {name: "looked at where there is a GPU" for name in ("pool", "stream", "capture_error_mode", "keep_graph")}


NODES = graphs.GraphData((graphs.GraphNode("kernel", "gemm"),), ())


def recorded():
    with recording() as found:
        note(x=x())
    return found


ADAPTERS = {
    "graphs.branch": Row(lambda: {"name": "a"}, accepts=NAME),
    "graphs.graph_data": Row(lambda: {"captured": graphs.graphed(doubled, x(), warmup=0)}),
    "graphs.graph_diff": Row(lambda: {"before": NODES, "after": NODES}),
    "graphs.graph_memory": Row(lambda: {"fn": lambda: None}),
    "graphs.register_hooks": Row(lambda: {"hooks": graphs.Hooks()}),
    "graphs.run_beside": Row(run_good, {"xs": ([x()], []), "dys": ([x()],)}),
    "graphs.schedule_memory": Row(
        lambda: {"schedule": run_good()["schedule"], "params": chain_params(), "x": x(), "cfg": CHAIN, "needs": Needs.ALL}
    ),
    "graphs.wgrads_beside": Row(lambda: {"cfg": CFG}, accepts={("cfg", "IdentityConfig()"): "a config without a repeat"}),
    "graphs.when": Row(lambda: {"flag": torch.tensor(True), "update": lambda t: t.add_(1), "trees": (x(),)}),
    "named_scope": Row(
        lambda: {"name": "a", "half": "fwd"}, accepts=NAME | {("half", text): "any half" for text in ("''", "'no such'")}
    ),
    "named_steps": Row(dict),
    "note": Row(dict),
    "recording": Row(
        lambda: {"module": torch.nn.Linear(4, 4), "like": (), "stop_at_nonfinite": True}, accepts={("like", "[]"): "no ranks"}
    ),
    "compare": Row(lambda: {"a": recorded(), "b": recorded(), "tolerance": 0.1, "names": {"a": "a"}}),
    "Recording": Row(lambda: {"rows": recorded().rows}, accepts={("rows", "[]"): "no rows"}),
    "profile": Row(lambda: {"fn": lambda: None, "calls": 1, "warmup": 1, "count": True}, {"calls": ONE}),
    "Profile": Row(
        lambda: {"rows": [], "device": "cpu", "events": {}, "spans": [], "calls": 1},
        accepts=dict.fromkeys(("rows", "device", "events", "spans", "calls"), "made by profile"),
    ),
    "graphs.check_capturable": Row(lambda: {"fn": doubled}),
    "graphs.cut_rows": Row(lambda: {"tree": x(), "size": 1}, accepts={"tree": ANY}),
    "graphs.pad_rows": Row(
        lambda: {"tree": x(), "size": 3, "value": 0.0},
        accepts={"tree": ANY, **{("value", value): "a number to fill with" for value in ("-1.0", "inf", "nan", "True")}},
    ),
    "graphs.graphed": Row(lambda: {"fn": lambda: None, "inputs": "copy", "state": None, **GRAPHED}, {"slots": ONE}, DEVICES_OWN),
    "graphs.graphed_op": Row(
        lambda: {
            "op": linear,
            "cfg": CFG,
            "params": params(),
            "x": x(),
            "dy": x(),
            "needs": Needs.ALL,
            "into": tree_map_tensors(torch.zeros_like, params()),
            "inputs": "copy",
            **GRAPHED,
        },
        {"slots": ONE},
        DEVICES_OWN,
    ),
    "graphs.make_graphed_callables": Row(
        lambda: {
            "callables": torch.nn.Linear(4, 4),
            "sample_args": (x(),),
            "num_warmup_iters": 1,
            "allow_unused_input": False,
            "sample_kwargs": {},
            "order": [1, -1],
            "delayed_wgrad": False,
            "clone_param_grads": True,
            "outputs": "clone",
        },
        {"order": ([2], [1])},
        {**DEVICES_OWN, ("sample_args", "('x',)"): MODULE, ("sample_args", "(complex64[2, 4],)"): MODULE},
    ),
    "graphs.GraphCache": Row(
        lambda: {"fn": doubled, "sizes": (2, 4), "size_of": len, "pad": graphs.pad_rows, "cut": graphs.cut_rows, "capacity": 1},
        {"sizes": ((), ONE), "capacity": ONE},
    ),
    "nn.GLU": Row(lambda: {"dim": -1, "kind": "glu", "gate": "second"}),
    "nn.SwiGLU": Row(lambda: {"gate": "first"}),
    "nn.LinearCrossEntropyLoss": Row(
        lambda: {
            "in_features": 4,
            "num_classes": 4,
            "out_features": (2,),
            "bias": False,
            "weight": None,
            "ignore_index": -100,
            "reduction": "mean",
            "label_smoothing": 0.1,
            "options": None,
            "device": "cpu",
            "dtype": torch.float32,
        },
        {"in_features": ONE, "num_classes": ONE},
        {("ignore_index", "-1"): "no class has it"},
    ),
    "nn.from_torch": Row(
        lambda: {
            "model": torch.nn.Sequential(torch.nn.Linear(4, 4)),
            "policy": None,
            "recipe": None,
            "only": None,
            "skip": (),
            "trace": True,
            "example": None,
        },
        {"policy": (3, "no such"), "recipe": (3, "fp8_block"), "only": (3, (3,)), "skip": (3, (3,))},
        {("skip", "[]"): "none"},
    ),
    "nn.to_torch": Row(lambda: {"model": torch.nn.Sequential(nn.Linear(4, 4))}),
    "nn.quantize_weights": Row(
        lambda: {"model": nn.Linear(4, 4, recipe=Fp8Block()), "dtype": torch.float32, "columns": True, "key": random.key(0)},
        accepts=META_KEY,
    ),
    "nn.kept_bytes": Row(lambda: {"module": torch.nn.Linear(4, 4), "input": torch.ones(2, 4)}),
    "nn.kept_report": Row(lambda: {"module": torch.nn.Linear(4, 4), "input": torch.ones(2, 4)}),
    "nn.preview": Row(lambda: {"module": torch.nn.Linear(4, 4), "input": torch.ones(2, 4)}),
    "nn.trainer_callback": Row(lambda: {"swap": nn.from_torch}),
    "nn.functional": Row(lambda: {"module": nn.Linear(4, 4)}),
}
