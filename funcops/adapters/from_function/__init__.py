"""Ops made from torch functions."""

from funcops.adapters.from_function.op_from_module import op_from_module as op_from_module
from funcops.adapters.from_function.op_from_torch import TorchConfig as TorchConfig
from funcops.adapters.from_function.op_from_torch import op_from_torch as op_from_torch
from funcops.adapters.from_function.stages import stages_from_module as stages_from_module
