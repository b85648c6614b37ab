"""Drawn steps whose messages are of tensors from anywhere: the step's input, fresh ones, captured ones, and counts of labels."""

import torch

from funcops.distributed import comm

ops = torch.ops._c10d_functional
LABELS = torch.tensor([3, -100, 5, -100])  # captured, and on the CPU
HELD = torch.ones(6, 5)
SOURCES = {
    "input": lambda x, rows, columns: x[:rows, :columns] * 2,
    "fresh": lambda x, rows, columns: torch.ones(rows, columns),
    "by device": lambda x, rows, columns: torch.full((rows, columns), 2.0, device="cpu"),
    "captured": lambda x, rows, columns: HELD[:rows, :columns],
    "mixed": lambda x, rows, columns: HELD[:rows, :columns] + x[:rows, :columns],
    "count": lambda x, rows, columns: (LABELS >= 0).sum().expand(rows, columns).clone(),
    "text": lambda x, rows, columns: torch.tensor([[float(columns)] * columns] * rows),
}
KINDS = {
    "all_reduce": comm.sum_over,
    "max": lambda t, axis: comm.largest(t.float(), axis),
    "all_gather": comm.gather,
    "reduce_scatter": comm.scatter_sum,
    "all_to_all": lambda t, axis: comm.all_to_all(t, axis, 0, 1),
    "shift": lambda t, axis: comm.shift(t, axis, 1),
    "broadcast": lambda t, axis: ops.wait_tensor(ops.broadcast(t, 0, axis.group)),
    "broadcast from 1": lambda t, axis: ops.wait_tensor(ops.broadcast(t, 1, axis.group)),
    "in place": lambda t, axis: ops.wait_tensor(ops.all_reduce_(t, "sum", axis.group)),
    "together": lambda t, axis: [ops.wait_tensor(one) for one in ops.all_reduce_coalesced([t[:1], t], "sum", axis.group)],
}
SAME = dict.fromkeys(("all_reduce", "in place"), ("all_reduce", "in place"))  # one message
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def drawn(draw, names, rows):
    """A program: of each message its axis, kind, source, numbers of rows and columns, and dtype."""
    return [
        (draw.choice(names), draw.choice(list(KINDS)), draw.choice(list(SOURCES)), rows, draw.randrange(1, 5), draw.choice(DTYPES))
        for _ in range(draw.randrange(1, 6))
    ]


def _wire(message):
    """The part of a message that the other ranks see."""
    _, kind, _, rows, columns, dtype = message
    return SAME.get(kind, (kind,)), rows, columns, None if kind == "max" else dtype


def changed(draw, program):
    """The program with one difference: in shape, order, dtype, axis, kind or count; and what differs."""
    at = draw.randrange(len(program))
    name, kind, source, rows, columns, dtype = one = program[at]
    names = sorted({"dp", "tp"} - {name})
    other = {
        "columns": (name, kind, source, rows, columns + 1, dtype),
        "dtype": (name, kind, source, rows, columns, torch.float16) if kind != "max" else None,
        "kind": (name, draw.choice([k for k in KINDS if k not in SAME.get(kind, (kind,))]), source, rows, columns, dtype),
        "axis": (names[0], kind, source, rows, columns, dtype),
        "count": None,
        "order": None,
    }
    what = draw.choice([what for what, value in other.items() if value or what == "count"])
    # over one axis: ranks that go through two in other orders need not wait for each other
    if draw.random() < 0.4 and program[0][0] == program[-1][0] and _wire(program[0]) != _wire(program[-1]):
        return [program[-1], *program[1:-1], program[0]], "order"
    made = [] if what == "count" else [other[what]]
    assert made != [one]
    return [*program[:at], *made, *program[at + 1 :]], what


def run(mesh, program, x):
    """The program, as a step; what comes back is computed with."""
    for name, kind, source, rows, columns, dtype in program:
        came = KINDS[kind](SOURCES[source](x, rows, columns).to(dtype), mesh[name])
        for t in came if isinstance(came, list) else [came]:
            x = x + t.sum().to(x.dtype)
    return x


def pairs():
    """Functional messages that only two ranks of an axis take part in, by operator; torch has them from 2.12 on."""
    calls = {
        "isend": lambda axis: ops.isend(torch.ones(2), 1 - axis.rank, 0, axis.group),
        "irecv": lambda axis: ops.irecv(torch.ones(2), 1 - axis.rank, 0, axis.group),
        "batch_p2p_ops": lambda axis: ops.batch_p2p_ops(["isend"], [1 - axis.rank], [0], [torch.ones(2)], axis.group),
    }
    return {name: call for name, call in calls.items() if hasattr(ops, name)}


def unordered(c10d, rank, x):
    """Messages of torch.distributed that change their arguments in place, by operator."""
    two = [torch.empty_like(x), torch.empty_like(x)]
    return {
        "allreduce_": lambda: c10d.all_reduce(x),
        "allgather_": lambda: c10d.all_gather(two, x),
        "_allgather_base_": lambda: c10d.all_gather_into_tensor(torch.cat(two), x),
        "_reduce_scatter_base_": lambda: c10d.reduce_scatter_tensor(x, torch.cat(two)),
        "reduce_scatter_": lambda: c10d.reduce_scatter(x, two),
        "alltoall_base_": lambda: c10d.all_to_all_single(torch.empty_like(x), x),
        "broadcast_": lambda: c10d.broadcast(x, 0),
        "reduce_": lambda: c10d.reduce(x, 0),
        "gather_": lambda: c10d.gather(x, two if rank == 0 else None),
        "scatter_": lambda: c10d.scatter(x, two if rank == 0 else None),
        "send": lambda: c10d.send(x, 1 - rank),
        "recv_": lambda: c10d.recv(x, 1 - rank),
        "barrier": lambda: c10d.barrier(),
    }


class Held:
    """State that a step captures on a device, and the ways to write to it in place."""

    def __init__(self):
        self.tensors = [torch.arange(6.0).view(2, 3), torch.ones(2, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)]
        self.param = torch.nn.Parameter(torch.ones(2, 3))
        self.param.grad = torch.ones(2, 3)
        self.optimizer = torch.optim.AdamW([self.param], weight_decay=0.5)
        self.generator = torch.Generator().manual_seed(3)
        self.optimizer.step()  # its state exists

    def all(self):
        """Everything that a step could change, copied."""
        adam = self.optimizer.state[self.param]
        tensors = [*self.tensors, self.param.detach(), self.param.grad, *adam.values()]
        return [t.clone() for t in [*tensors, self.generator.get_state(), torch.get_rng_state()]]

    def ways(self, x):
        """The ways by name, each a function that writes, given x on the meta device."""
        a, b, count = self.tensors
        return {
            "in place": lambda: a.add_(1),
            "of a view": lambda: a[1:, :2].mul_(3),
            "of a transpose": lambda: a.t().copy_(b.t()),
            "by index": lambda: a.__setitem__(torch.tensor([0], device="cpu"), 5.0),
            "of data": lambda: b.data.sub_(2),
            "a count": lambda: count.__iadd__(1),
            "out": lambda: torch.add(a, a, out=a),
            "many": lambda: torch._foreach_mul_([a, b], 0.5),
            "from meta": lambda: a.copy_(x[:2, :3]),
            "an optimiser": self.optimizer.step,
            "weight decay": lambda: self.param.data.mul_(0.9),
            "a resize": lambda: b.zero_().resize_(2, 3),
            "an own generator": lambda: torch.rand(3, device="cpu", generator=self.generator),
            "torch's generator": lambda: torch.rand(3, device="cpu"),
            "dropout": lambda: torch.nn.functional.dropout(a, 0.5),
            "noise": lambda: b.normal_(),
        }
