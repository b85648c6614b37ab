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
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from funcops.backend import aot, launch

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
from funcops.backend.aot import TARGETS, StubDriver
from funcops.backend.launch import launcher, use_driver

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


class Passing:
    """Triton's object that launches one kernel: it hands its arguments to `launch`, with the first five turned around."""

    def __init__(self, turned):
        self.turned, self.launch = turned, None

    def __call__(self, *given):
        first = given[:5][::-1] if self.turned else given[:5]
        self.launch(*first, *given[5:9], given[9:])


@pytest.mark.parametrize("turned", [False, True])
def test_a_launcher_that_hands_its_first_arguments_on_in_another_order_is_called_itself(turned):
    own, arguments = Passing(turned), (3, 4)
    own.launch = handed_to = lambda *given: None
    compiled = SimpleNamespace(run=own, function=object(), packed_metadata="packed", metadata=None)
    run, function, fixed, encode = launch._hit(compiled, arguments, 0)
    assert function is compiled.function and fixed == ("packed", None, None, None)
    assert (run, encode) == ((own, None) if turned else (handed_to, launch._nothing))


class Apart(Passing):
    """Triton 3.6's, which hands a kernel's own arguments on one by one."""

    def __call__(self, *given):
        self.launch(*given)


def some(a_ptr, n, seed: tl.int64, scale: tl.float32, BLOCK: tl.constexpr):
    pass


def described(a_desc, n):
    pass


class Kernel(JITFunction):
    """A kernel that Triton "compiles" to an object which notes what it is launched with."""

    def __init__(self, fn=some):
        super().__init__(fn, do_not_specialize=["seed"] if fn is some else None)
        self.compiled, self.ran = [], []

    def __getitem__(self, grid):
        def launched(*arguments, **options):
            self.compiled.append((grid, arguments, options))
            run = Passing(False)
            run.launch, run.global_scratch_size = lambda *given: self.ran.append(given), 8 * (self.fn is described)
            return SimpleNamespace(run=run, function="function", packed_metadata="packed", metadata=None)

        return launched


@pytest.fixture
def kernel(monkeypatch):
    """A kernel, with a stub for the machine's driver, whose launcher nobody else knows."""
    monkeypatch.setattr(launch, "_launchers", [])
    monkeypatch.setattr(launch, "_scopes", [])
    with aot.stubbed():
        yield Kernel()


X, OTHER = torch.zeros(64), torch.zeros(80)
DESCRIPTOR = TensorDescriptor(torch.zeros(64, 64), [64, 64], [64, 1], [32, 64])
GIVEN = {"a_ptr": X, "n": 64, "seed": 16, "scale": 0.5, "BLOCK": 128}
ALIKE = {
    "other tensors": {"a_ptr": OTHER},
    "another multiple of 16": {"n": 320},
    "a number that is not specialised on": {"seed": 2**40},
    "another float": {"scale": 3.0},
}
APART = {
    "an unaligned address": {"a_ptr": OTHER[1:]},
    "no tensor": {"a_ptr": None},
    "another dtype": {"a_ptr": X.half()},
    "not a multiple of 16": {"n": 63},
    "one": {"n": 1},
    "more than 32 bits": {"n": 2**31},
    "another constexpr": {"BLOCK": 64},
    "warps": {"num_warps": 8},
    "stages": {"num_stages": 2},
}


@pytest.mark.parametrize("name", [*ALIKE, *APART])
def test_a_launch_compiles_again_exactly_for_what_triton_specialises_on(kernel, name):
    """It hands the grid and the arguments, in the kernel's order, to Triton, and after that to the driver."""
    run = launch.launcher(kernel)
    run(4, 2, 3, *GIVEN.values())
    given = GIVEN | {**ALIKE, **APART}[name]
    options = {option: given.pop(option, default) for option, default in (("num_warps", 4), ("num_stages", 3))}
    run(5, 6, 7, *given.values(), **options)
    assert kernel.compiled[0] == ((4, 2, 3), (*GIVEN.values(),), {"num_warps": 4, "num_stages": 3})
    if name in ALIKE:
        ((*grid, stream, function, packed, _, _, _, handed),) = kernel.ran
        assert (grid, stream, function, packed, len(kernel.compiled)) == ([5, 6, 7], 0, "function", "packed", 1)
        assert handed == (given["a_ptr"].data_ptr(), *[given[key] for key in ("n", "seed", "scale", "BLOCK")])
    else:
        assert not kernel.ran and len(kernel.compiled) == len(run.cache) == 2
        grid, arguments, told = kernel.compiled[1]
        assert grid == (5, 6, 7) and told == options and all(a is b for a, b in zip(arguments, given.values(), strict=True))


def test_descriptors_differ_by_dtype_and_block(kernel):
    """A launch without one is told apart too."""
    run, t = launch.launcher(Kernel(described)), DESCRIPTOR.base
    blocks = [None, DESCRIPTOR, TensorDescriptor(t, [64, 64], [64, 1], [64, 32])]
    blocks += [TensorDescriptor(t.half(), [64, 64], [64, 1], [32, 64]), TensorDescriptor(t.clone(), [32, 64], [64, 1], [32, 64])]
    for count, one in enumerate(blocks, 1):
        run(1, 1, 1, one, 64)
        assert len(run.cache) == min(count, 4)


def test_launches_are_collected_once_a_kind_whether_compiled_or_planned(kernel):
    """All caches are empty at the start and the end of a block, and blocks nest."""
    run = launch.launcher(kernel)
    assert launch.launched_kernels() == [kernel]
    run(4, 1, 1, *GIVEN.values())
    with launch.planned_launches() as planned:
        assert not run.cache
        for n in (64, 320, 63):
            run(4, 1, 1, *(GIVEN | {"n": n}).values())
        assert len(kernel.compiled) == 1 and not kernel.ran, "nothing is compiled, and nothing runs"
        outer = list(planned)
        with launch.compiled_launches(found := []) as compiled:
            assert compiled is found and not run.cache
            run(4, 1, 1, *GIVEN.values())
            run(4, 1, 1, *GIVEN.values())
        assert [one.compiled.function for one in found] == ["function"] and not run.cache
        assert len(kernel.compiled) == 2 and len(kernel.ran) == 1 and planned == outer
        run(4, 1, 1, *GIVEN.values())
        assert len(kernel.compiled) == 2 and len(planned) == 3
    assert not run.cache
    assert [one.arguments["n"] for one in planned] == [64, 63, 64]
    first = planned[0]
    assert (first.kernel, first.grid, first.arguments, first.compiled) == (kernel, (4, 1, 1), GIVEN, None)
    assert first.key == ((torch.float32, True), launch.kind_of(64), 0, 0, 128, 4, 3)
    run(4, 1, 1, *GIVEN.values())
    assert len(kernel.compiled) == 3 and len(planned) == 3, "after the block launches are compiled, and not collected"
    assert first.compile().compiled.function == "function" and kernel.compiled[3] == kernel.compiled[0]


def test_a_launch_under_a_profilers_hooks_goes_through_triton_and_is_collected_once(kernel, monkeypatch):
    run = launch.launcher(kernel)
    with launch.compiled_launches() as found:
        run(4, 1, 1, *GIVEN.values())
        for name in ("launch_enter_hook", "launch_exit_hook"):
            with monkeypatch.context() as patched:
                patched.setattr(knobs.runtime, name, lambda *args: None)
                run(4, 1, 1, *GIVEN.values())
        assert len(kernel.compiled) == 3 and not kernel.ran and len(found) == 1
        run(4, 1, 1, *GIVEN.values())
    assert len(kernel.ran) == 1


def test_a_kernel_with_a_tensor_for_a_number_says_so(kernel):
    run = launch.launcher(kernel)
    said = r"^kernel some: argument 'n' must be named with _ptr at its end, as a tensor is passed, got a tensor$"
    with pytest.raises(TypeError, match=said):
        run(1, 1, 1, *(GIVEN | {"n": X}).values())
    with pytest.raises(AttributeError, match="data_ptr"):
        run(1, 1, 1, *(GIVEN | {"a_ptr": 3}).values())


@pytest.mark.parametrize("grid", [(1, 65_536, 1), (1, 1, 65_536)])
def test_a_grid_that_no_device_takes_says_so(kernel, grid):
    run = launch.launcher(kernel)
    run(65_536, 65_535, 65_535, *GIVEN.values())
    said = r"^kernel some: grid must be of at most 65,535 programs along its second and third dimension: .* got \(1, "
    with pytest.raises(ValueError, match=said):
        run(*grid, *GIVEN.values())


def test_the_first_launch_finds_the_machines_driver(kernel, monkeypatch):
    """Every launcher is bound to it then, those made before too."""
    run, other = launch.launcher(kernel), launch.launcher(Kernel())
    found = aot.StubDriver(aot.TARGETS["sm_90"].gpu)
    found.get_current_stream = lambda device: ("stream of", device)
    with monkeypatch.context() as patched:
        for first in ("_first_device", "_first_stream"):
            machine = SimpleNamespace(active=found, _active=None)
            patched.setattr(launch, "driver", machine)
            launch.use_driver(None)
            assert [scope["current_device"] for scope in launch._scopes] == [launch._first_device] * 2
            if first == "_first_device":
                run(4, 1, 1, *GIVEN.values())
                assert [key[-1] for key in run.cache] == [found.number]
            else:
                assert launch._first_stream(found.number) == ("stream of", found.number)
            assert machine._active is found
            for scope in launch._scopes:
                assert scope["current_device"]() == found.number and scope["current_stream"](7) == ("stream of", 7)
        other(4, 1, 1, *GIVEN.values())
        other(4, 1, 1, *GIVEN.values())


def of_run(run, descriptors=None):
    run.launch = lambda *given: given
    metadata = SimpleNamespace(tensordesc_meta=descriptors)
    return SimpleNamespace(run=run, function=object(), packed_metadata="packed", metadata=metadata)


PLAIN = {
    "memory of its own": ({"global_scratch_size": 8}, {}),
    "memory for a profile": ({"profile_scratch_size": 8}, {}),
    "a tensor in the host's memory": ({}, {"_active": object()}),
    "no function to launch": ({"launch": None}, {}),
    "AMD": ({}, {"hip": "6.0"}),
}


@pytest.mark.parametrize("why", [None, *PLAIN])
def test_a_hit_goes_through_triton_for_what_triton_does_itself(why, monkeypatch):
    attributes, more = PLAIN.get(why, ({}, {}))
    monkeypatch.setattr(launch, "driver", SimpleNamespace(_active=more.get("_active", SimpleNamespace(stands_in=True))))
    monkeypatch.setattr(torch.version, "hip", more.get("hip"))
    compiled = of_run(Passing(False))
    vars(compiled.run).update(attributes)
    if "launch" in attributes:
        del compiled.run.launch
    hit = launch._hit(compiled, (X, 4), 0)
    if why is None:
        assert hit == (compiled.run.launch, compiled.function, ("packed", None, None, None), launch._nothing)
    else:
        assert hit == (compiled.run, compiled.function, ("packed", None, None, None), None)


def test_arguments_that_a_launcher_hands_on_one_by_one_are_handed_over_so():
    compiled = of_run(Apart(False))
    run, function, fixed, encode = launch._hit(compiled, (3, 4), 0)
    assert function is compiled.function and fixed == ("packed", None, None, None) and encode is launch._nothing
    assert run(1, 2, 3, "stream", function, *fixed, (5, 6)) == (1, 2, 3, "stream", function, *fixed, 5, 6)


class Other(Passing):
    """A launcher that hands on other arguments than it was given."""

    def __call__(self, *given):
        self.launch(*given[:9], tuple(map(str, given[9:])))


def test_a_launcher_that_hands_on_other_arguments_is_called_itself():
    compiled = of_run(Other(False))
    assert launch._hit(compiled, (3, 4), 0) == (compiled.run, compiled.function, ("packed", None, None, None), None)


@pytest.fixture
def encoding(monkeypatch):
    """The descriptors that Triton's driver was asked to encode; one with a third argument is a later Triton's."""
    seen = []

    def make_tensordesc_arg(desc, how, more):
        seen.append((desc, how, more))
        return f"{how} {len(seen)}"

    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", SimpleNamespace(make_tensordesc_arg=make_tensordesc_arg))
    utils = SimpleNamespace(launch=lambda *given: given)
    active = SimpleNamespace(stands_in=True, utils=utils)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(_active=active, active=active))
    return seen


def test_a_hit_hands_descriptors_over_encoded_each_once(encoding, monkeypatch):
    """One is known again by its place, address, shape and strides, and what is known does not grow without an end."""
    compiled = of_run(Passing(False), ["first", "second"])
    run, _, fixed, encode = launch._hit(compiled, (DESCRIPTOR, DESCRIPTOR, 4), 2)
    assert run is launch.driver.active.utils.launch and fixed == ("packed", None, None, None) and not encoding
    t = torch.zeros(2, 64, 64)
    kinds = [
        TensorDescriptor(t[0], [64, 64], [64, 1], [32, 64]),
        TensorDescriptor(t[1], [64, 64], [64, 1], [32, 64]),
        TensorDescriptor(t[0], [32, 64], [64, 1], [32, 64]),
        TensorDescriptor(t[0], [64, 64], [128, 1], [32, 64]),
    ]
    want = {(place, i): f"{how} {4 * place + i + 1}" for place, how in enumerate(("first", "second")) for i in range(4)}
    for _ in range(2):
        assert {(place, i): encode(place, one) for place in range(2) for i, one in enumerate(kinds)} == want
    assert len(encoding) == 8 and encoding[5] == (kinds[1], "second", None)
    monkeypatch.setattr(launch, "MOST_ENCODED", 8)
    assert encode(0, kinds[0]) == "first 1"
    t = torch.zeros(64, 64)
    assert encode(0, TensorDescriptor(t, [64, 64], [64, 1], [32, 64])) == "first 9"
    assert encode(0, kinds[0]) == "first 10", "it has forgotten what it knew when that was too much"


@pytest.mark.parametrize(("how", "descriptors"), [([None], 1), ([], 1), (None, 1), (["one"], 2), (["one"], 0)])
def test_descriptors_that_a_launcher_does_not_encode_are_left_to_it(encoding, how, descriptors):
    """So are all if one is None in this launch, or if the names of the parameters say another number of them."""
    compiled = of_run(Passing(False), how)
    plain = compiled.run, compiled.function, ("packed", None, None, None), None
    assert launch._hit(compiled, (DESCRIPTOR, 4), descriptors) == plain


def test_descriptors_that_are_handed_on_one_by_one_are_left_to_the_launcher(encoding):
    compiled = of_run(Apart(False), ["one"])
    assert launch._hit(compiled, (DESCRIPTOR, 4), 1)[3] is None


def test_without_tritons_encoder_descriptors_are_left_to_the_launcher(encoding, monkeypatch):
    compiled = of_run(Passing(False), ["one"])
    monkeypatch.delitem(sys.modules, "triton.backends.nvidia.driver")
    assert launch._hit(compiled, (DESCRIPTOR, 4), 1)[3] is None


class Number(int):
    """An integer of another class."""


def test_kinds_of_integers_are_known_again_and_forgotten_when_they_are_many(monkeypatch):
    kinds = launch._Kinds()
    monkeypatch.setattr(launch, "MOST_KINDS", 3)
    for n, known in ((1, [1]), (16, [1, 16]), (2**31, [1, 16, 2**31]), (True, [1, 16, 2**31]), (5, [5]), (16, [5, 16])):
        assert kinds[n] == launch.kind_of(n) and [*kinds] == known
    assert kinds[Number(32)] == launch.kind_of(32) and [*kinds] == [5, 16], "only plain integers are kept"


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
    for path in (Path(launch.__file__).parents[1] / "kernels" / "triton").glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        launched = {one.args[0].id for one in nodes if isinstance(one, ast.Call) and ast.unparse(one.func) == "launcher"}
        for kernel in nodes:
            if isinstance(kernel, ast.FunctionDef) and kernel.name in launched:
                taken = own & {arg.arg for arg in kernel.args.args}
                assert not taken, f"{path.name}: {kernel.name}: {taken}"
                found += 1
    assert found > 60
