"""Prefetches and sums of a chain's steps and layers hide behind products, with the gradients of one process; the number of exposed
messages is counted."""

import pytest
import torch

from funcops import ChainConfig, Ledger, LinearConfig, Step, WithExtras, chain, dist, donate, linear, random
from funcops.distributed import finish, own_shards, reduce_start
from funcops.distributed.ring import scattered_products
from funcops.engine.trees import cast, tree_map_tensors
from funcops.low_precision import MXFP8, NVFP4, Fp8Current, Fp8Delayed, quantize_params, with_recipe
from funcops.models.blocks import Sizes, block_config, decoder_config
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits

SIZES = Sizes(dim=16, layers=3, heads=2, kv_heads=2, hidden=24, vocab=32)
DECODER = decoder_config(SIZES)
PARAMS = chain.init(DECODER, key=random.key(0))


def batch(rank):
    ids = torch.randint(32, (2, 2, 8), generator=torch.Generator().manual_seed(rank))
    return WithExtras(ids[0], {"positions": torch.arange(8), "labels": ids[1]})


def gradients(params, x, cfg, into=None):
    loss, kept = chain.fwd(params, x, cfg)
    return loss, chain.bwd(donate(kept), torch.ones_like(loss), cfg, into=into)[0]


def halves(params, x, cfg, into=None):
    loss, kept = chain.fwd(params, x, cfg)
    waiting = Ledger(params)
    waiting.keep("all", chain.dgrad(donate(kept), torch.ones_like(loss), cfg)[1])
    return loss, chain.wgrad(donate(waiting.take("all")), cfg, into=into)


def ones(tree):
    return tree_map_tensors(torch.ones_like, tree)


@pytest.mark.parametrize("ordered", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_are_summed_within_the_backward(ordered):
    """The bits of sums that start after it; whole, in halves, and into accumulators. Params and their gradients are whole."""

    def step(mesh):
        dp, x = mesh["dp"], batch(mesh.rank)
        loss, plain = gradients(PARAMS, x, DECODER)
        want = finish(reduce_start(plain, dp, ordered=ordered))
        added = finish(reduce_start(plain, dp, ordered=ordered), into=ones(PARAMS))
        cfg = dist.data_parallel(DECODER, dp, ordered=ordered, bucket_bytes=3000)
        same_bits(chain.init(cfg, key=random.key(0)), PARAMS, "init")
        assert dist.specs_of(chain, cfg) == {}
        for run in (gradients, halves):
            sums = ones(PARAMS)
            assert run(PARAMS, x, cfg, sums)[1] is sums
            same_bits((run(PARAMS, x, cfg), sums), ((loss, want), added), run.__name__)

    run_ranks({"dp": 2}, step)


@pytest.mark.slow
def test_sums_over_more_axes_and_in_another_dtype():
    def step(mesh):
        x = batch(mesh.rank)
        want = finish(reduce_start(gradients(PARAMS, x, DECODER)[1], mesh.axes))
        cfg = dist.data_parallel(DECODER, mesh["dp"], also=(mesh["node"],))
        same_bits(gradients(PARAMS, x, cfg)[1], want, "two axes")
        low = dist.data_parallel(DECODER, mesh["dp"], dtype=torch.bfloat16)
        loss, found = gradients(PARAMS, x, low)
        products = gradients(cast(PARAMS, torch.bfloat16), x, DECODER)
        same_bits((loss, found), (products[0], finish(reduce_start(products[1], mesh["dp"], dtype=torch.float32))), "dtypes")

    run_ranks({"node": 2, "dp": 2}, step)


@pytest.mark.slow
@pytest.mark.parametrize("also", [(), ("node",)])
def test_parts_of_the_sums_within_the_backward(also):
    """Params are whole and gradients are shards, for ZeRO-1 and 2; accumulators are refused."""

    def step(mesh):
        dp, x, over = mesh["dp"], batch(mesh.rank), tuple(mesh[name] for name in also)
        loss, plain = gradients(PARAMS, x, DECODER)
        want = finish(reduce_start(plain, (*over, dp), shard=dp))
        cfg = dist.data_parallel(DECODER, dp, also=over, shard=True, bucket_bytes=3000)
        same_bits(chain.init(cfg, key=random.key(0)), PARAMS, "init")
        assert dist.specs_of(chain, cfg) == {}
        for run in (gradients, halves):
            same_bits(run(PARAMS, x, cfg), (loss, want), run.__name__)
            with pytest.raises(ValueError, match=r"into must be None with stage=2 \(add the shards up after the backward\)"):
                run(PARAMS, x, cfg, ones(PARAMS))

    run_ranks(dict.fromkeys((*also, "dp"), 2), step)


LOW = decoder_config(Sizes(dim=64, layers=2, heads=2, kv_heads=2, hidden=64, vocab=32))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [NVFP4(), NVFP4(stochastic=False), Fp8Current(), MXFP8()], ids=repr)
@pytest.mark.parametrize("shard", [False, True])
def test_a_working_tree_is_summed_within_the_backward(recipe, shard):
    """With keys beside its weights, too; in the given dtype, from products in bfloat16."""
    low = with_recipe(LOW, recipe, only=("blocks.*",))
    params = chain.init(low, key=random.key(0))

    def step(mesh):
        dp, x = mesh["dp"], batch(mesh.rank)
        work = quantize_params(params, low, key=random.key(mesh.rank))
        loss, plain = gradients(work, x, low)
        want = finish(reduce_start(cast(plain, torch.float32), dp, shard=dp if shard else None))
        cfg = dist.data_parallel(low, dp, shard=shard, grad_dtype=torch.float32)
        same_bits(gradients(work, x, cfg), (loss, want), "in float32")

    run_ranks({"dp": 2}, step)


def test_a_recipe_with_amaxes_is_refused():
    low = with_recipe(LOW, Fp8Delayed(), only=("blocks.*",))
    with pytest.raises(
        ValueError, match=r"scales beside weights, whose amaxes are not summed \(reduce_start after end_step\), got Fp8D"
    ):
        dist.data_parallel(low, dist.Mesh.abstract({"dp": 2}, 0)["dp"])


@pytest.mark.parametrize("again", [None, *(pytest.param(one, marks=pytest.mark.slow) for one in (True, False))])
def test_params_that_stay_whole_have_the_same_gradients(again):
    def step(mesh):
        dp, x = mesh["dp"], batch(mesh.rank)
        loss, plain = gradients(PARAMS, x, DECODER)
        want = finish(reduce_start(plain, dp, shard=dp))
        cfg = dist.zero3(DECODER, dp, reshard_after_forward=again)
        shards, sums = own_shards(PARAMS, dp), ones(own_shards(PARAMS, dp))
        for run in (gradients, halves):
            same_bits(run(shards, x, cfg), (loss, want), run.__name__)
        gradients(shards, x, cfg, sums)
        same_bits(sums, finish(reduce_start(plain, dp, shard=dp), into=ones(shards)), "into")

    run_ranks({"dp": 2}, step)


@pytest.mark.parametrize(("again", "gathers"), [(None, 6 + 4), (True, 6 + 5), (False, 6)])
def test_params_are_gathered_as_often_as_asked(again, gathers):
    """Six for the forward; the embedding's backward reads no params."""

    def step(mesh):
        plain_step(dist.zero3(DECODER, mesh["dp"], reshard_after_forward=again))

    program = dist.check_program(step, {"dp": 2}, ranks=(0,))[0]
    assert sum(one.op == "all_gather" for one in program.sent) == gathers


def on_meta(cfg, x, extras, after=None):
    """The whole backward of a model without values."""
    y, kept = chain.fwd(chain.init(cfg, device="meta"), WithExtras(x, extras), cfg)
    dparams, _ = chain.bwd(donate(kept), torch.empty_like(y), cfg)
    if after is not None:
        after(dparams)


LONG = 4096  # positions, so that rules run as on a GPU


def plain_step(cfg, after=None):
    ids = torch.empty(2, LONG, dtype=torch.int64)
    on_meta(cfg, ids, {"positions": torch.empty(LONG, dtype=torch.int64), "labels": ids}, after)


def counted(step, sizes):
    """How many messages a rank sends, and how many of them are exposed."""
    program = dist.check_program(step, sizes, ranks=(0,))[0]
    return len(program.sent), len(program.exposed)


ROLES = {"*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row"}
BLOCK = block_config(64, 4, 128, 4)
LARGE = decoder_config(Sizes(dim=64, layers=4, heads=4, kv_heads=4, hidden=128, vocab=256))


@pytest.mark.parametrize(("overlap", "messages"), [("none", (10, 10)), ("bulk", (10, 6)), ("ring", (26, 0))])
def test_exposed_messages_of_a_block(overlap, messages):
    """`docs/parallel-in-depth.md` has these counts."""

    def step(mesh):
        cfg = dist.parallel(BLOCK, ROLES, mesh, overlap=overlap)
        on_meta(cfg, torch.empty(4, LONG, 64), {"positions": torch.empty(LONG, dtype=torch.int64)})

    assert counted(step, {"tp": 4}) == messages


STEPS = {
    "zero3": (lambda mesh: plain_step(dist.zero3(LARGE, mesh["dp"])), (19, 5)),
    "zero2": (lambda mesh: plain_step(dist.zero3(LARGE, mesh["dp"], reshard_after_forward=False)), (14, 4)),
    "after": (lambda mesh: plain_step(LARGE, lambda grads: finish(reduce_start(grads, mesh["dp"]))), (2, 2)),
    "ordered": (lambda mesh: plain_step(dist.data_parallel(LARGE, mesh["dp"])), (14, 7)),
    "unordered": (lambda mesh: plain_step(dist.data_parallel(LARGE, mesh["dp"], ordered=False)), (7, 2)),
    "parts": (lambda mesh: plain_step(dist.data_parallel(LARGE, mesh["dp"], shard=True)), (7, 2)),
}


@pytest.mark.parametrize("name", STEPS)
def test_exposed_messages_of_a_decoder(name):
    """With zero3 they are the gathers of the embedding and of the first layer of each pass, and the sums of the backward's last two
    steps. `docs/parallel-in-depth.md` has these counts."""
    step, messages = STEPS[name]
    assert counted(step, {"dp": 4}) == messages


def test_a_message_beside_a_product_is_not_exposed():
    def step(beside, mesh):
        h = dist.sum_over_start(torch.ones(2, 2), mesh["tp"])
        if beside:
            torch.ones(2, 2) @ torch.ones(2, 2)
        torch.ones(2).exp()
        finish(h)
        finish(dist.gather_start(torch.ones(2), mesh["tp"]))

    for beside, exposed in ((True, (1,)), (False, (0, 1))):
        assert dist.check_program(lambda mesh, beside=beside: step(beside, mesh), {"tp": 2})[1].exposed == exposed


def test_an_error_of_a_prefetch_names_its_step():
    cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 8)), Step("down", linear, LinearConfig(8, 4))))

    def step(mesh):
        shards = own_shards(chain.init(cfg, key=random.key(0)), mesh["dp"])
        shards["down"].weight = torch.ones(3, 8)
        chain.fwd(shards, torch.ones(2, 4), dist.zero3(cfg, mesh["dp"]))

    with pytest.raises(ValueError, match=r"^down: sharded_fwd: params.weight must be \[2, 8\]"):
        run_ranks({"dp": 2}, step)


@pytest.mark.parametrize("count", [2, 3])
def test_sums_that_pass_all_ranks_end_at_the_rank_of_their_rows(count):
    """There are two ranks, or three, where a ring differs from its reverse."""
    rows = torch.randn(count, count, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))  # by rank, of each

    def run(mesh):
        return scattered_products(list(rows[mesh.rank]), mesh["tp"], lambda part: part * 2)

    for rank, found in enumerate(run_ranks({"tp": count}, run)):
        torch.testing.assert_close(found, 2 * rows.sum(0)[rank])
