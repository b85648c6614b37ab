"""A slot: the graphs of one call in flight, the buffers that they read and write, and how far the call has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from funcops.adapters.graphs.backend import Captured, Capturer
from funcops.adapters.graphs.borrowed import Outputs
from funcops.adapters.graphs.lease import Lease
from funcops.adapters.graphs.statics import Inputs
from funcops.engine.backend import scopes
from funcops.engine.trees import tensors

FREE, RESIDUALS, PENDING = "free", "residuals", "pending"


class Slot:
    """A call takes a FREE slot; its forward leaves RESIDUALS there, a backward that puts off weight gradients leaves a PENDING, and
    the last part frees the slot. `writes`: tensors outside the slot that its graphs may write to.

    By the name of a graph, in the order of capture: `graphs`; `results`, the buffers that each writes; `inputs`, which it reads;
    `outputs`, which it gives; `leases`, on what must stay as its replay leaves it; and `written`, tensors outside the slot."""

    def __init__(self, capturer: Capturer, writes: Iterable[Tensor] = ()) -> None:
        self.capturer, self.state, self.ticket = capturer, FREE, 0
        self.graphs: dict[str, Captured] = {}
        self.results: dict[str, Any] = {}
        self.inputs: dict[str, Inputs] = {}
        self.outputs: dict[str, Outputs] = {}
        self.leases: dict[str, Lease] = {}
        self.written: dict[str, list[Tensor]] = {}
        self._writes = list(writes)

    def enter(self, state: str) -> int:
        """Go on to a state. Returns its ticket: what holds an older one was used already."""
        self.state, self.ticket = state, self.ticket + 1
        return self.ticket

    def capture(self, name: str, fn: Callable[[], Any], outputs: Callable[[Any], list[Tensor]] = tensors, keep: Any = ()) -> Any:
        """Capture `fn` as the graph `name`, and return its result. `outputs`: the tensors of the result that keep their values.
        These, the inputs and `keep` stay alive until the last replay has finished."""
        before = Lease().hold(self._writes)
        self.graphs[name], result = self.capturer.capture(fn, outputs)
        reads = [inputs.trees for inputs in self.inputs.values()]
        self.graphs[name].keep(tensors((reads, keep)), outputs(result), self.capturer.given)
        self.results[name], self.written[name] = result, before.written()
        self.leases[name] = Lease(self.graphs[name].entry)
        return result

    def give(self, name: str, result: Any, policy: str, debug: bool) -> None:
        """Let `run` of the graph `name` give `result`. The lease does not hold it, as the caller may write to it."""
        statics = [leaf.static for leaf in self.inputs[name].leaves]
        self.outputs[name] = Outputs(self.capturer.where, result, statics, policy, debug, self.leases[name])

    def run(self, name: str, given: tuple[Any, ...]) -> Any:
        """Check and take the inputs of the graph `name`, replay it, and return its outputs."""
        values = scopes.named("inputs of the graph", self.inputs[name].take, given)
        self.replay(name)
        return scopes.named("outputs of the graph", self.outputs[name].give, values)

    def replay(self, name: str) -> None:
        self.graphs[name].replay()
        if written := self.written[name]:  # torch does not see the writes of a replay
            torch.autograd.graph.increment_version(written)
        later = False
        for other, lease in self.leases.items():
            if other == name:
                lease.renew()
                later = True
            elif later:  # its results may lie in memory that this graph uses
                lease.end()

    def check(self, where: str, what: str, *graphs: str, by: str = "forward", hint: str = "") -> None:
        """Raise unless everything is as the replays of `graphs` left it."""
        for name in graphs:
            self.leases[name].check(where, what, by, hint)

    def reset(self) -> None:
        """Free the graphs and their memory. Borrowed tensors must not be used any more."""
        for lease in self.leases.values():
            lease.end()
        for captured in self.graphs.values():
            captured.reset()
