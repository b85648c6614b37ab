"""The tests that a new operator may change: `-p of_one_operator --operator NAME` leaves out tests with the name of another."""

import re


def pytest_addoption(parser):
    parser.addoption("--operator", help="the operator whose tests to run, beside the tests of no operator")


def pytest_collection_modifyitems(config, items):
    from law_cases import FIRST, MODULES  # from where pytest's `pythonpath` says, which is read after plugins are

    others = {str(case).partition("-")[0] for case in FIRST} | set(MODULES)

    def is_of_another(item):
        words = set(re.findall(r"\w+", item.nodeid.partition("[")[2]))
        return config.getoption("--operator") not in words and not words.isdisjoint(others)

    left = [item for item in items if is_of_another(item)]
    items[:] = [item for item in items if not is_of_another(item)]
    config.hook.pytest_deselected(items=left)
