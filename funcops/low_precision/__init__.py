"""Low precision over a whole model: recipes in a config, a working tree of params, and the state of delayed scaling.

    cfg, state = with_recipe(cfg, Fp8Block(), skip=("head",)), {}    # once
    work, main_grad = begin_step(params, cfg, state)                  # once a step, instead of cast(params, torch.bfloat16)
    for x in microbatches:
        y, residuals = chain.fwd(work, x, cfg)
        chain.bwd(residuals, dy, cfg, into=main_grad)
    grads, state = end_step(main_grad, cfg, state)

The library keeps no state between steps: the working tree is the cache of quantised weights. Only `Fp8Delayed` has state, a dict by
path that the caller keeps; its amaxes come back with the gradients. In parts:

    work = quantize_params(params, cfg, state)
    main_grad = gradients_like(work)
    grads, amaxes = split_amaxes(main_grad)
    state = recipe_update(state, amaxes, recipe)                      # the first: recipe_init(cfg, params, amaxes=amaxes)
"""

from funcops.library.formats import NF4, Format, NF4Tensor, QTensor, QWeight, dense, quantize_tensor
from funcops.library.formats.recipes import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed, Recipe
from funcops.library.formats.rounding import Rounding
from funcops.library.formats.scaled import Scaled
from funcops.low_precision.delayed import ScaleState, recipe_init, recipe_update, split_amaxes
from funcops.low_precision.params import gradients_like, quantize_params, with_keys
from funcops.low_precision.report import LinearErrors, Operand, QuantizationReport, quantization_report
from funcops.low_precision.rewrite import with_recipe
from funcops.low_precision.step import begin_step, end_step
from funcops.low_precision.total import AddedErrors, ModelErrors, WideLayers
from funcops.low_precision.watch import rounding_logs, weight_rounding
from funcops.low_precision.weight_only import quantize_weight, quantize_weights, weight_only, with_weight_only

__all__ = ["MXFP8", "NF4", "NVFP4", "AddedErrors", "Format", "Fp8Block", "Fp8Current", "Fp8Delayed", "LinearErrors", "ModelErrors"]
__all__ += ["NF4Tensor", "Operand", "QTensor", "QWeight", "QuantizationReport", "Recipe", "Rounding", "ScaleState", "Scaled"]
__all__ += ["begin_step", "dense", "end_step", "gradients_like", "quantization_report", "quantize_params"]
__all__ += ["quantize_tensor", "quantize_weight", "quantize_weights", "recipe_init", "recipe_update"]
__all__ += ["split_amaxes", "weight_only", "with_keys", "with_recipe", "with_weight_only", "WideLayers"]
__all__ += ["rounding_logs", "weight_rounding"]
