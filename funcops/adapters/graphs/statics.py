"""The static buffers of a graph's inputs, the policy of each leaf, and the checks before a replay."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from funcops.adapters.graphs.lease import Lease
from funcops.distributed.async_collectives import InFlight
from funcops.engine.contract.schema import Saved
from funcops.engine.errors import CaptureError, GradModeError, describe, differing, fail, few
from funcops.engine.trees import flatten, leaves, paths, structure, tensors, tree_map, with_leaves

POLICIES = ("copy", "pinned", "donated")
HOOKS = "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"


class StaticInput(NamedTuple):
    """An input of the captured function: its path in the arguments, its policy, and the buffer that the graph reads."""

    path: str
    policy: str
    static: Any
    strides: tuple[int, ...] = ()
    own: Any = None  # the caller's tensor, if the graph reads its memory


def other_structure(where: str, name: str, captured: Any, given: Any) -> NoReturn:
    """Raise for arguments of another structure, naming the paths that are missing or extra."""
    wanted, got = paths(captured), paths(given)
    if wanted.keys() != got.keys():
        fail(where, name, f"as captured, {few(wanted)}", differing(got, wanted))
    fail(where, name, f"of the captured structure {structure(captured)}", structure(given))


class Inputs:
    """The arguments of a captured function. `trees` are the arguments of its calls: its own buffer for `copy`, else the caller's
    tensor. `differentiable`: whether autograd drives the graph, so that a leaf must require grad as the example does, and no leaf
    may otherwise. `gradients`: whether they are gradients, of which None stands for zeros."""

    def __init__(
        self,
        where: str,
        examples: tuple[Any, ...],
        policies: str | Mapping[str, str],
        differentiable: bool = False,
        gradients: bool = False,
    ) -> None:
        refuse_in_flight(where, "input", examples)
        self.where, self.structure, self.differentiable, self.gradients = where, structure(examples), differentiable, gradients
        if not differentiable:
            self._refuse_grad(leaves(examples))
        self._nodes = self._check_fresh(examples)
        chosen = policies_of(where, examples, policies)
        self.leaves = [_leaf(path, chosen[path], value, differentiable) for path, value in paths(examples).items()]
        self.trees: tuple[Any, ...] = with_leaves(examples, [leaf.static for leaf in self.leaves])
        self.lease = Lease().hold([leaf.static for leaf in self.leaves])
        self._copied = [i for i, leaf in enumerate(self.leaves) if leaf.policy == "copy" and isinstance(leaf.static, Tensor)]

    def take(self, given: tuple[Any, ...]) -> list[Any]:
        """Check every leaf, then copy the leaves of policy `copy`. Returns the given leaves. Raises `ValueError` or `TypeError`."""
        values = self.check(given)
        self.copy(values)  # of no leaf that requires grad, in grad mode
        return values

    def check(self, given: tuple[Any, ...]) -> list[Any]:
        """The given leaves. Raises as `take`."""
        values, found = flatten(given)
        if found != self.structure:
            other_structure(self.where, "arguments" if self.differentiable else "inputs", self.trees, given)
        if not self.differentiable:
            self._refuse_grad(values)
        if self._nodes:
            self._check_fresh(given)
        for i, (leaf, value, address) in enumerate(zip(self.leaves, values, self.lease.addresses, strict=True)):
            # a pinned leaf mostly is the very tensor, and many leaves are None
            if value is not leaf.own or (leaf.static is not None if value is None else value.data_ptr() != address):
                self._check_leaf(i, leaf, value)
        return values

    def _check_leaf(self, i: int, leaf: StaticInput, given: Any) -> None:
        where, name, want = self.where, f"input {leaf.path}", leaf.static
        if given is None and self.gradients:
            return
        if not isinstance(want, Tensor):
            same = repr(given) == repr(want) if type(want) in (float, complex) else given is want or given == want  # NaN, -0.0
            if type(given) is not type(want) or not same:
                fail(where, name, f"{want!r}, the captured value", describe(given))
            return
        if not isinstance(given, Tensor):
            fail(where, name, describe(want), describe(given), TypeError)
        if given.dtype is not want.dtype:
            fail(where, name, describe(want), describe(given), TypeError)
        if given.shape != want.shape:
            fail(where, name, describe(want), describe(given))
        if given.device != want.device:
            fail(where, name, f"on device {want.device}", given.device)
        if given.stride() != leaf.strides:
            fail(where, name, f"of strides {leaf.strides}", given.stride())
        if leaf.policy != "copy" and not self.lease.at(i, given):
            fail(where, name, f"at its captured address ({leaf.policy})", "a tensor at another: write to it in place")
        if leaf.policy != "copy" and (given.is_conj(), given.is_neg()) != (want.is_conj(), want.is_neg()):
            fail(where, name, f"of the captured sign and conjugation ({leaf.policy})", "another view of its memory: resolve it")
        if self.differentiable and given.requires_grad != want.requires_grad and torch.is_grad_enabled():
            fail(where, name, f"a tensor with requires_grad={want.requires_grad}", given.requires_grad)

    def copy(self, values: list[Any]) -> None:
        """Copy the leaves of policy `copy` into the graph's buffers, out of grad mode."""
        for i in self._copied:
            if values[i] is None:
                self.leaves[i].static.zero_()
            elif not self.lease.at(i, values[i]):
                self.leaves[i].static.copy_(values[i])

    def _check_fresh(self, trees: Any) -> bool:
        """Raise if the residuals or pendings in `trees` were written to, as a copy does not know. Returns whether there are any."""
        nodes = [node for node in paths(trees, is_leaf=lambda node: isinstance(node, Saved)).values() if isinstance(node, Saved)]
        for node in nodes:
            if not node.fresh():  # type: ignore[attr-defined]
                node.complain(self.where)
        return bool(nodes)

    def _refuse_grad(self, values: list[Any]) -> None:
        """Raise if the caller could expect gradients, which a graph does not give to autograd."""
        if torch.is_grad_enabled() and any([isinstance(value, Tensor) and value.requires_grad for value in values]):
            raise GradModeError(
                f"{self.where}: inputs must not require grad, got some that do, in grad mode. Pass detached tensors, call under "
                "torch.no_grad(), or let autograd drive the graphs through make_graphed_callables"
            )

    @property
    def donated(self) -> list[Tensor]:
        return [leaf.static for leaf in self.leaves if leaf.policy == "donated" and isinstance(leaf.static, Tensor)]

    def check_unwritten(self) -> None:
        """Raise `CaptureError` if the function wrote to an input that was not donated."""
        written = set(map(id, self.lease.written()))
        for leaf in self.leaves:
            if id(leaf.static) in written and leaf.policy != "donated":
                raise CaptureError(
                    f"{self.where}: input {leaf.path} must not be written to unless it is donated, "
                    f"got an input of policy {leaf.policy!r}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of copied leaves."""
        return sum(leaf.static.nbytes for leaf in self.leaves if leaf.policy == "copy" and isinstance(leaf.static, Tensor))


def refuse_in_flight(where: str, what: str, tree: Any) -> None:
    """Raise for communication in flight: it must begin and end in one graph, because a replay cannot wait for another's
    messages."""
    for path, node in paths(tree, is_leaf=lambda node: type(node) is InFlight).items():
        if type(node) is InFlight:
            fail(where, f"{what} {path}", "finished", f"an InFlight ({node.what})", TypeError)


def _leaf(path: str, policy: str, value: Any, differentiable: bool) -> StaticInput:
    if not isinstance(value, Tensor):
        return StaticInput(path, policy, value)
    static = value.detach()
    with torch.inference_mode(False):  # tensors of inference mode do not count the function's writes
        if policy == "copy":
            static = static.clone()  # with the same strides, unless elements overlap
        elif static.is_inference():
            static = static.new_empty(0).set_(static.untyped_storage(), static.storage_offset(), static.shape, static.stride())
    if differentiable:
        static.requires_grad_(value.requires_grad)
    return StaticInput(path, policy, static, value.stride(), None if policy == "copy" else value)


def policies_of(where: str, examples: Any, policies: str | Mapping[str, str]) -> dict[str, str]:
    """The policy of each leaf: one for all, or by glob over dotted paths; the last glob that matches decides, "copy" without a
    match."""
    rules = {"*": policies} if isinstance(policies, str) else dict(policies)
    for pattern, policy in rules.items():
        if policy not in POLICIES:
            fail(where, f"inputs[{pattern!r}]", " or ".join(map(repr, POLICIES)), repr(policy))
    found = {path: "copy" for path in paths(examples)}
    for pattern, policy in rules.items():
        matched = [path for path in found if fnmatch.fnmatchcase(path, pattern) or path.startswith(f"{pattern}.")]
        if not matched and pattern != "*":
            fail(where, "inputs", f"patterns over {', '.join(found)}", repr(pattern))
        found.update(dict.fromkeys(matched, policy))
    return found


def refuse_copy(where: str) -> NoReturn:
    """Raise for a copy of captured work, which would share its memory and its place in an order without knowing of each other."""
    raise TypeError(
        f"{where}: must not be copied or pickled, because a graph is bound to its memory: copy the tensors, and capture again"
    )


class Part:
    """A module within a captured one, and its state at capture, compared in every call."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.training = path, module, module.training
        self.own = module._modules, module._parameters, module._buffers
        self.hooks = [getattr(module, name) for name in HOOKS if path]  # a call of the captured module runs its own
        self.held: list[Any] = [one for each in self.own for one in each.values()]
        self.tensors, self.ids = tensors(self.held), list(map(id, self.held))
        self.lease = Lease().hold(self.tensors)
        self.frozen = [t for t in self.tensors if not t.requires_grad]

    def check(self, where: str) -> None:
        """Raise if the module now has anything that a replay would not see."""
        same = [id(one) for each in self.own for one in each.values()] == self.ids
        if not same or not all([self.lease.at(i, t) for i, t in enumerate(self.tensors)]):
            said = "its captured submodules, parameters and buffers, where they were, got others: write to tensors in place"
        elif self.frozen and any([t.requires_grad for t in self.frozen]) and torch.is_grad_enabled():
            said = "no parameter trained that was frozen, got one"
        elif any(self.hooks):
            said = "no hooks, which a replay would not call, got some: register them on the captured module"
        else:
            return
        raise ValueError(f"{where}: module {self.path!r} must have {said}, or capture again")


@contextlib.contextmanager
def restored(written: list[Tensor]) -> Iterator[None]:
    """Give tensors that warm-up and capture will write to their values back."""
    before = [t.clone() for t in written]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, copy in zip(written, before, strict=True):
                t.copy_(copy)


def clones(tree: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, tree)
