"""Losses with torch.nn's names and arguments."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from funcops.adapters.autocast import LOWER
from funcops.adapters.nn.layers import ids
from funcops.adapters.nn.module import OpModule, folded, is_plain, prepare
from funcops.engine.errors import (
    FLOATS,
    describe,
    fail,
    require,
    require_count,
    require_device,
    require_dtype,
    require_flag,
    require_type,
)
from funcops.library.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.library.ops.linear_cross_entropy import LinearCrossEntropyConfig, LinearCrossEntropyParams, linear_cross_entropy

ALONE = "None, because the op has no class weights (torch's own forward has)"

if TYPE_CHECKING:

    class _Loss(OpModule):
        """A loss for an editor, which marks a call without a target."""

        def __call__(self, input: Tensor, target: Tensor) -> Tensor: ...
else:
    _Loss = OpModule


class CrossEntropyLoss(_Loss, nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` of class indices, without class weights, by `funcops.cross_entropy`: logits [N, V] or [V], or [N,
    V, *] as in torch. With class weights, or targets that are probabilities, torch's own forward runs. The loss of 16-bit logits is
    float32. Raises `ValueError` for a reduction or a label_smoothing that torch would refuse in the first call.

    >>> import torch
    >>> from funcops import nn
    >>> nn.CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([0, 3]))
    tensor(1.3863)
    """

    op, values = cross_entropy, ("label_smoothing", "ignore_index", "reduction")

    complete = True

    def other_way(self) -> Any:
        return None if self.weight is None else self.plain

    def _options(self) -> CrossEntropyConfig:
        return CrossEntropyConfig(**{name: getattr(self, name) for name in self.values})

    def make_cfg(self) -> CrossEntropyConfig:
        require(self.weight is None, "funcops.nn.CrossEntropyLoss", "weight", ALONE, "a tensor")
        return self._options()

    def forward(self, input: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        plain = is_plain(input) and is_plain(target) and self.weight is None
        if self._patched() or not plain or getattr(target, "dtype", None) in FLOATS:
            return super().plain(input, target)
        logits = input.movedim(1, -1) if input.dim() > 2 else input
        return self.launched([], (logits, ids(target)))


_torchs: Any = getattr(nn, "LinearCrossEntropyLoss", nn.Module)  # torch has it from 2.13 on
_chunking: Any = getattr(nn, "LinearCrossEntropyOptions", type(None))


class LinearCrossEntropyLoss(_Loss, _torchs):
    """A projection and the cross entropy of its logits, which never exist as a whole, by `funcops.linear_cross_entropy`. It has the
    arguments and state_dict keys of `torch.nn.LinearCrossEntropyLoss` in torch 2.13.

    `linear.weight`: [num_classes, in_features]; assign another module's weight to share it. input: [*, in_features]; target: [*],
    indices. The op does not support a bias, out_features, class weights, or targets that are probabilities
    ([N, num_classes, *out_features]): with these, torch computes the whole logits. `options`, for torch's chunks, are ignored: the
    op has its own chunks.

    >>> import torch
    >>> from funcops import nn
    >>> loss = nn.LinearCrossEntropyLoss(8, 100)
    >>> loss.linear.weight.shape, loss(torch.zeros(4, 8), torch.tensor([0, 1, 2, 3])).detach()
    (torch.Size([100, 8]), tensor(4.6052))
    """

    op, params_class = linear_cross_entropy, LinearCrossEntropyParams
    autocast = LOWER
    values = ("num_classes", "ignore_index", "reduction", "label_smoothing")

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
    ) -> None:
        nn.Module.__init__(self)
        where = "LinearCrossEntropyLoss"
        require_device(where, device)
        require_dtype(where, dtype)
        require_type(where, "out_features", out_features, tuple)
        for size in out_features:
            require_count(where, out_features=size)
        require_flag(where, bias=bias)
        for name, value, kind in (("weight", weight, Tensor), ("options", options, _chunking)):
            require_type(where, name, value, kind, type(None))
        self.num_classes, self.out_features, self.options = num_classes, out_features, options
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self._options(in_features)
        if weight is not None and tuple(weight.shape) != (num_classes,):
            fail(where, "weight", f"[{num_classes}], a weight for each class", describe(weight))
        self.register_buffer("weight", weight)
        outer = num_classes
        for size in self.out_features:
            outer *= size
        self.linear = nn.Linear(in_features, outer, bias=bias, device=device, dtype=dtype)
        prepare(self)

    def _options(self, in_features: int) -> LinearCrossEntropyConfig:
        ignore = -100 if self.ignore_index is None else self.ignore_index
        return LinearCrossEntropyConfig(
            in_features, self.num_classes, ignore_index=ignore, reduction=self.reduction, label_smoothing=self.label_smoothing
        )

    def _whole(self) -> bool:
        """Whether the op supports this loss, for targets that are class indices."""
        return self.weight is None and not self.out_features and self.linear.bias is None

    def make_cfg(self) -> LinearCrossEntropyConfig:
        where = "funcops.nn.LinearCrossEntropyLoss"
        require(self.weight is None, where, "weight", ALONE, "a tensor")
        require(not self.out_features, where, "out_features", "(), because the op has one loss per row", self.out_features)
        require(self.linear.bias is None, where, "bias", "False, because the op has no bias", True)
        return self._options(self.linear.in_features)

    def _own(self) -> list[Any]:
        return [self.linear.weight]

    def forward(self, input: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        if self._patched():
            return super().plain(input, target)
        weight = self.linear.weight
        indices = is_plain(target) and getattr(target, "dtype", None) not in FLOATS
        if not (self._whole() and indices and is_plain(input) and is_plain(weight)):
            return self.plain(input, target)
        return self.launched([weight], (folded(input), ids(target)))

    def plain(self, *given: Any) -> Any:
        x, target = given
        logits = self.linear(x)
        if logits.dim() > 2 and not self.out_features and target.dtype not in FLOATS:  # [*, V], the op's layout
            loss = self._loss(logits.flatten(0, -2), target.flatten())
            return loss.view(target.shape) if self.reduction == "none" else loss
        if self.out_features:
            logits = logits.reshape(*x.shape[:-1], self.num_classes, *self.out_features)
        if target.dtype in FLOATS and self.ignore_index is not None:
            fail("LinearCrossEntropyLoss", "ignore_index", "None for targets that are probabilities", self.ignore_index)
        return self._loss(logits, target)

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        ignore = -100 if self.ignore_index is None else self.ignore_index
        return nn.functional.cross_entropy(
            logits, target, weight=self.weight, ignore_index=ignore, reduction=self.reduction, label_smoothing=self.label_smoothing
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and isinstance(value, Tensor) and value.dim() == 2:
            said = "LinearCrossEntropyLoss.weight holds class weights, as in torch 2.13, and will refuse a matrix from 0.4 on"
            warnings.warn(f"{said}: set linear.weight, the projection's weight", DeprecationWarning, stacklevel=2)
            self.linear.weight = value
            return
        super().__setattr__(name, value)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        old = state_dict.get(f"{prefix}weight")
        if old is not None and old.dim() == 2 and f"{prefix}linear.weight" not in state_dict:  # the key of earlier versions
            state_dict[f"{prefix}linear.weight"] = state_dict.pop(f"{prefix}weight")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        names = ("num_classes", "out_features", "reduction", "ignore_index", "label_smoothing", "options")
        shown = {name: getattr(self, name) for name in names}
        first, last = list(shown.items())[:2], list(shown.items())[2:]
        parts = [("in_features", self.linear.in_features), *first, ("bias", self.linear.bias is not None), *last]
        return ", ".join([f"{name}={value}" for name, value in parts])
