"""Residuals in the memory of another rank: the bits of no policy, the bytes that a report said, and every fault by name."""

import copy
import gc
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import lending_ranks
import pytest
import torch
from policy_cases import X
from torch.fx.experimental.proxy_tensor import make_fx

from funcops import (
    Compress,
    Policy,
    RepeatConfig,
    SoftcapConfig,
    chain,
    donate,
    pack,
    random,
    repeat,
    report,
    softcap,
    unpack,
    with_policy,
)
from funcops.dist import Mesh
from funcops.engine.residuals.offload import copies
from funcops.graphs import graphed
from funcops.memory.away import AHEAD
from funcops.schedule import At, lend
from funcops.schedule.lend import Guest, _open
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits

ONE = SoftcapConfig(1.0)
SCRIPT = Path(__file__).with_name("lending_ranks.py")
CFG = lending_ranks.CHAIN


def ran(folder, *cases):
    """The exit codes and the `NAME| VALUE` lines of each rank of each case, by `CASE-RANK`."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), *cases]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    lines = {name: (folder / f"{name}.out").read_text().splitlines() for name in codes}
    said = {name: dict(re.split(r"\| ?", line, maxsplit=1) for line in own) for name, own in lines.items()}
    return codes, said, {name: (folder / f"{name}.err").read_text()[-3000:] for name in codes}


def test_a_rank_that_takes_no_part_keeps_the_bytes_that_the_report_said(tmp_path):
    codes, said, errors = ran(tmp_path, "short")
    assert codes == {"short-0": 0, "short-1": 0}, errors
    nbytes = str(192 + 48 + 24)  # a tensor as it is; codes and scales
    assert said["short-0"] == {"before": nbytes, "after": nbytes}
    assert said["short-1"] == {"put": nbytes, "read": nbytes, "used up": "0", "dropped": "0", "peak": nbytes}


LOST = (
    r"mix\.x: At: float32\[2, 3, 8\] at rank 1 of axis 'pp' of 2 must be kept until it is read \(look for the first error .*, got "
)
UNTAKEN = r"norm\.x: At: int8\[2, 3, 8\] at rank 1 of axis 'pp' of 2 must be taken by that rank \(.*, got "
ENDED = r"(a connection that has ended, .*|Connection reset by peer|.*Broken pipe)"


@pytest.mark.slow
def test_processes_that_end_or_stand_still(tmp_path):
    codes, said, errors = ran(tmp_path, "gone", "killed", "stopped", "raised")
    ends = {"gone": [0, 9], "killed": [9, 0], "stopped": [0, -9], "raised": [0, 0]}
    assert codes == {f"{case}-{rank}": code for case, both in ends.items() for rank, code in enumerate(both)}, errors
    gone = said["gone-0"]
    assert re.fullmatch(LOST + ENDED, gone["backward"]) and re.fullmatch(UNTAKEN + ENDED, gone["forward"]) and gone["closed"]
    assert re.fullmatch(LOST + "timed out", said["stopped-0"]["backward"]) and said["stopped-0"]["in time"] == "True"
    assert said["killed-1"] == said["raised-1"] == {"freed": "0"}
    assert said["raised-0"] == {"said": "mix: linear_bwd: dy must be [2, 3, 8], got [1]"}


@pytest.mark.slow
def test_drawn_rules_on_two_processes(tmp_path):
    """The ranks compare bits themselves; here the bytes are compared that one said and the other had."""
    codes, said, errors = ran(tmp_path, "drawn_rules")
    assert codes == {"drawn_rules-0": 0, "drawn_rules-1": 0}, errors
    had = {name: nbytes for name, nbytes in said["drawn_rules-1"].items() if "after" not in name}
    assert had == said["drawn_rules-0"] and len(had) == lending_ranks.DRAWN and len(set(had.values())) > lending_ranks.DRAWN / 2
    assert {nbytes for name, nbytes in said["drawn_rules-1"].items() if "after" in name} == {"0"}


def lending():
    """The axes that lend now. Those of one rank are another test's."""
    return [axis for axis, _ in _open if axis.size > 1]


class Pair:
    """Two ranks in this process, of which rank 1 lends `nbytes`."""

    def __init__(self, nbytes):
        self.lent = run_ranks({"pp": 2}, lambda mesh: lend(mesh, "pp", {1: nbytes}, wait=timedelta(seconds=20)))
        self.axis = self.lent[0].axis

    def held(self):
        """The bytes at rank 1, once all that was put or dropped is there."""
        lending_ranks.settled(self.lent[0])
        return self.lent[1].nbytes

    def close(self):
        threads = [threading.Thread(target=one.close) for one in self.lent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def op(self, pattern="mix.x", codec=None):
        return with_policy(chain, Policy({pattern: Compress(codec) | At(1, self.axis) if codec else At(1, self.axis)}))


@pytest.fixture
def pair():
    both = Pair(1 << 20)
    yield both
    gc.collect()
    assert both.held() == 0
    both.close()
    assert not lending() and not copies.elsewhere


PARAMS = chain.init(CFG, key=random.key(0))
DY = torch.ones(2, 3, 8)
WANT = chain.bwd(chain.fwd(PARAMS, X, CFG)[1], DY, CFG)


def test_freed_when_used_up_or_dropped(pair):
    op = pair.op()
    _, first = op.fwd(PARAMS, X, CFG)
    _, second = op.fwd(PARAMS, X, CFG)
    assert pair.held() == 2 * 192 and pair.lent[1].held == {0: 384} and pair.lent[1].peak_bytes == 384
    del first
    assert pair.held() == 192
    _, pending = op.dgrad(donate(second), DY, CFG)
    assert pair.held() == 192, "what only wgrad reads stays there"
    same_bits(op.wgrad(donate(pending), CFG), WANT[0], "late")
    assert pair.held() == 0


def test_pickles_and_copies_have_the_bytes(pair):
    op = pair.op()
    _, kept = op.fwd(PARAMS, X, CFG)
    assert pair.held() == 192
    made = [pickle.loads(pickle.dumps(kept)), copy.deepcopy(kept)]
    del kept
    assert pair.held() == 0
    for one in made:
        assert report(one, PARAMS, X).places["host"] == 192
        same_bits(op.bwd(one, DY, CFG), WANT, "a copy")


def test_a_rank_that_is_full_is_refused_by_path_and_later_there_is_room():
    pair = Pair(200)
    op = pair.op()
    _, first = op.fwd(PARAMS, X, CFG)
    _, second = op.fwd(PARAMS, X, CFG)
    assert pair.held() == 192
    said = r"^mix\.x: At: float32\[2, 3, 8\] at rank 1 of axis 'pp' of 2 must be taken by that rank \(lend more there, .*, got "
    said += r"192 bytes of 200 bytes in use, and 192 bytes more to keep$"
    for _ in range(2):
        with pytest.raises(OSError, match=said):
            op.bwd(second, DY, CFG)
    with pytest.raises(OSError, match=said):
        op.fwd(PARAMS, X, CFG)
    same_bits(op.bwd(first, DY, CFG), WANT, "the one that was taken")
    del first, second
    assert pair.held() == 0
    _, kept = op.fwd(PARAMS, X, CFG)
    same_bits(op.bwd(donate(kept), DY, CFG), WANT, "room")
    del kept
    pair.close()


def test_what_is_closed_or_was_never_opened_is_refused_by_path():
    pair = Pair(1 << 20)
    op, axis = pair.op(), pair.axis
    _, kept = op.fwd(PARAMS, X, CFG)
    assert pair.held() == 192
    with pytest.raises(ValueError, match=r"lend: axis must be one that lends no memory yet, got axis 'pp' of 2: close"):
        run_ranks({"pp": 2}, lambda mesh: lend(mesh, "pp", 0))
    pair.close()
    for _ in range(2):
        with pytest.raises(OSError, match=LOST + "memory that was closed"):
            op.bwd(kept, DY, CFG)
        with pytest.raises(ValueError, match=r"mix\.x: At: axis must be one whose ranks lend memory \(call lend\("):
            op.fwd(PARAMS, X, CFG)
    pair.close()  # again
    with pytest.raises(ValueError, match="At: rank must be below 2, on axis 'pp' of 2, got 2"):
        At(2, axis)
    with pytest.raises(TypeError, match="At: axis must be "):
        At(1, "pp")
    own = with_policy(chain, Policy({"mix.x": At(0, axis)}))
    with pytest.raises(ValueError, match=r"with_policy: rules at 'mix\.x' must be for another rank than this one .*, got rank 0"):
        own.fwd(PARAMS, X, CFG)
    with pytest.raises(ValueError, match="At: rank must be for another rank"):
        pack([X], At(0, axis))


def test_a_block_that_ends_by_an_error_does_not_wait_for_others():
    def step(mesh):
        with lend(mesh, "pp", {1: 1 << 20}, wait=timedelta(seconds=20)) as lent:
            if mesh.rank == 0:
                kept = with_policy(softcap, Policy({"x": At(1, mesh["pp"])})).fwd(None, X, ONE)[1]
                lending_ranks.settled(lent)
                assert kept is not None
                raise ArithmeticError("mine")
            lending_ranks._wait_for(lambda: lent.peak_bytes and not lent.nbytes)

    with pytest.raises(ArithmeticError, match="mine"):
        run_ranks({"pp": 2}, step)
    assert not lending()


@pytest.mark.parametrize("codec", [None, "mxfp8"])
def test_a_report_before_the_run_needs_no_memory_of_others(codec):
    axis = Mesh.abstract({"pp": 2}, 0)["pp"]
    op = with_policy(chain, Policy({"mix.x": Compress(codec) | At(1, axis) if codec else At(1, axis)}))
    like = chain.init(CFG, device="meta"), X.to("meta")
    found = report(op.fwd(*like, CFG)[1], *like)
    assert found.places["rank 1 of pp"] == (54 if codec else 192)
    assert f"{codec or 'float32'} on rank 1 of pp" in str(found)


def compiled(fn, x):
    return torch.compile(fn, backend="eager", fullgraph=True)(x)


@pytest.mark.turns("trace")
@pytest.mark.parametrize("trace", [compiled, graphed, lambda fn, x: make_fx(fn)(x)], ids=["compile", "graphed", "make_fx"])
def test_a_trace_that_would_send_once_is_refused_by_name(trace, pair):
    op = with_policy(softcap, Policy({"x": At(1, pair.axis)}))

    def step(x):
        y, kept = op.fwd(None, x, ONE)
        return op.bwd(kept, torch.ones_like(y), ONE)[1]

    said = r"At: tensors must be computed step by step, got .* which would send the tensor once. Use Offload\(\) there"
    with pytest.raises(Exception, match=said):
        trace(step, X)
    same_bits(step(X), softcap.bwd(softcap.fwd(None, X, ONE)[1], torch.ones_like(X), ONE)[1], "after it")


def test_a_fork_has_no_connections(pair):
    op = with_policy(softcap, Policy({"x": At(1, pair.axis)}))
    y, kept = op.fwd(None, X, ONE)
    assert pair.held() == 192
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                unpack(kept)
            except OSError as error:
                code = 0 if "a fork, which has no connections" in str(error) else 2
            try:
                op.fwd(None, X, ONE)
                code = 3
            except ValueError:
                del kept
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pair.held() == 192 and torch.equal(unpack(kept).x, X)


def test_a_slow_rank_holds_back_the_forward(pair):
    """At most a few tensors wait for the thread, and what is dropped meanwhile is not sent."""
    op, busy, kept = with_policy(softcap, Policy({"x": At(1, pair.axis)})), threading.Event(), []
    line = pair.lent[0]._lines[1]
    line._do(busy.wait)
    for _ in range(AHEAD):
        op.fwd(None, X, ONE)
    running = threading.Thread(target=lambda: kept.extend(op.fwd(None, X, ONE)[1] for _ in range(2 * AHEAD)))
    running.start()
    running.join(0.3)
    assert running.is_alive() and not kept
    busy.set()
    running.join()
    assert pair.held() == pair.lent[1].peak_bytes == 2 * AHEAD * 192
    assert all(node.x.parts[0].kept.held is None for node in kept)
    kept.clear()


def test_the_layer_before_is_fetched_while_a_layer_computes(pair, monkeypatch):
    notes, real, backward = [], Guest.ask, chain.bwd
    monkeypatch.setattr(Guest, "ask", lambda guest: notes.append(guest.key) or real(guest))
    body = chain._replace(bwd=lambda *args, **kwargs: notes.append("backward") or backward(*args, **kwargs))
    cfg = RepeatConfig(body, CFG, 4)
    op, params = with_policy(repeat, Policy({"*.norm.x": At(1, pair.axis)}, outputs="none")), repeat.init(cfg, key=random.key(0))
    _, kept = op.fwd(params, X, cfg)
    pair.held()
    op.bwd(donate(kept), DY, cfg)
    assert [note for note in notes if note != "backward"] == [3, 2, 1, 0], "each once, the last first"
    for layer, start in enumerate([i for i, note in enumerate(notes) if note == "backward"]):
        assert len([note for note in notes[:start] if note != "backward"]) == min(layer + 2, 4)
    assert pair.held() == 0


def test_a_rank_that_cannot_be_reached_is_told_to_all():
    said = []

    def step(mesh):
        try:
            lend(mesh, "pp", 0, host="127.0.0.1" if mesh.rank else "192.0.2.1")  # an address that no machine has
        except RuntimeError as error:
            said.append(str(error))

    run_ranks({"pp": 2}, step)
    assert len(said) == 2 and len(set(said)) == 1 and not lending()
    assert re.match(r"lend: every rank must be reachable .*host=\), got rank 0 cannot listen at '192\.0\.2\.1' \(", said[0])


def test_strangers_do_not_come_in(monkeypatch):
    """Who connects without the secret is not served, and does not keep the ranks from meeting."""
    real, strangers = socket.socket.listen, []

    def listen(one, count):
        real(one, count)
        for said in (b"", b"x" * 200, b"\0" * 49):
            strangers.append(socket.create_connection(one.getsockname()))
            strangers[-1].sendall(said)
            if not said:
                strangers[-1].close()

    monkeypatch.setattr(socket.socket, "listen", listen)
    pair = Pair(1 << 20)
    op = pair.op()
    _, kept = op.fwd(PARAMS, X, CFG)
    same_bits(op.bwd(donate(kept), DY, CFG), WANT, "among strangers")
    assert len(strangers) == 6 and pair.held() == 0
    pair.close()
    for one in strangers:
        one.close()
