"""Whether cuDNN computes attention instead of flash attention: as torch's own chooser says, asked once for each layout.

cuDNN makes a plan of each layout on the host, in each thread, which takes up to a tenth of a second: after `MOST` layouts in a
thread flash attention computes all others, as it does for what changes from call to call. torch finds a plan by the strides of q, k
and v alone. So out and its gradient must always lie as the forward lays out: dense, in the order of q, which here is [B, T, H, D].
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.backends import cuda, cudnn
from torch.nn.attention import SDPBackend

from funcops.engine.backend import tracing
from funcops.engine.backend.declare import capturing

CONFIRMED: tuple[tuple[int, int], ...] = ()  # the capabilities of the devices that measured this way (docs/benchmarks)
MOST = 64
PARTS = 91500  # the last cuDNN that takes rows and keys only in parts of 128
KNOWN = 4096  # answers that a thread remembers


class _Here(threading.local):
    """The answers of the chooser in a thread, and the layouts of which cuDNN has plans there."""

    def __init__(self) -> None:
        self.answers: dict[Hashable, bool] = {}
        self.planned: set[Hashable] = set()


_here = _Here()


def cudnn_serves(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether cuDNN computes attention of q [B, H, T, D], k and v: on a device that `CONFIRMED` has, or, if torch's switches forbid
    flash attention, on any; where torch's chooser takes it."""
    if tracing():
        return False
    wanted = not cuda.flash_sdp_enabled()
    if not (CONFIRMED or wanted):
        return False
    layout = (q.device, q.dtype, causal, *[(t.shape, t.stride()) for t in (q, k, v)])
    order = tuple(torch._C._get_sdp_priority_order())
    key = layout, wanted, cuda.cudnn_sdp_enabled(), order, torch.get_deterministic_debug_mode()
    found = _here.answers.get(key)
    if found is None:
        known = layout in _here.planned
        if not known and (len(_here.planned) >= MOST or capturing()):  # a plan is made before a capture, which it would break
            return False
        found = (
            (wanted or torch.cuda.get_device_capability(q.device) in CONFIRMED)
            and _takes(q, k, causal)
            and _chosen(q, k, v, causal)
        )
        if len(_here.answers) >= KNOWN:
            _here.answers.clear()
        _here.answers[key] = found
        if found:
            _here.planned.add(layout)
    return found


def _takes(q: Tensor, k: Tensor, causal: bool) -> bool:
    """Whether cuDNN gives our results, beyond what the chooser asks: its causal mask begins at the first key, ours ends at the
    last."""
    rows, keys = q.shape[2], k.shape[2]
    whole = rows % 128 == keys % 128 == 0 or (cudnn.version() or 0) > PARTS
    return whole and not (causal and rows != keys) and _in_order(q)


def _in_order(q: Tensor) -> bool:
    """Whether q, and so what cuDNN makes in q's order, lies as [B, T, H, D]."""
    outer = [stride for n, stride in zip(q.transpose(1, 2).shape, q.transpose(1, 2).stride(), strict=True) if n > 1]
    return all([a > b for a, b in zip(outer, outer[1:], strict=False)])


def _chosen(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether the chooser takes cuDNN for a forward and a backward: it asks whether q, k and v require a gradient."""
    with torch.enable_grad():
        q, k, v = _alias(q), _alias(k), _alias(v)
        if not cuda.can_use_cudnn_attention(cuda.SDPAParams(q, k, v, None, 0.0, causal, True)):
            return False  # asked first: the chooser raises where it may take no kernel
        return torch._fused_sdp_choice(q, k, v, is_causal=causal, enable_gqa=True) == SDPBackend.CUDNN_ATTENTION.value


def _alias(t: Tensor) -> Tensor:
    """A tensor of the same memory that requires a gradient, whatever t is: also one that inference mode made."""
    alias = torch.empty(0, dtype=t.dtype, device=t.device)
    return alias.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride()).requires_grad_()
