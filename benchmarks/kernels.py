"""Every kernel on this GPU: ours with default settings, our own matrix products ("triton") even where the table prefers the
library's, torch eager, torch.compile, and Liger-Kernel if it imports; torch's attention by two of its kernels.

Rates count the compulsory bytes, each argument read once and each result written once, as a share of the best that torch's copy,
scale or sum reaches in the same process; matrix products as a share of cuBLAS's bare product in the same rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.device import COLD_BYTES, MOST_COPIES, CudaTimer, Replay
from benchmarks.kernel_calls import KernelCall, Maker, Prepared, direct, measured_families
from benchmarks.launches import Listed, listed
from benchmarks.liger import liger_call, write_liger_csv
from benchmarks.measure import NoDevice, machine
from benchmarks.plot import draw
from benchmarks.rows import device_of, rows_of
from funcops.engine.backend import backend, gemm
from funcops.engine.errors import short
from funcops.engine.trees import leaves, nbytes, tree_map
from funcops.library.kernels import grouped, grouped_scaled

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NOT_MEASURED: Any = (math.nan,) * 9
PROVIDERS = ("funcops", "triton", "torch", "torch.compile", "liger", "cublas", "flash", "cudnn", "funcops_cudnn")
ORDER = (  # in which kernels are measured: what a user runs by default comes first
    *("adamw", "*norm_[fb]wd*", "cross_entropy_*", "attention_*", "slot_*", "scored_*", "experts_*", "route_*", "grouped_*"),
    *("*quantize*", "*"),
)
BATCH = 32  # calls that are compiled before the first of them is measured


class Measured(NamedTuple):
    """`error`: our error relative to float64 in the Euclidean norm. A rate that is meaningless for a row is NaN. `launches`: the
    fingerprints of the kernels that the call launches, on sm_90."""

    kernel: str
    shape: str
    dtype: str
    provider: str
    device_us: float
    host_us: float
    gb_per_s: float
    of_copy: float
    tflop_per_s: float
    of_cublas: float
    peak_mib: float
    delta_mib: float
    error: float
    note: str
    launches: str = ""


class Part(NamedTuple):
    """The calls of a family that are to be measured one after another, by their place in it."""

    dtype: str
    family: int
    calls: dict[int, Listed]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="only kernels whose names contain this")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: bf16")
    parser.add_argument("--providers", choices=PROVIDERS, nargs="+", default=PROVIDERS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no call after this; name those left out")
    parser.add_argument("--changed", metavar="FILE", help="measure only what FILE, an earlier --json, lacks; copy its other rows")
    parser.add_argument("--jobs", type=int, default=0, help="first compile our kernels in so many processes (default: %(default)s)")
    parser.add_argument("--liger-csv", metavar="FILE", help="also write the times under Liger-Kernel's columns")
    parser.add_argument("--plot", metavar="FILE", help="also draw the rates (PNG or SVG)")


def run(
    only: str = "",
    dtype: list[str] | None = None,
    providers: tuple[str, ...] = PROVIDERS,
    seconds: float = math.inf,
    changed: str | None = None,
    jobs: int = 0,
    liger_csv: str | None = None,
    plot: str | None = None,
) -> Iterator[list[Measured]]:
    """The rows of a call as soon as it is measured, after the rows of `changed` that are still valid."""
    stop = time.monotonic() + seconds
    if not torch.cuda.is_available():
        raise NoDevice("bench kernels: no CUDA device here; `bench aot` compiles every kernel without one")
    rows, parts = planned(only, dtype or ["bf16"], [] if changed is None else earlier_rows(changed))
    if rows:
        yield list(rows)
    timer, left = CudaTimer(), list[str]()
    copy_rate = measured_copy_rate(timer)
    with compiling(jobs) as compile_ahead:
        for batch in batches(parts):
            if time.monotonic() <= stop:
                compile_ahead(batch, providers)
            for name, one, call in ((part.dtype, *given) for part in batch for given in made(part, stop)):
                if call is None:
                    left.append(f"{one.kernel} {one.shape} {name}")
                    continue
                if isinstance(call, Exception):
                    found = [failed(one, DTYPES[name], "funcops", call)]
                else:
                    found = list(measure(call, DTYPES[name], providers, timer, copy_rate))
                rows += (new := [row._replace(launches=one.launches) for row in found])
                yield new  # a call's rows at once: `planned` takes a call with any row for known
    if liger_csv:
        write_liger_csv(liger_csv, rows)
    if left:
        say(f"out of time, not measured: {', '.join(left)}")
    if plot:
        draw(plot, rows)


def say(line: str) -> None:
    print(f"bench kernels: {line}", file=sys.stderr, flush=True)


def earlier_rows(file: str) -> list[Measured]:
    """The rows of a file, if it is of this device: figures of two devices do not belong in one file."""
    of, here = device_of(file), machine()["device"]
    if of not in (None, here):
        say(f"{file} is of {of}, this device is {here}: its rows are not copied")
        return []
    return [Measured(**row) for row in rows_of(file)]


def planned(only: str, dtypes: list[str], earlier: list[Measured]) -> tuple[list[Measured], list[Part]]:
    """The earlier rows that are still valid, as the same launches ran, and the calls that they lack: the first call of each kernel
    that has no such row, then the others, both in `ORDER`."""
    known = {_key(row) for row in earlier if row.launches and not row.note.startswith("failed")}
    valid, parts = set(), []
    for name in dtypes:
        keys = [(one.kernel, one.shape, short(DTYPES[name]), one.launches) for one in listed(DTYPES[name])]
        ran = {key[0] for key in keys if key in known}
        lacking: dict[tuple[bool, int, int], dict[int, Listed]] = {}
        places: dict[int, int] = {}
        for one, key in zip(listed(DTYPES[name]), keys, strict=True):
            place = places[one.family] = places.get(one.family, -1) + 1
            if key in known:
                valid.add(key)
            elif only in one.kernel:
                lacking.setdefault((one.kernel in ran, rank(one.kernel), one.family), {})[place] = one
                ran.add(one.kernel)
        parts += [Part(name, where[-1], lacking[where]) for where in sorted(lacking)]
    return [row for row in earlier if _key(row) in valid], parts


def rank(kernel: str) -> int:
    """The place of a kernel in `ORDER`."""
    return next(i for i, pattern in enumerate(ORDER) if fnmatch.fnmatchcase(kernel, pattern))


def _key(row: Measured) -> tuple[str, str, str, str]:
    return row.kernel, row.shape, row.dtype, row.launches


def batches(parts: list[Part]) -> Iterator[list[Part]]:
    """The parts in turn, so many at a time that all processes have calls to compile."""
    batch: list[Part] = []
    for part in parts:
        batch.append(part)
        if sum(len(one.calls) for one in batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def made(part: Part, stop: float = math.inf) -> Iterator[tuple[Listed, KernelCall | Exception | None]]:
    """The calls of a part, one by one. If the device cannot hold one, it and the rest of the family are errors; without time for
    one, it and the rest are None."""
    left = dict(part.calls)
    try:
        for place, call in enumerate(measured_families()[part.family](Maker("cuda", DTYPES[part.dtype]))):
            if time.monotonic() > stop:
                break
            if place in left:
                yield left.pop(place), call
            if not left:
                break
        yield from ((one, None) for one in left.values())
    except Exception as error:
        yield from ((one, error) for one in left.values())
        gc.collect()  # the error holds the frames, and so the tensors, of what was being made
    torch.cuda.empty_cache()


@contextlib.contextmanager
def compiling(jobs: int) -> Iterator[Callable[[list[Part], tuple[str, ...]], None]]:
    """Return a function that fills Triton's disk cache for some parts: so many processes share out their calls and run each once,
    while nothing is measured. With 0 jobs it does nothing."""
    if not jobs:
        yield lambda parts, providers: None
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:

        def ahead(parts: list[Part], providers: tuple[str, ...]) -> None:
            calls = [part._replace(calls={place: one}) for part in parts for place, one in part.calls.items()]
            with contextlib.suppress(BrokenExecutor):  # by a process that died: what it ran is measured, or fails, without it
                wait([pool.submit(_run_once, call, providers) for call in calls])

        yield ahead


def _run_once(part: Part, providers: tuple[str, ...]) -> None:
    for _, call in made(part):
        if call is None or isinstance(call, Exception):
            continue  # the bench says what fails
        for provider, prepare in provided(call).items():
            if prepare is not None and provider in providers and provider in ("funcops", "triton"):
                with contextlib.suppress(Exception), using(provider):
                    prepare(*call.args)()


def measured_copy_rate(timer: Any, count: int = 2**28) -> float:
    """Bytes read and written per second by torch's fastest way over tensors of so many floats: a copy, a scale, or a sum."""
    source, other, target = (torch.randn(count, device="cuda") for _ in range(3))
    ways: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (2, lambda: target.copy_(source)),
        "scale": (2, lambda: torch.mul(source, 0.5, out=target)),
        "add": (3, lambda: torch.add(source, other, out=target)),
    }
    times = timer.device_us({name: timer.replay([call]) for name, (_, call) in ways.items()})
    return max(tensors * source.nbytes / times[name] * 1e6 for name, (tensors, _) in ways.items())


@contextlib.contextmanager
def using(provider: str) -> Iterator[None]:
    """Use our kernels only for our own providers, as the torch bodies of some kernels call other kernels."""
    with backend("triton" if provider in ("funcops", "triton") else "torch"), gemm("triton" if provider == "triton" else "auto"):
        yield


def measure(call: KernelCall, dtype: torch.dtype, providers: tuple[str, ...], timer: Any, copy_rate: float) -> Iterator[Measured]:
    """A row for each provider that has this kernel; if a provider fails anywhere, its row has the reason."""
    named = Listed(0, call.name, call.shape, "")
    read = nbytes(call.args)
    calls: dict[str, Callable[[], Any]] = {}
    replays: dict[str, Replay] = {}
    for name, prepare in provided(call).items():
        if prepare is None or name not in providers:
            continue
        try:
            with torch.cuda.stream(timer.stream), using(name):
                own = min(MOST_COPIES, COLD_BYTES // max(1, read))
                ready = [prepare(*args) for args in (call.args, *(clones(call.args) for _ in range(own)))]
                ready[0]()
            with using(name):
                replays[name], calls[name] = timer.replay(ready), ready[0]
        except Exception as error:  # a rival that lacks a case must not end the bench
            yield failed(named, dtype, name, error)
    replays = {name: one if one.captured else one._replace(run=_under(name, one.run)) for name, one in replays.items()}
    times, errors = _times(timer, replays)
    for name, error in errors.items():
        yield failed(named, dtype, name, error)
    moved = _moved(call) if times else math.nan
    for name, us in times.items():
        try:
            with using(name):
                rate = moved / us * 1e6 if name != "cublas" else math.nan
                peak, delta = timer.memory_mib(calls[name])
                off = relative_error(call) if name == "funcops" else math.nan
                yield Measured(
                    call.name,
                    call.shape,
                    short(dtype),
                    name,
                    us,
                    timer.host_us(calls[name]),
                    rate / 1e9,
                    rate / copy_rate,
                    call.flops / us / 1e6 if call.flops else math.nan,
                    times.get("cublas", math.nan) / us,
                    peak,
                    delta,
                    off,
                    "" if replays[name].captured else "not captured",
                )
        except Exception as error:
            yield failed(named, dtype, name, error)


def failed(call: Listed, dtype: torch.dtype, provider: str, error: Exception) -> Measured:
    lines = f"failed: {type(error).__name__}: {error}".splitlines()
    return Measured(call.kernel, call.shape, short(dtype), provider, *NOT_MEASURED, note=lines[0][:120], launches=call.launches)


def _under(provider: str, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with using(provider):
            call()

    return run


def _times(timer: Any, replays: dict[str, Replay]) -> tuple[dict[str, float], dict[str, Exception]]:
    """The device times of all providers, taking turns; if that fails, of each alone, with the errors of those that fail."""
    try:
        return timer.device_us(replays), {}
    except Exception:
        times: dict[str, float] = {}
        errors: dict[str, Exception] = {}
        for name, one in replays.items():
            try:
                times |= timer.device_us({name: one})
            except Exception as error:
                errors[name] = error
        return times, errors


def _moved(call: KernelCall) -> float:
    """The compulsory bytes: those that our kernel reads and writes, or, if it fails, its torch body."""
    for name in ("funcops", "torch"):
        with contextlib.suppress(Exception), using(name):
            return nbytes(call.args) + nbytes(call.kernel(*clones(call.args))) + written(call)
    return math.nan


def provided(call: KernelCall) -> dict[str, Prepared | None]:
    body = call.kernel.kernel.torch_impl

    def compiled(*args: Any) -> Callable[[], Any]:
        return direct(torch.compile(body, dynamic=False))(*args)

    return {
        "funcops": direct(call.kernel),
        "triton": direct(call.kernel) if call.product else None,
        "torch": call.torch or direct(body),
        "torch.compile": compiled,
        "liger": liger_call(call),
        "cublas": call.product,
        **dict(call.others),
    }


def written(call: KernelCall) -> int:
    """Bytes of the arguments that the kernel writes to."""
    return sum(nbytes(arg) for name, arg in call.named.items() if name in call.kernel.kernel.mutates)


def clones(args: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, args)


@contextlib.contextmanager
def by_groups() -> Iterator[None]:
    """Let torch bodies multiply each group's rows alone, with the groups' sizes read on the host. On a GPU they multiply all rows
    by every group's matrix otherwise: seconds in float64, for 128 groups."""
    modules: tuple[Any, ...] = (grouped, grouped_scaled)
    before = [(module, module.by_masks, module.wgrad_by_masks) for module in modules]
    for module in modules:
        module.by_masks, module.wgrad_by_masks = grouped.by_groups, grouped.wgrad_by_groups
    try:
        yield
    finally:
        for module, product, wgrad in before:
            module.by_masks, module.wgrad_by_masks = product, wgrad


def relative_error(call: KernelCall) -> float:
    """The error of the results and of the arguments written to, against the torch body's in float64. Partial sums are summed first,
    and codes decoded."""
    own = clones(call.args)
    # 0-d tensors are step counts, which torch's optimisers take only in float32
    exact = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() and t.dim() else t, own)
    got = call.kernel(*own)
    with by_groups():
        want = call.kernel.kernel.torch_impl(*exact)
    if call.kernel.kernel.mutates:
        got, want = (got, own), (want, exact)
    if call.values is not None:
        got, want = call.values(got), call.values(want)
    off = size = 0.0
    for a, b in zip(leaves(got), leaves(want), strict=True):
        if not isinstance(a, Tensor) or not a.is_floating_point():
            continue
        if a.shape != b.shape:
            a, b = a.double().sum(0), b.sum(0)
        off += float((a.double() - b).square().sum())
        size += float(b.square().sum())
    return math.sqrt(off / size) if size else math.sqrt(off)
