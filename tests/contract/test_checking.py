"""`checking`: every case gives the same bits as without, and no write between forward and backward goes unnoticed."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from law_cases import FIRST, MODULES

from funcops import (
    ChainConfig,
    DonatedError,
    LinearConfig,
    Needs,
    QLinearConfig,
    RepeatConfig,
    RMSNormConfig,
    SoftmaxConfig,
    StaleResidualError,
    Step,
    chain,
    checking,
    linear,
    linear_bwd,
    linear_fwd,
    qlinear,
    random,
    repeat,
    rms_norm,
    softmax,
)
from funcops.adapters.from_function import TorchConfig
from funcops.engine.contract import functions, schema
from funcops.engine.contract.checking import active
from funcops.engine.contract.marks import SAMPLE, Sampled
from funcops.engine.contract.op import dgrad_of, forward, make_op
from funcops.engine.contract.schema import DGRAD, residuals, saved
from funcops.engine.errors import FLOATS, check
from funcops.engine.program.rules import changes
from funcops.engine.residuals import donate
from funcops.engine.trees import paths, tensors, tree_map_tensors
from funcops.low_precision import Fp8Block, quantize_params
from funcops.testing.checks import float_like, same_bits
from funcops.testing.guarded import MOVES

CASES = [  # the first of each op in the first tier
    pytest.param(case, case.dtypes[i % len(case.dtypes)], marks=() if case in FIRST else pytest.mark.slow)
    for i, case in enumerate(case for m in MODULES.values() for case in m.CASES)
]
CFG = LinearConfig(4, 3)
TWO = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)), Step("down", linear, CFG)))


def results(case, params, x):
    y, kept = case.op.fwd(params, x, case.cfg)
    dy = float_like(y, 7)
    found = [y, case.op.bwd(kept, dy, case.cfg)]
    dx, pending = case.op.dgrad(kept, dy, case.cfg)
    return [*found, dx, case.op.wgrad(pending, case.cfg), case.op.bwd(donate(kept), dy, case.cfg)]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_a_clean_run_has_the_same_bits(case, dtype):
    params, x = case.make(dtype)
    want = results(case, params, x)
    with checking():
        found = results(case, params, x)
        masked = case.op.fwd(params, x, case.cfg, needs=Needs(params=False))[1]
        case.op.bwd(masked, float_like(want[0], 7), case.cfg)
    for a, b in zip(want, found, strict=True):
        same_bits(a, b, str(case))


def aliases(case, params, x):
    """Paths of the leaves of params, x and y that the residuals share with the caller."""
    y, kept = case.op.fwd(params, x, case.cfg)
    held = {id(t) for t in tensors(kept)}
    return [path for path, t in paths({"params": params, "x": x, "y": y}).items() if id(t) in held and t.numel()]


def written(t):
    """Change every element, by a write that torch does not count."""
    before = t._version
    if t.is_floating_point():
        t.data.copy_((t.double() + 1).to(t.dtype))
    else:
        t.data.copy_(t + 1 if t.dtype is not torch.bool else ~t)
    assert t._version == before


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_a_write_by_data_raises_by_path(case, dtype):
    params, x = case.make(dtype)
    for path in aliases(case, params, x):
        given = tree_map_tensors(torch.clone, {"params": params, "x": x})
        with checking():
            y, kept = case.op.fwd(given["params"], given["x"], case.cfg)
            written(paths(given | {"y": y})[path])
            for half in (case.op.bwd, case.op.dgrad):
                with pytest.raises(StaleResidualError, match=r"residuals\.\w.* must be as the forward left it"):
                    half(kept, float_like(y, 7), case.cfg)
                    pytest.fail(f"a write to {path} went unnoticed")


def test_without_it_torch_counts_and_nothing_else_does():
    """Writes through `.data` pass the guards, also while another thread has `checking` on."""
    params, x, dy = linear.init(CFG, key=random.key(0)), torch.ones(2, 4), torch.ones(2, 3)

    def run(found):
        kept = linear_fwd(params, x, CFG)[1]
        x.data.add_(1)
        found.append((active(), linear_bwd(kept, dy, CFG)))

    found = []
    run(found)
    with checking():
        thread = threading.Thread(target=run, args=(found,))
        thread.start()
        thread.join()
        with checking(False):
            run(found)
        with pytest.raises(StaleResidualError):
            run(found)
    assert [on for on, _ in found] == [False] * 3


def test_a_donated_tensor_raises_in_the_same_words():
    with checking():
        kept = linear_fwd(linear.init(CFG, key=random.key(0)), torch.ones(2, 4), CFG)[1]
        linear_bwd(donate(kept), torch.ones(2, 3), CFG)
        with pytest.raises(DonatedError, match="linear_bwd: residuals must be unused, got"):
            linear_bwd(kept, torch.ones(2, 3), CFG)


def test_without_an_open_block_nothing_is_swapped():
    keep, count, asked = rms_norm.keeps.keep, len(changes), functions.any_autocast
    assert asked is torch._C._is_any_autocast_enabled
    with checking(), checking():
        assert rms_norm.keeps.keep is not keep and len(changes) == count + 1 and functions.any_autocast is not asked
        made = softplus()
        assert type(made.fwd(None, torch.ones(2), TorchConfig())[1]._marks[0]) is Sampled
    assert rms_norm.keeps.keep is keep and len(changes) == count and functions.any_autocast is asked
    assert type(made.fwd(None, torch.ones(2), TorchConfig())[1]._marks[0]) is int
    assert schema.Saved.__slots__ == ("_noted",)


@pytest.mark.parametrize("size", [1, SAMPLE, SAMPLE + 1, 5 * SAMPLE + 3])
def test_a_sample_is_spread_over_the_tensor(size):
    """All of a small tensor; of a larger one evenly spaced elements."""
    for x in (torch.zeros(size, 4), torch.zeros(4, size).t()):
        with checking():
            for start in range(0, 4 * size, max(1, 4 * size // 7)):
                kept = linear_fwd(linear.init(CFG, key=random.key(0)), x, CFG)[1]
                run = -(-4 * size // SAMPLE)
                places = torch.arange(start, min(start + run, 4 * size))
                assert kept.fresh()
                x.data[places // 4, places % 4] += 1
                assert len(places) < run or not kept.fresh(), f"a write to {run} elements from {start} on"


@pytest.mark.parametrize(("op", "cfg"), [(linear, CFG), (rms_norm, RMSNormConfig(4)), (softmax, SoftmaxConfig())], ids=str)
def test_tensors_without_values_have_no_sample(op, cfg):
    """Shapes can be tried on the meta device in a block, too."""
    with checking():
        params = op.init(cfg, device="meta")
        y, kept = op.fwd(params, torch.ones(2, 4, device="meta"), cfg)
        dparams, dx = op.bwd(kept, y, cfg)
    assert dx.shape == (2, 4) and [t.shape for t in tensors(dparams)] == [t.shape for t in tensors(params)]


def test_a_working_tree_notices_a_write_by_data_to_its_master():
    cfg = QLinearConfig(128, 128, recipe=Fp8Block())
    params = qlinear.init(cfg, key=random.key(0))
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    work = quantize_params(params, cfg)
    params.weight.data.mul_(2)
    qlinear.fwd(work, x, cfg)
    with checking():
        work = quantize_params(params, cfg)
        qlinear.fwd(work, x, cfg)
        params.weight.data.mul_(2)
        with pytest.raises(StaleResidualError, match=r"qlinear_fwd: params\.weight must have the codes"):
            qlinear.fwd(work, x, cfg)


def softplus(keep=lambda x: x, compute=torch.nn.functional.softplus, dx=lambda dy, x: dy * torch.sigmoid(x), asks=True):
    """An op with places where a test can plant a fault."""

    @residuals
    class Kept:
        x: torch.Tensor = saved("[*]", alias="x", needed_by=DGRAD)

    @forward(TorchConfig)
    def softplus_fwd(params, x, cfg, *, needs=Needs.ALL):
        check("softplus_fwd", "x", x, (...,), FLOATS)
        return compute(x), Kept.keep(cfg, needs, x=keep(x))

    @dgrad_of(Kept)
    def softplus_dgrad(residuals, dy, cfg):
        if asks:
            check("softplus_dgrad", "dy", dy, residuals.x.shape, residuals.x.dtype, residuals.x)
        return dx(dy, residuals.x), None

    return make_op("softplus", TorchConfig, fwd=softplus_fwd, dgrad=softplus_dgrad)


WROTE = r"softplus_\w+: arguments\.{} must be as the"
FAULTS = {
    "a forward that writes to x": (dict(compute=lambda x: x.add_(1)), RuntimeError, r"softplus_fwd: arguments\.x must be as the"),
    "a copy for an alias": (dict(keep=torch.clone), RuntimeError, r"softplus_fwd: residuals\.x must be x itself, .* got another"),
    "a backward that writes to dy": (dict(dx=lambda dy, x: dy.mul_(x)), RuntimeError, WROTE.format("dy")),
    "a backward that writes to x": (dict(dx=lambda dy, x: x.mul_(dy)), RuntimeError, r"softplus_\w+: arguments\.kept\.x must be"),
    "dx of another dtype": (dict(dx=lambda dy, x: dy.double()), RuntimeError, r"dx must be float32\[3\], like .* got float64\[3\]"),
    "dx of another shape": (dict(dx=lambda dy, x: dy[:2]), RuntimeError, r"dx must be float32\[3\], like .* got float32\[2\]"),
    "dx of another structure": (dict(dx=lambda dy, x: (dy,)), RuntimeError, r"dx must be of the structure"),
    "a dy that is broadcast": (dict(asks=False), ValueError, r"softplus_\w+: dy must be float32\[3\], like y, got float32\[1\]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_an_op_is_named(fault):
    options, error, match = FAULTS[fault]
    x, dy = torch.ones(3), torch.ones(1 if "broadcast" in fault else 3)
    faulty, right = softplus(**options), softplus()
    for half in ("bwd", "dgrad"):
        y, kept = faulty.fwd(None, x.clone(), TorchConfig())
        getattr(faulty, half)(kept, dy.clone(), TorchConfig())  # nobody asks
        with checking():
            getattr(right, half)(right.fwd(None, x, TorchConfig())[1], torch.ones(3), TorchConfig())
            with pytest.raises(error, match=match):
                getattr(faulty, half)(faulty.fwd(None, x.clone(), TorchConfig())[1], dy.clone(), TorchConfig())


@pytest.mark.slow
def test_the_environment_opens_a_block_around_the_program():
    code = (
        "import torch; from funcops import SoftcapConfig, softcap; x, cfg = torch.ones(3), SoftcapConfig(30.0)\n"
        "kept = softcap.fwd(None, x, cfg)[1]; x.data.add_(1); softcap.bwd(kept, x, cfg)"
    )
    for value, said in (("1", "StaleResidualError: softcap_bwd: residuals.x"), ("yes", "FUNCOPS_CHECK: name must be '0' or '1'")):
        run = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "FUNCOPS_CHECK": value}, capture_output=True, text=True
        )
        assert run.returncode and said in run.stderr, run.stderr


@pytest.mark.turns("case")
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_moves_take_samples_along(case):
    params, x = case.make(case.dtypes[0])
    for path in aliases(case, params, x)[:1]:
        for name in ("tree_map", "replace", "copy.copy", "flatten"):
            given = tree_map_tensors(torch.clone, {"params": params, "x": x})
            with checking():
                y, kept = case.op.fwd(given["params"], given["x"], case.cfg)
                moved = MOVES[name](kept)
                written(paths(given | {"y": y})[path])
                for tree in (moved, tree_map_tensors(torch.clone, kept)):
                    with pytest.raises(StaleResidualError):
                        case.op.bwd(tree, float_like(y, 7), case.cfg)


WITH_PARAMS = {
    "linear": (linear, CFG),
    "rms_norm": (rms_norm, RMSNormConfig(4)),
    "chain": (chain, TWO),
    "repeat": (repeat, RepeatConfig(linear, LinearConfig(4, 4), times=2)),
}


@pytest.mark.parametrize(("op", "cfg"), WITH_PARAMS.values(), ids=WITH_PARAMS)
@pytest.mark.parametrize("half", ["bwd", "wgrad"])
def test_gradients_are_added_once(op, cfg, half):
    """A checked call adds the same bits as another."""
    params, x = op.init(cfg, key=random.key(0)), torch.ones(2, 4)

    def added():
        y, kept = op.fwd(params, x, cfg)
        dy, into = torch.ones_like(y), tree_map_tensors(torch.ones_like, params)
        return op.bwd(kept, dy, cfg, into=into)[0] if half == "bwd" else op.wgrad(op.dgrad(kept, dy, cfg)[1], cfg, into=into)

    want = added()
    with checking():
        same_bits(want, added(), op.name)


@pytest.mark.parametrize("name", ["chain", "repeat"])
@pytest.mark.parametrize("on", [False, True])
def test_without_a_dy_dgrad_needs_no_part_of_its_residuals(name, on):
    """Nor does it refuse residuals of which a part was given away."""
    op, cfg = WITH_PARAMS[name]
    kept = op.fwd(op.init(cfg, key=random.key(0)), torch.ones(2, 4), cfg)[1]
    donate(list(kept.values())[-1])
    with checking(on):
        assert op.dgrad(kept, None, cfg) == (None, None)
