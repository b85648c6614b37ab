"""`report`: the tensors kept for a backward, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from funcops.engine.contract.marks import Gone
from funcops.engine.contract.schema import RECOMPUTE, Phase, Saved
from funcops.engine.errors import describe, fail, join_path, require_count, require_flag, short, size_of
from funcops.engine.residuals.forms import AT, Packed, has_form
from funcops.engine.trees import paths, tensors

__all__ = ["Report", "Row", "kept_values", "report", "storage_of", "storages"]


class Layers(NamedTuple):
    """`row` stands for `times` equal layers: its path has their first and last number, its bytes are their sum. `layer`: the number
    of a single layer."""

    row: Any
    times: int = 1
    layer: int = 0


def merged(rows: Sequence[Any]) -> list[Layers]:
    """The rows, with one row for each run of layers that keep the same under the same name."""
    found = [Layers(row) for row in rows]
    for nth in reversed(range(max((len(_numbers(row.path)) for row in rows), default=0))):  # inner repeats first
        found = [one for group in _alike(found, nth) for one in _runs(group)]
    return found


def _numbers(path: str) -> list[int]:
    """The positions of layer numbers in a path."""
    return [at for at, part in enumerate(path.split(".")) if part.isdigit()]


def _alike(found: list[Layers], nth: int) -> list[list[Layers]]:
    """Groups of rows whose paths differ only in their n-th number, in the order of each group's first row."""
    groups: dict[Any, list[Layers]] = {}
    for one in found:
        indices, parts = _numbers(one.row.path), one.row.path.split(".")
        if len(indices) <= nth:
            groups[one.row.path] = [one]
            continue
        layer, parts[indices[nth]] = int(parts[indices[nth]]), "*"
        groups.setdefault((tuple(parts), indices[nth]), []).append(one._replace(layer=layer))
    return list(groups.values())


def _runs(group: list[Layers]) -> Iterator[Layers]:
    """Merge consecutive layers that keep the same."""
    run = group[:1]
    for one in group[1:]:
        # a gap ends the run, whose path shows only the first and the last number
        if one.layer == run[-1].layer + 1 and _same(run, one):
            run.append(one)
        else:
            yield _as_one(run)
            run = [one]
    yield _as_one(run)


def _same(run: list[Layers], one: Layers) -> bool:
    """Whether a layer keeps the same as a run's layers. Their owners are equal except for numbers that count with the layer's."""
    # the first as well: a number that stood still and now moves on would pass between two neighbours
    three = run[0], run[-1], one
    if len({(a.row.shape, a.row.dtype, a.row.bytes, a.row.needed_by, a.times) for a in three}) > 1:
        return False
    owners = [a.row.alias_of.split(".") for a in three]
    if len({len(owner) for owner in owners}) > 1:
        return False
    steps = zip(*owners, strict=True)
    return all(
        len(set(parts)) == 1 or len({_less_layer(part, a.layer) for part, a in zip(parts, three, strict=True)}) == 1
        for parts in steps
    )


def _less_layer(part: str, layer: int) -> Any:
    return int(part) - layer if part.isdigit() else part


def _as_one(run: list[Layers]) -> Layers:
    first, last = run[0], run[-1]
    if len(run) == 1:
        return first
    path, owner = (_ranged(getattr(first.row, name), getattr(last.row, name)) for name in ("path", "alias_of"))
    row = first.row._replace(path=path, bytes=sum(one.row.bytes for one in run), alias_of=owner)
    return Layers(row, sum(one.times for one in run))


def _ranged(first: str, last: str) -> str:
    return ".".join([a if a == b else f"{a}-{b}" for a, b in zip(first.split("."), last.split("."), strict=True)])


class Row(NamedTuple):
    """One kept tensor. `bytes` is 0 if it shares the storage of `alias_of`: a parameter, an input, an earlier row. A tensor kept in
    another form, such as a `QTensor`, has the original's shape, and the form's name as `dtype`. `place`: "here", "host", "file"
    or the name of another."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    alias_of: str
    needed_by: str
    place: str = "here"


_HEAD = ("path", "shape", "dtype", "bytes", "share", "alias of", "needed by")


class Report:
    """A table of kept tensors with totals. `str()` and notebooks show equal layers as one row, unless it was made with `expand`;
    `rows` and `dicts()` return the data of every tensor."""

    def __init__(self, rows: list[Row], aliased_bytes: int, tokens: int | None, expand: bool = False) -> None:
        self.rows = rows
        self.expand = expand
        self.kept_bytes = sum(row.bytes for row in rows)
        self.aliased_bytes = aliased_bytes
        self.tokens = tokens

    @property
    def bytes_per_token(self) -> float | None:
        return self.kept_bytes / self.tokens if self.tokens else None

    @property
    def places(self) -> dict[str, int]:
        """The kept bytes by place: "here", where the op computes, in the memory of its "host", in a "file", and in each other place
        by its name, such as "rank 1 of pp"."""
        return {
            place: sum([row.bytes for row in self.rows if row.place == place])
            for place in dict.fromkeys(["here", "host", "file", *[row.place for row in self.rows]])
        }

    def dicts(self) -> list[dict[str, Any]]:
        return [row._asdict() for row in self.rows]

    def share(self, row: Row) -> float:
        """The row's share of all kept bytes."""
        return row.bytes / self.kept_bytes if self.kept_bytes else 0.0

    def plot(self, path: str | None = None, *, depth: int = 1) -> Any:
        """Plot a stacked bar for every step, `depth` names deep: the bytes of each field. Writes PNG, SVG, ... to `path` if given,
        and returns matplotlib's figure. Raises `ImportError` without matplotlib (the extra `examples`)."""
        from funcops.engine.residuals.picture import stacked_bars

        return stacked_bars(self.rows, self.totals(), path, depth)

    def totals(self) -> str:
        per_token = f", {size_of(self.bytes_per_token)} per token" if self.bytes_per_token is not None else ""
        tensors = "1 tensor" if len(self.rows) == 1 else f"{len(self.rows)} tensors"
        return f"kept {size_of(self.kept_bytes)} in {tensors}, aliased {size_of(self.aliased_bytes)}{per_token}"

    def _cells(self) -> list[tuple[str, ...]]:
        found = [Layers(row) for row in self.rows] if self.expand else merged(self.rows)
        shown = [(one.row.path + (f" (x {one.times})" if one.times > 1 else ""), one.row) for one in found]
        return [
            (path, str(list(r.shape)), r.dtype, size_of(r.bytes), f"{self.share(r):.1%}", r.alias_of, r.needed_by)
            for path, r in shown
        ]

    def __str__(self) -> str:
        table = [_HEAD, *self._cells()]
        widths = [max(len(line[i]) for line in table) for i in range(len(_HEAD))]
        lines = [
            "  ".join(c.rjust(w) if i in (3, 4) else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()
            for line in table
        ]
        return "\n".join([*lines, self.totals()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html

        def line(cells: tuple[str, ...], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        head = line(_HEAD, "th")
        body = "".join(line(cells, "td") for cells in self._cells())
        return f"<table>{head}{body}</table><p>{html.escape(self.totals())}</p>"


def report(residuals: Any, params: Any = None, x: Any = None, *, tokens: int | None = None, expand: bool = False) -> Report:
    """A table of the tensors that `residuals` (or pending) hold, by path. Printed, layers that keep the same are one row
    (`blocks.0-127.norm.rstd (x 128)`) unless `expand`.

    Bytes are the size of the storage behind a tensor, counted once; a tensor that shares the storage of a leaf of `params`
    or `x`, or of an earlier row, is an alias and counts 0 bytes. `tokens` defaults to the rows of the first tensor in x (for
    integer ids, to all its elements; for a dict, such as the extras of an x, to none). To report the residuals of several ops,
    pass them in a dict.

    `needed by`: the halves of the backward that read the tensor, `dgrad` and `wgrad`, and `recompute`, a recomputation of the
    forward. A path with brackets, such as `norm().x`, is a field from which the y of step `norm` is recomputed: a pending keeps it
    instead of y, which the weight gradient of the next step reads. Raises `TypeError` for anything but residuals or pending.

    >>> import torch
    >>> from funcops import RMSNormConfig, report, rms_norm
    >>> params, x = rms_norm.init(RMSNormConfig(64)), torch.ones(32, 64)
    >>> y, residuals = rms_norm.fwd(params, x, RMSNormConfig(64))
    >>> print(report(residuals, params, x))
    path    shape     dtype        bytes   share  alias of       needed by
    x       [32, 64]  float32    0 bytes    0.0%  x              dgrad
    weight  [64]      float32    0 bytes    0.0%  params.weight  dgrad
    rstd    [32, 1]   float32  128 bytes  100.0%                 dgrad
    kept 128 bytes in 3 tensors, aliased 8.25 KiB, 4 bytes per token
    """
    if tokens is not None:
        require_count("report", tokens=tokens)
    require_flag("report", expand=expand)
    if residuals is None:
        return Report([], 0, tokens, expand)
    _check_kept(residuals, "residuals")
    owners: dict[int, str] = {}
    for name, tree in (("params", params), ("x", x)):
        for path, value in _values(tree):
            # params are asked before x, so a weight that is in both is shown as the weight
            owners |= {storage: join_path(name, path) for storage in storages(value) if storage not in owners}
    rows, aliased, away = [], 0, any([not t.is_cpu for t in tensors([params, x])])
    for path, value, phases in kept_values(residuals):
        parts = storages(value)
        own = {storage: size for storage, size in parts.items() if storage not in owners}
        aliased += sum(parts.values()) - sum(own.values())
        owner = "" if own else next((owners[storage] for storage in parts), "")
        # of a node of several tensors each has a form of its own
        moved = next((one for one in paths(value, is_leaf=_packed).values() if _packed(one)), None)
        # of `remat`, a tensor of the host beside params on a device
        place = moved.place if moved is not None else "host" if away and value.device.type == "cpu" else "here"
        dtype = (
            short(value.dtype) if isinstance(value, Tensor) else value.form + AT.get(place, f" on {place}") * (moved is not value)
        )
        rows.append(Row(path, tuple(value.shape), dtype, sum(own.values()), owner, phases, place))
        owners.update(dict.fromkeys(own, path))
    return Report(rows, aliased, tokens if tokens is not None else _tokens(x), expand)


def _check_kept(node: Any, name: str) -> None:
    # residuals of a combinator are a dict, too, but one that can be given away
    if isinstance(node, dict) and node and not hasattr(node, "give"):
        for key, child in node.items():
            _check_kept(child, join_path(name, key))
    elif node is not None and not isinstance(node, Saved) and not hasattr(node, "give"):
        fail("report", name, "residuals or pending of an op", describe(node), TypeError)
    elif getattr(node, "gone", False) or isinstance(getattr(node, "_marks", None), Gone):
        node.complain("report")  # type: ignore[union-attr]


def _packed(value: Any) -> bool:
    return type(value) is Packed


def _values(tree: Any) -> list[tuple[str, Any]]:
    """The tensors of a tree, and the nodes that stand for one, by path."""
    return [(path, value) for path, value in paths(tree, is_leaf=has_form).items() if isinstance(value, Tensor) or has_form(value)]


def kept_values(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """All tensors in residuals or pending, and nodes that stand for one: the path, the value, and the phases that read it."""
    if node is None:
        return
    if isinstance(node, Saved):
        for name, field in node.fields.items():
            # a recomputation reads the field only where a program recomputes y
            readers = [phase for phase in Phase if phase in field.needed_by and (node.needs.recompute or phase is not RECOMPUTE)]
            phases = "+".join((phase.name or "").lower() for phase in readers)
            for path, value in _values(getattr(node, name)):
                yield join_path(prefix + name, path), value, phases
        return
    for name, child in node.items():
        yield from kept_values(child, f"{prefix}{name}.")


def storage_of(t: Tensor) -> int:
    """The identity of a tensor's storage, which it shares with its views."""
    # not the address of the data, which is 0 for every tensor on the meta device
    return t.untyped_storage()._cdata


def storages(tree: Any) -> dict[int, int]:
    """The bytes of the storages of a tree's tensors."""
    return {storage_of(t): int(t.untyped_storage().nbytes()) for t in tensors(tree)}


def _tokens(x: Any) -> int | None:
    # of extras alone none: positions may be shared by the rows of a batch
    first = None if isinstance(x, dict) else next(iter(tensors(x)), None)
    if first is None:
        return None
    return first.numel() // first.shape[-1] if first.is_floating_point() and first.dim() and first.shape[-1] else first.numel()
