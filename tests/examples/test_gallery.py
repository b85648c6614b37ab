"""The examples of docs/gallery.md without large training, run as a user would; and the page itself."""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from programs import check_picture, main_of, run

from funcops import Needs
from funcops.engine.trees import paths, tree_map_tensors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gallery.md"
SMALL_TEXT = "the quick brown fox jumps over the lazy dog. " * 100


def test_a_blank_picture_is_seen(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(6, 3))
    figure.savefig(tmp_path / "blank.png")
    with pytest.raises(AssertionError, match="0.0% of a half"):
        check_picture(tmp_path / "blank.png")


def test_the_page_has_every_example_with_its_command_and_its_picture():
    page = PAGE.read_text()
    for program in (ROOT / "examples").glob("*.py"):
        assert f"| [`{program.name}`](../examples/{program.name}) |" in page, program.name
        assert re.search(rf"^```bash\npython examples/{program.name}( .*)?\n```$", page, re.M), program.name
    pictures = {PAGE.parent / path for path in re.findall(r"^!\[.+\]\((.+)\)$", page, re.M)}
    assert pictures == set((ROOT / "docs" / "gallery").iterdir())
    for picture in pictures:
        assert picture.stat().st_size < 70_000
        check_picture(picture)


@pytest.mark.slow  # the block itself runs with all blocks of the page
def test_the_table_of_the_published_recipe_is_what_its_block_prints(capsys):
    code, said = re.search(
        r"^## A published recipe.*?^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE.read_text(), re.S | re.M
    ).groups()
    rules = code[code.index("recipe = Policy") : code.index("params =")]
    assert len(rules.strip().splitlines()) <= 10
    exec(code, {})
    assert capsys.readouterr().out == said


def test_residual_microscope(tmp_path):
    flags = "--dim 16 --layers 2 --context 8 --table".split()
    said = run("01_residual_microscope.py", *flags, "--plot", tmp_path / "plot.png")
    rows = {line.split()[0]: line.split() for line in said.splitlines()[-8:-1]}
    share = {name: float(row[3].rstrip("%")) for name, row in rows.items()}
    assert share["save_all"] == 100 > share["recompute_norms"] > share["recompute_elementwise"] > share["minimal"]
    assert all(rows[name][-1] == "bits" for name in list(rows)[:5]) and float(rows["compress_fp8"][-1]) > 1e-3
    assert "blocks.0-1.mlp.act.x (x 2)" in said
    check_picture(tmp_path / "plot.png")


def test_capture(tmp_path):
    said = run("07_capture.py", "--width", 8, "--rows", 4, "--steps", 2, "--plot", tmp_path / "plot.png")
    check_picture(tmp_path / "plot.png")
    assert "params and state at the end" in said and "the same bits" in said and "OTHER BITS" not in said
    kinds = dict(re.findall(r"^(clips|picks|draws) +(host sync|dynamic shape|generator) ", said, re.M))
    assert kinds == {"clips": "host sync", "picks": "dynamic shape", "draws": "generator"}


def test_same_bits(tmp_path):
    said = run("11_same_bits.py", "--steps", 2, "--prompts", 3, "--plot", tmp_path / "plot.png")
    rows = {line.split()[0]: line.split()[1:3] for line in said.splitlines()[1:3]}
    assert float(rows["free"][0].rstrip("%")) > 50 and float(rows["free"][1]) > 1e-3
    assert rows["invariant"] == ["0.00%", "0"]
    check_picture(tmp_path / "plot.png")


def test_fp8_error_map(tmp_path):
    (tmp_path / "text.txt").write_text(SMALL_TEXT)
    flags = "--steps 2 --layers 1 --dim 16 --context 8 --rows 2".split()
    said = run("06_fp8_error_map.py", *flags, "--text", tmp_path / "text.txt", "--plot", tmp_path / "plot.png")
    rows = {line.split()[0]: line.split() for line in said.splitlines()[1:6]}
    errors = {name: [float(cell.rstrip("%")) for cell in row[1:4]] for name, row in rows.items()}
    assert set(errors) == {"fp8_block", "fp8_current", "fp8_delayed", "mxfp8", "nvfp4"}
    for product in range(3):
        assert 1 < errors["fp8_block"][product] < 6 < errors["nvfp4"][product] < 25
    assert rows["nvfp4"][-1] == "all"
    check_picture(tmp_path / "plot.png")


@pytest.fixture
def made_up(monkeypatch):
    """Digits without a package: one image of each kind, plus noise."""
    kinds = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def drawn(count, seed):
        labels = torch.arange(count) % 10
        return kinds[labels] + 0.2 * torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed)), labels

    for program in ("02_vit_digits.py", "03_dit_digits.py", "08_expert_load.py"):
        names = main_of(program).__globals__
        monkeypatch.setitem(names, "load", lambda kind=names["Digits"]: kind(*drawn(200, 1), *drawn(40, 2)))


def test_vit_learns_its_images(made_up, tmp_path):
    said = run("02_vit_digits.py", *"--steps 30 --batch 16 --layers 1".split(), "--plot", tmp_path / "plot.png")
    assert float(re.search(r"\((.*)%\)", said)[1]) > 80, said
    check_picture(tmp_path / "plot.png")


def test_dit_learns_and_draws(made_up, tmp_path):
    flags = "--steps 40 --batch 16 --layers 1 --euler 3 --samples 1"
    check_dit(run("03_dit_digits.py", *flags.split(), "--plot", tmp_path / "plot.png"), tmp_path / "plot.png", 0.95)


def check_dit(said, picture, ratio):
    first, last = map(float, re.search(r"loss: (\S+) at first, (\S+) over", said).groups())
    assert last < ratio * first
    check_picture(picture)


def test_each_way_to_balance_evens_the_load(made_up, tmp_path):
    flags = "--steps 30 --batch 16 --experts 4"
    said = run("08_expert_load.py", *flags.split(), "--plot", tmp_path / "plot.png").splitlines()[1:4]
    spread = {line[:12].strip(): [float(cell) for cell in line[12:].split()[1:]] for line in said}
    assert list(spread) == ["nothing", "a loss", "a bias"]
    assert all(busiest >= 1 >= idlest for busiest, idlest in spread.values())
    assert spread["a bias"][0] - spread["a bias"][1] < 0.7 * (spread["nothing"][0] - spread["nothing"][1]), said
    check_picture(tmp_path / "plot.png")


@pytest.mark.slow
def test_scikit_learns_digits(tmp_path):
    said = run("02_vit_digits.py", *"--steps 40 --batch 32 --layers 1".split(), "--plot", tmp_path / "vit.png")
    assert "all       360" in said and float(re.search(r"\((.*)%\)", said)[1]) > 60, said
    check_picture(tmp_path / "vit.png")
    flags = "--steps 60 --batch 32 --layers 1 --euler 4 --samples 2"
    check_dit(run("03_dit_digits.py", *flags.split(), "--plot", tmp_path / "dit.png"), tmp_path / "dit.png", 0.7)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert "expected scikit-learn, for its digits: pip install 'funcops[examples]'" in run("02_vit_digits.py", code=2)


def plain_dit(p, x, given, layers):
    """The same model in torch's functions."""
    c, b, width = p["conditioner"], p["body"], 64
    h = F.silu(F.linear(given, *c["embed"]))
    part = {name: F.linear(h, *params)[:, None] for name, params in c["parts"].items()}

    def norm(t, params, name):
        return F.layer_norm(t, (width,), *params) * (1 + part[f"{name}_scale"]) + part[f"{name}_shift"]

    t = F.linear(F.unfold(x, 2, stride=2).mT, *b["embed"]) + b["places"][0]
    for i in range(layers):
        attn, mlp = b[f"attn{i}"], b[f"mlp{i}"]
        qkv = F.linear(norm(t, attn["norm"], f"attn{i}"), *attn["qkv"])
        q, k, v = qkv.reshape(len(x), 16, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = ((q @ k.mT) / 4).softmax(-1) @ v
        t = t + F.linear(mixed.transpose(1, 2).flatten(2), *attn["out"])
        t = t + F.linear(F.gelu(F.linear(norm(t, mlp["norm"], f"mlp{i}"), *mlp["up"])), *mlp["down"])
    return F.fold(F.linear(norm(t, b["norm"], "last"), *b["head"]).mT, (8, 8), 2, stride=2)


def test_gradients_that_go_from_the_body_on_to_the_conditioner_are_autograds():
    names = main_of("03_dit_digits.py").__globals__
    model, generator = names["model_of"](2), torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    params = tree_map_tensors(lambda t: 0.2 * drawn(*t.shape), names["init"](model))
    x, given, dy = drawn(3, 1, 8, 8), drawn(3, 42), drawn(3, 1, 8, 8)
    y, residuals = names["velocity"](params, x, given, model, Needs(x=False))
    grads = names["gradients"](residuals, dy, model)
    own = tree_map_tensors(lambda t: t.clone().requires_grad_(), params)
    leaves = {path: t for path, t in paths(own).items() if t is not None}
    nested = {}
    for path, t in leaves.items():
        *outer, layer, _ = path.split(".")
        place = nested
        for name in outer:
            place = place.setdefault(name, {})
        place.setdefault(layer, []).append(t)
    want = plain_dit(nested, x, given, 2)
    want_grads = torch.autograd.grad(want, list(leaves.values()), dy)
    want = want.detach()
    assert float((y - want).norm()) <= 1e-12 * float(want.norm())
    for (path, _), one in zip(leaves.items(), want_grads, strict=True):
        assert float((paths(grads)[path] - one).norm()) <= 1e-12 * float(one.norm()), path


@pytest.mark.parametrize(
    ("program", "flags", "error"),
    [
        ("02_vit_digits.py", "--steps 0", "--steps: expected at least 1, got 0"),
        ("03_dit_digits.py", "--euler -1", "--euler: expected at least 1, got -1"),
        ("01_residual_microscope.py", "--dim 12", "--dim: expected a multiple of 8, got 12"),
        ("08_expert_load.py", "--experts 1", "--experts: expected at least 2, got 1"),
        ("07_capture.py", "--rows 0", "--rows: expected at least 1, got 0"),
        ("04_delayed_wgrad.py", "--plot nowhere/a.png", "--plot: expected a file in a folder that exists, got 'nowhere/a.png'"),
        ("10_preferences.py", "--plot nowhere/a.png", "--plot: expected a file in a folder that exists, got 'nowhere/a.png'"),
        ("10_preferences.py", "--steps 0", "--steps: expected at least 1, got 0"),
        ("06_fp8_error_map.py", "--limit 0", "--limit: expected a number above 0, got 0.0"),
        ("06_fp8_error_map.py", "--dim 6", "--dim: expected an even multiple of --heads 2, got 6"),
        ("06_fp8_error_map.py", "--text none.txt", "--text: expected a file or a folder, got 'none.txt', which does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("--") and ":" not in value else "",
)
def test_bad_flags_are_named(program, flags, error):
    assert error in " ".join(run(program, *flags.split(), code=2).split())
