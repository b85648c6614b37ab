"""Shards of leaves that an axis does not divide, and a step for each leaf, move between meshes of any sizes."""

import random as python_random

import pytest
import torch
from test_dist_checkpoint import ONE, empty, same

from funcops import (
    ChainConfig,
    EmbeddingConfig,
    LinearConfig,
    RepeatConfig,
    SkipConfig,
    Step,
    chain,
    dist,
    embedding,
    linear,
    random,
    repeat,
    skip,
)
from funcops.distributed import Mesh, Spec
from funcops.engine.errors import CheckpointError
from funcops.engine.trees import paths, tensors
from funcops.optim import AdamWConfig, AdamWState, adamw_init, adamw_update
from funcops.testing import run_ranks

ADAMW = AdamWConfig()
SIZES = [{"tp": 1, "dp": n} for n in (1, 2, 3, 4, 7)] + [{"tp": 2, "dp": n} for n in (1, 2, 3)] + [{"tp": 3, "dp": 2}]


def drawn_tree(draw):
    """Leaves of 0 to 4 dimensions of any sizes; tp 2 and 3 divide the dimension that it shards."""
    tree, specs = {}, {}
    for i in range(8):
        shape = [draw.randint(1, 5) for _ in range(draw.randrange(5))]
        spec = Spec()
        if shape and draw.random() < 0.6:
            dim = draw.randrange(len(shape))
            parts = tuple(6 * draw.randint(1, 2) for _ in range(draw.randint(1, 2)))
            shape[dim] = sum(parts)
            spec = Spec("tp", dim, parts=parts if len(parts) > 1 else ())
        tree[f"l{i}"] = torch.randn(shape, dtype=torch.float64)
        specs[f"l{i}"] = spec
    return {**tree, "none": None}, specs


def shards_of(tree, specs, mesh):
    """A rank's shards, as ZeRO has them, and their specs."""
    own = dist.shard(tree, specs, mesh)
    return dist.own_shards(own, mesh["dp"]), dist.fsdp_specs(own, specs, mesh)


def move(seed, folder, sizes):
    draw = python_random.Random(seed)
    tree, specs = drawn_tree(draw)
    written, *read = draw.sample(sizes, 3)

    def write(mesh):
        shards, by = shards_of(tree, specs, mesh)
        same(dist.shard(tree, by, mesh), shards)
        same(dist.unshard(shards, by, mesh), tree)
        dist.save({"params": shards, "means": shards}, folder / "a", {f"*{path}": spec for path, spec in by.items()}, mesh)

    def check(mesh):
        shards, by = shards_of(tree, specs, mesh)
        by = {f"*{path}": spec for path, spec in by.items()}
        same(dist.load(folder / "a", empty({"params": shards, "means": shards}), by, mesh), {"params": shards, "means": shards})

    run_ranks(written, write)
    for other in read:
        run_ranks(other, check)
    same(dist.load(folder / "a", empty({"params": tree, "means": tree}), {}, ONE), {"params": tree, "means": tree})


@pytest.mark.turns("seed", every=2)
@pytest.mark.parametrize("seed", range(4))
def test_leaves_of_any_sizes_move_between_sizes_of_dp(seed, tmp_path):
    move(seed, tmp_path, SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 60))
def test_more_leaves_of_any_sizes_move(seed, tmp_path):
    move(seed, tmp_path, SIZES)


MODEL = ChainConfig(
    steps=(
        Step("embed", embedding, EmbeddingConfig(257, 6)),
        Step("blocks", repeat, RepeatConfig(skip, SkipConfig(linear, LinearConfig(6, 6)), 2)),
        Step("head", linear, LinearConfig(6, 11)),
    )
)


@pytest.mark.turns("tp")
@pytest.mark.parametrize("tp", [False, True])
def test_specs_of_zero3_are_those_of_its_shards(tp):
    """Also the draws of `init`, by the specs of another layout: each rank draws only its elements."""
    whole = chain.init(MODEL, key=random.key(1))

    def run(mesh):
        cfg = dist.parallel(MODEL, {"embed": "vocab"} if tp else {}, mesh)
        plain = dist.specs_of(chain, cfg)
        cfg3 = dist.zero3(cfg, mesh["dp"])
        specs = dist.specs_of(chain, cfg3)
        shards = chain.init(cfg3, key=random.key(1))
        same(dist.shard(whole, specs, mesh), shards)
        same(dist.unshard(shards, specs, mesh), whole)
        same(dist.init(chain, cfg3, specs, mesh, key=random.key(1)), shards)
        wider = dist.fsdp_specs(chain.init(cfg, device="meta"), plain, mesh)
        assert wider == specs | {path: wider[path] for path in wider.keys() - specs.keys()}
        same(dist.init(chain, cfg, wider, mesh, key=random.key(1)), shards)

    run_ranks({"dp": 4, "tp": 1}, run)


def drawn_model(draw):
    a, b = draw.randint(1, 7), draw.randint(1, 9)
    layers = RepeatConfig(skip, SkipConfig(linear, LinearConfig(b, b)), 2)
    return ChainConfig(steps=(Step("up", linear, LinearConfig(a, b)), Step("blocks", repeat, layers)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_leaves_of_any_size_move_between_meshes_by_the_specs_of_either(seed, tmp_path):
    """The leaves of ZeRO-3, and of ZeRO-1 and 2, where the optimiser's state alone is sharded: drawn, gathered, saved, loaded.
    The spec of a mesh that divides a leaf is refused on one that does not, with the remedy."""
    draw, served, refused = python_random.Random(seed), 0, 0
    for number in range(2):
        plain, one, other = drawn_model(draw), draw.choice([2, 3, 4]), draw.choice([1, 2, 3, 4, 5])
        whole = chain.init(plain, key=random.key(2))
        moments = adamw_init(whole, ADAMW).exp_avg
        for t in tensors(moments):
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(number)))
        folder = tmp_path / str(number)
        folder.mkdir()

        def specs_at(mesh, plain=plain, whole=whole):
            cfg = dist.zero3(plain, mesh["dp"])
            return cfg, dist.specs_of(chain, cfg), dist.fsdp_specs(whole, {}, mesh)

        _, *foreign = specs_at(Mesh.abstract({"dp": one}, 0))

        def write(mesh, whole=whole, moments=moments, folder=folder):
            cfg, specs, of_state = specs_at(mesh)
            dist.save(chain.init(cfg, key=random.key(2)), folder / "params", specs, mesh)
            dist.save(dist.own_shards(moments, mesh["dp"]), folder / "state", of_state, mesh)

        def read(mesh, whole=whole, moments=moments, folder=folder, foreign=foreign):
            cfg, *own = specs_at(mesh)
            there = [mesh["dp"].size == 1 or t.shape[0] % mesh["dp"].size == 0 for t in tensors(whole)]
            given = [spec.whole is not None for spec in foreign[1].values()]
            fits = all(fits or whole for fits, whole in zip(there, given, strict=True))
            for specs, of_state in (own, foreign) if fits else (own,):
                shards, state = chain.init(cfg, key=random.key(2)), dist.own_shards(moments, mesh["dp"])
                same(dist.init(chain, cfg, specs, mesh, key=random.key(2)), shards)
                same(dist.shard(whole, specs, mesh), shards)
                same(dist.unshard(shards, specs, mesh), whole)
                same(dist.load(folder / "params", empty(shards), specs, mesh), shards)
                same(dist.load(folder / "state", empty(state), of_state, mesh), state)
            if not fits:
                with pytest.raises(ValueError, match=r"or give its spec whole=\("):
                    dist.shard(whole, foreign[0], mesh)
            return fits

        run_ranks({"dp": one}, write)
        fits = run_ranks({"dp": other}, read)
        served, refused = served + all(fits), refused + (not any(fits))
    assert served + refused == 2


def test_a_vocabulary_that_no_axis_divides_goes_with_tensor_parallelism():
    cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(6, 10)), Step("down", linear, LinearConfig(10, 257))))
    whole = chain.init(cfg, key=random.key(1))

    def run(mesh):
        own = dist.zero3(dist.parallel(cfg, {"up": "column", "down": "row"}, mesh), mesh["dp"])
        specs = dist.specs_of(chain, own)
        assert specs["up.weight"].whole == (10, 6) and specs["down.weight"].whole == (257, 10)
        shards = chain.init(own, key=random.key(1))
        same(dist.shard(whole, specs, mesh), shards)
        same(dist.unshard(shards, specs, mesh), whole)

    run_ranks({"dp": 2, "tp": 2}, run)


def stages(draw):
    """Leaves of 2 to 4 stages, of other numbers each."""
    return [[f"b{i}.{j}" for j in range(draw.randint(1, 4))] for i in range(4)]


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_uneven_stages_are_by_leaf(seed, tmp_path):
    """Leaves have had other numbers of updates; another number of stages, and one process, read them."""
    draw = python_random.Random(seed)
    blocks = stages(draw)
    params = {path: torch.randn(3) for block in blocks for path in block}
    grads = [{path: None if draw.random() < 0.4 else t.sin() for path, t in params.items()} for _ in range(3)]

    def run_of(paths_of):
        own = {path: params[path] for path in paths_of}
        state = adamw_init(own, ADAMW)
        for one in grads:
            own, state = adamw_update(own, {path: one[path] for path in own}, state, ADAMW)
        return {"params": own, "state": state}

    def of_rank(mesh):
        n = mesh["pp"].size
        return run_of([path for i, block in enumerate(blocks) if i * n // 4 == mesh["pp"].rank for path in block])

    def read(mesh):
        tree = of_rank(mesh)
        got = dist.load(tmp_path / "a", empty(tree), {}, mesh)
        same(got, tree)

    sizes = [{"pp": 4, "dp": 1}, {"pp": 2, "dp": 2}, {"pp": 1, "dp": 2}, {"pp": 3, "dp": 1}]
    draw.shuffle(sizes)
    run_ranks(sizes[0], lambda mesh: dist.save(of_rank(mesh), tmp_path / "a", {}, mesh))
    for other in sizes[1:]:
        run_ranks(other, read)
    everything = run_of(list(params))
    same(dist.load(tmp_path / "a", empty(everything), {}, ONE), everything)


def test_a_vector_of_steps_of_an_older_checkpoint_loads_or_is_named(tmp_path):
    """It was one leaf, `state.step`: it fits a tree with the same leaves."""
    tree = {"state": adamw_init({"a": torch.ones(2), "b": torch.ones(3)}, ADAMW)}
    tree["state"].step += torch.tensor([3.0, 5.0])
    as_before = {f"state.{name}": t for name, t in paths(tree["state"]).items()}
    dist.save(as_before, tmp_path / "old", {}, ONE)
    same(dist.load(tmp_path / "old", empty(tree), {}, ONE), tree)
    fewer = {"state": adamw_init({"a": torch.ones(2)}, ADAMW)}
    with pytest.raises(CheckpointError) as raised:
        dist.load(tmp_path / "old", empty(fewer), {}, ONE)
    assert str(raised.value) == (
        f"load: state.step of {tmp_path / 'old'} must be an element for each of this rank's 1 tensors "
        "(load it on the mesh that wrote it, then save it), got one vector of [2]"
    )


def test_a_step_has_the_length_of_its_tree_and_is_whole(tmp_path):
    state = adamw_init({"a": torch.ones(2)}, ADAMW)
    with pytest.raises(ValueError, match=r"^save: step must be \[1\], got \[2\]"):
        dist.save(AdamWState(torch.zeros(2), state.exp_avg, state.exp_avg_sq), tmp_path / "a", {}, ONE)
    mesh = Mesh.abstract({"dp": 1}, 0)
    with pytest.raises(ValueError, match=r"^save: the spec of step must be one that shards nothing"):
        dist.save(state, tmp_path / "a", {"step": Spec("dp", 0)}, mesh)


BAD = {
    "Spec: whole must be None or a tuple of sizes, got list": dict(whole=[4]),
    "Spec: whole must be of more than 1 sizes, got (4,)": dict(axis="tp", dim=1, whole=(4,)),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_wholes_raise(said):
    with pytest.raises(ValueError) as raised:
        Spec(**BAD[said])
    assert str(raised.value) == said


def test_a_leaf_of_another_shape_than_its_spec_says_is_named():
    mesh = Mesh.abstract({"dp": 2}, 0)
    with pytest.raises(ValueError, match=r"^shard: w must be \[257\], as its spec says, got \[255\]"):
        dist.shard({"w": torch.ones(255)}, {"w": Spec(fsdp="dp", whole=(257,))}, mesh)
    with pytest.raises(ValueError, match=r"divides \(it does not divide 257; or give its spec whole=\(257,\)\), got \[257\]"):
        dist.shard({"w": torch.ones(257)}, {"w": Spec(fsdp="dp")}, mesh)
