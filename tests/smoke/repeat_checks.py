"""Checks that run kernels with several matrix products in their loops again and again, in the registry of `checks.py`: such kernels
have read shared memory out of bounds at random on sm_90 (triton 10486, 10573, 11366). Opt-in kernels are here, too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from checks import SmokeDevice, check

from benchmarks.attention import of_attention, of_caches
from benchmarks.experts import LAYERS_OF_EXPERTS, WIDE, of_experts
from benchmarks.kernel_call import KernelCall, Maker
from benchmarks.kernels import clones
from benchmarks.low_attention import of_low_attention
from funcops.engine.backend import backend, gemm
from funcops.engine.trees import tensors
from funcops.library.kernels import experts, fused_linear, grouped, scaled_attention, scored_attention, slot_attention
from funcops.testing.tolerances import assert_close

TIMES, SHRINK = 1000, 4096  # on a device; the CPU rehearses it once, at sizes divided by the last


def maker(on: SmokeDevice) -> Maker:
    torch.manual_seed(0)
    return Maker(on.device, torch.bfloat16, 1 if on.real else SHRINK)


def again_and_again(on: SmokeDevice, calls: Iterable[KernelCall], *kernels: Any) -> dict[str, int]:
    """Run each call of these kernels many times: all results must have the bits of the first one, and it must be finite."""
    runs: dict[str, int] = {}
    wanted = (call for call in calls if call.kernel in kernels)
    for call in wanted if on.real else itertools.islice(wanted, len(kernels)):  # rehearsed by the first call of each
        with backend("triton"):
            want, times = call.kernel(*call.args), TIMES if on.real else 1
            bad = torch.stack([~t.isfinite().all() for t in tensors(want)]).sum()
            for _ in range(times):
                for got, first in zip(tensors(call.kernel(*call.args)), tensors(want), strict=True):
                    bad += (got != first).any()
        assert int(bad) == 0, f"{call.name} {call.shape}: {int(bad)} results of {times} runs differ, or are not finite"
        runs[f"{call.name} {call.shape}"] = times
    assert runs, "no call of these kernels"
    return runs


@check
def scored_attention_gives_the_same_bits_again_and_again(on: SmokeDevice) -> Any:
    kernels = scored_attention.scored_attention_fwd, scored_attention.scored_attention_bwd
    return again_and_again(on, of_attention(maker(on)), *kernels)


@check
def slot_attention_gives_the_same_bits_again_and_again(on: SmokeDevice) -> Any:
    return again_and_again(on, of_caches(maker(on)), slot_attention.slot_attention_fwd)


@check
def attention_of_codes_gives_the_same_bits_again_and_again(on: SmokeDevice) -> Any:
    kernels = scaled_attention.scaled_attention_fwd, scaled_attention.scaled_attention_bwd
    return again_and_again(on, of_low_attention(maker(on)), *kernels)


@check
def experts_give_the_same_bits_again_and_again(on: SmokeDevice) -> Any:
    found = {}
    for layer in LAYERS_OF_EXPERTS[1:] if on.real else LAYERS_OF_EXPERTS[-1:]:  # the first is the second without biases
        found |= again_and_again(on, of_experts(maker(on), layer), experts.experts_up, experts.experts_dgrad)
    return found


def by_request(on: SmokeDevice, kernel: Any, args: tuple[Any, ...], length: int) -> None:
    """A call by the kernel that `gemm("specialised")` requests, against the one that the table chooses, and against itself."""
    with backend("triton"), gemm("auto" if on.real else "triton"):
        want = kernel(*clones(args))
    with backend("triton"), gemm("specialised"):
        first, again = (kernel(*clones(args)) for _ in range(2))
    for got, same, exact in zip(tensors(first), tensors(again), tensors(want), strict=True):
        assert torch.equal(got, same), "not the same bits"
        assert_close(got, exact, dtype=torch.bfloat16, length=length)


@check(opt_in=True)
def persistent_grouped_products_by_descriptors(on: SmokeDevice) -> Any:
    """Rows of some groups end within a tile."""
    kernels, runs = (grouped.grouped_product, grouped.grouped_wgrad), []
    for call in of_experts(maker(on), WIDE):  # sums of rows, for biases, go over pointers
        if call.kernel in kernels:
            by_request(on, call.kernel, call.args, call.length)
            runs.append(f"{call.name} {call.shape}")
    return {"calls": runs}


@check(opt_in=True)
def products_by_kernels_with_specialised_warps(on: SmokeDevice) -> Any:
    make = maker(on)
    shapes = ((8192, 4096, 4096), (16384, 1536, 1536)) if on.real else ((8, 16, 8),)
    for tokens, inner, outer in shapes:
        x, w, added = make.floats(tokens, inner), make.floats(outer, inner), make.floats(tokens, outer)
        forward = functools.partial(by_request, on, fused_linear.fused_linear_fwd, length=inner)
        forward((x, w, None, None, "", 1.0, False))
        forward((x, w, make.floats(outer), added, "gelu", 0.5, True))
        by_request(on, fused_linear.fused_linear_dgrad_into, (added, w, 1.0, x), outer)
    return {"shapes": shapes}
