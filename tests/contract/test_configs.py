"""Configs describe their ops correctly; a config without the base class works."""

from dataclasses import field

import pytest
import torch
from law_cases import CASES as LAW_CASES

from funcops import ActivationConfig, ChainConfig, IdentityConfig, Step, activation, chain, identity, random, rewrite, walk
from funcops.contract.op import OpConfig, config, dgrad_of, forward, make_op, same_width
from funcops.contract.schema import DGRAD, Residuals, saved
from funcops.formats import QTensor
from funcops.trees import tensors

CASES = list({id(case): (case, dtype) for case, dtype in LAW_CASES}.values())


def main_of(x):
    found = tensors(x)
    return found[0] if found and found[0].is_floating_point() and found[0].dim() > 0 and found[0].shape[-1] > 1 else None


def changed_features(case, dtype):
    """Which features of y change if feature 0 of x's main part does; None of a case in which this cannot be asked."""
    params, x = case.make(dtype)
    main = main_of(x)
    before = main_of(case.op.fwd(params, x, case.cfg)[0])
    if main is None or before is None or main.shape[-1] != before.shape[-1] or not main.numel():
        return None
    main[..., 0] += 1.0
    after = main_of(case.op.fwd(params, x, case.cfg)[0])
    moved = (before != after) & ~(before.isnan() & after.isnan())
    return moved.reshape(-1, moved.shape[-1]).any(0)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_ops_declared_featurewise_are(case, dtype):
    changed = changed_features(case, dtype) if case.cfg.featurewise else None
    assert changed is None or not changed[1:].any()


def test_some_ops_mix_features_and_say_so():
    mixing = {case.op.name for case, dtype in CASES if (changed := changed_features(case, dtype)) is not None and changed[1:].any()}
    assert {"softmax", "rms_norm", "layer_norm", "l2_norm", "group_norm"} <= mixing
    assert not {case.op.name for case, _ in CASES if case.cfg.featurewise} & mixing


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_widths_equal_x_and_y(case, dtype):
    params, x = case.make(dtype)
    own = width_of(x)
    wanted, given = case.cfg.widths(own)
    assert wanted is None or wanted == own
    assert given is None or given == width_of(case.op.fwd(params, x, case.cfg)[0])


def width_of(value):
    """The last dimension of the main value; a QTensor says its own, as 4-bit codes lie two in a byte."""
    first = value if isinstance(value, QTensor) else tensors(value)[0]
    return first.shape[-1] if len(first.shape) else None


class Kept(Residuals):
    x: torch.Tensor = saved("[*]", alias="x", needed_by=DGRAD)


def made_of(config_class):
    @forward(config_class)
    def fwd(params, x, cfg, *, needs):
        return x * cfg.by, Kept.keep(cfg, needs, x=x)

    @dgrad_of(Kept)
    def dgrad(residuals, dy, cfg):
        return dy * cfg.by, None

    return make_op("times", config_class, fwd=fwd, dgrad=dgrad)


def test_a_config_without_the_base_works_and_warns():
    @config
    class TimesConfig:
        by: float = field(kw_only=False)
        widths = same_width

    with pytest.warns(
        DeprecationWarning, match=r"^TimesConfig: must be a subclass of funcops.contract.op.OpConfig from version 0.4 on"
    ):
        times = made_of(TimesConfig)
    cfg = ChainConfig(steps=(Step("a", times, TimesConfig(2.0)), Step("b", identity, IdentityConfig())))
    y, residuals = chain.fwd(chain.init(cfg), torch.ones(3), cfg)
    assert y.tolist() == [2.0] * 3 and chain.bwd(residuals, torch.ones(3), cfg)[1].tolist() == [2.0] * 3
    assert [part.path for part in walk(cfg)] == ["", "a", "b"]
    assert rewrite(TimesConfig(1.0), lambda part: None, op=times) == (times, TimesConfig(1.0))


def test_a_config_with_the_base_does_not_warn(recwarn):
    @config
    class BaseConfig(OpConfig):
        by: float = field(kw_only=False)

    made_of(BaseConfig)
    assert not recwarn.list and BaseConfig(3.0).widths(4) == (None, None)


@pytest.mark.parametrize("hook", [name for name in vars(OpConfig) if not name.startswith("__")])
def test_a_field_does_not_take_a_hook_for_its_default(hook):
    body = {"__annotations__": {hook: "tuple"}, "__module__": __name__}
    with pytest.raises(TypeError, match=rf"^Own: field {hook} must be of another name, or have a default"):
        config(type("Own", (OpConfig,), dict(body)))
    made = config(type("Own", (OpConfig,), {**body, hook: field(default=(1,))}))
    assert getattr(made(), hook) == (1,)


@pytest.mark.parametrize("entry", [walk, lambda cfg: rewrite(cfg, lambda part: None)], ids=["walk", "rewrite"])
@pytest.mark.parametrize("wrong", [None, 3, "x", ActivationConfig, activation, random.key(0)], ids=str)
def test_anything_but_a_config_raises(entry, wrong):
    with pytest.raises(TypeError, match=r"^(walk|rewrite): cfg must be the config of an op"):
        entry(wrong)
