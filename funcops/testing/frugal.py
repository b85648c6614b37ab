"""Frugal: exactly what the needed gradients read is kept, and nothing else is computed."""

from __future__ import annotations

from typing import Any

import torch

from funcops.needs import Needs
from funcops.testing.case import Case
from funcops.testing.checks import run, same_bits
from funcops.testing.tolerances import assert_close
from funcops.trees import leaves, nothing_like, paths, tensors, tree_map


def law_frugal(case: Case, dtype: torch.dtype) -> None:
    """Every mask of needs gives the same bits where a gradient is needed, None elsewhere, and no more residuals."""
    params, x, _, residuals, dy, (dparams, dx) = run(case, dtype)
    assert case.op.fwd(params, x, case.cfg, needs=Needs.NONE)[1] is None, "Needs.NONE keeps nothing"
    full = len(tensors(residuals))
    given = {id(t) for t in tensors((params, x))}
    storages = {t.untyped_storage()._cdata for t in tensors((params, x)) if t.numel()}
    for t in tensors(residuals):
        shares = t.numel() > 0 and t.untyped_storage()._cdata in storages
        assert not shares or id(t) in given, "a residual that aliases an input must be that same object"
    masks: list[Needs] = [Needs(x=True, params=False), Needs(x=False, params=True)]
    masks += [Needs(x=False, params=[path]) for path, t in paths(params).items() if t is not None and path]
    for needs in masks:
        if not needs.x and not tensors(params):
            continue
        _, kept = case.op.fwd(params, x, case.cfg, needs=needs)
        assert len(tensors(kept)) <= full, f"{needs} keeps more than all"
        got_params, got_x = case.op.bwd(kept, dy, case.cfg)
        same_bits(got_x, dx if needs.x else nothing_like(dx), f"dx under {needs}")
        for (path, got), want in zip(paths(got_params).items(), leaves(dparams), strict=True):
            assert_close(got, want if needs.param(path) else None, dtype=dtype, what=f"dparams.{path} under {needs}")
        if tensors(params):
            into = tree_map(lambda g: None if g is None else torch.ones_like(g), got_params)
            total, _ = case.op.bwd(kept, dy, case.cfg, into=into)
            want = tree_map(lambda g: None if g is None else g + 1, got_params)
            assert_close(total, want, dtype=dtype, what=f"into under {needs}")
