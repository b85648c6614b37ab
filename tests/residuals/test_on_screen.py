"""Reports fit a screen of 100 columns and 40 lines, unless all is requested."""

import re
import sys

import pytest
import torch

from funcops import (
    ChainConfig,
    LinearConfig,
    Needs,
    RMSNormConfig,
    Step,
    chain,
    diff,
    explain,
    fit,
    linear,
    random,
    report,
    rms_norm,
    schedule,
)
from funcops.adapters.graphs import graphed
from funcops.engine.errors import size_of, sized
from funcops.memory.ledger import Ledger


def chain_of(steps):
    pairs = [
        (Step(f"norm_{i}", rms_norm, RMSNormConfig(8)), Step(f"a_rather_long_name_{i}", linear, LinearConfig(8, 8)))
        for i in range(steps)
    ]
    return ChainConfig(steps=tuple(step for pair in pairs for step in pair))


SHOWN = {
    "Schedule, long": lambda: schedule.zb_h2(64, 200),
    "Schedule": lambda: schedule.one_f_one_b(2, 3),
    "Simulated, long": lambda: schedule.simulate(schedule.one_f_one_b(64, 70)),
    "Simulated": lambda: schedule.simulate(schedule.one_f_one_b(2, 3)),
    "explain, long": lambda: explain(chain_of(30)),
    "explain": lambda: explain(chain_of(2)),
    "fit, long": lambda: fit(chain, chain_of(4), torch.ones(2, 8), 10**9),
    "fit": lambda: fit(chain, chain_of(1), torch.ones(2, 8), 10**9),
}


@pytest.mark.parametrize("what", [pytest.param(what, marks=pytest.mark.slow if what == "fit, long" else ()) for what in SHOWN])
def test_reprs_fit_a_screen(what):
    value = SHOWN[what]()
    lines = repr(value).split("\n")
    assert 2 <= len(lines) <= 40 and max(map(len, lines)) <= 100
    if "long" not in what:
        assert "..." not in repr(value)
    assert value._repr_html_().startswith("<pre>") and lines[0].split()[0] in value._repr_html_()


def test_a_schedule_shows_its_actions():
    assert repr(schedule.one_f_one_b(2, 2)) == (
        "one_f_one_b: 2 ranks, 2 stages, 2 microbatches\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1"
    )


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, (0, "bytes")), (1023, (1023, "bytes")), (1536, (1.5, "KiB")), (2**20, (1, "MiB")), (3 * 2**30, (3, "GiB"))],
)
def test_bytes_have_the_unit_in_which_they_are_something(nbytes, shown):
    assert sized(nbytes) == shown
    assert size_of(nbytes) == (f"{shown[0]} bytes" if nbytes < 1024 else f"{shown[0]:.2f} {shown[1]}")


def kept_by(width, needs=Needs.ALL):
    cfg = LinearConfig(width, width)
    params = linear.init(cfg, key=random.key(0))
    return linear.fwd(params, torch.ones(64, width), cfg, needs=needs)[1]


def a_ledger():
    ledger = Ledger()
    ledger.keep("a", linear.dgrad(kept_by(64), torch.ones(64, 64), LinearConfig(64, 64))[1])
    return ledger


PRINTS_BYTES = {
    "report": lambda: report(kept_by(64), tokens=1),
    "diff": lambda: diff(report(kept_by(64)), report(kept_by(64, Needs(x=False)))),
    "fit": lambda: fit(chain, chain_of(1), torch.ones(4096, 8), 10**9),
    "Simulated": lambda: schedule.simulate(schedule.one_f_one_b(2, 3), schedule.Costs(residual_bytes=2**20, pending_bytes=2**20)),
    "Ledger": a_ledger,
    "graphed": lambda: graphed(lambda x: x * 2, torch.ones(4096)).report(),
}


@pytest.mark.parametrize("what", PRINTS_BYTES)
def test_every_print_of_bytes_is_in_units(what):
    value = PRINTS_BYTES[what]()
    for text in (str(value), str(value) if what == "graphed" else repr(value)):  # a named tuple's repr is its data
        assert re.search(r"\d\.\d\d [KM]iB", text) and not re.search(r"\d{4,}|\d,\d{3}", text.replace("4096", "")), text


def test_the_picture_of_a_small_report_is_in_kib():
    pytest.importorskip("matplotlib")
    cfg = chain_of(2)
    params = chain.init(cfg, key=torch.tensor([0, 0]))
    x = torch.ones(64, 8)
    axes = report(chain.fwd(params, x, cfg)[1], params, x).plot().axes[0]
    assert axes.get_xlabel() == "KiB kept for the backward" and axes.get_title() and axes.get_xlim()[1] >= 0.2


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    cfg = chain_of(2)
    params, x = chain.init(cfg, key=torch.tensor([0, 0])), torch.ones(64, 8)
    kept = report(chain.fwd(params, x, cfg)[1], params, x)
    with pytest.raises(ImportError, match="^Report.plot needs matplotlib: pip install matplotlib$"):
        kept.plot()
