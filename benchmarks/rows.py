"""Files of results, read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_of(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a device's file: JSON with rows, or a line of JSON each. A file that is not there has none."""
    if not Path(path).exists():
        return []
    text = Path(path).read_text()
    return json.loads(text)["rows"] if text.startswith('{"machine"') else [json.loads(line) for line in text.splitlines()]
