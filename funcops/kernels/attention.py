"""Attention on torch's own kernels, with logsumexp as a value. q: [B, T, H, D]; k, v: [B, S, K, D]; out: [B, T, H, D].

CPU: aten's flash kernel (any float dtype). CUDA: flash attention for 16-bit with D up to 256, memory-efficient attention for
float32 and for longer heads, plain products for float64 (`way`). logsumexp has the layout of the kernel that made it. No [T, S]
matrix is saved. On CUDA the head size of v may differ from q's and k's; flash attention takes q shorter than k: the last row sees
all keys. Which kernel serves which options is decided at the end of this file (`attend_fwd`); docs/kernels.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from funcops.backend import kernel, operators, tracing
from funcops.kernels.scored_attention import Score, nothing_to_see, scored_attention_bwd, scored_attention_fwd, to_the_last

Gradients = tuple[Tensor, Tensor, Tensor, Optional[Tensor]]
_aten = torch.ops.aten
_compiling = torch.compiler.is_dynamo_compiling
_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
VECTOR = 16  # bytes that the CUDA kernels read at a time: heads, strides and addresses are multiples of it
LONGEST = 256  # the largest head size of flash attention
LSE_ROWS = 32  # memory-efficient attention pads logsumexp to a multiple of it, with infinity


class Way(NamedTuple):
    """How CUDA computes attention: by "flash", "efficient" or "math"; the head size to which heads are zero-padded; and whether k
    and v must be repeated to a head for each of q's."""

    kernel: str
    size: int
    repeated: bool


def way(dtype: torch.dtype, head_size: int) -> Way:
    """Choose the kernel: both take heads of whole vectors, flash only 16-bit ones of up to 256 elements, neither float64."""
    if dtype is torch.float64:
        return Way("math", head_size, True)
    step = VECTOR // dtype.itemsize
    size = -(-head_size // step) * step
    flash = dtype.itemsize == 2 and size <= LONGEST
    return Way("flash" if flash else "efficient", size, not flash)


@kernel(library=True)
def attention_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out = softmax(scale q k^T) v per head, and logsumexp."""
    if q.numel() == 0 or k.numel() == 0:
        lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.promote_types(q.dtype, torch.float32))
        return torch.zeros_like(q), lse
    if q.is_cuda:
        return cuda_fwd(q, k, v, causal, scale)
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        heads_first(q), heads_first(k), heads_first(v), 0.0, causal, scale=scale
    )
    return out.transpose(1, 2), lse


def merge(total: tuple[Tensor, Tensor], out: Tensor, logsumexp: Tensor, first: int) -> None:
    """Attention of the queries from `first` on over more keys, merged in place into `total`: out in the wide dtype, and logsumexp
    [B, H, T]. There must be at least one key: over no keys logsumexp is 0."""
    y, lse = total[0][:, first:], total[1][..., first:]
    more = logsumexp[..., : lse.shape[-1]]
    weight = torch.sigmoid(more - lse).to(y.dtype)  # on the meta device torch 2.11 returns a float32 logsumexp for float64
    y.lerp_(out.to(y.dtype), weight.transpose(1, 2).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, more))


@kernel(library=True)
def attention_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from out and logsumexp: the probabilities are recomputed. If k and v are only some of the keys that q sees, but
    out and logsumexp are over all keys, then dk and dv are complete, and dq is one term of a sum. logsumexp: contiguous; as the
    forward returned it, or [B, H, T]."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if q.is_cuda:
        return cuda_bwd(dy, q, k, v, out, logsumexp, causal, scale)
    heads = heads_first(q), heads_first(k), heads_first(v), heads_first(out)
    dq, dk, dv = _cpu_backward(heads_first(dy), *heads, logsumexp, 0.0, causal, scale=scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def cuda_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    how, size = way(q.dtype, max(q.shape[-1], v.shape[-1])), v.shape[-1]
    k, v = _for_kernel(k, how, q.shape[2]), _for_kernel(v, how, q.shape[2])
    out, lse = WAYS[how.kernel].forward(_for_kernel(q, how), k, v, causal, scale)
    return _cut(out.transpose(1, 2), size), lse


def cuda_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    how = way(q.dtype, max(q.shape[-1], v.shape[-1]))
    heads = _for_kernel(q, how), _for_kernel(k, how, q.shape[2]), _for_kernel(v, how, q.shape[2])
    found = WAYS[how.kernel].backward(_for_kernel(dy, how), *heads, _for_kernel(out, how), logsumexp, causal, scale)
    dq, dk, dv = (_cut(g.transpose(1, 2), t.shape[-1]) for g, t in zip(found, (q, k, v), strict=True))
    return dq, _sum_groups(dk, k.shape[2]), _sum_groups(dv, k.shape[2])


def flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Flash attention on CUDA with a window (0: none), or over one row of packed sequences, bounded by `cu_seqlens`."""
    how, longest = way(q.dtype, max(q.shape[-1], v.shape[-1])), (q.shape[1], k.shape[1])
    parts = [_packed(t, how, cu_seqlens) for t in (q, k, v)]
    out, lse, *_ = _aten._flash_attention_forward.default(
        *parts, *_ends(cu_seqlens, q, k), *longest, 0.0, causal, False, scale=scale, **_sides(window)
    )
    if cu_seqlens is not None:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    return _cut(out, v.shape[-1]), lse


def flash_bwd(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    how, longest = way(q.dtype, max(q.shape[-1], v.shape[-1])), (q.shape[1], k.shape[1])
    parts = [_packed(t, how, cu_seqlens) for t in (dy, q, k, v, out)]
    lse = logsumexp if cu_seqlens is None else logsumexp.squeeze(0)
    state = torch.empty((), dtype=torch.uint64, device=q.device)
    found = _aten._flash_attention_backward.default(
        *parts, lse, *_ends(cu_seqlens, q, k), *longest, 0.0, causal, state, state, scale=scale, **_sides(window)
    )
    grads = found if cu_seqlens is None else tuple([g.unsqueeze(0) for g in found])
    dq, dk, dv = (_cut(g, t.shape[-1]) for g, t in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _ends(cu_seqlens: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The ends of sequences among the rows of q, of which the last is the last of k, and among the keys."""
    if cu_seqlens is None:
        return None, None
    ends, before = to_the_last(cu_seqlens, k.shape[1]), k.shape[1] - q.shape[1]
    return (ends - before).clamp_(min=0) if before else ends, ends


def _sides(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _packed(t: Tensor, how: Way, cu_seqlens: Tensor | None) -> Tensor:
    """[B, T, H, D] as [B, T, H, size], or as [T, H, size] for packed sequences."""
    t = _for_kernel(t, how).transpose(1, 2)
    return t if cu_seqlens is None else t.squeeze(0)


def _flash_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.empty((), dtype=torch.uint64, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward.default(
        dy, q, k, v, y, logsumexp, None, None, q.shape[2], k.shape[2], 0.0, causal, state, state, scale=scale
    )


def _efficient_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.0, causal, scale=scale)[:2]


def _efficient_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    if logsumexp.shape[-1] % LSE_ROWS:
        logsumexp = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[-1] % LSE_ROWS), value=float("inf"))
    return _aten._scaled_dot_product_efficient_attention_backward.default(
        dy, q, k, v, None, y, logsumexp, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )[:3]


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = torch.matmul(q, k.mT) * scale
    if not causal:
        return scores
    t = torch.arange(q.shape[2], device=q.device)
    return scores.masked_fill(t > t.unsqueeze(1), float("-inf"))


def _math_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse.unsqueeze(-1)).exp(), v), lse


def _math_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    p = (_scores(q, k, causal, scale) - logsumexp.unsqueeze(-1)).exp()
    dp = torch.matmul(dy, v.mT)  # term 1 of ds: through the score's own exp
    along = (dy * y).sum(-1, keepdim=True)  # term 2: through logsumexp; it is the sum of p dp over a row
    ds = p * (dp - along) * scale
    return torch.matmul(ds, k), torch.matmul(ds.mT, q), torch.matmul(p.mT, dy)


class _Pair(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


WAYS = {
    "flash": _Pair(_flash_fwd, _flash_bwd),
    "efficient": _Pair(_efficient_fwd, _efficient_bwd),
    "math": _Pair(_math_fwd, _math_bwd),
}


def heads_first(t: Tensor) -> Tensor:
    """[B, T, H, D] as [B, H, T, D] with a last stride of 1, as `by_elements` gives it: written out, as a call takes time."""
    return (t if t.stride()[-1] == 1 else t.contiguous()).transpose(1, 2)


def by_elements(t: Tensor) -> Tensor:
    """Return t if its last stride is 1, which the flash kernels assume without a check, else a contiguous copy."""
    return t if t.stride()[-1] == 1 else t.contiguous()


def _for_kernel(t: Tensor, how: Way, heads: int | None = None) -> Tensor:
    """[B, T, H, D] as [B, H, T, size]: heads zero-padded, `in_vectors`; with `heads`, each head repeated for its group if the
    kernel requires it."""
    if t.shape[-1] != how.size:
        t = torch.nn.functional.pad(t, (0, how.size - t.shape[-1]))
    elif how.kernel != "math":
        t = _traced_aligned(t) if _compiling() else aligned(t)
    t = t.transpose(1, 2)
    repeats = 1 if heads is None or not how.repeated else heads // t.shape[1]
    return t if repeats == 1 else t.repeat_interleave(repeats, 1)


def aligned(t: Tensor) -> Tensor:
    """Return t if it is `in_vectors`, else a contiguous copy."""
    return t if in_vectors(t) else t.clone(memory_format=torch.contiguous_format)


# Dynamo does not support storage_offset. The tracers after it do, and look into a composite operator.
operators.define("aligned(Tensor(a) t) -> Tensor(a)")
operators.impl("aligned", aligned, "CompositeImplicitAutograd")
_traced_aligned = torch.ops.funcops.aligned.default


def in_vectors(t: Tensor) -> bool:
    """Whether the last stride is 1, and the other strides (even of one head, as the kernels check it too) and the address are
    multiples of a vector. A tracer does not know the address, only the offset in the storage."""
    *outer, last = zip(t.shape, t.stride(), strict=True)
    start = t.storage_offset() * t.itemsize if tracing() else t.data_ptr()
    return last[1] == 1 and start % VECTOR == 0 and all([s * t.itemsize % VECTOR == 0 and (s > 0 or n == 1) for n, s in outer])


def _cut(t: Tensor, size: int) -> Tensor:
    return t if t.shape[-1] == size else t.narrow(-1, 0, size).clone(memory_format=torch.contiguous_format)


def _sum_groups(t: Tensor, heads: int) -> Tensor:
    """[B, S, H, D] summed over each group of query heads to [B, S, heads, D]."""
    if t.shape[2] == heads:
        return t
    return t.unflatten(2, (heads, t.shape[2] // heads)).sum(3)


def attend_fwd(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], cu_seqlens: Optional[Tensor], score: Score
) -> tuple[Tensor, Tensor]:
    """Compute y, and logsumexp in the layout of the kernel that made it: [B, H, T], or longer."""
    served = _served(q, k, v, bias, cu_seqlens, score)
    if served == "library":
        return attention_fwd(q, k, v, score.causal, score.scale)  # type: ignore[no-any-return]
    if served == "flash":
        return flash_fwd(q, k, v, cu_seqlens, score.causal, score.window, score.scale)
    return scored_attention_fwd(q, k, v, bias, cu_seqlens, *score)  # type: ignore[no-any-return]


def attend_bwd(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    y: Tensor,
    lse: Tensor,
    score: Score,
    wants_bias: bool,
) -> Gradients:
    """Compute dq, dk, dv and, if `wants_bias`, dbias."""
    served = _served(q, k, v, bias, cu_seqlens, score)
    if served == "library":
        return *attention_bwd(dy, q, k, v, y, lse, score.causal, score.scale), None
    if served == "flash":
        return *flash_bwd(dy, q, k, v, cu_seqlens, y, lse, score.causal, score.window, score.scale), None
    return scored_attention_bwd(dy, q, k, v, bias, cu_seqlens, y, lse, *score, wants_bias)  # type: ignore[no-any-return]


def _served(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], cu_seqlens: Optional[Tensor], score: Score) -> str:
    """Choose the kernels: "library" for torch's, "flash" for torch's flash attention with options, or "" for our own."""
    if bias is not None or score.softcap or score.alibi:
        return ""
    window, shorter = score.window or cu_seqlens is not None, score.causal and q.shape[1] != k.shape[1]
    if q.shape[3] == v.shape[3] and not (window or shorter):
        return "library"
    if not q.is_cuda or nothing_to_see(q, k):
        return ""
    by = way(q.dtype, max(q.shape[3], v.shape[3])).kernel
    if by == "flash":
        return "flash" if window else "library"
    return "library" if by == "efficient" and not (window or shorter) else ""
