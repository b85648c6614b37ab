"""Three rings: the engine imports nothing of the package outside itself, the library only the engine, an extension these two and
the extensions that a table says. Rooms of the first two import only from rooms before their own."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import funcops

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ("errors", "backend", "trees", "random", "contract", "residuals", "program", "compose")
LIBRARY = ("kernels", "formats", "ops", "fused")
EXTENSIONS = (
    *(
        "memory",
        "low_precision",
        "optim",
        "precision",
        "checkpoint",
        "logs",
        "invariant",
        "lora",
        "distributed",
        "models",
        "schedule",
        "adapters",
    ),
    "testing",
)
# A public path of one line for what is in another folder, and the room that it names.
FACES = {"trees": "engine", "random": "engine", "contract": "engine", "fused": "library"}
FACES |= {"dist": "distributed", "nn": "adapters", "graphs": "adapters"}
# An extension and those that it imports: this table may only get shorter.
EDGES = {
    "low_precision": {"memory"},
    "lora": {"checkpoint"},
    "distributed": {"checkpoint", "lora", "optim", "testing"},
    "models": {"checkpoint", "lora"},
    "schedule": {"distributed", "memory"},
    "adapters": {"distributed", "low_precision", "memory", "precision", "schedule"},
}
MOST_NAMES = 196  # that extensions take from the engine beside those which `funcops` gives its users; it may only fall
WITHOUT_ALL = ("funcops.engine.errors", "funcops.engine.trees")  # where every name without an underscore is public
PRIVATE = {"_by_path", "_no_pairs"}  # of `trees`, for the files and the optimisers of extensions
SUMS = (
    "funcops.engine.compose.add",
    "funcops.engine.compose.fork",
)  # the ops to which a skip is lowered, which programs take apart


def imports(path):
    """The modules and names that a file imports when it runs; not those that only a type checker reads."""
    tree = ast.parse(path.read_text())
    tests = [one for one in ast.walk(tree) if isinstance(one, ast.If) and ast.unparse(one.test).strip("_") == "TYPE_CHECKING"]
    read = {id(inner) for one in tests for own in one.body for inner in ast.walk(own)}
    for node in ast.walk(tree):
        if id(node) in read:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def place(name):
    """The ring, or extension, and the room of a module of the package, such as funcops.engine.trees."""
    _, first, room, *_ = (*name.split("."), "", "")
    return FACES.get(first, first), room


def wrong(package):
    """Every import that leaves its ring or its confinement."""
    for path in sorted(package.rglob("*.py")):
        first, room = place(".".join(("funcops", *path.relative_to(package).with_suffix("").parts)))
        if path.parent == package and path.stem in ("__init__", *FACES):
            continue
        allowed = (
            {first, "engine", *EDGES.get(first, ())} if first == "engine" else {first, "engine", "library", *EDGES.get(first, ())}
        )
        where = f"{first}.{room}" if first in ("engine", "library") else first
        for target in imports(path):
            other, its_room = place(target)
            if target.startswith("funcops.") and other and other not in allowed:
                yield f"{where} imports {target}"
            order = {"engine": ENGINE, "library": LIBRARY}.get(first if first == other else "", ())
            if (
                its_room in order
                and not (room == "program" and target.startswith(SUMS))
                and order.index(its_room) > order.index(room)
            ):
                yield f"{where} imports {target}"
            if target.split(".")[0] == "triton" and where not in ("library.kernels", "engine.backend") and first != "testing":
                yield f"{where} imports {target}"
            if target.split(".")[0] == "optree" and where != "engine.trees":
                yield f"{where} imports {target}"
            if first in ("adapters", "testing"):
                continue
            if target.startswith("torch.autograd") or target.startswith("torch.nn.modules") or target == "torch.nn.Module":
                yield f"{where} imports {target}"
        if (
            "os.environ" in path.read_text()
            and path.relative_to(package) != Path("engine/backend/select.py")
            and first != "testing"
        ):
            yield f"{path.name} reads os.environ"


def rooms(folder):
    """Folders and files of a folder of the package, without caches that a checkout of another revision left behind."""
    return {path.relative_to(folder).parts[0].removesuffix(".py") for path in folder.rglob("*.py")} - {"__init__"}


def test_the_folders_are_the_rings():
    package = ROOT / "funcops"
    assert rooms(package / "engine") == set(ENGINE) and rooms(package / "library") == set(LIBRARY)
    assert rooms(package) == {"engine", "library", *EXTENSIONS, *FACES}


def test_the_map_for_contributors_has_every_room_in_order():
    (table,) = re.findall(r"^\| where \| what it is \|\n\|.*\n((?:\|.*\n)+)", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert tuple(named[: len(ENGINE) + len(LIBRARY)]) == (*ENGINE, *LIBRARY)
    assert set(named) == {*ENGINE, *LIBRARY, *EXTENSIONS}


def test_imports_stay_in_their_rings():
    assert list(wrong(ROOT / "funcops")) == []


def test_the_table_of_edges_has_no_needless_row():
    found = {}
    for path in (ROOT / "funcops").rglob("*.py"):
        first, _ = place(".".join(("funcops", *path.relative_to(ROOT / "funcops").with_suffix("").parts)))
        if first in EXTENSIONS and path.relative_to(ROOT / "funcops").as_posix() not in {f"{name}.py" for name in FACES}:
            others = {place(target)[0] for target in imports(path) if target.startswith("funcops.")}
            found.setdefault(first, set()).update(others.intersection(EXTENSIONS) - {first})
    assert {name: others for name, others in found.items() if others} == EDGES


def test_what_extensions_take_from_the_engine_is_public_there():
    taken = set()
    for path in (ROOT / "funcops").rglob("*.py"):
        first, _ = place(".".join(("funcops", *path.relative_to(ROOT / "funcops").with_suffix("").parts)))
        for node in ast.walk(ast.parse(path.read_text())) if first in EXTENSIONS else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("funcops.engine"):
                taken |= {(node.module, alias.name) for alias in node.names}
    inner = {name for _, name in taken if name not in funcops.__all__}
    assert 100 < len(inner) <= MOST_NAMES, len(inner)
    hidden = {name for module, name in taken if not public(module, name)}
    assert hidden == PRIVATE


def public(module, name):
    """Whether a module of the engine says that a name is public; a module of a package is."""
    if module in WITHOUT_ALL:
        return name[0] != "_"
    package = ROOT / module.replace(".", "/")
    return name in getattr(importlib.import_module(module), "__all__", ()) or (package / f"{name}.py").is_file()


def test_one_file_reads_versions():
    """So that there is a single guard for whatever depends on a version."""
    readers = {p.name for p in (ROOT / "funcops").rglob("*.py") if re.search(r"\._version\b", p.read_text())}
    assert readers == {"versions.py"}


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        (
            "engine/contract/bad.py",
            "from funcops.engine.compose.chain import chain",
            "engine.contract imports funcops.engine.compose.chain",
        ),
        ("engine/compose/bad.py", "from funcops.library import ops", "engine.compose imports funcops.library"),
        ("engine/compose/bad.py", "from funcops import dist", "engine.compose imports funcops.dist"),
        ("library/ops/bad.py", "from funcops.memory.fit import fit", "library.ops imports funcops.memory.fit"),
        ("library/ops/bad.py", "import optree", "library.ops imports optree"),
        ("library/ops/bad.py", "import triton", "library.ops imports triton"),
        ("lora/bad.py", "def f():\n    from funcops.models import hf", "lora imports funcops.models"),
        ("optim/bad.py", "from torch.autograd import Function", "optim imports torch.autograd"),
        ("optim/bad.py", "import os\nos.environ['X']", "bad.py reads os.environ"),
    ],
)
def test_a_violation_is_caught(tmp_path, path, text, said):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert said in wrong(tmp_path)


def test_pre_commit_checks_as_make_check_does():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    check = re.search(r"^check: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    asked = re.findall(r"\$\(PY\) -m (.*?)(?: \.)?$", check, re.M)
    assert re.findall(r"entry: \.venv/bin/python -m (.*?)(?: --force-exclude)?$", hooks, re.M) == asked and len(asked) == 3
    assert hooks.count("language: system") == 3 and hooks.count("repo:") == hooks.count("repo: local")
