"""Calibration of delayed scaling: the amaxes of a run in high precision, from which its first scales are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.configs import require_config
from funcops.engine.contract.walk import steps
from funcops.engine.errors import FLOATS, check, describe, fail, join_path, require, require_type
from funcops.engine.trees import at, has
from funcops.logs.rewrite import places_of

AMAXES = ("x_amax", "dy_amax")


def calibration_logs(cfg: Any) -> dict[str, tuple[str, ...]]:
    """Return the logs that calibrate the delayed scaling of a config, for `with_logs` of the same model without a recipe: the
    largest sizes of x and dy of each linear step. `calibrated` makes amaxes of them.

    Raises `TypeError` for a `cfg` that is not the config of an op, `ValueError` for one without delayed scaling, and for layers of
    groups, whose weights have scales of their own.

    >>> from funcops import ChainConfig, LinearConfig, Step, linear
    >>> from funcops.logs import calibration_logs
    >>> from funcops.low_precision import Fp8Delayed, with_recipe
    >>> model = ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)), Step("down", linear, LinearConfig(256, 128))))
    >>> calibration_logs(with_recipe(model, Fp8Delayed(), skip=("down",)))
    {'up': ('x_amax', 'dy_amax')}
    """
    require_config("calibration_logs", cfg)
    found = [part for part in steps(cfg) if part.cfg.low_recipe is not None and part.cfg.low_recipe.delayed]
    require(bool(found), "calibration_logs", "cfg", "one with delayed scaling (Fp8Delayed)", describe(cfg))
    for part in found:
        if part.cfg.group_dims:
            fail("calibration_logs", part.path, "a linear layer without groups", describe(part.cfg))
    return {part.path: AMAXES for part in found}


def calibrated(logs: Mapping[str, Mapping[str, Tensor]], cfg: Any, params: Any) -> dict[str, Tensor]:
    """Return the amaxes [3] of x, w and dy by the path of the weight, the largest over all runs, for `recipe_init(..., amaxes=)`.
    `logs`: from `split_logs(..., cfg)`; `params`: the model's, in high precision. Of weights that are stacked, [*layers, 3].

    dy must be what training will have: with the same loss, and the same division by the number of microbatches. What a run did not
    reach is NaN, for which `recipe_init` leaves the scale at 1. State that is not updated afterwards is a static scale. Raises
    `ValueError` or `TypeError` for logs of another config, and for a tied weight, whose uses share their scales.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random, vjp
    >>> from funcops.logs import calibrated, calibration_logs, logs_init, split_logs, with_logs
    >>> from funcops.low_precision import Fp8Delayed, recipe_init, with_recipe
    >>> model = ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),))
    >>> low, params = with_recipe(model, Fp8Delayed()), chain.init(model, key=random.key(0))
    >>> cfg = with_logs(model, calibration_logs(low))
    >>> y, pullback = vjp(chain, logs_init(params, cfg), torch.full((4, 128), 2.0), cfg)
    >>> amaxes = calibrated(split_logs(pullback(torch.ones_like(y))[0], cfg)[1], cfg, params)
    >>> amaxes["up.weight"][[0, 2]], recipe_init(low, params, amaxes=amaxes)["up.weight"].scale[0]
    (tensor([2., 1.]), tensor(224.))
    """
    where = "calibrated"
    require_type(where, "logs", logs, Mapping)
    found = {}
    for place in places_of(where, cfg):
        if not set(AMAXES) <= set(place.cfg.order):
            continue
        named = logs.get(place.key, {})
        require(set(AMAXES) <= named.keys(), where, "logs", f"logs of cfg, with {', '.join(AMAXES)} of {place.key}", describe(logs))
        shape = (*place.layers, *place.stacked, *((place.cfg.runs,) if place.cfg.runs > 1 else ()))
        x, dy = [_of_paths(named[name], name, shape, place) for name in AMAXES]
        for i, path in enumerate(place.paths):
            own = join_path(path, "weight")
            weight = at(params, own) if has(params, own) else None
            if not isinstance(weight, Tensor):
                fail(where, f"params.{own}", "a weight [O, I] of its own", describe(weight), TypeError)
            check(where, f"params.{own}", weight, (..., *weight.shape[-2:]), FLOATS, x)
            found[own] = torch.stack((x[i], weight.detach().abs().amax((-2, -1)).to(x.dtype), dy[i]), -1)
    require(bool(found), where, "cfg", "one with the logs of calibration_logs", describe(cfg))
    return found


def _of_paths(t: Any, name: str, shape: tuple[int, ...], place: Any) -> Tensor:
    """The largest value over the runs, [paths, *stacked], in float32."""
    check("calibrated", f"logs[{place.key!r}][{name!r}]", t, shape, FLOATS)
    rows: Tensor = t.float().reshape(len(place.paths), *place.stacked, place.cfg.runs)
    return rows.amax(-1)
