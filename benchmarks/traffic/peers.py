"""Liger-Kernel's calls for the same work as ours: its own host code and kernels, in place if that is its default."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.traffic.count import PROCESSORS
from benchmarks.traffic.functions import turns_halves
from benchmarks.traffic.ours import Case

LLAMA = 0  # its casting mode: statistics in float32


def liger_version() -> str | None:
    """Liger-Kernel's version; None if it is not installed."""
    try:
        import liger_kernel.ops  # noqa: F401
    except ImportError:
        return None
    return f"liger_kernel {version('liger_kernel')}"


def has_liger(case: Case) -> bool:
    """Whether Liger-Kernel has a kernel for this: SwiGLU and GEGLU only over two tensors, rotations only of whole heads."""
    if case.name == "rope_apply":
        return turns_halves(case)
    return case.name in CALLS and (not case.name.startswith("glu") or case.args[-1] in ("swiglu", "geglu_tanh"))


def liger_call(case: Case) -> Callable[[], Any]:
    return lambda: CALLS[case.name](*case.args)


def _settings(width: int) -> tuple[int, int]:
    from liger_kernel.ops.utils import calculate_settings

    return calculate_settings(width)


def _ops(module: str) -> Any:
    import importlib

    return importlib.import_module(f"liger_kernel.ops.{module}")


def _on_device(function: Any) -> Any:
    """The function with an H100's number of processors: it launches one program per processor, and only one for a CPU tensor."""
    source = textwrap.dedent(inspect.getsource(function))
    assert "sm_count = 1\n" in source
    scope = dict(vars(sys.modules[function.__module__]))
    exec(source.replace("sm_count = 1\n", f"sm_count = {PROCESSORS}\n"), scope)
    return scope[function.__name__]


def _rms_norm_fwd(x: Any, w: Any, eps: float, _: bool) -> Any:
    return _ops("rms_norm").rms_norm_forward(x, w, eps, 0.0, LLAMA, None)


def _rms_norm_bwd(dy: Any, x: Any, w: Any, rstd: Any, *_: Any) -> Any:
    backward = _on_device(_ops("rms_norm").rms_norm_backward)
    return backward(dy, x, w, rstd.view(-1), 0.0, LLAMA, *_settings(x.shape[-1]), True, None)


def _layer_norm_fwd(x: Any, w: Any, b: Any, eps: float, _: bool) -> Any:
    return _ops("layer_norm").layer_norm_forward(x, w, b, eps)


def _layer_norm_bwd(dy: Any, x: Any, w: Any, mean: Any, rstd: Any, *_: Any) -> Any:
    return _on_device(_ops("layer_norm").layer_norm_backward)(dy, x, w, w, mean.view(-1), rstd.view(-1))


def _add_rms_norm_fwd(x: Any, residual: Any, w: Any, eps: float, _: bool) -> Any:
    return _ops("fused_add_rms_norm").fused_add_rms_norm_forward(x, residual, w, eps, 0.0, LLAMA)


def _add_rms_norm_bwd(dy: Any, dstream: Any, stream: Any, w: Any, rstd: Any, *_: Any) -> Any:
    backward = _on_device(_ops("fused_add_rms_norm").fused_add_rms_norm_backward)
    return backward(dy, dstream, stream, w, rstd.view(-1), 0.0, LLAMA, *_settings(stream.shape[-1]), 2, True)


def _gate(kind: str) -> Any:
    return _ops({"swiglu": "swiglu", "geglu_tanh": "geglu"}[kind])


def _glu_pair_fwd(gate: Any, linear: Any, kind: str) -> Any:
    module = _gate(kind)
    return (module.swiglu_forward if kind == "swiglu" else module.geglu_forward)(gate, linear)


def _glu_pair_bwd(dy: Any, gate: Any, linear: Any, kind: str) -> Any:
    module = _gate(kind)
    return (module.swiglu_backward if kind == "swiglu" else module.geglu_backward)(gate, linear, dy)


def _rope_apply(x: Any, table: Any, interleaved: bool, inverse: bool) -> Any:
    """Rotate half of the heads as q and half as k, each in its own memory, as [*, N, T, D] that is a view of [*, T, N, D]."""
    batch, tokens, heads, width = x.shape
    q, k = (x.view(-1)[: x.numel() // 2].view(batch, tokens, heads // 2, width).transpose(1, 2) for _ in range(2))
    k = torch.empty_like(k)
    cos, sin = (torch.empty(1, tokens, width, dtype=table.dtype, device=x.device) for _ in range(2))
    rope = _ops("rope")
    return (rope.rope_backward if inverse else rope.rope_forward)(q, k, cos, sin)


def _cross_entropy_fwd(logits: Any, labels: Any, smoothing: float, ignored: int, z_loss: float) -> Any:
    return _ops("cross_entropy").cross_entropy_forward(
        logits.detach(), labels, None, ignored, z_loss, smoothing, "none", None, False
    )


def _cross_entropy(logits: Any, labels: Any, smoothing: float, ignored: int, z_loss: float) -> Any:
    """Loss and gradient: the forward computes both, and the backward has nothing left to do for a dloss of 1."""
    found = _ops("cross_entropy").cross_entropy_forward(
        logits.detach().requires_grad_(), labels, None, ignored, z_loss, smoothing, "mean", None, False
    )
    return _ops("cross_entropy").cross_entropy_backward(found[-1].detach(), torch.ones((), device=logits.device))


CALLS: dict[str, Callable[..., Any]] = {
    "rms_norm_fwd": _rms_norm_fwd,
    "rms_norm_bwd": _rms_norm_bwd,
    "layer_norm_fwd": _layer_norm_fwd,
    "layer_norm_bwd": _layer_norm_bwd,
    "add_rms_norm_fwd": _add_rms_norm_fwd,
    "add_rms_norm_bwd": _add_rms_norm_bwd,
    "glu_pair_fwd": _glu_pair_fwd,
    "glu_pair_bwd": _glu_pair_bwd,
    "rope_apply": _rope_apply,
    "cross_entropy_fwd": _cross_entropy_fwd,
    "cross_entropy": _cross_entropy,
}
