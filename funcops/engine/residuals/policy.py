"""Actions on kept tensors between forward and backward, by path: `Save | Recompute | Offload | Compress | Drop`.

    Policy({"attn": Recompute(), "*.mix.q": Compress("fp8"), "mlp.up.x": Offload()})

A pattern is a glob over the paths of steps and of the fields that they keep; the last pattern that matches decides. Layers of a
repeat are numbers in a path: `blocks.*.mlp` is the MLP of all layers, `blocks.3.mlp` the MLP of one, `blocks.0-9.mlp` the MLPs of
ten. A field that only a pending has, such as the `dy` of a linear, needs a pattern that ends in its name: `*.dy`.
`funcops.with_policy` (`memory/policy.py`) applies a policy to an op.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

from funcops.engine.contract.walk import layer_ranges
from funcops.engine.errors import describe, fail, require, require_flag, require_type
from funcops.engine.residuals.codec import codec
from funcops.engine.residuals.offload import copies

__all__ = ["POLICIES", "Action", "Compress", "Drop", "Offload", "Policy", "Recompute", "Save", "compressed", "means"]


@dataclasses.dataclass(frozen=True)
class Save:
    """Keep the tensor unchanged, even if a chain could recompute it; for a step, every tensor that it keeps.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Policy, RMSNormConfig, Save, Step
    >>> from funcops import chain, linear, random, report, rms_norm, with_policy
    >>> cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(64)), Step("up", linear, LinearConfig(64, 64))))
    >>> params, x = chain.init(cfg, key=random.key(0)), torch.ones(8, 64)
    >>> for op in (chain, with_policy(chain, Policy({"up.x": Save()}))):
    ...     print(report(op.fwd(params, x, cfg)[1], params, x).kept_bytes)
    ...
    32
    2080
    """


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Recompute in the backward: for a step, all that it keeps, from its params and x; for the x of a step, from the input of the
    previous step.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Policy, RMSNormConfig, Recompute, Step
    >>> from funcops import chain, linear, random, report, rms_norm, with_policy
    >>> cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(64)), Step("up", linear, LinearConfig(64, 64))))
    >>> params, x = chain.init(cfg, key=random.key(0)), torch.ones(8, 64)
    >>> for op in (chain, with_policy(chain, Policy({"norm": Recompute()}))):
    ...     print(report(op.fwd(params, x, cfg)[1], params, x).kept_bytes)
    ...
    32
    0
    """


@dataclasses.dataclass(frozen=True)
class Offload:
    """Offload the tensor (for a step, every tensor that it keeps) to pinned host memory, and copy it back before the backward that
    reads it, on a separate stream; for a layer of a repeat, while the layer after it runs its backward. What the caller
    holds, such as x, is copied, too, so that the caller may let it go. On the CPU it acts as `Save`.

    >>> import torch
    >>> from funcops import Offload, Policy, SoftcapConfig, softcap, with_policy
    >>> op = with_policy(softcap, Policy({"x": Offload()}))
    >>> y, residuals = op.fwd(None, torch.zeros(2), SoftcapConfig(30.0))
    >>> op.bwd(residuals, torch.ones(2), SoftcapConfig(30.0))[1]
    tensor([1., 1.])
    """

    mover: ClassVar[Any] = copies  # what takes a tensor to the place and back; a place of an extension is a subclass with its own


@dataclasses.dataclass(frozen=True)
class Compress:
    """Keep the tensor in fewer bytes, by codec "bf16", "fp8" (blocks of 128), "mxfp8" (blocks of 32) or "int8";
    `funcops.engine.residuals.codec` states their errors. `Compress(codec) | Offload()` keeps these bytes in the host's memory,
    `Compress(codec) | Disk(folder)` in files, `| At(rank, axis)` at another rank.

    >>> import torch
    >>> from funcops import Compress, Policy, SoftcapConfig, report, softcap, with_policy
    >>> op = with_policy(softcap, Policy({"x": Compress("int8")}))
    >>> print(report(op.fwd(None, torch.ones(32, 128), SoftcapConfig(30.0))[1]))
    path  shape      dtype     bytes   share  alias of  needed by
    x     [32, 128]  int8   4.12 KiB  100.0%            dgrad
    kept 4.12 KiB in 1 tensor, aliased 0 bytes
    >>> Compress("fp4")
    Traceback (most recent call last):
        ...
    ValueError: Compress: codec must be one of bf16, int8, fp8, mxfp8 (did you mean fp8?), got 'fp4'
    """

    codec: str

    def __post_init__(self) -> None:
        codec("Compress", self.codec)

    def __or__(self, place: Offload) -> Compress:
        require_type("Compress", "| place", place, Offload)
        return Placed(self.codec, place)

    __ror__ = __or__


@dataclasses.dataclass(frozen=True, repr=False)
class Placed(Compress):
    """A codec, and the place of its codes."""

    place: Offload
    __or__ = __ror__ = None  # type: ignore[assignment]  # it has a place

    def __repr__(self) -> str:
        return f"{Compress(self.codec)} | {self.place}"


@dataclasses.dataclass(frozen=True)
class Drop:
    """Do not keep the tensor. A backward that needs it raises `ValueError`.

    >>> import torch
    >>> from funcops import Drop, LinearConfig, Policy, linear, random, with_policy
    >>> cfg, op = LinearConfig(4, 4), with_policy(linear, Policy({"x": Drop()}))
    >>> y, residuals = op.fwd(linear.init(cfg, key=random.key(0)), torch.ones(2, 4), cfg)
    >>> dx, pending = op.dgrad(residuals, torch.ones(2, 4), cfg)
    >>> op.wgrad(pending, cfg)
    Traceback (most recent call last):
        ...
    ValueError: linear_wgrad: pending.x must be kept, because this half of the backward reads it, got dropped (policy)
    """


Action = Save | Recompute | Offload | Compress | Drop


@dataclasses.dataclass(frozen=True)
class Policy:
    """`rules`: a dict, or pairs, of glob and action; a glob may name layers of a repeat: `blocks.3.mlp`, `blocks.0-9.mlp`. A rule
    overrides `outputs`, and a rule without effect is an error; `optional` rules, such as a preset's, yield to `outputs` and apply
    only where they can. `outputs`: the steps whose outputs a chain
    recomputes: "recomputable" (norms, activations, GLUs), "norms", or "none". `blocks`: what a repeat's body keeps (or the op
    itself, if it has no repeat): "residuals", only its "inputs", or its inputs "offloaded"; the rest is recomputed, but for layers
    that a rule saves or offloads whole.

    >>> from funcops import POLICIES, Compress, Policy, Save
    >>> policy = Policy({"*.x": Compress("fp8"), "head.x": Save()})
    >>> policy.action("up.x"), policy.action("head.x"), policy.action("norm.rstd")
    (Compress(codec='fp8'), Save(), None)
    >>> sorted(POLICIES)
    ['compress_fp8', 'compress_int8', 'minimal', 'offload_block_inputs', 'recompute_elementwise', 'recompute_norms', 'save_all']
    """

    rules: Any = ()
    outputs: str = "recomputable"
    blocks: str = "residuals"
    optional: bool = False

    def __post_init__(self) -> None:
        require_type("Policy", "rules", self.rules, Mapping, tuple, list)
        rules = tuple(self.rules.items() if isinstance(self.rules, Mapping) else self.rules)
        for rule in rules:
            if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[0], str):
                fail("Policy", "rules", "pairs of a glob and an action", describe(rule), TypeError)
            require_type("Policy", f"rules at {rule[0]!r}", rule[1], Save, Recompute, Offload, Compress, Drop)
        # tuples, so that a policy has a hash: `with_policy` caches the ops that it makes
        object.__setattr__(self, "rules", rules)
        require_flag("Policy", optional=self.optional)
        for name, among in (("outputs", ("recomputable", "norms", "none")), ("blocks", ("residuals", "inputs", "offloaded"))):
            value = getattr(self, name)
            require(value in among, "Policy", name, " or ".join(map(repr, among)), repr(value))

    def action(self, path: str, waits: bool = False) -> Action | None:
        """The action of the last matching rule; see `means`."""
        return None if (rule := self.rule_for(path, waits)) is None else self.rules[rule][1]

    def rule_for(self, path: str, waits: bool = False) -> int | None:
        """The index of the last matching rule."""
        return max([i for i in range(len(self.rules)) if self.applies(i, path, waits)], default=None)

    def applies(self, rule: int, path: str, waits: bool = False) -> bool:
        """Whether a rule is one for the path: `Save` and `Offload` of a step are rules for every field in it, too."""
        pattern, action = self.rules[rule]
        return means(pattern, path, waits) or (isinstance(action, Save | Offload) and not waits and means(f"{pattern}.*", path))


@functools.lru_cache(maxsize=1 << 15)
def means(pattern: str, path: str, waits: bool = False) -> bool:
    """Whether a pattern matches the path. `waits`: the path is a field that only a pending has; the pattern must end with its
    name."""
    # no rule tells apart the layers for which a path stands, so the first answers for all
    parts = [(part, layer_ranges(part.replace("*", "0"))) for part in path.split(".")]
    here = ".".join([str(ranges[0][0]) if ranges else part for part, ranges in parts])
    numbers = [ranges[0][0] for _, ranges in parts if ranges]
    asked = [(part, layer_ranges(part)) for part in pattern.split(".")]
    forms = itertools.product(*[[str(n) for n in numbers if any([n in one for one in of])] if of else [part] for part, of in asked])
    # not `fnmatch`, which takes no notice of case on Windows
    ends = not waits or pattern.endswith(path.rpartition(".")[2])
    return ends and any([fnmatch.fnmatchcase(here, ".".join(form)) for form in forms])


def compressed(codec: str) -> Policy:
    """A policy that compresses activations; not the statistics, which are small and need their precision."""
    return Policy({"*[xqkvy]": Compress(codec)}, optional=True)


POLICIES = {  # those whose codecs the formats register are registered there, too
    "save_all": Policy(outputs="none"),
    "recompute_norms": Policy(outputs="norms"),
    "recompute_elementwise": Policy(),
    "minimal": Policy(blocks="inputs"),
    "offload_block_inputs": Policy(blocks="offloaded"),
}
