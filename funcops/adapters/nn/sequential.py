"""`Sequential`: runs of funcops modules as one chain each: one autograd node, planned and fused."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from funcops.adapters.autograd import run
from funcops.adapters.nn.layers import Dropout, drawn_key
from funcops.adapters.nn.module import OpModule, Prepared
from funcops.compose.chain import ChainConfig, chain
from funcops.compose.plan import FEW
from funcops.compose.step import Step, WithExtras
from funcops.errors import require

KEY = "key"


class Group:
    """Neighbours that run as one chain; or one ordinary module. Small inputs run on `small`, which computes nothing again."""

    def __init__(self, named: list[tuple[str, Any]], cfg: ChainConfig | None) -> None:
        self.names, self.modules, self.cfg = [n for n, _ in named], [m for _, m in named], cfg
        self.small = None if cfg is None else dataclasses.replace(cfg, recompute=False)
        self.in_order = [module for _, module in sorted(named, key=lambda pair: pair[0])]  # of the leaves of a dict
        self.leaves: list[Any] = []  # of `params`
        self.params: Any = None

    def run(self, x: Any) -> Any:
        if self.cfg is None or self.small is None:
            return self.modules[0](x)
        own: list[Any] = []
        for module in self.in_order:
            own += module._own()
        if self.params is None or len(own) != len(self.leaves) or any([a is not b for a, b in zip(own, self.leaves, strict=True)]):
            self.leaves, self.params = own, {name: m.op_params() for name, m in zip(self.names, self.modules, strict=True)}
        cfg = self.small if type(x) is Tensor and x.numel() < FEW else self.cfg
        if cfg.extras:
            return run(chain, self.params, WithExtras(x, {KEY: drawn_key(x)}), cfg)
        return run(chain, self.params, x, cfg, [*[t for t in own if t is not None], x])


class Sequential(Prepared, nn.Sequential):
    """`torch.nn.Sequential` whose runs of funcops modules are each one `chain`: what a step reads of a cheap one before it is
    computed again, and fused kernels run where there are some. An ordinary module, or one with hooks, splits a run."""

    op = chain

    def forward(self, input: Any) -> Any:
        x = input
        for group in self._groups():
            x = group.run(x)
        return x

    @property
    def cfg(self) -> ChainConfig:
        """The chain that all modules are, where they are one."""
        return self._whole().cfg  # type: ignore[return-value]

    def op_params(self) -> dict[str, Any]:
        """The chain's params; the leaves are the modules' own parameters."""
        group = self._whole()
        return {name: module.op_params() for name, module in zip(group.names, group.modules, strict=True)}

    def _whole(self) -> Group:
        groups = self._groups()
        one = len(groups) == 1 and groups[0].cfg is not None
        require(one, "funcops.nn.Sequential", "modules", "all of funcops.nn, without hooks", [type(m).__name__ for m in self])
        return groups[0]

    def _groups(self) -> list[Group]:
        """The groups, made anew when a module, its config or its hooks have changed."""
        now = [m.cfg if _joins(m) else m for m in self._modules.values()]
        cached = self.__dict__.get("_cached")
        if (
            cached is None
            or len(cached[0]) != len(now)
            or any([a is not b for a, b in zip(cached[0], now, strict=True)])
            or cached[2] != [*self._modules.values()]
        ):
            cached = self.__dict__["_cached"] = now, _grouped(dict(self._modules)), [*self._modules.values()]
        return cached[1]  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_cached"}


def _joins(module: Any) -> bool:
    """Whether the module may be a step of a chain: it takes x alone, and nobody looks at what it is given or gives."""
    if not isinstance(module, OpModule) or type(module).forward is not OpModule.forward:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def _grouped(modules: dict[str, Any]) -> list[Group]:
    groups: list[Group] = []
    joined: list[tuple[str, Any]] = []

    def close() -> None:
        if joined:
            steps = tuple(_step(name, module) for name, module in joined)
            extras = (KEY,) if any(step.takes for step in steps) else ()
            groups.append(Group(list(joined), ChainConfig(steps=steps, extras=extras)))
            joined.clear()

    for i, (name, module) in enumerate(modules.items()):
        if _joins(module):
            joined.append((f"m{i}", module))  # a module's name need not be an identifier
        else:
            close()
            groups.append(Group([(name, module)], None))
    close()
    return groups


def _step(name: str, module: Any) -> Step:
    return Step(name=name, op=module.op, cfg=module.cfg, takes=(KEY,) if isinstance(module, Dropout) else ())
