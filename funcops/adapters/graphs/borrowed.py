"""What a replay gives back: copies that the caller owns, or the graph's own buffers, borrowed until the next replay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.adapters.graphs.statics import refuse_in_flight
from funcops.adapters.graphs.timeline import TimelineEntry
from funcops.errors import BorrowedError, fail
from funcops.trees import nbytes, paths, structure, unflatten

POLICIES = ("clone", "borrow")


SHARED = "a graph that was captured earlier into the same memory pool"


class Generation:
    """How often the buffers of a graph have been written over."""

    def __init__(self, entry: TimelineEntry) -> None:
        self.entry = entry
        self.now = 0


class Borrowed(Tensor):
    """A graph's buffer that complains of any use after the replay that wrote over it. For `debug=True`: each use costs a check."""

    _of: Any

    @staticmethod
    def over(t: Tensor, generation: Generation, path: str) -> Borrowed:
        borrowed: Any = torch.Tensor._make_subclass(Borrowed, t.detach())
        borrowed._of = (generation, generation.now, path)
        return borrowed  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for t in (*args, *(kwargs or {}).values()):
                for one in t if isinstance(t, (list, tuple)) else (t,):
                    if isinstance(one, Borrowed):
                        _check(one)
            return func(*map(_plain, args), **{k: _plain(v) for k, v in (kwargs or {}).items()})


def _check(t: Any) -> None:
    generation, at, path = t.__dict__["_of"]
    name = f"output {path}" if path else "the output"
    if generation.now != at:
        raise BorrowedError(
            f"{name} was borrowed from a graph that has been replayed since: clone it, or capture with outputs='clone'"
        )
    if generation.entry.overwritten():
        raise BorrowedError(
            f"{name} was borrowed from a graph, and {SHARED} has been replayed since: clone it, or capture without pool="
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Borrowed):
        return value.as_subclass(Tensor)
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


class Outputs:
    """The results of a captured function. A result that is an input, donated and written in place, is given back as the caller's
    own tensor; None and other values as they were."""

    def __init__(self, where: str, tree: Any, statics: list[Any], policy: str, debug: bool, entry: TimelineEntry) -> None:
        if policy not in POLICIES:
            fail(where, "outputs", " or ".join(map(repr, POLICIES)), repr(policy))
        refuse_in_flight(where, "output", tree)
        self.policy, self.debug = policy, debug
        self.generation = Generation(entry)
        inputs = {id(t): i for i, t in enumerate(statics) if isinstance(t, Tensor)}
        self.leaves = list(paths(tree).items())  # held: their memory must not go back to the pool
        self.same_as = [inputs.get(id(t)) for _, t in self.leaves]
        self.structure = structure(tree)
        entry.lend(self.borrowed)

    def give(self, given: list[Any]) -> Any:
        """The results of the replay that just ended; `given`: the leaves of its inputs."""
        self.generation.now += 1
        pairs = zip(self.leaves, self.same_as, strict=True)
        return unflatten(self.structure, [given[same] if same is not None else self._one(path, t) for (path, t), same in pairs])

    def _one(self, path: str, t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if self.policy == "clone":
            return t.clone()
        return Borrowed.over(t, self.generation, path) if self.debug else t

    @property
    def borrowed(self) -> list[Tensor]:
        """The buffers that are lent."""
        found = [t for (_, t), same in zip(self.leaves, self.same_as, strict=True) if same is None and isinstance(t, Tensor)]
        return found if self.policy == "borrow" else []

    @property
    def nbytes(self) -> int:
        return nbytes([t for (_, t), same in zip(self.leaves, self.same_as, strict=True) if same is None])
