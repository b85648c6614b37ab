"""`batch_wgrads` of traced modules: the sums of one wgrad after another, of fewer products."""

import pytest
import torch
from own_models import CFG, MODELS, draw
from products import Products
from test_models_as_ops import model_of, result
from test_traced_compiled import Compiled, same
from torch import nn

from funcops import (
    Compress,
    DonatedError,
    Needs,
    Policy,
    StaleResidualError,
    WithExtras,
    batch_wgrads,
    chain,
    donate,
    op_from_module,
    op_from_torch,
    stages_from_module,
    with_policy,
)
from funcops.engine.trees import tensors, tree_map_tensors
from funcops.testing.tolerances import assert_close

COUNT = 3
HOW = (None, "each", "concatenate", "batch", "group")


class Transposed(nn.Module):
    """Weights as [I, O], of which two products read one, and a product that no row of tokens goes through."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(draw(6, 6, seed=i)) for i in range(2))
        self.c = nn.Parameter(draw(2, 6, 4))

    def forward(self, x):
        h = torch.tanh(x @ self.a) @ self.a.T + nn.functional.linear(x, self.b)
        return torch.einsum("...i,nio->...no", h, self.c) @ self.b[:4, :4]


class Mixed(nn.Module):
    """Products in 16 bits of weights in 32."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.down(self.up(x.float()).relu()).float()


BUILT = {name: build for name, build in MODELS.items() if name not in ("assigning", "counting")}
BUILT |= {"transposed": (Transposed, lambda: draw(2, 5, 6))}
# the products of one wgrad, and of COUNT joined along rows: convolutions and attention's are not joined
PRODUCTS = {"mlp": (2, 2), "block": (4, 4), "language": (5, 5), "language, logits": (9, 5), "conv": (2, 6), "transposed": (5, 8)}
PRODUCTS |= {"shared parts": (2, 1), "channels last": (2, 6), "recurrent": (5, 2), "encoder": (4, 4), "lazy view": (1, 1)}


def moved(t, i):
    """Another microbatch in the same layout."""
    return (t * (1 + i) if t.is_floating_point() else t.roll(i)) if isinstance(t, torch.Tensor) else t


def ones(y):
    main = tree_map_tensors(lambda t: draw(*t.shape).to(t.dtype), y.main if isinstance(y, WithExtras) else y)
    return WithExtras(main, dict.fromkeys(y.extras)) if isinstance(y, WithExtras) else main


def pendings(op, params, x, needs=Needs.ALL, cfg=CFG):
    found = []
    for i in range(COUNT):
        torch.manual_seed(i)
        y, residuals = op.fwd(params, tree_map_tensors(lambda t, i=i: moved(t, i), x), cfg, needs=needs)
        found.append(op.dgrad(residuals, ones(y), cfg)[1])
    return found


def joined(op, params, waiting, how, dtype=None, cfg=CFG):
    """The sums, and the number of products."""
    sums = tree_map_tensors(lambda t: torch.zeros_like(t, dtype=dtype), params)
    with Products() as products:
        assert batch_wgrads(op, waiting, cfg, into=sums, how=how) is sums
    return sums, products.count


def summed(op, params, waiting, dtype=None, cfg=CFG):
    sums = tree_map_tensors(lambda t: torch.zeros_like(t, dtype=dtype), params)
    for pending in waiting:
        op.wgrad(pending, cfg, into=sums)
    return sums


def traced(name, dtype=torch.float64):
    torch.manual_seed(0)
    build, example = BUILT[name]
    x = tree_map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, example())
    return *op_from_module(build().to(dtype), x), x


@pytest.mark.parametrize("name", BUILT)
def test_every_way_has_the_sums_of_one_wgrad_after_another(name):
    op, params, x = traced(name)
    waiting = pendings(op, params, x)
    want = summed(op, params, waiting)
    for how in HOW:
        got = batch_wgrads(op, waiting, CFG, into=tree_map_tensors(torch.zeros_like, params), how=how)
        assert_close(got, want, dtype=torch.float64, what=f"{how}")
        if how in (None, "each"):
            continue
        assert_close(batch_wgrads(op, waiting, CFG, how=how), op.wgrad(waiting[0], CFG) and want, dtype=torch.float64, what=how)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_joined(name):
    op, params, x = traced(name)
    waiting = pendings(op, params, x)
    one, together = PRODUCTS[name]
    found = {how: joined(op, params, waiting, how)[1] for how in ("each", "concatenate")}
    assert found == {"each": COUNT * one, "concatenate": together}


@pytest.mark.parametrize("build", [lambda: BUILT["block"][0]().bfloat16(), Mixed], ids=["in 16 bits", "autocast inside"])
@pytest.mark.parametrize("how", [None, "concatenate"])
def test_16_bits_are_summed_unrounded_and_joined_by_the_measured_table(build, how):
    torch.manual_seed(0)
    module = build()
    x = draw(2, 5, 6).to(next(module.parameters()).dtype)
    op, params = op_from_module(module, x)
    waiting = pendings(op, params, x)
    want = summed(op, params, waiting, torch.float32)
    got, products = joined(op, params, waiting, how, torch.float32)
    assert products == len([name for name in params if name.endswith("weight") and "norm" not in name])
    assert_close(got, want, dtype=torch.bfloat16)
    got = batch_wgrads(op, waiting, CFG, how=how)
    assert {t.dtype for t in got.values()} == {t.dtype for t in params.values()}
    assert_close(tree_map_tensors(lambda t: t.float(), got), want, dtype=torch.bfloat16)


@pytest.mark.parametrize("how", ["each", "concatenate"])
def test_a_gradient_that_is_not_needed_has_no_product(how):
    op, params, x = traced("mlp")
    needs = Needs(x=False, params=frozenset({"up.weight", "norm.bias"}))
    waiting = [*pendings(op, params, x, needs), *pendings(op, params, x)]
    got, products = joined(op, params, waiting, how)
    assert products == {"each": 12, "concatenate": 2 + COUNT}[how]  # norm.bias reads a dx that nothing else needs
    assert_close(got, summed(op, params, waiting), dtype=torch.float64)
    few = batch_wgrads(op, waiting[:COUNT], CFG, how=how)
    assert [name for name, g in few.items() if g is not None] == ["norm.bias", "up.weight"]


def trees(params, x, cfg):
    return x @ params["w"][0] + params["w"][1] * params["b"]


@pytest.mark.parametrize("how", ["each", "concatenate"])
def test_a_function_of_a_tree_in_any_order(how):
    op = op_from_torch(trees, init=lambda cfg, *, key=None, device=None, dtype=None: tree_of(device))
    params, x = tree_of("cpu"), draw(5, 6)
    waiting = pendings(op, params, x)
    assert_close(batch_wgrads(op, waiting, CFG, how=how), summed(op, params, waiting), dtype=torch.float64)


def tree_of(device):
    return {"w": (draw(6, 4).to(device), draw(4).to(device)), "b": draw(4, seed=2).to(device)}  # sorted, b would be the first


def test_given_away_stale_and_wrong_pendings_raise_before_anything_is_added():
    op, params, x = traced("mlp")
    waiting, sums = pendings(op, params, x), tree_map_tensors(torch.zeros_like, params)
    want = summed(op, params, waiting)
    cells = [donate(pending) for pending in pendings(op, params, x)]
    assert_close(batch_wgrads(op, cells, CFG, how="concatenate"), want, dtype=torch.float64)
    with pytest.raises(DonatedError, match=r"batch_wgrads: pendings.0"):
        batch_wgrads(op, cells, CFG, into=sums)
    odd = sums | {"up.weight": torch.zeros(12, 5, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"into.up.weight must be \[12, 6\], got \[12, 5\]"):
        batch_wgrads(op, waiting, CFG, into=odd)
    with pytest.raises(ValueError, match=r"Mlp_wgrad: into.up.weight must be \[12, 6\], got \[12, 5\]"):
        op.products(waiting[0], CFG, into=odd)
    narrow = {name: t.float() for name, t in sums.items()}
    with pytest.raises(TypeError, match=r"float64 or a wider"):
        batch_wgrads(op, waiting, CFG, into=narrow)
    with torch.no_grad():
        waiting[1].kept["x"].mul_(2)
    with pytest.raises(StaleResidualError, match=r"kept\.x"):
        batch_wgrads(op, waiting[1:], CFG, into=sums)
    assert not any(t.any() for t in tensors((sums, narrow)))


@pytest.mark.parametrize("how", ["each", "concatenate"])
def test_stages_of_a_chain_and_a_policy(how):
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    cfg, params = stages_from_module(module, draw(4, 6), ["2", "4"])
    waiting = pendings(chain, params, draw(4, 6), cfg=cfg)
    got, products = joined(chain, params, waiting, how, cfg=cfg)
    assert products == {"each": 9, "concatenate": 3}[how]
    assert_close(got, summed(chain, params, waiting, cfg=cfg), dtype=torch.float64)
    op, params, x = traced("mlp")
    lean = with_policy(op, Policy({"kept.*": Compress("bf16")}))
    waiting = pendings(lean, params, x)
    got, products = joined(lean, params, waiting, how)
    assert products == {"each": 6, "concatenate": 2}[how]
    assert_close(got, summed(lean, params, waiting), dtype=torch.float64)


@pytest.mark.turns("name", "how", every=4)
@pytest.mark.parametrize("how", ["each", "concatenate"])
@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_compiled(name, how):
    op, params, x = traced(name)
    waiting = pendings(op, params, x)
    want, got = [tree_map_tensors(torch.zeros_like, params) for _ in range(2)]
    batch_wgrads(op, waiting, CFG, into=want, how=how)
    Compiled(lambda waiting, into: batch_wgrads(op, waiting, CFG, into=into, how=how))(waiting, got)
    assert same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "ResNet", "T5", "ALBERT"])
def test_whole_models(name):
    model, batch = model_of(name)
    op, params = op_from_module(model, batch, output=result)
    waiting = pendings(op, params, batch, Needs(x=False, params=True))
    want, one_by_one = joined(op, params, waiting, "each")
    got, together = joined(op, params, waiting, "concatenate")
    assert_close(got, want, dtype=torch.float64)
    assert together < one_by_one
