"""The config that an adapter in a folder needs: ranks, factors and targets, read from the files that PEFT wrote."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from funcops import checkpoint
from funcops.engine.contract.configs import require_config
from funcops.engine.contract.walk import nested
from funcops.engine.errors import CheckpointError, fail, few, join_path, require_type
from funcops.library.ops.low_rank import adapter_of
from funcops.lora.rewrite import is_adapted, with_lora
from funcops.lora.settings import (
    CONFIG,
    OF_TABLES,
    PREFIX,
    SIDES,
    WEIGHTS,
    Names,
    ParameterOf,
    check_names,
    divisor,
    is_target,
    modules_of,
    name_of,
    names_in_file,
    numbered,
    of_module,
    of_targets,
    read_settings,
)

Shape = tuple[int, float]  # the rank of an adapter, and its factor


def with_adapter_of(cfg: Any, folder: str | os.PathLike[str], *, names: Names | None = None) -> Any:
    """Return the config with the adapters that a folder of PEFT's holds, which `load_adapter` then reads: `with_lora` with the
    targets, ranks and alphas of its files, rsLoRA's too.

    `names`: the modules' names by globs over the paths of linears, as for `save_adapter`; a linear whose modules have no adapter
    stays as it is. For a decoder: `models.peft_names(cfg)`. A linear of several modules, such as gate and up, gets an adapter of
    their rank if they share one lora_A, else of the sum of their ranks; so does one of which PEFT's target_modules have some alone.
    PEFT's lora_dropout is not read.

    Raises `CheckpointError` for a file that is invalid, a setting with another meaning (see `load_adapter`), an adapter of a module
    that no linear of the config is, a module of target_modules without one whose linear has others, and layers of one repeat, or
    modules of one linear, whose adapters differ in rank or factor.
    Raises `FileNotFoundError` if a file is missing.

    >>> import tempfile
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.lora import save_adapter, with_adapter_of, with_lora
    >>> base = ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)), Step("down", linear, LinearConfig(16, 8))))
    >>> cfg = with_lora(base, rank=2, targets=("up",), alpha=6.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_adapter(folder, chain.init(cfg, key=random.key(0)), cfg)
    ...     with_adapter_of(base, folder) == cfg
    ...
    True
    """
    where = "with_adapter_of"
    require_config(where, cfg)
    require_type(where, "folder", folder, str, os.PathLike)
    check_names(where, names)
    said = read_settings(where, Path(folder) / CONFIG)
    targets: dict[Shape, list[str]] = {}
    linears = [(path, [modules_of(one, names, experts)[1] for one in layers]) for path, layers, experts in linears_of(cfg)]
    every = [there for _, each in linears for there in each]
    experts = of_targets(where, folder, said, every)
    known = [one for there in every for one in there if not isinstance(one, ParameterOf) or one.parameter in experts]
    stored = names_in_file(known)
    with checkpoint._opened(where, Path(folder) / WEIGHTS) as file:
        endings = tuple(f".{sides['a']}" for sides in (SIDES, OF_TABLES))
        entries = [name.removeprefix(PREFIX) for name in file.keys() if name.endswith(endings)]  # noqa: SIM118
        held = {name.removesuffix(endings[0]).removesuffix(endings[1]) for name in entries}
        for path, each in linears:
            found = {
                _shape(where, folder, said, {name: stored.get(name, "") for name in map(name_of, there)}, held, file)
                for there in each
            }
            if len(found) > 1:
                said_of = "with adapters of one rank and factor in all layers of a repeat"
                fail(where, os.fspath(folder), said_of, f"several for {path}: {few(sorted(map(str, found)))}", CheckpointError)
            for shape in found - {None}:
                targets.setdefault(shape, []).append(re.sub(r"\*", "[*]", path))  # type: ignore[arg-type]
    unknown = sorted(held - {*stored.values()})
    if unknown or not held:
        got = f"others: {few(unknown)}" if unknown else "none"
        fail(where, os.fspath(folder), "with adapters of modules that names has for linears of cfg", got, CheckpointError)
    for (rank, factor), globs in targets.items():
        cfg = with_lora(cfg, rank, globs, alpha=round(factor * rank, 9))
    return cfg


def linears_of(cfg: Any) -> Iterator[tuple[str, list[str], bool]]:
    """The path of each linear or embedding without an adapter, with "*" for the layers of a repeat, its path in every layer, and
    whether it is a layer of experts."""
    for part, around in nested(cfg, stop=lambda part: is_adapted(part.cfg)):
        if part.composite:
            continue
        layers = list(itertools.product(*[range(one.cfg.times) for one in around if one.cfg.times]))
        paths = [join_path(part.path, name) for name in part.cfg.linear_parts]
        for path in paths or ([part.path] if adapter_of(part.cfg) else []):
            yield path, [numbered(path, numbers) for numbers in layers], bool(paths)


def _shape(where: str, folder: Any, said: Any, there: dict[str, str], held: set[str], file: Any) -> Shape | None:
    """The rank and factor of the adapter of a linear, by its modules' names, there and in the file; None if they have none."""
    have = [module for module, stored in there.items() if stored in held]
    if not have:
        return None
    at = f"{os.fspath(folder)}: the adapters of {', '.join(there)}"
    lost = [module for module in there if module not in have and is_target(said, module)]
    if lost:
        fail(where, at, "of all modules of target_modules, as they are one linear", f"none of {', '.join(lost)}", CheckpointError)
    ranks = [of_module(said, "rank_pattern", module, said.get("r")) for module in have]
    alphas = [of_module(said, "alpha_pattern", module, said.get("lora_alpha")) for module in have]
    right = all(type(rank) is int and rank > 0 for rank in ranks) and all(type(alpha) in (int, float) for alpha in alphas)
    if not right:
        fail(where, at, "of a rank r of at least 1, and with a number for lora_alpha", f"{ranks}, {alphas}", CheckpointError)
    factors = {alpha / divisor(said, rank) for rank, alpha in zip(ranks, alphas, strict=True)}
    if len(factors) > 1:
        fail(where, at, "with one factor, as they are one linear", sorted(factors), CheckpointError)
    if len(have) == 1:
        return ranks[0], factors.pop()
    read = [file.get_tensor(f"{PREFIX}{there[module]}.{SIDES['a']}") for module in have]
    shared = all(one.shape == read[0].shape and bool((one == read[0]).all()) for one in read)
    return (ranks[0] if shared else sum(ranks)), factors.pop()
