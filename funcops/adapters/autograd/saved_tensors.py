"""Moving the tensors of residuals to autograd and back, by functions generated once per op, config and needs.

The emptied residual nodes stay with autograd's node: autograd keeps the tensors, detects writes to them, and frees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from funcops.adapters.flatten import Shape, TensorIndex, flatten
from funcops.engine.backend.source import compile_source
from funcops.engine.contract.schema import Saved
from funcops.engine.residuals.nested import Nested
from funcops.library.formats import IN_CODES


class Slots(NamedTuple):
    """`take(residuals)` empties them and returns their tensors; `fill(residuals, tensors)` puts them back; `empty(residuals)` only
    empties them."""

    take: Callable[[Any], tuple[Any, ...]]
    fill: Callable[[Any, Any], None]
    empty: Callable[[Any], None]


class _Lines:
    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.empties: list[str] = []
        self.closed: list[str] = []
        self.classes: dict[str, type] = {}


def slots_of(residuals: Any) -> Slots | None:
    """The slots of residuals, or None if they hold anything but tensors and small trees of tensors, as under a policy."""
    lines = _Lines()
    if not _visit("r", residuals, lines):
        return None
    source = (
        "def take(r):\n    {nodes}\n    found = ({reads})\n    {empties}\n    {closed}\n    return found\n"
        "def fill(r, t):\n    {nodes}\n    {writes}\n    {closed}\n"
        "def empty(r):\n    {nodes}\n    {empties}\n    {closed}\n"
    ).format(
        nodes="; ".join(lines.nodes) or "pass",
        closed="; ".join(lines.closed) or "pass",
        reads="".join(f"{read}, " for read in lines.reads),
        empties="; ".join(lines.empties) or "pass",
        writes="; ".join(lines.writes) or "pass",
    )
    scope = compile_source("saved tensors", source, dict(lines.classes))
    return Slots(scope["take"], scope["fill"], scope["empty"])


def _visit(at: str, node: Any, lines: _Lines) -> bool:
    if node is None:
        return True
    if isinstance(node, Nested):
        return all([_visit(f"{at}[{literal(name)}]", child, lines) for name, child in node.items()])
    if not isinstance(node, Saved):
        return False
    name = f"n{len(lines.nodes)}"
    kind = type(node)
    lines.classes |= {f"K{name}": kind, f"U{name}": kind.unwatched}
    lines.nodes.append(f"{name} = {at}; {name}.__class__ = U{name}")
    lines.closed.append(f"{name}.__class__ = K{name}")
    lines.empties.append(f"{name}._marks = None")  # autograd has its own guard against writes
    return all([_slot(f"{name}.{field}", getattr(node, field), lines) for field in node.fields])


def _slot(at: str, value: Any, lines: _Lines) -> bool:
    if value is None:
        return True
    lines.empties.append(f"{at} = None")
    if isinstance(value, Tensor):
        lines.writes.append(f"{at} = t[{len(lines.reads)}]")
        lines.reads.append(at)
        return True
    if type(value) is tuple and all(isinstance(part, Tensor) for part in value):
        first = len(lines.reads)
        lines.writes.append(f"{at} = ({''.join(f't[{first + i}], ' for i in range(len(value)))})")
        lines.reads += [f"{at}[{i}]" for i in range(len(value))]
        return True
    shape = flatten(value, [])
    if (
        type(shape) is not Shape
        or shape.hidden
        or not all(part is None or type(part) is TensorIndex for part in shape.leaves.values())
    ):
        return False
    cls = f"C{len(lines.classes)}"
    lines.classes[cls] = shape.cls
    parts = []
    for field, part in shape.leaves.items():
        parts.append(f"{field}=" + ("None" if part is None else f"t[{len(lines.reads)}]"))
        if part is not None:
            lines.reads.append(f"{at}.{field}")
    if shape.statics:
        return False
    lines.writes.append(f"{at} = {cls}({', '.join(parts)})")
    return True


def gradient_writer(params_shape: Any, x_shape: Any, of_x: bool = True) -> Callable[[Any, Any], tuple[Any, ...]]:
    """Generate `write(dparams, dx)`, the result of a backward: None for each other argument, then a gradient per leaf of
    (params, x). `of_x`: whether any of x needs one; if none does, dx may be None for its whole tree."""
    reads: list[str] = []
    _reads("p", params_shape, reads)
    count = len(reads)
    _reads("x", x_shape, reads)
    if not of_x:
        reads[count:] = ["None"] * (len(reads) - count)
    text = f"def write(p, x):\n    return (None, None, {''.join(f'{read}, ' for read in reads)})\n"
    return compile_source("gradients of saved tensors", text, {})["write"]  # type: ignore[no-any-return]


def _reads(at: str, shape: Any, reads: list[str]) -> None:
    if type(shape) is TensorIndex:
        reads.append(at)
    elif type(shape) is Shape and shape.cls in IN_CODES:  # counts as one leaf: its codes and scales get no gradient
        parts: list[str] = []
        for child in shape.leaves.values():
            _reads("None", child, parts)
        reads += ["None"] * len(parts)
    elif type(shape) is Shape:
        for name, child in shape.leaves.items():
            _reads(f"{at}.{name}", child, reads)
    elif isinstance(shape, dict):
        for name in sorted(shape):  # optree's order of the leaves of a dict
            _reads(f"{at}[{literal(name)}]", shape[name], reads)
    elif isinstance(shape, (tuple, list)):
        for i, child in enumerate(shape):
            _reads(f"{at}[{i}]", child, reads)


def literal(key: Any) -> str:
    """A key of a dict, as source.

    >>> from funcops.adapters.autograd.saved_tensors import literal
    >>> literal("up"), literal(3)
    ("'up'", '3')
    """
    for kind in (str, int):
        # `int.__repr__(True)` is '1'
        if isinstance(key, kind) and type(key) is not bool:
            return kind.__repr__(key)
    return repr(key)
