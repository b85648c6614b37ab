"""A check whether modules are unchanged since their last call. It runs in every call, so it is generated as one expression per
module.

A module whose op is called directly must only run its class's forward on its own parameters. So the check covers all that could
change this: its class and the class's forward, its config, hooks, a forward on the instance, and each parameter and its class
(a tensor that is swapped in place keeps its identity).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.modules import module as hooks

from funcops.engine.backend.source import compile_source

Same = Callable[[Any, Any], bool]


GLOBAL_HOOKS = "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
WATCHED = " or ".join([f"hooks.{name}" for name in GLOBAL_HOOKS])


def watched() -> bool:
    """Whether hooks are set on all modules."""
    return any([getattr(hooks, name) for name in GLOBAL_HOOKS])


def parameters_of(module: Any, fields: Sequence[str]) -> tuple[Any, ...]:
    """The state that `same_parameters` compares: each parameter and its class."""
    found = [module._parameters[name] for name in fields]
    return tuple([part for t in found for part in (t, type(t))])


def state_of(modules: Sequence[Any], fields: Sequence[Sequence[str]]) -> tuple[Any, ...]:
    """The state that `same_modules` compares. A class has a forward, and stands for a class with another one."""
    parts: list[Any] = []
    for module, names in zip(modules, fields, strict=True):
        cls = type(module)
        parts += (module, cls, cls.forward, cls._origin, cls._theirs, module.__dict__["_cfg"], *parameters_of(module, names))
        parts += [getattr(module._parameters[name], "dtype", None) for name in _followed(module)]
    return tuple(parts)


def _followed(module: Any) -> list[str]:
    """The parameter on whose dtype the module's config depends, if any."""
    return [name for name in (module.cfg_follows,) if module._parameters.get(name) is not None]


def follows(modules: Sequence[Any]) -> tuple[str, ...]:
    """For each module, the name of that parameter, or ""."""
    return tuple(["".join(_followed(module)) for module in modules])


@functools.cache
def same_parameters(fields: tuple[str, ...]) -> Same:
    """Generate `same(parameters, before)` for a module's dict of parameters."""
    return _compiled("parameters, before", _unpacked(_names("", fields)) + [f"    return {_same('parameters', '', fields)}"])


@functools.cache
def same_modules(fields: tuple[tuple[str, ...], ...], followed: tuple[str, ...]) -> Same:
    """Generate `same(modules, before)` for a container's dict of modules with these fields, and the fields of which the dtype
    counts."""
    heads = [[f"m{i}", f"k{i}", f"f{i}", f"o{i}", f"g{i}", f"c{i}", *_names(str(i), own)] for i, own in enumerate(fields)]
    heads = [[*head, *[f"d{i}"] * bool(name)] for i, (head, name) in enumerate(zip(heads, followed, strict=True))]
    lines = [f"    if len(modules) != {len(fields)} or {WATCHED}: return False", *_unpacked([n for head in heads for n in head])]
    if fields:
        lines.append(f"    {''.join(f'a{i}, ' for i in range(len(fields)))} = modules.values()")
    for i, own in enumerate(fields):
        lines.append(f"    s = a{i}.__dict__")
        if own:
            lines.append("    p = s['_parameters']")
        called = "".join(f" or s['{name}']" for name in HOOKS)
        forwards = f"k{i}.forward is not f{i} or o{i}.forward is not g{i}"
        lines.append(
            f"    if a{i} is not m{i} or type(a{i}) is not k{i} or {forwards} or s.get('_cfg') is not c{i}"
            f"{called} or 'forward' in s or not ({_same('p', str(i), own)})"
            + (f" or t{i}_{followed[i]}.dtype is not d{i}" if followed[i] else "")
            + ": return False"
        )
    return _compiled("modules, before", [*lines, "    return True"])


HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def _names(of: str, fields: Sequence[str]) -> list[str]:
    return [f"{letter}{of}_{name}" for name in fields for letter in "ty"]


def _unpacked(names: list[str]) -> list[str]:
    return [f"    {', '.join(names)}, = before"] if names else []


def _same(parameters: str, of: str, fields: Sequence[str]) -> str:
    """The expression that compares parameters; the sentinel `s_` distinguishes a missing parameter from None."""
    each = [f"{parameters}.get({n!r}, s_) is t{of}_{n} and type(t{of}_{n}) is y{of}_{n}" for n in fields]
    return " and ".join(each) or "True"


def _compiled(arguments: str, lines: list[str]) -> Same:
    text = f"def same({arguments}):\n" + "\n".join(lines) + "\n"
    return compile_source("unchanged modules", text, {"hooks": hooks, "s_": object()})["same"]  # type: ignore[no-any-return]
