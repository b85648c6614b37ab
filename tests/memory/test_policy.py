"""Residual policies: the kept tensors, the laws, the error of compression, and the choice of `fit`."""

import dataclasses
import pickle

import pytest
import torch
from law_cases import CASES
from policy_cases import BLOCKS, COMBINED, LLAMA, TIES, decoder, made, same
from tiers import drawn

from benchmarks.memory import Live
from funcops import (
    POLICIES,
    ChainConfig,
    Compress,
    Drop,
    Needs,
    Offload,
    Policy,
    Recompute,
    RepeatConfig,
    RMSNormConfig,
    Save,
    Step,
    WithExtras,
    chain,
    donate,
    dropout,
    linear,
    random,
    remat,
    repeat,
    report,
    rms_norm,
    with_policy,
)
from funcops.engine.errors import DonatedError, StaleResidualError
from funcops.engine.residuals.forms import Packed
from funcops.engine.trees import paths, tensors, tree_map
from funcops.library.ops.linear import LinearConfig
from funcops.library.ops.linear_cross_entropy import LinearCrossEntropyConfig, linear_cross_entropy
from funcops.models.blocks import block_config, mlp_config
from funcops.testing import LAWS
from funcops.testing.tolerances import assert_close

EXACT = ("save_all", "recompute_norms", "recompute_elementwise", "minimal", "offload_block_inputs")


def policies_in_turn():
    """The first case of an op under every policy, the others under one in turn. One case of an op is in the first tier."""
    rows = drawn(COMBINED, EXACT, families=[case.op.name for case in COMBINED])
    seen = set()
    for i, case in enumerate(COMBINED):
        own = rows[i * len(EXACT) :][: len(EXACT)]
        yield from own if case.op.name not in seen else own[i % len(EXACT) :][:1]
        seen.add(case.op.name)


@pytest.mark.parametrize(("case", "policy"), list(policies_in_turn()))
def test_laws(case, policy):
    case = dataclasses.replace(case, op=with_policy(case.op, policy))
    for law in ("split", "pure", "mirror", "frugal", "right", "traceable"):
        if law not in case.exempt:
            LAWS[law](case, torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["recompute_norms", "minimal", "compress_fp8"])
def test_compiles(policy):
    case = next(c for c, _ in CASES if c.op.name == "chain")
    LAWS["compiles"](dataclasses.replace(case, op=with_policy(chain, policy)), torch.float32)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_equal_save_all(block, policy):
    cfg, params, x, dy = made(block)
    _, plain = with_policy(chain, "save_all").fwd(params, x, cfg)
    want = with_policy(chain, "save_all").bwd(plain, dy, cfg)
    op = with_policy(chain, policy)
    y, kept = op.fwd(params, x, cfg)
    dx, pending = op.dgrad(kept, dy, cfg)
    halves = op.wgrad(pending, cfg), dx
    whole = op.bwd(kept, dy, cfg)
    assert same(whole, halves) and same(whole, op.bwd(donate(kept), dy, cfg))
    with pytest.raises(DonatedError):
        op.bwd(kept, dy, cfg)
    if policy in EXACT:
        assert same(whole, want)
    else:  # the error that docs/residuals.md states for the whole gradient
        off = sum(float((a - b).square().sum()) for a, b in zip(tensors(whole), tensors(want), strict=True))
        size = sum(float(b.square().sum()) for b in tensors(want))
        assert 1e-6 < (off / size) ** 0.5 < {"compress_fp8": 0.05, "compress_int8": 0.02}[policy]


@pytest.mark.parametrize("block", BLOCKS)
def test_bytes_fall_from_policy_to_policy(block):
    cfg, params, x, _ = made(block, torch.bfloat16)
    units = 2 * 16 * 64
    kept = {p: report(with_policy(chain, p).fwd(params, x, cfg)[1], params, x.extras).kept_bytes / units for p in POLICIES}
    assert kept["save_all"] > kept["recompute_norms"] > kept["recompute_elementwise"] > kept["compress_fp8"]
    assert kept["recompute_elementwise"] == report(chain.fwd(params, x, cfg)[1], params, x.extras).kept_bytes / units
    assert kept["minimal"] <= 2.1


def test_a_rule_that_names_a_field_beats_what_the_chain_does_by_itself():
    cfg = mlp_config(64, 96)
    params, x, dy = chain.init(cfg, key=random.key(0)), torch.randn(32, 64), torch.randn(32, 64)
    op = with_policy(chain, Policy({"up.x": Compress("int8")}))
    kept = op.fwd(params, x, cfg)[1]
    assert isinstance(kept["up"].x, Packed) and chain.fwd(params, x, cfg)[1]["up"].x is None
    want, found = chain.bwd(chain.fwd(params, x, cfg)[1], dy, cfg), op.bwd(kept, dy, cfg)
    assert torch.equal(want[1], found[1]) and not torch.equal(want[0]["up"].weight, found[0]["up"].weight)
    torch.testing.assert_close(want[0]["up"].weight, found[0]["up"].weight, atol=0.2, rtol=0.05)
    for rules in ({"*p.x": Compress("int8")}, {"*x": Drop(), "*p.*": Compress("int8")}):
        assert isinstance(with_policy(chain, Policy(rules)).fwd(params, x, cfg)[1]["up"].x, Packed), "a glob, too"
    optional = with_policy(chain, Policy({"*p.x": Compress("int8")}, optional=True)).fwd(params, x, cfg)[1]
    assert optional["up"].x is None, "an optional rule leaves to the chain what it computes again"
    block, name = LLAMA[0], "attn.qkv.q.proj.x"
    one_of_three = r"the same for each field that holds the output of attn.norm .*k.proj.x.* got Compress.* for .*q.proj.x only"
    with pytest.raises(ValueError, match=one_of_three):
        with_policy(chain, Policy({name: Compress("int8")})).init(block, device="meta")


def test_a_pending_keeps_no_recomputable_output():
    cfg = mlp_config(64, 96)
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(32, 64)
    _, kept = chain.fwd(params, x, cfg)
    _, pending = chain.dgrad(kept, torch.randn(32, 64), cfg)
    assert pending["up"].x is None and pending["down"].x is None
    assert pending["norm()"].x is x and pending["act()"].x is kept["act"].x
    assert kept["up"].x is None and kept["norm"].x is x


def test_a_pending_keeps_no_output_that_its_dgrad_recomputed():
    """The only op whose dgrad reads its x and whose pending holds it, too."""
    loss = Step("loss", linear_cross_entropy, LinearCrossEntropyConfig(8, 5), takes=("labels",))
    cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(8)), loss), extras=("labels",))
    params, x = chain.init(cfg, key=random.key(0)), WithExtras(torch.randn(3, 8), {"labels": torch.tensor([0, 4, 1])})
    _, kept = chain.fwd(params, x, cfg)
    dx, pending = chain.dgrad(kept, torch.tensor(2.0), cfg)
    assert kept["loss"].x is None and pending["loss"].x is None and pending["norm()"].x is x.main
    assert same((chain.wgrad(pending, cfg), dx), chain.bwd(kept, torch.tensor(2.0), cfg))


@pytest.mark.parametrize(
    "needs", [Needs(x=False), Needs(params=False), Needs(params=["down.weight"]), Needs(x=False, params=["up.weight"])]
)
def test_recomputing_under_masks(needs):
    cfg = mlp_config(8, 6)
    everything = dataclasses.replace(cfg, recompute=False)
    params, x, dy = chain.init(cfg, key=random.key(0)), torch.randn(3, 8), torch.randn(3, 8)
    found = []
    for one in (cfg, everything):
        _, kept = chain.fwd(params, x, one, needs=needs)
        found.append(chain.bwd(kept, dy, one))
    assert same(*found)


def test_params_that_changed_are_stale():
    cfg = mlp_config(8, 6)
    params, x, dy = chain.init(cfg, key=random.key(0)), torch.randn(3, 8), torch.randn(3, 8)
    _, kept = chain.fwd(params, x, cfg)
    _, pending = chain.dgrad(kept, dy, cfg)
    params["norm"].weight.add_(1.0)
    with pytest.raises(StaleResidualError, match="^norm: rms_norm_recompute: residuals.weight must be .* or pass recompute=False"):
        chain.wgrad(pending, cfg)
    minimal = remat(chain)
    _, kept = minimal.fwd(params, x, cfg)
    params["down"].weight.add_(1.0)
    with pytest.raises(
        StaleResidualError, match=r"remat\(chain\)_bwd: params\.\w+.weight must be as the forward left it, got .*runs again"
    ):
        minimal.bwd(kept, dy, cfg)


def test_remat_draws_the_same_bits_and_steps_fold_their_names():
    cfg = dropout.config(p=0.5)
    x, key, dy = torch.randn(64), random.key(1), torch.randn(64)
    y, kept = dropout.fwd(None, (x, key), cfg)
    again, frugal = remat(dropout).fwd(None, (x, key), cfg)
    assert torch.equal(y, again)
    assert same(dropout.bwd(kept, dy, cfg), remat(dropout).bwd(frugal, dy, cfg))
    assert remat(dropout).keyed_by(cfg)


def test_rules_by_path():
    cfg, params, x, dy = made("llama")
    rules = {"attn": Recompute(), "mlp.act.x": Compress("int8"), "mlp.down.x": Save()}
    _, kept = with_policy(chain, Policy(rules)).fwd(params, x, cfg)
    rows = {row.path: row.dtype for row in report(kept, params, x).rows}
    assert not any(path.startswith("attn.qkv") for path in rows)
    assert rows["mlp.act.x"] == "int8" and rows["mlp.down.x"] == "float32"
    last = Policy({"mlp.*": Compress("fp8"), "mlp.act.x": Save()})
    rows = {row.path: row.dtype for row in report(with_policy(chain, last).fwd(params, x, cfg)[1], params, x).rows}
    assert rows["mlp.act.x"] == "float32" and rows["mlp.norm.x"] == "fp8"
    assert dy is not None


def test_a_dropped_tensor_raises_where_it_is_read():
    op, cfg = with_policy(linear, Policy({"x": Drop()})), LinearConfig(3, 4)
    params, x = linear.init(cfg, key=random.key(0)), torch.randn(2, 3)
    _, kept = op.fwd(params, x, cfg)
    dx, pending = op.dgrad(kept, torch.randn(2, 4), cfg)
    assert dx.shape == x.shape
    with pytest.raises(
        ValueError, match="linear_wgrad: pending.x must be kept, because this half of the backward reads it, got dropped"
    ):
        op.wgrad(pending, cfg)
    with pytest.raises(ValueError, match="linear_bwd: residuals.x must be kept"):
        op.bwd(kept, torch.randn(2, 4), cfg)
    _, frozen = op.fwd(params, x, cfg, needs=Needs(params=False))
    assert op.bwd(frozen, torch.randn(2, 4), cfg)[1] is not None


def test_a_tensor_that_both_halves_read_enters_the_pending_packed():
    op, cfg = with_policy(linear_cross_entropy, Policy({"x": Compress("int8")})), LinearCrossEntropyConfig(8, 12)
    params, x = linear_cross_entropy.init(cfg, key=random.key(0)), (torch.randn(4, 8), torch.tensor([0, 3, 11, 5]))
    _, kept = op.fwd(params, x, cfg)
    dx, pending = op.dgrad(kept, torch.ones(()), cfg)
    assert type(kept.x) is type(pending.x) is Packed
    assert same((op.wgrad(pending, cfg), dx), op.bwd(kept, torch.ones(()), cfg))


def test_errors():
    cfg, params, x, _ = made("llama")
    for policy, message in (
        (
            {"attn.mxi": Save()},
            "with_policy: rules must be globs over the paths of cfg, got 'attn.mxi', nearest attn.mix, .* .66 in all: report",
        ),
        ({"attn.out.x": Recompute()}, "without Recompute for the x of attn.out"),
    ):
        with pytest.raises(ValueError, match=message):
            with_policy(chain, Policy(policy)).fwd(params, x, cfg)
    with pytest.raises(ValueError, match="with_policy: policy must be a Policy or one of save_all, .*, got 'minimum'"):
        with_policy(chain, "minimum")
    with pytest.raises(ValueError, match="Compress: codec must be one of bf16, int8, fp8, mxfp8 .did you mean fp8.., got 'fp7'"):
        Compress("fp7")
    with pytest.raises(TypeError, match="Policy: rules at 'a' must be"):
        Policy({"a": "save"})
    with pytest.raises(ValueError, match="Policy: blocks must be 'residuals' or 'inputs' or 'offloaded', got 'none'"):
        Policy(blocks="none")


@pytest.mark.parametrize("block", BLOCKS)
def test_the_peak_of_minimal_is_the_inputs_and_one_block(block):
    """Forward and backward of 8 layers: their inputs, and at most 1.1 of one block's own peak."""
    layers, (cfg, extras) = 8, BLOCKS[block]
    whole = RepeatConfig(chain, cfg, layers)
    params = repeat.init(whole, key=random.key(0))
    x, dy = WithExtras(torch.randn(4, 16, 64), dict(extras)), torch.randn(4, 16, 64)

    def peak(op, params, cfg, needs):
        def run():
            _, kept = op.fwd(params, x, cfg, needs=needs)
            return op.bwd(donate(kept), dy, cfg)

        with Live() as counter:
            run()
        return counter.peak

    one = peak(chain, params[0], cfg, Needs.ALL)
    own = sum(t.nbytes for t in tensors(params[0]))
    grads = layers * own
    frugal = peak(with_policy(repeat, "minimal"), params, whole, Needs.ALL)
    inputs = layers * x.main.nbytes
    assert frugal - grads <= inputs + 1.1 * one


def test_paths_of_params_are_untouched():
    cfg, params, _, _ = made("llama")
    assert paths(with_policy(chain, "minimal").init(cfg, key=random.key(0))).keys() == paths(params).keys()


LOGITS = Policy({"loss.logits": Recompute()})


@pytest.mark.parametrize(
    "needs", [Needs(x=False), Needs(x=False, params=["head.weight"]), Needs(x=False, params=["embed"])], ids=str
)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": "none", "ignore_index": 3}], ids=str)
@pytest.mark.parametrize("ties", [(), TIES], ids=["free", "tied"])
def test_a_loss_whose_logits_are_recomputed(ties, options, needs):
    cfg, op = decoder(ties, **options), with_policy(chain, LOGITS)
    if ties and isinstance(needs.params, tuple) and needs.params[0].startswith("head"):
        needs = Needs(x=False)
    params = op.init(cfg, key=random.key(0), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(11, (2, 4, 5), generator=generator)
    x = WithExtras(tokens, {"labels": labels})
    y, plain = chain.fwd(params, x, cfg, needs=needs)
    got, kept = op.fwd(params, x, cfg, needs=needs)
    dy = torch.ones_like(y)
    want = chain.bwd(plain, dy, cfg)
    assert not any("logits" in path for path in paths(kept)) and any("logits" in path for path in paths(plain))
    dx, pending = op.dgrad(kept, dy, cfg)
    sums = tree_map(lambda p: None if p is None else torch.ones_like(p), params)
    total, _ = op.bwd(kept, dy, cfg, into=sums)
    assert total is sums
    less_one = tree_map(lambda s, g: None if g is None else s - 1, total, want[0])
    both = op.wgrad(pending, cfg), dx
    for found in (op.bwd(kept, dy, cfg), both, op.bwd(donate(kept), dy, cfg), (less_one, want[1])):
        assert_close((got, found), (y, want), dtype=torch.float64, length=64)


@pytest.mark.parametrize("rules", [{"norm": Recompute(), "head.x": Offload()}, {"*.x": Compress("fp8")}], ids=str)
def test_rules_for_what_joined_steps_keep_leave_them_joined(rules):
    """A step of the two is not rewritten by itself: that would keep the logits."""
    cfg = dataclasses.replace(decoder(), joined=("loss",))
    params = chain.init(cfg, key=random.key(0))
    x = WithExtras(torch.zeros(5, dtype=torch.int64), {"labels": torch.zeros(5, dtype=torch.int64)})
    kept = with_policy(chain, Policy(rules)).fwd(params, x, cfg)[1]
    found = {path for path, t in paths(kept).items() if t is not None}
    assert "head.logsumexp" in found and not any("logits" in path for path in found)


def test_products_that_cannot_be_joined_give_the_reason():
    for cfg, reason in ((decoder(bias=True), "the linear has a bias"), (block_config(8, 2, 8), "globs over")):
        with pytest.raises(ValueError, match=reason):
            with_policy(chain, LOGITS).init(cfg, key=random.key(0))
    params = decoder()
    with pytest.raises(ValueError, match="chain_fwd: params must be a dict by step name: embed, norm, head, loss"):
        with_policy(chain, LOGITS).fwd({"embed": None}, WithExtras(torch.zeros(1), {"labels": torch.zeros(1)}), params)


@pytest.mark.parametrize("name", [*POLICIES, *["recompute", "compress", "joint"]])
def test_residuals_and_ops_pickle(name):
    """Ops pickle by reference, or by what made them; their residuals by value: the backward of a copy gives the same bits."""
    rules = {"recompute": {"mlp": Recompute()}, "compress": {"*.x": Compress("fp8")}, "joint": {"head.x": Recompute()}}
    body = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(8)), Step("mlp", linear, LinearConfig(8, 8))))
    cfg = ChainConfig(steps=(Step("blocks", repeat, RepeatConfig(chain, body, 2)), Step("last", rms_norm, RMSNormConfig(8))))
    if name == "joint":
        cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 8)), Step("mlp", chain, mlp_config(8, 16))))
        rules["joint"] = {"mlp": Recompute()}
    elif name == "recompute":
        rules["recompute"] = {"blocks.*.norm": Recompute()}
    op = with_policy(chain, Policy(rules[name]) if name in rules else name)
    assert pickle.loads(pickle.dumps(op)) is op
    params = op.init(cfg, key=random.key(0))
    y, residuals = op.fwd(params, torch.randn(3, 8), cfg)
    copy = pickle.loads(pickle.dumps(residuals))
    dx, pending = op.dgrad(residuals, torch.ones_like(y), cfg)
    got, want = op.bwd(copy, torch.ones_like(y), cfg), (op.wgrad(pickle.loads(pickle.dumps(pending)), cfg), dx)
    assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(want), strict=True))


def test_an_op_without_a_name_is_not_pickled():
    with pytest.raises(pickle.PicklingError, match="pickle: op 'linear' must be a name of the module of its fwd, or made by"):
        pickle.dumps(linear._replace(recomputable="norm"))


@pytest.mark.parametrize("policy", ["save_all", "minimal", Policy({"norm": Recompute()})], ids=["all", "preset", "own"])
def test_a_compiler_is_told_the_op_and_config_of_each_config(policy, monkeypatch):
    """A trace takes them as constants; here it has no compiler."""
    op, x = with_policy(chain, policy), torch.randn(3, 4)
    for eps in (1e-5, 1.0, 1e-5):
        cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4, eps=eps)), Step("up", linear, LinearConfig(4, 4))))
        params = chain.init(cfg, key=random.key(0))
        asked = iter([True])  # by the op; what it makes of its config runs outside of the trace
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_dynamo_compiling", lambda: next(asked, False))  # noqa: B023 (called at once)
            y = op.fwd(params, x, cfg)[0]
        assert torch.equal(y, chain.fwd(params, x, cfg)[0])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["minimal", Policy({"norm": Recompute()})], ids=["preset", "own"])
def test_a_compiler_meets_a_policy_first(policy):
    """Params come from the plain op or from a file, so nothing has resolved the policy for this config before."""
    cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4)), Step("up", linear, LinearConfig(4, 4))))
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(3, 4)

    def step(params, x):
        y, residuals = op.fwd(params, x, cfg)
        return y, op.bwd(residuals, y, cfg)[0]

    op = with_policy(chain, policy)
    found = torch.compile(step, fullgraph=True, backend="eager", dynamic=False)(params, x)
    assert_close(found, step(params, x), dtype=torch.float32)


@pytest.mark.slow
def test_one_function_compiled_for_several_policies():
    """A number of its own, which the code of each op reads at the same place, would become a symbol of the compiler."""
    cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4)), Step("up", linear, LinearConfig(4, 4))))
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(3, 4)

    def step(op, params, x):
        y, residuals = op.fwd(params, x, cfg)
        return y, op.bwd(residuals, y, cfg)[0]

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for policy in ("minimal", Policy({"norm": Recompute()}), Policy({"up.x": Recompute()}, optional=True), "save_all"):
        op = with_policy(chain, policy)
        assert_close(compiled(op, params, x), step(op, params, x), dtype=torch.float32)
