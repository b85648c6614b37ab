"""Each number of each public config, at the ends of its range: the config works, with finite results, or raises when it is made."""

import dataclasses

import pytest
import torch
from law_cases import MODULES

from funcops import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, RopeConfig, YarnScaling, optim, rope_table
from funcops.engine.trees import tensors
from funcops.precision import LossScaleConfig, loss_scale_init, loss_scale_update
from funcops.testing.checks import float_like

NUMBERS = (0.0, -1.0, 5e-324, 1e-300, 1e-45, 1e-30, 1e30, 1e39, 1e300, 1.7e308, float("inf"), -float("inf"), float("nan"))


def finite(*trees):
    return all(bool(t.double().isfinite().all()) for t in tensors(list(trees)) if t.is_floating_point())


def of_an_op(case):
    """The forward and backward in float64 of the op's case, which is finite unchanged."""

    def works(cfg):
        params, x = case.make(torch.float64)
        y, kept = case.op.fwd(params, x, cfg)
        return finite(y, case.op.bwd(kept, float_like(y, 7), cfg))

    return works


def of_a_table(cfg):
    return finite(rope_table(torch.arange(5), cfg if type(cfg) is RopeConfig else RopeConfig(8, scaling=cfg)))


def of_loss_scale(cfg):
    scale = loss_scale_init(cfg)
    for ok in (True, True, False, True, False):
        if not finite(scale.scale):
            return False
        scale = loss_scale_update(scale, torch.tensor(ok), cfg)
    return finite(scale.scale)


def of_an_optimizer(init, update):
    def works(cfg):
        params, grads = {"w": torch.ones(3, 1)}, {"w": torch.ones(3, 1)}
        return finite(update(params, grads, init(params, cfg), cfg))

    return works


def rows():
    firsts = {}
    for module in MODULES.values():
        for case in module.CASES:
            params, x = case.make(torch.float64) if torch.float64 in case.dtypes else (None, None)
            if x is not None and all(t.numel() for t in tensors(x)) and type(case.cfg) not in firsts and of_an_op(case)(case.cfg):
                firsts[type(case.cfg)] = case
    for case in firsts.values():
        yield case.cfg, of_an_op(case)
    yield RopeConfig(8), of_a_table
    for scaling in (
        LinearScaling(2.0),
        DynamicScaling(factor=2.0, original_context=8),
        YarnScaling(factor=2.0, original_context=8),
        Llama3Scaling(factor=2.0, original_context=8),
        LongRopeScaling(factor=2.0, original_context=8, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4),
    ):
        yield scaling, of_a_table
    yield LossScaleConfig(interval=1), of_loss_scale
    yield optim.AdamWConfig(), of_an_optimizer(optim.adamw_init, optim.adamw_update)
    yield optim.SGDConfig(), of_an_optimizer(optim.sgd_init, optim.sgd_update)
    yield optim.MuonConfig(), of_an_optimizer(optim.muon_init, optim.muon_update)


def drawn():
    for cfg, works in rows():
        for field in dataclasses.fields(cfg):
            if str(field.type).startswith("float") and field.name != "jitter":  # which asks for a key in x, and is below 1
                yield pytest.param(cfg, field.name, works, id=f"{type(cfg).__name__}.{field.name}")


@pytest.mark.parametrize(("cfg", "name", "works"), list(drawn()))
def test_a_number_works_or_raises(cfg, name, works):
    bad = []
    for value in NUMBERS:
        try:
            made = dataclasses.replace(cfg, **{name: value})
        except (TypeError, ValueError) as error:
            assert name in str(error) or type(cfg).__name__ in str(error), error
            continue
        try:
            if not works(made):
                bad.append(f"{value}: not finite")
        except Exception as error:
            bad.append(f"{value}: {type(error).__name__}: {error}")
    assert not bad, bad
