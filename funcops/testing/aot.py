"""Compile kernels for a GPU that this machine does not have, and read the compiled code.

    with stubbed(TARGETS["sm_90"].gpu), compiled_launches() as found, backend("triton"):
        rms_norm_fwd(torch.empty(4096, 4096, device="meta"), ...)
    builds = [inspect(launched, "sm_90") for launched in found]

A kernel is built exactly as a launch on that device would build it: the same code path chooses its configuration, and Triton
specialises on the same arguments. Tensors on the meta device need no memory, so every shape can be tried.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from funcops.engine.backend.launch import Launched, use_driver
from funcops.engine.errors import require, short
from funcops.testing.fingerprint import fingerprint

__all__ = ["COMPILER", "TARGETS", "TOOLS", "Build", "inspect", "name_of", "stubbed", "takes_descriptors"]

COMPILER = f"triton {triton.__version__}"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MATRIX = re.compile(r"^(?:[A-Z]*MMA|v_mfma)")  # HMMA, HGMMA, QGMMA, UTCHMMA, ...; v_mfma_f32_32x32x8_bf16


class Target(NamedTuple):
    """A device to compile for, the bytes of shared memory that a program may use there, and whether it has tensor descriptors."""

    gpu: GPUTarget
    shared_limit: int
    descriptors: bool


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 166912, False),
    "sm_86": Target(GPUTarget("cuda", 86, 32), 101376, False),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 101376, False),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 232448, True),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 232448, True),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 101376, True),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 65536, False),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 163840, False),
}


class Build(NamedTuple):
    """One kernel, specialised for one launch and compiled for one target. `spills`: bytes of local memory per thread. `hash`: the
    `fingerprint` of its source. `compiler`: the version of Triton that compiled it."""

    kernel: str
    config: str
    target: str
    warps: int
    registers: int
    shared: int
    spills: int
    matrix: str
    instructions: int
    hash: str
    compiler: str


class _Read(NamedTuple):
    registers: int
    spills: int
    opcodes: set[str]
    instructions: int


class _Utils:
    limits: ClassVar[dict[int, int]] = {}  # of shared memory, by device

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        # module, function, registers, spills, threads: Triton refuses a kernel with more threads than the last
        return 0, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.limits[device], "multiprocessor_count": 132}


class _Launch:
    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        pass


class StubDriver:
    """A driver that compiles for the GPU of one of `TARGETS`, with its shared memory, and launches nothing. Each instance is its
    own device: Triton caches compiled kernels per device."""

    launcher_cls, utils, stands_in = _Launch, _Utils(), True
    _numbers = itertools.count(1000)  # above the numbers of real devices

    def __init__(self, target: GPUTarget) -> None:
        self.target, self.number = target, next(self._numbers)
        limits = [known.shared_limit for known in TARGETS.values() if known.gpu == target]
        require(limits != [], "StubDriver", "target", f"the GPU of one of {', '.join(TARGETS)}", target)
        _Utils.limits[self.number] = limits[0]

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def stubbed(target: GPUTarget = TARGETS["sm_90"].gpu) -> Iterator[None]:
    """Run Triton on a `StubDriver` in the block."""
    before = driver._active
    use_driver(StubDriver(target))
    try:
        yield
    finally:
        use_driver(before)


def inspect(launched: Launched, target: str) -> Build:
    """Read a compiled kernel with the disassembler that Triton ships."""
    compiled = launched.compiled
    read = _read_amd if TARGETS[target].gpu.backend == "hip" else _read_nvidia
    found = read(compiled.asm)
    matrix = ", ".join(sorted(opcode for opcode in found.opcodes if MATRIX.match(opcode)))
    metadata = compiled.metadata
    return Build(
        name_of(launched.kernel),
        config_of(launched),
        target,
        metadata.num_warps,
        found.registers,
        metadata.shared,
        found.spills,
        matrix,
        found.instructions,
        fingerprint(launched, target),
        COMPILER,
    )


def name_of(kernel: Any) -> str:
    """The family and the function: `norm.forward`."""
    return f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__.lstrip('_')}"


def takes_descriptors(kernel: Any) -> bool:
    return "make_tensor_descriptor" in kernel.src or any(parameter.name.endswith("_desc") for parameter in kernel.params)


def config_of(launched: Launched) -> str:
    """The dtypes of the tensors, the values of the constexprs, and which integers Triton knows to be multiples of 16."""
    found = []
    for parameter in launched.kernel.params:
        value = launched.arguments[parameter.name]
        if isinstance(value, TensorDescriptor):
            value = value.base
        if isinstance(value, Tensor):
            found.append(short(value.dtype))
        elif parameter.is_constexpr:
            found.append(f"{parameter.name}={value}")
        elif isinstance(value, int) and value % 16 == 0:
            found.append(f"{parameter.name}%16=0")
    dtypes = dict.fromkeys(f for f in found if "=" not in f)
    return " ".join([*dtypes, *(f for f in found if "=" in f)])


def _read_nvidia(asm: Any) -> _Read:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        Path(path).write_bytes(asm["cubin"])

        def tool(name: str, option: str) -> str:
            return subprocess.run([TOOLS / name, option, path], capture_output=True, text=True, check=True).stdout

        usage = tool("cuobjdump", "-res-usage")
        # the disassembler takes a quarter of a second, and finds a matrix opcode only if the PTX has one
        sass = tool("nvdisasm", "-c") if "mma" in asm["ptx"] else ""
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)[.\w]*", sass, re.M)
    # an instruction has 16 bytes on each of these NVIDIA targets
    return _Read(registers, stack, set(opcodes), _code_bytes(asm["cubin"]) // 16)


def _code_bytes(cubin: bytes) -> int:
    """The size of the executable sections of a 64-bit ELF file (System V ABI, section headers)."""
    offset, size, count = *struct.unpack_from("<Q", cubin, 0x28), *struct.unpack_from("<2H", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    return sum(header[5] for header in headers if header[2] & 4)  # SHF_EXECINSTR, which marks code


def _read_amd(asm: Any) -> _Read:
    text = asm["amdgcn"]
    registers, vector, scalar = (
        int(re.search(rf"\.{name}:\s+(\d+)", text)[1])  # type: ignore[index]
        for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    )
    opcodes = re.findall(r"^\t([a-z][a-z0-9_]+)\s", text, re.M)
    # AMD counts registers of 4 bytes, and `spills` is in bytes
    return _Read(registers, 4 * (vector + scalar), set(opcodes), len(opcodes))
