"""The page on funcops inside an existing model: each sentence has a test, which this file names or is."""

import inspect
import re

import pytest
import torch
from existing_models import (
    ADAPTERS,
    ARGUMENTS,
    BLOCKS,
    BY_RECIPE,
    BYTES,
    DELAYED,
    FIRST,
    GRAPH,
    INPUTS,
    KEPT,
    KEPT_BETWEEN,
    LINKS,
    MIXED,
    MODELS,
    NN,
    NODES,
    OPS,
    RECIPES,
    STRIDES,
    SWAP,
    TAMPERED,
    TRACERS,
    TWO_RANKS,
    D,
    nodes,
)
from sentences import ROOT, check_held, checks, sentences
from torch import nn
from torch.autograd import forward_ad

from funcops import nn as fnn
from funcops.engine.backend import backend
from funcops.low_precision import Fp8Block

PAGE = (ROOT / "docs" / "inside-an-existing-model.md").read_text()
LAYERS = {
    "Linear": lambda lib: lib.Linear(D, D),
    "LayerNorm": lambda lib: lib.LayerNorm(D),
    "RMSNorm": lambda lib: lib.RMSNorm(D),
    "GroupNorm": lambda lib: lib.GroupNorm(2, 4),
    "GELU": lambda lib: lib.GELU(),
    "ReLU": lambda lib: lib.ReLU(),
    "SiLU": lambda lib: lib.SiLU(),
    "Sigmoid": lambda lib: lib.Sigmoid(),
    "Tanh": lambda lib: lib.Tanh(),
    "GLU": lambda lib: lib.GLU(),
    "Softmax": lambda lib: lib.Softmax(-1),
    "Dropout": lambda lib: lib.Dropout(0.5),
}


def is_op(y):
    return type(y.grad_fn).__name__ == "_NodeBackward"


class Behind(nn.Module):
    """A module with an x that only its call makes, so that `kept_bytes` counts it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, *labels):
        return self.inner(x * 1, *labels)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


def nothing_else_changes():
    """An optimiser and hooks that were there before go on, with the same parameters, and each step is as with torch's layers."""
    theirs, ours = model(), model()
    optimisers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (theirs, ours)]
    seen, parameters, keys = [], list(ours.parameters()), list(ours.state_dict())
    ours[1].register_forward_hook(lambda *_: seen.append(1))
    before = {path: type(module) for path, module in ours.named_modules()}
    assert len(fnn.from_torch(ours).replaced) == len(before)
    for path, module in ours.named_modules():
        assert issubclass(type(module), before[path]) and type(module) is not before[path]
    for _ in range(3):
        x = torch.randn(4, D)
        for one, optimiser in zip((theirs, ours), optimisers, strict=True):
            optimiser.zero_grad()
            one(x).square().sum().backward()
            optimiser.step()
    assert all(a is b for a, b in zip(parameters, ours.parameters(), strict=True)) and len(seen) == 3
    assert list(ours.state_dict()) == keys == list(theirs.state_dict())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def small_inputs_keep_norms_and_glus():
    norm = lambda lib: lib.Sequential(lib.RMSNorm(64), lib.Linear(64, 8))  # noqa: E731
    gate = lambda lib: lib.Sequential(lib.Linear(64, 128), lib.GLU(), lib.Linear(64, 8))  # noqa: E731
    for make, bytes_of_output, others in ((norm, 256, 4), (gate, 256, 512)):
        for rows in (511, 512):  # of 64 elements
            x = torch.randn(rows, 64)
            kept = fnn.kept_bytes(make(fnn), x)
            assert kept == rows * (others + bytes_of_output * (rows < 512)) <= fnn.kept_bytes(make(nn), x)
    for rows, kept in ((511, True), (512, False)):  # on other devices, too
        y = norm(fnn).to("meta")(torch.empty(rows, 64, device="meta"))
        assert bool(y.grad_fn.call[2]["m1"].needs.drop) != kept


def a_chain_launches_fused_kernels(monkeypatch):
    pytest.importorskip("triton")
    from launches import launches

    with torch.device("meta"):
        layers = fnn.Sequential(fnn.LayerNorm(64), fnn.Linear(64, 256), fnn.GELU(), fnn.Linear(256, 64)).bfloat16()
        x = torch.empty(4096, 64, dtype=torch.bfloat16)
    found = []
    for run in (layers, lambda x: layers[3](layers[2](layers[1](layers[0](x))))):
        y = run(x)
        with launches(monkeypatch) as names:
            y.backward(torch.empty_like(y))
        found.append(names)
    chained, apart = found
    assert len(chained) < len(apart) and "bias_activation.backward" in {*chained} - {*apart}


def a_frozen_weight_keeps_no_input():
    x = torch.randn(8, D, requires_grad=True)
    for frozen in (False, True):
        layer = Behind(fnn.Linear(D, D))
        layer.inner.weight.requires_grad_(not frozen)
        assert fnn.kept_bytes(layer, x) == (0 if frozen else x.nbytes)


def outputs_that_a_backward_reads():
    (named,) = re.findall(r"writing to an output that the backward reads \((.*?)\)", PAGE)
    found = []
    for name, make in LAYERS.items():
        raised = []
        for lib in (nn, fnn):
            y = make(lib)(torch.randn(2, 4, D, requires_grad=True) * 1)
            y.mul_(2)
            try:
                y.sum().backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                raised.append(lib)
        assert raised in ([], [nn, fnn]), name
        found += [f"`{name}`"] * bool(raised)
    assert named == ", ".join(found)


def what_torchs_functions_run():
    x, labels = torch.randn(4, D, requires_grad=True), torch.randint(D, (4,))
    assert not is_op(fnn.Linear(D, D, dtype=torch.complex64)(x.to(torch.complex64)))
    assert is_op(fnn.CrossEntropyLoss()(x, labels)) and not is_op(fnn.CrossEntropyLoss()(x, x.detach().softmax(-1)))
    assert not is_op(fnn.CrossEntropyLoss(weight=torch.ones(D))(x, labels))
    for layer in (fnn.Softmax, fnn.GLU):
        assert is_op(layer(-1)(x)) and not is_op(layer(0)(x)) and not is_op(layer(1)(x))
    for layer in (fnn.ReLU(inplace=True), fnn.SiLU(inplace=True)):
        assert not is_op(layer(x * 1)) and not is_op(fnn.Sequential(layer)(x * 1))
        assert len(nodes(fnn.Sequential(fnn.Linear(D, D), layer, fnn.Linear(D, D))(x))) == 1
        assert len(nodes(fnn.Sequential(nn.Softplus(), layer, fnn.Linear(D, D))(x))) == 3
    assert len(nodes(fnn.Sequential(fnn.Linear(D, D), fnn.Dropout(inplace=True), fnn.Linear(D, D))(x))) == 3
    for option in (dict(max_norm=1.0), dict(scale_grad_by_freq=True), dict(sparse=True)):
        with pytest.raises(ValueError, match=f"funcops.nn.Embedding: {[*option][0]} must be off"):
            fnn.Embedding(4, 3, **option)


class Own(nn.Linear):
    """A user's subclass."""


def what_a_report_names():
    """Conv1d has parameters, so has a subclass of Linear; a Softplus has none, and does not run on funcops either."""
    done = fnn.from_torch(nn.ModuleList([nn.Conv1d(1, 1, 1), Own(2, 2), nn.Softplus(), nn.ModuleList([nn.Conv1d(1, 1, 1)])]))
    assert {one.path: one.after for one in done.left} == {"0": "not known", "1": "a subclass of Linear", "3.0": "not known"}
    assert not done.replaced


def layers_keep_no_more():
    """But for what the pages say: numbers a row of norms in 16 bits, and of losses."""
    for name, make in LAYERS.items():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(8, 4, D, dtype=dtype, requires_grad=True)
            theirs, ours = (fnn.kept_bytes(Behind(make(lib).to(dtype)), x) for lib in (nn, fnn))
            groups = {"LayerNorm": 4, "GroupNorm": 2}.get(name, 0) if dtype.itemsize == 2 else 0  # of two numbers
            assert ours <= theirs + 8 * groups * 2 * 2, (name, dtype)
    for dtype in (torch.float32, torch.bfloat16):
        x, labels = torch.randn(64, D, dtype=dtype, requires_grad=True), torch.randint(D, (64,))
        theirs, ours = (fnn.kept_bytes(Behind(lib.CrossEntropyLoss()), x, labels) for lib in (nn, fnn))
        assert theirs < ours <= theirs + 64 * 8 + 4  # and a number of the whole


def the_benchmark_is_as_described():
    from benchmarks import swapped

    assert swapped.SIZES["hidden_size"] == swapped.GPT2["n_embd"] == 256
    assert sum(len(models) for kind, models in swapped.KNOWN.items() if kind != "with dropout") == 30
    assert "dtype" not in inspect.getsource(swapped._model) and torch.get_default_dtype() is torch.float32


def minimal_keeps_inputs():
    transformers = pytest.importorskip("transformers")
    from transformers.models.vit import modeling_vit

    one = Behind(modeling_vit.ViTMLP(transformers.ViTConfig(hidden_size=D, intermediate_size=4 * D)))
    fnn.from_torch(one, policy="minimal")
    for rows in (4, 4096):
        x = torch.randn(rows, D, requires_grad=True)
        assert fnn.kept_bytes(one, x) == x.nbytes


def every_mlp_with_a_row_is_one_chain():
    pytest.importorskip("transformers")
    import importlib

    from funcops.adapters.nn import models
    from funcops.adapters.nn.hugging_face import ChainModule

    assert "`funcops/adapters/nn/models.py`" in PAGE and models.__file__.endswith("funcops/adapters/nn/models.py")
    for row, classes in models.ROWS:
        for name in classes:
            cls = getattr(importlib.import_module(f"transformers.models.{row}.modeling_{row}"), name)
            assert issubclass(models.swapped(cls), ChainModule) != name.endswith("Norm"), name


def replaced_layers_are_called():
    layers = fnn.Sequential(fnn.Linear(D, D), fnn.SiLU(), fnn.Linear(D, D))
    x = torch.randn(2, D)
    assert len(nodes(layers(x))) == 1
    for other, count in ((nn.GELU(), 3), (fnn.GELU(), 1), (nn.Sequential(fnn.GELU()), 3)):
        layers[1] = other
        assert len(nodes(layers(x))) == count


def norms_on_cpus_keep_the_dtype():
    for name in ("LayerNorm", "RMSNorm", "GroupNorm"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(2, 4, D, dtype=dtype)
            with torch.autocast("cpu", torch.bfloat16):
                assert LAYERS[name](fnn)(x).dtype is LAYERS[name](nn)(x).dtype is dtype


def second_derivatives_raise_and_to_torch_is_the_remedy():
    swapped, x = model(), torch.randn(3, D)
    fnn.from_torch(swapped)
    AF = torch.autograd.functional

    def loss(x):
        return swapped(x).square().sum()

    def by_grad(x):
        (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    def by_backward(x):
        (dx,) = torch.autograd.grad(loss(x), x, create_graph=True)
        dx.square().sum().backward()
        return x.grad

    ways = (
        by_grad,
        by_backward,
        lambda x: AF.hessian(loss, x).sum((0, 1)),
        lambda x: AF.hvp(loss, x, x)[1],
        lambda x: AF.vhp(loss, x, x)[1],
        lambda x: AF.jvp(swapped, x, x)[1],
    )
    for way in ways:
        with pytest.raises(RuntimeError, match="chain_bwd: a gradient must not be differentiated again"):
            way(x.clone().requires_grad_())
    fnn.to_torch(swapped)
    assert all(way(x.clone().requires_grad_()).shape == x.shape for way in ways)


def tangent(call, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def forward_mode_without_gradients():
    for name, make in LAYERS.items():
        theirs, ours, x = make(nn).eval(), make(fnn).eval(), torch.randn(2, 4, D)
        ours.load_state_dict(theirs.state_dict())
        for one in (theirs, ours):
            one.requires_grad_(False)
        torch.testing.assert_close(tangent(ours, x), tangent(theirs, x))
        leaf = x.clone().requires_grad_()
        if name in ("ReLU", "Sigmoid", "Tanh", "Dropout"):
            torch.testing.assert_close(tangent(ours, leaf), tangent(theirs, leaf))
            continue
        with pytest.raises(RuntimeError, match="must be without requires_grad if one has a tangent"):
            tangent(ours, leaf)
        pytest.importorskip("triton")
        with pytest.raises(RuntimeError, match="without tangents .* when Triton's kernels run"), backend("triton"):
            tangent(ours, x)


def functorch_is_for_torchs_functions():
    x = torch.randn(4, 4, D)
    for make in (LAYERS["Linear"], LAYERS["Softmax"], LAYERS["LayerNorm"], lambda lib: lib.Sequential(LAYERS["GELU"](lib))):
        layer = make(fnn)
        with pytest.raises(RuntimeError, match="must run outside of torch.func transforms"):
            torch.func.grad(lambda x, layer=layer: layer(x).sum())(x)
    for make in (lambda lib: lib.Softmax(0), lambda lib: lib.GLU(0), *(LAYERS[name] for name in ("ReLU", "Sigmoid", "Tanh"))):
        found = []
        for lib in (nn, fnn):
            loss = lambda x, layer=make(lib): layer(x).square().sum()  # noqa: E731
            second = torch.func.grad(lambda x, loss=loss: torch.func.grad(loss)(x).square().sum())
            leaf = x.clone().requires_grad_()
            (dx,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
            found.append((second(x), *torch.autograd.grad(dx.square().sum(), leaf), tangent(loss, leaf).detach()))
        torch.testing.assert_close(*found)


def compiled_functorch_raises():
    for layer in (fnn.Linear(D, D), fnn.Sequential(fnn.LayerNorm(D), fnn.GELU())):
        with pytest.raises(RuntimeError, match="must run outside of torch.func transforms"):
            torch.compile(torch.func.grad(lambda x, layer=layer: layer(x).sum()), backend="eager")(torch.randn(4, D))


def conv1d_takes_no_recipe():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    holder, x = nn.ModuleList([conv1d(32, 32), nn.Linear(32, 32)]), torch.randn(4, 32)
    want = holder[0](x)
    done = fnn.from_torch(holder, recipe=Fp8Block())
    assert done.details().splitlines() == ["0: Conv1D -> funcops.linear", "1: Linear -> funcops.nn.Linear (Fp8Block)"]
    torch.testing.assert_close(holder[0](x), want)


TABLE = "tests/pages/test_claims.py::test_the_page_on_existing_models_has_the_ratios_of_the_file"
PATH = "tests/pages/test_site.py::test_the_path_of_learning_leads_from_page_to_page"
ROWS = "Phi", "GPT-2", "HunYuan", "Llama, Mistral", "GPT-NeoX", "BERT", "Starcoder 2"
HELD = {  # by how each sentence, or row, of the page begins: what holds it
    **{f"| {row}": TABLE for row in ROWS},
    "**At its end** you can run": (
        PATH,
        f"{MODELS}test_loss_and_gradients",
        f"{DELAYED}test_grads_are_accumulated_over_microbatches",
    ),
    "**Before it:**": PATH,
    "A model of modules": (f"{SWAP}test_only_and_skip", f"{MODELS}test_loss_and_gradients"),
    "Nothing else changes": (nothing_else_changes, TWO_RANKS, f"{NN}test_compiles", f"{TRACERS}test_dynamic_sizes_are_one_graph"),
    "`funcops.nn` has layers with torch's names": (
        f"{NN}test_modules_equal_torchs",
        f"{NN}test_state_dicts_go_both_ways",
        f"{ARGUMENTS}test_every_option_of_torch_is_asked",
        BLOCKS,
    ),
    "`from_torch(model, example=batch)` makes": (
        f"{GRAPH}test_three_steps_have_the_same_bits",
        f"{GRAPH}test_calls_of_every_kind",
        BLOCKS,
    ),
    "Each new shape is traced": f"{GRAPH}test_calls_of_every_kind",
    "Results and gradients equal": f"{GRAPH}test_three_steps_have_the_same_bits",
    "A call that cannot be traced": (f"{GRAPH}test_a_step_that_cannot_be_traced_runs_as_before", LINKS),
    "A `fnn.Sequential` is one chain": (
        f"{NN}test_a_sequential_is_one_node_and_ordinary_modules_split_it",
        small_inputs_keep_norms_and_glus,
        a_chain_launches_fused_kernels,
    ),
    "Outside of `torch.compile` it keeps both": (
        small_inputs_keep_norms_and_glus,
        f"{BYTES}test_small_inputs_keep_no_more_than_torchs",
    ),
    "An ordinary module in it": f"{NN}test_a_sequential_is_one_node_and_ordinary_modules_split_it",
    "A tensor between two chains": KEPT_BETWEEN,
    "A layer keeps what `requires_grad`": (
        a_frozen_weight_keeps_no_input,
        f"{NODES}test_frozen_weights_keep_no_input_and_a_constant_x_computes_no_dgrad",
        f"{NODES}test_needs_follow_requires_grad",
    ),
    "The layers ([list]": (f"{ARGUMENTS}test_every_option_is_torchs_or_refused_when_made", LINKS),
    "| writing to an output that": (
        outputs_that_a_backward_reads,
        f"{ADAPTERS}test_in_place.py::test_an_output_of_a_layer_may_be_written_to",
        f"{ADAPTERS}test_writes_compiled.py::test_a_write_is_refused_or_right",
    ),
    "| complex weights": (
        what_torchs_functions_run,
        f"{INPUTS}test_dtypes_left_to_torch",
        f"{INPUTS}test_targets_that_torch_accepts",
        f"{ARGUMENTS}test_in_place_modules_in_a_sequential",
    ),
    "Where an op lacks a feature": what_torchs_functions_run,
    "| an `Embedding` with": (what_torchs_functions_run, f"{NN}test_embedding"),
    "| a `Dropout` in eval mode": f"{INPUTS}test_dropout_at_rest_is_x_itself",
    "`from_torch` changes a model in place": (
        what_a_report_names,
        f"{SWAP}test_torch_layers",
        f"{SWAP}test_the_report_is_a_summary",
        BLOCKS,
    ),
    "It reports what it replaced": (what_a_report_names, f"{SWAP}test_the_report_is_a_summary"),
    "A module's class becomes": (nothing_else_changes, f"{SWAP}test_torch_layers"),
    "`only=` and `skip=` take": f"{SWAP}test_only_and_skip",
    "A pattern matches a module": (f"{SWAP}test_only_and_skip", f"{SWAP}test_patterns_that_are_wrong"),
    "`to_torch` undoes the swap": (f"{SWAP}test_to_torch_undoes_it", BLOCKS),
    "`from_torch` knows the Hugging Face": (
        every_mlp_with_a_row_is_one_chain,
        f"{MODELS}test_every_row_has_a_model",
        f"{MODELS}test_loss_and_gradients",
        f"{MODELS}test_activations",
        f"{SWAP}test_an_mlp_is_one_node_while_nothing_is_done_to_it",
        f"{SWAP}test_halves_of_a_batch_add_up_to_the_whole",
        conv1d_takes_no_recipe,
    ),
    "A model with any other module": (
        f"{FIRST}test_models_without_a_row",
        f"{FIRST}test_a_module_of_any_class",
        f"{FIRST}test_what_from_torch_leaves_to_layers",
        BLOCKS,
    ),
    "Further shapes, up to 32": (f"{FIRST}test_a_length_is_traced_when_it_comes_again", f"{GRAPH}test_many_shapes_run_as_before"),
    "If a call cannot be traced": (f"{FIRST}test_parts_are_traced_where_a_whole_cannot_be",),
    "So they do inside DistributedDataParallel": f"{FIRST}test_gradients_come_by_blocks_inside_distributed_data_parallel",
    "`from_torch(model, example=batch)` says": f"{FIRST}test_a_recurrent_model_is_left_to_torch",
    "`trace=False`, a policy": f"{FIRST}test_what_from_torch_leaves_to_layers",
    "A swapped layer's output": (STRIDES, layers_keep_no_more, f"{BYTES}test_a_swapped_activation_keeps_no_more_than_torchs"),
    "`kept_report` lists": (
        BLOCKS,
        f"{BYTES}test_kept_bytes_are_torchs_own_sums",
        f"{KEPT}test_a_call_changes_nothing_and_its_graph_has_these_bytes",
        f"{KEPT}test_a_preview_is_the_report_after_from_torch",
    ),
    "Models of 30 architectures": (the_benchmark_is_as_described, TABLE),
    "Under autocast each model keeps": (TABLE, f"{ADAPTERS}test_swapped_models.py::test_the_bytes_of_swapped_models"),
    "With dropout GPT-2": TABLE,
    'With `from_torch(model, policy="minimal")` each': (minimal_keeps_inputs, f"{MODELS}test_policies"),
    "A `Sequential` or an MLP checks": (TAMPERED, f"{NN}test_a_sequential_follows_its_modules"),
    "A layer that was replaced": (replaced_layers_are_called, TAMPERED),
    "If a program replaces the forward of a class": TAMPERED,
    "So PEFT may come": (f"{ADAPTERS}test_peft.py::test_adapters", BLOCKS),
    "If a weight is a tensor subclass": TAMPERED,
    "Modules follow `torch.autocast`": (
        norms_on_cpus_keep_the_dtype,
        f"{MIXED}test_modules_follow",
        f"{MIXED}test_embeddings_and_losses_follow",
        f"{MIXED}test_norms_have_the_dtype_that_this_torch_gives_them",
    ),
    "A weight is cast once": (
        f"{MIXED}test_a_weight_is_cast_once_in_a_region",
        f"{ADAPTERS}test_mixed_precision_training.py::test_training",
    ),
    "So `Trainer(bf16=True)`": (
        f"{ADAPTERS}test_frameworks.py::test_mixed_precision_trains",
        f"{ADAPTERS}test_doors.py::test_a_callback_swaps_the_trainers_model",
    ),
    "Linear layers take a recipe": BY_RECIPE,
    "FP8, MXFP8 or NVFP4": (*BY_RECIPE, f"{RECIPES}test_from_torch_gives_recipes_and_takes_them_back"),
    "How their codes are made": LINKS,
    "A gradient goes to `main_grad`": (
        f"{DELAYED}test_tied_weights_main_grad_and_hooks",
        f"{DELAYED}test_hooks_fire_once_for_each_gradient",
    ),
    "A parameter that is frozen": f"{DELAYED}test_a_parameter_that_is_frozen_has_the_gradients_of_autograd",
    "| neither `run()` nor": (f"{DELAYED}test_a_forgotten_store_warns", f"{DELAYED}test_a_store_without_work_left_says_nothing"),
    "| DistributedDataParallel | needs": (f"{DELAYED}test_a_distributed_model_must_not_reduce", TWO_RANKS),
    "| a backward of ops": (
        f"{DELAYED}test_a_compiled_model_delays_or_raises",
        f"{DELAYED}test_blocks_without_a_backward_and_with_a_plain_one_beside_compiled_ops",
        f"{ADAPTERS}test_twice.py::test_delayed_weight_gradients_refuse_create_graph",
    ),
    "| `fully_shard` | needs": TWO_RANKS,
    "`differentiable(op)` is a function": (f"{NODES}test_gradients_equal_the_ops", f"{OPS}test_laws", LINKS),
    "`OpModule` makes a module": (f"{ADAPTERS}test_own_module.py::test_values_make_the_config", LINKS),
    "| `differentiable(op)`, or": (
        f"{MIXED}test_ops_refuse_autocast",
        f"{MIXED}test_the_remedy_works",
        f"{NODES}test_autocast_is_refused",
    ),
    "| `from_torch` with an unknown": (
        f"{SWAP}test_a_policy_that_is_wrong",
        f"{SWAP}test_a_policy_that_finds_no_mlp",
        f"{SWAP}test_patterns_that_are_wrong",
    ),
    "| a gradient of an op's": (
        second_derivatives_raise_and_to_torch_is_the_remedy,
        f"{ADAPTERS}test_twice.py::test_penalties_raise",
    ),
    "| forward mode": forward_mode_without_gradients,
    "| `torch.func.grad`": (
        functorch_is_for_torchs_functions,
        compiled_functorch_raises,
        f"{NODES}test_functorch_is_refused",
        f"{OPS}test_value_and_grad",
        LINKS,
    ),
    "Layers that call torch's function": (functorch_is_for_torchs_functions, forward_mode_without_gradients),
    "**Next:**": PATH,
}


def test_each_sentence_has_a_test():
    check_held(sentences(PAGE), HELD)


SLOW = (  # they import transformers, or the compiler
    compiled_functorch_raises,
    minimal_keeps_inputs,
    every_mlp_with_a_row_is_one_chain,
    conv1d_takes_no_recipe,
)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:Mismatch dtype between input and weight")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # newer torch calls torch.jit deprecated
@pytest.mark.parametrize("check", checks(HELD, SLOW))
def test_sentence(check, monkeypatch):
    torch.manual_seed(0)
    check(*[monkeypatch] * check.__code__.co_argcount)
