"""`--profile`: the time of a training step by the path of the step of the model that runs, printed, drawn, and as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcops import named_steps, profile
from funcops.graphs import graphed
from lm.step import Settings, State, train_step


def say_profile(params: Any, state: State, x: Tensor, labels: Tensor, key: Tensor | None, s: Settings, args: Any) -> list[Path]:
    """Print the table of a step, as it runs with these flags, and return the files written."""
    s, lr = s._replace(in_place=False), torch.tensor(args.lr, device=x.device)
    step: Any = lambda *trees: train_step(*trees, s)  # noqa: E731
    given = params, state, x, labels, lr, key
    if args.compile:
        step = torch.compile(step, fullgraph=True, dynamic=False)
    elif args.graph:
        with named_steps():
            step = graphed(step, *given)
    found = profile(step, *given)
    print(found)
    args.out.mkdir(parents=True, exist_ok=True)
    files = [args.out / "profile.png", args.out / "trace.json.gz"]
    found.plot(str(files[0]), depth=3)
    found.save_trace(files[1])
    return files
