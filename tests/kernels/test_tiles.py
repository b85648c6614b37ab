"""Every tile of the kernels' tables has sizes that Triton's launches take: powers of two, and at least one stage."""

import importlib
import pkgutil
import types

import pytest
import torch

pytest.importorskip("triton")

import funcops.library.kernels.triton as kernels
from funcops.engine.backend import shared
from funcops.library.kernels.triton import common, matmul, scaled_attention, scored_attention


def tiles(value):
    if isinstance(value, tuple) and "warps" in getattr(value, "_fields", ()):
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tiles(one)


def tables():
    for found in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        for name, value in vars(module).items():
            yield from ((f"{found.name}.{name}", tile) for tile in tiles(value))


def test_every_tile_can_be_launched():
    every = list(tables())
    assert len(every) > 100
    for where, tile in every:
        sizes = [n for field, n in tile._asdict().items() if field not in ("warps", "stages", "specialised")]
        assert all(n >= 16 and n & (n - 1) == 0 for n in sizes), f"{where}: {tile}"
        assert tile.warps in (1, 2, 4, 8, 16, 32) and 1 <= tile.stages <= 6, f"{where}: {tile}"


class Device:
    """A stand-in for Triton's driver of one device."""

    def __init__(self, backend, arch, warp_size):
        self.target = types.SimpleNamespace(backend=backend, arch=arch, warp_size=warp_size)
        found = {"multiprocessor_count": 107, "max_shared_mem": 65536}
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: found if device == 7 else None)

    def get_current_device(self):
        return 7

    def get_current_target(self):
        return self.target


DEVICES = {  # the most warps, and whether loads go on while a program computes, there are descriptors, products read shared memory,
    "B200": (Device("cuda", 100, 32), 32, True, True, True, True),  # and they are summed in memory of their own
    "RTX 5090": (Device("cuda", 120, 32), 32, True, True, False, False),
    "Hopper": (Device("cuda", 90, 32), 32, True, True, True, False),
    "Ampere": (Device("cuda", 80, 32), 32, True, False, False, False),
    "MI300": (Device("hip", "gfx942", 64), 16, False, False, False, False),
}


@pytest.mark.parametrize("name", DEVICES)
def test_launches_are_chosen_by_what_a_device_has(name, monkeypatch):
    device, warps, copies, described, feeds, apart = DEVICES[name]
    for module in (common, matmul, shared):
        monkeypatch.setattr(module, "IN_INTERPRETER", False)
        monkeypatch.setattr(module, "driver", types.SimpleNamespace(active=device))
    assert common.copies_by_itself() is copies and common.most_warps() == warps
    assert matmul.device_facts() == (described, 107, (65536, copies, feeds), apart)
    for module, decodes in ((scored_attention, False), (scaled_attention, True)):
        for (which, bytes_of), of in module.TILES.items():
            size, dtype = max(of), torch.bfloat16 if bytes_of == 2 else torch.float32
            wanted = of[size]._replace(rows=of[size].rows // 2, warps=8) if decodes and bytes_of == 2 else of[size]
            assert module.tile_of(which, dtype, size) == (wanted if copies else wanted._replace(stages=1)), module.__name__
