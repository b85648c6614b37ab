"""Language models: `DecoderConfig` says what one is, `decoder` makes a chain of it, `decode` and `generate` go on with a text, and
`from_hf` and `to_hf` read and write the checkpoints of Hugging Face's; `peft_names` says what PEFT calls a decoder's linears. `moe`
is the chain of a mixture of experts alone, `plain_experts` that of its experts in steps."""

from funcops.compose.plain_experts import plain_experts as plain_experts
from funcops.models.cache import Cache as Cache
from funcops.models.cache import KVCache as KVCache
from funcops.models.cache import cache_init as cache_init
from funcops.models.decode import decode as decode
from funcops.models.decode import generate as generate
from funcops.models.decoder import DecoderConfig as DecoderConfig
from funcops.models.decoder import LatentConfig as LatentConfig
from funcops.models.decoder import decoder as decoder
from funcops.models.decoder import decoder_x as decoder_x
from funcops.models.decoder import layer_paths as layer_paths
from funcops.models.hf import from_hf as from_hf
from funcops.models.hf import open_hf as open_hf
from funcops.models.hf import to_hf as to_hf
from funcops.models.mixture import MoEConfig as MoEConfig
from funcops.models.mixture import moe as moe
from funcops.models.peft import peft_names as peft_names
from funcops.models.roles import roles as roles
from funcops.models.sampling import SamplingConfig as SamplingConfig
from funcops.models.sampling import sample as sample
