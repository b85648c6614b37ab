"""The launcher, on a stubbed driver: what hits its cache, what misses, what reaches the driver."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, torch
from funcops.backend.launch import launcher
from funcops.backend.aot import stubbed
from funcops.bench.launch import cases
from triton import knobs

kernel, args = cases()["10 arguments"]
x, y, z = torch.zeros(3, 64)
wide = torch.zeros(80)
variants = {
    "first": args,
    "again": args,
    "other tensors, alike": (y, z, x, *args[3:]),
    "other multiples of 16": (*args[:3], 160, 320, *args[5:]),
    "another float": (*args[:7], 0.5, *args[8:]),
    "unaligned address": (wide[1:], *args[1:]),
    "another dtype": (x.half(), *args[1:]),
    "no tensor": (x, y, None, *args[3:]),
    "not a multiple of 16": (*args[:3], 63, *args[4:]),
    "one": (*args[:3], 1, *args[4:]),
    "more than 32 bits": (*args[:3], 2**31, *args[4:]),
    "another constexpr": (*args[:8], 256, True),
}
seen = {}
with stubbed():
    launch = launcher(kernel)
    for name, given in variants.items():
        before = len(launch.cache)
        launch(4, 1, 1, *given)
        seen[name] = len(launch.cache) - before
    launch(4, 1, 1, *args, num_warps=8)
    seen["num_warps"] = len(launch.cache) - sum(seen.values())
    calls = []
    run, function, packed = next(iter(launch.cache.values()))
    key = next(iter(launch.cache))
    launch.cache[key] = (lambda *a: calls.append(a), function, packed)
    launch(4, 2, 3, *args)
    seen["grid"] = list(calls[0][:3])
    seen["arguments"] = len(calls[0]) - 9
    knobs.runtime.launch_enter_hook.add(lambda *a: None)
    launch(4, 2, 3, *args)
    seen["bypassed under hooks"] = len(calls) == 1
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    path = tmp_path_factory.mktemp("launch") / "program.py"
    path.write_text(PROGRAM)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_what_triton_does_not_specialise_on_hits(seen):
    for name in ("again", "other tensors, alike", "other multiples of 16", "another float"):
        assert seen[name] == 0, name


def test_what_triton_specialises_on_misses(seen):
    names = ("first", "unaligned address", "another dtype", "no tensor", "not a multiple of 16", "one")
    for name in (*names, "more than 32 bits", "another constexpr", "num_warps"):
        assert seen[name] == 1, name


def test_a_hit_hands_the_driver_grid_and_arguments(seen):
    assert seen["grid"] == [4, 2, 3] and seen["arguments"] == 10


def test_a_profilers_hooks_are_honoured(seen):
    assert seen["bypassed under hooks"]
