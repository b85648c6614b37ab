"""The kernels that a function would launch on a device, found without one: on meta tensors the same choices are made, and nothing
runs."""

import functools
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from funcops.engine.backend import backend, gemm
from funcops.library.kernels import attention
from funcops.testing.aot import name_of

NO_KERNEL = ("empty", "new_empty", "detach", "unsafe_view")


class Operators(TorchDispatchMode):
    """Records in `found` the name of every aten operator that computes, on any device. Our own are followed to their launches."""

    runs = True

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "funcops":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        if not func.is_view and not func._opname.lstrip("_").startswith(NO_KERNEL):
            self.found.append(func._opname.strip("_"))
        return func(*args, **(kwargs or {}))


@contextmanager
def launches(monkeypatch):
    """The launches of the block, in order: of Triton kernels (`norm_kernels.forward`) and of aten operators (`mm`), which count as
    one each, by the choices of an H100 where Triton is interpreted. Tensors must be on the meta device."""
    found = []

    def launcher(kernel, grid):
        return lambda *_, **__: found.append(name_of(kernel.fn))

    with monkeypatch.context() as patch, backend("triton"), gemm("auto"), Operators(found):
        patch.setattr(interpreter.InterpretedFunction, "__getitem__", launcher)
        patch.setattr(attention.attention_fwd.kernel, "torch_impl", attention.cuda_fwd)
        patch.setattr(attention.attention_bwd.kernel, "torch_impl", attention.cuda_bwd)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", _sdpa)
        yield found


class _Flash(torch.autograd.Function):
    """[B, H, T, D], by the operators of CUDA."""

    @staticmethod
    def forward(ctx, causal, scale, *qkv):
        qkv = [t.transpose(1, 2) for t in qkv]
        y, lse = attention.cuda_fwd(*qkv, causal, scale)
        ctx.save_for_backward(*qkv, y, lse)
        ctx.options = causal, scale
        return y.transpose(1, 2)

    @staticmethod
    def backward(ctx, dy):
        found = attention.cuda_bwd(dy.transpose(1, 2), *ctx.saved_tensors, *ctx.options)
        return None, None, *(g.transpose(1, 2) for g in found)


@functools.wraps(torch.nn.functional.scaled_dot_product_attention)
def _sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    assert attn_mask is None and not dropout_p
    return _Flash.apply(is_causal, scale or q.shape[-1] ** -0.5, q, k, v)
