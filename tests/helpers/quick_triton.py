"""Triton's interpreter with less looking up: it does the same, in a third of the time.

At each call of a jitted function, one within a kernel as well, the interpreter goes through all members of `triton.language` for
those to replace by its own, for each value it makes a table of dtypes and checks and names its shape, and for each sum of
integers it works out whether it overflows and asserts nothing by it; it casts to and from bfloat16 by the general way from one
format to another. Here the members are replaced once and for all, since nothing compiles in a process that interprets, the table
and what follows from a shape are made once, sums are not looked at (`index_ranges.py` does that), and bfloat16 is the upper half
of float32.
"""

import dataclasses
import functools
import inspect

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def quicken():
    """Once for a process, before the first kernel runs. Names that this Triton does not have are left alone."""
    if not all(
        hasattr(interpreter, name)
        for name in ("_patch_builtin", "_patch_attr", "_patch_lang", "_get_np_dtype", "_LangPatchScope", "_convert_float")
    ):
        return
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._convert_float = _halves(interpreter._convert_float)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    core = tl.core
    core._unwrap_if_constexpr = _unwrapped(core._unwrap_if_constexpr)
    core.block_type.__init__, core.block_type.name = _block_type(core.block_type.__init__), property(_block_name, _no_name)
    core.tensor.__init__ = _tensor_init
    core.dtype.__eq__ = _same(core.dtype.__eq__)
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _of_one_shape(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _of_one_dtype(semantic.binary_op_type_checking_impl)
    semantic.scalar_constant = _constant(semantic.scalar_constant)


@functools.cache
def _builtins(package):
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package, builder, scope):
    for name in _builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            scope.set_attr(package, name, _interpreted(member))


@functools.cache
def _interpreted(member):
    """The member with the interpreter's meaning; past what only asks whether it was given a meaning."""
    asks = tl.core.builtin(lambda: None).__code__
    call = member.__wrapped__ if getattr(member, "__code__", None) is asks else member

    def with_meaning(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return call(*args, **kwargs)

    return with_meaning


@functools.cache
def _languages(function):
    """The modules of the language (tl, tl.core) among a function's globals."""
    return frozenset(each for each in (tl, tl.core) if any(value is each for value in function.__globals__.values()))


def _once(patch):
    """Patch each module once and leave it patched, where the interpreter patches and restores for every call."""
    replaced, nothing = set(), interpreter._LangPatchScope()

    def patch_lang(function):
        if not _languages(function) <= replaced:
            patch(function)
            replaced.update(_languages(function))
        return nothing  # to restore

    return patch_lang


def _halves(convert):
    """Convert float32 to bfloat16, truncated as the interpreter does, and back. Subnormal numbers go the interpreter's own way."""

    @functools.wraps(convert)
    def convert_float(input, input_dtype, output_dtype, rounding_mode):
        names = input_dtype.name, output_dtype.name
        if rounding_mode is None and input.ndim and names in (("bf16", "fp32"), ("fp32", "bf16")):
            bits = input.view(np.uint32) if names[0] == "fp32" else input.view(np.uint16).astype(np.uint32) << 16
            if not ((bits << 1) - 1 < 0xFFFFFF).any():
                return bits if names[1] == "fp32" else (bits >> 16).astype(np.uint16)
        return convert(input, input_dtype, output_dtype, rounding_mode)

    return convert_float


def _by_name(find):
    """Cache by name: dtypes and blocks have distinct names, and a pointer's is its element's."""
    known = {}

    def np_dtype(dtype):
        key = dtype.scalar.name, dtype.scalar.is_ptr()
        if key not in known:
            known[key] = find(dtype)
        return known[key]

    return np_dtype


def _unwrapped(unwrap):
    plain = {int, float, bool, str, type(None), tl.tensor, tl.dtype, tl.pointer_type, tl.block_type}

    def unwrap_if_constexpr(o):
        of = type(o)
        return o if of in plain else o.value if of is tl.constexpr else unwrap(o)

    return unwrap_if_constexpr


def _block_type(init):
    """Check a block's shape and derive its fields once for each shape; make its name only when it is read."""
    known = {}

    def block_type(self, element_ty, shape):
        assert isinstance(shape, (list, tl.tuple))
        key = tuple([d.value if type(d) is tl.constexpr else d for d in shape])
        if key not in known:
            init(self, element_ty, shape)
            known[key] = self.shape, self.numel, (tl.constexpr(self.numel), tl.tuple([tl.constexpr(d) for d in self.shape]))
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensors = known[key]

    return block_type


def _block_name(self):
    return f"<{self.shape}, {self.element_ty}>"


def _no_name(self, name):
    pass


SCALAR = tl.constexpr(1), tl.tuple([])


def _tensor_init(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_tensors if type.is_block() else SCALAR


def _of_one_shape(broadcast):
    def broadcast_impl_value(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_impl_value


def _same(equal):
    return lambda self, other: self is other or equal(self, other)


def _of_one_dtype(check):
    """Two blocks of one dtype are cast to none, but for divisions of 16-bit numbers."""

    def binary_op_type_checking_impl(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        if type(lhs) is tl.tensor and type(rhs) is tl.tensor and lhs.dtype is rhs.dtype and type(lhs.dtype) is tl.dtype:
            if not div_or_mod or lhs.dtype.primitive_bitwidth != 16:
                return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return binary_op_type_checking_impl


def _constant(make):
    known = {}

    def scalar_constant(self, value, dtype):
        key = value, type(value), dtype
        if key not in known:
            known[key] = make(self, value, dtype)
        return known[key]

    return scalar_constant
