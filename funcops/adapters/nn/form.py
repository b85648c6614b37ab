"""The result of a module without its tensors, to be made again with others: of any classes that Python can pickle."""

from __future__ import annotations

import io
import pickle
import types
from typing import Any

from torch import Tensor, nn

BY_REFERENCE = (nn.Module, type, types.FunctionType, types.ModuleType)


class Form:
    """A module's result without its tensors: classes, structure and other values, as a pickle."""

    def __init__(self, result: Any, held: dict[int, Any]) -> None:
        """`held`: objects that stay the same ones, by id: those that the module holds."""
        file = io.BytesIO()
        found = _Pickler(file, held).kept(result)
        self.text, self.found = file.getvalue(), found
        self.trained = {i: t.requires_grad for i, t in found.items() if isinstance(t, Tensor)}

    def tensors(self) -> tuple[Tensor, ...]:
        """The result's tensors, which it keeps no longer."""
        return tuple([self.found.pop(i) for i in self.trained])

    def filled(self, tensors: Any) -> Any:
        """The result with these tensors."""
        given = zip(self.trained.items(), tensors, strict=True)
        values = self.found | {i: t if trained else t.detach() for (i, trained), t in given}
        return _Unpickler(self.text, values).load()


class _Pickler(pickle.Pickler):
    """Leaves out tensors, classes, functions, modules and the objects of `held`, by id."""

    def __init__(self, file: Any, held: dict[int, Any]) -> None:
        super().__init__(file)
        self.held = held

    def kept(self, result: Any) -> dict[int, Any]:
        """Pickle it, and return what is left out."""
        self.found = dict[int, Any]()
        self.dump(result)
        return self.found

    def persistent_id(self, one: Any) -> Any:
        if isinstance(one, (Tensor, *BY_REFERENCE)) or id(one) in self.held:
            self.found[id(one)] = one
            return id(one)
        return None


class _Unpickler(pickle.Unpickler):
    """Puts these values back."""

    def __init__(self, text: bytes, values: dict[int, Any]) -> None:
        super().__init__(io.BytesIO(text))
        self.values = values

    def persistent_load(self, i: Any) -> Any:
        return self.values[i]
