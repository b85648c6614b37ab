"""The static buffers of a graph's inputs, the policy of each leaf, and the checks before a replay."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.contract.marks import Versions
from funcops.distributed.async_collectives import InFlight
from funcops.errors import CaptureError, GradModeError, describe, fail
from funcops.trees import flatten, leaves, paths, structure, tree_map, with_leaves

POLICIES = ("copy", "pinned", "donated")


class StaticInput(NamedTuple):
    """An input of the captured function: where it is in the arguments, its policy, and the buffer that the graph reads."""

    path: str
    policy: str
    static: Any
    address: int
    strides: tuple[int, ...] = ()
    own: Any = None  # the caller's tensor, where the graph reads its memory

    def check(self, where: str, given: Any) -> None:
        """Raises unless `given` may stand here."""
        name, want = f"input {self.path}", self.static
        if not isinstance(want, Tensor):
            if given is not want and (type(given) is not type(want) or given != want):
                fail(where, name, f"{want!r}, as when it was captured", describe(given))
            return
        if not isinstance(given, Tensor):
            fail(where, name, describe(want), describe(given), TypeError)
        if given.dtype is not want.dtype:
            fail(where, name, describe(want), describe(given), TypeError)
        if given.shape != want.shape:
            fail(where, name, describe(want), describe(given))
        if given.device != want.device:
            fail(where, name, f"on device {want.device}", given.device)
        if given.stride() != self.strides:
            fail(where, name, f"of strides {self.strides}", given.stride())
        if self.policy != "copy" and given.data_ptr() != self.address:
            fail(where, name, f"the very memory that was captured ({self.policy})", "a tensor elsewhere")


class Inputs:
    """The arguments of a captured function. `trees` are what it is called with: for `copy` a buffer of its own, else the caller's
    tensor."""

    def __init__(self, where: str, examples: tuple[Any, ...], policies: str | Mapping[str, str]) -> None:
        refuse_in_flight(where, "input", examples)
        self.where, self.structure = where, structure(examples)
        self._check_grad_mode(leaves(examples))
        chosen = policies_of(where, examples, policies)
        self.leaves = [_leaf(path, chosen[path], value) for path, value in paths(examples).items()]
        self.trees: tuple[Any, ...] = with_leaves(examples, [leaf.static for leaf in self.leaves])
        self._copied = [i for i, leaf in enumerate(self.leaves) if leaf.policy == "copy" and isinstance(leaf.static, Tensor)]
        self._versions = Versions.of([leaf.static for leaf in self.leaves])

    def take(self, given: tuple[Any, ...]) -> list[Any]:
        """Check every leaf, then copy those that are copied. Returns the leaves as given. Raises `ValueError` or `TypeError`."""
        values, found = flatten(given)
        if found != self.structure:
            fail(self.where, "inputs", f"of the captured structure {self.structure}", found)
        self._check_grad_mode(values)
        for leaf, value in zip(self.leaves, values, strict=True):
            if value is None or value is not leaf.own or value.data_ptr() != leaf.address:
                leaf.check(self.where, value)
        for i in self._copied:
            leaf, value = self.leaves[i], values[i]
            if value.data_ptr() != leaf.address:
                with torch.no_grad():
                    leaf.static.copy_(value)
        return values

    def _check_grad_mode(self, values: list[Any]) -> None:
        """A graph gives no gradient to autograd: who would expect one is told."""
        if torch.is_grad_enabled() and any([isinstance(value, Tensor) and value.requires_grad for value in values]):
            raise GradModeError(
                f"{self.where}: inputs must not require grad, got some that do, in grad mode. Pass detached tensors, call under "
                "torch.no_grad(), or let autograd drive the graphs through make_graphed_callables"
            )

    @property
    def donated(self) -> list[Tensor]:
        return [leaf.static for leaf in self.leaves if leaf.policy == "donated" and isinstance(leaf.static, Tensor)]

    def check_unwritten(self) -> None:
        """Raises `CaptureError` where the function wrote to an input that was not donated."""
        written = set(map(id, self._versions.written()))
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
    """Communication begins and ends in one graph: what is sent in one and waited for elsewhere, a replay knows nothing of."""
    for path, node in paths(tree, is_leaf=lambda node: type(node) is InFlight).items():
        if type(node) is InFlight:
            fail(where, f"{what} {path}", "finished", f"an InFlight ({node.what})", TypeError)


def _leaf(path: str, policy: str, value: Any) -> StaticInput:
    if not isinstance(value, Tensor):
        return StaticInput(path, policy, value, 0)
    static = value.detach()
    if policy == "copy":
        static = static.clone()  # of the same strides, unless elements overlap
    return StaticInput(path, policy, static, static.data_ptr(), value.stride(), None if policy == "copy" else value)


def policies_of(where: str, examples: Any, policies: str | Mapping[str, str]) -> dict[str, str]:
    """The policy of each leaf: one for all, or by glob over dotted paths,
    of which the last that matches decides ("copy" where none)."""
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


class Snapshot:
    """Copies of tensors that warm-up and capture will write to, and their way back."""

    def __init__(self, of: list[Tensor]) -> None:
        self.pairs = [(t, t.clone()) for t in of]

    @torch.no_grad()
    def restore(self) -> None:
        for t, copy in self.pairs:
            t.copy_(copy)


class Written:
    """Those of some tensors that a capture writes to. A replay writes to them behind torch's back, so it counts that."""

    def __init__(self, among: Iterable[Tensor]) -> None:
        self._before = Versions.of(list(among))
        self.tensors: list[Tensor] = []

    def note(self) -> None:
        """The capture is over."""
        self.tensors = self._before.written()
        self._before = Versions.of(())

    def count(self) -> None:
        """There was a replay."""
        if self.tensors:
            torch.autograd.graph.increment_version(self.tensors)


def clones(tree: Any) -> Any:
    return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, tree)
