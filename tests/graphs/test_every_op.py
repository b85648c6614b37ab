"""Every operator and combinator, in its first cases and its cases with outputs: a check of capture finds no fault, and a graph
gives the same bits, in any order of two slots."""

import importlib.util
from pathlib import Path

import pytest
import torch

from funcops import (
    POLICIES,
    ActivationConfig,
    ChainConfig,
    LinearConfig,
    RMSNormConfig,
    RopeConfig,
    Step,
    WithExtras,
    activation,
    chain,
    linear,
    random,
    rms_norm,
    rope_table,
    with_policy,
)
from funcops.adapters.graphs import check_capturable, graphed_op
from funcops.engine.backend import backend
from funcops.engine.trees import paths, tree_map, tree_map_tensors
from funcops.library.formats import dense
from funcops.models.blocks import Sizes, decoder_config

FILES = sorted((Path(__file__).parents[1] / "cases").glob("*.py"))


def _first(path):
    spec = importlib.util.spec_from_file_location(f"graph_cases_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [*module.CASES[:2], *[case for case in module.CASES[2:] if "outputs" in str(case)]]


CASES = [case for path in FILES for case in _first(path)]


def gradient(y, seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(t):
        return torch.randn(t.shape, generator=generator).to(t.dtype) if t.is_floating_point() else None

    return tree_map_tensors(draw, dense(y))


def same(a, b):
    a, b = paths(a), paths(b)
    assert list(a) == list(b)
    for path, t in a.items():
        assert torch.equal(t, b[path]) if isinstance(t, torch.Tensor) else t == b[path], path


@pytest.mark.turns("case", every=3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_to_complain_of(case):
    params, x = case.make(torch.float32)
    y, _ = case.op.fwd(params, x, case.cfg)

    def step(params, x, dy):
        y, residuals = case.op.fwd(params, x, case.cfg)
        dx, pending = case.op.dgrad(residuals, dy, case.cfg)
        return y, dx, case.op.wgrad(pending, case.cfg), case.op.bwd(residuals, dy, case.cfg)

    assert check_capturable(step, params, x, gradient(y, 0)) == []


@pytest.mark.turns("case", every=2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_graphs_give_the_same_bits(case):
    params, first = case.make(torch.float32)
    _, second = case.make(torch.float32, seed=1)
    second = tree_map(
        lambda a, b: b if isinstance(a, torch.Tensor) and a.is_floating_point() and a.shape == b.shape else a, first, second
    )
    xs, want = [first, second], []
    for i, x in enumerate(xs):
        y, residuals = case.op.fwd(params, x, case.cfg)
        dy = gradient(y, i)
        want.append((y, dy, *case.op.bwd(residuals, dy, case.cfg)))
    graph = graphed_op(case.op, case.cfg, params, first, slots=2, dy=want[0][1])
    flying = [graph.fwd(params, x) for x in xs]
    for (y, residuals), (y_want, dy, dparams_want, dx_want) in reversed(list(zip(flying, want, strict=True))):
        dx, pending = graph.dgrad(residuals, dy)
        same((y, dx, graph.wgrad(pending)), (y_want, dx_want, dparams_want))
    y, residuals = graph.fwd(params, xs[1])
    same((y, *graph.bwd(residuals, want[1][1])), (want[1][0], *want[1][2:]))


FUSED = ChainConfig(
    steps=(
        Step("norm", rms_norm, RMSNormConfig(16)),
        Step("up", linear, LinearConfig(16, 32)),
        Step("act", activation, ActivationConfig("gelu")),
        Step("down", linear, LinearConfig(32, 16)),
    )
)


def halves(op, cfg):
    def step(params, x, dy):
        y, residuals = op.fwd(params, x, cfg)
        dx, pending = op.dgrad(residuals, dy, cfg)
        return y, dx, op.wgrad(pending, cfg), op.bwd(residuals, dy, cfg)

    return step


@pytest.mark.slow
def test_fused_triton_kernels():
    """The kernels are interpreted here. A recording sees them as operators, and runs them again."""
    params, x = chain.init(FUSED, key=random.key(0)), torch.randn(5, 16)
    with backend("triton"):
        y, residuals = chain.fwd(params, x, FUSED)
        dy = gradient(y, 0)
        want = chain.bwd(residuals, dy, FUSED)
        assert check_capturable(halves(chain, FUSED), params, x, dy) == []
        graph = graphed_op(chain, FUSED, params, torch.zeros_like(x), warmup=1)
        y_got, kept = graph.fwd(params, x)
        same((y_got, graph.bwd(kept, dy)), (y, want))
        dot = [str(call.func) for call in graph.graphs()["fwd"].recording.calls]
        assert any(name.startswith("funcops.") for name in dot), dot


@pytest.mark.turns("name", every=3)
@pytest.mark.parametrize("name", POLICIES)
def test_a_decoder_under_every_policy(name):
    sizes = Sizes(dim=16, layers=2, heads=2, kv_heads=1, hidden=24, vocab=19, context=8, batch=2)
    op, cfg = with_policy(chain, name), decoder_config(sizes)
    params = chain.init(cfg, key=random.key(0))
    ids = torch.randint(0, 19, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    table = rope_table(torch.arange(8), RopeConfig(8))
    x = WithExtras(ids[0], {"positions": table, "labels": ids[1]})
    dy = torch.tensor(1.0)
    assert check_capturable(halves(op, cfg), params, x, dy) == []
    y, residuals = op.fwd(params, x, cfg)
    want = op.bwd(residuals, dy, cfg)
    graph = graphed_op(op, cfg, params, x, warmup=0)
    y_got, kept = graph.fwd(params, x)
    same((y_got, graph.bwd(kept, dy)), (y, want))
