"""Kernels that break a rule of kernels: law Pure names the kernel and the argument, on either implementation."""

from typing import Optional

import pytest
import torch
from torch import Tensor

from funcops.engine.backend import backend, kernel
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import OpConfig, config, dgrad_of, forward, make_op
from funcops.engine.contract.schema import DGRAD, Residuals, saved
from funcops.engine.errors import FLOATS, check
from funcops.testing import check_op


@config
class CubeConfig(OpConfig):
    pass


class CubeResiduals(Residuals):
    x: Tensor = saved("[*]", alias="x", needed_by=DGRAD)


def checked(body, triton=None, name="torch", **options):
    """Check an op that calls this kernel on a tensor of its own, so that no other law notices it."""
    called = kernel(**options)(body)
    if triton is not None:
        called.triton(triton)

    @forward(CubeConfig)
    def cube_fwd(params, x, cfg, *, needs=Needs.ALL):
        check("cube_fwd", "x", x, (...,), FLOATS)
        found = called(x.clone())
        return (x + 0 * (found if isinstance(found, Tensor) else x).sum().to(x.dtype)) ** 3, CubeResiduals.keep(cfg, needs, x=x)

    @dgrad_of(CubeResiduals)
    def cube_dgrad(residuals, dy, cfg):
        return 3 * dy * residuals.x**2, None

    cube = make_op("cube", CubeConfig, fwd=cube_fwd, dgrad=cube_dgrad)
    with backend(name):
        check_op(
            cube,
            cfg=CubeConfig(),
            x=lambda draw: draw.randn(3, 5),
            reference=lambda params, x, cfg: x**3,
            dtypes=(torch.float32,),
            laws=("pure", "right"),
        )


def whole(x: Tensor) -> Tensor:
    return x


def viewed(x: Tensor) -> Tensor:
    return x.view(-1)


def written(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def nothing(x: Tensor) -> None:
    x.mul_(2)


def fresh(x: Tensor) -> Tensor:
    return x + 1


def either(x: Tensor) -> tuple[Tensor, Optional[Tensor]]:
    return x + 1, None


FAULTS = [
    (whole, "kernel 'whole' returned memory of x: a kernel returns fresh tensors"),
    (viewed, "kernel 'viewed' returned memory of x"),
    (written, r"kernel 'written' wrote to x: .* declare mutates=\('x',\)"),
    (nothing, "kernel 'nothing' wrote to x"),
]


@pytest.mark.parametrize(("body", "said"), FAULTS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_kernel_that_breaks_a_rule_is_named(body, said):
    with pytest.raises(AssertionError, match=f"law 'pure', torch.float32: {said}"):
        checked(body)
    with pytest.raises(AssertionError, match=said.replace(body.__name__, "fresh" if body is not nothing else "nothing")):
        checked(fresh if body is not nothing else nothing, triton=body, name="triton")


def test_kernels_that_keep_the_rules_pass():
    checked(fresh)
    checked(either)
    checked(written, mutates=("x",))
    checked(fresh, triton=lambda x: x.add(1), name="triton")
    checked(either, triton=lambda x: (x.add(1), None), name="triton")


@pytest.mark.parametrize(
    ("triton", "said"),
    [
        (lambda x: x.double(), r"Triton returned float64\[3, 5\], torch float32\[3, 5\]"),
        (lambda x: x.sum(0), r"Triton returned float32\[5\], torch float32\[3, 5\]"),
        (lambda x: (x + 1, None), r"Triton returned float32\[3, 5\], None, torch float32\[3, 5\]"),
    ],
    ids=["dtype", "shape", "count"],
)
def test_implementations_of_other_forms_are_named(triton, said):
    with pytest.raises(AssertionError, match=f"kernel 'fresh': {said}"):
        checked(fresh, triton=triton, name="triton")


def _doubled(x, y_ptr, n):
    pass


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tensor_without_the_name_of_a_pointer_is_named(compiled):
    triton = pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    from funcops.engine.backend.launch import _launchers, launcher

    launch = launcher(JITFunction(_doubled) if compiled else triton.jit(_doubled))
    if compiled:
        _launchers.pop()  # so that no other test compiles it
        launch.__globals__["current_device"] = lambda: 0
    for x in (torch.ones(3), torch.zeros(1), torch.ones(3, dtype=torch.int64)):
        with pytest.raises(TypeError, match="kernel doubled: argument 'x' must be named with _ptr at its end, .* got a tensor"):
            launch(1, 1, 1, x, torch.ones(3), 3)
