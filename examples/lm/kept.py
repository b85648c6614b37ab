"""The policy that the flags select, and reports of what a step keeps for its backward and of rounding errors."""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import Tensor

from funcops import chain, fit, quantization_report, report, with_policy
from funcops.contract import Op
from funcops.engine.errors import size_of
from funcops.engine.residuals.report import Report
from funcops.low_precision import QuantizationReport, quantize_params
from funcops.trees import cast
from lm.model import left_out, model, model_x
from lm.ranks import Ranks
from lm.step import NEEDS, Settings, inputs

DEFAULT = "recompute_elementwise"


def policy_of(args: Any, ranks: Ranks) -> tuple[Op, str]:
    """The chain under the policy that the flags select, and the policy's name. Raises `SystemExit` if no policy fits --budget, the
    bytes that a rank keeps."""
    if ranks.stages is not None:  # the stages' blocks have the policy
        return chain, args.policy or DEFAULT
    cfg = ranks.model
    if args.budget is None:
        name = args.policy or DEFAULT
        op = chain if args.policy is None else with_policy(chain, args.policy)
    else:
        (ids,) = ranks.rows(torch.zeros(args.batch, args.context, dtype=torch.int64))
        given = model_x(args.decoder, ids, ids, args.dtype, ranks.cp)
        try:
            fitted = fit(chain, cfg, given, int(min(args.budget * 2**20, 2**62)), dtype=args.dtype)
        except ValueError as error:
            raise SystemExit(f"train_lm.py: --budget {args.budget} (MiB): {error}") from None
        name, op = fitted.picked.name, fitted.op
    op.init(cfg, device="meta")  # resolves the policy now, outside of torch.compile
    return op, name


def say_what_is_kept(
    params: Any, x: Tensor, labels: Tensor, s: Settings, name: str, scales: Any = None, key: Tensor | None = None
) -> None:
    """Print what the first block keeps, and what a step keeps in all, by default and under the policy."""
    compute = params if s.ranks.casts else quantize_params(params, s.model, scales, dtype=s.dtype, key=key)
    given = inputs(compute, x, labels, s)

    def kept_by(op: Op) -> tuple[Any, Report]:
        residuals = op.fwd(compute, given, s.model, needs=NEEDS)[1]
        return residuals, report(residuals, compute, given)

    residuals, whole = kept_by(s.op)
    block = report(residuals["blocks"][0], compute["blocks"][0], given)
    print(f"One block keeps, for its backward (policy {name}):\n{block}")
    after = size_of(whole.kept_bytes)
    if s.op is chain:
        print(f"kept for the backward: {after} a step\n")
    else:
        print(f"kept for the backward: {size_of(kept_by(chain)[1].kept_bytes)} by default; policy {name}: {after}\n")


def say_what_rounding_does(params: Any, x: Tensor, labels: Tensor, s: Settings, key: Tensor | None) -> None:
    """Print the recipe's rounding errors in each linear layer of the blocks, on one batch."""
    wide = cast(params, s.dtype)
    found = quantization_report(wide, inputs(wide, x, labels, s), model(s.decoder), s.recipe, key=key)
    left = left_out(s.recipe, s.decoder)
    rows = [
        row
        for row in found.rows
        if row.path.startswith("blocks.") and not any(fnmatch.fnmatchcase(row.step, glob) for glob in left)
    ]
    print(f"relative errors of rounding by {type(s.recipe).__name__}:\n{QuantizationReport(rows, s.recipe, found.not_measured)}")
