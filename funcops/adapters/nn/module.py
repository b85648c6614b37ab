"""What a module and an op have to do with each other."""

from __future__ import annotations

from typing import Any

from torch import nn

from funcops.adapters.autograd import run
from funcops.op import Op
from funcops.trees import tree_map_tensors


class Prepared(nn.Module):
    """A module whose config is made when it is, and made anew when its mode or dtype changes: torch.compile cannot make it, but finds
    it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        prepare(self)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        prepare(self)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.__dict__.pop("_cfg", None)  # the dtype may be another
        prepare(self)
        return self


class OpModule(Prepared):
    """A module that runs one op: `op`, `cfg` and `op_params()` are what the functional face takes. `values`: the attributes that
    the config is made of; `fields`: the parameters, in the order of `params_class`."""

    op: Op
    params_class: Any = None
    values: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in OpModule._read_by(self):
            self.__dict__.pop("_cfg", None)

    @staticmethod
    def _read_by(module: Any) -> tuple[str, ...]:
        """The attributes that its config is made of; none once `from_torch` has given it its class back."""
        cls = type(module)
        return (*cls.values, *cls.fields) if issubclass(cls, OpModule) else ()

    @property
    def cfg(self) -> Any:
        """The op's config, from the module's attributes as they are."""
        made = self.__dict__.get("_cfg")
        if made is None:
            made = self.__dict__["_cfg"] = self.make_cfg()
        return made

    def make_cfg(self) -> Any:
        """The config, made of `values` and `fields`. Raises `ValueError` for what the op does not have."""
        raise NotImplementedError

    def op_params(self) -> Any:
        """The op's params tree; its leaves are the module's own parameters."""
        return None if self.params_class is None else self.params_class(*self._own())

    def op_input(self, x: Any) -> Any:
        """The op's x for the module's x."""
        return x

    def forward(self, x: Any) -> Any:
        own, given = self._own(), self.op_input(x)
        params = None if self.params_class is None else self.params_class(*own)
        leaves = [t for t in own if t is not None]
        leaves += given if type(given) is tuple else (given,)
        return run(self.op, params, given, self.cfg, leaves)

    def _own(self) -> list[Any]:
        parameters = self._parameters
        return [parameters[name] if name in parameters else getattr(self, name) for name in self.fields]


def prepare(module: Any) -> None:
    """Make the config now, where it can be made."""
    try:
        module.cfg  # noqa: B018
    except (AttributeError, KeyError, TypeError, ValueError):
        return  # not yet complete, or wrong: its first use says so


def functional(module: Any) -> tuple[Op, Any, Any]:
    """`(op, cfg, params)` of a module or of a Sequential of them, for `op.fwd(params, x, cfg)`: params are detached views of the
    module's own, so that an update in place is seen by both. Raises `ValueError` for a Sequential that is not one chain."""
    return module.op, module.cfg, tree_map_tensors(lambda t: t.detach(), module.op_params())
