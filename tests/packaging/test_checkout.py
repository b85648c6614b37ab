"""A copy of the checkout has all its files and nothing that `.gitignore` names, with git or without."""

import checkout
import pytest

IGNORED = "cache/\n*.egg-info/\n*.py[cod]\n/build/\n/[0-9]*.png\nruns/\n"
KEPT = {".gitignore", "a.py", "b/c.py", "b/build/d.py", "b/2.png", "x.png", "docs/cached/e.md", ".ci/run", "b/cache", "1/x.png"}
LEFT = {"cache/g.py", "b/c/cache/h/i.py", "z.egg-info/PKG-INFO", "b/c.pyc", "build/j.py", "2.png", "runs/k", "b/runs/l"}


@pytest.mark.parametrize("git", ["none", "folder", "file"])
def test_what_is_ignored_is_left_out(tmp_path, git):
    """A checkout has `.git` as a folder, a worktree as a file, a copy and an unpacked source archive not at all."""
    own = {"none": set(), "folder": {".git/config", ".git/refs/heads/main"}, "file": {".git"}}[git]
    root, out = tmp_path / "root", tmp_path / "out"
    for name in KEPT | LEFT | own:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitignore").write_text(IGNORED)
    assert checkout.files(root) == sorted(KEPT)
    checkout.copy(out, root)
    assert {p.relative_to(out).as_posix(): p.read_text() for p in out.rglob("*") if p.is_file()} == {
        name: IGNORED if name == ".gitignore" else name for name in KEPT
    }
    assert checkout.files(out) == sorted(KEPT)  # a copy of the copy


def test_a_tree_without_patterns_is_copied_whole(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "a.py").write_text("")
    assert checkout.files(tmp_path) == ["cache/a.py"]
