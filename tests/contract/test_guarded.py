"""Guards follow trees wherever they go: the law Guarded under every policy, and the mechanisms behind it."""

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from law_cases import CASES, FIRST
from torch._subclasses.fake_tensor import FakeTensorMode

from funcops import (
    ChainConfig,
    Compress,
    DonatedError,
    LinearConfig,
    LinearParams,
    Needs,
    Offload,
    Policy,
    Recompute,
    RMSNormConfig,
    StaleResidualError,
    Step,
    chain,
    donate,
    linear,
    linear_bwd,
    linear_fwd,
    op_from_torch,
    pack,
    random,
    remat,
    rms_norm,
    trees,
    unpack,
    with_policy,
)
from funcops.adapters.from_function import TorchConfig
from funcops.engine.contract import schema
from funcops.engine.contract.marks import Form, Moved
from funcops.engine.contract.op import dgrad_of, forward, make_op
from funcops.engine.contract.schema import DGRAD, Donated, Saved, residuals, saved
from funcops.engine.errors import FLOATS, check
from funcops.engine.trees import (
    put,
    replace,
    same_structure,
    structure,
    tensors,
    tree_map,
    tree_map_tensors,
    unflatten,
    with_leaves,
)
from funcops.testing import Case, check_op
from funcops.testing.guarded import COPIES, MOVES, law_guarded

COMBINED = [
    c for c in {str(c): c for c, _ in CASES}.values() if c.op.name == "chain" and "()" not in str(c) and "(0,)" not in str(c)
]
COMBINED += [c for c in FIRST if c.op.name in ("skip", "parallel", "repeat")]
POLICIES = {
    "minimal": "minimal",
    "offload_block_inputs": "offload_block_inputs",
    "compress_int8": "compress_int8",
    "recompute every step": None,
}
CFG = LinearConfig(4, 3)
MLP = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(4)), Step("up", linear, CFG)))


@pytest.mark.turns("policy", "case", every=10)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", COMBINED, ids=str)
def test_law_under_policies(case, policy):
    steps = getattr(case.cfg, "steps", getattr(case.cfg, "branches", ()))
    rules = POLICIES[policy] or Policy({step.name: Recompute() for step in steps}, optional=True)
    law_guarded(dataclasses.replace(case, op=with_policy(case.op, rules)), case.dtypes[0])


@pytest.mark.turns("case", every=4)
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_law_of_remat(case):
    law_guarded(dataclasses.replace(case, op=remat(case.op, True)), case.dtypes[0])


def test_law_of_an_op_from_torch():
    def fn(params, x, cfg):
        return torch.nn.functional.gelu(torch.nn.functional.linear(x[0], params.weight, params.bias)) * x[1]

    init = lambda cfg, *, key=None, device=None, dtype=None: linear.init(CFG, key=key, device=device, dtype=dtype)  # noqa: E731
    op = op_from_torch(fn, name="gated", init=init)
    case = Case(op=op, cfg=TorchConfig(), x=lambda d: (d.randn(2, 4), d.randn(2, 3)), reference=fn)
    law_guarded(case, torch.float64)


def fresh():
    params, x = LinearParams(torch.randn(3, 4), torch.randn(3)), torch.randn(2, 4)
    return params, x, torch.randn(2, 3), linear_fwd(params, x, CFG)[1]


def test_each_node_has_its_own_marks_of_a_tensor():
    params, x, dy, before = fresh()
    x.add_(1)
    after = linear_fwd(params, x, CFG)[1]
    for name, move in MOVES.items():
        linear_bwd(move(after), dy, CFG)
        with pytest.raises(StaleResidualError):
            linear_bwd(move(before), dy, CFG)
        assert name


def test_an_edit_makes_one_leaf_fresh_and_no_other():
    params, x, dy, kept = fresh()
    x.add_(1)
    edited = replace(kept, x=x.clone())
    assert torch.equal(linear_bwd(edited, dy, CFG)[0].weight, dy.t() @ x)
    params.weight.add_(1)
    with pytest.raises(StaleResidualError, match="linear_bwd: residuals.weight must be as the forward left it"):
        linear_bwd(edited, dy, CFG)
    with pytest.raises(StaleResidualError, match=r"residuals\.x must"):
        linear_bwd(replace(kept, x=x), dy, CFG)


BACK = {
    "itself": lambda x: x,
    "detached": torch.detach,
    "turned twice": lambda x: x.t().t(),
    "in another shape": lambda x: x.view(2, 2, 2).view(2, 4),
}


@pytest.mark.parametrize("through", ["the tensor itself", "None", "another shape"])
@pytest.mark.parametrize("back", BACK)
def test_a_leaf_that_an_edit_puts_back_is_as_stale_as_it_was(back, through):
    _, x, dy, kept = fresh()
    want = linear_bwd(kept, dy, CFG)[0].weight

    def put_back():
        other = {"the tensor itself": x, "None": None, "another shape": torch.zeros(3)}[through]
        return linear_bwd(replace(replace(kept, x=other), x=BACK[back](x)), dy, CFG)

    assert torch.equal(put_back()[0].weight, want)
    x.add_(1)
    with pytest.raises(StaleResidualError, match=r"linear_bwd: residuals\.x must"):
        put_back()


def kept_of(case, op):
    params, x = case.make(case.dtypes[0])
    return op.fwd(params, x, case.cfg)[1]


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_cell_is_taken_once_if_it_is_copied_too(case):
    for op in (case.op, remat(case.op, True), with_policy(case.op, Policy({"*": Offload()}, optional=True))):
        cell = donate(kept_of(case, op))
        if cell is None:
            continue
        other = copy.copy(cell)
        op.dgrad(cell, None, case.cfg)
        with pytest.raises(DonatedError):
            op.dgrad(other, None, case.cfg)


def test_marks_are_not_in_a_structure_and_keep_nothing_alive():
    params, x, _, kept = fresh()
    x.add_(1)
    again = linear_fwd(params, x, CFG)[1]
    assert same_structure(kept, again) and hash(structure(kept)) == hash(structure(again))
    tree_map(lambda a, b: a, kept, again)
    spec, seen = structure(kept), weakref.ref(x)
    del kept, again, x
    gc.collect()
    assert seen() is None
    assert pickle.loads(pickle.dumps(structure({"a": 1}))) == structure({"a": 1}) and copy.copy(spec) == spec


def test_a_structure_takes_other_leaves_as_they_are():
    _, x, dy, kept = fresh()
    spec = structure(kept)
    weight, other = torch.randn(3, 4), torch.randn(2, 4)
    made = unflatten(spec, [other, weight])
    assert torch.equal(linear_bwd(made, dy, CFG)[1], dy @ weight)
    other.add_(1)
    with pytest.raises(StaleResidualError):
        linear_bwd(made, dy, CFG)
    x.add_(1)
    with pytest.raises(StaleResidualError):
        linear_bwd(with_leaves(kept, [x, weight]), dy, CFG)
    with pytest.raises(StaleResidualError):  # nobody can tell whether that was made of x before the write or since
        linear_bwd(unflatten(spec, [x.clone(), weight]), dy, CFG)
    del x, kept
    linear_bwd(unflatten(spec, [other, weight]), dy, CFG)


def test_inference_tensors_beside_others():
    params, x = LinearParams(torch.randn(3, 4), torch.randn(3)), torch.randn(2, 4)
    with torch.inference_mode():
        params = tree_map_tensors(torch.clone, params)
    dy = torch.randn(2, 3)
    for move in (MOVES | COPIES).values():
        kept = linear_fwd(params, x, CFG)[1]
        want = linear_bwd(kept, dy, CFG)
        got = linear_bwd(move(kept), dy, CFG)
        assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(want), strict=True))
    for move in MOVES.values():
        kept = linear_fwd(params, x, CFG)[1]
        moved = move(kept)
        x.add_(1)
        with pytest.raises(StaleResidualError, match=r"residuals\.x must"):
            linear_bwd(moved, dy, CFG)


def test_fake_tensors_move():
    with FakeTensorMode():
        _, x, dy, kept = fresh()
        for name, move in MOVES.items():
            linear_bwd(move(kept), dy, CFG)
            assert name
        x.add_(1)
        for move in MOVES.values():
            with pytest.raises(StaleResidualError):
                linear_bwd(move(kept), dy, CFG)


def test_donated_residuals_stay_donated():
    _, _, dy, kept = fresh()
    linear_bwd(donate(kept), dy, CFG)
    for name, move in (MOVES | COPIES).items():
        with pytest.raises(DonatedError):
            linear_bwd(move(kept), dy, CFG)
        assert name
    cell = donate(fresh()[3])
    other = copy.copy(cell)
    linear_bwd(cell, dy, CFG)
    with pytest.raises(DonatedError):
        linear_bwd(other, dy, CFG)


def mlp():
    params, x, dy = chain.init(MLP, key=random.key(0)), torch.randn(2, 4), torch.randn(2, 3)
    return params, x, dy, chain.fwd(params, x, MLP)[1]


def test_a_part_that_is_missing_is_missed():
    _, _, dy, kept = mlp()
    for name in kept:
        with pytest.raises(TypeError, match=f"residuals.{name}".replace("(", r"\(").replace(")", r"\)") + " must be .* got None"):
            chain.bwd(put(kept, name, None), dy, MLP)
    frozen = chain.fwd(chain.init(MLP, key=random.key(0)), torch.randn(2, 4), MLP, needs=Needs(x=False, params="up"))[1]
    assert frozen["norm"] is None
    chain.bwd(copy.copy(put(frozen, "up.x", frozen["up"].x)), dy, MLP)


def test_fewer_needs_miss_less():
    _, _, dy, kept = fresh()
    only_x = replace(kept, x=None, needs=Needs(params=False))
    assert torch.equal(linear_bwd(only_x, dy, CFG)[1], dy @ kept.weight)
    with pytest.raises(
        TypeError, match=r"linear_bwd: residuals.x must be a tensor \(\[\*, I\]\), as the forward kept it, got None"
    ):
        linear_bwd(replace(kept, x=None), dy, CFG)
    healed = replace(replace(kept, x=None), x=kept.x)
    linear_bwd(healed, dy, CFG)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_packed_trees_are_guarded_too(codec):
    params, x, dy, kept = mlp()
    waiting = pack(kept, Compress(codec))
    chain.bwd(unpack(waiting), dy, MLP)
    packed = next(p for p in (waiting["up"].weight, waiting["norm"].x) if type(p).__name__ == "Packed")
    packed.parts[0].add_(0)
    with pytest.raises(StaleResidualError, match="unpack: residuals"):
        unpack(waiting)
    x.add_(1)
    with pytest.raises(StaleResidualError, match="pack: residuals.x must be"):
        pack(kept, Compress(codec))


def test_offloaded_inputs_know_their_device_wherever_they_go():
    op = remat(linear, True)
    _, kept = op.fwd(LinearParams(torch.randn(3, 4), torch.randn(3)), torch.randn(2, 4), CFG)
    assert kept.device == torch.device("cpu")
    for name, move in (MOVES | COPIES).items():
        moved = move(kept)
        assert getattr(moved, "_node", moved).device == kept.device, name


def test_configs_are_copied_as_themselves_and_pickled_without_their_hash():
    assert copy.deepcopy(MLP) is MLP and copy.copy(CFG) is CFG
    cfg = LinearConfig(5, 3)
    object.__setattr__(cfg, "_hash", 1)  # as of a process that hashes strings otherwise
    assert hash(pickle.loads(pickle.dumps(cfg))) == hash(LinearConfig(5, 3))
    assert pickle.loads(pickle.dumps(MLP)) == MLP


def test_the_launch_path_looks_at_no_marks_but_its_own(monkeypatch):
    params, x, dy, kept = mlp()
    monkeypatch.setattr(Moved, "to", lambda self, node: pytest.fail("a node was rebuilt"))
    for op in (chain, with_policy(chain, "minimal"), with_policy(chain, "save_all")):
        _, kept = op.fwd(params, x, MLP)
        dx, pending = op.dgrad(kept, dy, MLP)
        op.wgrad(donate(pending), MLP)
        op.bwd(donate(kept), dy, MLP)


def softplus(alias, keep=lambda x: x):
    """An op whose residuals declare their alias, or forget to; `keep(x)` is the kept tensor."""

    @residuals
    class Kept:
        x: torch.Tensor = saved("[*]", alias=alias, needed_by=DGRAD)

    @forward(TorchConfig)
    def softplus_fwd(params, x, cfg, *, needs=Needs.ALL):
        check("softplus_fwd", "x", x, (...,), FLOATS)
        return torch.nn.functional.softplus(x), Kept.keep(cfg, needs, x=keep(x))

    @dgrad_of(Kept)
    def softplus_dgrad(residuals, dy, cfg):
        check("softplus_dgrad", "dy", dy, residuals.x.shape, residuals.x.dtype, residuals.x)
        return dy * torch.sigmoid(residuals.x), None

    return make_op("softplus", TorchConfig, fwd=softplus_fwd, dgrad=softplus_dgrad)


def holds(alias, law="guarded", **kept):
    reference = lambda params, x, cfg: torch.log1p(torch.exp(x))  # noqa: E731
    made = dict(cfg=TorchConfig(), x=lambda d: d.randn(3), reference=reference, laws=(law,), free=("x",))
    check_op(softplus(alias, **kept), **made)


FAULTS = {
    "marks are not handed on": lambda m: m.setattr(Moved, "to", lambda self, node: None),
    "all that was written to is fresh again": lambda m: m.setattr(Moved, "of", staticmethod(lambda node: trees.Aside())),
    "donate forgets marks": lambda m: m.setattr(Donated, "_node", forgetting(Donated._node)),
    "a copy takes the marks of the original": lambda m: m.setattr(Saved, "__deepcopy__", lambda self, memo: deep(self, memo)),
    "a leaf may have any form": lambda m: m.setattr(Form, "fits", lambda self, other: True),
    "a stale node's copy is fresh": lambda m: m.setattr(schema, "heard", lambda node, stale, unlike: None),
}


def forgetting(slot):
    """A slot that gives what it holds without its marks."""

    def node(self):
        found = slot.__get__(self)
        if isinstance(found, Saved):
            object.__setattr__(found, "_marks", None)
        return found

    return property(node, slot.__set__)


def deep(node, memo):
    made = node.twin()
    for name in node.fields:
        setattr(made, name, copy.deepcopy(getattr(node, name), memo))
    return made


@pytest.mark.parametrize("fault", FAULTS)
def test_the_law_notices(fault, monkeypatch):
    holds("x")
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, StaleResidualError)):
        for case in [c for c in COMBINED if c.op is chain][:1]:
            params, x = case.make(torch.float64)
            x.add_(1)  # so that a mark is not 0
            law_guarded(dataclasses.replace(case, params=lambda d, p=params: p, x=lambda d, x=x: x), torch.float64)
        holds("x")


def test_the_law_notices_a_copy_with_other_values(monkeypatch):
    monkeypatch.setitem(COPIES, "clone", lambda tree: tree_map_tensors(lambda t: t + 1, tree))
    with pytest.raises(AssertionError, match="residuals moved by clone"):
        holds("x")


@pytest.mark.parametrize("name", [name for name in COPIES if name not in ("pickle", "torch.save")])
def test_the_law_notices_a_copy_that_is_not_guarded(name, monkeypatch):
    """A later write to a tensor of the copy itself makes the copy stale."""
    copied = COPIES[name]

    def unguarded(tree):
        made = copied(tree)
        made._marks = None
        return made

    monkeypatch.setitem(COPIES, name, unguarded)
    said = f"residuals after a write to x, and to its copy by {name}: went through without an error"
    with pytest.raises(AssertionError, match=said):
        holds("x")


def test_the_law_notices_an_alias_that_is_not_declared():
    with pytest.raises(AssertionError, match=r"law 'guarded', .*: residuals after a write to x: went through without an error"):
        holds(None)


def test_the_law_notices_a_copy_that_is_declared_an_alias():
    """A copy costs bytes that a report would not count."""
    holds("x", "frugal")
    holds(None, "frugal", keep=torch.clone)
    with pytest.raises(AssertionError, match=r"law 'frugal', .*: residuals.x must be x itself, got another tensor"):
        holds("x", "frugal", keep=torch.clone)


def test_a_missing_field_is_explained_by_its_declaration():
    """The explanation has `of` only if it differs from what the phases imply."""
    from types import SimpleNamespace

    from funcops.engine.contract.schema import DGRAD, WGRAD
    from funcops.testing.frugal import _declared

    for needed, usual in ((DGRAD, ("x",)), (WGRAD, ("params",)), (DGRAD | WGRAD, ("x", "params"))):
        said = "|".join(str(phase.name) for phase in (DGRAD, WGRAD) if phase in needed)
        assert _declared(SimpleNamespace(needed_by=needed, of=usual)) == f"needed_by={said}"
        assert _declared(SimpleNamespace(needed_by=needed, of=("x.0",))) == f"needed_by={said}, of=('x.0',)"


def test_a_field_of_another_number_of_leaves_is_told_what_it_was():
    _, _, dy, kept = fresh()
    with pytest.raises(TypeError, match=r"linear_bwd: residuals.x must be float32\[.*\], as the forward kept, got 2 leaves"):
        linear_bwd(replace(kept, x=(kept.x, kept.x)), dy, CFG)
