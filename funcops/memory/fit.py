"""`fit`: the cheapest policy whose residuals stay within a number of bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from funcops.engine.compose.step import check_body
from funcops.engine.contract.needs import Mask, Needs
from funcops.engine.contract.op import Op, wrap
from funcops.engine.contract.walk import Inside, Part, nested, rewrite
from funcops.engine.errors import in_html, join_path, on_screen, require, require_dtype, require_type, size_of
from funcops.engine.program.values import abstract_params
from funcops.engine.residuals.policy import POLICIES, Policy, Recompute
from funcops.engine.residuals.report import kept_values, storage_of
from funcops.engine.trees import fake, tensors, tree_map, tree_map_tensors
from funcops.library.formats.working import working_like
from funcops.memory.parts import LeafPart, has_parts, leaves_of
from funcops.memory.policy import kept_paths, resolved, with_policy
from funcops.memory.remat import is_remat


def _attention_flops(q: Any, k: Any, v: Any, *_: Any, products: tuple[int, int] = (1, 1), **__: Any) -> int:
    """Two products, as torch counts them on other devices: a causal mask saves nothing. q: [B, H, T, D], k: [B, H', S, D]."""
    batch, heads, rows, size = q
    return int(2 * batch * heads * rows * k[-2] * (products[0] * size + products[1] * v[-1]))


def _attention_backward_flops(dy: Any, *x: Any, **_: Any) -> int:
    """Five products: the recomputed scores, dv, dp, dq, dk."""
    return _attention_flops(*x, products=(3, 2))


_aten = torch.ops.aten
ON_CPU = {  # torch's counter lacks the CPU's attention
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
MOST_PARTS = 6  # every subset of these is tried


class Tried(NamedTuple):
    """A policy, the bytes that it keeps, and its extra floating-point operations in matrix products, as a share of a forward and
    backward without recomputation."""

    name: str
    policy: Policy
    kept_bytes: int
    extra_flops: float


class Fitted(NamedTuple):
    """`op` is the op under the picked policy; `tried` has all policies, the cheapest first."""

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
            f"{100 * one.extra_flops:5.1f} % more work"
            for one in self.tried
        ]
        return "\n".join(lines)


def fit(op: Op, cfg: Any, x: Any, budget: int, *, dtype: torch.dtype | None = None, needs: Needs = Needs.ALL) -> Fitted:
    """Find the policy that recomputes least and keeps at most `budget` bytes between forward and backward, for inputs like x.

    It tries the lossless presets, and every subset of a block's parts to recompute. Nothing runs: one forward and backward, with
    two layers per repeat, is traced on shapes alone, and the bytes of each policy are counted from that. So the time does not
    depend on depth, unless `needs` names layers, and hardly on the number of policies. `dtype`: the dtype of the params, by default
    x's, or torch's if x has no floats. `needs`: the gradients that the training step asks of the forward.

    Of an op that `op_from_module` made, it bisects over the products of the graph for x, in the order of operations per byte, and
    each layer is computed again from its own input if that fits. An x of other shapes than the example's must have values, as the
    module is traced on it, and `dtype` must be None.

    Raises `ValueError`, with the least bytes found, if no policy fits.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, RMSNormConfig, Step, chain, fit, linear, rms_norm
    >>> cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(64)), Step("up", linear, LinearConfig(64, 64))))
    >>> fitted = fit(chain, cfg, torch.empty(100, 64), budget=26_000)
    >>> fitted.picked.name, fitted.picked.kept_bytes
    ('recompute_norms', 26000)
    >>> fit(chain, cfg, torch.empty(100, 64), budget=1000)
    Traceback (most recent call last):
        ...
    ValueError: fit: budget must be at least 25,600 bytes (25.00 KiB, policy recompute norm, the least of those tried), got 1,000
    """
    check_body("fit", op, cfg)
    require_dtype("fit", dtype)
    require(isinstance(budget, int) and budget is not True and budget > 0, "fit", "budget", "a positive number of bytes", budget)
    require_type("fit", "needs", needs, Needs)
    if op.named is None:
        followed = _follow(op, cfg, x, dtype, needs)
        tried = [Tried(name, policy, *followed.under(held)) for name, policy, held in _candidates(*_short(op, cfg, False))]
    else:
        require(dtype is None, "fit", "dtype", "None, as a module's params have their own", dtype)
        tried = [Tried(_titled(policy), policy, *cost) for policy, *cost in op.named.plans(x, cfg, needs, budget, _flops)]
    tried.sort(key=lambda one: (one.extra_flops, -one.kept_bytes))
    within = [one for one in tried if one.kept_bytes <= budget]
    least = min(tried, key=lambda one: one.kept_bytes)
    wanted = f"at least {least.kept_bytes:,} bytes ({size_of(least.kept_bytes)}, policy {least.name}, the least of those tried)"
    require(bool(within), "fit", "budget", wanted, f"{budget:,}")
    return Fitted(with_policy(op, within[0].policy), within[0], tried)


def _titled(policy: Policy) -> str:
    again = sum([action == Recompute() for _, action in policy.rules])
    return f"recompute {again} tensors" if again else "save_all"


def _flops(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The floating-point operations of a call of an operator, if it is a matrix product."""
    packet = getattr(target, "overloadpacket", None)
    count: Any = ON_CPU.get(packet) or flop_registry.get(packet)  # type: ignore[arg-type]
    if count is None:
        return 0
    if packet in ON_CPU:  # which take shapes
        args = [tuple(t.shape) if isinstance(t, Tensor) else t for t in args]
    return int(count(*args, **kwargs, out_val=result))


def _candidates(op: Op, cfg: Any) -> Iterator[tuple[str, Policy, Held]]:
    for name in ("save_all", "recompute_norms", "recompute_elementwise", "minimal"):
        under = resolved(op, cfg, POLICIES[name])
        if _may_run_again(*under):  # a forward that draws random numbers must not run again
            yield name, POLICIES[name], _held(*under)
    steps = list(dict.fromkeys([kept.path for kept in kept_paths(op, cfg) if kept.field is None]))
    # the parts of a repeat's body; without a repeat, the op's own parts
    inside = [path for path in steps if path.rpartition(".")[0].endswith("*")]
    parts = inside or [path for path in steps if "." not in path]
    served = [path for path in parts if _recomputing(op, cfg, (path,))][:MOST_PARTS]
    for chosen in [subset for size in range(1, len(served) + 1) for subset in itertools.combinations(served, size)]:
        if found := _recomputing(op, cfg, chosen):
            yield f"recompute {', '.join(chosen)}", *found


def _recomputing(op: Op, cfg: Any, parts: tuple[str, ...]) -> tuple[Policy, Held] | None:
    policy = Policy({path: Recompute() for path in parts})
    try:
        found = resolved(op, cfg, policy)
    except ValueError:
        return None
    return (policy, _held(*found)) if _may_run_again(*found) else None


def _may_run_again(op: Op, cfg: Any) -> bool:
    """Whether no forward that would run again was seen to draw random numbers."""
    again = [part for part, _ in nested(cfg, op=op) if is_remat(part.op)]
    inside = [part for one in again for part, _ in nested(one.cfg, op=one.op)]
    return not any([part.op.draws is not None and part.op.draws(part.cfg) for part in inside])


@dataclasses.dataclass
class PartRun:
    """The record of a part of a config in one forward and backward that keep everything: its x, which counts if gradients are asked
    of it, and, for an op without parts, the fields that it keeps and its floating-point operations in matrix products. It stands
    for `layers` layers. `asked`: the gradients that are asked of it and of the combinators around, by path."""

    path: str
    layers: int
    asked: dict[str, Needs]
    x: list[Tensor]
    kept: list[tuple[str, Tensor]] = dataclasses.field(default_factory=list)
    forward: int = 0
    backward: int = 0


class Run:
    """The parts of one forward and backward, in the order of the forward."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter = counter
        self.parts: list[PartRun] = []
        self.layers = 1  # the number of layers that the next part stands for
        self.asked = dict[str, Needs]()  # the gradients that are asked of the combinators around
        self.calls: Counter[str] = Counter()
        self.waiting: dict[str, list[PartRun]] = defaultdict(list)  # parts whose backward has not run

    def counted(self, fn: Callable[[], Any]) -> tuple[Any, int]:
        before = self.counter.get_total_flops()
        return fn(), int(self.counter.get_total_flops()) - before


_run: ContextVar[Run] = ContextVar("funcops.fit")


def _short(op: Op, cfg: Any, noting: bool, asked: Mask = ()) -> tuple[Op, Any]:
    """The op and its config with two layers per repeat, the second standing for all but the first, and without ties, which cost
    nothing. If `noting`, everything is kept and each part records its tensors and operations. `asked`: the params whose gradients
    are; a repeat of which it names layers has all of its layers, as they may keep different tensors."""
    return rewrite(cfg, _Shorter(noting, asked if isinstance(asked, tuple) else ()), op=op)


@dataclasses.dataclass(frozen=True)
class _Shorter:
    """The function that `_short` gives to `rewrite`. `times`: the layers of the shortened repeat whose body the part is, else 1;
    `around`: the path of the combinator around, None for the whole."""

    noting: bool
    asked: tuple[str, ...]
    times: int = 1
    around: str | None = None

    def __call__(self, part: Part) -> tuple[Op, Any] | Inside:
        path, op, cfg, _ = part
        if not has_parts(op, cfg):
            return (_noted(op, path, self.times, True) if self.noting else op), cfg
        layer = re.escape(join_path(path, "*")).replace(r"\*", r"\d+") + r"(\.|$)"
        times = None if any(re.match(layer, name) for name in self.asked) else cfg.times
        changes: dict[str, Any] = {} if times is None else {"times": min(times, 2)}
        if cfg.as_chain is not None:
            changes |= {"ties": (), "recompute": False if self.noting else cfg.as_chain.recompute}

        def note(op: Op, cfg: Any) -> tuple[Op, Any]:
            return (_noted(op, path, self.times, False) if self.noting and path != self.around else op), cfg

        return Inside(dataclasses.replace(self, times=times or 1, around=path), lambda _: changes, note)


_noting = functools.lru_cache(maxsize=16)(_short)  # so that a second run reuses the programs of the first


def _noted(op: Op, path: str, times: int, leaf: bool) -> Op:
    """The op with a record of its calls as the part at `path`; `times`: the layers of the repeat whose body it is, or 1."""

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        run = _run.get()
        around, run.calls[path] = (run.layers, run.asked), run.calls[path] + 1
        if times > 1 and run.calls[path] % 2 == 0:
            run.layers *= times - 1
        again = leaf and op.recompute is not None and any([one.any for one in (needs, *list(run.asked.values())[-1:])])
        kept = needs.with_recompute() if again else needs  # with what a recomputation of y reads
        run.asked = run.asked | {path: needs if leaf else cfg.needs_of_chain(needs)}
        here = PartRun(path, run.layers, run.asked, tensors(x) if needs.any else [])
        run.parts.append(here)
        (y, node), flops = run.counted(lambda: op.fwd(params, x, cfg, needs=kept))
        if leaf:
            here.kept = [(name.partition(".")[0], t) for name, value, _ in kept_values(node) for t in tensors(value)]
            here.forward = flops
            run.waiting[path].append(here)
        run.layers, run.asked = around
        return y, node

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[Any, Any]:
        run = _run.get()
        found, flops = run.counted(lambda: op.bwd(residuals, dy, cfg, into=into))
        run.waiting[path].pop().backward = flops
        return found

    return wrap(op, (_noted, (op, path, times, leaf)), fwd=fwd, recomputable="", **({"bwd": bwd} if leaf else {}))


class Followed(NamedTuple):
    """The parts of one forward and backward, the storages of the params, which cost nothing, and the parts that rerun their forward
    under any policy."""

    parts: list[PartRun]
    owned: frozenset[int]
    rerun: frozenset[str]

    def under(self, held: Held) -> tuple[int, float]:
        """The bytes of the held tensors, each storage once, and the floating-point operations of recomputation, as a share of
        all."""
        seen, kept = set(self.owned), 0
        for part in self.parts:
            if part.path in held:
                leaf = held[part.path]
                dropped = leaf.dropped(part.asked[leaf.root.path if leaf.root else leaf.path]) if leaf else ()
                for t in part.x if leaf is None else [t for name, t in part.kept if name not in dropped]:
                    if storage_of(t) not in seen:
                        seen.add(storage_of(t))
                        kept += part.layers * t.untyped_storage().nbytes()
        rerun = [f"{path}." * bool(path) for path, leaf in held.items() if leaf is None and path not in self.rerun]
        more = [part for part in self.parts if any(f"{part.path}.".startswith(path) for path in rerun)]
        base = sum(part.layers * (part.forward + part.backward) for part in self.parts)
        return kept, (base + sum(part.layers * part.forward for part in more)) / base - 1.0 if base else 0.0


def _follow(op: Op, cfg: Any, x: Any, dtype: torch.dtype | None, needs: Needs = Needs.ALL) -> Followed:
    """Trace a forward and backward on shapes alone."""
    rerun = frozenset(path for path, leaf in _held(op, cfg).items() if leaf is None)
    op, cfg = rewrite(cfg, lambda part: Inside(after=lambda op, made: (op, made.as_run())) if part.composite else None, op=op)
    op, cfg = _noting(op, cfg, True, needs.params)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = tree_map_tensors(fake, x)
        main = next((t.dtype for t in tensors(getattr(given, "main", given)) if _float(t)), None)
        params = working_like(op, cfg, tree_map_tensors(lambda t: fake(t, dtype or main), abstract_params(op, cfg)))
        with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
            token = _run.set(run := Run(counter))
            try:
                y, residuals = op.fwd(params, given, cfg, needs=needs)
                op.bwd(residuals, tree_map(lambda t: torch.empty_like(t) if _float(t) else None, y), cfg)
            finally:
                _run.reset(token)
    return Followed(run.parts, frozenset(map(storage_of, tensors(params))), rerun)


Held = dict[str, LeafPart | None]  # by path: None for a part that keeps only its x


def _held(op: Op, cfg: Any) -> Held:
    return {leaf.path: None if is_remat(leaf.op) else leaf for leaf in leaves_of(op, cfg)}


def _float(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()
