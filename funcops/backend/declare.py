"""`@kernel`: one declaration gives a kernel its schema, its torch implementation, its Triton one and its fake.

The decorated body is the torch implementation: obvious before fast, the default on CPU and always the reference. Its
annotations are the schema. `@name.triton` adds the Triton implementation, in the file of the same name under
`funcops/kernels/triton`, which is imported when it is first asked for; `@name.fake` says what shapes come out (the
torch body itself serves where no fake is given, since it can run on fake tensors). `@name.plain` is the formula, beside
a body that is fast and not obvious: it is there to be read, and the tests hold the body to it.

An eager call goes straight to an implementation. A torch implementation is traced through (its aten operators are what
a compiler wants to see); a Triton one is opaque to a tracer, so while tracing it is called as a `torch.library`
operator, defined on first use. So is a torch one that says (`opaque=True`) that it reads values on the host: what it does
depends on them, and only its results' shapes do not.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import threading
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.backend import select
from funcops.backend.source import compile_source
from funcops.errors import require

Implementation = Callable[..., Any]
operators = torch.library.Library("funcops", "FRAGMENT")
_defining = threading.Lock()  # an operator is defined once, whichever thread is the first to ask


def tracing() -> bool:
    """True under torch.compile, make_fx and FakeTensorMode; not under a mode that says (`runs = True`)
    that it runs every operator as it is."""
    if torch.compiler.is_compiling():
        return True
    modes = torch._C._len_torch_dispatch_stack()
    return modes > 0 and not all([getattr(torch._C._get_dispatch_stack_at(i), "runs", False) for i in range(modes)])


def watched() -> bool:
    """True under whatever sees operators: a tracer, or any mode."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


class Kernel:
    """A tensor-in, tensor-out function with up to two implementations."""

    def __init__(self, body: Implementation, mutates: tuple[str, ...], library: bool, product: bool, opaque: bool) -> None:
        self.name, self.module = body.__name__, body.__module__
        self.mutates, self.library, self.product, self.opaque = mutates, library, product, opaque
        self.torch_impl = body
        self.triton_impl: Implementation | None = None
        self.unsought = body.__module__.startswith("funcops.")
        self.fake_impl: Implementation = body
        self.formula: Implementation | None = None
        self._operator: Implementation | None = None
        self._torch_operator: Implementation | None = None

    def triton(self, launch: Implementation) -> Implementation:
        """Decorator: `launch` is the Triton implementation. What it writes to in place counts the write."""
        self.triton_impl = _counted(launch, self.torch_impl, self.mutates) if self.mutates else launch
        return launch

    def fake(self, outputs: Implementation) -> Implementation:
        """Decorator: `outputs` allocates the results without computing them."""
        self.fake_impl = outputs
        return outputs

    def plain(self, formula: Implementation) -> Implementation:
        """Decorator: `formula` computes every result as in the math, asked for or not, and after them what the arguments that the
        kernel writes to will hold. It writes to none."""
        self.formula = formula
        return formula

    def operator(self) -> Implementation:
        """This kernel's Triton implementation as a `torch.library` operator."""
        if self._operator is None:
            require(self.triton_impl is not None, self.name, "backend 'triton'", "implemented", "no implementation")
            with _defining:
                self._operator = self._operator or self._define(self.name, self.triton_impl)
        return self._operator

    def torch_operator(self) -> Implementation:
        """The torch implementation likewise."""
        if self._torch_operator is None:
            with _defining:
                self._torch_operator = self._torch_operator or self._define(f"{self.name}_by_torch", self.torch_impl)
        return self._torch_operator

    def _define(self, name: str, implementation: Implementation | None) -> Implementation:
        operators.define(name + _schema(self.torch_impl, self.mutates))
        operators.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"funcops::{name}", functools.partial(_contiguous, self.fake_impl), lib=operators)
        return getattr(torch.ops.funcops, name).default  # type: ignore[no-any-return]

    def _by_torch(self) -> Implementation:
        if self.opaque and watched():
            self.ready_by_torch()
            return self.torch_operator()
        return self.torch_impl

    def ready_by_torch(self) -> bool:
        """As `ready`, of the torch implementation."""
        self.torch_operator()
        return True

    ready_by_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def choose(self, first: Tensor) -> Implementation:
        """The implementation for tensors like `first`, in the current mode."""
        if self.library or not select.wants_triton(first) or first.dtype is torch.float64:
            return self._by_torch() if self.opaque else self.torch_impl
        if self.product and (select.gemm_provider() == "cublas" or (tracing() and select.gemm_provider() == "auto")):
            return self.torch_impl
        if watched():
            # whatever watches operators sees this one, not a launch behind torch's back
            return self.operator() if self.ready() else self._without_triton()
        if self.triton_impl is None and not self.find_triton():
            return self._without_triton()
        if first.is_cuda and first.get_device() != torch.cuda.current_device():
            return functools.partial(_on_device, first.device, self.triton_impl)  # type: ignore[arg-type]
        return self.triton_impl  # type: ignore[return-value]

    def ready(self) -> bool:
        """Whether there is a Triton implementation; then its operator is there after this. Files are imported and operators defined
        outside of what is traced: torch.compile calls this as it is, for a constant. (`torch.compiler.assume_constant_result` sets
        this very mark, and would import the compiler for it.)"""
        found = self.find_triton()
        if found:
            self.operator()
        return found

    ready._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _without_triton(self) -> Implementation:
        why = "it has no Triton implementation" if importlib.util.find_spec("triton") else "Triton is not installed"
        require(select.forced() is None, self.name, "backend", f"'torch' ({why})", "'triton'")
        return self._by_torch()

    def find_triton(self) -> bool:
        """Import the file that holds the Triton implementation, once, and say whether there is one."""
        if self.unsought:
            self.unsought = False
            family = "funcops.kernels.triton." + self.module.rpartition(".")[2]
            if importlib.util.find_spec("triton") and importlib.util.find_spec(family):
                importlib.import_module(family)
        return self.triton_impl is not None


def _contiguous(fake: Implementation, *args: Any) -> Any:
    """The results of Triton implementations are contiguous, whatever the strides of the arguments."""
    found = fake(*args)
    if isinstance(found, tuple):
        return tuple([t if t is None else t.contiguous() for t in found])
    return found if found is None else found.contiguous()


def _counted(launch: Implementation, body: Implementation, mutates: tuple[str, ...]) -> Implementation:
    """A launch writes behind torch's back: autograd and residuals would see no version change."""
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
    """A Triton launch goes to the current device, an aten operator to its tensors'."""
    with torch.cuda.device(device):
        return implementation(*args)


def kernel(
    *, mutates: tuple[str, ...] = (), library: bool = False, product: bool = False, opaque: bool = False
) -> Callable[[Implementation], Any]:
    """Declare a kernel. `mutates` names the arguments that it writes to; `library` says that torch's own kernels are the
    implementation on every device; `product`, that it is a bare matrix product, which `gemm` may leave to cuBLAS; `opaque`, that
    the body reads values on the host: a tracer sees one operator, whose results are those of `.fake`, which must be given. The
    result is called positionally, and has the decorators `.triton`, `.fake` and `.plain`.

    float64 always runs on the torch implementation: it is there to check the others by.
    """

    def decorate(body: Implementation) -> Any:
        declared = Kernel(body, mutates, library, product, opaque)

        call: Any = functools.wraps(body)(_write_call(body, declared))
        call.kernel, call.triton, call.fake, call.plain = declared, declared.triton, declared.fake, declared.plain
        return call

    return decorate


def _schema(body: Implementation, mutates: tuple[str, ...]) -> str:
    """The body's operator schema. `torch.library.infer_schema` knows every argument here, but no optional result."""
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


def _write_call(body: Implementation, declared: Kernel) -> Any:
    """The dispatch, written out with the body's own argument names: it runs in every call of a kernel."""
    parameters = inspect.signature(body).parameters
    names = list(parameters)
    defaults = [name if p.default is p.empty else f"{name}={p.default!r}" for name, p in parameters.items()]
    first = names[0] + ("[0]" if str(body.__annotations__[names[0]]).startswith("list") else "")
    scope: dict[str, Any] = {"body": body, "select": select, "choose": declared.choose, "watched": watched}
    seen = " and not watched()" if declared.opaque else ""
    text = _CALL.format(parameters=", ".join(defaults), names=", ".join(names), first=first, seen=seen)
    return compile_source(f"call of {body.__name__}", text, scope)["call"]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel computes and keeps statistics: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32
