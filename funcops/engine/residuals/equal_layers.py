"""Equal layers of a report as one row: `blocks.0..127.mlp.act.x (x 128)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


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
    return ".".join([a if a == b else f"{a}..{b}" for a, b in zip(first.split("."), last.split("."), strict=True)])
