"""The cut of a joint graph in forward, I and W, and what crosses.

I is every node of the backward that reaches dx, or the gradients of two modules; W reaches one module's gradients alone. Residuals
are a min cut over bytes between what the forward computes and what the backward reads, as some of it is cheap to compute again.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import networkx
import torch
from torch import Tensor, fx

from funcops.adapters.from_function.calls import CALL
from funcops.adapters.from_function.joint import Like, draws, is_view, of_schema, operator_name, writes
from funcops.adapters.from_function.keyed import DRAWS
from funcops.engine.errors import fail, join_path
from funcops.engine.residuals.policy import Action, Compress, Drop, Offload, Policy, Recompute

SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default)
OWN = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)  # of a tensor that the function makes of numbers
_FILLS = set(
    "arange full zeros ones scalar_tensor full_like zeros_like ones_like new_zeros new_full new_ones empty empty_like".split()
)
# computed again where that saves bytes, beside views, fills and what torch tags as pointwise: one pass over memory each
_CHEAP = _FILLS | set(
    "_to_copy clone cat mean sum var_mean embedding select slice index amax stack constant_pad_nd native_layer_norm gather "
    "_unsafe_view native_group_norm native_batch_norm cumsum tril triu repeat max_pool2d_with_indices max_pool3d_with_indices "
    "avg_pool2d avg_pool3d _adaptive_avg_pool2d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d reflection_pad1d reflection_pad2d replication_pad2d pixel_shuffle pixel_unshuffle roll "
    "flip index_select _softmax _log_softmax nll_loss_forward nll_loss2d_forward amin max min var linalg_vector_norm "
    # of this library
    "rms_norm_fwd layer_norm_fwd activation_fwd glu_fwd glu_pair_fwd modulate_fwd rope_apply cross_entropy_fwd".split()
)
fx.node.has_side_effect(torch.ops.aten._linalg_check_errors.default)  # or a trace drops it, and a factorisation never fails
_T = torch.ops.aten.t.default
_RESHAPED = "_unsafe_view"  # of a result that nothing else reads
X = None  # the owner of a gradient of x
KEPT = "kept"  # the field of the residuals with the tensors of the graph


class Rules(NamedTuple):
    """The rules of a policy for what an op at a path keeps."""

    path: str
    policy: Policy

    def action(self, name: str) -> Action | None:
        return self.policy.action(join_path(self.path, join_path(KEPT, name)))


class Graphs(NamedTuple):
    """The graphs, and the names of their inputs: leaves of the call, gradients of outputs, captured tensors, and nodes, whose
    values the previous graph returns after its results."""

    forward: fx.GraphModule
    dgrad: fx.GraphModule
    wgrad: fx.GraphModule
    backward: fx.GraphModule  # both halves as one, which computes nothing twice
    outputs: tuple[Like, ...]  # in the layout of their gradients
    kept: dict[str, Like]
    waiting: dict[str, Like]
    leaves: dict[str, int]
    dys: dict[str, int]
    placed: bool  # whether they contain storage offsets, so that they only serve leaves at these offsets
    captured: dict[str, Tensor]  # which the function reads beside its arguments; a backward gets those that it reads as kept ones
    draws: str  # the first operator of the forward that draws random numbers, or ""
    passes: tuple[bool, ...]  # which gradients wgrad may return unchanged
    idle: frozenset[str]  # the kept ones that dgrad only hands on
    actions: dict[str, Action]  # for kept ones in another form


def cheap(node: fx.Node) -> bool:
    """Whether a backward may compute the node again."""
    if node.op == "get_attr" or is_view(node) or node.target in DRAWS.values():
        return True
    if node.target is operator.getitem:
        return cheap(node.args[0])  # type: ignore[arg-type]
    schema = of_schema(node)
    if schema is None or torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return False
    return operator_name(node) in _CHEAP or torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _of_batch(node: fx.Node) -> bool:
    """Whether the node is a batch norm in training, which writes to its running statistics and does not read them."""
    return operator_name(node) == "native_batch_norm" and bool(node.args[5])


def args_again(node: fx.Node) -> Any:
    """The arguments of another run: the forward brought the running statistics up to date."""
    return (*node.args[:3], None, None, *node.args[5:]) if _of_batch(node) else node.args


def _writes_dx(node: fx.Node) -> bool:
    """Whether torch's kernel writes dx unasked, and crashes: of a group norm, unless x is contiguous."""
    return operator_name(node) == "native_group_norm_backward" and not node.args[1].meta["val"].is_contiguous()  # type: ignore[union-attr]


def _reads(node: fx.Node) -> list[fx.Node]:
    """The nodes that another run of the node needs."""
    if not _of_batch(node):
        return node.all_input_nodes
    return [n for n in node.args[:3] if isinstance(n, fx.Node)]


def maker(node: fx.Node) -> fx.Node:
    """The node that computes this one: for an element of a tuple the tuple, for a product in another shape the product."""
    while node.target is operator.getitem or operator_name(node) == _RESHAPED:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _and_elements(node: fx.Node) -> list[fx.Node]:
    """A node and the elements of its tuple, next to it, so that the tuple does not hold the others."""
    found = [node]
    for user in node.users:
        if user.target is operator.getitem:
            found += _and_elements(user)
    return found


def base_of(node: fx.Node) -> fx.Node:
    """The node of whose memory this one is a view."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


class Cut(NamedTuple):
    """The nodes of the two halves, the tensors that are kept for them, and the gradients that they compute."""

    second: set[fx.Node]
    third: set[fx.Node]
    kept: list[fx.Node]
    dx: list[Any]
    dparams: list[Any]


def by_module(node: fx.Node) -> str | None:
    """The path of the module in which the node was computed, and its operator; None if that is not known."""
    base = maker(node)
    path = base.meta.get("custom", {}).get("path")
    number = node.args[1] if node.target is operator.getitem else ""
    return None if path is None else join_path(path, f"{operator_name(base) or base.name}{number}")


def unique(path: str, taken: set[str], mark: str = ".") -> str:
    """The path, with a number if it is taken; takes it."""
    name, number = path, 2
    while name in taken:
        name, number = f"{path}{mark}{number}", number + 1
    taken.add(name)
    return name


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype may have a gradient."""
    return dtype.is_floating_point or dtype.is_complex


def _memory(node: Any) -> fx.Node:
    """The node whose memory a node is, or may be, a part of: as `base_of`, also through operators that return several views."""
    while node.target is operator.getitem or any(one.alias_info is not None for one in getattr(of_schema(node), "returns", ())):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


class Cutter:
    """Assigns each node of a joint graph to the forward, dgrad or wgrad. `owners`: by the number of a leaf of params, the module or
    part of the tree whose leaf it is. `held`: whether the caller keeps x anyway, as params and captured tensors."""

    def __init__(
        self,
        where: str,
        traced: fx.GraphModule,
        leaves: Sequence[str],
        outputs: tuple[Like, ...],
        asked: Sequence[bool],
        owners: Sequence[str],
        known: dict[int, str],
        held: bool = False,
    ) -> None:
        self.where, self.root, self.graph, self.outputs, self.owners = where, traced, traced.graph, outputs, owners
        self.params, self.held = len(owners), held
        self.captured = self._find_captured()
        self._drop_aliases()
        for node in self.graph.nodes:
            if writes(node):
                fail(where, "fn", "a function that torch can trace without writes", str(node.target))
        self.twins: dict[fx.Node, tuple[fx.Node, int, Any]] = {}  # of a node taken apart, the second: the first, and their mask
        self._take_masked_apart()
        self._merge_views()
        nodes = list(self.graph.nodes)
        self.order: list[fx.Node] = []
        for node in nodes:
            if node.op not in ("placeholder", "output") and node.target is not operator.getitem:
                self.order += _and_elements(node)
        inputs = [n for n in nodes if n.op == "placeholder"]
        self.dys = inputs[len(leaves) :]
        self.names = dict(zip(inputs, [*leaves, *[f"dy.{i}" for i in range(len(self.dys))]], strict=True))
        self.ys, grads = nodes[-1].args[0]
        self.grads = dict(zip([i for i, ask in enumerate(asked) if ask], grads, strict=True))
        self.leaves, self.inputs = inputs[: len(leaves)], {*inputs, *self.captured}
        for i, (node, t) in enumerate(self.captured.items()):
            name = f"captured.{known.get(id(t), i)}"  # two functions may call their variables the same
            self.names[node] = join_path(name, i if name in self.names.values() else None)
        self._name_nodes()
        self.first = self._with_elements(self._ancestors([*self.ys, *self._checks()]))

    def graphs(self, asked: Sequence[bool], rules: Rules | None = None) -> Graphs:
        """The graphs with the gradients of these leaves, which may be fewer than were traced, under these rules."""
        actions = {} if rules is None else {n: a for n in self.named() if (a := rules.action(self.names[n])) is not None}
        first, (second, third, names, dx, dparams) = self.first, self.cut(asked, actions)
        waiting, handed = self._crossing(dparams, third), self._crossing(dx, second)
        forward = self._part(first, self.leaves, [*self.ys, *[n for n in names if n not in self.inputs]])
        middle = [n for n in waiting if n in second]
        dgrad = self._part(second, [*names, *self.dys], [*dx, *middle])
        wgrad = self._part(third, waiting, dparams)
        backward = self._part(second | third, [*names, *self.dys], [*dx, *dparams])
        placed = any("as_strided" in str(n.target) and _memory(n.args[0]) in self.inputs for n in self.order)
        captured = {self.names[node]: t for node, t in self.captured.items()}
        drawing = [n for n in self.order if draws(n)]
        drawn = next((str(n.target) for n in drawing if n in first), "")
        anew = {n.target for n in drawing if n in second | third} & {n.target for n in drawing if n in first}
        if anew:
            wanted = "a function whose backward draws nothing again (leave out torch.utils.checkpoint around what draws)"
            fail(self.where, "fn", wanted, ", ".join(map(str, anew)))
        passes = tuple([g is not None and base_of(g) not in third for g in dparams])
        return Graphs(
            forward,
            dgrad,
            wgrad,
            backward,
            self.outputs,
            self._named(names),
            self._named(waiting),
            {self.names[n]: i for i, n in enumerate(self.leaves)},
            {self.names[n]: i for i, n in enumerate(self.dys)},
            placed,
            captured,
            drawn,
            passes,
            frozenset(map(self.name_of, set(names) - set(handed))),
            {self.names[n]: a for n, a in actions.items() if n in names and isinstance(a, Compress | Offload | Drop)},
        )

    def cut(self, asked: Sequence[bool], actions: dict[fx.Node, Action], fixed: frozenset[fx.Node] = frozenset()) -> Cut:
        """The halves, which compute again what they read of the forward and nobody keeps, but for those that are `fixed`."""
        owned = {i: g for i, g in self.grads.items() if asked[i] and i < self.params}
        dx, dparams = [g for i, g in self.grads.items() if asked[i] and i >= self.params], list(owned.values())
        second, third = self._halves(self._ancestors([*dx, *dparams]) - self.first, dx, owned)
        kept = self._kept(self.first, [n for n in self.order if n in second | third], [*dx, *dparams], actions, fixed)
        second |= self._again(self.first, kept, second, dx)
        # a product is computed again once, in the first half that reads it
        third |= self._again(self.first, kept | {n for n in second if not cheap(n)}, third, dparams)
        read = {*self._crossing(dx, second), *self._crossing(dparams, third)}
        found = kept | self.captured.keys()
        names = [n for n in self.leaves if n in read] + [n for n in self.order if n in read and n in found]
        return Cut(second, third, names, dx, dparams)

    def named(self) -> list[fx.Node]:
        """The tensors of the forward that have a name of their own; not params, nor x if the caller holds it."""
        own = [] if self.held else self.leaves[self.params :]
        made = [n for n in self.order if n in self.first and n in self.names and not is_view(n)]
        return [n for n in (*own, *made) if nbytes(n) is not None]

    def _checks(self) -> list[fx.Node]:
        """The nodes that raise for values of the forward, and compute nothing."""
        later = set(self.dys)
        for node in self.order:
            if not later.isdisjoint(node.all_input_nodes):
                later.add(node)
        return [n for n in self.order if n not in later and (schema := of_schema(n)) is not None and not schema.returns]

    def _find_captured(self) -> dict[fx.Node, Tensor]:
        """The nodes of tensors that the function reads beside its arguments, one for each, and the tensors."""
        first: dict[int, fx.Node] = {}
        found: dict[fx.Node, Tensor] = {}
        for node in [node for node in self.graph.nodes if node.op == "get_attr"]:
            t = getattr(self.root, node.target)
            if not isinstance(t, Tensor) or all(user.target in OWN for user in node.users):
                continue
            if first.setdefault(id(t), node) is node:
                found[node] = t
            else:
                node.replace_all_uses_with(first[id(t)])
                self.graph.erase_node(node)
        return found

    def _drop_aliases(self) -> None:
        for node in list(self.graph.nodes):
            if node.target in SAME:
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)

    def _take_masked_apart(self) -> None:
        """Make two nodes of one that computes dx, dW and db, as its `output_mask` says which: the first stays for dx."""
        for node in list(self.graph.nodes):
            if operator_name(node) == "native_batch_norm_backward" and node.args[7]:
                node.args = (*node.args[:3], None, None, *node.args[5:])  # in training it does not read the running statistics
            schema = of_schema(node)
            names = [] if schema is None else [argument.name for argument in schema.arguments]
            at = names.index("output_mask") if "output_mask" in names else len(node.args)
            mask: Any = node.args[at] if at < len(node.args) else ()
            later = [user for user in node.users if user.target is operator.getitem and user.args[1] > 0]
            if not later or len(mask) < 2 or not mask[0] or _writes_dx(node):
                continue
            with self.graph.inserting_after(node):
                twin = self.graph.node_copy(node)
            twin.meta = dict(node.meta)
            self.twins[twin] = node, at, mask
            twin.args = (*twin.args[:at], [False, *mask[1:]], *twin.args[at + 1 :])
            node.args = (*node.args[:at], [True] + [False] * (len(mask) - 1), *node.args[at + 1 :])
            for user in later:
                user.args = (twin, user.args[1])

    def _merge_views(self) -> None:
        """One node for the same view, or the same fill, of the same tensor; none for the transpose of a transpose."""
        first: dict[Any, fx.Node] = {}
        for node in list(self.graph.nodes):
            before: Any = node.args[0] if node.args else None
            if node.target is _T and isinstance(before, fx.Node) and before.target is _T:
                node.replace_all_uses_with(before.args[0])  # type: ignore[arg-type]
                self.graph.erase_node(node)
            elif is_view(node) or (
                operator_name(node) in _FILLS and not node.all_input_nodes and not operator_name(node).startswith("empty")
            ):
                same = first.setdefault(repr((node.target, node.args, node.kwargs)), node)
                if same is not node:
                    node.replace_all_uses_with(same)
                    self.graph.erase_node(node)
        self.graph.eliminate_dead_code()

    def _name_nodes(self) -> None:
        """Name the nodes by the modules in which they were computed, if that is known."""
        taken = set(self.names.values())
        for node in self.order:
            path = node.meta.get("custom", {}).get("input") or by_module(node)
            if path is not None and node not in self.names and [operator_name(user) for user in node.users] != [_RESHAPED]:
                self.names[node] = unique(path, taken)

    def _ancestors(self, ends: Iterable[Any]) -> set[fx.Node]:
        """The nodes from which the ends are computed, without inputs."""
        found: set[fx.Node] = set()
        stack = [n for n in ends if n is not None]
        while stack:
            node = stack.pop()
            if node in found or node in self.inputs:
                continue
            found.add(node)
            stack += node.all_input_nodes
        return found

    def _with_elements(self, part: set[fx.Node]) -> set[fx.Node]:
        """The part with every element of its tuples, so that tensors cross."""
        for node in self.order:
            if node.target is operator.getitem and node.args[0] in part:
                part.add(node)
        return part

    def _halves(self, backward: set[fx.Node], dx: list[Any], dparams: dict[int, Any]) -> tuple[set[fx.Node], set[fx.Node]]:
        """I and W."""
        reach: dict[fx.Node, set[Any]] = {}
        for owner, gradient in [*((X, g) for g in dx), *((self.owners[i], g) for i, g in dparams.items())]:
            if gradient is not None:
                reach.setdefault(gradient, set()).add(owner)
        for node in reversed(self.order):
            if node in backward:
                for user in node.users:
                    if user in backward:
                        reach.setdefault(node, set()).update(list(reach.get(user, ()))[:3])  # three are as good as all
        inner = {n for n in backward if X in reach.get(n, ()) or len(reach.get(n, ())) > 1}
        # a gradient that only some of an element's tuple needs stays with the tuple
        return self._with_elements(inner), backward - inner

    def _kept(
        self,
        first: set[fx.Node],
        backward: list[fx.Node],
        ends: list[Any],
        actions: dict[fx.Node, Action],
        fixed: frozenset[fx.Node],
    ) -> set[fx.Node]:
        """The values of the forward that are residuals: a min cut over bytes."""
        free = {maker(node) for node, action in actions.items() if isinstance(action, Recompute) and not draws(maker(node))}
        saved = {node for node, action in actions.items() if not isinstance(action, Recompute)}
        read = {n for node in backward for n in _reads(node)} | {n for n in ends if n is not None}
        counted = {*first, *([] if self.held else self.leaves[self.params :])}
        wanted = [n for n in read if n in counted]
        graph = networkx.DiGraph()
        reached, todo = set(), list(wanted)
        while todo:  # only what a backward could need
            node = todo.pop()
            if node in reached or node not in counted:
                continue
            reached.add(node)
            size = nbytes(node)
            if size is not None and not (node in first and is_view(node)):
                # of two equal ones, what a backward reads itself; and fewer tensors rather than more
                cost = 1000 * size + 500 - size * (node in read)
                graph.add_edge((node, 0), (node, 1), capacity=0 if node in saved else cost)
            else:
                graph.add_edge((node, 0), (node, 1))  # without a bound: a view is kept as its base, a tuple by its elements
            # a copy of a captured tensor is one of a buffer that the forward writes to: its caller may put the new value there
            copies = operator_name(node) == "clone" and node.args[0] in self.captured
            if node in self.inputs or node in fixed or copies or not (cheap(node) or maker(node) in free):
                graph.add_edge("forward", (node, 0))
            if node in self.inputs:
                continue
            for source in _reads(node):
                if source in counted:
                    todo.append(source)
                    graph.add_edge((source, 1), (node, 0))
        for node in wanted:
            graph.add_edge((node, 1), "backward")
        if "forward" not in graph or "backward" not in graph:
            return set()
        _, (before, _) = networkx.minimum_cut(graph, "forward", "backward")
        return {node for node in reached if node in saved or ((node, 0) in before and (node, 1) not in before)}

    def _again(self, first: set[fx.Node], kept: set[fx.Node], part: set[fx.Node], ends: list[Any]) -> set[fx.Node]:
        """The nodes of the forward that a half computes again."""
        found: set[fx.Node] = set()
        todo = [n for node in part for n in _reads(node)] + [n for n in ends if n is not None]
        while todo:
            node = todo.pop()
            if node in first and node not in kept and node not in found:
                found.add(node)
                todo += _reads(node)
        return found

    def _crossing(self, ends: Iterable[Any], part: set[fx.Node]) -> list[fx.Node]:
        """The nodes that a part reads or returns without computing them; the function's own constants are copied instead."""
        read = {n: None for node in self.order if node in part for n in _reads(node)}
        read.update({n: None for n in ends if n is not None})
        return [n for n in read if n not in part and (n.op != "get_attr" or n in self.captured)]

    def name_of(self, node: fx.Node) -> str:
        return self.names.get(node, node.name)

    def _named(self, nodes: Iterable[fx.Node]) -> dict[str, Like]:
        return {self.name_of(n): Like.of(self.captured[n] if n in self.captured else n.meta["val"]) for n in nodes}

    def _part(self, part: set[fx.Node], inputs: Sequence[fx.Node], results: Sequence[Any]) -> fx.GraphModule:
        graph, copies, again = fx.Graph(), dict[fx.Node, fx.Node](), inputs is not self.leaves
        for i, node in enumerate(inputs):
            copies[node] = graph.placeholder(f"i{i}")
            copies[node].meta = dict(node.meta)
        joined = {twin: found for twin, found in self.twins.items() if twin in part and found[0] in part}
        masks = {node: (at, mask) for node, at, mask in joined.values()}
        for node in self.in_order(part, inputs, results):
            if node in joined:
                copies[node] = copies[joined[node][0]]
            else:
                copies[node] = self._copied(node, graph, copies, again, masks.get(node))
        graph.output(tuple(None if n is None else copies[n] for n in results))
        graph.eliminate_dead_code()
        return fx.GraphModule(self.root, graph)

    def in_order(self, part: set[fx.Node], inputs: Sequence[fx.Node], results: Sequence[Any]) -> list[fx.Node]:
        """The nodes of a part as they run: what a backward computes again of the forward right before its first reader, so that it
        lives shortly."""
        again, done = inputs is not self.leaves, dict.fromkeys(inputs, True)
        todo = [n for n in results if n is not None][::-1]
        todo += [n for n in reversed(self.order) if n in part and not (again and n in self.first)]
        while todo:
            node = todo[-1]
            # of a node that was taken apart, the first half comes first
            reads = [*(_reads(node) if again else node.all_input_nodes), *([self.twins[node][0]] if node in self.twins else ())]
            missing = [] if node in done else [n for n in reads if n not in done and (n in part or n.op == "get_attr")]
            if missing:
                todo += missing[::-1]
            else:
                done[todo.pop()] = True
        return list(done)[len(inputs) :]

    def _copied(self, node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node], again: bool, mask: Any) -> fx.Node:
        args = node.args
        node.args = args_again(node) if again else args
        if mask is not None:
            node.args = (*args[: mask[0]], mask[1], *args[mask[0] + 1 :])
        made = graph.node_copy(node, copies.__getitem__)
        node.args = args
        if isinstance(call := node.meta.get(CALL), types.MethodDescriptorType):
            made.op, made.target = "call_method", call.__name__
        elif call is not None:
            made.target = call
        return made


def nbytes(node: fx.Node) -> int | None:
    """Bytes of the node's tensor; None if it is not one."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else None
