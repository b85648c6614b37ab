"""Low precision over a whole model: recipes in a config, a working tree of params, and the state of delayed scaling.

    cfg = with_recipe(cfg, Fp8Block(), skip=("head",))          # once
    work = quantize_params(params, cfg)                          # once a step, where cast(params, torch.bfloat16) would stand
    for x in microbatches:
        y, residuals = chain.fwd(work, x, cfg)
        chain.bwd(residuals, dy, cfg, into=grads)

Nothing is kept between steps but what the caller keeps: the working tree is the cache of quantised weights. `Fp8Delayed` alone has
state, a dict by path; its amaxes come back with the gradients:

    state = recipe_init(cfg, params)
    work = quantize_params(params, cfg, state)
    ...
    grads, amaxes = split_amaxes(dparams)
    state = recipe_update(state, amaxes, recipe)
"""

from funcops.formats import Format as Format
from funcops.formats import QTensor as QTensor
from funcops.formats import QWeight as QWeight
from funcops.formats import dense as dense
from funcops.formats import quantize_tensor as quantize_tensor
from funcops.formats.recipes import MXFP8 as MXFP8
from funcops.formats.recipes import NVFP4 as NVFP4
from funcops.formats.recipes import Fp8Block as Fp8Block
from funcops.formats.recipes import Fp8Current as Fp8Current
from funcops.formats.recipes import Fp8Delayed as Fp8Delayed
from funcops.formats.recipes import Recipe as Recipe
from funcops.formats.scaled import Scaled as Scaled
from funcops.low_precision.delayed import ScaleState as ScaleState
from funcops.low_precision.delayed import recipe_init as recipe_init
from funcops.low_precision.delayed import recipe_update as recipe_update
from funcops.low_precision.delayed import split_amaxes as split_amaxes
from funcops.low_precision.params import gradients_like as gradients_like
from funcops.low_precision.params import quantize_params as quantize_params
from funcops.low_precision.params import with_keys as with_keys
from funcops.low_precision.report import LinearErrors as LinearErrors
from funcops.low_precision.report import Operand as Operand
from funcops.low_precision.report import QuantizationReport as QuantizationReport
from funcops.low_precision.report import quantization_report as quantization_report
from funcops.low_precision.rewrite import with_recipe as with_recipe
from funcops.ops.qlinear import op_of as op_of

__all__ = [
    "MXFP8",
    "NVFP4",
    "Format",
    "Fp8Block",
    "Fp8Current",
    "Fp8Delayed",
    "LinearErrors",
    "Operand",
    "QTensor",
    "QWeight",
    "QuantizationReport",
    "Recipe",
    "ScaleState",
    "Scaled",
    "dense",
    "gradients_like",
    "op_of",
    "quantization_report",
    "quantize_params",
    "quantize_tensor",
    "recipe_init",
    "recipe_update",
    "split_amaxes",
    "with_keys",
    "with_recipe",
]
