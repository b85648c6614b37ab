"""Kept tensors in files: the bits of no policy, the bytes that a report said, and every fault by name, with nothing left behind."""

import copy
import errno
import os
import pickle
import random as pyrandom
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from policy_cases import MLP, SMALL, WAYS, X, by_backward, drawn_needs, report_before, within_bounds, written
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from funcops import (
    ChainConfig,
    Compress,
    Disk,
    Ledger,
    LinearConfig,
    Offload,
    Policy,
    Recompute,
    RepeatConfig,
    RMSNormConfig,
    SkipConfig,
    SoftcapConfig,
    Step,
    TorchConfig,
    chain,
    donate,
    linear,
    op_from_module,
    pack,
    random,
    remat,
    repeat,
    report,
    rms_norm,
    skip,
    softcap,
    unpack,
    with_policy,
)
from funcops.engine.residuals.offload import copies
from funcops.engine.residuals.report import kept_values
from funcops.engine.trees import tensors, tree_map_tensors
from funcops.graphs import graphed
from funcops.memory import away, disk
from funcops.models.blocks import mlp_config
from funcops.testing.checks import same_bits

BODIES = {**SMALL, "mlp": (skip, SkipConfig(chain, MLP), X)}
ROOT = Path(__file__).resolve().parents[2]
ONE = SoftcapConfig(1.0)


def files(folder):
    written(folder)
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".residual"))


def drawn(rng, folder):
    """An op and config of some layers, x, and rules by path for some of them."""
    op, cfg, x = BODIES[rng.choice(list(BODIES))]
    times = rng.randint(1, 3)
    fields = sorted({path for path, *_ in kept_values(op.fwd(op.init(cfg, key=random.key(0)), x, cfg)[1])})
    codec = rng.choice([None, None, "bf16", "mxfp8", "int8"])
    action = Disk(folder) if codec is None else Compress(codec) | Disk(folder)
    layers = rng.choice(["*", "0", f"0-{times - 1}"])
    fields = [path for path in fields if codec is None or path[-1] in "xqkvy"]
    names = rng.sample(fields, min(rng.randint(1, 4), len(fields)))
    rules = {f"{layers}.{name}": action for name in names}
    return op, RepeatConfig(op, cfg, times), x, Policy(rules, optional=True), codec


@pytest.mark.turns("seed")
@pytest.mark.parametrize("seed", range(24))
def test_drawn_rules_give_the_bits_and_the_bytes(seed, folder):
    rng = pyrandom.Random(seed)
    _, cfg, x, policy, codec = drawn(rng, folder)
    op, params = with_policy(repeat, policy), repeat.init(cfg, key=random.key(0))
    needs, how = drawn_needs(rng, params), rng.choice(WAYS)
    before = report_before(op, params, x, cfg, needs).places
    y, kept = op.fwd(params, x, cfg, needs=needs)
    found = report(kept, params, x)
    assert found.places == before and found.kept_bytes == sum(before.values())
    assert written(folder) == before["file"]
    ledger = Ledger(params, x)
    ledger.keep("a microbatch", kept)
    assert ledger.nbytes == before["here"]
    ledger.discard()
    plain = with_policy(repeat, Policy({}, optional=True))
    same_y, all_kept = plain.fwd(params, x, cfg, needs=needs)
    same_bits(y, same_y, "y")
    held = {path: value for path, value, _ in kept_values(all_kept)}
    for path, value, _ in kept_values(kept):
        if path in held and getattr(value, "place", "here") == "file":
            got = unpack(value)
            assert torch.equal(got, held[path]) if codec is None else within_bounds(codec, got, held[path]), path
    value = None  # a file goes with the last that holds its tensor
    # the bits of the codec alone, in the place or not
    alone = Policy({rule: Compress(codec) for rule, _ in policy.rules}, optional=True) if codec else Policy({}, optional=True)
    want = with_policy(repeat, alone)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
    same_bits(
        by_backward(op, kept, dy, cfg, how),
        by_backward(want, want.fwd(params, x, cfg, needs=needs)[1], dy, cfg, how),
        f"{policy} {needs}",
    )
    if not how.endswith("given away"):
        same_bits(op.bwd(kept, dy, cfg), want.bwd(want.fwd(params, x, cfg, needs=needs)[1], dy, cfg), "again")
    else:
        assert files(folder) == []


def of_a_chain(folder, action=None):
    """A chain under a rule for one field, and what it takes."""
    cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(8)), Step("mix", linear, LinearConfig(8, 8))))
    op = with_policy(chain, Policy({"mix.x": action or Disk(folder)}))
    params = chain.init(cfg, key=random.key(0))
    want = chain.bwd(chain.fwd(params, X, cfg)[1], torch.ones(2, 3, 8), cfg)
    return op, cfg, params, want


NAMED = r"mix\.x: Disk: the file .*funcops-[0-9a-f]{16}-\d+\.residual \(float32\[2, 3, 8\]\) must be "


def cut(path):
    os.truncate(path, 10)


def longer(path):
    with open(path, "ab") as end:
        end.write(b"more")


def one_byte(path):
    with open(path, "r+b") as start:
        first = start.read(1)
        start.seek(0)
        start.write(bytes([first[0] ^ 1]))


def of_another_run(path):
    Path(path).write_bytes(torch.ones(2, 3, 8).numpy().tobytes())


HARM = {
    cut: "one of 10 bytes instead of 192: it was cut off",
    longer: "one of 196 bytes instead of 192",
    one_byte: "other bytes: it was written to since, or is a file of another run",
    of_another_run: "other bytes: it was written to since, or is a file of another run",
    os.unlink: "No such file or directory",
}


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("half", ["bwd", "wgrad", "unpack", "pickle"])
def test_a_file_that_was_harmed_is_refused_by_path(harm, half, folder):
    op, cfg, params, _ = of_a_chain(folder)
    y, kept = op.fwd(params, X, cfg)
    (path,) = files(folder)
    harm(path)
    named = "run the forward again, .*got .*" + HARM[harm]
    if half == "bwd":
        with pytest.raises(OSError, match=NAMED + "as the forward wrote it .*" + named):
            op.bwd(kept, torch.ones_like(y), cfg)
    elif half == "wgrad":
        _, pending = op.dgrad(kept, torch.ones_like(y), cfg)
        with pytest.raises(OSError, match=NAMED + ".*" + named):
            op.wgrad(pending, cfg)
        del pending
    else:
        with pytest.raises(OSError, match=r"Disk: the file .*" + named):
            unpack(kept) if half == "unpack" else pickle.dumps(kept)


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("action", [None, "int8"])
def test_a_full_disk_is_refused_by_path_and_later_there_is_room(action, folder, monkeypatch):
    action = Compress(action) | Disk(folder) if action else Disk(folder)
    op, cfg, params, want = of_a_chain(folder, action)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "open", full, raising=False)
        busy = threading.Event()  # else the second file of a codec may meet the fault of the first
        disk._threads(os.getpid())[0].submit(busy.wait)
        y, kept = op.fwd(params, X, cfg)
        busy.set()
        written(folder)
        for _ in range(2):
            with pytest.raises(OSError, match=r"^mix\.x: Disk: the file .* written to its folder \(free space .* No space left"):
                op.bwd(kept, torch.ones_like(y), cfg)
        # the next forward does not go on in vain
        with pytest.raises(OSError, match=r"^mix\.x: Disk: the file .* written to its folder \(free space .* No space left"):
            op.fwd(params, X, cfg)
    assert files(folder) == []
    y, again = op.fwd(params, X, cfg)
    got = op.bwd(again, torch.ones_like(y), cfg)
    assert not isinstance(action, Disk) or same_bits(got, want, "room") is None


def test_a_limit_of_the_system_for_files(folder):
    """Python itself writes, and meets the limit in the middle of a file."""
    said = alone(
        folder,
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        y, kept = op.fwd(None, torch.ones(64, 1024), ONE)
        disk._threads(os.getpid())[0].submit(lambda: None).result()
        try:
            op.bwd(kept, y, ONE)
        except OSError as error:
            print(error)
        print(os.listdir(folder))
        """,
    )
    assert re.match(r"x: Disk: the file .* \(float32\[64, 1024\]\) must be written .*, got File too large\n", said), said
    assert ".residual" not in said.splitlines()[-1]


@pytest.mark.parametrize("fault", ["missing", "a file", "read-only", "no locks"])
def test_a_folder_that_cannot_be_used_is_refused_before_anything_is_changed(fault, folder, monkeypatch):
    where = {"missing": f"{folder}/none", "a file": f"{folder}/funcops-notes.txt"}.get(fault, folder)
    said = {"missing": "No such file or directory", "a file": "Not a directory", "read-only": "Read-only file system"}
    real = os.open

    def read_only(path, flags, *mode):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *mode)

    if fault == "read-only":
        monkeypatch.setattr(os, "open", read_only)
    if fault == "no locks":
        monkeypatch.setattr(disk, "fcntl", None)
    ran = []
    counted = linear._replace(fwd=lambda *args, **kwargs: ran.append(1) or linear.fwd(*args, **kwargs))
    cfg = ChainConfig(steps=(Step("a", counted, LinearConfig(8, 8)), Step("b", counted, LinearConfig(8, 8))))
    params = chain.init(cfg, key=random.key(0))
    got = said.get(fault, "this system has no locks of files")
    for action in (Disk(where), Compress("fp8") | Disk(where)):
        op = with_policy(chain, Policy({"b.x": action}))
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"^with_policy: rules at 'b\.x' must be for a folder .*, got Disk\(.*{got}\)"):
                op.fwd(params, X, cfg)
        with pytest.raises(ValueError, match=rf"Disk: a rule must be for a folder .*{got}"):
            pack([X], Disk(where))
    assert not ran


def test_a_folder_is_a_path(folder, monkeypatch):
    for wrong in (3, None, b"folder"):
        with pytest.raises(TypeError, match="Disk: folder must be a path, got "):
            Disk(wrong)
    with pytest.raises(ValueError, match="Disk: folder must be a path, got ''"):
        Disk("")
    monkeypatch.chdir(folder)
    assert Disk(".") == Disk(Path(folder)) and repr(Disk(".")) == f"Disk(folder={folder!r})"
    both = Compress("fp8") | Disk(folder)
    assert both == Disk(folder) | Compress("fp8") != Compress("fp8") | Offload() and hash(both) is not None
    assert repr(both) == f"Compress(codec='fp8') | Disk(folder={folder!r})"


def alone(folder, script, *, code=0):
    """Run a script in a process of its own. Returns its output."""
    head = f"""
        import os, signal, torch
        from funcops import Disk, Policy, SoftcapConfig, softcap, with_policy
        from funcops.memory import disk
        ONE, folder = SoftcapConfig(1.0), {folder!r}
        op = with_policy(softcap, Policy({{"x": Disk(folder)}}))
    """
    text = textwrap.dedent(head) + textwrap.dedent(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_nothing_is_left_at_exit(folder):
    alone(
        folder,
        """
        kept = [op.fwd(None, torch.ones(256, 256), ONE)[1] for _ in range(20)]
        """,
    )


def test_a_crash_leaves_files_that_the_next_process_removes_and_no_others(folder):
    crash = """
        kept = [op.fwd(None, torch.ones(2), ONE)[1] for _ in range(8)]
        os.kill(os.getpid(), signal.SIGKILL)
    """
    theirs = [
        f"{folder}/funcops-{'0' * 16}-1.residual.bak",
        f"{folder}/funcops-1.residual",
        f"{folder}/funcops-{'1' * 16}-0.residual",
    ]
    for path in theirs:
        Path(path).write_text("kept")
    live = with_policy(softcap, Policy({"x": Disk(folder)}))
    x = torch.randn(4)
    _, kept = live.fwd(None, x, ONE)
    (own,) = set(files(folder)) - set(theirs)
    for _ in range(2):
        alone(folder, crash, code=-signal.SIGKILL)
    crashed = set(files(folder)) - {own, *theirs}
    assert crashed
    alone(folder, "op.fwd(None, torch.ones(2), ONE)")
    assert set(files(folder)) == {own, *theirs[1:]}
    assert torch.equal(live.bwd(kept, torch.ones(4), ONE)[1], softcap.bwd(softcap.fwd(None, x, ONE)[1], torch.ones(4), ONE)[1])
    for path in theirs:
        os.unlink(path)


def test_a_fork_reads_files_and_removes_none(folder):
    said = alone(
        folder,
        """
        x = torch.arange(4.0)
        y, kept = op.fwd(None, x, ONE)
        disk._threads(os.getpid())[0].submit(lambda: None).result()
        want, before = op.bwd(kept, x, ONE)[1], sorted(os.listdir(folder))
        child = os.fork()
        if child == 0:
            right = torch.equal(op.bwd(kept, x, ONE)[1], want)
            more = op.fwd(None, x, ONE)[1]
            right = right and torch.equal(op.bwd(more, x, ONE)[1], want)
            raise SystemExit(0 if right else 3)
        _, status = os.waitpid(child, 0)
        print(status, sorted(os.listdir(folder)) == before)
        """,
    )
    assert said.split() == ["0", "True"]


def test_files_go_when_residuals_are_used_up_or_dropped(folder):
    op, cfg, params, want = of_a_chain(folder)
    y, first = op.fwd(params, X, cfg)
    _, second = op.fwd(params, X, cfg)
    assert len(files(folder)) == 2
    del first
    assert len(files(folder)) == 1
    same_bits(op.bwd(second, torch.ones_like(y), cfg), want, "kept")
    assert len(files(folder)) == 1
    op.bwd(donate(second), torch.ones_like(y), cfg)
    assert files(folder) == []


def test_dropped_before_its_turn(folder, monkeypatch):
    """The thread is busy: what is dropped meanwhile is never written."""
    op = with_policy(softcap, Policy({"x": Disk(folder)}))
    busy, made, real = threading.Event(), [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: made.append(str(path)) or real(path, *rest))
    disk._threads(os.getpid())[0].submit(busy.wait)
    for _ in range(away.AHEAD):
        op.fwd(None, X, ONE)
    busy.set()
    assert files(folder) == [] and not [path for path in made if path.endswith(".residual")]


def test_a_slow_disk_holds_few_tensors(folder):
    """The forward waits for the thread, so that the memory of what it keeps is bounded."""
    op, busy, kept = with_policy(softcap, Policy({"x": Disk(folder)})), threading.Event(), []
    disk._threads(os.getpid())[0].submit(busy.wait)
    running = threading.Thread(target=lambda: kept.extend(op.fwd(None, X, ONE)[1] for _ in range(3 * away.AHEAD)))
    running.start()
    running.join(0.5)
    assert running.is_alive() and len(kept) <= away.AHEAD
    busy.set()
    running.join()
    written(folder)
    assert len(kept) == 3 * away.AHEAD and all(node.x.parts[0].kept.held is None for node in kept)
    kept.clear()


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every other", "expanded", "a scalar", "half", "nothing"])
def test_bits_and_layout_are_those_of_the_forward(layout, folder):
    """Also if the tensor is written to before the thread has it."""
    base = torch.randn(4, 6)
    t = {
        "contiguous": base,
        "transposed": base.T,
        "every other": base[:, ::2],
        "expanded": base[:1].expand(4, 6),
        "a scalar": base[0, 0],
        "half": base.bfloat16(),
        "nothing": base[:0],
    }[layout]
    busy = threading.Event()
    disk._threads(os.getpid())[0].submit(busy.wait)
    want = t.clone(memory_format=torch.preserve_format)
    packed = pack([t], Disk(folder))
    t.data.resize_(0) if layout == "nothing" else base.fill_(7.0)
    busy.set()
    for wait in (False, True):
        if wait:
            written(folder)
        (got,) = unpack(packed)
        assert torch.equal(got, want) and got.dtype is want.dtype
        assert layout == "expanded" or got.stride() == want.stride()
    got.zero_()
    assert torch.equal(unpack(packed)[0], want)


def noting(op, notes):
    def bwd(*args, **kwargs):
        notes.append("backward")
        return op.bwd(*args, **kwargs)

    return op._replace(bwd=bwd)


def test_the_layer_before_is_read_while_a_layer_computes(folder, monkeypatch):
    notes, real = [], disk.File.begin

    def begin(file):
        before = file.reading
        real(file)
        if file.reading is not before:
            notes.append(file.path)

    monkeypatch.setattr(disk.File, "begin", begin)
    _, body, params, _ = of_a_chain(folder)
    cfg = RepeatConfig(chain._replace(bwd=noting(chain, notes).bwd), body, 4)
    op, params = with_policy(repeat, Policy({"*.norm.x": Disk(folder)}, outputs="none")), repeat.init(cfg, key=random.key(0))
    y, kept = op.fwd(params, X, cfg)
    made = sorted(files(folder), key=lambda path: int(path.rpartition("-")[2].partition(".")[0]))
    op.bwd(donate(kept), torch.ones_like(y), cfg)
    assert [note for note in notes if note != "backward"] == made[::-1], "each once, the last first"
    for layer, start in enumerate([i for i, note in enumerate(notes) if note == "backward"]):
        assert len([note for note in notes[:start] if note != "backward"]) == min(layer + 2, 4)
    assert not copies.elsewhere


def test_what_a_dgrad_does_not_read_is_not_held_until_the_wgrad(folder):
    _, body, _, _ = of_a_chain(folder)
    cfg = RepeatConfig(chain, body, 3)
    op, params = with_policy(repeat, Policy({"*.mix.x": Disk(folder)})), repeat.init(cfg, key=random.key(0))
    y, kept = op.fwd(params, X, cfg)
    written(folder)
    _, pending = op.dgrad(donate(kept), torch.ones_like(y), cfg)
    waiting = [value.parts[0].kept for _, value, _ in kept_values(pending) if getattr(value, "place", "") == "file"]
    assert len(waiting) == 3 and all(file.reading is None and file.held is None for file in waiting)
    want = repeat.bwd(repeat.fwd(params, X, cfg)[1], torch.ones_like(y), cfg)[0]
    same_bits(op.wgrad(donate(pending), cfg), want, "later")
    waiting.clear()


def test_microbatches_in_any_order(folder):
    op, cfg, params, _ = of_a_chain(folder)
    xs = [X + i for i in range(5)]
    kept = [op.fwd(params, x, cfg)[1] for x in xs]
    assert len(files(folder)) == 5
    pendings = {i: op.dgrad(donate(kept[i]), torch.ones_like(X), cfg)[1] for i in (3, 0, 4, 1, 2)}
    assert len(files(folder)) == 5
    for left, i in enumerate((2, 4, 0, 1, 3)):
        want = chain.bwd(chain.fwd(params, xs[i], cfg)[1], torch.ones_like(X), cfg)[0]
        same_bits(op.wgrad(donate(pendings.pop(i)), cfg), want, f"microbatch {i}")
        assert len(files(folder)) == 4 - left


def test_pickles_and_copies_have_the_bytes(folder):
    op, cfg, params, want = of_a_chain(folder)
    for late in (False, True):
        y, kept = op.fwd(params, X, cfg)
        if late:
            written(folder)
        made = [pickle.loads(pickle.dumps(kept)), copy.deepcopy(kept)]
        del kept
        assert files(folder) == []
        for one in made:
            assert report(one, params, X).places["file"] == 0 and report(one, params, X).places["host"] == 192
            same_bits(op.bwd(one, torch.ones_like(y), cfg), want, "a copy")


@pytest.mark.parametrize("inside", [False, True])
def test_beside_and_inside_remat(inside, folder):
    body = mlp_config(8, 12)
    if inside:  # the second forward writes and reads within the backward
        op, cfg = remat(with_policy(chain, Policy({"act.x": Disk(folder)}))), body
    else:
        op = with_policy(chain, Policy({"a": Recompute(), "b.x": Disk(folder)}))
        cfg = ChainConfig(steps=(Step("a", chain, body), Step("b", linear, LinearConfig(8, 8))))
    params = chain.init(cfg, key=random.key(0))
    y, kept = op.fwd(params, X, cfg)
    assert len(files(folder)) == (0 if inside else 1)
    same_bits(op.bwd(kept, torch.ones_like(y), cfg), chain.bwd(chain.fwd(params, X, cfg)[1], torch.ones_like(y), cfg), "remat")


def test_in_a_module_a_fault_has_the_path_of_its_tensor(folder):
    module = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 8))
    (op, params), cfg = op_from_module(module, X), TorchConfig()
    want = op.bwd(op.fwd(params, X, cfg)[1], torch.ones_like(X), cfg)
    path = next(row.path for row in report(op.fwd(params, X, cfg)[1], params, X).rows if not row.alias_of)
    under = with_policy(op, Policy({path: Disk(folder)}))
    y, kept = under.fwd(params, X, cfg)
    same_bits(under.bwd(kept, torch.ones_like(y), cfg), want, "a module")
    (file,) = files(folder)
    cut(file)
    name = re.escape(path.rpartition("kept.")[2])
    with pytest.raises(OSError, match=rf"{name}: Disk: the file .* must be as the forward wrote it"):
        under.bwd(kept, torch.ones_like(y), cfg)


def test_a_step_takes_the_place_for_all_that_it_keeps(folder):
    op, cfg, params, want = of_a_chain(folder)
    op = with_policy(chain, Policy({"norm": Disk(folder)}))
    y, kept = op.fwd(params, X, cfg)
    assert {row.path for row in report(kept, params).rows if row.place == "file"} == {"norm.x", "norm.rstd"}
    same_bits(op.bwd(kept, torch.ones_like(y), cfg), want, "a step")


def test_two_fields_with_one_tensor_have_one_file(folder):
    packed = pack([X, X, X.view(6, 8)], Disk(folder))
    assert len(files(folder)) == 1
    assert all(torch.equal(got, want) for got, want in zip(unpack(packed), [X, X, X.view(6, 8)], strict=True))


def compiled(fn, x):
    return torch.compile(fn, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize(
    "trace", [compiled, graphed, lambda fn, x: make_fx(fn)(x), lambda fn, x: make_fx(fn, tracing_mode="fake")(x)]
)
def test_a_trace_that_would_write_once_is_refused_by_name(trace, folder):
    op = with_policy(softcap, Policy({"x": Disk(folder)}))

    def step(x):
        y, kept = op.fwd(None, x, ONE)
        return op.bwd(kept, torch.ones_like(y), ONE)[1]

    with pytest.raises(Exception, match=r"Disk: tensors must be computed step by step, got .* Use Offload\(\) there"):
        trace(step, X)
    same_bits(step(X), softcap.bwd(softcap.fwd(None, X, ONE)[1], torch.ones_like(X), ONE)[1], "after it")


def test_a_report_before_the_run_makes_no_file(folder):
    op, cfg, params, _ = of_a_chain(folder, Compress("mxfp8") | Disk(folder))
    like = chain.init(cfg, device="meta"), torch.empty(2, 3, 8, device="meta")
    before = report(op.fwd(*like, cfg)[1], *like)
    assert os.listdir(folder) == ["funcops-notes.txt"]
    y, kept = op.fwd(params, X, cfg)
    assert before.places == report(kept, params, X).places and before.places["file"] == written(folder) == 48 + 6
    assert all(isinstance(t, Tensor) for t in tensors(op.bwd(kept, torch.ones_like(y), cfg)))


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", [*BODIES, "blocks"])
def test_a_report_on_the_meta_device_says_what_a_device_keeps(name, request):
    op, cfg, x = BODIES["mlp" if name == "blocks" else name]
    policy = Policy(blocks="offloaded") if name == "blocks" else Policy({"*": Offload(), "*.norm.x": Compress("int8") | Offload()})
    cfg = RepeatConfig(op, cfg, 2)
    under, params = with_policy(repeat, policy), repeat.init(cfg, key=random.key(0))
    like = [tree_map_tensors(lambda t: t.to("meta"), one) for one in (params, x)]
    before = report(under.fwd(*like, cfg)[1], *like).places
    request.getfixturevalue("device")
    kept = under.fwd(params, x, cfg)[1]
    if name == "blocks":  # of a device, here and the host are told apart by the tensors themselves
        assert before == {"here": 0, "host": 2 * X.nbytes, "file": 0} and report(kept, params).kept_bytes == 2 * X.nbytes
    else:
        assert before == report(kept, params, x).places and before["host"] > 0


def test_what_the_caller_holds_is_copied_too():
    x = torch.ones(2, 3, device="meta")
    places = [report(op.fwd(None, x, ONE)[1], x=x).places for op in (softcap, with_policy(softcap, Policy({"x": Offload()})))]
    assert [one["host"] for one in places] == [0, 24] and all(one["here"] == 0 for one in places)
