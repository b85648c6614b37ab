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

import torch
from torch import Tensor

from funcops.errors import describe, fail, require_type
from funcops.marks import versions
from funcops.residuals.codec import codec, smaller
from funcops.residuals.offload import copies
from funcops.trees import leaf, static, tree


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
    """`rules`: a dict, or pairs, of glob and action; one that is a path, not a glob, beats `outputs`. `outputs`: which steps'
    outputs a chain computes again: "cheap" (norms, activations, GLUs), "norms", or "none". `blocks`: what is kept of a repeat's
    body (of the op itself where it has no repeat): "residuals", or its "inputs" alone, or these "offloaded"; the rest is computed
    again."""

    rules: Any = ()
    outputs: str = "cheap"
    blocks: str = "residuals"

    def __post_init__(self) -> None:
        require_type("Policy", "rules", self.rules, Mapping, tuple, list)
        rules = tuple(self.rules.items() if isinstance(self.rules, Mapping) else self.rules)
        for rule in rules:
            if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[0], str):
                fail("Policy", "rules", "pairs of a glob and an action", describe(rule), TypeError)
            require_type("Policy", f"rules at {rule[0]!r}", rule[1], Save, Recompute, Offload, Compress, Drop)
        object.__setattr__(self, "rules", rules)
        for name, among in (("outputs", ("cheap", "norms", "none")), ("blocks", ("residuals", "inputs", "offloaded"))):
            value = getattr(self, name)
            if value not in among:
                fail("Policy", name, " or ".join(map(repr, among)), repr(value))

    def action(self, path: str) -> Action | None:
        """What the last matching rule says."""
        found = [action for pattern, action in self.rules if fnmatch.fnmatchcase(path, pattern)]
        return found[-1] if found else None

    def names(self, path: str) -> bool:
        """Whether the last rule for the path is for it alone, no glob: it then beats what a chain does by itself."""
        found = [pattern for pattern, _ in self.rules if fnmatch.fnmatchcase(path, pattern)]
        return bool(found) and found[-1] == path


_ACTIVATIONS = "*[xqkvy]"  # not the statistics, which are few and matter

POLICIES = {
    "save_all": Policy(outputs="none"),
    "recompute_norms": Policy(outputs="norms"),
    "recompute_elementwise": Policy(),
    "minimal": Policy(blocks="inputs"),
    "offload_block_inputs": Policy(blocks="offloaded"),
    "compress_fp8": Policy({_ACTIVATIONS: Compress("fp8")}),
    "compress_int8": Policy({_ACTIVATIONS: Compress("int8")}),
}


@tree
class Packed:
    """A kept tensor in another form. `parts`: what is kept."""

    parts: Any = leaf("its tensors")
    action: Any = static()
    dtype: Any = static()
    device: Any = static()

    @property
    def _version(self) -> Any:
        """Those of its parts: it is guarded as the tensor is that it stands for."""
        return versions(self)

    def __reduce__(self) -> Any:
        """Pickle has no code for 8-bit floats: they go as bytes."""
        parts = tuple([(t.view(torch.uint8), t.dtype) if t.dtype.itemsize == 1 else (t, t.dtype) for t in self.parts])
        return _unpickled, (parts, self.action, self.dtype, self.device)


def _unpickled(parts: Any, action: Action, dtype: Any, device: Any) -> Packed:
    return Packed(tuple([t.view(kind) for t, kind in parts]), action=action, dtype=dtype, device=device)


def pack(t: Tensor, action: Action) -> Any:
    """The tensor in the form that the action gives it; the tensor itself where that would not help."""
    if isinstance(action, Compress) and smaller(action.codec, t):
        return Packed(codec("pack", action.codec).encode(t), action=action, dtype=t.dtype, device=t.device)
    if isinstance(action, Offload) and copies.leaves(t):
        return Packed((copies.on_host(t),), action=action, dtype=t.dtype, device=t.device)
    return None if isinstance(action, Drop) else t


def unpack(value: Any) -> Any:
    if type(value) is not Packed:
        return value
    if isinstance(value.action, Compress):
        return codec("unpack", value.action.codec).decode(value.parts, value.dtype)
    return copies.on_device(value.parts[0], value.device)
