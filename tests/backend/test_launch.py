"""The launcher, on a stubbed driver: which launches hit its cache, which miss, and what reaches the driver."""

import importlib
import itertools
import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from triton._C.libtriton import native_specialize_impl

from funcops.backend import launch

PROGRAM = """
import json, torch
from funcops.backend.launch import launched_kernels, launcher, planned_launches
from funcops.backend.aot import stubbed
from benchmarks.launch import cases
from funcops.kernels.triton import random
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
    for number in (0, 1, 16, 2**31, 2**40, 2**63 - 1):
        random._fold_in[1,](*2 * [x.long()], x.long(), number, False, num_warps=4, num_stages=3)  # by Triton itself
        random._launch_fold_in(1, 1, 1, *2 * [x.long()], x.long(), number, False)
    seen["numbers"] = [len(random._launch_fold_in.cache), *(len(found) for found, *_ in random._fold_in.device_caches.values())]
    calls = []
    run, function, packed = next(iter(launch.cache.values()))
    key = next(iter(launch.cache))
    launch.cache[key] = (lambda *a: calls.append(a), function, packed)
    launch(4, 2, 3, *args)
    seen["grid"] = list(calls[0][:3])
    seen["arguments"] = len(calls[0]) - 9
    knobs.runtime.launch_enter_hook.add(lambda *a: None)
    launch(4, 2, 3, *args)
    seen["bypassed under hooks"] = {"enter": len(calls) == 1}
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    enter.calls.clear()
    for name, first, last in (
        ("none", enter, leave), ("set to None", None, None),
        ("functions", lambda *a: None, None), ("one function", None, lambda *a: None),
    ):
        knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook = first, last
        launch.cache[key] = (lambda *a: calls.append(a), function, packed)  # what goes through Triton puts its own there
        calls.clear()
        launch(4, 2, 3, *args)
        seen["bypassed under hooks"][name] = not calls
    knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook = enter, leave
    leave.add(lambda *a: None)
    calls.clear()
    launch(4, 2, 3, *args)
    seen["bypassed under hooks"]["exit"] = not calls
    leave.calls.clear()

here, torch.cuda.is_available = torch.cuda.is_available, lambda: True  # a machine with a GPU
devices = []
with stubbed():
    launch = launcher(kernel)
    launch(4, 1, 1, *args)
for _ in range(2):
    with stubbed():
        launch(4, 1, 1, *args)
torch.cuda.is_available = here
seen["devices"] = [key[-1] for key in launch.cache]
seen["defaults"] = launch.__defaults__
seen["kernels"] = [kernel in launched_kernels(), random._fold_in in launched_kernels()]
with stubbed(), planned_launches() as planned:
    seen["caches"] = [len(launch.cache)]
    launch(4, 1, 1, *args)
    seen["caches"] += [len(launch.cache), [one.kernel is kernel for one in planned]]
seen["caches"].append(len(launch.cache))
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
def test_launches_that_triton_compiles_once_share_a_key(seen):
    for name in ("again", "other tensors, alike", "other multiples of 16", "another float"):
        assert seen[name] == 0, name


@pytest.mark.slow
def test_launches_that_triton_specialises_differ_in_key(seen):
    names = ("first", "unaligned address", "another dtype", "no tensor", "not a multiple of 16", "one")
    for name in (*names, "more than 32 bits", "another constexpr", "num_warps"):
        assert seen[name] == 1, name


@pytest.mark.slow
def test_a_number_that_is_not_to_be_specialised_on_hits(seen):
    assert seen["numbers"] == [1, 1]


def test_a_hit_hands_the_driver_grid_and_arguments(seen):
    assert seen["grid"] == [4, 2, 3] and seen["arguments"] == 10


def test_a_profilers_hooks_are_honoured(seen):
    assert seen["bypassed under hooks"] == {
        "enter": True,
        "none": False,
        "set to None": False,
        "functions": True,
        "one function": True,
        "exit": True,
    }


def test_a_launcher_that_was_made_under_a_stub_is_not_bound_to_it(seen):
    assert len(set(seen["devices"])) == 3


def test_every_launcher_is_known_by_its_kernel(seen):
    assert seen["kernels"] == [True, True]


def test_an_interpreted_launch_has_the_defaults_of_a_compiled_one(seen):
    """So that a launch that is counted in the interpreter is the one that a device runs."""
    assert launch.launcher(None).__kwdefaults__ == dict(zip(("num_warps", "num_stages"), seen["defaults"], strict=True))


def test_launches_are_collected_with_empty_caches(seen):
    """A launch that ran before is collected again, and one that was planned is not kept."""
    assert seen["caches"] == [0, 1, [True], 0]


class Parameter(NamedTuple):
    name: str
    is_constexpr: bool = False
    annotation_type: str = ""


@pytest.mark.parametrize("backend", ["nvidia", "amd"])
def test_the_key_tells_apart_what_triton_tells_apart(backend):
    """Keys of two arguments (tensors of any dtype, offset and memory size, and integers) are equal exactly if Triton specialises
    alike."""
    compiler = importlib.import_module(f"triton.backends.{backend}.compiler")
    kind = compiler.HIPBackend if backend == "amd" else compiler.CUDABackend
    values = {"x_ptr": [None], "n": [0, 1, -1, 16, 17, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 16, 2**62, 2**62 + 1]}
    for dtype, size, start in itertools.product((torch.float32, torch.bfloat16), (64, 2**31 - 64, 2**31, 2**32), (0, 4, 8)):
        values["x_ptr"].append(torch.empty(size // dtype.itemsize, dtype=dtype, device="meta")[start:][:16])
    for name, given in values.items():
        key = eval(f"lambda {name}: ({launch.key_of(Parameter(name), backend == 'amd')})")
        found = [(native_specialize_impl(kind, value, False, True, True), key(value)) for value in given]
        for (first, ours), (second, other) in itertools.combinations(found, 2):
            assert first == second or ours != other, (first, second, ours)
