"""The moving average of params against torch.optim.swa_utils."""

import re

import pytest
import torch

from funcops.engine.trees import tree_map
from funcops.optim import ema_init, ema_update


def test_ema_equals_torch():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    torchs = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average = ema_init(dict(model.named_parameters()))
    for step in range(5):
        torchs.update_parameters(model)  # its first call copies
        before = tree_map(torch.clone, average)
        new = average if step == 0 else ema_update(average, dict(model.named_parameters()), 0.9)
        assert all(map(torch.equal, average.values(), before.values())), "pure"
        average = ema_update(before, dict(model.named_parameters()), torch.tensor(0.9), in_place=True) if step else new
        torch.testing.assert_close(new, average)
        torch.testing.assert_close(list(average.values()), [p.detach() for p in torchs.module.parameters()])
        for p in model.parameters():
            p.data.add_(torch.randn_like(p))


def test_ema_keeps_small_steps_of_16_bit_params():
    params = {"w": torch.ones(3, dtype=torch.bfloat16), "step": torch.tensor(7), "none": None}
    average = ema_init(params)
    assert average["w"].dtype is torch.float32 and average["w"] is not params["w"]
    average = ema_update({**average, "w": torch.zeros(3)}, params, 0.999)
    torch.testing.assert_close(average["w"], torch.full((3,), 0.001))
    assert average["step"].item() == 7 and average["none"] is None
    assert ema_init({"w": torch.ones(2, dtype=torch.float64)})["w"].dtype is torch.float64
    moved = ema_update(average, {**params, "step": torch.tensor(8)}, 0.5, in_place=True)
    assert moved is average and moved["step"].item() == 8


@pytest.mark.parametrize(
    ("average", "params", "decay", "match"),
    [
        (torch.ones(2), torch.ones(2), 1.5, "ema_update: decay must be from 0 to 1, got 1.5"),
        (torch.ones(2), torch.ones(2), "a", "ema_update: decay must be from 0 to 1, got a"),
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, 0.5, "ema_update: average.w must be [3], got [2]"),
        ({"w": torch.ones(2)}, {"v": torch.ones(2)}, 0.5, "ema_update: params must be a tree like average"),
    ],
)
def test_ema_names_the_fault(average, params, decay, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        ema_update(average, params, decay)


@pytest.mark.parametrize("in_place", [False, True])
def test_ema_takes_integers_as_they_are(in_place):
    average, params = ({"w": torch.tensor([n]), "step": torch.tensor(int(n)), "none": None} for n in (1.0, 3.0))
    found = ema_update(average, params, 0.5, in_place=in_place)
    assert (found is average) is in_place
    assert found["w"].tolist() == [2.0] and found["step"].item() == 3 and average["step"].item() == (3 if in_place else 1)


@pytest.mark.parametrize("decay", [0.5, torch.tensor(0.5)], ids=["a number", "a tensor"])
def test_ema_of_integers_alone_has_nothing_to_blend(decay):
    average, params = {"step": torch.tensor(1), "none": None}, {"step": torch.tensor(3), "none": None}
    assert ema_update(average, params, decay) == params
