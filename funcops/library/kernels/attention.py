"""Attention on torch's own kernels, with logsumexp as a value. q: [B, T, H, D]; k, v: [B, S, K, D]; out: [B, T, H, D].

CPU: aten's flash kernel (any float dtype). CUDA: flash attention, or cuDNN's (`cudnn_serves`), for 16-bit with D up to 256,
memory-efficient attention for float32 and for longer heads, plain products for float64 (`way`). logsumexp has the layout of the
kernel that made it. No [T, S] matrix is saved. On CUDA the head size of v may differ from q's and k's; flash attention takes q
shorter than k: the last row sees all keys. Which kernel serves which options is decided at the end of this file (`attend_fwd`);
docs/kernels.md has the table.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, operators, select, tracing
from funcops.engine.backend.once import once
from funcops.library.kernels.attention_ways import VECTOR, WAYS, Pair, Way, way
from funcops.library.kernels.block_attention import block_bwd, block_fwd, require_plain
from funcops.library.kernels.cudnn_attention import cudnn_serves
from funcops.library.kernels.pins import by_triton, launched_body
from funcops.library.kernels.scored_attention import (
    Score,
    nothing_to_see,
    scored_attention_bwd,
    scored_attention_fwd,
    sequence_of,
    to_the_last,
)

Gradients = tuple[Tensor, Tensor, Tensor, Optional[Tensor]]
_aten = torch.ops.aten
_compiling = torch.compiler.is_dynamo_compiling
_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


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
    q = _for_kernel(q, how)
    out, lse = _pair(how, q, k, v, causal).forward(q, k, v, causal, scale)
    return _cut(out.transpose(1, 2), size), lse


def cuda_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    how = way(q.dtype, max(q.shape[-1], v.shape[-1]))
    heads = _for_kernel(q, how), _for_kernel(k, how, q.shape[2]), _for_kernel(v, how, q.shape[2])
    backward = _pair(how, *heads, causal).backward
    found = backward(_for_kernel(dy, how), *heads, _for_kernel(out, how), logsumexp, causal, scale)
    dq, dk, dv = (_cut(g.transpose(1, 2), t.shape[-1]) for g, t in zip(found, (q, k, v), strict=True))
    return dq, _sum_groups(dk, k.shape[2]), _sum_groups(dv, k.shape[2])


def _pair(how: Way, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Pair:
    return WAYS["cudnn" if how.kernel == "flash" and cudnn_serves(q, k, v, causal) else how.kernel]


def flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, window: int, scale: float, max_seqlen: int = 0
) -> tuple[Tensor, Tensor]:
    """Flash attention on CUDA with a window (0: none), or over one row of packed sequences, bounded by `cu_seqlens`, of which none
    is longer than `max_seqlen` (0: unknown): the kernel has blocks for so many rows of each sequence, and leaves others
    unwritten."""
    how, longest = way(q.dtype, max(q.shape[-1], v.shape[-1])), _longest(q, k, max_seqlen)
    parts, ends = [_packed(t, how, cu_seqlens) for t in (q, k, v)], _ends(cu_seqlens, q, k)
    out, lse, *_ = _aten._flash_attention_forward.default(
        *parts, *ends, *longest, 0.0, causal, False, scale=scale, **_sides(window)
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
    max_seqlen: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    how, longest = way(q.dtype, max(q.shape[-1], v.shape[-1])), _longest(q, k, max_seqlen)
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


def _longest(q: Tensor, k: Tensor, max_seqlen: int) -> tuple[int, int]:
    """How many rows of q and of k a sequence has at most."""
    return (min(q.shape[1], max_seqlen), min(k.shape[1], max_seqlen)) if max_seqlen else (q.shape[1], k.shape[1])


def _none_longer(cu_seqlens: Tensor, rows: int, max_seqlen: int) -> None:
    """A device checks by itself that no sequence is longer, nor the rows after the last."""
    lengths = to_the_last(cu_seqlens, rows).diff()
    torch._assert_async((lengths <= max_seqlen).all(), f"attention: x.3 (cu_seqlens) must be of sequences up to {max_seqlen} long")


def _sides(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _packed(t: Tensor, how: Way, cu_seqlens: Tensor | None) -> Tensor:
    """[B, T, H, D] as [B, T, H, size], or as [T, H, size] for packed sequences."""
    t = _for_kernel(t, how).transpose(1, 2)
    return t if cu_seqlens is None else t.squeeze(0)


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
    if tracing():
        return t.storage_offset() * t.itemsize % VECTOR == 0 and _strides_in_vectors(t.shape, t.stride(), t.itemsize)
    return t.data_ptr() % VECTOR == 0 and _known_strides(t.shape, t.stride(), t.itemsize)


def _strides_in_vectors(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    *outer, last = zip(shape, strides, strict=True)
    return last[1] == 1 and all([s * size % VECTOR == 0 and (s > 0 or n == 1) for n, s in outer])


_known_strides = functools.lru_cache(maxsize=4096)(_strides_in_vectors)  # not for a tracer's sizes, which have no hash


def _cut(t: Tensor, size: int) -> Tensor:
    return t if t.shape[-1] == size else t.narrow(-1, 0, size).clone(memory_format=torch.contiguous_format)


def _sum_groups(t: Tensor, heads: int) -> Tensor:
    """[B, S, H, D] summed over each group of query heads to [B, S, heads, D]."""
    if t.shape[2] == heads:
        return t
    return t.unflatten(2, (heads, t.shape[2] // heads)).sum(3)


def attend_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    score: Score,
    chunk: int = 0,
    max_seqlen: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute y, and logsumexp in the layout of the kernel that made it: [B, H, T], or longer. `chunk`: the length of the chunks
    that rows see alone (0: none), without a bias. `max_seqlen`: of packed sequences (0: not known)."""
    if select.chosen_anywhere and (found := select.choice()[2]) is not None:
        require_plain("attention_fwd", q, bias, score.softcap)
        if by_triton(q):
            body, how = launched_body(attention_fwd.kernel), (score.window, score.alibi, chunk, cu_seqlens)
            return body(q, k, v, score.causal, score.scale, *how)  # type: ignore[no-any-return]
        return block_fwd(found, q, k, v, cu_seqlens, score, chunk)
    if chunk and cu_seqlens is not None:
        cu_seqlens, max_seqlen = once(chunk_starts, cu_seqlens, k.shape[1], chunk), chunk
    elif chunk:
        return _chunked_fwd(q, k, v, score, chunk)
    served = _served(q, k, v, bias, cu_seqlens, score)
    if served == "library":
        return attention_fwd(q, k, v, score.causal, score.scale)  # type: ignore[no-any-return]
    if served == "flash":
        if max_seqlen and not chunk and cu_seqlens is not None:
            _none_longer(cu_seqlens, k.shape[1], max_seqlen)
        return flash_fwd(q, k, v, cu_seqlens, score.causal, score.window, score.scale, max_seqlen)
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
    chunk: int = 0,
    max_seqlen: int = 0,
) -> Gradients:
    """Compute dq, dk, dv and, if `wants_bias`, dbias."""
    if select.chosen_anywhere and (found := select.choice()[2]) is not None:
        require_plain("attention_dgrad", q, bias, score.softcap)
        if by_triton(q):
            body, how = launched_body(attention_bwd.kernel), (score.window, score.alibi, chunk, cu_seqlens)
            return *body(dy, q, k, v, y, lse, score.causal, score.scale, *how), None
        return *block_bwd(found, dy, q, k, v, cu_seqlens, y, lse, score, chunk), None
    if chunk and cu_seqlens is not None:
        cu_seqlens, max_seqlen = once(chunk_starts, cu_seqlens, k.shape[1], chunk), chunk
    elif chunk:
        return *chunked_bwd(dy, q, k, v, y, lse, score, chunk), None
    served = _served(q, k, v, bias, cu_seqlens, score)
    if served == "library":
        return *attention_bwd(dy, q, k, v, y, lse, score.causal, score.scale), None
    if served == "flash":
        return *flash_bwd(dy, q, k, v, cu_seqlens, y, lse, score.causal, score.window, score.scale, max_seqlen), None
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


class _Chunks(NamedTuple):
    """Rows and keys of a number of whole chunks, or of a part of one."""

    rows: slice
    keys: slice
    number: int


def _chunks(rows: int, keys: int, chunk: int) -> list[_Chunks]:
    """Split causal attention, in which the last row is at the last key, into the rest of the first row's chunk, whole chunks, and
    the first part of another; the keys of chunks before are left out."""
    before = at = keys - rows
    found = []
    if at % chunk:
        stop = min(keys, at - at % chunk + chunk)
        found.append(_Chunks(slice(0, stop - before), slice(at - at % chunk, stop), 1))
        at = stop
    whole = (keys - at) // chunk
    for count, stop in ((whole, at + whole * chunk), (1, keys)):
        if stop > at:
            found.append(_Chunks(slice(at - before, stop - before), slice(at, stop), count))
            at = stop
    return found


def _apart(t: Tensor, at: slice, count: int) -> Tensor:
    """Rows of [B, T, H, D] as [B count, T / count, H, D]: chunks become batches."""
    t = t[:, at]
    return t if count == 1 else t.unflatten(1, (count, -1)).flatten(0, 1)


def _together(parts: list[Tensor], counts: list[int]) -> Tensor:
    """The reverse of `_apart`: [B, T, H, D] of all parts."""
    found = [t if n == 1 else t.unflatten(0, (-1, n)).flatten(1, 2) for t, n in zip(parts, counts, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _chunked_fwd(q: Tensor, k: Tensor, v: Tensor, score: Score, chunk: int) -> tuple[Tensor, Tensor]:
    pieces = _chunks(q.shape[1], k.shape[1], chunk)
    if not pieces or nothing_to_see(q, k) or q.shape[1] == k.shape[1] <= chunk:
        return attend_fwd(q, k, v, None, None, score)
    ys, lses, counts = [], [], [one.number for one in pieces]
    for rows, keys, n in pieces:
        part = _apart(q, rows, n)
        y, lse = attend_fwd(part, _apart(k, keys, n), _apart(v, keys, n), None, None, score)
        ys.append(y)
        lses.append(lse[..., : part.shape[1]].transpose(1, 2))
    return _together(ys, counts), _together(lses, counts).transpose(1, 2).contiguous()


def chunked_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, score: Score, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    pieces = _chunks(q.shape[1], k.shape[1], chunk)
    if not pieces or nothing_to_see(q, k) or q.shape[1] == k.shape[1] <= chunk:
        return attend_bwd(dy, q, k, v, None, None, y, lse, score, False)[:3]
    of_rows, grads, counts = lse.transpose(1, 2), [], [one.number for one in pieces]
    for rows, keys, n in pieces:
        d, part, out, logsumexp = (_apart(t, rows, n) for t in (dy, q, y, of_rows))
        given = _apart(k, keys, n), _apart(v, keys, n), None, None, out, logsumexp.transpose(1, 2).contiguous()
        grads.append(attend_bwd(d, part, *given, score, False)[:3])
    dq, dk, dv = (_together(list(parts), counts) for parts in zip(*grads, strict=True))
    unseen = pieces[0].keys.start
    if unseen:
        dk, dv = (torch.nn.functional.pad(t, (0, 0, 0, 0, unseen, 0)) for t in (dk, dv))
    return dq, dk, dv


def chunk_starts(cu_seqlens: Tensor, rows: int, chunk: int) -> Tensor:
    """The starts of the chunks of packed sequences, as cu_seqlens: as many as there can be, of which the last are the end."""
    starts, at = to_the_last(cu_seqlens, rows), torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    first = (at - starts[sequence_of(cu_seqlens, rows)]) % chunk == 0
    number, count = first.cumsum(0) - 1, cu_seqlens.shape[0] + rows // chunk + 1
    found = torch.full((count + 1,), rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return found.scatter_(0, torch.where(first, number, count), torch.where(first, at, rows))
