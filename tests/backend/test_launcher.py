"""The launcher in this process, with stand-ins for the driver and for what Triton compiles: keys, hits, and what is handed over."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from funcops.engine.backend import launch
from funcops.testing import aot


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
    assert kernel.compiled[0] == ((4, 2, 3), (*GIVEN.values(),), {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True})
    if name in ALIKE:
        ((*grid, stream, function, packed, _, _, _, handed),) = kernel.ran
        assert (grid, stream, function, packed, len(kernel.compiled)) == ([5, 6, 7], 0, "function", "packed", 1)
        assert handed == (given["a_ptr"].data_ptr(), *[given[key] for key in ("n", "seed", "scale", "BLOCK")])
    else:
        assert not kernel.ran and len(kernel.compiled) == len(run.cache) == 2
        grid, arguments, told = kernel.compiled[1]
        assert grid == (5, 6, 7) and told == {**options, "enable_fp_fusion": True}
        assert all(a is b for a, b in zip(arguments, given.values(), strict=True))


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
