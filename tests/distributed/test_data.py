"""Sums of gradients over ranks have the bits of one process that adds up the same microbatches; norms and flags are the same on all
ranks."""

import itertools
import math
import random as dice
import re

import pytest
import torch
from tiers import drawn

from funcops import DonatedError, Ledger, StaleResidualError, dist, optim, precision
from funcops.distributed import Axis, Mesh, finish, gather_shards_start, global_norm, own_shards, reduce_start
from funcops.distributed.buckets import Bucket, BucketLeaf
from funcops.engine.trees import leaves, nbytes, paths, tensors, tree_map, tree_map_tensors
from funcops.testing import run_ranks

ALONE = Axis("dp", 1, 0)
SHAPES = ((), (1,), (3,), (4, 2), (5, 3), (8, 1, 2), (0, 4), (2, 0), (16,), (7,))
KINDS = {"float32": (torch.float32,), "bfloat16": (torch.bfloat16,), "mixed": (torch.float32, torch.bfloat16, torch.float64)}


def drawn_tree(seed, dtypes):
    """A function of a microbatch that returns gradients with drawn shapes, dtypes and missing leaves."""
    rng = dice.Random(seed)
    like = [rng.choice([None, *[(shape, rng.choice(dtypes)) for shape in rng.sample(SHAPES, 4)]]) for _ in range(rng.randint(0, 7))]

    def gradients(microbatch):
        g = torch.Generator().manual_seed(100 * seed + microbatch)
        made = [None if one is None else torch.randn(one[0], generator=g).mul(7).to(one[1]) for one in like]
        return {"a": made[::2], "b": {"c": tuple(made[1::2])}}

    return gradients


def accumulated(gradients, microbatches, wide=None):
    """The sums as one process adds them, in this order, in float32 or wider."""

    def add(*ts):
        if ts[0] is None:
            return None
        total = ts[0].to(torch.promote_types(ts[0].dtype, wide or torch.float32))
        for t in ts[1:]:
            total = total + t
        return total if wide else total.to(ts[0].dtype)

    return tree_map(add, *[gradients(m) for m in microbatches])


def assert_same(got, want, what):
    for (path, a), b in zip(paths(got).items(), leaves(want), strict=True):
        same = a is b is None or (a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b))
        assert same, f"{what}: {path} is {a}, not {b}"


MESHES = {"1": {"dp": 1}, "2": {"dp": 2}, "4": {"dp": 4}, "2x2": {"node": 2, "dp": 2}, "3x2": {"node": 3, "dp": 2}}


@pytest.mark.turns("sizes", "kind", every=2)
@pytest.mark.parametrize(("sizes", "kind"), drawn(MESHES, KINDS, families=["1", "2", "4", "grid", "grid"]))
def test_an_ordered_sum_is_accumulation_on_one_process(sizes, kind):
    ways = list(itertools.product(itertools.permutations(MESHES[sizes]), [None, *MESHES[sizes]]))
    for seed, (names, shard) in enumerate(ways if len(ways) > 2 else ways * 2):
        gradients, bound = drawn_tree(seed, KINDS[kind]), (1, 40, 200, 10**6)[seed % 4]

        def run(mesh, names=names, bound=bound, shard=shard, gradients=gradients):
            want = accumulated(gradients, range(mesh.size))
            over = tuple(mesh[name] for name in names)
            n, place = mesh.size, 0
            for axis in over:
                place = place * axis.size + axis.rank
            given = dict(shard=shard and mesh[shard], bucket_bytes=bound)
            once = finish(reduce_start(gradients(place), over, **given))
            sums = tree_map(lambda t: None if t is None else torch.zeros_like(t, dtype=torch.float64), once)
            for i in range(2):
                assert finish(reduce_start(gradients(n * i + place), over, **given), into=sums) is sums
            wide = finish(reduce_start(gradients(place), over, dtype=torch.float64, **given))
            if shard:
                whole = gradients(0)
                assert_same(once, own_shards(want, mesh[shard]), "padding is zero")
                once, sums, wide = (
                    finish(gather_shards_start(t, whole, mesh[shard], bucket_bytes=bound)) for t in (once, sums, wide)
                )
            return once, sums, wide

        n = math.prod(MESHES[sizes].values())
        want = accumulated(gradients, range(n))
        results = run_ranks(MESHES[sizes], run)
        twice = accumulated(gradients, range(2 * n), torch.float64)
        for once, sums, wide in results:
            what = f"seed {seed}, over {names}, shard {shard}, buckets of {bound}"
            assert_same(once, want, what)
            assert_same(sums, twice, what)
            assert_same(wide, tree_map_tensors(torch.Tensor.double, accumulated(gradients, range(n), torch.float32)), what)


@pytest.mark.parametrize("sizes", ["2", "4", "2x2"])
def test_the_backends_own_sum_is_near(sizes):
    for seed in range(2):
        gradients, bound = drawn_tree(seed, KINDS["mixed"]), (1, 100, 10**6)[1 + seed]

        def run(mesh, gradients=gradients, bound=bound, shard=seed % 2):
            given = dict(shard=mesh["dp"] if shard else None, ordered=False, dtype=torch.float64, bucket_bytes=bound)
            h = reduce_start(gradients(mesh.rank), mesh.axes, **given)
            found = finish(h)
            return finish(gather_shards_start(found, gradients(0), mesh["dp"])) if shard else found

        for found in run_ranks(MESHES[sizes], run):
            want = accumulated(gradients, range(Mesh.abstract(MESHES[sizes], 0).size), torch.float64)
            for a, b in zip(tensors(found), tensors(want), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_each_leaf_goes_over_its_own_axes():
    def run(mesh):
        dp, tp = mesh["dp"], mesh["tp"]
        grads = {"norm": torch.full((2,), 1.0 + mesh.rank), "up": torch.full((2,), 1.0 + mesh.rank), "free": torch.ones(1)}
        return finish(reduce_start(grads, {"norm": (dp, tp), "up": (dp,), "free": ()}))

    for rank, found in enumerate(run_ranks({"dp": 2, "tp": 2}, run)):
        assert found["norm"].tolist() == [10.0, 10.0] and found["up"].tolist() == [4.0 + 2 * (rank % 2)] * 2
        assert found["free"].tolist() == [1.0]


def test_specs_say_over_which_axes_a_leaf_is_sent():
    """A gradient over those that its spec does not name, but for a pipeline's; a norm over those that it does."""
    mesh = Mesh.abstract({"pp": 2, "dp": 2, "tp": 2}, 0)
    specs = {"up": dist.Spec("tp", 0), "both": dist.Spec("tp", 1, fsdp="dp"), "same": dist.Spec(alike="tp")}
    tree = {name: torch.ones(2, 4) for name in (*specs, "norm")} | {"frozen": None}
    summed, parts = dist.sum_axes(tree, specs, mesh), dist.part_axes(tree, specs, mesh)
    dp, tp = mesh["dp"], mesh["tp"]
    assert summed == {"both": (), "frozen": (dp, tp), "norm": (dp, tp), "same": (dp,), "up": (dp,)}
    assert parts == {"both": (tp, dp), "frozen": (), "norm": (), "same": (), "up": (tp,)}
    for of in (dist.sum_axes, dist.part_axes):
        with pytest.raises(ValueError, match=f"^{of.__name__}: up must be of at least 2 dimensions, got "):
            of({"up": torch.ones(4)}, {"up": dist.Spec("tp", 1)}, mesh)
        with pytest.raises(TypeError, match=f"^{of.__name__}: mesh must be Mesh, got 3"):
            of(tree, specs, 3)


def test_buckets_keep_their_bound_and_big_leaves_are_not_copied():
    def run(mesh):
        dp = mesh["dp"]
        grads = [torch.ones(8), torch.ones(64, 2), torch.ones(8), torch.ones(8), torch.ones(3)]
        h = reduce_start(grads, dp, bucket_bytes=100)
        sent = [one.source for one in h.buckets]
        assert [t.nbytes for t in sent] == [32, 512, 64 + 32, 12 + 4], "a leaf begins at a multiple of 16 elements; ranks share all"
        assert sent[1].data_ptr() == grads[1].data_ptr()
        finish(h)
        h = reduce_start(grads, dp, bucket_bytes=100)
        grads[1].add_(0)
        with pytest.raises(StaleResidualError, match=re.escape("1: finish: h.source must be as the all_to_all_start left it")):
            finish(h)
        for one in h.buckets:
            finish(one) if one.fresh() else torch.ops._c10d_functional.wait_tensor(one.value)

    run_ranks({"dp": 2}, run)


@pytest.mark.parametrize("written", ["a", "b"])
def test_a_shard_that_is_written_to_in_flight_is_named(written):
    """Each shard is a bucket, so it is sent as it is."""

    def run(mesh):
        shards = {"a": torch.ones(64), "b": torch.zeros(64)}
        h = gather_shards_start(shards, {"a": torch.ones(128), "b": torch.ones(128)}, mesh["dp"], bucket_bytes=512)
        values = [one.value for one in h.buckets]
        shards[written].add_(0)
        with pytest.raises(StaleResidualError, match=f"{written}: finish: h.source must be as the gather_start left it"):
            finish(h)
        for value in values:
            torch.ops._c10d_functional.wait_tensor(value)

    run_ranks({"dp": 2}, run)


def test_started_sums_finish_once_and_a_ledger_names_them():
    for start in (lambda t: reduce_start(t, ALONE), lambda t: gather_shards_start(t, t, ALONE)):
        grads = {"a": torch.ones(4), "b": torch.ones(3)}
        h = start(grads)
        ledger = Ledger(grads)
        ledger.keep("stage 1, sums", h)
        assert ledger.nbytes == nbytes(h) > 0
        assert_same(finish(ledger.take("stage 1, sums")), grads, "one rank")
        with pytest.raises(DonatedError, match="finish: h must be in flight, got an? (Reducing|Gathering) that was finished"):
            finish(h)


def test_shards_are_a_part_each_and_make_the_whole():
    tree = {"w": torch.arange(24.0).reshape(8, 3), "odd": torch.arange(7.0), "one": torch.tensor(3.0), "none": None}

    def run(mesh):
        own = own_shards(tree, mesh["dp"])
        return own, finish(gather_shards_start(own, tree, mesh["dp"]))

    for n in (1, 2, 4):
        for rank, (own, whole) in enumerate(run_ranks({"dp": n}, run)):
            assert_same(whole, tree, f"{n} ranks")
            assert torch.equal(own["w"], tree["w"].chunk(n)[rank]) and own["w"].data_ptr() != tree["w"].data_ptr()
            assert own["odd"].shape == (-(-7 // n),) and own["none"] is None


def test_norms_of_sharded_trees():
    """dp shards all, tp shards `up`, `norm` is the same on tp, and each pp stage has leaves of its own; one stage has none."""
    tree = {s: {"up": torch.randn(8, 6).double(), "norm": torch.randn(8).double()} for s in (0, 1)}
    want = optim.global_norm(tree)

    def run(mesh):
        pp, dp, tp = mesh["pp"], mesh["dp"], mesh["tp"]
        own = tree.get(pp.rank, {})
        own = {k: t.chunk(2, 1)[tp.rank] if k == "up" else t for k, t in own.items()}
        own = own_shards(own, dp)
        found = global_norm(own, (pp, dp), {"up": (tp,)} if own else {})
        clipped, norm = optim.clip_by_global_norm(own, 1.0, norm=found)
        assert norm is found
        return found, clipped, global_norm(clipped, (dp, pp), {"up": (tp, pp)} if own else {})

    for sizes in ({"pp": 3, "dp": 2, "tp": 2},):
        results = run_ranks(sizes, run)
        for norm, _, after in results:
            torch.testing.assert_close(norm, want, rtol=1e-14, atol=0)
            torch.testing.assert_close(after, torch.tensor(1.0).double(), rtol=1e-5, atol=0)
            assert torch.equal(norm, results[0][0])


def test_a_step_that_goes_wrong_on_one_rank_is_told_on_all():
    for bad in (None, 0, 3):

        def run(mesh, bad=bad):
            grads = {"w": torch.full((3,), float("nan") if mesh.rank == bad else 1.0)}
            ok = dist.all_ranks(precision.all_finite(grads), mesh.axes)
            kept = precision.select_step(ok, {"w": torch.ones(1)}, {"w": torch.zeros(1)})
            try:
                dist.raise_on_all_ranks(precision.nonfinite(grads), mesh)
            except RuntimeError as error:
                return bool(kept["w"]), str(error)
            return bool(kept["w"]), ""

        said = "" if bad is None else f"raise_on_all_ranks: no rank must have a fault, got rank {bad}: w"
        assert run_ranks({"dp": 2, "tp": 2}, run) == [(bad is None, said)] * 4


TWO = Mesh.abstract({"dp": 2, "tp": 2}, 1)
BAD = {
    "global_norm: over must be axes, or () (specs go into parts=dist.part_axes(tree, specs, mesh)), got a dict": lambda: (
        global_norm({}, {"a": dist.Spec("tp", 0)})
    ),
    "reduce_start: dparams.a must be a float tensor or None, got 3": lambda: reduce_start({"a": 3}, ALONE),
    "reduce_start: dparams.a must be float64 or float32 or bfloat16 or float16, got int64": lambda: reduce_start(
        {"a": torch.ones(2, dtype=torch.int64)}, ALONE
    ),
    "reduce_start: over must be Axis or tuple or Mapping, got 'dp'": lambda: reduce_start({}, "dp"),
    "reduce_start: over.1 must be Axis, got 'dp'": lambda: reduce_start({}, (ALONE, "dp")),
    "reduce_start: over must be different axes, got axis 'dp' of 1, axis 'dp' of 1": lambda: reduce_start({}, (ALONE, ALONE)),
    "reduce_start: over must be by paths of the tree (a), got 'b'": lambda: reduce_start({"a": torch.ones(2)}, {"b": (ALONE,)}),
    "reduce_start: over must be a mapping with every path that has a gradient, such as b, got a": lambda: reduce_start(
        {"a": None, "b": torch.ones(2)}, {"a": (ALONE,)}
    ),
    "reduce_start: shard must be one of the axes that a is summed over (axis 'dp' of 2), got axis 'tp' of 2": lambda: reduce_start(
        {"a": torch.ones(2)}, TWO["dp"], shard=TWO["tp"]
    ),
    "reduce_start: bucket_bytes must be at least 1, got 0": lambda: reduce_start({}, ALONE, bucket_bytes=0),
    "finish: into must be a tree like dparams": lambda: finish(
        reduce_start({"a": torch.ones(2)}, ALONE), into={"b": torch.ones(2)}
    ),
    "finish: into.a must be [2], got [3]": lambda: finish(reduce_start({"a": torch.ones(2)}, ALONE), into={"a": torch.ones(3)}),
    "finish: into.a must be torch.float32 or a wider float dtype, got torch.bfloat16": lambda: finish(
        reduce_start({"a": torch.ones(2)}, ALONE), into={"a": torch.ones(2).bfloat16()}
    ),
    "finish: into must be None (only sums from reduce_start can be added), got dict": lambda: finish(
        gather_shards_start({"a": torch.ones(2)}, {"a": torch.ones(2)}, ALONE), into={}
    ),
    "gather_shards_start: shards.a must be [1, 3], got [2, 3]": lambda: gather_shards_start(
        {"a": torch.ones(2, 3)}, {"a": torch.ones(2, 3)}, TWO["dp"]
    ),
    "gather_shards_start: shards must be a tree like `like`, got one that differs at a, b": lambda: gather_shards_start(
        {"a": torch.ones(2)}, {"b": torch.ones(2)}, ALONE
    ),
    "global_norm: parts must be by paths of the tree (a), got 'b'": lambda: global_norm(
        {"a": torch.ones(2)}, (), {"b": (TWO["tp"],)}
    ),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_calls_raise_before_anything_is_sent(said):
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        BAD[said]()


@pytest.mark.parametrize("case", ["whole", "several", "padded", "turned", "another dtype"])
def test_a_bucket_of_one_tensor_is_that_tensor(case):
    """It is the tensor itself if that fills the bucket as it is; anything else is copied."""
    shape, count, width = (4, 6), 2 if case == "several" else 1, 32 if case == "padded" else 24
    leaves = tuple(BucketLeaf(i, str(i), shape, 24 * i, 24) for i in range(count))
    bucket = Bucket(leaves, torch.float32, torch.device("cpu"), (), 1, width * count)
    given = [torch.arange(24.0).view(shape) + 100 * i for i in range(count)]
    if case in ("turned", "another dtype"):
        given = [given[0].mT.contiguous().mT if case == "turned" else given[0].double()]
    packed = bucket.pack(given, torch.float32)
    assert packed.shape == (1, bucket.width) and (packed.data_ptr() == given[0].data_ptr()) == (case == "whole")
    assert all(torch.equal(packed[0, 24 * i : 24 * i + 24].view(shape), t.float()) for i, t in enumerate(given))
