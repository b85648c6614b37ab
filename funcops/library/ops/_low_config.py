"""Configs of linear layers in low precision: their base, and the table that leads to them from layers in high precision."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, ClassVar

from torch import Tensor

from funcops.engine.contract.configs import OpConfig, fields_of
from funcops.engine.contract.op import Op, config
from funcops.library.formats.recipes import LOW_FORMS, Recipe


@config
class LowConfig(OpConfig):
    """The base of the config of a linear layer with a recipe. `plain`: the class of the layer's config without it."""

    linear_weights = ("weight",)
    recipe: Recipe = field(kw_only=False)
    plain: ClassVar[type]
    linear: ClassVar[Any]  # the config of the layer without the recipe

    @property
    def low_recipe(self) -> Recipe:
        return self.recipe

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the layer's config
        made = self.plain(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self.plain)})
        object.__setattr__(self, "linear", made)

    def key_of_rank(self, key: Tensor) -> Tensor:
        """The key with which this rank rounds its part of dy."""
        return key


def low_form(plain: Op, low: Op) -> None:
    """Note the op of a layer in low precision, whose config has the fields of the plain layer's config, and a recipe."""
    LOW_FORMS[plain.config] = lambda cfg, recipe: (plain, low, low.config(**fields_of(cfg), recipe=recipe))
