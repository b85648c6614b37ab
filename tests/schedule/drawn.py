"""Schedules drawn by seed: from all generators, and arbitrary ones that keep the order of a microbatch."""

import random

from funcops.schedule import (
    Action,
    Schedule,
    delay_w,
    dualpipe_v,
    fold,
    gpipe,
    interleaved_1f1b,
    interleaved_zb,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)
from funcops.schedule.actions import needs

ONE_STAGE = (gpipe, one_f_one_b, zb_h1, zb_h2)
LOOPED = (interleaved_1f1b, interleaved_zb)
FOLDED = (zb_v, dualpipe_v)
GENERATORS = (*ONE_STAGE, *LOOPED, *FOLDED)


def generated(generator, rng, ranks=None):
    """A schedule of a generator, on `ranks` ranks or any number: maybe folded, maybe with weight gradients delayed."""
    ranks, count = ranks or rng.randint(1, 5), rng.randint(1, 9)
    if generator in ONE_STAGE and rng.random() < 0.5:
        made = fold(generator(ranks * rng.randint(2, 3), count), ranks)
    elif generator in LOOPED:
        made = generator(ranks, count, rng.randint(1, 3))
    else:
        made = generator(ranks, count)
    if rng.random() < 0.3:
        made = delay_w(made, max(simulate(made).peak_bytes) * rng.choice((1, 1.5)))
    return made


def free(rng, ranks=None):
    """Stages anywhere, actions in any order that comes to an end, some backwards beside forwards."""
    ranks = ranks or rng.randint(1, 4)
    stages, count = ranks + rng.randint(0, 3), rng.randint(1, 4)
    owner = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(owner)
    todo = [Action(s, "F", m) for s in range(stages) for m in range(count)]
    for s in range(stages):
        for m in range(count):
            todo += [Action(s, kind, m) for kind in rng.choice(("B", "IW"))]
    made, done = [[] for _ in range(ranks)], set()
    while todo:
        ready = [a for a in todo if all(need in done for need in needs(a, stages - 1))]
        action = rng.choice(ready)
        todo.remove(action)
        done.add(action._replace(kind="I") if action.kind == "B" else action)
        made[owner[action.stage]].append(action)
    pairs = [b for row in made for a, b in zip(row, row[1:], strict=False) if a.kind == "F" and b.kind in "IB"]
    together = frozenset()
    for pair in rng.sample(pairs, min(len(pairs), 3)):
        try:
            together = Schedule("free", tuple(map(tuple, made)), together | {pair}).together
        except ValueError:
            pass  # the two wait for each other
    return Schedule("free", tuple(map(tuple, made)), together)


def disturbed(made, rng):
    """The ranks' actions with two of one rank exchanged: whole, or stuck."""
    rows = [list(row) for row in made.ranks]
    row = rng.choice([row for row in rows if len(row) > 1])
    i, j = rng.sample(range(len(row)), 2)
    j = rng.choice((j, i - 1 if i else 1))
    row[i], row[j] = row[j], row[i]
    return tuple(map(tuple, rows))


def every(seed, count, ranks=None):
    """`count` schedules: the generators in turn, and free ones."""
    rng = random.Random(seed)
    turns = (*GENERATORS, None)
    for i in range(count):
        generator = turns[i % len(turns)]
        yield free(rng, ranks) if generator is None else generated(generator, rng, ranks)
