"""PEFT's names for the linears of a decoder: the names of Hugging Face's modules."""

from __future__ import annotations

from typing import Any

from funcops.compose.chain import ChainConfig
from funcops.errors import fail, require, require_type
from funcops.lora.from_folder import linears_of
from funcops.lora.rewrite import adapted_linears
from funcops.models.decoder import DecoderConfig, decoder
from funcops.models.fields import family_of
from funcops.models.hf import stored_leaves

__all__ = ["peft_names"]


def peft_names(cfg: DecoderConfig, model: ChainConfig | None = None) -> dict[str, str | tuple[str, ...]]:
    """Return `names` of `save_adapter` and `load_adapter` for the adapters of `model`, which `with_lora` made of `decoder(cfg)`:
    for the path of each linear the name of its module in Hugging Face's model. An up with a gate is two modules, gate_proj and
    up_proj. Without a model: `names` of `with_adapter_of`, for every linear of `decoder(cfg)` that is a whole module there.

    Raises `ValueError`, with its path, for a linear that is not a whole module there: q, k and v in one (GPT-2, Phi 3), and q of
    DeepSeek, whose rows are in another order; for an unknown family; and for a model without adapters.

    >>> from funcops import RopeConfig
    >>> from funcops.lora import with_lora
    >>> from funcops.models import DecoderConfig, decoder, peft_names
    >>> sizes = dict(vocab=64, dim=32, layers=1, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
    >>> cfg = DecoderConfig(**sizes, rope=RopeConfig(8), family="llama")
    >>> names = peft_names(cfg, with_lora(decoder(cfg), rank=4, targets=("*.q.proj", "*.mlp.up")))
    >>> names["blocks.0.attn.qkv.q.proj"]
    'model.layers.0.self_attn.q_proj'
    >>> names["blocks.0.mlp.up"]
    ('model.layers.0.mlp.gate_proj', 'model.layers.0.mlp.up_proj')
    """
    where = "peft_names"
    require_type(where, "cfg", cfg, DecoderConfig)
    require_type(where, "model", model, ChainConfig, type(None))
    known = stored_leaves(cfg, family_of(where, cfg.family))
    found: dict[str, Any] = {}
    if model is None:
        paths = [path for _, layers in linears_of(decoder(cfg)) for path in layers]
        whole = {
            path: held for path in paths if (held := known.get(f"{path}.weight")) and len(held.paths) == 1 and not held.rule.order
        }
        return {path: _modules(held) for path, held in whole.items()}
    for linear in adapted_linears(model):
        held = known.get(f"{linear.module}.weight")
        if held is None:
            said = "whose weight a checkpoint does not have"
            fail(where, "model", "decoder(cfg) with adapters", f"an adapter at {linear.module}, {said}")
        if len(held.paths) > 1 or held.rule.order:
            said = f"a part of {held.names[0]}" if len(held.paths) > 1 else f"the rows of {held.names[0]} in another order"
            fail(where, "model", "adapted at linears that are whole modules for PEFT", f"an adapter at {linear.module}, {said}")
        found[linear.module] = _modules(held)
    require(bool(found), where, "model", "one that with_lora made", "one without adapters")
    return found


def _modules(held: Any) -> str | tuple[str, ...]:
    names = tuple(name.removesuffix(".weight") for name in held.names)
    return names[0] if len(names) == 1 else names
