"""`Sequential`: runs of funcops modules as one chain each: one autograd node, planned and fused."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from funcops.adapters.autograd import differentiable
from funcops.adapters.nn.layers import Dropout, drawn_key
from funcops.adapters.nn.module import OpModule, prepare
from funcops.compose.chain import ChainConfig, chain
from funcops.compose.step import Step, WithExtras
from funcops.errors import require

KEY = "key"


class Group(NamedTuple):
    """Neighbours that run as one chain; or one ordinary module."""

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    cfg: ChainConfig | None


class Sequential(nn.Sequential):
    """`torch.nn.Sequential` whose runs of funcops modules are each one `chain`: what a step reads of a cheap one before it is
    computed again, and fused kernels run where there are some. An ordinary module, or one with hooks, splits a run."""

    def forward(self, input: Any) -> Any:
        x = input
        for group in self._groups():
            if group.cfg is None:
                x = group.modules[0](x)
                continue
            params = {name: module.op_params() for name, module in zip(group.names, group.modules, strict=True)}
            given = WithExtras(x, {KEY: drawn_key(x)}) if group.cfg.extras else x
            x = differentiable(chain)(params, given, group.cfg)
        return x

    op = chain

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        prepare(self)

    def train(self, mode: bool = True) -> Sequential:
        super().train(mode)
        prepare(self)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Sequential:
        super()._apply(fn, recurse)
        prepare(self)
        return self

    @property
    def cfg(self) -> ChainConfig:
        """The chain that all modules are, where they are one."""
        return self._whole().cfg  # type: ignore[return-value]

    def op_params(self) -> dict[str, Any]:
        """The chain's params; the leaves are the modules' own parameters."""
        group = self._whole()
        return {name: module.op_params() for name, module in zip(group.names, group.modules, strict=True)}  # type: ignore[operator]

    def _whole(self) -> Group:
        groups = self._groups()
        one = len(groups) == 1 and groups[0].cfg is not None
        require(one, "funcops.nn.Sequential", "modules", "all of funcops.nn, without hooks", [type(m).__name__ for m in self])
        return groups[0]

    def _groups(self) -> list[Group]:
        """The groups, made anew when a module, its config or its hooks have changed."""
        now = [(m, m.cfg if _joins(m) else None) for m in self._modules.values()]
        cached = self.__dict__.get("_cached")
        if cached is None or len(cached[0]) != len(now) or any([a is not c or b is not d for (a, b), (c, d) in zip(cached[0], now, strict=True)]):
            cached = self.__dict__["_cached"] = now, _grouped(dict(self._modules))
        return cached[1]

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__() if hasattr(super(), "__getstate__") else dict(self.__dict__)
        return {name: value for name, value in state.items() if name != "_cached"}


def _joins(module: Any) -> bool:
    """Whether the module may be a step of a chain: it takes x alone, and nobody looks at what it is given or gives."""
    return (
        isinstance(module, OpModule)
        and (type(module).forward is OpModule.forward)
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
    )


def _grouped(modules: dict[str, Any]) -> list[Group]:
    groups: list[Group] = []
    run: list[tuple[str, Any]] = []

    def close() -> None:
        if run:
            steps = tuple(_step(f"m{name}", module) for name, module in run)
            extras = (KEY,) if any(step.takes for step in steps) else ()
            names, members = zip(*((step.name, module) for step, (_, module) in zip(steps, run, strict=True)), strict=True)
            groups.append(Group(members, names, ChainConfig(steps=steps, extras=extras)))
            run.clear()

    for name, module in modules.items():
        if _joins(module):
            run.append((name, module))
        else:
            close()
            groups.append(Group((module,), (name,), None))
    close()
    return groups


def _step(name: str, module: Any) -> Step:
    return Step(name=name, op=module.op, cfg=module.cfg, takes=(KEY,) if isinstance(module, Dropout) else ())
