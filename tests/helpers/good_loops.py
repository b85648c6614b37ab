"""Good arguments of `funcops.checkpoint`, `random`, `precision` and `optim`, which training loops call, for `good_arguments.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from good_rows import ANY, META_KEY, NAME, Row, grads, tree

from funcops import checkpoint, optim, precision, random


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


def muon() -> dict[str, Any]:
    cfg = optim.MuonConfig()
    return {**adamw(), "state": optim.muon_init(tree(), cfg), "cfg": cfg}


def saved_file() -> Path:
    path = Path("good.safetensors")
    checkpoint.save(tree(), path)
    return path


LEAVES_COMPLEX = "tree", "{'a': complex64[2, 2], 'b': None}"


LOOPS = {
    "checkpoint.save": Row(
        lambda: {"tree": tree(), "path": saved_file(), "metadata": {"a": "b"}},
        {"path": (Path("no such") / "folder",)},
        {("tree", "None"): ANY, ("tree", "[]"): ANY, LEAVES_COMPLEX: "the format has it"},
    ),
    "checkpoint.load": Row(lambda: {"path": saved_file(), "like": tree(), "verify": True}),
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
        lambda: {
            "key": random.key(0),
            "shape": (2, 3),
            "low": -1.0,
            "high": 2.0,
            "dtype": torch.float32,
            "device": "cpu",
            "ranges": (((0, 1),), ((1, 2),)),
        },
        {"shape": ((-1,), (1.5,)), "low": (3.0,), "high": (-3.0,), "ranges": ((((0, 3),), ((1, 2),)), (((0, 1),), ()))},
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
    "precision.split_master": Row(lambda: {"params": tree()}),
    "precision.join_master": Row(lambda: dict(zip(("weights", "remainder"), precision.split_master(tree()), strict=True))),
    "precision.select_step": Row(lambda: {"ok": torch.tensor(True), "new": tree(), "old": tree()}),
    "optim.AdamWConfig": Row(
        lambda: {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
        {"betas": ((0.9,), (0.9, 1.0), ("a", "b"), (float("nan"), 0.5))},
    ),
    "optim.SGDConfig": Row(lambda: {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "optim.MuonConfig": Row(
        lambda: {
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 0.1,
            "ns_coefficients": (3.0, -4.0, 2.0),
            "ns_steps": 3,
            "eps": 1e-7,
            "adjust_lr_fn": "match_rms_adamw",
        },
        {"momentum": (1.0,), "ns_coefficients": ((1.0, 2.0), ("a", 1.0, 2.0)), "ns_steps": (0, 100), "adjust_lr_fn": ("none",)},
    ),
    "optim.adamw_init": Row(
        lambda: {"params": tree(), "cfg": optim.AdamWConfig()},
        accepts={("params", "None"): ANY, ("params", "[]"): ANY, ("params", "float64[3, 3]"): "a bare tensor is a tree"},
    ),
    "optim.sgd_init": Row(
        lambda: {"params": tree(), "cfg": optim.SGDConfig(momentum=0.9)}, accepts={("params", "None"): ANY, ("params", "[]"): ANY}
    ),
    "optim.muon_init": Row(
        lambda: {"params": tree(), "cfg": optim.MuonConfig()},
        accepts={("params", "None"): ANY, ("params", "[]"): ANY, ("params", "float64[3, 3]"): "a bare tensor is a tree"},
    ),
    "optim.adamw_update": Row(lambda: {**adamw(), "factor": 0.5, "into": tree()}),
    "optim.muon_update": Row(muon),
    "optim.sgd_update": Row(sgd),
    "optim.clip_factor": Row(lambda: {"norm": torch.tensor(2.0), "max_norm": 1.0}),
    "optim.clip_by_global_norm": Row(
        lambda: {"grads": grads(), "max_norm": 1.0, "norm": torch.tensor(2.0), "in_place": True},
        accepts={("grads", "None"): ANY, ("grads", "[]"): ANY},
    ),
    "optim.code_book": Row(lambda: {"signed": True}),
    "optim.quantize_state": Row(lambda: {"state": adamw()["state"], "min_size": 1}),
    "optim.dequantize_state": Row(lambda: {"state": adamw()["state"]}),
    "optim.with_quantized_state": Row(lambda: {"update": optim.adamw_update}),
    "optim.balance": Row(lambda: {"bias": torch.zeros(4), "load": torch.arange(4), "rate": 0.1}),
    "optim.global_norm": Row(lambda: {"tree": grads()}, accepts={("tree", "None"): ANY, ("tree", "[]"): ANY}),
    "optim.update_ratios": Row(
        lambda: {"params": tree(), "updated": grads()},
        accepts={("params", "None"): "another structure", ("updated", "None"): "another structure"},
    ),
    "optim.decay_mask": Row(lambda: {"params": tree(), "exclude": ("a",)}, accepts={"params": ANY, ("exclude", "[]"): "none"}),
    "optim.matrix_mask": Row(lambda: {"params": tree(), "exclude": ("a",)}, accepts={"params": ANY, ("exclude", "[]"): "none"}),
    "optim.partition": Row(lambda: {"tree": tree(), "mask": {"a": True, "b": False}}, accepts={"tree": ANY}),
    "optim.combine": Row(
        lambda: {"first": tree(), "second": {"a": None, "b": torch.ones(2)}}, accepts={"first": ANY, "second": ANY}
    ),
    "optim.ema_init": Row(lambda: {"params": tree(), "dtype": torch.float32}, accepts={"params": ANY}),
    "optim.ema_update": Row(lambda: {"average": tree(), "params": grads(), "decay": 0.5, "in_place": True}, {"decay": (1.5,)}),
    "optim.warmup_cosine": Row(
        lambda: {"step": 3, "peak": 0.1, "warmup": 2, "total": 9, "final": 0.01},
        {"warmup": (10,)},
        {("step", "1.5"): "between two steps"},
    ),
}
