"""`with_invariant`: a row has the same bits in training and decoding; what the mode does not serve raises by its path."""

import dataclasses

import pytest
import torch
from invariant_cases import gradients_case, one_case

import funcops
from funcops import (
    AttentionConfig,
    ChainConfig,
    CrossEntropyConfig,
    DropoutConfig,
    ExpertsConfig,
    GatedDeltaRuleConfig,
    GLUConfig,
    LinearConfig,
    LinearCrossEntropyConfig,
    Needs,
    RepeatConfig,
    RMSNormConfig,
    RopeConfig,
    RouteConfig,
    Step,
    attention,
    chain,
    cross_entropy,
    differentiable,
    donate,
    dropout,
    gated_delta_rule,
    glu,
    linear,
    linear_cross_entropy,
    random,
    remat,
    repeat,
    rms_norm,
)
from funcops.engine.backend import select
from funcops.engine.program import programs
from funcops.invariant import PinnedConfig, pinned, with_invariant
from funcops.library.kernels.pins import Pins, pins
from funcops.lora import with_lora
from funcops.low_precision import Fp8Current, with_recipe
from funcops.models import (
    DecoderConfig,
    MoEConfig,
    Sampled,
    SamplingConfig,
    check_invariant,
    decoder,
    decoder_x,
    generate,
    log_probabilities,
    sample,
)

SIZES = dict(vocab=61, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
CFG = DecoderConfig(**SIZES, rope=RopeConfig(8))


def sliced(count, first, slow):
    return [*range(first, first + count), *(pytest.param(i, marks=pytest.mark.slow) for i in range(first + count, first + slow))]


@pytest.mark.parametrize("seed", sliced(3, 5000, 20))
def test_log_probabilities_of_training_and_decoding_are_the_same(seed):
    wrong, count = one_case(seed)
    assert count > 0
    assert wrong == dict.fromkeys(wrong, 0)


@pytest.mark.parametrize("seed", sliced(4, 6000, 20))
def test_gradients_of_a_rows_tokens_are_the_same_in_any_batch(seed):
    assert gradients_case(seed)


def test_without_the_mode_they_differ():
    """The comparison can fail: the same steps without the mode, in a drawn case."""
    wrong, _ = one_case(5002, free=True)
    assert sum(wrong.values()) > 0


def step(op, cfg, **options):
    return ChainConfig(steps=(Step("one", op, cfg, **options),), extras=options.get("takes", ()))


ROUTED = dict(experts=ExpertsConfig(4, dim=32, hidden=24))
REFUSED = {
    "a mean": (
        step(cross_entropy, CrossEntropyConfig(), takes=("labels",)),
        "^with_invariant: step 'one' must be .*cross_entropy, with the mean over all rows",
    ),
    "a mean of both": (
        step(linear_cross_entropy, LinearCrossEntropyConfig(8, 9), takes=("labels",)),
        "linear_cross_entropy, with the mean",
    ),
    "dropout": (step(dropout, DropoutConfig(0.1), takes=("key",)), "dropout, with the mask of an element"),
    "softcap": (decoder(DecoderConfig(**SIZES, softcap=9.0)), r"step 'blocks\.\*\.attn\.mix' must be .*attention, with softcap"),
    "aux": (
        decoder(DecoderConfig(**SIZES, moe=MoEConfig(route=RouteConfig(4, 2, aux=0.1), **ROUTED))),
        "route, with aux, a loss of all",
    ),
    "capacity": (
        decoder(DecoderConfig(**SIZES, moe=MoEConfig(route=RouteConfig(4, 2, capacity=1.0), **ROUTED))),
        "capacity, what others",
    ),
    "recurrent": (
        step(gated_delta_rule, GatedDeltaRuleConfig(), takes=("k", "v", "g", "beta")),
        "gated_delta_rule, with the chunks",
    ),
    "low precision": (
        with_recipe(decoder(CFG), Fp8Current()),
        "says what its rows depend on, make_op.*got qlinear, which does not",
    ),
    "adapters with dropout": (with_lora(decoder(CFG), 2, ("*.up",), dropout=0.1), "low_rank, with the mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_refused_by_its_path(name):
    cfg, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        with_invariant(cfg)


@pytest.mark.parametrize(
    ("sizes", "said"), [({"rows": 0}, "rows must be at least 1"), ({"queries": 48}, "queries must be a multiple of 32")]
)
def test_sizes_that_no_kernel_has_are_refused(sizes, said):
    with pytest.raises(ValueError, match=said):
        with_invariant(decoder(CFG), **sizes)
    with pytest.raises(ValueError, match="multiple of 32"):
        with_invariant(decoder(CFG), queries=160)


def test_another_config_than_a_chains_is_refused():
    with pytest.raises(TypeError, match="with_invariant: cfg must be ChainConfig"):
        with_invariant(LinearConfig(2, 2))
    wrong = ChainConfig(
        steps=(Step("a", linear, LinearConfig(2, 2)), Step("b", dropout, DropoutConfig(0.5), takes=("key",))), extras=("key",)
    )
    with pytest.raises(ValueError, match="^with_invariant: step 'b' must be"):
        with_invariant(wrong)


def test_it_is_in_the_config_and_holds_in_no_other_run():
    cfg, x = with_invariant(step(linear, LinearConfig(300, 20)), rows=64), torch.randn(9, 300)
    assert cfg.steps[0].cfg == PinnedConfig(linear, LinearConfig(300, 20), rows=64) != PinnedConfig(linear, LinearConfig(300, 20))
    params = chain.init(cfg, key=random.key(0))
    y, residuals = chain.fwd(params, x, cfg)
    assert pins() is None
    assert residuals["one"].cfg.pins == Pins(64, 128)
    other = with_invariant(step(linear, LinearConfig(300, 20)), rows=32)
    with pytest.raises((TypeError, ValueError), match="cfg"):
        chain.bwd(residuals, y, other)
    assert list(params) == ["one"] and list(chain.init(step(linear, LinearConfig(300, 20)), key=random.key(0))) == ["one"]


def test_the_text_of_programs_outside_of_the_mode_is_the_same_and_no_rule_runs_inside():
    cfg, x = decoder(CFG), decoder_x(CFG, torch.zeros(40, 40, dtype=torch.int64))
    params = chain.init(cfg, key=random.key(0))
    seen = []

    def note(which, *args, **options):
        seen.append((which, args[3]))
        return made(which, *args, **options)

    made = programs._made
    try:
        programs._made = note
        body = cfg.steps[1].cfg.cfg
        block = with_invariant(ChainConfig(steps=(Step("block", chain, body),), extras=body.extras))
        big = torch.randn(40, 40, 32)
        given = funcops.WithExtras(big, {name: x.extras[name] for name in body.extras})
        y, residuals = chain.fwd({"block": params["blocks"][0]}, given, block)
        chain.bwd(residuals, y, block)
    finally:
        programs._made = made
    inside = [device for which, device in seen if which in ("forward", "backward")]
    assert inside.count(None) >= 2


def test_autograd_runs_the_backward_by_what_the_forward_ran_by():
    cfg = with_invariant(ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(300)), Step("up", linear, LinearConfig(300, 40)))))
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(50, 300)
    want = chain.bwd(chain.fwd(params, x, cfg)[1], torch.ones(50, 40), cfg)[1]
    leaf = x.clone().requires_grad_()
    differentiable(chain)(params, leaf, cfg).sum().backward()
    assert torch.equal(leaf.grad, want)
    one = x[7:8].clone().requires_grad_()
    differentiable(chain)(params, one, cfg).sum().backward()
    assert torch.equal(one.grad[0], want[7])


def test_halves_donated_residuals_accumulators_and_remat_give_the_same_bits():
    body = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(24)), Step("up", linear, LinearConfig(24, 24))))
    model = ChainConfig(steps=(Step("layers", repeat, RepeatConfig(chain, body, 2)),))
    cfg, x = with_invariant(model, rows=16), torch.randn(21, 24)
    params = chain.init(cfg, key=random.key(0))
    y, residuals = chain.fwd(params, x, cfg)
    dparams, dx = chain.bwd(residuals, y, cfg)
    got, pending = chain.dgrad(residuals, y, cfg)
    halves = chain.wgrad(pending, cfg)
    into = funcops.trees.tree_map_tensors(torch.zeros_like, params)
    chain.bwd(donate(residuals), y, cfg, into=into)
    again = with_invariant(
        dataclasses.replace(model, steps=(Step("layers", repeat, RepeatConfig(remat(chain), body, 2)),)), rows=16
    )
    by_remat = chain.bwd(chain.fwd(params, x, again)[1], y, again)
    assert torch.equal(dx, got) and torch.equal(dx, by_remat[1])
    flat = [funcops.trees.leaves(tree) for tree in (dparams, halves, into, by_remat[0])]
    assert all(torch.equal(a, b) for a, *others in zip(*flat, strict=True) for b in others)


def test_needs_are_passed_on():
    cfg, x = with_invariant(step(linear, LinearConfig(24, 24))), torch.randn(3, 24)
    params = chain.init(cfg, key=random.key(0))
    assert chain.fwd(params, x, cfg, needs=Needs.NONE)[1] is None
    y, residuals = chain.fwd(params, x, cfg, needs=Needs(x=True, params=False))
    dparams, dx = chain.bwd(residuals, y, cfg)
    assert dparams["one"].weight is None and dx is not None
    assert all(leaf is None for leaf in funcops.trees.leaves(chain.wgrad(None, cfg)))


def test_a_tracer_and_a_device_without_triton_are_refused_by_name():
    cfg, x = PinnedConfig(linear, LinearConfig(4, 4)), torch.randn(3, 4)
    params = pinned.init(cfg, key=random.key(0))
    with pytest.raises(Exception, match="linear_fwd in invariant mode: call must be eager"):
        torch.fx.experimental.proxy_tensor.make_fx(lambda t: pinned.fwd(params, t, cfg)[0])(x)
    said = "device must be the CPU by torch, or Triton's kernels: .*, got torch.float32 on meta by torch"
    with pytest.raises(ValueError, match=f"linear_fwd in invariant mode: {said}"):
        Pins()(linear_kernel(), torch.empty(1, device="meta"))
    q = torch.empty(1, 4, 2, 8, device="meta")
    with pytest.raises(ValueError, match=f"attention_fwd in invariant mode: {said}"):
        pinned.fwd(None, (q, q, q), PinnedConfig(attention, AttentionConfig(causal=True)))


def linear_kernel():
    from funcops.library.kernels.linear import linear_fwd

    return linear_fwd.kernel


def test_the_mode_ends_with_an_error():
    with pytest.raises(ValueError, match="linear_fwd: x must be"):
        pinned.fwd(
            pinned.init(PinnedConfig(linear, LinearConfig(4, 4)), key=random.key(0)),
            torch.randn(3, 5),
            PinnedConfig(linear, LinearConfig(4, 4)),
        )
    assert pins() is None and select.choice() == select.DEFAULT


def test_generate_yields_the_log_probabilities_of_what_it_drew():
    params = chain.init(decoder(CFG), key=random.key(0))
    ids, options = torch.randint(0, 61, (3, 5)), dict(key=random.key(1), sampling=SamplingConfig(temperature=0.7, top_k=9))
    plain = torch.stack(list(generate(params, CFG, ids, 6, **options)))
    found = list(generate(params, CFG, ids, 6, **options, log_probabilities=True))
    assert all(type(one) is Sampled for one in found)
    assert torch.equal(plain, torch.stack([one.tokens for one in found]))
    whole = torch.cat((ids, plain.T), 1)
    logits = chain.fwd(params, decoder_x(CFG, whole), decoder(CFG), needs=Needs.NONE)[0]
    want = torch.log_softmax(logits[:, 4:-1].double(), -1).gather(2, plain.T.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(torch.stack([one.log_probabilities for one in found], 1).double(), want, atol=1e-5)


def test_log_probabilities_of_a_row_that_has_ended_are_zero():
    params = chain.init(decoder(CFG), key=random.key(0))
    ids, options = torch.randint(0, 61, (4, 3)), dict(key=random.key(3), sampling=SamplingConfig(temperature=5.0))
    stop = tuple(range(0, 61, 3))
    found = list(generate(params, CFG, ids, 12, **options, stop=stop, log_probabilities=True))
    ended = torch.zeros(4, dtype=torch.bool)
    for one in found:
        assert bool((one.log_probabilities[ended] == 0).all()) and bool((one.log_probabilities[~ended] < 0).all())
        ended |= torch.isin(one.tokens, torch.tensor(stop))
    assert ended.any()


def test_log_probabilities_are_the_losses_of_cross_entropy_with_the_other_sign():
    logits, tokens = torch.randn(4, 3, 61), torch.randint(0, 61, (4, 3))
    losses, _ = cross_entropy.fwd(None, (logits, tokens), CrossEntropyConfig(reduction="none"))
    assert torch.equal(log_probabilities(logits, tokens), -losses)
    drawn = sample(logits[0], random.key(0), SamplingConfig(temperature=1.0))
    assert log_probabilities(logits[0], drawn).shape == (3,)


def test_a_rope_that_depends_on_the_longest_sequence_is_refused():
    from funcops.library.ops.rope_scaling import DynamicScaling

    grows = RopeConfig(8, scaling=DynamicScaling(2.0, original_context=32))
    with pytest.raises(ValueError, match="rope, with angles that depend on the longest sequence"):
        with_invariant(decoder(DecoderConfig(**SIZES, rope=grows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_self_check_holds_in_the_mode_and_names_what_differs_without(dtype):
    params, cfg = chain.init(decoder(CFG), key=random.key(0), dtype=dtype), with_invariant(decoder(CFG))
    assert check_invariant(params, CFG, cfg, tokens=20) == 9 * 19 + 9 + 20
    wider = DecoderConfig(**SIZES | dict(dim=128, hidden=300, context=160), rope=RopeConfig(8))
    plain = chain.init(decoder(wider), key=random.key(0), dtype=dtype)
    with pytest.raises(RuntimeError, match="log-probabilities .* must be the bits .*, the first at position"):
        check_invariant(plain, wider, decoder(wider))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("joined", [False, True])
def test_the_losses_of_a_trainer_are_the_log_probabilities_of_a_sampler(joined, dtype):
    """And so are the entropies; also where head and loss are one, and however few logits exist at a time."""
    params, sampler = chain.init(decoder(CFG), key=random.key(0), dtype=dtype), with_invariant(decoder(CFG))
    ids = torch.randint(0, 61, (5, 9))
    found = list(generate(params, CFG, ids, 7, model=sampler, log_probabilities=True, entropy=True))
    rows = torch.cat((ids, torch.stack([one.tokens for one in found], 1)), 1)
    saved = torch.stack([one.log_probabilities for one in found], 1)
    trainer = decoder(CFG, loss=True, reduction="none", entropy=True)
    if joined:
        trainer = dataclasses.replace(trainer, joined=("loss",))
    labels = rows.roll(-1, 1)
    x = decoder_x(CFG, rows, dtype, labels=labels)
    y, residuals = chain.fwd({**params, "loss": None}, x, with_invariant(trainer))
    assert torch.equal(-y.main[:, 8:-1], saved)
    assert torch.equal(y.extras["entropy"][:, 8:-1], torch.stack([one.entropy for one in found], 1))
    dy = funcops.WithExtras(torch.rand(5, 16), {"entropy": torch.rand(5, 16)})
    whole = chain.bwd(residuals, dy, with_invariant(trainer))[0]["embed"].weight
    assert torch.isfinite(whole).all() and whole.abs().max() > 0


@pytest.mark.parametrize("entropy", [False, True])
def test_the_gradients_of_a_joined_loss_do_not_depend_on_the_number_of_rows(entropy):
    """Chunks of classes are cut by a nominal number of rows."""
    op, cfg = linear_cross_entropy, LinearCrossEntropyConfig(40, 700, reduction="none", chunk_bytes=92_160, entropy=entropy)
    own, x, labels = PinnedConfig(op, cfg, rows=16), torch.randn(90, 40), torch.randint(0, 700, (90,))
    params = pinned.init(own, key=random.key(0))
    dy = (torch.rand(90), torch.rand(90)) if entropy else torch.rand(90)

    def of(rows, values):
        return tuple([t[rows] for t in values]) if entropy else values[rows]

    y, residuals = pinned.fwd(params, (x, labels), own)
    dx = pinned.bwd(residuals, dy, own)[1][0]
    for rows in (slice(3, 4), slice(0, 90), slice(50, 88)):
        part, kept = pinned.fwd(params, (x[rows], labels[rows]), own)
        assert all(map(torch.equal, funcops.trees.leaves(part), funcops.trees.leaves(of(rows, y))))
        assert torch.equal(pinned.bwd(kept, of(rows, dy), own)[1][0], dx[rows])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["swiglu", "geglu_tanh", "clamped_swiglu"])
def test_elements_of_any_number_and_threads(kind, threads):
    """1,025 rows of 32 are more than torch leaves to one thread, and two would part them within 32 elements."""
    limit = {"limit": 7.0} if kind == "clamped_swiglu" else {}
    own, generator = PinnedConfig(glu, GLUConfig(kind=kind, gate="first", **limit)), torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for width in (32, 37):
            x, dy = torch.randn(1025, 2 * width, generator=generator), torch.randn(1025, width, generator=generator)
            y, residuals = pinned.fwd(None, x, own)
            dx = pinned.bwd(residuals, dy, own)[1]
            for at in (slice(0, 1), slice(500, 530), slice(1000, 1025)):
                part, kept = pinned.fwd(None, x[at], own)
                assert torch.equal(part, y[at])
                assert torch.equal(pinned.bwd(kept, dy[at], own)[1], dx[at])
    finally:
        torch.set_num_threads(before)


def test_a_norm_has_no_threshold():
    own, x, dy = PinnedConfig(rms_norm, RMSNormConfig(256)), torch.randn(100, 256), torch.randn(100, 256)
    params = pinned.init(own, dtype=torch.float32)
    dx = pinned.bwd(pinned.fwd(params, x, own)[1], dy, own)[1]
    for at in (slice(3, 4), slice(40, 60)):
        assert torch.equal(pinned.bwd(pinned.fwd(params, x[at], own)[1], dy[at], own)[1], dx[at])


OPTIONS = [{}, {"window": 40}, {"chunk": 50}, {"alibi": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_a_part_of_the_queries(options, dtype):
    """Queries are the last of the keys' positions, as in a prompt's later chunk; and gradients before queries whose dy is 0."""
    own = PinnedConfig(attention, AttentionConfig(causal=True, **options), queries=64)
    q, dy, k, v = (torch.randn(2, 200, heads, 16).to(dtype) for heads in (4, 4, 2, 2))
    y, residuals = pinned.fwd(None, (q, k, v), own)
    for first, last in ((0, 1), (77, 78), (100, 133), (150, 200), (0, 130)):
        part, kept = pinned.fwd(None, (q[1:, first:last], k[1:, :last], v[1:, :last]), own)
        assert torch.equal(part, y[1:, first:last])
        if not first:
            only = torch.zeros_like(dy)
            only[:, :last] = dy[:, :last]
            whole, alone = pinned.bwd(residuals, only, own)[1], pinned.bwd(kept, dy[1:, :last], own)[1]
            assert all(torch.equal(a[1:, :last], b) for a, b in zip(whole, alone, strict=True))
    plain = attention.fwd(None, (q, k, v), own.cfg)[0]
    assert torch.allclose(plain.float(), y.float(), atol=2e-2 if dtype is torch.bfloat16 else 1e-5)
