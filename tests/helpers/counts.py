"""Counts what makes a change touch many files: questions that generic code asks of a config's class, walks over configs, circles.

python tests/helpers/counts.py            prints each count with its limit and what it counts
python tests/helpers/counts.py NAME       lists what the count of that name found, with file and line
python tests/helpers/counts.py --root DIR [NAME]     of another checkout
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from prose import FRAGMENT

ROOT = Path(__file__).resolve().parents[2]
OF_A_CONFIG = {"cfg", "inner", "body", "block"}  # names of values that are configs; so are those that end with cfg
BASES = {"OpConfig", "Composite"}
DECLARATIONS = {"ByConfig"}  # the name ends with Config, but its values are not configs


class Found(NamedTuple):
    path: Path
    line: int
    text: str


@functools.cache
def trees(folder: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


@functools.cache
def nodes(folder: Path) -> list[tuple[Path, ast.AST, str]]:
    """Every node of every file, with the name of the class around it."""
    found = []
    for path, tree in trees(folder).items():
        todo = [(tree, "")]
        while todo:
            node, cls = todo.pop()
            found.append((path, node, cls))
            inside = node.name if isinstance(node, ast.ClassDef) else cls
            todo += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found


def _last(node: ast.AST) -> str:
    """The last name of a dotted expression; "" of any other expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_config(node: ast.AST) -> bool:
    """Whether an expression is named like a config: cfg, step.cfg, inner_cfg, self.base."""
    name = _last(node)
    return name in OF_A_CONFIG or name.endswith("cfg") or (isinstance(node, ast.Attribute) and name == "base")


def _is_class_of_configs(node: ast.AST) -> bool:
    names = [_last(one) for one in (node.elts if isinstance(node, ast.Tuple) else [node])]
    return any(name.endswith("Config") and name not in BASES | DECLARATIONS for name in names)


def _call_of(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and len(node.args) > 0


def probes(root: Path) -> Iterator[Found]:
    """`hasattr` of a config, or `getattr` with a default: a question to a config whose answer no class declares"""
    for path, node, cls in nodes(root / "funcops"):
        if _call_of(node, "hasattr") or (_call_of(node, "getattr") and len(node.args) == 3):
            asked = node.args[0]
            own = _last(asked) == "self" and (cls.endswith("Config") or cls in BASES)
            if own or is_config(asked) or _last(asked) == "config":
                yield Found(path, node.lineno, ast.unparse(node))


def class_questions(root: Path) -> Iterator[Found]:
    """`type(cfg) is C`, also `in` and `==`, and `isinstance(cfg, C)` of the class of one op's configs"""
    for path, node, _ in nodes(root / "funcops"):
        if isinstance(node, ast.Compare) and _call_of(node.left, "type"):
            if is_config(node.left.args[0]) or any(_is_class_of_configs(one) for one in node.comparators):
                yield Found(path, node.lineno, ast.unparse(node))
        elif _call_of(node, "isinstance") and is_config(node.args[0]) and _is_class_of_configs(node.args[1]):
            yield Found(path, node.lineno, ast.unparse(node))


def _functions(tree: ast.Module) -> Iterator[tuple[str, str, ast.AST]]:
    """Class, name and node of every function of a file; the class is "" except for methods."""
    methods = {own: node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for own in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield methods.get(node, ""), node.name, node


def _reaches_parts(node: ast.AST) -> bool:
    for one in ast.walk(node):
        called = isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in ("parts", "with_parts")
        read = isinstance(one, ast.Attribute) and one.attr in ("members", "first_parts")
        if called or read or (_call_of(one, "parts", "parts_of") and is_config(one.args[0])):
            return True
    return False


def _refers(node: ast.AST, cls: str) -> Iterator[tuple[str, str]]:
    """The functions and own methods that a function names."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield "", one.id
        elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
            yield cls, one.attr


def walks(root: Path) -> Iterator[Found]:
    """functions that go down a tree of configs by themselves: they read `parts` or `with_parts`, and loop over what is left to
    see, or call themselves, also by way of others in the file"""
    for path, tree in trees(root / "funcops").items():
        functions = {(cls, name): node for cls, name, node in _functions(tree)}
        reaching = {key for key, node in functions.items() if _reaches_parts(node)}
        if not reaching:
            continue
        circles = circles_of({key: set(_refers(node, key[0])) & functions.keys() for key, node in functions.items()})
        for circle in circles:
            if circle & reaching:
                lines = [functions[key].lineno for key in circle & reaching]
                yield Found(path, min(lines), ", ".join(sorted(name for _, name in circle)))
        for key in reaching - {key for circle in circles for key in circle}:
            if any(isinstance(one, ast.While) for one in ast.walk(functions[key])):
                yield Found(path, functions[key].lineno, key[1])


def circles_of(edges: dict) -> list[set]:
    """The sets of nodes that reach each other: circles of several nodes, and nodes with an edge to themselves."""
    reached = {}
    for start in edges:
        todo, seen = list(edges[start]), set()
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += edges.get(node, ())
        reached[start] = seen
    circles = {
        frozenset(other for other in reached[node] if node in reached.get(other, ())) for node in edges if node in reached[node]
    }
    return sorted((set(one) for one in circles), key=lambda one: sorted(map(str, one)))


def _joined(node: ast.AST) -> tuple[str, ...]:
    """The source of the two things that f"{a}.{b}", f"a.{b}" or a + "." + b joins; () for any other expression."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.left, ast.BinOp):
        dotted = isinstance(node.left.right, ast.Constant) and node.left.right.value == "."
        return (ast.unparse(node.left.left), ast.unparse(node.right)) if dotted else ()
    values = node.values if isinstance(node, ast.JoinedStr) else []
    if len(values) not in (2, 3) or not isinstance(values[-1], ast.FormattedValue):
        return ()
    dot, last = values[-2], ast.unparse(values[-1].value)
    if not isinstance(dot, ast.Constant) or not dot.value.endswith("."):
        return ()
    if len(values) == 2:
        return repr(dot.value[:-1]), last
    return (ast.unparse(values[0].value), last) if dot.value == "." and isinstance(values[0], ast.FormattedValue) else ()


def joins(root: Path) -> Iterator[Found]:
    """places that join a path and a name unless one of the two is missing, as `funcops.engine.errors.join_path` does"""
    for path, node, _ in nodes(root / "funcops"):
        if isinstance(node, ast.IfExp):
            for one, other in ((node.body, node.orelse), (node.orelse, node.body)):
                bare = ast.unparse(other.args[0] if _call_of(other, "str", "exact") else other)
                if bare in _joined(one):
                    yield Found(path, node.lineno, ast.unparse(node))


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def import_circles(root: Path) -> Iterator[Found]:
    """sets of files that import each other, also inside functions; a package's own `__init__` is left out"""
    files = {_module(path, root): path for path in trees(root / "funcops") if path.name != "__init__.py"}
    edges = {name: set() for name in files}
    for path, node, _ in nodes(root / "funcops"):
        if isinstance(node, ast.Import):
            imported = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        else:
            continue
        if path.name != "__init__.py":
            edges[_module(path, root)] |= imported & files.keys()
    for circle in circles_of(edges):
        yield Found(files[min(circle)], 1, " <-> ".join(sorted(circle)))


def root_files(root: Path) -> Iterator[Found]:
    """files of the package that are in no folder of it"""
    yield from (Found(path, 1, path.name) for path in sorted((root / "funcops").glob("*.py")))


def kept_from_the_formatter(root: Path) -> Iterator[Found]:
    """comments `fmt: skip` and `fmt: off`"""
    for folder in ("funcops", "tests", "benchmarks", "examples"):
        for path in sorted((root / folder).rglob("*.py")):
            for i, line in enumerate(path.read_text().splitlines(), 1):
                if line.rstrip().endswith(("# fmt: " + "skip", "# fmt: " + "off")):
                    yield Found(path, i, line.strip())


def twins(root: Path) -> Iterator[Found]:
    """ops with the config class of another op, whose name their own begins with: which of them runs, the config does not tell"""
    known: dict[str, list[tuple[str, Path, int]]] = {}
    for path, node, _ in nodes(root / "funcops"):
        if _call_of(node, "make_op") and len(node.args) == 2 and isinstance(node.args[0], ast.Constant):
            known.setdefault(_last(node.args[1]), []).append((str(node.args[0].value), path, node.lineno))
    for config, ops in known.items():
        for name, path, line in ops:
            for other, *_ in ops:
                if name != other and name.startswith(other):
                    yield Found(path, line, f"{name} ({config}, as {other})")


def fragment_docstrings(root: Path) -> Iterator[Found]:
    """docstrings of the package that begin with a fragment (see `prose.py`), in per cent of all"""
    for path, doc, line in _docstrings(root):
        if FRAGMENT.match(doc):
            yield Found(path, line, doc.splitlines()[0])


def _docstrings(root: Path) -> Iterator[tuple[Path, str, int]]:
    for path, node, _ in nodes(root / "funcops"):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (doc := ast.get_docstring(node)):
            yield path, doc, node.body[0].lineno


def test_files(root: Path) -> Iterator[Found]:
    """files of `tests` that are in no folder of it"""
    yield from (Found(path, 1, path.name) for path in sorted((root / "tests").glob("*")) if path.is_file())


def _length(root: Path, name: str) -> Iterator[Found]:
    for path, tree in trees(root / "funcops").items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                text = path.read_text().splitlines()[body[0].lineno - 1 : node.end_lineno]
                yield from (Found(path, body[0].lineno + i, line) for i, line in enumerate(text) if line.strip())


def rewrite_lines(root: Path) -> Iterator[Found]:
    """lines of the longest of `with_recipe`, `with_lora`, `zero3` and `with_cache`, without its docstring"""
    yield from max([list(_length(root, name)) for name in ("with_recipe", "with_lora", "zero3", "with_cache")], key=len)


def engine_statements(root: Path) -> Iterator[Found]:
    """statements, without docstrings, of the engine; comments cost nothing"""
    yield from _statements(root / "funcops" / "engine")


def _statements(folder: Path) -> Iterator[Found]:
    for path, node, _ in nodes(folder):
        if isinstance(node, ast.stmt):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
                yield Found(path, node.lineno, ast.unparse(node).partition("\n")[0])


def _median(folder: Path) -> list[Found]:
    """The statements of the median of a folder's files."""
    files: dict[Path, list[Found]] = {}
    for one in _statements(folder):
        files.setdefault(one.path, []).append(one)
    return sorted(files.values(), key=len)[len(files) // 2] if files else []


def op_statements(root: Path) -> Iterator[Found]:
    """statements of the median of the files of `library/ops`: what an operator costs"""
    yield from _median(root / "funcops" / "library" / "ops")


def kernel_statements(root: Path) -> Iterator[Found]:
    """statements of the median of the files of `library/kernels`: what a family of kernels costs, in torch or in Triton"""
    yield from _median(root / "funcops" / "library" / "kernels")


class Count(NamedTuple):
    """`most`: the limit that `tests/test_house.py` holds the count to."""

    find: Callable[[Path], Iterator[Found]]
    most: float

    def number(self, root: Path = ROOT) -> float:
        n = sum(1 for _ in self.find(root))
        if self.find is not fragment_docstrings:
            return n
        return 100 * n / max(1, sum(1 for _ in _docstrings(root)))


COUNTS = {
    "probes": Count(probes, 8),
    "class questions": Count(class_questions, 8),
    "walks": Count(walks, 2),
    "path joins": Count(joins, 1),
    "root files": Count(root_files, 10),
    "import circles": Count(import_circles, 0),
    "fmt: skip": Count(kept_from_the_formatter, 20),
    "twin ops": Count(twins, 0),
    "fragments, %": Count(fragment_docstrings, 1),
    "root test files": Count(test_files, 15),
    "rewrite lines": Count(rewrite_lines, 30),
    "engine statements": Count(engine_statements, 7_215),
    "op statements": Count(op_statements, 71),
    "kernel statements": Count(kernel_statements, 53),
}


def main(args: list[str]) -> None:
    root = ROOT
    if args[:1] == ["--root"]:
        root, args = Path(args[1]).resolve(), args[2:]
    for name in args:
        for one in COUNTS[name].find(root):
            print(f"{one.path.relative_to(root)}:{one.line}: {one.text}")
    for name, count in COUNTS.items() if not args else ():
        number, said = count.number(root), " ".join((count.find.__doc__ or "").split())
        print(f"{name:<18} {number:>10{',' if number == int(number) else '.2f'}} of {count.most:>6,}   {said}")


if __name__ == "__main__":
    main(sys.argv[1:])
