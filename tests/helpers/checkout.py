"""The files of the checkout, without what `.gitignore` names. Git itself is not asked: a copy and a source archive have none."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def files(root: Path = ROOT) -> list[str]:
    """Their paths below the root, sorted. In `.gitignore`, a pattern that ends in "/" is for folders, one that begins with "/" for
    the root alone."""
    listed = root / ".gitignore"
    patterns = [".git", ".git/", *(listed.read_text().split() if listed.exists() else ())]  # a worktree's .git is a file
    names = (("" if one.startswith("/") else ".*/") + fnmatch.translate(one).replace(".*", "[^/]*") for one in patterns)
    ignored = re.compile("|".join(names)).match
    found = []
    for folder, folders, here in os.walk(root):
        inside = folder.removeprefix(str(root)).rstrip("/") + "/"
        folders[:] = [name for name in folders if not ignored(f"{inside}{name}/")]
        found += [f"{inside}{name}"[1:] for name in here if not ignored(inside + name)]
    return sorted(found)


def copy(folder: Path, root: Path = ROOT) -> None:
    """Copy them into a folder."""
    for name in files(root):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, folder / name)
