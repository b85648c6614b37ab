"""`@kernel`: one declaration gives a kernel its schema, its torch implementation, its Triton implementation and its fake.

The decorated body is the torch implementation: obvious before fast, the default on CPU and always the reference. Its
annotations are the schema. `@name.triton` adds the Triton implementation, in the file of the same name in a package of
`FAMILIES`, which is imported on first use; `@name.fake` gives the shapes of the results, from the arguments that it
names (without a fake, the torch body runs on fake tensors). `@name.plain` is the formula beside a body that is fast but not
obvious: it is there to be read, and the tests compare the body with it.

An eager call goes straight to an implementation. A tracer traces through a torch implementation, because a compiler needs its
aten operators. A Triton implementation is opaque to a tracer, so while tracing it is called as a `torch.library` operator,
defined on first use. So is a torch implementation with `opaque=True`, which reads values on the host: its work depends on them,
but its results' shapes do not.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import threading
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from funcops.engine.backend import select
from funcops.engine.backend.source import compile_source
from funcops.engine.errors import fail, require

__all__ = ["FAMILIES", "KERNELS", "Kernel", "capturing", "readable", "tracing", "watched"]

# past torch's question whether CUDA is initialised, where torch has CUDA: a tensor is on it
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: torch.cuda.current_device())
Implementation = Callable[..., Any]
KERNELS: weakref.WeakSet[Any] = weakref.WeakSet()  # all that are declared
FAMILIES: list[str] = []  # packages of Triton implementations, in files with the names of those that declare the kernels
operators = torch.library.Library("funcops", "FRAGMENT")
_defining = threading.Lock()  # an operator is defined once, by whichever thread needs it first


def tracing() -> bool:
    """True under torch.compile, make_fx and FakeTensorMode, but not under a mode that runs every operator unchanged (`runs =
    True`)."""
    if torch.compiler.is_dynamo_compiling():  # an export without Dynamo has a mode
        return True
    modes = torch._C._len_torch_dispatch_stack()
    return modes > 0 and not all([getattr(torch._C._get_dispatch_stack_at(i), "runs", False) for i in range(modes)])


def watched() -> bool:
    """True if something observes operators: a tracer, or any mode."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def capturing() -> bool:
    """Whether a graph is being captured: by CUDA, or by a mode that records operators to run them again (`records = True`)."""
    modes = range(torch._C._len_torch_dispatch_stack())
    recorded = any([getattr(torch._C._get_dispatch_stack_at(i), "records", False) for i in modes])
    return recorded or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def readable(t: Tensor) -> bool:
    """Whether the host may read the values of `t`: on a device it would wait, and a tracer, vmap, or a mode without `reads = True`
    has no values, or would take them as constants."""
    if not t.is_cpu or torch.compiler.is_compiling() or is_functorch_wrapped_tensor(t):
        return False
    modes = range(torch._C._len_torch_dispatch_stack())
    return all([getattr(torch._C._get_dispatch_stack_at(i), "reads", False) for i in modes])


class Kernel:
    """A tensor-in, tensor-out function with up to two implementations."""

    def __init__(
        self, body: Implementation, mutates: tuple[str, ...], library: bool, product: bool, opaque: bool, rows: str = "mixed"
    ) -> None:
        self.name, self.module, self.rows = body.__name__, body.__module__, rows
        self.mutates, self.library, self.product, self.opaque = mutates, library, product, opaque
        self.torch_impl = body
        self.triton_impl: Implementation | None = None
        # a kernel declared elsewhere has no file in our families
        self.unsought = body.__module__.startswith("funcops.")
        self.fake_impl: Implementation = body
        self.formula: Implementation | None = None
        self.flops: Implementation | None = None  # of an opaque body's products, from the arguments that it names
        self.scope: dict[str, Any] = {}  # the globals of its calls
        self._operator: Implementation | None = None
        self._torch_operator: Implementation | None = None

    def triton(self, launch: Implementation) -> Implementation:
        """Decorator: `launch` is the Triton implementation. Each tensor that it writes to in place gets a new version."""
        self.triton_impl = _counted(launch, self.torch_impl, self.mutates) if self.mutates else launch
        return launch

    def fake(self, outputs: Implementation) -> Implementation:
        """Decorator: `outputs` allocates the results without computing them, from the arguments that it names."""
        names = list(inspect.signature(self.torch_impl).parameters)
        named = list(inspect.signature(outputs).parameters)
        for name in named:
            require(name in names, f"fake of kernel {self.name!r}", "an argument", f"one of {', '.join(names)}", repr(name))

        def fake(*args: Any) -> Any:  # without trailing arguments that have their default
            given = dict(zip(names, args, strict=False))
            return outputs(**{name: given[name] for name in named if name in given})

        self.fake_impl = fake
        return outputs

    def plain(self, formula: Implementation) -> Implementation:
        """Decorator: `formula` computes every result as in the math, whether requested or not, and then the new values of the
        arguments that the kernel writes to. It writes to no argument."""
        self.formula = formula
        return formula

    def operator(self) -> Implementation:
        """This kernel's Triton implementation as a `torch.library` operator."""
        if self._operator is None:
            require(self.triton_impl is not None, self.name, "backend 'triton'", "implemented", "no implementation")
            with _defining:
                # asked again under the lock: another thread may have defined it meanwhile
                self._operator = self._operator or self._define(self.name, self.triton_impl)
        return self._operator

    def torch_operator(self) -> Implementation:
        """This kernel's torch implementation as a `torch.library` operator."""
        if self._torch_operator is None:
            with _defining:
                self._torch_operator = self._torch_operator or self._define(f"{self.name}_by_torch", self.torch_impl)
        return self._torch_operator

    def _define(self, name: str, implementation: Implementation | None) -> Implementation:
        operators.define(name + _schema(self.torch_impl, self.mutates))
        # one for every device, as the implementation is chosen before the operator is called
        operators.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"funcops::{name}", functools.partial(_contiguous, self.fake_impl), lib=operators)
        return getattr(torch.ops.funcops, name).default  # type: ignore[no-any-return]

    def _by_torch(self) -> Implementation:
        if self.opaque and watched():
            self.ready_by_torch()
            return self.torch_operator()
        return self.torch_impl

    def ready_by_torch(self) -> bool:
        """Define the torch implementation's operator, outside of the traced code, as `ready` does."""
        self.torch_operator()
        return True

    ready_by_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def choose(self, first: Tensor) -> Implementation:
        """The implementation for tensors like `first`, in the current mode."""
        found = select.choice() if select.chosen_anywhere else select.DEFAULT
        if found[2] is not None:
            return found[2](self, first)  # type: ignore[no-any-return]
        # without a block or a variable the device decides, and no context is read
        wanted = select.wants_triton(first, found) if select.chosen_anywhere else first.is_cuda
        if self.library or not wanted or first.dtype is torch.float64:
            return self._by_torch() if self.opaque else self.torch_impl
        # `watched`, in every launch
        seen = torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
        if self.product:
            provider = select.gemm_provider()
            if provider == "cublas" or (seen and provider == "auto" and tracing()):
                return self.torch_impl
        if seen:
            # a tracer or mode sees this operator; a direct launch would bypass torch's dispatcher
            return self.operator() if self.ready() else self._without_triton()
        if self.triton_impl is None and not self.find_triton():
            return self._without_triton()
        if first.is_cuda and first.get_device() != current_device():
            return functools.partial(_on_device, first.device, self.triton_impl)  # type: ignore[arg-type]
        return self.triton_impl  # type: ignore[return-value]

    def ready(self) -> bool:
        """Whether a Triton implementation exists; if so, define its operator. Files are imported and operators defined outside of
        the traced code: torch.compile runs this function eagerly and takes the result as a constant.
        (`torch.compiler.assume_constant_result` sets the same mark, but imports the compiler.)"""
        return self.find_triton() and self.operator() is not None

    ready._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _without_triton(self) -> Implementation:
        why = "it has no Triton implementation" if importlib.util.find_spec("triton") else "Triton is not installed"
        require(select.choice()[0] is None, self.name, "backend", f"'torch' ({why})", "'triton'")
        return self._by_torch()

    def find_triton(self) -> bool:
        """Import the file of the Triton implementation, once, and return whether one exists."""
        if self.unsought and FAMILIES:  # without the kernels, which may be imported later, there is nothing to find
            self.unsought = False
            for family in [f"{package}.{self.module.rpartition('.')[2]}" for package in FAMILIES]:
                if importlib.util.find_spec("triton") and importlib.util.find_spec(family):
                    importlib.import_module(family)
        return self.triton_impl is not None


def _contiguous(fake: Implementation, *args: Any) -> Any:
    """Make fake results contiguous: a Triton implementation's results are, whatever the strides of its arguments."""
    found = fake(*args)
    if isinstance(found, tuple):
        return tuple([t if t is None else t.contiguous() for t in found])
    return found if found is None else found.contiguous()


def _counted(launch: Implementation, body: Implementation, mutates: tuple[str, ...]) -> Implementation:
    """Count the writes of a launch, which torch does not see: autograd and residuals rely on versions."""
    names = list(inspect.signature(body).parameters)
    places = [names.index(name) for name in mutates]

    @functools.wraps(launch)
    def counted(*args: Any) -> Any:
        result = launch(*args)
        for place in places:
            if args[place] is not None:
                torch.autograd.graph.increment_version(args[place])
        return result

    return counted


def _on_device(device: torch.device, implementation: Implementation, *args: Any) -> Any:
    """Run a Triton launch, which goes to the current device, on its tensors' device, as an aten operator would."""
    with torch.cuda.device(device):
        return implementation(*args)


def kernel(
    body: Any = None,
    /,
    *,
    mutates: tuple[str, ...] = (),
    library: bool = False,
    product: bool = False,
    opaque: bool = False,
    rows: str = "mixed",
) -> Callable[[Implementation], Any]:
    """Declare a kernel. `mutates` names the arguments that it writes to. `library`: torch's own kernels are the implementation on
    every device. `product`: it is a bare matrix product, which `gemm` may leave to cuBLAS. `opaque`: the body reads values on the
    host, so a tracer sees one operator with the results of `.fake`, which must be given; `fit` counts the products of such a body
    by `call.kernel.flops`, a function of the arguments that it names. `rows`: whether the bits of a row on the
    CPU depend on which other rows come with it: "each" if they never do (of sums over rows, such as a weight gradient, nothing is
    said), "pinned" if they do not by the body that `funcops.library.kernels.pins` has for it, else "mixed". The result is called
    positionally, and has the decorators `.triton`, `.fake` and `.plain`.

    float64 always runs on the torch implementation, as the reference for the other dtypes. Raises `TypeError` for a decorator that
    is not called, and an argument or result without an annotation; `ValueError` for `mutates` of no argument, or other `rows`.
    """
    if body is not None:
        fail(f"kernel {getattr(body, '__name__', body)!r}", "the decorator", "called, @kernel()", "@kernel", TypeError)

    def decorate(body: Implementation) -> Any:
        parameters, where = inspect.signature(body).parameters, f"kernel {body.__name__!r}"
        names = list(parameters)
        for name in (*names, "return"):
            if name not in body.__annotations__:
                wanted = "annotated: Tensor, Optional[Tensor], a number or a string, and the result Tensor or a tuple of them"
                fail(where, name, wanted, "no annotation", TypeError)
        for name in mutates:
            require(name in names, where, "mutates", f"names of its arguments, {', '.join(names)}", repr(name))
        require(rows in ("each", "pinned", "mixed"), where, "rows", "'each', 'pinned' or 'mixed'", repr(rows))
        declared = Kernel(body, mutates, library, product, opaque, rows)

        call: Any = functools.wraps(body)(_write_call(body, declared, parameters))
        call.kernel, call.triton, call.fake, call.plain = declared, declared.triton, declared.fake, declared.plain
        return call

    return decorate


def _schema(body: Implementation, mutates: tuple[str, ...]) -> str:
    """The body's operator schema. `torch.library.infer_schema` handles every argument here, but not an optional result."""
    hints = typing.get_type_hints(body)
    signature = inspect.signature(body)
    parameters = [p.replace(annotation=hints[name]) for name, p in signature.parameters.items()]

    def prototype() -> None: ...

    prototype.__signature__ = signature.replace(parameters=parameters, return_annotation=Tensor)  # type: ignore[attr-defined]
    arguments = torch.library.infer_schema(prototype, mutates_args=mutates).rpartition(" -> ")[0]
    returned = hints["return"]
    results = typing.get_args(returned) if typing.get_origin(returned) is tuple else (returned,)
    named = ["Tensor" if r is Tensor else "Tensor?" for r in results if r is not type(None)]
    return f"{arguments} -> {named[0] if len(named) == 1 else '(' + ', '.join(named) + ')'}"


_CALL = """
def call({parameters}):
    if {first}.is_cpu and not select.chosen_anywhere{seen}:
        return body({names})
    return choose({first})({names})
"""


def _write_call(body: Implementation, declared: Kernel, parameters: Mapping[str, inspect.Parameter]) -> Any:
    """Generate the dispatch with the body's own argument names: it runs in every call of a kernel."""
    names = list(parameters)
    defaults = [name if p.default is p.empty else f"{name}={p.default!r}" for name, p in parameters.items()]
    # the tensors of a list are on one device, so the first one decides
    first = names[0] + ("[0]" if str(body.__annotations__[names[0]]).startswith("list") else "")
    scope = declared.scope = {"body": body, "select": select, "choose": declared.choose, "watched": watched}
    KERNELS.add(declared)
    seen = " and not watched()" if declared.opaque else ""
    text = _CALL.format(parameters=", ".join(defaults), names=", ".join(names), first=first, seen=seen)
    return compile_source(f"call of {body.__name__}", text, scope)["call"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel computes and keeps statistics: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32
