"""`Hooks`: functions that run around the life of a captured function, with the meaning of torch's hooks of CUDA graphs.

Own code on every version of torch and on the recorder, so that a hook runs at the same points everywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from funcops.adapters.graphs.statics import refuse_copy
from funcops.engine.errors import fail, require_type

Hook = Callable[[Any], None]
_numbers = itertools.count()
_everywhere: dict[int, Hooks] = {}


class Hooks(NamedTuple):
    """Functions that run around the life of a captured function, or None.

    `capture_start(graph)`: the capture has begun, so on a device nothing may be launched that should not be captured;
    `capture_end(graph)`: it has ended; `instantiate(graph)`: the graph can be replayed (with `keep_graph=True`: at `instantiate()`
    or the first replay); `replay_start(graph)`, `replay_end(graph)`: around each replay, which has been launched, not finished, and
    whose end is told even if the launch raised; `destroy()`: the graph will be freed, and its last replay has finished. `graph` has
    `kernels()`, `data()`, `dot(path)`, `instantiate()` and, on a device, torch's `CUDAGraph` as `raw_graph`.

    An error of a hook reaches the caller, except of `destroy`.

    >>> import torch
    >>> from funcops.graphs import Hooks, graphed
    >>> seen = []
    >>> hooks = Hooks(capture_end=lambda graph: seen.append(graph.kernels()), replay_end=lambda graph: seen.append("ran"))
    >>> _ = graphed(lambda x: 2 * x, torch.ones(2), hooks=hooks)(torch.ones(2))
    >>> seen
    [1, 'ran']
    """

    capture_start: Hook | None = None
    capture_end: Hook | None = None
    instantiate: Hook | None = None
    replay_start: Hook | None = None
    replay_end: Hook | None = None
    destroy: Callable[[], None] | None = None

    def check(self, where: str) -> None:
        for name, hook in self._asdict().items():
            if hook is not None and not callable(hook):
                fail(where, f"hooks.{name}", "a function or None", repr(hook), TypeError)


NOTHING = Hooks()


def register_hooks(hooks: Hooks) -> Callable[[], None]:
    """Let these hooks run around every function that is captured from now on or was before. Returns a function that removes them.
    An error of such a hook is dropped, so that one observer cannot stop a graph. Raises `TypeError` if `hooks` is not `Hooks`.

    >>> import torch
    >>> from funcops.graphs import Hooks, graphed, register_hooks
    >>> seen = []
    >>> remove = register_hooks(Hooks(capture_start=lambda graph: seen.append("capture")))
    >>> _ = graphed(lambda x: x + 1, torch.ones(2))
    >>> remove()
    >>> _ = graphed(lambda x: x + 1, torch.ones(2))
    >>> seen
    ['capture']
    """
    require_type("register_hooks", "hooks", hooks, Hooks)
    hooks.check("register_hooks")
    number = next(_numbers)
    _everywhere[number] = hooks
    return lambda: (_everywhere.pop(number, None), None)[1]


class Life:
    """The base of captured functions: their hooks, and what is kept until they are freed and their last replay has finished."""

    def __init__(self, hooks: Hooks | None, undo: Callable[[], None]) -> None:
        self.hooks, self.ready = hooks or NOTHING, False
        self.release = _Release(self.hooks.destroy, undo)
        self._freed = weakref.finalize(self, self.release)
        self._freed.atexit = False

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy("a graph")

    def keep(self, *objects: Any) -> None:
        """Keep objects alive until the graph is freed and its last replay has finished."""
        self.release.kept += objects

    def tell(self, event: str) -> None:
        for hooks in list(_everywhere.values()):
            if (hook := getattr(hooks, event)) is not None:
                with contextlib.suppress(Exception):
                    hook(self)
        if (hook := getattr(self.hooks, event)) is not None:
            hook(self)

    def replayed(self, launch: Callable[[], None]) -> None:
        """Launch a replay between its hooks."""
        if not self.ready:
            self.instantiate()
        if not _everywhere and self.hooks is NOTHING:
            launch()
            return
        self.tell("replay_start")
        try:
            launch()
        finally:
            self.tell("replay_end")

    def instantiate(self) -> None:
        """Make the graph ready to be replayed."""
        self.ready = True
        self.tell("instantiate")

    def reset(self) -> None:
        """Free the graph and what it keeps, after its last replay has finished."""
        self._freed()

    def disown(self) -> None:
        """Leave the graph to torch, as its capture failed."""
        self._freed.detach()


_waiting: list[_Release] = []  # of graphs that died during a capture, in which nothing may be waited for


def release_waiting() -> None:
    """Free the graphs that died during a capture."""
    while _waiting:
        _waiting.pop()()


class _Release:
    """Frees what a captured function holds, once: after its last replay, first its hooks, then the graph, then what it keeps."""

    def __init__(self, destroy: Callable[[], None] | None, undo: Callable[[], None]) -> None:
        self.destroy, self.undo = destroy, undo
        self.streams: set[Any] = set()  # on which it was replayed
        self.kept: list[Any] = []

    def __call__(self) -> None:
        if self.streams and torch.cuda.is_current_stream_capturing():
            _waiting.append(self)
            return
        for stream in self.streams:
            stream.synchronize()
        for hook in [self.destroy, *[hooks.destroy for hooks in _everywhere.values()]]:
            if hook is not None:
                with contextlib.suppress(Exception):
                    hook()
        self.undo()
        self.streams.clear()
        self.kept.clear()
