"""Launch Triton kernels through our own cache.

`kernel[grid](...)` binds and specialises its arguments at every call, which takes longer than many kernels run. `launcher`
generates, once from the kernel's parameters, a function whose cache key is all that Triton specialises on:

    *_ptr      a tensor or None: dtype, whether the address is a multiple of 16, and on AMD whether its memory exceeds 31 bits
    *_desc     a TensorDescriptor or None: dtype and block shape
    constexpr  the value
    fp*        annotated `tl.float32` and the like, or annotated and in `do_not_specialize`: nothing
    others     integers: whether 1, whether a multiple of 16, whether more than 32 bits

together with num_warps, num_stages and the device. A miss compiles and launches through Triton; a hit goes straight to
the compiled kernel. If launch hooks are set (a profiler's), and in the interpreter, every call goes through Triton.

The stages of a launch, `num_stages` or a constexpr STAGES, are the most that it may have: it has fewer where the device's shared
memory (`engine.backend.shared`) does not hold as many. What a kernel declares to need is asked before it is compiled; a kernel
that declares nothing is compiled again with fewer stages until it fits, as is one on whose pipeline a pass of Triton fails.

On an NVIDIA device a hit hands over addresses instead of tensors, past the launcher object, because Triton would ask the driver
about every tensor again, and keeps the descriptors that it encoded. A launch with a tensor in the host's memory has a key of its
own, and goes through Triton's check of it every time.

`compiled_launches` collects the kernels compiled in its block: with a stubbed driver, it builds every kernel exactly as it is
launched, for a device that this machine does not have (`funcops.testing.aot`). `planned_launches` collects the same launches and
compiles nothing.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Optional

import torch
import triton
from triton import OutOfResources, knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from funcops.engine.backend.shared import Need, shared_memory
from funcops.engine.backend.source import compile_source
from funcops.engine.errors import fail

__all__ = ["MOST", "Launched", "compiled_launches", "launched_kernels", "launcher", "need_of", "planned_launches", "use_driver"]


@functools.cache
def mend() -> None:
    """Patch the interpreter, once per process, before it runs the first kernel."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    kind = interpreter.InterpreterBuilder
    before = kind.create_splat

    def create_splat(self: Any, *args: Any) -> Any:
        handle = before(self, *args)
        # the arguments are the shape or type of the block and the value to fill it with; their order differs between versions
        scalar = next(arg for arg in args if isinstance(arg, interpreter.TensorHandle))
        if scalar.data.dtype == np.bool_ and handle.data.dtype != np.bool_:
            return interpreter.TensorHandle(handle.data.astype(np.bool_), tl.int1)
        return handle

    kind.create_splat = create_splat
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *args: Any) -> None:
        patch(tensor, *args)  # which records the old methods, to restore them
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_lang_tensor


_SOURCE = """
def launch(gx, gy, gz, {parameters}, num_warps=4, num_stages=3):
    if gy > MOST or gz > MOST:
        too_many(gx, gy, gz)
    device = current_device()
    try:
        {addresses}
        key = ({quick}, {aligned}, num_warps, num_stages, device)
    except (AttributeError, RuntimeError, TypeError):
        check_names(({parameters},))
        raise
    hit = cache.get(key)
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    if hit is None or entering or leaving or ((enter is not ENTER or leave is not LEAVE) and hooked(enter, leave)):
        return miss(key, ({key}, num_warps, num_stages), (gx, gy, gz), ({parameters},))
    run, function, fixed, described = hit
    if described is None:
        run(gx, gy, gz, current_stream(device), function, *fixed, {parameters})
    else:
        run(gx, gy, gz, current_stream(device), function, *fixed, ({handed},))
"""


MOST = 65_535  # programs along the second or third dimension of a grid on an NVIDIA device
FAILED = "PassManager::run failed"  # all that Triton's error says of which pass of its compiler failed
MOST_ENCODED, MOST_KINDS = 4096, 65_536  # descriptors that a compiled kernel keeps, and kinds of integers


class Launched(NamedTuple):
    """A kernel compiled for one launch, or only planned: then `compiled` is None. `key`: all that it is specialised on except the
    device, warps and stages included."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    key: tuple[Any, ...]
    compiled: Any

    @property
    def stages(self) -> int:
        return int(self.arguments.get("STAGES", self.key[-1]))

    def with_fewer_stages(self) -> Launched:
        """This launch with one stage less."""
        key, fewer = list(self.key), self.stages - 1
        if "STAGES" not in self.arguments:
            return self._replace(key=(*key[:-1], fewer))
        key[list(self.arguments).index("STAGES")] = fewer
        return self._replace(key=tuple(key), arguments={**self.arguments, "STAGES": fewer})

    def fitting(self, need: Optional[Need]) -> Launched:
        """This launch with the most stages whose declared need the current device's shared memory holds."""
        memory, found = shared_memory(), self
        while need is not None and found.stages > 1 and need(found.arguments, found.stages, memory) > memory.limit:
            found = found.with_fewer_stages()
        return found

    def compile(self) -> Launched:
        """Compile this launch on the active driver, with fewer stages if it exceeds the device's shared memory, or if a pass of
        Triton fails on its pipeline, as 3.9's for gfx950. If nobody asks for its results, the driver must be stubbed, because
        Triton launches what it compiles."""
        *_, num_warps, num_stages = self.key
        # a product and its sum are one instruction: Triton 3.9 warns where a launch leaves it open, and 3.10 parts the two
        options = {
            "num_warps": num_warps,
            "num_stages": num_stages,
            "enable_fp_fusion": knobs.language.default_fp_fusion or knobs.getenv("TRITON_DEFAULT_FP_FUSION") is None,
        }
        try:
            return self._replace(compiled=self.kernel[self.grid](*self.arguments.values(), **options))
        except OutOfResources as error:
            if error.name != "shared memory":
                raise
            limit = f"at most the device's {error.limit:,} bytes: pass smaller blocks"
            told = "shared memory", limit, f"{error.required:,} bytes"
        except RuntimeError as error:
            if FAILED not in str(error):
                raise
            told = "code", "what Triton can compile here: try another version of it", f"Triton {triton.__version__}: {FAILED}"
        if self.stages <= 1:
            fail(f"kernel {self.kernel.__name__.lstrip('_')}", *told, RuntimeError)
        return self.with_fewer_stages().compile()


_launchers: list[tuple[Any, dict[Any, Any], Optional[Need]]] = []  # kernels, their caches, and what they declare to need
_scopes: list[dict[str, Any]] = []  # of the launchers
_collected: list[Launched] | None = None
_planning = False


def compiled_launches(found: list[Launched] | None = None) -> AbstractContextManager[list[Launched]]:
    """Collect the launches of the block, one per specialisation, in `found` if it is given. All caches are empty at its start and
    its end."""
    return _collecting([] if found is None else found, planning=False)


def planned_launches() -> AbstractContextManager[list[Launched]]:
    """Collect launches as `compiled_launches` does, but compile and run nothing: no tensor is written to."""
    return _collecting([], planning=True)


@contextmanager
def _collecting(found: list[Launched], *, planning: bool) -> Iterator[list[Launched]]:
    global _collected, _planning
    before = _collected, _planning
    _collected, _planning = found, planning
    # a launch that hits its cache would not be collected
    for _, cache, _ in _launchers:
        cache.clear()
    try:
        yield found
    finally:
        _collected, _planning = before
        # what a plan put there runs nothing, and must not outlive it
        for _, cache, _ in _launchers:
            cache.clear()


def launched_kernels() -> list[Any]:
    """The kernels with a launcher in the families imported so far."""
    return [kernel for kernel, *_ in _launchers]


def need_of(kernel: Any) -> Optional[Need]:
    """The need of shared memory that a kernel declares; None if it declares none."""
    return next(need for known, _, need in _launchers if known is kernel)


def launcher(kernel: Any, shared: Optional[Need] = None) -> Callable[..., None]:
    """`launch(gx, gy, gz, *arguments, num_warps=4, num_stages=3)`, the arguments in the kernel's own order, constexprs
    included. The tensors must be on the current device. `shared(arguments, stages, memory)`: at least the bytes of shared memory
    that a launch takes, from the arguments by name and the device's `SharedMemory`."""
    if not isinstance(kernel, JITFunction):
        return _interpreted(kernel)
    cache: dict[Any, Any] = {}
    _launchers.append((kernel, cache, shared))
    names = [parameter.name for parameter in kernel.params]

    def miss(key: Any, told: Any, grid: Any, arguments: Any) -> None:
        launched = Launched(kernel, grid, dict(zip(names, arguments, strict=True)), told, None).fitting(shared)
        if not _planning:
            launched = launched.compile()
        # with hooks every launch comes here, and some differ only in stages that the device does not have
        if _collected is not None and key not in cache and not (shared and _has(_collected, launched)):
            _collected.append(launched)
        compiled, arguments = launched.compiled, tuple(launched.arguments.values())
        cache[key] = (_nothing, None, (), None) if _planning else _hit(compiled, arguments, len(described))

    described = [name for name in names if name.endswith("_desc")]
    hip, hooks = torch.version.hip is not None, knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    scope: dict[str, Any] = {"cache": cache, "miss": miss, "hooks": hooks, "MOST": MOST, "hooked": _hooked}
    scope |= {"kinds": _kinds, "kind_of": kind_of}
    scope |= {"ENTER": enter, "LEAVE": leave, "entering": _calls(enter), "leaving": _calls(leave)}
    scope |= {"too_many": functools.partial(_too_many, kernel), "check_names": functools.partial(_check_names, kernel)}
    _scopes.append(scope)
    _bind(scope)
    at = [f"at_{name} = 0 if {name} is None else {name}.data_ptr()" for name in names if name.endswith("_ptr")]
    handed = [
        f"at_{name}" if name.endswith("_ptr") else f"*described({described.index(name)}, {name})" if name in described else name
        for name in names
    ]
    text = _SOURCE.format(
        parameters=", ".join(names),
        addresses="; ".join(at) or "pass",
        aligned=aligned_of(names, hip),
        key=", ".join([key_of(parameter, hip) for parameter in kernel.params]),
        quick=", ".join([key_of(parameter, hip, quick=True) for parameter in kernel.params]),
        handed=", ".join(handed),
    )
    launch: Any = compile_source(f"launch of {kernel.fn.__name__}", text, scope)["launch"]
    launch.cache = cache
    return launch


def _has(collected: list[Launched], launched: Launched) -> bool:
    return any([one.kernel is launched.kernel and one.key == launched.key for one in collected])


def _calls(hook: Any) -> Any:
    return getattr(hook, "calls", hook)


def _hooked(enter: Any, leave: Any) -> bool:
    return bool(_calls(enter) or _calls(leave))


def _hit(compiled: Any, arguments: tuple[Any, ...], descriptors: int) -> tuple[Any, Any, tuple[Any, ...], Any]:
    """How the next launches like this one run: what to call, the function, the arguments that do not change, and a function that
    encodes a descriptor, which is None if tensors are handed over."""
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    plain = run, function, (packed, None, None, None), None
    on_host = any([t.is_cpu for t in arguments if isinstance(t, torch.Tensor)]) and not getattr(driver._active, "stands_in", False)
    scratch = [getattr(run, name, 0) for name in ("global_scratch_size", "profile_scratch_size")]
    # a descriptor may be None, which cannot be encoded: Triton sees to such a launch
    none_left_out = descriptors == sum([hasattr(a, "block_shape") for a in arguments])
    # Triton's launcher allocates scratch memory for each launch, and checks tensors in the host's memory
    if on_host or any(scratch) or not none_left_out or not hasattr(run, "launch") or torch.version.hip is not None:
        return plain
    probe, found = copy.copy(run), []
    # asks Triton's launcher how it passes its arguments on, and launches nothing
    probe.launch = lambda *given: found.append(given)
    first = *[object() for _ in range(4)], function  # the grid, the stream and the function
    probe(*first, packed, None, None, None, *arguments)
    (given,), direct = found, run.launch
    # a version that passes them in another way keeps its launcher
    if not _same(given[:5], first):
        return plain
    encode = _encoded(compiled.metadata) if descriptors else _nothing
    if isinstance(given[-1], tuple) and _same(given[-1], arguments):
        # past the wrapper that would encode the descriptors again
        direct = driver.active.utils.launch if encode is not _nothing else direct
        return (direct, function, given[5:-1], encode) if encode is not None else plain
    if encode is _nothing and _same(given[-len(arguments) :], arguments):  # Triton 3.6 takes them one by one
        return lambda *all: direct(*all[:-1], *all[-1]), function, given[5 : -len(arguments)], encode
    return plain


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all([a is b for a, b in zip(some, others, strict=True)])


def _encoded(metadata: Any) -> Any:
    """A function that encodes the descriptors of one compiled kernel, each once; None if its launcher does not encode them."""
    module, how = sys.modules.get("triton.backends.nvidia.driver"), getattr(metadata, "tensordesc_meta", None)
    encode = getattr(module, "make_tensordesc_arg", None)
    if encode is None or not how or None in how:
        return None
    more = [None] * (encode.__code__.co_argcount - 2)  # Triton 3.8's takes the launch's arguments too, and ignores them
    known: dict[Any, Any] = {}

    def encoded(place: int, desc: Any) -> Any:
        key = place, desc.base.data_ptr(), *desc.shape, *desc.strides
        found = known.get(key)
        if found is None:
            if len(known) >= MOST_ENCODED:
                known.clear()
            found = known[key] = encode(desc, how[place], *more)
        return found

    return encoded


def use_driver(active: Any) -> None:
    """Make `active` the driver of Triton and of every launcher; None: the machine's own driver, found at the first launch."""
    driver._active = active
    for scope in _scopes:
        _bind(scope)


def _bind(scope: dict[str, Any]) -> None:
    """Bind the active driver's methods, which are slow to look up at every launch. Without an active driver, the first launch
    finds it."""
    active = driver._active
    device = _first_device if active is None else active.get_current_device
    # past torch's question whether CUDA is initialised: tensors on it are
    scope["current_device"] = torch._C._cuda_getDevice if device is torch.cuda.current_device else device
    scope["current_stream"] = _first_stream if active is None else active.get_current_stream


def _first_device() -> Any:
    try:
        use_driver(driver.active)
    except RuntimeError as error:
        remedy = "To run kernels in Triton's interpreter, set TRITON_INTERPRET=1 before Triton is imported"
        raise RuntimeError(f"backend: name must be 'torch' without a GPU, got 'triton'. {remedy}") from error
    return driver.active.get_current_device()


def _first_stream(device: Any) -> Any:
    use_driver(driver.active)
    return driver.active.get_current_stream(device)


def _too_many(kernel: Any, *grid: int) -> None:
    wanted = f"of at most {MOST:,} programs along its second and third dimension: call the op on parts of the batch"
    fail(f"kernel {kernel.fn.__name__.lstrip('_')}", "grid", wanted, grid)


def _check_names(kernel: Any, arguments: tuple[Any, ...]) -> None:
    """Raise `TypeError` for a tensor whose parameter has not the name of a pointer: no key for an integer can be made of it."""
    for name, argument in zip(inspect.signature(kernel.fn).parameters, arguments, strict=False):
        if isinstance(argument, torch.Tensor) and not name.endswith("_ptr"):
            where = f"kernel {kernel.__name__.lstrip('_')}"
            fail(where, f"argument {name!r}", "named with _ptr at its end, as a tensor is passed", "a tensor", TypeError)


def _nothing(*_: Any) -> None:
    """Run in place of a kernel by a planned launch."""


def key_of(parameter: Any, hip: bool, quick: bool = False) -> str:
    """The part of the key for one parameter, as source: all that Triton specialises on. `quick`: a part of the key of the
    cache, beside which the addresses at hand are asked, and which tells tensors in the host's memory apart."""
    name = parameter.name
    if parameter.is_constexpr:
        return name
    if name.endswith("_ptr"):
        if quick and not hip:
            return f"None if {name} is None else ({name}.dtype,) if {name}.is_cpu else {name}.dtype"
        far = f", {name}.untyped_storage().size() > 2147483647" if hip else ""
        return f"None if {name} is None else ({name}.dtype, {name}.data_ptr() & 15 == 0{far})"
    if name.endswith("_desc"):
        return f"None if {name} is None else ({name}.base.dtype, *{name}.block_shape)"
    annotation = parameter.annotation_type or ""
    if annotation.startswith(("fp", "bf")) or (annotation and parameter.do_not_specialize):
        return "0"
    return f"kinds[{name}]" if quick else f"kind_of({name})"


def aligned_of(names: list[str], hip: bool) -> str:
    """The part of the cache's key for the alignment of all addresses, as source: True for most launches."""
    places = [f"at_{name}" for name in names if name.endswith("_ptr")]
    each = ", ".join([f"{place} & 15 == 0" for place in places])
    return f"not ({' | '.join(places)}) & 15 or ({each},)" if places and not hip else "None"


def kind_of(n: int) -> int:
    """Return a number for each kind of integer that Triton specialises on."""
    return -1 if n == 1 else (n & 15 == 0) + 2 * (not -2147483648 <= n <= 2147483647)


class _Kinds(dict[int, int]):
    """`kind_of` of integers, which are mostly sizes that were passed before: a look-up takes a third of the time."""

    def __missing__(self, n: int) -> int:
        found = kind_of(n)
        if type(n) is int:
            if len(self) >= MOST_KINDS:
                self.clear()
            self[n] = found
        return found


_kinds = _Kinds()


def _interpreted(kernel: Any) -> Callable[..., None]:
    mend()
    unchecked = [kernel]  # until a launch has passed

    def launch(gx: int, gy: int, gz: int, *arguments: Any, num_warps: int = 4, num_stages: int = 3) -> None:
        if gy > MOST or gz > MOST:
            _too_many(kernel, gx, gy, gz)
        if unchecked:
            _check_names(kernel, arguments)
            unchecked.clear()
        kernel[(gx, gy, gz)](*arguments, num_warps=num_warps, num_stages=num_stages)  # so that patched launches are seen

    return launch
