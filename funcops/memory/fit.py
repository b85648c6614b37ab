"""`fit`: the cheapest policy whose residuals stay within a number of bytes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from funcops.compose.repeat import RepeatConfig
from funcops.compose.step import check_body
from funcops.errors import in_html, on_screen, require, require_dtype, size_of
from funcops.memory.policy import part_paths, serves, with_policy
from funcops.op import Op
from funcops.program.values import abstract_params, parts_of
from funcops.residuals.policy import POLICIES, Policy, Recompute
from funcops.residuals.report import report
from funcops.trees import fake, tree_map, tree_map_tensors


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Two products, as torch counts them on other devices: a causal mask spares none. q: [B, H, T, D], k: [B, H', S, D]."""
    batch, heads, rows, size = q
    return int(2 * batch * heads * rows * k[-2] * (size + v[-1]))


def _attention_backward_flops(dy: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Five products: the scores again, dv, dp, dq, dk."""
    batch, heads, rows, size = q
    return int(2 * batch * heads * rows * k[-2] * (3 * size + 2 * v[-1]))


_aten = torch.ops.aten
ON_CPU = {  # torch's counter knows the attention of other devices
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
MOST_PARTS = 6  # of which every subset is tried


class Tried(NamedTuple):
    """A policy, the bytes that it keeps, and its extra floating-point operations in matrix products, as a share of those of a
    forward and backward that recomputes nothing."""

    name: str
    policy: Policy
    kept_bytes: int
    extra_flops: float


class Fitted(NamedTuple):
    """`op` is the op under the policy that was picked; `tried` are all, cheapest first."""

    op: Op
    picked: Tried
    tried: list[Tried]

    def __repr__(self) -> str:
        return on_screen(str(self))

    def _repr_html_(self) -> str:
        return in_html(repr(self))

    def __str__(self) -> str:
        lines = [
            f"{'>' if one is self.picked else ' '} {one.name:<40} {size_of(one.kept_bytes):>12}  "
            f"{100 * one.extra_flops:5.1f} % more"
            for one in self.tried
        ]
        return "\n".join(lines)


def fit(op: Op, cfg: Any, x: Any, budget: int, *, dtype: torch.dtype | None = None) -> Fitted:
    """The policy that recomputes least and keeps at most `budget` bytes between forward and backward, for inputs like x.

    Tried are the presets that lose no digit, and every subset of a block's parts computed again. Nothing is run: shapes alone
    are followed, and of a repeat two layers, so that depth costs nothing. `dtype`: that of the params (by default torch's).
    Raises `ValueError`, with the least bytes found, where no policy fits.

        print(fit(chain, cfg, x, 2**30))
    """
    check_body("fit", op, cfg)
    require_dtype("fit", dtype)
    require(isinstance(budget, int) and budget is not True and budget > 0, "fit", "budget", "a positive number of bytes", budget)
    measured = [(name, policy, *_measure(with_policy(op, policy), cfg, x, dtype)) for name, policy in _candidates(op, cfg)]
    base = min(flops for *_, flops in measured)
    tried = [Tried(name, policy, kept, flops / base - 1.0 if base else 0.0) for name, policy, kept, flops in measured]
    tried.sort(key=lambda one: (one.extra_flops, -one.kept_bytes))
    within = [one for one in tried if one.kept_bytes <= budget]
    least = min(tried, key=lambda one: one.kept_bytes)
    require(
        bool(within),
        "fit",
        "budget",
        f"at least {least.kept_bytes:,} bytes ({size_of(least.kept_bytes)}, policy {least.name})",
        f"{budget:,}",
    )
    return Fitted(with_policy(op, within[0].policy), within[0], tried)


def _candidates(op: Op, cfg: Any) -> Iterator[tuple[str, Policy]]:
    for name in ("save_all", "recompute_norms", "recompute_elementwise", "minimal"):
        yield name, POLICIES[name]
    parts = [path for path in part_paths(op, cfg) if serves(op, cfg, Policy({path: Recompute()}))][:MOST_PARTS]
    for size in range(1, len(parts) + 1):
        for chosen in itertools.combinations(parts, size):
            if serves(op, cfg, policy := Policy({path: Recompute() for path in chosen})):
                yield f"recompute {', '.join(chosen)}", policy


def _measure(op: Op, cfg: Any, x: Any, dtype: torch.dtype | None) -> tuple[int, int]:
    """Bytes kept, and the floating-point operations of matrix products in forward and backward. Of the layers of a repeat all but
    the first are alike, so two are followed however many there are."""
    times = list(_times(cfg))
    once = [1] * len(times)
    try:
        short = _resized(cfg, iter(once))
        longer = [(n - 1, _resized(cfg, iter([*once[:i], 2, *once[i + 1 :]]))) for i, n in enumerate(times) if n > 1]
    except ValueError:  # a tie names a layer that is not there
        return _follow(op, cfg, x, dtype)
    kept, flops = base = _follow(op, short, x, dtype)
    for more, config in longer:
        found = _follow(op, config, x, dtype)
        kept, flops = kept + more * (found[0] - base[0]), flops + more * (found[1] - base[1])
    return kept, flops


def _times(cfg: Any) -> Iterator[int]:
    """How many layers the repeats have that are in no other."""
    if type(cfg) is RepeatConfig:
        yield cfg.times
    elif hasattr(cfg, "with_parts"):
        for _, _, inner in parts_of(cfg):
            yield from _times(inner)


def _resized(cfg: Any, times: Iterator[int]) -> Any:
    """The config with other numbers of layers, in the order of `_times`."""
    if type(cfg) is RepeatConfig:
        return dataclasses.replace(cfg, times=next(times))
    return cfg.with_parts(lambda _, op, inner: (op, _resized(inner, times))) if hasattr(cfg, "with_parts") else cfg


def _follow(op: Op, cfg: Any, x: Any, dtype: torch.dtype | None) -> tuple[int, int]:
    """The figures of `_measure`, of every layer."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = tree_map_tensors(fake, x)
        params = tree_map_tensors(lambda t: fake(t, dtype), abstract_params(op, cfg))
        with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
            y, residuals = op.fwd(params, given, cfg)
            kept = report(residuals, params).kept_bytes
            op.bwd(residuals, tree_map(lambda t: torch.empty_like(t) if _float(t) else None, y), cfg)
    return kept, counter.get_total_flops()


def _float(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()
