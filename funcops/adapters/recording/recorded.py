"""`recording`: a digest of every value that the steps of a run compute, by path and half."""

from __future__ import annotations

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.adapters.recording.digest import Digest
from funcops.adapters.recording.modules import told_by_hooks
from funcops.adapters.recording.parts import Layouts
from funcops.adapters.recording.taken import Digests
from funcops.engine.backend import notes, scopes
from funcops.engine.errors import NonFiniteError, fail, in_html, on_screen, require_flag, require_type

VERSION = 1
AGAIN = " again"  # ends the name of a value that was recomputed more than once in a turn, to other bits


class Recorded(NamedTuple):
    """A value of a step: the step's `path`, the `half` that ran, the value's `name` there, and its `turn`: how often that path,
    half and name were there before, as one a microbatch. `part`: which part of the value, if only one was digested, such as "1 of
    2 along 0". `ran`: the path of the call, which has several steps if a rule ran them as one."""

    path: str
    half: str
    name: str
    turn: int
    part: str
    shape: tuple[int, ...]
    dtype: str
    ran: str
    digest: Digest

    @property
    def key(self) -> tuple[str, str, str, int, str]:
        return self[:5]

    @property
    def finite(self) -> bool:
        return not self.digest.nonfinite

    @property
    def place(self) -> str:
        """The value in words: `blocks.0.mlp.up: dgrad, dx`."""
        turn, part = f", turn {self.turn}" * bool(self.turn), f", part {self.part}" * bool(self.part)
        step = f"{self.path}: {self.half}" if self.path else self.half
        return f"{step}, {self.name}{turn}{part}"


class Recording:
    """The result of `recording`. `rows`: each value's digest, in the order in which they ran. They are there when the block has
    ended."""

    def __init__(self, rows: Sequence[Recorded] = ()) -> None:
        require_type("Recording", "rows", rows, list, tuple)
        for i, row in enumerate(rows):
            require_type("Recording", f"rows[{i}]", row, Recorded)
        self.rows = tuple(rows)

    def first_nonfinite(self) -> Recorded | None:
        """The first value in which something is infinite or NaN, in the order of execution; None if all are finite."""
        return next((row for row in self.rows if not row.finite), None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as JSON lines, with numbers in full."""
        lines = [json.dumps({"funcops recording": VERSION})]
        for row in self.rows:
            # a JSON number must be finite
            one = row._asdict() | {"digest": [f"{row.digest.hash:016x}", *(v.hex() for v in _numbers(row.digest))]}
            lines.append(json.dumps(one))
        Path(path).write_text("\n".join([*lines, ""]))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """A recording that `save` wrote. Raises `ValueError` for any other file."""
        try:
            head, *lines = Path(path).read_text().splitlines()
            if json.loads(head) != {"funcops recording": VERSION}:
                raise ValueError(head[:80])
            return cls([_loaded(json.loads(line)) for line in lines])
        except (ValueError, TypeError, KeyError) as error:
            fail("Recording.load", "path", f"a file of Recording.save, version {VERSION}", f"{path}: {error}")

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        """A line for each value: where, its shape and dtype, and what its digest says."""
        head = ("value", "shape", "hash", "max |v|", "rms", "zeros", "not finite")
        table = [head, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table)

    def __repr__(self) -> str:
        return on_screen(str(self), rows=60)

    def _repr_html_(self) -> str:
        return in_html(str(self))


def _numbers(digest: Digest) -> list[float]:
    return [*digest[1:5], *digest.sketch]


def _loaded(one: dict[str, Any]) -> Recorded:
    bits, *numbers = one.pop("digest")
    found = Digest.made(int(bits, 16), [float.fromhex(v) for v in numbers])
    return Recorded(**one | {"shape": tuple(one["shape"])}, digest=found)


def _cells(row: Recorded) -> tuple[str, ...]:
    d = row.digest
    shares = (f"{share:.1%}" if share else "" for share in (d.zeros, d.nonfinite))
    rms = math.sqrt(d.mean_square) if d.mean_square >= 0 else math.nan
    return row.place, f"{row.dtype}{list(row.shape)}", f"{d.hash:016x}", f"{d.largest:.4g}", f"{rms:.4g}", *shares


class Taker(Digests):
    """Takes what the steps of a thread tell, for its recording; the digests are read once, at the end."""

    def __init__(self, stops: bool, layouts: Layouts) -> None:
        super().__init__(layouts)
        self.stops = stops
        self.thread = threading.get_ident()
        self.turns: Counter[tuple[str, str, str]] = Counter()

    def __call__(self, found: list[notes.Told], kept: Any) -> None:
        if taker() is not self:
            return
        for told in found:
            self.take(told)
            if self.stops and (last := self._row(self.words[-1].cpu(), self.about[-1])).digest.nonfinite:
                raise NonFiniteError(last.place, {t.name: t.value for t in found}, kept)

    def note(self, about: Any, words: Tensor) -> None:
        path, half, name, part, *rest = about
        key = path, half, name
        super().note((*key, self.turns[key], part, *rest), words)
        # the whole comes after its parts
        self.turns[key] += not part

    def finished(self) -> list[Recorded]:
        rows = {device: iter(words.cpu()) for device, words in self.stacked().items()}
        found = [self._row(next(rows[words.device]), about) for about, words in zip(self.about, self.words, strict=True)]
        return list(_once(found))

    def _row(self, words: Tensor, about: Any) -> Recorded:
        return Recorded._make((*about, Digest.of(words)))


def taker() -> Taker:
    """The innermost recording's of this thread; of a thread without one the last one's."""
    every = [one for one in notes.takers if isinstance(one, Taker)]
    return [*every, *(one for one in every if one.thread == threading.get_ident())][-1]


def _once(rows: list[Recorded]) -> Iterator[Recorded]:
    """The rows, without what was told again: the dy of a rule that declined it, which the calls one by one are given, too; and a y
    that each of its readers recomputes, whose turn is the turn of the backward that comes. One with other bits than before in
    that turn is "y again"."""
    last: dict[Any, int] = {}
    turns: Counter[Any] = Counter()
    for row in rows:
        given = row.name.startswith("dy")
        if given or row.half == scopes.RECOMPUTE:
            turn = 0 if given else turns[row.path, "dy"]
            value = row.path, row.name, row.part, turn
            if last.get(value) == row.digest.hash:
                continue
            last[value] = row.digest.hash
            number = turns[value]
            turns[value] += 1
            if given:
                row = row._replace(turn=number)
                turns[row.path, "dy"] = number + 1
            else:
                row = row._replace(turn=turn, name=row.name + AGAIN * min(number, 1) + f" {number}" * (number > 1))
        yield row


def recording(
    *, module: Any = None, like: Sequence[Recording] = (), stop_at_nonfinite: bool = False
) -> AbstractContextManager[Recording]:
    """A block that notes a digest of every value that the steps of programs compute: y, and in the backward dy, dx, the gradients
    of params, and each y that is recomputed.

    A digest is a hash of the bits, the largest |v|, the mean of v^2, the shares of zeros and of values that are not finite, and a
    sketch, in 88 bytes: no value is kept, and none is held longer. It is computed on the value's device, and read at the end of the
    block. `named_scope` names any other part of a run, and `note` tells a value of yours.

    `module`: a torch.nn module, such as a model of transformers, whose parts tell by hooks what they compute, by their paths; dy
    and dx of those alone that give a tensor or a tuple.
    `like`: recordings of all ranks of a run over ranks: of a value that is whole here, each part in the shapes of the ranks is
    digested, too. `stop_at_nonfinite`: raise `NonFiniteError` at the first value that is infinite or NaN, with the step's values
    and residuals; this reads every digest at once, so it waits for the device.

    Raises `TypeError` for a module or recordings of another type.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, SoftcapConfig, Step, chain, linear, random, recording, softcap
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 8)), Step("cap", softcap, SoftcapConfig(30.0))))
    >>> params = chain.init(cfg, key=random.key(0))
    >>> with recording() as run:
    ...     y, residuals = chain.fwd(params, torch.ones(2, 4), cfg)
    ...     dparams, dx = chain.bwd(residuals, y, cfg)
    ...
    >>> [row.place for row in run.rows][:4]
    ['up: fwd, y', 'cap: fwd, y', 'cap: dgrad, dy', 'cap: dgrad, dx']
    """
    require_flag("recording", stop_at_nonfinite=stop_at_nonfinite)
    if module is not None:
        require_type("recording", "module", module, torch.nn.Module)
    require_type("recording", "like", like, list, tuple)
    for i, rank in enumerate(like):
        require_type("recording", f"like[{i}]", rank, Recording)
    return _recording(Taker(stop_at_nonfinite, Layouts(like)), module)


@contextmanager
def _recording(own: Taker, module: Any) -> Iterator[Recording]:
    found = Recording()
    with ExitStack() as ends:
        ends.enter_context(scopes.told(scopes.NOTED))
        if module is not None:
            ends.enter_context(told_by_hooks(module))
        notes.takers.append(own)
        try:
            yield found
        finally:
            notes.takers.remove(own)
            found.rows = tuple(own.finished())
