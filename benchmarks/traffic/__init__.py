"""Bytes that the memory-bound kernels move, over the minimum, and the quality of their code, without a GPU.

python -m benchmarks traffic --csv FILE                       counts all
python -m benchmarks traffic --changed FILE --csv FILE        counts only what FILE, an earlier table, lacks
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from triton import knobs

from benchmarks.measure import BenchError
from benchmarks.traffic import peers
from benchmarks.traffic.assembly import Quality, quality
from benchmarks.traffic.calls import RequestedLaunch, fingerprint_of, intercepted
from benchmarks.traffic.count import Counted, count, total
from benchmarks.traffic.functions import FORWARD, function_of
from benchmarks.traffic.limits import why
from benchmarks.traffic.ours import Case, cases, plan

PROGRAMS, MANY = 4, {"embedding_wgrad": 96, "embedding_wgrad_into": 96}  # to sample; more if their work depends on ids


def _liger(case: Case) -> Peer | None:
    if not peers.has_liger(case):
        return None
    return peers.liger_version(), lambda: peers.liger_call(case)


def _inductor(case: Case) -> Peer | None:
    function = function_of(case)
    if function is None:
        return None

    def made() -> Callable[[], Any]:
        from benchmarks.traffic.inductor import captured

        graphs = captured(function.f, function.inputs, function.graphs != FORWARD)[function.graphs]
        runs = [graph.runner(function.below) for graph in graphs]
        return lambda: [run() for run in runs]

    return f"torch {torch.__version__.partition('+')[0]}", made


Peer = tuple[str | None, Callable[[], Callable[[], Any]]]  # the version, None if not installed, and what makes the call
PEERS: dict[str, Callable[[Case], Peer | None]] = {"liger": _liger, "inductor": _inductor}
PROVIDERS = tuple(PEERS)


class Traffic(NamedTuple):
    """All launches of a kernel, as a training step calls it. Bytes moved (`ratio`), requested (`asked`) and moved in whole sectors
    of 32 bytes (`sectors`), over the minimum, inputs and outputs once. `launches` names the launches, and torch's operators between
    them; `resident` says for each launch how many programs a multiprocessor holds. Registers, warps, spills, `wide` (the share of
    bytes in accesses of 128 bits) and `per_byte` (instructions for each byte moved) are of the launch that moves most. `hash`: a
    hash of the counted source."""

    kernel: str
    shape: str
    dtype: str
    provider: str
    ratio: float
    asked: float
    sectors: float
    wide: float
    per_byte: float
    registers: int
    warps: int
    spills: int
    why: str
    launches: str
    resident: str
    hash: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="only kernels whose names contain this")
    parser.add_argument(
        "--providers", nargs="*", choices=PROVIDERS, default=PROVIDERS, help="beside ours; default: all that are installed"
    )
    parser.add_argument("--changed", metavar="FILE", help="count only kernels whose row in this table is missing or outdated")


def run(only: str = "", changed: str | None = None, providers: Sequence[str] = PROVIDERS) -> Iterator[Traffic] | list[Traffic]:
    """The rows, each as soon as it is counted: for each kernel the other libraries' rows first, then ours, with the reasons for
    limits that it exceeds. With an earlier table also its rows for kernels and providers that were not selected, and all rows at
    once, so that an interrupted run leaves that table complete."""
    if knobs.runtime.interpret:
        raise BenchError("bench traffic: TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it")
    if next(cases(torch.bfloat16, "meta", lambda name, _: only in name), None) is None:
        raise BenchError(f"bench traffic: --only must be part of a kernel's name, got {only!r}")
    known = {} if changed is None else {key_of(row): row for row in read(changed)}
    found = _rows(only, known, providers)
    if changed is None:
        return found
    place = {key: i for i, key in enumerate(known)}
    return sorted(found, key=lambda row: place.get(key_of(row), len(place)))


def key_of(row: Traffic) -> tuple[str, str, str]:
    return row.kernel, row.shape, row.provider


def _rows(only: str, known: dict[tuple[str, str, str], Traffic], providers: Sequence[str]) -> Iterator[Traffic]:
    yield from (row for row in known.values() if only not in row.kernel)

    def held(case: Case, provider: str, source: str | None) -> Traffic | None:
        """The earlier row, if it was counted from this source; for a library that is not installed, the earlier row in any case."""
        row = known.get((*case[:2], provider))
        return row if row is not None and source in (row.hash, None) else None

    fresh = 0
    for case in cases(torch.bfloat16, "cpu", lambda name, _: only in name):
        others: list[Traffic] = []
        for provider in PROVIDERS:
            if provider not in providers:
                others += filter(None, [known.get((*case[:2], provider))])
            elif (peer := PEERS[provider](case)) is not None:
                version, made = peer
                row = held(case, provider, version)
                others.append(row or other(case, provider, version, made))
                fresh += row is None
        yield from others
        source = fingerprint_of(plan(case))
        row = held(case, "funcops", source)
        fresh += row is None
        row = row or counted(case, "funcops", source)
        yield row._replace(why=why(row, others))
    print(f"bench traffic: {fresh} counted, the others unchanged", file=sys.stderr)


def other(case: Case, provider: str, version: str | None, made: Callable[[], Callable[[], Any]]) -> Traffic:
    """A row of another library; if its call fails, the row says why."""
    try:
        if version is None:
            raise BenchError("not installed")
        return counted(case._replace(run=made()), provider, version)
    except Exception as error:  # a rival that lacks a case must not end the bench
        line = str(error) if isinstance(error, BenchError) else f"failed: {type(error).__name__}: {error}".splitlines()[0][:120]
        nothing = (math.nan,) * 5
        return Traffic(case.name, case.shape, "bf16", provider, *nothing, 0, 0, 0, line, "", "", version or "")


def counted(case: Case, provider: str, source: str) -> Traffic:
    built: list[Quality] = []

    def build(call: RequestedLaunch) -> Any:
        compiled = call.run()
        built.append(quality(compiled))
        return compiled

    with intercepted(build):
        case.run()
    return row_of(case, provider, built, source)


def row_of(case: Case, provider: str, built: list[Quality], source: str) -> Traffic:
    residents = [found.resident for found in built]
    parts = recount(case, residents)
    asked, moved, sectors = (round(size / case.least, 4) for size in total(parts))
    launches = [one for one in parts if one.lines]
    main = max(range(len(launches)), key=lambda i: launches[i].bytes.moved)
    found, most = built[main], launches[main]
    again = most.bytes.asked / most.bytes.moved
    return Traffic(
        case.name,
        case.shape,
        "bf16",
        provider,
        moved,
        asked,
        sectors,
        round(wide(found, most), 3),
        round(found.per_byte * again, 2),
        found.registers,
        found.warps,
        max(one.spills for one in built),
        "",
        " + ".join(one.name for one in parts),
        " + ".join(map(str, residents)),
        source,
    )


def wide(found: Quality, launch: Counted) -> float:
    """The share of 128-bit accesses in the bytes that a launch requests, by source line. (Accesses that the compiler moved to
    another line are left out.)"""
    lines = {line: size for line, size in (launch.lines or {}).items() if line in found.widths}
    return sum(size * found.widths[line] for line, size in lines.items()) / sum(lines.values()) if lines else math.nan


def recount(case: Case, residents: list[int]) -> list[Counted]:
    return count(case.run, case.args, residents, MANY.get(case.name, PROGRAMS))


def read(path: str) -> list[Traffic]:
    """The rows of a table."""
    kinds = get_type_hints(Traffic)
    try:
        with open(path, newline="") as file:
            return [Traffic(**{name: kinds[name](row[name]) for name in kinds}) for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"bench traffic: {path} must be a table of `bench traffic`: {error!r}") from error
