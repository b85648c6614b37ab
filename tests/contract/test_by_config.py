"""Ops that keep other fields under other configs: what they declare, and whose residuals they refuse."""

import functools
import itertools
import pickle
from typing import NamedTuple

import pytest
import torch

import funcops
from funcops import GroupedQLinearConfig, Op, QLinearConfig, dist, donate, lora, low_precision, qlinear, random, remat
from funcops.distributed import Mesh
from funcops.engine.contract.by_config import ByConfig, class_by
from funcops.engine.contract.op import OpConfig, config, dgrad_of, forward, make_op
from funcops.engine.contract.schema import DGRAD, Residuals, saved
from funcops.engine.trees import paths
from funcops.library.formats.recipes import Fp8Current

AXIS = Mesh.abstract({"tp": 1}, 0)["tp"]
X, OFFSETS = random.normal(random.key(0), (4, 8), dtype=torch.float32), torch.tensor([0, 1, 4], dtype=torch.int32)
KEEPS = {"row": {"x": None}, "col": {"x": None}, "input": {"x": "x"}}  # by keep, what the field that holds x aliases
DROPPED = dist.ParallelLowRankConfig(8, 8, 2, axis=AXIS, side="row", dropout=0.5)


class Kind(NamedTuple):
    """An op whose residuals depend on its config, its configs by name, an x for each, and what its fields alias."""

    op: Op
    cfgs: dict
    x: dict
    aliases: dict


def by_keep(op, cfg, x=X, aliases=KEEPS):
    return Kind(op, {keep: cfg(Fp8Current(keep=keep)) for keep in KEEPS}, dict.fromkeys(KEEPS, x), aliases)


def by_gradient(op, config):
    """A loss whose gradients are made in the backward or in the forward."""
    return Kind(
        op,
        {when: config(8, 8, gradient=when) for when in ("backward", "forward")},
        dict.fromkeys(("backward", "forward"), (X, torch.arange(4))),
        {"backward": {"x": "x.0", "labels": "x.1"}, "forward": {"dx": None}},
    )


KINDS = {
    "qlinear": by_keep(qlinear, lambda recipe: QLinearConfig(8, 8, recipe)),
    "grouped_qlinear": by_keep(
        funcops.grouped_qlinear,
        lambda recipe: GroupedQLinearConfig(2, 8, 8, recipe),
        (X, OFFSETS),
        {"row": {"x": None}, "col": {"x": None}, "input": {"x": "x.0"}},
    ),
    "column_qlinear": by_keep(dist.column_qlinear, lambda recipe: dist.ColumnQLinearConfig(8, 8, recipe, axis=AXIS)),
    "row_qlinear": by_keep(dist.row_qlinear, lambda recipe: dist.RowQLinearConfig(8, 8, recipe, axis=AXIS)),
    "low_rank": Kind(
        lora.low_rank,
        {"whole": lora.LowRankConfig(8, 8, 2), "dropped": lora.LowRankConfig(8, 8, 2, dropout=0.5)},
        {"whole": X, "dropped": (X, random.key(1))},
        {"whole": {"x": "x"}, "dropped": {"x": "x.0", "key": "x.1"}},
    ),
    "parallel_low_rank": Kind(
        dist.parallel_low_rank,
        {"whole": dist.ParallelLowRankConfig(8, 8, 2, axis=AXIS, side="row"), "dropped": DROPPED},
        {"whole": X, "dropped": (X, random.key(1))},
        {"whole": {"x": "x"}, "dropped": {"x": "x.0", "key": "x.1"}},
    ),
    "linear_cross_entropy": by_gradient(funcops.linear_cross_entropy, funcops.LinearCrossEntropyConfig),
    "vocab_linear_cross_entropy": by_gradient(
        dist.vocab_linear_cross_entropy, functools.partial(dist.VocabLinearCrossEntropyConfig, axis=AXIS)
    ),
}
EACH = [pytest.param(kind, name, id=f"{op}-{name}") for op, kind in KINDS.items() for name in kind.cfgs]
PAIRS = [
    pytest.param(kind, a, b, id=f"{op}-{a}-{b}")
    for op, kind in KINDS.items()
    for a, b in itertools.permutations(kind.cfgs, 2)
    if kind.op.residuals_of(kind.cfgs[a]) is not kind.op.residuals_of(kind.cfgs[b])
]


def run(kind, name):
    """y and residuals under a config."""
    cfg = kind.cfgs[name]
    return kind.op.fwd(kind.op.init(cfg, key=random.key(2), dtype=torch.float32), kind.x[name], cfg)


def test_these_are_all_that_there_are():
    rooms = [funcops, dist, lora]
    found = {op for room in rooms for op in vars(room).values() if isinstance(op, Op) and isinstance(op.keeps, ByConfig)}
    assert found == {kind.op for kind in KINDS.values()}


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_the_fields_of_a_config_are_those_of_its_residuals(kind, name):
    cfg = kind.cfgs[name]
    _, residuals = run(kind, name)
    fields = kind.op.fields(cfg)
    assert type(residuals) is kind.op.residuals_of(cfg) and residuals.fields is fields
    assert list(paths(residuals, is_leaf=lambda node: node is not residuals)) == list(fields)
    x = kind.x[name] if isinstance(kind.x[name], tuple) else (kind.x[name],)
    for field, alias in kind.aliases[name].items():
        held = getattr(residuals, field)
        assert fields[field].alias == alias
        assert any(held is part for part in x) == (alias is not None)


@pytest.mark.parametrize(("kind", "own", "other"), PAIRS)
def test_residuals_of_another_config_are_refused_by_name(kind, own, other):
    y, residuals = run(kind, own)
    dy, cfg = torch.ones_like(y), kind.cfgs[other]
    wanted, got = kind.op.residuals_of(cfg).__name__, type(residuals).__name__
    said = rf"residuals must be {wanted} or donate\(\) of it, got residuals {got}"
    for half, function in (("bwd", kind.op.bwd), ("dgrad", kind.op.dgrad)):
        with pytest.raises(TypeError, match=f"^{kind.op.name}_{half}: {said}"):
            function(residuals, dy, cfg)
    with pytest.raises(TypeError, match=said):
        kind.op.bwd(donate(residuals), dy, cfg)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_config_of_another_op_is_refused(kind):
    y, residuals = run(kind, name := next(iter(kind.cfgs)))
    wrong, said = low_precision.Fp8Block(), f"cfg must be {type(kind.cfgs[name]).__name__}, got"
    with pytest.raises(TypeError, match=rf"^{kind.op.name}: {said}"):
        kind.op.residuals_of(wrong)
    with pytest.raises(TypeError, match=rf"^{kind.op.name}_dgrad: {said}"):
        kind.op.dgrad(residuals, torch.ones_like(y), wrong)


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_remat_keeps_one_class_and_the_key(kind, name):
    op, cfg = remat(kind.op), kind.cfgs[name]
    assert op.residuals_of(cfg) is op.keeps and set(op.fields(cfg)) == {"params", "x"}
    assert op.keyed_by(cfg) == kind.op.keyed_by(cfg) == (name == "dropped")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_pickled_op_is_the_op(kind):
    assert pickle.loads(pickle.dumps(kind.op)) is kind.op
    assert pickle.loads(pickle.dumps(remat(kind.op))) is remat(kind.op)


# a choice of one's own


@config
class HalvedConfig(OpConfig):
    keep: bool


class Squared(Residuals):
    x: torch.Tensor = saved("[*]", alias="x", needed_by=DGRAD)


class Doubled(Residuals, static=("shape",)):
    pass


def test_a_choice_must_be_one_of_the_declared_classes():
    @forward(HalvedConfig)
    def halved_fwd(params, x, cfg, *, needs=funcops.Needs.ALL):
        return (x * x, Squared.keep(cfg, needs, x=x)) if cfg.keep else (2 * x, Doubled.keep(cfg, needs, shape=x.shape))

    @dgrad_of(ByConfig(HalvedConfig, lambda cfg: Squared if cfg.keep else Doubled, (Squared, Doubled)))
    def halved_dgrad(residuals, dy, cfg):
        return 2 * (dy * residuals.x if cfg.keep else dy), None

    op = make_op("halved", HalvedConfig, fwd=halved_fwd, dgrad=halved_dgrad)
    for cfg, want in ((HalvedConfig(keep=True), 2 * X), (HalvedConfig(keep=False), torch.full_like(X, 2))):
        _, residuals = op.fwd(None, X, cfg)
        assert torch.equal(op.bwd(residuals, torch.ones_like(X), cfg)[1], want)
        assert list(op.fields(cfg)) == (["x"] if cfg.keep else [])
    wrong = ByConfig(HalvedConfig, lambda cfg: None, (Squared, Doubled))
    with pytest.raises(ValueError, match=r"^halved: choose\(cfg\) must be one of Squared, Doubled, got None"):
        class_by("halved", wrong, HalvedConfig(keep=True))
