"""Which private names of torch and Triton a package's sources use, read from their syntax trees.

A dotted name where the chain begins with a module (`torch._C._nn.gelu` is `torch._C`, `torch.Tensor._make_subclass` itself), the
name alone, with its dot, where it is an attribute of a value (`._version`). Of names in strings those count that `getattr` and the
like are given, and those in written source. Triton's modules are private but for `triton`, `language`, `knobs` and `testing`.
"""

import ast
import builtins
import re
from pathlib import Path

import torch

TRITON = {"runtime", "backends", "compiler", "tools", "errors", "_C"}  # all but language, knobs and testing
OF_PYTHON = {"_replace", "_asdict", "_fields", "_make", "_getframe", "_field_defaults", "_missing_", "_value_"}
PRIVATE = re.compile(r"_(?!_)[A-Za-z]\w*")
WRITTEN = re.compile(r"\b(torch(?:\.\w+)*\.)?(?<=\.)(_(?!_)[A-Za-z]\w*)")


def private_uses(root, *folders):
    """Files by name, over all of a folder, or of the named ones in it."""
    paths = [path for one in folders or (".",) for path in sorted((Path(root) / one).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    own = set().union(*[_defined(tree) for tree in trees.values()]) - _of_torch()
    uses = {}
    for path, tree in trees.items():
        for name in _Uses(tree, own).found:
            uses.setdefault(name, set()).add(path.relative_to(root).as_posix())
    return uses


def _of_torch():
    """Private attributes of torch's most used objects: a name of ours that equals one of these counts as torch's."""
    objects = (torch.empty(0), torch.nn.Module(), torch.empty(0).untyped_storage(), torch.ops.aten.add.Tensor, torch.fx.Graph())
    return {name for one in objects for name in (*dir(one), *getattr(one, "__dict__", ())) if PRIVATE.fullmatch(name)}


def _defined(tree):
    """The private names that a file gives to its own functions, classes, fields and attributes of self."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") in ("self", "cls")
        ):
            yield node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self.__dict__":
            yield from [one.value for one in (node.slice,) if isinstance(one, ast.Constant)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("setattr", "__setattr__"):
            yield from [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]


class _Uses(ast.NodeVisitor):
    def __init__(self, tree, own):
        self.own, self.found, self.modules = own, set(), {}
        nodes = list(ast.walk(tree))
        self.docstrings = {
            id(node.body[0].value)
            for node in nodes
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body and isinstance(node.body[0], ast.Expr)
        }
        for node in nodes:  # imports first: one within a function may follow its use in another
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self.modules[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
                    self._dotted(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self.modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    self._dotted(f"{node.module}.{alias.name}")
        for node in nodes:  # then other names of a module: `_aten = torch.ops.aten`
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Attribute):
                of = self._chain(node.value)
                if of is not None and of.startswith("torch.ops."):
                    self.modules[node.targets[0].id] = of
        self.visit(tree)

    def _chain(self, node):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        first = self.modules.get(node.id) if isinstance(node, ast.Name) else None
        return None if first is None else ".".join([first, *reversed(names)])

    def _dotted(self, name):
        name = name.removesuffix(".default")  # an operator's overload
        parts = name.split(".")
        if parts[0] == "triton" and len(parts) > 1 and parts[1] in TRITON:
            self.found.add(".".join(parts[:4]))
        if parts[0] != "torch":
            return
        if any(PRIVATE.fullmatch(part) for part in parts):
            self.found.add(name)

    def visit_Attribute(self, node):
        name = self._chain(node)
        if name is not None and name.partition(".")[0] in ("torch", "triton"):
            self._dotted(name)
            return
        if PRIVATE.fullmatch(node.attr) and name is None:
            self._bare(node.attr)
        self.visit(node.value)

    def visit_Constant(self, node):
        if not isinstance(node.value, str) or id(node) in self.docstrings:
            return
        if PRIVATE.fullmatch(node.value):
            self._bare(node.value)
        for module, name in WRITTEN.findall(node.value):
            if module:
                self._dotted(module + name)
            else:
                self._bare(name)

    def _bare(self, name):
        if name not in self.own and name not in OF_PYTHON and not hasattr(builtins, name):
            self.found.add("." + name)
