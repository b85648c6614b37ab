"""`stages_from_module(module, example, cuts)`: the stages of a pipeline, cut from an unmodified module of torch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from funcops.adapters.flatten import TensorIndex, flatten, indexed_paths, unflatten
from funcops.adapters.from_function.crossing import CutSteps, Parts
from funcops.adapters.from_function.joint import Joint, Like, resolved, trace_module
from funcops.adapters.from_function.op_from_module import ModuleTraces, NamedTraces, named_leaves
from funcops.adapters.from_function.op_from_torch import TorchConfig, defaults, one_at_a_time
from funcops.adapters.from_function.traced import Memo, Trace, Traced, as_traced, listed
from funcops.engine.compose.chain import ChainConfig
from funcops.engine.compose.step import Step
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import describe, differing, fail, few, require, require_callable, require_type
from funcops.engine.trees import WithExtras

WHERE = "stages_from_module"


def stages_from_module(
    module: nn.Module, example: Any, cuts: Sequence[str], *, output: Callable[[Any], Any] | None = None
) -> tuple[ChainConfig, dict[str, dict[str, Tensor]]]:
    """Cut a module, which is not changed, into the stages of a pipeline. Returns a chain of one step a stage, `s0`, `s1`, ..., and
    its params: for each step the parameters that it reads, by their names in the module, detached.

        cfg, params = stages_from_module(model, {"input_ids": ids, "labels": ids}, ["model.layers.8", "model.layers.16"],
                                         output=lambda out: out.loss)
        ran = funcops.schedule.run(zb_h1(3, 8), params, microbatches, cfg)

    `cuts` are paths of modules in the order in which they run: a stage begins where its module begins. `example` is an example of
    one microbatch, as in `op_from_module`, and so is `output`. The steps work in `funcops.chain`, `funcops.schedule.run` and
    `funcops.adapters.pipelining.Pipeline`.

    The module is traced once with its autograd backward, and each node of the graph goes to the stage in which it ran; each stage
    is cut in forward, dgrad and wgrad as by `op_from_module`. From stage to stage goes a dict of all that later stages read
    (hidden states, labels, masks), by the module that computed it; constants that are cheap to compute are computed by each stage.
    dx has a gradient for what autograd differentiates, and None for the rest. A parameter that several stages read, such as a tied
    embedding, is among the params of each: its gradient is the sum of theirs. A parameter that none reads is in none.

    Each process of a pipeline makes all stages, from its own copy of the module, and traces the whole.
    Afterwards it may free the parameters of stages that it does not run (`p.data = p.data.new_empty(0)`), until the module is
    traced anew: for an x of another shape or dtype by the first stage, for all stages of its process, and after a change of the
    module, such as another mode, on the example. In a process without the first stage, x has the example's shapes.

    Raises `TypeError` or `ValueError` for a path that is not a module's, or whose module does not run, runs twice or runs after
    the one behind it; for a module that `op_from_module` refuses, that writes to buffers (a batch norm in training), or that
    changes by a hook the gradient of what crosses; for an x that no trace fits; and for two shapes after which a later stage gets
    the same shapes and computes something else.

    >>> import torch
    >>> from funcops import chain, stages_from_module
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> cfg, params = stages_from_module(model, torch.ones(4, 2), ["2"])
    >>> {name: list(own) for name, own in params.items()}
    {'s0': ['0.weight', '0.bias'], 's1': ['2.weight', '2.bias']}
    >>> y, residuals = chain.fwd(params, torch.ones(4, 2), cfg)
    >>> torch.equal(y, model(torch.ones(4, 2)))
    True
    """
    require_type(WHERE, "module", module, nn.Module)
    require_type(WHERE, "cuts", cuts, list, tuple)
    if output is not None:
        require_callable(WHERE, output=output)
    found = dict(module.named_modules(remove_duplicate=False))
    for path in cuts:
        require(
            isinstance(path, str) and path in found and path != "",
            WHERE,
            "cuts",
            f"paths of modules in {type(module).__name__}",
            repr(path),
        )
    require(len(cuts) > 0, WHERE, "cuts", "at least one path of a module", "none")
    if isinstance(example, WithExtras):
        fail(WHERE, "example", "without extras, as a chain has its own", "WithExtras", TypeError)
    starts = {id(found[path]): path for path in cuts}
    require(len(starts) == len(cuts), WHERE, "cuts", "paths of different modules", list(cuts))
    whole = Whole(module, example, starts, output)
    whole.begin()
    steps = [Step(stage.label, stage.op(), TorchConfig()) for stage in whole.stages]
    return ChainConfig(steps=tuple(steps)), {stage.label: stage.own_params(TorchConfig()) for stage in whole.stages}


class Whole(ModuleTraces):
    """The traces of a whole module, whose parts are its stages'."""

    def __init__(self, module: nn.Module, example: Any, starts: dict[int, str], output: Callable[[Any], Any] | None) -> None:
        super().__init__(module, output)
        self.example, self.starts = example, starts  # the paths by the ids of modules
        self.stages = [Stage(self, index) for index in range(len(starts) + 1)]
        self.table = Memo()

    def begin(self) -> None:
        """Trace the example, and see which parameters each stage reads."""
        self.make(self.example)
        for stage in self.stages:
            own = self.table.get((self.state(), stage.index, None))
            stage.reads, stage.takes = tuple(own.params_shape), tuple(own.x_shape) if stage.index else ()

    def state(self) -> Any:
        """The module and the settings of torch, as the traces depend on them."""
        values = self.outside.values()
        if values != self.table.values:
            self.table = Memo(values)
        return self.outside.mode(), *defaults()

    def find(self, stage: Stage, key: Any, x: Any, leaves: list[Tensor]) -> Traced | None:
        """The trace of a stage for this key, if there is one. Only the first stage has an x to make one from."""
        state = self.state()
        if self.table.get((state, stage.index, key)) is None and not any(isinstance(t, FakeTensor) for t in leaves):
            with one_at_a_time:
                if not stage.index:
                    self.make(x)
                elif self.table.get((state, stage.index, None)) is None:
                    self.make(self.example)
        return self.table.get((state, stage.index, key))  # type: ignore[no-any-return]

    def make(self, x: Any) -> None:
        """Trace the module, and note the stages' parts under the state that it leaves, as its first call may change it."""
        leaves: list[Tensor] = []
        params_shape = flatten(self.own_params(TorchConfig()), leaves)
        count = len(leaves)
        x_shape = flatten(x, leaves)
        found: Any = self._trace(TorchConfig(), params_shape, x_shape, list(map(resolved, leaves)), count)
        state = self.state()
        keys = [
            (state, one.index, _key(own.x_shape, [like for like, _ in own.leaves]))
            for one, own in zip(self.stages, found, strict=True)
        ]
        for stage, key, own in zip(self.stages, keys, found, strict=True):
            if stage.reads not in (None, tuple(own.params_shape)):
                wanted = "one whose stages read the parameters that they read for the example"
                fail(
                    f"{self.label}_fwd", self.label, wanted, f"{stage.label} with {differing(own.params_shape, stage.reads or ())}"
                )
            before = self.table.get(key)
            if before is not None and not _equal(before, own):
                wanted = "one after which a stage computes from the same shapes what it computed before"
                fail(f"{self.label}_fwd", "x", wanted, f"one after which {stage.label} computes something else")
        together = object()
        for stage, key, own in zip(self.stages, keys, found, strict=True):
            stage.last = self.table.get(key) or own
            for one in (key, *([(state, stage.index, None)] if x is self.example else ())):
                self.table.put(f"{self.label}_fwd", one, stage.last, together)

    def trace(self, run: Any, leaves: list[Tensor], asked: tuple[bool, ...]) -> Joint:
        return trace_module(f"{self.label}_fwd", self.module, run, leaves, asked, watch=self._steps)

    def _steps(self, module: nn.Module) -> CutSteps:
        self.steps = CutSteps(module, f"{self.label}_fwd", self.starts)
        return self.steps

    def made(
        self, joint: Joint, y_shape: Any, params_shape: Any, x_shape: Any, leaves: list[Tensor], count: int, asked: tuple[bool, ...]
    ) -> Any:
        """The graphs of each stage."""
        params, x = list(params_shape), unflatten(x_shape, leaves)
        names = [*params, *[path or "x" for _, path in indexed_paths(x_shape, "")]]
        parts, found = Parts(f"{self.label}_fwd", joint, self.steps, names, count, asked).made(), []
        del self.steps  # it holds autograd's nodes
        for stage, part, after in zip(self.stages, parts, [*parts[1:], None], strict=True):
            own: list[Tensor] = []
            own_shape, first = flatten({params[i]: leaves[i] for i in part.params}, own), len(part.params)
            of_x = flatten(x, own)
            of_y = y_shape if after is None else {name: TensorIndex(i) for i, name in enumerate(after.names)}
            found.append(stage.made(part.joint, of_y, own_shape, of_x, own, first, part.asked))
            with torch.no_grad(), torch.random.fork_rng():
                values = found[-1].graphs.forward.forward(*own)[: len(part.joint.outputs)]
            x = unflatten(of_y, values)
        return found

    def _call(self, params: Any, x: Any, cfg: Any) -> Any:
        where = f"{self.label}_fwd"
        if self.written and self._own is None:
            wanted = "a module that writes to no buffer (a batch norm in eval mode, say)"
            fail(where, self.label, wanted, f"one that writes to {few(self.written)}")
        ran, thread = list[str](), threading.get_ident()

        def note(module: nn.Module, args: Any) -> None:
            if id(module) in self.starts and threading.get_ident() == thread:
                ran.append(self.starts[id(module)])

        hook = nn.modules.module.register_module_forward_pre_hook(note)
        try:
            y = super()._call(params, x, cfg)
        finally:
            hook.remove()
        if fault := _fault(ran, list(self.starts.values())):
            fail(WHERE, "cuts", "paths of modules that run once, in the order in which they run", fault)
        return y


class Stage(NamedTraces):
    """The traces of one stage, each a part of a trace of the whole module."""

    reads: tuple[str, ...] | None = None  # the names of its parameters, from the first trace on
    takes: tuple[str, ...] = ()  # the names of x, of a later stage

    def __init__(self, whole: Whole, index: int) -> None:
        super().__init__(f"s{index}", whole.fn, TorchConfig, self.own_params, whole.outside)
        self.of, self.index = whole, index
        self.held = index == 0  # x of the first stage is a batch

    def own_params(self, cfg: Any, *, key: Any = None, device: Any = None, dtype: Any = None) -> dict[str, Tensor]:
        """The parameters that the stage reads as they are in the module, on this device and in this dtype."""
        every = dict(self.of.module.named_parameters())
        return {name: every[name].detach().to(device, dtype) for name in self.reads or ()}

    def fixed(self, params_shape: Any, x_shape: Any) -> frozenset[int]:
        every = self.of.outside.params
        return frozenset([index.i for name, index in params_shape.items() if not every[name].requires_grad])

    def traced(self, params: Any, x: Any, cfg: Any, needs: Needs) -> tuple[Traced, list[Tensor], list[Tensor]]:
        where = f"{self.label}_fwd"
        if not isinstance(params, Mapping):
            fail(where, "params", "a dict of the stage's parameters by name", describe(params), TypeError)
        if params.keys() != {*(self.reads or ())}:
            fail(where, "params", "the stage's parameters by name", differing(params, self.reads or ()))
        if self.index and isinstance(x, Mapping) and x.keys() == {*self.takes}:
            x = {name: x[name] for name in self.takes}
        own, leaves, flat = super().traced({name: params[name] for name in self.reads or ()}, x, cfg, needs)
        found = as_traced(where, own, leaves, flat)  # a sent tensor has other strides than one that a stage computed
        return own, found, list(map(resolved, found))

    def _found(self, params_shape: Any, x_shape: Any, cfg: Any, flat: list[Tensor], count: int) -> Traced:
        own = self.of.find(self, _key(x_shape, flat), unflatten(x_shape, flat), flat)
        if own is None:
            self._refuse(params_shape, x_shape, flat)
        return own

    def _refuse(self, params_shape: Any, x_shape: Any, flat: list[Tensor]) -> NoReturn:
        """Name the first leaf that differs from the example's."""
        where, own = f"{self.label}_fwd", self.last
        got = dict(zip(named_leaves(params_shape, x_shape), map(describe, flat), strict=True))
        likes = [torch.empty(like.shape, dtype=like.dtype, device="meta") for like, _ in own.leaves]
        want = dict(zip(named_leaves(own.params_shape, own.x_shape), map(describe, likes), strict=True))
        if got.keys() != want.keys():
            fail(where, "x", "a dict of what the stage before gives", differing(got, want))
        for path in want:
            if want[path] != got[path]:
                hint = "as with the example, or with an x that the first stage got in this process"
                fail(where, path, f"{want[path]}, {hint}", got[path])
        fail(
            where,
            self.of.label,
            "in the mode and state of a trace of its stages, with x on its devices",
            "another mode, state or device",
        )

    def traces(self) -> list[Trace]:
        """See `Op.traces`."""
        return listed(self.of.table, lambda key: (TorchConfig(), key[0][0]) if key[1] == self.index and key[2] else None)

    def draws(self, cfg: Any) -> str:
        """See `Op.draws`."""
        own = [one.graphs.draws for (_, index, _), (one, _) in list(self.of.table.traces.items()) if index == self.index]
        return next(filter(None, own), "")


def _fault(ran: list[str], cuts: list[str]) -> str:
    """The first of `cuts` that does not run once, or not before the one behind it; "" if they run as listed."""
    for path in cuts:
        if ran.count(path) != 1:
            return f"{path!r}, which {'runs more than once' if path in ran else 'does not run'}"
    late = [
        f"{path!r}, which runs after {after!r}" for path, after in itertools.pairwise(cuts) if ran.index(path) > ran.index(after)
    ]
    return next(iter(late), "")


def _key(x_shape: Any, leaves: Sequence[Tensor | Like]) -> Any:
    """A part of the key of a stage's trace; strides are left out, as each leaf is laid out as in the trace."""
    return repr(x_shape), tuple([(t.shape, t.dtype, t.device) for t in leaves])


def _equal(one: Traced, other: Traced) -> bool:
    """Whether two traces compute the same from the same leaves."""
    pairs = [(getattr(one.graphs, half), getattr(other.graphs, half)) for half in ("forward", "dgrad", "wgrad", "backward")]
    return (
        one.y_shape == other.y_shape and one.graphs.kept == other.graphs.kept and all(map(_same_steps, *zip(*pairs, strict=True)))
    )


def _same_steps(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    constants = [[getattr(part, node.target) for node in part.graph.find_nodes(op="get_attr")] for part in (one, other)]
    return one.code == other.code and all(
        a is b or (isinstance(a, Tensor) and torch.equal(a, b)) for a, b in zip(*constants, strict=True)
    )
