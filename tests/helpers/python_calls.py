"""The cost in Python of a Llama block's backward: calls of this library's functions, files and depth.

python tests/python_calls.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import funcops
from funcops import WithExtras, chain, random
from funcops.models.blocks import block_config

PACKAGE = str(Path(funcops.__file__).parent)


class Count(NamedTuple):
    calls: int
    files: int
    depth: int


def counted(run: Callable[[], Any]) -> Count:
    """The calls of the library's functions in `run()`, those that it has written at run time too, the files that they are in (all
    that was written is one), and how deep calls nest, torch's too."""
    files: list[str] = []
    depth = deepest = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal depth, deepest
        if event == "call":
            depth += 1
            deepest = max(deepest, depth)
            file = frame.f_code.co_filename
            if file.startswith("<") or file.startswith(PACKAGE):
                files.append("<written>" if file.startswith("<") else file)
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Count(len(files), len(set(files)), deepest - 1)  # but for `run` itself


def of_a_block(recompute: bool) -> Count:
    """The count of one backward of the block, after a first one."""
    cfg = block_config(64, 4, 96, recompute=recompute)
    params = chain.init(cfg, key=random.key(0))
    x = WithExtras(torch.randn(2, 16, 64), {"positions": torch.arange(16)})
    y, kept = chain.fwd(params, x, cfg)
    dy = torch.randn_like(y)
    chain.bwd(kept, dy, cfg)
    return counted(lambda: chain.bwd(kept, dy, cfg))


if __name__ == "__main__":
    for recompute in (True, False):
        print("recomputing" if recompute else "keeping    ", of_a_block(recompute))
