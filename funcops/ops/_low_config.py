"""The base of the configs of linear layers in low precision."""

from __future__ import annotations

from typing import Any, ClassVar

from funcops.contract.configs import OpConfig
from funcops.formats.recipes import Recipe


class LowConfig(OpConfig):
    """The base of the config of a linear layer with a recipe."""

    recipe: Recipe
    linear: ClassVar[Any]  # the config of the layer without the recipe

    @property
    def low_recipe(self) -> Recipe:
        return self.recipe

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The shape of the weight that a rank has."""
        return self.linear.weight_shape  # type: ignore[no-any-return]

    @property
    def bias_shape(self) -> tuple[int] | None:
        """The shape of the bias that a rank has; None if the layer over ranks has no bias."""
        return self.linear.bias_shape  # type: ignore[no-any-return]
