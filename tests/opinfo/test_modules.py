"""torch's own samples of its modules (`module_db`) give equal results through `funcops.nn`'s, constructed and swapped in.

Options without a sample there are in `tests/adapters/test_torch_arguments.py`."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db

from funcops import nn as fnn
from funcops.engine.trees import tree_map_tensors
from funcops.testing import assert_close
from funcops.testing.checks import float_like

pytestmark = pytest.mark.slow
DTYPE = torch.float64
INFOS = {info.module_cls.__name__: info for info in module_db if hasattr(fnn, info.module_cls.__name__)}


def samples(name):
    info = INFOS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from info.module_inputs_func(info, device="cpu", dtype=DTYPE, requires_grad=True, training=True)


def made(lib, name, sample):
    args, options = copy.deepcopy((sample.constructor_input.args, sample.constructor_input.kwargs))
    torch.manual_seed(0)
    return getattr(lib, name)(*args, **options).to(DTYPE)


def outcome(module, sample):
    """y and the gradients of all inputs and parameters; or the error."""
    args, options = tree_map_tensors(
        lambda t: t.detach().clone().requires_grad_(t.requires_grad), (sample.forward_input.args, sample.forward_input.kwargs)
    )
    given = [t for t in [*args, *options.values()] if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.manual_seed(1)
    try:
        y = module(*args, **options)
    except Exception as error:
        return error, None, None, None
    if y.requires_grad:
        y.backward(float_like(y.detach(), 5))
    return None, y.detach(), [t.grad for t in given], {n: p.grad for n, p in module.named_parameters()}


def compare(want, got, what):
    assert (want[0] is None) == (got[0] is None), f"{what}: torch {want[0]!r}, funcops {got[0]!r}"
    for a, b in zip(want[1:], got[1:], strict=True):
        if isinstance(a, dict):
            assert list(a) == list(b), f"{what}: names of parameters"
            a, b = list(a.values()), list(b.values())
        if a is not None:
            assert_close(b, a, dtype=DTYPE, length=1024, what=what)


@pytest.mark.parametrize("name", INFOS)
def test_every_sample_of_a_module(name):
    found = 0
    for sample in samples(name):
        what = f"{name} {sample.desc} {sample.constructor_input.args} {sample.constructor_input.kwargs}"
        theirs, ours, swapped = made(nn, name, sample), made(fnn, name, sample), made(nn, name, sample)
        said = fnn.from_torch(swapped)
        assert said.replaced or said.left, what
        assert repr(ours) == repr(theirs), what
        assert list(ours.state_dict()) == list(theirs.state_dict()), what
        ours.load_state_dict(theirs.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = outcome(theirs, sample)
            compare(want, outcome(ours, sample), what)
            compare(want, outcome(swapped, sample), f"swapped {what}")
        found += 1
    assert found


def test_every_module_of_torchs_name_is_asked():
    assert {"Linear", "LayerNorm", "RMSNorm", "GroupNorm", "Softmax", "CrossEntropyLoss", "GLU"} <= set(INFOS)
    without_samples = {"Dropout", "Sequential"}  # drawn by torch's generator; a container
    named = {n for n in dir(fnn) if inspect.isclass(getattr(fnn, n)) and getattr(nn, n, None) in getattr(fnn, n).__mro__}
    assert named - set(INFOS) == without_samples
