"""A pretended compiler: the library is told that one traces, but its code runs as written. It shows what the code for a tracer
computes, not that one can trace it."""

import contextlib
import sys
from unittest import mock

import torch

import funcops.engine.trees
from funcops.adapters.autograd import delayed, traced

_ASKS = torch.compiler.is_dynamo_compiling


class _Structure:
    """A structure of a tree in the form that a tracer gives it. Containers have no metadata here."""

    def __init__(self, spec):
        self.type, self.entries, self.num_leaves = spec.type, spec.entries, spec.num_leaves
        self._metadata = None if spec.type in (None, dict, list, tuple) else spec.one_level()
        self._children = [_Structure(child) for child in spec.children()]

    def children(self):
        return self._children


@contextlib.contextmanager
def pretended_compiler():
    """The block runs as if Dynamo traced it."""
    own, plain = {(torch.compiler, "is_dynamo_compiling"): lambda: True}, funcops.trees.structure
    for name, module in list(sys.modules.items()):
        if name.startswith("funcops."):
            own |= {(module, at): lambda: True for at, value in vars(module).items() if value is _ASKS}
    own[funcops.trees, "structure"] = lambda tree: _Structure(plain(tree))
    own[traced, "_floats_as_constants"] = bool
    own[delayed, "_compiled"] = delayed._compiled
    with contextlib.ExitStack() as patches:
        for (module, name), value in own.items():
            patches.enter_context(mock.patch.object(module, name, value))
        yield
