"""Old import paths of modules that have moved: they import the new module, with a `DeprecationWarning`, until 0.4."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_CONTRACT = ("accumulators", "configs", "marks", "needs", "op", "schema", "signatures")
MOVED = {
    **{f"funcops.{name}": f"funcops.contract.{name}" for name in _CONTRACT},
    "funcops.compose.walk": "funcops.contract.walk",
    "funcops.contract.memo": "funcops.contract.trace_safe_cache",
    "funcops.distributed.in_flight": "funcops.distributed.async_collectives",
    "funcops.distributed.parallel": "funcops.distributed.rewrite",
    "funcops.distributed.plain": "funcops.distributed.checks",
    "funcops.memo": "funcops.contract.trace_safe_cache",
    "funcops.models.coded": "funcops.models.quantized_checkpoints",
    "funcops.models.roles": "funcops.models.sharding_rules",
    "funcops.names": "funcops.backend.source",
    "funcops.quantization": "funcops.low_precision.report",
    "funcops.recipes": "funcops.formats.recipes",
    "funcops.scaled": "funcops.formats.scaled",
}
GONE = {"funcops.bench": "the benchmarks are not part of the package: run `python -m benchmarks` in a checkout of funcops"}
_PREFIXES = {"funcops.dist.": "funcops.distributed."}


def new_path(name: str) -> str | None:
    """The new import path of a module that has moved; None for a path that has not.

    >>> from funcops.contract.moved import new_path
    >>> new_path("funcops.op"), new_path("funcops.dist.mesh"), new_path("funcops.trees")
    ('funcops.contract.op', 'funcops.distributed.mesh', None)
    """
    for old, new in _PREFIXES.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
            return MOVED.get(name, name)
    return MOVED.get(name)


class OldPaths(MetaPathFinder, Loader):
    """An importer for `sys.meta_path`, and the loader of what it finds."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in GONE:
            raise ModuleNotFoundError(f"{name}: {GONE[name]}", name=name)
        new = new_path(name)
        if new is None or importlib.util.find_spec(new) is None:
            return None
        warnings.warn(f"{name} is now {new}; the old path is removed in version 0.4", DeprecationWarning, stacklevel=2)
        return ModuleSpec(name, self, is_package=hasattr(importlib.import_module(new), "__path__"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(str(new_path(spec.name)))
        self._own = module.__spec__  # the import system replaces it by the old path's
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own


class Face(ModuleType):
    """A module whose own names stay when the import system binds a submodule of the same name in it: `import funcops.dist.parallel`
    would otherwise replace the function `dist.parallel`."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in self.__dict__):
            super().__setattr__(name, value)


def install() -> None:
    """Serve the old paths, once a process."""
    if not any(isinstance(one, OldPaths) for one in sys.meta_path):
        sys.meta_path.insert(0, OldPaths())  # before the importer of files, which would load a moved folder's files twice
