"""Muon: momentum made orthogonal, for matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from funcops.engine.contract.op import config
from funcops.engine.errors import describe, fail, join_path, require, require_type
from funcops.engine.trees import paths, tree
from funcops.library.kernels.adamw import grouped
from funcops.optim._rows import check_rate, exact_rate, in_wide_dtype, not_negative, open_trees, own_tensors, told, zeros_like

T = TypeVar("T")
SCALES = ("original", "match_rms_adamw")
MOST_STEPS = 100  # as torch.optim.Muon
# Whether the CPU has instructions for products of bfloat16: asked here, as a traced step cannot ask.
MULTIPLIES_BFLOAT16 = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))


@config
class MuonConfig:
    """The settings of torch.optim.Muon, by its names: `lr`, `momentum`, `nesterov`, and `weight_decay`, which is decoupled;
    `ns_steps` iterations of the polynomial a s + b s^3 + c s^5 with `ns_coefficients` (a, b, c); `eps`, the least norm that a
    matrix is divided by.

    `adjust_lr_fn`: the factor of lr for a matrix [m, n]. "original": sqrt(max(1, m / n)); "match_rms_adamw": 0.2 sqrt(max(m, n)),
    with which rates and decays that suit AdamW suit Muon, too (arXiv:2502.16982)."""

    shows_defaults: ClassVar = True  # libraries differ in their defaults
    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    eps: float = 1e-7
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"

    def __post_init__(self) -> None:
        where = "MuonConfig"
        not_negative(where, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, eps=self.eps)
        require(self.momentum < 1, where, "momentum", "a number in [0, 1)", self.momentum)
        three = isinstance(self.ns_coefficients, tuple) and len(self.ns_coefficients) == 3
        ok = three and all(isinstance(c, (int, float)) and math.isfinite(c) for c in self.ns_coefficients)
        require(ok, where, "ns_coefficients", "three finite numbers", self.ns_coefficients)
        steps = isinstance(self.ns_steps, int) and not isinstance(self.ns_steps, bool) and 1 <= self.ns_steps < MOST_STEPS
        require(steps, where, "ns_steps", f"an int from 1 to {MOST_STEPS - 1}", self.ns_steps)
        require(self.adjust_lr_fn in SCALES, where, "adjust_lr_fn", " or ".join(map(repr, SCALES)), repr(self.adjust_lr_fn))


@tree
class MuonState:
    """`momentum`, the running means of the gradients, is a tree like params."""

    momentum: Any = None


def muon_init(params: Any, cfg: MuonConfig) -> MuonState:
    """Means of zeros in the shape and dtype of each param. Raises as `adamw_init` does, and `ValueError` for a tensor
    without rows and columns, [..., m, n].

    >>> import torch
    >>> from funcops.optim import MuonConfig, MuonState, muon_init
    >>> state = muon_init({"w": torch.ones(1, 2), "frozen": None}, MuonConfig())
    >>> isinstance(state, MuonState), state.momentum
    (True, {'w': tensor([[0., 0.]]), 'frozen': None})
    """
    require_type("muon_init", "cfg", cfg, MuonConfig)
    own_tensors("muon_init", params)
    _check_matrices("muon_init", params)
    return MuonState(zeros_like(params))


def muon_update(
    params: T,
    grads: T,
    state: MuonState,
    cfg: MuonConfig,
    *,
    lr: float | Tensor | None = None,
    decay: Any = None,
    in_place: bool = False,
) -> tuple[T, MuonState]:
    """One step of Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/), with u the running mean of g:

        u <- momentum u + (1 - momentum) g        g' = u     (nesterov: momentum u + (1 - momentum) g)
        p <- p - lr weight_decay p - lr f orthogonal(g')

    f is the factor of `cfg.adjust_lr_fn`, and `orthogonal` brings the singular values of a matrix near 1 by `ns_steps`
    Newton-Schulz iterations of X = g' / |g'|:

        X <- a X + (b A + c A A) X,  A = X X^T

    in bfloat16, as torch.optim.Muon computes them, and in float64 for float64 params.

    p, u: [..., m, n], one float dtype: leading dimensions count matrices, each of which is made orthogonal by itself (experts,
    the layers of a repeat); g: that dtype or a narrower one. A leaf must be a whole matrix: gather the shards of ZeRO or tensor
    parallelism first. Embeddings, heads and vectors are for `adamw_update`; `partition` and `matrix_mask` split a tree.
    `lr`, `decay` and `in_place` are as for `adamw_update`, and so are the errors; a tensor of fewer than two dimensions raises
    `ValueError`.

    >>> import torch
    >>> from funcops.optim import MuonConfig, muon_init, muon_update
    >>> params, cfg = {"w": torch.ones(2, 2, dtype=torch.float64)}, MuonConfig(lr=0.1, weight_decay=0.0)
    >>> grads = {"w": torch.eye(2, dtype=torch.float64)}
    >>> params, state = muon_update(params, grads, muon_init(params, cfg), cfg)
    >>> params["w"].round(decimals=3)
    tensor([[0.8890, 1.0000],
            [1.0000, 0.8890]], dtype=torch.float64)
    """
    where = "muon_update"
    require_type(where, "cfg", cfg, MuonConfig)
    require_type(where, "state", state, MuonState)
    require_type(where, "in_place", in_place, bool)
    rate = check_rate(where, cfg.lr if lr is None else lr)
    _check_matrices(where, params)
    opened = open_trees(where, {"params": params, "grads": grads, "state.momentum": state.momentum}, decay, in_place)
    rows, kinds, decayed, *_ = opened
    with torch.no_grad():
        keys = [(*kind, tuple(p.shape[-2:]), decays) for kind, p, decays in zip(kinds, rows[0], decayed, strict=True)]
        for (device, _, shape, decays), (p, g, u) in grouped(rows, keys) if keys else ():
            at, decay = exact_rate(rate, device), cfg.weight_decay if decays else 0.0
            in_wide_dtype(functools.partial(_update_, lr=at, shape=shape, cfg=cfg, decay=decay), p, g, u)
    if in_place:
        return told(params), state
    new, momentum = opened.rebuilt(params, 0, 2)
    return told(new), MuonState(momentum)


def _update_(
    p: Sequence[Tensor], g: Sequence[Tensor], u: Sequence[Tensor], lr: Any, shape: Sequence[int], cfg: MuonConfig, decay: float
) -> None:
    """Update matrices of one device, dtype and shape. They are made orthogonal together, as products of stacks."""
    g = [t.to(x.dtype) for t, x in zip(g, p, strict=True)]
    torch._foreach_lerp_(list(u), g, 1 - cfg.momentum)
    steps = torch._foreach_lerp(g, list(u), cfg.momentum) if cfg.nesterov else u
    computed = p[0].dtype if p[0].dtype is torch.float64 else torch.bfloat16
    (m, n), counts = shape, [math.prod(t.shape[:-2]) for t in p]
    stack = torch.cat([t.to(computed).reshape(count, m, n) for t, count in zip(steps, counts, strict=True)])
    factor = 0.2 * math.sqrt(max(m, n)) if cfg.adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1.0, m / max(n, 1)))
    for x, step in zip(p, orthogonal(stack, cfg).split(counts), strict=True):
        if decay:
            x.mul_(1 - lr * decay)
        x.sub_(step.view(x.shape).to(x.dtype) * (lr * factor))


def orthogonal(x: Tensor, cfg: MuonConfig) -> Tensor:
    """Matrices [k, m, n] with the singular vectors of x and singular values near 1, in the dtype of x."""
    a, b, c = cfg.ns_coefficients
    tall = x.shape[1] > x.shape[2]
    made = x.mT if tall else x  # the products of the shorter side are the smaller ones
    made = made / torch.linalg.vector_norm(made, dim=(1, 2), keepdim=True).clamp(min=cfg.eps)
    for _ in range(cfg.ns_steps):
        gram = _sum(None, made, made.mT)
        made = _sum(made, _sum(gram, gram, gram, b, c), made, a)
    return made.mT if tall else made


def _sum(t: Tensor | None, x: Tensor, y: Tensor, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """beta t + alpha x y (without t: x y) for stacks x [N, M, K], y [N, K, L] and t [N, M, L] of one dtype, rounded once."""
    # A CPU without such instructions takes 10 to 40 times as long for them as for products of the same numbers in float32.
    if x.is_cpu and x.dtype is torch.bfloat16 and not MULTIPLIES_BFLOAT16:
        return _sum(None if t is None else t.float(), x.float(), y.float(), beta, alpha).to(x.dtype)
    return x @ y if t is None else torch.baddbmm(t, x, y, beta=beta, alpha=alpha)


def _check_matrices(where: str, params: Any) -> None:
    for path, p in paths(params).items():
        if isinstance(p, Tensor) and p.dim() < 2:
            wanted = "a matrix [..., m, n]; update other leaves by adamw_update (partition and matrix_mask split a tree)"
            fail(where, join_path("params", path), wanted, describe(p))
