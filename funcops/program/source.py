"""The functions of a program, written as straight-line Python: a few lines a call, no loop, no lookup.

A local is deleted right after its last reader (`released`). Names, with the number of their value, call or scope: v value, g its
gradient; n residuals of a call, h the same held for later, p pending, d gradient of x, q of params, a recomputed y; E and G the
values and gradients that a rule reads, out and j its results; P params, K residuals, W pending, I accumulators of a scope.

What the ops' own functions check at every call is tested here by source that only says yes or no. If it says no, and while a
compiler traces, the ops' own functions run, and raise the error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from funcops.contract import functions
from funcops.contract.marks import versions
from funcops.contract.schema import Saved
from funcops.program import run
from funcops.program.lower import Call, Lowered, Place, Scope, Value
from funcops.program.rules import Cover
from funcops.program.values import add
from funcops.random import fold_in
from funcops.trees import WithExtras


class Source:
    """Lines of one function, and the objects that they name."""

    def __init__(self, lowered: Lowered, cover: Cover, traced: bool) -> None:
        self.lowered, self.cover, self.traced = lowered, cover, traced
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"WithExtras": WithExtras, "Tensor": Tensor, "add": add, "fold_in": fold_in, "run": run}
        self.names |= {"versions": versions, "any_autocast": functions.any_autocast}
        self.paths = [""]
        self.depth = 2
        self.opened: set[int] = set()
        if not traced:
            self.put("fast = not any_autocast()")

    def put(self, *lines: str) -> None:
        self.lines += ["    " * self.depth + line for line in lines]

    def const(self, kind: str, index: int, value: Any) -> str:
        name = f"{kind}{index}"
        self.names[name] = value
        return name

    def at(self, path: str) -> None:
        """From here on errors get the path of this step."""
        if path not in self.paths:
            self.paths.append(path)
        self.put(f"at = {self.paths.index(path)}")

    def of(self, value: Value) -> str:
        """A value of the forward, as an expression."""
        if isinstance(value, tuple):
            return f"({''.join(self.of(one) + ', ' for one in value)})"
        return f"v{self.lowered.resolve(value)}"

    def part(self, tree: str, place: Place) -> str:
        """A part of the trees with that name, as an expression: `P1['up']`; the whole tree is `P`."""
        return tree if place.scope is None else f"{tree}{place.scope.index}[{place.name!r}]"

    def tree(self, leaf: str, node: Callable[[Scope, str], str], at: Scope | Call | None = None) -> str:
        """The tree of the calls' locals named `leaf`, as an expression; `node` makes the expression of a scope from its parts."""
        at = self.root if at is None else at
        if isinstance(at, Call):
            return f"{leaf}{at.index}"
        parts = ", ".join(f"{name!r}: {self.tree(leaf, node, part)}" for name, part in at.parts.items())
        return node(at, f"{{{parts}}}")

    @property
    def root(self) -> Scope | Call:
        """The outermost part that has trees."""
        return self.lowered.scopes[0] if self.lowered.scopes else next(call for call in self.lowered.calls if call.place)

    def is_ready(self, call: Call, node: str, also: str = "") -> bool:
        """Write a test, with the result `ok`: whether the residuals `node` pass all checks of the call's op. Returns False if
        no such test can be written."""
        cls = call.residuals
        if self.traced or not isinstance(cls, type) or not issubclass(cls, Saved):
            return False
        names = self.const("C", call.index, cls), self.const("c", call.index, call.cfg)
        marks = f"type(m) is tuple and m == ({cls.marks_source})" if cls.guarded else "type(m) is tuple and not m"
        marks = marks.replace("n.", f"{node}.")
        own = f"type({node}) is {names[0]} and {node}.cfg is {names[1]}{also}"
        self.put(f"try: ok = fast and {own} and ((m := {node}._marks) is None or {marks})", "except Exception: ok = False")
        return True

    def accumulators(self, scope: Scope, where: str) -> None:
        """Put the accumulators of a scope, by name, into a local: None for each if none are given."""
        i, names = scope.index, self.const("names", scope.index, dict.fromkeys(scope.cfg.names))
        self.put(f"I{i} = {self.part('I', scope.place)} or {names}")
        if scope.ties and scope.place.scope is not None:
            self.put(f"if I{i} is not {names}: I{i} = run.tied({where!r}, I{i}, {self.const('ties', i, scope.ties)})")

    def gradients(self, scope: Scope, parts: str) -> str:
        """The gradients of a scope's params, the tied ones added to their source's, as an expression."""
        return f"run.collected({parts}, {self.const('ties', scope.index, scope.ties)})" if scope.ties else parts

    def written(self, name: str, arguments: str, result: str) -> tuple[str, dict[str, Any]]:
        """The function's text, and its globals."""
        self.names["PATHS"] = tuple(self.paths)
        self.put(f"return {result}")
        body = "\n".join(released(self.lines))
        return (
            f"def {name}({arguments}):\n    at = 0\n    try:\n{body}\n    except Exception as error:\n"
            "        run.in_path(error, PATHS[at])\n        raise\n"
        ), self.names


_LOCAL = re.compile(r"(?<![\w.])(?:v|g|n|p|a|h|d|dy|part|out|j|E|G)\d+(?:_\d+)?\b")
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


def _locals(lines: Iterable[str]) -> set[str]:
    return {name for line in lines for name in _LOCAL.findall(_TEXT.sub("", line))}


def released(lines: list[str], held: Iterable[str] = ()) -> list[str]:
    """The lines of a block, in which each local is deleted after the last statement that names it, unless it is `held` around the
    block; in each branch of a statement by itself, if no other statement names it."""
    if not lines:
        return []
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    statements: list[list[str]] = []
    for line in lines:
        if line.startswith((indent + " ", indent + "else:", indent + "except ")):
            statements[-1].append(line)
        else:
            statements.append([line])
    named = [_locals(statement) for statement in statements]
    uses = {name: [i for i, own in enumerate(named) if name in own] for name in set().union(*named)}
    found: list[str] = []
    for i, (statement, own) in enumerate(zip(statements, named, strict=True)):
        here = _locals(line for line in statement if not line.startswith(indent + " "))
        shared = {name for name in own if name in held or name in here or len(uses[name]) > 1}
        branch: list[str] = []
        for line in [*statement, indent]:
            if line.startswith(indent + " "):
                branch.append(line)
                continue
            found += released(branch, shared)
            branch = []
            found += [line] * bool(line.strip())
        gone = sorted(name for name in shared.difference(held) if uses[name][-1] == i)
        if gone and not statement[0].lstrip().startswith("return "):
            found.append(f"{indent}del {', '.join(gone)}")
    return found


def flat(value: Value) -> list[int]:
    """The numbers of a value."""
    return [number for one in value for number in flat(one)] if isinstance(value, tuple) else [value]


def total(a: str, b: str) -> str:
    """The sum of two gradients, as an expression."""
    return f"{a} + {b} if type({a}) is type({b}) is Tensor else {a} if {b} is None else add({a}, {b})"
