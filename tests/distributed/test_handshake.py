"""Programs as data: a step's messages are known before it runs, and if ranks disagree all raise."""

import contextlib
import functools
import random
import re
from typing import NamedTuple

import drawn_messages
import pytest
import torch

from funcops import ChainConfig, LinearConfig, LinearParams, Step, WithExtras, chain, dist, linear
from funcops.distributed import Mesh, check_program, comm, finish, gather_start, handshake, record
from funcops.distributed.testing import ranks, run_ranks
from funcops.engine.trees import tree_map_tensors
from funcops.models.blocks import Sizes, decoder_config

SIZES = {"dp": 2, "tp": 2}


def mlp(mesh, x, overlap="none"):
    """Forward and backward of a column-parallel layer."""
    cfg = dist.ColumnLinearConfig(4, 8, axis=mesh["tp"], overlap=overlap)
    params = LinearParams(x.new_ones(cfg.weight_shape), x.new_ones(cfg.bias_shape))
    y, residuals = dist.column_linear.fwd(params, x, cfg)
    return dist.column_linear.bwd(residuals, y, cfg)


def total(axis, x):
    return dist.sum_over.fwd(None, x, dist.SumOverConfig(axis))[0]


def test_a_program_is_what_a_step_sends():
    mesh = Mesh.abstract(SIZES, 1)
    for overlap, order in (("none", "gather scatter gather"), ("bulk", "gather gather scatter"), ("ring", "shift gather shift")):
        program = record(lambda x, overlap=overlap: mlp(mesh, x, overlap), torch.ones(3, 4))
        names = {
            "gather": "all_gather of float32[3, 4]",
            "scatter": "reduce_scatter (sum) of float32[6, 4]",
            "shift": "all_to_all of float32[*, 3, 4]",
        }
        assert [str(one) for one in program.sent] == [names[word] for word in order.split()] and not program.unfinished
        assert {one.group for one in program.sent} == {"tp[0:2:1]"}


def test_operators_of_others_are_no_messages():
    """An operator of another library may take a group's name too, as torch's collectives do."""
    library = torch.library.Library("handshake_probe", "DEF")
    library.define("twice(str group_name, Tensor x) -> Tensor")
    library.impl("twice", lambda group_name, x: x + x, "CompositeExplicitAutograd")
    program = record(lambda x: torch.ops.handshake_probe.twice("tp", x).sum(), torch.ones(3))
    assert program.sent == () and program.unfinished == ()


def test_a_message_of_torchs_own_groups_has_no_order_that_ranks_can_compare():
    """An operator of a process group itself: it is refused by its name, and nothing is sent."""
    said = (
        "record: step must be one that sends by funcops.dist, or by torch's functional collectives, of all ranks of an axis, got "
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}c10d\\.allreduce_\\.default$"):
        dist.Collective.of(torch.ops.c10d.allreduce_.default, ())


def agreed(mesh):
    return handshake(mesh, lambda x: (mlp(mesh, x), total(mesh["dp"], x)), torch.ones(2, 4))


def test_ranks_that_agree_go_on():
    programs = run_ranks(SIZES, agreed)
    assert [len(p.sent) for p in programs] == [4] * 4 and agreed(Mesh.abstract({"dp": 1, "tp": 1}, 0)).sent == ()


def shape(mesh, x):
    return total(mesh["dp"], x[: 1 if mesh.rank == 2 else 2])


def kind(mesh, x):
    mlp(mesh, x)
    return total(mesh["tp"], x.double() if mesh.rank == 1 else x)


def order(mesh, x):
    steps = [lambda: total(mesh["tp"], x), lambda: dist.gather.fwd(None, x, dist.GatherConfig(mesh["tp"]))]
    for step in steps[:: -1 if mesh.rank == 3 else 1]:
        step()


def fewer(mesh, x):
    for _ in range(2 if mesh.rank == 0 else 3):
        total(mesh["dp"], x)


def elsewhere(mesh, x):
    return total(Mesh.abstract({"tp": 2}, mesh["tp"].rank)["tp"] if mesh.rank == 1 else mesh["tp"], x)


def other_mesh(mesh, x):
    return total(Mesh.abstract({"cp": 2, "tp": 2}, 3)["cp"], x) if mesh.rank == 3 else None


def unfinished(mesh, x):
    if mesh.rank == 2:
        gather_start(x, mesh["dp"])
    else:
        finish(gather_start(x, mesh["dp"]))


def broken(mesh, x):
    return total(mesh["tp"], x) if mesh.rank != 1 else total(mesh["tp"], x @ x)


def rows(mesh, x):
    """Rank 1 expects one row of its neighbour, which sends two."""
    sends, receives = ([0, 2], [0, 2]) if mesh["tp"].rank == 0 else ([2, 0], [1 if mesh.rank == 1 else 2, 0])
    return comm.wait(comm.ops.all_to_all_single(x, receives, sends, mesh["tp"].group), mesh["tp"])


def features(mesh, x):
    return comm.shift(x[:, : 3 if mesh.rank == 1 else 4], mesh["tp"], 1)


def crossed(mesh, x):
    """Ranks 0 and 3 sum over tp first, ranks 1 and 2 over dp: each waits for one that waits for it."""
    for name in ("tp", "dp") if mesh.rank in (0, 3) else ("dp", "tp"):
        total(mesh[name], x)


FAULTS = {
    rows: "collective 0 over axis 'tp' must send the rows that the other rank expects, got all_to_all of float32[*, 4] with 2 rows "
    "for rank 1 on rank 0, 1 rows from rank 0 on rank 1",
    features: "collective 0 over axis 'tp' must be the same on all ranks, got all_to_all of float32[*, 2, 4] on rank 0, "
    "all_to_all of float32[*, 2, 3] on rank 1",
    crossed: "all ranks must call collectives over different axes in one order, got rank 0 at collective 0, over axis 'tp', and "
    "rank 1 at collective 0, over axis 'dp', each waiting for the other",
    shape: "collective 0 over axis 'dp' must be the same on all ranks, got all_reduce (sum) of float32[2, 4] on rank 0, "
    "all_reduce (sum) of float32[1, 4] on rank 2",
    kind: "collective 3 over axis 'tp' must be the same on all ranks, got all_reduce (sum) of float32[2, 4] on rank 0, "
    "all_reduce (sum) of float64[2, 4] on rank 1",
    order: "collective 0 over axis 'tp' must be the same on all ranks, got all_reduce (sum) of float32[2, 4] on rank 2, "
    "all_gather of float32[2, 4] on rank 3",
    fewer: "collective 2 over axis 'dp' must be the same on all ranks, got nothing on rank 0, "
    "all_reduce (sum) of float32[2, 4] on rank 2",
    other_mesh: "collective 0 must be over an axis of the mesh (axis 'dp' of 2, axis 'tp' of 2), got all_reduce (sum) of "
    "float32[2, 4] over group 'cp[1:5:2]'",
    unfinished: "collective 0 must be finished, got all_gather of float32[2, 4] that nobody waits for on rank 2",
    broken: "step must run on the meta device, got RuntimeError on rank 1: ",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_raises_on_every_rank(fault):
    def run(mesh):
        with pytest.raises(ValueError) as raised:
            handshake(mesh, lambda x: fault(mesh, x), torch.ones(2, 4))
        return str(raised.value)

    said = run_ranks(SIZES, run)
    assert len(set(said)) == 1 and said[0].startswith(f"handshake: {FAULTS[fault]}"), said
    if fault is not broken:
        with pytest.raises(ValueError, match=re.escape(f"check_program: {FAULTS[fault]}")):
            check_program(lambda mesh: fault(mesh, torch.ones(2, 4)), SIZES)


GRID = {"dp": 2, "tp": 3}
KINDS = ("sum", "gather", "scatter", "rows")


class Drawn(NamedTuple):
    axis: str
    kind: str
    columns: int
    dtype: torch.dtype
    splits: tuple  # the rows from each rank of an axis to each, of "rows"


def drawn_program(draw):
    found = []
    for _ in range(draw.randrange(1, 9)):
        axis = draw.choice(list(GRID))
        n = GRID[axis]
        splits = tuple(tuple(draw.randrange(3) for _ in range(n)) for _ in range(n))
        found.append(Drawn(axis, draw.choice(KINDS), draw.randrange(1, 5), draw.choice([torch.float32, torch.float64]), splits))
    return found


def changed(draw, program):
    """The program of the rank that differs, by one planted difference."""
    at = draw.randrange(len(program))
    one, n = program[at], GRID[program[at].axis]
    ways = [
        program[:at] + program[at + 1 :],
        [*program[:at], one, *program[at:]],
        [*program[:at], one._replace(columns=one.columns + 1), *program[at + 1 :]],
        [*program[:at], one._replace(dtype=torch.bfloat16), *program[at + 1 :]],
        [*program[:at], one._replace(kind=KINDS[KINDS.index(one.kind) - 1]), *program[at + 1 :]],
    ]
    if one.kind == "rows":
        other = draw.randrange(n)
        more = tuple(tuple(s + (other in (i, j)) * (i != j) for j, s in enumerate(row)) for i, row in enumerate(one.splits))
        ways.append([*program[:at], one._replace(splits=more), *program[at + 1 :]])
    return draw.choice(ways)


def run_drawn(mesh, program):
    for one in program:
        axis = mesh[one.axis]
        if one.kind == "rows":
            sends, receives = list(one.splits[axis.rank]), [row[axis.rank] for row in one.splits]
            x = torch.empty(sum(sends), one.columns, dtype=one.dtype, device="meta")
            comm.wait(comm.ops.all_to_all_single(x, receives, sends, axis.group), axis)
            continue
        x = torch.empty(axis.size, one.columns, dtype=one.dtype, device="meta")
        {"sum": comm.sum_over, "gather": comm.gather, "scatter": comm.scatter_sum}[one.kind](x, axis)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_drawn_programs_with_one_difference_are_refused_and_equal_ones_are_not(seed):
    draw = random.Random(seed)
    for _ in range(50 if seed else 12):
        program, rank = drawn_program(draw), draw.randrange(6)
        assert len(check_program(lambda mesh, program=program: run_drawn(mesh, program), GRID)) == 6
        other = changed(draw, program)
        with pytest.raises(ValueError, match=r"must be the same on all ranks|must send the rows that the other rank expects"):
            check_program(lambda mesh, a=program, b=other, rank=rank: run_drawn(mesh, b if mesh.rank == rank else a), GRID)


def shake_hands(program, other, rank):
    """Each rank's error in the handshake of a program that `rank` runs otherwise; None if it does not raise."""

    def run(mesh):
        try:
            handshake(mesh, lambda: run_drawn(mesh, other if mesh.rank == rank else program))
        except ValueError as error:
            return str(error)
        return None

    return run_ranks(GRID, run)


@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_every_planted_difference_is_noticed_by_all_ranks_before_anything_is_sent(count):
    draw = random.Random(count)
    for _ in range(count):
        program, rank = drawn_program(draw), draw.randrange(6)
        assert shake_hands(program, program, rank) == [None] * 6
        said = shake_hands(program, changed(draw, program), rank)
        assert said[0] is not None and len(set(said)) == 1, (program, said)
        assert re.search(rf"\brank {rank}\b", said[0]) or "over axis" in said[0]


def handshakes(sizes, step_of):
    """Each rank's error in the handshake of its step, or its program; and the tensors that all of them have sent."""
    sent, put = [], ranks._Board.put

    def noted(board, mesh, axis, number, given):
        sent.append(given.sent)
        put(board, mesh, axis, number, given)

    def run(mesh):
        try:
            return handshake(mesh, step_of(mesh), torch.ones(6, 5))
        except ValueError as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks._Board, "put", noted)
        return run_ranks(sizes, run), sent


def is_digest(t):
    """Whether a tensor is of the ranks' texts: a length, or bytes."""
    return t.dtype is torch.uint8 or (t.dtype is torch.int64 and t.shape == (1,))


@pytest.mark.parametrize("count", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_a_handshake_sends_no_message_of_its_step_wherever_its_tensors_come_from(count):
    """Equal programs pass, and one that differs is refused by all ranks, by what it would send and not by what came of it."""
    draw, seen = random.Random(count), set()
    held, labels = drawn_messages.HELD.clone(), drawn_messages.LABELS.clone()
    for _ in range(count):
        program, rank = drawn_messages.drawn(draw, list(SIZES), 4), draw.randrange(4)
        said, sent = handshakes(SIZES, lambda mesh, program=program: lambda x: drawn_messages.run(mesh, program, x))
        assert all([len(getattr(one, "sent", ())) == len(program) for one in said]), (program, said)
        assert all(map(is_digest, sent))
        other, what = drawn_messages.changed(draw, program)
        of_rank = [other if r == rank else program for r in range(4)]
        said, sent = handshakes(SIZES, lambda mesh, of=of_rank: lambda x: drawn_messages.run(mesh, of[mesh.rank], x))
        assert len(set(said)) == 1 and "must be the same on all ranks" in said[0], (program, other, what, said)
        assert all(map(is_digest, sent))
        seen.add(what)
    assert seen == {"columns", "dtype", "kind", "axis", "count", "order"} or count < 50
    assert held.equal(drawn_messages.HELD) and labels.equal(drawn_messages.LABELS)


def handshake_of(axis, step):
    """The first rank's handshake; the second has the same program, without the state."""

    def step_of(mesh):
        return (lambda x: total(axis, x[:2, :3])) if mesh.rank else step

    handshakes({"tp": 2}, step_of)


TAKEN = {
    "handshake": handshake_of,
    "record": lambda axis, step: record(step, torch.ones(6, 5)),
    "check_program": lambda axis, step: check_program(lambda mesh: step(torch.ones(6, 5)), {"tp": 2}),
}


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "a step that raises"])
@pytest.mark.parametrize("how", TAKEN)
def test_what_a_step_writes_to_its_state_is_undone(how, fails):
    """The step has not run, whatever it updates in place or draws; while it is recorded it reads what it has written."""
    held, draw, axis = drawn_messages.Held(), random.Random(0), Mesh.abstract({"tp": 2}, 0)["tp"]
    for name in held.ways(torch.ones(6, 5)):
        before, seen = held.all(), []

        def step(x, name=name, seen=seen):
            ways = held.ways(x)
            for one in (name, *draw.sample(list(ways), 2)):
                ways[one]()
            held.tensors[2].add_(1)
            seen.append(held.tensors[2].tolist())
            total(axis, held.tensors[0])
            if fails:
                raise ValueError(name)

        with pytest.raises(ValueError) if fails and how != "handshake" else contextlib.nullcontext():
            TAKEN[how](axis, step)
        assert len(seen) == 1 and seen[0][0] >= 1
        for got, want in zip(held.all(), before, strict=True):
            assert torch.equal(got, want), name


def waits_later(axis, x):
    """A functional collective of torch's own, whose result waits when it is read."""
    return torch.distributed._functional_collectives._maybe_wrap_tensor(comm.ops.all_reduce(x, "sum", axis.group)) * 2


def test_a_result_that_waits_when_it_is_read_is_waited_for():
    said, _ = handshakes({"tp": 2}, lambda mesh: lambda x: waits_later(mesh["tp"], torch.ones(3)))
    assert [str(one.sent[0]) for one in said] == ["all_reduce (sum) of float32[3]"] * 2 and said[0].unfinished == ()

    def never(mesh):
        return lambda x: comm.ops.all_reduce_(torch.ones(3), "sum", mesh["tp"].group)

    assert all("must be finished, got all_reduce (sum) of float32[3]" in one for one in handshakes({"tp": 2}, never)[0])


@pytest.mark.parametrize("how", [torch.Tensor.item, torch.Tensor.tolist, bool])
def test_a_step_that_reads_what_it_makes_is_refused(how):
    said, sent = handshakes({"tp": 2}, lambda mesh: lambda x: total(mesh["tp"], x * how(torch.ones(1))))
    assert len(set(said)) == 1 and re.match(
        "handshake: step must run on the meta device, got (RuntimeError|NotImplementedError) on rank 0: ", said[0]
    )
    assert all(map(is_digest, sent))


def test_messages_between_pairs_are_refused_by_name():
    for name in drawn_messages.pairs():
        said, sent = handshakes({"tp": 2}, lambda mesh, name=name: lambda x: drawn_messages.pairs()[name](mesh["tp"]))
        assert len(set(said)) == 1 and "must be one that sends by funcops.dist" in said[0] and name in said[0], said
        assert all(map(is_digest, sent))


def gets_stuck(orders, sizes):
    """Whether ranks wait for each other, by trying every rank again until none can go on."""
    meshes = [Mesh.abstract(sizes, rank) for rank in range(len(orders))]
    at, before = [0] * len(orders), None
    while at != before:
        before = list(at)
        for mesh in meshes:
            if at[mesh.rank] == len(orders[mesh.rank]):
                continue
            name = orders[mesh.rank][at[mesh.rank]]
            peers = mesh.peers(mesh[name])
            if all(at[peer] < len(orders[peer]) and orders[peer][at[peer]] == name for peer in peers):
                for peer in peers:
                    at[peer] += 1
    return any(here < len(order) for here, order in zip(at, orders, strict=True))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_drawn_orders_over_axes_are_refused_where_ranks_wait_for_each_other(seed):
    draw, seen = random.Random(seed), set()
    for _ in range(60):
        order = [draw.choice(("dp", "tp")) for _ in range(draw.randrange(2, 6))]
        orders = [order if draw.random() < 0.5 else draw.sample(order, len(order)) for _ in range(4)]
        seen.add(stuck := gets_stuck(orders, SIZES))

        def step(mesh, orders=orders):
            for name in orders[mesh.rank]:
                total(mesh[name], torch.empty(2, device="meta"))

        if not stuck:
            check_program(step, SIZES)
        else:
            with pytest.raises(ValueError, match="must call collectives over different axes in one order"):
                check_program(step, SIZES)
    assert seen == {True, False}


def told_apart(draw, sizes):
    """A step that takes branches by the positions along drawn axes, by a drawn order of reads; the counts of its runs."""
    names, runs = draw.sample(list(sizes), draw.randrange(len(sizes) + 1)), []
    tables = {name: [draw.randrange(3) for _ in range(sizes[name])] for name in names}
    threshold = draw.randrange(3)

    @functools.lru_cache
    def cached(axis):
        return tables[axis.name][axis.rank]

    def step(mesh):
        runs.append(mesh)
        for name in names:
            found = cached(mesh[name]) if draw_cached else tables[name][mesh[name].rank]
            for _ in range(found):
                total(mesh["tp"], torch.empty(2))
            if found > threshold:
                break
        total(mesh["dp"], torch.empty(3))

    draw_cached = draw.random() < 0.5
    return step, runs


@pytest.mark.parametrize("seed", range(30))
def test_a_step_runs_once_for_ranks_that_it_cannot_tell_apart(seed):
    """Programs and faults are as if it ran for each rank, however reads depend on each other and on caches."""
    draw = random.Random(seed)
    sizes = {"dp": 2, "pp": 3, "tp": 2, "cp": 2}
    step, runs = told_apart(draw, sizes)
    by_rank = {}
    for rank in range(24):
        with torch.device("meta"):
            by_rank[rank] = record(lambda rank=rank: step(Mesh.abstract(sizes, rank)))
    runs.clear()
    try:
        found = check_program(step, sizes)
    except ValueError as error:
        assert "must be the same on all ranks" in str(error)
        tp = [[str(c) for c in by_rank[rank].sent if c.group.startswith("tp")] for rank in range(24)]
        assert any(tp[Mesh.abstract(sizes, r).peers(Mesh.abstract(sizes, r)["tp"])[0]] != tp[r] for r in range(24))
    else:
        assert found == by_rank
    assert len(runs) <= 24


def test_ranks_that_differ_in_rows_alone_run_once():
    runs = []

    def step(mesh):
        runs.append(mesh.sizes)
        assert mesh == mesh and hash(mesh["dp"]) == hash(mesh["dp"])
        total(mesh["dp"], torch.empty(2))
        return comm.shift(torch.empty(3), mesh["tp"], 1)

    found = check_program(step, {"dp": 64, "tp": 2})
    assert len(found) == 128 and len(runs) == 2
    assert found[127].sent[0].group == Mesh.abstract({"dp": 64, "tp": 2}, 127)["dp"].group


DATA = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 6)), Step("down", linear, LinearConfig(6, 5))))


def both_ways(cfg, params):
    y, residuals = chain.fwd(params, torch.ones(2, 4), cfg)
    return chain.bwd(residuals, y, cfg)[0]


def zero1(mesh):
    """ZeRO-1 and 2: whole params, and shards of sums and of the optimiser's state."""
    dp, params = mesh["dp"], chain.init(DATA, device="meta")
    shards = dist.own_shards(params, dp)
    sums = finish(dist.reduce_start(both_ways(DATA, params), dp, shard=dp), into=tree_map_tensors(torch.zeros_like, shards))
    return finish(dist.gather_shards_start(tree_map_tensors(torch.add, shards, sums), params, dp))


def zero3(mesh, **options):
    cfg = dist.zero3(DATA, mesh["dp"], **options)
    return both_ways(cfg, chain.init(cfg, device="meta"))


def zero3_by_specs(mesh):
    cfg = dist.zero3(DATA, mesh["dp"])
    return both_ways(cfg, dist.init(chain, cfg, dist.specs_of(chain, cfg), mesh, device="meta"))


def summed(mesh):
    cfg = dist.data_parallel(DATA, mesh["dp"], shard=True)
    return both_ways(cfg, chain.init(cfg, device="meta"))


def over_both(mesh):
    """A sum over two axes, sharded over one, that is added to what is there."""
    dp, nodes, grads = mesh["dp"], mesh["nodes"], {"w": torch.ones(6, 2), "odd": torch.ones(5)}
    return finish(dist.reduce_start(grads, (nodes, dp), shard=dp), into=dist.own_shards(grads, dp))


def hybrid(mesh):
    return zero3(mesh, also=(mesh["nodes"],))


@pytest.mark.turns("step", every=3)
@pytest.mark.parametrize("step", [zero1, zero3, zero3_by_specs, summed, over_both, hybrid], ids=lambda step: step.__name__)
def test_data_parallel_ranks_of_any_number_run_once(step):
    """A rank's part has the shape of the others', so its step is theirs; its program is what it would record alone."""
    runs = []

    def counted(mesh):
        runs.append(mesh)
        step(mesh)

    sizes = {"nodes": 4, "dp": 32}
    found = check_program(counted, sizes)
    assert len(found) == 128 and len(runs) == 1
    for rank in (0, 37, 127):
        assert found[rank] == record(lambda rank=rank: step(Mesh.abstract(sizes, rank))) and found[rank].sent


@pytest.mark.slow
def test_a_decoder_on_a_thousand_ranks():
    """A step is recorded for each position along the axes that it reads, tp and cp: 16 times for 1,024 ranks."""
    decoder, runs = decoder_config(Sizes(dim=32, layers=2, heads=4, kv_heads=4, hidden=64, vocab=64)), []
    rules = {"embed": "vocab", "head": "column", "loss": "vocab", "*.proj": "column", "*.out": "row", "*.up": "column"}

    def step(mesh):
        runs.append(1)
        cfg = dist.parallel(decoder, {**rules, "*.down": "row", "*.mix": "context"}, mesh)
        params, ids = chain.init(cfg, device="meta"), torch.zeros(8, 8, dtype=torch.int64)
        x = WithExtras(ids, {"positions": torch.zeros(8, dtype=torch.int64), "labels": ids})
        dparams, _ = chain.bwd(chain.fwd(params, x, cfg)[1], torch.ones(()), cfg)
        finish(dist.reduce_start(dparams, dist.sum_axes(dparams, dist.specs_of(chain, cfg), mesh)))

    programs = check_program(step, {"dp": 8, "pp": 8, "cp": 4, "tp": 4})
    assert len(programs) == 1024 and len(runs) == 16 and min(len(p.sent) for p in programs.values()) > 40


@pytest.mark.slow
def test_programs_of_a_thousand_ranks():
    def step(mesh, wrong=None):
        cfg = dist.ColumnLinearConfig(4, 8, axis=mesh["tp"], overlap="bulk")
        params, x = LinearParams(torch.ones(2, 4), torch.ones(2)), torch.ones(4 if mesh.rank != wrong else 5, 4)
        y, residuals = dist.column_linear.fwd(params, x, cfg)
        total(mesh["dp"], dist.column_linear.bwd(residuals, y, cfg)[0].weight)

    sizes = {"dp": 8, "pp": 8, "cp": 4, "tp": 4}
    programs = check_program(step, sizes)
    assert len(programs) == 1024 and {len(p.sent) for p in programs.values()} == {4}
    with pytest.raises(ValueError, match=r"collective 0 over axis 'tp' .* got .*\[4, 4\] on rank 776, .*\[5, 4\] on rank 777"):
        check_program(lambda mesh: step(mesh, 777), sizes, ranks=range(768, 800))
    assert list(check_program(step, sizes, ranks=(3, 900))) == [3, 900]
