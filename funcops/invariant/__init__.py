"""A model whose rows have the same bits whatever else is in the batch, in training and in decoding.

    cfg = with_invariant(decoder(model))                    # the mode is in the config, and so in the residuals
    logits, residuals = chain.fwd(params, x, cfg)           # a row's bits, and its gradient's, are its own

Kernels run in blocks of constant sizes, and a part that lets rows depend on each other raises by its path.
"""

from funcops.invariant.pinned import PinnedConfig, pinned
from funcops.invariant.rewrite import with_invariant

__all__ = ["PinnedConfig", "pinned", "with_invariant"]
