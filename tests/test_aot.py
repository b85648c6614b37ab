"""Every kernel and configuration compiles for every target, within its limits; no GPU is needed.

The committed table holds every build, and a hash of what it was compiled from. What has another hash now is compiled here,
and of the rest a few, drawn anew each day; `make aot` compiles what changed and writes the table, `python -m funcops.bench aot` all.
"""

import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "benchmarks" / "aot.csv"
DRAWN = 6  # for each target
NUMBERS = itertools.count()
PROGRAM = """
import json, random, sys, torch, triton, triton.language as tl
from funcops.backend.aot import COMPILER, TARGETS, config_of, inspect, name_of, stubbed
from funcops.backend.fingerprint import fingerprint
from funcops.backend.launch import compiled_launches, launcher
from funcops.bench.aot import build, never_built, plan, read

@triton.jit
def greedy(x_ptr, y_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x - tl.sum(x, 0))

table, seed, drawn = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
known = {row.hash for row in read(table) if row.compiler == COMPILER}
draw = random.Random(seed)
found = {"compiler": COMPILER, "planned": [], "built": [], "missing": []}
for target in TARGETS:
    planned = plan(target)
    hashes = [fingerprint(launched, target) for launched in planned]
    found["planned"] += [(h, name_of(p.kernel), config_of(p), target) for h, p in zip(hashes, planned)]
    found["missing"] += never_built(planned, target)
    old = [launched for h, launched in zip(hashes, planned) if h in known]
    new = [launched for h, launched in zip(hashes, planned) if h not in known]
    found["built"] += [build(launched, target)._asdict() for launched in new + draw.sample(old, min(drawn, len(old)))]
with stubbed(), compiled_launches() as launches:
    x = torch.empty(8192, device="meta")
    launcher(greedy)(1, 1, 1, x, x, 8192, num_warps=1)
found["greedy"] = inspect(launches[0], "sm_90")._asdict()
print(json.dumps(found))
"""
HELPERS = """
import triton, triton.language as tl

LIMIT = tl.constexpr(4)

@triton.jit
def deep(x):
    return x + 1

@triton.jit
def helper(x):
    return deep(x) * 2
"""
KERNEL = """
import triton, triton.language as tl
import {helpers} as helpers
from {helpers} import LIMIT

@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, helpers.helper(tl.load(x_ptr + i)), mask=i < LIMIT)
"""


def rows():
    from funcops.bench.aot import read

    return [row._asdict() for row in read(TABLE)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    seed = int(time.time() // 86400)
    path = tmp_path_factory.mktemp("aot") / "program.py"
    path.write_text(PROGRAM)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, path, TABLE, str(seed), str(DRAWN)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    print(f"seed {seed}: built", *(f"{b['kernel']} {b['config']} {b['target']}" for b in found["built"]), sep="\n  ")
    return found


def within_limits(build):
    from funcops.backend.aot import TARGETS

    target = build["target"]
    assert build["shared"] <= TARGETS[target].shared_limit, build
    assert target != "sm_90" or not build["spills"], build
    if build["kernel"].startswith("gemm") and build["config"].startswith(("bfloat16", "float16")):
        assert build["matrix"] and (target != "sm_90" or "HGMMA" in build["matrix"]), build


def wrong_rows(planned, table, compiler):
    """The rows that the table should have and has not, and those that it has and should not have."""
    want = {tuple(row) for row in planned}
    have = {(row["hash"], row["kernel"], row["config"], row["target"]) for row in table if row["compiler"] == compiler}
    return sorted(want - have), sorted(have - want) + [row for row in table if row["compiler"] != compiler]


def test_every_build_keeps_its_limits(found):
    assert not found["missing"], "kernels without a sample in funcops/bench/samples.py"
    assert len(found["built"]) >= 4 * DRAWN
    for build in [*rows(), *found["built"]]:
        within_limits(build)


def test_what_was_drawn_is_as_the_table_says(found):
    table = {row["hash"]: row for row in rows()}
    for build in found["built"]:
        row = table.get(build["hash"])
        assert row is None or row["compiler"] != build["compiler"] or row == build


def test_the_committed_table_is_of_these_kernels(found):
    missing, over = wrong_rows(found["planned"], rows(), found["compiler"])
    assert not missing and not over, (
        f"{TABLE.name} lacks {len(missing)} rows and has {len(over)} too many; `make aot` mends it: {missing[:3]} {over[:3]}"
    )


def test_a_table_that_is_not_of_these_kernels_is_seen():
    table = rows()
    compiler = table[0]["compiler"]
    planned = [tuple(row[name] for name in ("hash", "kernel", "config", "target")) for row in table]
    assert wrong_rows(planned, table, compiler) == ([], [])
    draw = random.Random(0)
    for i in draw.sample(range(len(table)), 5):
        row = table[i]
        assert wrong_rows(planned, table[:i] + table[i + 1 :], compiler) == ([planned[i]], [])  # a choice without a row
        assert wrong_rows(planned[:i] + planned[i + 1 :], table, compiler) == ([], [planned[i]])  # a row without a choice
        for name, value in (("hash", "0" * 12), ("compiler", "triton 3.6.0")):
            missing, over = wrong_rows(planned, [*table[:i], {**row, name: value}, *table[i + 1 :]], compiler)
            assert missing == [planned[i]] and len(over) == 1


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """The hash of KERNEL with its helpers, after a replacement in their sources; a new pair of modules each time."""
    from funcops.backend.fingerprint import fingerprint
    from funcops.backend.launch import Launched

    monkeypatch.syspath_prepend(tmp_path)

    def hashed(old="", new="", key=("float32", 64, 4, 3), target="sm_90"):
        number = next(NUMBERS)
        helpers, name = f"aot_helpers_{number}", f"aot_kernel_{number}"
        for module, text in ((helpers, HELPERS), (name, KERNEL.format(helpers=helpers))):
            assert not old or old in HELPERS + KERNEL
            (tmp_path / f"{module}.py").write_text(text.replace(old, new) if old else text)
        importlib.invalidate_caches()
        kernel = importlib.import_module(name).kernel
        for module in (helpers, name):  # the modules' names are no part of what is compared
            for value in vars(sys.modules[module]).values():
                if hasattr(value, "fn"):
                    value.fn.__module__ = "aot"
        return fingerprint(Launched(kernel, (1, 1, 1), {}, key, None), target)

    return hashed


def test_the_hash_is_of_the_source_its_helpers_and_the_launch(hashed):
    first = hashed()
    assert hashed() == first
    changes = [
        {"old": "tl.load(x_ptr + i)", "new": "tl.load(x_ptr + i, mask=i < 2)"},
        {"old": "* 2", "new": "* 3"},  # a helper
        {"old": "x + 1", "new": "x - 1"},  # a helper's helper
        {"old": "constexpr(4)", "new": "constexpr(5)"},  # a value that it reads
        {"key": ("float16", 64, 4, 3)},
        {"key": ("float32", 64, 8, 3)},
        {"key": ("float32", 64, 4, 2)},
        {"target": "sm_100"},
    ]
    assert len({first, *(hashed(**change) for change in changes)}) == 1 + len(changes)


def test_the_hash_is_not_of_comments_and_layout(hashed):
    first = hashed()
    for old, new in (
        ("\n\n@triton", "\n\n\n# why\n@triton"),
        ("return deep(x) * 2", "'''What it does.'''\n    return (deep(x)\n        * 2)  # why"),
        ("helpers.helper(tl.load(x_ptr + i)), mask", "helpers.helper(tl.load(x_ptr+i)),\n        mask"),
        ("LIMIT = ", "UNREAD = 1\nLIMIT = "),
    ):
        assert hashed(old, new) == first, new


def test_the_bench_compiles_what_changed_alone(monkeypatch, tmp_path):
    from funcops.backend.aot import COMPILER, Build
    from funcops.bench import aot
    from funcops.bench.measure import BenchError, write_csv

    def made(launched, target):
        return Build(launched, "", target, 4, 8, 0, 0, "", 16, launched + target, COMPILER)

    monkeypatch.setattr(aot, "plan", lambda target: ["a", "b", "c"])
    monkeypatch.setattr(aot, "fingerprint", lambda launched, target: launched + target)
    monkeypatch.setattr(aot, "build", made)
    every = aot.run()
    changed = [every[0]._replace(hash="other"), every[1]._replace(compiler="triton 3.0"), *every[2:]]
    write_csv(tmp_path / "table.csv", changed)
    monkeypatch.setattr(aot, "build", lambda *args: made(*args)._replace(registers=9))
    again = aot.run(changed=tmp_path / "table.csv")
    assert again == [every[0]._replace(registers=9), every[1]._replace(registers=9), *every[2:]]
    with pytest.raises(BenchError, match="must be a table of `bench aot`"):
        aot.run(changed=tmp_path / "none.csv")


def test_a_kernel_that_spills_is_seen(found):
    assert found["greedy"]["spills"] > 0 and found["greedy"]["matrix"] == ""
    with pytest.raises(AssertionError):
        within_limits(found["greedy"])
