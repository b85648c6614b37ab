"""The counts of `helpers/counts.py`, each within its limit; and that each finds what it counts."""

import re
import textwrap

import counts
import pytest
from counts import COUNTS

PLANTED = {
    "probes": "def f(cfg):\n    return hasattr(cfg, 'axis'), getattr(cfg.base, 'linear', None), getattr(cfg, 'axis')\n",
    "class questions": """
        def f(step, cfg):
            asked = type(step.cfg) is LinearConfig, type(cfg) in KNOWN, isinstance(cfg, (LinearConfig, Other))
            return asked, isinstance(cfg, OpConfig), type(params) is dict
        """,
    "walks": """
        def down(cfg):
            return [below(inner) for _, _, inner in cfg.parts()]

        def below(cfg):
            return down(cfg)

        def flat(cfg):
            return cfg.parts()

        class Walk:
            def inside(self, cfg):
                def part(name, op, inner):
                    return op, self.inside(inner)

                return cfg.with_parts(part)
        """,
    "path joins": """
        def f(path, name):
            whole = f"{path}.{name}" if path else str(name), f"x.{path}" if path else "x", path + "." + name if name else path
            return whole, f"{path}.{name}", f"{path}, {name}" if path else name
        """,
    "root files": "",
    "fmt: skip": "x = 1  # fmt: skip\ny = 'fmt: skip'\n",
    "twin ops": """
        linear = make_op("linear", LinearConfig, fwd=f)
        linear_of_input = make_op("linear_of_input", LinearConfig, fwd=f)
        unlinear = make_op("unlinear", LinearConfig, fwd=f)
        """,
    "rewrite lines": 'def with_lora(cfg):\n    """Return it."""\n    made = cfg\n\n    return made\n',
    "engine statements": '"""Errors."""\n\n# why\nx = 1\nif x:\n    y = 1\n',
    "op statements": '"""Errors."""\n\n# why\nx = 1\nif x:\n    y = 1\n',
    "kernel statements": '"""Errors."""\n\n# why\nx = 1\nif x:\n    y = 1\n',
}
FOUND = {"probes": 2, "class questions": 3, "walks": 2, "path joins": 3, "root files": 1, "fmt: skip": 1, "twin ops": 1}
FOUND |= {"rewrite lines": 2, "engine statements": 3, "op statements": 3, "kernel statements": 3}

UNEVEN = {  # how often each file pairs values of unequal or unknown numbers: all other calls of zip are strict
    "adapters/autograd/traced.py": 1,
    "adapters/from_function/joint.py": 2,
    "adapters/graphs/without_gpu/check.py": 2,
    "adapters/graphs/without_gpu/recorder.py": 2,
    "adapters/nn/module.py": 1,
    "distributed/boxes.py": 1,
    "distributed/handshake.py": 1,
    "distributed/init.py": 1,
    "distributed/ops/context_attention.py": 1,
    "distributed/rewrite.py": 1,
    "engine/backend/declare.py": 1,
    "engine/backend/launch.py": 1,
    "engine/compose/chain.py": 1,
    "engine/contract/marks.py": 5,
    "engine/random.py": 1,
    "library/fused/experts.py": 1,
    "library/fused/qkv.py": 1,
    "library/kernels/adamw.py": 1,
    "library/kernels/grouped_scaled.py": 1,
    "library/ops/attention.py": 1,
    "library/ops/grouped_wgrads.py": 2,
    "library/ops/qattention.py": 1,
    "memory/policy.py": 1,
    "testing/laws.py": 1,
}
NEIGHBOURS = re.compile(r"zip\((\w+), \1\[1:\], strict=False\)")
LENIENT = re.compile(r"strict=\(?False")
DATACLASS = re.compile(r"^ *@(?:dataclasses\.)?dataclass\b(.*)\n(?: *@.*\n)*? *class (\w+)", re.M)
CHANGED = {"Call", "PartRun", "QWeight", "Scope"}  # dataclasses that are written to; params and residuals have their own decorator


def sources(root):
    return {str(path.relative_to(root / "funcops")): path.read_text() for path in (root / "funcops").rglob("*.py")}


def uneven(root):
    return {path: n for path, text in sources(root).items() if (n := len(LENIENT.findall(NEIGHBOURS.sub("", text))))}


def changed(root):
    return {name for text in sources(root).values() for how, name in DATACLASS.findall(text) if "frozen=True" not in how}


def test_only_these_calls_of_zip_take_values_of_unequal_numbers():
    """Elsewhere a value too many or too few raises; neighbours of a list, of which it has one fewer, need no entry."""
    assert uneven(counts.ROOT) == UNEVEN


def test_only_these_dataclasses_can_be_changed():
    """All others can be shared and be keys of a cache."""
    assert changed(counts.ROOT) == CHANGED


def test_a_zip_or_a_dataclass_that_is_not_strict_is_found(tmp_path):
    texts = [
        "pairs = zip(a, a[1:], strict=False), zip(a, b[1:], strict=False), zip(a, b, strict=True), zip(a, b, strict=(False))\n",
        "@dataclasses.dataclass\nclass A: ...\n\n\n@dataclass(slots=True)\n@final\nclass B:\n"
        "    @dataclasses.dataclass(frozen=False)\n    class C: ...\n\n\n@dataclass(frozen=True)\nclass D: ...\n",
    ]
    root = planted(tmp_path, {f"funcops/{i}.py": text for i, text in enumerate(texts)})
    assert uneven(root) == {"0.py": 2} and changed(root) == {"A", "B", "C"}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_within_its_limit(name):
    found = COUNTS[name].number()
    said = list(COUNTS[name].find(counts.ROOT)) if found > COUNTS[name].most else []
    assert found <= COUNTS[name].most, f"python tests/helpers/counts.py {name!r}\n" + "\n".join(map(str, said[:100]))


def planted(tmp_path, files):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(textwrap.dedent(text))
    return tmp_path


PLACE = {"engine statements": "funcops/engine/errors.py", "op statements": "funcops/library/ops/a.py"}
PLACE |= {"kernel statements": "funcops/library/kernels/a.py"}


@pytest.mark.parametrize("name", PLANTED)
def test_a_count_finds_what_it_counts(tmp_path, name):
    assert COUNTS[name].number(planted(tmp_path, {PLACE.get(name, "funcops/errors.py"): PLANTED[name]})) == FOUND[name]


def test_files_that_import_each_other_are_found(tmp_path):
    files = {
        "funcops/a.py": "from funcops.room import b\n",
        "funcops/room/b.py": "def f():\n    import funcops.c\n",
        "funcops/c.py": "from funcops.a import f\nfrom funcops.d import g\n",
        "funcops/d.py": "",
    }
    (circle,) = COUNTS["import circles"].find(planted(tmp_path, files))
    assert circle.text == "funcops.a <-> funcops.c <-> funcops.room.b"


def test_fragments_are_counted_in_per_cent(tmp_path):
    files = {"funcops/a.py": '"""What it is."""\n\ndef f():\n    """Return x."""\n'}
    assert COUNTS["fragments, %"].number(planted(tmp_path, files)) == 50


def test_every_count_is_printed_with_its_limit(tmp_path, capsys):
    root = str(planted(tmp_path, {"funcops/errors.py": PLANTED["probes"], "tests/test_a.py": ""}))
    counts.main(["--root", root])
    said = capsys.readouterr().out.splitlines()
    assert [line[:18].rstrip() for line in said] == list(COUNTS) and said[0].split()[:4] == ["probes", "2", "of", "8"]
    counts.main(["--root", root, "root files", "root test files"])
    assert capsys.readouterr().out == "funcops/errors.py:1: errors.py\ntests/test_a.py:1: test_a.py\n"
