"""AdamW in one launch, in the interpreter, against torch.optim in float64."""

import copy

import pytest
import torch

from funcops.engine.backend import backend
from funcops.library.kernels import adamw as kernels
from funcops.library.kernels.tables import Tables
from funcops.optim import AdamWConfig, adamw_init, adamw_update
from funcops.testing.tolerances import assert_close

pytest.importorskip("triton")
from funcops.library.kernels.triton import adamw as launching  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(3, 5), (1,), (), (0, 4), (40, 1000)]


def made(dtype, seed, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def updated(name, params, grads, steps, **options):
    cfg = AdamWConfig(lr=0.01, weight_decay=0.3, betas=(0.9, 0.999))
    state = adamw_init(params, cfg)
    with backend(name):
        for step in range(steps):
            params, state = adamw_update(params, grads[step], state, cfg, **options)
    return params, state


def by_torch(params, grads, decay):
    """The params and means of torch.optim.AdamW in float64."""
    params = [torch.nn.Parameter(p.double()) for p in params]
    groups = [{"params": [p], "weight_decay": 0.3 if d else 0.0} for p, d in zip(params, decay, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999))
    for row in grads:
        for p, g in zip(params, row, strict=True):
            p.grad = g.double()
        optimizer.step()
    kept = [optimizer.state[p] for p in params]
    return [p.data for p in params], [k["exp_avg"] for k in kept], [k["exp_avg_sq"] for k in kept]


@pytest.mark.turns("dtype", "of_grads", every=2)
@pytest.mark.parametrize(("dtype", "of_grads"), [*zip(DTYPES, DTYPES, strict=True), (torch.float32, torch.bfloat16)], ids=str)
def test_three_steps_as_torch_takes_them(dtype, of_grads):
    params, grads, decay = made(dtype, 0), [made(of_grads, seed) for seed in (1, 2, 3)], [True, False, True, True, False]
    got, state = updated("triton", params, grads, 3, decay=decay)
    for have, want in zip((got, state.exp_avg, state.exp_avg_sq), by_torch(params, grads, decay), strict=True):
        assert_close(have, want, dtype=dtype)


def test_one_launch_for_all_tensors(monkeypatch):
    calls = []
    launch = launching._launch
    monkeypatch.setattr(launching, "_launch", lambda *args, **options: calls.append(args) or launch(*args, **options))
    updated("triton", made(torch.float32, 0), [made(torch.float32, 1)], 1, decay=[True, False, True, True, False])
    assert len(calls) == 1
    calls.clear()
    mixed = made(torch.float32, 1)
    mixed[0] = mixed[0].bfloat16()
    updated("triton", made(torch.float32, 0), [mixed], 1)
    assert len(calls) == 2, "one for each dtype of gradients"


def test_a_table_is_made_once_for_the_same_addresses(monkeypatch):
    monkeypatch.setattr(launching, "_tables", Tables(3))
    params, grads = made(torch.float32, 0, [(3, 5), (0, 4)]), made(torch.float32, 1, [(3, 5), (0, 4)])
    updated("triton", params, [grads] * 3, 3, in_place=True)
    assert len(launching._tables.cache) == 1
    before = launching._without_grads.cache_info().misses
    updated("triton", params, [copy.deepcopy(grads) for _ in range(3)], 3, in_place=True)
    assert launching._without_grads.cache_info().misses == before + 1, "only the column of gradients is made again"
    for _ in range(6):
        updated("triton", copy.deepcopy(params), [grads], 1, in_place=True)
    assert len(launching._tables.cache) == 3


def test_the_rate_as_a_tensor_and_gradients_of_any_strides():
    params, grads = made(torch.float32, 0, [(6, 8)]), [made(torch.float32, 1, [(8, 6)])[0].mT]
    want, _ = updated("torch", params, [grads], 1, lr=0.02)
    got, _ = updated("triton", params, [grads], 1, lr=torch.tensor(0.02))
    assert_close(got, want, dtype=torch.float32)


@pytest.mark.parametrize("by", [1, 3, 5])
def test_unaligned_addresses(by):
    (flat,), (g,) = made(torch.float32, 0, [(by + 40,)]), made(torch.float32, 1, [(40,)])
    want, _ = updated("torch", [flat[by:].clone()], [[g]], 1, in_place=True)
    before = flat[:by].clone()
    got, _ = updated("triton", [flat[by:]], [[g]], 1, in_place=True)
    assert_close(got, want, dtype=torch.float32)
    assert torch.equal(flat[:by], before)


@pytest.mark.filterwarnings("ignore:invalid value")  # 0 / 0 where the interpreter fills a block beyond its end
def test_bias_corrections_are_exact():
    """float32 has only three digits of 1 - 0.99999."""
    cfg, p = AdamWConfig(lr=0.1, betas=(0.999, 0.99999), eps=0.0, weight_decay=0.0), torch.ones(3)
    with backend("triton"):
        new, _ = adamw_update(p, torch.full_like(p, 2.0), adamw_init(p, cfg), cfg)
    torch.testing.assert_close(new, torch.full_like(p, 0.9), rtol=1e-6, atol=0)


def test_another_mask_at_the_same_addresses():
    cfg, params = AdamWConfig(lr=0.1, weight_decay=0.5), [torch.ones(3), torch.ones(3)]
    grads, state = [torch.zeros(3), torch.zeros(3)], adamw_init(params, cfg)
    with backend("triton"):
        adamw_update(params, grads, state, cfg, decay=[True, False], in_place=True)
        adamw_update(params, grads, state, cfg, decay=[False, True], in_place=True)
    assert_close(params, [torch.full((3,), 0.95)] * 2, dtype=torch.float32)


def test_groups_keep_their_order():
    assert list(kernels.grouped([[1, 2, 3], "abc"], ["x", "y", "x"])) == [("x", [[1, 3], ["a", "c"]]), ("y", [[2], ["b"]])]
    assert list(kernels.grouped([[], []], [])) == []


def test_params_at_odd_distances_are_refused():
    """The kernel counts from the first param in elements, and these are two and a half elements apart."""
    memory = bytearray(32)
    params = [torch.frombuffer(memory, dtype=torch.float32, offset=start, count=2) for start in (0, 10)]
    with pytest.raises(ValueError, match="^adamw: tensors must be at addresses that are multiples of their element size"):
        updated("triton", params, [[torch.ones(2), torch.ones(2)]], 1, in_place=True)
    assert not any(memory)
