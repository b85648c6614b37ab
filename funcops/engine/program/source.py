"""The printer: rows as the text of a function, straight-line Python with a few lines a call, no loop, no lookup.

The kinds of locals are in `rows.LETTERS`. Beside them are the trees of a scope, with its number: P params, K residuals, W pending,
I accumulators, and t whether K or W was given away.

What the ops' own functions check at every call is tested here by source that only says yes or no. If it says no, and while a
compiler traces, the ops' own functions run, and raise the error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from funcops.engine.backend import notes, scopes
from funcops.engine.backend.once import call
from funcops.engine.contract import functions
from funcops.engine.contract.marks import versions
from funcops.engine.program import run
from funcops.engine.program.lower import Call, Scope
from funcops.engine.program.noted import noted
from funcops.engine.program.rows import Row, local
from funcops.engine.program.rules import Piece
from funcops.engine.program.run import joined
from funcops.engine.program.templates import ARGUMENTS, CONSTANTS, EXPRESSIONS, LINES, half_of, number
from funcops.engine.program.values import add
from funcops.engine.random import fold_in
from funcops.engine.trees import WithExtras


class Source:
    """Lines of one function, and the objects that they name. `named`: whether each step runs in a scope of its path, and tells
    what it computes (`scopes.NAMED`, `scopes.NOTED`); `shares`: whether steps share what they derive (`once`), also with the steps
    of a call around; `begins`: the first call, if it is the sum that ends the layer before."""

    def __init__(self, named: int = 0, shares: bool = False, begins: Call | None = None) -> None:
        self.names: dict[str, Any] = {"WithExtras": WithExtras, "Tensor": Tensor, "add": add, "fold_in": fold_in, "run": run}
        self.names |= {"new": object.__new__, "put": object.__setattr__, "new_node": dict.__new__, "fill": dict.update}
        self.names |= {"versions": versions, "any_autocast": functions.any_autocast}
        self.names |= {"scopes": scopes} if named else {}
        self.names |= {"notes": notes} if named == scopes.NOTED else {}
        self.names |= {"call": call} if shares else {}
        self.named, self.shares, self.begins = named, shares, begins
        self.paths = [""]
        self.path: str | None = ""  # the path that an error gets at this line; None if that depends on the block that ran

    def function(self, name: str, rows: Iterable[Row], traced: bool) -> tuple[str, dict[str, Any]]:
        """The function's text, and its globals."""
        # a traced program has no tests, so nothing in it reads `fast`
        lines = [*["        fast = not any_autocast()"] * (not traced), *self._block(rows, 2)]
        self.names["PATHS"] = tuple(self.paths)
        begin = ["    around = call.made", "    call.made = {} if around is None else around"] * self.shares
        end = ["    finally:", "        call.made = around"] * self.shares
        # one handler serves all steps: `at` says in which of them the error was
        text = [f"def {name}({ARGUMENTS[name]}):", "    at = 0", *begin, "    try:", *lines, "    except Exception as error:"]
        return "\n".join([*text, "        run.in_path(error, PATHS[at])", "        raise", *end, ""]), self.names

    def _block(self, rows: Iterable[Row], depth: int) -> list[str]:
        lines, indent = list[str](), "    " * depth
        for row in rows:
            lines += [f"{indent}at = {number}" for number in self._moved(row)]
            lines += [indent + line for line in self._lines(row)]
            if row.then:
                before, lines = self.path, [*lines, *self._block(row.then, depth + 1), f"{indent}else:"]
                after, self.path = self.path, before
                lines += self._block(row.otherwise, depth + 1)
                self.path = after if self.path == after else None
        return lines

    def _lines(self, row: Row) -> list[str]:
        """The lines of a row; in a named program, in the scope of the step that it runs."""
        kind = f"named {row.kind}" if self.named and f"named {row.kind}" in LINES else row.kind
        lines = LINES[kind].format_map(Fields(self, row)).split("\n")
        half = half_of(row) if self.named else None
        pauses = self.named == scopes.NOTED and row.kind.startswith("pausing")
        if half is None and not pauses:
            return lines
        of, path = row.of, row.path
        if isinstance(of, Piece):
            path = joined(of.calls)
        elif isinstance(of, Call):
            path = of.path
        elif isinstance(of, Scope) and of.ties:  # the gradients of tied params are summed
            path = "+".join(dict.fromkeys(source.rpartition(".")[0] for _, source in of.ties))
        before, after = noted(row, half, self.begins) if self.named == scopes.NOTED else ([], [])
        scope = f"with scopes.named_scope({path or ''!r}, {half or row.kind.split()[1]!r}):"
        # a call that pauses has a scope of its own, which ends at each pause
        blocks = (before, after) if pauses else ([*before, *lines, *after],)
        first, *last = [[scope, *(f"    {line}" for line in block)] if block else [] for block in blocks]
        return [*first, *(lines if pauses else []), *(line for block in last for line in block)]

    def _moved(self, row: Row) -> list[int]:
        """The number of the row's path, if errors got another one before it."""
        if row.path is None or row.path == self.path:
            return []
        self.path = row.path
        if row.path not in self.paths:
            self.paths.append(row.path)
        return [self.paths.index(row.path)]

    def const(self, name: str, value: Any) -> str:
        self.names[name] = value
        return name


class Fields(dict[str, Any]):
    """The values of the braces in a row's lines: its own fields, constants, which become globals, and expressions."""

    def __init__(self, source: Source, row: Row) -> None:
        super().__init__(r=row.reads, w=row.writes, d=row.data)
        self.source, self.row = source, row

    def __missing__(self, name: str) -> Any:
        row = self.row
        if name in CONSTANTS:
            letter, value = CONSTANTS[name]
            return self.source.const(f"{letter}{number(row.of)}", value(row))
        return EXPRESSIONS[name](self, row)

    def tree(self, leaf: str, node: str, at: Scope | Call) -> str:
        """The tree of the calls' locals of kind `leaf`, as an expression."""
        if isinstance(at, Call):
            return local(leaf, at.index)
        parts = "".join(f"{name!r}: {self.tree(leaf, node, part)}, " for name, part in at.parts.items()).removesuffix(", ")
        if node == "gradients":
            node = "tied gradients" if at.ties else "dict"
            return LINES[node].format_map(Fields(self.source, Row(node, at, data=(parts,))))
        if not at.needs:
            return "None"
        if node == "pending tree":
            sources = [(name, part) for name, part in at.parts.items() if isinstance(part, Call) and part.source]
            parts += "".join(f", {run.recipe_of(name)!r}: {local('recipe', part.index)}" for name, part in sources)
        return LINES[node].format_map(Fields(self.source, Row(node, at, data=(parts,))))
