"""The references of the laws put the tensors that they make on the case's device."""

import dataclasses

import pytest
import torch
from law_cases import CASES
from two_devices import TwoDevices, placed

from funcops.engine.trees import tree_map_tensors
from funcops.testing.laws import by_reference, run

NAMES = sorted({case.op.name for case, _ in CASES})


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", NAMES)
def test_no_reference_mixes_devices(name):
    """Each case runs in one dtype."""
    found = list({str(case): case for case, _ in CASES if case.op.name == name}.values())
    for case in found:
        params, x, *_ = run(case, next(dtype for other, dtype in CASES if other is case))
        case = dataclasses.replace(case, device="cuda")
        with TwoDevices():
            params, x = tree_map_tensors(lambda t: placed(t.detach().clone()), (params, x))
            by_reference(case, params, x)


@pytest.mark.parametrize(
    ("expression", "fails"),
    [
        (lambda x: x + torch.ones(3), True),
        (lambda x: torch.where(x > 0, x, torch.zeros(3)), True),
        (lambda x: torch.stack([x, torch.arange(3.0)]), True),
        (lambda x: x.mul_(torch.ones(3)), True),
        (lambda x: x.cpu() + x, True),
        (lambda x: x + torch.ones(3, device=x.device), False),
        (lambda x: x + torch.tensor(1.0), False),
        (lambda x: x[torch.tensor([0, 2])], False),
        (lambda x: x.cpu() + torch.ones(3), False),
        (lambda x: torch.ones(3).cuda() * x.to("cuda:0"), False),
        (lambda x: x + torch.ones(3).to(x.device), False),
        (lambda x: x.new_ones(3) + torch.ones_like(x), False),
    ],
)
def test_mixed_devices_are_noticed(expression, fails):
    with TwoDevices():
        x = torch.ones(3, device="cuda")
        if fails:
            with pytest.raises(AssertionError, match="of tensors on cuda and on the CPU"):
                expression(x)
        else:
            expression(x)
        with torch.device("cuda"):
            assert (x + torch.ones(3)).is_cuda
