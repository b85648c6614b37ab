"""`Away`, the base of places that a thread of the host serves, such as files and the memory of another rank.

A forward copies the tensor (on a device into pinned memory, on the stream for copies), and a thread takes the copy to its place,
where it is let go when its bytes are there. A backward gets them back: for a layer of a repeat while the layer after it runs its
backward, else when the reader asks. The tree has a tensor without memory in the place of the bytes, so `report` counts them and
guards see writes.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import weakref
from concurrent.futures import Future
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from funcops.engine.backend.declare import capturing, tracing
from funcops.engine.errors import describe, fail, short
from funcops.engine.residuals.offload import copies
from funcops.engine.residuals.policy import Offload
from funcops.engine.trees import leaf, leaves, static, tree

AHEAD = 4  # tensors that wait for the thread: with more, a slow place would keep the whole forward in memory


@dataclasses.dataclass(frozen=True)
class Away(Offload, abc.ABC):
    """A place of a rule. A subclass says what its `check` asks at a policy's first use, and makes a `Kept` of a tensor."""

    once: ClassVar[str]  # what a capture would do one time only

    @property
    def mover(self) -> Away:
        return self

    @property
    @abc.abstractmethod
    def where(self) -> str:
        """The name of the place in a report."""

    @abc.abstractmethod
    def check(self, where: str, name: str) -> None:
        """Raise `ValueError` if a rule with this place cannot be followed."""

    @abc.abstractmethod
    def keep(self, t: Tensor, like: Tensor) -> Kept:
        """Begin to take the tensor away; `like` has its form, without gaps."""

    def leaves(self, t: Tensor) -> bool:
        return t.numel() > 0

    def on_host(self, t: Tensor) -> Elsewhere:
        """Begin to take the tensor away, and return what stands for it."""
        compiled = torch.compiler.is_compiling() or get_proxy_mode() is not None
        shapes = not compiled and (t.is_meta or isinstance(t, FakeTensor))
        where = type(self).__name__
        if compiled or capturing() or (tracing() and not shapes):
            got = f"a compiler, a tracer or a capture, which would {self.once} once. Use Offload() there"
            fail(where, "tensors", "computed step by step", got)
        if not shapes and (t.layout is not torch.strided or is_traceable_wrapper_subclass(t)):
            fail(where, "tensors", "dense, with memory of their own", describe(t), TypeError)
        stub = torch.empty_like(t, device="meta", requires_grad=False)  # dense: a view is kept without what lies between
        if shapes:
            return Elsewhere(stub, kept=None, place=self.where)
        kept = self.keep(t.detach(), stub)
        copies.elsewhere[stub.untyped_storage()._cdata] = kept.begin
        weakref.finalize(stub.untyped_storage(), copies.elsewhere.pop, stub.untyped_storage()._cdata, None)
        return Elsewhere(stub, kept=kept, place=self.where)

    def on_device(self, part: Any, device: torch.device) -> Tensor:
        """The tensor again."""
        if type(part) is not Elsewhere:  # of a pickle
            return copies.on_device(part, device)
        if part.kept is None:
            return torch.empty_like(part.bytes, device=device)
        host = part.kept.read()
        return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


@tree
class Elsewhere:
    """A tensor in another place: one without memory that has its form, the `Kept` (None in a forward on shapes), and the place's
    name."""

    bytes: Any = leaf("the form of the tensor")
    kept: Any = static()
    place: Any = static()

    def __reduce__(self) -> Any:
        # a pickle or a deep copy outlives the place
        return _same, (self.bytes if self.kept is None else self.kept.read(),)


def _same(t: Tensor) -> Tensor:
    return t


def let_go(kept: Any) -> None:
    """Forget what was read of these tensors ahead of a backward that does not read it."""
    for node in leaves(kept, is_leaf=lambda node: type(node) is Elsewhere):
        if type(node) is Elsewhere and node.kept is not None:
            node.kept.reading = None


class Kept(abc.ABC):
    """The bytes of one tensor, held until they are in their place, which has them as long as this object lives."""

    faults: ClassVar[tuple[type[Exception], ...]] = (OSError,)  # that `ask` raises
    lost: ClassVar[str]  # what a backward expected that does not find them
    refused: ClassVar[str]  # what a forward expected that cannot take them there

    def __init__(self, t: Tensor, like: Tensor) -> None:
        self.shape, self.stride, self.dtype = tuple(like.shape), like.stride(), like.dtype
        self.device, self.size = t.device, int(like.untyped_storage().nbytes())
        self.error: Exception | None = None
        self.reading: Future[Tensor] | None = None
        # a copy even on the CPU: whoever holds the tensor may write to it before the thread has read it
        self.held: Tensor | None = self.room()
        self.copied: Any = None
        if copies.own_stream(t) and t.is_cuda:
            side = copies.side(t.device)
            side.wait_stream(copies.current(t.device))
            with copies.on(side):
                self.held.copy_(t, non_blocking=True)
            copies.held_by(side, t)
            self.copied = side.record_event()
        else:
            self.held.copy_(t)

    @property
    @abc.abstractmethod
    def named(self) -> tuple[str, str]:
        """Who raises an error, and the name of these bytes in it."""

    @abc.abstractmethod
    def ask(self) -> Future[Tensor]:
        """Start to read the bytes."""

    def room(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, pin_memory=self.device.type == "cuda")

    def begin(self) -> None:
        """Start to read the bytes, unless they are held, or that has started."""
        if self.held is None and self.reading is None and self.error is None:
            self.reading = self.ask()

    def read(self) -> Tensor:
        """The tensor, in the host's memory."""
        held = self.held
        if self.error is not None:
            self.refuse(self.refused, self.error)
        if held is not None:
            return held
        try:
            self.begin()
            future, self.reading = self.reading, None
            return future.result()  # type: ignore[union-attr]
        except self.faults as error:
            self.refuse(self.lost, error)
        finally:
            future = None  # its error holds this frame

    def refuse(self, expected: str, error: Exception) -> NoReturn:
        got = (isinstance(error, OSError) and error.strerror) or str(error)
        fail(*self.named, expected, got, OSError)

    def shown(self) -> str:
        return f"{short(self.dtype)}{list(self.shape)}"


class Waiting:
    """Tensors that wait for a thread to take them away; `error`: of one that could not be, until a forward has raised it."""

    def __init__(self) -> None:
        self.waiting: collections.deque[Future[None]] = collections.deque()
        self.error: Exception | None = None

    def admit(self, kept: Kept) -> None:
        """Wait until there are few enough before this one. Raises the error of one before it."""
        while len(self.waiting) >= AHEAD:
            self.waiting.popleft().exception()  # which the tensor has, too
        if (error := self.error) is not None:
            self.error = None
            kept.refuse(kept.refused, error)


def data(t: Tensor) -> memoryview:
    """The bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy().data
