"""The modules of a Hugging Face model by the paths of this library's decoder, so that two runs are compared by step."""

from __future__ import annotations

from funcops.engine.errors import require_type
from funcops.models.decoder_config import DecoderConfig, layer_paths
from funcops.models.hf import stored_leaves


def hf_paths(cfg: DecoderConfig) -> dict[str, str]:
    """The path in `decoder(cfg)` of each module of Hugging Face's model that computes the same, and of its layers: what
    `funcops.compare` takes as `names`. A module that is a part of a step here, as `gate_proj` and `up_proj` of an MLP, is left out.
    Raises `ValueError` for a config without a family.

    >>> from funcops.models import DecoderConfig, hf_paths
    >>> cfg = DecoderConfig(vocab=8, dim=8, layers=1, heads=2, kv_heads=2, head_size=4, hidden=8, context=8, family="llama")
    >>> found = hf_paths(cfg)
    >>> found["model.layers.0.mlp.down_proj"], found["model.layers.0"]
    ('blocks.0.mlp.down', 'blocks.0.mlp')
    """
    require_type("hf_paths", "cfg", cfg, DecoderConfig)
    found = {}
    for path, stored in stored_leaves("hf_paths", cfg).items():
        alike = len(stored.names) == len(stored.paths) == 1 and not stored.rule.order
        step, _, leaf = path.rpartition(".")
        if alike and leaf == "weight":
            found[stored.names[0].rpartition(".")[0]] = step
    layers = {name.split(".layers.")[0] for name in found if ".layers." in name}
    for prefix in layers:
        # a layer ends with the sum of its MLP's skip
        found |= {f"{prefix}.layers.{i}": f"{path}.mlp" for i, path in enumerate(layer_paths(cfg))}
    return found
