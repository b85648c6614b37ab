"""No thread of a kernel reads memory that another thread has written, without a barrier in between."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton")
from races import accesses, races  # noqa: E402

DRAWN = 8  # launches beside one of each kernel
PROGRAM = """
import json, random, sys, torch
from races import memory_of, races, ttgir
from funcops.engine.backend import backend
from funcops.testing.aot import TARGETS, config_of, name_of, stubbed
from funcops.engine.backend.launch import planned_launches
from benchmarks.kernel_calls import Maker, kernel_calls

class Odd(Maker):
    def sizes(self, *sizes):
        return tuple(n + 3 if n % 2 == 0 else n for n in sizes)  # nothing is aligned, and loads and stores are laid out apart

draw = random.Random(int(sys.argv[1]))
with stubbed(TARGETS["sm_90"].gpu), planned_launches() as launches, backend("triton"):
    for call in kernel_calls(Odd("meta", torch.bfloat16)):
        call.kernel(*call.args)
launches = draw.sample(list(launches), len(launches))
each = {name_of(launched.kernel): launched for launched in launches}
written = [one for one in launches if "ADD=True" in config_of(one) and "forward_long" in name_of(one.kernel)]
chosen = [*each.values(), *written, *launches[: int(sys.argv[2])]]
found = {"kernels": len(each), "races": []}
for launched in chosen:
    for race in races(ttgir(launched, "sm_90"), memory_of(launched)):
        found["races"].append(f"{name_of(launched.kernel)} {config_of(launched)}: {race}")
print(json.dumps(found))
"""


@pytest.mark.slow
def test_every_kernel_at_sizes_that_are_aligned_to_nothing():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    seed = int(time.time() // 86400)
    command = [sys.executable, "-c", PROGRAM, str(seed), str(DRAWN)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["kernels"] >= 25 and not found["races"], seed


TEXT = """
  tt.func public @f(%x_ptr: !tt.ptr<bf16>, %y_ptr: !tt.ptr<bf16>) {
    %a = tt.addptr %x_ptr, %n : !tt.ptr<bf16>, i64
    %b = tt.splat %a : !tt.ptr<bf16> -> tensor<8x!tt.ptr<bf16>, #one>
    %c = ttg.convert_layout %b : tensor<8x!tt.ptr<bf16>, #one> -> tensor<8x!tt.ptr<bf16>, #two>
    %d:2 = scf.for %i = %s to %t step %u iter_args(%e = %c, %g = %k) -> (tensor<8x!tt.ptr<bf16>, #two>, i32) {
      tt.store %e, %v : tensor<8x!tt.ptr<bf16>, #two>
    }
    BETWEEN
    %z = tt.load %READ : tensor<8x!tt.ptr<bf16>, #LAYOUT>
"""


@pytest.mark.parametrize(
    ("change", "same", "count"),
    [
        ({}, {}, 1),
        ({"READ": "d#0"}, {}, 1),
        ({"LAYOUT": "two"}, {}, 0),  # each thread reads its own
        ({"BETWEEN": "gpu.barrier"}, {}, 0),
        ({"READ": "y_ptr"}, {}, 0),
        ({"READ": "y_ptr"}, {"x_ptr": 1, "y_ptr": 1}, 1),  # the same memory by another name
        ({"READ": "y_ptr"}, {"x_ptr": 1, "y_ptr": 2}, 0),
        ({"tt.store %e, %v : tensor<8x!tt.ptr<bf16>, #two>": "tt.store %x_ptr, %v : !tt.ptr<bf16>"}, {}, 1),  # one thread's, of all
    ],
)
def test_races_and_their_absence(change, same, count):
    text = TEXT
    for old, new in ({"READ": "b", "LAYOUT": "one", "BETWEEN": ""} | change).items():
        text = text.replace(old, new)
    assert len(races(text, same)) == count
    assert [access.base for access in accesses(text) if access.kind == "store"] == ["x_ptr"]
