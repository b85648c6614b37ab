"""The role of each layer of a decoder over the ranks of a mesh, as `funcops.dist.parallel` takes it."""

from __future__ import annotations

from funcops.errors import require, require_type
from funcops.models.decoder import DecoderConfig

__all__ = ["roles"]


def roles(cfg: DecoderConfig, *, loss: bool = False) -> dict[str, str]:
    """Return the rules of `dist.parallel` for `decoder(cfg, loss=loss)`, roles by globs over its steps:

        q, k, v and up       "column"   heads, and features of the MLP, are sharded over "tp"
        attention's out, down   "row"
        embed, loss          "vocab"    and the head is "column": no rank has logits of the whole vocabulary
        experts              "expert"   sharded over "ep", if the mesh has it
        attention            "context"  over "cp", if the mesh has it

    Without `loss` the head gives whole logits of a rank's rows, so it is replicated, as is the embedding if they are tied.
    Raises `TypeError` if `cfg` is not a DecoderConfig, and `ValueError` for latent attention, whose keys have a part that all heads
    share. `dist.parallel` raises for every other layer that a mesh cannot shard, and names its path.

    >>> from funcops import RopeConfig, dist
    >>> from funcops.models import DecoderConfig, decoder, roles
    >>> sizes = dict(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8))
    >>> roles(cfg)["*.qkv.*.proj"], roles(cfg, loss=True)["head"], roles(cfg)["*.attn.mix"]
    ('column', 'column', 'context')
    >>> own = dist.parallel(decoder(cfg), roles(cfg), dist.Mesh.abstract({"tp": 2}, rank=0))
    >>> [step.op.name for step in own.steps]
    ['vocab_embedding', 'repeat', 'rms_norm', 'linear']
    """
    require_type("roles", "cfg", cfg, DecoderConfig)
    require_type("roles", "loss", loss, bool)
    wanted = "None (all heads share a part of a key, which a column layer would split)"
    require(cfg.latent is None, "roles", "cfg.latent", wanted, cfg.latent)
    found = {} if cfg.tied and not loss else {"embed": "vocab"}
    found |= {"*.qkv.*.proj": "column", "*.attn.out": "row", "*.attn.mix": "context"}
    if any(not cfg.kind(i).sparse for i in range(cfg.layers)):
        found |= {"*.mlp.up": "column", "*.mlp.down": "row"}
    if cfg.moe is not None:
        found |= {"*.experts": "expert"} | ({"*.shared.up": "column", "*.shared.down": "row"} if cfg.moe.shared else {})
    return found | ({"head": "column", "loss": "vocab"} if loss else {})
