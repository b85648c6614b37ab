"""Communication over an axis: torch's functional collectives, which return a tensor at once, and wait for it when told to.

Before `wait` the result of a `start_*` must not be read, and its argument must not be written to. The other functions start and
wait. On an axis of size 1 each returns x itself. Sums are over the ranks; parts are along dimension 0, or `dim`.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from funcops.distributed.mesh import Axis
from funcops.engine.backend.declare import tracing, watched
from funcops.engine.errors import fail

if torch.distributed.is_available():
    import torch.distributed._functional_collectives  # noqa: F401  registers their meta kernels

ops: Any = torch.ops._c10d_functional


def _group(x: Tensor, axis: Axis) -> str:
    """The name of the axis's process group. An axis of an abstract mesh has none, and only a tracer, or values on the meta device,
    pass it."""
    if axis.group.endswith("]") and not watched() and not x.is_meta:
        wanted = "of a mesh of processes (Mesh.of, or funcops.testing.run_ranks for threads)"
        fail("dist", "axis", wanted, f"{axis} of Mesh.abstract, which is traced and not run", RuntimeError)
    return axis.group


_sent: Any = WeakTensorKeyDictionary()  # what is sent, by what will arrive, of each collective that a GPU's streams order
_in_flight: dict[str, tuple[Tensor, Any]] = {}  # of each Gloo group, what was started last and is not waited for yet, and by what
# what Gloo says when another rank does not answer; its other errors, as of a dtype that it cannot send, stay
_NO_ANSWER = re.compile(r"clos|reset|refused|broken pipe|time.?out|timed out|unreachable", re.I)


def _reached(op: Any, axis: Axis, call: Any, *args: Any) -> Tensor:
    """Call a part of a collective; if another rank does not answer, say over which axis, and what to do."""
    try:
        return call(*args)  # type: ignore[no-any-return]
    except RuntimeError as error:
        if not _NO_ANSWER.search(str(error)):
            raise
        name = op.__name__.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")
        hint = (
            f"on rank {axis.rank} of it ({str(error).strip()}). One has ended, or is late: look for the first error among the "
            "ranks; compare their steps by dist.handshake; a longer wait is Mesh.of(..., timeout=)"
        )
        raise RuntimeError(f"{name} over {axis} must be called by all its ranks, got no answer {hint}") from error


def _start(op: Any, x: Tensor, axis: Axis, *args: Any) -> Tensor:
    """Start a collective. Gloo runs two of a group in two threads, which corrupt the heap: with torch 2.13 and 2.14 processes abort
    or hang. So on a CPU the one before is waited for; other groups run beside it."""
    group = _group(x, axis)
    if x.is_cuda and not tracing():
        sent = x.contiguous()
        found = op(sent, *args, group)
        _sent[found] = sent
        return found  # type: ignore[no-any-return]
    if x.device.type != "cpu" or group.endswith("]") or tracing():
        return op(x.contiguous(), *args, group)  # type: ignore[no-any-return]
    if (before := _in_flight.pop(group, None)) is not None:
        _reached(before[1], axis, ops.wait_tensor, before[0])
    found = _reached(op, axis, op, x.contiguous(), *args, group)
    _in_flight[group] = found, op
    return found


def wait(t: Tensor, axis: Axis) -> Tensor:
    """Wait for a started tensor, and return it. On CUDA the current stream waits, which need not be the one that started: the
    memory of both tensors belongs to the starting stream, which would reuse it, once it is freed, without waiting for the
    communication, or for what this stream does with the result. `record_stream` does nothing if the streams are the same."""
    if axis.size == 1:
        return t
    if t.is_cuda and not tracing():
        sent, stream = _sent.pop(t, t), torch.cuda.current_stream(t.device)
        found = ops.wait_tensor(t)
        for one in (sent, t):
            one.record_stream(stream)
        return found  # type: ignore[no-any-return]
    last = _in_flight.get(axis.group)
    if last is not None and last[0] is t:
        del _in_flight[axis.group]
        return _reached(last[1], axis, ops.wait_tensor, t)
    return ops.wait_tensor(t)  # type: ignore[no-any-return]


def start_gather(x: Tensor, axis: Axis) -> Tensor:
    """[m, *] -> [n m, *]: the x of all ranks, one after the other."""
    return x if axis.size == 1 else _start(ops.all_gather_into_tensor, x, axis, axis.size)


def start_scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    """[n m, *] -> [m, *]: this rank's part of the sum of x."""
    return x if axis.size == 1 else _start(ops.reduce_scatter_tensor, x, axis, "sum", axis.size)


def start_sum(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x."""
    return x if axis.size == 1 else _start(ops.all_reduce, x, axis, "sum")


def largest(amaxes: Tensor, axis: Axis) -> Tensor:
    """The elementwise maximum over the ranks, of float32 without a sign. It compares bits, which order as the numbers do, with NaN
    the largest: Gloo's own maximum of floats may drop a NaN."""
    if axis.size == 1:
        return amaxes
    return wait(_start(ops.all_reduce, amaxes.contiguous().view(torch.int32), axis, "max"), axis).view(torch.float32)


Parts = tuple[list[int], list[int]]  # rows for each rank, and from each; lists of one number: not known, at most so many in all


def start_all_to_all(x: Tensor, axis: Axis, parts: Parts | None = None) -> Tensor:
    """[N, *] -> [R, *]: part i of this rank goes to rank i, and becomes part `rank` there. Without `parts` all have one size."""
    sends, receives = parts or ([x.shape[0] // axis.size] * axis.size,) * 2
    return x if axis.size == 1 else _start(ops.all_to_all_single, x, axis, receives, sends)


def start_shift(x: Tensor, axis: Axis, by: int) -> Tensor:
    """[*] -> [1, *]: the x of the rank that is `by` before this one, cyclically."""
    if axis.size == 1:
        return x[None]
    sent, came = [0] * axis.size, [0] * axis.size
    sent[(axis.rank + by) % axis.size] = came[(axis.rank - by) % axis.size] = 1
    return _start(ops.all_to_all_single, x[None], axis, came, sent)


def gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    return x if axis.size == 1 else _back(wait(start_gather(_first(x, dim), axis), axis), dim)


def scatter_sum(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    return x if axis.size == 1 else _back(wait(start_scatter_sum(_first(x, dim), axis), axis), dim)


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    return wait(start_sum(x, axis), axis)


def place(axis: Axis, t: Tensor) -> int:
    """This rank's position, to take its part of `t`; 0 on the meta device, where all parts are alike: a step that reads no rank is
    recorded once for all of them."""
    return 0 if t.is_meta else axis.rank


def own_slice(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's part of x, a view."""
    if axis.size == 1:
        return x
    length = x.shape[dim] // axis.size
    return x.narrow(dim, place(axis, x) * length, length)


def all_to_all(x: Tensor, axis: Axis, split: int, cat: int) -> Tensor:
    """Send parts along `split`, and concatenate the received parts along `cat`."""
    if axis.size == 1:
        return x
    came = wait(start_all_to_all(_first(x, split), axis), axis)
    return torch.cat([part.movedim(0, split) for part in came.chunk(axis.size)], cat)


def shift(x: Tensor, axis: Axis, by: int) -> Tensor:
    return x if by % axis.size == 0 else wait(start_shift(x, axis, by), axis)[0]


def all_bytes(data: bytes, axis: Axis, device: str) -> list[bytes]:
    """Gather the bytes of all ranks."""
    if axis.size == 1:
        return [data]
    lengths = gather(torch.tensor([len(data)], device=device), axis).tolist()
    if not max(lengths):
        return [b""] * axis.size
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
    found = gather(padded.to(device), axis).cpu().reshape(axis.size, -1)
    return [row[:length].numpy().tobytes() for row, length in zip(found, lengths, strict=True)]


def _first(x: Tensor, dim: int) -> Tensor:
    return x if dim == 0 else x.movedim(dim, 0)


def _back(t: Tensor, dim: int) -> Tensor:
    return t if dim == 0 else t.movedim(0, dim).contiguous()
