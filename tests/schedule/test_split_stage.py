"""torch's `dw_builder` route: stages that are modules, with their weight gradients at W."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from staged import square_error, stages_of_modules
from torch.distributed.pipelining import ScheduleZBVZeroBubble

import funcops
from funcops import delayed_wgrad
from funcops.adapters.autograd.delayed import WgradStore
from funcops.adapters.pipelining import split_stage
from funcops.adapters.pipelining.torch_stages import StageOfRank
from funcops.testing.tolerances import assert_close

DIM, M = 8, 8
PACKAGE = Path(funcops.__file__).parent
TORCHS = "torch.distributed.pipelining"


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def setup():
    torch.manual_seed(0)
    x, target = torch.randn(2, 2 * M, DIM, dtype=torch.float64)
    whole = stages_of_modules(2)
    square_error(whole(x), target).backward()
    return x, target, [p.grad for p in whole.parameters()], stages_of_modules(2)


def examples(count):
    return [(torch.empty(2, DIM, dtype=torch.float64).requires_grad_(i > 0),) for i in range(count + 1)]


@pytest.mark.parametrize("static", [True, False])
def test_first_batch_is_right(alone, static):
    """Without the guard that `split_stage` describes, the dry run of metadata inference (static=False) spoils the first step."""
    x, target, want, modules = setup()
    ex = examples(2)
    stages = [split_stage(m, i, 2, "cpu", *((ex[i], ex[i + 1]) if static else ())) for i, m in enumerate(modules)]
    schedule = ScheduleZBVZeroBubble(stages, M, loss_fn=square_error)
    for _ in range(2):
        modules.zero_grad()
        schedule.step(x, target=target)
        assert_close([p.grad for p in modules.parameters()], want, dtype=torch.float64)
    assert all(len(stage.store) == 0 for stage in stages)


@pytest.mark.parametrize("static", [True, False])
def test_a_store_that_is_always_open_takes_nothing_of_the_dry_run(alone, static):
    """Which asks for no gradient of a parameter."""
    x, target, want, modules = setup()
    store, counts, ex = delayed_wgrad(), [], examples(2)

    def builder():
        own = WgradStore()
        own.waiting, store.waiting = store.waiting, []
        counts.append(len(own))
        return own.run

    stages = [
        StageOfRank(m, i, 2, "cpu", *((ex[i], ex[i + 1]) if static else ()), dw_builder=builder) for i, m in enumerate(modules)
    ]
    with store:
        ScheduleZBVZeroBubble(stages, M, loss_fn=square_error).step(x, target=target)
    assert set(counts) == {2}
    assert_close([p.grad for p in modules.parameters()], want, dtype=torch.float64)


def test_weight_gradients_wait_for_w(alone):
    x, target, want, modules = setup()
    ex = examples(2)
    stages = [split_stage(m, i, 2, "cpu", ex[i], ex[i + 1]) for i, m in enumerate(modules)]
    seen = []
    for stage in stages:
        weight = next(stage.submod.parameters())

        def backward(*args, stage=stage, weight=weight, before=stage.backward_one_chunk, **kwargs):
            was = None if weight.grad is None else weight.grad.clone()
            before(*args, **kwargs)
            same = was is None and weight.grad is None or torch.equal(was, weight.grad)
            seen.append((kwargs["full_backward"], same))

        stage.backward_one_chunk = backward
    ScheduleZBVZeroBubble(stages, M, loss_fn=square_error).step(x, target=target)
    assert len(seen) == 2 * M and {same for full, same in seen if not full} == {True}
    assert_close([p.grad for p in modules.parameters()], want, dtype=torch.float64)


def test_one_file_needs_torchs_pipelining():
    """It is imported only for a stage: schedules run without it."""
    needs = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
            if any(name.startswith((TORCHS, "funcops.adapters.pipelining.torch_stages")) for name in names):
                needs.add(file.name)
    assert needs == {"torch_stages.py"}
