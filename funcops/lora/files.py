"""Adapters alone in a folder, as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors.

Entries are `base_model.model.MODULE.lora_A.weight` [R, I] and `.lora_B.weight` [O, R], one pair for each linear; those of stacked
layers are written by layer. Needs the safetensors package.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from funcops import checkpoint
from funcops.errors import CheckpointError, describe, fail, require, require_type
from funcops.lora.params import adapted, adapter, with_adapter
from funcops.lora.rewrite import Place
from funcops.ops.low_rank import LowRankParams

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
SIDES = {"a": "lora_A", "b": "lora_B"}
# settings of PEFT that give another function, or other tensors, and the values under which they do not
PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
}


def save_adapter(
    folder: str | os.PathLike[str], params: Any, cfg: Any, *, names: Mapping[str, str] | None = None, base: str = ""
) -> None:
    """Write the adapters of `params` to a folder, which is made where it is not there. Each file is written whole or not at all.

    `names`: what the modules are called there, by globs over the paths of linears; what each "*" stands for takes the place of that
    of the name, in their order. By default the paths themselves.

        names={"blocks.*.attn.qkv.q.proj": "model.layers.*.self_attn.q_proj"}

    `base`: the name or path of the base model, for PEFT. Raises `ValueError`, before anything is written, for a linear without a
    name, for two of one name and for adapters of several dropouts.

    >>> import os, tempfile
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.lora import load_adapter, save_adapter, with_lora
    >>> cfg = with_lora(ChainConfig(steps=(Step("up", linear, LinearConfig(8, 16)),)), rank=2, targets=("up",))
    >>> params = chain.init(cfg, key=random.key(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_adapter(folder, params, cfg, names={"up": "model.mlp.up_proj"})
    ...     again = load_adapter(folder, chain.init(cfg, key=random.key(1)), cfg, names={"up": "model.mlp.up_proj"})
    ...     sorted(os.listdir(folder))
    ...
    ['adapter_config.json', 'adapter_model.safetensors']
    >>> again["up"]["both"]["lora"].a.equal(params["up"]["both"]["lora"].a)
    True
    """
    where = "save_adapter"
    require_type(where, "folder", folder, str, os.PathLike)
    require(os.fspath(folder) != "", where, "folder", "the path of a folder", repr(folder))
    require_type(where, "base", base, str)
    found = adapted(where, cfg)
    modules = _modules(where, found, names)
    own, entries = adapter(params, cfg), {}
    with_adapter(params, own, cfg)  # which checks them
    for (path, index), module in modules.items():
        for side, peft in SIDES.items():
            entries[f"{PREFIX}{module}.{peft}.weight"] = getattr(own[path], side)[index]
    text = json.dumps(_described(where, found, modules, base), indent=2, sort_keys=True) + "\n"
    os.makedirs(folder, exist_ok=True)
    checkpoint.save(entries, Path(folder) / WEIGHTS, metadata={"format": "pt"})
    beside = Path(folder) / f".{secrets.token_hex(8)}.part"
    try:
        beside.write_text(text)
        os.replace(beside, Path(folder) / CONFIG)
    finally:
        beside.unlink(missing_ok=True)


def load_adapter(folder: str | os.PathLike[str], params: Any, cfg: Any, *, names: Mapping[str, str] | None = None) -> Any:
    """The params with the adapters of a folder that `save_adapter` or PEFT wrote, on the devices of those that they replace.
    `names`: as for `save_adapter`.

    Raises `CheckpointError`, before any tensor is read: for a file that is none or is cut off; for tensors that are missing, extra,
    or of another shape or dtype, by name; for another rank or alpha; for settings of PEFT with another meaning (DoRA, rsLoRA,
    biases, modules that are saved whole). Raises `FileNotFoundError` where a file is not there."""
    where = "load_adapter"
    require_type(where, "folder", folder, str, os.PathLike)
    found = {place.path: place for place in adapted(where, cfg)}
    modules = _modules(where, list(found.values()), names)
    own = adapter(params, cfg)
    with_adapter(params, own, cfg)
    _check_settings(where, Path(folder) / CONFIG, found, modules)
    like = {
        f"{PREFIX}{module}.{peft}.weight": getattr(own[path], side)[index]
        for (path, index), module in modules.items()
        for side, peft in SIDES.items()
    }
    read = checkpoint.load(Path(folder) / WEIGHTS, like)
    made = {}
    for path, place in found.items():
        sides = {}
        for side, peft in SIDES.items():
            layers = [read[f"{PREFIX}{modules[path, index]}.{peft}.weight"] for index in _indices(place)]
            sides[side] = torch.stack(layers).unflatten(0, place.lead) if place.lead else layers[0]
        made[path] = LowRankParams(**sides)
    return with_adapter(params, made, cfg)


def _indices(place: Place) -> Iterator[tuple[int, ...]]:
    yield from itertools.product(*[range(n) for n in place.lead])


def _modules(where: str, found: list[Place], names: Any) -> dict[tuple[str, tuple[int, ...]], str]:
    """The name of each module by the path of its linear, and the layer of that."""
    for place in found:
        over = getattr(place.lora, "axis", None)
        if over is not None and over.size > 1:
            wanted = "that of whole adapters (dist.unshard the params, and use the config before dist.parallel)"
            fail(where, "cfg", wanted, f"{place.path} over {over}")
    if names is not None:
        require_type(where, "names", names, Mapping)
        for glob, name in names.items():
            require_type(where, "names", glob, str)
            require_type(where, f"names[{glob!r}]", name, str)
            require(glob.count("*") == name.count("*"), where, f"names[{glob!r}]", "a name with as many '*'", repr(name))
    made: dict[tuple[str, tuple[int, ...]], str] = {}
    used = set()
    for place in found:
        for index in _indices(place):
            numbers = iter(index)
            path = re.sub(r"\*", lambda _, numbers=numbers: str(next(numbers)), place.module)  # type: ignore[misc]
            glob = None if names is None else next((glob for glob in names if fnmatchcase(path, glob)), None)
            if names is not None and glob is None:
                fail(where, "names", f"globs, one of them for {path}", f"{', '.join(names) or 'none'}")
            made[place.path, index] = path if glob is None else _named(path, glob, names[glob])
            used.add(glob)
    for glob in names or ():
        require(
            glob in used, where, "names", f"globs over the paths of adapters ({', '.join(p.module for p in found)})", repr(glob)
        )
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    for at, module in made.items():
        require(bool(module), where, "names", "a name for each adapter", f"none for {at[0] or 'the linear itself'}")
        if module in seen:
            fail(where, "names", "a name for each adapter", f"{module} for {seen[module][0]} and for {at[0]}")
        seen[module] = at
    return made


def _named(path: str, glob: str, name: str) -> str:
    pattern = "".join("(.*)" if c == "*" else re.escape(c) for c in glob)
    stood = re.fullmatch(pattern, path)
    if stood is None:
        fail("names", repr(glob), "of '*' alone", "a glob with other marks")
    parts = iter(stood.groups())
    return re.sub(r"\*", lambda _: next(parts), name)


def _alpha(place: Place) -> float:
    return round(place.lora.scale * place.lora.rank, 9)  # of 16 / 3, times 3, it is 16


def _described(where: str, found: list[Place], modules: Mapping[Any, str], base: str) -> dict[str, Any]:
    """adapter_config.json: the most common rank and alpha, and by module what has another."""
    drops = {place.lora.dropout for place in found}
    require(len(drops) == 1, where, "cfg", "one with one dropout for all adapters, as PEFT has it", sorted(drops))
    by_path = {place.path: place for place in found}
    ranks = {module: by_path[path].lora.rank for (path, _), module in modules.items()}
    alphas = {module: _alpha(by_path[path]) for (path, _), module in modules.items()}
    rank, alpha = _commonest(ranks), _commonest(alphas)
    return {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": base, "inference_mode": True, "bias": "none",
        "fan_in_fan_out": False, "init_lora_weights": True, "use_rslora": False, "use_dora": False, "modules_to_save": None,
        "r": rank, "lora_alpha": _plain(alpha), "lora_dropout": drops.pop(), "target_modules": list(ranks),
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank},
        "alpha_pattern": {module: _plain(own) for module, own in alphas.items() if own != alpha},
    }  # fmt: skip


def _commonest(given: Mapping[str, Any]) -> Any:
    values = list(given.values())
    return max(values, key=values.count)


def _plain(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _check_settings(where: str, path: Path, found: Mapping[str, Place], modules: Mapping[Any, str]) -> None:
    """adapter_config.json describes the adapters of the config."""
    if not path.is_file():
        raise FileNotFoundError(f"{where}: folder must hold {CONFIG}, got {os.fspath(path.parent)!r}")
    try:
        said = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{where}: {os.fspath(path)} must be JSON, got {error}") from error
    if not isinstance(said, dict):
        fail(where, os.fspath(path), "a JSON object", describe(said), CheckpointError)
    if said.get("peft_type") != "LORA":
        fail(where, f"{path}: peft_type", "'LORA'", repr(said.get("peft_type")), CheckpointError)
    for name, plain in PLAIN.items():
        if said.get(name) not in plain:
            fail(where, f"{path}: {name}", repr(plain[0]), repr(said[name]), CheckpointError)
    for (at, _), module in modules.items():
        low = found[at].lora
        rank = _of_module(said, "rank_pattern", module, said.get("r"))
        alpha = _of_module(said, "alpha_pattern", module, said.get("lora_alpha"))
        if rank != low.rank:
            fail(where, f"{path}: r of {module}", f"{low.rank}, as in cfg", repr(rank), CheckpointError)
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not number or not math.isclose(alpha, _alpha(found[at]), rel_tol=1e-9):
            fail(where, f"{path}: lora_alpha of {module}", f"{_plain(_alpha(found[at]))}, as in cfg", repr(alpha), CheckpointError)


def _of_module(said: Mapping[str, Any], name: str, module: str, other: Any) -> Any:
    """The setting of a module, by a pattern that is for the end of its name, as PEFT reads it."""
    patterns = said.get(name) or {}
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return other
