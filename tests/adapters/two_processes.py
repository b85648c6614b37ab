"""Ten steps of the example's decoder on two processes: `python two_processes.py MODES FOLDER`. Each prints for each mode its
distance from one process; their exit codes are printed last.

MODES, with commas between: ddp, ddp-delayed, fsdp, fsdp-delayed, and fsdp-recipe, with linear layers in blocks of FP8. Modes with
"whole" train a model, or each of its blocks, as its joint graph: ddp-whole, ddp-unused-whole, fsdp-root-whole, fsdp-blocks-whole;
in fsdp-nested-whole the parameters of the blocks are sharded while the whole model is called, so it runs as before.
"""

import copy
import functools
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from forked import codes
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.plain import PlainLlama
from funcops import delayed_wgrad
from funcops import nn as fnn
from funcops.low_precision import Fp8Block

SIZES = dict(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, hidden=48, context=8, vocab=19)
STEPS, BATCH = 10, 4


ROWS = Fp8Block(keep="input", wgrad="high")  # every row is rounded by itself, on whichever process


def made(mode):
    torch.manual_seed(0)
    model = PlainLlama(**SIZES).double()
    if "whole" in mode:
        return model
    assert fnn.from_torch(model, recipe=ROWS if mode == "fsdp-recipe" else None).replaced
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randint(SIZES["vocab"], (2, BATCH, SIZES["context"]), generator=generator)


def train(model, part=slice(None), backward=None, parameters=None):
    optimiser = torch.optim.AdamW(list(parameters or model.parameters()), lr=1e-2)
    losses = []
    for x, labels in batches():
        optimiser.zero_grad()
        loss = model(x[part], labels[part])
        (backward or (lambda loss: loss.backward()))(loss)
        optimiser.step()
        losses.append(loss.detach())
    return losses


def as_whole(model, mode, part):
    """Let the model, or its blocks, run as a joint graph, and return those that do."""
    x, labels = next(batches())
    if "blocks" not in mode:
        assert fnn.from_torch(model, example=(x[part], labels[part])).replaced
        return [model]
    seen = []
    handles = [block.register_forward_pre_hook(lambda _, args: seen.append(args)) for block in model.blocks]
    model(x[part], labels[part])
    for block, args, handle in zip(model.blocks, seen, handles, strict=True):
        handle.remove()
        assert fnn.from_torch(block, example=args).replaced
    return list(model.blocks)


def refused(model):
    """Codes of a weight that is sharded between calls."""
    try:
        fnn.quantize_weights(model)
    except TypeError as error:
        assert "weight must be a parameter that is a plain tensor" in str(error), error
    else:
        raise AssertionError("quantised a sharded weight")


def compare(mode, rank):
    single = made(mode)
    whole = train(single)
    model = made(mode)
    part = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    graphs = as_whole(model, mode, part) if "whole" in mode else []
    if mode.startswith("fsdp"):
        for block in model.blocks if "root" not in mode else ():
            fully_shard(block)
        fully_shard(model)
        if mode == "fsdp-recipe":
            refused(model)

        if mode == "fsdp-delayed":
            model.set_reshard_after_backward(False)

        def late(loss):
            with delayed_wgrad() as store:
                loss.backward()
            assert len(store)
            store.run()
            store.reduce_sharded(model)

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            losses = train(model, part, late if mode == "fsdp-delayed" else None)
        why = [str(one.message) for one in said if "run as before from_torch" in str(one.message)]
        assert [("DTensor" in one or "has a hook" in one) for one in why] == [True] * (mode == "fsdp-nested-whole"), why
        final = {name: p.full_tensor() for name, p in model.named_parameters()}
    else:
        wrapped = DistributedDataParallel(model, find_unused_parameters="unused" in mode)

        def delayed(loss):
            with delayed_wgrad() as store:
                loss.backward()
            store.run()
            store.reduce(also=model.parameters())  # the head is a plain product

        if "delayed" not in mode:
            losses = train(wrapped, part)
        else:
            with wrapped.no_sync():
                losses = train(wrapped, part, delayed)
        final = dict(model.named_parameters())
    for module in graphs:
        assert module.forward.traces.tries <= 2, "the example's, and one of the sharded module's"
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    error = max((final[n] - p).abs().max().item() for n, p in single.named_parameters())
    curve = (mean / 2 - torch.stack(whole)).abs().max().item()
    moved = max(
        (p - q).abs().max().item() for p, q in zip(single.parameters(), copy.deepcopy(made(mode)).parameters(), strict=True)
    )
    print(f"{mode} {error:.3e} {curve:.3e} {moved:.3e}")


def work(modes, rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(minutes=10))
    for mode in modes.split(","):
        compare(mode, rank)
    dist.destroy_process_group()


def main(modes, folder):
    print(json.dumps(codes({f"rank{rank}": functools.partial(work, modes, rank, folder / "store") for rank in range(2)}, folder)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
