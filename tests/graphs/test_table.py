"""Every test named in the docs' table of torch's features exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_of_the_table_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "capturing-a-training-step.md").read_text()))
    there = {
        name for path in Path(__file__).parent.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 15 and named <= there
