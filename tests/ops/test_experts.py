"""Experts: equal to Hugging Face's, their kept bytes, and no decisions by a loop over groups on the host."""

import importlib
import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from funcops import ExpertsConfig, GroupedLinearConfig, Needs, PermuteConfig, dist, experts, grouped_linear, permute, report, trees
from funcops.engine.backend import backend
from funcops.engine.random import key
from funcops.engine.trees import leaves, paths
from funcops.graphs import check_capturable
from funcops.library.kernels import grouped
from funcops.library.kernels.routing import sort_by_expert
from funcops.library.ops.experts import ExpertsParams
from funcops.library.ops.grouped_linear import GroupedLinearParams
from funcops.testing import run_ranks
from funcops.testing.tolerances import assert_close

HUGGING_FACE = {  # their home and name, fields of their config, and whether weights are transposed and interleaved, with biases
    "Mixtral": ("mixtral", "Mixtral", dict(num_local_experts=5, intermediate_size=6), False),
    "Qwen3-MoE": ("qwen3_moe", "Qwen3Moe", dict(num_experts=5, moe_intermediate_size=6), False),
    "DeepSeek-V3": ("deepseek_v3", "DeepseekV3", dict(n_routed_experts=5, moe_intermediate_size=6), False),
    "GPT-OSS": ("gpt_oss", "GptOss", dict(num_local_experts=5, intermediate_size=6), True),
}


def hugging_face(name):
    """Hugging Face's experts with drawn weights, in float64, our params with the same weights, and the config."""
    pytest.importorskip("transformers")
    home, kind, sizes, oss = HUGGING_FACE[name]
    modeling = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
    theirs = getattr(modeling, f"{kind}Experts")(getattr(modeling, f"{kind}Config")(hidden_size=8, **sizes)).double()
    generator = torch.Generator().manual_seed(1)
    for p in theirs.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    named = dict(theirs.named_parameters())

    def ours(of):
        """Our params from their weights, or from their weights' gradients."""
        up, down = of(named["gate_up_proj"]), of(named["down_proj"])
        if not oss:
            return ExpertsParams(GroupedLinearParams(up), GroupedLinearParams(down))
        rows = [*range(0, up.shape[-1], 2), *range(1, up.shape[-1], 2)]  # the gate's first
        bias = GroupedLinearParams(up.mT[:, rows], of(named["gate_up_proj_bias"])[:, rows])
        return ExpertsParams(bias, GroupedLinearParams(down.mT, of(named["down_proj_bias"])))

    if oss:
        cfg = ExpertsConfig(5, 8, 6, kind="clamped_swiglu", bias=True, limit=theirs.limit, alpha=theirs.alpha)
    else:
        cfg = ExpertsConfig(5, 8, 6)
    return theirs, ours, cfg


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_faces_experts(name):
    theirs, ours, cfg = hugging_face(name)
    x, weights = torch.randn(9, 8, dtype=torch.float64) * 3, torch.rand(9, 2, dtype=torch.float64)
    indices = torch.rand(9, 5).argsort(-1)[:, :2]
    indices[indices == 2] = 3  # one expert has no rows
    given = x.clone().requires_grad_(), weights.clone().requires_grad_()
    want = theirs(given[0], indices, given[1])
    dy = torch.randn_like(want)
    want.backward(dy)
    y, residuals = experts.fwd(ours(torch.Tensor.detach), (weights, x, indices.int()), cfg)
    dparams, (d_weights, dx, none) = experts.bwd(residuals, dy, cfg)
    assert none is None
    assert_close((y, dx, d_weights), (want.detach(), given[0].grad, given[1].grad), dtype=torch.float64)
    assert_close(dparams, ours(lambda p: p.grad), dtype=torch.float64)


def made(tokens, choices, count, dim, hidden, dtype=torch.float32, **options):
    cfg = ExpertsConfig(count, dim, hidden, **options)
    params = experts.init(cfg, key=key(0), dtype=dtype)
    indices = torch.rand(tokens, count).argsort(-1)[:, :choices].int()
    return cfg, params, (torch.rand(tokens, choices), torch.randn(tokens, dim).to(dtype), indices)


@pytest.mark.parametrize(("tokens", "choices", "count", "dim", "hidden"), [(64, 8, 16, 256, 96), (48, 1, 4, 64, 32)])
def test_kept_is_z_and_8_bytes_a_row(tokens, choices, count, dim, hidden):
    """And E + 1 offsets: less than 4 K I + 16 K + 8 bytes a token, which leaves room for own weights."""
    cfg, params, x = made(tokens, choices, count, dim, hidden, torch.bfloat16)
    _, residuals = experts.fwd(params, x, cfg)
    kept = report(residuals, params, x).kept_bytes
    own = tokens * choices * (4 * hidden + 8) + 4 * (count + 1)
    assert kept == own
    assert own / tokens <= 4 * choices * hidden + 16 * choices + 8


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_graph_can_hold_every_half(name, bias):
    """Its replay with other routing has the function's bits: `check_capturable` compares them."""
    cfg, params, x = made(5, 2, 4, 6, 3, bias=bias)
    with backend(name):
        _, residuals = experts.fwd(params, x, cfg)
        dy = torch.randn_like(x[1])
        _, pending = experts.dgrad(residuals, dy, cfg)
        assert check_capturable(lambda params, x: experts.fwd(params, x, cfg)[0], params, x) == []

        def backward(params, x, dy):
            dx, pending = experts.dgrad(experts.fwd(params, x, cfg)[1], dy, cfg)
            return dx, experts.wgrad(pending, cfg)

        assert check_capturable(backward, params, x, dy) == []
        layer = GroupedLinearConfig(4, 6, 3, bias=bias, gathered=True)

        def both(params, x, indices, dy):
            order, _, offsets, place = sort_by_expert(indices, 4)
            y, residuals = grouped_linear.fwd(params, (x, offsets, order, place), layer)
            return y, grouped_linear.bwd(residuals, dy, layer)

        of_layer = grouped_linear.init(layer, key=key(1), dtype=torch.float32)
        assert check_capturable(both, of_layer, x[1], x[2], torch.randn(10, 3)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_has_the_same_bits_wherever_the_others_go(dtype):
    """Our kernels promise this; torch's products on the CPU may add in another order for another number of rows."""
    cfg, params, (weights, x, indices) = made(70, 2, 3, 20, 17, dtype)
    other = indices.roll(1, 0)
    other[:3] = indices[:3]
    found = []
    with backend("triton"):
        for routed in (indices, other):
            y, residuals = experts.fwd(params, (weights, x, routed), cfg)
            _, (d_weights, dx, _) = experts.bwd(residuals, x, cfg)
            found.append((y, d_weights, dx))
    assert not torch.equal(found[0][0][3:], found[1][0][3:])
    assert all(torch.equal(a[:3], b[:3]) for a, b in zip(*found, strict=True))


ROWS = 24
OFFSETS = {"empty ends": (0, 0, 9, 20, 20), "empty middle": (0, 7, 7, 8, 24), "one takes all": (0, 0, 0, 24, 24), "none": (0,) * 5}


@pytest.mark.parametrize("offsets", OFFSETS)
def test_torchs_products_without_a_word_from_the_host(offsets):
    """Products for CUDA without Triton equal the loop over groups up to the order of sums, and read no value."""
    offsets = torch.tensor(OFFSETS[offsets], dtype=torch.int32)
    rows, inner = torch.randn(ROWS, 16), torch.randn(ROWS, 8)
    w = torch.randn(4, 16, 8)
    for products, wgrads in ((grouped.by_masks, grouped.wgrad_by_masks), (grouped.by_library, grouped.wgrad_by_library)):
        assert_close(products(rows, w, offsets), grouped.by_groups(rows, w, offsets), dtype=torch.float32)
        assert_close(wgrads(rows, inner, offsets), grouped.wgrad_by_groups(rows, inner, offsets), dtype=torch.float32)
        assert (
            check_capturable(
                lambda rows, inner, at, p=products, g=wgrads: (p(rows, w, at), g(rows, inner, at)), rows, inner, offsets.clone()
            )
            == []
        )


def test_a_tracer_sees_one_operator():
    """The body reads values on the host, and yet the graph serves other values."""
    cfg, params, x = made(5, 2, 4, 6, 3)
    graph = make_fx(lambda *t: experts.fwd(params, t, cfg, needs=Needs.NONE)[0])(*x)
    names = {str(node.target) for node in graph.graph.nodes}
    assert {"funcops.experts_up_by_torch.default", "funcops.grouped_product_by_torch.default"} <= names
    other = (x[0], x[1], x[2].flip(0))
    assert_close(graph(*other), experts.fwd(params, other, cfg)[0], dtype=torch.float32)


def test_dropped_choices_add_nothing():
    cfg, params, (weights, x, indices) = made(6, 2, 4, 5, 3, bias=True)
    indices[2] = 4
    y, residuals = experts.fwd(params, (weights, x, indices), cfg)
    _, (d_weights, dx, _) = experts.bwd(residuals, torch.ones_like(x), cfg)
    assert not y[2].any() and not d_weights[2].any() and not dx[2].any() and all(t.any() for t in leaves((y, d_weights, dx)))


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_do_not_depend_on_which_are_requested(bias):
    """Any subset of the params, biases of experts without any too, with and without x."""
    cfg, params, x = made(5, 2, 4, 6, 3, bias=bias)
    y, residuals = experts.fwd(params, x, cfg)
    dy = torch.randn_like(y)
    every = paths(experts.bwd(residuals, dy, cfg)[0])
    for count in range(len(every) + 1):
        for chosen in itertools.combinations(every, count):
            for of_x in (True, False):
                kept = experts.fwd(params, x, cfg, needs=Needs(x=of_x, params=chosen))[1]
                if kept is None:
                    continue
                got = paths(experts.bwd(kept, dy, cfg)[0])
                wanted = [path for path in chosen if every[path] is not None]
                assert [path for path, t in got.items() if t is not None] == wanted
                assert all(torch.equal(got[path], every[path]) for path in wanted), (chosen, of_x)


INDICES = torch.tensor([[0, 2], [3, 1], [2, 0], [1, 3], [4, 2]])  # 4 is a dropped choice


def chosen(mesh, dtype):
    """All ops that take indices of experts, on one rank and over two: their y, and what their backward returns."""
    draw = torch.Generator().manual_seed(0)
    weights, x, indices = torch.rand(5, 2, generator=draw), torch.randn(5, 8, generator=draw), INDICES.to(dtype)
    params = experts.init(ExpertsConfig(4, 8, 6), key=key(0))
    own = {"up": params.up.weight[:2], "down": params.down.weight[:2]}
    shard = type(params)(*(type(params.up)(own[name], None) for name in ("up", "down")))
    for op, given, cfg in (
        (experts, (weights, x, indices), ExpertsConfig(4, 8, 6)),
        (permute, (x, indices), PermuteConfig(4)),
        (permute, (weights, x, indices), PermuteConfig(4, gathered=True)),
        (dist.dispatch, (weights, x, indices), dist.DispatchConfig(4, axis=mesh["ep"])),
        (dist.parallel_experts, (weights, x, indices), dist.ParallelExpertsConfig(4, 8, 6, axis=mesh["ep"])),
    ):
        held = {experts: params, dist.parallel_experts: shard}.get(op)
        y, kept = op.fwd(held, given, cfg)
        dy = trees.tree_map(lambda t: torch.ones_like(t) if t.is_floating_point() else None, y)
        yield from trees.leaves((y, op.bwd(kept, dy, cfg)))


def test_indices_of_topk_are_taken_as_they_are():
    """int64, as torch.topk returns them: the bits of int32."""

    def each(mesh):
        pairs = list(zip(chosen(mesh, torch.int64), chosen(mesh, torch.int32), strict=True))
        assert all((a is None and b is None) or (a.dtype is b.dtype and a.equal(b)) for a, b in pairs)
        return len(pairs)

    assert run_ranks({"ep": 2}, each)[0] > 15
