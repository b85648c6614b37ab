"""Which outputs a chain computes again rather than keeps: those of cheap steps, such as the norm before a linear."""

from __future__ import annotations

from funcops.compose.step import Step
from funcops.needs import Needs
from funcops.op import Op


def can_give_again(step: Step) -> bool:
    """Whether the step's y can be had of what its backward keeps."""
    return step.op.again is not None and not step.names and not step.gives


def gives_again(op: Op, needs: Needs) -> bool:
    """Whether an op that can, under these needs, keeps its x anyway."""
    fields = [field for field in op.fields().values() if (field.alias or "").partition(".")[0] == "x"]
    return all(field.wanted(needs) for field in fields)
