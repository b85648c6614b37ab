"""GraphCache: several sizes, padded and cut, in one pool."""

import pytest
import torch

from funcops import LinearConfig, Needs, linear, random
from funcops.adapters.graphs import GraphCache, cut_rows, pad_rows
from funcops.adapters.graphs.backend import RecorderBackend
from funcops.engine.trees import tensors
from funcops.testing.tolerances import assert_close

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CFG = LinearConfig(4, 3)


def fn(params, x):
    y, _ = linear.fwd(params, x, CFG, needs=Needs.NONE)
    return {"y": y, "twice": 2 * y}


def made(device="cpu", **options):
    params = linear.init(CFG, key=random.key(0), device=device)
    options = {"sizes": (2, 8, 4), "inputs": {"0": "pinned"}, **options}
    cache = GraphCache(
        fn, size_of=lambda params, x: len(x), pad=lambda trees, size: (trees[0], pad_rows(trees[1], size)), cut=cut_rows, **options
    )
    return cache, params


@pytest.mark.parametrize("device", DEVICES)
def test_every_size_equals_the_function(device):
    cache, params = made(device)
    cache.warm(params, torch.zeros(1, 4, device=device))
    assert cache.report().sizes == (8, 4, 2) and cache.report().misses == 0, "largest first"
    for n in (1, 2, 3, 5, 8, 4, 0):
        x = torch.randn(n, 4, device=device)
        got, want = cache(params, x), fn(params, x)
        assert_close(got, want, dtype=torch.float32)
    assert (cache.report().hits, cache.report().misses, cache.report().evicted) == (7, 0, 0)
    assert cache.report().input_bytes == (2 + 4 + 8) * 4 * 4 and cache.report().pool_bytes > 0


def test_the_least_recently_used_goes():
    cache, params = made(capacity=2)
    for n, held in [(1, (2,)), (4, (2, 4)), (2, (4, 2)), (8, (2, 8)), (3, (8, 4))]:
        cache(params, torch.ones(n, 4))
        assert cache.report().sizes == held
    assert (cache.report().hits, cache.report().misses, cache.report().evicted) == (1, 4, 2)
    cache.reset()
    assert cache.report().sizes == () and cache.report().pool_bytes == 0
    assert_close(cache(params, torch.ones(3, 4)), fn(params, torch.ones(3, 4)), dtype=torch.float32)
    cache, params = made(capacity=1)
    cache.warm(params, torch.ones(1, 4))
    assert cache.report().sizes == (8,)


def test_a_pool_whose_graphs_are_gone_is_not_used_again(monkeypatch):
    """After a reset, and where each capture evicts the only graph."""
    pools = []
    make = RecorderBackend.pool
    monkeypatch.setattr(RecorderBackend, "pool", lambda self: pools.append(make(self)) or pools[-1])
    cache, params = made()
    for size in (1, 3):
        cache(params, torch.ones(size, 4))
    assert len(pools) == 1
    cache.reset()
    cache(params, torch.ones(1, 4))
    assert len(pools) == 2
    alone, params = made(capacity=1)
    for size in (1, 3):
        alone(params, torch.ones(size, 4))
    assert len(pools) == 4


def test_results_are_the_callers_own():
    cache, params = made()
    first = cache(params, torch.ones(2, 4))
    kept = [t.clone() for t in tensors(first)]
    cache(params, torch.zeros(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), kept, strict=True))
    with pytest.raises(
        ValueError, match="outputs must be 'clone', because graphs of one pool overwrite each other's buffers, got 'borrow'"
    ):
        made(outputs="borrow")


def test_bad_arguments():
    cache, params = made()
    with pytest.raises(ValueError, match="GraphCache: the size of the inputs must be at most 8, got 9"):
        cache(params, torch.ones(9, 4))
    for bad in ((), (0, 2), (1.5,)):
        with pytest.raises(ValueError, match="GraphCache: sizes must be positive numbers"):
            made(sizes=bad)
    with pytest.raises(ValueError, match="GraphCache: capacity must be at least 1, got 0"):
        made(capacity=0)
    with pytest.raises(ValueError, match=r"pad_rows: a tensor must be \[at most 2, ...\], got \[3\]"):
        pad_rows(torch.ones(3), 2)
    for value in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"pad_rows: value must be a whole number for int64\[2\], got {value}"):
            pad_rows(torch.ones(2, dtype=torch.int64), 3, value)


def test_reset_frees_every_graph():
    cache, params = made()
    for n in (2, 4):
        cache(params, torch.ones(n, 4))
    held = list(cache._held.values())
    cache.reset()
    assert len(held) == 2 and not any(one._slots for one in held) and not cache.report().sizes
    assert_close(cache(params, torch.ones(2, 4))["y"], fn(params, torch.ones(2, 4))["y"], dtype=torch.float32, length=4)
