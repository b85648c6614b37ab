"""`profile` and the names of steps: against counts without names, residuals' own report, and traces written out by hand."""

import gzip
import json
import threading
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import (
    ChainConfig,
    LinearConfig,
    Profile,
    RepeatConfig,
    RopeConfig,
    RouteConfig,
    SoftcapConfig,
    Step,
    chain,
    linear,
    named_scope,
    named_steps,
    optim,
    profile,
    random,
    remat,
    repeat,
    report,
    softcap,
    trees,
    value_and_grad,
    with_policy,
)
from funcops.adapters.profiler import profiles, trace
from funcops.engine.backend import scopes
from funcops.engine.backend.scopes import Label
from funcops.engine.program import rules
from funcops.graphs import graph_data, graphed, wgrads_beside
from funcops.library.ops.experts import ExpertsConfig
from funcops.models import DecoderConfig, MoEConfig, decoder, decoder_x

SIZES = dict(vocab=64, dim=16, layers=2, heads=2, kv_heads=1, head_size=8, hidden=32, context=16)
PLAIN = DecoderConfig(**SIZES, rope=RopeConfig(8), tied=True)
SPARSE = DecoderConfig(
    **SIZES, rope=RopeConfig(8), moe=MoEConfig(route=RouteConfig(4, 2, aux=0.1), experts=ExpertsConfig(4, 16, 8), shared=8)
)


def training(cfg, op=chain):
    """A step of a decoder with its optimiser, and its arguments."""
    dec = decoder(cfg, loss=True)
    params = chain.init(dec, key=random.key(0))
    ids = torch.randint(0, cfg.vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    x = decoder_x(cfg, ids, torch.float32, labels=ids.roll(-1, 1))
    adamw, losses = optim.AdamWConfig(), tuple(name for name in dec.outputs if name.startswith("loss"))

    def step(params, state, x):
        loss, grads, *_ = value_and_grad(op, losses=losses)(params, x, dec)
        with named_scope("optimizer"):
            params, state = optim.adamw_update(params, grads, state, adamw, lr=1e-3)
        return loss, params, state

    return step, (params, optim.adamw_init(params, adamw), x), dec


def equal(a, b):
    return all(torch.equal(s, t) for s, t in zip(trees.tensors(a), trees.tensors(b), strict=True))


class Products(TorchDispatchMode):
    """Counts products by the step that runs."""

    runs = True

    def __init__(self):
        super().__init__()
        self.by_step = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.by_step[scopes.label()] += func.__name__.split(".")[0] in ("mm", "addmm", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cfg", [PLAIN, SPARSE], ids=["dense", "experts"])
def test_a_step_of_a_decoder_is_named_by_path_and_half(cfg, tmp_path):
    step, args, dec = training(cfg)
    found = profile(step, *args)
    calls = operators_of(found, tmp_path / "eager.json")
    assert found.device == "cpu" and calls[Label()] <= 0.01 * calls.total()
    assert [row.path for row in found.rows if not row.path] in ([], [""])
    paths = {row.path for row in found.rows}
    for layer in (0, 1):
        assert {f"blocks.{layer}.attn.norm", f"blocks.{layer}.attn.qkv.q.proj", f"blocks.{layer}.attn.mix"} <= paths
    assert {"embed", "norm", "head", "optimizer"} <= paths
    assert {row.half for row in found.rows} >= {"fwd", "bwd", "dgrad", "recompute"}
    assert found.seconds == pytest.approx(sum(row.seconds for row in found.rows)) and all(row.seconds >= 0 for row in found.rows)
    assert f"cpu: {1e3 * found.seconds:.3f} ms" in str(found) and "blocks.*.attn.mix" in str(found)


@pytest.mark.parametrize("change", [None, remat, lambda op: with_policy(op, "minimal")], ids=["plain", "remat", "minimal"])
def test_bytes_kept_are_those_of_the_report(change):
    op = chain if change is None else change(chain)
    step, args, dec = training(PLAIN, op)
    _, kept = op.fwd(args[0], args[2], dec)
    assert sum(row.kept for row in profile(step, *args).rows) == report(kept, args).kept_bytes


@pytest.mark.parametrize("offload", [False, True])
def test_the_input_that_a_remat_by_itself_keeps_is_counted(offload):
    cfg, x = LinearConfig(4, 3), torch.ones(2, 4)
    op, params = remat(linear, offload), linear.init(cfg, key=random.key(0))
    found = profile(lambda params, x: op.fwd(params, 2 * x, cfg), params, x, warmup=0, calls=1)
    assert sum(row.kept for row in found.rows) == x.nbytes


def test_products_are_counted_where_they_run():
    """A mode of the test counts them, over one call; the table counts every operator that computes."""
    step, args, _ = training(PLAIN)
    with Products() as plain:
        want = step(*args)
    with named_steps(), Products() as named:
        got = step(*args)
    assert equal(got, want) and set(plain.by_step) == {Label()}
    assert sum(named.by_step.values()) == sum(plain.by_step.values())
    for layer in (0, 1):
        for name, products in (("attn.qkv.q.proj", 3), ("attn.out", 3), ("mlp.up", 3), ("mlp.down", 3)):
            path = f"blocks.{layer}.{name}"
            assert sum(n for label, n in named.by_step.items() if label.path == path) == products, path
    rows = {(row.path, row.half): row for row in profile(step, *args).rows}
    weight, rows_ = 4 * 16 * 16, 4 * 24 * 16
    assert rows["blocks.0.attn.out", "fwd"].launches == 1
    assert rows["blocks.0.attn.out", "fwd"].moved == weight + 2 * rows_, "x, the weight and y, once each"


def operators_of(found, path):
    """The calls of operators in a profile's trace by label, and the labels."""
    found.save_trace(path)
    labels = {str(label): label for label in (Label(row.path, row.half) for row in found.rows) if label != Label()}
    return trace.spent(json.loads(path.read_text())["traceEvents"], labels, {}).calls


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_has_the_names_of_the_eager_one(backend, tmp_path, monkeypatch):
    """Its operators run in the steps in which the eager step runs them, with the rules for large inputs, which a compiled step has
    for all; Inductor's kernels between them are timed only. Code without names, which a guard of dynamo keeps, is made once for
    both backends, as to trace it takes a dozen seconds."""
    monkeypatch.setattr(rules, "FEW", 0)
    step, args, _ = training(PLAIN)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    plain = compiled(*args) if backend == "aot_eager" else None
    found = profile(compiled, *args, calls=1)
    assert {row.launches for row in found.rows} == {None}
    calls = operators_of(found, tmp_path / "compiled.json")
    assert calls[Label()] <= 0.03 * calls.total(), "the compiled graph itself, and copies at its end"
    eager = {(row.path, row.half) for row in profile(step, *args, calls=1).rows if row.path}
    assert {label for label in eager if "+" not in label[0]} <= {(row.path, row.half) for row in found.rows}
    for layer in (0, 1):
        for name in ("attn.qkv.q.proj", "attn.out", "mlp.up", "mlp.down"):
            assert calls[Label(f"blocks.{layer}.{name}", "fwd")] >= 1
    assert plain is None or equal(compiled(*args), plain), "the compiled code without names is still there"


def test_a_recorded_graph_has_the_names_of_its_capture(tmp_path):
    step, args, _ = training(PLAIN)
    with named_steps():
        captured = graphed(step, *args, warmup=1)
    data = graph_data(captured)
    assert sum(bool(node.path) for node in data.nodes) >= 0.99 * len(data.nodes)
    found = profile(captured, *args)
    calls = operators_of(found, tmp_path / "graph.json")
    assert calls[Label()] <= 0.01 * calls.total()
    assert {"head", "optimizer", "blocks.1.mlp.down", "inputs of the graph"} <= {row.path for row in found.rows}
    assert equal(captured(*args), step(*args))
    plain = graphed(step, *args, warmup=1)
    assert {node.path for node in graph_data(plain).nodes} == {""}
    assert [node.name for node in graph_data(plain).nodes] == [node.name for node in data.nodes]


def test_weight_gradients_in_a_branch_are_named():
    cfg = wgrads_beside(RepeatConfig(linear, LinearConfig(4, 4), times=3))
    params, x = repeat.init(cfg, key=random.key(0)), torch.ones(2, 4)
    found = profile(lambda: repeat.bwd(repeat.fwd(params, x, cfg)[1], x, cfg))
    assert {(row.path, row.half) for row in found.rows if row.path} >= {(str(i), "wgrad") for i in range(3)}


UP = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 8)), Step("cap", softcap, SoftcapConfig(30.0))))


def test_off_nothing_is_named():
    params, x = chain.init(UP, key=random.key(0)), torch.ones(2, 4)
    with named_scope("outer"), torch.profiler.profile() as found:
        chain.fwd(params, x, UP)
    assert scopes.label() == Label() and not any("up" in event.name or "outer" in event.name for event in found.events())
    with named_steps():
        pass
    assert not scopes.on and not scopes.names


def test_names_nest_and_errors_leave_none_behind():
    params, x = chain.init(UP, key=random.key(0)), torch.ones(2, 4)
    with named_steps():
        with torch.profiler.profile() as found, named_scope("model"):
            chain.fwd(params, x, UP)
        with pytest.raises(ValueError, match="up: linear_fwd: x must be"), named_scope("model"):
            chain.fwd(params, torch.ones(2, 5), UP)
        assert scopes.label() == Label()
    assert {"model", "model.up: fwd", "model.cap: fwd"} <= {event.name for event in found.events()}


def test_each_thread_has_names_of_its_own():
    seen = {}

    def work(name):
        with named_scope(name):
            barrier.wait()
            seen[name] = scopes.label()

    barrier = threading.Barrier(2)
    with named_steps():
        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert seen == {"a": Label("a"), "b": Label("b")}


def test_the_trace_is_written_for_a_viewer(tmp_path):
    params, x = chain.init(UP, key=random.key(0)), torch.ones(2, 4)
    compiled = torch.compile(lambda x: chain.fwd(params, x, UP)[0], backend="aot_eager", fullgraph=True)
    found = profile(compiled, x, calls=1)
    found.save_trace(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    (up,) = [event for event in events if event.get("name") == "up: fwd"]
    inside = [e for e in events if e.get("cat") == "cpu_op" and up["ts"] <= e["ts"] and e["ts"] + e["dur"] <= up["ts"] + up["dur"]]
    assert {"aten::addmm", "aten::mm"} & {event["name"] for event in inside}, "the range spans the operators between its marks"


def test_rows_are_summed_by_depth_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    step, args, _ = training(PLAIN)
    found = profile(step, *args, calls=1)
    short = found.by_step(1)
    assert {row.path for row in short} <= {"embed", "blocks", "norm", "head", "loss", "optimizer", ""}
    assert sum(row.seconds for row in short) == pytest.approx(found.seconds)
    assert sum(row.kept for row in short) == sum(row.kept for row in found.rows)
    found.plot(str(tmp_path / "profile.svg"))
    assert "blocks" in (tmp_path / "profile.svg").read_text()
    assert isinstance(found, Profile) and found.dicts()[0].keys() == set(found.rows[0]._fields) and "<pre>" in found._repr_html_()


@pytest.mark.filterwarnings("ignore:No artists with labels found")  # matplotlib's, of a legend without bars
@pytest.mark.parametrize(("steps", "inches"), [(0, 1.6), (1, 1.6), (2, 2.0)])
def test_a_picture_is_as_high_as_its_rows(steps, inches):
    """Without rows it is as high as with one."""
    pytest.importorskip("matplotlib")
    rows = [profiles.ProfileRow(f"step{i}", "fwd", 1e-3, 1, 8, 0) for i in range(steps)]
    assert Profile(rows, "cpu", {}).plot().get_figheight() == pytest.approx(inches)


def event(cat, name, ts, dur, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "tid": 1 if cat.startswith(("cpu", "user", "cuda")) else 7,
        "args": args,
    }


LABELS = {str(label): label for label in (Label("up", "fwd"), Label("up", "wgrad"), Label("blocks.0.up", "dgrad"))}
UP_FWD, UP_WGRAD, UP_DGRAD = LABELS.values()


def test_kernels_belong_to_the_step_that_launched_them():
    """Eager: by the time of the launch with the kernel's correlation, whenever the kernel runs."""
    events = [
        event("user_annotation", "up: fwd", 0, 50),
        event("cpu_op", "aten::mm", 10, 20),
        event("cuda_runtime", "cudaLaunchKernel", 15, 2, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 40, 2, correlation=2),
        event("user_annotation", "up: wgrad", 60, 30),
        event("cuda_runtime", "cudaMemcpyAsync", 70, 2, correlation=3),
        event("kernel", "gemm", 100, 400, correlation=1),
        event("kernel", "triton_norm", 500, 100, correlation=2),
        event("gpu_memcpy", "Memcpy DtoD", 600, 50, correlation=3),
        event("kernel", "late", 700, 10, correlation=9),
        {"ph": "i", "name": "Record Window End", "ts": 0},
    ]
    found = trace.spent(events, LABELS, {})
    assert found.kernels == pytest.approx({UP_FWD: 500e-6, UP_WGRAD: 50e-6, Label(): 10e-6})
    assert found.launches == {UP_FWD: 2, UP_WGRAD: 1, Label(): 1}
    assert found.operators == pytest.approx({UP_FWD: 20e-6})


def test_kernels_of_a_graph_belong_to_the_step_of_their_node():
    """Torch records annotations, keyed by the ids that a profiler reports."""
    node = 5 << 32 | 3
    labels = scopes.labels_of({node: [{"name": "up: fwd", "path": "up", "half": "fwd"}], 8: ["phase", {"name": "other"}]})
    assert labels == {node: UP_FWD}
    events = [
        event("user_annotation", "up: wgrad", 0, 50),
        event("cuda_runtime", "cudaGraphLaunch", 10, 5, correlation=1),
        event("kernel", "gemm", 100, 30, correlation=1, **{"graph node id": node}),
        event("kernel", "gemm", 130, 30, correlation=1, **{"graph id": 5, "graph node id": 3}),
        event("kernel", "unknown", 160, 7, correlation=1, **{"graph node id": 4}),
    ]
    assert trace.spent(events, LABELS, labels).kernels == pytest.approx({UP_FWD: 60e-6, UP_WGRAD: 7e-6})


def test_bytes_of_a_cuda_graph_are_unknown_not_zero():
    """A replay's operators are not seen; where some are, their bytes are counted."""
    times = trace.Spent({}, {UP_FWD: 4.0, UP_WGRAD: 2.0}, Counter({UP_FWD: 8, UP_WGRAD: 2}), Counter())
    counted = profiles._Counted()
    counted.launches[UP_WGRAD], counted.moved[UP_WGRAD] = 1, 96
    rows = [profiles._row(label, times, counted, {UP_FWD: 7}, 2) for label in (UP_FWD, UP_WGRAD)]
    assert rows == [profiles.ProfileRow("up", "fwd", 2.0, 4, None, 7), profiles.ProfileRow("up", "wgrad", 1.0, 1, 96, 0)]
    assert profiles._row(UP_FWD, times, None, {}, 2) == profiles.ProfileRow("up", "fwd", 2.0, 4, None, 0)


def test_time_between_marks_belongs_to_their_step():
    begin, end = ("cpu_op", "funcops::scope_begin"), ("cpu_op", "funcops::scope_end")
    events = [
        event("cpu_op", "## Call CompiledFxGraph abc ##", 0, 100),
        event(*begin, 10, 10),
        event("user_annotation", scopes.BEGIN + "up: fwd", 12, 2),
        event(*begin, 30, 10),
        event("user_annotation", scopes.BEGIN + "blocks.0.up: dgrad", 32, 2),
        event(*end, 60, 10),
        event("user_annotation", scopes.END, 62, 2),
        event(*end, 80, 10),
        event("user_annotation", scopes.END, 82, 2),
    ]
    found = trace.spent(events, LABELS, {}).operators
    assert found == pytest.approx({Label(): 20e-6, UP_FWD: 20e-6, UP_DGRAD: 20e-6}), "the marks' own time is nobody's"
    assert [(r["name"], r["ts"]) for r in trace.ranges(events)] == [("blocks.0.up: dgrad", 32), ("up: fwd", 12)]
    assert trace.is_compiled(events) and not trace.is_compiled(events[:1])


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda: profile(3), TypeError, "profile: fn must be"),
        (lambda: profile(lambda: None, calls=0), ValueError, "profile: calls must be"),
        (lambda: profile(lambda: None, warmup=-1), ValueError, "profile: warmup must be"),
        (lambda: profile(lambda: None, count="yes"), TypeError, "profile: count must be"),
        (lambda: profile(lambda: torch.ones(1)).by_step(0), ValueError, "by_step: depth must be"),
    ],
)
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_long_profile_is_cut_off_on_the_screen_alone():
    def step():
        for i in range(80):
            with named_scope(f"part_{chr(65 + i // 10)}{chr(65 + i % 10)}"):
                torch.ones(1)

    found = profile(step)
    assert len(str(found).splitlines()) >= 82 and repr(found) != str(found)
    assert repr(found).splitlines()[:50] == str(found).splitlines()[:50] and len(repr(found).splitlines()) <= 62


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({}, 5), (dict(warmup=0), 4), (dict(warmup=2, calls=1), 4), (dict(warmup=3, calls=2, count=False), 5)],
    ids=str,
)
def test_a_function_runs_as_often_as_is_said(options, wanted):
    """`warmup + calls` times, and once more to count."""
    given = []
    profile(given.append, "x", **options)
    assert given == ["x"] * wanted


def test_a_function_without_operators_has_no_rows():
    found = profile(lambda: None)
    assert found.rows == [] and found.named == 1.0 and "0.000 ms" in str(found)
