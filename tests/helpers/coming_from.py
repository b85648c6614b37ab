"""The tables of docs/coming-from-*.md: their rows, a row's fault, and the other library's names that need a row."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import funcops

DOCS = Path(__file__).resolve().parents[2] / "docs"
CODE = re.compile(r"`([^`]+)`")
MAY_CHANGE = ("kernels", "program")  # rooms that no page promises anything of


class Row(NamedTuple):
    section: str
    theirs: str
    here: str
    why: str


def rows(text: str) -> Iterator[Row]:
    """The rows of every table whose second column is "here"."""
    section, inside = "", False
    for line in text.splitlines():
        section = line.lstrip("# ") if line.startswith("#") else section
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) == 3 and cells[1] == "here":
            inside = True
        elif not cells:
            inside = False
        elif inside and set(line) - set("|-: "):
            yield Row(section, *(cells + ["", "", ""])[:3])


def fault(row: Row) -> str | None:
    """The fault of a row, if any: an unknown name, an argument that the name does not take, a reason that is missing."""
    names = CODE.findall(row.here)
    if not row.theirs:
        return "names nothing"
    if row.here.startswith("not here"):
        return None if len(row.why.split()) >= 4 else "does not say why it is not here"
    if not names:
        return "names nothing here"
    for name in names:
        try:
            found(ast.parse(name, mode="eval").body)
        except (AttributeError, ModuleNotFoundError, NameError, SyntaxError, TypeError, ValueError) as error:
            return f"{name}: {error}"
    return None


def found(node: ast.expr) -> Any:
    """The value of an expression of funcops' names. A config whose arguments are all given is made; for any other call, such as
    one with `...`, the names of the arguments are looked up."""
    if not isinstance(node, ast.Call):
        return value_of(ast.unparse(node))
    called = found(node.func)
    keywords = {word.arg: word.value for word in node.keywords if word.arg}
    parameters = inspect.signature(called).parameters
    if unknown := set(keywords) - set(parameters):
        raise TypeError(f"takes no {', '.join(sorted(unknown))}")
    if inspect.isclass(called) and ... not in map(constant, [*node.args, *keywords.values()]):
        return called(*map(constant, node.args), **{word: constant(value) for word, value in keywords.items()})
    return None


def constant(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(constant(part) for part in node.elts)
    if isinstance(node, ast.Dict):
        return {constant(key): constant(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return found(node)


def value_of(name: str) -> Any:
    """A public name of funcops, an importable module of it, or a field of a config or tuple."""
    value: Any = funcops
    for part in name.split("."):
        if part.startswith("_") or (value is funcops and part in MAY_CHANGE):
            raise NameError("is not public")
        fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
        if hasattr(value, part):
            value = getattr(value, part)
        elif part in fields:
            return part
        elif inspect.ismodule(value):
            value = importlib.import_module(f"{value.__name__}.{part}")
        else:
            raise AttributeError(f"has no {part}")
    return value


def theirs(name: str, sections: tuple[str, ...] = ()) -> list[str]:
    """The names in the first column of a page, or of some of its sections, in order."""
    found = (row for row in rows((DOCS / name).read_text()) if not sections or row.section in sections)
    return [one for row in found for one in CODE.findall(row.theirs)]


TRANSFORMER_ENGINE = {  # transformer_engine/pytorch at d0067d0: ops/basic, ops/fused, module/linear.py, ../common/recipe
    "Basic ops": """BasicLinear Bias GELU QGELU ReLU SReLU SiLU GLU GEGLU QGEGLU ReGLU SReGLU SwiGLU ClampedSwiGLU SiTUGLU
        ScaledSReLU ScaledSwiGLU ScaledClampedQGeGLU ScaledSiTUGLU LayerNorm RMSNorm L2Normalization Dropout AddExtraInput
        MakeExtraOutput ConstantScale Quantize Reshape Identity AllGather ReduceScatter AllReduce GroupedLinear""",
    "Fused ops": """ForwardLinearBiasActivation ForwardLinearBiasAdd ForwardLinearScaleAdd BackwardLinearAdd BackwardLinearScale
        BackwardActivationBias BackwardAddRMSNorm UserbuffersForwardLinear UserbuffersBackwardLinear GroupedMLP_CuTeGEMMGLU
        GroupedMLP_CuTeGEMMUnary""",
    "Arguments of `Linear`": """in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size
        get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype parallel_mode parameters_split device
        ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type
        save_original_input name is_first_microbatch fp8_output fp8_grad dtype tensor_parallel_mode tensor_parallel_group
        rng_state_tracker_function accumulate_into_main_grad userbuffers_options""",
    "Recipes": """DelayedScaling DelayedScaling.margin DelayedScaling.fp8_format DelayedScaling.amax_history_len
        DelayedScaling.amax_compute_algo DelayedScaling.scaling_factor_compute_algo DelayedScaling.reduce_amax
        Float8CurrentScaling Float8CurrentScaling.use_power_2_scales Float8CurrentScaling.fp8_format
        Float8BlockScaling Float8BlockScaling.use_f32_scales Float8BlockScaling.fp8_format
        x_block_scaling_dim w_block_scaling_dim grad_block_scaling_dim
        MXFP8BlockScaling MXFP8BlockScaling.margin MXFP8BlockScaling.fp8_format enable_2d_quantization
        NVFP4BlockScaling disable_rht disable_stochastic_rounding disable_2d_quantization row_scaled_activation nvfp4_4over6
        nvfp4_4over6_e4m3_use_256 nvfp4_4over6_err_mode fp4_format
        CustomRecipe CustomRecipe.qfactory QuantizerRole QuantizerRequest DelayedScalingRequest quantization_alignment
        Format QParams.power_2_scale QParams.amax_epsilon QParams.random_hadamard_transform QParams.stochastic_rounding
        QParams.fp4_2d_quantization MMParams.use_split_accumulator fp8_dpa fp8_mha""",
}
MEGATRON = {  # megatron/core at d98e8a6: tensor_parallel/__init__.py's __all__, and the files of fusions/
    "`core.tensor_parallel`": """vocab_parallel_cross_entropy broadcast_data ColumnParallelLinear RowParallelLinear
        VocabParallelEmbedding set_tensor_model_parallel_attributes set_defaults_if_not_set_tensor_model_parallel_attributes
        copy_tensor_model_parallel_attributes copy_gtp_attributes param_is_not_tensor_parallel_duplicate param_is_not_gtp_duplicate
        linear_with_grad_accumulation_and_async_allreduce copy_to_tensor_model_parallel_region
        gather_from_tensor_model_parallel_region gather_from_sequence_parallel_region reduce_from_tensor_model_parallel_region
        reduce_scatter_to_sequence_parallel_region scatter_to_tensor_model_parallel_region scatter_to_sequence_parallel_region
        checkpoint convert_cuda_rng_state get_cuda_rng_tracker model_parallel_cuda_manual_seed get_expert_parallel_rng_tracker_name
        CheckpointWithoutOutput split_tensor_along_last_dim split_tensor_into_1d_equal_chunks gather_split_1d_tensor""",
    "Pipelines": """get_forward_backward_func forward_backward_no_pipelining forward_backward_pipelining_without_interleaving
        forward_backward_pipelining_with_interleaving""",
    "Mixtures of experts": """MoELayer TopKRouter TEGroupedMLP SequentialMLP SharedExpertMLP MoEAlltoAllTokenDispatcher
        MoEFlexTokenDispatcher MoEAllGatherTokenDispatcher""",
    "Fusions": """fused_bias_dropout fused_bias_geglu fused_bias_gelu fused_bias_swiglu fused_cross_entropy fused_indices_converter
        fused_layer_norm fused_mla_yarn_rope_apply fused_pad_routing_map fused_softmax fused_weighted_squared_relu""",
}
LIGER = {  # liger_kernel/transformers/__init__.py's __all__ and functional.py at ead96b6
    "Layers and functions": """LigerCrossEntropyLoss LigerDyT LigerFusedLinearCrossEntropyLoss LigerFusedLinearJSD LigerGEGLUMLP
        LigerJSD LigerLayerNorm LigerFusedAddRMSNorm LigerModulatedRMSNorm LigerPolyNorm LigerReLUSquared LigerRMSNorm
        liger_rotary_pos_emb liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb LigerBlockSparseTop2MLP
        LigerFalconH1SwiGLUMLP LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP LigerTiledGEGLUMLP LigerTiledSwiGLUMLP
        LigerTVDLoss LigerKLDIVLoss LigerMHC LigerMultiTokenAttention LigerSoftmax LigerSparsemax LigerMLP LigerFalconH1MLP
        LigerExperts LigerVocabParallelCrossEntropy
        liger_cross_entropy liger_fused_linear_cross_entropy liger_fused_linear_jsd liger_geglu liger_group_norm liger_jsd
        liger_kl_div liger_sparsemax liger_multi_token_attention liger_fused_neighborhood_attention liger_tvd liger_layer_norm
        liger_qwen2vl_mrope liger_relu_squared liger_rms_norm liger_modulated_rms_norm liger_poly_norm liger_fused_add_rms_norm
        liger_rope liger_swiglu liger_softmax liger_dyt liger_mhc_coeffs liger_mhc_pre liger_mhc_post_res liger_mhc_apply
        liger_attn_res liger_mhc_forward""",
    "Models": "AutoLigerKernelForCausalLM",
}
JAX = {  # jax.checkpoint_policies, of its documentation
    "Policies of `jax.checkpoint`": """everything_saveable nothing_saveable dots_saveable checkpoint_dots
        dots_with_no_batch_dims_saveable save_only_these_names save_anything_except_these_names save_any_names_but_these
        save_and_offload_only_these_names offload_dot_with_no_batch_dims save_from_both_policies""",
    "Gradients": "jax.vjp jax.custom_vjp jax.checkpoint",
    "Many devices": "jax.shard_map",
}
TORCH_REMAT = {  # torch_remat 0.2.2, and torch.utils.checkpoint's __all__ without what it deprecates
    "Names of torch_remat": """checkpoint recompute_needs_tensor save_for_backward RecomputeStateHook saved_tensors_hooks
        SavedTensorInfo SavedTensorKind current_saved_tensor_info is_placeholder is_recomputing name_scope collect_trace
        trace_scope format_current_memory_report print_current_memory_report format_saved_tensors_report
        print_saved_tensors_report discover_autograd_roots memory_snapshot_annotate clear_memory_snapshot_cache
        format_oom_saved_tensors_report oom_observer""",
    "Names of torch.utils.checkpoint": """checkpoint checkpoint_sequential create_selective_checkpoint_contexts CheckpointPolicy
        SelectiveCheckpointContext SAC_IGNORED_OPS noop_context_fn CheckpointError set_checkpoint_early_stop
        set_checkpoint_debug_enabled check_backward_validity detach_variable get_device_states set_device_states
        DefaultDeviceType GraphExecGroup""",
}
NAMES = {
    "coming-from-transformer-engine.md": TRANSFORMER_ENGINE,
    "coming-from-megatron.md": MEGATRON,
    "coming-from-liger.md": LIGER,
    "coming-from-jax.md": JAX,
    "coming-from-torch-remat.md": TORCH_REMAT,
}
