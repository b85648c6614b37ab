"""chain: steps one after another, an op like any other.

    h_0 = x        h_i = step_i(h_{i-1})        y = h_n

x and y have the shapes of the first step's x and the last step's y. The backward walks the steps in reverse. Its params,
residuals and pending are dicts by step name. A step may take named extra inputs (x is then `(main, *takes)`) and give named extra
outputs (y is `(main, *gives)`); if a name is taken more than once, its gradients are summed. Steps before the first that needs
a gradient keep nothing, and that step skips its dgrad.

With `outputs` some of the steps' outputs leave the chain: y is then `WithExtras(h_n, {name: ...})`, and so is dy, of which each
part may be None, which means zero. An output may also be taken inside. An output that is not a float tensor (a count) has no
gradient: its part of dy is None. An outer chain reads the outputs of a step by name; `skip` and `parallel` pass them on, `repeat`
stacks its layers'.

>>> import torch
>>> from funcops import AddConfig, ChainConfig, ForkConfig, ScaleConfig, Step, add, chain, fork, scale
>>> fork_step = Step("fork", fork, ForkConfig(), gives=("x",))
>>> cfg = ChainConfig(steps=(fork_step, Step("double", scale, ScaleConfig(2.0)), Step("add", add, AddConfig(), takes=("x",))))
>>> y, residuals = chain.fwd(chain.init(cfg), torch.ones(2), cfg)
>>> y, list(residuals)
(tensor([3., 3.]), ['fork', 'double', 'add'])
>>> dparams, dx = chain.bwd(residuals, torch.ones(2), cfg)
>>> dx
tensor([3., 3.])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from funcops.engine.compose.joints import ends_joint, joined_steps
from funcops.engine.compose.pausing import LOWERED
from funcops.engine.compose.step import Step, abstract_parts, init_parts, live_inputs, note, split_x
from funcops.engine.contract.configs import Composite, Replace, Width
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, init_of, make_op
from funcops.engine.errors import describe, fail, join_path, require, require_type
from funcops.engine.program import programs
from funcops.engine.program.lower import Call, Extras, Lowered, Parts, Place, Value
from funcops.engine.residuals.nested import nested
from funcops.engine.trees import paths, put, stands_for_one

if TYPE_CHECKING:
    from funcops.engine.contract.op import TypedOp

__all__ = ["ChainConfig", "ChainPending", "ChainResiduals"]
__all__ += ["chain", "chain_bwd", "chain_dgrad", "chain_fwd", "chain_init", "chain_wgrad"]


@config
class ChainConfig(Composite):
    """`steps` in order; `extras`: names that the caller gives (x is then `WithExtras(x, {...})`); `outputs`: names that steps give
    and the caller gets (y is then `WithExtras(y, {...})`, and dy too, with None for zero); `ties` maps a path to the path whose
    leaf it shares: the params tree holds None at the first, whose gradient is added to the second's, and `Needs` names only the
    second. A tie to a tied path is a tie to that path's source.
    `recompute`: the outputs of recomputable steps (norms, activations, GLUs) are recomputed in the backward, not kept; a tuple
    of step names selects some of them, `funcops.with_policy` decides in more detail. `fuse`: on devices where Triton runs, steps
    run in fused kernels, which `funcops.explain` shows. `joined`: losses that run as one op with the projection before them, and an
    optional softcap between, so that the logits are never whole in memory (`linear_cross_entropy`); paths of params stay. A
    projection with a bias, an adapter or a recipe runs by itself, and its logits are kept."""

    steps: tuple[Step, ...] = dataclasses.field(kw_only=False)
    extras: tuple[str, ...] = ()
    ties: Any = ()
    recompute: bool | tuple[str, ...] = True
    fuse: bool = True
    outputs: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_type("ChainConfig", "steps", self.steps, tuple)
        require_type("ChainConfig", "extras", self.extras, tuple)
        right = isinstance(self.outputs, tuple) and all(isinstance(name, str) for name in self.outputs)
        require(right, "ChainConfig", "outputs", "a tuple of names", repr(self.outputs))
        require_type("ChainConfig", "ties", self.ties, Mapping, tuple, list)
        require(len(self.steps) > 0, "ChainConfig", "steps", "at least one Step", "none")
        for step in self.steps:
            require_type("ChainConfig", "steps", step, Step)
        names = [step.name for step in self.steps]
        require(len(set(names)) == len(names), "ChainConfig", "steps", "uniquely named", names)
        _check_routing(self.steps, self.extras, self.outputs)
        keys = tuple(sorted({k for step in self.steps for k in step.keys if k in self.extras}))
        # a weight in codes counts as one leaf, so a tie or a mask cannot name its codes and scales
        known = paths(abstract_parts(self.steps), is_leaf=stands_for_one)
        losses = [step.name for step in self.steps if ends_joint(step.op)]
        right = isinstance(self.joined, tuple) and all(name in losses for name in self.joined)
        require(
            right, "ChainConfig", "joined", f"a tuple of names of losses ({', '.join(losses) or 'none here'})", repr(self.joined)
        )
        note(self, runs=joined_steps(self.steps, self.joined))
        # `programs` is a cache on the config: it goes when the config goes, and a look-up hashes no config
        note(self, keys=keys, names=dict.fromkeys(names), recomputed=_recomputed(self.steps, self.recompute), programs={})
        note(self, ties=resolved_ties("ChainConfig", self.ties, known), known=tuple(p for p, t in known.items() if t is not None))
        self.follow("ChainConfig", "", None)

    @property
    def members(self) -> tuple[Step, ...]:  # type: ignore[override]
        return self.steps

    @property
    def as_chain(self) -> ChainConfig:  # type: ignore[override]
        return self

    @property
    def first_parts(self) -> tuple[Any, ...]:
        """The config of the first step, whose x is this config's x."""
        return (self.steps[0].cfg,)

    def as_run(self) -> ChainConfig:
        """The config of the steps as they run."""
        # a joined loss is an identity by now, which `joined` may not name
        return dataclasses.replace(self, steps=self.runs, joined=()) if self.joined else self

    def follow(self, where: str, path: str, width: Width | None) -> Width | None:
        """See `OpConfig.follow`."""
        for step in self.steps:
            width = step.cfg.follow(where, join_path(path, step.name), width)
        return width

    def abstract(self) -> Any:
        """See `funcops.engine.program.values.abstract_params`."""
        params = abstract_parts(self.steps)
        for path, _ in self.ties:
            params = put(params, path, None)
        return params

    def with_parts(self, replace: Replace, **changes: Any) -> ChainConfig:
        """The config with `replace(name, op, cfg)` for each step's op and config. A name that only the new steps take, and that no
        step gives, becomes one of the extras."""
        steps = tuple(step.with_op(*replace(step.name, step.op, step.cfg)) for step in self.steps)
        known = {
            *self.extras,
            *(name for step in self.steps for name in step.names),
            *(name for step in steps for name in step.given),
        }
        added = dict.fromkeys(name for step in steps for name in step.names if name not in known)
        return dataclasses.replace(self, **{"steps": steps, "extras": (*self.extras, *added), **changes})

    known: ClassVar[tuple[str, ...]]  # the paths of params that exist
    recomputed: ClassVar[frozenset[str]]  # the steps whose outputs are recomputed
    runs: ClassVar[tuple[Step, ...]]  # the steps as they run, by the names of `steps`
    programs: ClassVar[dict[Any, Any]]

    def needs_of_steps(self, needs: Needs, steps: tuple[Step, ...] | None = None) -> tuple[Needs, ...]:
        """The needs of each step, by which values need a gradient. `steps`: those that run, by default the config's."""
        live = live_inputs(needs.x, self.extras)
        params, found = needs.params, []
        if self.ties and isinstance(params, tuple):
            params = _with_tied("chain_fwd", needs, params, self)
        for step in steps or self.steps:
            wanted = step.needs(live, params)
            found.append(wanted)
            for name in ("", *step.given):
                # the y of a step that needs nothing needs no gradient, so the steps before the first that does keep nothing
                live[name] = wanted.any
        return tuple(found)


def _recomputed(steps: tuple[Step, ...], recompute: Any) -> frozenset[str]:
    names = {step.name for step in steps}
    require_type("ChainConfig", "recompute", recompute, bool, tuple)
    unknown = [] if isinstance(recompute, bool) else [name for name in recompute if name not in names]
    require(not unknown, "ChainConfig", "recompute", f"a bool, or names of steps ({', '.join(names)})", unknown)
    asked = names if recompute is True else set(recompute or ())
    # `recompute` gives y alone, so a step with further outputs is not recomputed
    return frozenset(step.name for step in steps if step.name in asked and step.op.recompute is not None and not step.given)


def _check_routing(steps: tuple[Step, ...], extras: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    """Check that every name is made once, before it is taken, and is taken at least once or given to the caller."""
    made, taken = dict.fromkeys(extras, "the caller"), set()
    require(len(set(extras)) == len(extras), "ChainConfig", "extras", "different names", extras)
    for step in steps:
        for name in step.names:
            require(name in made, "ChainConfig", f"takes of step {step.name!r}", f"names made before it ({list(made)})", repr(name))
            taken.add(name)
        for name in step.given:
            require(
                name not in made, "ChainConfig", f"gives of step {step.name!r}", "a new name", f"{name!r}, made by {made.get(name)}"
            )
            made[name] = f"step {step.name!r}"
    require(len(set(outputs)) == len(outputs), "ChainConfig", "outputs", "different names", outputs)
    given = [name for name in made if name not in extras]
    for name in outputs:
        require(name in given, "ChainConfig", "outputs", f"names that steps give ({given})", repr(name))
    unused = [name for name in made if name not in taken and name not in outputs]
    expected = "taken by a later step" + (", or be one of outputs" if outputs else "")
    require(not unused, "ChainConfig", "every extra", expected, f"unused {unused}")


ChainResiduals, ChainPending = nested("Chain", "a chain, by step name", __name__)


def _with_tied(where: str, needs: Needs, params: tuple[str, ...], cfg: ChainConfig) -> tuple[str, ...]:
    """The mask over the steps' own leaves, with each tied leaf whose source is in the mask. Raises for a tied path in the mask."""
    sources, found = dict(cfg.ties), []
    for path in params:
        below = [one for one in cfg.known if one == path or one.startswith(path + ".")]
        own = [one for one in below if one not in sources]
        # a path with tied and other leaves stands for the others: a tied leaf follows its source
        if below and not own:
            fail(where, "needs.params", "paths that are not tied", f"{path!r}, tied to {sources[below[0]]!r}")
        found += [path] if len(own) == len(below) else own
    return (*found, *(path for path, source in cfg.ties if needs.param(source)))


def resolved_ties(where: str, ties: Any, known: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Pairs of a path and its source, which is not tied itself. Raises `ValueError` for a tie that is not a pair of paths, and for
    a path tied twice, to itself (also through others), or to a leaf of another shape or dtype."""
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
        # ends at a circle, too, which the check below reports with its whole way
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
    # sorted, so that configs with the same ties are equal, however they were written
    return tuple(sorted(found))


@init_of(ChainConfig)
def chain_init(cfg: ChainConfig, *, key: Tensor | None = None, device: Any = None, dtype: Any = None) -> dict[str, Any]:
    """Params of every step by name, each from a key of its own; None at tied paths."""
    params = init_parts(cfg.steps, key, device, dtype)
    for path, _ in cfg.ties:
        params = put(params, path, None)
    return params


def _lower(
    cfg: ChainConfig, rows: Lowered, place: Place, needs: Needs, main: Value, given: Extras, recomputed_by: Call | None
) -> Parts:
    """Each step reads the output of the step before it; the backward is in reverse order."""
    scope = rows.scope(place, "chain", cfg, needs, (ChainResiduals, ChainPending))
    extras, back = rows.aliases(given)
    for step, wanted, before in zip(cfg.runs, cfg.needs_of_steps(needs, cfg.runs), (None, *cfg.runs), strict=False):
        if before is not None:
            source = scope.parts[before.name] if before.name in cfg.recomputed else None
            recomputed_by = source if isinstance(source, Call) and source.can_recompute else None
        main, gives, own = rows.step(step, scope, wanted, main, extras, recomputed_by)
        extras |= gives
        # the steps are reversed, but the rows of each keep the order that its own lowering gave them
        back = own + back
    return main, tuple([extras[name] for name in cfg.outputs]), back


@forward(ChainConfig, dict)
def chain_fwd(params: dict[str, Any], x: Any, cfg: ChainConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    """Run the steps in order. x: the x of the first step, in `WithExtras` if the config declares extras; y: the y of the last step,
    in `WithExtras` if it declares outputs.

    Raises `ValueError` for missing or extra params or extras, and whatever a step raises.
    """
    main, extras = split_x("chain_fwd", x, cfg)
    return programs.forward(chain, cfg, needs, main)(params, main, extras)


@dgrad_of(ChainResiduals)
def chain_dgrad(residuals: Any, dy: Any, cfg: ChainConfig) -> tuple[Any, Any]:
    """All dgrads, last step first. Returns dx and the pending weight gradients by step."""
    return programs.dgrad(chain, residuals, dy, cfg)


def chain_wgrad(pending: Any, cfg: ChainConfig, *, into: Any = None) -> dict[str, Any]:
    """All weight gradients, last step first; added to `into` if given."""
    return programs.wgrad(chain, ChainPending, pending, cfg, into)


def _products(pending: Any, cfg: ChainConfig, *, into: Any) -> list[Any]:
    return programs.wgrad(chain, ChainPending, pending, cfg, into, "products")  # type: ignore[no-any-return]


def chain_bwd(residuals: Any, dy: Any, cfg: ChainConfig, *, into: Any = None) -> tuple[dict[str, Any], Any]:
    """The whole backward, a step at a time: each step's weight gradient right after its dgrad, so that donated residuals
    are freed step by step. Returns `(dparams, dx)`."""
    return programs.bwd(chain, residuals, dy, cfg, into)


chain: TypedOp[dict[str, Any], Any, ChainConfig, Any, Any] = make_op(
    "chain",
    ChainConfig,
    init=chain_init,
    fwd=chain_fwd,
    dgrad=chain_dgrad,
    wgrad=chain_wgrad,
    bwd=chain_bwd,
    lower=_lower,
    products=_products,
    pausing=LOWERED,
    mixes="",
)
programs.lowers(ChainConfig, chain)
