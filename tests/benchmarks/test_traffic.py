"""The committed table of bytes moved has every memory-bound kernel in its present source, within its limits; no GPU is needed."""

import importlib
import itertools
import math
import pkgutil
import random
import time
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from benchmarks import traffic  # noqa: E402
from benchmarks.measure import BenchError  # noqa: E402
from benchmarks.traffic import Traffic, read, recount  # noqa: E402
from benchmarks.traffic.assembly import BITS, Instruction, per_byte, resident, widths  # noqa: E402
from benchmarks.traffic.calls import fingerprint_of, intercepted  # noqa: E402
from benchmarks.traffic.count import count, total  # noqa: E402
from benchmarks.traffic.limits import REASONS, missed  # noqa: E402
from benchmarks.traffic.ours import cases, plan  # noqa: E402
from funcops.library.kernels import triton as triton_kernels  # noqa: E402

TABLE = Path(__file__).parents[2] / "docs" / "benchmarks" / "traffic.csv"
CHEAP = 60_000  # bytes that a program asks for


@pytest.fixture(scope="module")
def rows():
    return read(TABLE)


@pytest.fixture(scope="module")
def ours(rows):
    return {(row.kernel, row.shape): row for row in rows if row.provider == "funcops"}


@pytest.fixture(scope="module")
def planned():
    return {(case.name, case.shape): plan(case) for case in cases(torch.bfloat16, "meta")}


def test_the_table_holds_every_memory_bound_kernel_as_it_is(ours, planned):
    assert len(planned) > 100 and set(ours) == set(planned)
    changed = [key for key, calls in planned.items() if ours[key].hash != fingerprint_of(calls)]
    assert not changed, "run `make traffic`, which counts them again"


def test_counts_are_keyed_by_kernel_grid_constants_and_warps(planned):
    for calls in planned.values():
        call = calls[0]
        others = [
            call._replace(grid=(call.grid[0] + 1, *call.grid[1:])),
            call._replace(arguments={**call.arguments, next(reversed(call.arguments)): 77}),
            call._replace(options={**call.options, "num_warps": 64}),
        ]
        assert len({fingerprint_of([one, *calls[1:]]) for one in (call, *others)}) == 4


def beyond(rows):
    """Our rows beyond a limit without a reason, rows with a needless reason, and reasons that no row has."""
    wrong, used = [], set()
    for row in rows:
        if row.provider != "funcops":
            continue
        peers = [peer for peer in rows if peer.provider != "funcops" and (peer.kernel, peer.shape) == (row.kernel, row.shape)]
        limits = missed(row, peers)
        reasons = [next((reason for reason in REASONS if reason.fits(row, limit)), None) for limit in limits]
        used |= set(reasons)
        if None in reasons or row.why != "; ".join(reason.words for reason in reasons):
            wrong.append((row.kernel, row.shape, limits, row.why))
    return wrong, set(REASONS) - used


def test_every_row_is_within_the_limits_or_says_why(rows):
    assert beyond(rows) == ([], set())


@pytest.mark.turns("fault", every=2)
@pytest.mark.parametrize(
    "fault",
    [
        {"ratio": 3.9},
        {"wide": 0.4},
        {"per_byte": 19.0},
        {"spills": 9999},
        {"why": "no need"},
        {"ratio": math.nan},
        {"wide": math.nan},
        {"per_byte": math.nan},
    ],
    ids=str,
)
def test_a_row_beyond_a_limit_is_seen(rows, fault):
    clean = [i for i, row in enumerate(rows) if row.provider == "funcops" and not row.why]
    for i in random.Random(repr(fault)).sample(clean, 25):
        assert beyond([*rows[:i], rows[i]._replace(**fault)])[0], rows[i]


@pytest.mark.slow
def test_unrequested_rows_stay_where_they_are(rows, monkeypatch):
    counted = []
    for module in pkgutil.iter_modules(triton_kernels.__path__):  # a kernel that is imported below would be one that is compiled
        importlib.import_module(f"{triton_kernels.__name__}.{module.name}")
    monkeypatch.setattr(traffic.knobs.runtime, "interpret", False)
    monkeypatch.setattr(traffic, "cases", lambda dtype, device, wanted: (c for c in cases(dtype, "meta") if wanted(c.name, "")))
    monkeypatch.setattr(
        traffic, "counted", lambda case, provider, source: counted.append(case.name) or theirs[case[:2]]._replace(ratio=7.0)
    )
    theirs = {(row.kernel, row.shape): row for row in rows if row.provider == "funcops"}
    stale = [row._replace(hash="old") if row.kernel == "scale" and row.provider == "funcops" else row for row in rows]
    monkeypatch.setattr(traffic, "read", lambda path: stale)
    with pytest.raises(BenchError, match="--only must be part of a kernel's name, got 'scael'"):
        traffic.run(only="scael", changed="table.csv")
    found = traffic.run(only="scale", changed="table.csv", providers=())
    assert list(map(traffic.key_of, found)) == list(map(traffic.key_of, rows)) and set(counted) == {"scale"}
    assert {row.kernel for row, was in zip(found, rows, strict=True) if row.ratio != was.ratio} == {"scale"}


def test_others_are_counted_for_the_same_work(rows):
    others = [row for row in rows if row.provider != "funcops"]
    assert {row.provider for row in others} == {"liger", "inductor"} and len(others) > 100
    assert not [row for row in others if row.why]


def recounted(ours, drawn):
    for case in itertools.islice(cases(torch.bfloat16, "cpu", lambda *key: key in drawn), len(drawn)):
        row = ours[case.name, case.shape]
        found = total(recount(case, [int(n) for n in row.resident.split(" + ")]))
        got = [size / case.least for size in (found.moved, found.asked, found.sectors)]
        assert got == pytest.approx([row.ratio, row.asked, row.sectors], abs=2e-4), case[:2]


def per_program(row, calls, least):
    x, y, z = max((call.grid for call in calls), key=lambda grid: grid[0] * grid[1] * grid[2])
    return row.asked * least / (x * y * z)


@pytest.fixture(scope="module")
def cheap(ours, planned):
    sizes = {(case.name, case.shape): case.least for case in cases(torch.bfloat16, "meta")}
    return sorted(
        key for key, row in ours.items() if per_program(row, planned[key], sizes[key]) < CHEAP and "embedding" not in key[0]
    )


@pytest.mark.slow
def test_some_rows_are_counted_again(ours, cheap):
    recounted(ours, set(random.Random(int(time.time() // 86400)).sample(cheap, 1)))


@pytest.mark.slow
def test_more_rows_are_counted_again(ours, cheap):
    draw = random.Random(int(time.time() // 86400) + 1)
    recounted(ours, {*draw.sample(cheap, 8), *draw.sample(sorted(set(ours) - set(cheap)), 2)})


# The reader of assembly

PTX = """
	.loc	2 18 19                         // common.py:18:19 @[ norm.py:49:54 @[ norm.py:30:57 ] ]
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	@%p1 ld.global.L1::evict_last.v2.b32 { %r5, %r6 }, [ %rd2 + 0 ];
	.loc	1 37 24                         // norm.py:37:24
	@%p6 st.global.b16 [ %rd7 + 0 ], { %rs31 };
	.loc	1 40 10                         // norm.py:40:10
	cp.async.cg.shared.global [ %r6 + 0 ], [ %rd9 + 0 ], 0x10, %r7;
	.loc	1 41 10
	st.global.v8.b16 [ %rd7 + 0 ], { %rs1 };
"""
SASS = """
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   LDG.E R1, desc[UR8][R2.64] ;
.L_x_1:
        /*0020*/              @!P1 LDG.E.128 R8, desc[UR8][R18.64] ;
        /*0030*/                   FADD R8, R8, R9 ;
        /*0040*/                   STG.E.64 desc[UR8][R8.64], R26 ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   BRA `(.L_x_2);
        /*0080*/                   NOP;
"""


def test_widths_equal_the_kernels_own_lines():
    assert widths(PTX) == {30: 16 / 24, 37: 0.0, 40: 1.0, 0: 1.0}


def test_instructions_of_the_loop_with_accesses_are_counted():
    assert per_byte(SASS) == 4 / 24
    assert per_byte(SASS.replace("@P0 BRA", "FADD")) == 7 / 28, "without a loop, all instructions but the end count"


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "programs"),
    [(16, 1, 0, 32), (32, 4, 0, 16), (33, 4, 0, 12), (128, 16, 0, 1), (32, 32, 512, 2), (32, 4, 100_000, 2), (255, 16, 0, 1)],
)
def test_programs_that_a_multiprocessor_holds(registers, warps, shared, programs):
    assert resident(registers, warps, shared) == programs


# The counter, on kernels whose traffic is known


@triton.jit
def _twice(x_ptr, y_ptr, n, between, BLOCK: tl.constexpr):
    """Reads a block, then others, then that block again."""
    start = tl.program_id(0) * n
    i = start + tl.arange(0, BLOCK)
    total = tl.load(x_ptr + i)
    for k in range(1, between):
        total += tl.load(x_ptr + i + k * BLOCK)
    tl.store(y_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total + tl.load(x_ptr + i))


@triton.jit
def _masked(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i // 2, mask=i < n), mask=i < n)


@triton.jit
def _scalar_mask(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=(i >= 0) & (tl.program_id(0) < n)), mask=(i >= 0) & (tl.program_id(0) < n))


@triton.jit
def _strided(x_ptr, y_ptr, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i * stride))


@triton.jit
def _small(x_ptr, w_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK + i
    tl.store(x_ptr + at, tl.load(x_ptr + at) * tl.load(w_ptr + i))


@triton.jit
def _atomic(x_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), 1.0)


def bytes_of(kernel, grid, *args, resident=32, torch_call=lambda: None):
    def run():
        kernel[(grid,)](*args)
        torch_call()

    return total(count(run, args, [resident]))


def room(*shape):
    return torch.empty(shape, dtype=torch.float32)


@pytest.mark.parametrize("resident", [1, 4, 32])
@pytest.mark.parametrize("between", [1, 2, 8, 40, 120])
def test_a_block_is_moved_again_where_it_is_far(resident, between):
    block, programs = 1024, 300
    x, y = room(programs, between * block), room(programs, block)
    asked, moved, sectors = bytes_of(_twice, programs, x, y, between * block, between, block, resident=resident)
    far = (between - 1) * 4 * block > 25_000_000 // (132 * resident)
    assert asked == x.nbytes + 2 * y.nbytes
    assert moved == sectors == asked - (0 if far else y.nbytes)


def test_masked_lanes_repeated_lanes_and_sectors():
    n = 1024 * 2000
    x, y = room(n), room(n)
    assert bytes_of(_masked, 2000, x, y, n, 1024) == (1.5 * y.nbytes,) * 3
    assert bytes_of(_strided, 1000, x, y, 2, 1024) == (1000 * 8192, 1000 * 8192, 1000 * (4096 + 8192))
    partial = bytes_of(_masked, 2000, x, y, n // 2, 1024)
    assert partial.asked == pytest.approx(0.75 * y.nbytes, rel=0.01), "masked lanes ask for nothing"
    assert bytes_of(_scalar_mask, 2000, x, y, 0, 1024) == (0.0,) * 3, "a mask of scalars is a mask"


def test_small_tensors_move_once_atomics_twice_and_torch_counts():
    x, w = room(1000, 1024), room(1024)
    asked, moved, _ = bytes_of(_small, 1000, x, w, 1024)
    assert (asked, moved) == (3 * x.nbytes, 2 * x.nbytes + w.nbytes)
    assert bytes_of(_atomic, 1000, x, 1024).moved == 2 * x.nbytes
    views = bytes_of(_atomic, 1000, x, 1024, torch_call=lambda: (x.view(-1).t(), torch.empty_like(x), x.new_zeros(7)))
    assert views.moved == 2 * x.nbytes + 28
    assert bytes_of(_atomic, 1000, x, 1024, torch_call=lambda: x + x[:1]).moved == 4 * x.nbytes + w.nbytes


def test_every_launch_is_seen(planned):
    x, seen = room(10, 1024), []
    with intercepted(seen.append):
        for _ in range(3):
            _atomic[(10,)](x, 1024, num_warps=2)
    assert [(call.grid, call.options, call.arguments["BLOCK"]) for call in seen] == [((10, 1, 1), {"num_warps": 2}, 1024)] * 3
    assert Traffic._fields[:5] == ("kernel", "shape", "dtype", "provider", "ratio")


@pytest.mark.parametrize("suffix", [*BITS, ""])
@pytest.mark.parametrize("opcode", ["LDG", "STG", "LDS", "FADD"])
def test_an_instruction_moves_the_bytes_that_its_name_says(opcode, suffix):
    """Only accesses to global memory count; without a size they move 32 bits."""
    one = Instruction(0, opcode, tuple(filter(None, ("E", suffix))), "")
    assert one.bytes == (int(suffix.lstrip("US") or 32) // 8 if opcode in ("LDG", "STG") else 0)
