"""Steps that derive the same from one extra make it once a call: a rotary table from positions, the starts of chunks."""

import threading
import weakref

import pytest
import torch

from funcops import (
    AttentionConfig,
    ChainConfig,
    ParallelConfig,
    QKVSplitConfig,
    RepeatConfig,
    RopeConfig,
    Step,
    WithExtras,
    attention,
    chain,
    parallel,
    qkv_split,
    random,
    remat,
    repeat,
    rope,
    rope_table,
    trees,
    with_policy,
)
from funcops.engine.backend import once as shared
from funcops.engine.errors import StaleResidualError
from funcops.library.kernels import attention as attention_kernels
from funcops.library.ops import rope as ropes
from funcops.models.blocks import block_config

D, SIZE, T = 32, 16, 8
BLOCK = block_config(D, 2, 48)


def stack(op=chain, body=BLOCK, stacked=False):
    cfg = RepeatConfig(op, body, 3, stacked=stacked)
    return ChainConfig(steps=(Step("layers", repeat, cfg, takes=("positions",)),), extras=("positions",))


def split(*thetas):
    """Rows of q, k and v, which turn by each theta, one after the other."""
    turned = [Step(f"turn{i}", rope, RopeConfig(SIZE, theta=theta), takes=("positions",)) for i, theta in enumerate(thetas)]
    return ChainConfig(steps=tuple(turned), extras=("positions",))


PLAIN = {
    "block": (chain, BLOCK, 1),
    "layers": (chain, stack(), 1),
    "stacked layers": (chain, stack(stacked=True), 1),
    "layers that run again": (chain, stack(remat(chain)), 1),
    "all of it again": (remat(chain), stack(), 1),  # whose backward is two programs
    "a policy": (with_policy(chain, "minimal"), stack(), 1),
    "two thetas": (chain, split(1e4, 1e6, 1e4), 2),
}


def given(cfg, positions):
    heads = cfg.steps[0].op is rope
    x = torch.randn(2, T, *([2, SIZE] if heads else [D]), generator=torch.Generator().manual_seed(0))
    return chain.init(cfg, key=random.key(0)), WithExtras(x, {"positions": positions}), x


@pytest.fixture
def made(monkeypatch):
    """The tables that were made, weakly; none is kept for the next call, as none is on a device."""
    found, make = [], ropes._table_at
    monkeypatch.setattr(ropes, "_SHORT", 0)

    def noted(*args):
        table = make(*args)
        found.append(weakref.ref(table))
        return table

    monkeypatch.setattr(ropes, "_table_at", noted)
    return found


@pytest.mark.parametrize("halves", [False, True], ids=["bwd", "halves"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_table_is_made_once_a_half(name, halves, made):
    """Once in the forward, once where dx is computed, also for what runs again there. The bits are as with a table that is given,
    of which none is made."""
    op, cfg, tables = PLAIN[name]
    params, x, dy = given(cfg, torch.arange(T))

    def run(x):
        y, kept = op.fwd(params, x, cfg)
        made.append("between")
        if not halves:
            return y, op.bwd(kept, dy, cfg)
        dx, pending = op.dgrad(kept, dy, cfg)
        made.append("between")
        return y, (op.wgrad(pending, cfg), dx)

    got = run(x)
    counts = [len(part.split()) for part in " ".join("," if one == "between" else "table" for one in made).split(",")]
    assert counts == [tables, tables * (2 if op.name == "remat(chain)" else 1), 0][: 2 + halves]
    if name != "two thetas":
        made.clear()
        want = run(WithExtras(x.main, {"positions": rope_table(torch.arange(T), RopeConfig(SIZE))}))
        assert all(torch.equal(a, b) for a, b in zip(trees.tensors(got), trees.tensors(want), strict=True))
        assert set(made[1:]) == {"between"}


def test_alone_an_op_shares_with_none(made):
    x, positions = torch.ones(2, T, 2, SIZE), torch.arange(T)
    for _ in range(2):
        _, kept = rope.fwd(None, (x, positions), RopeConfig(SIZE))
    rope.bwd(kept, x, RopeConfig(SIZE))
    assert len(made) == 3 and not any(table() for table in made)


def test_steps_of_another_kind_find_the_same_table(made):
    """`qkv_split` turns q and k by it; and the residuals have the positions still, so a write to them is noticed."""
    halves = QKVSplitConfig(2, dim=SIZE, kv_heads=1, rope=RopeConfig(SIZE))
    one = ChainConfig(steps=(Step("split", qkv_split, halves, takes=("positions",)),), extras=("positions",))
    cfg = ParallelConfig(branches=tuple(Step(name, chain, one, takes=("positions",)) for name in "ab"))
    params, positions = {"a": {"split": None}, "b": {"split": None}}, torch.arange(T)
    y, kept = parallel.fwd(params, WithExtras(torch.randn(2, T, 4 * SIZE), {"positions": positions}), cfg)
    assert len(made) == 1 and kept["a"]["split"].positions is positions
    positions.add_(1)
    with pytest.raises(StaleResidualError, match="^a.split: qkv_split_bwd: residuals.positions "):
        parallel.bwd(kept, y, cfg)
    assert shared.call.made is None, "an error ends the call, too"


@pytest.mark.parametrize("cfg", [BLOCK, stack()], ids=["block", "layers"])
@pytest.mark.parametrize(
    "positions",
    [torch.arange(T + 1), torch.arange(T, dtype=torch.int32), torch.arange(T).float(), torch.zeros(T, 1, 7), None, [0] * T],
    ids=["long", "int32", "float32", "a table of another size", "None", "a list"],
)
def test_wrong_positions_raise_as_alone(cfg, positions):
    params, x, _ = given(cfg, positions)
    with pytest.raises((ValueError, TypeError)) as alone:
        rope.fwd(None, (torch.ones(2, T, 2, SIZE), positions), RopeConfig(SIZE))
    with pytest.raises(type(alone.value)) as raised:
        chain.fwd(params, x, cfg)
    assert str(raised.value).endswith(f"rope: {alone.value}")
    assert shared.call.made is None, "an error ends the call, too"


def test_no_table_outlives_its_call(made):
    params, x, dy = given(BLOCK, torch.arange(T))
    _, kept = chain.fwd(params, x, BLOCK)
    assert [table() for table in made] == [None] and shared.call.made is None
    chain.bwd(kept, dy, BLOCK)
    assert [table() for table in made] == [None, None]


@pytest.fixture
def opened(monkeypatch):
    """A call whose steps share."""
    monkeypatch.setattr(shared.call, "made", {})


def double(t, by):
    return t * by


def test_what_is_shared_is_of_one_tensor_as_it_is(opened):
    t = torch.ones(2)
    first = shared.once(double, t, 2)
    assert shared.once(double, t, 2) is first
    assert all(shared.once(double, of, by) is not first for of, by in ((t, 3), (t.clone(), 2), (t[:], 2)))
    t.add_(1)
    assert shared.once(double, t, 2).tolist() == [4, 4], "a write between two steps is seen"
    with torch.inference_mode():
        t = torch.ones(2)
        assert shared.once(double, t, 2).tolist() == [2, 2]
        assert shared.once(double, t.add_(1), 2).tolist() == [4, 4], "also where no version tells it"


def test_threads_share_nothing(opened):
    seen, t = [shared.once(double, torch.ones(2), 2)], torch.ones(2)
    seen.append(shared.once(double, t, 2))
    other = threading.Thread(target=lambda: seen.extend((shared.once(double, t, 2), shared.call.made)))
    other.start()
    other.join()
    assert seen[2] is not seen[1] and seen[3] is None


def test_a_tracer_makes_its_own(opened):
    """Its program reads the positions of each call, and nothing that was made before the trace."""
    params, x, _ = given(BLOCK, torch.arange(T))

    def run(positions):
        return chain.fwd(params, WithExtras(x.main, {"positions": positions}), BLOCK)[0]

    positions = torch.arange(T)
    assert torch.equal(
        shared.once(ropes._table_at, positions, RopeConfig(SIZE), torch.float32), rope_table(positions, RopeConfig(SIZE))
    )
    graph = torch.fx.experimental.proxy_tensor.make_fx(run)(positions)
    assert torch.equal(graph(torch.arange(T) + 5), run(torch.arange(T) + 5))


def test_starts_of_chunks_are_found_once_a_half(monkeypatch):
    found, make = [], attention_kernels.chunk_starts
    monkeypatch.setattr(attention_kernels, "chunk_starts", lambda *args: found.append(args) or make(*args))
    chunks = AttentionConfig(causal=True, packed=True, chunk=3)
    branches = tuple(Step(name, attention, chunks, takes=("ends",)) for name in "ab")
    cfg = ParallelConfig(branches=branches)
    rows = [torch.randn(1, T, 2, SIZE, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    y, kept = parallel.fwd({"a": None, "b": None}, WithExtras(tuple(rows), {"ends": torch.tensor([0, 5, T]).int()}), cfg)
    assert len(found) == 1 and torch.equal(y[0], y[1])
    parallel.bwd(kept, y, cfg)
    assert len(found) == 2
    alone, _ = attention.fwd(None, (*rows, torch.tensor([0, 5, T]).int()), chunks)
    assert torch.equal(alone, y[0])
