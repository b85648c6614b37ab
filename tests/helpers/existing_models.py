"""The two pages on existing models share the tests that hold their sentences, and a walk over the nodes of autograd."""

ADAPTERS = "tests/adapters/"
NN, INPUTS, ARGUMENTS = f"{ADAPTERS}test_nn.py::", f"{ADAPTERS}test_nn_inputs.py::", f"{ADAPTERS}test_torch_arguments.py::"
SWAP, MODELS, FIRST = f"{ADAPTERS}test_from_torch.py::", f"{ADAPTERS}test_models.py::", f"{ADAPTERS}test_first_call.py::"
BETWEEN = f"{ADAPTERS}test_between_nodes.py::"
TRACERS, TAMPERED = f"{ADAPTERS}test_tracers_and_swaps.py::", f"{ADAPTERS}test_tampering.py::test_tampering"
MIXED, DELAYED, RECIPES = (f"{ADAPTERS}test_{name}.py::" for name in ("mixed_precision", "delayed", "nn_recipes"))
OPS, AGAIN, NODES = (f"{ADAPTERS}test_{name}.py::" for name in ("from_function", "functions_run_again", "autograd"))
WHOLE = f"{ADAPTERS}test_op_from_module.py::"
PARTS = f"{ADAPTERS}test_known_parts.py::"
LOW = f"{ADAPTERS}test_module_recipes.py::"
CUT = f"{ADAPTERS}test_stages_from_module.py::"
RULES = f"{ADAPTERS}test_policies_in_a_module.py::"
GRAPH, GRAPHS = f"{ADAPTERS}test_whole.py::", f"{ADAPTERS}test_whole_models.py::"
TWO_RANKS = f"{ADAPTERS}test_distributed.py::test_two_processes_match_one"
STRIDES, ALIVE = f"{ADAPTERS}test_torchs_layouts.py::test_strides_are_torchs", f"{ADAPTERS}test_bytes_alive.py::"
BYTES = f"{ADAPTERS}test_module_bytes.py::"
KEPT = f"{ADAPTERS}test_kept_reports.py::"
BLOCKS = "tests/pages/test_docs.py::test_code_blocks_run"  # the sentence says what the block behind it shows
LINKS = "tests/pages/test_site.py::test_a_link_of_the_site_that_leads_nowhere_is_seen"
KEPT_BETWEEN = f"{BETWEEN}test_a_write_between_modules_is_what_the_next_one_reads"
BY_RECIPE = f"{RECIPES}test_codes_of_weights_give_the_bits_of_quantising_in_every_call", f"{RECIPES}test_bad_recipes_raise"

D = 16  # features of a small layer


def nodes(y):
    """The names of the autograd nodes behind y, from the last one on, each layer having one x."""
    found, node = [], y.grad_fn
    while node is not None:
        found.append(type(node).__name__)
        node = next((n for n, _ in node.next_functions if n is not None and "Accumulate" not in n.name()), None)
    return found
