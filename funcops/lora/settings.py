"""adapter_config.json, PEFT's settings of an adapter: which are read, which change nothing, and which are refused. And the names of
PEFT's modules, by globs over the paths of linears."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from funcops.engine.errors import CheckpointError, describe, fail, few, require, require_count, require_type


@dataclasses.dataclass(frozen=True)
class RowsOf:
    """The rows `at` of a module of `rows` rows: a linear in a model whose module is several linears, such as q, k and v in one, or
    has its rows in another order.

    >>> from funcops.lora import RowsOf
    >>> RowsOf("transformer.h.*.attn.c_attn", 96, range(32, 64)).at[0]
    32
    """

    module: str
    rows: int
    at: range | tuple[int, ...]

    def __post_init__(self) -> None:
        require_type("RowsOf", "module", self.module, str)
        require_count("RowsOf", rows=self.rows)
        require_type("RowsOf", "at", self.at, range, tuple)
        right = len(set(self.at)) == len(self.at) > 0 and all(type(i) is int and 0 <= i < self.rows for i in self.at)
        require(right, "RowsOf", "at", f"of rows below {self.rows}, each once", few(map(str, self.at)))


@dataclasses.dataclass(frozen=True)
class ParameterOf:
    """A parameter of a module, for a linear that PEFT adapts by `target_parameters`: the weight of a router, or the weights of all
    experts, [E, O, I] or [E, I, O]. `at`: the row of the parameter for each of the O rows of ours, if it has them in another order.
    Raises `ValueError` unless `at` has every row once.

    >>> from funcops.lora import ParameterOf
    >>> ParameterOf("model.layers.*.mlp.experts.down_proj").parameter
    'model.layers.*.mlp.experts.down_proj'
    """

    parameter: str
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_type("ParameterOf", "parameter", self.parameter, str)
        require_type("ParameterOf", "at", self.at, tuple)
        require(sorted(self.at) == list(range(len(self.at))), "ParameterOf", "at", "every row, once", few(map(str, self.at)))


Module = str | RowsOf | ParameterOf
Names = Mapping[str, str | RowsOf | ParameterOf | tuple[str, ...]]
CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
MOST = 2**53  # a larger number cannot be a rank, nor an alpha with which factors stay finite
SIDES = {"a": "lora_A.weight", "b": "lora_B.weight"}
OF_TABLES = {"a": "lora_embedding_A", "b": "lora_embedding_B"}
READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_parameters"}
# settings of PEFT that do not change a trained adapter's output: its origin, which modules have one (the tensors say that), and how
# it was trained. Some would, but only if another setting, which is refused, turns them on.
WITHOUT_MEANING = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "lora_dropout",
    "megatron_core",
    "runtime_config",
    "ensure_weight_tying",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "fan_in_fan_out",  # how the base's weight is stored
}
# settings that change the function or the tensors: their values that do not, besides None, False and empty ones
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),  # the others change the base's weights
}


def read_settings(where: str, path: Path) -> dict[str, Any]:
    """The settings in a file, none of which gives the tensors a meaning that is not served."""
    if not path.is_file():
        raise FileNotFoundError(f"{where}: folder must hold {CONFIG}, got {os.fspath(path.parent)!r}")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {os.fspath(path)} must be JSON, got {error}") from error
    if not isinstance(said, dict):
        fail(where, os.fspath(path), "a JSON object", describe(said), CheckpointError)
    if said.get("peft_type") != "LORA":
        fail(where, f"{path}: peft_type", "'LORA'", repr(said.get("peft_type")), CheckpointError)
    for name, value in said.items():
        if name not in READ | WITHOUT_MEANING and value and value not in PLAIN.get(name, ()):
            _refuse(where, path, name, value)
    if not isinstance(said.get("use_rslora", False), bool):
        fail(where, f"{path}: use_rslora", "True or False", repr(said["use_rslora"]), CheckpointError)
    _check_patterns(where, path, said)
    targets = said.get("target_parameters") or []
    if not isinstance(targets, list) or not all([isinstance(one, str) for one in targets]):
        fail(where, f"{path}: target_parameters", "None or a list of names", repr(targets), CheckpointError)
    return said


def _check_patterns(where: str, path: Path, said: Mapping[str, Any]) -> None:
    """Check what `of_module` and `is_target` read."""
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = said.get(name) or {}
        if not isinstance(patterns, dict) or not all(map(_is_pattern, patterns)):
            fail(where, f"{path}: {name}", "None or an object of patterns", repr(patterns), CheckpointError)
        for one in (said.get("r"), said.get("lora_alpha"), *patterns.values()):
            if isinstance(one, (int, float)) and not abs(one) <= MOST:  # NaN, too
                fail(
                    where, f"{path}: {name}, r and lora_alpha", f"of numbers up to {MOST}", "NaN, or a larger one", CheckpointError
                )
    for name in ("target_modules", "exclude_modules"):
        targets = said.get(name)
        names = isinstance(targets, list) and all(isinstance(one, str) for one in targets)
        if targets is not None and not names and not (isinstance(targets, str) and _is_pattern(targets)):
            fail(where, f"{path}: {name}", "None, a list of names, or a pattern", repr(targets), CheckpointError)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def of_targets(where: str, folder: Any, said: Mapping[str, Any], found: Iterable[tuple[Module, ...]]) -> set[str]:
    """The parameters that have an adapter. Raises for a target beyond these."""
    parameters = {one.parameter for there in found for one in there if isinstance(one, ParameterOf)}
    targeted: set[str] = set()
    for target in said.get("target_parameters") or ():
        these = {name for name in parameters if f".{name}".endswith(f".{target}")}
        if not these:
            wanted = f"parameters that names has for linears of cfg ({few(sorted(parameters)) or 'none'})"
            fail(where, f"{os.fspath(folder)}: target_parameters", wanted, repr(target), CheckpointError)
        targeted |= these
    return targeted


def is_target(said: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT's `target_modules` have a module, and its `exclude_modules` do not: lists of ends of names, or patterns. Without
    targets every module that has tensors is one."""

    def met(targets: Any) -> bool:
        if isinstance(targets, str):
            return targets == "all-linear" or re.fullmatch(targets, module) is not None
        return any([f".{module}".endswith(f".{one}") for one in targets])

    targets, excluded = said.get("target_modules"), said.get("exclude_modules")
    return not (excluded and met(excluded)) and (not targets or met(targets))


def divisor(said: Mapping[str, Any], rank: int) -> float:
    """The divisor of alpha for the factor of an adapter: the rank, or with rsLoRA (arXiv 2312.03732) its square root."""
    return math.sqrt(rank) if said.get("use_rslora") else rank


def _refuse(where: str, path: Path, name: str, value: Any) -> NoReturn:
    """Raise for a setting that changes the function of the same tensors, or to which a later PEFT may give a meaning."""
    wanted = " or ".join(map(repr, PLAIN.get(name, (False if isinstance(value, bool) else None,))))
    remedy = "merge the adapter into the base with PEFT's merge_and_unload, and load that"
    if name == "init_lora_weights":
        remedy = "save it with PEFT's path_initial_model_for_weight_conversion, which makes a LoRA of it"
    fail(where, f"{path}: {name}", wanted, f"{value!r}; {remedy}", CheckpointError)


def of_module(said: Mapping[str, Any], name: str, module: str, other: Any) -> Any:
    """The setting of a module: of the first pattern that matches the end of its name, as in PEFT, else `other`."""
    patterns = said.get(name) or {}
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return other


def check_names(where: str, names: Any) -> None:
    """Check the names of modules by globs over the paths of linears."""
    if names is None:
        return
    require_type(where, "names", names, Mapping)
    for glob, name in names.items():
        require_type(where, "names", glob, str)
        require_type(where, f"names[{glob!r}]", name, str, tuple, RowsOf, ParameterOf)
        each = _each(name)
        require(len(each) > 0, where, f"names[{glob!r}]", "a name, or several", repr(name))
        for one in each:
            if type(name) is not tuple:
                one = name_of(one)
            require_type(where, f"names[{glob!r}]", one, str)
            require(glob.count("*") == one.count("*"), where, f"names[{glob!r}]", "a name with as many '*'", repr(one))


def numbered(path: str, numbers: tuple[int, ...]) -> str:
    """The path with these numbers in place of its "*"."""
    left = iter(numbers)
    return re.sub(r"\*", lambda _: str(next(left)), path)


def name_of(module: Module) -> str:
    return module if isinstance(module, str) else module.module if isinstance(module, RowsOf) else module.parameter


def names_in_file(found: Iterable[Module]) -> dict[str, str]:
    """The name in a file of each module with an adapter. Of the parameters of one module, in their order, PEFT wraps each in the
    next: the last one has the module's name, every other one a ".base_layer" more than the next."""
    inside: dict[str, dict[str, None]] = {}
    names = {}
    for one in found:
        names[name_of(one)] = name_of(one)
        if isinstance(one, ParameterOf):
            inside.setdefault(one.parameter.rpartition(".")[0], {})[one.parameter] = None
    for module, parameters in inside.items():
        names |= {name: module + ".base_layer" * outside for outside, name in enumerate(reversed(parameters))}
    return names


def modules_of(path: str, names: Names | None, experts: bool = False) -> tuple[str | None, tuple[Module, ...]]:
    """The glob of `names` that matches the path of a linear, and the names of its modules: without names its path; () if no glob
    matches. `experts`: whether it is a layer of experts."""
    if names is None:
        return None, (ParameterOf(path) if experts else path,)
    glob = next((glob for glob in names if fnmatchcase(path, glob)), None)
    return glob, () if glob is None else tuple(_named(path, glob, one) for one in _each(names[glob]))


def _each(names: Any) -> tuple[Any, ...]:
    return names if isinstance(names, tuple) else (names,)


def _named(path: str, glob: str, name: Module) -> Module:
    said = _filled(path, glob, name_of(name))
    if isinstance(name, RowsOf):
        return dataclasses.replace(name, module=said)
    return said if isinstance(name, str) else dataclasses.replace(name, parameter=said)


def _filled(path: str, glob: str, name: str) -> str:
    """The name with what stands for each "*" of the glob in the path."""
    pattern = "".join("(.*)" if c == "*" else re.escape(c) for c in glob)
    stood = re.fullmatch(pattern, path)
    if stood is None:
        fail("names", repr(glob), "a glob whose only wildcard is '*'", "others")
    parts = iter(stood.groups())
    return re.sub(r"\*", lambda _: next(parts), name)
