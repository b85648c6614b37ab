"""Low precision over a whole model: recipes in a config, a working tree of params, and the state of delayed scaling.

    cfg = with_recipe(cfg, Fp8Block(), skip=("head",))          # once
    work = quantize_params(params, cfg)                          # once a step, instead of cast(params, torch.bfloat16)
    for x in microbatches:
        y, residuals = chain.fwd(work, x, cfg)
        chain.bwd(residuals, dy, cfg, into=grads)

The library keeps no state between steps: the working tree is the cache of quantised weights. Only `Fp8Delayed` has state, a dict by
path that the caller keeps; its amaxes come back with the gradients:

    state = recipe_init(cfg, params)
    work = quantize_params(params, cfg, state)
    ...
    grads, amaxes = split_amaxes(dparams)
    state = recipe_update(state, amaxes, recipe)
"""

from funcops.formats import Format, QTensor, QWeight, dense, quantize_tensor
from funcops.formats.recipes import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed, Recipe
from funcops.formats.scaled import Scaled
from funcops.low_precision.delayed import ScaleState, recipe_init, recipe_update, split_amaxes
from funcops.low_precision.params import gradients_like, quantize_params, with_keys
from funcops.low_precision.report import LinearErrors, Operand, QuantizationReport, quantization_report
from funcops.low_precision.rewrite import with_recipe
from funcops.ops.qlinear import op_of

__all__ = ["MXFP8", "NVFP4", "Format", "Fp8Block", "Fp8Current", "Fp8Delayed", "LinearErrors"]
__all__ += ["Operand", "QTensor", "QWeight", "QuantizationReport", "Recipe", "ScaleState", "Scaled"]
__all__ += ["dense", "gradients_like", "op_of", "quantization_report", "quantize_params"]
__all__ += ["quantize_tensor", "recipe_init", "recipe_update", "split_amaxes", "with_keys", "with_recipe"]
