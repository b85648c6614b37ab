"""chain: steps one after another, an op like any other.

    h_0 = x        h_i = step_i(h_{i-1})        y = h_n

The backward walks the steps in reverse. Its params, residuals and pending are dicts by step name. A step may take named
extra inputs (x is then `(main, *takes)`) and give named extra outputs (y is `(main, *gives)`); where a name is taken more
than once, its gradients are summed. Steps before the first that needs a gradient keep nothing, and that step skips its dgrad.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from funcops.backend import wants_triton
from funcops.compose.again import Dropped, dropped
from funcops.compose.into import check_into_tree
from funcops.compose.pieces import Planned, backward_piece, backward_step, forward_piece
from funcops.compose.plan import Piece, Window, make_plan, planned_for, registry_version
from funcops.compose.step import (
    Nested,
    Replace,
    Step,
    WithExtras,
    add,
    init_parts,
    live_inputs,
    nested,
    part,
    run_backward,
    split_x,
)
from funcops.compose.widths import Width, follow, inside
from funcops.errors import describe, fail, in_step, require, require_type
from funcops.memo import remember
from funcops.needs import Needs
from funcops.op import Op, config, dgrad_of, forward, init_of, make_op
from funcops.schema import open_node
from funcops.trees import at, paths, put


@config
class ChainConfig:
    """`steps` in order; `extras`: names that the caller gives (x is then `WithExtras(x, {...})`); `ties` maps a path to the
    path whose leaf it shares: the params tree holds None at the first, and its gradient is added to the second's, under whose path
    alone `Needs` asks for it. A tie to a tied path is one to that path's source.
    `recompute`: the outputs of cheap steps (norms, activations, GLUs) are computed again in the backward, not kept; a tuple
    of step names for some of them. `funcops.with_policy` says more. `fuse`: on devices where Triton runs, steps go to fused
    kernels as `funcops.explain` says."""

    steps: tuple[Step, ...]
    extras: tuple[str, ...] = ()
    ties: Any = ()
    recompute: bool | tuple[str, ...] = True
    fuse: bool = True

    def __post_init__(self) -> None:
        require_type("ChainConfig", "steps", self.steps, tuple)
        require_type("ChainConfig", "extras", self.extras, tuple)
        require_type("ChainConfig", "ties", self.ties, Mapping, tuple, list)
        require(len(self.steps) > 0, "ChainConfig", "steps", "at least one Step", "none")
        for step in self.steps:
            require_type("ChainConfig", "steps", step, Step)
        names = [step.name for step in self.steps]
        require(len(set(names)) == len(names), "ChainConfig", "steps", "uniquely named", names)
        _check_routing(self.steps, self.extras)
        keys = tuple(sorted({k for step in self.steps for k in step.keys if k in self.extras}))
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "names", dict.fromkeys(names))
        routed = [step if step.names or step.gives else None for step in self.steps]
        object.__setattr__(self, "routed", tuple(routed))
        found = _dropped_outputs(self.steps, self.recompute)
        object.__setattr__(self, "dropped", found)
        object.__setattr__(self, "backwards", tuple(zip(self.steps[::-1], found[::-1], strict=True)))
        object.__setattr__(self, "entries", ((self.steps[0].name, self.steps[0].op, self.steps[0].cfg),))
        object.__setattr__(self, "gives", any(step.gives for step in self.steps))
        object.__setattr__(self, "step_needs", {})
        object.__setattr__(self, "forwards", {})
        object.__setattr__(self, "plans", {})
        known = paths(init_parts(self.steps, None, "meta", None))
        object.__setattr__(self, "ties", resolved_ties("ChainConfig", self.ties, known))
        object.__setattr__(self, "known", tuple(path for path, t in known.items() if t is not None))
        needs_of_steps(self, Needs.ALL)
        needs_of_steps(self, Needs.NONE)
        self.follow("ChainConfig", "", None)

    def follow(self, where: str, path: str, width: Width | None) -> Width | None:
        """See `funcops.compose.widths`."""
        for step in self.steps:
            width = follow(where, inside(path, step.name), step.cfg, width)
        return width

    def with_parts(self, replace: Replace, **changes: Any) -> ChainConfig:
        """The config with `replace(name, op, cfg)` for each step's op and config."""
        steps = tuple(step.with_op(*replace(step.name, step.op, step.cfg)) for step in self.steps)
        return dataclasses.replace(self, steps=steps, **changes)

    keys: ClassVar[tuple[str, ...]]
    known: ClassVar[tuple[str, ...]]  # the paths of params that are there
    names: ClassVar[dict[str, None]]
    routed: ClassVar[tuple[Step | None, ...]]  # the steps that take or give extras
    dropped: ClassVar[tuple[Dropped | None, ...]]  # by step, what it does not keep of the one before
    backwards: ClassVar[tuple[tuple[Step, Dropped | None], ...]]  # by step, last first
    plans: ClassVar[dict[Any, Any]]
    entries: ClassVar[tuple[tuple[Any, Op, Any], ...]]  # whose input x is: name, op, cfg
    gives: ClassVar[bool]
    step_needs: ClassVar[dict[Needs, tuple[Needs, ...]]]
    forwards: ClassVar[dict[Needs, tuple[tuple[str, Any, Any, Needs, Step | None, Dropped | None], ...]]]


def _dropped_outputs(steps: tuple[Step, ...], recompute: Any) -> tuple[Dropped | None, ...]:
    """For each step, what it leaves out of the output of the one before. Two in a row cannot: the second's recipe would lack x."""
    names = {step.name for step in steps}
    require_type("ChainConfig", "recompute", recompute, bool, tuple)
    unknown = [] if isinstance(recompute, bool) else [name for name in recompute if name not in names]
    require(not unknown, "ChainConfig", "recompute", f"a bool, or names of steps ({', '.join(names)})", unknown)
    found: list[Dropped | None] = [None]
    for before, step in itertools.pairwise(steps):
        asked = recompute if isinstance(recompute, bool) else before.name in recompute
        found.append(dropped(before, step) if asked and found[-1] is None else None)
    return tuple(found)


def _check_routing(steps: tuple[Step, ...], extras: tuple[str, ...]) -> None:
    """Every name is made once, before it is taken, and taken at least once."""
    made, taken = dict.fromkeys(extras, "the caller"), set()
    require(len(set(extras)) == len(extras), "ChainConfig", "extras", "different names", extras)
    for step in steps:
        for name in step.names:
            require(name in made, "ChainConfig", f"takes of step {step.name!r}", f"names made before it ({list(made)})", repr(name))
            taken.add(name)
        for name in step.gives:
            require(
                name not in made, "ChainConfig", f"gives of step {step.name!r}", "a new name", f"{name!r}, made by {made.get(name)}"
            )
            made[name] = f"step {step.name!r}"
    unused = [name for name in made if name not in taken]
    require(not unused, "ChainConfig", "every extra", "taken by a later step", f"unused {unused}")


@nested("residuals")
class ChainResiduals(Nested):
    """Residuals of a chain: those of its steps by name."""

    __slots__ = ()


@nested("pending")
class ChainPending(Nested):
    """Pending weight gradients of a chain: those of its steps by name."""

    __slots__ = ()


def needs_of_steps(cfg: ChainConfig, needs: Needs) -> tuple[Needs, ...]:
    """What each step's backward will be asked for, by following which values need a gradient."""
    if needs in cfg.step_needs:
        return cfg.step_needs[needs]
    live = live_inputs(needs.x, cfg.extras)
    params, found = needs.params, []
    if cfg.ties and isinstance(params, tuple):
        params = _with_tied("chain_fwd", needs, params, cfg)
    for step in cfg.steps:
        wanted = step.needs(live, params)
        found.append(wanted)
        for name in ("", *step.gives):
            live[name] = bool(wanted)
    return remember(cfg.step_needs, needs, tuple(found))


def _with_tied(where: str, needs: Needs, params: tuple[str, ...], cfg: ChainConfig) -> tuple[str, ...]:
    """The mask over the steps' own leaves: a tied one is wanted where its source is, and not for its own path."""
    sources, found = dict(cfg.ties), []
    for path in params:
        below = [one for one in cfg.known if one == path or one.startswith(path + ".")]
        own = [one for one in below if one not in sources]
        if below and not own:
            fail(where, "needs.params", "paths that are not tied", f"{path!r}, tied to {sources[below[0]]!r}")
        found += [path] if len(own) == len(below) else own
    return (*found, *(path for path, source in cfg.ties if needs.param(source)))


def resolved_ties(where: str, ties: Any, known: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Pairs of a path and its source, which is not tied itself. Raises `ValueError` for what is no pair of paths, a path tied twice,
    to itself (also by way of others), or to a leaf of another shape or dtype."""
    sources: dict[str, str] = {}
    leaves = {path: t for path, t in known.items() if isinstance(t, Tensor)}
    for tie in ties.items() if isinstance(ties, Mapping) else ties:
        right = isinstance(tie, tuple) and len(tie) == 2 and all(isinstance(path, str) for path in tie)
        require(right, where, "ties", "pairs of a path and its source", repr(tie))
        for path in tie:
            require(path in leaves, where, "ties", f"paths among {', '.join(leaves)}", repr(path))
        require(tie[0] not in sources, where, "ties", "one source for each path", f"two for {tie[0]!r}")
        sources[tie[0]] = tie[1]
    found = []
    for path, source in sources.items():
        through = [path]
        while source in sources and source not in through:
            through.append(source)
            source = sources[source]
        require(
            source not in through, where, "ties", "to other paths", f"{path!r} tied to itself ({' -> '.join([*through, source])})"
        )
        a, b = leaves[path], leaves[source]
        same = a.shape == b.shape and a.dtype is b.dtype
        require(same, where, "ties", "between leaves of one shape and dtype", f"{path} {describe(a)} and {source} {describe(b)}")
        found.append((path, source))
    return tuple(sorted(found))


@init_of(ChainConfig)
def chain_init(cfg: ChainConfig, *, key: Tensor | None = None, device: Any = None, dtype: Any = None) -> dict[str, Any]:
    """Params of every step by name, each from a key of its own; None at tied paths."""
    params = init_parts(cfg.steps, key, device, dtype)
    for path, _ in cfg.ties:
        params = put(params, path, None)
    return params


def tied(where: str, tree: Any, ties: Iterable[tuple[str, str]]) -> Any:
    """The tree with each tied path holding its source's leaf."""
    for path, source in ties:
        if at(tree, path) is not None:
            fail(where, f"params.{path}", f"None (it is tied to {source})", describe(at(tree, path)))
        tree = put(tree, path, at(tree, source))
    return tree


def check_names(where: str, what: str, tree: Any, cfg: ChainConfig) -> None:
    if not isinstance(tree, dict):
        fail(where, what, f"a dict by step name: {', '.join(cfg.names)}", describe(tree), TypeError)
    if list(tree) != list(cfg.names) and tree.keys() != cfg.names.keys():
        missing, extra = sorted(cfg.names.keys() - tree.keys()), sorted(tree.keys() - cfg.names.keys())
        fail(where, what, f"a dict with the steps {', '.join(cfg.names)}", f"missing {missing}, extra {extra}")


@forward(ChainConfig, dict)
def chain_fwd(params: dict[str, Any], x: Any, cfg: ChainConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """Run the steps in order. x: whatever the first step takes, in `WithExtras` where the config declares extras.

    Raises `ValueError` for missing or extra params or extras, and whatever a step raises.
    """
    check_names("chain_fwd", "params", params, cfg)
    if cfg.ties:
        params = tied("chain_fwd", params, cfg.ties)
    main, extras = split_x("chain_fwd", x, cfg)
    if cfg.gives:
        extras = dict(extras)
    kept = ChainResiduals(cfg=cfg, needs=needs)
    rows = cfg.forwards.get(needs) or _forwards(cfg, needs)
    if type(main) is Tensor and wants_triton(main):
        extras = dict(extras)
        for piece in planned(cfg, needs, "cuda", main.dtype).forward:
            main = forward_piece(piece, params, main, extras, kept)
        return main, kept if needs else None
    name = ""
    try:
        for name, fwd, step_cfg, wanted, routed, left_out in rows:
            main, node = fwd(params[name], main if routed is None else routed.x(main, extras), step_cfg, needs=wanted)
            kept[name] = node
            if left_out is not None and node is not None:
                left_out.cut(node, kept, params[left_out.producer.name])
            if routed is not None and routed.gives:
                extras.update(zip(routed.gives, main[1:], strict=True))
                main = main[0]
    except Exception as error:
        in_step(error, name)
        raise
    return main, kept if needs else None


def _forwards(cfg: ChainConfig, needs: Needs) -> tuple[tuple[str, Any, Any, Needs, Step | None, Dropped | None], ...]:
    """What the loop above reads of each step: name, fwd, cfg, needs, the step itself if it takes or gives extras, and what it
    leaves out."""
    wanted = needs_of_steps(cfg, needs)
    left_out = [d if d is not None and d.applies(n) else None for d, n in zip(cfg.dropped, (Needs.NONE, *wanted), strict=False)]
    rows = zip(cfg.steps, wanted, cfg.routed, left_out, strict=True)
    return remember(cfg.forwards, needs, tuple((s.name, s.op.fwd, s.cfg, own, routed, left) for s, own, routed, left in rows))


def window_of(cfg: ChainConfig, needs: Needs, dtype: torch.dtype) -> Window:
    """All steps, as the rules of a plan look at them."""
    rows = cfg.forwards.get(needs) or _forwards(cfg, needs)
    return Window(cfg.steps, needs_of_steps(cfg, needs), dtype, tuple(row[5] is not None for row in rows))


class Pieces(NamedTuple):
    """The pieces of both halves of a plan, the backward's last first."""

    forward: tuple[Planned, ...]
    backward: tuple[Planned, ...]
    fused_backward: bool


def planned(cfg: ChainConfig, needs: Needs, device_type: str, dtype: torch.dtype) -> Pieces:
    """The pieces in which a chain runs; made once for what they depend on."""
    key = needs, device_type, dtype, registry_version()
    if key not in cfg.plans:
        wanted, left_out = needs_of_steps(cfg, needs), [row[5] for row in cfg.forwards.get(needs) or _forwards(cfg, needs)]
        found = make_plan(window_of(cfg, needs, dtype), device_type, cfg.fuse)

        def known_of(piece: Piece, of: Any) -> tuple[Any, ...]:
            return tuple(of[piece.first : piece.first + len(piece.steps)])

        halves = [
            tuple(Planned(piece, known_of(piece, wanted), known_of(piece, left_out)) for piece in half)
            for half in (found.forward, found.backward)
        ]
        return remember(cfg.plans, key, Pieces(halves[0], halves[1][::-1], any(piece.rule for piece in found.backward)))
    return cfg.plans[key]


def _walk(node: Any, dy: Any, cfg: ChainConfig, sums: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """The steps in reverse. Returns dx and by step: dparams, added to `sums` where there is one; without `sums`, pending."""
    gradients: dict[str, Any] = {}
    results: dict[str, Any] = dict(cfg.names)
    where = "chain_dgrad" if sums is None else "chain_bwd"
    device_type = planned_for(dy)
    pieces = None if device_type is None else planned(cfg, node.needs, device_type, dy.dtype)
    if pieces is not None and pieces.fused_backward:
        for piece in pieces.backward:
            dy = backward_piece(piece, node, dy, gradients, results, sums, where)
    else:
        plain, whole, name = not node.donated, sums is not None, ""
        try:
            for step, left_out in cfg.backwards:
                name = step.name
                if plain and left_out is None and not step.names and not step.gives:  # the launch path
                    dy, results[name] = run_backward(step.op, step.cfg, node[name], dy, whole, sums[name] if sums else None)
                else:
                    dy = backward_step(step, left_out, node, dy, gradients, results, sums, where)
        except Exception as error:
            in_step(error, name)
            raise
    if cfg.extras:
        dy = WithExtras(dy, {name: gradients.get(name) for name in cfg.extras})
    return dy, results


@dgrad_of(ChainResiduals)
def chain_dgrad(residuals: Any, dy: Any, cfg: ChainConfig) -> tuple[Any, Any]:
    """All dgrads, last step first. Returns dx and the pending weight gradients by step."""
    needs = residuals.needs
    dx, waiting = _walk(residuals, dy, cfg, None)
    empty = all(p is None for p in waiting.values())
    return dx, None if empty else ChainPending(waiting, cfg=cfg, needs=needs)


def chain_wgrad(pending: Any, cfg: ChainConfig, *, into: Any = None) -> dict[str, Any]:
    """All weight gradients, last step first; added to `into` where that is given."""
    if type(cfg) is not ChainConfig:
        fail("chain_wgrad", "cfg", "ChainConfig", describe(cfg), TypeError)
    node = None if pending is None else open_node("chain_wgrad", pending, ChainPending, cfg)
    sums = _accumulators("chain_wgrad", into, node, cfg)
    found, name = dict(cfg.names), ""
    try:
        for step, left_out in cfg.backwards:
            name = step.name
            waiting = None if node is None else part(node, name)
            if node is not None and waiting is not None and left_out is not None and left_out.key in node:
                output = left_out.value("chain_wgrad", part(node, left_out.key))
                waiting = left_out.fill("chain_wgrad", waiting, output)
            found[name] = step.op.wgrad(waiting, step.cfg, into=sums[name])
    except Exception as error:
        in_step(error, name)
        raise
    if node is not None and node is not pending:
        node.empty()
    return _collect(found, into, cfg)


def chain_bwd(residuals: Any, dy: Any, cfg: ChainConfig, *, into: Any = None) -> tuple[dict[str, Any], Any]:
    """The whole backward, a step at a time: each step's weight gradient right after its dgrad, so that donated residuals
    fall as it walks. Returns `(dparams, dx)`."""
    node = open_node("chain_bwd", residuals, ChainResiduals, cfg)
    dx, found = _walk(node, dy, cfg, _accumulators("chain_bwd", into, node, cfg, dy))
    if node is not residuals:
        node.empty()
    return _collect(found, into, cfg), dx


def _accumulators(where: str, into: Any, node: Any, cfg: ChainConfig, dy: Any = None) -> dict[str, Any]:
    """`into` by step, every leaf checked before any is written; a tied path shares its source's accumulator."""
    if into is None:
        return cfg.names
    check_names(where, "into", into, cfg)
    check_into_tree(where, into, chain, cfg, node, dy)
    seen: dict[tuple[str, str], str] = {}
    for path, source in (*[(source, source) for source in {source for _, source in cfg.ties}], *cfg.ties):
        first = seen.setdefault((source, path.partition(".")[0]), path)
        if first != path:  # refused here, before the step of both refuses it
            got = f"memory of into.{first}, which is in the same step"
            fail(where, f"into.{path}", "a tensor of its own", got)
    return tied(where, into, cfg.ties)


def _collect(found: dict[str, Any], into: Any, cfg: ChainConfig) -> dict[str, Any]:
    """dparams in the order of the steps, the gradients of tied paths summed into their source."""
    if into is not None:
        return into
    dparams: Any = found
    for path, source in cfg.ties:
        total = add(at(dparams, source), at(dparams, path))
        dparams = put(put(dparams, source, total), path, None)
    return dparams


chain: Op = make_op("chain", ChainConfig, init=chain_init, fwd=chain_fwd, dgrad=chain_dgrad, wgrad=chain_wgrad, bwd=chain_bwd)
