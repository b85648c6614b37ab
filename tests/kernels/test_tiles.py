"""Every tile of the kernels' tables has sizes that Triton's launches take: powers of two, and at least one stage."""

import importlib
import pkgutil

import pytest

pytest.importorskip("triton")

import funcops.kernels.triton as kernels


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
