"""Two counts of what autograd does: products that run, by operator, and bytes that a forward saves."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "convolution", "convolution_backward", "_grouped_mm"}


class Products(TorchDispatchMode):
    """Matrix products, attentions and convolutions; a convolution's backward counts for each gradient of it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        if name == "convolution_backward":
            self.count += sum(args[10][:2])
        elif name in PRODUCTS or "scaled_dot_product" in name:
            self.count += 1
        return func(*args, **(kwargs or {}))


def saved_by(forward, own):
    """The result of `forward()`, and the bytes of the storages that it saves, without the storages of the tensors `own`."""
    held, saved = {t.untyped_storage()._cdata for t in own}, {}

    def pack(t):
        storage = t.untyped_storage()
        if storage._cdata not in held:
            saved[storage._cdata] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = forward()
    return y, sum(storage.nbytes() for storage in saved.values())
