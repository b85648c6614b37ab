"""Whether the programs of ranks go together: the first collective on which two ranks of a group differ, rows that one rank sends
and the other does not expect, and orders over several axes in which ranks wait for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Entry(NamedTuple):
    """A collective as its group compares it: a text that is the same on all ranks, and the rows that this rank sends to each rank
    of the group and receives from each, if ranks may have different ones."""

    text: str
    sends: Sequence[int] = ()
    receives: Sequence[int] = ()


def difference(where: str, axis: str, members: Mapping[int, tuple[int, Sequence[Entry]]]) -> str:
    """The first position at which two ranks of a group differ, as an error's text, or "". `members`: the position along the axis,
    and the collectives, of each rank."""
    first, *others = members
    for rank in others:
        mine, theirs = ([entry.text for entry in members[one][1]] for one in (first, rank))
        if mine != theirs:
            length = max(len(mine), len(theirs))
            at = next(i for i in range(length) if mine[i : i + 1] != theirs[i : i + 1])
            a, b = (one[at] if at < len(one) else "nothing" for one in (mine, theirs))
            got = f"{a} on rank {first}, {b} on rank {rank}"
            return f"{where}: collective {at} over axis {axis!r} must be the same on all ranks, got {got}"
    for at, entry in enumerate(members[first][1]):
        if entry.sends:
            fault = unexpected_rows({rank: (place, sent[at]) for rank, (place, sent) in members.items()})
            if fault:
                return f"{where}: collective {at} over axis {axis!r} must send the rows that the other rank expects, got {fault}"
    return ""


def unexpected_rows(members: Mapping[int, tuple[int, Entry]]) -> str:
    """The first pair of ranks of which one sends other rows than the other expects, or ""."""
    places = [place for place, _ in members.values()]
    for rank, (place, entry) in members.items():
        expected = [its.receives[place] for _, its in members.values()]
        sent = [entry.sends[there] for there in places]
        if sent != expected:
            other, sends, takes = next(one for one in zip(members, sent, expected, strict=True) if one[1] != one[2])
            return f"{entry.text} with {sends} rows for rank {other} on rank {rank}, {takes} rows from rank {rank} on rank {other}"
    return ""


def deadlock(where: str, programs: Mapping[int, Sequence[tuple[str, int]]]) -> str:
    """Two ranks that wait for each other, as an error's text, or "". `programs`: the group of each collective of a rank, in order,
    by the name of its axis and the first rank along it. The programs over each group must be equal."""
    members: dict[tuple[str, int], int] = {}
    for rank in programs:
        for group in set(programs[rank]):
            members[group] = members.get(group, 0) + 1
    at, waiting, ready = dict.fromkeys(programs, 0), dict[tuple[str, int], list[int]](), list(programs)
    while ready:
        rank = ready.pop()
        if at[rank] < len(programs[rank]):
            group = programs[rank][at[rank]]
            here = waiting.setdefault(group, [])
            here.append(rank)
            if len(here) == members[group]:
                for one in waiting.pop(group):
                    at[one] += 1
                    ready.append(one)
    stuck = [(rank, group) for group, ranks in waiting.items() for rank in ranks]
    if not stuck:
        return ""
    (rank, (axis, _)), *others = sorted(stuck)
    other, (its, _) = next((one, group) for one, group in others if group[0] != axis)
    got = f"rank {rank} at collective {at[rank]}, over axis {axis!r}, and rank {other} at collective {at[other]}, over axis {its!r}"
    return f"{where}: all ranks must call collectives over different axes in one order, got {got}, each waiting for the other"
