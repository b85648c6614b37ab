"""Files of results, read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_of(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a device's file: JSON with rows, or a line of JSON each. A file that is not there has none."""
    text = Path(path).read_text() if Path(path).exists() else ""
    return json.loads(text)["rows"] if text.startswith('{"machine"') else [json.loads(line) for line in text.splitlines()]


def device_of(path: str | Path) -> str | None:
    """The device that a file of JSON with rows names."""
    text = Path(path).read_text() if Path(path).exists() else ""
    return json.loads(text)["machine"].get("device") if text.startswith('{"machine"') else None
