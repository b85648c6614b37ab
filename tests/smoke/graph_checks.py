"""Checks of captured steps: names on kernels, hooks, branches, conditional updates and memory, in the registry of `checks.py`."""

from __future__ import annotations

from typing import Any

import torch
from checks import SmokeDevice, check, same

from funcops import (
    ActivationConfig,
    ChainConfig,
    LinearConfig,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    activation,
    chain,
    linear,
    named_steps,
    profile,
    random,
    repeat,
    rms_norm,
    skip,
)
from funcops.adapters.graphs import Hooks, graph_data, graph_memory, graphed, run_beside, schedule_memory, wgrads_beside, when
from funcops.engine.trees import tensors, tree_map_tensors
from funcops.schedule import run, zb_v

SEGMENT = 20 << 20  # bytes that the allocator rounds a pool's memory up to


def layers(on: SmokeDevice) -> tuple[Any, Any, Any, Any]:
    """A step of residual MLPs, its config, params and x."""
    dim = on.size(1024, 32)
    steps = (
        Step("norm", rms_norm, RMSNormConfig(dim)),
        Step("up", linear, LinearConfig(dim, 4 * dim)),
        Step("act", activation, ActivationConfig("gelu")),
        Step("down", linear, LinearConfig(4 * dim, dim)),
    )
    cfg = RepeatConfig(skip, SkipConfig(chain, ChainConfig(steps=steps)), times=on.size(6, 3))
    params = repeat.init(cfg, key=random.key(0), device=on.device, dtype=torch.bfloat16 if on.real else torch.float32)
    x = on.randn(on.size(4, 1), on.size(512, 8), dim, dtype=tensors(params)[0].dtype)

    def step(params: Any, x: Any, cfg: Any = cfg) -> Any:
        y, residuals = repeat.fwd(params, x, cfg)
        return y, *repeat.bwd(residuals, y, cfg)

    return step, cfg, params, x


def milliseconds(call: Any, times: int = 20) -> float:
    """A call's mean time on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


@check
def kernels_have_the_names_of_their_steps(on: SmokeDevice) -> Any:
    """An eager step by the time of their launch, a graph by the annotations of its nodes."""
    step, _, params, x = layers(on)
    eager = profile(step, params, x)
    with named_steps():
        captured = graphed(step, params, x, keep_graph=True)
    graph = profile(captured, params, x, count=False)
    measured = {"eager": eager.named, "graph": graph.named, "ms": 1e3 * eager.seconds, "graph ms": 1e3 * graph.seconds}
    assert eager.named >= 0.9 and eager.device == graph.device == ("cuda" if on.real else "cpu"), measured
    try:
        from torch.cuda.graph_annotations import is_available
    except ImportError:
        return measured | {"not asked of graphs": f"torch {torch.__version__}"}
    if on.real and not is_available():
        return measured | {"not asked of graphs": "the driver"}
    assert graph.named >= 0.9, measured
    nodes = graph_data(captured).nodes
    assert sum(bool(node.path) for node in nodes if node.kind in ("kernel", "operator")) >= 0.9 * len(nodes)
    return measured | {"nodes": len(nodes)}


@check
def hooks_of_a_graph_run_in_order(on: SmokeDevice) -> Any:
    seen: list[str] = []
    events = ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end", "destroy")
    hooks = Hooks(**{name: lambda *graph, name=name: seen.append(name) for name in events})
    for keep in (False, True):
        seen.clear()
        step = graphed(lambda x: 2 * x, on.randn(64), hooks=hooks, keep_graph=keep)
        step(on.randn(64))
        step(on.randn(64))
        step.reset()
        assert seen == [*events[:3], *events[3:5] * 2, "destroy"], seen
    return {}


@check
def branches_of_a_graph_have_the_bits_of_a_run_in_turn(on: SmokeDevice) -> Any:
    """Weight gradients beside the dgrad of the next layer; the ratio of the times is measured, not asserted."""
    step, cfg, params, x = layers(on)
    beside = wgrads_beside(cfg)
    turn = graphed(step, params, x)
    at_once = graphed(lambda params, x: step(params, x, beside), params, x)
    want = turn(params, x)
    for _ in range(3):
        same(at_once(params, x), want)
    if not on.real:
        return {}
    times = {name: milliseconds(lambda graph=graph: graph(params, x)) for name, graph in (("in turn", turn), ("at once", at_once))}
    return times | {"ratio": times["at once"] / times["in turn"]}


@check
def a_zero_bubble_step_of_four_stages_is_one_graph(on: SmokeDevice) -> Any:
    """ZB-V with eight microbatches, a branch for each rank: the bits of a run in turn, the bytes that were known before, and both
    times, which are measured, not asserted."""
    _, layer, params, x = layers(on)
    stages = {f"s{i}": params for i in range(4)}
    cfg = ChainConfig(steps=tuple(Step(name, repeat, layer) for name in stages))
    made, xs = zb_v(2, 8), torch.stack([x + i for i in range(8)])

    def step(how: Any) -> Any:
        return lambda xs: (lambda ran: (torch.stack(ran.ys), ran.dparams))(how(made, stages, list(xs), cfg, list(xs)))

    ahead = schedule_memory(made, stages, x, cfg)
    turn, at_once = graphed(step(run), xs), graphed(step(run_beside), xs)
    want = turn(xs)
    for _ in range(3):
        same(at_once(xs), want)
    found = {"slots": ahead.slots, "peaks": ahead.peak_bytes, "pool": at_once.report().pool_bytes}
    if not on.real:
        assert graph_data(at_once).width > 1 == graph_data(turn).width
        return found
    assert sum(ahead.peak_bytes) <= found["pool"], found
    times = {name: milliseconds(lambda graph=graph: graph(xs)) for name, graph in (("in turn", turn), ("at once", at_once))}
    return found | times | {"ratio": times["at once"] / times["in turn"]}


@check
def an_update_is_left_out_by_a_value_on_the_device(on: SmokeDevice) -> Any:
    params = {"w": on.randn(33, 65), "b": on.randn(65, seed=1)}
    first = tree_map_tensors(torch.clone, params)

    def step(flag: Any, params: Any) -> None:
        when(flag, lambda tree: [t.add_(1) for t in tensors(tree)], params)

    flags = [torch.tensor(on_or_off, device=on.device) for on_or_off in (True, False)]
    captured = graphed(step, flags[0], params, inputs={"1": "donated"})
    same(params, first)
    for flag in (False, True, False, True):
        captured(flags[not flag], params)
    same(params, tree_map_tensors(lambda t: t + 1 + 1, first))
    return {}


@check
def the_memory_of_a_graph_is_known_before_its_capture(on: SmokeDevice) -> Any:
    """The pool holds what the dry run said, up to the segments of the allocator; a `MemPool` is taken where there is a device."""
    step, _, params, x = layers(on)
    ahead = graph_memory(step, params, x)
    pool = torch.cuda.MemPool() if on.real else None
    found = graphed(step, params, x, pool=pool).report()
    if on.real:
        assert ahead.pool <= found.pool_bytes + SEGMENT and found.pool_bytes <= 1.2 * ahead.pool + 4 * SEGMENT, (ahead, found)
    assert abs(found.output_bytes - ahead.outputs) <= 512 * len(tensors((params, x))) + 512
    return {"ahead": ahead.pool, "pool": found.pool_bytes, "workspace": found.workspace_bytes}
