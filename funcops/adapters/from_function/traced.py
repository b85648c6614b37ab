"""A trace cut into graphs, what is made of it, and the traces that an op holds."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcops.adapters.flatten import indexed_paths, unflatten
from funcops.adapters.from_function.boxed import boxed
from funcops.adapters.from_function.cut import Cutter, Graphs, Rules, has_gradient
from funcops.adapters.from_function.factors import Factors, factors_of
from funcops.adapters.from_function.joint import Like
from funcops.adapters.from_function.missing import without
from funcops.adapters.from_function.paths import HALVES, with_paths
from funcops.adapters.from_function.pickled import Operators
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.marks import mark_of, version
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import describe, stale
from funcops.engine.trees import paths

takers: Any = OpConfig.given_while_tracing.takers  # type: ignore[attr-defined]
TRACES = 64  # that an op holds


class Noted:
    """A forward's note to its second run: the trace, in which all that the function read is fixed, and the
    marks of the tensors among that. Two are equal if their traces are."""

    __slots__ = ("marks", "traced")

    def __init__(self, traced: Traced) -> None:
        compiling = torch.compiler.is_dynamo_compiling()
        self.traced, self.marks = traced, {n: None if compiling else mark_of(t) for n, t in traced.graphs.captured.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.traced.graphs.captured

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Noted) and other.traced is self.traced

    def __hash__(self) -> int:
        return id(self.traced)

    def complain(self, where: str) -> None:
        for name, t in self.tensors.items():
            if self.marks[name] is not None and version(t) != self.marks[name]:
                stale(where, name, hint="The forward runs again: run the backward first, or keep a clone")


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """The graphs traced for a call's shapes, and the trees of their inputs and outputs."""

    graphs: Graphs
    params_shape: Any
    x_shape: Any
    dx_shape: Any  # its tensors alone
    y_shape: Any
    asked: tuple[bool, ...]
    params: int  # leaves of params
    leaves: tuple[tuple[Like, int], ...]  # their layouts and storage offsets
    cutter: Cutter
    fixed: frozenset[int]  # leaves whose gradients nobody asks for
    cuts: dict[Any, Traced] = dataclasses.field(default_factory=dict)
    others: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what `other` has made

    def asking(self, needs: Needs) -> Traced:
        """The same trace, which has the gradients of all leaves, cut for fewer of them."""
        found: Traced = self.other("_asking", needs)  # noted by the masks: the paths of all leaves cost a call more than its graph
        return found

    def _asking(self, needs: Needs) -> Traced:
        asked = asked_of(self.params_shape, self.x_shape, [like for like, _ in self.leaves], self.params, needs, self.fixed)
        return self.cut(asked, None)

    def cut(self, asked: tuple[bool, ...], rules: Rules | None) -> Traced:
        key = asked, rules
        if key not in self.cuts:
            self.cuts[key] = dataclasses.replace(self, graphs=self.cutter.graphs(asked, rules), asked=asked, others={})
        return self.cuts[key]

    def asking_while_compiling(self, number: str, *masks: Any) -> str:
        """The name of `asking`'s trace, as a constant for the compiler."""
        return takers[number].watched.kept(self.asking(Needs(*masks)))  # type: ignore[no-any-return]

    asking_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def other(self, make: str, *args: Any) -> Any:
        """The result of the method `make` of this trace, which is called once."""
        if (make, args) not in self.others:
            self.others[make, args] = getattr(self, make)(*args)
        return self.others[make, args]

    def other_while_compiling(self, number: str, make: str, *args: Any) -> str:
        """The name of `other`'s result, as a constant for the compiler."""
        return takers[number].watched.kept(self.other(make, *args))  # type: ignore[no-any-return]

    other_while_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def without(self, *missing: int) -> Traced:
        """The same trace, cut for gradients of all outputs but these."""
        return dataclasses.replace(self, graphs=without(self.graphs, frozenset(missing)), others={})

    def factors(self) -> Factors:
        """The graph of wgrad without its last products."""
        return factors_of(self.graphs.wgrad)

    def factors_with_paths(self) -> Factors:
        found = factors_of(self.graphs.wgrad)
        return found._replace(graph=with_paths(found.graph, "wgrad"))

    def with_paths(self, which: str, level: int) -> fx.GraphModule:
        """One of the graphs, whose steps have the paths of modules, and at a level of NOTED tell what they compute."""
        return with_paths(getattr(self.graphs, which), HALVES[which], level)

    def boxed(self, which: str, level: int) -> fx.GraphModule:
        """One of the graphs, which takes its inputs out of a list."""
        return boxed(self.other("with_paths", which, level) if level else getattr(self.graphs, which))

    def home(self, name: str) -> str:
        """The path of the module that a kept tensor is named by; "" for a leaf and for a captured one."""
        return "" if name in self.graphs.leaves or name in self.graphs.captured else name.rpartition(".")[0]

    def __getstate__(self) -> dict[str, Any]:
        # residuals in another process need their graphs, but no other cut
        return {"operators": Operators.of(self.graphs)} | vars(self) | {"cutter": None, "cuts": {}, "others": {}}

    def nothing(self) -> Any:
        """dx without gradients."""
        return unflatten(self.dx_shape, [None] * len(self.asked))

    def dx(self, found: Any) -> tuple[Any, Iterator[Any]]:
        """dx, which is first among the results of a graph, and the rest."""
        count = sum(self.asked[self.params :])
        return unflatten(self.dx_shape, self.spread(found[:count], self.params, len(self.asked))), iter(found[count:])

    def spread(self, found: Any, first: int, last: int) -> list[Any]:
        """The gradients `found` of leaves `first` to `last`, among all leaves; None for leaves without a requested gradient."""
        values = iter(found)
        return [next(values) if ask and first <= i < last else None for i, ask in enumerate(self.asked)]


def asked_of(
    params_shape: Any, x_shape: Any, leaves: list[Like], count: int, needs: Needs, fixed: frozenset[int]
) -> tuple[bool, ...]:
    """Whether the gradient of each leaf is asked for; the first `count` are of params."""
    asked = []
    for shape, side in ((params_shape, needs.param), (x_shape, needs.input)):
        for i, path in indexed_paths(shape, ""):
            wanted = side(path) if path else bool(needs.params if i < count else needs.x)
            asked.append(bool(wanted and i not in fixed and has_gradient(leaves[i].dtype)))
    return tuple(asked)


def as_traced(where: str, own: Traced, leaves: list[Tensor], flat: list[Tensor]) -> list[Tensor]:
    """The leaves of a second run in the layout of the first one's, from which they differ if they were offloaded in between."""
    found = []
    for i, ((like, offset), t, plain) in enumerate(zip(own.leaves, leaves, flat, strict=True)):
        if Like.of(plain) != like:
            t = plain = like.laid_out(where, f"input {i}", plain)
        if own.graphs.placed and plain.storage_offset() != offset:
            t = plain.new_empty(offset + like.extent()).as_strided(like.shape, like.stride, offset)
            t.as_strided((like.extent(),), (1,), offset).copy_(plain.as_strided((like.extent(),), (1,)))
        found.append(t)
    return found


class Memo:
    """Traces by key, which hold for the same values outside. Of more than `TRACES` the one that was used longest ago goes; what it
    has kept for a backward holds it on."""

    def __init__(self, values: Any = ()) -> None:
        self.values, self.clock = values, itertools.count()
        self.traces: dict[Any, tuple[Any, Any]] = {}
        self.used: dict[Any, int] = {}  # when each group of traces was used, by a number that grows

    def get(self, key: Any) -> Any:
        traced, group = self.traces.get(key, (None, None))
        if traced is not None:
            self.used[group] = next(self.clock)
        return traced

    def put(self, where: str, key: Any, traced: Any, group: Any = None) -> None:
        """Hold a trace. `group`: of traces that go together; by default the trace alone."""
        group = group or traced
        if group not in self.used and len(self.used) >= TRACES:
            oldest = min(self.used, key=self.used.__getitem__)
            self.traces = {own: one for own, one in self.traces.items() if one[1] is not oldest}
            del self.used[oldest]
            why = f"{where}: it has more than {TRACES} traces, so the one that was used longest ago is dropped"
            warnings.warn(f"{why}: pad inputs to few lengths, and pass numbers that change as tensors", RuntimeWarning, 2)
        self.traces[key] = traced, group
        self.used[group] = next(self.clock)


class Trace(NamedTuple):
    """The key of a trace that an op holds: the leaves of x and of params, by path, the config, and the mode of the module."""

    x: dict[str, str]
    params: dict[str, str]
    cfg: Any
    mode: str


class Held:
    """The `traces` of an op."""

    def __init__(self, label: str, traces: Callable[[], list[Trace]], state: Callable[[], str]) -> None:
        self.label, self.traces, self.state = label, traces, state

    def __call__(self) -> list[Trace]:
        return self.traces()


def listed(memo: Memo, said: Callable[[Any], tuple[Any, Any] | None]) -> list[Trace]:
    """The traces that are held, the last used last. `said`: the config and the mode in a key, or None of what is not listed."""
    found = {group: (key, traced) for key, (traced, group) in list(memo.traces.items()) if said(key) is not None}
    order = sorted(found, key=lambda group: memo.used.get(group, 0))
    return [_listed(found[group][1], *said(found[group][0])) for group in order]  # type: ignore[misc]


def _listed(traced: Traced, cfg: Any, mode: Any) -> Trace:
    leaves = [torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta") for like, _ in traced.leaves]
    trees = unflatten(traced.x_shape, leaves), unflatten(traced.params_shape, leaves)
    x, params = [{path: _leaf(one) for path, one in paths(tree).items()} for tree in trees]
    training, trained = mode or ((), ())
    parts = [] if not training else ["training" if all(training) else "a part in training" if any(training) else "eval"]
    parts += [] if all(trained) else [f"{sum(trained)} of {len(trained)} parameters require grad"]
    return Trace(x, params, cfg, ", ".join(parts))


def _leaf(one: Any) -> str:
    if not isinstance(one, Tensor) or one.is_contiguous():
        return describe(one)
    return f"{describe(one)} with strides {list(one.stride())}"
