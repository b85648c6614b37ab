"""Imports: `import funcops` loads engine and library alone; every extension, imported first, loads what it needs."""

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "funcops"
MOST_MODULES = 200


def in_a_new_process(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_import_funcops_loads_no_extension():
    code = """
import sys, torch
before = set(sys.modules)
import funcops
own = [name for name in sys.modules if name.startswith("funcops")]
print(len(own), *sorted({name.split(".")[1] for name in own if "." in name}))
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - {"funcops", "optree"}))
funcops.fit, funcops.nn, funcops.remat
try:
    funcops.no_such_name
except AttributeError as error:
    print(error)
"""
    first, others, missing = in_a_new_process(code).splitlines()
    number, *rooms = first.split()
    assert int(number) <= MOST_MODULES and rooms == ["engine", "library"]
    assert others == "", "libraries that nothing uses yet"
    assert missing == "module 'funcops' has no attribute 'no_such_name'"


def test_the_collector_is_as_it_was_after_an_import():
    fails = """
import gc, sys
sys.modules["optree"] = None  # which then cannot be imported
try:
    import funcops
except ImportError:
    print(gc.isenabled())
print(gc.isenabled())
"""
    assert in_a_new_process(fails).split()[-1] == "True"
    assert in_a_new_process("import gc, funcops; print(gc.isenabled())") == "True\n"
    assert in_a_new_process("import gc; gc.disable(); import funcops; print(gc.isenabled())") == "False\n"


def test_each_extension_imports_alone():
    """In a process that has only imported torch: a fork of one that did."""
    names = sorted(path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
    names.remove("__init__")
    code = f"""
import importlib, os, sys, torch, optree
for name in {names!r}:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module("funcops." + name)
        except BaseException as error:
            print(name, repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
"""
    assert in_a_new_process(code) == "" and len(names) > 15
