"""LoRA: low-rank adapters on the linear steps and embeddings of a model whose own weights are frozen.

    cfg = with_lora(base, rank=8, targets=("*.q.proj", "*.v.proj"), alpha=16)     # y = base(x) + (alpha / rank) x a^T b^T
    params = lora_init(params, cfg, key=key)                                      # b is zero: the same y
    y, residuals = chain.fwd(params, x, cfg, needs=lora_needs(cfg))               # frozen weights save no input
    grads = adapter(chain.bwd(residuals, dy, cfg)[0], cfg)                        # only a's and b's
    params = with_adapter(params, updated, cfg)
    params = merge(params, cfg)                                                   # for `base` again

An adapted linear at path p has its own params at p.both.base and a, b at p.both.lora. Files are PEFT's: `save_adapter`,
`load_adapter`. Source: LoRA, arXiv 2106.09685.
"""

from funcops.library.ops.low_rank import LowRankConfig, LowRankParams, low_rank
from funcops.lora.files import load_adapter, save_adapter
from funcops.lora.from_folder import with_adapter_of
from funcops.lora.params import adapter, lora_init, lora_needs, merge, unmerge, with_adapter
from funcops.lora.rewrite import with_lora
from funcops.lora.settings import ParameterOf, RowsOf

__all__ = ["LowRankConfig", "LowRankParams", "ParameterOf", "RowsOf"]
__all__ += ["adapter", "load_adapter", "lora_init", "lora_needs", "low_rank"]
__all__ += ["merge", "save_adapter", "unmerge", "with_adapter", "with_adapter_of", "with_lora"]
