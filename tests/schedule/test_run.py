"""Schedules run by one process give the results of one chain."""

import re

import pytest
import torch
from staged import DIM, USER, decoder, gated, microbatches, reference, routed_stages

from funcops import (
    AddConfig,
    ChainConfig,
    ForkConfig,
    LinearConfig,
    Needs,
    Step,
    WithExtras,
    add,
    chain,
    differentiable,
    fork,
    linear,
    random,
)
from funcops.engine.compose.add import AddResiduals
from funcops.engine.contract.op import dgrad_of, make_op
from funcops.engine.errors import LedgerError
from funcops.engine.trees import nbytes, paths, put, tensors, tree_map_tensors
from funcops.memory.ledger import Ledger
from funcops.schedule import (
    Schedule,
    delay_w,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    run,
    zb_h1,
    zb_h2,
    zb_v,
)
from funcops.schedule.stage import check_ties
from funcops.testing.tolerances import assert_close

M = 8
SCHEDULES = {
    "gpipe": gpipe(4, M),
    "one_f_one_b": one_f_one_b(4, M),
    "zb_h1": zb_h1(4, M),
    "zb_h2": zb_h2(4, M),
    "interleaved_1f1b": interleaved_1f1b(2, M),
    "interleaved_zb": interleaved_zb(2, M),
    "zb_v": zb_v(2, M),
    "dualpipe_v": dualpipe_v(2, M),
    "delayed": delay_w(one_f_one_b(4, M), 6),
    "user": Schedule.from_csv(USER),
}


def setup(cfg, count=M, dtype=torch.float64):
    return chain.init(cfg, key=random.key(1), dtype=dtype), microbatches(count, cfg)


@pytest.mark.turns("keyed", "name", every=2)
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_equal_the_chains(name, keyed):
    cfg, schedule = decoder(4, keyed), SCHEDULES[name]
    params, xs = setup(cfg, schedule.microbatches)
    losses, want = reference(params, xs, cfg)
    ran = run(schedule, params, xs, cfg)
    assert ran.ys == losses, "a forward is a forward, bit for bit"
    assert_close(ran.dparams, want, dtype=torch.float64)
    assert [event.action for event in ran.events] == [action for _, action in schedule.order()]
    assert all(event.nbytes > 0 for event in ran.events[:4]) and ran.events[-1].nbytes == 0


def test_inputs_get_gradients_and_dys_are_taken():
    cfg = ChainConfig(steps=(Step("a", linear, LinearConfig(3, 5)), Step("b", linear, LinearConfig(5, 2))))
    params = chain.init(cfg, key=random.key(0), dtype=torch.float64)
    xs, dys = torch.randn(4, 6, 3, dtype=torch.float64), torch.randn(4, 6, 2, dtype=torch.float64)
    ran = run(zb_h1(2, 4), params, list(xs), cfg, list(dys))
    y, residuals = chain.fwd(params, xs, cfg)
    dparams, dx = chain.bwd(residuals, dys, cfg)
    assert_close((torch.stack(ran.ys), ran.dparams, torch.stack(ran.dxs)), (y, dparams, dx), dtype=torch.float64)


def test_an_extra_that_several_stages_read_gets_the_sum_of_their_gradients():
    up = (Step("up", linear, LinearConfig(3, 3)), Step("more", add, AddConfig(), takes=("given",)))
    stage = ChainConfig(steps=up, extras=("given",))
    cfg = ChainConfig(steps=tuple(Step(name, chain, stage) for name in "ab"), extras=("given",))
    params = chain.init(cfg, key=random.key(0), dtype=torch.float64)
    data, given, dys = torch.randn(3, 4, 6, 3, dtype=torch.float64)
    xs = [WithExtras(x, {"given": g}) for x, g in zip(data, given, strict=True)]
    ran = run(zb_h1(2, 4), params, xs, cfg, list(dys))
    for x, dy, dx in zip(xs, dys, ran.dxs, strict=True):
        _, want = chain.bwd(chain.fwd(params, x, cfg)[1], dy, cfg)
        assert_close(dx, want, dtype=torch.float64)


@pytest.mark.parametrize("schedule", [gpipe(1, 1), zb_h1(1, 1)], ids=["whole", "halves"])
def test_an_op_that_forgets_the_gradient_of_an_extra_raises(schedule):
    """And is not taken for one whose extra has none."""

    @dgrad_of(AddResiduals)
    def short_dgrad(residuals, dy, cfg):
        return (dy,), None

    short = make_op("short", AddConfig, fwd=add.fwd, dgrad=short_dgrad)
    for op in (add, short):
        cfg = ChainConfig(steps=(Step("sum", op, AddConfig(), takes=("given",)),), extras=("given",))
        given = {"sum": None}, [WithExtras(torch.ones(2), {"given": torch.ones(2)})], cfg, [torch.ones(2)]
        if op is add:
            assert torch.equal(run(schedule, *given).dxs[0].extras["given"], torch.ones(2))
        else:
            with pytest.raises(ValueError, match="stage 0"):
                run(schedule, *given)


LOSSES = ("loss0", "loss3", "logits1")


@pytest.mark.parametrize("name", ["zb_v", "one_f_one_b"])
@pytest.mark.parametrize("given", [False, True], ids=["losses", "dys"])
def test_outputs_of_stages_and_losses_added_to_the_loss(name, given):
    """The sums of the losses are added, compared with autograd."""
    cfg, params, xs = routed_stages()
    asked = tree_map_tensors(lambda t: t.requires_grad_(), params)
    total, ys = 0.0, []
    for x in xs:
        y = differentiable(chain)(asked, x, cfg)
        total = total + y.main + sum(y.extras[name].sum() for name in LOSSES)
        ys.append(tree_map_tensors(torch.detach, y))
    wanted = torch.autograd.grad(total / len(xs), tensors(asked), allow_unused=True)
    params = tree_map_tensors(torch.detach, asked)
    dys = [
        WithExtras(
            torch.full_like(y.main, 1 / M), {n: torch.full_like(t, 1 / M) if n in LOSSES else None for n, t in y.extras.items()}
        )
        for y in ys
    ]
    ran = run(SCHEDULES[name], params, xs, cfg, **({"dys": dys} if given else {"losses": LOSSES}))
    assert [list(y.extras) for y in ran.ys] == [list(cfg.outputs)] * M and ran.ys[0].extras["load3"].dtype is torch.int32
    assert_close(ran.ys, ys, dtype=torch.float64)
    assert_close(tensors(ran.dparams), list(wanted), dtype=torch.float64)


def test_outputs_that_are_not_losses_raise():
    cfg, params, xs = routed_stages()
    for losses, match in (
        (("lost",), r"run: losses must be names among the outputs \(load0, .*, logits3\), got \['lost'\]"),
        ("loss0", "run: losses must be a tuple of names, got 'loss0'"),
        (("load1",), r"run: losses must be names of float outputs, got 'load1', int32\[8\]"),
    ):
        with pytest.raises(ValueError, match=match):
            run(gpipe(4, M), params, xs, cfg, losses=losses)
    with pytest.raises(ValueError, match="run: losses must be .* where dys are given"):
        run(gpipe(4, M), params, xs, cfg, [None] * M, losses=("loss0",))
    with pytest.raises(TypeError, match="run, microbatch 0: dy must be WithExtras with extras load0, "):
        run(gpipe(4, M), params, xs, cfg, list(torch.ones(M)))


def test_accumulators_and_frozen_stages():
    cfg = decoder(4)
    params, xs = setup(cfg, dtype=torch.float32)
    params = tree_map_tensors(lambda t: t.bfloat16(), params)
    into = tree_map_tensors(lambda t: torch.ones_like(t, dtype=torch.float32), params)
    ran = run(zb_v(2, M), params, xs, cfg, into=into)
    assert ran.dparams["s1"]["mlp"]["up"].weight is into["s1"]["mlp"]["up"].weight
    again = run(zb_v(2, M), params, xs, cfg, into=tree_map_tensors(torch.zeros_like, into))
    assert_close(tree_map_tensors(lambda t: t - 1, ran.dparams), again.dparams, dtype=torch.bfloat16)
    frozen = run(zb_v(2, M), params, xs, cfg, needs=Needs(x=False, params=("s2", "s3.head")))
    got = {path for path, t in paths(frozen.dparams).items() if t is not None}
    assert got == {path for path, t in paths(params).items() if t is not None and path.startswith(("s2", "s3.head"))}
    assert max(frozen.peak_bytes) < max(ran.peak_bytes), "a frozen first stage keeps nothing"


def test_ties_between_stages():
    cfg = decoder(4, ties={"s3.head.weight": "s0.embed.weight"})
    params, xs = setup(cfg)
    losses, want = reference(params, xs, cfg)
    ran = run(zb_v(2, M), params, xs, cfg)
    assert ran.ys == losses
    assert_close(ran.dparams, want, dtype=torch.float64)


def test_frozen_parameters_of_a_tied_chain_have_no_gradient():
    """None, not zeros: an optimiser would decay them."""
    cfg = decoder(4, ties={"s3.head.weight": "s0.embed.weight"})
    params, xs = setup(cfg)
    needs = Needs(x=False, params=("s1", "s0.embed"))
    _, residuals = chain.fwd(params, xs[0], cfg, needs=needs)
    want, _ = chain.bwd(residuals, torch.tensor(1.0, dtype=torch.float64), cfg)
    got = run(Schedule.from_csv("0F0,1F0,2F0,3F0,3I0,2B0,1B0,0B0,3W0"), params, xs[:1], cfg, needs=needs).dparams
    assert {path for path, t in paths(got).items() if t is not None} == {path for path, t in paths(want).items() if t is not None}
    assert_close(got, want, dtype=torch.float64)


def test_done_is_told_once_a_stage_and_when_it_is():
    cfg = decoder(4)
    params, xs = setup(cfg)
    seen = {}
    ran = run(
        zb_v(2, M), params, xs, cfg, done=lambda stage, dparams: seen.setdefault(stage, tree_map_tensors(torch.clone, dparams))
    )
    assert sorted(seen) == [0, 1, 2, 3]
    for stage, dparams in seen.items():
        assert_close(dparams, ran.dparams[f"s{stage}"], dtype=torch.float64)


TIES = {"s3.head.weight": "s0.embed.weight"}
DONE = {
    **{f.__name__: f(2, M) for f in (zb_v, dualpipe_v, interleaved_1f1b)},
    "the tied stage last": Schedule.from_csv("0F0,1F0,2F0,3F0,3I0,2B0,1B0,0B0,3W0"),
    "in any order": Schedule.from_csv("0F0,1F0,2F0,3F0,3I0,2I0,1I0,0I0,0W0,2W0,3W0,1W0"),
    "late": delay_w(zb_v(2, M), 6),
}


@pytest.mark.parametrize("name", DONE)
def test_done_is_told_when_the_sums_of_tied_leaves_are_whole(name):
    """A stage adds to the leaf that it is tied to; in its own tree that is None, as in the results."""
    cfg, seen = decoder(4, ties=TIES), {}
    params, xs = setup(cfg, DONE[name].microbatches)

    def done(stage, dparams):
        assert stage not in seen
        seen[stage] = tree_map_tensors(torch.clone, dparams)

    ran = run(DONE[name], params, xs, cfg, done=done)
    assert sorted(seen) == [0, 1, 2, 3] and paths(seen[3])["head.weight"] is None
    for stage, dparams in seen.items():
        assert_close(dparams, ran.dparams[f"s{stage}"], dtype=torch.float64)


def test_bytes_fall_when_a_stage_is_done():
    cfg = decoder(2)
    params, xs = setup(cfg, 1)
    f0, f1, i1, w1, i0, w0 = [e.nbytes for e in run(Schedule.from_csv("0F0,1F0,1I0,1W0,0I0,0W0"), params, xs, cfg).events]
    assert f0 < f1 and i1 > w1 == f0 and i0 > w0 == 0


def test_inputs_are_nobodys_residuals():
    """Tensors that the caller holds anyway are not counted: params, the main value and extras."""
    cfg, params, xs, dys = gated()
    ran = run(gpipe(2, 2), params, xs, cfg, dys)
    assert ran.peak_bytes == (0, 2 * 6 * DIM * 4), "the first keeps nothing but what it was given, the second what the first gave"
    frozen = run(gpipe(2, 2), params, xs, cfg, dys, needs=Needs(params=False))
    assert frozen.peak_bytes == (0, 0), "a weight is not counted either"


def test_a_tie_between_two_ranks_is_refused():
    """Stages of one rank may share a leaf, wherever they stand."""
    cfg = decoder(4, ties={"s3.head.weight": "s0.embed.weight"})
    check_ties("Pipeline", cfg, {0: 0, 1: 1, 2: 1, 3: 0})
    said = "Pipeline: cfg.ties must be between stages of one rank (as the first and the last of zb_v and dualpipe_v are), got "
    with pytest.raises(ValueError, match="^" + re.escape(f"{said}s3.head.weight on rank 3 and s0.embed.weight on rank 0")):
        check_ties("Pipeline", cfg, {0: 0, 1: 1, 2: 2, 3: 3})


def test_a_mismatch_raises_before_anything_runs():
    cfg = decoder(4)
    params, xs = setup(cfg)
    with pytest.raises(ValueError, match="run: cfg must be a chain of 2 steps, one a stage of the schedule, got 4 steps"):
        run(gpipe(2, M), params, xs, cfg)
    with pytest.raises(ValueError, match="run: xs must be a list of 8, one a microbatch of the schedule, got 2"):
        run(gpipe(4, M), params, xs[:2], cfg)
    with pytest.raises(ValueError, match="run: dys must be a list of 8, one a microbatch, got 1"):
        run(gpipe(4, M), params, xs, cfg, [None])
    with pytest.raises(ValueError, match=r"run: params must be a dict by step name: s0, s1, s2, s3, got missing \['s0'\]"):
        run(gpipe(4, M), {k: v for k, v in params.items() if k != "s0"}, xs, cfg)
    with pytest.raises(TypeError, match="run: schedule must be Schedule, got 'gpipe'"):
        run("gpipe", params, xs, cfg)
    with pytest.raises(ValueError, match="run: stage 'f' must be without gives"):
        forked = ChainConfig(steps=(Step("f", fork, ForkConfig(), gives=("b",)), Step("g", chain, _adds(), takes=("b",))))
        run(gpipe(2, 1), chain.init(forked), [torch.ones(2)], forked)
    with pytest.raises(ValueError, match="run: dys must be given if y is not a scalar loss"):
        plain = ChainConfig(steps=(Step("a", linear, LinearConfig(DIM, DIM)),))
        run(gpipe(1, 1), chain.init(plain, key=random.key(0)), [torch.ones(2, DIM)], plain)


def halved(t):
    return t.to(torch.float32)


WRONG = {
    "shared by two stages": (
        lambda into: into | {"s2": into["s1"]},
        ValueError,
        r"run: into\.s2\.mlp\.(\S+) must be a tensor of its own, got memory of into\.s1\.mlp\.\1",
    ),
    "narrow": (
        lambda into: into | {"s2": tree_map_tensors(halved, into["s2"])},
        TypeError,
        r"stage 2: into\.mlp\.down\.weight must be torch\.float64 or a wider float dtype, got torch\.float32",
    ),
    "elsewhere": (
        lambda into: into | {"s2": tree_map_tensors(lambda t: t.to("meta"), into["s2"])},
        ValueError,
        r"stage 2: into\.mlp\.down\.weight must be on device cpu, got meta",
    ),
    "missing": (
        lambda into: put(into, "s2.mlp.up.bias", None),
        TypeError,
        r"stage 2: into\.mlp\.up\.bias must be a tensor \[16\], got None",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_accumulators_are_checked_before_anything_runs(wrong):
    cfg = decoder(4)
    params, xs = setup(cfg)
    whole = tree_map_tensors(torch.zeros_like, params)
    change, error, said = WRONG[wrong]
    into = change(whole)
    with pytest.raises(error, match=said):
        run(SCHEDULES["one_f_one_b"], params, xs, cfg, into=into)
    assert all(t.is_meta or not t.any() for t in tensors(into)), "nothing was added"
    needs = Needs(x=False, params=("s0", "s1", "s3"))
    if wrong != "elsewhere":  # a frozen stage adds nothing to its own
        run(SCHEDULES["one_f_one_b"], params, xs, cfg, into=into, needs=needs)


def _adds():
    from funcops import AddConfig, add

    return ChainConfig(steps=(Step("sum", add, AddConfig(), takes=("b",)),), extras=("b",))


def test_an_error_says_where():
    cfg = decoder(4)
    params, xs = setup(cfg)
    params["s2"]["mlp"]["up"] = None
    with pytest.raises(TypeError) as error:
        run(one_f_one_b(4, M), params, xs, cfg)
    if hasattr(error.value, "__notes__"):
        assert error.value.__notes__ == ["in the forward of stage 2 (s2), microbatch 0"]


def test_a_ledger_uses_everything_once():
    t = torch.zeros(100)
    with Ledger() as ledger:
        ledger.keep("a", {"x": t})
        ledger.keep("b", t.view(10, 10))
        assert ledger.nbytes == ledger.peak_bytes == 400 == nbytes(t) and ledger.waiting == ("a", "b")
        with pytest.raises(LedgerError, match="Ledger: a must be kept once, got it again"):
            ledger.keep("a", t)
        ledger.take("a")
        assert ledger.nbytes == 400 and "a" not in ledger and "b" in ledger
        with pytest.raises(LedgerError, match="Ledger: a must be waiting, got one taken already"):
            ledger.take("a")
        with pytest.raises(LedgerError, match="Ledger: c must be waiting, got one never kept"):
            ledger.take("c")
        with pytest.raises(LedgerError, match="Ledger: a must be kept once"):
            ledger.keep("a", t)
        ledger.take("b")
        assert ledger.nbytes == 0 and len(ledger) == 0
    with pytest.raises(LedgerError, match="everything must be taken by the end, got 1 left: stage 3"), Ledger(t) as ledger:
        ledger.keep("stage 3", t)
        assert ledger.nbytes == 0, "it belongs to what is not counted"
    with pytest.raises(KeyError), Ledger() as ledger:
        ledger.keep("x", t)
        raise KeyError
    assert len(ledger) == 0
