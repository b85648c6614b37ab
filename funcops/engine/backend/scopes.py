"""Names of the steps that run: ranges in a profile, annotations in a CUDA graph, marks in compiled code.

Steps are named inside `named_steps()` only. Outside of it programs are other functions, without a line of this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from funcops.engine.errors import require_type

__all__ = ["BEGIN", "END", "Label", "named_scope", "named_steps", "node_labels"]

NAMED, NOTED = 1, 2  # steps have names; they also tell what they compute (`notes`)
on = 0  # one of these, or 0 for neither, in every thread: the largest of the blocks that run
_levels: list[int] = []


RECOMPUTE = "recompute"


class Label(NamedTuple):
    """The path of a step, and which of its halves runs: fwd, dgrad, wgrad, bwd for both at once, recompute."""

    path: str = ""
    half: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.half}" if self.path and self.half else self.path or self.half

    def inside(self, name: str, half: str) -> Label:
        """The label of a step with that name in this one, whose half it has if it names none, or if this one is recomputed."""
        path = f"{self.path}.{name}" if self.path and name else self.path or name
        return Label(path, self.half if self.half == RECOMPUTE else half or self.half)


class _Thread(threading.local):
    """The labels of a thread, innermost last, each with what ends when it ends."""

    def __init__(self) -> None:
        self.open: list[tuple[Label, ExitStack]] = []


_thread = _Thread()
names: dict[str, Label] = {}  # the labels by their text, in the order in which they first ran
observers: list[Callable[[Label, Any], None]] = []  # each gets the residuals of every outermost forward


def label() -> Label:
    """The label of what this thread runs now; without a path if no step runs."""
    return _thread.open[-1][0] if _thread.open else Label()


@contextmanager
def named_steps() -> Iterator[None]:
    """A block in which every step of a program is named by its path, as in `blocks.3.mlp.up: dgrad`.

    Under `torch.profiler`, also with `emit_nvtx`, a step is a `record_function` range. In a CUDA graph that is captured in the
    block, its kernels are annotated (`torch.cuda.graph_annotations`, from torch 2.15 on). A compiled step is compiled again, with
    marks between its kernels. Outside of the block nothing is named, and nothing is paid for it.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, SoftcapConfig, Step, chain, linear, named_steps, random, softcap
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)), Step("cap", softcap, SoftcapConfig(30.0))))
    >>> params = chain.init(cfg, key=random.key(0))
    >>> with named_steps(), torch.profiler.profile() as profiler:
    ...     y, _ = chain.fwd(params, torch.ones(2, 4), cfg)
    ...
    >>> [event.name for event in profiler.events() if event.name.endswith(": fwd")]
    ['up: fwd', 'cap: fwd']
    """
    with told(NAMED):
        yield


@contextmanager
def told(level: int) -> Iterator[None]:
    """A block in which programs tell at least so much of their steps, in every thread."""
    global on
    depth = len(_thread.open)
    _levels.append(level)
    on = max(_levels)
    try:
        with _in_order():
            yield
    finally:
        _levels.remove(level)  # not the last one, which may be another thread's
        on = max(_levels, default=0)
        leave_all(depth)
        if not on:
            names.clear()


@contextmanager
def _in_order() -> Iterator[None]:
    """Let Inductor keep the order of the program, so that marks stay between the kernels of their steps."""
    import torch._inductor.config as config

    with config.patch(reorder_for_peak_memory=False, reorder_for_locality=False):
        yield


class named_scope:
    """A block with a name in profiles, which stands before the paths of its steps: `named_scope("optimizer")`. `half`: what runs in
    it, such as "fwd"; by default as in the scope around it. Outside of `named_steps()` and `profile` it does nothing. Raises
    `TypeError` if a name is not a string.

    >>> import torch
    >>> from funcops import named_scope, profile
    >>> def update(p):
    ...     with named_scope("optimizer"):
    ...         return p - 0.1
    ...
    >>> profile(update, torch.ones(2)).rows[0].path
    'optimizer'
    """

    def __init__(self, name: str, half: str = "") -> None:
        # tested here first, as every step of a named program makes a scope
        if type(name) is not str or type(half) is not str:
            require_type("named_scope", "name", name, str)
            require_type("named_scope", "half", half, str)
        self.name, self.half, self.entered = name, half, False

    def __enter__(self) -> None:
        if on:
            enter(self.name, self.half)
            self.entered = True

    def __exit__(self, *error: object) -> None:
        # not `on`, which may have changed inside the block
        if self.entered:
            self.entered = False
            leave()


def by_number(run: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    """The function of a layer's number and tree, run in a scope with that number as its name."""
    return lambda i, tree: named(str(i), run, i, tree)


def named(name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` in a scope of that name."""
    if not on:
        return fn(*args)
    with named_scope(name):
        return fn(*args)


def resumed(name: str, half: str, part: Generator[None, None, Any]) -> Generator[None, None, Any]:
    """A generator whose every turn runs in a scope of that name, which ends at each pause: what runs meanwhile is not in it."""
    while True:
        with named_scope(name, half):
            try:
                next(part)
            except StopIteration as end:
                return end.value
        yield


def enter(name: str, half: str) -> None:
    if torch.compiler.is_dynamo_compiling():
        torch.ops.funcops.scope_begin(_token, name, half)
        return
    made = label().inside(name, half)
    names.setdefault(str(made), made)
    ends = ExitStack()
    ends.enter_context(torch.profiler.record_function(str(made)))
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        ends.enter_context(_annotated(made))
    _thread.open.append((made, ends))


def leave() -> None:
    if torch.compiler.is_dynamo_compiling():
        torch.ops.funcops.scope_end(_token)
    # nothing is open if `leave_all` came first
    elif _thread.open:
        _thread.open.pop()[1].close()


def leave_all(but: int = 0) -> None:
    """End what an error left open, but for the outermost ones."""
    while len(_thread.open) > but:
        _thread.open.pop()[1].close()


def kept(residuals: Any) -> None:
    """Pass the residuals of a forward to the observers, if it is in no other step."""
    # a program inside a step has the step's half: the outermost one has its residuals in its own
    if observers and not label().half and not torch.compiler.is_dynamo_compiling():
        for observe in observers:
            observe(label(), residuals)


def _annotated(made: Label) -> Any:
    try:
        from torch.cuda.graph_annotations import mark_kernels
    except ImportError:  # before torch 2.15
        return ExitStack()
    return mark_kernels({"name": str(made), "path": made.path, "half": made.half})


def node_labels() -> dict[int, Label]:
    """The labels of the nodes of captured CUDA graphs, by id; none before torch 2.15."""
    try:
        from torch.cuda.graph_annotations import get_kernel_annotations
    except ImportError:
        return {}
    return labels_of(get_kernel_annotations())


def labels_of(annotations: Mapping[int, list[Any]]) -> dict[int, Label]:
    """The labels in annotations of graph nodes, as `get_kernel_annotations` has them."""
    every = [(node, one) for node, given in annotations.items() for one in given]
    return {node: Label(one["path"], one.get("half", "")) for node, one in every if isinstance(one, dict) and "path" in one}


# The marks of compiled code write to a token, so that a compiler neither drops them nor changes their order.
_token = torch.zeros(1)
_operators = torch.library.Library("funcops", "FRAGMENT")
_operators.define("scope_begin(Tensor(a!) token, str name, str half) -> ()")
_operators.define("scope_end(Tensor(a!) token) -> ()")
BEGIN, END = "scope begins: ", "scope ends"


def _begin(token: torch.Tensor, name: str, half: str) -> None:
    made = label().inside(name, half)
    names.setdefault(str(made), made)
    # with nothing to end: a compiled step is two instants in a profile, not a range
    _thread.open.append((made, ExitStack()))
    with torch.profiler.record_function(BEGIN + str(made)):  # an instant: a range must not outlast the operator that opens it
        pass


def _end(token: torch.Tensor) -> None:
    if _thread.open:
        _thread.open.pop()
    with torch.profiler.record_function(END):
        pass


def _nothing(*args: Any) -> None:
    """The operators give nothing, and nothing is computed on fake tensors."""


for _name, _run in (("scope_begin", _begin), ("scope_end", _end)):
    # the token is on the CPU, wherever the step runs
    _operators.impl(_name, _run, "CPU")
    _operators.impl(_name, _nothing, "Meta")
