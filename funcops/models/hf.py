"""Checkpoints of Hugging Face's language models: a folder with config.json and safetensors files, as params and config, and back.

    params, cfg = from_hf(folder, dtype=torch.bfloat16)
    to_hf(params, cfg, other_folder)

Names and layouts are in `families.py`; nothing is initialised at random, and no bit changes unless a dtype is given. Quantised
tensors (`quantized_checkpoints.py`) are read as numbers. Needs the safetensors package. Tokenizers and downloads are not included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from funcops.checkpoint import CODES, _opened, save
from funcops.engine.errors import (
    FLOATS,
    CheckpointError,
    describe,
    fail,
    few,
    require,
    require_count,
    require_device,
    require_dtype,
    require_type,
    short,
)
from funcops.engine.trees import paths, stands_for_one, tree_map_with_path
from funcops.models.decoder import decoder, without_loss
from funcops.models.decoder_config import DecoderConfig, layer_paths
from funcops.models.families import IGNORED, Family, Rule
from funcops.models.fields import family_of, read_config, write_config
from funcops.models.quantized_checkpoints import Coded, Part, coding, parts
from funcops.models.quantized_writing import Unwritten, coded_tensors, codes_of, shape_of

__all__ = ["from_hf", "open_hf", "to_hf"]


if TYPE_CHECKING:
    from funcops.models.decoder import DecoderConfig


def row_order(kind: str, count: int, parts: int, cfg: DecoderConfig) -> Tensor | None:
    """The row of the tensors for each of `count` rows of params, which are `parts` leaves one below the other; None if the order is
    the same. `kind`: `Rule.order`."""
    rows = torch.arange(count)
    if kind == "evens_first":
        return torch.cat((rows[::2], rows[1::2]))
    if kind == "turning_first":
        assert cfg.latent is not None
        return rows.view(cfg.heads, -1).roll(cfg.latent.rope_size, 1).flatten()
    if kind == "by_head":
        return torch.cat([part.flatten() for part in rows.view(cfg.heads, -1).chunk(parts, 1)])
    if kind == "by_key_head":
        assert cfg.linear is not None
        of = cfg.linear
        values = of.values // of.key_heads
        sizes = [of.key_size, of.key_size, values, values] if parts == 4 else [of.value_heads // of.key_heads] * parts
        return torch.cat([part.flatten() for part in rows.view(of.key_heads, -1).split(sizes, 1)])
    return None


PLAIN = tuple(code for dtype in FLOATS for code, of in CODES.items() if of is dtype)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredLeaf(NamedTuple):
    """The rows of a leaf within the tensors `names`, one below the other."""

    rule: Rule
    names: tuple[str, ...]  # with {e} in the rule: expert 0's, then expert 1's, ...
    paths: tuple[str, ...]
    shape: tuple[int, ...]  # of all rows: [R, ...], or [E, R, ...]
    leaf: tuple[int, ...]  # the leaf's own shape
    first: int  # the leaf's first row

    @property
    def axis(self) -> int:
        return 1 if self.rule.stacked else 0

    @property
    def split(self) -> bool:
        """Whether every expert has tensors of its own."""
        return "{e}" in self.rule.names[0]

    def tensor_shape(self) -> list[int]:
        """The shape that each tensor has in a file."""
        lead, (rows, *rest) = self.shape[: self.axis], self.shape[self.axis :]
        found = [rows // len(self.rule.names), *([1] if self.rule.depthwise else []), *rest]
        return [*(() if self.split else lead), *(found[::-1] if self.rule.transposed else found)]

    def order(self, cfg: DecoderConfig) -> Tensor | None:
        """The row of the tensors for each row of params; None if the order is the same."""
        return row_order(self.rule.order, self.shape[self.axis], len(self.paths), cfg)


def stored_leaves(where: str, cfg: DecoderConfig) -> dict[str, StoredLeaf]:
    """The tensors of a checkpoint that store each leaf of the params of `decoder(cfg)`."""
    family = family_of(where, cfg.family)
    leaves = {path: t for path, t in paths(decoder(cfg).abstract()).items() if t is not None}
    found: dict[str, StoredLeaf] = {}
    for rule in family.rules:
        layers = list(enumerate(layer_paths(cfg))) if "{l}" in rule.paths[0] else [(0, "")]
        for i, layer in layers:
            here = tuple(path.replace("{l}", layer) for path in rule.paths)
            if not all(path in leaves for path in here):
                continue
            axis, shapes = int(rule.stacked), [tuple(leaves[path].shape) for path in here]
            rows = [shape[axis] for shape in shapes]
            whole = (*shapes[0][:axis], sum(rows), *shapes[0][axis + 1 :])
            experts = range(whole[0]) if "{e}" in rule.names[0] else range(1)
            names = tuple(name.replace("{i}", str(i)).replace("{e}", str(e)) for e in experts for name in rule.names)
            found |= {path: StoredLeaf(rule, names, here, whole, shapes[j], sum(rows[:j])) for j, path in enumerate(here)}
    missing = [path for path in leaves if path not in found]
    if missing:
        fail(where, f"params of family {cfg.family!r}", "all covered by its rules", ", ".join(missing))
    return {path: found[path] for path in leaves}


class HFWeights:
    """An open checkpoint: `cfg`, and the params of `decoder(cfg)` by path, read from the mapped files on request. A context manager
    that closes the files; `open_hf` makes it. `method`: how tensors are quantised, if they are."""

    def __init__(
        self, folder: Path, cfg: DecoderConfig, files: dict[str, Any], prefix: str, stack: contextlib.ExitStack, method: str = ""
    ) -> None:
        self.folder, self.cfg, self._files, self._stack, self._method = folder, cfg, files, stack, method
        self._stored = stored_leaves("open_hf", cfg)
        self._prefix = prefix  # of names, which the files lack

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def __contains__(self, path: object) -> bool:
        return path in self._stored

    def read(self, path: str, start: int = 0, stop: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        """Read rows `start` to `stop` of a leaf, all by default. Other rows are not read, unless the leaf's rows have another order
        in the file. `dtype`: by default the file's, for quantised tensors bfloat16. Raises `ValueError` for a path or rows that do
        not exist."""
        if path not in self._stored:
            fail("HFWeights.read", "path", f"one of {', '.join(self._stored)}", repr(path))
        stored = self._stored[path]
        count = stored.leaf[0]
        stop = count if stop is None else stop
        require_count("HFWeights.read", 0, start=start, stop=stop)
        if not start <= stop <= count:
            fail("HFWeights.read", "rows", f"within 0..{count}", f"{start}..{stop}")
        found = self._experts(stored, start, stop) if stored.axis else self._read(stored, stored.first + start, stored.first + stop)
        if dtype is None and any(self._parts(stored, name) for name in stored.names):
            dtype = torch.bfloat16
        if dtype is not None and stored.rule.wide:
            dtype = torch.promote_types(dtype, torch.float32)
        return found if dtype is None else found.to(dtype)

    def _read(self, stored: StoredLeaf, first: int, last: int) -> Tensor:
        order = stored.order(self.cfg)
        if order is None:
            return self._rows(stored, stored.names, first, last)
        return self._rows(stored, stored.names, 0, stored.shape[0])[order[first:last]].contiguous()

    def _experts(self, stored: StoredLeaf, start: int, stop: int) -> Tensor:
        """Read experts `start` to `stop` of a stacked leaf."""
        first, last, per = stored.first, stored.first + stored.leaf[1], len(stored.rule.names)
        if not stored.split:
            (name,), order = stored.names, stored.order(self.cfg)
            whole = self._entry(stored, name)[start:stop]
            whole = whole.mT if stored.rule.transposed else whole
            return whole[:, slice(first, last) if order is None else order[first:last]].clone(memory_format=torch.contiguous_format)
        each = [self._rows(stored, stored.names[e * per : (e + 1) * per], first, last) for e in range(start, stop)]
        return torch.stack(each) if each else self._rows(stored, stored.names[:per], 0, 0).new_empty((0, *stored.leaf[1:]))

    def _rows(self, stored: StoredLeaf, names: tuple[str, ...], first: int, last: int) -> Tensor:
        """Read rows `first` to `last` of tensors taken one below the other."""
        per, found = stored.shape[stored.axis] // len(stored.rule.names), []
        for i, name in enumerate(names):
            a, b = max(first - i * per, 0), min(last - i * per, per)
            if a < b or (first == last and i == 0):
                entry = self._entry(stored, name)
                found.append(entry[:, a:b].mT if stored.rule.transposed and len(stored.shape) > 1 else entry[a:b])
        rows = torch.cat(found).contiguous()
        return rows.squeeze(1) if stored.rule.depthwise else rows

    def _entry(self, stored: StoredLeaf, name: str) -> Any:
        found, name = self._parts(stored, name), self._prefix_free(name)
        return Coded(self._method, found, self._files) if found else self._files[name].get_slice(name)

    def _parts(self, stored: StoredLeaf, name: str) -> list[Part]:
        """The tensors that hold a quantised one; [] if it is not quantised."""
        return parts(self._method, self._prefix_free(name), stored.tensor_shape(), self._files) if self._method else []

    def _prefix_free(self, name: str) -> str:
        return name.removeprefix(self._prefix)


def open_hf(folder: str | os.PathLike[str], *, length: int | None = None, ignore: Sequence[str] = ()) -> HFWeights:
    """Open the checkpoint in a folder, until the end of a `with`. All errors of `from_hf` are raised here; no tensor is read.
    `folder`, `length` and `ignore` are as in `from_hf`.

    >>> import tempfile
    >>> from funcops import RopeConfig, chain, random
    >>> from funcops.models import DecoderConfig, decoder, open_hf, to_hf
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8), family="llama")
    >>> params = chain.init(decoder(cfg), key=random.key(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     to_hf(params, cfg, f"{folder}/model")
    ...     with open_hf(f"{folder}/model") as weights:
    ...         weights.read("blocks.1.mlp.down.weight", 8, 16).shape
    ...
    torch.Size([8, 48])
    """
    require_type("open_hf", "folder", folder, str, os.PathLike)
    if length is not None:
        require_count("open_hf", length=length)
    if not isinstance(ignore, (tuple, list)) or not all(isinstance(name, str) for name in ignore):
        fail("open_hf", "ignore", "a tuple of fields of config.json", describe(ignore), TypeError)
    root = _found(folder)
    where, said = f"open_hf: {root / 'config.json'}", _json(root / "config.json")
    for name in ignore:
        require(name in said, where, "ignore", f"of fields that it has ({', '.join(said)})", repr(name))
    method = coding(where, said)
    left_out = {"quantization_config", *ignore}
    cfg = read_config(where, {name: value for name, value in said.items() if name not in left_out}, length)
    family = family_of("open_hf", cfg.family)
    with contextlib.ExitStack() as stack:
        files = _files(root, stack)
        bare = bool(family.prefix) and not any(name.startswith(family.prefix) for name in files)
        weights = HFWeights(root, cfg, files, family.prefix if bare else "", stack, method)
        _check(weights, family)
        weights._stack = stack.pop_all()
    return weights


HUB_NAME = r"[\w.-]+/[\w.-]+"


def _found(folder: str | os.PathLike[str]) -> Path:
    """The folder, or the snapshot in the hub's cache if that is the name of a model which was downloaded."""
    root, name = Path(folder), os.fspath(folder)
    if not root.exists() and re.fullmatch(HUB_NAME, name):
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(name, local_files_only=True))
        except (ImportError, OSError, ValueError):  # no package, model or such name: the missing file's error says what to do
            pass
    return root


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        name, hint = os.fspath(path.parent), ""
        if not path.parent.exists() and re.fullmatch(HUB_NAME, name):
            hint = f" (for a model of the hub download it first: huggingface_hub.snapshot_download({name!r}) returns its folder)"
        raise FileNotFoundError(f"open_hf: folder must have the file {path.name}, got {name!r}{hint}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"open_hf: {path} must be a JSON file, got {error}") from error
    if not isinstance(found, dict):
        fail("open_hf", str(path), "a JSON object", describe(found), CheckpointError)
    return found


def _files(root: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The open file of each tensor."""
    if (root / SINGLE).is_file():  # before shards that are also there, as Hugging Face
        file = stack.enter_context(_opened("open_hf", root / SINGLE))
        return dict.fromkeys(file.keys(), file)
    if not (root / INDEX).is_file():
        raise FileNotFoundError(f"open_hf: folder must have {SINGLE} or {INDEX}, got {os.fspath(root)!r}")
    where: Any = _json(root / INDEX).get("weight_map")
    right = isinstance(where, dict) and all(
        isinstance(name, str) and name == Path(name).name not in ("", "..") for name in where.values()
    )
    if not right:
        said = "the name of a file of the folder for each tensor"
        fail("open_hf", f"weight_map of {root / INDEX}", said, describe(where), CheckpointError)
    shards = {name: stack.enter_context(_opened("open_hf", root / name)) for name in sorted(set(where.values()))}
    held = {name: set(file.keys()) for name, file in shards.items()}
    wrong = [f"{key} in {name}, which lacks it" for key, name in where.items() if key not in held[name]]
    wrong += [f"no entry for {key}, which is in {name}" for name, keys in held.items() for key in sorted(keys - where.keys())]
    if wrong:
        raise CheckpointError(f"open_hf: {root / INDEX} must name the file of each tensor, got\n  " + "; ".join(wrong))
    return {key: shards[name] for key, name in where.items()}


def _check(weights: HFWeights, family: Family) -> None:
    """Raise `CheckpointError`, which lists all wrong tensors, unless the files hold the config's model."""
    cfg, files = weights.cfg, weights._files
    wrong: dict[str, list[str]] = {"missing": [], "extra": [], "mis-shaped": [], "mis-typed": []}
    known: set[str] = set()
    for stored in weights._stored.values():
        for name in map(weights._prefix_free, stored.names):
            for part in weights._parts(stored, name) or [Part(name, stored.tensor_shape(), PLAIN)]:
                if part.name not in known:
                    known.add(part.name)
                    _check_part(part, files, wrong)
    skipped = [pattern.replace("{layers}", str(cfg.layers)) for pattern in family.skipped]
    for name in sorted(set(files) - known):
        if cfg.tied and name == "lm_head.weight":
            _check_tied(weights)
        elif not any(re.fullmatch(pattern, weights._prefix + name) for pattern in skipped):
            wrong["extra"].append(f"{name} {list(files[name].get_slice(name).get_shape())}")
    said = "".join(f"\n  {kind}: {few(names, 10, '; ')}" for kind, names in wrong.items() if names)
    if said:
        raise CheckpointError(f"open_hf: {weights.folder} must hold the model of its config.json, got{said}")


def _check_part(part: Part, files: Mapping[str, Any], wrong: dict[str, list[str]]) -> None:
    if part.name not in files:
        wrong["missing"].append(f"{part.name} {part.shape}")
        return
    entry = files[part.name].get_slice(part.name)
    got, code = list(entry.get_shape()), entry.get_dtype()
    if got != part.shape:
        wrong["mis-shaped"].append(f"{part.name} {part.shape}, got {got}")
    if code not in part.codes:
        said = " or ".join(short(CODES[one]) if one in CODES else one for one in part.codes)
        wrong["mis-typed"].append(f"{part.name} {said}, got {code}")


def _check_tied(weights: HFWeights) -> None:
    """Check that a head that a checkpoint holds although it is tied equals the embedding."""
    head = weights._files["lm_head.weight"].get_tensor("lm_head.weight")
    embed = weights.read("embed.weight")
    if head.shape != embed.shape or head.dtype is not embed.dtype or not torch.equal(head, embed):
        fail("open_hf", "lm_head.weight", "the embedding's weight, as config.json ties them", "another tensor", CheckpointError)


def from_hf(
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    length: int | None = None,
    ignore: Sequence[str] = (),
) -> tuple[Any, DecoderConfig]:
    """Read params and config of the checkpoint in a folder: `chain.fwd(params, decoder_x(cfg, ids, dtype), decoder(cfg))` gives its
    logits. `dtype`: of the params, default as in the files; the bias of a router stays in float32 at least. `length`: the longest
    sequence that will occur, for scalings of rope that depend on it (dynamic, longrope). `ignore`: fields of config.json to be read
    as if they were absent. `folder` may be the hub's name of a model that was downloaded.

    All files are checked before a tensor is read. Raises `FileNotFoundError` for a missing file; `ValueError` or `TypeError` for an
    unknown family, or a field of config.json that is unknown or has an unsupported value; `CheckpointError` for a file that is cut
    short or is not a safetensors file, and one that lists the tensors that are missing, extra, of another shape, or of a dtype that
    ops do not compute in.

    >>> import tempfile, torch
    >>> from funcops import RopeConfig, chain, random
    >>> from funcops.models import DecoderConfig, decoder, from_hf, to_hf
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8), family="llama")
    >>> params = chain.init(decoder(cfg), key=random.key(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     to_hf(params, cfg, f"{folder}/model")
    ...     again, same = from_hf(f"{folder}/model", dtype=torch.bfloat16)
    ...
    >>> same == cfg, again["embed"].weight.dtype
    (True, torch.bfloat16)
    """
    require_dtype("from_hf", dtype)
    require_device("from_hf", device)
    with open_hf(folder, length=length, ignore=ignore) as weights:
        cfg = weights.cfg

        def leaf(path: str, like: Tensor | None) -> Tensor | None:
            return None if like is None else weights.read(path, dtype=dtype).to(device)

        params = tree_map_with_path(leaf, decoder(cfg).abstract())
    if "gemma" not in family_of("from_hf", cfg.family).sections:
        return params, cfg
    rounded = float(torch.tensor(cfg.embed_scale, dtype=params["embed"].weight.dtype))  # as Hugging Face's Gemma has it
    return params, dataclasses.replace(cfg, embed_scale=rounded)


def to_hf(
    params: Any,
    cfg: DecoderConfig,
    folder: str | os.PathLike[str],
    *,
    fields: Mapping[str, Any] | None = None,
    shard_bytes: int = 5 * 10**9,
    quant_method: str | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> None:
    """Write a checkpoint of family `cfg.family`: config.json, with `fields` that change nothing here (such as "eos_token_id"), and
    files of at most `shard_bytes`, or one tensor. The folder must be new or empty; it is written whole or not at all. Tokenizer and
    generation_config.json are not written: copy them from the original checkpoint. `params` may have "loss": None.

    Weights in codes, from `quantize_params` or `quantize_weights`, are written as they are, by the layout `quant_method`: "fp8"
    (DeepSeek's), "compressed-tensors" or "modelopt", by default the first that has their format. `scale_dtype`: float8_e8m0fnu
    stores powers of two of "fp8" in 8 bits.

    Raises before anything is written: `ValueError` for a config that the family cannot express or unknown `fields`,
    `CheckpointError` for params that are not `decoder(cfg)`'s, `FileExistsError` for a folder that is not empty.

    >>> import os, tempfile
    >>> from funcops import RopeConfig, chain, random
    >>> from funcops.models import DecoderConfig, decoder, to_hf
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8), family="llama")
    >>> params = chain.init(decoder(cfg), key=random.key(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     to_hf(params, cfg, f"{folder}/model")
    ...     sorted(os.listdir(f"{folder}/model"))
    ...
    ['config.json', 'model.safetensors']
    """
    require_type("to_hf", "cfg", cfg, DecoderConfig)
    require_type("to_hf", "folder", folder, str, os.PathLike)
    require_type("to_hf", "fields", fields, Mapping, type(None))
    require_count("to_hf", shard_bytes=shard_bytes)
    said, target = write_config(cfg), Path(os.path.realpath(folder))
    for name in fields or {}:
        if name not in IGNORED:
            fail("to_hf", "fields", f"among {', '.join(IGNORED)}", repr(name))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"to_hf: folder must be new or empty, got {os.fspath(folder)!r}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"to_hf: folder must be in an existing one, got {os.fspath(folder)!r}")
    given = _checked(params, cfg)
    tensors, coded = _tensors(given, cfg, quant_method, scale_dtype)
    said = {**said, "torch_dtype": short(given["embed.weight"].dtype), **coded, **(fields or {})}
    beside = target.with_name(f".{secrets.token_hex(8)}.part")
    beside.mkdir()
    try:
        _write(tensors, beside, shard_bytes)
        (beside / "config.json").write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def _checked(params: Any, cfg: DecoderConfig) -> dict[str, Any]:
    """Check that params are `decoder(cfg)`'s, with or without a loss, and return their leaves by path."""
    params = without_loss(params)
    wanted = {path: None if t is None else list(t.shape) for path, t in paths(decoder(cfg).abstract()).items()}
    nodes = {path: codes_of(path, node) for path, node in paths(params, is_leaf=stands_for_one).items()}
    got = {path: shape_of(node) for path, node in nodes.items()}
    wrong = [f"{path} {wanted.get(path)}, got {got.get(path)}" for path in {**wanted, **got} if wanted.get(path) != got.get(path)]
    if any(".both.lora." in path for path in got):
        fail("to_hf", "params", "decoder(cfg)'s, without adapters (lora.merge)", "adapters beside them", CheckpointError)
    if wrong:
        raise CheckpointError("to_hf: params must be decoder(cfg)'s, got\n  " + "; ".join(wrong))
    found = {path: t for path, t in nodes.items() if t is not None}
    if not isinstance(found["embed.weight"], Tensor):
        fail("to_hf", "params.embed.weight", "a tensor", "codes", CheckpointError)
    for path, t in found.items():
        if t.dtype not in FLOATS:
            fail("to_hf", f"params.{path}", f"of {' or '.join(map(short, FLOATS))}", short(t.dtype), CheckpointError)
    return found


def _tensors(
    given: dict[str, Any], cfg: DecoderConfig, method: str | None, scale_dtype: torch.dtype
) -> tuple[dict[str, Unwritten], dict[str, Any]]:
    """The tensors of a checkpoint by name, and the fields of config.json about those in codes."""
    every = [one for one in dict.fromkeys(stored_leaves("to_hf", cfg).values()) if not one.first]
    found, said = coded_tensors(given, every, {stored: stored.order(cfg) for stored in every}, method, scale_dtype)
    for stored in every:
        if isinstance(one := given[stored.paths[0]], Tensor):
            size = math.prod(stored.tensor_shape()) * one.itemsize
            for i, name in enumerate(stored.names):
                found[name] = Unwritten(size, functools.partial(_made, given, cfg, stored, i))
    return found, said


def _made(given: dict[str, Tensor], cfg: DecoderConfig, stored: StoredLeaf, i: int) -> Tensor:
    """The i-th of the tensors that store some leaves: a view, unless rows of several leaves or in another order are needed."""
    axis, per, order = stored.axis, len(stored.rule.names), stored.order(cfg)
    leaves = [given[path].detach() for path in stored.paths]
    whole = leaves[0] if len(leaves) == 1 else torch.cat(leaves, axis)
    whole = whole if order is None else whole.index_select(axis, order.argsort().to(whole.device))
    part = whole[i // per].chunk(per)[i % per] if stored.split else whole.chunk(per, axis)[i]
    part = part.unsqueeze(1) if stored.rule.depthwise else part
    return (part.mT if stored.rule.transposed and part.dim() > 1 else part).contiguous()


def _write(tensors: dict[str, Unwritten], folder: Path, shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name in sorted(tensors):
        size = tensors[name].nbytes
        if shards[-1] and size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    files = [SINGLE] if len(shards) == 1 else [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        save({name: tensors[name].make() for name in names}, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(one.nbytes for one in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": {key: n for n, s in zip(files, shards, strict=True) for key in s}}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
