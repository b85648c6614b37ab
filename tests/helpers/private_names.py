"""Every private name of torch and Triton that the package uses, and why: one list, held by `tests/packaging/test_private_uses.py`.

A line is NAME: why no public name does, or which check stands in front of it. A name that begins with a dot is an attribute of a
value; `OWNERS` says whose, so that a torch without it is noticed by name.
"""

FAKE = "no public name: shapes and dtypes of a function without running it; the laws and test_shapes fail without it"
MODE = "no public name for a dispatch mode, which torch's own docs import from here"
PYTREE = "torch.utils.pytree is public from a later torch than 2.11 on: to be taken when that is the oldest"
FOREACH = "documented as beta, under this name; the public torch.optim functions do more per call"
FUSED = "public as torch.optim.*(fused=True) alone, which needs .grad; kernels are held to torch's bits"
FLASH = "scaled_dot_product_attention does not give the logsumexp, which a backward by hand reads; tested against the formula"
HOST = "public only by a slower way, and on the path of every call"
DYNAMO = "torch.compiler.assume_constant_result sets it, and imports the compiler, most of the time of an import"
FUNCTORCH = "no public way to ask whether a tensor is one of torch.func's; tests try every entry of torch.func"
TIMEOUT = "no public way to ask a process group for its timeout; a test lets a rank of four stop, on each version"
C10D = "no public operator that a compiler may trace; tests run each on threads and on processes"
HOOKS = "no public way to ask whether a module or tensor has hooks, which decides whether a layer may be skipped"
MODULE = "torch.nn documents the dictionaries for subclasses; named_parameters and named_modules cost a generator a call"
BENCH = "a measurement of torch.compile's kernels, not of the package; a test of the bench fails by name, no call of a user's does"
INDUCTOR = "documented as the options of Inductor; test_profile fails where kernels are not in the order of the program"
INTERPRETER = "Triton has no public interpreter: `make newest` tries each release"
TRITON = (
    "documented for those who launch by hand; test_launch compares with Triton's own launches, `make newest` tries each release"
)

NAMES = {
    "torch._C._cuda_getDevice": HOST,
    "._cuda_getDevice": HOST,
    "torch._C._autograd._top_saved_tensors_default_hooks": "no public way to ask for active hooks; a checkpoint's around a trace",
    "._dynamo_marked_constant": DYNAMO,
    "torch._inductor.config": INDUCTOR,
    "torch._inductor.config.patch": INDUCTOR,
    "._is_compiling_flag": "torch.compiler.is_compiling reads it, and has no public way to hide a compiler from a model",
    "torch._dynamo": "its config of floats, read once a compiler runs: torch.compiler has no public name for one",
    "._current_level": "whether torch.autograd.forward_ad is on: no public name; a layer under it would lose tangents in silence",
    "._load_from_state_dict": "the hook that torch.nn documents for subclasses with older state dicts",
    "._get_backend": TIMEOUT,
    "._timeout": TIMEOUT,
    "._version": "autograd's own counter, documented in torch's notes; test_versions tries every way to write",
    "torch._prims_common.are_strides_like_channels_last_or_false": "norms ask it; test_torchs_layouts compares",
    "._orig_mod": "in the text of an error alone: where torch.compile's wrapper of a module has the module",
    "._original_forward": "accelerate's note of the forward that it wraps: no change of the module",
    "._base": "the tensor that a view is of: no public name; a fusion is left out where it is None",
    "._is_view": "whether a tensor is a view: no public name; tests/distributed tries views and their bases",
    "._str": "the name of the function that makes the text of a tensor: a frame of it says that values are read",
    "torch.autograd._get_sequence_nr": "no public way to ask which autograd node is older; stages are cut by it",
    "._sequence_nr": "the same, of a node",
    "._raw_saved_": "how torch's notes on saved tensors name them; without it a report does not say which node reads a tensor",
    "._cdata": "a storage's identity: data_ptr is 0 for every empty one and on meta",
    "._metadata": "what state_dict keeps beside its tensors, passed on as it is",
    "._schema": "which arguments an operator writes: OpOverload has no public name for it",
    "._parameters": MODULE,
    "._buffers": MODULE,
    "._modules": MODULE,
    "._flat_weights": "a recurrent module's list of its parameters, made anew when one is swapped: left out of what is compared",
    "._flat_weight_refs": "the same, by weak references; test_op_from_module traces a GRU once",
    "._apply": "the hook behind Module.to, which subclasses may override; tests of to, half and to_empty",
    "._forward_hooks": HOOKS,
    "._forward_pre_hooks": HOOKS,
    "._backward_hooks": HOOKS,
    "._backward_pre_hooks": HOOKS,
    "._post_accumulate_grad_hooks": HOOKS,
    "._global_forward_hooks": HOOKS,
    "._global_forward_pre_hooks": HOOKS,
    "._global_backward_hooks": HOOKS,
    "._global_backward_pre_hooks": HOOKS,
    "._active_ddp_module": "whether a forward runs inside DistributedDataParallel: no public name; read with a default",
    "._c10d_functional": C10D,
    "._unsafe_view": "what a trace calls the reshaping of a product: no public name; only the name of a kept product needs it",
    "._addmm_activation": BENCH,
    "._exchange_device": BENCH,
    "._maybe_exchange_device": BENCH,
    "torch.Tensor._make_subclass": "documented in torch's notes on subclasses as the way to wrap without a copy",
    "torch.UntypedStorage._new_with_weak_ptr": "a storage by its weak reference: no public name; nothing is kept alive by it",
}


def _under(prefix, names, why):
    NAMES.update({f"{prefix}{name}": why for name in names.split()})


_under("torch.", "_foreach_add _foreach_add_ _foreach_copy_ _foreach_lerp _foreach_lerp_", FOREACH)
_under("torch.", "_foreach_mul _foreach_mul_ _foreach_norm _foreach_sub_", FOREACH)
_under("torch.", "_fused_adamw_ _fused_sgd_", FUSED)
_under("torch.", "_assert_async", "an assertion that a device checks without a wait: no public name")
_under("torch.", "_scaled_dot_product_flash_attention_for_cpu", FLASH)
_under("torch.ops.aten.", "_flash_attention_forward _flash_attention_backward", FLASH)
_under("torch.ops.aten._scaled_dot_product_", "efficient_attention efficient_attention_backward flash_attention", FLASH)
_under("torch.ops.aten._scaled_dot_product_flash_attention_", "backward for_cpu for_cpu_backward", FLASH)
_under("torch.ops.aten._scaled_dot_product_", "cudnn_attention cudnn_attention_backward", FLASH)
_under(
    "torch.", "_fused_sdp_choice", "the chooser itself: public is whether a kernel can be used, not which is; asked of a stand-in"
)
_under("torch.ops.aten.", "_softmax_backward_data", "the backward that torch.softmax itself runs; tested against the formula")
_under("torch.ops.", "_c10d_functional", C10D)
_under("torch.ops.aten.", "_to_copy", "the operator of every cast in a trace, compared and never called; without it casts are left")
_under("torch.distributed.", "_functional_collectives distributed_c10d._resolve_process_group", C10D)
_under(
    "torch._C.",
    "_nn",
    "the home of torch.nn.functional's native functions, which cost less than those; each is compared with its operator",
)
_under("torch._C.", "_get_sdp_priority_order", "public only as sdpa_kernel(set_priority=True), which sets it")
_under("torch._C.", "_is_any_autocast_enabled _len_torch_dispatch_stack _get_dispatch_stack_at _get_tracing_state", HOST)
_under("torch._C.", "_functorch.maybe_current_level _nn.silu _cuda_getCurrentRawStream", HOST)
_under("torch._C._functorch.", "is_batchedtensor is_legacy_batchedtensor is_functorch_wrapped_tensor", FUNCTORCH)
_under("torch._C._functorch.", "peek_interpreter_stack", FUNCTORCH)
_under(
    "torch._C.",
    "_dispatch_has_kernel_for_dispatch_key _dispatch_key_for_device",
    "whether autocast knows an operator: no public name",
)
_under(
    "torch._C._autograd.",
    "_get_current_graph_task_keep_graph",
    "whether a backward retains its graph: no public name; test_first_call runs both kinds",
)
_under(
    "torch.ops.aten.",
    "_linalg_check_errors",
    "the check of torch.linalg's functions, an operator of torch's own list; test_from_function",
)
_under("torch._C.", "_current_graph_task_id", "which backward runs now: no public name; tests nest two")
_under("torch._C.", "_will_engine_execute_node", "whether a backward accumulates a leaf's gradient: no public name")
_under("torch._C.", "DisableTorchFunctionSubclass", "torch.overrides' own way past a subclass, documented there")
_under("torch._C.", "_functions.DelayedError", "the node with which torch's once_differentiable refuses a second derivative")
_under(
    "torch._C.",
    "_cuda_endAllocateToPool _cuda_releasePool",
    "mends a capture that raised; takes a pool id of two numbers on every torch",
)
_under(
    "torch._subclasses.", "FakeTensor functional_tensor.FunctionalTensor fake_tensor.FakeTensor fake_tensor.FakeTensorMode", FAKE
)
_under("torch._subclasses.fake_tensor.", "DataDependentOutputException DynamicOutputShapeException", FAKE)
_under("torch._ops.", "OpOverload", "the class of an operator's overload: torch.ops gives its values, and no public name of it")
_under("torch._ops.", "OpOverloadPacket _OpNamespace", "make operators' objects; test_ranks tries first uses of several threads")
_under(
    "torch.distributed._functional_collectives.",
    "AsyncCollectiveTensor",
    "what torch's functional collectives return: no public name; test_handshake sends by them",
)
_under("torch.utils._python_dispatch.", "TorchDispatchMode is_traceable_wrapper_subclass", MODE)
_under("torch.utils.", "_pytree", PYTREE)
_under("torch.utils._pytree.", "MappingKey register_pytree_node tree_flatten tree_leaves tree_unflatten", PYTREE)
_under("torch.nn.parallel.DistributedDataParallel.", "_active_ddp_module", NAMES["._active_ddp_module"])
_under("torch.", "_C _C._dynamo.guards._empty_strided_cuda cuda._DeviceGuard", BENCH)
_under("torch._dynamo.device_interface", " .CudaInterface .CudaInterface.Worker .device_interfaces .init_device_reg", BENCH)
_under("torch._dynamo.", "device_interface device_interface.register_interface_for_device reset", BENCH)
_under("torch._functorch.", "aot_autograd.aot_function aot_autograd.make_boxed_func config config.patch", BENCH)
_under("torch._functorch.", "partitioners.min_cut_rematerialization_partition", BENCH)
_under("torch._guards.", "TracingContext tracing", BENCH)
_under("torch._inductor.", "compile_fx compile_fx.compile_fx compile_fx.compile_fx_inner", BENCH)
_under("torch._inductor.", "decomposition.select_decomp_table graph.GraphLowering", BENCH)
_under("torch._inductor.", "fx_passes.joint_graph fx_passes.joint_graph.joint_graph_passes", BENCH)
_under("torch._inductor.runtime.", "triton_helpers triton_heuristics triton_heuristics.GridExpr", BENCH)
_under("torch._inductor.runtime.", "triton_heuristics.GridExpr.from_meta", BENCH)
_under("torch.distributed.pipelining._backward.", "stage_backward_input stage_backward_weight", BENCH)
_under("triton.runtime.", "driver driver._active driver.active jit.JITFunction", TRITON)
_under("triton.", "backends.compiler.GPUTarget tools.tensor_descriptor.TensorDescriptor", TRITON)
_under(
    "triton.runtime.interpreter", " .InterpretedFunction .InterpreterBuilder .ReduceOps .TensorHandle ._implicit_cvt", INTERPRETER
)
_under("triton.runtime.interpreter.", "_patch_lang _patch_lang_tensor interpreter_builder interpreter_semantic", INTERPRETER)
_under("triton.runtime.", "interpreter", INTERPRETER)

# Texts and attributes that only look so: ours on an object of torch's, the ends of names, what torch's index of a checkpoint is
# pickled of, and fields of Hugging Face's configs.
NOT_TORCH = set("._lifted_ ._cast_of ._cfg ._in_step ._start ._values ._desc ._ptr ._name ._proj ._scale_inv ._softcapping".split())
NOT_TORCH |= set("._recompute ._name_or_path ._sliding_window_pattern ._experts_implementation ._attn_implementation".split())
NOT_TORCH |= set("._attn_implementation_autoset ._load_in_4bit ._load_in_8bit".split())
NOT_TORCH |= set("._into_tensor ._single ._out ._get_layout ._StorageInfo ._MEM_FORMAT_ENCODING ._local".split())
