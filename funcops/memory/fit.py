"""`fit`: the cheapest policy whose residuals stay within a number of bytes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from funcops.engine.compose.step import check_body
from funcops.engine.contract.needs import Mask, Needs
from funcops.engine.contract.op import Op, wrap
from funcops.engine.contract.walk import Inside, Part, nested, rewrite
from funcops.engine.errors import in_html, join_path, on_screen, require, require_dtype, require_type, size_of
from funcops.engine.program.values import abstract_params
from funcops.engine.residuals.forms import to_form
from funcops.engine.residuals.policy import POLICIES, Action, Compress, Offload, Policy, Recompute
from funcops.engine.residuals.report import kept_values, storages
from funcops.engine.trees import fake, tensors, tree_map, tree_map_tensors
from funcops.library.formats.working import working_like
from funcops.memory.flops import ON_CPU, FlopCounter
from funcops.memory.layers import named_layers
from funcops.memory.parts import LeafPart, actions_of, has_parts, leaves_of
from funcops.memory.policy import kept_paths, resolved, with_policy
from funcops.memory.remat import is_remat

MOST_PARTS = 6  # every subset of these is tried
MOST_MOVED = 4  # and these in every way, if some may move


class Tried(NamedTuple):
    """A policy, the bytes that it keeps, and what it costs: its extra floating-point operations in matrix products, as a share of a
    forward and backward without recomputation, the bytes of the tensors that a codec rounds, and how many of `kept_bytes` move to
    another place, with the seconds there and back."""

    name: str
    policy: Policy
    kept_bytes: int
    extra_flops: float
    rounded_bytes: int = 0
    moved_bytes: int = 0
    seconds: float = 0.0

    @property
    def here(self) -> int:
        """The bytes that stay where the op computes, which a budget is for."""
        return self.kept_bytes - self.moved_bytes


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
            f"{'>' if one is self.picked else ' '} {one.name:<40} {size_of(one.here):>12}  "
            f"{100 * one.extra_flops:5.1f} % more work"
            + f", rounds {size_of(one.rounded_bytes)}" * bool(one.rounded_bytes)
            + f", moves {size_of(one.moved_bytes)} ({1e3 * one.seconds:.2f} ms)" * bool(one.moved_bytes)
            for one in self.tried
        ]
        return "\n".join(lines)


def fit(
    op: Op,
    cfg: Any,
    x: Any,
    budget: int,
    *,
    dtype: torch.dtype | None = None,
    needs: Needs = Needs.ALL,
    codecs: tuple[str, ...] = (),
    places: Mapping[Offload, float] | None = None,
) -> Fitted:
    """Find the policy that recomputes least and keeps at most `budget` bytes between forward and backward, for inputs like x. The
    bytes are `report(residuals, params, x).kept_bytes`: params and x, which the caller holds, do not count.

    It tries the lossless presets, every subset of a block's parts to recompute, and of the cheapest two between which the budget
    lies, one for the first layers of the repeats and the other for the rest. Nothing runs: one forward and
    backward, with four layers per repeat, is traced on shapes alone, and the bytes of each policy are counted from that. So the
    time does not depend on depth, unless `needs` names layers, and hardly on the number of policies. `dtype`: the dtype of the
    params, by default x's, or torch's if x has no floats. `needs`: the gradients that the training step asks of the forward.
    `codecs`: the codecs of `Compress` that policies may use for activations; by default no policy rounds anything. Of policies that
    recompute as much, the one that rounds least is picked.
    `places`: where policies may move tensors, and how many bytes a second go there, as `{Offload(): 25e9}`; by default all stay
    where the op computes. Every way to let each of up to four parts of a block stay, run again or move is tried, and of those that
    recompute and round as much, the one that takes the fewest seconds to move is picked. Bytes that are moved do not count for the
    budget. From the CPU nothing moves to the host's memory.

    Of an op that `op_from_module` made, it bisects over the products of the graph for x, in the order of operations per byte, and
    each layer is computed again from its own input if that fits. An x of other shapes than the example's must have values, as the
    module is traced on it, and `dtype` must be None.

    Raises `ValueError`, with the least bytes found, if no policy fits.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, RepeatConfig, RMSNormConfig, Step, chain, fit, linear, repeat, rms_norm
    >>> cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(64)), Step("up", linear, LinearConfig(64, 64))))
    >>> fitted = fit(chain, cfg, torch.empty(100, 64), budget=1000)
    >>> fitted.picked.name, fitted.picked.kept_bytes
    ('recompute_norms', 400)
    >>> deep = RepeatConfig(chain, cfg, 8)
    >>> fitted = fit(repeat, deep, torch.empty(100, 64), budget=181_000)
    >>> fitted.picked.name, fitted.picked.kept_bytes
    ('recompute 0-3.norm', 180800)
    >>> fit(repeat, deep, torch.empty(100, 64), budget=99)
    Traceback (most recent call last):
        ...
    ValueError: fit: budget must be at least 179,200 bytes (175.00 KiB, policy recompute *.norm, the least of those tried), got 99
    """
    check_body("fit", op, cfg)
    require_dtype("fit", dtype)
    require(isinstance(budget, int) and budget is not True and budget > 0, "fit", "budget", "a positive number of bytes", budget)
    require_type("fit", "needs", needs, Needs)
    require_type("fit", "codecs", codecs, tuple)
    rounding = {name: Compress(name) for name in codecs}  # raises for an unknown name
    speeds = _speeds(places)
    if op.named is None:
        followed = _follow(op, cfg, x, dtype, needs)
        short = _short(op, cfg, False)
        options = list(_candidates(*short, rounding))
        tried = [Tried(one.name, one.policy, *followed.under(one.held)) for one in options]
        between = list(_between(followed, options, tried, budget))
        tried = [one for one in tried if one.rounded_bytes or not one.policy.optional] + between
        for place, speed in speeds.items():
            moving = [(one, followed.under(one.held)) for one in _moving(*short, place, rounding)]
            tried += [Tried(one.name, one.policy, *cost, 2 * cost[-1] / speed) for one, cost in moving if cost[-1]]
    else:
        require(dtype is None, "fit", "dtype", "None, as a module's params have their own", dtype)
        require(not speeds, "fit", "places", "None, as the policies for a traced module move nothing", places)
        require(not codecs, "fit", "codecs", "(), as the policies for a traced module round nothing", codecs)
        tried = [Tried(_titled(policy), policy, *cost) for policy, *cost in op.named.plans(x, cfg, needs, budget, _flops)]
    tried.sort(key=lambda one: (one.extra_flops, one.rounded_bytes, one.seconds, -one.kept_bytes))
    within = [one for one in tried if one.here <= budget]
    least = min(tried, key=lambda one: one.here)
    wanted = f"at least {least.here:,} bytes ({size_of(least.here)}, policy {least.name}, the least of those tried)"
    require(bool(within), "fit", "budget", wanted, f"{budget:,}")
    return Fitted(with_policy(op, within[0].policy), within[0], tried)


def _speeds(places: Any) -> dict[Offload, float]:
    """The places, and the bytes a second that go there."""
    if places is None:
        return {}
    require_type("fit", "places", places, Mapping)
    for place, speed in places.items():
        require_type("fit", "places", place, Offload)
        right = isinstance(speed, int | float) and speed is not True and 0 < speed < math.inf
        require(right, "fit", f"places[{place}]", "a positive number of bytes a second", repr(speed))
    return dict(places)


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


class Option(NamedTuple):
    """A policy for all layers, and what each part holds under it. `parts`: the parts that it recomputes, if rules say all of it."""

    name: str
    policy: Policy
    held: Held
    parts: frozenset[str] | None = None


def _candidates(op: Op, cfg: Any, rounding: dict[str, Compress]) -> Iterator[Option]:
    lossless = list(_lossless(op, cfg))
    yield from lossless
    for codec, action in rounding.items():
        for name, parts in [(one.name, one.parts) for one in lossless if one.parts is not None]:
            again = {path: Recompute() for path in sorted(parts)}
            policy = Policy({"*[xqkvy]": action, **again}, optional=True)  # activations, as in the preset
            yield Option(f"{name}, " * bool(parts) + f"compress_{codec}", policy, _held(*resolved(op, cfg, policy)))


def _moving(op: Op, cfg: Any, place: Offload, rounding: dict[str, Compress]) -> Iterator[Option]:
    """Options that move to a place what some parts keep, while others run again; and those that round, with their codes there."""
    units, to = _parts(op, cfg)[:MOST_MOVED], type(place).__name__.lower()
    for each in itertools.product((None, Recompute(), place), repeat=len(units)):
        rules = {path: action for path, action in zip(units, each, strict=True) if action is not None}
        if place in each:
            yield from _moved(op, cfg, rules, to)
    yield from _moved(op, cfg, {"*": place}, to)
    for codec, action in rounding.items():
        yield from _moved(op, cfg, {"*[xqkvy]": action | place}, f"compress_{codec} {to}")


def _moved(op: Op, cfg: Any, rules: dict[str, Any], to: str) -> Iterator[Option]:
    policy = Policy(rules, optional=True)
    found = resolved(op, cfg, policy)
    again, away = (", ".join([path for path, action in rules.items() if (action == Recompute()) is same]) for same in (True, False))
    if _may_run_again(*found):
        yield Option(f"recompute {again}, {to} {away}" if again else f"{to} {away}", policy, _held(*found))


def _lossless(op: Op, cfg: Any) -> Iterator[Option]:
    steps = _steps(op, cfg)
    bodies = [path for path in steps if path.endswith("*") and path.count("*") == 1]
    by_rules = {"recompute_elementwise": frozenset[str]()}
    if bodies and all([_recomputing(op, cfg, (path,)) for path in bodies]):
        by_rules["minimal"] = frozenset(bodies)
    for name in ("save_all", "recompute_norms", "recompute_elementwise", "minimal"):
        under = resolved(op, cfg, POLICIES[name])
        if _may_run_again(*under):  # a forward that draws random numbers must not run again
            yield Option(name, POLICIES[name], _held(*under), by_rules.get(name))
    served = [path for path in _parts(op, cfg) if _recomputing(op, cfg, (path,))][:MOST_PARTS]
    for chosen in [subset for size in range(1, len(served) + 1) for subset in itertools.combinations(served, size)]:
        if found := _recomputing(op, cfg, chosen):
            yield found


def _steps(op: Op, cfg: Any) -> list[str]:
    return list(dict.fromkeys([kept.path for kept in kept_paths(op, cfg) if kept.field is None]))


def _parts(op: Op, cfg: Any) -> list[str]:
    """The parts of a repeat's body; without a repeat, the op's own parts."""
    steps = _steps(op, cfg)
    return [path for path in steps if path.rpartition(".")[0].endswith("*")] or [path for path in steps if "." not in path]


def _recomputing(op: Op, cfg: Any, parts: tuple[str, ...]) -> Option | None:
    policy = Policy({path: Recompute() for path in parts})
    try:
        found = resolved(op, cfg, policy)
    except ValueError:
        return None
    name = f"recompute {', '.join(parts)}"
    return Option(name, policy, _held(*found), frozenset(parts)) if _may_run_again(*found) else None


def _between(followed: Followed, options: list[Option], tried: list[Tried], budget: int) -> Iterator[Tried]:
    """A policy made of the two that cost least for what they save, among pairs between whose bytes the budget lies: one for the
    first layers of the repeats, the fewest with which it fits, and the other for the rest."""
    both = zip(tried, options, strict=True)
    costs = [(one.kept_bytes, one.extra_flops, option) for one, option in both if option.parts is not None]
    depth = sum(followed.depths.values())
    above, below = ([one for one in costs if (one[0] > budget) is more] for more in (True, False))
    if depth < 2 or not above or not below:
        return
    # the line between the two that is lowest at the budget
    more, less = min(itertools.product(above, below), key=lambda pair: _at(budget, *pair[0][:2], *pair[1][:2]))
    fewest, most = 0, depth
    while most - fewest > 1:
        middle = (fewest + most) // 2
        fits = followed.under(less[2].held, more[2].held, middle)[0] <= budget
        fewest, most = (fewest, middle) if fits else (middle, most)
    if most < depth:
        rules = list(_for_layers(followed.depths, less[2].parts, more[2].parts, most))
        policy = Policy(dict.fromkeys(rules, Recompute()))
        yield Tried(f"recompute {', '.join(rules)}", policy, *followed.under(less[2].held, more[2].held, most))


def _at(budget: int, more: int, cost: float, less: int, dear: float) -> float:
    return dear + (cost - dear) * (budget - less) / (more - less)


def _for_layers(depths: dict[str, int], first: Any, rest: Any, count: int) -> Iterator[str]:
    """The globs over the parts of the first `count` layers that are in `first`, and of the other layers that are in `rest`."""
    for path in dict.fromkeys((*sorted(first), *sorted(rest))):
        body, before = path[: path.index("*") + 1], 0
        for here, times in depths.items():
            own = min(max(count - before, 0), times)
            before += times
            layers = [range(own)] * (path in first) + [range(own, times)] * (path in rest)
            if here == body and any(layers):
                numbers = sorted([i for one in layers for i in one])
                said = "*" if len(numbers) == times else named_layers(numbers)
                yield f"{body[:-1]}{said}{path[len(body) :]}"


def _may_run_again(op: Op, cfg: Any) -> bool:
    """Whether no forward that would run again was seen to draw random numbers."""
    again = [part for part, _ in nested(cfg, op=op) if is_remat(part.op)]
    inside = [part for one in again for part, _ in nested(one.cfg, op=one.op)]
    return not any([part.op.draws is not None and part.op.draws(part.cfg) for part in inside])


class Layer(NamedTuple):
    """A layer that was traced: the path of the repeat's body, its place among those traced, their number, and the depth of the
    repeat. Of four, the first two stand for layers under one policy, and the others for layers under another; of each two, the
    second stands for all but the first."""

    body: str
    place: int
    traced: int
    times: int

    def first(self, count: int) -> bool:
        """Whether it is among the first `count` layers."""
        return self.place < count if self.traced == self.times else count > 0 and (self.place < 2 or count == self.times)

    def stands_for(self, count: int) -> int:
        """The number of layers that it stands for, if the first `count` have another policy than the rest."""
        if self.traced == self.times:
            return 1
        ahead = self.times if self.traced == 2 or count in (0, self.times) else count
        return (1, ahead - 1, min(1, self.times - ahead), max(0, self.times - ahead - 1))[self.place]


@dataclasses.dataclass
class PartRun:
    """The record of a part of a config in one forward and backward that keep everything: its x, which counts if gradients are asked
    of it, and, for an op without parts, the fields that it keeps and its floating-point operations in matrix products. `layers`:
    all that it is in, outermost first. `asked`: the gradients that are asked of it and of the combinators around, by path."""

    path: str
    layers: tuple[Layer, ...]
    asked: dict[str, Needs]
    x: list[Tensor]
    kept: list[tuple[str, Tensor]] = dataclasses.field(default_factory=list)
    forward: int = 0
    backward: int = 0

    def asked_of(self, leaf: LeafPart) -> Needs:
        """The gradients that are asked of the program that runs it, or of itself without one."""
        return self.asked[leaf.root.path if leaf.root else leaf.path]

    def kept_under(self, leaf: LeafPart) -> list[tuple[str, Tensor]]:
        """The fields that it keeps under a policy: its own, and the parts of x that a second forward reads alone."""
        call = leaf.called(self.asked_of(leaf))
        if call is None or not call.source:  # its forward runs once, and kept what it keeps under any policy
            return self.kept
        own, fields = {name for name, _ in self.kept}, leaf.op.fields(leaf.cfg)
        more = [(name, int((field.alias or "")[2:] or 0)) for name, field in fields.items() if field.of_x and name not in own]
        return [*self.kept, *[(name, self.x[at]) for name, at in more if at < len(self.x)]]

    def is_source(self, held: Held) -> bool:
        """Whether its forward runs again for what another part leaves out."""
        leaf = held.get(self.path)
        call = leaf and leaf.called(self.asked_of(leaf))
        return call is not None and call.source


class Run:
    """The parts of one forward and backward, in the order of the forward."""

    def __init__(self, counter: FlopCounter) -> None:
        self.counter = counter
        self.parts: list[PartRun] = []
        self.layers: tuple[Layer, ...] = ()  # that the next part is in
        self.asked = dict[str, Needs]()  # the gradients that are asked of the combinators around
        self.calls: Counter[str] = Counter()
        self.waiting: dict[str, list[PartRun]] = defaultdict(list)  # parts whose backward has not run

    def counted(self, fn: Callable[[], Any]) -> tuple[Any, int]:
        before = self.counter.total
        return fn(), self.counter.total - before


_run: ContextVar[Run] = ContextVar("funcops.fit")


def _short(op: Op, cfg: Any, noting: bool, asked: Mask = ()) -> tuple[Op, Any]:
    """The op and its config with few layers per repeat, and without ties, which cost nothing: two layers, or if `noting`, four in a
    repeat that is in no other, so that policies may change between them. If `noting`, everything is kept and each part records its
    tensors and operations. `asked`: the params whose gradients are; a repeat of which it names layers has all of its layers, as
    they may keep different tensors."""
    return rewrite(cfg, _Shorter(noting, asked if isinstance(asked, tuple) else ()), op=op)


@dataclasses.dataclass(frozen=True)
class _Shorter:
    """The function that `_short` gives to `rewrite`. `depth`: the depth of the repeat whose body the part is, and the number of its
    layers that are traced, else None; `around`: the path of the combinator around, None for the whole; `inside`: whether the part
    is in a repeat."""

    noting: bool
    asked: tuple[str, ...]
    depth: tuple[int, int] | None = None
    around: str | None = None
    inside: bool = False

    def __call__(self, part: Part) -> tuple[Op, Any] | Inside:
        path, op, cfg, _ = part
        if not has_parts(op, cfg):
            return (_noted(op, path, self.depth, True) if self.noting else op), cfg
        layer = re.escape(join_path(path, "*")).replace(r"\*", r"\d+") + r"(\.|$)"
        named = any([re.match(layer, name) for name in self.asked])
        traced = cfg.times if named or cfg.times is None else min(cfg.times, 4 if self.noting and not self.inside else 2)
        changes: dict[str, Any] = {} if traced is None else {"times": traced}
        if cfg.as_chain is not None:
            changes |= {"ties": (), "recompute": False if self.noting else cfg.as_chain.recompute}

        def note(op: Op, cfg: Any) -> tuple[Op, Any]:
            return (_noted(op, path, self.depth, False) if self.noting and path != self.around else op), cfg

        depth = None if traced is None else (cfg.times, traced)
        inside = dataclasses.replace(self, depth=depth, around=path, inside=self.inside or depth is not None)
        return Inside(inside, lambda _: changes, note)


_noting = functools.lru_cache(maxsize=16)(_short)  # so that a second run reuses the programs of the first


def _noted(op: Op, path: str, depth: tuple[int, int] | None, leaf: bool) -> Op:
    """The op with a record of its calls as the part at `path`; `depth`: of the repeat whose body it is, and how many layers run."""

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        run = _run.get()
        around, place, run.calls[path] = (run.layers, run.asked), run.calls[path], run.calls[path] + 1
        if depth is not None:
            run.layers = (*run.layers, Layer(path, place % depth[1], depth[1], depth[0]))
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

    return wrap(op, (_noted, (op, path, depth, leaf)), fwd=fwd, recomputable="", **({"bwd": bwd} if leaf else {}))


class Followed(NamedTuple):
    """The parts of one forward and backward, the storages of the params and x, which cost nothing, the parts that rerun their
    forward under any policy, and the number of layers of each repeat that is in no other, by the path of its body."""

    parts: list[PartRun]
    owned: frozenset[int]
    rerun: frozenset[str]
    depths: dict[str, int]

    def under(self, held: Held, rest: Held | None = None, count: int = 0) -> tuple[int, float, int, int]:
        """The bytes of the held tensors, each storage once, the floating-point operations of recomputation, as a share of all, the
        bytes of what is rounded, and those that are in another place. `rest`: what is held in the layers behind the first
        `count`."""
        before, seen, total, rounded, moved, more, base = dict[str, int](), set[Any](self.owned), 0, 0, 0, 0, 0
        for body, times in self.depths.items():
            before[body] = times if rest is None else min(max(count - sum(self.depths[one] for one in before), 0), times)
        rerun = [(one, self._again(one)) for one in (held, held if rest is None else rest)]
        for part in self.parts:
            counts = [before.get(layer.body, 0) for layer in part.layers]
            times = math.prod([layer.stands_for(own) for layer, own in zip(part.layers, counts, strict=True)])
            own, again = rerun[bool(part.layers) and not part.layers[0].first(counts[0])]
            base += times * (part.forward + part.backward)
            more += times * part.forward * (any([f"{part.path}.".startswith(path) for path in again]) or part.is_source(own))
            for key, size, packed, action in _forms(part, own[part.path]) if part.path in own else ():
                if key not in seen:
                    total += times * packed
                    rounded += times * size if isinstance(action, Compress) else 0
                    moved += times * packed if isinstance(getattr(action, "place", action), Offload) else 0
                seen.add(key)
        return total, (base + more) / base - 1.0 if base else 0.0, rounded, moved

    def _again(self, held: Held) -> list[str]:
        """The beginnings of the paths whose forward runs again."""
        return [f"{path}." * bool(path) for path, leaf in held.items() if leaf is None and path not in self.rerun]


def _follow(op: Op, cfg: Any, x: Any, dtype: torch.dtype | None, needs: Needs = Needs.ALL) -> Followed:
    """Trace a forward and backward on shapes alone."""
    rerun = frozenset(path for path, leaf in _held(op, cfg).items() if leaf is None)
    op, cfg = rewrite(cfg, lambda part: Inside(after=lambda op, made: (op, made.as_run())) if part.composite else None, op=op)
    op, cfg = _noting(op, cfg, True, needs.params)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = tree_map_tensors(fake, x)
        main = next((t.dtype for t in tensors(getattr(given, "main", given)) if _float(t)), None)
        params = working_like(op, cfg, tree_map_tensors(lambda t: fake(t, dtype or main), abstract_params(op, cfg)))
        with FlopCounter() as counter:
            token = _run.set(run := Run(counter))
            try:
                y, residuals = op.fwd(params, given, cfg, needs=needs)
                op.bwd(residuals, tree_map(lambda t: torch.empty_like(t) if _float(t) else None, y), cfg)
            finally:
                _run.reset(token)
    depths = {part.layers[0].body: part.layers[0].times for part in run.parts if part.layers}
    return Followed(run.parts, frozenset(storages([params, given])), rerun, depths)


def _forms(part: PartRun, leaf: LeafPart | None) -> Iterator[tuple[Any, int, int, Action | None]]:
    """For each tensor that a part holds: what tells it from others, the bytes of its storage, the bytes of the form that is kept,
    and the action that gave it that form, or None. A tensor that several fields hold is packed once."""
    dropped = leaf.dropped(part.asked_of(leaf)) if leaf else ()
    actions = actions_of(leaf.op) if leaf else {}
    for name, t in [(name, t) for name, t in part.kept_under(leaf) if name not in dropped] if leaf else [("", t) for t in part.x]:
        action = actions.get(name)
        form = to_form(t, action) if isinstance(action, Compress | Offload) else t
        for storage, size in storages(t).items():
            if form is t:
                yield storage, size, size, None
            else:
                yield (storage, t.storage_offset(), t.numel(), action), size, sum(storages(form).values()), action


Held = dict[str, LeafPart | None]  # by path: None for a part that keeps only its x


def _held(op: Op, cfg: Any) -> Held:
    return {leaf.path: None if is_remat(leaf.op) else leaf for leaf in leaves_of(op, cfg)}


def _float(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()
