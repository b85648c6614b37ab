"""`compile_stages`: each half of a stage is a function of torch.compile, whole, so that a schedule's F, I and W run compiled."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from funcops.engine.backend.declare import watched
from funcops.engine.compose.chain import ChainConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, wrap
from funcops.engine.errors import require_type
from funcops.schedule.stage import check_staged

Options = tuple[tuple[str, Any], ...]


def compile_stages(cfg: ChainConfig, **options: Any) -> ChainConfig:
    """The chain whose every step, a stage, runs by torch.compile: its fwd, dgrad, wgrad and bwd are each compiled by themselves,
    without a graph break (`fullgraph=True`), and hand residuals and pendings on to each other. Params, residuals and gradients are
    the same, as far as rounding; for `run`, `run_beside` and `Pipeline`.

    `options`: as for `torch.compile`, such as `backend`, `mode` or `dynamic`; they must be hashable. torch compiles nothing under a
    mode of its dispatcher, such as a recording without CUDA, a branch of a graph, or shapes without values: there the stages run as
    they are. Stages with one op and one config are compiled once. Raises `ValueError` or `TypeError` for a chain whose steps are
    not stages, and for `fullgraph`; a stage's first run raises what torch.compile does.

    >>> from funcops import ChainConfig, LinearConfig, Step, linear
    >>> from funcops.schedule import compile_stages
    >>> cfg = ChainConfig(steps=tuple(Step(name, linear, LinearConfig(4, 4)) for name in "ab"))
    >>> [step.op.name for step in compile_stages(cfg, mode="max-autotune-no-cudagraphs").steps]
    ['compiled(linear)', 'compiled(linear)']
    """
    require_type("compile_stages", "cfg", cfg, ChainConfig)
    check_staged("compile_stages", cfg, len(cfg.steps))
    if "fullgraph" in options:
        raise TypeError("compile_stages: fullgraph must be left out, got one: a half of a stage is always one graph")
    return cfg.with_parts(lambda name, op, inner: (compiled(op, tuple(sorted(options.items()))), inner))


@functools.lru_cache(maxsize=256)
def compiled(op: Op, options: Options) -> Op:
    """The op whose functions are compiled."""
    plain: Any = op

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        return _half(plain.fwd, cfg, options, needs)(params, x)

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> tuple[Any, Any]:
        return _half(plain.dgrad, cfg, options)(residuals, dy)

    def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> Any:
        return _half(plain.wgrad, cfg, options)(pending, into=into)

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[Any, Any]:
        return _half(plain.bwd, cfg, options)(residuals, dy, into=into)

    name = f"compiled({op.name})"
    return wrap(op, (compiled, (op, options)), fwd=fwd, dgrad=dgrad, wgrad=wgrad, bwd=bwd, name=name)


@functools.lru_cache(maxsize=1024)
def _half(fn: Any, cfg: Any, options: Options, needs: Needs | None = None) -> Callable[..., Any]:
    """A function of an op, compiled for one config. It has code of its own: torch counts recompilations by code, and would give up
    on the ninth stage. `needs`: of a forward."""
    fixed = {} if needs is None else {"needs": needs}

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, cfg, **fixed, **kwargs)

    own = types.FunctionType(call.__code__.replace(co_name=fn.__name__), globals(), fn.__name__, None, call.__closure__)
    traced = torch.compile(own, fullgraph=True, **dict(options))
    return lambda *args, **kwargs: (call if watched() else traced)(*args, **kwargs)
