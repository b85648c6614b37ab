"""Triton's interpreter with less looking up: it does the same, in a third of the time.

At each call of a jitted function, one within a kernel as well, the interpreter goes through all members of `triton.language` for
those to replace by its own, for each value it makes a table of dtypes and checks and names its shape, and for each sum of
integers it works out whether it overflows and asserts nothing by it. Here the members are looked up once, a function within a
kernel finds them replaced, the table and what follows from a shape are made once, and sums are not looked at (`index_ranges.py`
does that).
"""

import dataclasses
import functools
import inspect

from triton import language as tl
from triton.runtime import interpreter


def quicken():
    """Once for a process, before the first kernel runs. Names that this Triton does not have are left alone."""
    if not all(
        hasattr(interpreter, name) for name in ("_patch_builtin", "_patch_attr", "_patch_lang", "_get_np_dtype", "_LangPatchScope")
    ):
        return
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _once_for_a_launch(interpreter._patch_lang)
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
    """Those of the two modules of the language that a function calls by."""
    return frozenset(each for each in (tl, tl.core) if any(value is each for value in function.__globals__.values()))


def _once_for_a_launch(patch):
    """What is replaced is restored at the end of a launch; until then only a module that was not seen has more to replace."""
    replaced = set()

    class Launch(interpreter._LangPatchScope):
        def restore(self):
            super().restore()
            replaced.clear()

    launch = Launch()

    def patch_lang(function):
        if not _languages(function) <= replaced:
            replaced.update(_languages(function))
            launch._changes += patch(function)._changes
        return launch

    return patch_lang


def _by_name(find):
    """Dtypes and blocks of them have names that tell them apart; a pointer's is that of what it points to."""
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
    """What a type of blocks checks and makes of its shape is made once for the shape; its name, where it is asked for."""
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
