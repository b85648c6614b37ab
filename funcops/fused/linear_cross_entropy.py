"""A linear layer and the cross entropy of its output, in chunks: the logits are never whole in memory, and are recomputed.

Applies if the policy recomputes the loss's logits.
"""

from __future__ import annotations

from typing import Any

from funcops.contract.op import Op
from funcops.memory.joined_steps import Joint, register_joint
from funcops.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.ops.linear import LinearConfig, LinearParams, linear
from funcops.ops.linear_cross_entropy import LinearCrossEntropyConfig, LinearCrossEntropyParams, linear_cross_entropy


def _refuses(head: LinearConfig, loss: CrossEntropyConfig) -> str | None:
    return "the linear has a bias" if head.bias else None


def _made(head: LinearConfig, loss: CrossEntropyConfig) -> tuple[Op, Any]:
    options = {name: getattr(loss, name) for name in ("label_smoothing", "ignore_index", "z_loss", "reduction")}
    return linear_cross_entropy, LinearCrossEntropyConfig(in_features=head.in_features, vocab=head.out_features, **options)


def _join(head: LinearParams, loss: None) -> LinearCrossEntropyParams:
    return LinearCrossEntropyParams(head.weight)


def _part(dparams: LinearCrossEntropyParams) -> tuple[LinearParams, None]:
    return LinearParams(dparams.weight, None), None


joint = register_joint(Joint(linear, cross_entropy, _refuses, _made, _join, _part))
