"""Captures the kernels that torch.compile writes for sm_90, without a GPU, and runs them one by one in the interpreter.

A function is traced on fake CPU tensors, the device is replaced in its graphs, and inductor lowers them as it would for CUDA. Its
wrapper then runs on the CPU, where every launch is intercepted. A device would try each kernel's configurations; here the one that
moves the fewest sectors is taken, among equals the one with the largest blocks. Torch's compiler takes seconds to import, so it is
imported late.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import itertools
import math
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.traffic.calls import RequestedLaunch
from benchmarks.traffic.count import PROCESSORS, Counter
from funcops.testing.aot import stubbed

CUDA = torch.device("cuda", 0)
H100 = types.SimpleNamespace(
    name="H100",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    multi_processor_count=PROCESSORS,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    total_memory=80 * 2**30,
    gcnArchName="",
)
DEVICE: dict[str, Any] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda device=None: H100,
    "synchronize": lambda device=None: None,
}
OF_TORCH = {
    **DEVICE,
    "get_device_capability": lambda device=None: (9, 0),
    "get_rng_state": lambda device=None: torch.empty(16, dtype=torch.uint8),
    "set_rng_state": lambda *_: None,
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
}
OF_INTERFACE = {
    **DEVICE,
    "is_triton_capable": lambda device=None: True,
    "raise_if_triton_unavailable": lambda device=None: None,
    "get_compute_capability": lambda device=None: 90,
    "get_raw_stream": lambda device: 0,
    "exchange_device": lambda device: 0,
    "maybe_exchange_device": lambda device: 0,
}
CPU_INSTEAD = {  # replacements in the wrapper's source
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = int",
    "async_compile = AsyncCompile()": "async_compile = captured_kernels",
    "empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda": (
        "empty_strided_cuda = lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype)"
    ),
    "torch.cuda._DeviceGuard(0)": "contextlib.nullcontext()",
    "torch.cuda.set_device(0)": "pass",
    "device='cuda:0'": "device='cpu'",
}
_numbers = itertools.count()


class _Captured(Exception):
    pass


class Graph:
    """The wrapper's source for one graph, and the shape, strides and dtype of each input tensor, or the input if it is a number."""

    def __init__(self, source: str, inputs: list[Any]) -> None:
        self.source, self.inputs = source, inputs

    def runner(self, below: int) -> Callable[[], Any]:
        """A call on new tensors; integers are below `below`."""
        for old, new in CPU_INSTEAD.items():
            self.source = self.source.replace(old, new)
        scope: dict[str, Any] = {"captured_kernels": _Kernels(), "contextlib": contextlib, "__name__": "captured"}
        with _heuristics():
            exec(compile(self.source, "<captured>", "exec"), scope)
        made = [_tensor(one, below) if isinstance(one, tuple) else one for one in self.inputs]
        return lambda: scope["call"](list(made))


def captured(f: Callable[..., Any], inputs: Sequence[Tensor], backward: bool) -> list[Graph]:
    """The graphs of f on tensors like the inputs: forward, and with `backward` the backward."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    found: list[Graph] = []
    mode = FakeTensorMode()

    def stop(self: Any) -> None:
        found[-1].source = self.codegen()[0].value
        raise _Captured

    def lowered(gm: Any, example_inputs: Any, is_backward: bool = False) -> Any:
        graph, args = gm, example_inputs
        exchanged = copy.deepcopy(graph)
        for node in exchanged.graph.nodes:
            node.args = tuple(CUDA if isinstance(arg, torch.device) else arg for arg in node.args)
            node.kwargs = {name: CUDA if isinstance(arg, torch.device) else arg for name, arg in node.kwargs.items()}
        found.append(Graph("", [(tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in args]))
        with mode:
            moved = [
                torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=CUDA) if isinstance(a, Tensor) else a for a in args
            ]
        try:
            with tracing(TracingContext(mode)):
                compile_fx_inner(exchanged, moved, is_backward=is_backward)
        except Exception as error:
            if not found[-1].source:
                raise error
        return make_boxed_func(graph.forward)

    def partition(graph: Any, args: Any, **named: Any) -> Any:
        joint_graph.joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, args, compiler="inductor", **named)

    with _device(), mock.patch.object(GraphLowering, "compile_to_module", stop), mode:
        fakes = [
            torch.empty(t.shape, dtype=t.dtype).requires_grad_(backward and t.is_floating_point() and t.numel() > 1) for t in inputs
        ]
        compiled = aot_function(
            f, lowered, functools.partial(lowered, is_backward=True), partition, decompositions=select_decomp_table()
        )
        results = compiled(*fakes)
        if backward:
            results = list(results) if isinstance(results, (tuple, list)) else [results]
            torch.autograd.grad(
                results, [t for t in fakes if t.requires_grad], [torch.empty_like(t) for t in results], allow_unused=True
            )
    return found


@contextlib.contextmanager
def _device() -> Iterator[None]:
    """Pretend to have an H100 while inductor lowers; nothing runs on it."""
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph

    worker = type("Worker", (device_interface.CudaInterface.Worker,), {n: staticmethod(f) for n, f in DEVICE.items()})
    interface = type(
        "Interface", (device_interface.CudaInterface,), {"Worker": worker, **{n: staticmethod(f) for n, f in OF_INTERFACE.items()}}
    )
    with contextlib.ExitStack() as stack:
        for name, f in OF_TORCH.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, f))
        stack.enter_context(stubbed())
        stack.enter_context(
            mock.patch.object(joint_graph, "lazy_init", lambda *_, **__: None)
        )  # its patterns are traced on the device
        device_interface.init_device_reg()  # now, as later it would replace ours
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces))
        for name in ("cuda", "cuda:0"):
            device_interface.register_interface_for_device(name, interface)
        yield


@contextlib.contextmanager
def _heuristics() -> Iterator[None]:
    """Keep the kernels that inductor decorates, instead of tuning them."""
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    def kept(
        size_hints: Any,
        configs: Any,
        triton_meta: Any,
        heuristic_type: Any,
        filename: Any = None,
        inductor_meta: Any = None,
        **_: Any,
    ) -> Any:
        return lambda fn: _Kernel(fn, configs, triton_meta, inductor_meta)

    with (
        _device(),
        mock.patch.object(triton_heuristics, "cached_autotune", kept),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
    ):
        yield


@functools.cache
def _sources() -> tempfile.TemporaryDirectory[str]:
    """The folder of the kernels' sources until the process ends: they are read when a kernel is compiled."""
    return tempfile.TemporaryDirectory()


class _Kernels:
    """Replaces inductor's compiler."""

    def triton(self, name: str, source: str, device_str: str = "") -> Any:
        module = f"captured_{next(_numbers)}"
        path = Path(_sources().name) / f"{module}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None and spec.loader is not None
        sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return getattr(loaded, name)

    def wait(self, scope: Any) -> None:
        pass


class _Kernel:
    def __init__(self, fn: Any, configs: Any, triton_meta: Any, inductor_meta: Any) -> None:
        self.fn, self.configs, self.triton_meta, self.inductor_meta = fn, configs, triton_meta, inductor_meta
        self.chosen: Any = None

    def run(self, *args: Any, stream: Any = None, **_: Any) -> None:
        if self.chosen is None:
            self.chosen = (
                min(self.configs, key=lambda config: self._sectors_and_size(config, args))
                if len(self.configs) > 1
                else self.configs[0]
            )
        grid, arguments = self._launch(self.chosen, args)
        self.fn[grid](**arguments, num_warps=self.chosen.num_warps, num_stages=self.chosen.num_stages)

    def _launch(self, config: Any, args: Any) -> tuple[Any, dict[str, Any]]:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        names = self.fn.arg_names
        constants = {names[k] if isinstance(k, int) else k: v for k, v in self.triton_meta.get("constants", {}).items()}
        fixed = {**constants, **config.kwargs}
        arguments = {**dict(zip([name for name in names if name not in fixed], args, strict=True)), **fixed}
        expression = GridExpr.from_meta(self.inductor_meta, config)
        return expression.eval_slow(arguments), {name: arguments[name] for name in names}

    def _sectors_and_size(self, config: Any, args: Any) -> tuple[float, float]:
        grid, arguments = self._launch(config, args)
        counter = Counter([8], 2)
        counter.launch(RequestedLaunch(self.fn, grid, arguments, {}, lambda: None))
        return counter.found[0].bytes.sectors, -math.prod(v for k, v in config.kwargs.items() if k.endswith("BLOCK"))


def _tensor(like: tuple[Any, Any, torch.dtype], below: int) -> Tensor:
    shape, strides, dtype = like
    if dtype.is_floating_point or dtype is torch.bool:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.randint(below, shape).to(dtype).as_strided(shape, strides)
