"""Reads of compiled kernels (TTGIR): a store, and a later load of the same memory in another layout, with no barrier between them.
Threads of a block then read what other threads wrote, perhaps before it is there."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from funcops.testing.aot import TARGETS, stubbed

DEFINED = re.compile(r"^\s*(%[\w#]+)(?::\d+)? = (?:\"?)([\w.]+)")
CARRIED = re.compile(r"(%\w+) = (%[\w#]+)")
STORES = ("tt.store", "tt.descriptor_store", "ttng.async_tma_copy_local_to_global", "tt.atomic_rmw", "tt.atomic_cas")
LOADS = ("tt.load", "tt.descriptor_load", "ttng.async_tma_copy_global_to_local", "ttg.async_copy_global_to_local")
BARRIERS = ("gpu.barrier", "ttg.barrier", "ttg.local_barrier", "nvvm.barrier0")
ACCESS = re.compile(r"(" + "|".join(map(re.escape, (*STORES, *LOADS, *BARRIERS))) + r")\b(.*)")


class Access(NamedTuple):
    line: int
    kind: str
    base: str
    layout: str


def bases(lines: list[str]) -> dict[str, str]:
    """For every value that is a pointer or is derived from one, the value that it comes from; each chain ends at an argument."""
    found: dict[str, str] = {}
    for line in lines:
        defined = DEFINED.match(line)
        carried = CARRIED.findall(line.partition("iter_args(")[2].partition("->")[0]) if "iter_args(" in line else []
        found.update(dict(carried))
        if defined is None:
            continue
        name, op = defined.groups()
        if op.startswith("scf."):
            found.update({name if len(carried) == 1 else f"{name}#{i}": start for i, (_, start) in enumerate(carried)})
        else:
            operands = re.findall(r"%[\w#]+", line.partition(" = ")[2])
            if operands:
                found[name] = operands[1] if op == "arith.select" else operands[0]
    return found


def accesses(text: str) -> list[Access]:
    lines = [re.sub(r" loc\(.*$", "", line) for line in text.splitlines()]
    before = bases(lines)
    found = []
    for number, line in enumerate(lines):
        if (match := ACCESS.search(line)) is None:
            continue
        kind, rest = match.groups()
        if kind in BARRIERS:
            found.append(Access(number, "barrier", "", ""))
            continue
        base = re.findall(r"%[\w#]+", rest)[0]
        while base in before and before[base] != base:
            base = before[base]
        layout = re.search(r"tensor<[^>]*!tt\.ptr<\w+>, (#\w+)>", rest)
        name = layout[1] if layout else "tma" if "desc" in kind or "tma" in kind else "scalar"
        found.append(Access(number, "store" if kind in STORES else "load", base.lstrip("%"), name))
    return found


def races(text: str, same: dict[str, Any]) -> list[str]:
    """`same`: of each argument that is a tensor, a mark of its memory."""
    written: list[Access] = []
    found = []
    for access in accesses(text):
        if access.kind == "barrier":
            written = []
        elif access.kind == "store":
            written.append(access)
        else:
            for store in written:
                alike = same.get(store.base, store.base) == same.get(access.base, access.base)
                if alike and (store.layout != access.layout or access.layout == "scalar"):
                    found.append(f"{store.base} is written in {store.layout}, then read in {access.layout} as {access.base}")
    return found


def memory_of(launched: Any) -> dict[str, Any]:
    tensors = {name: getattr(value, "base", value) for name, value in launched.arguments.items()}
    return {name: t.untyped_storage()._cdata for name, t in tensors.items() if hasattr(t, "untyped_storage")}


def ttgir(launched: Any, target: str) -> str:
    """The TTGIR of a launch, as `launched.compile()` makes it."""
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource
    from triton.runtime.driver import driver

    *_, num_warps, num_stages = launched.key
    options = {"num_warps": num_warps, "num_stages": num_stages}
    with stubbed(TARGETS[target].gpu):
        kernel = launched.kernel
        _, _, gpu, backend, binder = kernel.device_caches[driver.active.get_current_device()]
        bound, specialised, _ = binder(*launched.arguments.values(), **options, debug=False)
        parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialised, options)
        source, context = ASTSource(kernel, signature, constants, attributes), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = source.make_ir(gpu, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed, source.language)
        metadata = {"hash": "", "target": gpu, **parsed.__dict__}
        for stage in ("ttir", "ttgir"):
            module = stages[stage](module, metadata)
        return str(module)
