"""funcops: neural-network operators as pure functions, with their backward passes as data.

    y, residuals = linear_fwd(params, x, cfg)
    dparams, dx = linear_bwd(residuals, dy, cfg)

The tensors that a forward saves for its backward are a pytree like any other.

Operators: each NAME is an `Op`, with NAMEConfig, NAMEParams, NAME_init, NAME_fwd, NAME_bwd, NAME_dgrad and
NAME_wgrad (also NAME.config, NAME.init, NAME.fwd and so on; help(NAME) shows its page)
    layers           linear, qlinear, bias, embedding, position_embedding, dropout, causal_conv1d, bmm,
                     patchify, unpatchify
    attention        attention, sink_attention, qattention, gated_delta_rule, log_decay, qkv_split,
                     latent_split, rope (rope_table; LinearScaling, DynamicScaling, YarnScaling,
                     LongRopeScaling, Llama3Scaling)
    norms            layer_norm, rms_norm, l2_norm, group_norm, softmax
    pointwise        activation, glu, scale, row_scale, modulate, softcap, add, cast, quantize, dequantize,
                     identity, reshape, fork
    mixtures         route, permute, grouped_linear, grouped_qlinear, experts, unpermute
    losses           cross_entropy, linear_cross_entropy
    combinators      chain, repeat, skip, parallel, interleave; Step, WithExtras
Ops of ops           Op, remat, with_policy, op_from_torch, op_from_module (TorchConfig), stages_from_module;
                     walk, rewrite (Part)
Requested gradients  Needs
Residuals            report, diff, quantization_report, donate, pack, unpack, Ledger, checking,
                     without_params, with_params
Policies             fit (Fitted), Policy, POLICIES; Save, Recompute, Offload, Disk, Compress, Drop
Gradients            value_and_grad, vjp, differentiable, delayed_wgrad, batch_wgrads
Profiles             profile (Profile), named_steps, named_scope
Recordings           recording (Recording), compare, note
Kernels              backend, explain, plan, register_fusion, unregister_fusion (Rule, Saving)
Errors               DonatedError, StaleResidualError, GradModeError, LedgerError, CheckpointError,
                     CheckpointWriteError, NonFiniteError;
                     of graphs: CaptureError, GraphOrderError, BorrowedError
Modules              funcops.nn, optim, low_precision, logs, lora, precision, checkpoint, schedule, graphs,
                     random, trees, testing, fused, dist, models, invariant
"""

import gc as _gc
import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

_collected = _gc.isenabled()
_gc.disable()  # an import makes no garbage, and a collection would walk all that torch has made
try:
    from funcops.engine import random as random
    from funcops.engine import trees as trees
    from funcops.engine.backend import backend as backend
    from funcops.engine.backend.notes import note as note
    from funcops.engine.backend.scopes import named_scope as named_scope
    from funcops.engine.backend.scopes import named_steps as named_steps
    from funcops.engine.compose.add import *
    from funcops.engine.compose.batch import batch_wgrads as batch_wgrads
    from funcops.engine.compose.chain import *
    from funcops.engine.compose.fork import *
    from funcops.engine.compose.identity import *
    from funcops.engine.compose.interleave import *
    from funcops.engine.compose.parallel import *
    from funcops.engine.compose.repeat import *
    from funcops.engine.compose.skip import *
    from funcops.engine.compose.step import Step as Step
    from funcops.engine.compose.vjp import value_and_grad as value_and_grad
    from funcops.engine.compose.vjp import vjp as vjp
    from funcops.engine.contract.checking import checking as checking
    from funcops.engine.contract.needs import Needs as Needs
    from funcops.engine.contract.op import Op as Op
    from funcops.engine.contract.walk import Part as Part
    from funcops.engine.contract.walk import rewrite as rewrite
    from funcops.engine.contract.walk import walk as walk
    from funcops.engine.errors import BorrowedError as BorrowedError
    from funcops.engine.errors import CaptureError as CaptureError
    from funcops.engine.errors import CheckpointError as CheckpointError
    from funcops.engine.errors import CheckpointWriteError as CheckpointWriteError
    from funcops.engine.errors import DonatedError as DonatedError
    from funcops.engine.errors import GradModeError as GradModeError
    from funcops.engine.errors import GraphOrderError as GraphOrderError
    from funcops.engine.errors import LedgerError as LedgerError
    from funcops.engine.errors import NonFiniteError as NonFiniteError
    from funcops.engine.errors import StaleResidualError as StaleResidualError
    from funcops.engine.program.explain import explain as explain
    from funcops.engine.program.explain import plan as plan
    from funcops.engine.program.rules import Rule as Rule
    from funcops.engine.program.rules import Saving as Saving
    from funcops.engine.program.rules import register_fusion as register_fusion
    from funcops.engine.program.rules import unregister_fusion as unregister_fusion
    from funcops.engine.residuals import POLICIES as POLICIES
    from funcops.engine.residuals import Compress as Compress
    from funcops.engine.residuals import Drop as Drop
    from funcops.engine.residuals import Offload as Offload
    from funcops.engine.residuals import Policy as Policy
    from funcops.engine.residuals import Recompute as Recompute
    from funcops.engine.residuals import Save as Save
    from funcops.engine.residuals import donate as donate
    from funcops.engine.residuals import pack as pack
    from funcops.engine.residuals import report as report
    from funcops.engine.residuals import unpack as unpack
    from funcops.engine.trees import WithExtras as WithExtras
    from funcops.library import fused as fused
    from funcops.library.ops.activation import *
    from funcops.library.ops.attention import *
    from funcops.library.ops.bias import *
    from funcops.library.ops.bmm import *
    from funcops.library.ops.cast import *
    from funcops.library.ops.causal_conv1d import *
    from funcops.library.ops.cross_entropy import *
    from funcops.library.ops.dropout import *
    from funcops.library.ops.embedding import *
    from funcops.library.ops.experts import *
    from funcops.library.ops.gated_delta_rule import *
    from funcops.library.ops.glu import *
    from funcops.library.ops.group_norm import *
    from funcops.library.ops.grouped_linear import *
    from funcops.library.ops.grouped_qlinear import *
    from funcops.library.ops.l2_norm import *
    from funcops.library.ops.latent_split import *
    from funcops.library.ops.layer_norm import *
    from funcops.library.ops.linear import *
    from funcops.library.ops.linear_cross_entropy import *
    from funcops.library.ops.log_decay import *
    from funcops.library.ops.modulate import *
    from funcops.library.ops.patchify import *
    from funcops.library.ops.permute import *
    from funcops.library.ops.position_embedding import *
    from funcops.library.ops.qattention import *
    from funcops.library.ops.qkv_split import *
    from funcops.library.ops.qlinear import *
    from funcops.library.ops.quantize import *
    from funcops.library.ops.reshape import *
    from funcops.library.ops.rms_norm import *
    from funcops.library.ops.rope import *
    from funcops.library.ops.rope_scaling import *
    from funcops.library.ops.route import *
    from funcops.library.ops.row_scale import *
    from funcops.library.ops.scale import *
    from funcops.library.ops.sink_attention import *
    from funcops.library.ops.softcap import *
    from funcops.library.ops.softmax import *
    from funcops.library.ops.unpermute import *
finally:
    if _collected:
        _gc.enable()

if _TYPE_CHECKING:  # extensions, which are imported at their first use
    from funcops import checkpoint as checkpoint
    from funcops import dist as dist
    from funcops import graphs as graphs
    from funcops import invariant as invariant
    from funcops import logs as logs
    from funcops import lora as lora
    from funcops import low_precision as low_precision
    from funcops import models as models
    from funcops import nn as nn
    from funcops import optim as optim
    from funcops import precision as precision
    from funcops import schedule as schedule
    from funcops import testing as testing
    from funcops.adapters.autograd import differentiable as differentiable
    from funcops.adapters.autograd.delayed import delayed_wgrad as delayed_wgrad
    from funcops.adapters.from_function import TorchConfig as TorchConfig
    from funcops.adapters.from_function import op_from_module as op_from_module
    from funcops.adapters.from_function import op_from_torch as op_from_torch
    from funcops.adapters.from_function import stages_from_module as stages_from_module
    from funcops.adapters.profiler import Profile as Profile
    from funcops.adapters.profiler import profile as profile
    from funcops.adapters.recording import Recording as Recording
    from funcops.adapters.recording import compare as compare
    from funcops.adapters.recording import recording as recording
    from funcops.low_precision.report import quantization_report as quantization_report
    from funcops.memory.compare import diff as diff
    from funcops.memory.disk import Disk as Disk
    from funcops.memory.fit import Fitted as Fitted
    from funcops.memory.fit import fit as fit
    from funcops.memory.ledger import Ledger as Ledger
    from funcops.memory.policy import with_policy as with_policy
    from funcops.memory.remat import remat as remat
    from funcops.memory.saveable import with_params as with_params
    from funcops.memory.saveable import without_params as without_params

__version__ = "0.3.0"

_ROOMS = [
    "checkpoint",
    "dist",
    "fused",
    "graphs",
    "invariant",
    "logs",
    "lora",
    "low_precision",
    "models",
    "nn",
    "optim",
    "precision",
    "random",
    "schedule",
    "testing",
    "trees",
]
_LATER = {  # names of extensions, and where they are
    "Disk": "memory.disk",
    "Fitted": "memory.fit",
    "Ledger": "memory.ledger",
    "Profile": "adapters.profiler",
    "Recording": "adapters.recording",
    "TorchConfig": "adapters.from_function",
    "compare": "adapters.recording",
    "delayed_wgrad": "adapters.autograd.delayed",
    "diff": "memory.compare",
    "differentiable": "adapters.autograd",
    "fit": "memory.fit",
    "op_from_module": "adapters.from_function",
    "op_from_torch": "adapters.from_function",
    "profile": "adapters.profiler",
    "quantization_report": "low_precision.report",
    "recording": "adapters.recording",
    "remat": "memory.remat",
    "stages_from_module": "adapters.from_function",
    "with_params": "memory.saveable",
    "with_policy": "memory.policy",
    "without_params": "memory.saveable",
}
# for `import *`, completion and the reference, which have the same names; a room is among them, although other modules are not
__all__ = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _ModuleType)]
__all__ = sorted([*__all__, *_LATER, *_ROOMS])


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if not _TYPE_CHECKING:  # a checker would take every name for one of the module's

    def __getattr__(name: str) -> object:
        """An extension, or a name of one, imported at its first use."""
        if name in _ROOMS:
            return _import_module(f"funcops.{name}")
        if name not in _LATER:
            raise AttributeError(f"module 'funcops' has no attribute {name!r}", name=name, obj=_sys.modules[__name__])
        value = globals()[name] = getattr(_import_module(f"funcops.{_LATER[name]}"), name)
        return value
