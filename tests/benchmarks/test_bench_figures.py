"""The benchmarks' arithmetic, on known samples and clocks: denominators, the order of runs, and counts."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import device, kernels, measure, memory, overhead, plain, plain_moe, profiled
from benchmarks.device import CudaTimer, Replay
from benchmarks.kernel_calls import KernelCall, direct
from benchmarks.measure import write_json
from benchmarks.saved import saved_by_autograd as saved
from funcops import RouteConfig, RouteParams, route
from funcops.engine.trees import tensors
from funcops.library.kernels import fused_linear, norm
from funcops.testing.tolerances import assert_close


class Clock:
    """A clock that advances when it is told to; `seconds` reads it."""

    def __init__(self):
        self.now, self.done = 0.0, []

    def takes(self, name, us):
        def fn():
            self.now += us * 1e-6
            self.done.append(name)

        return fn

    def seconds(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("time.perf_counter", made.seconds)
    return made


def test_functions_take_turns_and_a_sample_is_of_one_call(clock):
    found = measure.interleaved({"a": clock.takes("a", 5), "b": clock.takes("b", 7)}, rounds=3, calls=2)
    assert found == {"a": [pytest.approx(5)] * 3, "b": [pytest.approx(7)] * 3}
    assert clock.done == ["a", "b"] + ["a", "a", "b", "b"] * 3, "warm-up, then rounds"
    clock.done.clear()
    measure.interleaved({"a": clock.takes("a", 5)}, rounds=1, calls=8)
    assert len(clock.done) == 3 + 8


def test_a_summary_is_of_medians_and_of_ratios_by_round_to_the_fastest_other():
    samples = {"ours": [1.0, 2.0, 3.0, 4.0, 50.0], "slow": [100.0, 9.0, 9.0, 9.0, 9.0], "fast": [2.0, 1.0, 6.0, 2.0, 10.0]}
    rows = {(row.provider, row.metric): row.value for row in measure.summary("b", "c", samples, "ours", "ms")}
    assert rows == {
        ("ours", "median"): 3,
        ("ours", "quartile spread"): 27 - 1.5,
        ("slow", "median"): 9,
        ("slow", "quartile spread"): 54.5 - 9,
        ("fast", "median"): 2,
        ("fast", "quartile spread"): 8 - 1.5,
        ("ours", "ratio to fast"): 2,  # the median of 0.5, 2, 0.5, 2, 5; the ratio of the medians would be 3 / 2
    }
    units = {row.unit for row in measure.summary("b", "c", samples, "ours", "ms") if "ratio" not in row.metric}
    assert units == {"ms"}


class Cuda:
    """A stand-in for torch.cuda, on a clock: events, a stream, a graph that may refuse to capture, and memory."""

    def __init__(self, clock, captures=True):
        self.clock, self.captures, self.synchronized = clock, captures, 0
        self.allocated, self.peak = 10 * 2**20, 90 * 2**20

    def Stream(self):
        return "stream"

    @contextlib.contextmanager
    def stream(self, one):
        assert one == "stream"
        yield

    def Event(self, enable_timing):
        assert enable_timing
        return Event(self.clock)

    def CUDAGraph(self, keep_graph=False):
        return Graph(self.clock)

    def graph_pool_handle(self):
        self.pools = getattr(self, "pools", 0) + 1
        return 0, self.pools  # a pair of numbers, as torch's are

    def device(self, device):
        return contextlib.nullcontext()

    def current_device(self):
        return 0

    def current_stream(self):
        return "current"

    def set_stream(self, stream):
        assert stream == "current"

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode="global"):
        if not self.captures:
            raise RuntimeError("not permitted when stream is capturing")
        self.clock.done.clear()
        yield
        graph.recorded, self.clock.done = self.clock.done, []

    def synchronize(self):
        self.synchronized += 1

    def memory_allocated(self):
        return self.allocated

    def reset_peak_memory_stats(self):
        self.peak = self.allocated

    def max_memory_allocated(self):
        return self.peak


class Event:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.at = self.clock.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3  # milliseconds


class Graph:
    def __init__(self, clock):
        self.clock = clock

    def replay(self):
        self.clock.done += ["replay"]

    def reset(self):
        """Free nothing."""


@pytest.fixture
def cuda(clock, monkeypatch):
    made = Cuda(clock)
    monkeypatch.setattr(device.torch, "cuda", made)
    return made


def test_device_times_are_of_one_call_in_turns(clock, cuda):
    replays = {
        "a": Replay(clock.takes("a", 60), calls=3, captured=True),
        "b": Replay(clock.takes("b", 40), calls=10, captured=True),
    }
    assert CudaTimer().device_us(replays, rounds=5) == {"a": pytest.approx(20), "b": pytest.approx(4)}
    assert clock.done == ["a", "b"] * 6


@pytest.mark.parametrize(
    ("us", "providers", "calls"), [(90, 2, 24), (1, 3, 64), (5000, 2, 2), (1, 80, 80)], ids=["some", "short", "long", "many"]
)
@pytest.mark.parametrize("captures", [True, False])
def test_a_replay_is_of_about_two_milliseconds(us, providers, calls, captures, clock, cuda):
    """It holds as many rounds of the copies as take so long, at most 64 calls, but each copy at least once."""
    cuda.captures = captures
    found = CudaTimer().replay([clock.takes(str(i), us) for i in range(providers)])
    assert (found.calls, found.captured) == (calls, captures)
    clock.done.clear()
    found.run()
    assert clock.done == (["replay"] if captures else [str(i % providers) for i in range(calls)])


def test_host_times_are_of_one_call_on_an_idle_device(clock, cuda):
    assert CudaTimer().host_us(clock.takes("a", 3), rounds=3, calls=4) == pytest.approx(3)
    assert len(clock.done) == 12 and cuda.synchronized == 4


def test_memory_is_the_peak_and_its_rise(clock, cuda):
    def call():
        cuda.peak = 70 * 2**20

    assert CudaTimer().memory_mib(call) == (70, 60)


class Fixed:
    """A timer with known answers, which records how many copies of the arguments each provider was given."""

    stream = None

    def __init__(self, **us):
        self.us, self.copies = us, {}

    def replay(self, calls):
        self.copies[len(self.copies)] = len(calls)
        return Replay(calls[0], len(calls), captured=True)

    def device_us(self, replays):
        return {name: self.us[name] for name in replays}

    def host_us(self, call):
        return 7.0

    def memory_mib(self, call):
        return 3.0, 1.0


def rows_of(call, timer, providers, copy_rate=1e9):
    rows = kernels.measure(call, torch.bfloat16, providers, timer, copy_rate)
    return {row.provider: row for row in rows}


def test_rates_count_what_is_read_and_what_is_written_once():
    x, w = torch.randn(16, 8).bfloat16(), torch.randn(8).bfloat16()
    call = KernelCall(norm.rms_norm_fwd, "16x8", (x, w, 1e-6, False))
    timer = Fixed(funcops=2.0, torch=4.0)
    rows = rows_of(call, timer, ("funcops", "torch"), copy_rate=1e9)
    moved = (16 * 8 + 8) * 2 + 16 * 8 * 2 + 16 * 4  # x and weight; y; rstd
    assert rows["funcops"].gb_per_s == pytest.approx(moved / 2e-6 / 1e9)
    assert rows["torch"].gb_per_s == pytest.approx(moved / 4e-6 / 1e9)
    assert rows["funcops"].of_copy == pytest.approx(moved / 2e-6 / 1e9), "of a copy's 1 GB/s"
    assert (rows["torch"].device_us, rows["torch"].host_us, rows["torch"].peak_mib, rows["torch"].delta_mib) == (4, 7, 3, 1)
    assert math.isnan(rows["torch"].of_cublas) and math.isnan(rows["torch"].tflop_per_s) and math.isnan(rows["torch"].error)
    assert rows["funcops"].error < 2**-7 and rows["funcops"].note == ""
    assert set(timer.copies.values()) == {1 + device.MOST_COPIES}


def test_an_argument_that_is_written_to_is_counted_twice_and_products_by_cublas(monkeypatch):
    dy, x, weight, bias = torch.randn(16, 4), torch.randn(16, 8), torch.zeros(4, 8), torch.zeros(4)
    dy, x = dy.bfloat16(), x.bfloat16()
    call = KernelCall(
        fused_linear.fused_linear_wgrad_into,
        "16x8x4",
        (dy, x, 1.0, weight, bias),
        product=direct(lambda dy, x, *_: dy.T @ x),
        flops=1024.0,
    )
    read = 16 * 4 * 2 + 16 * 8 * 2 + 4 * 8 * 4 + 4 * 4
    monkeypatch.setattr(kernels, "COLD_BYTES", 5 * read)
    timer = Fixed(funcops=2.0, cublas=0.5)
    rows = rows_of(call, timer, ("funcops", "cublas"))
    moved = read + 4 * 8 * 4 + 4 * 4
    assert rows["funcops"].gb_per_s == pytest.approx(moved / 2e-6 / 1e9) and math.isnan(rows["cublas"].gb_per_s)
    assert rows["funcops"].tflop_per_s == pytest.approx(1024 / 2e-6 / 1e12)
    assert rows["funcops"].of_cublas == 0.25 and rows["cublas"].of_cublas == 1
    assert set(timer.copies.values()) == {6}, "as many as leave nothing in the cache"


def test_an_error_is_of_all_results_in_the_euclidean_norm():
    x, w = torch.randn(16, 8), torch.ones(8)
    good = KernelCall(norm.rms_norm_fwd, "16x8", (x, w, 1e-6, False))
    assert kernels.relative_error(good) < 1e-6

    def off(x, w, eps, zero_centered):
        y, rstd = norm.rms_norm_fwd(x, w, eps, zero_centered)
        return y * 1.5, rstd * 1.5

    off.kernel = norm.rms_norm_fwd.kernel
    assert kernels.relative_error(KernelCall(off, "16x8", good.args)) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(("best", "tensors"), [("copy", 2), ("scale", 2), ("add", 3)])
def test_the_yardstick_is_the_best_of_a_copy_a_scale_and_a_sum(best, tensors, monkeypatch):
    """A sum reads two tensors and writes one."""
    real, times = torch.randn, dict(copy=4.0, scale=4.0, add=6.0) | {best: 2.0}
    monkeypatch.setattr(torch, "randn", lambda n, device: real(n))
    assert kernels.measured_copy_rate(Fixed(**times), 1024) == pytest.approx(tensors * 4096 / 2e-6)


def test_autograd_is_charged_for_saved_activations_alone():
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    assert saved(torch.nn.Linear(8, 4), x) == x.nbytes, "the weight is not an activation"
    chained = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4))
    assert saved(chained, x) == x.nbytes + 5 * 4 * 4
    scaled = torch.nn.Linear(8, 4)
    scaled.table = torch.randn(5, 4)
    scaled.forward = lambda x: torch.nn.functional.linear(x, scaled.weight) * scaled.table
    assert saved(scaled, x) == x.nbytes, "nor is a table"
    twice = torch.nn.Linear(8, 4)
    twice.forward = lambda x: twice.weight.sum() + (x * x).sum() + (x.view(8, 5) * x.view(8, 5)).sum()
    assert saved(twice, x) == x.nbytes, "a storage counts once"


def test_peak_bytes_count_tensors_alive_at_once():
    x = torch.zeros(1000)

    def work():
        y = x + 1
        z = y + 1
        del y
        w = z.view(10, 100) + 1  # a view has no storage of its own
        return w, z.add_(1)

    def falls():
        y = x + 1
        z = y + 1
        w = z + 1
        del y, z
        return w + 1

    assert memory.peak_of(work) == 8000
    assert memory.peak_of(falls) == 12000, "which is more than lives at the end"
    assert memory.peak_of(lambda: [x + 1, x + 2, x + 3]) == 12000
    assert memory.peak_of(lambda: x.add_(1).view(10, 100)) == 0


MADE = [["norm fwd", "norm bwd"], ["linear"], ["glu", "no memory", "norm after it"]]


@pytest.fixture
def calls(monkeypatch):
    """`kernels.run` on three families of calls, of which one cannot be made."""
    made = [[SimpleNamespace(name=name, shape=f"{i} rows") for i, name in enumerate(names)] for names in MADE]

    def family(calls):
        for call in calls:
            if call.name == "no memory":
                raise torch.OutOfMemoryError("asked for 80 GiB")
            yield call

    def row(call, *_):
        return [kernels.Measured(call.name, call.shape, "bfloat16", "funcops", *kernels.NOT_MEASURED, note="")]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels.gc, "collect", lambda: 0)  # half a second each in a process that has run many tests
    monkeypatch.setattr(kernels, "CudaTimer", lambda: None)
    monkeypatch.setattr(kernels, "Maker", lambda *_: None)
    monkeypatch.setattr(kernels, "measured_copy_rate", lambda timer: 1.0)
    monkeypatch.setattr(kernels, "measured_families", lambda: [lambda make, calls=calls: family(calls) for calls in made])
    found = [kernels.Listed(i, call.name, call.shape, f"of {call.name}") for i, calls in enumerate(made) for call in calls]
    monkeypatch.setattr(kernels, "listed", lambda dtype: found)
    monkeypatch.setattr(kernels, "measure", row)
    return found


def names_of(rows):
    return [row.kernel for row in rows]


def ran(*args, **options):
    """The rows of `kernels.run`, which come some at a time."""
    return [row for found in kernels.run(*args, **options) for row in found]


@pytest.mark.parametrize("only", ["", "norm", "linear", "no kernel"])
@pytest.mark.parametrize("late", [False, True])
def test_kernels_are_measured_by_name_until_the_time_is_over(only, late, calls, capsys):
    """A call that is not selected is not measured; one that the time did not allow is named."""
    wanted = [call.kernel for call in calls if only in call.kernel]
    found = ran(only, ["bf16"], (), -1.0 if late else math.inf)
    said = capsys.readouterr().err
    assert names_of(found) == ([] if late else wanted)
    assert all((f"{name} " in said) == late for name in wanted) and bool(said) == bool(late and wanted), said
    failed = [row.kernel for row in found if row.note == "failed: OutOfMemoryError: asked for 80 GiB"]
    assert failed == [name for name in names_of(found) if name in ("no memory", "norm after it")]
    assert all(row.launches == f"of {row.kernel}" for row in found)


@pytest.mark.parametrize("lost", [0, 1, 2, 4, 8, 15])
def test_only_what_an_earlier_file_lacks_is_measured(lost, calls, tmp_path):
    """A call is lacking if its row is not there, has failed, or is of other launches. The rows that are valid are copied."""
    rows = ran("", ["bf16"], ())
    missing = {row.kernel for i, row in enumerate(rows[:4]) if lost >> i & 1}
    changes = [None, dict(launches=""), dict(launches="of another"), dict(note="failed: earlier")]
    kept = [
        row._replace(gb_per_s=7.0, **(changes[i] or {})) if row.kernel in missing else row._replace(gb_per_s=7.0)
        for i, row in enumerate(rows)
        if not (row.kernel in missing and changes[i % 4] is None)
    ]
    write_json(tmp_path / "k.json", kept)
    valid = [row for row in kept if row.kernel not in missing and not row.note.startswith("failed")]
    at_once = next(kernels.run("", ["bf16"], (), changed=str(tmp_path / "k.json")))
    assert not valid or names_of(at_once) == names_of(valid), "none is out of the file for a moment"
    again = ran("", ["bf16"], (), changed=str(tmp_path / "k.json"))
    measured = {row.kernel for row in again if row.gb_per_s != 7.0}
    assert measured == missing | {"no memory", "norm after it"} and sorted(names_of(again)) == sorted(names_of(rows))
    assert names_of(ran("linear", ["bf16"], (), changed=str(tmp_path / "k.json"))).count("linear") == 1


@pytest.mark.parametrize("of", ["NVIDIA A", "NVIDIA B"])
def test_figures_of_two_devices_do_not_meet_in_a_file(of, calls, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: of)
    write_json(tmp_path / "k.json", [row._replace(gb_per_s=7.0) for row in ran("", ["bf16"], ())])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B")
    again = ran("", ["bf16"], (), changed=str(tmp_path / "k.json"))
    copied = [row for row in again if row.gb_per_s == 7.0 and not row.note]
    assert bool(copied) == (of == "NVIDIA B") and ("k.json is of NVIDIA A" in capsys.readouterr().err) != bool(copied)


def test_a_profile_counts_kernels_and_not_the_calls_that_launch_them(monkeypatch):
    on_device = [("gemm", 60.0, 6), ("norm", 30.0, 9), ("copy", 3.0, 3)]
    events = [(name, DeviceType.CUDA, us, count) for name, us, count in on_device] + [("cudaLaunchKernel", DeviceType.CPU, 0.0, 18)]
    times = [(0.0, 4e3), (1e3, 3e3), (6e3, 9e3)]  # a kernel beside another, then none for 2 ms
    ran = [SimpleNamespace(device_type=DeviceType.CUDA, time_range=SimpleNamespace(start=a, end=b)) for a, b in times]
    found = SimpleNamespace(
        key_averages=lambda: [
            SimpleNamespace(key=key, device_type=on, self_device_time_total=us, count=count) for key, on, us, count in events
        ],
        events=lambda: [*ran, SimpleNamespace(device_type=DeviceType.CPU, time_range=SimpleNamespace(start=-9e3, end=99e3))],
    )
    said = iter([{"SM clock": 1755.0, "power": 512.5}, {"SM clock": 1500.0}])
    monkeypatch.setattr(profiled, "during", lambda step, seconds=0.0: next(said))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profiled.torch.profiler, "profile", lambda activities: contextlib.nullcontext(found))
    monkeypatch.setattr(profiled, "LISTED", 2)
    done = []
    rows = list(profiled.profiled("step", "case", {"ours": lambda: done.append(1)}))
    assert len(done) == 2 * profiled.STEPS == 6
    host = [row for row in rows if row.metric == "host until return"]
    assert len(host) == 1 and 0 <= host[0].value < 1e3 and host[0].unit == "ms"
    rows.remove(host[0])
    assert {row.metric: row.value for row in rows} == {
        "gemm: time": 20.0,
        "gemm: launches": 2.0,
        "norm: time": 10.0,
        "norm: launches": 3.0,
        "other kernels: time": 1.0,
        "other kernels: launches": 1.0,
        "all kernels: time": 31.0,
        "all kernels: launches": 6.0,
        "span of kernels": 3.0,
        "gaps between kernels": pytest.approx(2 / 3),
        "SM clock before": 1755.0,
        "SM clock after": 1500.0,
        "power before": 512.5,
        "power after": None,
    }


@pytest.mark.parametrize(
    ("says", "found"),
    [
        ("1755, 512.34", {"SM clock": 1755.0, "power": 512.34}),
        ("1755, [N/A]", {"SM clock": 1755.0}),
        ("No devices were found", {}),
        (None, {}),
    ],
    ids=str,
)
def test_the_clock_is_read_while_steps_run(says, found, monkeypatch, tmp_path):
    """A field that nvidia-smi does not know is absent; without nvidia-smi all are, and nothing fails."""
    if says is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    steps = []
    assert profiled.during(lambda: steps.append(1)) == found and steps


def test_low_precision_is_measured_beside_the_rest(monkeypatch):
    monkeypatch.setattr(overhead, "_cases", lambda: [("a",), ("b",)])
    monkeypatch.setattr(overhead, "_measure", lambda case: [case, case])
    monkeypatch.setattr(overhead, "_modules", lambda lib: {"m": lib})
    monkeypatch.setattr(overhead, "_measure_modules", lambda name, ours, theirs: [name, ours is not theirs])
    monkeypatch.setattr(overhead, "_low_precision", lambda: ["low"])
    assert overhead.run() == ["a", "a", "b", "b", "m", True, "low"]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (2, 1), (4, 2), (4, 3)])
def test_plain_routing_chooses_as_ours_does(score, groups, top_groups):
    """The plain mixture chooses the same experts, from the best groups alone, with the same weights."""
    options = dict(score=score, scale=2.0, groups=groups, top_groups=top_groups)
    logits = torch.randn(33, 8, generator=torch.Generator().manual_seed(groups))
    weights, counts, _ = plain_moe.routed(logits, None, plain_moe.Router(8, 2, **options))
    (ours, indices, load, _), _ = route.fwd(RouteParams(), logits, RouteConfig(8, 2, **options))
    assert_close(weights, torch.zeros(33, 8).scatter(1, indices.long(), ours), dtype=torch.float32)
    assert counts.tolist() == load.tolist()


def test_sizes_of_weight_gradients_are_the_callers():
    import argparse

    from benchmarks import wgrads

    parser = argparse.ArgumentParser()
    wgrads.add_arguments(parser)
    assert parser.parse_args(["--rows", "3", "5"]).rows == [3, 5] and parser.parse_args([]).rows == list(wgrads.ROWS)
    assert parser.parse_args(["--features", "7"]).features == 7 and parser.parse_args([]).features == wgrads.FEATURES


@pytest.mark.parametrize("i", [0, 3], ids=["linear", "block"])
def test_overhead_compares_donation_halves_and_ids_with_the_same_gradients(i, monkeypatch):
    found = []

    def interleaved(functions, **_):
        found.append({name: fn() for name, fn in functions.items()})
        return {name: [1.0, 1.0, 1.0] for name in functions}

    monkeypatch.setattr(overhead, "interleaved", interleaved)
    name, *case = overhead._cases()[i]
    rows = overhead._measure(name, *case)
    ours = ["donated", "donated halves", "halves", *["positions as ids"] * (i == 3), "step"]
    assert [row.case for row in rows if row.metric.startswith("ratio")] == [name, *(f"{name}, {one}" for one in ours)]
    assert all(row.provider == f"funcops, {row.case.rpartition(', ')[2]}" for row in rows if row.metric == "ratio to funcops")
    for results in found[1:-1]:
        one, other = (tensors(result) for result in results.values())
        assert one and len(one) == len(other)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))
    assert len(found[-1]) == 2 and all(t.isfinite().all() for params in found[-1].values() for t in tensors(params))


KEPT_ON_A_GPU = {  # the tensors beside x and the weights
    "RMS norm": (lambda: plain.RMSNorm(6), [((2, 300, 1), torch.float32)]),
    "layer norm": (lambda: torch.nn.LayerNorm(6), [((2, 300, 1), torch.float32)] * 2),
    "dropout after a linear layer": (lambda: plain.DroppedLinear(6, 6, 0.25), [((2, 300, 6), torch.bool)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KEPT_ON_A_GPU)
def test_a_layer_as_on_a_gpu_is_the_layer_and_keeps_its_input_and_what_a_gpus_kernel_keeps(name, dtype):
    build, wanted = KEPT_ON_A_GPU[name]
    layer = build().to(dtype)
    weights = list(layer.parameters())
    torch.nn.init.uniform_(weights[0], 0.5, 1.5)
    x, dy = (torch.randn(2, 300, 6).to(dtype) for _ in range(2))
    found = []
    for run in (lambda of: of, plain.as_on_a_gpu):
        torch.manual_seed(0)
        kept = list[torch.Tensor]()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            given = x.clone().requires_grad_()
            y = run(layer)(given)
        found.append((y, *torch.autograd.grad(y, [given, *weights], dy)))
    for ours, torchs in zip(*found[::-1], strict=True):
        assert_close(ours, torchs, dtype=dtype)
    own = {t.untyped_storage()._cdata for t in (given, *weights)}
    assert [(tuple(t.shape), t.dtype) for t in kept if t.untyped_storage()._cdata not in own] == wanted
