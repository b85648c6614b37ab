"""`zero3`: a model with params sharded over an axis, each layer whole while it computes; `data_parallel`: one whose params are
whole, and whose gradients are summed layer by layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from funcops.distributed.buckets import BUCKET_BYTES
from funcops.distributed.mesh import Axis
from funcops.distributed.ops.sharded import ShardedConfig, sharded
from funcops.distributed.ops.vocab_cross_entropy import vocab_cross_entropy
from funcops.engine.compose.chain import ChainConfig
from funcops.engine.compose.joints import Made, joint_by_ops, register_joint
from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import Inside, Part, rewrite, walk
from funcops.engine.errors import in_step, require_flag, require_type
from funcops.engine.program.values import has_params
from funcops.library.ops.cross_entropy import cross_entropy
from funcops.library.ops.softcap import softcap


def zero3(
    cfg: ChainConfig,
    axis: Axis,
    *,
    also: tuple[Axis, ...] = (),
    dtype: torch.dtype | None = None,
    ordered: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    reshard_after_forward: bool | None = None,
) -> ChainConfig:
    """The chain with `sharded` around each layer of a repeat, and around each other step that has params. Its params are shards,
    from its `init` or `own_shards`; paths, residuals of activations and ties stay. See `ShardedConfig` for the options; without
    `reshard_after_forward` only the last step with params keeps them for its backward, which comes next. With False all do: ZeRO-2,
    whose gathers start layer by layer during the forward. Raises `TypeError` unless `cfg` is a chain's config.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, dist, linear
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)),))
    >>> sharded = dist.zero3(cfg, dist.Mesh.abstract({"dp": 2}, rank=0)["dp"])
    >>> sharded.steps[0].op, chain.init(sharded, device="meta")["up"].weight.shape
    (sharded, torch.Size([8, 8]))
    """
    require_type("zero3", "cfg", cfg, ChainConfig)
    last = next((step.name for step in reversed(cfg.steps) if step.has_params), None)

    def made(part: Part) -> ShardedConfig:
        again = part.path != last if reshard_after_forward is None else reshard_after_forward
        options: dict[str, Any] = {"dtype": dtype, "ordered": ordered, "bucket_bytes": bucket_bytes}
        return ShardedConfig(part.op, part.cfg, axis=axis, also=also, **options, reshard_after_forward=again)

    return _around_layers(cfg, made)


def data_parallel(
    cfg: ChainConfig,
    axis: Axis,
    *,
    also: tuple[Axis, ...] = (),
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    shard: bool = False,
    ordered: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> ChainConfig:
    """The chain whose backward sums its gradients over the axis: each layer of a repeat, and each other step that has params, is in
    `sharded` with `stage=0`, so its sums are in flight while the next ones compute. `bwd` and `wgrad` return sums, or add them to
    `into`. `shard`: of the sums each rank gets only its part (`own_shards`), as ZeRO-1 and 2 need, and `into` must be None. Every
    backward communicates: a step of several microbatches sends less with one `reduce_start` after the last. Params, their paths,
    ties, and residuals of activations stay; a working tree of `quantize_params` needs `grad_dtype`. See `ShardedConfig` for the
    options. Raises `TypeError` unless `cfg` is a chain's config.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, dist, linear
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)),))
    >>> summed = dist.data_parallel(cfg, dist.Mesh.abstract({"dp": 2}, rank=0)["dp"])
    >>> summed.steps[0].op, chain.init(summed, device="meta")["up"].weight.shape
    (sharded, torch.Size([16, 8]))
    """
    require_type("data_parallel", "cfg", cfg, ChainConfig)
    require_flag("data_parallel", shard=shard)
    stage = 2 if shard else 0

    def made(part: Part) -> ShardedConfig:
        options: dict[str, Any] = {"dtype": dtype, "grad_dtype": grad_dtype, "ordered": ordered, "bucket_bytes": bucket_bytes}
        return ShardedConfig(part.op, part.cfg, axis=axis, also=also, **options, stage=stage)

    return _around_layers(cfg, made)


def _around_layers(cfg: ChainConfig, made: Callable[[Part], ShardedConfig]) -> ChainConfig:
    """The chain with `sharded` around each layer of a repeat, and around each other step, that has params."""

    def shard(part: Part) -> tuple[Op, Any]:
        if not has_params(part.op, part.cfg):
            return part.op, part.cfg
        try:
            return sharded, made(part)
        except ValueError as error:
            in_step(error, part.path)
            raise

    def step(part: Part) -> tuple[Op, Any] | Inside | None:
        if part.composite and part.cfg.times is not None:
            return Inside(shard)
        repeats = any(inner.composite and inner.cfg.times is not None for inner in walk(part.cfg))
        return None if not part.path or repeats else shard(part)

    return rewrite(cfg, step)[1]  # type: ignore[no-any-return]


def _joined(head: ShardedConfig, *others: Any, ops: tuple[Op, ...]) -> Made:
    """The loss of a head whose params are sharded, without its logits."""
    made = joint_by_ops((head.op, *ops), (head.cfg, *others))
    return made if isinstance(made, str) else (sharded, dataclasses.replace(head, op=made[0], cfg=made[1]))


for _loss in (cross_entropy, vocab_cross_entropy):
    for _ops in ((_loss,), (softcap, _loss)):
        register_joint((sharded, *_ops), functools.partial(_joined, ops=_ops))
