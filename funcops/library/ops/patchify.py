"""Images, or clips, as sequences of patches, and back.

    y = x with its last n dimensions cut into patches        dx = dy put back together, as by `unpatchify`

x, dx: [*, C, *S] with n sizes S; y, dy: [*, N, C p_1 ... p_n], N patches in the order of the grid, its last dim fastest; one float
dtype. `unpatchify` is the inverse. Kept: nothing. `patchify` and a linear layer are torch's convolution of kernel and stride p,
with the weight [out, C, *p] as [out, C p_1 ... p_n]: the patch embedding of a ViT, arXiv:2010.11929.

>>> import torch
>>> from funcops import PatchifyConfig, UnpatchifyConfig, patchify_bwd, patchify_fwd, unpatchify_fwd
>>> image = torch.arange(8.0).reshape(1, 2, 4)
>>> y, residuals = patchify_fwd(None, image, PatchifyConfig((2, 2)))
>>> y
tensor([[0., 1., 4., 5.],
        [2., 3., 6., 7.]])
>>> patchify_bwd(residuals, y, PatchifyConfig((2, 2)))[1].equal(image)
True
>>> back, _ = unpatchify_fwd(None, y, UnpatchifyConfig((2, 2), grid=(1, 2)))
>>> back.equal(image)
True
"""

from __future__ import annotations

import math
from dataclasses import field

import torch
from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import NO_GRADIENT, Residuals, static
from funcops.engine.errors import FLOATS, check, fail, require

__all__ = ["PatchifyConfig", "PatchifyResiduals", "UnpatchifyConfig", "UnpatchifyResiduals"]
__all__ += ["patchify", "patchify_bwd", "patchify_dgrad", "patchify_fwd", "patchify_init", "patchify_wgrad"]
__all__ += ["unpatchify", "unpatchify_bwd", "unpatchify_dgrad", "unpatchify_fwd", "unpatchify_init", "unpatchify_wgrad"]


def check_sizes(where: str, name: str, sizes: object) -> None:
    right = isinstance(sizes, tuple) and len(sizes) > 0 and all(type(n) is int and n >= 1 for n in sizes)
    require(right, where, name, "a tuple of one or more sizes of at least 1", sizes)


@config
class PatchifyConfig(OpConfig):
    """`patch`: the sizes of a patch, (16, 16) for a common ViT."""

    mixes_positions = True

    patch: tuple[int, ...] = field(kw_only=False)

    def __post_init__(self) -> None:
        check_sizes("PatchifyConfig", "patch", self.patch)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, None


@config
class UnpatchifyConfig(OpConfig):
    """`patch`: the sizes of a patch; `grid`: how many patches there are along each dimension, in the order of `patch`."""

    mixes_positions = True

    patch: tuple[int, ...] = field(kw_only=False)
    grid: tuple[int, ...] = field(kw_only=False)

    def __post_init__(self) -> None:
        check_sizes("UnpatchifyConfig", "patch", self.patch)
        check_sizes("UnpatchifyConfig", "grid", self.grid)
        same = len(self.grid) == len(self.patch)
        require(same, "UnpatchifyConfig", "grid", f"of {len(self.patch)} sizes, as many as patch has", self.grid)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, self.grid[-1] * self.patch[-1]


class PatchifyResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""

    grid: tuple[int, ...] = static()


class UnpatchifyResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


def _cut(t: Tensor, patch: tuple[int, ...]) -> Tensor:
    """[*, C, *S] as patches [*, N, C p]: a copy."""
    n = len(patch)
    rows, channels, sizes = t.shape[: -n - 1], t.shape[-n - 1], t.shape[t.dim() - n :]
    split = [part for size, p in zip(sizes, patch, strict=True) for part in (size // p, p)]
    first = len(rows)
    order = [*range(first), *range(first + 1, first + 1 + 2 * n, 2), first, *range(first + 2, first + 2 + 2 * n, 2)]
    cut = t.reshape(*rows, channels, *split).permute(order).clone(memory_format=torch.contiguous_format)
    return cut.reshape(*rows, math.prod(split[::2]), channels * math.prod(patch))


def _together(t: Tensor, patch: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    """Patches [*, N, C p] as [*, C, *S]: a copy."""
    n, rows = len(patch), t.shape[:-2]
    first = len(rows)
    order = [*range(first), first + n, *[place for i in range(n) for place in (first + i, first + n + 1 + i)]]
    channels = t.shape[-1] // math.prod(patch)
    joined = t.reshape(*rows, *grid, channels, *patch).permute(order).clone(memory_format=torch.contiguous_format)
    return joined.reshape(*rows, channels, *[g * p for g, p in zip(grid, patch, strict=True)])


@forward(PatchifyConfig)
def patchify_fwd(
    params: None, x: Tensor, cfg: PatchifyConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, PatchifyResiduals | None]:
    """x: [*, C, *S] -> y: [*, N, C p_1 ... p_n]. Raises `ValueError` unless the sizes are multiples of the patch's, `TypeError`
    for a dtype that is not a float."""
    check("patchify_fwd", "x", x, (...,), FLOATS)
    patch, n = cfg.patch, len(cfg.patch)
    sizes = x.shape[max(0, x.dim() - n) :]
    if x.dim() < n + 1 or any(size % p for size, p in zip(sizes, patch, strict=True)):
        fail("patchify_fwd", "x", f"[..., C, {', '.join(f'{p} n' for p in patch)}]", list(x.shape))
    y, grid = _cut(x, patch), tuple([size // p for size, p in zip(sizes, patch, strict=True)])
    return y, PatchifyResiduals.keep(cfg, needs, grid=grid, shape=y.shape, dtype=y.dtype)


@dgrad_of(PatchifyResiduals)
def patchify_dgrad(residuals: PatchifyResiduals, dy: Tensor, cfg: PatchifyConfig) -> tuple[Tensor, None]:
    """dx: [*, C, *S]. No params, so pending is None."""
    check("patchify_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return _together(dy, cfg.patch, residuals.grid) if residuals.needs.x else NO_GRADIENT, None


@forward(UnpatchifyConfig)
def unpatchify_fwd(
    params: None, x: Tensor, cfg: UnpatchifyConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, UnpatchifyResiduals | None]:
    """x: [*, N, C p_1 ... p_n] -> y: [*, C, *S]. Raises `ValueError` unless the number of patches is the grid's and the last size
    a multiple of a patch's; `TypeError` for a dtype that is not a float."""
    check("unpatchify_fwd", "x", x, (...,), FLOATS)
    count, of_patch = math.prod(cfg.grid), math.prod(cfg.patch)
    if x.dim() < 2 or x.shape[-2] != count or x.shape[-1] % of_patch:
        fail("unpatchify_fwd", "x", f"[..., {count}, {of_patch} C]", list(x.shape))
    y = _together(x, cfg.patch, cfg.grid)
    return y, UnpatchifyResiduals.keep(cfg, needs, shape=y.shape, dtype=y.dtype)


@dgrad_of(UnpatchifyResiduals)
def unpatchify_dgrad(residuals: UnpatchifyResiduals, dy: Tensor, cfg: UnpatchifyConfig) -> tuple[Tensor, None]:
    """dx: [*, N, C p_1 ... p_n]. No params, so pending is None."""
    check("unpatchify_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return _cut(dy, cfg.patch) if residuals.needs.x else NO_GRADIENT, None


patchify = make_op("patchify", PatchifyConfig, fwd=patchify_fwd, dgrad=patchify_dgrad)
patchify_init, patchify_bwd, patchify_wgrad = no_params(patchify, patchify_dgrad)
unpatchify = make_op("unpatchify", UnpatchifyConfig, fwd=unpatchify_fwd, dgrad=unpatchify_dgrad)
unpatchify_init, unpatchify_bwd, unpatchify_wgrad = no_params(unpatchify, unpatchify_dgrad)
