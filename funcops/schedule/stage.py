"""A stage at work: one step of a staged chain, its residuals or pendings for each microbatch in flight, and its gradient so far.

A staged op is a chain whose steps are the stages. The chain's main value goes from stage to stage; extras come only from the
caller, and outputs go only to the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import notes, scopes
from funcops.engine.compose.chain import ChainConfig
from funcops.engine.compose.step import split_x
from funcops.engine.compose.vjp import check_losses, sum_gradient
from funcops.engine.contract.accumulators import check_accumulator, check_apart, check_width
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import fail, require, require_type
from funcops.engine.program.accumulator_checks import check_into_tree
from funcops.engine.program.run import taken_apart, tied
from funcops.engine.program.values import fold_keys
from funcops.engine.residuals.donate import donate
from funcops.engine.trees import WithExtras, constant_paths, paths, put, stands_for_one, tree_map_with_path
from funcops.library.formats import zero_gradient
from funcops.library.formats.qtensor import has_keys
from funcops.memory.ledger import Ledger

Done = Callable[[int, Any], None]
HALVES = {"forward": "fwd", "dgrad": "dgrad", "wgrad": "wgrad", "backward": "bwd"}


class Stage:
    """Stage `index` of `cfg`. Residuals and pendings wait in `ledger`; the gradients of all microbatches are summed in `dparams`:
    the given accumulators, or zeros like params, made for the first gradient. `done(index, dparams)` is called after the last of
    `count`. With several microbatches each has its number folded into the keys of the params: no two round alike."""

    def __init__(
        self,
        cfg: ChainConfig,
        index: int,
        params: Any,
        ledger: Ledger,
        needs: Needs,
        into: Any = None,
        *,
        count: int,
        done: Done | None = None,
    ) -> None:
        self.step, self.index, self.params, self.ledger = cfg.steps[index], index, params, ledger
        self.needs = cfg.needs_of_steps(needs)[index]
        self.dparams, self.left, self.done = into, count, done
        self.keyed = count > 1 and has_keys(params)
        if into is not None:
            check_into_tree(f"stage {index}", into, self.step.op, self.step.cfg, None)

    def forward(self, m: int, main: Any, extras: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the main value and the outputs of microbatch m. Its residuals wait in the ledger."""
        with self._named("forward", m):
            params = fold_keys(self.params, m) if self.keyed else self.params
            y, residuals = self.step.op.fwd(params, self.step.x(main, extras), self.step.cfg, needs=self.needs)
            self.ledger.keep(self._path("residuals", m), residuals)
            _tell("fwd", y=y)
            return self.step.split_y(y)

    def dgrad(self, m: int, dy: Any, sums: dict[str, Any]) -> Any:
        """Return dx of microbatch m; add the gradients of extras to `sums`. Its pending replaces its residuals in the ledger."""
        with self._named("dgrad", m):
            _tell("dgrad", dy=dy)
            residuals = donate(self.ledger.take(self._path("residuals", m)))
            dx, pending = (None, None) if residuals is None else self.step.op.dgrad(residuals, dy, self.step.cfg)
            self.ledger.keep(self._path("pending", m), pending)
            _tell("dgrad", dx=dx)
            return self.step.split(dx, sums)

    def wgrad(self, m: int) -> None:
        """Add the weight gradient of microbatch m to `dparams`."""
        with self._named("wgrad", m):
            pending = donate(self.ledger.take(self._path("pending", m)))
            self.step.op.wgrad(pending, self.step.cfg, into=self._sums())
            _tell("wgrad", sums=self._sums())
        self._count()

    def backward(self, m: int, dy: Any, sums: dict[str, Any]) -> Any:
        """Run both halves of the backward at once, by the op's `bwd`; return dx."""
        with self._named("backward", m):
            residuals = donate(self.ledger.take(self._path("residuals", m)))
            _tell("dgrad", dy=dy)
            _, dx = (None, None) if residuals is None else self.step.op.bwd(residuals, dy, self.step.cfg, into=self._sums())
            _tell("dgrad", dx=dx)
            _tell("wgrad", sums=self._sums())
            dx = self.step.split(dx, sums)
        self._count()
        return dx

    def _count(self) -> None:
        self.left -= 1
        if self.done is not None and not self.left:
            self.done(self.index, self._sums())

    def _sums(self) -> Any:
        if self.dparams is None:
            self.dparams = sums_for(self.params, self.needs)
        return self.dparams

    def _path(self, kind: str, m: int) -> str:
        return f"{kind} of stage {self.index} ({self.step.name}), microbatch {m}"

    @contextlib.contextmanager
    def _named(self, what: str, m: int) -> Iterator[None]:
        """A scope with the step's name. Add a note to an exception that says where it came from."""
        try:
            with scopes.named_scope(self.step.name, HALVES[what]):
                yield
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in the {what} of stage {self.index} ({self.step.name}), microbatch {m}")
            raise


def _tell(half: str, **values: Any) -> None:
    """Tell a recording what the step of a stage was given, or computed."""
    if scopes.on == scopes.NOTED:
        notes.tell([(None, half, name, value) for name, value in values.items()])


def check_staged(where: str, cfg: Any, stages: int) -> None:
    """Raise unless `cfg` is a chain of that many stages that pass on only the main value: everything else that they give are
    outputs of the chain that no stage takes."""
    require_type(where, "cfg", cfg, ChainConfig)
    if len(cfg.steps) != stages:
        fail(where, "cfg", f"a chain of {stages} steps, one a stage of the schedule", f"{len(cfg.steps)} steps")
    for step in cfg.steps:
        taken = tuple(name for name in step.given if any(name in other.names for other in cfg.steps))
        if taken:
            fail(where, f"stage {step.name!r}", "without gives that another stage takes: extras come from the caller alone", taken)


def check_ties(where: str, cfg: ChainConfig, rank_of: Mapping[int, int]) -> None:
    """Raise for a tie between stages of two ranks: each would need the other's gradient."""
    index = {step.name: i for i, step in enumerate(cfg.steps)}
    for tie in cfg.ties:
        path, source = (rank_of[index[one.partition(".")[0]]] for one in tie)
        if path != source:
            expected = "between stages of one rank (as the first and the last of zb_v and dualpipe_v are)"
            fail(where, "cfg.ties", expected, f"{tie[0]} on rank {path} and {tie[1]} on rank {source}")


def check_sums(where: str, params: Any, into: Any, cfg: ChainConfig, needs: Needs) -> None:
    """Raise unless each gradient of these stages has an accumulator with its param's shape and device, its dtype or a wider one,
    and memory of its own. A stage checks the rest: it also knows accumulators that params lack."""
    given = {}
    for index, (step, own) in enumerate(zip(cfg.steps, cfg.needs_of_steps(needs), strict=True)):
        have, params_here = paths(into.get(step.name)), params.get(step.name)
        constant = constant_paths(params_here)
        for path, param in paths(params_here, is_leaf=stands_for_one).items():
            known = hasattr(param, "shape") and path in have  # a weight with delayed scales has no accumulator of its own path
            if not known or path in constant or not (own.param(path) or have[path] is not None):
                continue
            check_accumulator(f"stage {index}", path, have[path], tuple(param.shape), param.device)
            if own.param(path):
                check_width(f"stage {index}", path, have[path], param.dtype)
                given[f"{step.name}.{path}"] = have[path]
    check_apart(where, given)


def share_ties(where: str, params: Any, into: Any, cfg: ChainConfig, needs: Needs) -> tuple[Any, Any]:
    """Return params, and accumulators, in which tied paths hold their sources' leaves, so that each gradient is added to the
    source; missing accumulators are made if a gradient is needed. Given accumulators are checked first."""
    if into is not None:
        check_sums(where, params, into, cfg, needs)
    here = [tie for tie in cfg.ties if tie[0].partition(".")[0] in params]
    if not here:
        return params, into
    sums = into if into is not None else sums_for(params, needs)
    return tied(where, params, here), tied(where, sums, here, "into")


def told_of_ties(done: Done | None, cfg: ChainConfig) -> Done | None:
    """`done`, which is told of a stage once its sums are whole: the stages that are tied to its leaves add to them, too. Their own
    trees have None there, as the results have."""
    if done is None or not cfg.ties:
        return done
    index = {step.name: i for i, step in enumerate(cfg.steps)}
    pairs = [(index[path.partition(".")[0]], index[source.partition(".")[0]]) for path, source in cfg.ties]
    ended: set[int] = set()
    waiting: dict[int, Any] = {}

    def end(stage: int, dparams: Any) -> None:
        ended.add(stage)
        waiting[stage] = {cfg.steps[stage].name: dparams}
        for one in [one for one in waiting if all(adds in ended for adds, to in pairs if to == one)]:
            own = waiting.pop(one)
            for path, (adds, _) in zip([path for path, _ in cfg.ties], pairs, strict=True):
                own = put(own, path, None) if adds == one else own
            done(one, own[cfg.steps[one].name])

    return end


def sums_for(params: Any, needs: Needs) -> Any:
    """Make zero accumulators like params; None for a param that needs no gradient."""

    def zeros(path: str, parameter: Any) -> Any:
        has_gradient = stands_for_one(parameter) or (isinstance(parameter, Tensor) and parameter.is_floating_point())
        return zero_gradient(parameter) if has_gradient and needs.param(path) else None

    return tree_map_with_path(zeros, params, is_leaf=stands_for_one)


def split_inputs(where: str, xs: Any, microbatches: int, cfg: ChainConfig) -> tuple[list[Any], list[dict[str, Any]]]:
    """The main values and the extras of all microbatches."""
    require_type(where, "xs", xs, list, tuple)
    if len(xs) != microbatches:
        fail(where, "xs", f"a list of {microbatches}, one a microbatch of the schedule", f"{len(xs)}")
    mains, extras = zip(*[split_x(where, x, cfg) for x in xs], strict=True)
    return list(mains), list(extras)


class Ends:
    """The results of a staged chain for each microbatch, which are the last stage's main value and all stages' outputs, and their
    gradients: `dys`, or the gradients of the mean over the microbatches of a loss, the main value plus the sums of the outputs
    named in `losses`."""

    def __init__(self, where: str, cfg: ChainConfig, count: int, dys: Any, losses: Any) -> None:
        check_losses(where, losses, cfg.outputs)
        require(dys is None or not losses, where, "losses", "() where dys are given, which hold the gradients of outputs", losses)
        self.where, self.names, self.count, self.dys, self.losses = where, cfg.outputs, count, None, losses
        self.mains: list[Any] = [None] * count
        self.outputs: list[dict[str, Any]] = [dict.fromkeys(cfg.outputs) for _ in range(count)]
        self.gradients: list[dict[str, Any]] = [{} for _ in range(count)]  # of outputs
        if dys is not None:
            parts = [taken_apart(f"{where}, microbatch {m}", dy, cfg.outputs) if cfg.outputs else (dy,) for m, dy in enumerate(dys)]
            self.dys = [main for main, *_ in parts]
            self.gradients = [dict(zip(cfg.outputs, of_outputs, strict=True)) for _, *of_outputs in parts]

    def note(self, m: int, outputs: dict[str, Any]) -> None:
        """Record the outputs of a stage."""
        self.outputs[m].update(outputs)
        for name in outputs:
            if name in self.losses:
                self.gradients[m][name] = sum_gradient(self.where, name, outputs[name], 1.0 / self.count)

    def gradient(self, m: int, y: Any) -> Any:
        """Record the last stage's main value, and return its gradient."""
        self.mains[m] = y
        return loss_gradient(self.where, y, self.count) if self.dys is None else self.dys[m]

    def ys(self) -> list[Any]:
        pairs = zip(self.mains, self.outputs, strict=True)
        return [WithExtras(main, outputs) for main, outputs in pairs] if self.names else self.mains


def loss_gradient(where: str, y: Any, microbatches: int) -> Tensor:
    """The gradient of a scalar loss, averaged over the microbatches."""
    if not isinstance(y, Tensor) or y.dim() or not y.is_floating_point():
        got = f"{list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        fail(where, "dys", "given if y is not a scalar loss", f"None for a y of {got}")
    return torch.full_like(y, 1.0 / microbatches)
