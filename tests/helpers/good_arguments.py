"""Good arguments of every public callable, one row each: `test_wrong_values.py` makes them wrong, one argument at a time."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dist_cases import PLAIN
from good_dist import DIST
from good_lora import LORA
from good_models import MODELS
from good_rows import ANY, CFG, CHAIN, NAME, Row, chain_params, params, x
from good_schedules import SCHEDULES
from law_cases import CONFIGS, FIRST

import funcops
from funcops import (
    ChainConfig,
    CrossEntropyConfig,
    LinearParams,
    Needs,
    Op,
    RopeConfig,
    Save,
    Step,
    chain,
    checkpoint,
    cross_entropy,
    formats,
    graphs,
    linear,
    low_precision,
    nn,
    optim,
    precision,
    random,
    report,
    trees,
)
from funcops.adapters.nn.module import Prepared  # whose arguments are those of torch.nn's module
from funcops.contract.schema import Saved
from funcops.formats.recipes import Fp8Block
from funcops.residuals.nested import Nested
from funcops.testing.checks import float_like
from funcops.trees import tree_map_tensors

ROOMS = (
    "checkpoint",
    "dist",
    "fused",
    "graphs",
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


LOW = low_precision.with_recipe(CHAIN, low_precision.Fp8Delayed(history=2), only=("a",))
LOSS = ChainConfig(
    steps=(Step("a", linear, CFG), Step("b", cross_entropy, CrossEntropyConfig(), takes=("labels",))), extras=("labels",)
)


def kept() -> Any:
    return linear.fwd(params(), x(), CFG)[1]


def pending() -> Any:
    return linear.dgrad(kept(), x(), CFG)[1]


def tree() -> dict[str, Any]:
    return {"a": torch.ones(2, 2), "b": None}


def grads() -> dict[str, Any]:
    return {"a": torch.full((2, 2), 0.5), "b": None}


def adamw() -> dict[str, Any]:
    cfg = optim.AdamWConfig()
    return {
        "params": tree(),
        "grads": grads(),
        "state": optim.adamw_init(tree(), cfg),
        "cfg": cfg,
        "lr": 0.1,
        "decay": {"a": True, "b": False},
        "in_place": True,
    }


def sgd() -> dict[str, Any]:
    cfg = optim.SGDConfig(momentum=0.9)
    return {**adamw(), "state": optim.sgd_init(tree(), cfg), "cfg": cfg}


def saved_file() -> Path:
    path = Path("good.safetensors")
    checkpoint.save(tree(), path)
    return path


def doubled(tree: Any) -> Any:
    return 2 * tree


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
META_KEY = {("key", "int64[2]"): "a key on the meta device gives keys and bits there"}
LEAVES_COMPLEX = "tree", "{'a': complex64[2, 2], 'b': None}"
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
OWN = {  # by "module.name", or "name" of funcops itself
    "checkpoint.save": Row(
        lambda: {"tree": tree(), "path": saved_file(), "metadata": {"a": "b"}},
        {"path": (Path("no such") / "folder",)},
        {("tree", "None"): ANY, ("tree", "[]"): ANY, LEAVES_COMPLEX: "the format has it"},
    ),
    "checkpoint.load": Row(lambda: {"path": saved_file(), "like": tree()}),
    "checkpoint.read_metadata": Row(lambda: {"path": saved_file()}),
    "random.key": Row(
        lambda: {"seed": 3, "device": "cpu"}, {"seed": (2**64, -(2**63) - 1)}, {("seed", "-1"): "seeds are modulo 2^64"}
    ),
    "random.check_key": Row(lambda: {"where": "a", "key": random.key(0)}, accepts={"where": "the caller's name"}),
    "random.path_id": Row(lambda: {"name": "a"}, accepts=NAME),
    "random.fold_in": Row(lambda: {"key": random.key(0), "data": 3}, accepts=META_KEY),
    "random.split": Row(
        lambda: {"key": random.key(0), "n": 3}, {"n": (0,)}, {("key", "None"): "no key, on the meta device", **META_KEY}
    ),
    "random.philox": Row(lambda: {"key": (1, 2), "counter": (1, 2, 3, 4)}),
    "random.bits": Row(lambda: {"key": random.key(0), "n": 3}, accepts=META_KEY),
    "random.bits_of": Row(
        lambda: {"key": random.key(0), "shape": (2, 3), "ranges": (((0, 1),), ((1, 2),))},
        {"shape": ((2, -3), (2,)), "ranges": ((((0, 3),), ((1, 2),)), (((0, 1),), ()), (((0, 1, 1),), ((1, 2),)))},
        META_KEY,
    ),
    "random.put_off": Row(lambda: {"takes": lambda place: True}),
    "random.uniform": Row(
        lambda: {"key": random.key(0), "shape": (2, 3), "low": -1.0, "high": 2.0, "dtype": torch.float32, "device": "cpu"},
        {"shape": ((-1,), (1.5,)), "low": (3.0,), "high": (-3.0,)},
        {("shape", "[]"): "one number", ("low", "-1.0"): "it is one"},
    ),
    "random.normal": Row(
        lambda: {"key": random.key(0), "shape": (2, 3), "mean": 0.0, "std": 1.0, "dtype": torch.float32, "device": "cpu"},
        {"shape": ((-1,), (1.5,))},
        {("shape", "[]"): "one number", ("mean", "-1.0"): "a mean"},
    ),
    "precision.LossScaleConfig": Row(
        lambda: {"initial": 8.0, "growth": 2.0, "backoff": 0.5, "interval": 10}, {"backoff": (1.5,), "interval": (0,)}
    ),
    "precision.loss_scale_init": Row(lambda: {"cfg": precision.LossScaleConfig(), "device": "cpu"}),
    "precision.loss_scale_update": Row(
        lambda: {
            "loss_scale": precision.loss_scale_init(precision.LossScaleConfig()),
            "ok": torch.tensor(True),
            "cfg": precision.LossScaleConfig(),
        }
    ),
    "precision.unscale": Row(
        lambda: {"grads": grads(), "loss_scale": precision.loss_scale_init(precision.LossScaleConfig())},
        accepts={
            "grads": ANY,
            **{("loss_scale", f"LossScale(scale=float32[], good_steps={value})"): "not read" for value in ("'x'", "complex64[]")},
        },
    ),
    "precision.all_finite": Row(lambda: {"grads": grads()}, accepts={"grads": ANY}),
    "precision.nonfinite": Row(lambda: {"grads": grads()}, accepts={"grads": ANY}),
    "precision.select_step": Row(lambda: {"ok": torch.tensor(True), "new": tree(), "old": tree()}),
    "optim.AdamWConfig": Row(
        lambda: {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        {"betas": ((0.9,), (0.9, 1.0), ("a", "b"), (float("nan"), 0.5))},
    ),
    "optim.SGDConfig": Row(lambda: {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "optim.adamw_init": Row(
        lambda: {"params": tree(), "cfg": optim.AdamWConfig()},
        accepts={("params", "None"): ANY, ("params", "[]"): ANY, ("params", "float64[3, 3]"): "a bare tensor is a tree"},
    ),
    "optim.sgd_init": Row(
        lambda: {"params": tree(), "cfg": optim.SGDConfig(momentum=0.9)}, accepts={("params", "None"): ANY, ("params", "[]"): ANY}
    ),
    "optim.adamw_update": Row(adamw),
    "optim.sgd_update": Row(sgd),
    "optim.clip_by_global_norm": Row(
        lambda: {"grads": grads(), "max_norm": 1.0, "norm": torch.tensor(2.0), "in_place": True},
        accepts={("grads", "None"): ANY, ("grads", "[]"): ANY},
    ),
    "optim.balance": Row(lambda: {"bias": torch.zeros(4), "load": torch.arange(4), "rate": 0.1}),
    "optim.global_norm": Row(lambda: {"tree": grads()}, accepts={("tree", "None"): ANY, ("tree", "[]"): ANY}),
    "optim.decay_mask": Row(lambda: {"params": tree(), "exclude": ("a",)}, accepts={"params": ANY, ("exclude", "[]"): "none"}),
    "optim.ema_init": Row(lambda: {"params": tree(), "dtype": torch.float32}, accepts={"params": ANY}),
    "optim.ema_update": Row(lambda: {"average": tree(), "params": grads(), "decay": 0.5, "in_place": True}, {"decay": (1.5,)}),
    "optim.warmup_cosine": Row(
        lambda: {"step": 3, "peak": 0.1, "warmup": 2, "total": 9, "final": 0.01},
        {"warmup": (10,)},
        {("step", "1.5"): "between two steps"},
    ),
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
    "trees.leaf": Row(lambda: {"shape": "[*]", "gradient": False}, accepts={"shape": "words"}),
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
    "low_precision.with_recipe": Row(
        lambda: {"cfg": CHAIN, "recipe": low_precision.Fp8Block(), "only": ("*",), "skip": ()},
        {"only": (("head",),), "skip": (("head",),)},
        {(name, "[]"): "none" for name in ("only", "skip")},
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
    "low_precision.split_amaxes": Row(lambda: {"dparams": grads()}, accepts={"dparams": ANY}),
    "low_precision.gradients_like": Row(lambda: {"work": chain_params(), "dtype": torch.float32}, accepts={"work": ANY}),
    "low_precision.with_keys": Row(
        lambda: {"work": chain_params(), "cfg": LOW, "key": random.key(0)},
        accepts={"work": ANY, "cfg": "any config: one without a stochastic recipe has no keys", **META_KEY},
    ),
    "trees.leaves": Row(lambda: {"tree": tree(), "is_leaf": lambda node: False}, accepts={"tree": ANY}),
    "trees.paths": Row(lambda: {"tree": tree(), "is_leaf": lambda leaf: False}, accepts={"tree": ANY}),
}


def of_the_ops() -> dict[str, Row]:
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
    }


def rule() -> dict[str, Any]:
    return {
        "name": f"fresh {next(COUNT)}",
        "phase": "forward",
        "match": lambda window: None,
        "run": lambda *given: None,
        "saves": funcops.Saving(passes=2, launches=1),
        "wgrads": lambda calls, pendings: None,
        "on_cpu": False,
        "whole": False,
        "recompute": False,
    }


COUNT = itertools.count()
OP = Row(lambda: {"op": linear})
ONE = (0,)
GRAPHED = {"slots": 1, "outputs": "clone", "warmup": 1, "capture_error_mode": "global", "keep_graph": False, "debug": False}
NO_PATH = {("needs", "Needs(x=False, params=('no.such',))"): "nothing is asked for"}
ROOT = {("cfg", "IdentityConfig()"): "an op without parts", "op": "handed on as it is", "path": "any text"}
MODULE = "the module itself says what it takes"
DEVICES_OWN = {name: "looked at where there is a GPU" for name in ("pool", "stream", "capture_error_mode", "keep_graph")}
OWN |= (
    DIST
    | LORA
    | SCHEDULES
    | MODELS
    | {
        "Needs": Row(
            lambda: {"x": True, "params": ("a",)},
            {"x": (3,), "params": (3, (3,), {"a": 1})},
            {("x", "'yes'"): "a path", ("params", "'x'"): "a path", ("params", "[]"): "no paths"},
        ),
        "Step": Row(
            lambda: {"name": "a", "op": linear, "cfg": CFG, "takes": ("b",), "gives": ("c",)},
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
        "Ledger": Row(lambda: {}),
        **{name: Row(lambda: {}) for name in ("Drop", "Offload", "Recompute", "Save", "TorchConfig", "delayed_wgrad")},
        **{name: OP for name in ("differentiable",)},
        "backend": Row(lambda: {"name": "torch"}),
        "checking": Row(lambda: {"on": True}),
        "remat": Row(lambda: {"op": linear, "offload": True}),
        "value_and_grad": Row(lambda: {"op": linear, "x": True, "has_aux": True, "losses": ("loss",), "needs": Needs.ALL}),
        "vjp": Row(lambda: {"op": linear, "params": params(), "x": x(), "cfg": CFG, "needs": Needs.ALL}),
        "with_policy": Row(lambda: {"op": chain, "policy": "minimal"}),
        "walk": Row(lambda: {"cfg": CHAIN, "op": chain, "path": "model", "layers": True}, accepts=ROOT),
        "rewrite": Row(lambda: {"cfg": CHAIN, "fn": lambda part: None, "op": chain, "path": "model"}, accepts=ROOT),
        "fit": Row(
            lambda: {"op": linear, "cfg": CFG, "x": x(), "budget": 1000, "dtype": torch.float32},
            {"budget": ONE},
            {("x", "float32[2, 4]"): "nothing is run"},
        ),
        "plan": Row(lambda: {"cfg": CHAIN, "needs": Needs.ALL, "device_type": "cuda", "dtype": torch.bfloat16}, accepts=NO_PATH),
        "explain": Row(lambda: {"cfg": CHAIN, "needs": Needs.ALL, "device_type": "cuda", "dtype": torch.bfloat16}, accepts=NO_PATH),
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
            lambda: {"params": params(), "x": x(), "cfg": CFG, "recipe": formats.E4M3_BLOCK, "dy": None, "key": random.key(0)}
        ),
        "diff": Row(lambda: {"before": report_of(), "after": report_of()}),
        "rope_table": Row(
            lambda: {"positions": torch.arange(3), "cfg": RopeConfig(4), "dtype": torch.float32},
            accepts={("positions", "int64[3, 5]"): "of any size", ("positions", "int64[3]"): "one tensor may be anywhere"},
        ),
        "LinearScaling": Row(lambda: {"factor": 2.0}),
        "DynamicScaling": Row(
            lambda: {"factor": 2.0, "original_context": 8, "length": 20}, {"original_context": ONE, "length": ONE}
        ),
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
        "graphs.check_capturable": Row(lambda: {"fn": doubled}),
        "graphs.cut_rows": Row(lambda: {"tree": x(), "size": 1}, accepts={"tree": ANY}),
        "graphs.pad_rows": Row(
            lambda: {"tree": x(), "size": 3, "value": 0.0},
            accepts={"tree": ANY, **{("value", value): "a number to fill with" for value in ("-1.0", "inf", "nan", "True")}},
        ),
        "graphs.graphed": Row(lambda: {"fn": lambda: None, "inputs": "copy", **GRAPHED}, {"slots": ONE}, DEVICES_OWN),
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
            lambda: {"model": torch.nn.Sequential(torch.nn.Linear(4, 4)), "policy": None, "recipe": None, "only": None, "skip": ()},
            {"policy": (3, "no such"), "recipe": (3, "fp8_block"), "only": (3, (3,)), "skip": (3, (3,))},
            {("skip", "[]"): "none"},
        ),
        "nn.to_torch": Row(lambda: {"model": torch.nn.Sequential(nn.Linear(4, 4))}),
        "nn.quantize_weights": Row(lambda: {"model": nn.Linear(4, 4, recipe=Fp8Block()), "dtype": torch.float32, "columns": True}),
        "nn.functional": Row(lambda: {"module": nn.Linear(4, 4)}),
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
            {
                ("reference", "None"): "for laws that compare with none",
                "x": "a tree, or a function",
                "params": "a tree, or a function",
            },
        ),
    }
)


def of(name: str) -> Callable[..., Any]:
    room, _, own = name.rpartition(".")
    return getattr(importlib.import_module(f"funcops.{room}") if room else funcops, own)


def public() -> list[str]:
    """The names of all public callables, of funcops itself and of its rooms."""
    found = [name for name, value in vars(funcops).items() if name[0] != "_" and is_called(value)]
    for room in ROOMS:
        module = importlib.import_module(f"funcops.{room}")
        own = not hasattr(module, "__path__") or room == "low_precision"  # whose formats and recipes are configs of other rooms
        home = module.__name__ if own and room not in ("nn", "graphs") else "funcops."
        names = [n for n, value in vars(module).items() if n[0] != "_" and str(getattr(value, "__module__", "")).startswith(home)]
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
    "Plan",
    "Predicted",
    "QuantizationReport",
    "Simulated",
    "OpModule",
}  # by functions, or to be derived from
ROWS = OWN | of_the_ops()
