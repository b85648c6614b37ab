"""Programs: the collectives that a rank will call, as data; and the handshake, in which ranks compare programs before they run.

If a rank sends another shape, or in another order, Gloo aborts and NCCL hangs. A program is recorded by running the step under the
meta device, and compared by group. No message of the step is sent, whatever it sends: see `_Recorder`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from funcops.distributed import comm
from funcops.distributed.agreement import Entry, deadlock, difference
from funcops.distributed.mesh import Axis, Mesh
from funcops.engine.errors import require, require_callable, require_type, short
from funcops.engine.trees import tensors, tree_map_tensors


class Watch:
    """The axes whose `rank` has been read, in any run so far, and the meshes of these runs. What a run reads may come from a cache
    that an earlier run filled, so a rank counts as equal to an earlier one only along all axes that any run has read."""

    def __init__(self) -> None:
        read: dict[str, None] = {}

        class Watched(Axis):
            """An axis that notes when its `rank` is read; comparing it and hashing it, as caches do, reads nothing."""

            def __getattribute__(self, name: str) -> Any:
                if name == "rank":
                    read[object.__getattribute__(self, "name")] = None
                return object.__getattribute__(self, name)

            def __eq__(self, other: object) -> bool:
                return type(other) is Watched and other._all() == self._all()

            def __hash__(self) -> int:
                return hash(self._all())

            def _all(self) -> tuple[Any, ...]:
                return tuple([object.__getattribute__(self, name) for name in ("name", "size", "rank", "group")])

        self.read, self.axis, self.runs, self.known = read, Watched, list[Mesh](), dict[Any, Mesh]()
        self.keyed_by = 0  # how many axes make a key of `known`

    def mesh(self, mesh: Mesh) -> Mesh:
        """The mesh with axes that are watched, for a run on it."""
        self.runs.append(mesh)
        before = dict(self.read)
        axes = tuple([self.axis(axis.name, axis.size, axis.rank, axis.group) for axis in mesh.axes])
        made = Mesh(axes=axes, device=mesh.device)
        self.read.clear()  # of what the checks of a new axis have read
        self.read.update(before)
        return made

    def equal(self, mesh: Mesh) -> Mesh | None:
        """The mesh of an earlier run whose rank no run can tell from this one's, or None."""
        if self.keyed_by != len(self.read):
            self.keyed_by, self.known = len(self.read), {self._key(run): run for run in reversed(self.runs)}
        elif self.runs:
            self.known.setdefault(self._key(self.runs[-1]), self.runs[-1])
        return self.known.get(self._key(mesh))

    def _key(self, mesh: Mesh) -> tuple[tuple[str, int], ...]:
        return tuple([(axis.name, axis.rank) for axis in mesh.axes if axis.name in self.read])


if torch.distributed.is_available():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as _Waiting  # waits when an operator reads it
else:
    _Waiting = None  # type: ignore[assignment,misc]

NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}
FUNCTIONAL = "one that sends by funcops.dist, or by torch's functional collectives, of all ranks of an axis"
PAIRS = ("isend", "irecv", "batch_p2p_ops")  # messages that not all ranks of a group take part in


class Collective(NamedTuple):
    """A collective, on which its group must agree. `shape`: of this rank's input; its first dimension is None in an all_to_all,
    whose ranks may have different numbers of rows. `how`: the kind of reduction, the rank of a broadcast, and the tensors that are
    sent together with the first. `sends`, `receives`: the rows of an all_to_all for each rank, and from each; none if they are
    data, as in `dispatch`.

    >>> import torch
    >>> from funcops.dist import Collective
    >>> print(Collective("all_reduce", "tp", (3,), torch.float32))
    all_reduce of float32[3]
    """

    op: str
    group: str
    shape: tuple[int | None, ...]
    dtype: torch.dtype
    how: str = ""
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    @staticmethod
    def of(func: Any, args: Sequence[Any]) -> Collective | None:
        """The collective of an operator's call; None if the call sends nothing. Raises `ValueError` for messages whose order ranks
        cannot compare."""
        namespace = getattr(func, "namespace", "")
        if namespace != "_c10d_functional":
            require(namespace != "c10d", "record", "step", FUNCTIONAL, func)
            return None
        name, group, at = _arguments(func)
        require(name not in PAIRS, "record", "step", FUNCTIONAL, func)
        if group < 0:  # wait_tensor
            return None
        first, *others = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        how = ", ".join([*([str(args[at])] if at >= 0 else []), *(f"with {short(t.dtype)}{list(t.shape)}" for t in others)])
        shape, receives, sends = tuple(first.shape), *(tuple(args[1:3]) if name == "all_to_all" else ((), ()))
        if sends:
            shape = (None, *shape[1:])
        if len(sends) == 1:  # not known: see funcops.distributed.comm.Parts
            sends = receives = ()
        return Collective(name, args[group], shape, first.dtype, how, tuple(sends), tuple(receives))

    def __str__(self) -> str:
        size = ", ".join("*" if n is None else str(n) for n in self.shape)
        return f"{self.op}{f' ({self.how})' if self.how else ''} of {short(self.dtype)}[{size}]"

    @property
    def entry(self) -> Entry:
        return Entry(str(self), self.sends, self.receives)


@functools.cache
def _arguments(func: Any) -> tuple[str, int, int]:
    """The name of an operator, and the positions of its arguments for group and for the reduction or the source; -1 if it lacks
    one."""
    names = [a.name for a in func._schema.arguments]
    name = func._schema.name.partition("::")[2].removesuffix("_").removesuffix("_out")  # in place the message is the same
    how = "src" if "src" in names else "reduce_op"
    return NAMES.get(name, name), *[names.index(n) if n in names else -1 for n in ("group_name", how)]


class Program(NamedTuple):
    """The collectives of a step, in order; the positions of the ones that it never waits for; and of the exposed ones: no product
    (of matrices, an attention, a convolution) runs between start and wait, so nothing hides them."""

    sent: tuple[Collective, ...]
    unfinished: tuple[int, ...] = ()
    exposed: tuple[int, ...] = ()

    def over(self, axis: Axis) -> list[Entry]:
        return [one.entry for one in self.sent if one.group == axis.group]

    def groups(self, mesh: Mesh) -> list[tuple[str, int]]:
        """The group of each collective: the name of its axis, and the first rank along it."""
        known = {axis.group: (axis.name, mesh.peers(axis)[0]) for axis in mesh.axes if axis.size > 1}
        return [known[one.group] for one in self.sent]

    def on(self, mesh: Mesh, other: Mesh) -> Program:
        """The program, which was recorded for a rank of `other`, for an equal rank of this mesh."""
        if mesh.rank == other.rank:
            return self
        groups = {there.group: here.group for here, there in zip(mesh.axes, other.axes, strict=True)}
        return self._replace(sent=tuple([one._replace(group=groups[one.group]) for one in self.sent]))


class _Recorder(TorchDispatchMode):
    """Notes collectives, and sends none: their arguments are taken to the meta device, wherever the step has made them. A tensor
    that is on a device, captured or made there by name, follows where an operator meets it with one on the meta device. What the
    step writes to it is undone by `restore`, as is what it draws there: a step that updates its state in place has not run."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[Any, Any]] = {}  # those that were written to, by their identity, and what they held before
        self.generators: dict[torch.Generator, Tensor] = {}
        self.sent: list[Collective] = []
        self.flying: dict[int, tuple[int, Tensor]] = {}
        self.products, self.started, self.exposed = 0, list[int](), list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _Waiting in types:
            return NotImplemented  # it waits, which comes here, and calls the operator again
        found = Collective.of(func, args)
        if found is None:
            if getattr(func, "namespace", "") == "_c10d_functional":
                return self._waited(args[0])
            self._remember(func, args, kwargs or {})
            result = _anywhere(func, args, kwargs or {})
            self.products += _is_product(str(func))
            return result
        result = func(*tree_map_tensors(_to_meta, args), **tree_map_tensors(_to_meta, kwargs or {}))
        if func._schema.is_mutable:  # the step waits for the tensor that it gave
            result = (kwargs or {}).get("out", args[0])
        for t in result if isinstance(result, (list, tuple)) else [result]:
            self.flying[id(t)] = len(self.sent), t
        self.sent.append(found)
        self.started.append(self.products)
        return result

    def _remember(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what the operator will write over."""
        for t in tensors(_written(func, args, kwargs)):
            if not t.is_meta and not is_traceable_wrapper_subclass(t):
                storage = t.untyped_storage()
                if storage._cdata not in self.storages:
                    self.storages[storage._cdata] = storage, storage.clone()
        generator = kwargs.get("generator") or _default_generator(func, args, kwargs)
        if generator is not None and generator not in self.generators:
            self.generators[generator] = generator.get_state()

    def restore(self) -> None:
        for storage, before in self.storages.values():
            storage.copy_(before)
        for generator, state in self.generators.items():
            generator.set_state(state)

    def _waited(self, t: Tensor) -> Tensor:
        place, _ = self.flying.pop(id(t), (-1, None))
        if place >= 0 and self.started[place] == self.products and place not in self.exposed:
            self.exposed.append(place)
        return t


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    given = {**dict(zip([a.name for a in func._schema.arguments], args, strict=False)), **kwargs}
    return [given.get(a.name) for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _default_generator(func: Any, args: Any, kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """torch's own generator that an operator draws from, if it does."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    device = torch.device(next((t.device for t in tensors((args, kwargs))), kwargs.get("device") or "cpu"))
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator if device.type == "cpu" else None


def _to_meta(t: Tensor) -> Tensor:
    return t if t.is_meta else t.to("meta")


def _anywhere(func: Any, args: Any, kwargs: Any) -> Any:
    """The operator's result; on the meta device if some of its tensors are there, and it does not take both kinds."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        if len({t.is_meta for t in tensors((args, kwargs))}) < 2:
            raise
    return func(*tree_map_tensors(_to_meta, args), **tree_map_tensors(_to_meta, kwargs))


@functools.cache
def _is_product(name: str) -> bool:
    return any(part in name for part in ("mm", "matmul", "attention", "conv", "grouped"))


def record(step: Callable[..., Any], *trees: Any) -> Program:
    """The program of `step(*trees)`, recorded with every tensor of the trees on the meta device, and under it. Raises `TypeError`
    unless `step` is a function, `ValueError` if it sends by other means than collectives of `funcops.dist` or torch's functional
    ones.

    >>> import torch
    >>> from funcops import dist
    >>> axis = dist.Mesh.abstract({"tp": 2}, rank=0)["tp"]
    >>> program = dist.record(lambda x: dist.sum_over.fwd(None, x, dist.SumOverConfig(axis)), torch.ones(3))
    >>> [str(one) for one in program.sent], program.unfinished
    (['all_reduce (sum) of float32[3]'], ())
    """
    require_callable("record", step=step)
    return _recorded(step, *tree_map_tensors(lambda t: t.to("meta"), trees))


def _recorded(step: Callable[..., Any], *args: Any) -> Program:
    recorder = _Recorder()
    try:
        with torch.no_grad(), torch.device("meta"), recorder:
            step(*args)
    finally:
        recorder.restore()
    unfinished, exposed = sorted(place for place, _ in recorder.flying.values()), sorted(recorder.exposed)
    return Program(tuple(recorder.sent), tuple(unfinished), tuple(exposed))


def handshake(mesh: Mesh, step: Callable[..., Any], *trees: Any) -> Program:
    """Record the program of `step(*trees)` and compare it with the programs of all ranks of the mesh. All ranks must call it, once,
    before the first step. The step runs under the meta device, on which also its trees and what it sends are: nothing is sent but
    what the ranks compare. What it writes in place to a captured tensor, or draws on a device, is undone.

    Raises `ValueError` on every rank, with the ranks, the position and both entries, if two ranks of a group would call different
    collectives, if one sends other rows than another expects, and if ranks would wait for each other as they go through their axes
    in different orders; also if a step uses a group of another mesh, or never finishes a collective.

    >>> import torch
    >>> from funcops import dist
    >>> from funcops.testing import run_ranks
    >>> def each(mesh):
    ...     cfg = dist.SumOverConfig(mesh["tp"])
    ...     try:
    ...         dist.handshake(mesh, lambda x: dist.sum_over.fwd(None, x, cfg), torch.ones(2 + mesh["tp"].rank))
    ...     except ValueError as error:
    ...         return str(error).partition(", got ")[2]
    ...
    >>> run_ranks({"tp": 2}, each)[0]
    'all_reduce (sum) of float32[2] on rank 0, all_reduce (sum) of float32[3] on rank 1'
    """
    require_type("handshake", "mesh", mesh, Mesh)
    raised: Exception | None = None
    try:
        program = record(step, *trees)
        said = _own_fault(mesh, program)
    except Exception as error:
        program, raised = Program(()), error
        said = f"handshake: step must run on the meta device, got {type(error).__name__} on rank {mesh.rank}: {error}"
    said = known_to_all(said, mesh)
    if not said:
        found = [_compare(mesh, axis, program.over(axis)) for axis in mesh.axes if axis.size > 1]
        said = known_to_all(min(filter(None, found), default=""), mesh)
    if not said:
        said = _compare_orders(mesh, program.groups(mesh))
    if said:
        raise ValueError(said) from raised
    return program


def known_to_all(fault: str, mesh: Mesh) -> str:
    """Send a fault along each axis in turn, so that all ranks return the same one; "" if no rank has a fault."""
    for axis in mesh.axes:
        fault = min(filter(None, _all_texts(fault, axis, mesh.device)), default="")
    return fault


def check_program(step: Callable[[Mesh], Any], sizes: Mapping[str, int], ranks: Sequence[int] | None = None) -> dict[int, Program]:
    """The programs of all ranks of a mesh of these sizes (or only of `ranks`), recorded in this process and compared as in
    `handshake`: `step(mesh)` runs a whole step on a `Mesh.abstract`, under the meta device. It runs once for all ranks that it
    cannot tell apart: those at the same position along every axis whose `rank` it, or a function that it calls, has read.

    Raises `ValueError` for the first fault.

    >>> import torch
    >>> from funcops import dist
    >>> def step(mesh):
    ...     return dist.sum_over.fwd(None, torch.ones(3), dist.SumOverConfig(mesh["tp"]))
    ...
    >>> programs = dist.check_program(step, {"dp": 2, "tp": 4})
    >>> len(programs), str(programs[7].sent[0])
    (8, 'all_reduce (sum) of float32[3]')
    """
    require_callable("check_program", step=step)
    if ranks is not None:
        require_type("check_program", "ranks", ranks, Sequence)
        require(len(ranks) > 0, "check_program", "ranks", "at least one rank", ranks)
    meshes = [Mesh.abstract(sizes, rank) for rank in (range(math.prod(sizes.values())) if ranks is None else ranks)]
    programs: dict[int, Program] = {}
    orders: dict[int, list[tuple[str, int]]] = {}
    groups: dict[tuple[str, str], dict[int, tuple[int, list[Entry]]]] = {}
    watch, entries = Watch(), dict[tuple[int, str], list[Entry]]()
    for mesh in meshes:
        like = watch.equal(mesh)
        if like is None:
            program = _recorded(step, watch.mesh(mesh))
            fault = _own_fault(mesh, program, "check_program")
            if fault:
                raise ValueError(fault)
            entries.update({(mesh.rank, axis.name): program.over(axis) for axis in mesh.axes})
            like = mesh
        programs[mesh.rank] = program = programs.get(like.rank, program).on(mesh, like)
        orders[mesh.rank] = program.groups(mesh)
        for axis in mesh.axes:
            if axis.size > 1:
                groups.setdefault((axis.name, axis.group), {})[mesh.rank] = axis.rank, entries[like.rank, axis.name]
    for (name, _), members in groups.items():
        fault = difference("check_program", name, members)
        if fault:
            raise ValueError(fault)
    fault = deadlock("check_program", orders)
    if fault:
        raise ValueError(fault)
    return programs


def _own_fault(mesh: Mesh, program: Program, where: str = "handshake") -> str:
    groups = {axis.group for axis in mesh.axes if axis.size > 1}
    for place, one in enumerate(program.sent):
        if one.group not in groups:
            axes = ", ".join(map(str, mesh.axes))
            return f"{where}: collective {place} must be over an axis of the mesh ({axes}), got {one} over group {one.group!r}"
    if program.unfinished:
        place = program.unfinished[0]
        return f"{where}: collective {place} must be finished, got {program.sent[place]} that nobody waits for on rank {mesh.rank}"
    return ""


def _compare(mesh: Mesh, axis: Axis, sent: list[Entry]) -> str:
    """The difference between the programs of an axis's ranks, or "". Digests are sent first, and programs only if these differ, or
    if ranks may send different numbers of rows."""
    same = "\n".join(entry.text for entry in sent) + ("\nrows" if any(entry.sends for entry in sent) else "")
    digests = _all_texts(hashlib.sha256(same.encode()).hexdigest(), axis, mesh.device)
    if len(set(digests)) == 1 and not same.endswith("\nrows"):
        return ""
    found = [[Entry(*one) for one in json.loads(text)] for text in _all_texts(json.dumps(sent), axis, mesh.device)]
    return difference("handshake", axis.name, dict(zip(mesh.peers(axis), enumerate(found), strict=True)))


def _compare_orders(mesh: Mesh, groups: list[tuple[str, int]]) -> str:
    """Whether ranks would wait for each other, or "". Digests are sent first, and the orders of axes only if these differ."""
    own = hashlib.sha256(" ".join(name for name, _ in groups).encode()).hexdigest()
    if not known_to_all("differs" if known_to_all(own, mesh) != own else "", mesh):
        return ""
    orders = [json.dumps(groups)]
    for axis in reversed(mesh.axes):
        orders = [one for lot in _all_texts("\n".join(orders), axis, mesh.device) for one in lot.split("\n")]
    programs = {rank: [(name, first) for name, first in json.loads(order)] for rank, order in enumerate(orders)}
    return deadlock("handshake", programs)


def _all_texts(text: str, axis: Axis, device: str) -> list[str]:
    """Gather the texts of all ranks of an axis."""
    return [data.decode() for data in comm.all_bytes(text.encode(), axis, device)]
