"""Language models: `DecoderConfig` describes one, `decoder` makes its chain, `decode` and `generate` continue a text, and `from_hf`
and `to_hf` read and write Hugging Face's checkpoints; `hf_paths` their modules by path, to compare runs;
`peft_names` gives PEFT's names of a decoder's linears; `pack` puts documents
into one row. `moe` makes the chain of a mixture of experts alone, `plain_experts` the chain of its experts as separate steps."""

from funcops.library.ops.expert_steps import plain_experts
from funcops.models.cache import Cache, KVCache, cache_init, roll_back
from funcops.models.decode import decode, generate
from funcops.models.decoder import decoder, decoder_x
from funcops.models.decoder_config import DecoderConfig, LatentConfig, LinearAttentionConfig, layer_paths
from funcops.models.documents import PackedDocuments, pack
from funcops.models.hf import from_hf, open_hf, to_hf
from funcops.models.hf_paths import hf_paths
from funcops.models.mixture import MoEConfig, moe
from funcops.models.peft import peft_names
from funcops.models.sampling import Sampled, SamplingConfig, log_probabilities, sample
from funcops.models.self_check import check_invariant
from funcops.models.sharding_rules import roles

__all__ = ["Cache", "DecoderConfig", "KVCache", "LatentConfig", "LinearAttentionConfig", "MoEConfig"]
__all__ += ["PackedDocuments", "Sampled", "SamplingConfig", "check_invariant", "log_probabilities"]
__all__ += ["cache_init", "decode", "decoder", "decoder_x", "from_hf", "generate", "hf_paths", "layer_paths"]
__all__ += ["moe", "open_hf", "pack", "peft_names", "plain_experts", "roles", "roll_back", "sample", "to_hf"]
