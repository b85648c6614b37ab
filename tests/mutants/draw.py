"""Draws faults over the syntax tree of the package, by seed.

A line that holds something that can be changed is drawn, each as likely as any other, then a change of that line: an operator or a
comparison flipped, a condition inverted, a constant of another value, a statement dropped. Text that does not run is left alone:
docstrings, annotations, `if TYPE_CHECKING`, `__all__`, overloads, and the words of errors.

A fault keeps the numbers of all lines, so that what was measured of the file without it still holds.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
COMPARED = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
}
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


class Drawn(NamedTuple):
    file: str
    line: int  # of the statement
    last: int  # its last line; of a statement that holds others, its head's
    kind: str
    was: str
    becomes: str
    text: str  # the whole file with the fault in it

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.was} -> {self.becomes}"


def changed(node: ast.AST, parents: list[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Each kind of change of this node alone, with the node that takes its place."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in BINARY and not _of_text(node):
        new = copy.copy(node)
        new.op = BINARY[type(node.op)]()
        yield "operator", new
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            for other in COMPARED[type(op)]:
                yield "comparison", ast.Compare(node.left, [*node.ops[:i], other(), *node.ops[i + 1 :]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield "operator", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "operator", node.operand
    elif isinstance(node, ast.Constant):
        yield from _constants(node, parents[-1])
    if isinstance(node, ast.expr) and _is_condition(node, parents[-1]):
        yield "condition", ast.UnaryOp(ast.Not(), node)
    if isinstance(node, ast.stmt) and _droppable(node, parents):
        yield "dropped", ast.Pass()


def _of_text(node: ast.BinOp | ast.AugAssign) -> bool:
    """Whether it joins strings: their difference or quotient would not run."""
    sides = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    return any(isinstance(side, ast.JoinedStr) or isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)


def _constants(node: ast.Constant, parent: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield "constant", ast.Constant(value + 1)
        if value > 0:
            yield "constant", ast.Constant(value - 1)
    elif isinstance(value, float):
        yield "constant", ast.Constant(value * 2 if value else 1.0)
    elif isinstance(value, str) and isinstance(parent, ast.Compare | ast.Subscript):  # a name that decides, not words
        yield "constant", ast.Constant(value + "_")


def _is_condition(node: ast.expr, parent: ast.AST) -> bool:
    if isinstance(node, ast.Compare | ast.UnaryOp):
        return False  # flipped as it is
    if isinstance(parent, ast.If | ast.While | ast.IfExp | ast.Assert):
        return node is parent.test
    return isinstance(parent, ast.comprehension) and node in parent.ifs


def _droppable(node: ast.stmt, parents: list[ast.AST]) -> bool:
    """A statement without which the rest may still run: not the first binding of a name, nor a function's last return."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete | ast.Assert):
        return True
    if isinstance(node, ast.Return):
        return not isinstance(parents[-1], FUNCTIONS)
    if not isinstance(node, ast.Assign):
        return False
    names = {n.id for target in node.targets for n in _bound(target)}
    function = next((p for p in reversed(parents) if isinstance(p, FUNCTIONS)), None)
    if function is None:
        return False
    arguments = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    return names <= arguments | {n.id for n in _bound(function) if n.lineno < node.lineno}


def _bound(node: ast.AST) -> Iterator[ast.Name]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _left_alone(node: ast.AST, parent: ast.AST | None) -> bool:
    """Whether to leave a node and all within it alone, as it does not run."""
    if isinstance(node, ast.JoinedStr):  # words, whose places 3.11 does not tell
        return True
    if isinstance(node, ast.If) and {"TYPE_CHECKING", "__name__"} & {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}:
        return True
    if isinstance(node, FUNCTIONS) and any(getattr(d, "id", "") == "overload" for d in node.decorator_list):
        return True
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and isinstance(parent, ast.Module):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(getattr(t, "id", "") == "__all__" for t in targets) or _is_type(node.value)
    return isinstance(node, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal)


def _is_type(node: ast.expr | None) -> bool:
    """The right side of an alias of types: names, their subscripts and unions alone, or what makes a type's variable."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") in {"TypeVar", "ParamSpec", "NewType"}
    kinds = ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Constant, ast.BinOp, ast.BitOr, ast.expr_context
    return isinstance(node, ast.Subscript | ast.BinOp) and all(isinstance(n, kinds) for n in ast.walk(node))


def _fields(node: ast.AST) -> Iterator[ast.AST]:
    """The children that are program: no annotation, no words of an error."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns"} or isinstance(node, ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def sites(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """Every node that may be changed, with the nodes around it from the outermost."""
    stack: list[tuple[ast.AST, list[ast.AST]]] = [(tree, [])]
    while stack:
        node, parents = stack.pop()
        if parents and _left_alone(node, parents[-1]):
            continue
        if parents and hasattr(node, "lineno"):
            yield node, parents
        stack.extend((child, [*parents, node]) for child in _fields(node))


def planted(text: str, node: ast.AST, new: ast.AST) -> str:
    """The text with `new` where `node` stood, and every other line where it was."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()
    begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
    end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
    words, gap = ast.unparse(ast.fix_missing_locations(new)), "\n" * raw[begin:end].count(b"\n")
    words = f"({words}{gap})" if isinstance(new, ast.expr) else words + gap
    return (raw[:begin] + words.encode() + raw[end:]).decode()


def head(parents: list[ast.AST], node: ast.AST) -> tuple[int, int]:
    """The first and the last line of the statement around a node, or of its head where it holds other statements."""
    statement = next(n for n in [node, *reversed(parents)] if isinstance(n, ast.stmt))
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno
    return statement.lineno, max(statement.lineno, last or 0)


def draw(root: Path, count: int, seed: int, folder: str = "funcops") -> list[Drawn]:
    """`count` distinct faults of the package's files. Raises `ValueError` if there are fewer lines that can be changed."""
    where = []
    for path in sorted((root / folder).rglob("*.py")):
        text = path.read_text()
        by_line: dict[int, list[tuple[ast.AST, list[ast.AST], str, ast.AST]]] = {}
        for node, parents in sites(ast.parse(text)):
            for kind, new in changed(node, parents):
                by_line.setdefault(node.lineno, []).append((node, parents, kind, new))  # type: ignore[attr-defined]
        where += [(path, text, found) for _, found in sorted(by_line.items())]
    if len(where) < count:
        raise ValueError(f"draw: {folder} must have {count} lines that can be changed, got {len(where)}")
    random_ = random.Random(seed)
    drawn = []
    for path, text, found in random_.sample(where, count):
        node, parents, kind, new = random_.choice(sorted(found, key=lambda one: (one[2], ast.dump(one[0]), ast.dump(one[3]))))
        first, last = head(parents, node)
        was, becomes = ast.unparse(node), ast.unparse(ast.fix_missing_locations(new))
        drawn.append(Drawn(path.relative_to(root).as_posix(), first, last, kind, was, becomes, planted(text, node, new)))
    return drawn
