"""Weights with the scales of delayed scaling, whose gradient slots carry amaxes (the largest |x| of a tensor)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine.trees import cast, leaf, stands_in, tree, tree_map
from funcops.library.formats.qtensor import zero_gradient


@stands_in
@tree
class Scaled:
    """A weight with the scales [3] by which delayed scaling multiplies x, w and dy ([0] in a first step, whose products measure
    theirs), and the amax [1] of w if w is already quantised. Its gradient has the weight gradient in `value`, and in `scale` the
    amaxes [3], as `bits_of` makes them.

    >>> import torch
    >>> from funcops import QLinearConfig, qlinear, random
    >>> from funcops.low_precision import Fp8Delayed, Scaled, quantize_params, recipe_init
    >>> cfg = QLinearConfig(128, 128, recipe=Fp8Delayed())
    >>> params = qlinear.init(cfg, key=random.key(0))
    >>> work = quantize_params(params, cfg, recipe_init(cfg, params))
    >>> isinstance(work.weight, Scaled), work.weight.scale
    (True, tensor([1., 1., 1.]))
    """

    value: Any = leaf("[O, I]")
    scale: Tensor = leaf("[3]")
    amax: Tensor | None = leaf("[1]")

    def zero_gradient(self, dtype: torch.dtype | None = None) -> Scaled:
        """Zeros to accumulate the weight gradient and the amaxes in."""
        amaxes = self.scale.new_zeros((*self.scale.shape[:-1], 3), dtype=torch.uint32)
        return Scaled(zero_gradient(self.value, dtype), amaxes, None)

    def cast(self, dtype: torch.dtype) -> Scaled:
        """Cast the value; scales and amaxes stay float32."""
        return Scaled(cast(self.value, dtype), self.scale, self.amax)

    def plus(self, other: Scaled) -> Scaled:
        """Sum two gradients; of amaxes, take the larger."""
        largest = self.scale.clone()
        join_amaxes(largest, other.scale)
        return Scaled(self.value + other.value, largest, None)


def bits_of(amaxes: Tensor) -> Tensor:
    """Amaxes as gradients hold them: the bits of float32 as uint32, which torch does not add. So code that sums gradients leaf by
    leaf raises instead of adding amaxes."""
    return amaxes.view(torch.uint32)


def amaxes_of(bits: Tensor) -> Tensor:
    """The float32 amaxes from `bits_of`."""
    return bits.view(torch.float32)


def join_amaxes(into: Tensor, bits: Tensor) -> None:
    """Write the larger of each pair to `into`. The bits of numbers that are not negative have the order of the numbers; a NaN is
    the largest."""
    largest = into.view(torch.int32)
    torch.maximum(largest, bits.view(torch.int32), out=largest)


def unscaled(tree: Any) -> Any:
    """The tree with every `Scaled` replaced by its value."""
    return tree_map(lambda node: node.value if type(node) is Scaled else node, tree, is_leaf=lambda node: type(node) is Scaled)
