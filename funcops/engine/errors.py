"""The errors that a wrong argument raises, in one wording: `where: name must be ..., got ...`."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from types import EllipsisType
from typing import Any, NoReturn

import torch
from torch import Tensor

Shape = tuple["int | str | EllipsisType", ...]
Dtypes = torch.dtype | tuple[torch.dtype, ...] | None


class StaleResidualError(RuntimeError):
    """A tensor that residuals or pending alias was changed in place after the forward.

    >>> import torch
    >>> from funcops import SoftcapConfig, StaleResidualError, softcap
    >>> x = torch.ones(2)
    >>> y, residuals = softcap.fwd(None, x, SoftcapConfig(30.0))
    >>> _ = x.add_(1)
    >>> try:
    ...     softcap.bwd(residuals, torch.ones(2), SoftcapConfig(30.0))
    ... except StaleResidualError as error:
    ...     print(str(error).partition(" (")[0])
    ...
    softcap_bwd: residuals.x must be as the forward left it, got a tensor that was written to since
    """


class DonatedError(RuntimeError):
    """Residuals or pending were used after they had been given away with `donate`.

    >>> import torch
    >>> from funcops import DonatedError, SoftcapConfig, donate, softcap
    >>> y, residuals = softcap.fwd(None, torch.ones(2), SoftcapConfig(30.0))
    >>> given = donate(residuals)
    >>> try:
    ...     softcap.bwd(residuals, torch.ones(2), SoftcapConfig(30.0))
    ... except DonatedError as error:
    ...     print(error)
    ...
    softcap_bwd: residuals must be unused, got SoftcapResiduals given away with donate()
    """


class LedgerError(RuntimeError):
    """An entry of a ledger was kept twice, taken twice, or never kept or taken.

    >>> from funcops import Ledger, LedgerError
    >>> try:
    ...     Ledger().take("microbatch 0")
    ... except LedgerError as error:
    ...     print(error)
    ...
    Ledger: microbatch 0 must be waiting, got one never kept
    """


class CaptureError(RuntimeError):
    """A function does something that a CUDA graph cannot hold; the message names the line.

    >>> import torch
    >>> from funcops import CaptureError
    >>> from funcops.graphs import graphed
    >>> try:
    ...     graphed(lambda x: x / x.sum().item(), torch.ones(2))
    ... except CaptureError as error:
    ...     print(str(error).partition(": ")[2].partition(" of a tensor")[0])
    ...
    host sync: item(), bool(), int() or float()
    """


class GraphOrderError(RuntimeError):
    """A captured forward, dgrad, wgrad or backward was called out of its order.

    >>> import torch
    >>> from funcops import GraphOrderError, ScaleConfig, scale
    >>> from funcops.graphs import graphed_op
    >>> graph = graphed_op(scale, ScaleConfig(3.0), None, torch.ones(2))
    >>> y, residuals = graph.fwd(None, torch.ones(2))
    >>> dparams, dx = graph.bwd(residuals, torch.ones(2))
    >>> try:
    ...     graph.bwd(residuals, torch.ones(2))
    ... except GraphOrderError as error:
    ...     print(error)
    ...
    graphed scale_bwd: residuals of slot 0 must be unused, got some that were used already
    """


class BorrowedError(RuntimeError):
    """A tensor that a graph lent or saved was used after a replay that may have overwritten it, or was written to.

    >>> import torch
    >>> from funcops import BorrowedError
    >>> from funcops.graphs import graphed
    >>> double = graphed(lambda x: 2 * x, torch.ones(2), outputs="borrow", debug=True)
    >>> first, second = double(torch.ones(2)), double(torch.zeros(2))
    >>> try:
    ...     first + 1
    ... except BorrowedError as error:
    ...     print(error)
    ...
    the output was borrowed from a graph that has been replayed since: clone it, or capture with outputs='clone'
    """


class CheckpointError(ValueError):
    """A tree cannot be written, or a file does not hold the requested tree.

    >>> import tempfile, torch
    >>> from funcops import CheckpointError, checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoint.save({"w": torch.ones(2)}, f"{folder}/model.safetensors")
    ...     try:
    ...         checkpoint.load(f"{folder}/model.safetensors", like={"v": torch.empty(2)})
    ...     except CheckpointError as error:
    ...         print(str(error).replace(folder, ""))
    ...
    load: /model.safetensors must hold the tree of like, got
      missing: v float32[2]
      extra: w
    """


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint could not be written, as a disk is full or a folder is read-only; the one from before is unchanged.

    >>> from funcops import CheckpointError, CheckpointWriteError
    >>> issubclass(CheckpointWriteError, CheckpointError), issubclass(CheckpointWriteError, OSError)
    (True, True)
    """


def unwritten(where: str, path: object, error: BaseException) -> CheckpointWriteError:
    """The error of every checkpoint that could not be written."""
    # an error of the system may have several lines, or no text at all
    said = " ".join(str(error).split()) or type(error).__name__
    remedy = "free space there, or choose another path; the checkpoint from before is unchanged"
    return CheckpointWriteError(f"{where}: path must be one that can be written to ({remedy}), got {str(path)!r}: {said}")


class GradModeError(RuntimeError):
    """A leaf that requires grad reached an operator in grad mode: autograd would save every tensor a second time.

    >>> import torch
    >>> from funcops import GradModeError, SoftcapConfig, softcap
    >>> try:
    ...     softcap.fwd(None, torch.ones(2, requires_grad=True), SoftcapConfig(30.0))
    ... except GradModeError as error:
    ...     print(str(error).partition(". ")[0])
    ...
    softcap_fwd: x must be a tensor that does not require grad, got one that does, in grad mode
    """


class NonFiniteError(ArithmeticError):
    """A step computed something infinite or NaN in a `recording(stop_at_nonfinite=True)`. `place`: which value of which step;
    `values`: all that the step computed, by name; `residuals`: what its forward kept, None in other halves.

    >>> import torch
    >>> from funcops import ChainConfig, NonFiniteError, ScaleConfig, Step, chain, recording, scale
    >>> cfg = ChainConfig(steps=(Step("double", scale, ScaleConfig(2.0)), Step("huge", scale, ScaleConfig(1e38))))
    >>> try:
    ...     with recording(stop_at_nonfinite=True):
    ...         chain.fwd({"double": None, "huge": None}, torch.full((2,), 9.0), cfg)
    ... except NonFiniteError as error:
    ...     print(error.place, error.values["y"])
    ...
    huge: fwd, y tensor([inf, inf])
    """

    def __init__(self, place: str, values: dict[str, Any], residuals: Any) -> None:
        super().__init__(f"recording: {place} must be finite, got a value that is infinite or NaN: see .values and .residuals")
        self.place, self.values, self.residuals = place, values, residuals


def fail(where: str, name: str, expected: str, got: object, error: type[Exception] = ValueError) -> NoReturn:
    """Raise `error` in the wording of every error of the library."""
    raise error(f"{where}: {name} must be {expected}, got {got}")


def stale(
    where: str,
    what: str,
    by: str = "forward",
    hint: str = "",
    aliases: str = "",
    error: type[Exception] = StaleResidualError,
    got: str = "a tensor that was written to since",
) -> NoReturn:
    """Raise the error of every guard: a tensor was written to after the forward (or after what `by` names)."""
    of = f" (it aliases {aliases})" if aliases else ""
    end = f". {hint}" if hint else ""
    raise error(f"{where}: {what} must be as the {by} left it, got {got}{of}{end}")


def in_step(error: Exception, name: object) -> None:
    """Put the name of a step before the message of an error that the step raised. Each level calls it on the way up, so that nested
    steps give the whole path, as in `blocks.3.mlp.up: linear_fwd: x must be ...`. The error object stays the same; if its message
    is not its only argument, it gets a note instead, on Pythons that have notes."""
    if torch.compiler.is_dynamo_compiling():
        _in_traced_step(error, name)
        return
    # a KeyError shows the repr of its argument, so a message would appear in quotes
    if len(error.args) == 1 and isinstance(error.args[0], str) and not isinstance(error, KeyError):
        # kept apart: the next level cannot tell a path from the message behind it
        path, text = getattr(error, "_in_step", ("", error.args[0]))
        path = join_path(str(name), path)
        error._in_step = path, text  # type: ignore[attr-defined]
        error.args = (f"{path}: {text}",)
    elif hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"in step {name}")


def _in_traced_step(error: Exception, name: object) -> None:
    """`in_step` while a compiler traces, which cannot change an error: raise another of the same type. A tracer follows neither
    attributes nor slices of a message, so an error with a path is recognised by its cause, the error that it was made from."""
    if type(error) is ValueError or type(error) is TypeError:
        between = "." if type(error.__cause__) is type(error) else ": "
        raise type(error)(f"{name}{between}{error.args[0]}") from error


def not_a_tuple(where: str, x: Any, *names: str, why: str = "") -> NoReturn:
    """Raise `TypeError`, as x is not a tuple with a part for each name, and say how a step of a chain takes these parts. `why`
    tells what asks for them, as in ", as the config says"."""
    got = f"{describe(x)}: a step of a chain takes what the step before does not give with Step(..., takes={names[1:]})"
    fail(where, "x", f"a tuple ({', '.join(names)}){why}", got, TypeError)


def require(ok: bool, where: str, name: str, expected: str, got: object, *error: type[Exception]) -> None:
    """Raise `ValueError`, or the `error` that is given, unless `ok`; for config values and other plain arguments."""
    if not ok:
        fail(where, name, expected, got, *error)


def require_type(where: str, name: str, value: object, *types: type) -> None:
    """Raise `TypeError` unless `value` is an instance of one of `types` (a bool is not an int). A type may say how a function
    becomes one, in `of_a_function`."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        made = getattr(types[0], "of_a_function", "") * callable(value)
        fail(where, name, " or ".join(t.__name__ for t in types), describe(value) + made, TypeError)


def require_count(where: str, least: int = 1, **given: object) -> None:
    """Raise unless each value is an int (not a bool) of at least `least`."""
    for name, value in given.items():
        require_type(where, name, value, int, torch.SymInt)
        # a SymInt is not compared: that would be a guard
        if isinstance(value, int):
            require(value >= least, where, name, f"at least {least}", value)


def require_number(where: str, least: float = -math.inf, finite: bool = True, **given: Any) -> None:
    """Raise unless each value is a number of at least `least`, not a bool, not NaN and, if `finite`, not infinite."""
    for name, value in given.items():
        require_type(where, name, value, float, int)
        # refuses NaN, too, which is not even at least -inf
        require(value >= least, where, name, "a number" if least == -math.inf else f"at least {least:g}", value)
        require(not (finite and math.isinf(value)), where, name, "finite", value)


def require_flag(where: str, **given: object) -> None:
    """Raise unless each value is a bool: the string "no" is true to Python."""
    for name, value in given.items():
        require_type(where, name, value, bool)


def require_callable(where: str, **given: object) -> None:
    for name, value in given.items():
        if not callable(value):
            fail(where, name, "a function", describe(value), TypeError)


def require_device(where: str, device: Any) -> None:
    """Raise unless `device` is None or something that torch accepts as a device."""
    if device is None or isinstance(device, torch.device):
        return
    # torch decides: the names that it knows depend on its build
    try:
        torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        fail(where, "device", "a torch.device, or its name", describe(device))


def require_dtype(where: str, dtype: Any, floating: bool = True, name: str = "dtype") -> None:
    """Raise unless `dtype` is None or a dtype; if `floating`, a dtype in which ops compute."""
    if dtype is None:
        return
    require_type(where, name, dtype, torch.dtype)
    # not `is_floating_point`: formats of 8 bits are floating, too, but no op computes in them
    if floating and dtype not in FLOATS:
        fail(where, name, " or ".join(map(short, FLOATS)), short(dtype), TypeError)


def describe(value: Any) -> str:
    """A short, readable form of any value: `float32[2, 3]` for a tensor, the type's name for a container."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)
    # a named tuple says more by its name, and an op by its own
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"{type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r}" if hasattr(value, "residuals_of") else type(value).__name__


def describe_tree(tree: Any) -> str:
    """A tree as text, each tensor by its dtype and shape: `{'w': (float32[2], None)}`."""
    if isinstance(tree, Tensor):
        return describe(tree)
    # a subclass, as residuals of a combinator, has a repr with its name
    if type(tree) is dict:
        return f"{{{', '.join([f'{key!r}: {describe_tree(value)}' for key, value in tree.items()])}}}"
    if type(tree) in (tuple, list):
        parts = ", ".join(map(describe_tree, tree))
        return f"[{parts}]" if type(tree) is list else f"({parts},)" if len(tree) == 1 else f"({parts})"
    return repr(tree)


def differing(given: Iterable[str], wanted: Iterable[str]) -> str:
    """The missing and the extra names: the first two of each, and how many more there are."""
    given, wanted = list(dict.fromkeys(given)), list(dict.fromkeys(wanted))
    said = []
    for kind, names, others in (("missing", wanted, given), ("extra", given, wanted)):
        odd = [name for name in names if name not in set(others)]
        said.append(f"{kind} {odd[:2]}{f' and {len(odd) - 2} more' if len(odd) > 2 else ''}")
    return ", ".join(said)


def few(names: Iterable[str], most: int = 6, mark: str = ", ") -> str:
    """The first of `names`, and how many more there are."""
    found = list(names)
    shown = found if len(found) <= most + 1 else found[:most]  # one more name is as short as a number
    return mark.join(shown) + (f" and {len(found) - len(shown)} more" if len(shown) < len(found) else "")


def one_of(names: Iterable[str], got: object) -> str:
    """The choices as an error gives them: one of `names`, and the one that was probably meant."""
    known = list(names)
    near = difflib.get_close_matches(got, known, 1) if isinstance(got, str) and got not in known else []
    return f"one of {', '.join(known)}" + "".join(f" (did you mean {name}?)" for name in near)


def nearest(name: str, known: Iterable[str], most: int = 6) -> str:
    """`known`, or if there are many, the names most like `name`, and how many there are."""
    found = list(known)
    if len(found) <= most or torch.compiler.is_dynamo_compiling():  # which cannot trace difflib
        return ", ".join(found)
    return f"{len(found)} names, such as {', '.join(difflib.get_close_matches(name, found, 4, 0.0))}"


SHORT = 160  # characters that two texts may have together to be read at a glance


def differing_parts(wanted: Any, got: Any, longest: int = 240) -> tuple[str, str]:
    """Two unequal configs as texts: in full if they are short, else from where they first differ, such as `steps.0.cfg=...`."""
    if len(str(wanted)) + len(str(got)) <= longest:
        return str(wanted), str(got)
    path, wanted, got = _parting(wanted, got)
    if isinstance(wanted, tuple) and isinstance(got, tuple) and len(wanted) != len(got):
        wanted, got = f"{len(wanted)} of them", f"{len(got)}"
    texts = [text if len(text) <= longest // 2 else f"{text[: longest // 2]} ..." for text in map(str, (wanted, got))]
    return (f"{path}={texts[0]}", f"{path}={texts[1]}") if path else (texts[0], texts[1])


def _parting(wanted: Any, got: Any) -> tuple[str, Any, Any]:
    """The path to the first part in which two unequal values differ, and that part of both."""
    if type(wanted) is not type(got) or len(str(wanted)) + len(str(got)) <= SHORT:
        return "", wanted, got
    if isinstance(wanted, tuple) and len(wanted) == len(got):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(wanted, got, strict=True))]
    elif dataclasses.is_dataclass(wanted):
        # a field that equality ignores cannot be the difference
        pairs = [(f.name, getattr(wanted, f.name), getattr(got, f.name)) for f in dataclasses.fields(wanted) if f.compare]
    else:
        pairs = []
    for name, one, other in pairs:
        if one != other:
            path, wanted, got = _parting(one, other)
            return join_path(name, path), wanted, got
    return "", wanted, got


def on_screen(text: str, columns: int = 100, rows: int = 40) -> str:
    """A long text cut for a repr, saying what is left out."""
    lines = text.split("\n")
    if len(lines) > rows:
        lines = [*lines[: rows - 1], f"... and {len(lines) - rows + 1} more lines: print it"]
    return "\n".join([line if len(line) <= columns else line[: columns - 4] + " ..." for line in lines])


def in_html(text: str) -> str:
    """A text as HTML for a notebook."""
    import html  # a notebook needs it, most processes do not

    return f"<pre>{html.escape(text)}</pre>"


def sized(nbytes: float) -> tuple[float, str]:
    """A number of bytes in the largest unit that makes it at least one: `(1.5, "KiB")`."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(nbytes) >= 2**power:
            return nbytes / 2**power, unit
    return nbytes, "bytes"


def size_of(nbytes: float) -> str:
    """A number of bytes as every report shows it: `1.50 KiB`, or `512 bytes` below 1 KiB."""
    value, unit = sized(nbytes)
    return f"{value:g} bytes" if unit == "bytes" else f"{value:,.2f} {unit}"


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check(where: str, name: str, t: Any, shape: Shape, dtype: Dtypes = None, like: Tensor | None = None) -> None:
    """Raise unless `t` is a tensor of this shape (a leading `...` matches any), of this dtype or of one of a tuple of them,
    and on the device of `like`.

    Raises `TypeError` (not a tensor, wrong dtype), `ValueError` (wrong rank, size or device), `GradModeError`.
    """
    # every call of an op comes here, so nothing is formatted before something is wrong
    try:
        got = t.shape
        if (
            (
                got == shape
                or (
                    shape
                    and shape[0] is ...
                    and (len(shape) == 1 or (_ends(got, shape) if len(shape) != 2 else got and got[-1] == shape[1]))
                )
            )
            and (dtype is None or (got_dtype := t.dtype) is dtype or (type(dtype) is tuple and got_dtype in dtype))
            # two flags cost less than two devices to compare
            and (like is None or (t.is_cpu and like.is_cpu) or t.device == like.device)
            and not (t.requires_grad and torch.is_grad_enabled())
        ):
            return
    except AttributeError:  # not a tensor, as `_explain` says
        pass
    _explain(where, name, t, shape, dtype, like)


def check_rows(where: str, name: str, t: Any, width: int) -> None:
    """`check` for float rows `[..., width]`, the most common shape, without building or comparing a tuple."""
    try:
        if t.shape[-1] == width and t.dtype in FLOATS and not (t.requires_grad and torch.is_grad_enabled()):
            return
    except (AttributeError, IndexError):  # not a tensor, or one without dimensions
        pass
    _explain(where, name, t, (..., width), FLOATS, None)


def _ends(got: Shape, shape: Shape) -> bool:
    """Whether `got` ends in the sizes that follow the leading `...` of `shape`."""
    skipped = len(got) - len(shape) + 1
    return skipped >= 0 and tuple(got[skipped:]) == shape[1:]


def _explain(where: str, name: str, t: Any, shape: Shape, dtype: Dtypes, like: Tensor | None) -> None:
    if not isinstance(t, Tensor):
        fail(where, name, f"a tensor {show_shape(shape)}", describe(t), TypeError)
    got = tuple(t.shape)
    if not (_ends(got, shape) if shape[:1] == (...,) else got == shape):
        turned = len(got) == 2 and shape == got[::-1]  # a weight in the order of JAX
        fail(where, name, show_shape(shape), f"{list(got)}{': transpose it' if turned else ''}")
    allowed = dtype if isinstance(dtype, tuple) else () if dtype is None else (dtype,)
    if allowed and t.dtype not in allowed:
        # a param has to agree with x, and either may be the wrong one
        of_x = name.startswith("params") and like is not None and allowed == (like.dtype,)
        remedy = f": x is {short(like.dtype)}, cast one of them (funcops.trees.cast)" if of_x and like is not None else ""
        fail(where, name, " or ".join(map(short, allowed)), short(t.dtype) + remedy, TypeError)
    if like is not None and t.device != like.device:
        fail(where, name, f"on device {like.device}", t.device)
    if t.requires_grad and torch.is_grad_enabled():
        raise GradModeError(
            f"{where}: {name} must be a tensor that does not require grad, got one that does, in grad mode. "
            "Pass detached tensors, call under torch.no_grad(), or let autograd drive the operator through "
            "funcops.differentiable"
        )


def show_shape(shape: Shape) -> str:
    return "[" + ", ".join("..." if d is ... else str(d) for d in shape) + "]"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def join_path(path: str, name: object) -> str:
    """The path of a part below `path`. A part whose name is None, such as the body of a skip, has its combinator's path."""
    if name is None or name == "":
        return path
    return f"{path}.{name}" if path else str(name)
