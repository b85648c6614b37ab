"""Stages whose halves are compiled, in a schedule on one process and on the processes of a group."""

import pickle

import pytest
import torch
import torch.distributed as dist
from staged import decoder, microbatches, stages_of_modules

from funcops import ChainConfig, LinearConfig, Step, chain, linear, random, stages_from_module
from funcops.adapters.pipelining import Pipeline
from funcops.engine.trees import tensors
from funcops.graphs import graphed, run_beside
from funcops.schedule import Schedule, compile_stages, delay_w, gpipe, run, zb_h1, zb_v
from funcops.testing.tolerances import assert_close

IN_TURN = Schedule.from_csv("0F0,0F1,1F0,1I0,1F1,1B1,0I0,1W0,0B1,0W0")


class Counting:
    """A backend that runs a graph as it is, and counts the graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph


def widening(stages):
    """Linear stages, no two alike."""
    sizes = range(2, stages + 3)
    steps = [Step(f"s{i}", linear, LinearConfig(a, b)) for i, (a, b) in enumerate(zip(sizes, sizes[1:], strict=False))]
    return ChainConfig(steps=tuple(steps))


def check(made, cfg, counting, **given):
    params = chain.init(cfg, key=random.key(0), dtype=torch.float64)
    xs = list(torch.randn(made.microbatches, 3, 2, dtype=torch.float64))
    dys = list(torch.randn(made.microbatches, 3, len(cfg.steps) + 2, dtype=torch.float64))
    own = compile_stages(cfg, backend=counting)
    for _ in range(2):
        got, want = (run(made, params, xs, one, dys) for one in (own, cfg))
        assert_close(got[:3], want[:3], dtype=torch.float64)
        assert got.peak_bytes == want.peak_bytes


@pytest.mark.slow
def test_every_half_of_a_stage_is_one_graph():
    """And none is compiled again: neither for the next microbatch nor for the next step."""
    counting = Counting()
    check(zb_h1(2, 3), widening(2), counting)
    assert counting.graphs == 2 * len(("fwd", "dgrad", "wgrad"))


@pytest.mark.slow
def test_more_stages_than_torch_compiles_one_function_for():
    counting = Counting()
    check(gpipe(10, 2), widening(10), counting)
    assert counting.graphs == 10 * len(("fwd", "bwd"))


@pytest.mark.slow
@pytest.mark.parametrize("made", [zb_v(2, 3), delay_w(gpipe(4, 2), 99)], ids=lambda made: made.name)
def test_a_decoder_of_compiled_stages(made):
    cfg = decoder(4, keyed=True)
    params, xs = chain.init(cfg, key=random.key(0), dtype=torch.float64), microbatches(made.microbatches, cfg)
    got, want = (run(made, params, xs, one) for one in (compile_stages(cfg, backend="aot_eager"), cfg))
    assert_close(got[:3], want[:3], dtype=torch.float64)


@pytest.mark.slow
def test_stages_cut_from_a_module():
    xs = list(torch.randn(3, 3, 8, dtype=torch.float64))
    cfg, params = stages_from_module(stages_of_modules(4), xs[0], ["1", "2", "3"])
    got, want = (run(zb_v(2, 3), params, xs, one, xs) for one in (compile_stages(cfg, backend="eager"), cfg))
    assert_close(got[:3], want[:3], dtype=torch.float64)


def test_under_a_recording_stages_run_as_they_are():
    """torch compiles nothing under a mode; shapes, branches and recordings have one."""
    made, cfg, counting = zb_h1(2, 2), widening(2), Counting()
    params, xs, dys = chain.init(cfg, key=random.key(0)), torch.randn(2, 3, 2), torch.randn(2, 3, 4)
    own = compile_stages(cfg, backend=counting)
    step = graphed(lambda xs, dys: run_beside(made, params, list(xs), own, list(dys))[:3], xs, dys, warmup=0)
    want = run(made, params, list(xs), cfg, list(dys))[:3]
    assert counting.graphs == 0 and all(torch.equal(a, b) for a, b in zip(tensors(step(xs, dys)), tensors(want), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("as_graphs", [False, True])
def test_a_pipeline_of_compiled_stages(as_graphs, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        counting = Counting()
        cfg = widening(2)
        params = chain.init(cfg, key=random.key(0), dtype=torch.float64)
        xs, dys = (list(torch.randn(2, 3, n, dtype=torch.float64)) for n in (2, 4))
        want = Pipeline(IN_TURN, cfg, xs[0], dtype=torch.float64).step(params, xs, dys)
        pipeline = Pipeline(IN_TURN, compile_stages(cfg, backend=counting), xs[0], dtype=torch.float64, graphed=as_graphs)
        for _ in range(2):
            assert_close(pipeline.step(params, xs, dys)[:3], want[:3], dtype=torch.float64)
        assert counting.graphs == 2 * len(("fwd", "dgrad", "wgrad", "bwd"))
    finally:
        dist.destroy_process_group()


def test_what_is_not_stages_or_options_raises():
    with pytest.raises(TypeError, match="compile_stages: fullgraph must be left out, got one"):
        compile_stages(widening(2), fullgraph=False)
    with pytest.raises(TypeError, match="compile_stages: cfg must be ChainConfig"):
        compile_stages(LinearConfig(2, 2))
    cfg = compile_stages(widening(2), backend="eager")
    assert pickle.loads(pickle.dumps(cfg)) == cfg and cfg.steps[0].op.name == "compiled(linear)"
