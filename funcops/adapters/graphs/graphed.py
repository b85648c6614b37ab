"""`graphed`: a pure function of pytrees, captured once and replayed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from funcops.adapters.graphs.backend import Capturer, Options
from funcops.adapters.graphs.hooks import Hooks
from funcops.adapters.graphs.slot import Slot
from funcops.adapters.graphs.statics import Inputs, restored
from funcops.adapters.graphs.without_gpu.faults import without_autograd
from funcops.engine.errors import (
    GradModeError,
    describe,
    require,
    require_callable,
    require_count,
    require_flag,
    require_type,
    size_of,
)
from funcops.engine.trees import tensors, tree_map


class Report(NamedTuple):
    """Bytes of the buffers for copied inputs, of outputs, of residuals and pendings between graphs, and of all pools; and the
    number of kernels (on the recorder: operators) that a replay launches, if known."""

    backend: str
    input_bytes: int
    output_bytes: int
    residual_bytes: int
    pool_bytes: int
    kernels: int | None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the pools that are neither outputs nor residuals. `graph_memory` says beforehand what it will be on a device; a
        recording holds none."""
        return max(0, self.pool_bytes - self.output_bytes - self.residual_bytes)

    def __str__(self) -> str:
        kernels = "" if self.kernels is None else f", {self.kernels} kernels"
        return (
            f"{self.backend}: inputs {size_of(self.input_bytes)}, outputs {size_of(self.output_bytes)}, "
            f"residuals {size_of(self.residual_bytes)}, workspace {size_of(self.workspace_bytes)}, "
            f"pool {size_of(self.pool_bytes)}{kernels}"
        )


CALL = "call"  # the name of a slot's one graph


class Graphed:
    """A captured function. Call it like the function; `report`, `reset`, `dot`, `raw_graph` and `instantiate` act on its graphs.
    A deep copy and a pickle hold the function itself, uncaptured: a method becomes the copied object's."""

    def __init__(self, fn: Callable[..., Any], slots: list[Slot], capturer: Capturer) -> None:
        self.fn, self.backend, self.pool = fn, capturer.backend, capturer.pool
        self._capturer = capturer
        self._slots, self._next = slots, 0

    def __copy__(self) -> Graphed:
        return self  # as a function does

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.fn, memo)

    def __reduce__(self) -> Any:
        return functools.partial, (self.fn,)

    def __call__(self, *trees: Any) -> Any:
        """Replay with these inputs. Raises `ValueError` or `TypeError`, before anything runs, if the structure, or a leaf's shape,
        strides, dtype, device, or (pinned, donated) address differs from the captured one."""
        if not self._slots:
            raise RuntimeError("graphed: must not be called after reset()")
        at = self._next
        found = self._slots[at].run(CALL, trees)
        self._next = (at + 1) % len(self._slots)
        return found

    def report(self) -> Report:
        counts = [slot.graphs[CALL].kernels() for slot in self._slots]
        inputs = sum(slot.inputs[CALL].nbytes for slot in self._slots)
        outputs = sum(slot.outputs[CALL].nbytes for slot in self._slots)
        return Report(self.backend.name, inputs, outputs, 0, self._capturer.pool_bytes(), counts[0] if counts else 0)

    def reset(self) -> None:
        """Free the graphs and their memory. Borrowed tensors must not be used any more."""
        for slot in self._slots:
            slot.reset()
        self._slots = []

    def pools(self) -> list[Any]:
        """The memory pools of the slots, which another capture may share."""
        return list(self._capturer.pools)

    def dot(self, path: str) -> None:
        """Write the first slot's graph for Graphviz; on CUDA it must have been captured with `keep_graph=True`."""
        self._slots[0].graphs[CALL].dot(path)

    @property
    def raw_graph(self) -> Any:
        """torch's `CUDAGraph` of the first slot. Raises `RuntimeError` on the recorder."""
        return self._slots[0].graphs[CALL].raw_graph

    def instantiate(self) -> None:
        """Instantiate graphs captured with `keep_graph=True` now, rather than at the first replay."""
        for slot in self._slots:
            slot.graphs[CALL].instantiate()


def graphed(
    fn: Callable[..., Any],
    *examples: Any,
    slots: int = 1,
    inputs: str | Mapping[str, str] = "copy",
    outputs: str = "clone",
    state: Any = None,
    warmup: int = 3,
    pool: Any = None,
    stream: Any = None,
    capture_error_mode: str = "global",
    keep_graph: bool = False,
    hooks: Hooks | None = None,
    debug: bool = False,
) -> Graphed:
    """Capture `fn(*examples)` as a CUDA graph; without a CUDA tensor, record it, with the same interface and errors.

        step = graphed(train_step, params, state, x, lr, inputs={"0": "donated", "1": "donated"})
        params, state, loss = step(params, state, x, lr)

    `inputs`: a policy for all leaves, or policies by glob over dotted paths (`"0.blocks.*"`; the first name is the argument's
    number): "copy" into the graph's own buffer (skipped if the input is that buffer), "pinned" to the caller's memory, whose
    address must not change, or "donated": pinned, and the function writes to it. `outputs`: "clone", or "borrow" the graph's
    buffers, which the next call but `slots - 1` overwrites; with `debug` any use after that raises `BorrowedError`. `warmup`
    runs come first; their writes to donated leaves and to `state` are undone, and no others: a function that trains a module from
    outside, whose weights it does not take, trains it in these runs, too. Everything that changes from call to call must be a
    tensor: keys, learning rates, counters.

    `state`: a tree of tensors that the function reads and writes from outside its arguments, such as params, an optimiser's state
    and accumulators. The graph keeps them, and a call neither takes nor checks them: write to them in place.

    Slots whose outputs are borrowed have a memory pool each. `pool`: another graphed function or op (or a torch `MemPool` or pool
    handle), whose memory the first slot shares. The two must not run at the same time, and a call of the one that was captured
    first may overwrite buffers borrowed from the other: with `debug` any use after that raises, too.

    `hooks`: see `Hooks`. Captured in `named_steps()`, the graph knows the paths of its steps (`graph_data`, `funcops.profile`).

    Raises `CaptureError` for anything that a graph cannot hold, with its line if known (`check_capturable` says more), and
    `GradModeError` for a function that calls autograd's backward, as it runs without autograd.

    >>> import torch
    >>> from funcops.graphs import Graphed, Report, graphed
    >>> double = graphed(lambda x: 2 * x, torch.ones(2))
    >>> double(torch.tensor([1.0, 5.0])), isinstance(double, Graphed)
    (tensor([ 2., 10.]), True)
    >>> isinstance(double.report(), Report), double.report().input_bytes
    (True, 8)
    >>> double(torch.ones(3))
    Traceback (most recent call last):
        ...
    ValueError: graphed: input 0 must be float32[2], got float32[3]
    """
    require_callable("graphed", fn=fn)
    require_count("graphed", slots=slots)
    require_flag("graphed", keep_graph=keep_graph, debug=debug)
    require_type("graphed", "inputs", inputs, str, Mapping)
    require(state is None or bool(tensors(state)), "graphed", "state", "a tree with tensors", describe(state))
    capturer = Capturer("graphed", (examples, state), pool, Options(stream, capture_error_mode, keep_graph, hooks), warmup)
    lent = outputs == "borrow"  # cloned outputs are safe from later replays, so their slots share one pool
    made = [
        _capture(fn, examples, inputs, outputs, debug, state, capturer.of_slot(i) if lent else capturer, warm=i == 0)
        for i in range(slots)
    ]
    return Graphed(fn, made, capturer)


def _capture(
    fn: Callable[..., Any],
    examples: tuple[Any, ...],
    policies: str | Mapping[str, str],
    policy: str,
    debug: bool,
    state: Any,
    capturer: Capturer,
    warm: bool,
) -> Slot:
    reads = Inputs("graphed", examples, policies)
    written = [*reads.donated, *tensors(state)]
    slot = Slot(capturer, written)
    slot.inputs[CALL] = reads

    def call() -> Any:
        return fn(*tree_map(lambda leaf: leaf, reads.trees))  # a new tree for each call, because the function may donate it

    with torch.no_grad(), restored(written):
        try:
            if warm:
                capturer.warm_up(call)
            reads.check_unwritten()
            result = slot.capture(CALL, call, keep=state)
        except RuntimeError as error:
            if remedy := without_autograd(error):
                raise GradModeError(f"graphed: {error}{remedy}") from error
            raise
    try:
        reads.check_unwritten()
        slot.give(CALL, result, policy, debug)
    except Exception:
        slot.reset()
        raise
    return slot
