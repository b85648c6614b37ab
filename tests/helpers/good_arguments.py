"""Good arguments of every public callable, one row each: `test_wrong_values.py` makes them wrong, one argument at a time.

Rows of `funcops` itself and of `funcops.testing` are here, rows of other rooms in `good_ROOM.py`.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from dist_cases import PLAIN
from good_adapters import ADAPTERS
from good_dist import DIST
from good_invariant import INVARIANT
from good_logs import LOGS
from good_loops import LOOPS
from good_lora import LORA
from good_low_precision import LOW_PRECISION
from good_models import MODELS
from good_ops import op_rows
from good_rows import ANY, CFG, CHAIN, NAME, ONE, Row, doubled, params, x
from good_schedules import SCHEDULES
from good_trees import TREES
from law_cases import CONFIGS

import funcops
from funcops import LinearParams, Needs, Op, RopeConfig, Save, chain, linear, random, report, trees
from funcops.adapters.nn.module import Prepared  # which takes the arguments of torch.nn's module
from funcops.engine.contract.schema import Saved
from funcops.engine.residuals.nested import Nested
from funcops.engine.trees import tree_map_tensors
from funcops.library import formats
from funcops.low_precision import Fp8Current
from funcops.models.blocks import block_config

BLOCK = block_config(4, heads=2, hidden=4)
ROOMS = (
    "checkpoint",
    "dist",
    "fused",
    "graphs",
    "invariant",
    "logs",
    "lora",
    "low_precision",
    "models",
    "nn",
    "optim",
    "precision",
    "random",
    "schedule",
    "testing",
    "trees",
)


def kept() -> Any:
    return linear.fwd(params(), x(), CFG)[1]


PARAMS = params()


def pending() -> Any:
    return linear.dgrad(kept(), x(), CFG)[1]


def report_of() -> Any:
    return report(kept())


def case_good() -> dict[str, Any]:
    return {
        "op": linear,
        "cfg": CFG,
        "x": lambda d: d.randn(2, 4),
        "reference": lambda params, x, cfg: x @ params.weight.T + params.bias,
        "params": lambda d: LinearParams(d.randn(4, 4), d.randn(4)),
        "dtypes": (torch.float32,),
        "free": (),
        "cancels": (),
        "unrounded": (),
        "casts": False,
    }


def rule() -> dict[str, Any]:
    return {
        "name": f"fresh {next(COUNT)}",
        "phase": "forward",
        "match": lambda window: None,
        "run": lambda *given: None,
        "saves": funcops.Saving(passes=2, launches=1),
        "wgrads": lambda calls, pendings: None,
        "shared": lambda calls, pendings, into: None,
        "on_cpu": False,
        "settle": lambda calls, dx: dx,
        "whole": True,
        "recompute": False,
    }


COUNT = itertools.count()
OP = Row(lambda: {"op": linear})
NO_PATH = {("needs", "Needs(x=False, params=('no.such',))"): "nothing is asked for"}
ROOT = {("cfg", "IdentityConfig()"): "an op without parts", "op": "handed on as it is", "path": "any text"}
OWN = {  # by "module.name", or "name" of funcops itself
    **DIST,
    **INVARIANT,
    **LOGS,
    **LORA,
    **SCHEDULES,
    **MODELS,
    **TREES,
    **LOOPS,
    **LOW_PRECISION,
    **ADAPTERS,
    "Needs": Row(
        lambda: {"x": True, "params": ("a",)},
        {"x": (3,), "params": (3, (3,), {"a": 1})},
        {("x", "'yes'"): "a path", ("params", "'x'"): "a path", ("params", "[]"): "no paths"},
    ),
    "Step": Row(
        lambda: {"name": "a", "op": linear, "cfg": CFG, "takes": ("b",), "gives": ("c",), "folds": False},
        {"name": ("1a",), "takes": ("s", (3,), ["a"])},
    ),
    "Rule": Row(rule, {"phase": ("no such",)}, NAME),
    "register_fusion": Row(lambda: {"rule": funcops.Rule(**rule())}),
    "unregister_fusion": Row(lambda: {"rule": funcops.register_fusion(funcops.Rule(**rule()))}),
    "Policy": Row(
        lambda: {"rules": {"*": Save()}, "outputs": "none", "blocks": "inputs", "optional": False},
        {"rules": ({3: Save()}, {"*": 3})},
        {("rules", "[]"): "no rules"},
    ),
    "Compress": Row(lambda: {"codec": "fp8"}),
    "Disk": Row(lambda: {"folder": "folder"}, {}, {("folder", "'no such'"): "asked at the first use of a policy"}),
    "Ledger": Row(lambda: {}),
    **{name: Row(lambda: {}) for name in ("Drop", "Offload", "Recompute", "Save", "TorchConfig", "delayed_wgrad")},
    **{name: OP for name in ("differentiable",)},
    "backend": Row(lambda: {"name": "torch"}),
    "checking": Row(lambda: {"on": True}),
    "remat": Row(lambda: {"op": linear, "offload": True}),
    "value_and_grad": Row(lambda: {"op": linear, "x": True, "has_aux": True, "losses": ("loss",), "needs": Needs.ALL}),
    "vjp": Row(lambda: {"op": linear, "params": params(), "x": x(), "cfg": CFG, "needs": Needs.ALL}),
    "without_params": Row(
        lambda: {"kept": linear.fwd(PARAMS, x(), CFG)[1], "params": PARAMS, "digest": True},
        accepts={
            ("kept", "None"): "nothing was kept",
            ("params", "LinearParams(weight=float32[4, 4], bias=complex64[4])"): "the bias is not in the residuals",
        },
    ),
    "with_params": Row(
        lambda: {"kept": funcops.without_params(linear.fwd(PARAMS, x(), CFG)[1], PARAMS), "params": PARAMS},
        accepts={("kept", "None"): "nothing was kept"},
    ),
    "with_policy": Row(lambda: {"op": chain, "policy": "minimal"}),
    "walk": Row(lambda: {"cfg": CHAIN, "op": chain, "path": "model", "layers": True}, accepts=ROOT),
    "rewrite": Row(lambda: {"cfg": CHAIN, "fn": lambda part: None, "op": chain, "path": "model"}, accepts=ROOT),
    "fit": Row(
        lambda: {
            "op": linear,
            "cfg": CFG,
            "x": x(),
            "budget": 1000,
            "dtype": torch.float32,
            "needs": Needs.ALL,
            "codecs": ("fp8",),
            "places": {funcops.Offload(): 25e9},
        },
        {"budget": ONE},
        {("x", "float32[2, 4]"): "nothing is run"},
    ),
    "plan": Row(lambda: {"cfg": CHAIN, "needs": Needs.ALL, "device_type": "cuda", "dtype": torch.bfloat16}, accepts=NO_PATH),
    "explain": Row(
        lambda: {"cfg": CHAIN, "needs": Needs.ALL, "device_type": "cuda", "dtype": torch.bfloat16, "rows": True, "op": chain},
        accepts=NO_PATH,
    ),
    "fused.pack_qkv": Row(
        lambda: {"params": chain.init(BLOCK, key=random.key(0)), "cfg": BLOCK},
        accepts={"params": "leaves that do not fit are handed on", ("cfg", "IdentityConfig()"): "has no q, k and v"},
    ),
    "batch_wgrads": Row(
        lambda: {
            "op": linear,
            "pendings": [pending()],
            "cfg": CFG,
            "into": tree_map_tensors(torch.zeros_like, params()),
            "how": "each",
        },
        {"pendings": ([], [3])},
    ),
    "op_from_module": Row(
        lambda: {
            "module": torch.nn.Linear(4, 4),
            "example": torch.ones(2, 4),
            "output": torch.neg,
            "recipe": Fp8Current(),
            "skip": (),
        },
        {"skip": (("head",),)},
        {("skip", "[]"): "none"},
    ),
    "stages_from_module": Row(
        lambda: {
            "module": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
            "example": torch.ones(2, 4),
            "cuts": ["1"],
            "output": torch.neg,
        }
    ),
    "op_from_torch": Row(
        lambda: {"fn": doubled, "name": "mine", "config": funcops.TorchConfig, "init": lambda cfg, **k: None},
        {"config": (CFG,)},
        {("name", "'no such'"): "any name"},
    ),
    "donate": Row(lambda: {"kept": kept()}, accepts={("kept", "None"): "nothing was kept"}),
    "pack": Row(lambda: {"kept": kept(), "action": funcops.Compress("fp8")}, accepts={"kept": ANY}),
    "unpack": Row(lambda: {"packed": kept()}, accepts={"packed": ANY}),
    "report": Row(
        lambda: {"residuals": kept(), "params": params(), "x": x(), "tokens": 2, "expand": True},
        {"tokens": ONE},
        {("residuals", "None"): "nothing was kept", "params": ANY, "x": ANY},
    ),
    "quantization_report": Row(
        lambda: {
            "params": params(),
            "x": x(),
            "cfg": CFG,
            "recipe": formats.E4M3_BLOCK,
            "dy": None,
            "key": random.key(0),
            "total": False,
        }
    ),
    "diff": Row(lambda: {"before": report_of(), "after": report_of()}),
    "rope_table": Row(
        lambda: {"positions": torch.arange(3), "cfg": RopeConfig(4), "dtype": torch.float32},
        accepts={("positions", "int64[3, 5]"): "of any size", ("positions", "int64[3]"): "one tensor may be anywhere"},
    ),
    "LinearScaling": Row(lambda: {"factor": 2.0}),
    "DynamicScaling": Row(lambda: {"factor": 2.0, "original_context": 8, "length": 20}, {"original_context": ONE, "length": ONE}),
    "YarnScaling": Row(
        lambda: {
            "factor": 2.0,
            "original_context": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.5,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        },
        {"original_context": ONE, "beta_fast": (0.5,)},
    ),
    "LongRopeScaling": Row(
        lambda: {
            "short_factor": (1.0, 2.0),
            "long_factor": (2.0, 4.0),
            "original_context": 8,
            "factor": 4.0,
            "length": 20,
            "attention_factor": 1.5,
        },
        {"original_context": (0, 1), "short_factor": ((1.0,), (0.0, 1.0)), "length": ONE},
    ),
    "Llama3Scaling": Row(
        lambda: {"factor": 2.0, "original_context": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"original_context": ONE, "high_freq_factor": (1.0,)},
    ),
    "testing.Case": Row(
        lambda: {**case_good(), "name": "a", "exempt": (), "device": "cpu", "bits": 13},
        {"dtypes": ((3,),), "free": ((3,),)},
        {**NAME, ("reference", "None"): "for laws that compare with none", ("device", "None"): "torch's own"},
    ),
    "testing.Draw": Row(lambda: {"dtype": torch.float32, "seed": 3}),
    "testing.Error": Row(
        lambda: {"call": lambda: None, "match": "a", "error": ValueError},
        accepts={("match", "'no such'"): "any text", ("match", "''"): "any text"},
    ),
    "testing.assert_close": Row(
        lambda: {
            "got": x(),
            "want": x(),
            "dtype": torch.float32,
            "length": 3,
            "what": "x",
            "by_leaf": True,
            "cancels": (),
            "bits": 13,
        },
        accepts={"got": "what it is asked of", "want": "what it is asked of", ("what", "'no such'"): "any text"},
    ),
    "testing.check_op": Row(
        lambda: {**case_good(), "laws": ("mirror",)},
        {"laws": (("no such",),)},
        {("reference", "None"): "for laws that compare with none", "x": "a tree, or a function", "params": "a tree, or a function"},
    ),
}


def of(name: str) -> Callable[..., Any]:
    room, _, own = name.rpartition(".")
    return getattr(importlib.import_module(f"funcops.{room}") if room else funcops, own)


def public() -> list[str]:
    """The names of all public callables, of funcops itself and of its rooms."""
    found = [name for name in dir(funcops) if name[0] != "_" and is_called(getattr(funcops, name))]
    for room in ROOMS:
        module = importlib.import_module(f"funcops.{room}")
        own = not hasattr(module, "__path__") or room == "low_precision"  # whose formats and recipes are configs of other rooms
        home = module.__name__ if own and room not in ("nn", "graphs", "dist") else "funcops."
        every = dict.fromkeys([*vars(module), *getattr(module, "__all__", ())])  # some are imported at their first use
        names = [n for n in every if n[0] != "_" and str(getattr(getattr(module, n), "__module__", "")).startswith(home)]
        found += [
            f"{room}.{n}" for n in names if is_called(getattr(module, n)) and getattr(funcops, n, None) is not getattr(module, n)
        ]
    return found


def is_called(value: Any) -> bool:
    """Functions, configs and modules; not ops (whose functions have names), errors, and what functions return."""
    if not callable(value) or isinstance(value, (Op, type(Any))) or inspect.ismodule(value):
        return False
    if not isinstance(value, type):
        return True
    if issubclass(value, (BaseException, tuple, Saved, Nested)) or value in trees.FIELDS:  # results, and trees, which hold anything
        return False
    return (
        value.__name__ not in MADE
        and value not in {type(cfg) for cfg in (*CONFIGS, *[case.cfg for case in PLAIN.values()])}
        and value.__init__ is not Prepared.__init__
    )


MADE = {
    "Graphed",
    "GraphedOp",
    "InFlight",
    "Lent",
    "Leveled",
    "ModelErrors",
    "Plan",
    "Predicted",
    "QuantizationReport",
    "Saving",
    "Simulated",
    "OpModule",
}  # by functions, or to be derived from
ROWS = OWN | op_rows()
