"""Residuals and pending of combinators: a dict of the parts' residuals or pendings by name."""

from __future__ import annotations

from typing import Any, ClassVar

from funcops.engine.backend.source import compile_source
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.schema import Donated
from funcops.engine.errors import DonatedError, fail
from funcops.engine.residuals.donate import donate
from funcops.engine.trees import Aside, WithExtras, register_node

__all__ = ["Nested", "nested"]


def part(node: Any, name: Any) -> Any:
    """A child of residuals or pending, donated if its parent was."""
    child = node[name]
    if not node.donated or child is None:
        return child
    # the parent lets go, so that nobody but the cell holds the child
    node[name] = None
    return donate(child)


def needs_of(kept: Any) -> Needs:
    """The needs under which residuals were kept, donated or not."""
    return getattr(kept._node if type(kept) is Donated else kept, "needs", Needs.NONE)


class Nested(dict):  # type: ignore[type-arg]
    """Residuals or pending of a combinator: its parts' by name, None for a part that keeps nothing."""

    __slots__ = ("_noted", "cfg", "donated", "gone", "had", "needs")
    kind: ClassVar[str] = "residuals"
    had: tuple[str, ...]  # in a derived node, the parts that must not be None

    def __init__(self, parts: Any = (), *, cfg: Any = None, needs: Needs = Needs.ALL) -> None:
        if parts:
            # not `self.update`, which asks for `gone`: that is not set yet
            dict.update(self, parts)
        self.cfg, self.needs = cfg, needs
        self.donated = self.gone = False
        self.had = ()

    def fresh(self) -> bool:
        return not self.gone and (not self.had or self.missing() is None)

    def missing(self) -> Any:
        """The name of a part that this derived node has lost, or None."""
        return next((name for name in self.had if self.get(name) is None), None)

    def complain(self, where: str) -> None:
        if not self.gone:
            fail(where, f"{self.kind}.{self.missing()}", "as the forward kept it", None, TypeError)
        raise DonatedError(f"{where}: {self.kind} must be unused, got {type(self).__name__} given away with donate()")

    def give(self) -> Nested:
        node = dict.__new__(type(self))
        dict.update(node, dict.items(self))  # not `update(self)`, which asks the methods below
        # `had` is empty, as a tree that was given away loses its parts one by one
        node.cfg, node.needs, node.donated, node.gone, node.had = self.cfg, self.needs, True, False, ()
        self.empty()
        return node

    def cell(self) -> Donated | None:
        """`Donated(self.give())` of a fresh node; None of any other."""
        return None if self.gone or self.had else Donated(self.give())

    def empty(self) -> None:
        dict.clear(self)
        self.gone, self.had = True, ()

    def parts(self) -> tuple[str, ...]:
        return self.had or tuple([name for name, part in dict.items(self) if part is not None])

    def moved(self, had: Any) -> Any:
        """This node, derived from one with the parts `had`, which it must not lose."""
        if had is not None:
            self.had = had
        return self

    def __copy__(self) -> Any:
        made: Any = type(self)(self, cfg=self.cfg, needs=self.needs)
        made.donated = self.donated
        return made.moved(self.parts())

    copy = __copy__

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._open()
        return super().__reduce_ex__(protocol)

    def _open(self) -> Any:
        """Return this node. Raises `DonatedError` if it was given away."""
        if self.gone:
            raise DonatedError(f"{type(self).__name__} was given away with donate(): it must not be used again")
        return self

    def nothing(self) -> Any:
        """dx if no gradient is requested."""
        extras = self.cfg.extras
        return WithExtras(None, dict.fromkeys(extras)) if extras else None

    def __missing__(self, name: Any) -> Any:
        self._open()
        raise KeyError(name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({super().__repr__()})"


# Every other method of a dict first checks that the node was not given away. `node[name]`, which launches call, does not: a node
# that was given away is empty, and then `__missing__` checks. The methods are generated source with `super`, because a tracer
# cannot follow a method that is called through its class.
_METHOD = """
def {name}(self, *args, **options):
    if self.gone:
        self._open()
    return super(Nested, self).{name}(*args, **options)
"""
_NAMES = (
    "get keys values items pop popitem update setdefault clear __iter__ __reversed__ __len__ __contains__ __eq__ __ne__ "
    "__or__ __ror__ __ior__ __delitem__"
).split()
_scope = compile_source("methods of Nested", "".join([_METHOD.format(name=name) for name in _NAMES]), {"Nested": Nested})
for _name in _NAMES:
    setattr(Nested, _name, _scope[_name])


def nested(name: str, parts: str, module: str) -> tuple[Any, Any]:
    """Make the residuals and pending classes of the combinator `name` in `module`; `parts` describes its parts in their
    docstrings."""
    kept = _nested(f"{name}Residuals", "residuals", f"Residuals of {parts}.", module)
    return kept, _nested(f"{name}Pending", "pending", f"Pending weight gradients of {parts}.", module)


def _nested(name: str, kind: str, doc: str, module: str) -> Any:
    cls: Any = type(name, (Nested,), {"__slots__": (), "kind": kind, "__doc__": doc, "__module__": module})
    register_node(
        cls,
        lambda node: tuple(dict.values(node)),
        lambda node: (node._open().cfg, node.needs, tuple(dict.keys(node)), Aside(node.parts())),
        lambda values, data: cls(zip(data[2], values, strict=True), cfg=data[0], needs=data[1]).moved(data[3].value),
        lambda node: tuple(dict.keys(node)),
    )
    return cls
