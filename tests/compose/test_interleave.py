"""Parts of the rows in turns: what a body needs beyond rows (keys, ties, policies), and in which order parts run."""

import pytest
import torch

from funcops import (
    ChainConfig,
    CrossEntropyConfig,
    DropoutConfig,
    ExpertsConfig,
    InterleaveConfig,
    LinearConfig,
    RepeatConfig,
    RMSNormConfig,
    StaleResidualError,
    Step,
    WithExtras,
    batch_wgrads,
    chain,
    cross_entropy,
    dropout,
    interleave,
    linear,
    random,
    remat,
    repeat,
    report,
    rms_norm,
    with_policy,
)
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.pausing import Flying, Pausing, landed, pausing, take_turns
from funcops.engine.program.values import add, fold_keys
from funcops.engine.trees import nbytes, tree_map, tree_map_tensors
from funcops.library.ops.expert_steps import ExpertStepsConfig, expert_steps, plain_experts
from funcops.low_precision import NVFP4, quantize_params, with_recipe
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close


def waiting(op):
    """The op as if it sent something before each of its functions."""

    def pauses(function):
        def run(*args, **options):
            yield
            return function(*args, **options)

        return run

    return op._replace(pausing=Pausing(pauses(op.fwd), pauses(op.dgrad), pauses(op.bwd)))


D, SENDS = 8, waiting(linear)
BODY = ChainConfig(
    steps=(
        Step("norm", rms_norm, RMSNormConfig(D)),
        Step("up", SENDS, LinearConfig(D, D, bias=False)),
        Step("drop", dropout, DropoutConfig(0.5), takes=("key",)),
        Step("down", SENDS, LinearConfig(D, D, bias=False)),
    ),
    extras=("key",),
)
TIED = ChainConfig(steps=BODY.steps, extras=("key",), ties={"down.weight": "up.weight"})


def one_after_another(op, params, x, key, dy, body, n, into=None):
    ys, dparams, dxs = [], None, []
    for i, (rows, drows) in enumerate(zip(x.chunk(n), dy.chunk(n), strict=True)):
        y, kept = op.fwd(params, WithExtras(rows, {"key": random.fold_in(key, i)}), body)
        own, dx = op.bwd(kept, drows, body, into=into)
        ys.append(y)
        dxs.append(dx.main)
        dparams = own if into is not None else add(dparams, own)
    return torch.cat(ys), dparams, torch.cat(dxs)


@pytest.mark.parametrize("body", [BODY, TIED], ids=["plain", "tied"])
@pytest.mark.parametrize("op", [chain, remat(chain), with_policy(chain, "minimal")], ids=str)
def test_the_bits_of_a_loop(op, body):
    """Each part draws a mask of its own; a tied weight's gradient has all terms of one part before the next one's."""
    params, key = chain.init(body, key=random.key(0), dtype=torch.float32), random.key(1)
    x, dy = torch.randn(2, 6, 3, D, generator=torch.Generator().manual_seed(0))
    cfg, given = InterleaveConfig(op, body, 3), WithExtras(x, {"key": key})
    want = one_after_another(op, params, x, key, dy, body, 3)
    y, kept = interleave.fwd(params, given, cfg)
    dparams, dx = interleave.bwd(kept, dy, cfg)
    same_bits((y, dparams, dx.main), want, "whole")
    dx_again, pending = interleave.dgrad(kept, dy, cfg)
    same_bits((interleave.wgrad(pending, cfg), dx_again), (dparams, dx), "halves")
    sums, into, later = (tree_map_tensors(torch.ones_like, dparams) for _ in range(3))
    one_after_another(op, params, x, key, dy, body, 3, sums)
    interleave.bwd(kept, dy, cfg, into=into)
    interleave.wgrad(pending, cfg, into=later)
    same_bits((into, later), (sums, sums), "into")


LINEAR = LinearConfig(D, D, bias=False)
WAITING = chain, ChainConfig(steps=BODY.steps[:2])
REPEATS = {"sends": WAITING, "sends itself": (SENDS, LINEAR), "never sends": (linear, LINEAR)}


@pytest.mark.parametrize("name", REPEATS)
def test_layers_in_a_row_take_turns(name):
    """The parts have the bits of a loop; where the body sends, every layer of one part pauses for the other one's."""
    cfg = RepeatConfig(*REPEATS[name], 3)
    params, x = repeat.init(cfg, key=random.key(0)), torch.randn(2, 4, D, generator=torch.Generator().manual_seed(0))
    parts, dys = x.chunk(2), (x + 1).chunk(2)
    want = [repeat.fwd(params, part, cfg) for part in parts]
    backs = [repeat.bwd(kept, dy, cfg) for (_, kept), dy in zip(want, dys, strict=True)]

    def counted(of):
        pauses = 0
        while True:
            try:
                next(of)
            except StopIteration as end:
                assert pauses == cfg.times
                return end.value
            pauses += 1

    if name != "never sends":
        assert [counted(repeat.pausing.fwd(params, part, cfg))[0].tolist() for part in parts] == [y.tolist() for y, _ in want]
        kept = [counted(repeat.pausing.fwd(params, part, cfg))[1] for part in parts]
        same_bits([counted(repeat.pausing.bwd(k, d, cfg)) for k, d in zip(kept, dys, strict=True)], backs, "whole")
        found = [counted(repeat.pausing.dgrad(k, d, cfg)) for k, d in zip(kept, dys, strict=True)]
        same_bits([(repeat.wgrad(pending, cfg), dx) for dx, pending in found], backs, "halves")
    whole = InterleaveConfig(repeat, cfg, 2)
    y, kept = interleave.fwd(params, x, whole)
    dparams, dx = interleave.bwd(kept, x + 1, whole)
    assert torch.equal(y, torch.cat([y for y, _ in want])) and torch.equal(dx, torch.cat([dx for _, dx in backs]))
    same_bits(dparams, add(*[own for own, _ in backs]), "dparams")
    dx, pending = interleave.dgrad(kept, x + 1, whole)
    assert torch.equal(dx, torch.cat([dx for _, dx in backs]))
    same_bits(interleave.wgrad(pending, whole), dparams, "halves")
    into, sums = (tree_map_tensors(torch.ones_like, dparams) for _ in range(2))
    interleave.bwd(kept, x + 1, whole, into=into)
    for (_, node), dy in zip(want, dys, strict=True):
        repeat.bwd(node, dy, cfg, into=sums)
    same_bits(into, sums, "into")


def test_an_error_has_the_number_of_its_layer():
    cfg = InterleaveConfig(repeat, RepeatConfig(*WAITING, 3), 2)
    params, dy = repeat.init(cfg.cfg, key=random.key(0)), torch.ones(4, D)
    _, kept = interleave.fwd(params, torch.ones(4, D), cfg)
    params[2]["up"].weight.add_(1)
    with pytest.raises(StaleResidualError, match=r"^2\.up: "):
        interleave.bwd(kept, dy, cfg)


def test_steps_of_experts_take_turns():
    """With the results of the op's own functions, and gradients by its own fields."""
    cfg, g = ExpertStepsConfig(plain_experts(ExpertsConfig(3, D, 4))), torch.Generator().manual_seed(0)
    params, indices = expert_steps.init(cfg, key=random.key(0)), torch.tensor([[0, 2], [2, 1], [1, 0], [0, 1]], dtype=torch.int32)
    x, dy = (torch.rand(4, 2, generator=g), torch.randn(4, D, generator=g), indices), torch.randn(4, D, generator=g)
    want, node = expert_steps.fwd(params, x, cfg)
    own, waits = expert_steps.bwd(node, dy, cfg), expert_steps.pausing
    ((y, kept),) = take_turns([waits.fwd(params, x, cfg)])
    ((dparams, dx),) = take_turns([waits.bwd(kept, dy, cfg)])
    ((again, pending),) = take_turns([waits.dgrad(kept, dy, cfg)])
    same_bits((y, dparams, dx, again), (want, *own, own[1]), "results")
    same_bits(expert_steps.wgrad(pending, cfg), own[0], "halves")
    assert type(dparams) is type(params) and dx[2] is None
    into, sums = (tree_map_tensors(torch.ones_like, params) for _ in range(2))
    take_turns([waits.bwd(kept, dy, cfg, into=into)])
    expert_steps.bwd(kept, dy, cfg, into=sums)
    same_bits(into, sums, "into")
    needs = Needs(x=["1"], params=False)
    ((_, less),) = take_turns([waits.fwd(params, x, cfg, needs=needs)])
    assert nbytes(less) < nbytes(kept) and expert_steps.bwd(less, dy, cfg)[1][0] is None
    into = {"up": params.up, "down": params.down}
    for where, call in {
        "expert_steps_fwd: params": lambda: expert_steps.fwd(into, x, cfg),
        "expert_steps_bwd: into": lambda: expert_steps.bwd(node, dy, cfg, into=into),
        "expert_steps_wgrad: into": lambda: expert_steps.wgrad(pending, cfg, into=into),
    }.items():
        with pytest.raises(TypeError, match=f"^{where} must be ExpertsParams, got "):
            call()


def test_residuals_are_counted_by_part():
    plain = ChainConfig(steps=BODY.steps[:2])
    cfg, params, x = InterleaveConfig(chain, plain), chain.init(plain, key=random.key(0)), torch.ones(4, D)
    _, kept = interleave.fwd(params, x, cfg)
    assert list(kept) == [0, 1] and kept[1]["norm"].x.data_ptr() == x[2:].data_ptr()
    assert "0-1.norm.rstd (x 2)" in str(report(kept, params, x)) and report(kept, params, x).kept_bytes == 4 * 4


@pytest.mark.parametrize("policy", ["save_all", "recompute_norms", "minimal", "compress_fp8"])
def test_policies_reach_the_body(policy):
    plain = ChainConfig(steps=BODY.steps[:2])
    params, (x, dy) = chain.init(plain, key=random.key(0), dtype=torch.float32), torch.randn(2, 4, D)
    cfg, op = InterleaveConfig(chain, plain), with_policy(interleave, policy)
    y, kept = op.fwd(params, x, cfg)
    within = with_policy(chain, policy)
    parts = [within.fwd(params, rows, plain) for rows in x.chunk(2)]
    same_bits(y, torch.cat([one for one, _ in parts]), "y")
    found = [within.bwd(own, rows, plain) for (_, own), rows in zip(parts, dy.chunk(2), strict=True)]
    same_bits(op.bwd(kept, dy, cfg), (add(found[0][0], found[1][0]), torch.cat([dx for _, dx in found])), "gradients")
    assert nbytes(kept) == nbytes([own for _, own in parts])


def test_pendings_are_joined():
    plain = ChainConfig(steps=BODY.steps[:2])
    params, (x, dy) = chain.init(plain, key=random.key(0), dtype=torch.float64), torch.randn(2, 4, D, dtype=torch.float64)
    cfg = InterleaveConfig(chain, plain)
    _, pending = interleave.dgrad(interleave.fwd(params, x, cfg)[1], dy, cfg)
    assert_close(batch_wgrads(interleave, [pending], cfg), interleave.wgrad(pending, cfg), dtype=torch.float64)


def test_y_has_the_rows_of_x():
    loss = InterleaveConfig(cross_entropy, CrossEntropyConfig(reduction="mean"))
    with pytest.raises(
        TypeError, match=r"^interleave_fwd: y of the body must be one tensor with the 2 rows of x \(leave what sums"
    ):
        interleave.fwd(None, (torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)), loss)


def test_parts_take_turns():
    """Each up to its next pause, in their order; a part that ends early leaves the others to theirs."""
    log = []

    def begin(name, pauses):
        log.append(f"{name} starts {pauses}")
        return Flying(lambda: begin(name, pauses - 1)) if pauses else name

    assert take_turns([pausing(begin)("a", 1), pausing(begin)("b", 2)]) == ["a", "b"]
    assert log == ["a starts 1", "b starts 2", "a starts 0", "b starts 1", "b starts 0"]
    assert landed(begin("c", 3)) == "c" and take_turns([]) == []


def test_an_error_of_a_part_has_the_path_of_its_step():
    cfg = InterleaveConfig(chain, ChainConfig(steps=BODY.steps[:2]))
    params = tree_map(lambda t: t, chain.init(cfg.cfg, key=random.key(0)))
    params["up"].weight = torch.ones(D, D + 1)
    with pytest.raises(ValueError, match=r"^up: linear_fwd: params.weight must be"):
        interleave.fwd(params, torch.ones(4, D), cfg)


def test_each_part_rounds_with_noise_of_its_own():
    """A recipe that rounds dy at random has a key beside each weight: the part's number is folded into it."""
    body = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(32, 32, bias=False)),)), NVFP4())
    work = quantize_params(chain.init(body, key=random.key(0), dtype=torch.float32), body, key=random.key(1))
    x, dy = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0)).bfloat16().repeat(1, 2, 1)
    dparams, dx = interleave.bwd(interleave.fwd(work, x, InterleaveConfig(chain, body))[1], dy, InterleaveConfig(chain, body))
    want, total = [], None
    for i in range(2):
        own, d = chain.bwd(chain.fwd(fold_keys(work, i), x[:8], body)[1], dy[:8], body)
        want, total = [*want, d], add(total, own)
    same_bits((dx, dparams), (torch.cat(want), total), "a loop")
    assert not torch.equal(*want)
    alone = InterleaveConfig(chain, body, 1)
    same_bits(interleave.bwd(interleave.fwd(work, x, alone)[1], dy, alone), chain.bwd(chain.fwd(work, x, body)[1], dy, body), "one")
