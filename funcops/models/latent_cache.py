"""Multi-head latent attention over cached latents, of which keys and values are never made.

    k_hj = (shared_j, A_h c_j)        v_hj = B_h c_j        A_h, B_h: the rows of w for head h

    score_hij = (A_h^T own_hi) c_j + turned_hi shared_j        y_hi = B_h sum over j of p_hij c_j

c: [B, T, L], the latents; shared: [B, T, 1, S], the rotated part of all keys; q_h = (turned_h, own_h): [B, T, H, S + O]. A slot
has (c, shared): L + S numbers for all heads. arXiv:2405.04434, section 2.1.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine.compose.chain import chain
from funcops.engine.compose.identity import IdentityConfig, identity
from funcops.engine.contract.configs import OpConfig, config
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, forward, init_of, make_op
from funcops.engine.contract.walk import Inside, Part, steps
from funcops.engine.errors import FLOATS, check, describe, fail
from funcops.engine.trees import leaf, tree
from funcops.library.ops._tuples import require_tuple
from funcops.library.ops.latent_split import LatentSplitConfig, latent_split
from funcops.library.ops.linear import LinearParams, linear
from funcops.library.ops.reshape import ReshapeConfig, reshape
from funcops.models.cache import CACHE, CachedParams, Slots, attend, no_backward, require_causal, write

UP = "qkv.kv.up"
REMEDY = "for a cache of latents (make the cache with cache_init(..., latents=False))"


@config
class LatentAttentionConfig(OpConfig):
    """`of`: the config of the attention; `split`: of the op that makes its q, k and v; `rank`: L."""

    of: Any
    split: LatentSplitConfig
    rank: int
    takes_also = (CACHE,)

    def __post_init__(self) -> None:
        require_causal(self.of)


@tree
class LatentParams:
    """A layer's cache, the weight that makes keys and values, and the sinks if attention has them."""

    latents: Tensor | None = leaf("[B, 1, R, L + S]")
    weight: Tensor | None = leaf("[H (O + V), L]")
    sinks: Tensor | None = leaf("[H]")


@init_of(LatentAttentionConfig)
def latent_attention_init(cfg: LatentAttentionConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> LatentParams:
    """No params of its own: `with_caches` places them."""
    return LatentParams(None, None, None)


@forward(LatentAttentionConfig, LatentParams)
def latent_attention_fwd(
    params: LatentParams, x: tuple[Any, dict[int | None, Slots]], cfg: LatentAttentionConfig, *, needs: Needs = Needs.NONE
) -> tuple[Tensor, None]:
    """x: `((q, c, shared), slots)` -> y [B, T, H, V]. c [B, T, 1, L] and shared of x are written into the cache in place. Raises
    `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    where, (given, by_window), of, split = "latent_attention_fwd", x, cfg.of, cfg.split
    if needs:
        fail(where, "needs", "Needs.NONE: a cache that is written to has no gradient", needs)
    q, c, shared = require_tuple(where, given, "q", "latents", "shared")
    check(where, "x.0 (q)", q, (..., split.heads, split.shared + split.own), FLOATS)
    check(where, "x.1 (latents)", c, (*q.shape[:2], 1, cfg.rank), q.dtype, q)
    check(where, "x.2 (shared)", shared, (*q.shape[:2], 1, split.shared), q.dtype, q)
    at, held, weight = by_window[of.reach], params.latents, params.weight
    assert held is not None and weight is not None
    check(where, "x.1 (latents), as the cache,", c, (held.shape[0], at.at.shape[1], 1, cfg.rank), held.dtype, held)
    check(where, "params.weight", weight, (split.heads * (split.own + split.value), cfg.rank), q.dtype, q)
    write(held, torch.cat((c, shared), -1), at)
    of_keys, of_values = weight.reshape(split.heads, split.own + split.value, cfg.rank).split((split.own, split.value), 1)
    turned, own = q.split((split.shared, split.own), -1)
    asked = torch.cat((torch.einsum("bthd,hdl->bthl", own, of_keys), turned), -1)
    y = attend(where, asked, CachedParams(held, None, params.sinks), at, None, of, of.score(q.shape[3]).scale, cfg.rank)
    return torch.einsum("bthl,hvl->bthv", y, of_values), None


latent_attention = make_op(
    "latent_attention",
    LatentAttentionConfig,
    init=latent_attention_init,
    fwd=latent_attention_fwd,
    dgrad=no_backward,
    wgrad=no_backward,
    bwd=no_backward,
)


def latent_steps(part: Part) -> Inside | None:
    """How `rewrite` changes the steps of multi-head latent attention, if the part is that: the latents go on as they are, and
    attention takes the place of the step that would make q, k and v of them."""
    found = {step.name: step for step in part.cfg.members} if part.op is chain else {}
    if "split" not in found or found["split"].op is not latent_split:
        return None
    path, of, split = part.path, found["mix"].cfg, found["split"].cfg

    def replaced(inner: Part) -> tuple[Op, Any] | None:
        below = inner.path.removeprefix(f"{path}.")
        if below == UP:
            if not _is_plain(inner):
                fail("with_cache", inner.path, f"a plain linear {REMEDY}", inner.op.name + " with a bias" * (inner.op is linear))
            ranks.append(inner.cfg.in_features)
            return identity, IdentityConfig()
        if below == "qkv.kv.heads":
            return reshape, ReshapeConfig((ranks[0],), (1, ranks[0]))
        if below == "split":
            return latent_attention, LatentAttentionConfig(of=of, split=split, rank=ranks[0])
        return (identity, IdentityConfig()) if below == "mix" else None

    ranks: list[int] = []
    return Inside(fn=replaced)


def plain_latents(cfg: Any) -> int:
    """The number of a model's layers that can read latents: a plain linear makes their keys and values."""
    found = [part for part in steps(cfg, layers=True) if part.path.endswith(f".attn.{UP}")]
    return sum(map(_is_plain, found))


def _is_plain(part: Part) -> bool:
    return part.op is linear and not part.cfg.bias


def weight_of_latents(where: str, path: str, attn: Any) -> Tensor:
    """The weight that makes keys and values of the latents of a layer's attention."""
    up = attn["qkv"]["kv"]["up"]
    if type(up) is not LinearParams or not isinstance(up.weight, Tensor):
        fail(where, f"params.{path}.{UP}", f"a plain weight {REMEDY}", describe(up), TypeError)
    return up.weight
