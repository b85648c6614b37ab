"""A launch has as many stages as the device's shared memory holds, by what its kernel declares, or by what the compiler says."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton import OutOfResources
from triton.runtime.jit import JITFunction

from funcops.engine.backend import launch, shared
from funcops.engine.backend.shared import SharedMemory
from funcops.library.kernels.triton.gemm_table import SQUARE, WIDE, Tile, fitting
from funcops.testing import aot
from funcops.testing.aot import TARGETS, stubbed

EACH = 20_000  # bytes that a stage takes


def by_option(x_ptr, BLOCK: tl.constexpr):
    pass


def by_constexpr(x_ptr, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    pass


class Kernel(JITFunction):
    """A kernel that is "compiled" to use EACH bytes a stage, by the device's limit, as Triton does."""

    def __init__(self, fn):
        super().__init__(fn)
        self.compiled, self.ran, self.most = [], [], 99  # the most stages of which Triton's passes make code

    def __getitem__(self, grid):
        def launched(*arguments, num_warps, num_stages, enable_fp_fusion):
            stages = arguments[1] if self.fn is by_constexpr else num_stages
            self.compiled.append(stages)
            if stages > self.most:
                raise RuntimeError("PassManager::run failed")
            limit = shared.driver.active.utils.get_device_properties(shared.driver.active.get_current_device())["max_shared_mem"]
            if stages * EACH > limit:
                raise OutOfResources(stages * EACH, limit, "shared memory")
            return SimpleNamespace(
                run=lambda *given: self.ran.append(given), function=stages, packed_metadata="packed", metadata=None
            )

        return launched


@pytest.fixture(params=[by_option, by_constexpr])
def kernel(request, monkeypatch):
    monkeypatch.setattr(launch, "_launchers", [])
    monkeypatch.setattr(launch, "_scopes", [])
    monkeypatch.setattr(shared, "IN_INTERPRETER", False)
    return Kernel(request.param)


def launched(run, kernel, stages, block=64):
    """The stages of the compiled kernel that a launch runs."""
    if kernel.fn is by_constexpr:
        run(1, 1, 1, torch.zeros(64), stages, block)
    else:
        run(1, 1, 1, torch.zeros(64), block, num_stages=stages)
    return next(reversed(run.cache.values()))[1]


def need(arguments, stages, memory):
    assert arguments["BLOCK"] == 64 and memory.limit in {target.shared_limit for target in TARGETS.values()}
    return EACH * stages


@pytest.mark.parametrize("declares", [True, False])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("asked", [1, 3, 12])
def test_a_launch_has_the_most_stages_that_a_card_holds(kernel, target, asked, declares):
    """Whether they are an option or a constexpr. One that declares its need is compiled once, in a plan nothing is."""
    most = min(asked, TARGETS[target].shared_limit // EACH)
    with stubbed(TARGETS[target].gpu):
        run = launch.launcher(kernel, shared=need if declares else None)
        assert launched(run, kernel, asked) == most
        assert kernel.compiled == ([most] if declares else [*range(asked, most - 1, -1)])
        before = len(kernel.compiled)
        launched(run, kernel, asked)
        assert len(kernel.compiled) == before, "the second launch finds it"
        with launch.planned_launches() as planned:
            for stages in (asked, most, 1):
                launched(run, kernel, stages)
    stages = [one.stages for one in planned]
    assert stages == ([*dict.fromkeys((most, 1))] if declares else [*dict.fromkeys((asked, most, 1))])
    assert launch.need_of(kernel) is (need if declares else None)
    if declares:
        (first, *_) = planned
        assert ("STAGES" in first.arguments and first.arguments["STAGES"] in first.key) or first.key[-1] == most


def test_a_kernel_that_no_number_of_stages_makes_fit_says_so(kernel, monkeypatch):
    monkeypatch.setitem(globals(), "EACH", 200_000)
    with stubbed(TARGETS["sm_89"].gpu):
        run = launch.launcher(kernel)
        said = (
            f"^kernel {kernel.__name__}: shared memory must be at most the device's 101,376 bytes: pass smaller blocks, "
            "got 200,000 bytes$"
        )
        with pytest.raises(RuntimeError, match=said):
            launched(run, kernel, 3)
        assert kernel.compiled == [3, 2, 1] and not run.cache


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_kernel_whose_pipeline_triton_cannot_make_has_fewer_stages(kernel, most):
    kernel.most = most
    with stubbed():
        run = launch.launcher(kernel)
        if most:
            assert launched(run, kernel, 3) == most
        else:
            said = f"^kernel {kernel.__name__}: code must be what Triton can compile here: try another version of it, got Triton 3"
            with pytest.raises(RuntimeError, match=said):
                launched(run, kernel, 3)
    assert kernel.compiled == [*range(3, max(most, 1) - 1, -1)] and bool(run.cache) == bool(most)


def test_an_error_that_is_not_a_pass_of_tritons_is_raised(kernel, monkeypatch):
    def refuses(grid):
        def launched(*arguments, **options):
            raise RuntimeError("no device")

        return launched

    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: refuses(grid))
    with stubbed(), pytest.raises(RuntimeError, match="^no device$"):
        launched(launch.launcher(kernel), kernel, 3)


def test_too_many_registers_are_no_matter_of_stages(kernel, monkeypatch):
    def refuses(grid):
        def launched(*arguments, **options):
            raise OutOfResources(70_000, 65_536, "registers")

        return launched

    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: refuses(grid))
    with stubbed(), pytest.raises(OutOfResources, match="registers"):
        launched(launch.launcher(kernel), kernel, 3)


def test_memory_is_the_devices_own(monkeypatch):
    monkeypatch.setattr(shared, "IN_INTERPRETER", False)
    found = {}
    for name, target in TARGETS.items():
        with stubbed(target.gpu):
            found[name] = shared.shared_memory()
    assert {name: memory.limit for name, memory in found.items()} == {n: t.shared_limit for n, t in TARGETS.items()}
    assert {name for name, memory in found.items() if memory.feeds} == {"sm_90", "sm_100"}
    assert {name for name, memory in found.items() if not memory.copies} == {"gfx942", "gfx950"}
    assert found["sm_90"] == shared.HOPPER and [found["sm_90"].tiles(n) for n in (1, 3)] == [1, 3]
    assert [found["sm_120"].tiles(n) for n in (1, 2, 3)] == [1, 1, 2]
    monkeypatch.setattr(shared, "IN_INTERPRETER", True)
    with stubbed(TARGETS["sm_89"].gpu):
        assert shared.shared_memory() == shared.HOPPER


def test_a_stub_has_the_memory_of_its_target():
    for target in TARGETS.values():
        stub = aot.StubDriver(target.gpu)
        assert stub.utils.get_device_properties(stub.get_current_device())["max_shared_mem"] == target.shared_limit


@pytest.mark.parametrize("limit", [*range(20_000, 240_000, 7_000)])
def test_the_part_of_a_tile_that_fits_is_the_largest(limit):
    """First it has fewer stages, but two at least; then half of its longer side, with all stages. K at a time stays."""
    for tile in (WIDE, SQUARE, Tile(64, 128, 128, 4, 4), Tile(128, 128, 64, 8, 1)):
        ask = []

        def need(part, ask=ask):
            ask.append(part)
            return part.stages * (part.m + part.n) * part.k * 2 + part.m * part.n * 2

        found = fitting(tile, need, limit)
        assert need(found) <= limit and found.k == tile.k and found.warps == tile.warps
        parts = [tile._replace(m=m, n=n) for m, n in sizes(tile.m, tile.n)]
        order = [part._replace(stages=s) for part in parts for s in range(tile.stages, min(2, tile.stages) - 1, -1)]
        assert found == next(part for part in order if need(part) <= limit) == ask[order.index(found)]


def sizes(m, n):
    while m * n > 1:
        yield m, n
        m, n = (m, n // 2) if n >= m else (m // 2, n)


def test_memory_that_no_part_fits_leaves_the_tile():
    assert fitting(WIDE, lambda part: 1, 0) == WIDE
    assert SharedMemory(1, True, False).tiles(1) == 1


COMPILED = """
import json, torch, triton, triton.language as tl
from funcops.testing.aot import TARGETS, stubbed
from funcops.engine.backend.launch import compiled_launches, launcher

@triton.jit
def add_up(x_ptr, y_ptr, n, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    i, total = tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32)
    for at in tl.range(0, n, BLOCK, num_stages=STAGES):
        total += tl.load(x_ptr + at + i)
    tl.store(y_ptr + i, total)

run, found = launcher(add_up), {}
x = torch.empty(1 << 20, device="meta")
for name in ("sm_90", "sm_89"):
    with stubbed(TARGETS[name].gpu), compiled_launches() as launches:
        run(1, 1, 1, x, x, 1 << 20, 8, 8192)
    (one,) = launches
    found[name] = one.stages, one.compiled.metadata.shared, TARGETS[name].shared_limit
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_kernel_of_a_user_is_compiled_with_the_most_stages_that_fit(tmp_path):
    """Triton itself compiles it; a stage of 8,192 numbers takes 32 KB."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    (program := tmp_path / "program.py").write_text(COMPILED)
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for stages, taken, limit in json.loads(done.stdout).values():
        assert taken <= limit < taken + 32768 and stages == limit // 32768 + 1
