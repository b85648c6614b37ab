"""PEFT's names for the linears and the embedding of a decoder: the names of Hugging Face's modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funcops.engine.compose.chain import ChainConfig
from funcops.engine.errors import fail, require, require_type
from funcops.lora.from_folder import linears_of
from funcops.lora.rewrite import adapted_linears
from funcops.lora.settings import ParameterOf, RowsOf
from funcops.models.decoder import decoder
from funcops.models.decoder_config import DecoderConfig
from funcops.models.hf import stored_leaves

__all__ = ["peft_names"]


def peft_names(cfg: DecoderConfig, model: ChainConfig | None = None) -> dict[str, str | RowsOf | ParameterOf | tuple[str, ...]]:
    """Return `names` of `save_adapter` and `load_adapter` for the adapters of `model`, which `with_lora` made of `decoder(cfg)`:
    for the path of each linear the name of its module in Hugging Face's model. An up with a gate is two modules, gate_proj and
    up_proj. q, k and v of a family that has them in one module, and linears whose rows lie there in another order, are `RowsOf` it.
    Routers and the layers of experts are `ParameterOf`, as Hugging Face has no modules for them.
    Without a model: `names` of `with_adapter_of`, for every linear of `decoder(cfg)`.

    Raises `ValueError`, with its path, for a linear whose weight a checkpoint does not have; for an unknown family; and for a
    model without adapters.

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
    known = stored_leaves(where, cfg)
    if cfg.tied:  # the head has a module of its own, and its adapter leaves the embedding as it is
        known["head.weight"] = known["embed.weight"]._replace(names=("lm_head.weight",), paths=("head.weight",))
    found: dict[str, Any] = {}
    if model is None:
        every = [path for _, layers, _ in linears_of(decoder(cfg)) for path in layers if f"{path}.weight" in known]
        named = {path: _modules(path, known, cfg) for path in every}
        return {path: modules for path, modules in named.items() if modules is not None}
    for linear in adapted_linears(model):
        held = known.get(f"{linear.module}.weight")
        modules = None if held is None else _modules(linear.module, known, cfg)
        if modules is None:
            said = "whose weight a checkpoint does not have" if held is None else f"a part of {', '.join(held.names)}"
            fail(where, "model", "decoder(cfg) with adapters", f"an adapter at {linear.module}, {said}")
        found[linear.module] = modules
    require(bool(found), where, "model", "one that with_lora made", "one without adapters")
    return found


def _modules(path: str, known: Mapping[str, Any], cfg: DecoderConfig) -> str | RowsOf | ParameterOf | tuple[str, ...] | None:
    """The modules of a linear's weight; None for a part of several tensors."""
    held = known[f"{path}.weight"]
    order = held.order(cfg)
    parameter = _parameter(path, held, f"{path.removesuffix('.gate')}.experts.up.weight" in known)
    if parameter:
        return ParameterOf(parameter, () if order is None else tuple(order.tolist()))
    names = tuple(name.removesuffix(".weight") for name in held.names)
    rows = range(held.first, held.first + held.leaf[0])
    if order is None and len(held.paths) == 1:
        return names[0] if len(names) == 1 else names
    if len(names) > 1:
        return None
    return RowsOf(names[0], held.shape[0], rows if order is None else tuple(order[rows.start : rows.stop].tolist()))


def _parameter(path: str, held: Any, router: bool) -> str:
    """The parameter of Hugging Face's model that is the weight of a router or of a layer of experts; "" for any other linear. Its
    modules have the same names in every family, whatever the files have."""
    if not (held.rule.stacked or router):
        return ""
    names = held.names[0].split(".")  # model.layers.N.mlp.gate.weight
    experts = f"experts.{'down_proj' if path.endswith('.down') else 'gate_up_proj'}"
    return ".".join((*names[:3], "mlp", experts if held.rule.stacked else f"{names[4]}.weight"))
