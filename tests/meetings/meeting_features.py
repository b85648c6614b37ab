"""The features of the table of meetings: what each changes, in one stated order.

A meeting is a set of features. `Meeting` composes them, whatever they are, in the order of its methods:

    1. `sizes`      the model: a window, a mixture
    2. `rewrites`   of its config: packed rows, recompute, adapters, a recipe, parallel layers, ZeRO-3
    3. `op`         what is kept: a policy or a budget
    4. `logged`     the config, with logs
    5. the step: how forward and backward are called (`meeting_steps`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from meeting_join import JoinConfig, join

from funcops import (
    AttentionConfig,
    ChainConfig,
    ExpertsConfig,
    RopeConfig,
    RouteConfig,
    Step,
    chain,
    dist,
    fit,
    remat,
    report,
    with_policy,
)
from funcops.engine.contract.configs import Composite
from funcops.engine.contract.op import Op
from funcops.logs import with_logs
from funcops.lora import with_lora
from funcops.low_precision import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed, with_recipe
from funcops.models import DecoderConfig, MoEConfig, decoder, roles

SIZES = DecoderConfig(
    vocab=32, dim=32, layers=2, heads=4, kv_heads=2, head_size=128, hidden=256, context=16, rope=RopeConfig(128)
)  # on two ranks whole tiles of every recipe
RANK, SCALE = 4, 2.0  # of adapters
DOCUMENTS = (5, 8, 3)  # of a packed row


class Feature(NamedTuple):
    """`title`: as the page has it; `call`: how it is turned on. `group`: features of one group answer the same question, so that a
    model has at most one of them. `within`: the features that this one contains. `axis`: the axis of ranks that it adds."""

    title: str
    call: str
    group: str = ""
    within: tuple[str, ...] = ()
    axis: str = ""


RECIPES = {"fp8_current": Fp8Current(), "fp8_delayed": Fp8Delayed(history=4), "fp8_block": Fp8Block(), "mxfp8": MXFP8()}
RECIPES |= {"nvfp4": NVFP4(stochastic=False)}
POLICIES = {
    "save_all": "save_all",
    "recompute_norms": "recompute_norms",
    "minimal": "minimal",
    "compress": "compress_fp8",
    "offload": "offload_block_inputs",
}

FEATURES = {
    **{name: Feature(type(r).__name__, f"with_recipe(cfg, {r!r})", "recipe") for name, r in RECIPES.items()},
    "tp": Feature("tp", "dist.parallel(..., sequence_parallel=False)", "tp", axis="tp"),
    "sp": Feature("sp", "dist.parallel(...), rows sharded between layers", "tp", axis="tp"),
    "cp": Feature("cp", "dist.parallel(...), context attention", axis="cp"),
    "ep": Feature("ep", "dist.parallel(..., capacity=1.0), experts over ranks", within=("moe",), axis="ep"),
    "zero3": Feature("ZeRO-3", "dist.zero3(cfg, axis)", axis="dp"),
    "pipeline": Feature("pipeline", "schedule.run, a stage a step", "backward"),
    "lora": Feature("LoRA", "with_lora(cfg, rank, targets)"),
    "save_all": Feature("save all", 'with_policy(op, "save_all")', "kept"),
    "recompute_norms": Feature("norms", 'with_policy(op, "recompute_norms")', "kept"),
    "minimal": Feature("minimal", 'with_policy(op, "minimal")', "kept"),
    "compress": Feature("compress", 'with_policy(op, "compress_fp8")', "kept"),
    "offload": Feature("offload", 'with_policy(op, "offload_block_inputs")', "kept"),
    "fit": Feature("fit", "fit(op, cfg, x, budget)", "kept"),
    "recompute": Feature("remat", "remat(chain) as the body of repeat"),
    "delayed": Feature("delayed", "dgrad of all microbatches, then wgrad"),
    "batch": Feature("batched", "batch_wgrads(op, pendings, cfg)", within=("delayed",)),
    "donate": Feature("donate", "bwd(donate(residuals), dy, cfg)"),
    "graph": Feature("graph", "graphs.graphed, graphs.graphed_op"),
    "compile": Feature("compile", "torch.compile(step, fullgraph=True)"),
    "differentiable": Feature("autograd", "differentiable(op), then backward()", "backward"),
    "packed": Feature("packed", "AttentionConfig(packed=True)"),
    "window": Feature("window", "DecoderConfig(windows=...)"),
    "moe": Feature("MoE", "DecoderConfig(moe=...)"),
    "logs": Feature("logs", "logs.with_logs(cfg, {...}), logs.logs_init(params, cfg)"),
    "recorded": Feature("recording", "with recording():"),
}
LOGS = {"*": ("y_norm", "dy_norm"), "blocks.*": ("dx_norm",), "norm": ("dw_norm",)}
CALLERS = {  # the features whose step the caller writes, by the one that calls the backward itself
    "pipeline": ("batch", "donate"),
    "differentiable": ("batch", "donate"),
}


def left_out(a: str, b: str) -> bool:
    """Whether no model can have both: they answer the same question, one contains the other, or each calls the backward."""
    one, other = FEATURES[a], FEATURES[b]
    if one.group and one.group == other.group:
        return True
    if a in other.within or b in one.within:
        return True
    return b in CALLERS.get(a, ()) or a in CALLERS.get(b, ())


class Meeting:
    """A model with these features. `microbatches`: of a step, on all ranks; by default as few as its ranks and a compiler take."""

    def __init__(self, *names: str, microbatches: int | None = None) -> None:
        contained = [inner for name in names for inner in FEATURES[name].within]
        self.names = frozenset((*names, *contained))
        fewest = 1 if "compile" in self.names else 2
        self.microbatches = microbatches or max(fewest, 2 ** len({"ep", "zero3"} & self.names))

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @property
    def recipe(self) -> Any:
        return next((recipe for name, recipe in RECIPES.items() if name in self), None)

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the axes of ranks; {} for one process."""
        axes = [FEATURES[name].axis for name in FEATURES if name in self and FEATURES[name].axis]
        return dict.fromkeys(sorted(set(axes), key="dp ep cp tp".split().index), 2)

    @property
    def model(self) -> frozenset[str]:
        """The features that change the function that the model computes, apart from rounding."""
        return self.names & {"lora", "moe", "packed", "window", "compile"}

    @property
    def sizes(self) -> DecoderConfig:
        sizes = dataclasses.replace(SIZES, layers=1) if "compile" in self else SIZES
        if "window" in self:
            sizes = dataclasses.replace(sizes, windows=(3,) * sizes.layers)
        if "moe" in self:
            mixture = MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, sizes.dim, 128))
            sizes = dataclasses.replace(sizes, moe=mixture)
        return sizes

    def rewrites(self, mesh: Any = None) -> dict[str, Callable[[Any], Any]]:
        """The functions from config to config that the features ask for, in order."""
        found: dict[str, Callable[[Any], Any]] = {}
        if "packed" in self:
            found["packed"] = packed
        if "recompute" in self:
            found["recompute"] = recomputed
        if "lora" in self:
            found["lora"] = lambda cfg: with_lora(cfg, RANK, ("*.q.proj", "*.v.proj", "*.out"), alpha=SCALE * RANK)
        if self.recipe is not None:
            skip = ("head", *(("*gate",) if "moe" in self else ()))
            found["recipe"] = lambda cfg: with_recipe(cfg, self.recipe, skip=skip)
        if {"tp", "sp", "cp", "ep"} & self.names:
            rules = roles(self.sizes, loss=True)
            found["ranks"] = lambda cfg: dist.parallel(cfg, rules, mesh, sequence_parallel="sp" in self, capacity=1.0)
        if "zero3" in self:
            found["zero3"] = lambda cfg: dist.zero3(cfg, mesh["dp"])
        return found

    def config(self, *without: str, mesh: Any = None) -> Any:
        """The config of a rank, or without some of the rewrites."""
        cfg = decoder(self.sizes, loss=True)
        for name, rewrite in self.rewrites(mesh).items():
            cfg = cfg if name in without else rewrite(cfg)
        return cfg

    @property
    def adapted(self) -> Any:
        """The config of all params, in high precision and whole."""
        return self.config("recipe", "ranks", "zero3")

    @property
    def whole(self) -> Any:
        """The config on one process."""
        return self.config("ranks", "zero3")

    def own(self, mesh: Any) -> Any:
        """The config of a rank, or on one process of the only one."""
        return self.config(mesh=mesh)

    def logged(self, cfg: Any) -> Any:
        """The config of a rank, with logs of each microbatch."""
        return with_logs(cfg, LOGS, runs=self.microbatches) if "logs" in self else cfg

    def op(self, cfg: Any, params: Any, x: Any) -> Op:
        """The op that runs the config, which keeps what a policy or a budget says."""
        if "fit" in self:
            kept = report(chain.fwd(params, x, cfg)[1], params).kept_bytes
            return fit(chain, cfg, x, int(0.95 * kept), dtype=torch.float64).op
        policy = next((policy for name, policy in POLICIES.items() if name in self), None)
        return chain if policy is None else with_policy(chain, policy)


def recomputed(cfg: Any) -> Any:
    """The config whose layers keep only their inputs."""
    return cfg.with_parts(
        lambda name, op, inner: (op, dataclasses.replace(inner, op=remat(inner.op)) if name == "blocks" else inner)
    )


def packed(cfg: Any) -> Any:
    """The config whose attentions and routers take `cu_seqlens`, an extra of the chains around them: a step before each attention
    joins it to q, k, v."""
    if not isinstance(cfg, ChainConfig):
        return cfg.with_parts(lambda name, op, inner: (op, packed(inner))) if isinstance(cfg, Composite) else cfg
    steps: list[Step] = []
    for step in cfg.steps:
        if isinstance(step.cfg, AttentionConfig):
            steps.append(Step("join", join, JoinConfig(), takes=("cu_seqlens",)))
            step = dataclasses.replace(step, cfg=dataclasses.replace(step.cfg, packed=True))
        if isinstance(step.cfg, RouteConfig):
            step = dataclasses.replace(step, cfg=dataclasses.replace(step.cfg, packed=True), takes=("cu_seqlens",))
        steps.append(dataclasses.replace(step, cfg=packed(step.cfg)))
    below = any("cu_seqlens" in (*step.takes, *step.cfg.extras) for step in steps)
    return dataclasses.replace(cfg, steps=tuple(steps), extras=(*cfg.extras, *(("cu_seqlens",) if below else ())))
