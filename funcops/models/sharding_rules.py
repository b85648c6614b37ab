"""The role of each layer of a decoder over the ranks of a mesh, as `funcops.dist.parallel` takes it."""

from __future__ import annotations

from funcops.engine.errors import require_type
from funcops.models.decoder_config import DecoderConfig

__all__ = ["roles"]


def roles(cfg: DecoderConfig, *, loss: bool = False) -> dict[str, str]:
    """Return the rules of `dist.parallel` for `decoder(cfg, loss=loss)`, roles by globs over its steps:

        q, k, v and up       "column"   heads, and features of the MLP, are sharded over "tp"
        attention's out, down   "row"
        embed, loss          "vocab"    and the head is "column": no rank has logits of the whole vocabulary
        experts              "expert"   sharded over "ep", if the mesh has it
        attention            "context"  over "cp", if the mesh has it

    A gate of attention is sharded with its heads. Linear attention is replicated: with `sequence_parallel` each rank computes it
    for its own rows of the batch, and "cp" is refused. Latent attention has its heads' projections as "column" and the keys'
    shared part as "shared". Without `loss` the head gives whole logits of a rank's rows, so it is replicated, as is the embedding
    if they are tied. Raises `TypeError` if `cfg` is not a DecoderConfig. `dist.parallel` raises for a layer that a mesh cannot
    shard, and names its path.

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
    found = {} if cfg.tied and not loss else {"embed": "vocab"}
    if cfg.latent is None:
        found |= {"*.qkv.*.proj": "column"}
    else:
        q = "up" if cfg.latent.q_rank else "proj"
        found |= {f"*.qkv.q.{q}": "column", "*.qkv.kv.up": "column", "*.qkv.shared.rope": "shared", "*.attn.split": "shared"}
    gated = {"*.attn.gated.gate.proj": "column", "*.attn.gated.mixed.mix": "context"}
    found |= {"*.attn.out": "row", **(gated if cfg.attention_gate else {"*.attn.mix": "context"})}
    if any(not cfg.kind(i).sparse for i in range(cfg.layers)):
        found |= {"*.mlp.up": "column", "*.mlp.down": "row"}
    if cfg.moe is not None:
        found |= {"*.experts": "expert"} | ({"*.shared.up": "column", "*.shared.down": "row"} if cfg.moe.shared else {})
    return found | ({"head": "column", "loss": "vocab"} if loss else {})
