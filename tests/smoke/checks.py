"""Checks that need a device, a function each. A check returns its measurements, and raises if something is wrong.

`run.py` runs each in a process of its own on the device. On the CPU, at small sizes and with Triton interpreted, checks
without the mark `device_only` run: this rehearses their code, not their questions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.device import CudaTimer
from funcops import (
    AttentionConfig,
    CrossEntropyConfig,
    LinearConfig,
    Needs,
    RepeatConfig,
    WithExtras,
    attention,
    batch_wgrads,
    chain,
    cross_entropy,
    donate,
    linear,
    random,
    repeat,
    with_policy,
)
from funcops import nn as fnn
from funcops.adapters.graphs import GraphCache, check_capturable, cut_rows, graphed, pad_rows
from funcops.engine.backend import backend, gemm
from funcops.engine.errors import CaptureError
from funcops.engine.trees import leaves, tensors, tree_map_tensors
from funcops.library.kernels import activation, embedding, fused_linear, norm, pointwise, qkv_split
from funcops.library.kernels import linear as products
from funcops.models.blocks import block_config, gpt2_block_config
from funcops.optim import AdamWConfig, adamw_init, adamw_update
from funcops.testing.tolerances import assert_close


class SmokeDevice(NamedTuple):
    """The place of a run: a device with full sizes, or the CPU with small ones."""

    device: str

    @property
    def real(self) -> bool:
        return self.device != "cpu"

    def size(self, full: int, small: int) -> int:
        return full if self.real else small

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device).to(dtype)


Check = Callable[[SmokeDevice], Any]
CHECKED = "checks", "graph_checks", "model_checks", "repeat_checks"  # the modules that have some
CHECKS: dict[str, Check] = {}
DEVICE_ONLY: set[str] = set()
OPT_IN: set[str] = set()


def check(run: Check | None = None, *, device_only: bool = False, opt_in: bool = False) -> Any:
    """Enter a check. `opt_in`: of kernels that only a request takes, which run last, as one that hangs holds the device."""

    def enter(run: Check) -> Check:
        CHECKS[run.__name__] = run
        if device_only:
            DEVICE_ONLY.add(run.__name__)
        if opt_in:
            OPT_IN.add(run.__name__)
        return run

    return enter if run is None else enter(run)


def same(a: Any, b: Any) -> None:
    assert all(s is t is None or torch.equal(s, t) for s, t in zip(leaves(a), leaves(b), strict=True)), "not the same bits"


# Capture


@check
def a_failed_capture_leaves_torch_as_it_was(on: SmokeDevice) -> Any:
    """Afterwards random numbers can be drawn, and the same pool takes another capture."""
    x = on.randn(64)
    first = graphed(lambda x: x * 2, x)
    try:
        graphed(lambda x: x * float(x.sum()), x, pool=first.pool)
    except CaptureError:
        pass
    else:
        raise AssertionError("a function that reads a value was captured")
    torch.randn(8, device=on.device)
    again = graphed(lambda x: x * 3, x, pool=first.pool)
    same((again(x), first(x)), (x * 3, x * 2))
    return {}


@check
def adamw_in_a_graph_of_two_slots(on: SmokeDevice) -> Any:
    cfg = AdamWConfig(lr=1e-2)
    params = {"w": on.randn(33, 65), "b": on.randn(65, seed=1)}
    grads = [tree_map_tensors(lambda t, i=i: on.randn(*t.shape, seed=i + 2), params) for i in range(4)]
    state = adamw_init(params, cfg)
    step = graphed(lambda p, g, s: adamw_update(p, g, s, cfg), params, grads[0], state, slots=2)
    ours, theirs = (params, state), (params, state)
    for g in grads:
        ours, theirs = step(ours[0], g, ours[1]), adamw_update(theirs[0], g, theirs[1], cfg)
        adamw_update(params, g, state, cfg)  # another table, between two replays
    assert_close(ours[0], theirs[0], dtype=torch.float32)
    return {}


@check
def sizes_of_a_cache_of_graphs_smallest_first(on: SmokeDevice) -> Any:
    cfg = LinearConfig(16, 8)
    params = linear.init(cfg, key=random.key(0), device=on.device)

    def fn(params: Any, x: Tensor) -> Tensor:
        return linear.fwd(params, x, cfg)[0]

    cache = GraphCache(
        fn, sizes=(4, 64), size_of=lambda p, x: len(x), pad=lambda trees, size: (trees[0], pad_rows(trees[1], size)), cut=cut_rows
    )
    for rows in (3, 50, 2, 64):
        x = on.randn(rows, 16, seed=rows)
        assert_close(cache(params, x), fn(params, x), dtype=torch.float32, length=16)
    return cache.report()._asdict()


@check
def a_training_step_in_a_graph_gives_the_bits_of_the_eager_one(on: SmokeDevice) -> Any:
    cfg = gpt2_block_config(32, 2, 48, 0.1)
    params = chain.init(cfg, key=random.key(0), device=on.device)
    x = WithExtras(on.randn(2, 8, 32), {"key": random.key(3).to(on.device)})

    def step(params: Any, x: Any) -> Any:
        y, kept = chain.fwd(params, x, cfg)
        return y, chain.bwd(donate(kept), y, cfg)

    same(graphed(step, params, x)(params, x), step(params, x))
    return {"found": str(check_capturable(step, params, x))}


@check
def joined_weight_gradients_in_a_graph(on: SmokeDevice) -> Any:
    """Three microbatches of different sizes in every way of joining them."""
    cfg = LinearConfig(32, 16)
    params = linear.init(cfg, key=random.key(0), device=on.device, dtype=torch.bfloat16)
    xs = [on.randn(rows, 32, dtype=torch.bfloat16, seed=rows) for rows in (8, 16, 24)]
    dys = [on.randn(len(x), 16, dtype=torch.bfloat16, seed=len(x) + 1) for x in xs]
    want = sum(dy.double().mT @ x.double() for dy, x in zip(dys, xs, strict=True))
    for how in ("concatenate", "group", "each"):

        def joined(params: Any, xs: Any, dys: Any, how: str = how) -> Any:
            waiting = [linear.dgrad(linear.fwd(params, x, cfg)[1], dy, cfg)[1] for x, dy in zip(xs, dys, strict=True)]
            return batch_wgrads(linear, waiting, cfg, how=how)

        assert_close(graphed(joined, params, xs, dys)(params, xs, dys).weight, want, dtype=torch.bfloat16, length=48)
    return {}


@check(device_only=True)
def a_step_waits_for_nothing(on: SmokeDevice) -> Any:
    """One training step under `set_sync_debug_mode("error")`."""
    dim, length = on.size(64, 16), on.size(16, 3)
    cfg = block_config(dim, 4, 96)
    params = chain.init(cfg, key=random.key(0), device=on.device, dtype=torch.bfloat16)
    x = WithExtras(on.randn(2, length, dim, dtype=torch.bfloat16), {"positions": torch.arange(length, device=on.device)})
    state = adamw_init(params, AdamWConfig())

    def step() -> None:
        y, kept = chain.fwd(params, x, cfg)
        dparams, _ = chain.bwd(donate(kept), y, cfg)
        adamw_update(params, dparams, state, AdamWConfig())

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {}


@check(device_only=True)
def a_launch_follows_the_current_stream(on: SmokeDevice) -> Any:
    """After a kernel that sleeps on another stream, it reads what that stream wrote."""
    x, side = on.randn(1 << 16), torch.cuda.Stream()
    with backend("triton"):
        pointwise.add(x, x)
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            x.fill_(3.0)
            y = pointwise.add(x, x)
        torch.cuda.current_stream().wait_stream(side)
    assert bool((y == 6.0).all()), "the launch did not wait for its stream"
    return {}


# Kernels


@check
def products_by_every_kernel(on: SmokeDevice) -> Any:
    """Descriptors and pointers; inner dimensions split and whole; one row; expanded and unaligned operands."""
    worst: dict[str, float] = {}
    shapes = [(1, 64, 64), (256, 192, 64), (130, 70, 50), (128, 128, 8192)] if on.real else [(1, 8, 8), (5, 7, 6)]
    for dtype in (torch.float32, torch.bfloat16):
        for m, n, k in shapes:
            x, w = on.randn(m, k, dtype=dtype), on.randn(n, k, dtype=dtype, seed=1)
            expanded, unaligned = x[:1].expand(m, k), on.randn(m * k + 1, dtype=dtype)[1:].view(m, k)
            for name, given in (("plain", x), ("expanded", expanded), ("unaligned", unaligned)):
                with backend("triton"), gemm("triton"):
                    got = products.linear_fwd(given, w, None)
                    dw, _ = products.linear_wgrad(got, given, False)
                assert_close(got, given.double() @ w.double().mT, dtype=dtype, length=k)
                assert_close(dw, got.double().mT @ given.double(), dtype=dtype, length=m)
                off = (got.double() - given.double() @ w.double().mT).abs().max() / got.double().abs().max()
                worst[f"{name} {dtype}"] = max(worst.get(f"{name} {dtype}", 0.0), float(off))
    return worst


@check
def long_rows_give_the_same_bits_again_and_again(on: SmokeDevice) -> Any:
    """Rows wider than a program keeps are written and read back: a race would show as a difference."""
    widths, times = ((8193, 8200, 11999, 33000), 2500) if on.real else ((8200,), 2)
    for width in widths:
        x, w = on.randn(4, width), on.randn(width, seed=2)
        with backend("triton"):
            want = norm.rms_norm_fwd(x, w, 1e-6, False)
            bad = torch.zeros((), device=on.device, dtype=torch.int64)
            for _ in range(times):
                for a, b in zip(norm.rms_norm_fwd(x, w, 1e-6, False), want, strict=True):
                    bad += (a != b).any()
        assert int(bad) == 0, f"width {width}: {int(bad)} of {times} differ"
        assert_close(
            want[0], torch.nn.functional.rms_norm(x.double(), (width,), w.double(), 1e-6), dtype=torch.float32, length=width
        )
    return {"runs": times * len(widths)}


@check
def norms_of_many_widths(on: SmokeDevice) -> Any:
    """Forward and backward, on both sides of the width that one program keeps."""
    for width in (1, 69, 1024, 4096, 8192, 8200, 16384, 32768) if on.real else (1, 69):
        x, dy, w, b = (on.randn(*shape, seed=i) for i, shape in enumerate([(5, width), (5, width), (width,), (width,)]))
        with backend("triton"):
            y, mean, rstd = norm.layer_norm_fwd(x, w, b, 1e-5, False)
            dx, dw, db = norm.layer_norm_bwd(dy, x, w, mean, rstd, False, True, True, True)
        exact = [t.double().requires_grad_() for t in (x, w, b)]
        want = torch.nn.functional.layer_norm(exact[0], (width,), exact[1], exact[2], 1e-5)
        want.backward(dy.double())
        assert_close((y, dw.sum(0), db.sum(0)), (want.detach(), exact[1].grad, exact[2].grad), dtype=torch.float32, length=width)
        if width > 1:  # x - mean of one element is rounding alone
            assert_close(dx, exact[0].grad, dtype=torch.float32, length=width)
    return {}


@check
def attention_of_every_head_size(on: SmokeDevice) -> Any:
    sizes = (4, 8, 20, 64, 72, 128, 192, 256, 320) if on.real else (4, 20)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for dim in sizes:
            q, k, v = (on.randn(2, 9, heads, dim, dtype=dtype, seed=i) for i, heads in enumerate((4, 2, 2)))
            cfg = AttentionConfig(causal=True)
            y, kept = attention.fwd(None, (q, k, v), cfg)
            found = attention.bwd(kept, y, cfg)[1]
            exact = [t.double().requires_grad_() for t in (q, k, v)]
            heads = [exact[0].transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(2, 1) for t in exact[1:])]
            p = (heads[0] @ heads[1].mT * dim**-0.5 + torch.full((9, 9), -torch.inf, device=on.device).triu(1)).softmax(-1)
            want = (p @ heads[2]).transpose(1, 2)
            want.backward(y.double())
            assert_close((y, *found), (want.detach(), *(t.grad for t in exact)), dtype=dtype, length=9 * dim)
    return {"sizes": sizes}


@check
def dropout_draws_the_bits_of_the_cpu(on: SmokeDevice) -> Any:
    """Also beyond 2^30 numbers."""
    n, key = on.size(2**30 + 4099, 5000), random.fold_in(random.key(3), 2**40 + 7)
    with backend("triton"):
        got = pointwise.dropout(torch.ones(n, dtype=torch.bfloat16, device=on.device), key.to(on.device), 0.3)[-4099:].cpu()
    assert torch.equal(got != 0, _bits(key, n - 4099, 4099) >= round(0.3 * 2**32))
    return {"elements": n}


def _bits(key: Tensor, first: int, count: int) -> Tensor:
    """`random.bits(key, first + count)[first:]`, without drawing the others."""
    seed, stream = int(key[0]), int(key[1])
    block, low = torch.arange(first // 4, (first + count + 3) // 4), 0xFFFFFFFF
    counter = (block & low, block >> 32, torch.tensor(stream & low), torch.tensor(stream >> 32 & low))
    words = random.philox((torch.tensor(seed & low), torch.tensor(seed >> 32 & low)), counter)
    return torch.stack(words, -1).reshape(-1)[first % 4 :][:count]


@check
def gradients_of_an_embedding_are_the_same_again(on: SmokeDevice) -> Any:
    ids = torch.randint(7, (on.size(100_000, 300),), generator=torch.Generator().manual_seed(0)).to(on.device)
    dy = on.randn(len(ids), 64, dtype=torch.bfloat16)
    with backend("triton"):
        one, two = (embedding.embedding_wgrad(dy, ids, 7, -1) for _ in range(2))
    same(one, two)
    want = torch.zeros(7, 64, dtype=torch.float64, device=on.device).index_add_(0, ids, dy.double())
    assert_close(one, want, dtype=torch.bfloat16, length=len(ids))
    return {}


@check
def a_loss_over_a_large_vocabulary(on: SmokeDevice) -> Any:
    classes = on.size(128_256, 300)
    logits, labels = on.randn(5, classes, dtype=torch.bfloat16), torch.tensor([classes - 1, -100, 7, 0, 1], device=on.device)
    cfg = CrossEntropyConfig(label_smoothing=0.1, z_loss=1e-3, reduction="none")
    with backend("triton"):
        y, kept = cross_entropy.fwd(None, (logits, labels), cfg)
        (dlogits, _) = cross_entropy.bwd(kept, torch.ones_like(y), cfg)[1]
    with backend("torch"):
        exact, again = cross_entropy.fwd(None, (logits.double(), labels), cfg)
        (want, _) = cross_entropy.bwd(again, torch.ones_like(exact), cfg)[1]
    assert_close((y.double(), dlogits), (exact, want), dtype=torch.bfloat16, length=classes)
    return {}


# Residuals, adapters


@check
def a_policy_gives_the_bits_of_save_all(on: SmokeDevice) -> Any:
    cfg = gpt2_block_config(32, 2, 48, 0.1)
    params = chain.init(cfg, key=random.key(0), device=on.device)
    x = WithExtras(on.randn(2, 8, 32), {"key": random.key(3).to(on.device)})
    found = []
    for policy in ("save_all", "recompute_norms", "minimal", "offload_block_inputs"):
        op = with_policy(chain, policy)
        y, kept = op.fwd(params, x, cfg)
        found.append((y, op.bwd(kept, y, cfg)))
    for other in found[1:]:
        same(other, found[0])
    return {}


@check
def offloading_overlaps_with_computing(on: SmokeDevice) -> Any:
    """The profiler sees copies run while kernels do: four layers are offloaded, and prefetched one layer ahead."""
    dim, length = on.size(1024, 16), on.size(1024, 3)
    cfg = RepeatConfig(chain, block_config(dim, 8 if on.real else 2, on.size(2816, 24)), 4)
    op = with_policy(repeat, "offload_block_inputs")
    params = repeat.init(cfg, key=random.key(0), device=on.device, dtype=torch.bfloat16)
    # so many rows that the device, and not the host, takes the time
    x = WithExtras(
        on.randn(on.size(64, 2), length, dim, dtype=torch.bfloat16), {"positions": torch.arange(length, device=on.device)}
    )

    def step() -> None:
        y, kept = op.fwd(params, x, cfg)
        op.bwd(donate(kept), y, cfg)

    step()
    if not on.real:
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end, "Memcpy" in e.name) for e in profile.events() if e.device_type.name == "CUDA"]
    copies, kernels = [s for s in spans if s[2]], [s for s in spans if not s[2]]
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in kernels)
    copied = sum(end - start for start, end, _ in copies)
    assert copied > 0 and both > 0, f"copies {copied} us, of these {both} us beside a kernel"
    return {"copy_us": copied, "overlapped_us": both}


@check
def modules_train_by_autograd_and_compiled(on: SmokeDevice) -> Any:
    torch.manual_seed(0)
    model = fnn.Sequential(fnn.RMSNorm(16), fnn.Linear(16, 32), fnn.GELU(), fnn.Linear(32, 4)).to(on.device)
    x = on.randn(5, 16)
    model(x).square().sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if on.real else "aot_eager")
    compiled(x).square().sum().backward()
    assert_close([p.grad for p in model.parameters()], want, dtype=torch.float32, length=32)
    return {}


@check(device_only=True)
def a_linear_pair_holds_no_more_than_its_results(on: SmokeDevice) -> Any:
    n = on.size(1024, 16)
    cfg = LinearConfig(n, n, bias=False)
    params, x = linear.init(cfg, key=random.key(0), device=on.device), on.randn(4 * n, n)
    dy = torch.ones_like(x)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y, kept = linear.fwd(params, x, cfg, needs=Needs.ALL)
        found = linear.bwd(donate(kept), dy, cfg)
        torch.cuda.synchronize()
        held, peak = sum(t.nbytes for t in tensors((y, found))), torch.cuda.max_memory_allocated() - before
        del y, kept, found
    assert peak <= held * 1.01 + 2**20, f"peak {peak} bytes, results {held}"
    return {"peak": peak, "results": held}


@check(device_only=True)
def work_runs_on_the_device_of_its_tensors(on: SmokeDevice) -> Any:
    if torch.cuda.device_count() < 2:
        return {"not asked": "there is one device"}
    x = torch.randn(33, 64, device="cuda:1")
    with backend("triton"):
        y = activation.activation_fwd(x, "gelu")
    step = graphed(lambda x: x * 2, x)
    assert y.device == x.device and torch.equal(step(x), x * 2)
    return {}


# Times that only a device can give


@check(device_only=True)
def suspects_are_timed_both_ways(on: SmokeDevice) -> Any:
    """Microseconds of calls that may be slow by construction, by our kernels and by torch's; nothing is asserted."""
    n = on.size(2048, 16)
    x, w, b = (on.randn(*shape, seed=i) for i, shape in enumerate([(n, n), (n, n), (n,)]))
    qkv = on.randn(on.size(4, 1), on.size(1024, 2), 3 * 16 * on.size(128, 4), dtype=torch.bfloat16)
    narrow = x.bfloat16()
    calls = {
        "heads of a joint projection": lambda: qkv_split.qkv_split_fwd(qkv, None, 16, 16, False),
        "float32 product with bias": lambda: products.linear_fwd(x, w, b),
        "float32 product with bias and gelu": lambda: fused_linear.fused_linear_fwd(x, w, b, None, "gelu", 1.0, True),
        "float32 wgrad with row sums": lambda: products.linear_wgrad(x, x, True),
        "bfloat16 wgrad with row sums": lambda: fused_linear.fused_linear_wgrad(narrow, narrow, 1.0, True),
        "bfloat16 wgrad without": lambda: fused_linear.fused_linear_wgrad(narrow, narrow, 1.0, False),
    }
    timer = CudaTimer()
    replays = {
        f"{name}, {provider}": timer.replay([functools.partial(_by, provider, call)])
        for name, call in calls.items()
        for provider in ("triton", "cublas", "torch")
    }
    return timer.device_us(replays)


def _by(provider: str, call: Callable[[], Any]) -> Any:
    """Our kernels, with products of ours or of cuBLAS, or torch's."""
    with backend("torch" if provider == "torch" else "triton"), gemm("auto" if provider == "torch" else provider):
        return call()
