"""`zero3`: a model with params sharded over an axis, each layer whole while it computes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from funcops.compose.chain import ChainConfig
from funcops.compose.joints import Made, joint_by_ops, register_joint
from funcops.contract.op import Op
from funcops.contract.walk import Inside, Part, rewrite, walk
from funcops.distributed.buckets import BUCKET_BYTES
from funcops.distributed.mesh import Axis
from funcops.distributed.ops.sharded import ShardedConfig, sharded
from funcops.distributed.ops.vocab_cross_entropy import vocab_cross_entropy
from funcops.errors import in_step, require_type
from funcops.ops.cross_entropy import cross_entropy
from funcops.ops.softcap import softcap
from funcops.program.values import has_params


def zero3(
    cfg: ChainConfig,
    axis: Axis,
    *,
    also: tuple[Axis, ...] = (),
    dtype: torch.dtype | None = None,
    ordered: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
) -> ChainConfig:
    """The chain with `sharded` around each layer of a repeat, and around each other step that has params. Its params are shards,
    from its `init` or `own_shards`; paths, residuals of activations and ties stay. See `ShardedConfig` for the options.
    Raises `TypeError` unless `cfg` is a chain's config.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, dist, linear
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)),))
    >>> sharded = dist.zero3(cfg, dist.Mesh.abstract({"dp": 2}, rank=0)["dp"])
    >>> sharded.steps[0].op, chain.init(sharded, device="meta")["up"].weight.shape
    (sharded, torch.Size([8, 8]))
    """
    require_type("zero3", "cfg", cfg, ChainConfig)

    options: dict[str, Any] = {"axis": axis, "also": also, "dtype": dtype, "ordered": ordered, "bucket_bytes": bucket_bytes}

    def shard(part: Part) -> tuple[Op, Any]:
        if not has_params(part.op, part.cfg):
            return part.op, part.cfg
        try:
            return sharded, ShardedConfig(part.op, part.cfg, **options)
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
