"""torch's default dtype and device are for what is made of nothing (`init`, `random.key`): results of tensors that are given, and
of numbers, are the same under any."""

import contextlib

import pytest
import torch
from law_cases import FIRST

from funcops import LinearConfig, batch_wgrads, linear, random
from funcops.engine.backend import backend
from funcops.library.kernels.cross_entropy import cross_entropy_fwd
from funcops.optim import (
    AdamWConfig,
    MuonConfig,
    SGDConfig,
    adamw_init,
    adamw_update,
    clip_by_global_norm,
    global_norm,
    muon_init,
    muon_update,
    sgd_init,
    sgd_update,
    warmup_cosine,
)
from funcops.precision import LossScaleConfig, all_finite, loss_scale_init, loss_scale_update, nonfinite, select_step, unscale
from funcops.testing.laws import run, same_bits

DEFAULTS = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16, "meta": torch.device("meta")}


@contextlib.contextmanager
def default(value):
    if isinstance(value, torch.device):
        with value:
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(value)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def of_trees():
    generator = torch.Generator("cpu").manual_seed(0)
    p, g = ({"w": torch.randn(4, 3, dtype=torch.float32, device="cpu", generator=generator), "b": None} for _ in range(2))
    results = [global_norm(g), global_norm({}), clip_by_global_norm(g, 0.1), all_finite(g), all_finite({}), nonfinite(g)]
    for init, update, cfg in (
        (adamw_init, adamw_update, AdamWConfig()),
        (sgd_init, sgd_update, SGDConfig(momentum=0.9)),
        (muon_init, muon_update, MuonConfig()),
    ):
        results += [update(p, g, init(p, cfg), cfg), init({}, cfg)]
    with backend("triton"):
        results.append(adamw_update(p, g, adamw_init(p, AdamWConfig()), AdamWConfig()))
    scale = loss_scale_init(LossScaleConfig(initial=2.0**24 + 2), device="cpu")
    ok = torch.tensor(True, device="cpu")
    results += [scale, loss_scale_update(scale, ok, LossScaleConfig()), unscale(g, scale), select_step(ok, p, g)]
    return [*results, warmup_cosine(torch.tensor(3, device="cpu"), peak=0.1, warmup=2, total=9)]


def of_keys():
    key = random.key(3, device="cpu")
    draws = [draw(key, (5,), dtype=dtype) for draw in (random.uniform, random.normal) for dtype in (torch.float32, torch.float64)]
    return [*draws, random.bits(key, 5), random.fold_in(key, 2), random.split(key, 3)]


def of_products():
    cfg, dtype = LinearConfig(16, 8), torch.bfloat16
    params = linear.init(cfg, key=random.key(0, device="cpu"), dtype=dtype)
    found = []
    for how in (None, "concatenate", "batch", "group"):
        pendings = []
        for rows in (8, 8, 16):
            x = random.normal(random.key(rows, device="cpu"), (rows, 16), dtype=dtype)
            _, kept = linear.fwd(params, x, cfg)
            pendings.append(linear.dgrad(kept, torch.ones_like(x[:, :8]), cfg)[1])
        found.append(batch_wgrads(linear, pendings, cfg, how=how))
    return found


@pytest.mark.parametrize("value", DEFAULTS)
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_every_op(case, value):
    want = run(case, torch.float32)
    with default(DEFAULTS[value]):
        same_bits(run(case, torch.float32), want, f"{case} under {value}")


@pytest.mark.parametrize("value", DEFAULTS)
@pytest.mark.parametrize("results", [of_trees, of_keys, of_products])
def test_everything_else(results, value):
    want = results()
    with default(DEFAULTS[value]):
        same_or_equal(results(), want, f"{results.__name__} under {value}")


def same_or_equal(got, want, what):
    for g, w in zip(got, want, strict=True):
        same_bits(g, w, what) if not isinstance(w, str) else None


def test_rows_of_minus_infinity_have_torchs_logsumexp():
    """In every dtype: bit for bit, beside other rows."""
    rows = torch.randn(4, 5)
    rows[1], rows[2, :3] = float("-inf"), float("-inf")
    rows[3, 0] = float("inf")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wide = rows.to(dtype).float()
        labels = torch.zeros(4, dtype=torch.int64)
        _, lse = cross_entropy_fwd(rows.to(dtype), labels, 0.0, -100, 0.0)
        assert torch.equal(lse.sum(-1), torch.logsumexp(wide, -1))
