"""The recorder: which arguments are values, which tensors stay where they are, and who reads whose tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcops.adapters.graphs.without_gpu.recorder import Pool, record
from funcops.engine.errors import BorrowedError, CaptureError
from funcops.engine.trees import tensors


def recorded(fn, *inputs, pool=None):
    return record(lambda: fn(*inputs), pool or Pool(), tensors)


def test_intermediates_exist_only_while_it_runs():
    x = torch.ones(1000)
    recording, y = recorded(lambda x: ((x + 1) * 2).sum(), x)
    assert len(recording.outputs) == 1 and recording.operators == 3
    assert all(made.lent.storage.expired() for made in recording.made.values() if made.value.i != 2)
    x.fill_(3)
    recording.replay()
    assert float(y) == 8000


def test_views_and_writes_in_place():
    x, total = torch.arange(6.0).reshape(2, 3), torch.zeros(3)

    def fn(x, total):
        h = x * 2
        h[0].add_(1)
        h.mT[2] -= h[1, 0]
        total += h.view(3, 2)[:, 0].flip(0)
        return h, h[1], h.unbind(1)[0]

    recording, out = recorded(fn, x, total)
    for k in range(3):
        x.copy_(torch.arange(6.0).reshape(2, 3) * (k + 2))
        want_total = total.clone()
        want = fn(x, want_total)
        recording.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True)) and torch.equal(total, want_total)


def test_an_earlier_recordings_tensor_is_kept_for_a_later_one():
    """Tensors that autograd saves are like this: the first recording does not return it, the second reads it."""
    pool, x = Pool(), torch.ones(3)
    kept = {}

    def first(x):
        kept["h"] = x * 5
        return kept["h"] + 1

    one, y = recorded(first, x, pool=pool)
    assert len(one.outputs) == 1
    two, z = recorded(lambda y: y * kept["h"], y, pool=pool)
    assert len(one.outputs) == 2
    x.fill_(2)
    one.replay()
    two.replay()
    assert torch.equal(z, torch.full((3,), 110.0))
    two.reset()
    assert pool.recordings == [one]


def test_memory_that_went_back_to_the_pool_is_not_read():
    """On a GPU the next capture may have taken that memory, and every replay of it would overwrite it."""
    pool, x, kept = Pool(), torch.ones(3), {}

    def first(x):
        kept["h"] = x * 5
        return kept["h"] + 1

    one, y = recorded(first, x, pool=pool)
    two, z = recorded(lambda: kept["h"] * 2, pool=pool)
    two.replay()
    assert torch.equal(z, torch.full((3,), 10.0))
    kept.clear()
    one.replay()
    with pytest.raises(BorrowedError, match="a graph reads memory that was given back to its pool after capture"):
        two.replay()


def test_a_replay_writes_over_what_later_recordings_of_its_pool_left():
    """On a GPU later recordings may have been given memory that the earlier one needs. Inputs, its own results and earlier results
    stay."""

    def several(x):
        y = x * 2 + 1
        return y, y.to(torch.bfloat16), y.to(torch.complex64), y.long(), y.to(torch.uint8), y > 4, y[1:], y.mT

    def bits(tree):
        return [t.contiguous().view(torch.uint8).clone() for t in tensors(tree)]

    pool, xs = Pool(), [torch.arange(6.0).reshape(2, 3) for _ in range(3)]
    made = [recorded(several, x, pool=pool) for x in xs]
    other = recorded(several, xs[0])[1]
    want = bits(other)
    for i, (recording, _) in enumerate(made):
        for one, _ in made:
            one.replay()
        recording.replay()
        for j, (_, out) in enumerate(made):
            differ = [not torch.equal(a, b) for a, b in zip(bits(out), want, strict=True)]
            assert all(differ) if j > i else not any(differ)
            assert j <= i or all(bool(t.isnan().all()) for t in tensors(out) if t.is_floating_point() or t.is_complex())
        assert all(torch.equal(a, b) for a, b in zip(bits((other, xs[1])), [*want, *bits(xs[0])], strict=True))
    last = made.pop()[0]
    last.reset()
    last.replay()


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda x: x * x.sum().item(), "host sync"),
        (lambda x: x if x.sum() > 0 else -x, "host sync"),
        (lambda x: x[x > 0], "dynamic shape"),
        (lambda x: x.nonzero(), "dynamic shape"),
        (lambda x: x + torch.rand(3, generator=torch.Generator()), "generator"),
    ],
)
def test_recording_raises_where_capture_would(fn, kind):
    with pytest.raises(CaptureError, match=f"{__file__}:.*{kind}"):
        recorded(fn, torch.ones(3))
    assert torch._C._len_torch_dispatch_stack() == 0


OPS = [
    lambda a, b: a + b,
    lambda a, b: a * 0.5,
    lambda a, b: a.mT.contiguous().mT,
    lambda a, b: a[1:].repeat(2, 1)[:4],
    lambda a, b: a.add_(b) + 0,
    lambda a, b: a.softmax(-1),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a @ b.mT @ a,
    lambda a, b: a.clone().fill_diagonal_(2.0),
    lambda a, b: torch.stack(a.unbind(0)).flip(1),
    lambda a, b: a.sort(-1).values,
    lambda a, b: a.reshape(-1).view(4, 3),
]


@given(st.lists(st.integers(0, len(OPS) - 1), min_size=1, max_size=8), st.integers(0, 5))
def test_any_program(program, seed):
    """Random chains of operators, views and in-place writes: a replay on other values equals the program bit by bit."""

    def run(x, b):
        a, seen = x + 0, []
        for i in program:
            a = OPS[i](a, b)
            seen.append(a.sum(0))
        return a, seen

    generator = torch.Generator().manual_seed(seed)
    x, b = (torch.randn(4, 3, generator=generator) for _ in range(2))
    recording, out = recorded(run, x, b)
    x.copy_(torch.randn(4, 3, generator=generator))
    want = run(x, b)
    recording.replay()
    assert all(torch.equal(p, q) for p, q in zip(tensors(out), tensors(want), strict=True))
