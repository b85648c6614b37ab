"""`preview`: what a model would keep after `from_torch`, found on a copy."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from funcops.adapters.nn.from_torch import from_torch
from funcops.adapters.nn.kept import check_module, kept_report, unharmed
from funcops.adapters.nn.whole import WHOLE
from funcops.engine.errors import fail
from funcops.engine.residuals.report import Report
from funcops.engine.trees import tensors


def preview(module: nn.Module, *args: Any, **kwargs: Any) -> Report:
    """`kept_report` of the call as it would be after `from_torch(module)`. The module itself does not change: a copy of it, which
    shares its parameters and buffers, is swapped, runs until its graphs are traced, and is dropped.

    Raises as `kept_report` does, and `ValueError` for a module that cannot be copied.

    >>> import torch
    >>> from funcops import nn
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    >>> x = torch.ones(4096, 8)
    >>> nn.kept_report(model, x).kept_bytes, nn.preview(model, x).kept_bytes
    (819200, 294912)
    >>> type(model[0]) is torch.nn.Linear
    True
    """
    check_module("preview", module)
    shared = [*module.parameters(), *module.buffers()]
    try:
        swapped = copy.deepcopy(module, {id(t): t for t in shared})
    except Exception as error:
        fail("preview", "module", "one that copy.deepcopy copies (or swap it: from_torch, kept_report, to_torch)", str(error))
    from_torch(swapped)
    traced = -1
    while traced < (traced := _graphs(swapped)):  # a module of which a call cannot be traced hands the task to its parts
        with unharmed(swapped, tensors((args, kwargs))):
            swapped(*args, **kwargs)
    return kept_report(swapped, *args, **kwargs)


def _graphs(module: nn.Module) -> int:
    return sum([WHOLE in vars(part) for part in module.modules()])
