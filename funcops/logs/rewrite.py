"""`with_logs`: the config of a model that returns named values, and the params, needs and results that go with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.compose.chain import ChainConfig
from funcops.engine.compose.parallel import ParallelConfig
from funcops.engine.compose.repeat import RepeatConfig
from funcops.engine.compose.skip import SkipConfig
from funcops.engine.contract.configs import require_config
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.walk import Inside, Part, matches, nested, rewrite
from funcops.engine.errors import (
    FLOATS,
    check,
    describe,
    fail,
    few,
    in_step,
    join_path,
    require,
    require_count,
    require_dtype,
    require_type,
)
from funcops.engine.trees import at, put
from funcops.library.ops.expert_steps import ExpertStepsConfig
from funcops.logs.logged import LEAF, OF_DX, WEIGHTS, LoggedConfig, Place, holding, logged, places, taken, zeros

T = TypeVar("T")
OF_FIRST = ("x_norm", "x_amax", *OF_DX, *WEIGHTS)  # the values of a step that has another y where it runs as one with a loss
ENTERED = (
    ChainConfig,
    SkipConfig,
    ParallelConfig,
    RepeatConfig,
    ExpertStepsConfig,
    LoggedConfig,
)  # the combinators whose parts may be logged


def with_logs(cfg: Any, logs: Mapping[str, tuple[str, ...]], *, runs: int = 1) -> Any:
    """Return the config of a model whose steps return named values out of their forward and backward.

    `logs`: paths of steps (the layers of a repeat are "*"), or globs over them, each with names: `x_norm`, `y_norm`, `dy_norm`,
    `dx_norm`, `dw_norm`, `x_amax`, `y_amax`, `dy_amax`, `dx_amax`, and the names that the op's author declared. A step may be an
    op, or a chain, skip or parallel as a whole. A path names that step alone, any other glob all that it matches, but for repeats
    and steps that run as one with their loss (`joined`), of which the first has the values of its x, dx and dw. `runs`: how many
    backwards into the same accumulators keep their values apart, such as the microbatches of a step.

    A logged step runs as one call of its own: rules of fusion do not join it with its neighbours, and a chain does not recompute
    its y. Its params have one more leaf, `logs`, which `logs_init` makes, and a report has its residuals at `body`; paths of
    params, and of a policy's rules, stay. With `dw_norm` a backward with `into` adds a step's gradient once it is complete.

    Raises `ValueError` for a glob that matches no step, a name that a step does not have, a repeat (log its body), another value
    of a step that runs as one with its loss, and a step inside another combinator, such as `interleave` or `zero3`, which divides
    the leaf.

    >>> import torch
    >>> from funcops import ActivationConfig, ChainConfig, LinearConfig, Step, activation, chain, linear, random, vjp
    >>> from funcops.logs import logs_init, split_logs, with_logs
    >>> model = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)), Step("act", activation, ActivationConfig("relu"))))
    >>> cfg = with_logs(model, {"up": ("dw_norm",), "act": ("dx_norm", "y_norm")})
    >>> params = logs_init(chain.init(model, key=random.key(0)), cfg)
    >>> y, pullback = vjp(chain, params, torch.ones(2, 4), cfg)
    >>> grads, found = split_logs(pullback(y)[0], cfg)
    >>> torch.equal(found["act"]["y_norm"], torch.linalg.vector_norm(y)), {path: list(named) for path, named in found.items()}
    (True, {'up': ['dw_norm', 'runs'], 'act': ['dx_norm', 'y_norm', 'runs']})
    """
    require_config("with_logs", cfg)
    require_type("with_logs", LEAF, logs, Mapping)
    require_count("with_logs", runs=runs)
    for glob, names in logs.items():
        right = isinstance(glob, str) and isinstance(names, tuple) and all(isinstance(name, str) for name in names) and names
        require(bool(right), "with_logs", LEAF, "globs over paths, each with a tuple of names", f"{glob!r}: {names!r}")
    known = _known(cfg)
    asked: dict[str, tuple[str, ...]] = {}
    joined, joining = _joined(cfg), {id(part.cfg) for part in _chains(cfg)}
    for glob, names in logs.items():
        wrong = [path for path, first in joined.items() if not (first and set(names) <= set(OF_FIRST))]
        several = [path for path, of in known.items() if matches(path, (glob,)) and of != RepeatConfig and path not in wrong]
        found = [glob] if glob in known else several
        if glob in wrong:
            wanted = f"of the first step that runs as one with a loss (joined), and among {', '.join(OF_FIRST)}"
            fail("with_logs", LEAF, wanted, f"{glob!r}: {names}")
        if not found:
            within = next((one for one, path in _closed(cfg) if matches(path, (glob,))), None)
            got = f"{glob!r}, inside {within}, which divides its params or its rows" if within else repr(glob)
            fail("with_logs", LEAF, f"globs over {few(known) or 'paths'}, of steps in chains", got)
        asked |= {path: tuple(dict.fromkeys((*asked.get(path, ()), *names))) for path in found}

    def visit(part: Part) -> Any:
        require(part.op is not logged, "with_logs", "cfg", "one without logs", f"one with logs of {part.path}")
        if id(part.cfg) in joining and any([join_path(part.path, step.name) in asked for step in _first(part.cfg)]):
            return rewrite(part.cfg.as_run(), visit, op=part.op, path=part.path)
        # popped, as the body of a skip has its path, and is a part of what the path names
        names = asked.pop(part.path, ())
        if names and repeats(part):
            fail("with_logs", LEAF, f"a step, as the body of this repeat, {join_path(part.path, '*')!r}", repr(part.path))

        def wrapped(op: Any, own: Any) -> tuple[Any, Any]:
            try:
                return logged, LoggedConfig(op, own, names, runs=runs)
            except (TypeError, ValueError) as error:
                in_step(error, part.path)
                raise

        if isinstance(part.cfg, ENTERED):
            return Inside(after=wrapped if names else None)
        return wrapped(part.op, part.cfg) if names else (part.op, part.cfg)

    return rewrite(cfg, visit)[1]


def _known(cfg: Any) -> dict[str, type]:
    """The paths of parts that may be logged, each with the class of the outermost config there."""
    found: dict[str, type] = {}
    for part, _ in nested(cfg, stop=lambda part: part.composite and not isinstance(part.cfg, ENTERED)):
        if part.path:
            found.setdefault(part.path, type(part.cfg))
    return found


def _closed(cfg: Any) -> Iterator[tuple[str, str]]:
    """The combinators whose parts may not be logged, each with the path of a part."""
    for part, around in nested(cfg):
        outer = next((one for one in around if not isinstance(one.cfg, ENTERED)), None)
        if outer is not None:
            yield f"{type(outer.cfg).__name__} at {outer.path!r}", part.path


def _first(cfg: ChainConfig) -> list[Any]:
    """The first steps of those that run as one."""
    return [step for step, runs in zip(cfg.steps, cfg.runs, strict=True) if step.op is not runs.op and runs.has_params]


def _chains(cfg: Any) -> Iterator[Part]:
    return (part for part, _ in nested(cfg) if isinstance(part.cfg, ChainConfig))


def _joined(cfg: Any) -> dict[str, bool]:
    """The paths of steps that run as one with others, and whether it is the first of them, whose x, dx and params are the one's."""
    found = {}
    for part in _chains(cfg):
        for step, runs in zip(part.cfg.steps, part.cfg.runs, strict=True):
            if step.op is not runs.op:
                found[join_path(part.path, step.name)] = runs.has_params
    return found


def repeats(part: Part) -> bool:
    """Whether the part is a repeat: its body may be logged, not itself."""
    return part.composite and part.cfg.times is not None


def logs_init(params: T, cfg: Any, *, dtype: torch.dtype | None = None) -> T:
    """Return the params with a leaf `logs` of zeros at each step with logs of a config from `with_logs`; all other leaves are the
    same objects, so it costs an allocation for each of these steps, and is called after a cast or `begin_step`.

    Params of some of the model's steps, as a rank of a pipeline has, get the leaves of these.
    `dtype`: of these leaves, by default float32, or float64 beside params of float64; the values come back in it. Raises
    `TypeError` for params of another config, `ValueError` for a config without logs.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.logs import logs_init, with_logs
    >>> model = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)),))
    >>> params = chain.init(model, key=random.key(0))
    >>> work = logs_init(params, with_logs(model, {"up": ("dw_norm",)}, runs=8))
    >>> work["up"].logs.shape, work["up"].weight is params["up"].weight
    (torch.Size([8, 2]), True)
    """
    require_dtype("logs_init", dtype)
    made: Any = params
    for place in _there("logs_init", "params", params, cfg):
        shape = (*place.stacked, *place.cfg.shape)
        for path in place.paths:
            own, _ = _own("logs_init", "params", made, path, place.cfg)
            made = put(made, path, holding(own, zeros(params, shape, dtype=dtype), place.cfg))
    return made  # type: ignore[no-any-return]


def logs_needs(cfg: Any, needs: Needs = Needs.ALL) -> Needs:
    """Return the needs that also ask for the logs of a config from `with_logs`: for frozen params, whose mask does not name them.
    Raises `TypeError` for needs of another type, `ValueError` for a config without logs.

    >>> from funcops import ChainConfig, LinearConfig, Needs, Step, linear
    >>> from funcops.logs import logs_needs, with_logs
    >>> model = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)),))
    >>> logs_needs(with_logs(model, {"up": ("dx_norm",)}), Needs(x=False, params=False))
    Needs(x=False, params=('up.logs',))
    """
    require_type("logs_needs", "needs", needs, Needs)
    own = [join_path(path, LEAF) for place in places_of("logs_needs", cfg) for path in place.paths]
    params: Any = needs.params
    return needs if params is True else Needs(x=needs.x, params=(*(params or ()), *own))


def split_logs(dparams: T, cfg: Any) -> tuple[T, dict[str, dict[str, Tensor]]]:
    """Split gradients, or accumulators that backwards were added to, into gradients like the model's own params, and its logs, by
    the path of the step and by name.

    A value is [*layers], or [*layers, runs] for a config with more than one run: the layers of each `repeat` around the step are
    stacked. A row in which several runs were summed, as autograd sums gradients, holds their mean; `"runs"` counts
    them. What did not run is NaN. Raises `TypeError` for gradients of another config, `ValueError` for a config without logs.

    >>> import torch
    >>> from funcops import LinearConfig, RepeatConfig, ChainConfig, Step, chain, linear, random, repeat, vjp
    >>> from funcops.logs import logs_init, split_logs, with_logs
    >>> model = ChainConfig(steps=(Step("layers", repeat, RepeatConfig(linear, LinearConfig(2, 2), times=3)),))
    >>> cfg = with_logs(model, {"layers.*": ("dx_norm",)})
    >>> params = logs_init(chain.init(model, key=random.key(0)), cfg)
    >>> y, pullback = vjp(chain, params, torch.ones(1, 2), cfg)
    >>> grads, logs = split_logs(pullback(y)[0], cfg)
    >>> logs["layers.*"]["dx_norm"].shape, type(grads["layers"][0]).__name__
    (torch.Size([3]), 'LinearParams')
    """
    grads: Any = dparams
    found: dict[str, dict[str, Tensor]] = {}
    for place in _there("split_logs", "dparams", dparams, cfg):
        tables = []
        for path in place.paths:
            own, table = _own("split_logs", "dparams", grads, path, place.cfg)
            if table is not None:
                check("split_logs", f"dparams.{path}.{LEAF}", table, (*place.stacked, *place.cfg.shape), FLOATS)
            grads = put(grads, path, own)
            tables.append(table)
        found[place.key] = _by_name(place, tables)
    return grads, found


def places_of(where: str, cfg: Any) -> list[Place]:
    require_config(where, cfg)
    found = list(places(cfg))
    require(bool(found), where, "cfg", "one from with_logs", "one without logs")
    return found


def _there(where: str, name: str, tree: Any, cfg: Any) -> list[Place]:
    """The places in a tree, which may be a rank's part of a pipeline's chain: a dict of some of its steps."""
    found = places_of(where, cfg)
    there = [place for place in found if type(tree) is not dict or place.key.partition(".")[0] in tree]
    if not there:
        fail(where, name, f"a tree with {few([place.key for place in found])}", describe(tree), TypeError)
    return there


def _own(where: str, name: str, tree: Any, path: str, cfg: LoggedConfig) -> tuple[Any, Any]:
    """The tree of a step without the leaf, and the leaf; None if the tree has none."""
    try:
        node = at(tree, path)
    except ValueError:
        return fail(where, name, f"a tree with {path!r}", describe(tree), TypeError)
    if type(node) is cfg.kind and (cfg.kind is not dict or LEAF not in node):
        return node, None
    return taken(where, join_path(name, path), node, cfg)


def _by_name(place: Place, tables: list[Any]) -> dict[str, Tensor]:
    """The values of a step by name, from the tables [*stacked, runs, 1 + n] of its layers."""
    like = next((t for t in tables if t is not None), None)
    if like is None:  # no gradient was needed, or none came
        like = torch.zeros(*place.stacked, *place.cfg.shape)
    whole = torch.stack([torch.zeros_like(like) if t is None else t for t in tables]).reshape(*place.layers, *like.shape)
    counts = whole[..., 0]
    found = {name: whole[..., i + 1] / counts for i, name in enumerate(place.cfg.order)} | {"runs": counts}
    by_name = {name: found[name] for name in (*place.cfg.logs, "runs")}
    return by_name if place.cfg.runs > 1 else {name: value[..., 0] for name, value in by_name.items()}
