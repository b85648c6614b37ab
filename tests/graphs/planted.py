"""Functions that no CUDA graph can capture. The line at fault ends in `# fault: KIND`; every function takes x [4, 3] and ids
[4]."""

import io
import pickle
import random
import time

import numpy as np
import torch

CACHE = {}
KEPT = []
COUNT = [0]
GENERATOR = torch.Generator()
WEIGHT = torch.nn.Parameter(torch.ones(3))
ADAMW = torch.optim.AdamW([WEIGHT])


def item(x, ids):
    return x * x.sum().item()  # fault: host sync


def branch(x, ids):
    if (x > 0).any():  # fault: host sync
        return x
    return -x


def loop_on_a_value(x, ids):
    n = int(ids.max())  # fault: host sync
    for _ in range(n):
        x = x + 1
    return x


def printed(x, ids):
    print(x.sum())  # fault: host sync
    return x


def shown_in_a_string(x, ids):
    return x, f"{x.sum()!r}"  # fault: host sync


def to_cpu(x, ids):
    return x.cpu() + 1  # fault: host sync


def to_cpu_by_name(x, ids):
    return x.to("cpu") + 1  # fault: host sync


def numpy(x, ids):
    return torch.full_like(x, x.numpy().max().item())  # fault: host sync


def to_list(x, ids):
    y = x * 2
    return [y, ids.tolist()][0]  # fault: host sync


def equal(x, ids):
    same = torch.equal(x, x + 0)  # fault: host sync
    return x if same else -x


def index_by_a_value(x, ids):
    return x[: ids[0]]  # fault: host sync


def nonzero(x, ids):
    return x.nonzero()  # fault: dynamic shape


def mask(x, ids):
    positive = x[x > 0]  # fault: dynamic shape
    return positive.sum()


def mask_assignment(x, ids):
    y = x.clone()
    y[x > 0] = x[0, 0] * torch.ones_like(x)[x > 0]  # fault: dynamic shape
    return y


def unique(x, ids):
    return torch.unique(ids)  # fault: dynamic shape


def repeats(x, ids):
    return torch.repeat_interleave(x, ids, dim=0)  # fault: dynamic shape


def masked_select(x, ids):
    return torch.masked_select(x, x > 0)  # fault: dynamic shape


def tensor_of_a_list(x, ids):
    return x * torch.tensor([1.0, 2.0, 3.0])  # fault: host copy


def from_numpy(x, ids):
    return x + torch.from_numpy(np.ones(3, dtype=np.float32))  # fault: host copy


def index_by_a_list(x, ids):
    return x[[0, 2]] * x.new_tensor(2.0)  # fault: host copy


def pinned(x, ids):
    return x + torch.zeros(3).pin_memory()  # fault: host copy


def to_cuda(x, ids):
    return x.cuda()  # fault: host copy


def draw(x, ids):
    return x + torch.randn_like(x)  # fault: generator


def dropout(x, ids):
    return torch.nn.functional.dropout(x, 0.5)  # fault: generator


def own_generator(x, ids):
    return x + torch.rand(3, generator=GENERATOR)  # fault: generator


def seed(x, ids):
    torch.manual_seed(0)  # fault: generator
    return x + 1


def counter(x, ids):
    COUNT[0] += 1
    return x * COUNT[0]  # fault: baked value


def clock(x, ids):
    return x + time.perf_counter()  # fault: baked value


def python_random(x, ids):
    return x * random.random()  # fault: baked value


def cache(x, ids):
    if "y" not in CACHE:
        CACHE["y"] = x * 2  # fault: escaping allocation
    return CACHE["y"] + x


def kept(x, ids):
    h = x * 2  # fault: escaping allocation
    KEPT.append(h)
    return h.sum() + 0


def history(x, ids):
    loss = x.square().sum()  # fault: escaping allocation
    KEPT.append(loss)
    return loss


def history_of_views(x, ids):
    h = x * 2  # fault: escaping allocation
    KEPT.append(h[0].detach())
    return {"h": h}


def kept_as_a_view(x, ids):
    h = x * 2  # fault: escaping allocation
    KEPT.append(h[0])
    return h.sum() + 0


def saved(x, ids):
    torch.save({"x": x * 2}, io.BytesIO())  # fault: host sync
    return x * 2


def pickled(x, ids):
    pickle.dumps([x])  # fault: host sync
    return x * 2


def inverse(x, ids):
    square = x.T @ x + torch.eye(3)
    return torch.linalg.inv(square)  # fault: host sync


def backward(x, ids):
    (x * WEIGHT).sum().backward()  # fault: grad mode
    return x


def adamw(x, ids):
    with torch.enable_grad():
        (x * WEIGHT).sum().backward()
    ADAMW.step()  # fault: host sync
    return x
