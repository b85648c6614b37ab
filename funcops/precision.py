"""Mixed precision: 16-bit compute with float32 master weights, loss scaling, and steps that are skipped when not finite.

The recipe, for a model `op` with `cfg`; nothing in it waits for the device:

    params = op.init(cfg, key=key)                                  # float32 master weights
    state = adamw_init(params, adamw)                               # float32 means
    main_grads = tree_map(torch.zeros_like, params)                 # float32 accumulators (None leaves stay None)

    compute = cast(params, torch.bfloat16)                          # funcops.trees.cast, once a step
    for x in microbatches:
        y, residuals = op.fwd(compute, x, cfg)                      # bfloat16
        op.bwd(donate(residuals), dy, cfg, into=main_grads)         # bfloat16 products, summed in float32
    grads, norm = clip_by_global_norm(main_grads, 1.0)
    ok = all_finite(norm)                                           # False if a gradient is not, or if the norm overflows
    new_params, new_state = adamw_update(params, grads, state, adamw)
    params, state = select_step(ok, (new_params, new_state), (params, state))

bfloat16 has the range of float32 and needs no loss scale. float16 does: start the backward from `dy * loss_scale.scale`,
put `grads = unscale(main_grads, loss_scale)` before the clipping, and end the step with
`loss_scale = loss_scale_update(loss_scale, ok, scaling)`. When a step is bad, `nonfinite(grads)` says where.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.contract.op import config
from funcops.engine.errors import check, describe, fail, join_path, require, require_device, require_type
from funcops.engine.trees import PAIRS, _no_pairs, leaf, paths, same_structure, tensors, tree, tree_map, tree_map_tensors

__all__ = ["LossScale", "LossScaleConfig"]
__all__ += ["all_finite", "join_master", "loss_scale_init", "loss_scale_update", "nonfinite", "select_step", "split_master"]
__all__ += ["unscale"]

T = TypeVar("T")
_RANGE = torch.finfo(torch.float32)


@config
class LossScaleConfig:
    """The scale starts at `initial`, grows by `growth` after `interval` good steps in a row, and is multiplied by
    `backoff` after a bad one. The defaults are torch.amp.GradScaler's."""

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        where = "LossScaleConfig"
        require(self.initial > 0 and math.isfinite(self.initial), where, "initial", "positive and finite", self.initial)
        least = f"at least {_RANGE.tiny:.3g}, the smallest normal float32"
        require(self.initial >= _RANGE.tiny, where, "initial", least, self.initial)
        require(math.isfinite(self.growth), where, "growth", "finite", self.growth)
        require(self.growth >= 1, where, "growth", "at least 1", self.growth)
        require(0 < self.backoff <= 1, where, "backoff", "in (0, 1]", self.backoff)
        require(self.interval >= 1, where, "interval", "at least 1", self.interval)


@tree
class LossScale:
    """The state of loss scaling: the factor of the loss, and the number of good steps in a row since it changed.

    >>> from funcops.precision import LossScale, LossScaleConfig, loss_scale_init
    >>> scale = loss_scale_init(LossScaleConfig(initial=8.0))
    >>> isinstance(scale, LossScale), scale.scale, scale.good_steps
    (True, tensor(8.), tensor(0, dtype=torch.int32))
    """

    scale: Tensor = leaf("[], float32")
    good_steps: Tensor = leaf("[], int32")


def loss_scale_init(cfg: LossScaleConfig, *, device: Any = None) -> LossScale:
    """The scale of the first step, `cfg.initial`. Raises `TypeError` for another config, `ValueError` or `TypeError` for an
    invalid device."""
    require_type("loss_scale_init", "cfg", cfg, LossScaleConfig)
    require_device("loss_scale_init", device)
    scale = torch.tensor(cfg.initial, dtype=torch.float32, device=device)
    return LossScale(scale, torch.zeros((), dtype=torch.int32, device=device))


def loss_scale_update(loss_scale: LossScale, ok: Tensor, cfg: LossScaleConfig) -> LossScale:
    """The scale for the next step; `ok` is a 0-d bool, from `all_finite`. No host sync. A scale stays within the normal numbers of
    float32: it never grows to infinity, nor falls to 0, from which it could not grow again, however many steps are bad.

    Raises `ValueError` or `TypeError` for an invalid config, scale or `ok`.

    >>> import torch
    >>> from funcops.precision import LossScaleConfig, loss_scale_init, loss_scale_update
    >>> scale = loss_scale_init(LossScaleConfig(initial=8.0))
    >>> loss_scale_update(scale, torch.tensor(False), LossScaleConfig()).scale
    tensor(4.)
    """
    where = "loss_scale_update"
    require_type(where, "cfg", cfg, LossScaleConfig)
    require_type(where, "loss_scale", loss_scale, LossScale)
    check(where, "loss_scale.scale", loss_scale.scale, (), torch.float32)
    check(where, "loss_scale.good_steps", loss_scale.good_steps, (), torch.int32)
    check(where, "ok", ok, (), torch.bool)
    scale, good = loss_scale.scale.clamp(_RANGE.tiny, _RANGE.max), loss_scale.good_steps + 1
    due = good >= cfg.interval
    grown = scale * cfg.growth
    grown = torch.where(due & torch.isfinite(grown), grown, scale)
    less = (scale * cfg.backoff).clamp(min=_RANGE.tiny)
    return LossScale(torch.where(ok, grown, less), torch.where(ok & ~due, good, torch.zeros_like(good)))


def unscale(grads: T, loss_scale: LossScale) -> T:
    """Gradients divided by the scale; gradients of 8 and 16 bits become float32, in which unscaled values do not underflow. Raises
    `TypeError` or `ValueError` for an invalid loss scale, `TypeError` for a gradient of 4 bits.

    >>> import torch
    >>> from funcops.precision import LossScaleConfig, loss_scale_init, unscale
    >>> unscale({"w": torch.tensor([8.0, 16.0])}, loss_scale_init(LossScaleConfig(initial=8.0)))
    {'w': tensor([1., 2.])}
    """
    require_type("unscale", "loss_scale", loss_scale, LossScale)
    check("unscale", "loss_scale.scale", loss_scale.scale, (), torch.float32)
    _no_pairs("unscale", "grads", tensors(grads), grads)
    by = loss_scale.scale.reciprocal()
    return tree_map_tensors(lambda g: (g.float() if g.element_size() < 4 else g) * by, grads)


def all_finite(grads: Any) -> Tensor:
    """A 0-d bool tensor: no infinity and no NaN in any floating or complex tensor of the tree, float8 included. No host sync.

    >>> import torch
    >>> from funcops.precision import all_finite
    >>> all_finite({"w": torch.tensor([1.0, float("inf")])})
    tensor(False)
    """
    with torch.no_grad():
        given = [_reals(t) for t in tensors(grads) if t.numel() and _may_be_infinite(t)]
        if not given:
            found = tensors(grads)
            return torch.ones((), dtype=torch.bool, device=found[0].device if found else "cpu")
        # The largest magnitude carries both infinities and NaN, and cannot overflow as a sum of squares can.
        device = given[0].device
        if all([t.device == device for t in given]):
            largest = list(torch._foreach_norm(given, float("inf")))
        else:
            largest = [torch.linalg.vector_norm(t, float("inf")).to(device) for t in given]
        return torch.isfinite(torch.stack(largest)).all()


def nonfinite(grads: Any) -> str | None:
    """The dotted path of the first leaf that holds an infinity or a NaN, or None. Waits for the device.

    >>> import torch
    >>> from funcops.precision import nonfinite
    >>> nonfinite({"a": torch.ones(2), "b": (torch.tensor(float("nan")),)})
    'b.0'
    """
    if bool(all_finite(grads)):
        return None
    given = {path: t for path, t in paths(grads).items() if isinstance(t, Tensor) and _may_be_infinite(t)}
    return next(path for path, t in given.items() if not bool(torch.isfinite(_reals(t)).all()))


def _may_be_infinite(t: Tensor) -> bool:
    """Whether the dtype has an infinity or a NaN: two numbers of 4 bits in a byte have none."""
    return (t.is_floating_point() and t.dtype is not PAIRS) or t.is_complex()


def _reals(t: Tensor) -> Tensor:
    """The numbers in a dtype that torch has norms of: it has none of 8 bits."""
    if t.is_complex():
        return torch.view_as_real(t.resolve_conj())
    return t.float() if t.dtype.itemsize == 1 else t


def select_step(ok: Tensor, new: T, old: T) -> T:
    """Return `new` if the 0-d bool `ok` is true, else `old`: trees of params and state, leaf by leaf, without a host sync.

    Raises `ValueError` or `TypeError`, which names the leaf, if the trees differ in structure, shape or dtype.

    >>> import torch
    >>> from funcops.precision import select_step
    >>> select_step(torch.tensor(False), {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    {'w': tensor([0., 0.])}
    """
    where = "select_step"
    check(where, "ok", ok, (), torch.bool)
    if not same_structure(new, old):
        a, b = paths(new), paths(old)
        apart = [path for path in (*a, *b) if path not in a or path not in b]
        fail(where, "new", "a tree like old", f"one that differs at {', '.join(apart) or 'its containers'}")
    if not torch.compiler.is_compiling():
        before = paths(old)
        for path, a in paths(new).items():
            b = before[path]
            if isinstance(a, Tensor) != isinstance(b, Tensor):
                fail(where, f"new.{path}", describe(b), describe(a), TypeError)
            if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape != b.shape or a.dtype is not b.dtype):
                fail(where, f"new.{path}", describe(b), describe(a))
    with torch.no_grad():
        return tree_map(lambda a, b: a if a is b or not isinstance(a, Tensor) else torch.where(ok, a, b), new, old)


def split_master(params: T) -> tuple[T, T]:
    """Split float32 master weights into `(weights, remainder)`: bfloat16 weights to compute with, and int16 tensors that hold the
    rest, 4 bytes a param where a copy takes 6. `join_master` gives the same bits back; NaN stays NaN.

    The weights are the nearest, of two equally near the one away from zero (a cast takes the even one). Other leaves stay in the
    first tree, and are None in the second. Raises `TypeError` for a tree without a float32 tensor.

    >>> import torch
    >>> from funcops.precision import join_master, split_master
    >>> weights, remainder = split_master({"w": torch.tensor([1.0, 0.1])})
    >>> weights["w"], remainder["w"]
    (tensor([1.0000, 0.1001], dtype=torch.bfloat16), tensor([     0, -13107], dtype=torch.int16))
    >>> join_master(weights, remainder)["w"]
    tensor([1.0000, 0.1000])
    """
    if not any(t.dtype is torch.float32 for t in tensors(params)):
        fail("split_master", "params", "a tree with a float32 tensor", describe(params), TypeError)

    def high(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.dtype is not torch.float32:
            return t
        nearest = (t.detach().contiguous().view(torch.int32) + 0x8000) >> 16
        return torch.where(t.isnan(), t.bfloat16(), nearest.to(torch.int16).view(torch.bfloat16))

    def low(t: Any, weight: Any) -> Any:
        if not isinstance(t, Tensor) or t.dtype is not torch.float32:
            return None
        rest = t.detach().contiguous().view(torch.int32) - (weight.view(torch.int16).to(torch.int32) << 16)
        return torch.where(t.isnan(), 0, rest).to(torch.int16)

    with torch.no_grad():
        weights = tree_map(high, params)
        return weights, tree_map(low, params, weights)


def join_master(weights: T, remainder: T) -> T:
    """The float32 master weights of `split_master`. Raises `ValueError` or `TypeError`, which names the leaf, for trees that do not
    fit each other.

    >>> import torch
    >>> from funcops.precision import join_master, split_master
    >>> p = {"w": torch.tensor([0.1, float("inf")])}
    >>> torch.equal(join_master(*split_master(p))["w"], p["w"])
    True
    """
    found, rest = paths(weights), paths(remainder)
    if found.keys() != rest.keys():
        apart = [path for path in (*found, *rest) if path not in found or path not in rest]
        fail("join_master", "remainder", "a tree like weights", f"one that differs at {', '.join(apart)}")
    for path, t in rest.items():
        if t is not None:
            check("join_master", join_path("weights", path), found[path], (...,), torch.bfloat16)
            check("join_master", join_path("remainder", path), t, tuple(found[path].shape), torch.int16, found[path])

    def joined(weight: Any, t: Any) -> Any:
        if t is None:
            return weight
        return ((weight.contiguous().view(torch.int16).to(torch.int32) << 16) + t.to(torch.int32)).view(torch.float32)

    with torch.no_grad():
        return tree_map(joined, weights, remainder)
