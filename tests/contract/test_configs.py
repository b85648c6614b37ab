"""Configs describe their ops correctly; a config without the base class works."""

import dataclasses
import inspect
from dataclasses import field

import pytest
import torch
from law_cases import CASES as LAW_CASES

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    DropoutConfig,
    ForkConfig,
    LinearConfig,
    RepeatConfig,
    ScaleConfig,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    add,
    chain,
    dist,
    dropout,
    fork,
    random,
    repeat,
    rewrite,
    scale,
    skip,
    walk,
)
from funcops.engine.contract.configs import Composite
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import OpConfig, config, dgrad_of, forward, make_op, same_width
from funcops.engine.contract.schema import DGRAD, Residuals, saved
from funcops.engine.contract.walk import Inside, nested
from funcops.engine.trees import tensors, tree_map
from funcops.library.formats import QTensor

CASES = list({id(case): (case, dtype) for case, dtype in LAW_CASES}.values())


def main_of(x):
    found = tensors(x)
    return found[0] if found and found[0].is_floating_point() and found[0].dim() > 0 and found[0].shape[-1] > 1 else None


def changed_features(case, dtype):
    """The features of y that change with feature 0 of x's main part; None if the case cannot show this."""
    params, x = case.make(dtype)
    main = main_of(x)
    before = main_of(case.op.fwd(params, x, case.cfg)[0])
    if main is None or before is None or main.shape[-1] != before.shape[-1] or not main.numel():
        return None
    main[..., 0] += 1.0
    after = main_of(case.op.fwd(params, x, case.cfg)[0])
    moved = (before != after) & ~(before.isnan() & after.isnan())
    return moved.reshape(-1, moved.shape[-1]).any(0)


@pytest.mark.turns("case", "dtype", every=3, each="op")
@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_ops_declared_featurewise_are(case, dtype):
    changed = changed_features(case, dtype) if case.cfg.featurewise else None
    assert changed is None or not changed[1:].any()


# ops that change no other feature, as far as their cases show, and are not declared featurewise: their params have features, or x
# has parts of other widths
APART = {"bias", "causal_conv1d", "position_embedding", "glu", "latent_split", "log_decay", "permute"}


def test_ops_that_mix_features_say_so_and_others_too():
    shown = [(case, changed) for case, dtype in CASES if (changed := changed_features(case, dtype)) is not None]
    mixing = {case.op.name for case, changed in shown if changed[1:].any()}
    assert {"softmax", "rms_norm", "layer_norm", "l2_norm", "group_norm"} <= mixing
    declared = {case.op.name for case, _ in CASES if case.cfg.featurewise}
    assert not declared & mixing
    assert {case.op.name for case, _ in shown} - mixing - declared == APART


def mixes_positions(case, dtype):
    """Whether other positions of y's main part change with position 0 of x; False if the case cannot show this: dimension 1 of x is
    one of features, a recipe scales the whole x, or rows of y are in the order of experts."""
    params, x = case.make(dtype)
    main, before = (main_of(value) for value in (x, case.op.fwd(params, x, case.cfg)[0]))
    features = len(case.cfg.dim) if isinstance(getattr(case.cfg, "dim", 0), tuple) else 1
    if main is None or before is None or main.dim() < 2 + features or before.dim() < 3 or case.cfg.low_recipe or not main.numel():
        return False
    for t in tensors(x):
        if t.is_floating_point() and t.shape[:2] == main.shape[:2]:
            t[:, 0] += 1.0
    after = main_of(case.op.fwd(params, x, case.cfg)[0])
    moved = (before != after) & ~(before.isnan() & after.isnan())
    return main.shape[:2] != before.shape[:2] or bool(moved[:, 1:].any())


@pytest.mark.turns("case", "dtype", every=3, each="op")
@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_ops_that_mix_positions_say_so(case, dtype):
    assert not mixes_positions(case, dtype) or case.cfg.attends or case.cfg.mixes_positions


def test_some_ops_mix_positions():
    mixing = {case.op.name for case, dtype in CASES if mixes_positions(case, dtype)}
    assert {"attention", "causal_conv1d", "group_norm"} <= mixing


@pytest.mark.turns("case", "dtype", every=3, each="op")
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


def test_a_config_without_the_base_is_refused():
    @config
    class TimesConfig:
        by: float = field(kw_only=False)
        widths = same_width

    for wrong in (TimesConfig, TimesConfig(2.0)):
        with pytest.raises(TypeError, match=r"^make_op 'times': config must be a subclass of OpConfig, .*, got TimesConfig"):
            make_op("times", wrong, fwd=lambda params, x, cfg: None, dgrad=lambda residuals, dy, cfg: None)


@pytest.mark.parametrize("hook", [name for name in vars(OpConfig) if not name.startswith("__")])
def test_a_field_does_not_take_a_hook_for_its_default(hook):
    body = {"__annotations__": {hook: "tuple"}, "__module__": __name__}
    with pytest.raises(TypeError, match=rf"^Own: field {hook} must be of another name, or have a default"):
        config(type("Own", (OpConfig,), dict(body)))
    made = config(type("Own", (OpConfig,), {**body, hook: field(default=(1,))}))
    assert getattr(made(), hook) == (1,)


OF_COMBINATORS = [name for name in vars(Composite) if not name.startswith("__") and name not in vars(OpConfig)]


@pytest.mark.parametrize("hook", OF_COMBINATORS)
def test_a_field_of_a_combinator_does_not_take_a_hook_for_its_default(hook):
    with pytest.raises(TypeError, match=rf"^Own: field {hook} must be of another name, .* \(Composite has a hook of that name\)"):
        config(type("Own", (Composite,), {"__annotations__": {hook: "Any"}, "__module__": __name__}))
    assert config(type("Own", (OpConfig,), {"__annotations__": {hook: "Any"}, "__module__": __name__}))


COMPOSITES = [case for case, _ in CASES if isinstance(case.cfg, Composite)]


@pytest.mark.parametrize("case", COMPOSITES, ids=str)
def test_parts_are_those_that_are_replaced(case):
    replaced = []
    same = case.cfg.with_parts(lambda name, op, cfg: replaced.append((name, op, cfg)) or (op, cfg))
    assert case.cfg.parts() == replaced and same == case.cfg and len(replaced) > 0


@pytest.mark.parametrize("case", COMPOSITES, ids=str)
def test_a_combinator_says_how_its_parts_lie(case):
    params, x = case.make(torch.float64)
    y = case.op.fwd(params, x, case.cfg)[0]
    main_y, main_x = (value.main if isinstance(value, WithExtras) else value for value in (y, x))
    assert isinstance(main_y, tuple) == case.cfg.branching
    assert not case.cfg.maps_to_itself or main_y.shape == main_x.shape
    assert (case.cfg.times is None) == (case.op is not repeat) and case.cfg.stacked <= (case.op is repeat)


@pytest.mark.parametrize("case", {case.op: case for case in COMPOSITES}.values(), ids=lambda case: case.op.name)
def test_each_half_of_a_combinator_names_the_config_of_another_op(case):
    op, cfg, other = case.op, case.cfg, LinearConfig(4, 4)
    params, x = case.make(torch.float64)
    y, kept = op.fwd(params, x, cfg)
    dy = tree_map(lambda t: torch.ones_like(t) if t.is_floating_point() else None, y)
    pending = op.dgrad(kept, dy, cfg)[1]
    halves = {
        "init": lambda: op.init(other, key=random.key(0)),
        "fwd": lambda: op.fwd(params, x, other),
        "dgrad": lambda: op.dgrad(kept, dy, other),
        "wgrad": lambda: op.wgrad(pending, other),
        "bwd": lambda: op.bwd(kept, dy, other),
    }
    for half, call in halves.items():
        said = rf"(?s)^{op.name}_{half}: cfg must be (the config of the forward, )?{op.config.__name__}\b.*, got LinearConfig"
        with pytest.raises((TypeError, ValueError), match=said):
            call()


SCALE = Step("scale", scale, ScaleConfig(2.0))
LAYERS = ChainConfig(steps=(SCALE, Step("layers", repeat, RepeatConfig(skip, SkipConfig(chain, ChainConfig(steps=(SCALE,))), 2))))


def test_parts_come_with_what_is_around_them():
    found = {part.path: [one.path for one in around] for part, around in nested(LAYERS, op=chain) if not part.composite}
    assert found == {"scale": [""], "layers.*.scale": ["", "layers", "layers.*", "layers.*"]}
    stopped = [part.path for part, _ in nested(LAYERS, stop=lambda part: part.op is repeat)]
    assert stopped == ["", "scale", "layers"]


def test_a_rewrite_goes_on_with_another_function_and_ends_with_a_step():
    seen = []

    def factor(by):
        def replace(part):
            seen.append((part.path, by))
            if part.op is scale:
                return scale, ScaleConfig(by)
            if part.cfg.times is not None:
                return Inside(factor(10.0), lambda parts: {"times": 2 + len(parts)})
            return Inside(after=lambda op, cfg: (op, dataclasses.replace(cfg, fuse=False))) if part.op is chain else None

        return replace

    op, made = rewrite(LAYERS, factor(3.0), op=chain)
    assert op is chain and not made.fuse and made.steps[0].cfg.factor == 3.0
    inner = made.steps[1].cfg.cfg.cfg
    assert made.steps[1].cfg.times == 3 and inner.steps[0].cfg.factor == 10.0 and not inner.fuse
    assert seen == [("", 3.0), ("scale", 3.0), ("layers", 3.0), ("layers.*", 10.0), ("layers.*", 10.0), ("layers.*.scale", 10.0)]
    assert rewrite(ScaleConfig(1.0), lambda part: Inside(after=lambda op, cfg: (scale, cfg))) == (scale, ScaleConfig(1.0))


def test_a_chain_declares_what_only_its_rewritten_steps_take():
    drop = ChainConfig(steps=(Step("drop", dropout, DropoutConfig(0.5), takes=("key",)),), extras=("key",))
    op, made = rewrite(LAYERS, lambda part: (chain, drop) if part.op is scale else None, op=chain)
    assert made.extras == ("key",) == made.steps[1].cfg.cfg.cfg.extras and made.steps[0].names == ("key",)
    with pytest.raises(ValueError, match=r"^ChainConfig: takes of step 'drop' must be names made before it"):
        ChainConfig(steps=drop.steps)


@config
class AddsConfig(OpConfig):
    takes_also = ("other",)


@forward(AddsConfig)
def adds_fwd(params, x, cfg, *, needs):
    return sum(x), None


@dgrad_of(Kept)
def adds_dgrad(residuals, dy, cfg):
    return (dy, dy, dy), None


adds = make_op("adds", AddsConfig, fwd=adds_fwd, dgrad=adds_dgrad)


def test_an_op_takes_also_what_its_config_adds():
    steps = Step("fork", fork, ForkConfig(), gives=("copy",)), Step("add", add, AddConfig(), takes=("copy",))
    made = rewrite(ChainConfig(steps=steps), lambda part: (adds, AddsConfig()) if part.op is add else None)[1]
    assert made.steps[1].takes == ("copy", "other") and made.extras == ("other",)
    x = WithExtras(torch.ones(2), {"other": torch.full((2,), 3.0)})
    assert chain.fwd(chain.init(made), x, made, needs=Needs.NONE)[0].tolist() == [5.0, 5.0]
    again = made.with_parts(lambda name, op, cfg: (op, AddsConfig() if op is adds else cfg))
    assert again.steps[1].takes == ("copy", "other") and again.extras == ("other",)


@pytest.mark.parametrize("entry", [walk, lambda cfg: rewrite(cfg, lambda part: None)], ids=["walk", "rewrite"])
@pytest.mark.parametrize("wrong", [None, 3, "x", ActivationConfig, activation, random.key(0)], ids=str)
def test_anything_but_a_config_raises(entry, wrong):
    with pytest.raises(TypeError, match=r"^(walk|rewrite): cfg must be the config of an op"):
        entry(wrong)


def test_a_wrong_name_of_a_field_is_answered_with_the_right_one():
    """For every config of the laws. A wrong value keeps its own error."""
    configs = {type(case.cfg): case.cfg for case, _ in CASES}
    assert len(configs) > 40
    for cls, cfg in configs.items():
        fields = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.init}
        assert set(inspect.signature(cls).parameters) == set(fields)
        for name in fields:
            given = {(f"{name[:-1]}_x" if one == name else one): value for one, value in fields.items()}
            with pytest.raises(TypeError) as raised:
                cls(**given)
            words = str(raised.value)
            assert words.startswith(f"{cls.__name__}: arguments must be of its fields, {', '.join(fields)}"), words
            assert words.endswith(f"got {name[:-1]}_x") and (len(name) < 4 or f"(did you mean {name}?)" in words), words
    with pytest.raises(TypeError, match=r"LinearConfig: in_features must be int, got '8'"):
        LinearConfig("8", 8)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'out_features'"):
        LinearConfig(8)


def test_no_half_shows_the_arguments_that_only_rules_give():
    for case, _ in CASES:
        for half, names in ((case.op.dgrad, ["residuals", "dy", "cfg"]), (case.op.wgrad, ["pending", "cfg", "into"])):
            assert list(inspect.signature(half).parameters) == names, half


def test_a_device_that_there_is_not_is_refused_by_name():
    for case in {id(case.op): case for case, _ in CASES if tensors(case.op.init(case.cfg, device="meta"))}.values():
        with pytest.raises(ValueError, match=rf"^{case.op.name}_init: device must be .*, got 'nowhere'$"):
            case.op.init(case.cfg, key=random.key(0), device="nowhere")
    with pytest.raises(ValueError, match="global_norm: device must be .*, got 'nowhere'"):
        dist.global_norm({"w": torch.ones(2)}, dist.Mesh.abstract({"dp": 1}, 0)["dp"], device="nowhere")
