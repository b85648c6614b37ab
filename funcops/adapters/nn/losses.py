"""Losses with torch.nn's names and arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from funcops.adapters.autocast import LOWER
from funcops.adapters.nn.layers import ids
from funcops.adapters.nn.module import OpModule, is_plain, prepare
from funcops.errors import FLOATS, require, require_device, require_dtype
from funcops.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.ops.linear_cross_entropy import LinearCrossEntropyConfig, LinearCrossEntropyParams, linear_cross_entropy


class CrossEntropyLoss(OpModule, nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` of class indices, without class weights, by `funcops.cross_entropy`: logits [N, V] or [V], or
    [N, V, *] as in torch. Targets that are probabilities are left to torch. The loss of 16-bit logits is float32.

    >>> import torch
    >>> from funcops import nn
    >>> nn.CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor(1.3863)
    """

    op, values = cross_entropy, ("label_smoothing", "ignore_index", "reduction")

    def make_cfg(self) -> CrossEntropyConfig:
        require(self.weight is None, "funcops.nn.CrossEntropyLoss", "weight", "None", "a tensor")
        return CrossEntropyConfig(**{name: getattr(self, name) for name in self.values})

    def forward(self, input: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        if not (is_plain(input) and is_plain(target)) or getattr(target, "dtype", None) in FLOATS:
            return super().plain(input, target)
        logits = input.movedim(1, -1) if input.dim() > 2 else input
        return self.launched([], (logits, ids(target)))


class LinearCrossEntropyLoss(OpModule):
    """A projection and the cross entropy of its logits, which never exist as a whole: `funcops.linear_cross_entropy`.

    `weight`: [num_classes, in_features], initialised as that of `torch.nn.Linear`; give another module's to share it.

    >>> import torch
    >>> from funcops import nn
    >>> loss = nn.LinearCrossEntropyLoss(8, 100)
    >>> loss.weight.shape, loss(torch.zeros(4, 8), torch.tensor([0, 1, 2, 3])).detach()
    (torch.Size([100, 8]), tensor(4.6052))
    """

    op, params_class, fields = linear_cross_entropy, LinearCrossEntropyParams, ("weight",)
    autocast = LOWER
    values = ("in_features", "num_classes", "ignore_index", "reduction", "label_smoothing")

    def __init__(
        self, in_features: int, num_classes: int, *, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        require_device("LinearCrossEntropyLoss", device)
        require_dtype("LinearCrossEntropyLoss", dtype)
        self.in_features, self.num_classes = in_features, num_classes
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.make_cfg()
        self.weight = nn.Parameter(torch.empty(num_classes, in_features, device=device, dtype=dtype))
        self.reset_parameters()
        prepare(self)

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def make_cfg(self) -> LinearCrossEntropyConfig:
        options = {name: getattr(self, name) for name in self.values[2:]}
        return LinearCrossEntropyConfig(in_features=self.in_features, vocab=self.num_classes, **options)

    def forward(self, input: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        weight = self.weight
        if not (is_plain(input) and is_plain(weight)):
            return self.plain(input, target)
        return self.launched([weight], (input, ids(target)))

    def plain(self, *given: Any) -> Any:
        scores, options = nn.functional.linear(given[0], self.weight), {name: getattr(self, name) for name in self.values[2:]}
        loss = nn.functional.cross_entropy(scores.flatten(0, -2), given[1].flatten(), **options)
        return loss.view(given[1].shape) if self.reduction == "none" else loss

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.num_classes}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"
