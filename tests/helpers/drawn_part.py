"""A drawn part of the tests: `-p drawn_part --part 10 --seed TEXT` runs one of ten, chosen by each test's name and the seed."""

import hashlib


def pytest_addoption(parser):
    parser.addoption("--part", type=int, default=1, help="run one of so many tests")
    parser.addoption("--seed", default="", help="which")


def chosen(name, part, seed):
    """The choice depends only on the test's name and the seed, so it is the same in every process."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") % part == 0


def pytest_collection_modifyitems(config, items):
    part, seed = config.getoption("--part"), config.getoption("--seed")
    left = [item for item in items if not chosen(item.nodeid, part, seed)]
    items[:] = [item for item in items if chosen(item.nodeid, part, seed)]
    config.hook.pytest_deselected(items=left)
