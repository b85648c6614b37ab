"""Good arguments of the public callables of `funcops.logs`: see `good_arguments`."""

from __future__ import annotations

from typing import Any

import torch
from good_lora import elsewhere
from good_rows import CFG, CHAIN, Row, chain_params

from funcops import Needs, linear, logs, low_precision

ASKED = {"a": ("dx_norm", "y_norm")}
DELAYED = low_precision.with_recipe(CHAIN, low_precision.Fp8Delayed(), only=("a",))
CALIBRATED = logs.with_logs(CHAIN, logs.calibration_logs(DELAYED))
LOGGED = logs.with_logs(CHAIN, ASKED, runs=2)


def gradients() -> Any:
    return logs.logs_init(chain_params(), LOGGED)


LOGS = {
    "logs.LoggedConfig": Row(
        lambda: {"op": linear, "cfg": CFG, "logs": ("dx_norm",), "runs": 2},
        {"logs": ((), ("no such",), "dx_norm", ["dx_norm"]), "runs": (0,)},
    ),
    "logs.with_logs": Row(
        lambda: {"cfg": CHAIN, "logs": ASKED, "runs": 2},
        {"logs": ({"no such": ("dx_norm",)}, {"a": "dx_norm"}, {"a": ()}, {"a": ("no such",)}, {3: ("dx_norm",)}), "runs": (0,)},
    ),
    "logs.logs_init": Row(
        lambda: {"params": chain_params(), "cfg": LOGGED, "dtype": torch.float32},
        accepts=elsewhere("params", chain_params(), "nothing"),
    ),
    "logs.logs_needs": Row(
        lambda: {"cfg": LOGGED, "needs": Needs(x=False)},
        accepts={("needs", "Needs(x=False, params=('no.such',))"): "the forward checks them"},
    ),
    "logs.split_logs": Row(lambda: {"dparams": gradients(), "cfg": LOGGED}, accepts=elsewhere("dparams", gradients(), "a.logs")),
    "logs.gradient_noise": Row(
        lambda: {"small": torch.ones(2), "big": torch.ones(()), "batch_small": 1, "batch_big": 2}, {"batch_big": (1,)}
    ),
    "logs.param_logs": Row(lambda: {"cfg": CHAIN}),
    "logs.total_norm": Row(lambda: {"logs": {"a": {"dw_norm": torch.ones(2)}}, "cfg": LOGGED}, {"logs": ({},)}),
    "logs.calibration_logs": Row(lambda: {"cfg": DELAYED}),
    "logs.calibrated": Row(
        lambda: {"logs": {"a": {"x_amax": torch.ones(()), "dy_amax": torch.ones(())}}, "cfg": CALIBRATED, "params": chain_params()},
        {"logs": ({},)},
        elsewhere("params", chain_params(), "a.weight"),
    ),
}
