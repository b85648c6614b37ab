"""What becomes of each kept tensor between forward and backward: `Save | Recompute | Offload | Compress | Drop`, by path.

    Policy({"attn": Recompute(), "*.mix.q": Compress("fp8"), "mlp.up.x": Offload()})

A pattern is a glob over the paths of steps and of the fields that they keep, a repeat's layers written `*`; of those that match
the last decides. `funcops.with_policy` makes an op of an op and a policy.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

from funcops.errors import describe, fail, require_flag, require_type
from funcops.residuals.codec import codec


@dataclasses.dataclass(frozen=True)
class Save:
    """Keep the tensor as it is, also where a chain could compute it again."""


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Compute it again in the backward: for a step, all that it keeps, from its params and x; for the x of a step, from what the
    step before read."""


@dataclasses.dataclass(frozen=True)
class Offload:
    """Keep it in the host's memory (pinned), and bring it back before the backward that reads it: on a stream of its own, and for a
    repeat's layers while the layer after them runs its backward. On the CPU: as `Save`."""


@dataclasses.dataclass(frozen=True)
class Compress:
    """Keep it in fewer bytes: codec "bf16", "fp8" or "int8"; see `funcops.residuals.codec` for the errors."""

    codec: str

    def __post_init__(self) -> None:
        codec("Compress", self.codec)


@dataclasses.dataclass(frozen=True)
class Drop:
    """Do not keep it. A backward that needs it after all raises `ValueError`."""


Action = Save | Recompute | Offload | Compress | Drop


@dataclasses.dataclass(frozen=True)
class Policy:
    """`rules`: a dict, or pairs, of glob and action. A rule beats `outputs`, and one that would change nothing is an error;
    `optional` rules, as those of a preset, yield to `outputs`, and hold where they can.
    `outputs`: which steps' outputs a chain computes again: "cheap" (norms, activations, GLUs), "norms", or "none". `blocks`: what
    is kept of a repeat's body (of the op itself where it has no repeat): "residuals", or its "inputs" alone, or these "offloaded";
    the rest is computed again."""

    rules: Any = ()
    outputs: str = "cheap"
    blocks: str = "residuals"
    optional: bool = False

    def __post_init__(self) -> None:
        require_type("Policy", "rules", self.rules, Mapping, tuple, list)
        rules = tuple(self.rules.items() if isinstance(self.rules, Mapping) else self.rules)
        for rule in rules:
            if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[0], str):
                fail("Policy", "rules", "pairs of a glob and an action", describe(rule), TypeError)
            require_type("Policy", f"rules at {rule[0]!r}", rule[1], Save, Recompute, Offload, Compress, Drop)
        object.__setattr__(self, "rules", rules)
        require_flag("Policy", optional=self.optional)
        for name, among in (("outputs", ("cheap", "norms", "none")), ("blocks", ("residuals", "inputs", "offloaded"))):
            value = getattr(self, name)
            if value not in among:
                fail("Policy", name, " or ".join(map(repr, among)), repr(value))

    def action(self, path: str) -> Action | None:
        """What the last matching rule says."""
        rule = self.rule_for(path)
        return None if rule is None else self.rules[rule][1]

    def rule_for(self, path: str) -> int | None:
        """Which rule decides."""
        found = [i for i, (pattern, _) in enumerate(self.rules) if fnmatch.fnmatchcase(path, pattern)]
        return found[-1] if found else None

    def without(self, rule: int) -> Policy:
        return dataclasses.replace(self, rules=self.rules[:rule] + self.rules[rule + 1 :])


_ACTIVATIONS = "*[xqkvy]"  # not the statistics, which are few and matter

POLICIES = {
    "save_all": Policy(outputs="none"),
    "recompute_norms": Policy(outputs="norms"),
    "recompute_elementwise": Policy(),
    "minimal": Policy(blocks="inputs"),
    "offload_block_inputs": Policy(blocks="offloaded"),
    "compress_fp8": Policy({_ACTIVATIONS: Compress("fp8")}, optional=True),
    "compress_int8": Policy({_ACTIVATIONS: Compress("int8")}, optional=True),
}
