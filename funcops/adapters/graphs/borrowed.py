"""Results of a replay: copies that the caller owns, or the graph's own buffers, borrowed until the next replay."""

from __future__ import annotations

import copy
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from funcops.adapters.graphs.lease import SHARED, Lease
from funcops.adapters.graphs.statics import refuse_in_flight
from funcops.engine.errors import BorrowedError, describe, fail, join_path
from funcops.engine.trees import nbytes, paths, structure, unflatten, with_leaves

POLICIES = ("clone", "borrow")


class Borrowed(Tensor):
    """A graph's buffer, or a view of one, that raises on any use after the replay that overwrote it. For `debug=True`: each use
    costs a check."""

    _of: Any

    @staticmethod
    def over(t: Tensor, lease: Lease, number: int, path: str) -> Borrowed:
        borrowed: Any = torch.Tensor._make_subclass(Borrowed, t.detach())
        borrowed._of = (lease, number, path)
        return borrowed  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            lent: dict[int, Any] = {}
            for t in (*args, *(kwargs or {}).values()):
                for one in t if isinstance(t, (list, tuple)) else (t,):
                    if isinstance(one, Borrowed):
                        _check(one)
                        lent[one.untyped_storage()._cdata] = one.__dict__["_of"]
            return _lent(func(*args, **(kwargs or {})), lent)


def _check(t: Any) -> None:
    lease, number, path = t.__dict__["_of"]
    name = f"output {path}" if path else "the output"
    if lease.number != number:
        raise BorrowedError(
            f"{name} was borrowed from a graph that has been replayed since: clone it, or capture with outputs='clone'"
        )
    if lease.overwritten():
        raise BorrowedError(
            f"{name} was borrowed from a graph, and {SHARED} has been replayed since: clone it, or capture without pool="
        )


def _plain(t: Borrowed) -> Tensor:
    _check(t)
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(Tensor)


def _lent(value: Any, lent: dict[int, Any]) -> Any:
    """The result of a function, whose views of memory that is lent, by storage, are borrowed too."""
    if type(value) in (list, tuple):
        return type(value)([_lent(one, lent) for one in value])
    view = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
    of = lent.get(value.untyped_storage()._cdata) if view else None
    return value if of is None else Borrowed.over(value, *of)


def _may_change(value: Any) -> bool:
    """Whether a value is compared by its identity and has attributes, or cannot be hashed, as a dict of a class of its own."""
    kind = type(value).__hash__
    return kind is None or (kind is object.__hash__ and hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType)))


class Outputs:
    """The results of a captured function. A result that is a donated input, written in place, is returned as the caller's own
    tensor; another value is the one of the capture. Raises `TypeError` for an object that may hold tensors or change."""

    def __init__(self, where: str, tree: Any, statics: list[Any], policy: str, debug: bool, lease: Lease) -> None:
        if policy not in POLICIES:
            fail(where, "outputs", " or ".join(map(repr, POLICIES)), repr(policy))
        refuse_in_flight(where, "output", tree)
        self.policy, self.debug, self.lease = policy, debug, lease
        inputs = {id(t): i for i, t in enumerate(statics) if isinstance(t, Tensor)}
        for path, value in paths(tree).items():
            if not isinstance(value, Tensor) and _may_change(value):
                wanted = "a tensor, or a value that cannot change, as each replay gives the captured one"
                fail(where, join_path("output", path), wanted, f"{describe(value)}: return its tensors", TypeError)
        self.leaves = list(paths(tree).items())  # kept alive, so that their memory does not return to the pool
        self.same_as = [inputs.get(id(t)) for _, t in self.leaves]
        # of tensors that are gone, so that residuals are as fresh as at capture, whatever was written to its buffers since
        self.structure = structure(with_leaves(tree, [t.detach() if isinstance(t, Tensor) else t for _, t in self.leaves]))
        if lease.graph is not None:
            lease.graph.lend(self.borrowed)

    def give(self, given: list[Any]) -> Any:
        """The results of the replay that just ended; `given`: the leaves of its inputs."""
        pairs = zip(self.leaves, self.same_as, strict=True)
        return unflatten(self.structure, [given[same] if same is not None else self._one(path, t) for (path, t), same in pairs])

    def _one(self, path: str, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if self.policy == "clone":
            return t.clone()
        return Borrowed.over(t, self.lease, self.lease.number, path) if self.debug else t

    @property
    def borrowed(self) -> list[Tensor]:
        """The buffers that callers borrow."""
        found = [t for (_, t), same in zip(self.leaves, self.same_as, strict=True) if same is None and isinstance(t, Tensor)]
        return found if self.policy == "borrow" else []

    @property
    def nbytes(self) -> int:
        return nbytes([t for (_, t), same in zip(self.leaves, self.same_as, strict=True) if same is None])
