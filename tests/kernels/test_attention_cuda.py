"""Attention calls torch's CUDA kernels with arguments that they take: every call is checked against the rules of torch's
sources; and numbers, with the CPU's kernel in place of CUDA's."""

import pytest
import torch
from attention_calls import drawn, made, on_cuda, refused
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.library.kernels import attention, attention_ways
from funcops.library.kernels.attention import attention_bwd, attention_fwd, cuda_bwd, cuda_fwd
from funcops.testing.laws import LAYOUTS
from funcops.testing.tolerances import assert_close

aten = torch.ops.aten
KERNELS = {
    aten._scaled_dot_product_flash_attention.default: "flash",
    aten._scaled_dot_product_flash_attention_backward.default: "flash",
    aten._scaled_dot_product_efficient_attention.default: "efficient",
    aten._scaled_dot_product_efficient_attention_backward.default: "efficient",
}


def lse_refused(kernel, given):
    """Why a backward would read logsumexp wrongly: its rows must be consecutive, and for one kernel in whole groups."""
    for lse in [t for t in given if t.dim() == 3]:
        if not lse.is_contiguous() or (kernel == "efficient" and lse.shape[-1] % 32):
            return f"logsumexp {list(lse.shape)} of strides {lse.stride()}"
    return None


class Rules(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen, self.wrong = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in KERNELS:
            given = [t for t in args if isinstance(t, torch.Tensor) and t.dim() == 4]
            dy, given = (given[:1], given[1:]) if "backward" in func.name() else ([], given)
            self.seen.append(KERNELS[func])
            why = refused(KERNELS[func], *given, *dy) or lse_refused(
                KERNELS[func], [t for t in args if isinstance(t, torch.Tensor)]
            )
            if why:
                self.wrong.append(f"{func}: {why}")
        return func(*args, **(kwargs or {}))


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_call_is_one_that_the_device_takes(dtype):
    wants = set()
    for b, t, heads, kv_heads, size, layout, causal in drawn(0, 30):
        like = made(torch.zeros, dtype, b, t, heads, kv_heads, size, layout)
        with FakeTensorMode(), Rules() as rules:
            q, k, v = (on_cuda(x) for x in like)
            y, lse = attention_fwd.kernel.torch_impl(q, k, v, causal, 0.5)
            grads = attention_bwd.kernel.torch_impl(torch.empty_like(y), q, k, v, y, lse, causal, 0.5)
        assert not rules.wrong, (size, layout, rules.wrong)
        assert y.shape == q.shape and [g.shape for g in grads] == [q.shape, k.shape, v.shape]
        wants |= set(rules.seen)
    assert wants == {torch.float64: set(), torch.float32: {"efficient"}}.get(dtype, {"flash", "efficient"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logsumexp_of_rows_is_what_the_device_takes(dtype):
    """Merging gives a logsumexp of T rows, where a kernel wants rows in groups."""
    for size in (64, 264):
        with FakeTensorMode(), Rules() as rules:
            q, lse = torch.empty(2, 33, 4, size, dtype=dtype, device="cuda"), torch.empty(2, 4, 33, device="cuda")
            attention_bwd.kernel.torch_impl(q, q, q, q, q, lse, False, 0.5)
        assert rules.seen and not rules.wrong, (size, rules.wrong)


def stands_in(kernel):
    """The CPU's kernel, which refuses what the device's refuses, with as many heads of k and v as of q, or fewer."""

    def forward(q, k, v, causal, scale):
        assert not refused(kernel, q, k, v)
        return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def backward(dy, q, k, v, y, lse, causal, scale):
        assert not refused(kernel, q, k, v, y, dy)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(dy, q, k, v, y, lse, 0.0, causal, scale=scale)

    return attention_ways.Pair(forward, backward)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_numbers_do_not_depend_on_the_layout_of_heads(dtype, monkeypatch):
    for kernel in ("flash", "efficient"):
        monkeypatch.setitem(attention.WAYS, kernel, stands_in(kernel))
    torch.manual_seed(0)
    for b, t, heads, kv_heads, size, layout, causal in drawn(1, 25):
        q, k, v = made(torch.randn, dtype, b, t, heads, kv_heads, size, layout)
        y, lse = cuda_fwd(q, k, v, causal, size**-0.5)
        dy = LAYOUTS.get(layout, lambda t: t)(torch.randn(y.shape).to(dtype))
        got = y, cuda_bwd(dy, q, k, v, y, lse, causal, size**-0.5)
        q, k, v, dy = (x.contiguous() for x in (q, k, v, dy))
        want, lse = attention_fwd(q, k, v, causal, size**-0.5)
        want = want, attention_bwd(dy, q, k, v, want, lse, causal, size**-0.5)
        assert_close(got, want, dtype=dtype, what=f"{size} {layout}")


def opaque(kernel):
    """`stands_in` as operators, opaque to a tracer, which get the arguments that the device's kernels would."""
    pair, name = stands_in(kernel), f"funcops_stands_in::{kernel}"

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return pair.forward(q, k, v, causal, scale)

    def backward(
        dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(g.clone() for g in pair.backward(dy, q, k, v, y, lse, causal, scale))

    made = [torch.library.custom_op(f"{name}_{f.__name__}", f, mutates_args=()) for f in (forward, backward)]
    made[0].register_fake(lambda q, k, v, *_: (torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)))
    made[1].register_fake(lambda dy, q, k, v, *_: tuple(torch.empty_like(t) for t in (q, k, v)))
    return attention_ways.Pair(*made)


@pytest.fixture(scope="module")
def opaque_kernels():
    return {kernel: opaque(kernel) for kernel in ("flash", "efficient")}


WHOLE = [row for row in drawn(2, 30) if row[4] % 8 == 0]  # heads of whole vectors, which no padding brings into place


@pytest.mark.turns("dtype")
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_compiles_to_one_graph(dtype, dynamic, opaque_kernels, monkeypatch):
    for kernel, pair in opaque_kernels.items():
        monkeypatch.setitem(attention.WAYS, kernel, pair)
    torch.manual_seed(0)

    def step(q, k, v, dy, causal, scale):
        y, lse = cuda_fwd(q, k, v, causal, scale)
        return y, cuda_bwd(dy, q, k, v, y, lse, causal, scale)

    for b, t, heads, kv_heads, size, layout, causal in WHOLE[: 1 if dynamic else 3]:
        args = *made(torch.randn, dtype, b, t, heads, kv_heads, size, layout), torch.randn(b, t, heads, size).to(dtype)
        torch._dynamo.reset()
        got = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*args, causal, size**-0.5)
        assert_close(got, step(*args, causal, size**-0.5), dtype=dtype, what=f"{size} {layout}")


HEADS = {torch.bfloat16: "flash", torch.float32: "efficient", torch.float64: "math"}


@pytest.mark.parametrize("dtype", HEADS, ids=str)
def test_the_kernels_that_serve_a_call(dtype):
    """Torch's, where it has one; flash attention with options for windows and packed rows; else our own."""
    with FakeTensorMode():
        q, bounds = torch.empty(2, 64, 4, 64, dtype=dtype, device="cuda"), torch.empty(3, dtype=torch.int32, device="cuda")

    def served(cu_seqlens=None, keys=q, bias=None, **more):
        return attention._served(
            q,
            keys,
            keys,
            bias,
            cu_seqlens,
            attention.Score(**{"causal": True, "scale": 1.0, "window": 0, "softcap": 0.0, "alibi": False, **more}),
        )

    assert served() == "library" and served(softcap=3.0) == served(alibi=True) == served(bias=q) == ""
    flash = {"flash": "flash", "efficient": "", "math": ""}[HEADS[dtype]]
    assert served(window=8) == served(bounds) == flash
    with FakeTensorMode():
        more = torch.empty(2, 80, 4, 64, dtype=dtype, device="cuda")
    assert served(keys=more) == ("library" if HEADS[dtype] == "flash" else "")
    assert served(keys=more, causal=False) == "library"
