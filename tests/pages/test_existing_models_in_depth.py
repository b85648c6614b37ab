"""The page on existing models in depth: each sentence has a test, which this file names or is."""

import types

import pytest
import torch
from existing_models import (
    ADAPTERS,
    AGAIN,
    ALIVE,
    BLOCKS,
    BY_RECIPE,
    BYTES,
    CUT,
    FIRST,
    GRAPH,
    GRAPHS,
    INPUTS,
    KEPT_BETWEEN,
    LINKS,
    LOW,
    NN,
    OPS,
    PARTS,
    RECIPES,
    RULES,
    STRIDES,
    TRACERS,
    TWO_RANKS,
    WHOLE,
    D,
    nodes,
)
from launches import Operators
from sentences import ROOT, check_held, checks, sentences
from torch import nn

from funcops import TorchConfig, op_from_module, op_from_torch, random
from funcops import nn as fnn
from funcops.adapters.nn import whole
from funcops.low_precision import NVFP4, Fp8Block

DOORS = f"{ADAPTERS}test_doors.py::"
CHECKPOINTED = f"{ADAPTERS}test_checkpointed.py::test_gradients_are_those_of_the_plain_model"
HELD_TRACES = f"{ADAPTERS}test_traces_held.py::"
GRAPHED = "tests/graphs/test_graphed_traces.py::"
TRANSFORMED = f"{ADAPTERS}test_transformed_traces.py::"
DONATED = f"{ADAPTERS}test_donated_traces.py::"
PROFILED = f"{ADAPTERS}test_profiled_traces.py::"
BATCHED = f"{ADAPTERS}test_batched_traces.py::"
BOTH = "tests/pages/test_existing_models.py::"  # what both pages say
PAGE = (ROOT / "docs" / "existing-models-in-depth.md").read_text()


def op_holds_64_traces():
    op = op_from_torch(lambda params, x, cfg: x * x)
    with pytest.warns(RuntimeWarning, match="more than 64 traces"):
        for rows in range(66):
            op.fwd(None, torch.ones(rows), TorchConfig())
    assert [t.x[""] for t in op.traces()] == [f"float32[{rows}]" for rows in range(2, 66)]


def traces_where_a_tensor_requires_grad():
    x = torch.randn(3, D)
    frozen = fnn.Linear(D, D).requires_grad_(False)
    torch.testing.assert_close(torch.jit.trace(frozen, x)(2 * x), frozen(2 * x))
    for layer, given in ((fnn.Linear(D, D), x), (fnn.GELU(), x.clone().requires_grad_())):
        with pytest.raises(RuntimeError, match=r"torch.jit.trace must be around calls under torch.no_grad\(\)"):
            torch.jit.trace(layer, given)


def left_layers_run_after_a_move():
    holder = nn.ModuleDict({"act": nn.GLU(), "drop": nn.Dropout(), "last": nn.Linear(D, D)})
    assert [one.path for one in fnn.from_torch(holder).left] == ["act", "drop"]
    done = fnn.from_torch(holder.to("meta"))
    assert [one.path for one in done.replaced] == ["act", "drop"] and not done.left


def group_norms_run_torchs_operator():
    layer, x = fnn.GroupNorm(2, 4), torch.randn(2, 4, D, requires_grad=True)
    with Operators(ran := []):
        layer(x).sum().backward()
    assert {"native_group_norm", "native_group_norm_backward"} <= set(ran)


def products_have_quantised_operands():
    x, dy = torch.randn(8, 32), torch.randn(8, 32)
    for recipe, quantised in ((Fp8Block(), 3), (Fp8Block(keep="input", wgrad="high"), 2)):
        layer, leaf = fnn.Linear(32, 32, bias=False, recipe=recipe), x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        w, y = layer.weight.detach(), y.detach()
        dw = layer.weight.grad
        errors = [float((a - b).norm() / b.norm()) for a, b in ((y, x @ w.T), (leaf.grad, dy @ w), (dw, dy.T @ x))]
        assert [error > 0.01 for error in errors] == [True] * quantised + [False] * (3 - quantised), errors
        assert dw.dtype is torch.float32 and errors[-1] < (0.1 if quantised == 3 else 1e-6)


def low():
    recipe = Fp8Block()
    return fnn.Sequential(fnn.RMSNorm(32), fnn.Linear(32, 32, recipe=recipe), fnn.SiLU(), fnn.Linear(32, 32, recipe=recipe))


def a_write_through_data_is_not_noticed():
    layers, x = low(), torch.randn(4, 32)
    fnn.quantize_weights(layers)
    y = layers(x)
    layers[1].weight.data.mul_(2.0)
    assert torch.equal(layers(x), y)


def a_layer_with_codes_is_a_module():
    layers, x = low(), torch.randn(4, 32)
    assert nodes(layers(x)) == ["_NodeBackward"]
    fnn.quantize_weights(layers)
    assert nodes(layers(x)) == ["_NodeBackward"] * 4


def codes_under_autocast_and_with_a_key():
    layer, x = fnn.Linear(32, 32, recipe=NVFP4(stochastic=True)), torch.randn(4, 32)
    with pytest.raises(ValueError, match="key must be a random key"):
        fnn.quantize_weights(layer, dtype=torch.bfloat16)
    fnn.quantize_weights(layer, dtype=torch.bfloat16, key=random.key(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16


def functions_that_depend_on_values_are_refused():
    for fn in (lambda params, x, cfg: x[x > 0], lambda params, x, cfg: x * (2 if x.sum() > 0 else 3)):
        with pytest.raises(ValueError, match="own_fwd: fn must be a function whose shapes and steps do not depend on values"):
            op_from_torch(fn, name="own").fwd(None, torch.ones(3), TorchConfig())


def gradients_of_other_strides_are_copied():
    """To the strides of the trace, as a `view` in the backward would raise for others."""
    op, cfg, x = op_from_torch(lambda params, x, cfg: x.view(3, 4).sin(), name="own"), TorchConfig(), torch.randn(12)
    dy, seen = torch.randn(4, 3).mT, []
    for one in (dy.contiguous(), dy):
        residuals = op.fwd(None, x, cfg)[1]
        with Operators(names := []):
            dx = op.bwd(residuals, one, cfg)[1]
        torch.testing.assert_close(dx, dy.reshape(-1) * x.cos())
        seen.append(names)
    plain, copied = seen
    assert len(copied) > len(plain)


def closures_that_require_grad_are_refused():
    own = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="takes tensors that require grad as params or x"):
        op_from_torch(lambda params, x, cfg: x * own, name="own").fwd(None, torch.ones(3), TorchConfig())


def numbers_of_python_are_drawn_once_a_trace():
    import random as python_random

    import numpy as np

    op = op_from_torch(lambda params, x, cfg: x * python_random.random() * float(np.random.rand()), name="own")
    first, again, other = (op.fwd(None, torch.ones(size), TorchConfig())[0][0] for size in (2, 2, 3))
    assert first == again != other


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.array, self.config = torch.ones(2**18).numpy(), types.SimpleNamespace(inner=Inner())

    def forward(self, x):
        return x * float(self.array[0]) * getattr(self.config.inner, "".join(("po", "wer"))).by


class Inner:
    def __init__(self):
        self.power = types.SimpleNamespace(by=2.0)
        self.power.owner = self


def some_changes_are_not_seen():
    """An array of four bytes more than 1 MiB, and a name that is made at run time."""
    module, x = Scaled(), torch.ones(3)
    module.array = torch.ones(2**18 + 1).numpy()
    op, params = op_from_module(module, x)
    y, _ = op.fwd(params, x, TorchConfig())
    module.array[0] = 5.0
    module.config.inner.power.by = 3.0
    assert torch.equal(op.fwd(params, x, TorchConfig())[0], y) and not torch.equal(module(x), y)


class Asks(nn.Module):
    def forward(self, x):
        return x * (2 if torch.is_grad_enabled() else 3)


def traces_are_in_grad_mode():
    op, params = op_from_module(Asks(), torch.ones(3))
    with torch.no_grad():
        assert torch.equal(op.fwd(params, torch.ones(3), TorchConfig())[0], Asks()(torch.ones(3)) / 3 * 2)
    with torch.inference_mode():
        assert torch.equal(op.fwd(params, torch.ones(3), TorchConfig())[0], 2 * torch.ones(3))


def thirty_two_traces():
    assert whole.TRACES == 32


HELD = {  # by how each sentence of the page begins: what holds it
    "This page has what": LINKS,
    "Its code builds on this": BLOCKS,
    "With `from_torch(model, example=...)`": f"{GRAPH}test_three_steps_have_the_same_bits",
    "Every new shape of the inputs": (f"{GRAPH}test_calls_of_every_kind", BLOCKS),
    "`example` has the arguments": (f"{GRAPH}test_it_is_undone_and_set_once", f"{GRAPH}test_wrong_arguments"),
    "Results, gradients, buffers": (
        f"{GRAPH}test_three_steps_have_the_same_bits",
        f"{GRAPH}test_fewer_bytes_than_autograd",
        f"{GRAPHS}test_steps_have_the_same_bits_and_keep_fewer_bytes",
    ),
    "The model stays the same object": (
        f"{GRAPH}test_three_steps_have_the_same_bits",
        f"{GRAPHS}test_steps_have_the_same_bits_and_keep_fewer_bytes",
    ),
    "It is traced anew after a change": (
        f"{GRAPH}test_modes_frozen_parameters_and_dtypes",
        f"{GRAPH}test_autocast_is_a_trace_of_its_own",
        f"{GRAPH}test_copies",
    ),
    "Hooks of the model itself": f"{GRAPH}test_hooks_at_its_border_run",
    "Without gradients, and under": (f"{GRAPH}test_without_gradients_it_runs_as_before", f"{GRAPH}test_what_calls_or_traces_it"),
    "`to_torch` undoes it.": f"{GRAPH}test_it_is_undone_and_set_once",
    "Call it before accelerate's": (
        f"{ADAPTERS}test_frameworks.py::test_a_whole_model_has_the_same_losses",
        f"{GRAPHS}test_adapters",
        TWO_RANKS,
    ),
    "Where `fully_shard` shards": TWO_RANKS,
    "A call that it cannot serve": (
        f"{GRAPH}test_a_step_that_cannot_be_traced_runs_as_before",
        f"{GRAPH}test_a_warning_names_the_line_of_the_call",
    ),
    "So it is for a step": (
        thirty_two_traces,
        f"{GRAPH}test_a_step_that_cannot_be_traced_runs_as_before",
        f"{GRAPH}test_hooks_of_its_parts_run_in_every_call",
        f"{GRAPH}test_arguments_of_other_classes_run_as_before",
        f"{GRAPH}test_many_shapes_run_as_before",
        f"{ADAPTERS}test_op_from_module.py::test_what_cannot_be_traced_is_refused_before_anything_is_changed",
    ),
    "`from_torch(model)` without an example": f"{FIRST}test_what_from_torch_leaves_to_layers",
    "It warns of nothing": f"{FIRST}test_parts_are_traced_where_a_whole_cannot_be",
    "So is each block inside": f"{FIRST}test_gradients_come_by_blocks_inside_distributed_data_parallel",
    "A model with an `nn.RNN`": (
        f"{FIRST}test_a_recurrent_model_is_left_to_torch",
        f"{ALIVE}test_x_may_be_written_to_where_torch_reads_y",
        BLOCKS,
    ),
    "A trace runs the forward": (
        f"{FIRST}test_a_trace_runs_the_forward_and_later_calls_do_not",
        f"{FIRST}test_a_forward_that_prints",
    ),
    "The gradients of a graph come": f"{FIRST}test_the_gradients_of_a_graph_come_together",
    "If the example cannot be traced": f"{GRAPH}test_a_model_that_cannot_be_traced_is_left_as_it_was",
    "| Hugging Face's `Trainer`": (f"{DOORS}test_a_callback_swaps_the_trainers_model", f"{DOORS}test_a_callback_of_trl"),
    "| accelerate": f"{ADAPTERS}test_frameworks.py::test_a_whole_model_has_the_same_losses",
    "| Lightning": f"{ADAPTERS}test_frameworks.py::test_a_whole_model_has_the_same_losses",
    "| PEFT": f"{ADAPTERS}test_peft.py::test_adapters",
    "| torchtitan": f"{DOORS}test_an_override_of_torchtitan",
    "| `kernels`": f"{DOORS}test_a_mapping_of_kernels",
    "`trainer_callback` swaps": f"{DOORS}test_a_callback_swaps_the_trainers_model",
    "Parameters stay the same": f"{DOORS}test_a_callback_swaps_the_trainers_model",
    "Other arguments of `from_torch`": (
        f"{DOORS}test_a_callback_swaps_the_trainers_model",
        f"{DOORS}test_a_callback_of_a_whole_model_keeps_the_bits",
    ),
    "An override of torchtitan": f"{DOORS}test_an_override_of_torchtitan",
    "A file `my_overrides.py`": (f"{DOORS}test_an_override_of_torchtitan", TWO_RANKS),
    "The package `kernels`": f"{DOORS}test_a_mapping_of_kernels",
    "The class of this one": f"{DOORS}test_a_mapping_of_kernels",
    "| adapters of PEFT": f"{ADAPTERS}test_peft.py::test_adapters",
    "| `gradient_checkpointing_enable()`": CHECKPOINTED,
    "| `torch.compile` |": f"{GRAPH}test_what_calls_or_traces_it",
    "| DistributedDataParallel |": TWO_RANKS,
    "| `fully_shard` |": TWO_RANKS,
    "| `torch.autocast` |": f"{GRAPH}test_autocast_is_a_trace_of_its_own",
    "A checkpoint's second run": CHECKPOINTED,
    "Transformers also leaves": f"{DOORS}test_checkpoints_leave_a_hook_on_the_embeddings",
    "Losses and gradients of swapped": (CHECKPOINTED, f"{GRAPH}test_three_steps_have_the_same_bits"),
    "A swapped layer's output": (
        STRIDES,
        f"{BOTH}layers_keep_no_more",
        f"{BYTES}test_a_swapped_activation_keeps_no_more_than_torchs",
    ),
    "Of a slice a linear layer": f"{ALIVE}test_no_more_is_alive_than_torchs",
    "With the same seed": f"{TRACERS}test_a_hook_does_not_change_the_mask",
    "In a model on a CPU": (f"{TRACERS}test_what_is_slower_alone_on_a_cpu_is_left_with_the_reason", left_layers_run_after_a_move),
    "Group norms run by": group_norms_run_torchs_operator,
    "What lies between two chains": (KEPT_BETWEEN, f"{NN}test_large_inputs_recompute_what_small_ones_keep"),
    "`torch.fx` traces": (f"{INPUTS}test_fx_and_jit_trace", f"{INPUTS}test_fx_says_what_it_cannot_trace"),
    "`torch.jit.trace` of an op": (traces_where_a_tensor_requires_grad, f"{INPUTS}test_fx_and_jit_trace"),
    "`torch.export` with": (f"{TRACERS}test_an_exported_batch_is_of_any_size", f"{TRACERS}test_dynamic_sizes_are_one_graph"),
    "`torch.jit.script` and": f"{TRACERS}test_tools_for_torchs_classes_refuse_by_name",
    "Linear layers take a recipe": BY_RECIPE,
    "FP8, MXFP8 or NVFP4": BY_RECIPE,
    "Parameters, their gradients": (products_have_quantised_operands, f"{RECIPES}test_codes_are_not_in_copies_or_state"),
    "`from_torch(model, recipe=": f"{RECIPES}test_from_torch_gives_recipes_and_takes_them_back",
    "An MLP whose linear layers": f"{RECIPES}test_mlps_of_hugging_face_are_chains_by_the_recipe_of_all_their_layers",
    "A layer with sizes": (f"{BOTH}conv1d_takes_no_recipe", f"{RECIPES}test_from_torch_gives_recipes_and_takes_them_back"),
    "Without `quantize_weights`": (BY_RECIPE[0], f"{RECIPES}test_codes_are_made_once_for_all_microbatches"),
    "If a parameter has changed": (
        a_write_through_data_is_not_noticed,
        f"{RECIPES}test_codes_of_a_weight_that_changed_raise",
        BLOCKS,
    ),
    "A layer that reads codes": a_layer_with_codes_is_a_module,
    "Under `torch.compile` it reads": (
        f"{RECIPES}test_a_step_with_an_optimiser_compiles_whole",
        f"{RECIPES}test_a_graph_quantises_in_every_replay",
    ),
    "Under `fully_shard` weights": TWO_RANKS,
    "Under autocast pass": (
        codes_under_autocast_and_with_a_key,
        BY_RECIPE[0],
        f"{RECIPES}test_keys_round_the_gradients_of_modules",
    ),
    "`Fp8Delayed` raises": (BY_RECIPE[1], f"{RECIPES}test_a_loop_over_the_functions_of_modules_takes_every_recipe", LINKS),
    "`op_from_torch(fn)` makes": (functions_that_depend_on_values_are_refused, f"{OPS}test_laws"),
    "Its backward is traced": f"{OPS}test_residuals_have_names_and_split",
    "A gradient with other strides": gradients_of_other_strides_are_copied,
    "A tensor that requires grad": (closures_that_require_grad_are_refused, f"{AGAIN}test_a_captured_tensor_is_guarded"),
    "A forward after a change": (
        f"{AGAIN}test_a_value_that_was_rebound_is_read_by_the_next_forward",
        f"{AGAIN}test_a_long_container_is_compared",
        f"{AGAIN}test_a_part_of_a_module_that_was_assigned",
    ),
    "Under `remat`, and": (f"{AGAIN}test_a_value_that_was_rebound_is_not_read_anew", f"{AGAIN}test_a_captured_tensor_is_guarded"),
    "A function that draws": (
        f"{ADAPTERS}test_functions_that_draw.py::test_what_draws_is_refused_or_kept",
        f"{ADAPTERS}test_functions_that_draw.py::test_fit_chooses_no_policy_that_draws_anew",
        f"{ADAPTERS}test_functions_that_draw.py::test_a_checkpoint_inside_draws_nothing_anew",
        f"{AGAIN}test_values_of_a_captured_tensor_are_no_constants",
    ),
    "Numbers that it draws": numbers_of_python_are_drawn_once_a_trace,
    "`op_from_module(module, example)` traces": (f"{WHOLE}test_gradients_are_autograds_to_the_bit", BLOCKS),
    "On a CPU, gradients are autograd's": (
        f"{WHOLE}test_gradients_are_autograds_to_the_bit",
        f"{WHOLE}test_fewer_bytes_than_autograd",
        f"{WHOLE}test_residuals_have_the_names_of_modules",
        f"{ADAPTERS}test_drawn_modules.py::test_a_drawn_module",
    ),
    "The names under `kept`": f"{RULES}test_lossless_rules_change_no_bit",
    "`Recompute` lets the": (
        f"{RULES}test_lossless_rules_change_no_bit",
        f"{RULES}test_fit_finds_products_to_compute_again_within_the_bytes",
        f"{RULES}test_fit_computes_a_layer_again_from_its_own_input",
    ),
    "A module whose shapes": (
        f"{WHOLE}test_what_cannot_be_traced_is_refused_before_anything_is_changed",
        f"{WHOLE}test_wrong_arguments",
        f"{ADAPTERS}test_drawn_modules.py::test_what_is_refused_changes_nothing",
    ),
    "So does one that": f"{ADAPTERS}test_drawn_modules.py::test_what_is_refused_changes_nothing",
    "Every new shape, dtype": f"{WHOLE}test_other_shapes_and_modes_are_other_traces",
    "Equal layers are traced": (
        f"{ADAPTERS}test_equal_layers.py::test_deep_models_cost_hardly_more_traced_operators",
        f"{ADAPTERS}test_equal_layers.py::test_a_trace_holds_one_of_equal_layers_at_a_time",
    ),
    "What the forward writes": f"{WHOLE}test_buffers_as_values",
    "A change after the": f"{ADAPTERS}test_changes_after_the_trace.py::test_a_change_is_traced_anew",
    "It does not see": some_changes_are_not_seen,
    "Every trace is in": traces_are_in_grad_mode,
    "It draws random": (
        f"{WHOLE}test_gradients_are_autograds_to_the_bit",
        f"{ADAPTERS}test_keyed_modules.py::test_a_key_makes_it_a_function_that_may_run_again",
    ),
    "Where Triton is chosen": (f"{PARTS}test_parts_of_models_of_hugging_face", f"{PARTS}test_parts_as_other_projects_write_them"),
    "A part has the operators": (
        f"{PARTS}test_each_formula_is_its_op_and_is_found",
        f"{PARTS}test_near_misses_are_left_as_they_are",
    ),
    "A module whose backward": f"{PARTS}test_a_backward_that_is_not_of_the_forwards_operators_stays_autograds",
    "The op has the bytes": f"{PARTS}test_parts_of_models_of_hugging_face",
    "With `backend(": (f"{PARTS}test_a_trace_holds_for_the_backend_of_its_call", BLOCKS),
    "With `recipe=` the": (
        f"{LOW}test_the_bits_of_layers_with_the_recipe_and_no_more_bytes",
        f"{LOW}test_layers_that_are_skipped_or_refused_have_the_modules_bits",
    ),
    "A recipe with state": f"{LOW}test_what_a_recipe_cannot_serve_is_refused",
    "An adapter of PEFT has": f"{LOW}test_adapters_of_peft_beside_layers_in_low_precision",
    "`with_lora` of an op puts": (
        "tests/adapters/test_module_lora.py::test_results_and_gradients_by_path",
        "tests/adapters/test_module_lora.py::test_no_product_of_the_weights_is_kept_or_made",
    ),
    "What requires no gradient": ("tests/adapters/test_module_lora.py::test_results_and_gradients_by_path", BLOCKS),
    "`quantization_report` of": (f"{LOW}test_a_report_of_a_module_is_the_report_of_the_same_config", BLOCKS),
    "An op holds 64 traces": (op_holds_64_traces, f"{HELD_TRACES}test_compiled_code_keeps_its_trace"),
    "For one more, with a": (
        f"{HELD_TRACES}test_the_one_used_longest_ago_goes_and_residuals_stay",
        f"{HELD_TRACES}test_a_trace_that_is_dropped_is_said",
    ),
    "`op.traces()` lists them": f"{HELD_TRACES}test_they_are_listed_by_what_they_hold_for",
    "`batch_wgrads` adds up": f"{BATCHED}test_every_way_has_the_sums_of_one_wgrad_after_another",
    "A gradient that is": f"{BATCHED}test_products_are_joined",
    "Any other (of a": f"{BATCHED}test_products_are_joined",
    "With `donate` memory falls": f"{DONATED}test_a_kept_tensor_is_freed_after_its_last_reader",
    "What `wgrad` reads, too": f"{DONATED}test_a_kept_tensor_is_freed_after_its_last_reader",
    "`graphed_op` captures it": (f"{GRAPHED}test_running_statistics_go_from_step_to_step", f"{GRAPHED}test_a_gradient_of_none"),
    "After a change of the module, which": f"{GRAPHED}test_a_module_that_has_changed_is_refused",
    "`torch.func.vmap`, `jvp` and": (
        f"{TRANSFORMED}test_a_batch_is_the_stack_of_its_calls",
        f"{TRANSFORMED}test_forward_mode",
        f"{TRANSFORMED}test_an_operator_without_a_rule_is_named",
    ),
    "A shape that was not traced": f"{TRANSFORMED}test_a_trace_inside_is_refused",
    "`grad` and `vjp` raise": f"{TRANSFORMED}test_reverse_mode_is_refused",
    "In `profile` and `named_steps()`": (
        f"{PROFILED}test_each_half_has_the_paths_of_modules",
        f"{PROFILED}test_what_a_rule_computes_again_is_named_so",
    ),
    "What the module itself runs": f"{PROFILED}test_each_half_has_the_paths_of_modules",
    "Outside of these two": f"{PROFILED}test_the_same_bits_and_nothing_outside_of_the_block",
    "`stages_from_module(module, example, cuts)` traces": (
        f"{CUT}test_a_chain_of_stages_has_autograds_gradients_to_the_bit",
        BLOCKS,
    ),
    "It returns a chain": f"{CUT}test_a_chain_of_stages_has_autograds_gradients_to_the_bit",
    "Each step is an": (f"{CUT}test_schedules", f"{CUT}test_pipelines_over_processes"),
    "`example` has the shapes": f"{CUT}test_schedules",
    "Losses and gradients are": (f"{CUT}test_schedules", f"{CUT}test_schedules_of_hugging_faces_models"),
    "All that later stages": f"{CUT}test_what_crosses",
    "A constant that is": f"{CUT}test_what_crosses",
    "In dx, each value": f"{CUT}test_what_crosses",
    "A parameter that several": f"{CUT}test_schedules",
    "Each process of a": (f"{CUT}test_a_process_without_the_first_stage", f"{CUT}test_pipelines_over_processes"),
    "An x of other": (f"{CUT}test_other_shapes_and_modes_are_traced_anew", f"{CUT}test_what_no_trace_fits_is_refused"),
    "A module that writes": f"{CUT}test_what_cannot_be_cut_is_refused",
    "So does a path": f"{CUT}test_what_cannot_be_cut_is_refused",
}


def test_each_sentence_has_a_test():
    check_held(sentences(PAGE), HELD)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("check", checks(HELD))
def test_sentence(check):
    torch.manual_seed(0)
    check()
