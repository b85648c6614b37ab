"""`op_from_module(module, example)`: an op made from an unmodified module of torch, by a trace of its joint graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcops.adapters.flatten import Shape, TensorIndex, gradients, indexed_paths, unflatten
from funcops.adapters.from_function.adapted import Layers, adapted, adapters, layers_in, names_of, parts_of
from funcops.adapters.from_function.cut import KEPT, Rules
from funcops.adapters.from_function.first_run import first_run
from funcops.adapters.from_function.formulas import ATTENTION, FORMULAS
from funcops.adapters.from_function.joint import Joint, copied
from funcops.adapters.from_function.keyed import draw_by_key
from funcops.adapters.from_function.layers import trace_layers
from funcops.adapters.from_function.lent import lent, put
from funcops.adapters.from_function.low_products import LowProducts, Seen, check_recipe
from funcops.adapters.from_function.matched import Finder, Forward, Part, with_parts
from funcops.adapters.from_function.op_from_torch import TorchConfig, Traces
from funcops.adapters.from_function.plan import plans
from funcops.adapters.from_function.read_by_module import ReadByModule
from funcops.engine.backend import wants_triton
from funcops.engine.contract.marks import Versions, version
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.errors import check, describe, describe_tree, differing, fail, join_path, require_callable, require_type
from funcops.engine.random import check_key
from funcops.engine.residuals.policy import Action, Policy
from funcops.engine.trees import WithExtras, paths
from funcops.library.formats.recipes import Recipe


def op_from_module(
    module: nn.Module,
    example: Any,
    *,
    output: Callable[[Any], Any] | None = None,
    recipe: Recipe | None = None,
    skip: Sequence[str] = (),
) -> tuple[Op, dict[str, Tensor]]:
    """Make an `Op` from a module, which is not changed. Returns the op, and its params: the module's parameters by name, detached.

        op, params = op_from_module(model, {"input_ids": ids, "labels": ids}, output=lambda out: out.loss)
        loss, residuals = op.fwd(params, {"input_ids": ids, "labels": ids}, TorchConfig())
        dx, pending = op.dgrad(residuals, torch.ones(()), TorchConfig())
        dparams = op.wgrad(pending, TorchConfig())

    `example` is an example of x: a tensor, a tuple of positional arguments, or a dict of arguments by name. y is the module's
    result, or `output` of it; a mapping, such as Hugging Face's `ModelOutput`, becomes a dict of what is not None in it.

    The module's forward and its autograd backward are traced together, on the tensors of x, and the graph is cut in three: `fwd`;
    `dgrad`, with all that reaches dx or the gradients of two modules; `wgrad`, with what reaches one module's gradients alone.
    Residuals have the names of the modules that computed them. They are the fewest bytes from which the backward is computed
    without a product or a random number being computed again. The trace itself holds what one step of autograd holds. Equal layers
    are traced once, if what they take and give are tensors and plain values: it holds one of these at a time, and all their inputs.

    Where Triton is chosen, as it is on a GPU, the parts of the graph that are written as this library's ops (norms, gated and
    written-out activations, modulation, rotations, attention by products, cross entropy) run by its kernels, within the rounding
    of the dtype from autograd; all else has autograd's bits, and inside `backend("torch")` everything.

    `recipe`: a recipe of `funcops.low_precision` without state, that rounds to nearest. Each product that a linear layer computes
    of a parameter [O, I] runs by it (`qlinear`), but for layers whose sizes it refuses and those whose paths match a glob of
    `skip`; `quantization_report(params, x, op, recipe)` measures each.

    The module is traced anew for other shapes, strides and dtypes, another mode or set of parameters that require grad, and after a
    change of an attribute, hook, buffer or submodule, of its config, or of a global that its classes read. What its hooks did in
    the trace is in the graph. Parameters that do not require grad have no gradients.

    Buffers to which the forward writes are values: y is `WithExtras(y, {name: its new value})`, and the module's own stay as they
    are. Their old values are the module's or, if x is `WithExtras(x, {name: value})`, these.

    Raises `TypeError` or `ValueError` for a module whose shapes or steps depend on values of its inputs or on random numbers (with
    the submodule that asks for them), that draws from Python's or NumPy's generators, that writes to its inputs or parameters,
    whose backward reads parameters again (by `torch.utils.checkpoint`, unless its layer has an equal), that changes its attributes
    in every call, that is compiled by `torch.jit`, or whose result holds anything but tensors; for arguments that it refuses; for
    params of other names; for a recipe that no layer takes, or with state; and `RuntimeError` under autocast.

    >>> import torch
    >>> from funcops import TorchConfig, op_from_module
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> op, params = op_from_module(model, torch.ones(4, 2))
    >>> y, residuals = op.fwd(params, torch.ones(4, 2), TorchConfig())
    >>> torch.equal(y, model(torch.ones(4, 2))), list(residuals.kept)[-1]
    (True, '2.input')
    >>> dparams, dx = op.bwd(residuals, torch.ones(4, 1), TorchConfig())
    >>> list(dparams)
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    require_type("op_from_module", "module", module, nn.Module)
    if any([isinstance(part, torch.jit.ScriptModule) for part in module.modules()]):
        fail("op_from_module", "module", "a module in Python", f"{type(module).__name__}, which torch.jit compiled", TypeError)
    if output is not None:
        require_callable("op_from_module", output=output)
    check_recipe("op_from_module", recipe, skip)
    own = ModuleTraces(module, output)
    own.recipe, own.skip = recipe, tuple(skip)
    params = own.own_params(TorchConfig())
    own.traced(params, example, TorchConfig(), Needs.ALL)  # what cannot be traced is refused here
    return own.op(), params


OF_OPERATORS = "whose backward is autograd's of its operators (without an autograd.Function or a hook on a tensor)"
KEY = "key"  # among the extras of x, by which random numbers are drawn


def named_leaves(params_shape: Any, x_shape: Any) -> list[str]:
    """The names of the leaves of params and x, by their paths."""
    named = [(i, join_path("params", path)) for i, path in indexed_paths(params_shape, "")]
    return [name for _, name in sorted([*named, *[(i, join_path("x", path)) for i, path in indexed_paths(x_shape, "")]])]


class NamedTraces(Traces):
    """Traces whose tensors have the names of modules, by which policies reach them."""

    quick = True
    init: Callable[..., Any]

    @property
    def named(self) -> NamedTraces:
        return self

    def known(self, cfg: Any) -> list[str]:
        cutter = self.whole.last.cutter
        return [join_path(KEPT, cutter.names[node]) for node in cutter.named()]

    def kept(self, cfg: Any) -> dict[str, Action | None]:
        last, known = self.whole.last, self.known(cfg)
        graphs = last.cut(last.asked, self.rules).graphs
        return {path: graphs.actions.get(n) for n in graphs.kept if (path := join_path(KEPT, n)) in known}

    def under(self, path: str, policy: Policy) -> Op:
        own = copy.copy(self.whole)
        own.rules = Rules(path, policy)
        return own.op()

    def plans(self, x: Any, cfg: Any, needs: Needs, budget: int, flops: Any) -> list[tuple[Policy, int, float]]:
        found, _, _ = self.whole.traced(self.init(cfg), x, cfg, needs)
        made = {}
        for plan in plans(found.cutter, found.asked, budget, flops):
            # optional: the rules need not be tried one by one, as each is known to change something
            policy = Policy({join_path(KEPT, name): action for name, action in plan.actions.items()}, optional=True)
            made[policy] = policy, plan.kept_bytes, plan.extra
        return list(made.values())

    def names(self, params_shape: Any, x_shape: Any, count: int) -> list[str]:
        return named_leaves(params_shape, x_shape)


class ModuleTraces(NamedTraces):
    """The traces of a module, whose forward and buffers are called as a pure function."""

    held = True  # x is a batch, which its loop holds
    settles = True  # `joint` refuses a module that changes its attributes again
    outside: ReadByModule
    recipe: Recipe | None = None
    skip: tuple[str, ...] = ()
    layers: Layers = {}  # with adapters
    linear: dict[str, str] = {}  # the weights of all layers, by path, once some have adapters

    def __init__(self, module: nn.Module, output: Callable[[Any], Any] | None, beside: frozenset[str] = frozenset()) -> None:
        super().__init__(type(module).__name__, self._call, TorchConfig, self.own_params, ReadByModule(module, beside))
        self.module, self.output = module, output
        self.written: tuple[str, ...] = ()  # names of buffers that the forward writes to, of the trace that is made

    def own_params(self, cfg: Any, *, key: Any = None, device: Any = None, dtype: Any = None) -> dict[str, Tensor]:
        """The module's parameters as they are, on this device and in this dtype, and the adapters'."""
        own = {name: p.detach().to(device, dtype) for name, p in self.module.named_parameters()}
        return own | adapters(self.layers, own, key, device, dtype) if self.layers else own

    def with_lora(self, where: str, rank: int, targets: Sequence[str], scale: float) -> Op:
        """The op with adapters beside the linear layers that the targets match."""
        params = self.outside.params
        made = ModuleTraces(self.module, self.output)
        made.recipe, made.skip = self.recipe, self.skip
        made.linear = self.linear or layers_in(self.whole.last.cutter.graph, params)
        made.layers = adapted(where, made.linear, params, self.layers, rank, targets, scale)
        return made.op()

    def lora_init(self, where: str, params: Any, key: Tensor, dtype: Any) -> dict[str, Tensor]:
        """These params, and new ones of the adapters that they lack."""
        new = adapters(self.layers, self.outside.params, key, None, dtype)
        if not isinstance(params, Mapping) or not self.outside.params.keys() <= params.keys() <= {*self.outside.params, *new}:
            fail(where, "params", "the module's parameters by name", describe(params))
        return {**params, **{name: t for name, t in new.items() if name not in params}}

    def fixed(self, params_shape: Any, x_shape: Any) -> frozenset[int]:
        """Parameters that do not require grad, and buffers."""
        for name, shape in params_shape.items():
            if type(shape) is not TensorIndex:
                fail(f"{self.label}_fwd", join_path("params", name), "a tensor", describe(shape), TypeError)
        untrained = [params_shape[name].i for name, p in self.outside.params.items() if not p.requires_grad]
        return frozenset([*untrained, *[i for i, _ in indexed_paths(_extras(x_shape), "")]])

    def traced(self, params: Any, x: Any, cfg: Any, needs: Needs) -> Any:
        where = f"{self.label}_fwd"
        if not isinstance(params, Mapping):
            fail(where, "params", "a dict of the module's parameters by name", describe(params), TypeError)
        if self.layers and params.keys() == {*(wanted := [*self.outside.params, *names_of(self.layers)])}:
            params = {name: params[name] for name in wanted}
        if isinstance(x, WithExtras):
            buffers = [name for name, _ in self.module.named_buffers()]
            if odd := [name for name in x.extras if name not in (*buffers, KEY)]:
                known = f"a key, or buffers of the module by name ({', '.join(buffers) or 'it has none'})"
                fail(where, "x.extras", known, ", ".join(odd))
            if KEY in x.extras:
                if KEY in buffers:
                    fail(where, "x.extras.key", "for a module without a buffer of that name", "one that has it")
                check_key(f"{where}, x.extras", x.extras[KEY])
        return super().traced(params, x, cfg, needs)

    def _trace(self, cfg: Any, params_shape: Any, *rest: Any) -> Any:
        names = dict.fromkeys([*self.outside.params, *names_of(self.layers)])
        if params_shape.keys() != names.keys():  # of the module as it now is
            wanted = "the module's parameters by name"
            fail(f"{self.label}_fwd", "params", wanted, differing(params_shape, names))
        return super()._trace(cfg, params_shape, *rest)

    def joint(self, run: Any, leaves: list[Tensor], asked: tuple[bool, ...], x_shape: Any) -> Joint:
        undo = self.outside.restorer()
        try:
            return self._joint(run, leaves, asked, x_shape)
        except BaseException:
            undo()  # a forward that counts, or assigns its buffers, has done so
            raise

    def _joint(self, run: Any, leaves: list[Tensor], asked: tuple[bool, ...], x_shape: Any) -> Joint:
        where, count = f"{self.label}_fwd", len(self.outside.params)
        names = [*[join_path("params", name) for name in self.outside.params], *["an input"] * len(leaves[count:])]
        with torch.inference_mode(False):  # an inference tensor has no gradient, but its copy has
            given = [copied(t) if i >= count or t.is_inference() else t.detach() for i, t in enumerate(leaves)]
        # asked before each trace, as another part or shape may have others
        before = dict(self.module.named_buffers())
        self.written, made = self._tried(run, given, names, before)
        if made:  # some only in a first call, as a table for this shape
            self.written, again = self._tried(run, given, names, before | made)
            for name in again:
                check(where, f"the new value of its buffer {name}", made[name], before[name].shape, before[name].dtype)
            put(self.module, {name: t for name, t in made.items() if name not in again})
            self.outside.values()
        settled = self.outside.frozen  # what the first call alone changes, such as a table that it makes, may stay changed
        traced = self.trace(run, given, asked)
        self._left = None
        params = {id(p): name for name, p in self.outside.params.items()}
        constants = [id(getattr(traced.graph, node.target)) for node in traced.graph.graph.find_nodes(op="get_attr")]
        if read := [params[one] for one in constants if one in params]:  # outside of its forward, where they are arguments
            wanted = "a module whose backward reads no parameter again (leave out torch.utils.checkpoint)"
            fail(where, self.label, wanted, f"one that reads {read[0]}")
        self.outside.values()
        if changed := self.outside.changed(settled):
            wanted = "a module whose forward leaves its attributes as they are, as a trace does not run it again"
            fail(where, self.label, wanted, f"one that assigns {changed}")
        buffers = dict(self.module.named_buffers())
        if decide := [name for name in self.written if any([t is buffers[name] for t in traced.constants])]:
            fail(where, self.label, "a module whose steps do not depend on values of buffers that it writes to", ", ".join(decide))
        self.outside.constants += [(t, version(t)) for t in traced.constants]
        key = _extras(x_shape).get(KEY)
        if key is not None:
            inputs = [node for node in traced.graph.graph.nodes if node.op == "placeholder"]
            draw_by_key(where, traced.graph.graph, inputs[key.i])
        return traced

    def trace(self, run: Any, leaves: list[Tensor], asked: tuple[bool, ...]) -> Joint:
        where = f"{self.label}_fwd"
        made = trace_layers(where, self.module, run, leaves, asked)
        by_products = any([node.target is torch.ops.aten.bmm.default for node in made.graph.graph.nodes])
        known: Any = Finder(ATTENTION + FORMULAS if by_products else FORMULAS, wants_triton)
        if self.recipe is None and not self.layers:
            return with_parts(made, leaves, asked, known) or made
        count = len(self.outside.params)

        def find(forward: Forward) -> dict[Any, Part]:
            low = {} if self.recipe is None else LowProducts(where, self.recipe, self.skip, count)(forward)
            return known(forward) | low | (parts_of(where, forward, count, self.layers, low) if self.layers else {})

        found = with_parts(made, leaves, asked, find)
        if found is None:
            what = ("adapters", "with_lora") if self.recipe is None else ("recipe", type(self.recipe).__name__)
            fail(where, what[0], f"for a module {OF_OPERATORS}", what[1])
        return found

    def linears(self, params: Any, x: Any, cfg: Any, dy_of: Callable[[Any], Any]) -> list[tuple[str, Tensor, Tensor, Tensor]]:
        """The path, x, w and dy of each product of a linear layer, in one step of autograd without a recipe."""
        own = _Seeing(self.module, self.output)
        found, _, _ = own.traced(params, x, cfg, Needs.ALL)
        seen: Seen = own.seen
        return seen.operands(gradients(found.y_shape, dy_of(unflatten(found.y_shape, [y.detach() for y in seen.ys])), []))

    def _complain(self, where: str, params: Any, x: Any, error: Exception) -> None:
        """Raise for arguments with which the module does not run."""
        kind = TypeError if isinstance(error, TypeError) else ValueError
        for name, p in self.module.named_parameters():
            if getattr(params[name], "shape", None) != p.shape:
                fail(
                    where, join_path("params", name), f"of the shape {list(p.shape)}, as the module's", describe(params[name]), kind
                )
        kinds = {f"{str(t.dtype).removeprefix('torch.')} on {t.device}": None for _, t in _tensors(params)}
        given = (
            f"{describe_tree(x)}{', '.join(['', *{f'on {t.device}' for _, t in _tensors(x)}])}, with params of {', '.join(kinds)}"
        )
        fail(where, "x", f"arguments with which {self.label} runs", f"{given}: {error}", kind)

    def _tried(
        self, run: Any, given: list[Tensor], names: list[str], buffers: dict[str, Tensor]
    ) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """The names of the buffers to which a call on these writes; and, by name, the tensors that it puts in their places."""
        self._own = own = {name: b.clone() for name, b in buffers.items()}
        versions = Versions.of(own)
        try:
            with self.outside.learning(), first_run(f"{self.label}_fwd", self.label, names, given):
                run(given)
        finally:
            self._own = None
        if self.outside.prints:
            fail(f"{self.label}_fwd", self.label, "a module whose forward prints nothing, as only its trace would", "one that does")
        made = {name: t for name, t in self._left.items() if t is not own[name]}
        # a batch norm writes without counting, and another forward replaces its buffer
        found = {*map(id, versions.written()), *[id(b) for name, b in own.items() if not torch.equal(b, buffers[name])]}
        return tuple([name for name, b in own.items() if id(b) in found or name in made]), made

    _own: Any = None
    _left: Any = None  # by the last call, in place of the tensors that it was lent

    def _call(self, params: Any, x: Any, cfg: Any) -> Any:
        where = f"{self.label}_fwd"
        main, given = (x.main, {n: b for n, b in x.extras.items() if n != KEY}) if isinstance(x, WithExtras) else (x, {})
        own = self._own
        if own is None:
            buffers = dict(self.module.named_buffers())
            own = {name: given.get(name, buffers[name]).clone() for name in self.written}
        if self._own is not None and (odd := [path for path, t in _tensors({"params": params, "x": x}) if t.is_meta]):
            fail(where, odd[0], "a tensor with values, as a trace runs the module", "one on the meta device")
        added = {*names_of(self.layers)}  # which the module does not know
        values = {**{name: p for name, p in params.items() if name not in added}, **given, **own}
        try:
            y = self.result(values, main)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self._own is None or str(error).startswith(f"{where}: "):  # it ran with them before, or says it itself
                raise
            self._complain(where, params, main, error)
        self._left = {name: values[name] for name in own}
        return WithExtras(y, self._left) if own and self._own is None else y

    def result(self, values: dict[str, Tensor], x: Any) -> Any:
        """The module's result with these parameters and buffers, as a tree of tensors. `values` gets what its forward assigns."""
        args = x if type(x) is tuple else () if isinstance(x, Mapping) else (x,)
        with lent(self.module, values) as left:
            found = self.module(*args, **(dict(x) if isinstance(x, Mapping) else {}))
        values.update(left)
        return _plain(f"{self.label}_fwd", "y", found if self.output is None else self.output(found))


class _Seeing(ModuleTraces):
    """Runs what it has traced, under autograd."""

    seen: Any = None

    def trace(self, run: Any, leaves: list[Tensor], asked: tuple[bool, ...]) -> Joint:
        made = trace_layers(f"{self.label}_fwd", self.module, run, leaves, asked)
        self.seen = Seen.of(made, leaves, asked, len(self.outside.params))
        if self.seen is None:
            fail(f"{self.label}_fwd", self.label, f"a module {OF_OPERATORS}, whose products can be measured", "another")
        return made


def _extras(x_shape: Any) -> dict[str, Any]:
    return x_shape.leaves["extras"] if type(x_shape) is Shape and x_shape.cls is WithExtras else {}


def _tensors(tree: Any) -> list[tuple[str, Tensor]]:
    return [(path, t) for path, t in paths(tree).items() if isinstance(t, Tensor)]


def _plain(where: str, path: str, y: Any) -> Any:
    """A result of dicts, tuples and tensors, without None."""
    if isinstance(y, Tensor):
        return y
    if isinstance(y, Mapping):
        return {name: _plain(where, join_path(path, str(name)), one) for name, one in y.items() if one is not None}
    if isinstance(y, (tuple, list)):
        return tuple([_plain(where, join_path(path, i), one) for i, one in enumerate(y) if one is not None])
    return fail(where, path, "a tensor (output= chooses a part of the result)", describe(y), TypeError)
