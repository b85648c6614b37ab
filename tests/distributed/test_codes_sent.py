"""Codes in place of what they are made from: tokens to their experts, and params under ZeRO-3. All results keep their bits."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from tiers import drawn
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import (
    ChainConfig,
    CrossEntropyConfig,
    ExpertsConfig,
    GLUConfig,
    GroupedQLinearConfig,
    LinearConfig,
    Needs,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    WithExtras,
    chain,
    cross_entropy,
    dist,
    experts,
    glu,
    grouped_qlinear,
    linear,
    random,
    repeat,
    rms_norm,
    skip,
)
from funcops.distributed import Mesh
from funcops.engine.contract.walk import walk
from funcops.engine.trees import nbytes, paths, tensors
from funcops.library.formats import quantize_tensor
from funcops.lora import with_lora
from funcops.low_precision import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed, quantize_params, with_recipe
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits

WIDTH, HIDDEN, EXPERTS = 256, 128, 4
EXACT = (Fp8Block(), Fp8Block(bwd="e5m2"), MXFP8(keep="row"))
SIZES = {2: (5, 0), 4: (5, 0, 9, 3)}  # tokens of each rank
GIVEN = ("tokens", "indices")


def layer(axis=None, capacity=None):
    """A chain of experts alone, sharded or not."""
    own, sizes = (experts, ExpertsConfig(EXPERTS, WIDTH, HIDDEN)), (EXPERTS, WIDTH, HIDDEN)
    if axis is not None:
        own = dist.parallel_experts, dist.ParallelExpertsConfig(*sizes, axis=axis, capacity=capacity)
    return ChainConfig(steps=(Step("experts", *own, takes=GIVEN),), extras=GIVEN)


def low_experts(recipe, axis=None, capacity=None):
    """The config of the experts in low precision, whose `cfg` is the chain of their steps."""
    return with_recipe(layer(axis, capacity), recipe).steps[0].cfg


def sent_whole(cfg):
    """The same steps, with x itself sent: it is quantised where it arrives."""
    first, *rest = cfg.steps
    return dataclasses.replace(cfg, steps=(dataclasses.replace(first, cfg=dataclasses.replace(first.cfg, format=None)), *rest))


def of_rank(rank, tokens, choices, dtype=torch.bfloat16):
    """Weights, tokens, choices (some dropped) and dy of a rank. Rows and blocks have scales of their own, but span little, so that
    tiling anew has the bits of x."""
    draw = torch.Generator().manual_seed(rank)
    x, dy = (torch.rand(tokens, WIDTH, generator=draw) + 0.5 for _ in range(2))
    signs = torch.randint(2, (tokens, WIDTH), generator=draw) * 2 - 1
    x = x * signs * 2.0 ** (torch.randint(5, (tokens, 1), generator=draw) + torch.arange(WIDTH) // 32 % 3)
    indices = torch.rand(tokens, EXPERTS + 1, generator=draw).argsort(-1)[:, :choices].int()
    return torch.rand(tokens, choices, generator=draw).to(dtype), x.to(dtype), indices, (dy * signs).to(dtype)


def step(cfg, params, weights, x, indices, dy):
    """y, dw, dx, d weights; and residuals."""
    own = {one.name: getattr(params, one.name, None) for one in cfg.steps}
    y, kept = chain.fwd(own, WithExtras(weights, {"tokens": x, "indices": indices}), cfg)
    dparams, dx = chain.bwd(kept, dy, cfg)
    dx_again, pending = chain.dgrad(kept, dy, cfg)
    same_bits((dparams, dx), (chain.wgrad(pending, cfg), dx_again), "the halves")
    return (y, dparams["up"], dparams["down"], dx.extras["tokens"], dx.main), kept


class Wire(TorchDispatchMode):
    """The bytes that this rank sends to others, by the dtype and shape of a row."""

    runs = True  # see funcops.engine.backend.declare.tracing

    def __init__(self, rank):
        super().__init__()
        self.rank, self.sent = rank, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            t, row = args[0], tuple(args[0].shape[1:])
            self.sent[t.dtype, row] += (sum(args[2]) - args[2][self.rank]) * math.prod(row) * t.itemsize
        return func(*args, **(kwargs or {}))


WAYS = ((2, None), (4, None), (4, 0.5))


@pytest.mark.parametrize(("recipe", "way"), drawn(EXACT, WAYS, families=[1, 1, 2]))
def test_experts_of_codes_that_were_sent(recipe, way):
    """Bit for bit, with several choices a token: y, dx, d weights, dw, and what is kept."""
    n, capacity = way
    whole = experts.init(ExpertsConfig(EXPERTS, WIDTH, HIDDEN), key=random.key(0), dtype=torch.bfloat16)

    def on_rank(mesh):
        axis, tokens = mesh["ep"], SIZES[n][mesh.rank] if capacity is None else 6
        cfg, given = low_experts(recipe, axis, capacity), of_rank(mesh.rank, tokens, 2)
        params = dist.shard(whole, cfg.specs, mesh)
        (found, kept), (wanted, after) = [step(one, params, *given) for one in (cfg.cfg, sent_whole(cfg.cfg))]
        same_bits(found, wanted, "results")
        same_bits((kept["up"].x.codes, kept["up"].x.scales), (after["up"].x.codes, after["up"].x.scales), "the kept x")
        assert cfg.cfg.steps[0].cfg.format == recipe.x and nbytes(kept) == nbytes(after)
        return len(kept["up"].x.codes)

    assert sum(run_ranks({"ep": n}, on_rank)) > 0


@pytest.mark.parametrize(("recipe", "n"), drawn(EXACT, SIZES, families=[1, 1, 2]))
def test_experts_of_codes_equal_one_process(recipe, n):
    """Bit for bit, with one choice a token, whose sum over ranks rounds nothing; one rank has no tokens."""
    cfg = low_experts(recipe)
    whole = experts.init(ExpertsConfig(EXPERTS, WIDTH, HIDDEN), key=random.key(0), dtype=torch.bfloat16)
    given = [of_rank(rank, tokens, 1) for rank, tokens in enumerate(SIZES[n])]
    wanted, _ = step(cfg.cfg, whole, *map(torch.cat, zip(*given, strict=True)))

    def on_rank(mesh):
        own = low_experts(recipe, mesh["ep"])
        return step(own.cfg, dist.shard(whole, own.specs, mesh), *given[mesh.rank])[0]

    ys, ups, downs, dxs, dweights = zip(*run_ranks({"ep": n}, on_rank), strict=True)
    weights = [torch.cat([layer.weight for layer in layers]) for layers in (ups, downs)]
    same_bits([torch.cat(t) for t in (ys, dxs, dweights)], [wanted[0], *wanted[3:]], "y, dx and d weights")
    same_bits(weights, [wanted[1].weight, wanted[2].weight], "dw")


@pytest.mark.parametrize("recipe", [Fp8Block(), MXFP8(keep="row")], ids=["block", "mx"])
def test_the_bytes_of_tokens_on_the_wire(recipe):
    """1.03 an element for tokens, in place of 2; their gradients and results are sums, in 2."""

    def on_rank(mesh):
        cfg, given, sent = low_experts(recipe, mesh["ep"]), of_rank(mesh.rank, SIZES[4][mesh.rank], 2), []
        whole = experts.init(ExpertsConfig(EXPERTS, WIDTH, HIDDEN), key=random.key(0), dtype=torch.bfloat16)
        own = dist.shard(whole, cfg.specs, mesh)
        for one in (cfg.cfg, sent_whole(cfg.cfg)):
            params = {step.name: getattr(own, step.name, None) for step in one.steps}
            with Wire(mesh.rank) as wire:
                chain.fwd(params, WithExtras(given[0], dict(zip(GIVEN, given[1:3], strict=True))), one)
            sent.append(wire.sent)
        rows = sum(len({e for e in row if e < EXPERTS} - {mesh.rank}) for row in given[2].tolist())
        back = sent[0][torch.bfloat16, (WIDTH,)]  # combine's
        return rows, sum(sent[0].values()), sum(sent[1].values()), sent[1][torch.bfloat16, (WIDTH,)] - back, sent[0]

    for rows, coded, whole, tokens, by_kind in run_ranks({"ep": 4}, on_rank):
        scales = by_kind[torch.uint8 if recipe.x.scales == "e8m0" else torch.float32, (WIDTH // recipe.x.tile[1],)]
        codes = by_kind[torch.uint8, (WIDTH,)]
        assert (codes, scales, tokens) == (rows * WIDTH, rows * WIDTH // 32, 2 * rows * WIDTH)
        assert whole - coded == tokens - codes - scales


def formats_sent(cfg):
    return [part.cfg.format for part in walk(cfg) if isinstance(part.cfg, dist.DispatchConfig)]


def test_which_recipes_send_codes():
    """The ones by which all results keep their bits, whichever rewrite comes first; adapters read x itself."""
    axis = Mesh.abstract({"ep": 2}, 0)["ep"]
    for recipe in EXACT:
        adapted = with_lora(layer(axis), 4, ("*.up",))
        assert formats_sent(with_recipe(layer(axis), recipe)) == [recipe.x]
        assert (
            formats_sent(with_recipe(adapted, recipe))
            == formats_sent(with_lora(with_recipe(layer(axis), recipe), 4, ("*.up",)))
            == [None]
        )
    for recipe in (Fp8Current(), Fp8Delayed(), MXFP8(), NVFP4(), Fp8Block(keep="col"), Fp8Block(keep="input")):
        assert formats_sent(low_experts(recipe, axis)) == [None], recipe


@pytest.mark.parametrize("form", [Fp8Current().x, Fp8Block().w, NVFP4().x, MXFP8(w_tile=(32, 32)).w], ids=lambda one: one.name)
def test_a_scale_of_several_rows_is_not_sent(form):
    with pytest.raises(
        ValueError, match=r"DispatchConfig: format must be with scales within a row, such as \(1, 128\) of Fp8Block"
    ):
        dist.DispatchConfig(4, axis=Mesh.abstract({"ep": 2}, 0)["ep"], format=form)


def grouped(recipe, needs=Needs.ALL, form=None):
    """y and dx of one layer, of codes of a format or of the x from which they are made."""
    cfg = GroupedQLinearConfig(2, WIDTH, HIDDEN, recipe, bias=False)
    x, offsets = of_rank(0, 9, 1)[1], torch.tensor([0, 4, 9], dtype=torch.int32)
    params = grouped_qlinear.init(cfg, key=random.key(0), dtype=torch.bfloat16)
    y, kept = grouped_qlinear.fwd(params, (quantize_tensor(x, form) if form else x, offsets), cfg, needs=needs)
    return y, None if kept is None else grouped_qlinear.dgrad(kept, y, cfg)[0][0]


REFUSED = [
    (MXFP8(), MXFP8().x, r"must be a tensor, as MXFP8's keep='col' makes dw's operand from x itself \(keep='row' takes codes\)"),
    (Fp8Current(), MXFP8().x, "must be a tensor, as Fp8Current's scale is of all rows of an expert, got a QTensor"),
    (Fp8Delayed(), MXFP8().x, "must be a tensor, as Fp8Delayed's scale is of all rows of an expert, got a QTensor"),
    (Fp8Block(), MXFP8().x, "format must be e4m3 1x128 pow2, got e4m3 1x32 e8m0"),
]


@pytest.mark.parametrize(("recipe", "form", "said"), REFUSED, ids=lambda one: type(one).__name__)
def test_codes_that_an_expert_cannot_read_are_refused(recipe, form, said):
    with pytest.raises((TypeError, ValueError), match=said):
        grouped(recipe, form=form)


def test_codes_serve_every_recipe_in_blocks_without_dw():
    """In inference, and under frozen weights."""
    for needs in (Needs.NONE, Needs(params=False)):
        same_bits(grouped(MXFP8(), needs, MXFP8().x), grouped(MXFP8(), needs), "y and dx")


DECODER = ChainConfig(
    steps=(
        Step(
            "blocks",
            repeat,
            RepeatConfig(
                skip,
                SkipConfig(
                    chain,
                    ChainConfig(
                        steps=(
                            Step("norm", rms_norm, RMSNormConfig(WIDTH)),
                            Step("up", linear, LinearConfig(WIDTH, 2 * WIDTH)),
                            Step("act", glu, GLUConfig(kind="swiglu", gate="first")),
                            Step("down", linear, LinearConfig(WIDTH, WIDTH, bias=False)),
                        )
                    ),
                ),
                times=2,
            ),
        ),
        Step("odd", linear, LinearConfig(WIDTH, 192, bias=False)),  # 96 rows a rank: not whole blocks of 128
        Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
    ),
    extras=("labels",),
)
IN_BLOCKS = (Fp8Block(), Fp8Block(scales="float32", keep="col"), MXFP8(w_tile=(32, 32)))
AS_TENSORS = (Fp8Current(), MXFP8(), NVFP4(stochastic=False))


def in_codes(recipe):
    """The elements of weights whose shards on two ranks are whole blocks."""
    layers, odd = 2 * 3 * WIDTH * WIDTH, 192 * WIDTH
    return 0 if recipe in AS_TENSORS else layers + (odd if recipe.w.tile == (32, 32) else 0)


def batch(rank):
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(6, WIDTH, generator=draw).bfloat16()
    return WithExtras(x, {"labels": torch.randint(192, (6,), generator=draw)})


def gathered_bytes(cfg, again):
    """Bytes that a rank gives to the gathers of a step."""
    own = dist.zero3(cfg, Mesh.abstract({"dp": 2}, 0)["dp"], dtype=torch.bfloat16, reshard_after_forward=again)

    def whole(params, x):
        y, kept = chain.fwd(params, x, own)
        return chain.bwd(kept, torch.ones_like(y), own)

    sent = dist.record(whole, chain.init(own, device="meta"), batch(0)).sent
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in sent if one.op == "all_gather")


@pytest.mark.parametrize(("recipe", "again"), drawn((*IN_BLOCKS, *AS_TENSORS), (True, False), families=[1, 1, 2, 3, 3, 3]))
def test_sharded_weights_are_gathered_in_codes(recipe, again):
    """Bit for bit as from whole weights that are quantised; a weight whose shards are not whole blocks is gathered as it is."""
    low = with_recipe(DECODER, recipe)
    params = chain.init(low, key=random.key(0))

    def on_rank(mesh):
        cfg = dist.zero3(low, mesh["dp"], dtype=torch.bfloat16, reshard_after_forward=again)
        y, kept = chain.fwd(dist.own_shards(params, mesh["dp"]), batch(mesh.rank), cfg)
        held = sum([t.numel() for t in tensors(kept) if t.dtype is torch.uint8 and t.numel() > 2**15])
        assert held == (0 if again else in_codes(recipe))
        dparams, dx = chain.bwd(kept, torch.ones_like(y), cfg)
        other, pending = chain.dgrad(kept, torch.ones_like(y), cfg)
        same_bits((chain.wgrad(pending, cfg), other.main), (dparams, dx.main), "the halves")
        return y, dx.main, dist.finish(dist.gather_shards_start(dparams, params, mesh["dp"]))

    def alone(rank):
        y, kept = chain.fwd(quantize_params(params, low), batch(rank), low)
        dparams, dx = chain.bwd(kept, torch.ones_like(y), low)
        return y, dx.main, dparams

    found, wanted = run_ranks({"dp": 2}, on_rank), [alone(rank) for rank in range(2)]
    for (y, dx, dparams), (of_y, of_dx, _) in zip(found, wanted, strict=True):
        same_bits((y, dx), (of_y, of_dx), "y and dx")
        for (path, got), one, other in zip(
            paths(dparams).items(), paths(wanted[0][2]).values(), paths(wanted[1][2]).values(), strict=True
        ):
            same_bits(got, None if got is None else one.float() + other.float(), path)


@pytest.mark.slow
def test_the_bytes_of_gathered_weights():
    """In a forward and a backward: 1 byte an element, and a scale a block, in place of 2. Others are gathered as they are."""
    plain = gathered_bytes(DECODER, True)
    for recipe in (*IN_BLOCKS, *AS_TENSORS):
        found, coded = gathered_bytes(with_recipe(DECODER, recipe), True), in_codes(recipe)
        if not coded:
            assert found == plain, recipe
            continue
        scale = 1 if recipe.w.scales == "e8m0" else 4
        saved = coded - coded * scale // recipe.w.tile[0] ** 2  # of half the elements, in two passes
        padding = 16 * scale * 5 * 2  # scales of five weights, each at a multiple of 16 in its bucket
        assert saved - padding < plain - found <= saved, recipe


def test_a_weight_that_another_layer_shares_is_gathered_as_it_is():
    """The other layer reads it unquantised."""
    steps = [Step(name, linear, LinearConfig(WIDTH, WIDTH, bias=False)) for name in ("up", "down")]
    tied = with_recipe(ChainConfig(steps=(*steps,), ties={"down.weight": "up.weight"}), Fp8Block(), only=("up",))
    params, x = chain.init(tied, key=random.key(0), dtype=torch.bfloat16), batch(0).main

    def on_rank(mesh):
        cfg = dist.ShardedConfig(chain, tied, axis=mesh["dp"])
        y, kept = dist.sharded.fwd(dist.own_shards(params, mesh["dp"]), x, cfg)
        return y, dist.sharded.bwd(kept, y, cfg)[1]

    y, kept = chain.fwd(params, x, tied)
    for found in run_ranks({"dp": 2}, on_rank):
        same_bits(found, (y, chain.bwd(kept, y, tied)[1]), "y and dx")
