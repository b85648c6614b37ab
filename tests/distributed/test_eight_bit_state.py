"""The state of an optimiser in 8 bits on ranks: blocks of each rank's part; checkpoints that any mesh reads."""

import pytest
import torch

from funcops import dist
from funcops.distributed import Mesh, Spec, gather_shards_start, own_shards
from funcops.engine.trees import cast, paths, tree_map_tensors
from funcops.optim import (
    AdamWConfig,
    BlockTensor,
    SGDConfig,
    adamw_init,
    adamw_update,
    dequantize_state,
    quantize_state,
    sgd_init,
    sgd_update,
    with_quantized_state,
)
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits

WHOLE, CUT = (32, 64), (12, 40)  # on up to 4 ranks the parts of the one are whole blocks of 256, of the other they are not
ADAMW, SGD = AdamWConfig(lr=0.01), SGDConfig(lr=0.01, momentum=0.9)
OPTIMISERS = {"adamw": (adamw_init, adamw_update, ADAMW), "sgd": (sgd_init, sgd_update, SGD)}
ONE = Mesh.abstract({"dp": 1, "tp": 1}, 0)
ERROR = 0.008  # of a block's largest: half the widest gap between neighbours of the code book, and of the largest's own


def drawn(seed):
    draw = torch.Generator().manual_seed(seed)
    sizes = {"whole": WHOLE, "cut": CUT, "small": (7,)}
    return {name: torch.randn(size, generator=draw) for name, size in sizes.items()} | {"frozen": None}


def steps(params, state, part, update, cfg, count=3, first=1):
    for i in range(count):
        params, state = with_quantized_state(update)(params, part(drawn(first + i)), state, cfg)
    return params, state


def fields(state):
    return {name: getattr(state, name) for name in ("exp_avg", "exp_avg_sq", "momentum") if hasattr(state, name)}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_zero_keeps_the_state_of_each_part_in_8_bits(name):
    """ZeRO-1: a part that is whole blocks has the params and codes of one process, bit for bit; every part has the bits of an
    update of that part alone, and params near what a state in float32 gives."""
    init, update, cfg = OPTIMISERS[name]
    whole, of_whole = steps(drawn(0), quantize_state(init(drawn(0), cfg), min_size=64), lambda tree: tree, update, cfg)
    exact, state = drawn(0), init(drawn(0), cfg)
    for i in range(3):
        exact, state = update(exact, drawn(1 + i), state, cfg)

    def run(mesh):
        part = lambda tree: own_shards(tree, mesh["dp"])  # noqa: E731
        shards, own = steps(part(drawn(0)), quantize_state(init(part(drawn(0)), cfg), min_size=64), part, update, cfg)
        return shards, own, dist.finish(gather_shards_start(shards, drawn(0), mesh["dp"]))

    for rank, (shards, own, params) in enumerate(run_ranks({"dp": 4}, run)):
        assert torch.equal(params["whole"], whole["whole"])
        for field, trees in fields(own).items():
            mine, all_ranks = trees["whole"], fields(of_whole)[field]["whole"]
            assert torch.equal(mine.codes, all_ranks.codes.chunk(4)[rank]), field
            assert torch.equal(mine.absmax, all_ranks.absmax.chunk(4)[rank]), field
            assert type(trees["cut"]) is BlockTensor and trees["cut"].absmax.shape == (1,), "120 elements"
        axis = Mesh.abstract({"dp": 4}, rank)["dp"]
        part = lambda tree, axis=axis: own_shards(tree, axis)  # noqa: E731
        alone = steps(part(drawn(0)), quantize_state(init(part(drawn(0)), cfg), min_size=64), part, update, cfg)
        same_bits((shards, own), alone, "the part alone")
        for path, t in params.items():
            if t is not None:
                assert (t - exact[path]).abs().max() < 0.01 * cfg.lr * 3 + 0.02 * (exact[path] - drawn(0)[path]).abs().max(), path


SPECS = {"*.whole": Spec("tp", 0), "*.cut": Spec("tp", 1)}


def empty(tree):
    return tree_map_tensors(lambda t: t.to("meta"), tree)


def trained(mesh, optimiser="adamw", count=2):
    """This rank's params and state in 8 bits after some steps, by specs for params alone."""
    init, update, cfg = OPTIMISERS[optimiser]
    specs = {path: SPECS[f"*.{path}"] for path in ("whole", "cut")}
    part = lambda tree: dist.shard(tree, specs, mesh)  # noqa: E731
    params, state = steps(part(drawn(0)), quantize_state(init(part(drawn(0)), cfg), min_size=64), part, update, cfg, count)
    return {"params": params, "state": state}, part


def near(found, want, path):
    assert (found - want).abs().max() <= ERROR * want.abs().max(), path


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_checkpoint_goes_on_with_the_same_bits_and_on_any_mesh(optimiser, tmp_path):
    """On the mesh that wrote it: the numbers of the state, and the params of the next step. On others: the same, where parts are
    whole blocks; elsewhere within the rounding to 8 bits. One process reads it too."""
    _, update, cfg = OPTIMISERS[optimiser]

    def write(mesh):
        tree, part = trained(mesh, optimiser)
        dist.save(tree, tmp_path / "a", SPECS, mesh)
        again = dist.load(tmp_path / "a", empty(tree), SPECS, mesh)
        same_bits(dequantize_state(again["state"]), dequantize_state(tree["state"]), "state")
        assert all(type(trees["cut"]) is BlockTensor for trees in fields(again["state"]).values())
        on, after = (steps(one["params"], one["state"], part, update, cfg, 1, 9) for one in (tree, again))
        same_bits((on[0], dequantize_state(on[1])), (after[0], dequantize_state(after[1])), "the next step")

    def read(mesh):
        like, _ = trained(mesh, optimiser)
        return dist.unshard(dequantized(dist.load(tmp_path / "a", empty(like), SPECS, mesh)), SPECS, mesh)

    run_ranks({"dp": 2, "tp": 2}, write)
    wide = dist.load(tmp_path / "a", empty(dequantized(trained(ONE, optimiser)[0])), {}, ONE)  # read as it is written
    alone = dequantized(dist.load(tmp_path / "a", empty(trained(ONE, optimiser)[0]), {}, ONE))
    for tree in (alone, *run_ranks({"dp": 1, "tp": 4}, read), run_ranks({"dp": 2, "tp": 2}, read)[3]):
        same_bits(tree["params"], wide["params"], "params")
        for field, own in fields(tree["state"]).items():
            want = fields(wide["state"])[field]
            assert torch.equal(own["whole"], want["whole"]) and torch.equal(own["small"], want["small"]), field
            near(own["cut"], want["cut"], field)


def dequantized(tree):
    return {**tree, "state": dequantize_state(tree["state"])}


def test_a_run_changes_between_8_bits_and_float32(tmp_path):
    """A state in float32 is read in 8 bits, as `quantize_state` makes it, but for blocks whose largest is negative, and back."""
    wide = {"state": adamw_update(drawn(0), drawn(1), adamw_init(drawn(0), ADAMW), ADAMW)[1]}
    dist.save(wide, tmp_path / "a", {}, ONE)
    small = quantize_state(wide["state"], min_size=64)
    found = dist.load(tmp_path / "a", {"state": empty(small)}, {}, ONE)["state"]
    same_bits(found, small, "in 8 bits")
    assert found.exp_avg["whole"].device.type == "cpu" and found.exp_avg_sq["whole"].signed is False
    low = {"state": quantize_state(adamw_init(cast(drawn(0), torch.bfloat16), ADAMW), min_size=64)}
    dist.save(low, tmp_path / "b", {}, ONE)
    same_bits(dist.load(tmp_path / "b", empty(low), {}, ONE), low, "of bfloat16 params")


def test_8_bits_are_not_sharded_afterwards():
    """Blocks of the whole do not end where parts do: cutting codes and scales would pair the wrong ones."""
    state = quantize_state(adamw_init(drawn(0), ADAMW), min_size=64)
    mesh = Mesh.abstract({"dp": 2}, 0)
    wanted = (
        r"exp_avg\.(cut|whole) must be a tensor: blocks of 256 end where the parts of ranks do not \(optim.quantize_state after"
    )
    for call in (dist.shard, dist.unshard, dist.fsdp_specs):
        with pytest.raises(TypeError, match=wanted):
            call(state, {}, mesh)
    with pytest.raises(TypeError, match=r"own_shards: tree\.exp_avg\.(cut|whole)"):
        own_shards({"exp_avg": state.exp_avg}, mesh["dp"])
    assert sorted(paths(state.exp_avg["whole"])) == ["absmax", "codes"]
