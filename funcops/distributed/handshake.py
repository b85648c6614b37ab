"""Programs: the collectives that a rank will call, as data; and the handshake, in which ranks compare programs before they run.

If a rank sends another shape, or in another order, Gloo aborts and NCCL hangs. A program is recorded by running the step on the
meta device, where nothing is computed or sent, and compared by group.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.distributed import comm
from funcops.distributed.mesh import Axis, Mesh
from funcops.errors import require, require_callable, require_type, short
from funcops.trees import tree_map_tensors

NAMES = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all"}


class Collective(NamedTuple):
    """A collective, on which its group must agree. `shape`: of this rank's input; None if ranks may have different ones (parts of
    an all_to_all). `how`: the kind of reduction.

    >>> import torch
    >>> from funcops.distributed import Collective
    >>> print(Collective("all_reduce", "tp", (3,), torch.float32))
    all_reduce of float32[3]
    """

    op: str
    group: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    how: str = ""

    @staticmethod
    def of(func: Any, args: Sequence[Any]) -> Collective | None:
        """The collective of an operator's call; None if the call sends nothing."""
        if getattr(func, "namespace", "") != "_c10d_functional":
            return None
        name, group, how = _arguments(func)
        if group < 0:  # wait_tensor
            return None
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        shape = None if name == "all_to_all" else tuple(first.shape)
        return Collective(name, args[group], shape, first.dtype, args[how] if how >= 0 else "")

    def __str__(self) -> str:
        size = "" if self.shape is None else str(list(self.shape))
        return f"{self.op}{f' ({self.how})' if self.how else ''} of {short(self.dtype)}{size}"


@functools.cache
def _arguments(func: Any) -> tuple[str, int, int]:
    """The name of an operator, and the positions of its arguments for group and reduction; -1 if it lacks one."""
    names = [a.name for a in func._schema.arguments]
    name = func._schema.name.partition("::")[2]
    return NAMES.get(name, name), *[names.index(n) if n in names else -1 for n in ("group_name", "reduce_op")]


class Program(NamedTuple):
    """The collectives of a step, in order, and the positions of the ones that it never waits for."""

    sent: tuple[Collective, ...]
    unfinished: tuple[int, ...] = ()

    def over(self, group: str) -> list[Collective]:
        return [one for one in self.sent if one.group == group]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Collective] = []
        self.flying: dict[int, tuple[int, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = Collective.of(func, args)
        if found is None and getattr(func, "namespace", "") == "_c10d_functional":
            self.flying.pop(id(args[0]), None)
            return args[0]
        result = func(*args, **(kwargs or {}))
        if found is not None:
            for t in result if isinstance(result, (list, tuple)) else [result]:
                self.flying[id(t)] = len(self.sent), t
            self.sent.append(found)
        return result


def record(step: Callable[..., Any], *trees: Any) -> Program:
    """The program of `step(*trees)`, recorded with every tensor of the trees on the meta device. Raises `TypeError` unless `step`
    is a function.

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
    with torch.no_grad(), _Recorder() as recorder:
        step(*args)
    return Program(tuple(recorder.sent), tuple(sorted(place for place, _ in recorder.flying.values())))


def handshake(mesh: Mesh, step: Callable[..., Any], *trees: Any) -> Program:
    """Record the program of `step(*trees)` and compare it with the programs of all ranks of the mesh. All ranks must call it, once,
    before the first step.

    Raises `ValueError` on every rank, with the rank, the position and both entries, if two ranks of a group would call different
    collectives; also if a step uses a group of another mesh, or never finishes a collective.

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
        found = [_compare(mesh, axis, program.over(axis.group)) for axis in mesh.axes if axis.size > 1]
        said = known_to_all(min(filter(None, found), default=""), mesh)
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
    `handshake`: `step(mesh)` runs a whole step on a `Mesh.abstract`, under the meta device.

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
    groups: dict[tuple[str, str], dict[int, list[Collective]]] = {}
    for mesh in meshes:
        with torch.device("meta"):
            programs[mesh.rank] = program = _recorded(step, mesh)
        fault = _own_fault(mesh, program, "check_program")
        if fault:
            raise ValueError(fault)
        for axis in mesh.axes:
            if axis.size > 1:
                groups.setdefault((axis.name, axis.group), {})[mesh.rank] = program.over(axis.group)
    for (name, _), members in groups.items():
        fault = _difference("check_program", name, members)
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


def _compare(mesh: Mesh, axis: Axis, sent: list[Collective]) -> str:
    """The difference between the programs of an axis's ranks, or "". Digests are sent first, and programs only if these differ."""
    text = "\n".join(map(str, sent))
    digests = _all_texts(hashlib.sha256(text.encode()).hexdigest(), axis, mesh.device)
    if len(set(digests)) == 1:
        return ""
    texts = _all_texts(text, axis, mesh.device)
    return _difference(
        "handshake", axis.name, dict(zip(mesh.peers(axis), [t.split("\n") if t else [] for t in texts], strict=True))
    )


def _difference(where: str, name: str, members: Mapping[int, Sequence[Any]]) -> str:
    """The first position at which two ranks of a group differ, as an error's text, or ""."""
    first, *others = members
    for rank in others:
        mine, theirs = members[first], members[rank]
        if mine != theirs:
            length = max(len(mine), len(theirs))
            at = next(i for i in range(length) if mine[i : i + 1] != theirs[i : i + 1])
            a, b = (str(one[at]) if at < len(one) else "nothing" for one in (mine, theirs))
            got = f"{a} on rank {first}, {b} on rank {rank}"
            return f"{where}: collective {at} over axis {name!r} must be the same on all ranks, got {got}"
    return ""


def _all_texts(text: str, axis: Axis, device: str) -> list[str]:
    """Gather the texts of all ranks of an axis."""
    return [data.decode() for data in comm.all_bytes(text.encode(), axis, device)]
