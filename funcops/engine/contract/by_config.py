"""Declarations of an op that depend on its config.

Most ops keep one class of residuals. An op that keeps other fields under some configs declares `ByConfig` in place of the class:
`@dgrad_of(ByConfig(...))`. Generic code asks `op.residuals_of(cfg)` or `op.fields(cfg)`, once for each config: a call of the op
compares classes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from funcops.engine.contract.configs import require_config
from funcops.engine.errors import describe, fail

__all__ = ["ByConfig", "class_by"]


class ByConfig(NamedTuple):
    """The class of an op's residuals, if it depends on the config: `choose(cfg)`, for a `config`, is one of `classes`.

    >>> from funcops import QLinearConfig, qlinear
    >>> from funcops.engine.contract.by_config import ByConfig
    >>> from funcops.low_precision import Fp8Block
    >>> isinstance(qlinear.keeps, ByConfig), [one.__name__ for one in qlinear.keeps.classes]
    (True, ['QLinearResiduals', 'QLinearOfInputResiduals'])
    >>> qlinear.residuals_of(QLinearConfig(128, 128, recipe=Fp8Block(keep="row"))).__name__
    'QLinearResiduals'
    >>> qlinear.residuals_of(QLinearConfig(128, 128, recipe=Fp8Block(keep="input"))).__name__
    'QLinearOfInputResiduals'
    """

    config: type
    choose: Callable[[Any], type]
    classes: tuple[type, ...]


def class_by(where: str, declared: Any, cfg: Any) -> Any:
    """The declared class, or the one that the config chooses. Raises `TypeError` if the choice is for configs of another class."""
    if type(declared) is not ByConfig:
        return declared
    # before `choose`, which reads fields that only this class of configs has
    require_config(where, cfg, declared.config)
    found = declared.choose(cfg)
    # the decorators' fast path and the checks of `make_op` know the declared classes alone
    if found not in declared.classes:
        fail(where, "choose(cfg)", f"one of {', '.join(one.__name__ for one in declared.classes)}", describe(found))
    return found


def classes_of(declared: Any) -> tuple[Any, tuple[Any, ...]]:
    """The declared class and no others; or the first class of a choice and the others."""
    return (declared.classes[0], declared.classes[1:]) if type(declared) is ByConfig else (declared, ())
