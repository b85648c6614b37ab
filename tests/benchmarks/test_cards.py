"""A step of each standard model fits each card, and the page of cards is of the table of builds and of this code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from funcops.testing.aot import TARGETS

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from benchmarks.aot import read
from benchmarks.cards import TABLE, launches, shared_of
from benchmarks.standard_models import MODELS
from funcops.testing.aot import name_of

table, found = read(str(TABLE)), {}
for target in sys.argv[1:]:
    builds = [build for build in table if build.target == target]
    for model in MODELS:
        of_step = launches(target, model)
        taken = shared_of(of_step, target, builds)
        found[f"{target} {model}"] = [(name_of(one.kernel), one.stages, bytes) for one, bytes in zip(of_step, taken)]
print(json.dumps(found))
"""
PAGE = "from benchmarks.cards import page_of, run; print(page_of(run()), end='')"


def said_by(program, *arguments):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("targets", [("sm_89", "gfx942"), tuple(t for t in TARGETS if t not in ("sm_89", "gfx942"))], ids=" ".join)
def test_a_step_of_each_standard_model_fits_a_card(targets):
    """99 KB of shared memory on sm_89, 64 KB on gfx942. Each launch has a build in the table, so it is known what it takes there;
    the table is held against the compiler by `test_aot.py`."""
    found = json.loads(said_by(PROGRAM, *targets))
    for name, of_step in found.items():
        limit = TARGETS[name.split()[0]].shared_limit
        over = [(kernel, taken) for kernel, _, taken in of_step if taken > limit]
        assert not over and len(of_step) > 10, (name, limit, over)
    backward = {name: stages for name, of in found.items() for kernel, stages, _ in of if kernel == "norm_kernels.backward"}
    wanted = {"sm_89": 2, "sm_86": 2, "sm_120": 2, "gfx942": 1, "gfx950": 1}
    assert {name: wanted.get(name.split()[0], 3) for name in backward} == backward
    assert {name.split(" ", 1)[1] for name in backward} >= {"Llama", "GPT-2", "GPT-2 medium", "ViT"}


@pytest.mark.slow
def test_the_committed_page_is_of_this_table_and_code():
    mend = "`python -m benchmarks cards --page docs/cards.md` mends it"
    assert (ROOT / "docs" / "cards.md").read_text() == said_by(PAGE), mend
