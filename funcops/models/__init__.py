"""Language models: `DecoderConfig` says what one is, `decoder` makes a chain of it, `decode` and `generate` go on with a text, and
`from_hf` and `to_hf` read and write the checkpoints of Hugging Face's; `peft_names` says what PEFT calls a decoder's linears. `moe`
is the chain of a mixture of experts alone, `plain_experts` that of its experts in steps."""

from funcops.compose.plain_experts import plain_experts
from funcops.models.cache import Cache, KVCache, cache_init
from funcops.models.decode import decode, generate
from funcops.models.decoder import DecoderConfig, LatentConfig, decoder, decoder_x, layer_paths
from funcops.models.hf import from_hf, open_hf, to_hf
from funcops.models.mixture import MoEConfig, moe
from funcops.models.peft import peft_names
from funcops.models.roles import roles
from funcops.models.sampling import SamplingConfig, sample

__all__ = [
    "Cache",
    "DecoderConfig",
    "KVCache",
    "LatentConfig",
    "MoEConfig",
    "SamplingConfig",
    "cache_init",
    "decode",
    "decoder",
    "decoder_x",
    "from_hf",
    "generate",
    "layer_paths",
    "moe",
    "open_hf",
    "peft_names",
    "plain_experts",
    "roles",
    "sample",
    "to_hf",
]
