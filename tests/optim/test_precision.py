"""Loss scaling against torch's, non-finite detection, skipped steps."""

from __future__ import annotations

import math
import random

import pytest
import torch
from two_devices import TwoDevices, is_placed, placed

from funcops.engine import trees
from funcops.engine.trees import leaves
from funcops.optim import (
    AdamWConfig,
    MuonConfig,
    SGDConfig,
    adamw_init,
    adamw_update,
    clip_by_global_norm,
    combine,
    decay_mask,
    ema_init,
    ema_update,
    global_norm,
    muon_init,
    muon_update,
    partition,
    sgd_init,
    sgd_update,
)
from funcops.precision import (
    LossScale,
    LossScaleConfig,
    all_finite,
    loss_scale_init,
    loss_scale_update,
    nonfinite,
    select_step,
    unscale,
)


@pytest.mark.parametrize("initial", [8.0, 1e38])
def test_loss_scale_equals_torch(initial):
    cfg = LossScaleConfig(initial=initial, growth=2.0, backoff=0.5, interval=3)
    ours = loss_scale_init(cfg)
    scale, tracker = torch.tensor(initial), torch.zeros((), dtype=torch.int32)
    for ok in [True] * 7 + [False, False] + [True] * 9:
        before = (ours.scale.clone(), ours.good_steps.clone())
        new = loss_scale_update(ours, torch.tensor(ok), cfg)
        assert torch.equal(ours.scale, before[0]) and torch.equal(ours.good_steps, before[1])
        ours = new
        torch._amp_update_scale_(scale, tracker, torch.tensor(0.0 if ok else 1.0), 2.0, 0.5, 3)
        assert ours.scale.item() == scale.item() and ours.good_steps.item() == tracker.item()
        assert ours.scale.dtype is torch.float32 and ours.good_steps.dtype is torch.int32


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nonfinite_names_the_first_bad_path(bad, dtype):
    big = torch.finfo(dtype).max  # its square overflows
    grads = {"a": torch.full((3,), big, dtype=dtype), "b": (None, torch.tensor([1, 2])), "c": torch.zeros(0), "d": torch.ones(2)}
    assert all_finite(grads).item() is True and nonfinite(grads) is None
    grads["b"] = (torch.tensor([1.0, bad], dtype=dtype), None)
    grads["d"] = torch.tensor(bad)
    assert all_finite(grads).item() is False and nonfinite(grads) == "b.0"


@pytest.mark.parametrize(
    "bad", [complex(float("nan"), 0), complex(0, float("nan")), complex(0, float("-inf")), complex(float("inf"), 1)]
)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_count(bad, dtype):
    """Conjugate views too, whose bits are read unresolved."""
    t = torch.tensor([1 + 2j, bad], dtype=dtype)
    for one in (t, t.conj(), t[1:], t.reshape(2, 1).mT):
        assert all_finite({"a": torch.ones(2), "b": one}).item() is False and nonfinite((one,)) == "0"
    assert all_finite(t[:1]).item() is True and all_finite(t[:1].conj()).item() is True


def test_nothing_is_finite():
    for nothing in ({}, {"a": None}, {"a": torch.zeros(0)}, {"a": torch.tensor([1, 2])}):
        assert all_finite(nothing).item() is True and nonfinite(nothing) is None


@pytest.mark.parametrize("first", [True, False], ids=["cuda first", "cpu first"])
@pytest.mark.parametrize("values", [(1.0, 1.0), (float("nan"), 1.0), (1.0, float("inf"))], ids=str)
def test_gradients_on_two_devices_count(values, first):
    """The result is on the device of the first."""
    grads = [torch.tensor([1.0, value]) for value in values]
    placed(grads[0 if first else 1])
    with TwoDevices():
        found = all_finite(grads)
    assert is_placed(found) is first and found.item() is (values == (1.0, 1.0))


def test_unscale_widens_narrow_gradients():
    grads = unscale({"a": torch.tensor([6e4], dtype=torch.float16), "b": None}, LossScale(torch.tensor(2.0**20), torch.zeros(())))
    assert grads["b"] is None and grads["a"].dtype is torch.float32
    torch.testing.assert_close(grads["a"], torch.tensor([6e4]).half().float() / 2**20)


@pytest.mark.slow
def test_a_bad_step_changes_nothing():
    cfg = AdamWConfig()
    params = {"w": torch.ones(3), "b": None}
    state = adamw_init(params, cfg)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(params, grads, state):
        ok = all_finite(grads)
        new = adamw_update(params, grads, state, cfg)
        return select_step(ok, new, (params, state)), ok

    eager = step._torchdynamo_orig_callable
    for run in (eager, step):
        same, ok = run(params, {"w": torch.tensor([1.0, float("nan"), 1.0]), "b": None}, state)
        assert not ok
        assert all(
            b is None if a is None else torch.equal(a, b) for a, b in zip(leaves((params, state)), leaves(same), strict=True)
        )
        (moved, moved_state), ok = run(params, {"w": torch.ones(3), "b": None}, state)
        assert ok and not torch.equal(moved["w"], params["w"]) and moved_state.step.item() == 1


ERRORS = [
    (lambda: select_step(True, 1, 1), TypeError, "select_step: ok must be a tensor [], got True"),
    (lambda: select_step(torch.ones(()), 1, 1), TypeError, "select_step: ok must be bool, got float32"),
    (lambda: select_step(torch.tensor(True), {"a": 1}, {"b": 1}), ValueError, "one that differs at a, b"),
    (
        lambda: select_step(torch.tensor(True), {"a": torch.ones(2)}, {"a": torch.ones(3)}),
        ValueError,
        "select_step: new.a must be float32[3], got float32[2]",
    ),
    (
        lambda: select_step(torch.tensor(True), {"a": torch.ones(2)}, {"a": torch.ones(2).bfloat16()}),
        ValueError,
        "select_step: new.a must be bfloat16[2], got float32[2]",
    ),
    (lambda: select_step(torch.tensor(True), {"a": torch.ones(2)}, {"a": None}), TypeError, "new.a must be None, got float32[2]"),
    (lambda: loss_scale_update(None, torch.tensor(True), LossScaleConfig()), TypeError, "loss_scale must be LossScale, got None"),
    (lambda: LossScaleConfig(initial=0.0), ValueError, "LossScaleConfig: initial must be positive and finite, got 0.0"),
    (lambda: LossScaleConfig(growth=0.5), ValueError, "growth must be at least 1, got 0.5"),
    (lambda: LossScaleConfig(backoff=0.0), ValueError, "backoff must be in (0, 1], got 0.0"),
    (lambda: LossScaleConfig(interval=0), ValueError, "interval must be at least 1, got 0"),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS, ids=[e[2][:50] for e in ERRORS])
def test_errors(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


# The codes of 8 bits that are not finite.
NOT_FINITE = {
    torch.float8_e4m3fn: {0x7F, 0xFF},
    torch.float8_e4m3fnuz: {0x80},
    torch.float8_e5m2: {*range(0x7C, 0x80), *range(0xFC, 0x100)},
    torch.float8_e5m2fnuz: {0x80},
    torch.float8_e8m0fnu: {0xFF},
    torch.float4_e2m1fn_x2: set(),
    torch.uint8: set(),
    torch.bool: set(),
}


@pytest.mark.parametrize("dtype", NOT_FINITE, ids=str)
def test_each_code_of_8_bits_is_finite_or_found(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    wrong = NOT_FINITE[dtype]
    good = codes[[code not in wrong for code in range(256)]]
    good = (good % 2).to(dtype) if dtype is torch.bool else good.view(dtype)
    tree = {"a": torch.ones(2), "b": good, "c": torch.ones(1, dtype=torch.complex64)}
    assert bool(all_finite(tree)) and bool(all_finite({"b": good})) and nonfinite(tree) is None
    for code in wrong:
        bad = tree | {"b": torch.cat([codes[:1], codes[code : code + 1]]).view(dtype)}
        assert not bool(all_finite(bad)) and nonfinite(bad) == "b"


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128], ids=str
)
@pytest.mark.parametrize("beside", [torch.float8_e5m2, torch.float4_e2m1fn_x2, torch.int32, torch.bool], ids=str)
def test_wide_numbers_are_found_beside_narrow_ones(dtype, beside):
    narrow = torch.zeros(4, dtype=torch.uint8).view(beside)
    for wrong in (float("nan"), float("inf"), -float("inf")):
        tree = {"a": narrow, "b": torch.tensor([0.0, wrong]).to(dtype)}
        assert not bool(all_finite(tree)) and nonfinite(tree) == "b"
    assert nonfinite({"a": narrow, "b": torch.zeros(2, dtype=dtype)}) is None


@pytest.mark.turns("seed", every=2)
@pytest.mark.parametrize("seed", range(2))
def test_a_loss_scale_recovers_after_any_number_of_bad_steps(seed):
    """It stays a normal number whose inverse is finite, and grows again as soon as steps are good."""
    draw = random.Random(seed)
    tiny, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    for backoff in (0.5, 1e-3, 1e-30, 1e-200, 1.0):
        cfg = LossScaleConfig(initial=draw.choice([tiny, 1e-30, 65536.0, largest]), backoff=backoff, interval=1)
        scale = loss_scale_init(cfg)
        for bad, good in [(draw.randrange(400), draw.randrange(200)) for _ in range(2)]:
            for ok in [False] * bad + [True] * good:
                before, scale = scale.scale.item(), loss_scale_update(scale, torch.tensor(ok), cfg)
                now = scale.scale.item()
                assert tiny <= now <= largest and scale.scale.reciprocal().isfinite()
                assert now == before * 2 if ok and before * 2 <= largest else now <= before
    for lost in (0.0, 1e-45, math.inf):  # as a checkpoint of an earlier version may have it
        found = loss_scale_update(LossScale(torch.tensor(lost), torch.zeros((), dtype=torch.int32)), torch.tensor(True), cfg).scale
        assert tiny <= found.item() <= largest


@pytest.mark.parametrize("initial", [1e-300, 1e-46, 1e-39, 3.5e38, 1e300])
def test_an_initial_loss_scale_that_float32_lacks_is_refused(initial):
    with pytest.raises(ValueError, match="LossScaleConfig: initial must be at (least 1.18e-38|most 3.4e)"):
        LossScaleConfig(initial=initial)


NARROW = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
NARROW += [torch.float4_e2m1fn_x2]
WIDE = {"a": torch.ones(8, 8), "w": torch.ones(8, 8)}
ADAMW, SGD, MUON = AdamWConfig(lr=0.1), SGDConfig(lr=0.1, momentum=0.9), MuonConfig(lr=0.1)
GOOD = torch.tensor(True)
TAKE_NARROW = {  # by name: the call, and what comes, for a tree of given leaves and their values in float32
    "unscale": (lambda t: unscale(t, loss_scale_init(LossScaleConfig(initial=4.0))), lambda v: v / 4),
    "ema_init": (ema_init, lambda v: v),
    "ema_update": (lambda t: ema_update(WIDE, t, 0.5), lambda v: (1 + v) / 2),
    "ema_update of a narrow average": (lambda t: ema_update(t, WIDE, 0.5), None),
    "select_step": (lambda t: select_step(GOOD, t, t), lambda v: v),
    "cast": (lambda t: trees.cast(t, torch.float32), lambda v: v),
    "global_norm": (global_norm, None),
    "clip_by_global_norm": (lambda t: clip_by_global_norm(t, 1.0), None),
    "adamw_init": (lambda t: adamw_init(t, ADAMW), None),
    "adamw_update": (lambda t: adamw_update(WIDE, t, adamw_init(WIDE, ADAMW), ADAMW), None),
    "sgd_init": (lambda t: sgd_init(t, SGD), None),
    "sgd_update": (lambda t: sgd_update(WIDE, t, sgd_init(WIDE, SGD), SGD), None),
    "muon_init": (lambda t: muon_init(t, MUON), None),
    "muon_update": (lambda t: muon_update(WIDE, t, muon_init(WIDE, MUON), MUON), None),
    "partition": (lambda t: partition(t, {"a": False, "w": True})[0], lambda v: v),
    "combine": (lambda t: combine({"a": t["a"], "w": None}, {"a": None, "w": t["w"]}), lambda v: v),
    "decay_mask": (lambda t: {"w": t["w"]} if decay_mask(t)["w"] else {}, lambda v: v),
}
MOVED_ONLY = ("select_step", "partition", "combine", "decay_mask")  # which look at no number


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", TAKE_NARROW)
def test_leaves_of_8_and_4_bits_are_right_or_refused_by_name(name, dtype):
    bits = 127 + torch.arange(64) % 4 if dtype is torch.float8_e8m0fnu else 0x30 + torch.arange(64) % 16
    leaf = bits.to(torch.uint8).view(8, 8).view(dtype)
    call, wanted = TAKE_NARROW[name]
    given = {"a": torch.ones(8, 8), "w": leaf}
    if wanted is None or (dtype is torch.float4_e2m1fn_x2 and name not in MOVED_ONLY):
        with pytest.raises(TypeError, match=rf"^{name.split()[0]}: ([a-z]+\.)?w must be .*, got (a )?float[48]_"):
            call(given)
    elif dtype is torch.float4_e2m1fn_x2:
        assert call(given)["w"].view(torch.uint8).equal(leaf.view(torch.uint8))
    else:
        torch.testing.assert_close(call(given)["w"].float(), wanted(leaf.float()))
