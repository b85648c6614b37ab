"""The kernel benchmark's calls and measurements, with the host's clock and tiny sizes on a machine without a GPU."""

import csv
import dataclasses
import itertools
import json
import math
import random
import re
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from tiny_kernel_calls import names, tiny

from benchmarks import kernels, launches, plot
from benchmarks.__main__ import main
from benchmarks.attention import of_library_attention
from benchmarks.device import Replay
from benchmarks.kernel_calls import Maker
from benchmarks.liger import COLUMNS, write_liger_csv
from benchmarks.measure import write_csv, write_json
from benchmarks.plot import draw
from funcops.engine.backend import backend
from funcops.library.kernels import cudnn_attention, grouped, grouped_scaled
from funcops.testing.tolerances import FACTOR, ROUNDOFF, assert_close

pytest.importorskip("triton")


class HostTimer:
    """A CudaTimer for the host."""

    stream = None

    def replay(self, calls):
        return Replay(lambda: [call() for call in calls], len(calls), captured=False)

    def device_us(self, replays, rounds=1):
        return {name: self.host_us(one.run) / one.calls for name, one in replays.items()}

    def host_us(self, call):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def memory_mib(self, call):
        return 0.0, 0.0


def measured(call, dtype, providers=("funcops",)):
    torch.manual_seed(0)
    with backend("triton"):
        return list(kernels.measure(call, dtype, providers, HostTimer(), 1e9))


KERNELS = [name.rpartition("-")[0] for name in names()]


def calls_in_turn():
    """Every call in one dtype, taking turns; the first tier has the first call of every other kernel."""
    order = list(dict.fromkeys(KERNELS))
    for i, name in enumerate(names()):
        chosen = KERNELS[i] not in KERNELS[:i] and order.index(KERNELS[i]) % 2 == 0
        yield pytest.param(i, id=name, marks=() if chosen else pytest.mark.slow)


@pytest.mark.turns("i", every=4)
@pytest.mark.parametrize("i", list(calls_in_turn()))
def test_every_call_measures(i, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_COPIES", 1)
    dtype = (torch.bfloat16, torch.float32)[i % 2]
    call = tiny(dtype)[i]
    (row,) = measured(call, dtype)
    dtype = call.dtype or dtype
    assert row.note == "not captured" and row.device_us > 0 and row.gb_per_s > 0
    assert row.error < FACTOR[dtype] * ROUNDOFF[dtype]


def test_the_librarys_attention_is_measured_beside_torchs_own_choice(monkeypatch):
    """Two of torch's kernels, of which the CPU has one, and ours by cuDNN, for which no other kernel may stand. Rows are known by
    the file that chooses the library's function."""
    monkeypatch.setattr(kernels, "MOST_COPIES", 1)
    for call in itertools.islice(of_library_attention(Maker("cpu", torch.float32, shrink=4096)), 2):
        providers = ("funcops", "torch", "flash", "cudnn", "funcops_cudnn")
        rows = {row.provider: row for row in measured(call, torch.float32, providers)}
        assert call.name in ("attention_fwd", "attention_bwd") and set(rows) == set(providers) <= set(kernels.PROVIDERS)
        # a torch for CUDA asks for its driver first
        assert re.match("failed: (BenchError: torch's chooser does not take cuDNN|AcceleratorError)", rows["funcops_cudnn"].note)
        with monkeypatch.context() as patch:
            patch.setattr(cudnn_attention, "cudnn_serves", serves := Mock(return_value=True))
            (row,) = measured(call, torch.float32, ("funcops_cudnn",))
        *heads, causal = serves.call_args_list[0].args
        given = call.args[1:4] if call.name == "attention_bwd" else call.args[:3]
        assert row.device_us > 0 and causal is True
        assert all(t.equal(one.transpose(1, 2)) for t, one in zip(heads, given, strict=True))
        assert rows["funcops"].error < FACTOR[torch.float32] * ROUNDOFF[torch.float32] and rows["torch"].tflop_per_s > 0
        assert rows["cudnn"].note.startswith("failed: ") and not rows["flash"].note.startswith("failed")
        want = call.torch(*call.args)()
        got = call.kernel(*call.args)
        if call.name == "attention_fwd":
            assert_close(got[0], want, dtype=torch.float32, length=call.length)
    assert len(launches._source(call.kernel)) == 12 and launches._source(call.kernel) != launches._source(
        kernels.grouped.grouped_wgrad
    )


FIRST = {
    "adamw": 0,
    "rms_norm_fwd": 1,
    "add_layer_norm_bwd": 1,
    "cross_entropy_fwd": 2,
    "attention_bwd": 3,
    "slot_attention_fwd": 4,
}
FIRST |= {"scored_attention_fwd": 5, "experts_up": 6, "route_fwd": 7, "grouped_wgrad": 8, "rms_norm_quantize": 9, "scale": 10}


@pytest.mark.parametrize("seed", range(4))
def test_what_a_user_runs_by_default_is_measured_first(seed, monkeypatch):
    """A call of each kernel without a row, then the others: both in this order."""
    draw, names = random.Random(seed), [*FIRST, *FIRST]
    draw.shuffle(names)
    found = [kernels.Listed(i // 3, name, str(i), "abc") for i, name in enumerate(names)]
    monkeypatch.setattr(kernels, "listed", lambda dtype: found)
    done = draw.choice(found)
    earlier = [kernels.Measured(done.kernel, done.shape, "bfloat16", "funcops", *kernels.NOT_MEASURED, "", "abc")]
    rows, parts = kernels.planned("", ["bf16"], earlier)
    measured = [one for part in parts for one in part.calls.values()]
    assert rows == earlier and sorted(measured) == sorted(one for one in found if one is not done)
    first, others = [one.kernel for one in measured[: len(FIRST) - 1]], [one.kernel for one in measured[len(FIRST) - 1 :]]
    assert set(first) == set(FIRST) - {done.kernel}, "one call of each kernel that has no row"
    for part in (first, others):
        assert [kernels.rank(name) for name in part] == sorted(FIRST[name] for name in part)
    assert all(found[3 * part.family + place] == one for part in parts for place, one in part.calls.items())


@pytest.mark.parametrize("jobs", [0, 1, 3, 8])
@pytest.mark.parametrize("broken", [False, True])
def test_processes_share_out_what_is_compiled_ahead(jobs, broken, monkeypatch):
    """Each call is one process's. A process that dies breaks the pool, and ends nothing."""
    shares = []

    class Threads(ThreadPoolExecutor):
        def submit(self, *given):
            if broken:
                raise BrokenExecutor("a process died")
            return super().submit(*given)

    monkeypatch.setattr(kernels, "ProcessPoolExecutor", lambda jobs, context: Threads(jobs))
    monkeypatch.setattr(kernels, "_run_once", lambda part, providers: shares.append(part))
    parts = [kernels.Part("bf16", family, {i: None for i in range(family)}) for family in (0, 3, 5)]
    with kernels.compiling(jobs) as ahead:
        ahead(parts, ("funcops",))
    want = [(part.family, place) for part in parts for place in part.calls]
    assert sorted((part.family, place) for part in shares for place in part.calls) == ([] if broken or not jobs else want)


@pytest.mark.parametrize("sizes", [[], [1], [31, 1], [31, 40, 2], [32, 5, 5]], ids=str)
def test_batches_keep_the_order_of_parts(sizes):
    parts = [kernels.Part("bf16", i, dict.fromkeys(range(size))) for i, size in enumerate(sizes)]
    found = list(kernels.batches(parts))
    assert sum(found, []) == parts and all(sum(len(part.calls) for part in batch) >= kernels.BATCH for batch in found[:-1])


def test_errors_of_groups_are_of_each_group_alone():
    """A reference that multiplies all rows by every group's matrix takes seconds a call on a GPU."""
    masks = grouped.by_masks, grouped.wgrad_by_masks, grouped_scaled.by_masks, grouped_scaled.wgrad_by_masks
    with kernels.by_groups():
        assert grouped.by_masks is grouped_scaled.by_masks is grouped.by_groups
        assert grouped.wgrad_by_masks is grouped_scaled.wgrad_by_masks is grouped.wgrad_by_groups
    assert (grouped.by_masks, grouped.wgrad_by_masks, grouped_scaled.by_masks, grouped_scaled.wgrad_by_masks) == masks


class Brittle:
    """A rival that raises from its nth call on; preparation is the first."""

    def __init__(self, nth):
        self.left = nth

    def step(self):
        self.left -= 1
        if self.left <= 0:
            raise RuntimeError("no such case")

    def prepare(self, *args):
        self.step()
        return self.step


@pytest.mark.parametrize("nth", [*range(1, 8), 1000])
@pytest.mark.parametrize("who", ["liger", "cublas", "funcops"])
def test_who_fails_anywhere_is_named_and_the_rest_goes_on(nth, who, monkeypatch):
    """In preparing, in the first call, while it is timed, or after."""
    monkeypatch.setattr(kernels, "MOST_COPIES", 1)
    call = next(s for s in tiny(torch.float32) if s.name == "rms_norm_bwd")
    given, brittle = kernels.provided(call), Brittle(nth)
    monkeypatch.setattr(kernels, "provided", lambda call: {**given, who: brittle.prepare})
    rows = {row.provider: row for row in measured(call, torch.float32, ("funcops", "torch", who))}
    assert set(rows) == {"funcops", "torch", who} and rows["torch"].device_us > 0
    assert (rows[who].note == "failed: RuntimeError: no such case") == (brittle.left <= 0) == math.isnan(rows[who].device_us)


def test_rivals_run_none_of_our_kernels(monkeypatch):
    """Not even if the torch body of a kernel, which torch.compile compiles, calls another kernel."""
    monkeypatch.setattr(kernels, "MOST_COPIES", 1)
    calls = [dataclasses.replace(s, torch=None) for s in {s.name: s for s in reversed(tiny(torch.float32))}.values()]

    def ours(*args):
        raise AssertionError("ours")

    for call in calls:
        declared = call.kernel.kernel
        if declared.find_triton():
            monkeypatch.setattr(declared, "triton_impl", ours)
    for call in calls:
        rows = measured(call, torch.float32, ("torch",))
        assert [row.note for row in rows] == ["not captured"], call.name


def test_rows_are_written_as_they_come(tmp_path, monkeypatch, capsys):
    """A benchmark that ends early leaves its rows in every file."""
    rows = measured(tiny(torch.float32)[0], torch.float32, ("funcops", "torch"))

    def some(**options):
        yield rows[0]
        assert json.loads((tmp_path / "k.json").read_text())["rows"][0]["provider"] == "funcops"
        yield rows[1]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(kernels, "run", some)
    with pytest.raises(RuntimeError, match="out of memory"):
        main(["kernels", "--json", str(tmp_path / "k.json"), "--csv", str(tmp_path / "k.csv")])
    assert len((tmp_path / "k.csv").read_text().splitlines()) == 3
    assert capsys.readouterr().out.count("rms_norm_fwd") == 2


def test_what_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_COPIES", 1)
    rows = measured(tiny(torch.float32)[0], torch.float32, ("funcops", "torch"))
    write_json(tmp_path / "k.json", rows)
    write_csv(tmp_path / "k.csv", rows)
    write_liger_csv(tmp_path / "l.csv", rows)
    draw(tmp_path / "k.png", rows)
    found = json.loads((tmp_path / "k.json").read_text())
    assert found["rows"][0]["kernel"] == "rms_norm_fwd" and found["machine"]["torch"] == torch.__version__
    for name, header in (("k.csv", kernels.Measured._fields), ("l.csv", COLUMNS)):
        with open(tmp_path / name) as file:
            lines = list(csv.reader(file))
        assert lines[0] == list(header) and len(lines) == 3
    assert (tmp_path / "k.png").stat().st_size > 1000


@pytest.mark.turns("count")
@pytest.mark.parametrize("count", [0, 1, 40, 120])
def test_the_picture_hides_no_mark(count, tmp_path, monkeypatch):
    """All labels and marks are within the axes, and the legend is outside."""
    from matplotlib import pyplot as plt

    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    row = kernels.Measured("k", "8", "bf16", "funcops", 1.0, 1.0, 1.0, 0.5, math.nan, math.nan, 0.0, 0.0, 0.0, "")
    rows = [row._replace(shape=str(i), provider=name, of_copy=1.2) for i in range(count) for name in kernels.PROVIDERS[:4]]
    draw(str(tmp_path / "k.png"), rows)
    (figure,) = figures
    assert len(figure.axes) == max(1, -(-count // plot.LINES)) and figure.get_suptitle()
    marks = 0
    for axes in figure.axes:
        low, high = sorted(axes.get_ylim())
        left, right = axes.get_xlim()
        for line in axes.lines:
            if line.get_marker() in plot.MARKERS:
                marks += len(line.get_xdata())
                assert all(low < y < high and left < x < right for x, y in line.get_xydata())
                assert set(line.get_xdata()) == {120.0}, "percent of a copy's rate"
        assert high - low <= min(max(1, count), plot.LINES) + 0.01 and axes.get_xlabel()
        for legend in figure.legends:
            assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert marks == 4 * count and len(figure.legends) == (count > 0)
    monkeypatch.undo()
    plt.close(figure)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_bench_says_so():
    command = [sys.executable, "-m", "benchmarks", "kernels"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and "no CUDA device" in found.stderr
