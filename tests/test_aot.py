"""Every kernel and configuration compiles for every target, within its limits; no GPU is needed."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json, sys
from funcops.bench.aot import builds, never_built
found = builds(sys.argv[1])
print(json.dumps({"builds": [build._asdict() for build in found], "missing": sorted(never_built(found, sys.argv[1]))}))
"""
SPILLS = """
import json, torch, triton, triton.language as tl
from funcops.backend.aot import inspect, stubbed
from funcops.backend.launch import compiled_launches, launcher

@triton.jit
def greedy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x - tl.sum(x, 0))

with stubbed(), compiled_launches() as found:
    x = torch.empty(16384, device="meta")
    launcher(greedy)(1, 1, 1, x, x, 16384, num_warps=1)
print(json.dumps(inspect(found[0], "sm_90")._asdict()))
"""
TABLE = Path(__file__).parents[1] / "docs" / "benchmarks" / "aot.csv"


def compiled(folder, program, *args):
    path = folder / "program.py"
    path.write_text(program)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, path, *args], env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout)


@pytest.fixture(scope="module", params=["sm_80", "sm_90", "sm_100", "gfx942"])
def built(request, tmp_path_factory):
    return request.param, compiled(tmp_path_factory.mktemp("aot"), PROGRAM, request.param)


def test_builds_keep_their_limits(built):
    from funcops.backend.aot import TARGETS

    target, found = built
    assert not found["missing"], "kernels without a sample in funcops/bench/samples.py"
    for build in found["builds"]:
        assert build["shared"] <= TARGETS[target].shared_limit, build
        assert target != "sm_90" or not build["spills"], build
    products = [b for b in found["builds"] if b["kernel"].startswith("gemm")]
    narrow = [b for b in products if b["config"].startswith(("bfloat16", "float16"))]
    assert narrow or not products
    assert all(b["matrix"] for b in narrow)
    if target == "sm_90":
        assert all("HGMMA" in b["matrix"] for b in narrow)


def test_the_committed_table_is_of_these_kernels(built):
    target, found = built
    with open(TABLE) as file:
        listed = {(row["kernel"], row["config"]) for row in csv.DictReader(file) if row["target"] == target}
    assert listed == {(build["kernel"], build["config"]) for build in found["builds"]}


def test_a_kernel_that_spills_is_seen(tmp_path):
    build = compiled(tmp_path, SPILLS)
    assert build["spills"] > 0 and build["matrix"] == ""
