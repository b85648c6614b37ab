"""`measure`: the times and bytes of an op's actions, or of every stage's, on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.step import check_body, split_x
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.contract.op import Op
from funcops.engine.errors import fail, require_count
from funcops.engine.program.run import check_names, tied
from funcops.engine.residuals.report import storages
from funcops.engine.trees import nbytes, tensors, tree_map_tensors
from funcops.schedule.simulate import Costs
from funcops.schedule.stage import check_staged


def measure(op: Op, params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL, repeats: int = 5) -> Costs:
    """Measure the costs of one microbatch x: medians over `repeats`, in seconds, of `fwd`, `dgrad` and `wgrad` (after one run that
    is not counted); bytes of residuals, of the pending and of y, net of params. dy is ones. For `simulate` and `delay_w`.

    A saved x counts: within a model it is the y of the layer before, which nothing else holds. `run`, `measure_stages` and a
    `Ledger(params, x)` leave out what the caller passed, as the caller holds it anyway. Raises `ValueError` or `TypeError` for
    an op or a config that does not fit the other, fewer than one repeat, and an x without values.

    >>> import torch
    >>> from funcops import LinearConfig, linear, random
    >>> from funcops.schedule import measure
    >>> cfg = LinearConfig(64, 64, bias=False)
    >>> costs = measure(linear, linear.init(cfg, key=random.key(0)), torch.ones(8, 64), cfg, repeats=1)
    >>> costs.residual_bytes, costs.output_bytes
    (2048, 2048)
    """
    return _measured(op, params, x, cfg, needs, repeats, 1, params)


def _measured(op: Op, params: Any, x: Any, cfg: Any, needs: Needs, repeats: int, block: int, *besides: Any) -> Costs:
    """Measure as `measure` does; storages of the trees `besides` are not counted, and those that are in multiples of `block`."""
    check_body("measure", op, cfg)
    require_count("measure", repeats=repeats)
    check_needs("measure", needs, params, x)
    if any(t.is_meta for t in tensors(x)):
        fail("measure", "x", "tensors with values", "one on the meta device")
    synchronize = _synchronizer(x)
    timed: dict[str, list[float]] = {"fwd": [], "dgrad": [], "wgrad": []}

    def clocked(what: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        synchronize()
        start = time.perf_counter()
        result = fn(*args, **kwargs)
        synchronize()
        timed[what].append(time.perf_counter() - start)
        return result

    for _ in range(repeats + 1):
        y, residuals = clocked("fwd", op.fwd, params, x, cfg, needs=needs)
        dy = tree_map_tensors(lambda t: torch.ones_like(t) if t.is_floating_point() else None, y)
        pending = None
        if residuals is not None:
            _, pending = clocked("dgrad", op.dgrad, residuals, dy, cfg)
            clocked("wgrad", op.wgrad, pending, cfg)
    forward, dgrad, wgrad = (statistics.median(times[1:]) if times else 0.0 for times in timed.values())
    kept, left = _net(residuals, block, besides), _net(pending, block, besides)
    return Costs(forward, dgrad, wgrad, residual_bytes=kept, pending_bytes=left, output_bytes=nbytes(y))


def measure_stages(
    params: dict[str, Any], x: Any, cfg: ChainConfig, *, needs: Needs = Needs.ALL, repeats: int = 5, block: int = 1
) -> tuple[Costs, ...]:
    """Measure every stage of a staged chain, each on the y of the stage before; for `simulate(schedule, costs)`. Bytes are counted
    as in `run`: net of params and of the chain's own x; a y that the next stage saves counts there. `block`: each tensor that is
    kept counts as a multiple of so many bytes, as an allocator's (512 on a device).
    Raises `ValueError` or `TypeError` as `measure` does, and for a chain whose steps are not stages.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.schedule import measure_stages, one_f_one_b, simulate
    >>> cfg = ChainConfig(steps=(Step("bottom", linear, LinearConfig(8, 8)), Step("top", linear, LinearConfig(8, 8))))
    >>> costs = measure_stages(chain.init(cfg, key=random.key(0)), torch.ones(4, 8), cfg, repeats=1)
    >>> [cost.residual_bytes for cost in costs], [cost.pending_bytes for cost in costs]
    ([0, 128], [128, 256])
    >>> simulate(one_f_one_b(2, 4), costs).peak_bytes
    (0.0, 128.0)
    """
    check_body("measure_stages", chain, cfg)
    check_staged("measure_stages", cfg, len(cfg.steps))
    check_names("measure_stages", "params", params, cfg)
    check_needs("measure_stages", needs, params, x)
    require_count("measure_stages", repeats=repeats, block=block)
    params, (main, extras) = tied("measure_stages", params, cfg.ties), split_x("measure_stages", x, cfg)
    found = []
    for step, wanted in zip(cfg.steps, cfg.needs_of_steps(needs), strict=True):
        given = step.x(main, extras)
        found.append(_measured(step.op, params[step.name], given, step.cfg, wanted, repeats, block, params, x))
        main, _ = step.split_y(step.op.fwd(params[step.name], given, step.cfg, needs=Needs.NONE)[0])
    return tuple(found)


def _net(kept: Any, block: int, besides: Any) -> int:
    held = storages(besides)
    return sum(-(-size // block) * block for key, size in storages(kept).items() if key not in held)


def _synchronizer(x: Any) -> Callable[[], None]:
    device = next((t.device for t in tensors(x) if isinstance(t, Tensor)), torch.device("cpu"))
    return (lambda: None) if device.type == "cpu" else lambda: torch.accelerator.synchronize(device)
