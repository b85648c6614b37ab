"""Triton's interpreter with less looking up: it does the same, in half of the time.

At each call of a jitted function, one within a kernel as well, the interpreter goes through all members of `triton.language` for
those to replace by its own, for each value it makes a table of dtypes, and for each sum of integers it works out whether it
overflows and asserts nothing by it. Here the members are looked up once, a function within a kernel finds them replaced, the table
is made once, and sums are not looked at (`index_ranges.py` does that).
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


@functools.cache
def _builtins(package):
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package, builder, scope):
    for name in _builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


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
