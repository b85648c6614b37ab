"""Guards and small promises that other tests pass by."""

import itertools

import pytest
import torch
from law_cases import FIRST

import funcops
from funcops import (
    ActivationConfig,
    AttentionConfig,
    ChainConfig,
    Compress,
    EmbeddingConfig,
    GroupedLinearConfig,
    LinearConfig,
    Needs,
    PermuteConfig,
    Policy,
    QLinearConfig,
    RMSNormConfig,
    RopeConfig,
    Save,
    ScaleConfig,
    Step,
    activation,
    attention,
    chain,
    dist,
    embedding,
    explain,
    grouped_linear,
    linear,
    permute,
    qlinear,
    random,
    rms_norm,
    scale,
    with_policy,
)
from funcops.adapters.graphs.without_gpu.faults import COPY, SYNC, fault_of
from funcops.engine.backend import backend, gemm
from funcops.engine.errors import CheckpointError
from funcops.engine.trees import paths, put, tensors, tree_map_tensors
from funcops.library.kernels import routing
from funcops.library.kernels.sibling_linear import joined_linear_dgrad, sibling_linear_dgrad
from funcops.lora import LowRankConfig, LowRankParams, adapter, lora_init, low_rank, save_adapter, with_adapter, with_lora
from funcops.low_precision import Fp8Block
from funcops.models import DecoderConfig, SamplingConfig, decoder, sample, to_hf
from funcops.testing import run_ranks

OPS = [value for value in vars(funcops).values() if isinstance(value, funcops.Op)]
BASE = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4)), Step("up", linear, LinearConfig(4, 4))))
ADAPTED = with_lora(BASE, 2, ["up"])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_functions_of_an_op_live_where_its_config_does(op):
    home = op.config.__module__
    for part in ("init", "fwd", "bwd", "dgrad", "wgrad"):
        fn = getattr(funcops, f"{op.name}_{part}")
        assert fn.__module__ == home and fn.__name__ == f"{op.name}_{part}"


@pytest.mark.parametrize("case", [case for case in FIRST if case.op.params is not type(None)], ids=lambda case: case.op.name)
def test_every_param_has_a_draw_of_its_own(case):
    """No number is drawn twice, in one leaf or in two of them."""
    made = case.op.init(case.cfg, key=random.key(0), dtype=torch.float64)
    drawn = [t.flatten() for t in tensors(made) if t.is_floating_point() and t.unique().numel() > 1]
    drawn = torch.cat(drawn) if drawn else torch.empty(0)
    assert drawn.abs().unique().numel() == drawn.numel()


@pytest.mark.parametrize("case", [case for case in FIRST if case.op.params is not type(None)], ids=lambda case: case.op.name)
def test_accumulators_of_another_op_are_refused_without_a_pending_too(case):
    with pytest.raises((TypeError, ValueError), match=r"^[\w.]+_wgrad: into must be |^[\w.]+: \w+_wgrad: into must be "):
        case.op.wgrad(None, case.cfg, into=torch.ones(1))


def test_an_adapter_has_the_dtype_of_its_own_weight():
    """Not of the first param, a norm in float32."""
    params = chain.init(BASE, key=random.key(0))
    params = put(params, "up", tree_map_tensors(lambda t: t.bfloat16(), params["up"]))
    made = adapter(lora_init(params, ADAPTED, key=random.key(1)), ADAPTED)
    assert {t.dtype for t in paths(made).values() if t is not None} == {torch.bfloat16}


def saved(names):
    params = lora_init(chain.init(BASE, key=random.key(0)), ADAPTED, key=random.key(1))
    return lambda tmp_path: save_adapter(tmp_path, params, ADAPTED, names=names)


def one_of(experts, ranks):
    return lambda _: dist.DispatchConfig(experts, axis=dist.Axis("ep", ranks, 0, "a group" if ranks > 1 else ""))


NOT_ADAPTED = "cfg must be one that with_lora made (with_adapter_of, for adapters in files)"
REFUSED = {
    f"{NOT_ADAPTED}, got LinearConfig": (TypeError, ValueError),
    f"{NOT_ADAPTED}, got one without adapters": (TypeError, ValueError),
    "names['up'] must be str or tuple or RowsOf or ParameterOf, got 3": (TypeError,),
    "experts must be a multiple of 1, the number of ranks, got 0": (ValueError,),
    "experts must be a multiple of 2, the number of ranks, got 1": (ValueError,),
    "grouped_linear_fwd: params.bias must be None (cfg.bias is False), got a tensor": (ValueError,),
    "qlinear_fwd: params.bias must be None (cfg.bias is False), got a tensor": (ValueError,),
    "Policy: rules must be pairs of a glob and an action, got tuple of 1": (TypeError,),
    "Policy: rules must be pairs of a glob and an action, got tuple of 2": (TypeError,),
    "Policy: rules must be pairs of a glob and an action, got 3": (TypeError,),
    "sample: logits must be [B, V], got [2]": (ValueError,),
    "sample: logits must be [B, V], got [2, 0]": (ValueError,),
    "attention_fwd: x.3 (cu_seqlens) must be [N + 1], got [1, 2]": (ValueError,),
    "attention_fwd: x.3 (cu_seqlens) must be [N + 1], got [0]": (ValueError,),
    "random.philox: key must be a tuple of 2, got tuple of 1": (TypeError,),
    "random.philox: counter must be a tuple of 4, got list": (TypeError,),
    "to_hf: folder must be in an existing one, got": (FileNotFoundError,),
    "to_hf: params.blocks.0.attn.norm.weight must be of float64 or float32 or bfloat16 or float16, got int32": (CheckpointError,),
    "with_adapter: params must be a tree with up.both.lora, got dict": (ValueError,),
    "layout must be 'blocks' without sections, got 'axial'": ValueError,
    "amaxes['up.x'] must be float32, got float64": TypeError,
}


def biased(op, cfg, x):
    """The forward with a bias that the config does not have."""

    def call(_):
        params = op.init(cfg, key=random.key(0))
        return op.fwd(put(params, "bias", torch.zeros(2, 4)), x, cfg)

    return call


def packed(ends):
    q = torch.zeros(1, 3, 2, 4)
    return lambda _: attention.fwd(None, (q, q, q, torch.zeros(ends, dtype=torch.int32)), AttentionConfig(packed=True))


def written(below, dtype):
    cfg = DecoderConfig(
        vocab=8, dim=8, layers=1, heads=2, kv_heads=2, head_size=4, hidden=8, context=8, rope=RopeConfig(4), family="llama"
    )
    params = chain.init(decoder(cfg), key=random.key(0))
    return lambda folder: to_hf(tree_map_tensors(lambda t: t.to(dtype), params), cfg, folder / below / "new")


def put_elsewhere(_):
    params = chain.init(BASE, key=random.key(0))
    made = adapter(lora_init(params, ADAPTED, key=random.key(1)), ADAPTED)
    return with_adapter(params, made, ADAPTED)


CALLS = [
    lambda _: adapter(linear.init(LinearConfig(4, 4), key=random.key(0)), LinearConfig(4, 4)),
    lambda _: adapter(chain.init(BASE, key=random.key(0)), BASE),
    saved({"up": 3}),
    one_of(0, 1),
    one_of(1, 2),
    biased(
        grouped_linear, GroupedLinearConfig(2, 4, 4, bias=False), (torch.zeros(3, 4), torch.tensor([0, 1, 3], dtype=torch.int32))
    ),
    biased(qlinear, QLinearConfig(32, 32, recipe=Fp8Block(), bias=False), torch.zeros(2, 32)),
    lambda _: Policy([("a",)]),
    lambda _: Policy([(3, Save())]),
    lambda _: Policy([3]),
    lambda _: sample(torch.zeros(2), None, SamplingConfig()),
    lambda _: sample(torch.zeros(2, 0), None, SamplingConfig()),
    packed((1, 2)),
    packed((0,)),
    lambda _: random.philox((0,), (0, 0, 0, 0)),
    lambda _: random.philox((0, 0), [0, 0, 0, 0]),
    written("absent", torch.float32),
    written("", torch.int32),
    put_elsewhere,
    lambda _: RopeConfig(8, layout="axial"),
    lambda _: dist.amaxes_over({"up.x": torch.ones(2).double()}, dist.Axis("dp", 2, 0, "a group")),
]


@pytest.mark.parametrize(("text", "call"), list(zip(REFUSED, CALLS, strict=True)), ids=list(REFUSED))
def test_a_wrong_call_is_refused(text, call, tmp_path):
    with pytest.raises(REFUSED[text]) as caught:
        call(tmp_path)
    assert text in str(caught.value)


def test_right_calls_pass(tmp_path):
    saved({"up": ("model.up",)})(tmp_path / "a")
    saved({"up": "model.up"})(tmp_path / "b")
    assert one_of(1, 1)(None).experts == 1 and one_of(2, 2)(None).experts == 2


def test_more_rows_than_numbers_are_refused(monkeypatch):
    """For rows that all ranks send, too."""
    monkeypatch.setattr(routing, "MOST_ROWS", 3)
    x = torch.ones(2, 1), torch.ones(2, 4), torch.tensor([[0], [1]]).int()

    def sent(mesh):
        cfg = dist.DispatchConfig(2, axis=mesh["ep"])
        with pytest.raises(ValueError, match="x, sent to all ranks, must be of at most 3 rows, got 4"):
            dist.dispatch.fwd(None, x, cfg)

    run_ranks({"ep": 2}, sent)


@pytest.mark.parametrize("kind", ["relu", "gelu", "tanh"])
def test_no_gradient_is_computed_that_is_not_needed(kind):
    x, cfg = torch.ones(2, 3), ActivationConfig(kind)
    _, residuals = activation.fwd(None, x, cfg, needs=Needs(x=False, params=True))
    dx, pending = activation.dgrad(residuals, torch.ones(2, 3), cfg)
    assert dx is None and pending is None


@pytest.mark.parametrize("name", ["copy_", "_to_copy"])
def test_copies_between_host_and_device_are_faults_of_a_capture(name):
    """The meta device stands for one that is not the host."""
    pairs = list(itertools.product((torch.ones(2), torch.ones(2, device="meta")), repeat=2))
    copy, to = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
    found = [fault_of(copy, (b, a), {}) if name == "copy_" else fault_of(to, (a,), {"device": b.device}) for a, b in pairs]
    assert [one and one[0] for one in found] == [None, COPY, SYNC, None]


def test_a_rule_that_makes_nothing_smaller_is_refused_whatever_it_is_called():
    """Ids are kept as they are; the rule's glob need not end in their name."""
    cfg = ChainConfig(steps=(Step("table", embedding, EmbeddingConfig(8, 4)), Step("up", linear, LinearConfig(4, 4))))
    params = chain.init(cfg, key=random.key(0))
    for pattern in ("table.*", "*.ids"):
        with pytest.raises(ValueError, match="must be for tensors that it makes smaller"):
            with_policy(chain, Policy({pattern: Compress("fp8")})).fwd(params, torch.arange(3), cfg)


@pytest.mark.parametrize("three", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_siblings_are_left_to_the_library_by_the_table(dtype, three, monkeypatch):
    pytest.importorskip("triton")
    dy, w = torch.ones(2, 4, dtype=dtype), torch.ones(4, 4, dtype=dtype)
    given = [(sibling_linear_dgrad, (dy, dy, dy if three else None, w, w, w if three else None))]
    given += [(joined_linear_dgrad, (torch.cat((dy, dy, dy), -1), w, w, w))] * three
    for op, args in given:
        calls, body = [], op.kernel.torch_impl
        monkeypatch.setattr(op.kernel, "torch_impl", lambda *args, calls=calls, body=body: calls.append(args) or body(*args))
        with backend("triton"):
            for provider, count in (("auto", 1), ("triton", 0)):
                calls.clear()
                with gemm(provider):
                    op(*args)
                assert len(calls) == count, provider


def test_a_plan_says_what_each_rule_saves():
    """The cost by which a cover is chosen: a factor before a linear layer's backward is applied in its product."""
    cfg = ChainConfig(steps=(Step("by", scale, ScaleConfig(2.0)), Step("up", linear, LinearConfig(4, 4))))
    assert "saves 2 passes and 1 launch" in str(explain(cfg))


def test_more_rows_than_an_index_can_count_are_refused():
    """Before they are sorted: views of one number stand for 2^31 choices."""
    tokens = 1 << 30
    weights, indices = torch.ones(1).expand(tokens, 2), torch.zeros(1, dtype=torch.int32).expand(tokens, 2)
    with pytest.raises(ValueError, match=r"permute_fwd: x\.2 \(indices\) must be .*, got 2147483648"):
        permute.fwd(None, (weights, torch.ones(1, 1).expand(tokens, 1), indices), PermuteConfig(2, gathered=True))


def test_accumulators_of_low_rank_products_are_checked():
    cfg = LowRankConfig(4, 3, 2)
    params, x = low_rank.init(cfg, key=random.key(0)), torch.ones(5, 4)
    _, pending = low_rank.dgrad(low_rank.fwd(params, x, cfg)[1], torch.ones(5, 3), cfg)
    for a, b, said in ((torch.zeros(2, 5), torch.zeros(3, 2), "a"), (torch.zeros(2, 4), torch.zeros(2, 3), "b")):
        with pytest.raises(ValueError, match=rf"low_rank_wgrad: into\.{said} must be "):
            low_rank.products(pending, cfg, into=LowRankParams(a, b))
