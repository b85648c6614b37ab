import gc
import importlib.util
import os
import sys
from pathlib import Path

import drawn_part
import pytest
import quick_torch
import torch
from hypothesis import settings
from tiers import COLLECTED

RUN = pytest.StashKey()  # the tests that have run in this process
LONG = {  # files of tests that compile or start processes: they come first, so that no worker ends with one alone
    "test_pipeline_examples.py",
    "test_pipeline.py",
    "test_train_lm_ranks.py",
    "test_cold_compile.py",
    "test_train_lm.py",
    "test_aot.py",
    "test_smoke.py",
    "test_notebooks.py",
}
SECONDS = 1.2, 4.0  # that the cases of a function, and the functions of a file, have in the first tier, by the table of durations
gc.disable()  # until all tests are collected: the modules and thousands of tests live to the end
ROOT = Path(__file__).parents[1]
settings.register_profile("funcops", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("funcops")
torch.set_num_threads(1)
torch.set_warn_always(True)  # what torch says once in a process would fail the test that comes first, another in each run


def pytest_configure(config):
    """Triton reads its variable once, when it is imported: `-m gpu` compiles kernels, every other run interprets their source.
    There the compiler makes scalar code for the CPU: ten probes of vector instructions, each a run of g++, would come first.
    A process that a test starts imports what the test does: `pythonpath` in pyproject.toml says that for pytest alone."""
    said = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "helpers")), *said])
    if config.getoption("markexpr") != "gpu":
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
        os.environ.setdefault("TRITON_INTERPRET", "1")
        if importlib.util.find_spec("triton"):
            import quick_triton

            quick_triton.quicken()
        quick_torch.quicken()
    funcops = importlib.import_module("funcops")
    for room in funcops._ROOMS:  # tests ask for every class, op and kernel that there is: not for those that others have imported
        getattr(funcops, room)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = list(items)
    absent = not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    _take_turns(items)
    # every op is held to every law in the first tier (test_tiers.py), the code of every page runs, and the engine runs alone,
    # whatever that takes
    bounded = [item for item in items if item.path.name not in ("test_laws.py", "test_docs.py", "test_proof.py")]
    first = [item.nodeid for item in bounded if not (item.get_closest_marker("slow") or item.get_closest_marker("gpu"))]
    left_out = drawn_part.dear(first, drawn_part.durations(), *SECONDS)
    for item in items:
        if item.nodeid in left_out:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name not in LONG)
    for item in items:
        if absent and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no device: needs a CUDA device, and to be chosen by -m gpu alone"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """The garbage collector, which a tracer's many objects call often, need not look at what was collected each time."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    gc.enable()
    session.stash[RUN] = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """A tracer that has seen a function with two sizes takes its next size for a symbol, which takes ten times as long to trace:
    what a test compiled is forgotten, so that none pays for the shapes of another. Nor for what the tests before it imported and
    cached, half a million objects in the end: without a freeze now and then a test that collects garbage waits a second for it."""
    item.session.stash[RUN] += 1
    if item.session.stash[RUN] % 200 == 0:
        gc.collect()
        gc.freeze()
    compiled = sys.modules.get("torch._dynamo.convert_frame")
    if compiled is not None and compiled.FRAME_COUNTER:
        torch.compiler.reset()


def _take_turns(items):
    """`pytest.mark.turns("dtype")`: cases that differ in that parameter alone, or in several such, prove much the same, so one of
    them, each in its turn, is in the first tier, and the others are in the second. With `every=3` one of three is in the first.
    With `each="op"` only cases of the same operator take turns, so that each operator has some in the first."""
    tests = {}
    for item in items:
        marker = item.get_closest_marker("turns")
        if marker is not None and not item.get_closest_marker("slow"):
            of, each = item.callspec.params, marker.kwargs.get("each")
            apart = [getattr(of[name], each).name for name in marker.args if each and hasattr(of[name], each)]
            groups = tests.setdefault(item.function, {})
            key = *apart, *[repr(value) for name, value in of.items() if name not in marker.args]
            groups.setdefault(key, (marker.kwargs.get("every"), []))[1].append(item)
    for turn, (every, group) in [one for groups in tests.values() for one in enumerate(groups.values())]:
        every = min(every or len(group), len(group))
        for i, item in enumerate(group):
            if (i + i // every) % every != turn % every:  # not in step with a parameter of as many values
                item.add_marker(pytest.mark.slow)
