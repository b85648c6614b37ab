"""The launcher, on a stubbed driver: which launches hit its cache, which miss, and what reaches the driver."""

import ast
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")
from triton._C.libtriton import native_specialize_impl

from funcops.engine.backend import launch
from funcops.library.kernels import triton as kernels

PROGRAM = """
import json, os, torch
from funcops.engine.backend.launch import compiled_launches, launched_kernels, launcher, planned_launches
from funcops.testing.aot import stubbed
from benchmarks.launch import cases
from funcops.library.kernels.triton import random
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
        options = dict(num_warps=4, num_stages=3, enable_fp_fusion=True)  # Triton's own key has them in our order
        random._fold_in[1,](*2 * [x.long()], x.long(), number, False, **options)
        random._launch_fold_in(1, 1, 1, *2 * [x.long()], x.long(), number, False)
    seen["numbers"] = [len(random._launch_fold_in.cache), *(len(found) for found, *_ in random._fold_in.device_caches.values())]
    calls = []
    run, *rest = next(iter(launch.cache.values()))
    key = next(iter(launch.cache))
    launch.cache[key] = (lambda *a: calls.append(a), *rest)
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
        launch.cache[key] = (lambda *a: calls.append(a), *rest)  # what goes through Triton puts its own there
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
fused = {}
for default, told in ((True, None), (False, None), (False, "0"), (True, "1")):
    knobs.language.default_fp_fusion = default  # before 3.10 and since
    os.environ.pop("TRITON_DEFAULT_FP_FUSION", None) if told is None else os.environ.update(TRITON_DEFAULT_FP_FUSION=told)
    with stubbed(), compiled_launches() as found:
        launcher(kernel)(4, 1, 1, *args)
    fused[f"{default} {told}"] = found[0].compiled.metadata.enable_fp_fusion
seen["fused"] = fused
print(json.dumps(seen))
"""


def said_by(program, tmp_path_factory):
    """Run a program in a process whose Triton does not interpret, and return the JSON that it prints."""
    path = tmp_path_factory.mktemp("launch") / "program.py"
    path.write_text(program)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return said_by(PROGRAM, tmp_path_factory)


@pytest.mark.slow
def test_products_and_sums_are_fused_unless_the_user_says_no(seen):
    """Whatever Triton's own default is."""
    assert seen["fused"] == {"True None": True, "False None": True, "False 0": False, "True 1": True}


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


HANDED = """
import json, torch, triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from funcops.testing.aot import TARGETS, StubDriver
from funcops.engine.backend.launch import launcher, use_driver

def as_tuple(launch, first, packed, rest):
    launch(*first, "fixed", packed, "annotations", rest)

def one_by_one(launch, first, packed, rest):  # Triton 3.6
    launch(*first, "fixed", packed, *rest)

def in_another_order(launch, first, packed, rest):
    launch("fixed", *first, packed, rest)

handed, objects, encoded = [], [], []

class Launcher:  # as Triton's own, which hands tensors to `launch`
    pass_on, global_scratch_size = staticmethod(as_tuple), 0
    def __init__(self, src, metadata):
        self.launch = lambda *given: handed.append(given)
    def __call__(self, gx, gy, gz, stream, function, packed, meta, enter, leave, *rest):
        objects.append(1)
        self.pass_on(self.launch, (gx, gy, gz, stream, function), packed, rest)

class Utils(type(StubDriver.utils)):
    def launch(self, *given):
        handed.append(given)
    def fill_tma_descriptor_tiled(self, *given):
        encoded.append(given)
        return "map"
    fill_tma_descriptor = fill_tma_descriptor_tiled  # its name in Triton 3.6

class Driver(StubDriver):
    utils, stands_in = Utils(), False
    def __init__(self, **attributes):
        super().__init__(TARGETS["sm_90"].gpu)
        self.launcher_cls = type("Launcher", (Launcher,), attributes)

@triton.jit
def some(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)

@triton.jit
def described(x_desc, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i[:, None] * BLOCK + i[None, :], x_desc.load([n, 0]))

host, seen = torch.zeros(64), {}
class There(torch.Tensor):
    is_cpu = False
there = torch.zeros(64).as_subclass(There)

def run(tensor, **attributes):
    use_driver(Driver(**attributes))
    launch = launcher(some)
    launch(4, 1, 1, tensor, tensor, None, 64, 64)
    handed.clear(), objects.clear()
    launch(4, 2, 3, tensor, tensor, None, 64, 64)
    (given,) = handed
    flat = [*given[:-1], *given[-1]] if isinstance(given[-1], tuple) else [*given]
    return {"object": len(objects), "address": tensor.data_ptr() in [x for x in flat if type(x) is int],
            "tensor": any(x is tensor for x in flat), "grid": [x for x in flat if type(x) is int][:3], "arguments": len(flat)}

seen["as a tuple"] = run(there)
seen["one by one"] = run(there, pass_on=staticmethod(one_by_one))
seen["in another order"] = run(there, pass_on=staticmethod(in_another_order))
seen["scratch"] = run(there, global_scratch_size=8)
seen["host"] = run(host)

use_driver(Driver())
launch, square = launcher(described), torch.zeros(4, 64, 64)
def of(t):
    return TensorDescriptor(t, [64, 64], [64, 1], [64, 64])
use = [of(square[0]), of(square[0]), of(square[1]), TensorDescriptor(square[1], [32, 64], [64, 1], [64, 64])]
Driver.stands_in = True
for one in use:
    launch(1, 1, 1, one, square[2], 0, 64)
    launch(1, 1, 1, one, square[2], 0, 64)
seen["encoded"] = [[given[0] - square.data_ptr(), given[5]] for given in encoded]
seen["descriptor"] = list(handed[-1][-1][:5])
launch(1, 1, 1, of(square[1]), square[3], 0, 64)
seen["described addresses"] = [handed[-1][-1][-3] - square.data_ptr(), len(encoded)]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def handed(tmp_path_factory):
    return said_by(HANDED, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["as a tuple", "one by one"])
def test_a_hit_hands_over_addresses_past_the_launcher_object(handed, form):
    arguments = 13 if form == "as a tuple" else 12
    found = {"object": 0, "address": True, "tensor": False, "grid": [4, 2, 3], "arguments": arguments}
    assert handed[form] == found


@pytest.mark.slow
@pytest.mark.parametrize("why", ["in another order", "scratch", "host"])
def test_a_launch_that_needs_tritons_own_work_goes_through_it(handed, why):
    """Triton raises for a tensor in the host's memory, and allocates scratch memory."""
    assert (handed[why]["object"], handed[why]["address"], handed[why]["tensor"]) == (1, False, True)
    assert handed[why]["grid"] == [4, 2, 3]


@pytest.mark.slow
def test_a_descriptor_is_encoded_once_for_its_address_and_shape(handed):
    page = 64 * 64 * 4
    assert [[at, shape] for at, shape in handed["encoded"] if at >= 0][-3:] == [[0, [64, 64]], [page, [64, 64]], [page, [32, 64]]]
    assert handed["descriptor"] == ["map", 32, 64, 64, 1]
    assert handed["described addresses"] == [3 * page, len(handed["encoded"])]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("backend", ["nvidia", "amd"])
def test_the_key_tells_apart_what_triton_tells_apart(backend, quick):
    """Keys of two arguments (tensors of any dtype, offset and memory size, and integers) are equal exactly if Triton specialises
    alike."""
    compiler = importlib.import_module(f"triton.backends.{backend}.compiler")
    kind = compiler.HIPBackend if backend == "amd" else compiler.CUDABackend
    values = {"x_ptr": [None], "n": [0, 1, -1, 16, 17, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 16, 2**62, 2**62 + 1]}
    for dtype, size, start in itertools.product((torch.float32, torch.bfloat16), (64, 2**31 - 64, 2**31, 2**32), (0, 4, 8)):
        values["x_ptr"].append(torch.empty(size // dtype.itemsize, dtype=dtype, device="meta")[start:][:16])
    for name, given in values.items():
        part = launch.key_of(Parameter(name), backend == "amd", quick)
        part += f", {launch.aligned_of([name], backend == 'amd')}" if quick else ""
        part = part.replace(f"at_{name}", f"({name} is not None and {name}.data_ptr())")
        key = eval(f"lambda {name}: ({part})", {"kinds": launch._kinds, "kind_of": launch.kind_of})
        found = [(native_specialize_impl(kind, value, False, True, True), key(value)) for value in given]
        for (first, ours), (second, other) in itertools.combinations(found, 2):
            assert first == second or ours != other, (first, second, ours)


def test_no_parameter_of_a_kernel_has_a_name_of_the_launcher_itself():
    """Its text would hand over another value: `run(..., *fixed, {parameters})`."""
    own = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"\{\w+\}", "", launch._SOURCE)))
    assert {"device", "fixed", "hit", "num_warps", "cache"} <= own
    found = 0
    for path in (Path(kernels.__file__).parent).glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        launched = {one.args[0].id for one in nodes if isinstance(one, ast.Call) and ast.unparse(one.func) == "launcher"}
        for kernel in nodes:
            if isinstance(kernel, ast.FunctionDef) and kernel.name in launched:
                taken = own & {arg.arg for arg in kernel.args.args}
                assert not taken, f"{path.name}: {kernel.name}: {taken}"
                found += 1
    assert found > 60
