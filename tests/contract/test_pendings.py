"""Pendings as data: summed in few products, offloaded, saved, moved, reported; each used once."""

import copy
import random as pyrandom
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    Compress,
    LinearConfig,
    LinearParams,
    Needs,
    Offload,
    ParallelConfig,
    Policy,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    activation,
    add,
    batch_wgrads,
    chain,
    donate,
    linear,
    pack,
    parallel,
    random,
    remat,
    repeat,
    report,
    rms_norm,
    skip,
    unpack,
    with_policy,
)
from funcops.checkpoint import load, save
from funcops.engine.contract.op import wrap
from funcops.engine.errors import DonatedError
from funcops.engine.trees import cast, leaves, nbytes, paths, tensors, tree_map_tensors
from funcops.library.ops import linear_wgrads
from funcops.testing.tolerances import assert_close

HOW = [None, "each", "concatenate", "batch", "group"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def pendings_of(op, cfg, rows, dtype=torch.float64, needs=Needs.ALL, width=8, numbers=None):
    """The params, and a pending a number of rows, of x and dy in `dtype`, which hold numbers that fit in the dtype `numbers`."""
    params = cast(op.init(cfg, key=random.key(0), dtype=torch.float64), dtype)
    generator = torch.Generator().manual_seed(1)
    found = []
    for r in rows:
        x = torch.randn(r, width, generator=generator, dtype=torch.float64).to(numbers or dtype).to(dtype)
        y, residuals = op.fwd(params, x, cfg, needs=needs)
        dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(numbers or dtype).to(dtype)
        found.append(op.dgrad(residuals, dy, cfg)[1])
    return params, found


def one_by_one(op, pendings, cfg, into):
    for pending in pendings:
        op.wgrad(pending, cfg, into=into)
    return into


def model():
    body = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(8)), Step("up", linear, LinearConfig(8, 8))))
    steps = (Step("blocks", repeat, RepeatConfig(chain, body, 3)), Step("head", linear, LinearConfig(8, 4, bias=False)))
    return ChainConfig(steps=steps)


def zeros(params, dtype=None):
    return tree_map_tensors(lambda t: torch.zeros_like(t, dtype=dtype), params)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [[5], [4, 4, 4], [3, 1, 7, 0]], ids=str)
def test_a_linear(how, dtype, rows):
    cfg = LinearConfig(8, 16)
    params, pendings = pendings_of(linear, cfg, rows, dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    into = zeros(params, wide)
    got = batch_wgrads(linear, pendings, cfg, into=into, how=how)
    assert got is into
    exact = pendings_of(linear, cfg, rows, numbers=dtype)[1]
    assert_close(got, one_by_one(linear, exact, cfg, zeros(params, torch.float64)), dtype=dtype)


@pytest.mark.parametrize("how", HOW)
def test_a_model(how):
    cfg = model()
    params, pendings = pendings_of(chain, cfg, [4, 4, 9])
    want = one_by_one(chain, pendings, cfg, zeros(params))
    assert_close(batch_wgrads(chain, pendings, cfg, how=how), want, dtype=torch.float64)
    donated = [donate(p) for p in pendings]
    assert_close(batch_wgrads(chain, donated, cfg, into=zeros(params), how=how), want, dtype=torch.float64)
    with pytest.raises(DonatedError):
        batch_wgrads(chain, donated, cfg, into=zeros(params))


@pytest.mark.parametrize("how", HOW)
def test_tied_weights_add_up(how):
    steps = (Step("a", linear, LinearConfig(8, 8)), Step("b", linear, LinearConfig(8, 8, bias=False)))
    cfg = ChainConfig(steps=steps, ties={"b.weight": "a.weight"})
    params, pendings = pendings_of(chain, cfg, [3, 3])
    want = one_by_one(chain, pendings, cfg, zeros(params))
    assert_close(batch_wgrads(chain, pendings, cfg, into=zeros(params), how=how), want, dtype=torch.float64)


@pytest.mark.parametrize(("how", "products"), [("concatenate", 3), ("batch", 1)])
def test_a_stacked_leaf_is_the_same_place_at_every_call(how, products):
    cfg = RepeatConfig(linear, LinearConfig(8, 8), 3, stacked=True)
    params, pendings = pendings_of(repeat, cfg, [4, 4])
    want = one_by_one(repeat, pendings, cfg, zeros(params))
    into = zeros(params)
    with Counter() as counter:
        batch_wgrads(repeat, pendings, cfg, into=into, how=how)
    assert counter.products == products
    assert_close(into, want, dtype=torch.float64)


@pytest.mark.parametrize("needs", [Needs(params=("weight",)), Needs(params=("bias",)), Needs(x=False)], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_masks(needs, how):
    cfg = LinearConfig(8, 16)
    params, pendings = pendings_of(linear, cfg, [3, 3], needs=needs)
    into = LinearParams(*[torch.ones_like(t) if needs.param(n) else None for n, t in paths(params).items()])
    want = one_by_one(linear, pendings, cfg, copy.deepcopy(into))
    assert_close(batch_wgrads(linear, pendings, cfg, into=into, how=how), want, dtype=torch.float64)


LAYERS = {
    "linear": (linear, LinearConfig(8, 8)),
    "chain": (chain, ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(8)), Step("up", linear, LinearConfig(8, 8))))),
    "repeat": (repeat, RepeatConfig(linear, LinearConfig(8, 8), 2)),
    "skip": (skip, SkipConfig(linear, LinearConfig(8, 8))),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_pending_without_weight_gradients_adds_nothing(name):
    op, cfg = LAYERS[name]
    params, (pending,) = pendings_of(op, cfg, [3])
    _, (nothing,) = pendings_of(op, cfg, [3], needs=Needs(params=False))
    want = one_by_one(op, [pending], cfg, zeros(params))
    got = batch_wgrads(op, [nothing, pending, nothing], cfg, into=zeros(params))
    assert_close(got, want, dtype=torch.float64)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.sampled_from(HOW), st.integers(1, 60))
def test_any_rows(rows, how, joined):
    """`joined`: a small limit, so that concatenations are cut into several."""
    cfg, before = LinearConfig(8, 16), linear_wgrads.JOINED_ROWS
    params, pendings = pendings_of(linear, cfg, rows)
    linear_wgrads.JOINED_ROWS = joined
    try:
        got = batch_wgrads(linear, pendings, cfg, how=how)
    finally:
        linear_wgrads.JOINED_ROWS = before
    assert_close(got, one_by_one(linear, pendings, cfg, zeros(params)), dtype=torch.float64)


@pytest.mark.parametrize(("how", "products"), [("each", 6), ("concatenate", 2), ("batch", 1), ("group", 1), (None, 2)])
def test_the_number_of_products(how, products):
    """Two weights of one shape, three microbatches."""
    cfg = ChainConfig(steps=(Step("a", linear, LinearConfig(8, 8)), Step("b", linear, LinearConfig(8, 8))))
    _, pendings = pendings_of(chain, cfg, [4, 4, 4], torch.float32)
    counter = Counter()
    into = zeros(chain.init(cfg, key=random.key(0)))
    with counter:
        batch_wgrads(chain, pendings, cfg, into=into, how=how)
    assert counter.products == products


def wrapped(draw, op, cfg, depth):
    """A drawn op around an op whose x is like its y, and the number of weights for each weight of that op."""
    if depth == 0:
        return op, cfg, 1
    inner, inner_cfg, n = wrapped(draw, op, cfg, depth - 1)
    kind, times = draw.choice(WRAPS if depth == 1 else WRAPS[:-1]), draw.randint(2, 3)
    if kind == "chain":
        act = Step("act", activation, ActivationConfig("silu"))
        return chain, ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(8)), Step("in", inner, inner_cfg), act)), n
    if kind == "skip":
        return skip, SkipConfig(inner, inner_cfg), n
    if kind == "repeat":
        return repeat, RepeatConfig(inner, inner_cfg, times, stacked=draw.random() < 0.5), n * times
    if kind == "parallel":
        branches = ParallelConfig(branches=(Step("a", inner, inner_cfg), Step("b", inner, inner_cfg)))
        return chain, ChainConfig(steps=(Step("both", parallel, branches), Step("sum", add, AddConfig()))), 2 * n
    if kind == "remat":
        return remat(inner), inner_cfg, n
    return with_policy(chain, kind), ChainConfig(steps=(Step("in", inner, inner_cfg),)), n


WRAPS = ["chain", "skip", "repeat", "parallel", "remat", "minimal", "save_all", Policy({"*": Compress("bf16")})]


@pytest.mark.parametrize("seed", range(24))
def test_products_are_joined_wherever_they_are(seed):
    """However an op is wrapped, each weight gets one joined product, with the sums of one wgrad after another."""
    draw = pyrandom.Random(seed)
    op, cfg, weights = wrapped(draw, linear, LinearConfig(8, 8, bias=seed % 3 > 0), 1 + seed % 4)
    params, pendings = pendings_of(op, cfg, [4, 4, 4])
    want, counter, alone = one_by_one(op, pendings, cfg, zeros(params)), Counter(), Counter()
    into = [zeros(params), zeros(params)]
    with counter:
        batch_wgrads(op, pendings, cfg, into=into[0], how="concatenate")
    with alone:
        batch_wgrads(op, [donate(p) for p in pendings], cfg, into=into[1], how="each")
    assert (counter.products, alone.products) == (weights, 3 * weights)
    assert all(torch.equal(a, b) for a, b in zip(tensors(into[1]), tensors(want), strict=True))
    assert_close(into[0], want, dtype=torch.float64)


def test_sums_within_others():
    """A weight gradient may itself be such a sum, on any thread."""
    cfg = LinearConfig(8, 4)
    params, pendings = pendings_of(linear, cfg, [3, 3])

    def wgrad(pending, cfg, *, into=None):
        with ThreadPoolExecutor(1) as other:
            found = other.submit(batch_wgrads, linear, [pending, pending], cfg, into=into).result()
        return batch_wgrads(linear, [pending], cfg, into=found)

    def fwd(params, x, cfg, *, needs=Needs.ALL):
        return linear.fwd(params, x, cfg, needs=needs)

    thrice = wrap(linear, (None, ()), fwd=fwd, wgrad=wgrad)
    want = one_by_one(linear, pendings * 3, cfg, zeros(params))
    assert_close(batch_wgrads(thrice, pendings, cfg, into=zeros(params)), want, dtype=torch.float64)


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = ("mm", "addmm", "bmm", "_grouped_mm", "addmm_", "baddbmm")
        own = func.namespace == "funcops" and "linear" in func._schema.name
        self.products += (func._schema.name.partition("::")[2] in names or own) and not isinstance(args[0], FakeTensor)
        return func(*args, **(kwargs or {}))


def test_wrong_arguments_raise_before_anything_is_added():
    cfg = LinearConfig(8, 16)
    params, pendings = pendings_of(linear, cfg, [3, 3], torch.bfloat16)
    into = LinearParams(torch.zeros(16, 8), torch.zeros(5))
    with pytest.raises(ValueError, match=r"batch_wgrads: pendings.0: into.bias must be \[16\], got \[5\]"):
        batch_wgrads(linear, pendings, cfg, into=into)
    assert not into.weight.any()
    with pytest.raises(ValueError, match="batch_wgrads: pendings must be at least one, got none"):
        batch_wgrads(linear, [], cfg)
    with pytest.raises(ValueError, match="how must be None, or one of 'each', 'concatenate', 'batch', 'group', got 'bmm'"):
        batch_wgrads(linear, pendings, cfg, how="bmm")
    with pytest.raises(TypeError, match="batch_wgrads: pendings must be list or tuple, got LinearPending"):
        batch_wgrads(linear, pendings[0], cfg)
    assert leaves(batch_wgrads(linear, [None, None], cfg)) == [None, None]
    linear.wgrad(pendings[0], cfg, into=zeros(params, torch.float32))  # and what failed left nothing behind


def test_pendings_are_saved_moved_reported_and_packed(tmp_path):
    cfg = model()
    params, (pending,) = pendings_of(chain, cfg, [40], torch.float32)
    want = chain.wgrad(pending, cfg)
    table = report(pending)
    assert table.kept_bytes == nbytes(pending)
    save(pending, tmp_path / "pending.safetensors")
    blank = tree_map_tensors(torch.zeros_like, pending)
    assert_close(chain.wgrad(load(tmp_path / "pending.safetensors", like=blank), cfg), want, dtype=torch.float32)
    on_meta = tree_map_tensors(lambda t: t.to("meta"), pending)
    assert {t.device.type for t in tensors(chain.wgrad(on_meta, cfg))} == {"meta"}
    packed = pack(pending, Compress("bf16"))
    assert nbytes(packed) < 0.51 * nbytes(pending)
    assert_close(chain.wgrad(unpack(packed), cfg), want, dtype=torch.bfloat16)
    assert nbytes(pack(pending, Compress("int8"))) < 0.45 * nbytes(pending)
    kept = pack(pending, Offload())
    assert all(a is b for a, b in zip(tensors(unpack(kept)), tensors(pending), strict=True)), "on the CPU it is there already"
    with pytest.raises(TypeError, match="pack: action must be Offload or Compress, got 'fp8'"):
        pack(pending, "fp8")
