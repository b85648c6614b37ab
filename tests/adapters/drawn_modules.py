"""Random modules by number: some steps of `drawn_steps.py`, some nested and run twice, and random inputs in random layouts."""

import random

import torch
import torch.nn.functional as F
from drawn_steps import ACTIVATIONS, REFUSED, STEPS, Args, D, Step, V
from torch import nn


class Nested(nn.Module):
    """Steps one after the other, a residual connection around them, and all of it once more."""

    def __init__(self, steps, times):
        super().__init__()
        self.steps, self.times = nn.ModuleList(steps), times

    def forward(self, h, args):
        for _ in range(self.times):
            y = h
            for step in self.steps:
                y = step(y, args)
            h = (h + y) / 2
        return h


class Drawn(nn.Module):
    def __init__(self, steps, result):
        super().__init__()
        self.steps, self.result = nn.ModuleList(steps), result

    def forward(self, h, ids, mask, other=None):
        x, seen = h, []
        args = Args(ids, mask, h.detach().cos() if other is None else other)
        for step in self.steps:
            h = step(h, args)
            seen.append(h)
        return self.result(h, x, args, seen)


RESULTS = {
    "tensor": lambda h, x, args, seen: h,
    "pair": lambda h, x, args, seen: (h, seen[0].sum(-1)),
    "dict": lambda h, x, args, seen: {"last": h, "none": None, "parts": (seen[0], {"mean": h.mean()})},
    "number": lambda h, x, args, seen: h.square().mean(),
    "no parameter": lambda h, x, args, seen: (h, 2 * x, args.ids + 1),
    "an input": lambda h, x, args, seen: {"y": h, "x": x, "ids": args.ids},
    "a view": lambda h, x, args, seen: (h.transpose(0, 1), x[..., 0], h[:, :1].expand_as(h)),
    "twice": lambda h, x, args, seen: [h, h],
    "detached": lambda h, x, args, seen: (h, h.detach(), h > 0),
    "constant": lambda h, x, args, seen: (h, torch.arange(3.0, dtype=torch.float64)),
}
LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda t: torch.cat([t, t, t], -1)[..., D : 2 * D],
    "offset": lambda t: torch.cat([t[:1], t])[1:],
    "expanded": lambda t: t[:1].expand_as(t),
}


def named_steps(number):
    """The names of the steps of a module, some nested; of every 16 modules one has a step that is refused."""
    draw = random.Random(number)
    names = draw.sample([*STEPS], draw.randint(2, 5))
    names += [draw.choice(ACTIVATIONS)] * (draw.random() < 0.5)
    if draw.random() < 1 / 16:
        names.insert(draw.randrange(len(names)), draw.choice([*REFUSED]))
    return names


def step_of(name):
    if name in ACTIVATIONS:
        return Step(lambda m, h, args: getattr(F, name)(h), None)
    return Step(*(STEPS | REFUSED)[name])


def module_of(number):
    names, draw = named_steps(number), random.Random(-1 - number)
    torch.manual_seed(number)
    steps = [step_of(name) for name in names]
    if draw.random() < 0.4:
        at = draw.randrange(len(steps))
        steps[at : at + 2] = [Nested(steps[at : at + 2], draw.choice([1, 2]))]
    return Drawn(steps, RESULTS[draw.choice([*RESULTS])]).double()


def inputs_of(number, rows=3, length=4, seed=0):
    """Positional arguments, or arguments by name."""
    draw, generator = random.Random(-1000 - number), torch.Generator().manual_seed(1000 * seed + number)
    layout = LAYOUTS[draw.choice([*LAYOUTS])]
    h = layout(torch.randn(rows, length, D, generator=generator, dtype=torch.float64))
    ids = torch.randint(V, (rows, length), generator=generator)
    mask = torch.rand(rows, length, generator=generator) < 0.3
    other = torch.randn(rows, length, D, generator=generator, dtype=torch.float64)
    if draw.random() < 0.5:
        return h, ids, mask, other
    return {"h": h, "ids": ids, "mask": mask} | ({"other": other} if draw.random() < 0.5 else {})
