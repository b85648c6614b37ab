"""Sharding as data: parts of leaves, whole leaves from parts, and sums of their gradients."""

import dataclasses
import math
import random as python_random

import pytest
import torch
from drawn_leaves import MESHES, bits, drawn_leaf

from funcops import LinearParams, dist
from funcops.checkpoint import CODES
from funcops.distributed import Mesh, Spec
from funcops.distributed.boxes import own_runs
from funcops.engine.contract.digest import digest
from funcops.testing import run_ranks


def by_hand(t, spec, mesh):
    """This rank's part, by plain chunks."""
    if spec.axis:
        axis = mesh[spec.axis]
        parts = t.split(spec.parts or (t.shape[spec.dim],), spec.dim)
        t = torch.cat([part.chunk(axis.size, spec.dim)[axis.rank] for part in parts], spec.dim)
    return t.chunk(mesh[spec.fsdp].size)[mesh[spec.fsdp].rank] if spec.fsdp else t


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_parts_of_leaves_and_their_wholes(sizes):
    """25 leaves a mesh, of drawn sizes, dtypes and specs."""
    draw = python_random.Random(str(sizes))
    leaves = {f"l{i}": drawn_leaf(draw, sizes) for i in range(25)}
    tree, specs = ({path: pair[i] for path, pair in leaves.items()} for i in range(2))

    def run(mesh):
        own = dist.shard(tree, specs, mesh)
        for path, spec in specs.items():
            t, want = own[path], by_hand(tree[path], spec, mesh)
            assert t.dtype is want.dtype and t.shape == want.shape and torch.equal(bits(t), bits(want)), path
            n = math.prod(mesh[name].size for name in spec.names)
            assert t.is_contiguous() and (t is tree[path] if n == 1 else t.untyped_storage().nbytes() == t.nbytes)
        whole = dist.unshard(own, specs, mesh)
        assert all(torch.equal(bits(whole[path]), bits(tree[path])) for path in tree)

    run_ranks(sizes, run)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_gradients_are_summed_over_every_axis_that_a_spec_does_not_name(sizes):
    """The sum over an axis is over the ranks that differ along that axis alone."""
    specs = {"a": Spec("tp"), "b.*": Spec("dp") if "dp" in sizes else Spec(), "c": Spec("tp", fsdp="dp" if "dp" in sizes else "")}
    tree = {"a": 1, "b": LinearParams(1, None), "c": 1, "d": 1}

    def run(mesh):
        own = torch.full((2,), 10.0**mesh.rank, dtype=torch.float64)
        given = {"a": own, "b": LinearParams(own.clone(), None), "c": own.clone(), "d": own.clone()}
        found = dist.sum_gradients(given, specs, mesh)
        assert type(found["b"]) is LinearParams and found["b"].bias is None
        assert torch.equal(given["d"], own)
        return {"a": found["a"], "b": found["b"].weight, "c": found["c"], "d": found["d"]}

    spec_of = {"a": specs["a"], "b": specs["b.*"], "c": specs["c"], "d": Spec()}
    found = run_ranks(sizes, run)
    meshes = [Mesh.abstract(sizes, rank) for rank in range(len(found))]
    for mine in meshes:
        for leaf in tree:
            fixed = {*spec_of[leaf].names, "pp"} & sizes.keys()
            others = [m.rank for m in meshes if all(m[name].rank == mine[name].rank for name in fixed)]
            assert found[mine.rank][leaf].tolist() == [sum(10.0**rank for rank in others)] * 2, (leaf, mine.rank)


def test_a_path_comes_before_globs_and_globs_in_their_order():
    specs = {"*": Spec(), "a.weight": Spec("tp", 0)}
    mesh, tree = Mesh.abstract({"tp": 2}, 1), {"a": {"weight": torch.arange(4), "other": torch.arange(4)}}
    own = dist.shard(tree, specs, mesh)
    assert own["a"]["weight"].tolist() == [2, 3] and own["a"]["other"] is tree["a"]["other"]
    own = dist.shard(tree, {"a.w*": Spec("tp", 0), "a.*": Spec()}, mesh)
    assert own["a"]["weight"].tolist() == [2, 3] and own["a"]["other"] is tree["a"]["other"]


class DTensor(torch.Tensor):
    """A stand-in for torch's class, recognised by its name."""


W, MESH = torch.ones(4, 6), Mesh.abstract({"dp": 2, "tp": 2}, 0)
BAD = {
    "shard: specs must be paths, or globs that are the first to match a leaf (a.w), got 'b.*'": {"b.*": Spec()},
    "shard: specs must be paths, or globs that are the first to match a leaf (a.w), got 'a.*'": {"*": Spec(), "a.*": Spec()},
    "shard: specs['a.w'] must be of axes of the mesh (dp, tp), got 'cp'": {"a.w": Spec("cp")},
    "shard: a.w must be of more than 2 dimensions (its spec shards dimension 2), got [4, 6]": {"a.w": Spec("tp", 2)},
    "shard: a.w must be of sizes along dimension 1 that axis 'tp' of 2 divides (it does not divide 3), got [4, 6]": {
        "a.w": Spec("tp", 1, parts=(3, 3))
    },
    "shard: a.w must be of 5, the sum of its spec's parts, along dimension 0, got [4, 6]": {"a.w": Spec("tp", 0, parts=(2, 3))},
    "shard: a.w must be of sizes along dimension 0 that axis 'dp' of 2 divides (it does not divide 1; or give its spec "
    "whole=(2, 6)), got [2, 6]": {"a.w": Spec("tp", 0, fsdp="dp")},
}


@pytest.mark.parametrize("said", BAD)
def test_bad_specs_raise(said):
    with pytest.raises((ValueError, TypeError)) as raised:
        dist.shard({"a": {"w": W[:2] if "[2, 6]" in said else W}}, BAD[said], MESH)
    assert str(raised.value) == said


@pytest.mark.parametrize("n", [2, 3])
def test_a_number_that_is_sharded_by_elements_is_on_the_first_rank(n):
    meshes = [Mesh.abstract({"dp": n}, rank) for rank in range(n)]
    assert [own_runs((), Spec(fsdp="dp", whole=()), mesh) for mesh in meshes] == [[((), ())], *[[]] * (n - 1)]
    assert [own_runs((n,), Spec(fsdp="dp", whole=(n,)), mesh) for mesh in meshes] == [[((r,), (1,))] for r in range(n)]


def test_a_tree_like_the_whole_has_a_tensor_for_each_shard():
    like = {"w": torch.ones(4), "b": None}
    with pytest.raises(TypeError, match=r"^gather_shards_start: like\.b must be a tensor, got None$"):
        dist.gather_shards_start({"w": torch.ones(2), "b": torch.ones(2)}, like, MESH["dp"])


def test_bad_leaves_raise_before_anything_is_sent():
    """On every rank: these meshes have no group that could send."""
    wrapped = {"w": W.as_subclass(DTensor)}
    for call in (dist.shard, dist.unshard, dist.sum_gradients):
        with pytest.raises(TypeError, match=r"^\w+: w must be a plain tensor \(pass its to_local\(\), .*\), got DTensor"):
            call(wrapped, {}, MESH)
    with pytest.raises(ValueError, match=r"^unshard: w must be of at least 2 dimensions, got float32\[4\]"):
        dist.unshard({"w": W[:, 0]}, {"w": Spec("tp", 1)}, MESH)
    with pytest.raises(
        ValueError, match=r"^unshard: w must be of 8, the sum of its spec's parts, along dimension 1, got \[4, 12\]"
    ):
        dist.unshard({"w": W}, {"w": Spec("tp", 1, parts=(4, 4))}, MESH)
    fsdp = Mesh.abstract({"dp": 2}, 0)
    with pytest.raises(ValueError, match=r"^shard: w must be of at least one dimension \(axis 'dp'.* shards it; .*\), got \[\]"):
        dist.shard({"w": torch.ones(())}, {"w": Spec(fsdp="dp")}, fsdp)
    for field in ("axis", "fsdp"):
        with pytest.raises(ValueError, match=rf"^Spec: {field} must be the name of an axis, got 't p'"):
            dataclasses.replace(Spec(), **{field: "t p"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(axis="tp", fsdp="tp"), "fsdp must be another axis, got 'tp'"),
        (dict(axis="tp", alike="tp"), "alike must be an axis that does not shard the leaf, got 'tp'"),
        (dict(fsdp="dp", alike="dp"), "alike must be an axis that does not shard the leaf, got 'dp'"),
        (dict(alike="t p"), "alike must be the name of an axis, got 't p'"),
        (dict(parts=(2, 4)), "parts must be () without axis, got (2, 4)"),
    ],
    ids=str,
)
def test_fields_of_a_spec_that_contradict_each_other_are_refused(fields, said):
    with pytest.raises(ValueError) as raised:
        Spec(**fields)
    assert str(raised.value) == f"Spec: {said}"


@pytest.mark.parametrize("parts", [(1,), (1, 1, 1), (4, 1, 2)], ids=str)
def test_a_part_of_one_element_is_whole_on_the_only_rank(parts):
    mesh, spec = Mesh.abstract({"tp": 1}, 0), {"w": Spec("tp", 0, parts=parts)}
    tree = {"w": torch.arange(float(sum(parts)))}
    assert torch.equal(dist.shard(tree, spec, mesh)["w"], tree["w"])


@pytest.mark.parametrize("parts", [(0,), (2, 0), (2, -1), (2.0,), (True, 1), [2, 1], 3], ids=str)
def test_parts_are_a_tuple_of_sizes_of_at_least_one(parts):
    with pytest.raises(ValueError, match="^Spec: parts must be a tuple of sizes of at least 1, got"):
        Spec("tp", 0, parts=parts)


SENT = [*CODES.values(), torch.complex128, torch.complex32]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_leaf_of_any_dtype_is_gathered_in_its_bits(dim):
    """Packed leaves, too."""
    draw = torch.Generator().manual_seed(dim)
    whole = {}
    for dtype in SENT:
        made = torch.randint(0, 2 if dtype is torch.bool else 256, (16 * dtype.itemsize,), dtype=torch.uint8, generator=draw)
        whole[str(dtype)] = made.view(dtype).view(4, 4)
    for parts in ((), (2, 2)):
        specs = {"*": Spec("tp", dim, parts=parts)}
        for found in run_ranks({"tp": 2}, lambda mesh, specs=specs: dist.unshard(dist.shard(whole, specs, mesh), specs, mesh)):
            assert all(found[name].dtype is t.dtype and digest(found[name]) == digest(t) for name, t in whole.items())
