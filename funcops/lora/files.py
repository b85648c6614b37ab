"""Adapters without their base model in a folder, as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors.

Entries are `base_model.model.MODULE.lora_A.weight` [R, I] and `.lora_B.weight` [O, R], one pair for each linear (for an embedding
`.lora_embedding_A` [R, V] and `.lora_embedding_B` [D, R]); stacked layers are written one by one. A linear that holds several of
PEFT's modules, one below the other, has a pair for each of them: its whole a, and their rows of its b. A layer of E experts is a
parameter of a module: row r of expert e's a is row e R + r of lora_A [E R, I], column r of its b is column r E + e of lora_B
[O, R E]. Needs the safetensors package.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcops import checkpoint
from funcops.engine.contract.walk import ties
from funcops.engine.errors import FLOATS, CheckpointError, describe, fail, few, join_path, require, require_dtype, require_type
from funcops.engine.trees import at, tree_map
from funcops.library.ops.low_rank import LowRankParams
from funcops.lora.params import adapted, adapter, with_adapter
from funcops.lora.rewrite import INSIDE, AdaptedLinear
from funcops.lora.settings import (
    CONFIG,
    OF_TABLES,
    PREFIX,
    SIDES,
    WEIGHTS,
    Module,
    Names,
    ParameterOf,
    RowsOf,
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

Modules = dict[tuple[str, tuple[int, ...]], tuple[Module, ...]]  # by a linear's path, and the index of its layer


def save_adapter(
    folder: str | os.PathLike[str], params: Any, cfg: Any, *, names: Names | None = None, base: str = "", task: str | None = None
) -> None:
    """Write the adapters of `params` to a folder, which is created if it is missing. Each file is written whole or not at all.

    `names`: the modules' names in the files, by globs over the paths of linears; the match of each "*" replaces the "*" of the
    name, in order. By default the paths themselves.

        names={"blocks.*.attn.qkv.q.proj": "model.layers.*.self_attn.q_proj"}

    A tuple is for a linear that holds several modules of equally many rows: `("...gate_proj", "...up_proj")`. Each of these gets
    the whole a, and its rows of b. A `RowsOf` is for a linear that is some rows of a module: its b is these rows of the module's,
    whose a is the one that all its linears share, or else all of theirs, one below the other. A `ParameterOf` is for a linear that
    PEFT has in its `target_parameters`, such as a layer of experts. `models.peft_names` gives the names for a decoder of
    `funcops.models`.

    `base`: the name or path of the base model, and `task` PEFT's task type, such as "CAUSAL_LM", which its Auto classes read.
    Raises `ValueError`, before anything is written, for a linear without a name, for two with one name, for a tuple whose length
    does not divide b's rows, and for adapters with different dropouts; `TypeError` for a layer of experts whose name is no
    `ParameterOf`.

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
    require_type(where, "task", task, str, type(None))
    found = adapted(where, cfg)
    modules, cfgs = _modules(where, found, names), {linear.path: linear.lora for linear in found}
    own = adapter(params, cfg)
    with_adapter(params, own, cfg)  # checks them
    parts: dict[str, list[tuple[Module, Tensor, Tensor]]] = {}
    for (path, index), there in modules.items():
        for module, rows in zip(there, own[path].b[index].chunk(len(there)), strict=True):
            parts.setdefault(name_of(module), []).append((module, own[path].a[index], rows))
    whole = {name: _whole(each) for name, each in parts.items()}
    stored = names_in_file(one for there in modules.values() for one in there)
    by_ids = {name_of(there[0]) for (path, _), there in modules.items() if cfgs[path].by_ids}
    entries = {_entry(stored[name], side, name in by_ids): t for name, (a, b) in whole.items() for side, t in (("a", a), ("b", b))}
    ranks = {name: len(a) // math.prod(parts[name][0][1].shape[:-2]) for name, (a, _) in whole.items()}  # of one expert
    text = json.dumps(_described(where, found, modules, ranks, base, task), indent=2, sort_keys=True) + "\n"
    os.makedirs(folder, exist_ok=True)
    checkpoint.save(entries, Path(folder) / WEIGHTS, metadata={"format": "pt"})
    beside = Path(folder) / f".{secrets.token_hex(8)}.part"
    try:
        beside.write_text(text)
        os.replace(beside, Path(folder) / CONFIG)
    finally:
        beside.unlink(missing_ok=True)


def load_adapter(
    folder: str | os.PathLike[str], params: Any, cfg: Any, *, names: Names | None = None, dtype: torch.dtype | None = None
) -> Any:
    """Return the params with the adapters that `save_adapter` or PEFT wrote to a folder, on the devices of the adapters that they
    replace. `names`: see `save_adapter`. `dtype`: the adapters' dtype, to which the file's numbers are rounded; by default the
    dtype of the adapters that they replace, which must also be the file's: PEFT keeps float32 where the base has 16 bits.

    A linear of two modules of rank r, such as gate and up, takes an adapter of rank r if both have the same lora_A, as
    `save_adapter` writes them. If each has its own, as PEFT trains them, it takes one of rank 2r with twice the alpha: `[a1; a2]`,
    and b with b1 and b2 on its diagonal. If PEFT's target_modules have one of them alone, it takes one of rank r, whose b has zeros
    in the other's rows; a training then changes these, too.

    Raises `CheckpointError`, before any tensor is read: for a file that is invalid or cut off; for tensors that are missing, extra,
    or of another shape or dtype, by name; for another rank or alpha; for any setting of PEFT with another meaning (DoRA,
    PiSSA, OLoRA, aLoRA, biases, modules that are saved whole), and for an unknown setting. Raises it after reading for
    different lora_A if the rank is for one, for a b with numbers in rows that no linear takes, and for a weight of the base (PEFT
    saves lm_head's and the embedding's) other than the one in params. Raises `FileNotFoundError` if a file is missing."""
    where = "load_adapter"
    require_type(where, "folder", folder, str, os.PathLike)
    require_dtype(where, dtype)
    found = {linear.path: linear for linear in adapted(where, cfg)}
    modules = _modules(where, list(found.values()), names)
    own = adapter(params, cfg)
    with_adapter(params, own, cfg)
    ranks = _checked_settings(where, Path(folder) / CONFIG, found, modules)
    stored = names_in_file(one for there in modules.values() for one in there)
    held = _dtypes(where, Path(folder) / WEIGHTS)
    bases = {_base_entry(there, stored): path for (path, _), there in modules.items()}
    like = {entry: _base_weight(where, folder, entry, params, cfg, found[path]) for entry, path in bases.items() if entry in held}
    for (path, index), there in modules.items():
        for module, rank in zip(there, ranks[path, index], strict=True):
            for side, shape in _shapes(module, found[path], rank, len(there)).items() if rank else ():
                entry = _entry(stored[name_of(module)], side, found[path].lora.by_ids)
                kind = own[path].a.dtype if dtype is None else held.get(entry, dtype)
                like[entry] = getattr(own[path], side).new_empty(shape, dtype=kind)
    _check_readable(where, like, held, names)
    read = checkpoint.load(Path(folder) / WEIGHTS, like)
    for entry in bases.keys() & read.keys():
        if not torch.equal(read.pop(entry), like[entry]):
            wanted = "the weight in params (merge the adapter into its own base with PEFT's merge_and_unload, and load that)"
            fail(where, f"{os.fspath(folder)}: {entry}", wanted, "another", CheckpointError)
    read = {entry: t if dtype is None else t.to(dtype) for entry, t in read.items()}
    _check_no_other_rows(where, folder, modules, read)
    made = {}
    for path, linear in found.items():
        parts = [
            {
                module: tuple(read.get(_entry(stored[name_of(module)], side, linear.lora.by_ids)) for side in SIDES)
                for module in modules[path, index]
            }
            for index in _indices(linear)
        ]
        layers = [_adapter_of_modules(where, folder, linear, each) for each in parts]
        made[path] = layers[0] if not linear.lead else tree_map(lambda *t, of=linear: torch.stack(t).unflatten(0, of.lead), *layers)
    return with_adapter(params, made, cfg)


def _check_readable(where: str, like: Mapping[str, Tensor], held: Mapping[str, torch.dtype], names: Any) -> None:
    """Raise if the file has other modules than the config's paths, or another dtype, with the argument that helps."""
    if names is None and like and not held.keys() & like.keys():
        wanted = "the modules' names in the file, by path (of a decoder: models.peft_names(decoder_config, cfg))"
        fail(where, "names", wanted, f"None, and the file has {few(held)}", CheckpointError)
    for entry, t in like.items():
        if held.get(entry, t.dtype) != t.dtype:
            wanted = f"given, as {entry} has {held[entry]} and the adapter that it replaces {t.dtype} (dtype={t.dtype})"
            fail(where, "dtype", wanted, None, CheckpointError)


def _entry(module: str, side: str, by_ids: bool = False) -> str:
    return f"{PREFIX}{module}.{(OF_TABLES if by_ids else SIDES)[side]}"


def _base_entry(there: tuple[Module, ...], stored: Mapping[str, str]) -> str:
    """The name under which PEFT also saves the weight of a linear that it takes for an embedding, such as lm_head."""
    return f"{PREFIX}{stored[name_of(there[0])]}.base_layer.weight" if len(there) == 1 and isinstance(there[0], str) else ""


def _base_weight(where: str, folder: Any, entry: str, params: Any, cfg: Any, linear: AdaptedLinear) -> Tensor:
    """The frozen weight of an adapted linear, which the weight in a file must equal."""
    path = linear.at(join_path(INSIDE, "weight"))
    path = ties(cfg).get(path, path)
    weight = at(params, path)
    if linear.lead or not isinstance(weight, Tensor) or weight.dtype not in FLOATS:
        wanted = "left out (save with PEFT's save_embedding_layers=False), as it cannot be compared with the weight in params"
        fail(where, f"{os.fspath(folder)}: {entry}", wanted, describe(weight), CheckpointError)
    return weight.detach()


def _inverse(at: tuple[int, ...]) -> list[int]:
    return sorted(range(len(at)), key=at.__getitem__)


def _shapes(module: Module, linear: AdaptedLinear, rank: int, modules: int) -> dict[str, tuple[int, int]]:
    """The shapes of a module's a and b in a file."""
    count = math.prod(linear.lora.shapes["a"][:-2])
    rows = module.rows if isinstance(module, RowsOf) else linear.lora.out_features // modules
    return {"a": (count * rank, linear.lora.in_features), "b": (rows, rank * count)}


def _whole(parts: list[tuple[Module, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The a and b of a module, from the adapters of the linears that are parts of it."""
    first, a, b = parts[0]
    if isinstance(first, str):
        return a, b
    if isinstance(first, ParameterOf):
        rows = b.view(-1, *b.shape[-2:])[:, _inverse(first.at) if first.at else slice(None)]
        return a.flatten(0, -2), rows.permute(1, 2, 0).flatten(1)
    one = all(torch.equal(own, a) for _, own, _ in parts)
    ranks = [len(own) for _, own, _ in parts]
    made = b.new_zeros(first.rows, ranks[0] if one else sum(ranks))
    for i, (module, _, rows) in enumerate(parts):
        start = 0 if one else sum(ranks[:i])
        at: Any = module
        made[list(at.at), start : start + ranks[i]] = rows
    return (a if one else torch.cat([own for _, own, _ in parts])), made


def _dtypes(where: str, path: Path) -> dict[str, torch.dtype]:
    """The dtypes of the float entries, by name."""
    with checkpoint._opened(where, path) as file:
        held = {name: checkpoint.CODES.get(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    return {name: dtype for name, dtype in held.items() if dtype in FLOATS}


def _adapter_of_modules(where: str, folder: Any, linear: AdaptedLinear, parts: Mapping[Module, tuple[Any, ...]]) -> LowRankParams:
    """Join the adapters of a linear's modules, a and b: with their common a, or with all their a, one below the other."""
    modules = [name_of(module) for module, (one, _) in parts.items() if one is not None]
    (first, (a0, b0)), *_ = parts.items()
    if isinstance(first, RowsOf):
        return LowRankParams(a0.clone(), b0[list(first.at)])
    if isinstance(first, ParameterOf):
        shapes, experts = linear.lora.shapes, b0.unflatten(1, (linear.lora.rank, -1)).permute(2, 0, 1)
        rows = experts[:, list(first.at) if first.at else slice(None)]
        return LowRankParams(a0.reshape(shapes["a"]), rows.reshape(shapes["b"]).contiguous())
    a = [one for one, _ in parts.values() if one is not None]
    apart = sum(len(one) for one in a) == linear.lora.rank
    none = a[0].new_zeros(linear.lora.out_features // len(parts), 0 if apart else linear.lora.rank)
    b = [none if b is None else b for _, b in parts.values()]
    if apart:
        return LowRankParams(torch.cat(a), torch.block_diag(*b))
    for module, one in zip(modules, a, strict=True):
        if not torch.equal(one, a[0]):
            rank, alpha = linear.lora.rank * len(modules), _plain(_alpha(linear) * len(modules))
            wanted = f"equal to {modules[0]}'s (if each has its own, use rank {rank} with alpha {alpha} at {linear.module})"
            fail(where, f"{os.fspath(folder)}: lora_A of {module}", wanted, "another", CheckpointError)
    return LowRankParams(a[0], torch.cat(b))


def _indices(linear: AdaptedLinear) -> Iterator[tuple[int, ...]]:
    yield from itertools.product(*[range(n) for n in linear.lead])


def _modules(where: str, found: list[AdaptedLinear], names: Any) -> Modules:
    """The names of each linear's modules."""
    for linear in found:
        over = getattr(linear.lora, "axis", None) or linear.axis
        if over is not None and over.size > 1:
            wanted = "one with unsharded adapters (dist.unshard the params, and use the config before dist.parallel)"
            fail(where, "cfg", wanted, f"{linear.path} over {over}")
    check_names(where, names)
    made: Modules = {}
    used = set()
    for linear in found:
        for index in _indices(linear):
            path = numbered(linear.module, index)
            experts = len(linear.lora.shapes["a"]) > 2
            glob, made[linear.path, index] = modules_of(path, names, experts)
            if names is not None and glob is None:
                fail(where, "names", f"globs, one of them for {path}", f"{', '.join(names) or 'none'}")
            used.add(glob)
            rows, there = linear.lora.out_features, made[linear.path, index]
            said = f"{len(there)} of them"
            require(rows % len(there) == 0, where, f"names[{glob!r}]", f"names for equal parts of {rows} rows", said)
            if linear.lora.by_ids and not (len(there) == 1 and isinstance(there[0], str)):
                fail(where, f"names[{glob!r}]", f"a name, as {path} is an embedding", repr(there), TypeError)
            if experts and not isinstance(there[0], ParameterOf):
                fail(where, f"names[{glob!r}]", f"a ParameterOf, as {path} is a layer of experts", repr(there[0]), TypeError)
            at_rows = () if isinstance(there[0], str) else there[0].at
            if at_rows:
                require(len(at_rows) == rows, where, f"names[{glob!r}].at", f"{rows} rows", len(at_rows))
    for glob in names or ():
        require(
            glob in used,
            where,
            "names",
            f"globs over the paths of adapters ({', '.join(p.module for p in found)}; of a decoder: models.peft_names)",
            repr(glob),
        )
    _check_apart(where, made)
    return made


def _check_apart(where: str, made: Modules) -> None:
    """Raise if two linears have one module, or one row of a module."""
    seen: dict[str, dict[int, str]] = {}  # by module, the path of the linear that has a row; row -1 stands for a whole module
    sizes: dict[str, int] = {}
    for (path, _), there in made.items():
        for module in there:
            name, rows = name_of(module), module.at if isinstance(module, RowsOf) else (-1,)
            require(bool(name), where, "names", "a name for each adapter", f"none for {path or 'the linear itself'}")
            taken = seen.setdefault(name, {})
            clash = [taken[row] for row in rows if row in taken] or (list(taken.values()) if -1 in (*rows, *taken) else [])
            if clash:
                fail(where, "names", "a name for each adapter", f"{name} for {clash[0]} and for {path}")
            taken |= dict.fromkeys(rows, path)
            if isinstance(module, RowsOf) and sizes.setdefault(name, module.rows) != module.rows:
                fail(where, "names", f"with one number of rows for {name}", f"{sizes[name]} and {module.rows}")


def _check_no_other_rows(where: str, folder: Any, modules: Modules, read: Mapping[str, Tensor]) -> None:
    """Raise if b of a module has numbers in rows that no linear with an adapter takes: they would be dropped."""
    left: dict[str, set[int]] = {}
    for there in modules.values():
        for module in there:
            if isinstance(module, RowsOf):
                left.setdefault(module.module, set(range(module.rows))).difference_update(module.at)
    for name, rows in left.items():
        if bool(read[_entry(name, "b")][sorted(rows)].any()):
            wanted = "zero beyond the rows of linears with adapters (with_adapter_of makes the config that has them all)"
            fail(where, f"{os.fspath(folder)}: lora_B of {name}", wanted, "others", CheckpointError)


def _alpha(linear: AdaptedLinear, rank: float | None = None) -> float:
    """The alpha of an adapter, or of one of another `rank` with the same factor."""
    return round(linear.lora.scale * (linear.lora.rank if rank is None else rank), 9)  # 16 / 3, times 3, is 16


def _described(
    where: str, found: list[AdaptedLinear], modules: Modules, ranks: dict[str, int], base: str, task: str | None
) -> dict[str, Any]:
    """The contents of adapter_config.json: the most common rank and alpha, and by module the others."""
    drops = {linear.lora.dropout for linear in found if not linear.lora.by_ids} or {0.0}
    require(len(drops) == 1, where, "cfg", "one with the same dropout for all adapters, as PEFT has one", sorted(drops))
    by_path = {linear.path: linear for linear in found}
    alphas: dict[str, float] = {}
    for (path, _), there in modules.items():
        for name in map(name_of, there):
            alpha = _alpha(by_path[path], ranks[name])
            if alphas.setdefault(name, alpha) != alpha:
                fail(where, "cfg", "one with the same factor for all linears of a module", f"others at {path}, a part of {name}")
    rank, alpha = _commonest(ranks), _commonest(alphas)
    experts = [one.parameter for there in modules.values() for one in there if isinstance(one, ParameterOf)]
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": drops.pop(),
        "target_modules": [name for name in ranks if name not in experts],
        **({"target_parameters": experts} if experts else {}),
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank},
        "alpha_pattern": {module: _plain(own) for module, own in alphas.items() if own != alpha},
    }


def _commonest(given: Mapping[str, Any]) -> Any:
    values = list(given.values())
    return max(values, key=values.count)


def _plain(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _checked_settings(where: str, path: Path, found: Mapping[str, AdaptedLinear], modules: Modules) -> dict[Any, list[int]]:
    """The ranks of each linear's modules, after the check that adapter_config.json describes the adapters of the config."""
    said = read_settings(where, path)
    targeted = of_targets(where, path, said, modules.values())
    ranks = {}
    for key, there in modules.items():
        linear, whole = found[key[0]], found[key[0]].lora.rank
        names = [name_of(module) for module in there]
        if isinstance(there[0], ParameterOf) and there[0].parameter not in targeted:
            wanted = f"a list with {there[0].parameter}, as in cfg"
            fail(where, f"{path}: target_parameters", wanted, sorted(targeted), CheckpointError)
        held = [name for name in names if len(names) == 1 or is_target(said, name)] or names
        each = {name: of_module(said, "rank_pattern", name, said.get("r")) for name in held}
        ranks[key] = [each.get(name, 0) for name in names]
        counts = all(type(rank) is int and rank > 0 for rank in each.values())
        for module, rank in each.items():
            if not counts or (rank != whole and sum(each.values()) != whole):
                more = ", for each if they share one lora_A, or as their sum" if len(there) > 1 else ""
                fail(where, f"{path}: r of {module}", f"{whole}, as in cfg{more}", repr(rank), CheckpointError)
            alpha = of_module(said, "alpha_pattern", module, said.get("lora_alpha"))
            number, right = isinstance(alpha, int | float) and not isinstance(alpha, bool), _alpha(linear, divisor(said, rank))
            if not number or not math.isclose(alpha, right, rel_tol=1e-9):
                fail(where, f"{path}: lora_alpha of {module}", f"{_plain(right)}, as in cfg", repr(alpha), CheckpointError)
    return ranks
