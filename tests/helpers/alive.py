"""The bytes that autograd's graph holds after a call, counted without hooks: by what is still alive when nothing else holds it."""

import gc

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """The storages that operators give out, by weak references, and their bytes."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)]:
            if storage._cdata not in self.found or self.found[storage._cdata][0].expired():
                self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out


def bytes_alive(call, own):
    """The bytes of the storages that the graph behind `call()` holds, without the tensors of `own()` after the call."""
    with Made() as made:
        graph = [t.grad_fn for t in tree_leaves(call()) if isinstance(t, Tensor)]
    gc.collect()
    held = {t.untyped_storage()._cdata for t in own()}
    found = sum(size for storage, (ref, size) in made.found.items() if not ref.expired() and storage not in held)
    del graph
    return found
