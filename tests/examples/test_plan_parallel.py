"""examples/plan_parallel.py, run as a user would."""

import pytest
from programs import check_picture, run

SMALL = "--hidden 1024 --ffn 2816 --layers 12 --heads 8 --kv-heads 4 --vocab 32000 --seq 2048 --batch 4 --gpus 8".split()


def test_a_plan_is_printed_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    flags = "--fixed pp=2 tp=4 microbatch=1 --why tp=8 --show 3".split()
    said = run("plan_parallel.py", *SMALL, *flags, "--plot", tmp_path / "best.png").splitlines()
    assert said[0] == "0.2B params, 8,192 tokens a step"
    assert said[2].startswith(">    2     1    1   4") and "meshes are out" in said[5]
    assert any(line.startswith("pp 2 x dp 1 x cp 1 x tp 4, V ") for line in said)
    check_picture(tmp_path / "best.png")


def test_experts_have_an_axis():
    said = run("plan_parallel.py", *SMALL, *"--experts 8 --choices 2 --fixed ep=4 pp=1 cp=1 --show 1".split()).splitlines()
    assert said[0] == "0.9B params, 8,192 tokens a step" and said[1].split()[:5] == ["pp", "dp", "ep", "cp", "tp"]
    assert "2 experts of a layer on a GPU" in said[-1]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--gpus", "0"], "plan_parallel: gpus must be at least 1, got 0"),
        (["--gpu", "V100"], "gpu must be A100 or H100, or a GPU of your own, got 'V100'"),
        (["--fixed", "tp"], "--fixed: expected NAME=VALUE, got 'tp'"),
        (["--fixed", "tp=3"], "fixed must be sizes whose product divides gpus 8, got {'tp': 3}"),
        (["--heads", "7"], "Decoder: heads must be a divisor of hidden 1024, got 7"),
        (["--memory", "0.01"], "memory must be at least "),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_flags_are_named(flags, error):
    assert error in run("plan_parallel.py", *SMALL, *flags, code=1)
